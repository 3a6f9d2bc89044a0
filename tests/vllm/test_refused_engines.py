"""What packed caches refuse, with vLLM's own configurations and layers. `turboquant.vllm.refusals` looks for vLLM's
names, and would silently accept an engine if vLLM renamed one."""

from __future__ import annotations

import pytest

from engines import Engine  # noqa: F401  # isort: skip  # skips without vLLM
import models
import torch
import transformers
from vllm.config import ModelConfig, MultiModalConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.model_executor.layers.attention.prefill_prefix_lm_attention import PrefillPrefixLMAttention
from vllm.model_executor.layers.attention.rswa_attention import RSWAAttention
from vllm.v1.attention.backend import AttentionType

from turboquant.vllm.refusals import check_engine

SHAPE = {name: value for name, value in models._SHAPE.items() if name != "initializer_range"}
LATENTS = dict(q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
               n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=1, first_k_dense_replace=3)  # fmt: skip
KINDS = {
    "Llama": ("LlamaForCausalLM", SHAPE),
    "Llama, one KV head": ("LlamaForCausalLM", SHAPE | {"num_key_value_heads": 1}),
    "DeepseekV3": ("DeepseekV3ForCausalLM", SHAPE | LATENTS),
    "Llama4Text": ("Llama4ForCausalLM", SHAPE | {"attention_chunk_size": 128, "num_local_experts": 2}),
    "Qwen3Next": ("Qwen3NextForCausalLM", SHAPE),
    "Whisper": ("WhisperForConditionalGeneration",
                dict(vocab_size=96, d_model=64, encoder_layers=1, decoder_layers=1, max_target_positions=512)),
    "Glm4Moe": ("Glm4MoeForCausalLM", SHAPE | {"num_nextn_predict_layers": 1, "n_routed_experts": 2}),
}  # fmt: skip


def config_of(folder, kind="Llama", **options):
    """Returns the `VllmConfig` of a model without weights."""
    architecture, fields = KINDS[kind]
    made = getattr(transformers, f"{kind.split(',')[0]}Config")(**fields)
    made.architectures = [architecture]
    made.save_pretrained(folder)
    given = dict(model=str(folder), dtype="bfloat16", max_model_len=512, skip_tokenizer_init=True, load_format="dummy",
                 additional_config={"turboquant": {"profile": None}})  # fmt: skip
    return EngineArgs(**given | options).create_engine_config()


@pytest.mark.parametrize(
    "kind, options, says",
    [
        ("DeepseekV3", {}, "no MLA models"),
        ("Llama4Text", {}, "no chunked attention"),
        ("Qwen3Next", {}, "no hybrids with linear attention"),
        ("Whisper", {}, "no cross attention"),
        ("Llama", {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype must be auto or bfloat16, got fp8"),
        ("Llama", {"pipeline_parallel_size": 2}, "pass --pipeline-parallel-size 1"),
        ("Llama", {"block_size": 64}, "--block-size must be a multiple of 128, got 64"),
        (
            "Llama, one KV head",
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "pass --decode-context-parallel-size 1",
        ),
        ("Llama", {"kv_offloading_size": 1.0}, "remove --kv-transfer-config and --kv-offloading-size"),
        (
            "Llama",
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "remove --kv-transfer-config",
        ),
        ("Llama", {"speculative_config": {"model": ".", "num_speculative_tokens": 2}}, "'draft_model'"),
        ("Llama", {"speculative_config": {"method": "eagle", "model": ".", "num_speculative_tokens": 2}}, "'eagle'"),
        ("Glm4Moe", {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, "'mtp'"),
    ],
)
def test_configurations_that_are_refused(kind, options, says, tmp_path):
    draft = options.get("speculative_config", {})
    if "model" in draft:
        options = {"speculative_config": draft | {"model": str(tmp_path)}}
    with pytest.raises(ValueError, match=says):
        check_engine(config_of(tmp_path, kind, **options))


def test_configurations_that_are_served(tmp_path):
    for options in ({}, {"block_size": 256}, {"tensor_parallel_size": 2}, {"kv_cache_dtype": "bfloat16"}):
        check_engine(config_of(tmp_path, **options))


def test_names_that_tell_images():
    """vLLM has the names by which image models are told. The models need torchvision, which is not installed here."""
    assert hasattr(ModelConfig, "is_mm_prefix_lm") and hasattr(ModelConfig, "uses_mrope")
    assert {"multimodal_config"} <= {*ModelConfig.__dataclass_fields__}
    assert {"language_model_only"} <= {*MultiModalConfig.__dataclass_fields__}


@pytest.mark.parametrize(
    "kind, options, says",
    [
        (Attention, {"alibi_slopes": [0.5] * 4}, "no ALiBi attention"),
        (Attention, {"attn_type": AttentionType.ENCODER_ONLY}, "no encoder_only attention"),
        (Attention, {"attn_type": AttentionType.ENCODER_DECODER}, "no encoder_decoder attention"),
        (Attention, {"kv_sharing_target_layer_name": "layers.0.attn"}, r"the cache of another one \(layers.0.attn"),
        (Attention, {"chunk_masks": 7}, "no attention with chunk_masks=7"),
        (Attention, {"head_size_v": 16}, "equally many channels, got 32 and 16"),
        (ChunkedLocalAttention, {"attention_chunk_size": 128}, "no layers of the class ChunkedLocalAttention"),
        (RSWAAttention, {"rswa_window": 128}, "no layers of the class RSWAAttention"),
        (PrefillPrefixLMAttention, {}, "no layers of the class PrefillPrefixLMAttention"),
    ],
)
def test_layers_that_are_refused(kind, options, says, tmp_path):
    config = config_of(tmp_path)
    with set_current_vllm_config(config):
        given = dict(num_kv_heads=2, cache_config=config.cache_config)
        Attention(4, 32, 1.0, prefix="layers.0.attn", **given).process_weights_after_loading(torch.bfloat16)
        with pytest.raises(ValueError, match=f"turboquant packs .*{says}"):
            layer = kind(4, 32, 1.0, prefix="layers.1.attn", **given | options)
            layer.process_weights_after_loading(torch.bfloat16)
