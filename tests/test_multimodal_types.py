"""Every type of transformers that reads images or sound and continues a text: patched and exact with an image in the
prompt, patched without a test, or refused with a reason.

A type that is in no table fails. `multimodal` says what stands in for the towers.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from causal_types import EXACT as CAUSAL
from causal_types import (
    GEMMA_3N,
    INDEXER,
    KINDS,
    LATENTS,
    NO_INTERFACE,
    NOT_CAUSAL,
    PER_LAYER_INPUTS,
    QWEN_4,
    VERSION,
)
from models import torch, transformers
from multimodal import IMAGE, TYPES, give_features, prompt, tiny
from specs import bare
from table import FILE, page
from transformers import CONFIG_MAPPING

import turboquant
from turboquant import TurboQuantCache
from turboquant.models import names
from turboquant.patching import check

pytestmark = pytest.mark.skipif(VERSION < (5, 23), reason="the table is that of transformers 5.23 and newer")

HOLDS_ALL, PACKED = bare(4, 4, sinks=2, window=256), bare(5, 5)

# Run here with an image, or sound, in the prompt.
EXACT = """
    aria aya_vision cohere2_vision cosmos3_edge cosmos3_omni deepseek_vl deepseek_vl_hybrid ernie4_5_vl_moe exaone4_5
    fuyu gemma3 gemma4 gemma4_unified glm46v glm4v glm_ocr glmasr glmga got_ocr2 granite_docling hyperclovax_vision_v2
    idefics2 idefics3 internvl janus lfm2_vl lfm3_vl lighton_ocr llava llava_next llava_next_video llava_onevision
    minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 moss_transcribe_diarize muse_glimmer paddleocr_vl pp_chart2table
    qianfan_ocr qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_asr qwen3_vl qwen3_vl_moe shieldgemma2 smolvlm
    video_llama_3 vipllava voxtral
    """.split()

# Fields of the small text configuration of some of them.
FIELDS: dict[str, dict[str, Any]] = {
    "ernie4_5_vl_moe": dict(
        moe_intermediate_size=[16, 16],
        rope_parameters=dict(rope_type="default", rope_theta=500000.0, mrope_section=[3, 3, 2]),
    ),
    "gemma4": PER_LAYER_INPUTS,
}

# The inputs of their towers are too unlike the others'. Run with embeddings that no token has, in place of an image's.
EMBEDDED: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in """
        fast_vlm granite_speech granite_speech_plus hunyuan_vl nemotron_h_omni omniasr ovis2 qwen2_5_omni_thinker
        qwen2_audio qwen3_omni_moe_thinker video_llava
        """.split()
    },
    "chameleon": dict(vocabulary_map={"<image>": IMAGE, **{f"IMGIMG{i}Z": 10 + i for i in range(3)}}),
    "cohere_compass": dict(text=CAUSAL["cohere_compass_text"]),
    "fun_asr_nano": dict(adaptor_config=dict(hidden_size=64, intermediate_size=16, num_attention_heads=2)),
    "gemma3n": dict(text=GEMMA_3N),
    "glm4v_moe": dict(text=dict(head_dim=32)),  # half of which turns
    "molmo2": dict(adapter_config=dict(vision_feature_layer=[1, 0])),
    "perception_lm": dict(vision_config=dict(model_args=dict(embed_dim=32))),
    "phi4_multimodal": CAUSAL["phi4_multimodal"],
    "step3p7": dict(text=dict(sliding_window=16)),
    # All experts run: with random weights, rounding would choose others.
    "kimi_k25": dict(text={**LATENTS, "n_routed_experts": 2}),
    "mistral4": dict(text={**LATENTS, "head_dim": 16, "n_routed_experts": 2}),
    "muse_spark": dict(
        text=dict(moe_hidden_size=32, num_local_experts=2),
        audio_config=dict(patch_sizes=(16, 6, 5, 4), hidden_sizes=(8,) * 4, depths=(1,) * 4, out_hidden_size=64),
    ),
}

# `patch` takes them. They are not run here: their configurations or inputs are unlike the others', or take too long.
PATCHED = """
    apertus1p5 idefics kosmos-2 kosmos-2.5 kyutai_speech_to_text llama4 nemo_speechlm vibevoice_asr voxtral_realtime
    """.split()

# The refusal, as a pattern, and the types that are refused with it. docs/models.md has them, by `table.py`.
REFUSED: dict[str, str] = {
    "encoder-decoder models are not supported": """
        florence2 pix2struct pp_formulanet t5gemma2 udop vision-encoder-decoder
        """,
    NO_INTERFACE: "blip git",
    "its forward takes no cache": "blip-2 evolla instructblip instructblipvideo qwen2_5_omni",
    NOT_CAUSAL: "paligemma",
    "its configuration has no `num_hidden_layers`": "pi0",
    "cross-attention layers are not supported": "mllama",
    r"its latents differ in size \(`kv_lora_rank`\)": "dots3_note",
    INDEXER: "glm5_next hy_v4_vl mistral_large4",
    "its `generate` is its own": "diffusion_gemma",
    KINDS + "indexed_attention": "qwen4_exp",
    KINDS + "reference_sliding_attention": "unlimited_ocr",
    KINDS + "minimax_m3_sparse": "minimax_m3_vl",
    "its attention adds position biases": "inkling2 inkling2_loop inkling_mm_model",
}

# Types whose default configuration transformers cannot build, because sizes do not fit or are not there.
NOT_BUILT = "deepseek_ocr2 emu3 granite4_vision qwen3_omni_moe".split()

# Fields of types whose default is another layer pattern than the published one, or cannot be built.
PUBLISHED = {
    "diffusion_gemma": dict(text_config=dict(num_experts=4, top_k_experts=2, moe_intermediate_size=16)),
    "qwen4_exp": dict(text_config=QWEN_4),
    "minimax_m3_vl": dict(text_config=dict(num_hidden_layers=2, layer_types=["full_attention", "minimax_m3_sparse"])),
}

QUICK = {"gemma3", "mistral3", "qwen3_5", "qwen3_vl", "voxtral", "gemma4", "paligemma", "mllama", "diffusion_gemma"}
SLOW = (pytest.mark.slow, pytest.mark.newest)


def every(given: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else SLOW) for name in given if name in TYPES]


def built(name: str) -> Any:
    """The type at its default size, without weights."""
    model = getattr(transformers, TYPES[name])
    with torch.device("meta"):
        return model((model.config_class or CONFIG_MAPPING[name])(**PUBLISHED.get(name, {})))


def with_an_image(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A small model and inputs for it. Some types join a list of features, others take one tensor."""
    model = tiny(name, FIELDS.get(name))
    inputs = prompt(model)
    for as_list in (False, True):
        give_features(model, as_list)
        try:
            with torch.no_grad():
                model.generate(**inputs, max_new_tokens=1)
            return model, inputs
        except (TypeError, AttributeError):
            if as_list:
                raise
    raise AssertionError


