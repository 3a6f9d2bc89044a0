"""The causal language model types of transformers, and how to build a tiny model of each.

`EXACT`, `REFUSED`, `WITH_TOWERS` and `NOT_RUN` are the table of types, and `BEFORE` lists what differs in older
transformers. A type that is not in exactly one of the four fails `test_causal_types.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
from models import torch, transformers
from multimodal import EXPERTS, has_field, layers_with_all_kinds
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])

# Fields of a small configuration. A type is given those that it has; EXACT has further fields of a type.
SMALL: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    **EXPERTS,
    max_position_embeddings=256,
    initializer_range=0.15,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
GPT_2 = dict(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.15, pad_token_id=0)
GPT_J = dict(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=256, rotary_dim=8, bos_token_id=1)
LINEAR_ATTENTION = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    shared_expert_intermediate_size=16,
    eos_token_id=95,
)
CONVOLUTIONS = dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
GEMMA_3N = dict(
    num_hidden_layers=6,
    layer_types=["sliding_attention", "full_attention"] * 3,
    num_kv_shared_layers=2,
    hidden_size_per_layer_input=16,
    vocab_size_per_layer_input=96,
    laurel_rank=8,
    activation_sparsity_pattern=None,
    eos_token_id=None,
)
GEMMA_4 = dict(
    num_hidden_layers=6,
    layer_types=["sliding_attention", "full_attention"] * 3,
    num_kv_shared_layers=2,
    hidden_size_per_layer_input=16,
    vocab_size_per_layer_input=96,
    global_head_dim=32,
    eos_token_id=None,
)
LATENTS = dict(
    num_key_value_heads=4,
    head_dim=8,
    q_lora_rank=16,
    kv_lora_rank=32,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=16,
    first_k_dense_replace=1,
    eos_token_id=95,
)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_ssm=128, mamba_d_state=16, mamba_chunk_size=8, eos_token_id=95)
TOWER = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2)

# Types that are patched, and fields of their small configurations beside SMALL.
EXACT: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in """
        afmoe apertus apertus1p5_text arcee aria_text beam biogpt bitnet code_llama cohere cohere2 cohere2_moe cwm
        emu3 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text glm glm4
        glm4_moe gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text
        hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna lfm3 llama
        mellum minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder moshi nanochat
        nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe sarvam_moe
        seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma
        """.split()
    },
    **{
        name: dict(is_decoder=True)
        for name in """
        bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm roc_bert xlm-roberta
        xlm-roberta-xl
        """.split()
    },
    **dict.fromkeys(["lara_mini", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"], LINEAR_ATTENTION),
    "bamba": {**MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "falcon_h1": MAMBA,
    **dict.fromkeys(["lfm2", "lfm2_moe"], CONVOLUTIONS),
    "granitemoehybrid": {**MAMBA, "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
    "jamba": dict(
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
        eos_token_id=95,
    ),
    "llama4_text": dict(
        num_hidden_layers=4,
        layer_types=["chunked_attention"] * 3 + ["full_attention"],
        attention_chunk_size=8,
        intermediate_size_mlp=96,
        eos_token_id=None,
    ),
    "nemotron_h": dict(
        layers_block_type=["mamba", "moe", "attention", "mamba", "attention"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=8,
        moe_shared_expert_intermediate_size=16,
        eos_token_id=95,
    ),
    "recurrent_gemma": dict(num_hidden_layers=3, lru_width=64, eos_token_id=95),
    "zamba2": dict(
        num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        mamba_d_state=16,
        n_mamba_heads=8,
        adapter_rank=8,
        chunk_size=8,
        eos_token_id=95,
    ),
    **dict.fromkeys(
        "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite longcat_flash minicpm3 sarvam_mla youtu".split(), LATENTS
    ),
    **{
        name: {**LATENTS, "n_group": 1, "num_local_experts": 4, "num_experts_per_tok": 2, **few}
        for name, few in (("bailing_hybrid", {}), ("kimi_linear", {"linear_num_heads": 2, "linear_head_dim": 8}))
    },
    "mimo_v2_flash": dict(head_dim=48, v_head_dim=32, sliding_window=6),
    "gemma3n_text": GEMMA_3N,
    **dict.fromkeys(["gemma4_text", "gemma4_unified_text"], GEMMA_4),
    "zaya": dict(router_hidden_size=16, num_experts_per_tok=1, eos_token_id=95),
    **dict.fromkeys(["gpt-sw3", "gpt2", "gpt_bigcode"], GPT_2),
    "codegen": {**GPT_J, "eos_token_id": None},
    "ctrl": {**GPT_2, "dff": 48},
    "cohere_compass_text": dict(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}),
    "dbrx": dict(
        d_model=64,
        n_heads=4,
        n_layers=2,
        max_seq_len=256,
        attn_config=dict(kv_n_heads=2, rope_theta=10000.0, clip_qkv=8),
        ffn_config=dict(ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2),
    ),
    "dots1": dict(n_shared_experts=1),
    "gptj": {**GPT_J, "eos_token_id": None},
    "phimoe": dict(num_local_experts=2),  # all of them run, so rounding cannot change the choice
    "phi4_multimodal": dict(
        vision_config={**TOWER, "num_hidden_layers": 2, "image_size": 28, "crop_size": 28},
        audio_config={**TOWER, "num_blocks": 1, "ext_pw_out_channel": 32, "nemo_conv_channels": 32},
    ),
    "xmod": dict(is_decoder=True, default_language="en_XX"),
}

# The refusal, as a pattern, and the types that are refused with it. docs/models.md has them, by `table.py`.
NO_INTERFACE = "its attention does not go through transformers' AttentionInterface"
NOT_CAUSAL = "not all of its attention is causal"
KINDS = "layers must be full, sliding, chunked or linear attention, not "
INDEXER = "sparse attention with an indexer is not supported"
REFUSED: dict[str, str] = {
    NO_INTERFACE: """
        big_bird cpmant doge falcon git gpt_neo gpt_neox_japanese mega megatron-bert mvp open-llama openai-gpt
        prophetnet qdqbert reformer rembert roformer rwkv speech_to_text_2 transfo-xl trocr xglm xlm xlm-prophetnet
        xlnet xlstm zamba
        """,
    NOT_CAUSAL: """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen pegasus plbart
        whisper
        """,
    "its configuration has no `num_hidden_layers`": "blt",
    "its `generate` is its own": "musicgen_melody",
    "its attention adds ALiBi biases": "bloom mpt",
    INDEXER: "axk2 deepseek_v32 deepseek_v4 glm_moe_dsa hy_v4",
    r"its latents differ in size \(`kv_lora_rank`\)": "dots3_note dots3_note_text",
    "it demands a cache class of its own": "minimax",
    "its attention adds position biases": "inkling2_loop_text inkling2_text inkling_text",
    KINDS + "indexed_attention": "qwen4_exp qwen4_exp_text",
    KINDS + "minimax_m3_sparse": "minimax_m3_vl_text",
    "no layer has keys and values": "falcon_mamba gemma4_assistant gemma4_unified_assistant mamba mamba2",
    "its attention uses the keys of a layer twice": "diffllama",
    "its attention computes with the keys between cache and AttentionInterface": "jetmoe",
    "cross-attention layers are not supported": "mllama",
    r"layers that run several times in a forward \(`n_recurrent_loops`\) are not supported": "dory",
}

# Types that read images or sound beside text, and fields of their small text configurations. Here they read text alone;
# `test_multimodal_types` runs such models with an image.
PER_LAYER_INPUTS = dict(hidden_size_per_layer_input=16, vocab_size_per_layer_input=96)
WITH_TOWERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in "fuyu gemma3 gemma4_unified got_ocr2 moss_transcribe_diarize qwen3_5 qwen3_5_moe".split()},
    "gemma3n": GEMMA_3N,
    "gemma4": PER_LAYER_INPUTS,
}

# Types that call for a pattern other than causal even without an image, which needs prefill="exact".
MAKE_PATTERNS = {"gemma4_unified"}

# Types that `patch` takes and transformers cannot run: llama4 fails without a patch.
NOT_RUN = {"llama4"}

# Fields of refused types that cannot be built with the default fields, or only slowly.
QWEN_4 = dict(
    indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=256, indexer_budget=2048, indexer_compress_ratio=4
)
ASSISTANT = dict(
    num_hidden_layers=2,
    num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"],
    hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=0,
)
NEEDED: dict[str, dict[str, Any]] = {
    "gemma4_assistant": dict(text_config=ASSISTANT),
    "gemma4_unified_assistant": dict(text_config=ASSISTANT),
    "minimax_m3_vl_text": dict(num_hidden_layers=2, layer_types=["full_attention", "minimax_m3_sparse"]),
    "mllama": dict(rope_scaling={"rope_type": "default"}),
    "nemotron": dict(num_key_value_heads=8),
    "qwen3_next": dict(num_hidden_layers=4),  # 24576 modules of experts in transformers 4.57
    "qwen4_exp": QWEN_4,
    "qwen4_exp_text": QWEN_4,
    "reformer": dict(is_decoder=True),
}

# Types that transformers cannot build here, with what it says then.
NOT_BUILT: dict[str, str] = {
    "qdqbert": "requires the pytorch-quantization library",
    "speech_to_text_2": "has no attribute 'weight'",
}
if VERSION < (5, 24):  # these refuse models whose layers all share keys and values
    sharing = "The set of layer types producing a cache"
    NOT_BUILT.update(dict.fromkeys(["gemma4_assistant", "gemma4_unified_assistant"], sharing))

# Types whose keys turn with their position in a way that `measure` does not find, or not at all, because positions are
# learned vectors. Their centre is constant.
NOT_PROBED = set(
    """
    bert bert-generation biogpt camembert codegen ctrl data2vec-text electra ernie gpt-sw3 gpt2 gpt_bigcode gptj
    moss_transcribe_diarize opt roberta roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod
    """.split()
)

# Types that versions before the one named refuse with another phrase, or that only these versions refuse. Most have
# attention code of their own there; persimmon makes 4-D masks, and granitemoehybrid names linear attention differently.
BEFORE: dict[tuple[int, int], dict[str, str]] = {
    (5, 0): {
        **dict.fromkeys(
            """
            bamba bert bert-generation camembert ctrl data2vec-text dbrx diffllama electra ernie falcon_h1 falcon_mamba
            gpt_bigcode granitemoe granitemoeshared jamba jetmoe mamba mamba2 moshi nemotron olmoe phimoe qwen2_moe
            recurrent_gemma roberta roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod zamba zamba2
            """.split(),
            NO_INTERFACE,
        ),
        "persimmon": "it makes its attention masks itself",
        **dict.fromkeys(
            """
            granitemoehybrid lfm2 lfm2_moe lfm3 nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next zaya
            """.split(),
            "layers must be full, sliding, chunked or linear attention",
        ),
        "llama4_text": KINDS + "chunked_attention",
    },
    (5, 24): dict.fromkeys(["codegen", "gptj"], NO_INTERFACE),
}


def phrase_of_refusal(name: str) -> str | None:
    """Returns what the refusal of a type says, or None for a type that is patched."""
    for version, phrases in BEFORE.items():
        if version > VERSION and name in phrases:
            return phrases[name]
    phrases = [phrase for phrase, names in REFUSED.items() if name in names.split()]
    if bool(phrases) + (name in EXACT) + (name in WITH_TOWERS) + (name in NOT_RUN) != 1:
        pytest.fail(
            f"transformers {transformers.__version__} has the causal type {name!r}, which is not in the table of "
            f"{__name__}. Build it tiny and patch it: put it into EXACT if it agrees with the model without a patch, "
            "else into REFUSED with the phrase of the refusal; if it patches and fails later, let "
            "turboquant/hf/refusals.py refuse it first."
        )
    return phrases[0] if phrases else None


def classes(name: str) -> tuple[Any, Any]:
    model = getattr(transformers, TYPES[name])
    return model, model.config_class or CONFIG_MAPPING[name]


def built(name: str) -> Any:
    """The type at its default size, without weights."""
    model, config = classes(name)
    try:
        with torch.device("meta"):
            return model(config(**NEEDED.get(name, {})))
    except (ImportError, AttributeError, ValueError) as error:
        if name in NOT_BUILT and NOT_BUILT[name] in str(error):
            pytest.skip(f"transformers cannot build it: {NOT_BUILT[name]}")
        raise


def tiny(name: str) -> Any:
    model, config = classes(name)
    renamed = getattr(config, "attribute_map", {})
    has = config(**{k: v for k, v in EXACT[name].items() if isinstance(v, dict)})
    fields = {key: x for key, x in SMALL.items() if key not in renamed and has_field(has, key)} | EXACT[name]
    if isinstance(kinds := has.__dict__.get("layer_types"), list) and "layer_types" not in renamed:
        fields.setdefault("layer_types", layers_with_all_kinds(kinds, 2))
        fields["num_hidden_layers"] = len(fields["layer_types"])
    torch.manual_seed(0)
    made = model(config(**fields)).eval()
    if getattr(made.config, "attn_logit_softcapping", None):
        made.set_attn_implementation("eager")  # transformers 4.57 silently drops the soft-cap in SDPA
    return made
