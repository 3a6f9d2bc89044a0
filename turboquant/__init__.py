"""TurboQuant: keys, values and vectors in 1 to 8 bits a number, and attention straight from the packed bytes.

    Quantizer, Codes         vectors, with NumPy alone
    Index                    vector search, with NumPy alone
    search_shards            vector search over several files; write_manifest, verify_shards
    CacheSpec, preset(s)     how a cache quantises
    Plan                     how one layer's vectors become bytes
    TurboQuantCache          a `transformers.Cache`                               needs transformers
    Codec                    keys and values as bytes that attention reads         needs transformers
    measure, calibrate       make a Profile of a model, once                      need transformers
    Profile                  what they found, as one object and one file; NumPy only
    evaluate                 what a spec costs in quality, on text                needs transformers
    patch, unpatch, is_patched   make a model's `generate` use a packed cache     need transformers
    ops                      `torch.ops.turboquant.*`, loaded by importing it     needs torch
    esm                      ESM-2: context caches, variant scans                 needs transformers

Names are imported on first use: `import turboquant` imports neither torch nor NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Index": "index",
    "search_shards": "index",
    "verify_shards": "index",
    "write_manifest": "index",
    "Codes": "quantizer",
    "Quantizer": "quantizer",
    "CacheSpec": "spec",
    "preset": "named_specs",
    "presets": "named_specs",
    "Plan": "plan",
    "Profile": "measured",
    "calibrate": "calibration.calibrate",
    "measure": "evaluation.forecast",
    "evaluate": "evaluation.decoder",
    "Codec": "hf.codec",
    "TurboQuantCache": "hf.cache",
    "patch": "patching",
    "unpatch": "patching",
    "is_patched": "patching",
}
__all__ = ["CacheSpec", "Codec", "Codes", "Index", "Plan", "Profile", "Quantizer", "TurboQuantCache", "calibrate",
           "esm", "evaluate", "is_patched", "measure", "ops", "patch", "preset", "presets", "search_shards",
           "unpatch", "verify_shards", "write_manifest"]  # fmt: skip

if TYPE_CHECKING:
    from . import esm as esm
    from . import ops as ops
    from .calibration.calibrate import calibrate as calibrate
    from .evaluation.decoder import evaluate as evaluate
    from .evaluation.forecast import measure as measure
    from .hf.cache import TurboQuantCache as TurboQuantCache
    from .hf.codec import Codec as Codec
    from .index import Index as Index
    from .index import search_shards as search_shards
    from .index import verify_shards as verify_shards
    from .index import write_manifest as write_manifest
    from .measured import Profile as Profile
    from .named_specs import preset as preset
    from .named_specs import presets as presets
    from .patching import is_patched as is_patched
    from .patching import patch as patch
    from .patching import unpatch as unpatch
    from .plan import Plan as Plan
    from .quantizer import Codes as Codes
    from .quantizer import Quantizer as Quantizer
    from .spec import CacheSpec as CacheSpec


def __getattr__(name: str) -> Any:
    if name in ("ops", "esm"):
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("torch", "transformers", "safetensors", "tokenizers"):
            raise
        raise ImportError(f"turboquant.{name} needs {missing}: pip install 'turboquant-attention[hf]'") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