def test_every_type_is_in_a_table() -> None:
    tables = [EXACT, EMBEDDED, PATCHED, NOT_BUILT, *(names.split() for names in REFUSED.values())]
    for name in TYPES:
        assert sum(name in table for table in tables) == 1, (
            f"transformers {transformers.__version__} has the type {name!r}, which must be in one table: patch it, and "
            "put it into EXACT if it agrees with the model without a patch, else into REFUSED with the phrase"
        )


def test_the_documentation_has_the_tables() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert page(text) == text, "run `python tests/table.py`"


@pytest.mark.parametrize("name", every(EXACT))
def test_an_image_in_the_prompt(name: str) -> None:
    model, inputs = with_an_image(name)
    compare(model, inputs, inputs["input_ids"] % 80)


@pytest.mark.parametrize("name", every(EMBEDDED))
def test_embeddings_in_place_of_an_image(name: str) -> None:
    model = tiny(name, **EMBEDDED[name])
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 80, (1, 20), generator=generator)
    rows = model.get_input_embeddings()(ids).detach()
    rows[:, 5:11] = rows.std() * torch.randn(6, rows.shape[-1], generator=generator)
    compare(model, {"inputs_embeds": rows, "attention_mask": torch.ones_like(ids)}, ids)


def compare(model: Any, inputs: dict[str, torch.Tensor], without: torch.Tensor) -> None:
    """`generate` gives the same with and without a patch. without: ids that give other logits."""
    options = dict(max_new_tokens=5, do_sample=False, return_dict_in_generate=True, output_logits=True)
    with torch.no_grad():
        want = model.generate(**inputs, **options)
        blind = model(input_ids=without, use_cache=True).logits[:, -1]
        assert (blind - want.logits[0]).abs().max() > 0.01  # the image counts
        turboquant.patch(model, HOLDS_ALL)
        got = model.generate(**inputs, **options)
        turboquant.patch(model, PACKED)
        packed = model.generate(**inputs, **options)
    for out in (got, packed):
        assert type(out[names.CACHE]) is TurboQuantCache
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-5)
    new = [out.sequences[0, -len(want.logits) :] for out in (packed, want)]
    same = int((new[0] == new[1]).long().cumprod(0).sum())
    for a, b in list(zip(packed.logits, want.logits, strict=True))[: same + 1]:  # while both read the same text
        a, b = a.clamp(-100), b.clamp(-100)  # a token that Chameleon never continues with has a logit of -3e38
        assert torch.nn.functional.cosine_similarity(a, b).min() > 0.94


@pytest.mark.parametrize("name", every(PATCHED))
def test_patched(name: str) -> None:
    check(built(name))


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        pytest.param(name, phrase, marks=() if name in QUICK else SLOW)
        for phrase, given in REFUSED.items()
        for name in given.split()
        if name in TYPES
    ],
)
def test_refused(name: str, phrase: str) -> None:
    model = built(name)
    with pytest.raises(NotImplementedError, match=f"^{re.escape(type(model).__name__)} cannot be patched: .*{phrase}"):
        check(model)


@pytest.mark.parametrize("name", every(NOT_BUILT))
def test_not_built(name: str) -> None:
    with pytest.raises((ImportError, AttributeError, ValueError, TypeError, KeyError)):
        check(built(name))
