"""Plans: how the vectors of one layer become bytes.

A `Plan` has names for the integers that files, operators and `turboquant._core` take, ``Plan.words``. Their order and
their meaning are in ``csrc/include/turboquant.h`` ("A plan as integers"). Only the core decides which plans are valid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

from .arguments import integer, quoted

FORMAT_VERSION = 2
GROUP = 32  # rotated channels that share a bit width; also the tokens of a tile
FINE_GROUP = 16  # the other choice
MAX_BITS = 6
WIDE_BITS = 8
WIDTHS = (*range(MAX_BITS + 1), WIDE_BITS)  # bits that a group may have
WIDE_STEP = 2.0**-5  # between neighbouring levels of 8 bits
MAX_HEAD_DIM = 512  # of a plan with values
MAX_CUDA_BASELINE_DIM = 256  # of a plan that is not plain, on a GPU
MAX_DIM = 4096  # of a plan without values (vectors)
PAGE_TOKENS = 128  # of a cache
PAIR_MULTIPLE, MAX_RANK = 8, 4  # a wave's pairs are a multiple of the first; a metric's rank is at most the second

_HEADER = 19  # words before those of the groups
_NEW_BLOCK = 16  # added to the bits of the first group of a block


class Rotation(IntEnum):
    """How vectors are rotated before they are quantised (``tq_rotation``)."""

    NONE = 0  #: not at all
    HADAMARD = 1  #: random signs and Walsh-Hadamard butterflies; nothing is stored but the seed
    DENSE = 2  #: a matrix passed with each call


class Codebook(IntEnum):
    """The distribution of a rotated coordinate that the levels are made for (``tq_codebook_law``)."""

    NORMAL = 0  #: N(0, 1)
    SPHERE = 1  #: sqrt(d) times a coordinate of a uniform unit vector, d = head_dim <= 256
    UNIFORM = 2  #: N(0, 1) too, with equally spaced levels (Max 1960, Table II)


class Scale(IntEnum):
    """The number stored per token, where c are the decoded codes of u = z / rms(z) (``tq_scale``)."""

    EDEN = 0  #: rms(z) <u, u> / <c, u>: unbiased inner products over the random signs (EDEN, arXiv 2108.08842)
    NORM = 1  #: ||z|| / sqrt(d), TurboQuant mse (arXiv 2504.19874, Algorithm 1)
    NORM_CORRECTED = 2  #: the decoded vector has the norm of z
    LEAST_SQUARES = 3  #: rms(z) <c, u> / <c, c>: the least squared error


class Levels(IntEnum):
    """The numbers that the codes of one side decode to (``tq_levels``)."""

    CODEBOOK = 0  #: a scale per token and block, times a level of the codebook
    AFFINE = 1  #: a zero point and a scale, from the block's smallest and largest number
    ABSMAX = 2  #: a scale, from the block's largest magnitude; levels on both sides of 0 (q8_0)
    TABLE = 3  #: levels that come with each call; nothing is stored per token


class Sketch(IntEnum):
    """The signs that are stored of a key's quantisation error r (``tq_sketch``)."""

    NONE = 0  #: none
    GAUSSIAN = 1  #: of S r with Gaussian S, and the norm of r (QJL, arXiv 2406.03482)
    SIGN = 2  #: of r itself, and its mean magnitude


_Member = TypeVar("_Member", bound=IntEnum)


def member(kind: type[_Member], value: _Member | str, argument: str) -> _Member:
    """Returns the member of `kind` that `value` is or names in any case, as in ``member(Scale, "eden", "scale")``.

    Raises TypeError for another object, ValueError for an unknown name; the message names `argument` and lists names.
    """
    if isinstance(value, kind):
        return value
    names = [m.name.lower() for m in kind]
    if not isinstance(value, str):
        raise TypeError(f"`{argument}` must be one of {', '.join(names)}, got {quoted(value)}")
    if value.lower() not in names:
        raise ValueError(f"`{argument}` must be one of {', '.join(names)}, got {value!r}")
    return kind[value.upper()]


def _shown(value: object) -> str:
    return repr(value.name.lower() if isinstance(value, IntEnum) else value)


def _integer(value: Any, argument: str) -> int:
    number = integer(value, f"`{argument}`")
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"`{argument}` must fit in 64 bits, got {number}")
    return number


def group_bits(bits: int | Sequence[int], groups: int, argument: str) -> tuple[int, ...]:
    """Returns the bits of each of `groups` groups, from one integer or from one per group. TypeError or ValueError."""
    if isinstance(bits, (str, bytes, Set, Mapping)):
        raise TypeError(f"`{argument}` must be an integer or a sequence of integers, got {quoted(bits)}")
    if not isinstance(bits, Iterable) or getattr(bits, "ndim", 1) == 0:
        return (_integer(bits, argument),) * groups
    widths = tuple(_integer(b, f"{argument}[{i}]") for i, b in enumerate(bits))
    if len(widths) != groups:
        raise ValueError(f"`{argument}` must be an integer or one per group, {groups} of them, got {len(widths)}")
    return widths


