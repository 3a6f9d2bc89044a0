"""Read by mypy, never run: behind each reveal_type what it must be, behind each mistake its error code."""

# ruff: noqa: F821

import numpy as np

import turboquant
from turboquant import Codes, Quantizer, _core
from turboquant.plan import Codebook, Plan, Rotation, Scale, Side, member

x = np.zeros((3, 64), np.float32)
x64 = np.zeros((3, 64))

# ---- turboquant ----
reveal_type(turboquant.__version__)  # type: str
q = Quantizer(64, 4, rotation="dense", scale="norm", codebook=Codebook.SPHERE, seed=1, centre=x[0])
mixed = Quantizer(64, [4, 2])
reveal_type(q.quantize)  # type: def (x: ndarray[tuple[Any, ...], dtype[floating[_32Bit]]]) -> Codes
codes = q.quantize(x)
reveal_type(codes)  # type: Codes
reveal_type(codes.pages)  # type: ndarray[tuple[Any, ...], dtype[unsignedinteger[_8Bit]]]
reveal_type(codes.plan)  # type: Plan
reveal_type(len(codes))  # type: int
reveal_type(codes.nbytes)  # type: int
reveal_type(codes.effective_bits)  # type: float
reveal_type(Codes.load("file"))  # type: Codes
reveal_type(codes.save("file"))  # type: None
reveal_type(q.dequantize(codes))  # type: ndarray[tuple[Any, ...], dtype[floating[_32Bit]]]
reveal_type(q.dot(x, codes))  # type: ndarray[tuple[Any, ...], dtype[floating[_32Bit]]]
reveal_type(turboquant.Quantizer)  # type: def (dim: int, bits: int | Sequence[int], rotation: str =, scale: Scale | str =, codebook: Codebook | str =, seed: int =, centre: ndarray[tuple[Any, ...], dtype[floating[_32Bit]]] | None =, levels: str =, block: int =, sketch: str =, sketch_rows: int | None =, tries: int =) -> Quantizer
Quantizer("64", 4)  # error: arg-type
Quantizer(64, 4.5)  # error: arg-type
q.quantize(x64)  # error: arg-type
q.dequantize(x)  # error: arg-type
codes.vectors = 3  # error: misc
q.dim = 3  # error: misc

# ---- turboquant.plan ----
named = Plan(64, Side(4, "none"), [3, 2], scale=Scale.NORM)
plan = named.words
reveal_type(plan)  # type: tuple[int, ...]
reveal_type(named.record_bytes)  # type: int
reveal_type(named.nbytes(100))  # type: int
reveal_type(named.key_bits)  # type: tuple[int, ...]
named.seed = 3  # error: misc
reveal_type(member(Rotation, "dense", "rotation"))  # type: Rotation
Plan(64)  # error: call-arg
Plan(64, 4, 3, "none")  # error: arg-type

# ---- turboquant._core ----
pages = _core.new_pages(plan, 2, 1)
table = np.zeros((1, 2), np.int32)
lengths = np.zeros(1, np.int32)
k = np.zeros((1, 1, 3, 64), np.float16)
reveal_type(_core.append(plan, k, k, lengths, pages, table))  # type: None
reveal_type(_core.attend(plan, k, pages, table, lengths))  # type: tuple[ndarray[tuple[Any, ...], dtype[Any]], ndarray[tuple[Any, ...], dtype[floating[_32Bit]]]]
reveal_type(_core.plan_info(plan)["key_bits"])  # type: tuple[int, ...]
reveal_type(_core.codebook(0, 64, 3)["step"])  # type: float
reveal_type(_core.isa_available())  # type: tuple[str, ...]
reveal_type(_core.set_isa(None))  # type: None
_core.append(plan, k, k, x, pages, table)  # error: arg-type
_core.dot(plan, k, pages, 3)  # error: arg-type
_core.dot(plan, x, pages, 3, x)  # error: call-arg
_core.plan_info(plan)["colour"]  # error: typeddict-item
