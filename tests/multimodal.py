"""Small models that read images or sound beside text, and inputs with one image for them.

A patch does not change what a vision or audio tower computes, and the inputs of towers differ from type to type. So
most types get random features in place of a tower's (`give_features`). The rest of the model runs as it is: where the
features go, positions, masks and the text decoder.
"""

from __future__ import annotations

import functools
import inspect
from types import MethodType
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto import modeling_auto as auto

TYPES: dict[str, str] = {  # classes that read images or sound and continue a text, by model type
    **getattr(auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {}),
    **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}

VOCABULARY, IMAGE, SOUND = 96, 90, 91
FEATURES = 6  # tokens of an image

# Fields that make a few small experts, under each name that a type may use for them.
EXPERTS = dict(
    moe_intermediate_size=16,
    num_experts=4,
    n_routed_experts=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
)

# Fields of small configurations: of the text decoder, of towers, of the whole model. Each is given those that it has.
TEXT: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=48,
    shared_expert_intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    **EXPERTS,
    max_position_embeddings=512,
    initializer_range=0.15,
    pad_token_id=0,
    bos_token_id=1,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
TOWER: dict[str, Any] = dict(
    hidden_size=32,
    embed_dim=32,
    d_model=32,
    intermediate_size=32,
    num_hidden_layers=2,
    depth=1,
    num_attention_heads=2,
    num_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    out_hidden_size=64,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    encoder_ffn_dim=32,
    image_size=32,
    patch_size=8,
    projection_dim=32,
    num_position_embeddings=16,
)
WHOLE: dict[str, Any] = dict(
    image_token_id=IMAGE,
    image_token_index=IMAGE,
    audio_token_id=SOUND,
    audio_token_index=SOUND,
    vocab_size=VOCABULARY,
    pad_token_id=0,
    bos_token_id=1,
    vision_start_token_id=93,
    vision_end_token_id=94,
    projection_dim=64,
)


MROPE = [2, 3, 3]  # pairs of channels that turn by time, row and column of an image


def has_field(config: Any, name: str) -> bool:
    """Whether a configuration has a field. One that differs between layers is only listed: it cannot be read."""
    return name in (getattr(config, "per_layer_attributes", None) or ()) or hasattr(config, name)