@dataclass(frozen=True)
class Side:
    """Keys or values in a `Plan`.

    bits: bits of a code, 0..6 or 8. One integer, or one per group of channels.
    rotation, levels, sketch: members or their names.
    blocks: channels that share a scale, a multiple of 32 (0: all of them); or a tuple of the groups at which blocks
        begin, the first of which is 0.
    sketch_rows: rows of a Gaussian sketch, 1..head_dim.
    """

    bits: int | Sequence[int]
    rotation: Rotation | str = Rotation.HADAMARD
    levels: Levels | str = Levels.CODEBOOK
    blocks: int | tuple[int, ...] = 0
    sketch: Sketch | str = Sketch.NONE
    sketch_rows: int = 0

    def _of(self, name: str, groups: int, group: int) -> Side:
        """Returns the same side with tuples as bits and blocks, and members for names. name: "key" or "value"."""
        blocks = self.blocks
        if not isinstance(blocks, tuple):
            channels = _integer(blocks, f"{name}_blocks")
            if channels < 0 or channels % group:
                raise ValueError(f"`{name}_blocks` must be 0 or a multiple of {group} channels, got {channels}")
            blocks = tuple(range(0, groups, channels // group or groups))
        return Side(
            group_bits(self.bits, groups, f"{name}_bits"),
            member(Rotation, self.rotation, f"{name}_rotation"),
            member(Levels, self.levels, f"{name}_levels"),
            blocks,
            member(Sketch, self.sketch, f"{name}_sketch"),
            _integer(self.sketch_rows, f"{name}_sketch_rows"),
        )

    def _head(self) -> tuple[int, int, int, int]:
        return int(self.rotation), int(self.levels), int(self.sketch), self.sketch_rows

    def _groups(self, name: str) -> list[int]:
        bits: tuple[int, ...] = self.bits  # type: ignore[assignment]
        for i, b in enumerate(bits):
            if b not in WIDTHS:
                at = "" if len(set(bits)) == 1 else f"[{i}]"  # equal bits were probably given as one number
                raise ValueError(f"`{name}_bits{at}` must be in 0..{MAX_BITS} or {WIDE_BITS}, got {b}")
        return [b + _NEW_BLOCK * (g in self.blocks) for g, b in enumerate(bits)]  # type: ignore[operator]

    def __repr__(self) -> str:
        bits = self.bits[0] if isinstance(self.bits, tuple) and len(set(self.bits)) == 1 else self.bits
        said = [repr(bits)]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default and not (field.name == "blocks" and value == (0,)):
                said.append(f"{field.name}={_shown(value)}")
        return f"Side({', '.join(said)})"


@dataclass(frozen=True, repr=False)
class Plan:
    """How the vectors of one layer become bytes; immutable, compared and hashed by its fields.

    head_dim: channels of a vector, a multiple of 8; 8..512, or 8..4096 if there are no values.
    key, value: a `Side`, or its bits alone: ``Plan(128, 4, 3)``. No values (None, or no bits) make a plan for vectors.
    page_tokens: 32, 64, 96 or 128; 64 or 128 with groups of 16.
    group: channels of a group, 32, or 16 with head_dim <= 256. The last group is padded.
    codebook, scale: members or their names. ``Codebook.SPHERE`` is for head_dim <= 256.
    seed: 0 .. 2**63 - 1, for the Hadamard signs.
    wave_pairs: how many pairs of key channels have a centre that turns with the position, a wave: a multiple of 8, up
        to head_dim / 2 rounded up to a multiple of 8.
    metric: rank of the keys' metric, 0 to 4; None: no metric.
    tries: how many scales encoding tries for each vector, to keep the best: 0 (none), 3, 5 or 7. Codes are read in the
        same way. Needs the scale EDEN and a plain plan.

    variance_term: subtract half the variance of a packed token's logit from it, so that its exponential is right on
        average (turboquant.h, "Variance term"). Needs values, a plain plan, the scale EDEN, the codebook NORMAL and
        keys of one width without steps.

    words: the plan as integers, for `torch.ops.turboquant`, `turboquant._core` and files of codes.
    record_bytes: bytes of one page of one KV head.

    Raises TypeError for a wrong type, ValueError for what the core refuses; the message names the field.
    """

    head_dim: int
    key: Side | int | Sequence[int]
    value: Side | int | Sequence[int] | None = None
    page_tokens: int = PAGE_TOKENS
    group: int = GROUP
    codebook: Codebook | str = Codebook.NORMAL
    scale: Scale | str = Scale.EDEN
    seed: int = 0
    wave_pairs: int = 0
    metric: int | None = None
    tries: int = 0
    variance_term: bool = False
    words: tuple[int, ...] = dataclasses.field(init=False, compare=False)
    record_bytes: int = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        from . import _core

        names = ("head_dim", "page_tokens", "group", "seed", "wave_pairs", "tries")
        numbers = {n: _integer(getattr(self, n), n) for n in names}
        law, scaling = member(Codebook, self.codebook, "codebook"), member(Scale, self.scale, "scale")
        if not isinstance(self.variance_term, bool):
            raise TypeError(f"`variance_term` must be True or False, got {quoted(self.variance_term)}")
        metric = None if self.metric is None else _integer(self.metric, "metric")
        if metric is not None and not 0 <= metric <= MAX_RANK:  # in the core 0 is no metric
            raise ValueError(f"`metric` must be a rank in 0..4, or None, got {metric}")
        group = numbers["group"] if numbers["group"] in (GROUP, FINE_GROUP) else GROUP  # the core refuses others
        groups = max(1, -(-min(numbers["head_dim"], MAX_DIM) // group))
        sides = {}
        for name in ("key", "value"):
            argument = getattr(self, name)
            side = argument if isinstance(argument, Side) else None if argument is None else self._side(name, argument)
            side = None if side is None else side._of(name, groups, group)
            sides[name] = side if name == "key" or (side and any(side.bits)) else None  # type: ignore[arg-type]
        key, value = sides["key"], sides["value"]
        if key is None:
            raise TypeError("`key` must be a Side or its bits, got None")
        words = (
            *(FORMAT_VERSION, numbers["head_dim"], numbers["page_tokens"], numbers["group"], int(law), int(scaling)),
            *(numbers["seed"], *key._head(), *(value._head() if value else (0,) * 4)),
            *(numbers["wave_pairs"], 0 if metric is None else 1 + metric),
            *(numbers["tries"], int(self.variance_term)),
            *(*key._groups("key"), *(value._groups("value") if value else (0,) * groups)),
        )
        fields = {**numbers, **sides, "codebook": law, "scale": scaling, "metric": metric, "words": words}
        for name, checked in {**fields, "record_bytes": _core.record_bytes(words)}.items():
            object.__setattr__(self, name, checked)

    def _side(self, name: str, bits: Any) -> Side:
        """Returns a side made from its bits alone. Values take the rotation of the keys."""
        rotation = self.key.rotation if name == "value" and isinstance(self.key, Side) else Rotation.HADAMARD
        return Side(bits, rotation)

    @classmethod
    def from_words(cls, words: Sequence[int]) -> Plan:
        """The plan with these `words`. ValueError or TypeError for other words."""
        from . import _core

        if not isinstance(words, Iterable):
            raise TypeError(f"`words` must be a sequence of integers, got {quoted(words)}")
        words = tuple(words)
        _core.record_bytes(words)  # raises for what is no plan
        groups = (len(words) - _HEADER) // 2

        def side(head: int, first: int) -> Side | None:
            of_groups = words[first : first + groups]
            blocks = tuple(g for g, word in enumerate(of_groups) if word >= _NEW_BLOCK)
            rotation, levels, sketch, rows = words[head : head + 4]
            bits = [word % _NEW_BLOCK for word in of_groups]
            return Side(bits, Rotation(rotation), Levels(levels), blocks, Sketch(sketch), rows) if blocks else None

        key = side(7, _HEADER)
        assert key is not None
        metric = words[16] - 1 if words[16] else None
        laws = Codebook(words[4]), Scale(words[5])
        head_dim, page_tokens, group = words[1:4]
        moments = words[15], metric
        value = side(11, _HEADER + groups)
        return cls(head_dim, key, value, page_tokens, group, *laws, words[6], *moments, words[17], bool(words[18]))

    @property
    def groups(self) -> int:
        """How many groups a vector's channels have."""
        return -(-self.head_dim // self.group)

    @property
    def key_bits(self) -> tuple[int, ...]:
        """Bits of each group."""
        return self.key.bits  # type: ignore[union-attr, return-value]

    @property
    def value_bits(self) -> tuple[int, ...]:
        """Bits of each group; 0 for a plan without values."""
        return (0,) * self.groups if self.value is None else self.value.bits  # type: ignore[union-attr, return-value]

    @property
    def is_plain(self) -> bool:
        """Whether the fast kernels run it: both sides have codebook levels, one block, the same rotation, no sketch."""
        from . import _core

        return bool(_core.plan_info(self.words)["is_plain"])

    @property
    def key_moments(self) -> int:
        """Numbers of a KV head's moments in the operators' `key_numbers`; 0 without a wave and a metric."""
        from . import _core

        return _core.plan_info(self.words)["key_moments"]

    def nbytes(self, tokens: int, kv_heads: int = 1) -> int:
        """Bytes of the pages that `tokens` packed tokens of one sequence need, the last page whole. TypeError for
        anything but integers, ValueError for negative ones."""
        tokens, kv_heads = _integer(tokens, "tokens"), _integer(kv_heads, "kv_heads")
        if tokens < 0 or kv_heads < 0:
            raise ValueError(f"`tokens` and `kv_heads` must be at least 0, got {tokens} and {kv_heads}")
        return -(-tokens // self.page_tokens) * kv_heads * self.record_bytes

    def __repr__(self) -> str:
        said = [str(self.head_dim)]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if field.init and value != field.default:
                said.append(f"{field.name}={_shown(value)}")
        return f"Plan({', '.join(said)})"
