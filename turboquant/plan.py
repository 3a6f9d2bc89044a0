"""Plans: how the vectors of one layer become bytes, as the integers that files, operators and `turboquant._core` carry.

The words are defined in ``csrc/include/turboquant.h`` ("A plan as integers"); only this file writes them in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import index
from typing import TypeVar

FORMAT_VERSION = 1
BLOCKED_VERSION = 2  # of plans with blocks, tables and sketches, which plain kernels run
FINE_VERSION = 3  # of plans with groups of 16 channels
NEW_BLOCK = 16  # added to the bits of the group that a block begins with
GROUP = 32  # rotated channels that share a number of bits; also the tokens of a tile
FINE_GROUP = 16  # the same in version 3
MAX_BITS = 5
WIDE_BITS = 8  # of groups of 16 channels, beside 0..5
WIDE_STEP = 2.0**-5  # of their levels
MAX_HEAD_DIM = 256  # of a plan with values
MAX_DIM = 4096  # of a plan without values (vectors)
PAGE_TOKENS = 128  # of a cache

Plan = tuple[int, ...]


class Rotation(IntEnum):
    """How vectors are rotated before they are quantised (``tq_rotation``)."""

    NONE = 0
    HADAMARD = 1  # random signs and Walsh-Hadamard butterflies; nothing is stored but the seed
    DENSE = 2  # a matrix passed with each call


class Codebook(IntEnum):
    """The law of a rotated coordinate that the levels are made for (``tq_codebook_law``)."""

    NORMAL = 0  # N(0, 1)
    SPHERE = 1  # sqrt(d) times a coordinate of a uniform unit vector, d = head_dim <= 256
    UNIFORM = 2  # N(0, 1) again, but equally spaced levels (Max 1960, Table II)


class Scale(IntEnum):
    """The one number stored per token, for decoded codes c of u = z / rms(z) (``tq_scale``)."""

    EDEN = 0  # rms(z) <u, u> / <c, u>: inner products are unbiased (arXiv 2108.08842)
    NORM = 1  # ||z|| / sqrt(d), TurboQuant mse (arXiv 2504.19874, Algorithm 1)
    NORM_CORRECTED = 2  # the decoded vector has the norm of z
    LEAST_SQUARES = 3  # rms(z) <c, u> / <c, c>: least squared error


class Levels(IntEnum):
    """What the codes of one side of a plan of version 2 stand for (``tq_levels``)."""

    CODEBOOK = 0  # a scale per token and block, times a level of the codebook
    AFFINE = 1  # a zero point and a scale, from the block's smallest and largest number
    ABSMAX = 2  # a scale, from its largest magnitude; levels on both sides of 0 (q8_0)
    TABLE = 3  # levels that come with each call; nothing is stored per token


class Sketch(IntEnum):
    """The signs that are kept of what the codes leave over (``tq_sketch``)."""

    NONE = 0
    GAUSSIAN = 1  # of S r with Gaussian S, and the norm of r (QJL, arXiv 2406.03482)
    SIGN = 2  # of r itself, and its mean magnitude


_Member = TypeVar("_Member", bound=IntEnum)


def member(kind: type[_Member], value: _Member | str, argument: str) -> _Member:
    """The member of `kind` that `value` is or names in any case, such as ``member(Scale, "eden", "scale")``.

    Raises TypeError for another object, ValueError for an unknown name; the message names `argument` and lists names.
    """
    if isinstance(value, kind):
        return value
    names = [m.name.lower() for m in kind]
    if not isinstance(value, str):
        raise TypeError(f"`{argument}` must be one of {', '.join(names)}, got {value!r}")
    if value.lower() not in names:
        raise ValueError(f"`{argument}` must be one of {', '.join(names)}, got {value!r}")
    return kind[value.upper()]


def _integer(value: int, argument: str) -> int:
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"`{argument}` must be an integer, got {value!r}") from None


def widths_of(group: int) -> tuple[int, ...]:
    """The bits that a group of so many channels may have, ascending."""
    return (*range(MAX_BITS + 1), *((WIDE_BITS,) if group == FINE_GROUP else ()))


def group_bits(bits: int | Sequence[int], head_dim: int, argument: str, group: int = GROUP) -> Plan:
    """The bits of each group of `group` channels, from one integer or ``ceil(head_dim / group)`` of them: 0 to 5 each,
    in groups of 16 also 8."""
    groups = -(-head_dim // group)
    known = widths_of(group)
    wants = f"in 0..{MAX_BITS}" + (f" or {WIDE_BITS}" if WIDE_BITS in known else "")
    if isinstance(bits, (str, bytes)):
        raise TypeError(f"`{argument}` must be an integer or a sequence of integers, got {bits!r}")
    widths: Plan
    if isinstance(bits, Iterable):
        widths = tuple(_integer(b, f"{argument}[{i}]") for i, b in enumerate(bits))
        if len(widths) != groups:
            number = f"an integer or one per group of {group} channels, {groups} for {head_dim} channels"
            raise ValueError(f"`{argument}` must be {number}, got {len(widths)} of them")
    else:
        widths = (_integer(bits, argument),) * groups
        if widths[0] not in known:
            raise ValueError(f"`{argument}` must be {wants}, got {widths[0]}")
    for i, width in enumerate(widths):
        if width not in known:
            raise ValueError(f"`{argument}[{i}]` must be {wants}, got {width}")
    return widths


def plan_words(
    head_dim: int,
    key_bits: int | Sequence[int],
    value_bits: int | Sequence[int] = 0,
    *,
    rotation: Rotation | str = Rotation.HADAMARD,
    codebook: Codebook | str = Codebook.NORMAL,
    scale: Scale | str = Scale.EDEN,
    seed: int = 0,
    page_tokens: int = PAGE_TOKENS,
    group: int = GROUP,
) -> Plan:
    """The words of a plan, checked.

    head_dim: channels of a vector, a multiple of 8; 8..256, or 8..4096 if there are no value bits.
    key_bits, value_bits: bits of a code, 0..5 (with groups of 16 also 8); one integer, or one per group. At least one
        key group has bits; value bits of 0 make a plan for vectors alone, which `turboquant._core.attend` refuses.
    rotation, codebook, scale: members or their names. ``Codebook.SPHERE`` is for head_dim <= 256.
    seed: 0 .. 2**63 - 1, of the Hadamard signs (a dense matrix has its own).
    page_tokens: 32, 64, 96 or 128; 64 or 128 with groups of 16.
    group: channels of a group, 32, or 16 (version 3) with head_dim <= 256. The last group is padded, so heads that are
        no multiple of 32 take less room with 16.

    Raises TypeError for a wrong type, ValueError for a number out of range; the message names the argument.
    """
    head_dim, seed = _integer(head_dim, "head_dim"), _integer(seed, "seed")
    if head_dim % 8 or not 8 <= head_dim <= MAX_DIM:
        limits = f"8..{MAX_HEAD_DIM} (8..{MAX_DIM} without values)"
        raise ValueError(f"`head_dim` must be a multiple of 8 in {limits}, got {head_dim}")
    group = _integer(group, "group")
    if group not in (GROUP, FINE_GROUP):
        raise ValueError(f"`group` must be {GROUP} or {FINE_GROUP} channels, got {group!r}")
    if group == FINE_GROUP and head_dim > MAX_HEAD_DIM:
        raise ValueError(f"`group` must be {GROUP} above {MAX_HEAD_DIM} channels, got {group} for {head_dim}")
    keys, values = (
        group_bits(b, head_dim, name, group) for b, name in ((key_bits, "key_bits"), (value_bits, "value_bits"))
    )
    if not any(keys):
        raise ValueError(f"`key_bits` must give at least one group bits, got {key_bits!r}")
    if any(values) and head_dim > MAX_HEAD_DIM:
        raise ValueError(f"`head_dim` must be in 8..{MAX_HEAD_DIM} for a plan with values, got {head_dim}")
    law = member(Codebook, codebook, "codebook")
    if law == Codebook.SPHERE and head_dim > MAX_HEAD_DIM:
        raise ValueError(f"`codebook` must be 'normal' above {MAX_HEAD_DIM} channels, got 'sphere' for {head_dim}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"`seed` must be in 0..2**63 - 1, got {seed}")
    page_tokens = _integer(page_tokens, "page_tokens")
    if page_tokens not in (32, 64, 96, 128) or (group == FINE_GROUP and page_tokens % 64):
        wants = "64 or 128 with groups of 16" if group == FINE_GROUP else "32, 64, 96 or 128"
        raise ValueError(f"`page_tokens` must be {wants}, got {page_tokens}")
    turn, scaling = member(Rotation, rotation, "rotation"), member(Scale, scale, "scale")
    version = FORMAT_VERSION if group == GROUP else FINE_VERSION
    return (version, head_dim, page_tokens, int(turn), int(law), int(scaling), seed, *keys, *values)


@dataclass(frozen=True)
class Side:
    """Keys or values in a plan of version 2.

    bits: 1..5, with affine levels also 8, with absmax 2..5 and 8; one integer, or one per group of 32 channels.
    block: channels that share their per-token numbers, a multiple of 32; 0: all of them; a tuple: the groups that
        blocks begin with, the first of them 0.
    rotation, levels, sketch: members or their names.
    sketch_rows: of a Gaussian sketch, 1..head_dim.
    """

    bits: int | Sequence[int]
    block: int | tuple[int, ...] = 0
    rotation: Rotation | str = Rotation.HADAMARD
    levels: Levels | str = Levels.CODEBOOK
    sketch: Sketch | str = Sketch.NONE
    sketch_rows: int = 0

    def words(self, head_dim: int) -> tuple[Plan, Plan]:
        """Those of the header, and those of the groups."""
        groups, levels = -(-head_dim // GROUP), member(Levels, self.levels, "levels")
        bits = tuple(self.bits) if isinstance(self.bits, Iterable) else (_integer(self.bits, "bits"),) * groups
        if len(bits) != groups:
            raise ValueError(f"`bits` must be an integer or one per group, {groups} of them, got {len(bits)}")
        known = (*range(2 if levels == Levels.ABSMAX else 1, MAX_BITS + 1),)
        if levels in (Levels.AFFINE, Levels.ABSMAX):
            known += (WIDE_BITS,)
        for b in bits:
            if _integer(b, "bits") not in known:
                raise ValueError(f"`bits` must be one of {known} with {levels.name.lower()} levels, got {b}")
        if isinstance(self.block, tuple):
            begins = set(self.block)
        elif _integer(self.block, "block") % GROUP or self.block < 0:
            raise ValueError(f"`block` must be 0 or a multiple of {GROUP} channels, got {self.block}")
        else:
            begins = set(range(0, groups, self.block // GROUP or groups))
        head = (member(Rotation, self.rotation, "rotation"), levels, member(Sketch, self.sketch, "sketch"),
                self.sketch_rows)  # fmt: skip
        return tuple(map(int, head)), tuple(b + NEW_BLOCK * (g in begins) for g, b in enumerate(bits))


def blocked_plan_words(
    head_dim: int,
    key: Side,
    value: Side | None = None,
    *,
    codebook: Codebook | str = Codebook.NORMAL,
    scale: Scale | str = Scale.EDEN,
    seed: int = 0,
    page_tokens: int = PAGE_TOKENS,
) -> Plan:
    """The words of a plan of version 2, checked by the core. value: None for vectors alone. Others as `plan_words`.

    Raises TypeError or ValueError; the message names the field, or the word as ``plan[i]``.
    """
    from . import _core

    head_dim, seed, page_tokens = (
        _integer(n, name) for n, name in ((head_dim, "head_dim"), (seed, "seed"), (page_tokens, "page_tokens"))
    )
    law, scaling = member(Codebook, codebook, "codebook"), member(Scale, scale, "scale")
    key_head, key_groups = key.words(head_dim)
    value_head, value_groups = ((0,) * 4, (0,) * len(key_groups)) if value is None else value.words(head_dim)
    common = (BLOCKED_VERSION, head_dim, page_tokens, 0, int(law), int(scaling), seed)
    words = (*common, *key_head, *value_head, *key_groups, *value_groups)
    _core.record_bytes(words)
    return words
