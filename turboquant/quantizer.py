"""Quantizer: vectors in 1 to 8 bits a number, and inner products straight from the bytes. NumPy only.

The method is TurboQuant's (arXiv 2504.19874) with the scale of EDEN (arXiv 2108.08842): rotate, divide by the root mean
square, round every coordinate to the nearest of 2^bits levels made for its distribution, keep one binary16 scale per
vector. The bytes are a cache's pages without values (csrc/include/turboquant.h), with 32 vectors to a page.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _core
from .arguments import bounded, integer, quoted
from .files import Tensor, crc32, existing_file, read_header, write_arrays
from .plan import MAX_DIM, Codebook, Levels, Plan, Rotation, Scale, Side, Sketch
from .transforms import Transforms, transforms

__all__ = ["Codes", "Quantizer"]

_FORMAT = "turboquant-codes-2"
_PAGE = 32  # vectors of a page
_RUN = 256  # vectors that one thread quantises at a time
_LIMIT = f"finite and at most {_core.MAX_INPUT:.0f} in magnitude"
_LEVELS = ("codebook", "affine", "absmax")  # not a table, which needs data
_ARGUMENTS = {"`head_dim`": "`dim`", "`key_blocks": "`block", "`key_": "`"}  # by beginnings of a plan's fields
_SKETCHES = ("none", "gaussian", "sign")

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def _said(field: object) -> str:
    if isinstance(field, tuple) and len(set(field)) == 1:
        field = field[0]
    return field.name.lower() if isinstance(field, IntEnum) else repr(field)


def _difference(one: Any, other: Any) -> tuple[str, Any, Any]:
    """Returns the first field in which two plans, or two sides, differ: its name and both values."""
    pairs = ((field.name, getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one))
    return next((name, mine, its) for name, mine, its in pairs if name not in ("words", "record_bytes") and mine != its)


def _without_values(op: str, plan: object) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"{op}: `plan` must be a turboquant.Plan, got {type(plan).__name__}")
    if plan.value is not None:
        raise ValueError(f"{op}: `plan` must have no value bits, got a plan of a cache")


def _describe(array: object) -> str:
    if not isinstance(array, np.ndarray):
        return type(array).__name__
    return f"{array.dtype} {list(array.shape)}"


def _plain(op: str, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Returns the array as a plain `ndarray`, not copied: an `np.matrix` would always keep two dimensions. ValueError
    if any number is masked, because the core would read it."""
    if np.ma.is_masked(array):
        raise ValueError(f"{op}: `{name}` must have no masked numbers, got {np.ma.getmaskarray(array).sum()} of them")
    return np.asarray(array)


