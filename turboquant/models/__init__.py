"""A model as it is: its layers, tokens, attention and weights, and what wraps it. With torch and transformers."""

from ..oldest import OLDEST

try:
    import torch as _torch  # noqa: F401
    import transformers
except ImportError as error:
    missing = error.name or str(error)
    raise ImportError(f"turboquant's models need {missing}: pip install 'turboquant-attention[hf]'") from error

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST["transformers"]:
    raise ImportError(
        f"turboquant needs transformers >= 4.57, this is {transformers.__version__}: pip install -U transformers"
    )