def _known(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns those of `fields` that a configuration has under the same name, not as an alias."""
    renamed = getattr(config, "attribute_map", {})
    held = {name: x for name, x in fields.items() if name not in renamed and hasattr(type(config), name)}
    return {**held, **{name: x for name, x in fields.items() if name not in renamed and name in vars(config)}}


def _changed(config: Any, fields: dict[str, Any]) -> Any:
    """Returns a configuration of the same class, with `fields` in place of its own values. Lists with an entry for each
    layer are cut to the new number of layers."""
    own = {name: x for name, x in config.to_diff_dict().items() if name not in ("model_type", "transformers_version")}
    layers, count = fields.get("num_hidden_layers"), getattr(config, "num_hidden_layers", None)
    if layers is not None and layers != count:
        for name, x in vars(config).items():
            if isinstance(x, (list, tuple)) and len(x) == count:
                own[name] = type(x)(x[:layers])
        if "per_layer_config" in own:
            own["per_layer_config"] = {int(i): x for i, x in own["per_layer_config"].items() if int(i) < layers}
    return type(config)(**{**own, **fields})


def _parts(config: Any) -> dict[str, Any]:
    return {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}


def _tower(config: Any) -> Any:
    numbers = {name: x for name, x in TOWER.items() if isinstance(getattr(config, name, None), int)}
    return _changed(config, _known(config, numbers) | {name: _tower(part) for name, part in _parts(config).items()})


def layers_with_all_kinds(kinds: list[str], least: int) -> list[str]:
    """Returns the first layers of a published pattern: at least `least`, and enough for one of each kind."""
    return kinds[: max(least, *(kinds.index(kind) + 1 for kind in set(kinds)))]


def _text(config: Any, fields: dict[str, Any]) -> Any:
    small = _known(config, TEXT)
    if isinstance(kinds := getattr(config, "layer_types", None), list):
        small["layer_types"] = layers_with_all_kinds(kinds, TEXT["num_hidden_layers"])
        small["num_hidden_layers"] = len(small["layer_types"])
    if "rope_parameters" not in fields and isinstance(rope := getattr(config, "rope_parameters", None), dict):
        small["rope_parameters"] = {**rope, "mrope_section": MROPE}
    return _changed(config, small | fields)


def tiny(name: str, text: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A small model of a type in `TYPES` with random weights, in evaluation mode.

    text, fields   changes to its text configuration, and to its own
    """
    model = getattr(transformers, TYPES[name])
    default = (model.config_class or CONFIG_MAPPING[name])()
    inner = default.get_text_config(decoder=True)
    if inner is default:  # one configuration for the text decoder and all else
        fields = {**_known(default, WHOLE), **fields, **(text or {})}
        made = _text(default, {**{part: _tower(config) for part, config in _parts(default).items()}, **fields})
        return _built(model, made)
    parts = {
        part: _text(config, text or {}) if config is inner else _tower(config)
        for part, config in _parts(default).items()
    }
    return _built(model, type(default)(**{**_known(default, WHOLE), **parts, **fields}))


def _built(kind: Any, config: Any) -> Any:
    """A model with random weights. A tower that needs timm, which is not installed, is left out."""
    own = transformers.AutoModel.from_config

    def made(config: Any, **options: Any) -> Any:
        needs_timm = transformers.AutoModel._model_mapping[type(config)].__name__ == "TimmWrapperModel"
        return torch.nn.Identity() if needs_timm else own(config, **options)

    torch.manual_seed(0)
    with mock.patch.object(transformers.AutoModel, "from_config", made):
        return kind(config).eval()


def give_features(model: Any, as_list: bool = False, seed: int = 5, tokens: int = FEATURES) -> None:
    """Makes a model's towers return `tokens` random rows, whatever the image."""
    width = model.config.get_text_config(decoder=True).hidden_size
    rows = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))

    def like(method: Any) -> Any:
        @functools.wraps(method)  # `generate` reads its arguments
        def found(self: Any, *args: Any, **kwargs: Any) -> BaseModelOutputWithPooling:
            out = BaseModelOutputWithPooling(last_hidden_state=rows[None], pooler_output=(rows,) if as_list else rows)
            out.__dict__.update(deepstack_features=[(0.1 * rows,)] * 3, router_logits=None)
            return out

        return found

    for part in model.modules():
        for method in ("get_image_features", "get_audio_features"):
            if hasattr(part, method):
                setattr(part, method, MethodType(like(getattr(type(part), method)), part))


def prompt(
    model: Any, tokens: int = 20, at: int = 5, seed: int = 1, grid: tuple[int, int] = (2, 3)
) -> dict[str, torch.Tensor]:
    """Inputs: tokens with an image of this grid, or sound, from position `at` on."""
    sees = any(hasattr(part, "get_image_features") for part in model.modules())
    ids = torch.randint(2, 80, (1, tokens), generator=torch.Generator().manual_seed(seed))
    ids[0, at : at + grid[0] * grid[1]] = IMAGE if sees else SOUND
    kinds = (ids >= IMAGE).int()
    given = {
        "pixel_values" if sees else "input_features": torch.zeros(1, 3, 32, 32) if sees else torch.zeros(1, 8, 16),
        "image_grid_thw": torch.tensor([[1, 2 * grid[0], 2 * grid[1]]]),  # in patches; four make a token
        "image_sizes": torch.tensor([[32, 32]]),
        "mm_token_type_ids": kinds,
        "token_type_ids": kinds,
    }
    taken = inspect.signature(model.forward).parameters
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | {n: x for n, x in given.items() if n in taken}
