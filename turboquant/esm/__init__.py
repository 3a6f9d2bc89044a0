"""ESM-2 protein models over packed keys and values: needs torch and transformers.

    ContextCache       proteins read once; changed or new residues run against their packed keys and values
    masked_marginals   the variant-effect scan, with a shared context or exactly
    joint_marginals    the same with several positions masked together
    wild_type_marginals   the same with nothing masked, in one pass
    embed              means and residues of any number of proteins, of any length: Embeddings
    evaluate           what a spec costs in quality, on proteins
    protein_batches    proteins as `turboquant.calibrate` takes them
    read_fasta         names and sequences of a file
    heat_map           a scan as a picture                                        needs matplotlib

Names are imported on first use. `turboquant.patch` does the quantised full pass; `turboquant.calibrate` and the command
line take ESM-2 models as they take others.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "EXACT": "context",
    "Embeddings": "embeddings",
    "embed": "embedding",
    "ContextCache": "context",
    "Residues": "context",
    "ProteinEvaluation": "quality",
    "evaluate": "quality",
    "Protein": ".models.fasta",
    "protein_batches": "quality",
    "read_fasta": ".models.fasta",
    "heat_map": "heatmap",
    "AMINO_ACIDS": ".models.esm",
    "Scan": "scan",
    "joint_marginals": "scan",
    "masked_marginals": "scan",
    "wild_type_marginals": "scan",
}
__all__ = ["AMINO_ACIDS", "EXACT", "ContextCache", "Embeddings", "Protein", "ProteinEvaluation", "Residues", "Scan",
           "embed", "evaluate", "heat_map", "joint_marginals", "masked_marginals", "protein_batches", "read_fasta",
           "wild_type_marginals"]  # fmt: skip

if TYPE_CHECKING:
    from ..models.esm import AMINO_ACIDS as AMINO_ACIDS
    from ..models.fasta import Protein as Protein
    from ..models.fasta import read_fasta as read_fasta
    from .context import EXACT as EXACT
    from .context import ContextCache as ContextCache
    from .context import Residues as Residues
    from .embedding import embed as embed
    from .embeddings import Embeddings as Embeddings
    from .heatmap import heat_map as heat_map
    from .quality import ProteinEvaluation as ProteinEvaluation
    from .quality import evaluate as evaluate
    from .quality import protein_batches as protein_batches
    from .scan import Scan as Scan
    from .scan import joint_marginals as joint_marginals
    from .scan import masked_marginals as masked_marginals
    from .scan import wild_type_marginals as wild_type_marginals


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("torch", "transformers"):
            raise
        raise ImportError(f"turboquant.esm needs {missing}: pip install 'turboquant-attention[hf]'") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
