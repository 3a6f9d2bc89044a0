"""The contents of an index's file, beside the arguments of `Index`."""

from __future__ import annotations

from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..arguments import bounded
from . import inputs, storage, transform
from .contents import Contents
from .inputs import Floats
from .lists import Lists, Sorted
from .storage import Segment
from .transform import Transform

Arrays = dict[str, NDArray[Any]]


def meta_of(now: Contents) -> dict[str, Any]:
    t = now.transform
    return {
        "next_id": now.next_id,
        "first_id": int(now.segments[0].all_ids[0]) if now.segments else 0,
        "sigmas": t.sigmas if np.isfinite(t.sigmas) else None,
        "exponent": t.exponent,
        "factor": t.factor,
        "training": t.training,
    }


def arrays_of(now: Contents) -> dict[str, list[NDArray[Any]]]:
    """Returns each array in parts. The contents have no removed rows."""
    t, segments = now.transform, now.segments
    arrays: dict[str, list[NDArray[Any]]] = {"bits": [t.bits], "lead": [t.lead], "steps": [t.steps]}
    fine = None if t.fine is None else t.fine.mean
    lists = None if t.lists is None else t.lists.directions
    lengths = None if t.lists is None else t.lists.lengths
    for name, array in (("mean", t.mean), ("matrix", t.matrix), ("fine.mean", fine), ("directions", lists),
                        ("lengths", lengths)):  # fmt: skip
        if array is not None:
            arrays[name] = [array]
    if not segments:
        return arrays
    arrays |= _rows_of("", segments)
    signs: list[NDArray[Any]] = [s.signs for s in segments]
    if any(len(s) % storage.BLOCK for s in segments[:-1]):
        signs = [storage.blocks_of(np.concatenate([s.sign_rows() for s in segments]))]
    arrays["signs"] = signs
    own: list[NDArray[Any]] = [s.all_ids for s in segments]
    first = int(own[0][0])
    for ids in own:
        if not (ids == np.arange(first, first + len(ids))).all():
            arrays["ids"] = own
        first += len(ids)
    if isinstance(segments[0], Sorted):
        arrays["starts"] = [segments[0].starts]
    if t.fine is not None:
        arrays |= _rows_of("fine.", tuple(s.fine for s in segments if s.fine is not None))
    return arrays


def _rows_of(prefix: str, segments: tuple[Segment, ...]) -> dict[str, list[NDArray[Any]]]:
    arrays: dict[str, list[NDArray[Any]]] = {f"{prefix}codes": [s.codes for s in segments]}
    arrays[f"{prefix}scales"] = [s.scales for s in segments]
    if segments[0].offsets is not None:
        arrays[f"{prefix}offsets"] = [s.offsets for s in segments if s.offsets is not None]
    return arrays