@dataclass(frozen=True, eq=False, repr=False)
class Codes:
    """Quantised vectors: what `Quantizer.quantize` returns.

    plan: how they were made; a plan without values. `save` writes it and the pages, but not the Quantizer's `centre`.
    pages: uint8 ``[ceil(vectors / 32), 1, record_bytes]``, 64-byte aligned; an unaligned array is copied once, here.
    vectors: how many vectors there are; the rest of the last page is zero.
    """

    plan: Plan
    pages: NDArray[np.uint8]
    vectors: int

    def __post_init__(self) -> None:
        _without_values("Codes", self.plan)
        vectors = bounded("Codes: `vectors`", self.vectors)
        object.__setattr__(self, "vectors", vectors)
        shape = (-(-vectors // self.plan.page_tokens), 1, self.plan.record_bytes)
        if not isinstance(self.pages, np.ndarray) or self.pages.dtype != np.uint8:
            raise TypeError(f"Codes: `pages` must be uint8 {list(shape)}, got {_describe(self.pages)}")
        if self.pages.shape != shape:
            raise ValueError(f"Codes: `pages` must be uint8 {list(shape)}, got {_describe(self.pages)}")
        object.__setattr__(self, "pages", _plain("Codes", "pages", self.pages))
        if not self.pages.flags.c_contiguous or self.pages.ctypes.data % 64:
            aligned = _core.new_pages(self.plan.words, shape[0], 1)
            aligned[...] = self.pages
            object.__setattr__(self, "pages", aligned)

    def __len__(self) -> int:
        return self.vectors

    def __repr__(self) -> str:
        return f"<Codes: {self.vectors} vectors of {self.dim} numbers, {self.effective_bits:.3f} bits each>"

    def __reduce__(self) -> tuple[type[Codes], tuple[Plan, NDArray[np.uint8], int]]:
        return Codes, (self.plan, self.pages, self.vectors)  # the constructor aligns the copy

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return self.plan.head_dim

    @property
    def nbytes(self) -> int:
        """Bytes of all pages: codes, scales, and the unused rest of the last page."""
        return self.pages.nbytes

    @property
    def effective_bits(self) -> float:
        """Bits per number of the vectors, from all bytes of `nbytes`; 0 if there are no vectors."""
        return 8 * self.nbytes / (self.vectors * self.dim) if self.vectors else 0.0

    def save(self, path: Path) -> None:
        """Write the codes to a safetensors file: the pages, and the plan and checksums in the header.

        A file at `path` is replaced in one step once everything is on the disk, so no reader sees half a file.
        Raises OSError.
        """
        meta = {"plan": list(self.plan.words), "vectors": self.vectors}
        write_arrays(path, _FORMAT, meta, {"pages": self.pages})

    @classmethod
    def load(cls, path: Path) -> Codes:
        """Read codes that `save` wrote, on any machine.

        Raises ValueError for a file that is truncated, altered, of another kind or of another version. Never allocates
        more than the file's size, whatever its header claims. Raises FileNotFoundError if there is none, and OSError if
        it cannot be read.
        """
        name = existing_file(path, "a file of codes")
        with open(name, "rb") as file:
            try:
                meta, tensors, start = read_header(file, _FORMAT)
                plan, vectors = Plan.from_words(meta["plan"]), bounded("Codes: `vectors`", meta["vectors"])
                _without_values("load", plan)
                wanted = Tensor("U8", (-(-vectors // plan.page_tokens), 1, plan.record_bytes))
                if tensors != {"pages": wanted}:
                    raise ValueError(f"its one tensor must be `pages`, U8 {list(wanted.shape)}")
                pages = _core.new_pages(plan.words, wanted.shape[0], 1)
                payload = pages.reshape(-1).data
                file.seek(start)
                got = 0
                while got < payload.nbytes and (count := file.readinto(payload[got:])):
                    got += count
                if got != payload.nbytes or crc32([payload]) != meta["crc32"]["pages"]:
                    raise ValueError("`pages` is damaged")
                return cls(plan, pages, vectors)
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"`path` must be a file of codes, got {name!r}: {error}") from None


class Quantizer:
    """Turns vectors into codes and back, and takes inner products with codes.

    dim: numbers of a vector, a multiple of 8 in 8..4096. (Pad others with zeros: no inner product changes.)
    bits: 1..6 or 8 for all numbers, or a sequence with 0..6 or 8 for each group of 32 rotated channels.
    rotation: "hadamard" (random signs and Walsh-Hadamard butterflies, O(dim log dim)), "dense" (a random orthogonal
        matrix, made here in O(dim^3): seconds from a dim of about 2,000, and O(dim^2) for every vector), or "none".
    scale: the number kept per vector. "eden": inner products are unbiased over the random rotation;
        "least_squares": the squared error is least; "norm": that of TurboQuant mse; "norm_corrected": decoded vectors
        keep their norm.
    codebook: "normal": levels for N(0, 1), right for all but small dims; "sphere": levels for the exact distribution of
        a coordinate of a random unit vector, dim <= 256; "uniform": the best equally spaced levels for N(0, 1).
    seed: 0 .. 2**63 - 1, for the rotation. Equal arguments make equal bytes on every machine.
    centre: float32 ``[dim]`` or None, finite and at most 16384 in magnitude; subtracted before quantisation, added
        after decoding. It is not part of the codes: a Quantizer that reads them must be given the same one.
    levels: "codebook"; "affine": from the smallest to the largest number; "absmax": both sides of 0 up to the largest
        magnitude.
    block: numbers that share a scale, a multiple of 32; 0: all.
    sketch: signs stored of the quantisation error. "gaussian": of `sketch_rows` Gaussian projections (1..dim, by
        default dim; with scale="norm" this is TurboQuant prod of bits + 1, whose inner products are unbiased); "sign":
        of its coordinates; "none".
    tries: how many scales encoding tries for each vector, to keep the one whose codes have the largest cosine with the
        vector: 0 (none), 3, 5 or 7. More than 0 needs scale="eden", levels="codebook", and neither block nor sketch. It
        helps above 2 bits: 3 tries remove a tenth of the squared error at 4 bits and 128 numbers. Encoding takes
        longer; codes are read in the same way.
    Codes with affine or absmax levels, blocks or sketches are read by slower, portable code.

    Raises TypeError or ValueError; the message names the argument.
    """

    def __init__(
        self,
        dim: int,
        bits: int | Sequence[int],
        rotation: str = "hadamard",
        scale: Scale | str = "eden",
        codebook: Codebook | str = "normal",
        seed: int = 0,
        centre: NDArray[np.float32] | None = None,
        levels: str = "codebook",
        block: int = 0,
        sketch: str = "none",
        sketch_rows: int | None = None,
        tries: int = 0,
    ) -> None:
        dim = integer(dim, "Quantizer: `dim`")
        if dim % 8 or not 8 <= dim <= MAX_DIM:
            raise ValueError(f"Quantizer: `dim` must be a multiple of 8 in 8..{MAX_DIM}, got {dim}")
        for name, argument, choices in (("levels", levels, _LEVELS), ("sketch", sketch, _SKETCHES)):
            if not isinstance(argument, str) or argument not in choices:
                raise ValueError(f"Quantizer: `{name}` must be one of {', '.join(choices)}, got {quoted(argument)}")
        rows = sketch_rows if sketch_rows is not None else dim if sketch == "gaussian" else 0
        side = Side(bits, rotation, levels, block, sketch, rows)
        try:
            plan = Plan(dim, side, codebook=codebook, scale=scale, seed=seed, page_tokens=_PAGE, tries=tries)
        except (TypeError, ValueError) as error:
            text = str(error)
            for field, argument in {**_ARGUMENTS, "head_dim": str(dim)}.items():
                text = text.replace(field, argument)
            raise type(error)(f"Quantizer: {text}") from None
        self._setup(plan, centre)

    @classmethod
    def from_plan(cls, plan: Plan, centre: NDArray[np.float32] | None = None) -> Quantizer:
        """The Quantizer that makes codes with this plan, as in ``Quantizer.from_plan(codes.plan)``.

        Raises TypeError for another object, ValueError for a plan with values or a table, or a wrong centre.
        """
        _without_values("Quantizer", plan)
        quantizer = cls.__new__(cls)
        quantizer._setup(plan, centre)
        return quantizer

    def _setup(self, plan: Plan, centre: NDArray[np.float32] | None) -> None:
        side: Side = plan.key  # type: ignore[assignment]
        self._plan, self._words, self._side = plan, plan.words, side
        self._page_tokens, self._dim, self._bits = plan.page_tokens, plan.head_dim, plan.key_bits
        self._centre: NDArray[np.float32] | None = None
        self._transform: Transforms = {}
        if side.levels == Levels.TABLE:
            raise ValueError("Quantizer: `plan` must have no table, got one of a cache")
        matrices = [_core.haar(plan.seed, self._dim)] if side.rotation == Rotation.DENSE else []
        if side.sketch == Sketch.GAUSSIAN:
            matrices.append(_core.gaussian(plan.seed, side.sketch_rows, self._dim))
        if centre is not None:
            centre = self._checked("Quantizer", "centre", centre)
            bad = np.flatnonzero(~(np.abs(centre) <= _core.MAX_INPUT))
            if len(bad):
                raise ValueError(f"Quantizer: `centre[{bad[0]}]` must be {_LIMIT}, got {centre[bad[0]]}")
            self._centre = centre.copy()
            self._centre.flags.writeable = False
        self._transform = transforms(
            key_rotation=np.concatenate(matrices) if matrices else None,
            key_centre=None if self._centre is None else self._centre[None],
        )

    def __repr__(self) -> str:
        plan, side = self._plan, self._side
        bits = self._bits[0] if len(set(self._bits)) == 1 else list(self._bits)
        names = {"rotation": side.rotation, "scale": plan.scale, "codebook": plan.codebook}
        said = [f"{name}={kind.name.lower()!r}" for name, kind in names.items()]  # type: ignore[union-attr]
        said.append(f"seed={plan.seed}")
        if not plan.is_plain:
            kinds = {"levels": side.levels, "sketch": side.sketch}
            said += [f"{name}={kind.name.lower()!r}" for name, kind in kinds.items()]  # type: ignore[union-attr]
        if len(side.blocks) > 1:  # type: ignore[arg-type]
            said.append(f"block={side.blocks[1] * plan.group}")  # type: ignore[index]
        if side.sketch_rows:
            said.append(f"sketch_rows={side.sketch_rows}")
        if plan.tries:
            said.append(f"tries={plan.tries}")
        if self._centre is not None:
            said.append("centre=...")
        return f"Quantizer({self._dim}, {bits}, {', '.join(said)})"

    @property
    def plan(self) -> Plan:
        """The plan of its codes and files."""
        return self._plan

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return self._dim

    @property
    def bits(self) -> tuple[int, ...]:
        """Bits of each group of 32 rotated channels."""
        return self._bits

    @property
    def centre(self) -> NDArray[np.float32] | None:
        """float32 ``[dim]``, read-only, or None."""
        return self._centre

    def quantize(self, x: NDArray[np.float32]) -> Codes:
        """Codes of vectors: rotate, scale, round (arXiv 2504.19874, Algorithm 1, with this quantiser's scale).

        x: float32 ``[vectors, dim]``, finite, at most 16384 in magnitude. Rows are dense; there may be gaps between
            them. Scales are binary16: a row (less the centre) whose root mean square is below about 1e-6 loses
            precision, and below 3e-8 it becomes zero. Multiply such rows by a power of two first.
        Returns `Codes` with ``len(codes) == vectors``.
        Raises TypeError for another dtype, ValueError for another shape, masked numbers or numbers out of range, the
        first of which it names.
        """
        x = self._checked("quantize", "x", x, "vectors")
        vectors = x.shape[0]
        pages = _core.new_pages(self._words, -(-vectors // self._page_tokens), 1)
        try:
            # Each run is a sequence of one batch, which threads share; the remainder is a batch of its own.
            run = _RUN if _RUN % self._page_tokens == 0 else self._page_tokens
            even = vectors - vectors % run
            self._append(x[:even].reshape(-1, 1, run, self._dim), pages[: even // self._page_tokens])
            self._append(x[even:].reshape(1, 1, -1, self._dim), pages[even // self._page_tokens :])
        except ValueError as error:
            if getattr(error, "argument", None) != "k":
                raise
            bad = np.argwhere(~(np.abs(x) <= _core.MAX_INPUT))
            if not len(bad):
                wants = "an array of dense rows in ascending order"
                raise ValueError(f"quantize: `x` must be {wants}, got strides {x.strides}") from None
            i, j = bad[0]
            raise ValueError(f"quantize: `x[{i}, {j}]` must be {_LIMIT}, got {x[i, j]}") from None
        return Codes(self._plan, pages, vectors)

    def dequantize(self, codes: Codes) -> NDArray[np.float32]:
        """The vectors decoded from codes, ``centre + R^T (scale * levels)``: float32 ``[vectors, dim]``.

        codes: from a Quantizer with equal arguments. Raises TypeError for another object, ValueError for another plan.
        """
        self._check_codes("dequantize", codes)
        table = np.arange(len(codes.pages), dtype=np.int32)[None]
        counts = np.array([codes.vectors], np.int32)
        x, _ = _core.dequantize(self._words, codes.pages, table, counts, codes.vectors, **self._transform)
        return x.reshape(codes.vectors, self._dim)

    def dot(self, queries: NDArray[np.float32], codes: Codes) -> NDArray[np.float32]:
        """Estimates of ``<q, x>`` for every query q and the vector x of every code, without decoding any.

        ``<q, x> ~ <q, centre> + scale * <R q, levels>``; with scale="eden" the mean over seeds is ``<q, x>`` (EDEN,
        arXiv 2108.08842). A query is rotated once.

        queries: float32 ``[queries, dim]`` or ``[dim]``, C-contiguous, in the units of the vectors.
        codes: from a Quantizer with equal arguments.
        Returns float32 ``[queries, vectors]``, or ``[vectors]`` for one query without its dimension.
        Raises TypeError for another dtype or object, ValueError for another shape or plan.
        """
        single = isinstance(queries, np.ndarray) and queries.ndim == 1
        queries = self._checked("dot", "queries", queries, *([] if single else ["queries"]))
        self._check_codes("dot", codes)
        rows = queries[None] if single else queries
        transforms = self._transform
        out = _core.dot(
            self._words,
            rows,
            codes.pages,
            codes.vectors,
            key_numbers=transforms.get("key_numbers"),
            rotation=transforms.get("rotation"),
        )
        return out.reshape(-1) if single else out

    def _append(self, x: NDArray[np.float32], pages: NDArray[np.uint8]) -> None:
        if not x.size:
            return
        batch, _, tokens, _ = x.shape
        table = np.arange(len(pages), dtype=np.int32).reshape(batch, -1)
        lengths = np.full(batch, tokens, np.int32)
        _core.append(self._words, x, None, lengths, pages, table, **self._transform)

    def _checked(self, op: str, name: str, array: object, *rows: str) -> NDArray[np.float32]:
        """Returns `array` as a plain `ndarray`. TypeError or ValueError unless it is float32 ``[*rows, dim]``."""
        shape = ", ".join([*rows, str(self._dim)])
        message = f"{op}: `{name}` must be float32 [{shape}], got {_describe(array)}"
        if not isinstance(array, np.ndarray) or array.dtype != np.float32:
            raise TypeError(message)
        if array.ndim != 1 + len(rows) or array.shape[-1] != self._dim:
            raise ValueError(message)
        return _plain(op, name, array)

    def _check_codes(self, op: str, codes: object) -> None:
        if not isinstance(codes, Codes):
            raise TypeError(f"{op}: `codes` must be Codes, got {type(codes).__name__}")
        if codes.plan != self._plan:
            name, mine, theirs = _difference(self._plan, codes.plan)
            if name == "key":
                name, mine, theirs = _difference(mine, theirs)
            raise ValueError(f"{op}: `codes` must be of {name} {_said(mine)}, got {_said(theirs)}")