class _Reader:
    """Checks and returns the arrays of a file."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays

    def get(self, name: str, kind: Any, *shape: int) -> NDArray[Any] | None:
        array = self.arrays.get(name)
        if array is not None and (array.dtype != kind or array.shape != shape):
            raise ValueError(f"`{name}` must be {np.dtype(kind)} {list(shape)}, got {array.dtype} {list(array.shape)}")
        return array

    def needed(self, name: str, kind: Any, *shape: int) -> NDArray[Any]:
        array = self.get(name, kind, *shape)
        if array is None:
            raise ValueError(f"`{name}` must be there")
        return array

    def floats(self, name: str, most: float, *shape: int) -> Floats | None:
        """Returns an array of numbers of magnitude `most` at most."""
        array = self.get(name, np.float32, *shape)
        if array is not None:
            check_size(name, array, most)
        return array


def check_size(name: str, array: Floats, most: float) -> None:
    if not (np.abs(array) <= most).all():  # false for NaN too
        raise ValueError(f"`{name}` must be finite and at most {most:g} in magnitude")


def contents(base: Transform, metric: int, n_lists: int, meta: dict[str, Any], arrays: Arrays) -> Contents:
    """Returns the contents of a file. base: the transform of a new index with the same arguments. Raises ValueError,
    KeyError or TypeError for a file that no index can have written."""
    read = _Reader(arrays)
    t = _transform(base, metric, n_lists, meta, read)
    next_id = bounded("load: `next_id`", meta["next_id"])
    if arrays.get("codes") is None:
        return Contents(t, (), next_id)
    first = bounded("load: `first_id`", meta["first_id"])
    return Contents(t, (_rows(t, metric, n_lists, first, next_id, read),), next_id)


def _transform(base: Transform, metric: int, n_lists: int, meta: dict[str, Any], read: _Reader) -> Transform:
    dim, channels, groups = base.dim, base.channels, len(base.bits)
    bits, lead = read.needed("bits", np.uint8, groups), read.needed("lead", np.uint8, groups)
    if not lead.any():
        raise ValueError("`lead` must be above 0 in a group")
    steps = read.floats("steps", 1e30, groups)
    if steps is None:
        raise ValueError("`steps` must be there")
    mean = read.floats("mean", inputs.LARGEST, dim)
    matrix = read.get("matrix", np.uint16, channels, channels)
    if matrix is not None:
        check_size("matrix", transform.widened(matrix), 1.01)
    sigmas = np.inf if meta["sigmas"] is None else meta["sigmas"]
    if type(sigmas) is not float:
        raise ValueError("`sigmas` must be null or a float")
    exponent, factor = bounded("load: `exponent`", meta["exponent"]), bounded("load: `factor`", meta["factor"])
    learnt = meta["training"]
    if learnt is not None:
        _check_training(learnt, bits.tolist())
    lists = _lists(dim, metric, n_lists, read)
    if lists is not None and (mean is not None or matrix is not None):
        raise ValueError("`mean` and `matrix` must not be there with lists")
    t = Transform(dim, base.seed, bits, lead, steps, mean, matrix, sigmas, exponent, learnt, lists)
    if base.fine is not None:
        t = transform.with_fine(t, factor, read.floats("fine.mean", inputs.LARGEST, dim))
    none = None if lists is None else np.empty(0, np.int32)
    _core.index_encode(t.space(0), np.zeros((0, dim), np.float32), lists=none)  # checks widths and steps
    return t


_TOLD = {  # what `Index.training` may tell, by type
    "chosen": (str,), "queries": (int,), "recall": (dict,), "power": (float,), "together": (bool,), "widths": (list,),
    "sigmas": (float, NoneType), "factor": (int,), "found": (float,),
}  # fmt: skip
_ALWAYS, _OF_AXES = {"chosen", "queries", "recall"}, {"power", "together", "widths"}


def _check_training(told: Any, widths: list[int]) -> None:
    """Raises ValueError for what `train` cannot have told of an index with these widths."""
    right = isinstance(told, dict) and all(type(value) in _TOLD.get(name, ()) for name, value in told.items())
    right = right and told.keys() >= (_ALWAYS | _OF_AXES if told.get("chosen") == "axes" else _ALWAYS)
    right = right and told["chosen"] in ("none", "mean", "axes", "lists") and told.get("widths", widths) == widths
    if not right or not all(type(share) is float for share in told["recall"].values()):
        raise ValueError("`training` must be null or what `train` can tell of this index")


def _lists(dim: int, metric: int, n_lists: int, read: _Reader) -> Lists | None:
    directions = read.floats("directions", inputs.LARGEST, n_lists, dim)
    lengths = read.floats("lengths", inputs.LARGEST, n_lists)
    if directions is None and lengths is None:
        return None
    if not n_lists or directions is None or (lengths is None) != (metric == 2):
        raise ValueError("`directions` must be there with lists alone, and `lengths` with them unless l2")
    return Lists(directions, lengths)


def _rows(t: Transform, metric: int, n_lists: int, first: int, next_id: int, read: _Reader) -> Segment:
    n = len(read.arrays["codes"])
    codes = read.needed("codes", np.uint8, n, t.row_bytes)
    starts, blocks = None, -(-n // storage.BLOCK)
    if n_lists:
        starts = read.needed("starts", np.int64, n_lists + 1)
        if t.lists is None:
            raise ValueError("`directions` must be there, with lists")
        if starts[0] != 0 or starts[-1] != n or (starts[1:] < starts[:-1]).any():
            raise ValueError(f"`starts` must ascend from 0 to {n}")
        blocks = int((-(-np.diff(starts) // storage.BLOCK)).sum())
    signs = read.needed("signs", np.uint8, blocks, t.planes, storage.BLOCK)
    scales, offsets = read.needed("scales", np.float32, n), read.get("offsets", np.float32, n)
    if (offsets is None) != (t.mean is None and t.lists is None and metric != 2):
        raise ValueError("`offsets` must be there with a mean, lists or l2, and only then")
    ids = read.get("ids", np.int64, n)
    low, after = (first, first + n) if ids is None or not n else (int(ids.min()), int(ids.max()) + 1)
    if low < 0 or after > next_id:
        raise ValueError(f"`ids` must be in 0..next_id - 1 = {next_id - 1}, got {low}..{after - 1}")
    segment = Segment(codes, signs, scales, offsets, first if ids is None else ids)
    if starts is not None:
        segment = Sorted(codes, signs, scales, offsets, segment.all_ids, starts=starts)
    if t.fine is not None:
        segment.fine = _fine_rows(t.fine, metric, n, read)
    return segment


def _fine_rows(t: Transform, metric: int, n: int, read: _Reader) -> Segment:
    codes = read.needed("fine.codes", np.uint8, n, t.row_bytes)
    scales, offsets = read.needed("fine.scales", np.float32, n), read.get("fine.offsets", np.float32, n)
    if (offsets is None) != (t.mean is None and metric != 2):
        raise ValueError("`fine.offsets` must be there with a mean or l2, and only then")
    return Segment(codes, storage.blocks_of(np.empty((n, 0), np.uint8)), scales, offsets, 0)
