"""A limit for the bytes of a cache. When they run short, layers fall to fewer bits, the keys or the values of one layer
at a time: first those whose errors cost least for the bytes that this frees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..measured import Moments
from ..measured.choice import added_cost
from ..plan import GROUP, PAGE_TOKENS
from ..spec import CacheSpec
from .exact import exact_rows, with_room

if TYPE_CHECKING:
    from .shared import Common
    from .storage import LayerStorage

__all__ = ["LEAST_BITS", "MemoryLimit", "can_fall"]

LEAST_BITS = 2  # of keys and of values
MOST_AFTER = 3  # bits after a fall: recoding 5 bits to 4 would make errors up to 20 % larger than packing at 4
Widths = tuple[int, int]


def can_fall(spec: CacheSpec) -> bool:
    """Whether `ops.recode` takes the pages of a layer of this spec: one width a side, a codebook and the EDEN scale."""
    plain = spec.scale == "eden" and not spec.blocked and spec.group == GROUP
    return plain and not spec.calibrated and all(isinstance(bits, int) for bits in (spec.key_bits, spec.value_bits))


class MemoryLimit:
    """The bytes that a cache may hold, and the widths that it began with.

    most    bytes of all tensors of the cache, temporary copies included: while pages or exact rows of a layer grow, or
            pages are recoded, the old and the new ones exist at once
    specs   the spec of each layer before any fall
    costs   [layers, 2] of `Moments.costs`; ones where they are not known
    """

    def __init__(self, most: int, specs: Sequence[CacheSpec], moments: Moments | None) -> None:
        self.most, self.specs = most, list(specs)
        known = None if moments is None or moments.costs is None else moments.costs.tolist()
        self.costs: list[list[float]] = known or [[1.0, 1.0] for _ in specs]

    def restore(self, layers: Sequence[LayerStorage]) -> None:
        """Gives empty layers the widths that they began with."""
        for layer, spec in zip(layers, self.specs, strict=True):
            layer.spec = spec

    def make_room(self, shared: Common, now: LayerStorage, after: int, padding: Sequence[int]) -> None:
        """Lets layers fall until the tokens of a forward, up to `after` positions, fit. Called before layer `now`
        stores them. If the cache holds tokens, the first layer does so for all. In a first forward the sizes of later
        layers are not known yet, and count as those of `now`.

        Raises MemoryError if all that can fall is at `LEAST_BITS` and too little is free; nothing has changed then.
        """
        layers: list[LayerStorage] = shared.layers  # type: ignore[assignment]
        if now.tokens and (now.rank or all(layer.table is not None and after <= layer.ready for layer in layers)):
            return
        plan = _Room(self, shared, layers, now, after, padding)
        before = [_widths(layer.spec) for layer in layers]
        widths = list(before)
        while plan.bytes_at(widths) > self.most:
            if (fall := plan.cheapest(widths)) is None:
                raise MemoryError(self._full(plan.bytes_at(widths), now, after))
            widths[fall[0]] = fall[1]
        for layer, old, new in zip(layers, before, widths):
            if old != new:
                layer.fall(*new)

    def _full(self, needed: int, now: LayerStorage, after: int) -> str:
        return (
            f"{after - now.tokens} more tokens of {len(now.padding)} sequences do not fit into `memory_limit`: "
            f"{after} need {needed:,} bytes where all that may fall has {LEAST_BITS} bits, the limit is {self.most:,}. "
            f"The {now.tokens} tokens stored are kept: crop the cache, drop its forks, or make one with a higher limit"
        )

    def described(self, layers: Sequence[LayerStorage]) -> str:
        """Says in a line how many layers have which widths."""
        told = []
        for side, name in enumerate(("keys", "values")):
            widths = [_widths(layer.spec)[side] for layer in layers]
            parts = [f"{widths.count(bits)} layers at {bits}" for bits in sorted(set(widths), reverse=True)]
            told.append(f"{name} of {', '.join(parts)}")
        return f"memory limit {self.most:,} bytes: {'; '.join(told)} bits"


def _widths(spec: CacheSpec) -> Widths:
    return int(spec.key_bits), int(spec.value_bits)  # type: ignore[arg-type]


class _Room:
    """The bytes of a cache after a forward, by the widths of its layers."""

    def __init__(
        self,
        limit: MemoryLimit,
        shared: Common,
        layers: Sequence[LayerStorage],
        now: LayerStorage,
        after: int,
        padding: Sequence[int],
    ) -> None:
        self.limit, self.layers, self.now = limit, layers, now
        batch = len(padding)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for _, t in (*shared.tensors(), *(part for layer in layers for part in layer.by_part()))}  # fmt: skip
        fixed = sum(storages.values())
        self.pages, self.fixed = [], fixed
        largest = 0
        for layer in layers:
            like = layer if layer.shape is not None else now
            pages, rows = self._pages(layer, like, after, padding)
            self.pages.append(pages)
            self.fixed -= layer.pages.untyped_storage().nbytes()
            self.fixed += 4 * batch * rows  # a new block table
            exact, grown = _exact_bytes(layer, like, after, batch)
            self.fixed += grown
            largest = max(largest, exact)
        self.exact = largest
        self.fixed += 8 * batch * (after + PAGE_TOKENS)  # token ids and lengths, until pages are missing again

    @staticmethod
    def _pages(layer: LayerStorage, like: LayerStorage, after: int, padding: Sequence[int]) -> tuple[int, int]:
        """Pages that the layer's pool will have, and those of its longest row."""
        needed = [-(-count // PAGE_TOKENS) for count in like.packed(after, padding)]
        longest = max(needed, default=0)
        if layer.table is None:
            return sum(needed), longest
        pool, rows = layer.table.pool, layer.table.rows
        missing = sum(max(0, count - len(row)) for count, row in zip(needed, rows))
        missing += sum(1 for row in rows if row and row[-1] >= 0 and pool.references(row[-1]) > 1)  # copied on write
        missing -= pool.free
        present = len(pool.storage)
        return present + (max(missing, present // 64) if missing > 0 else 0), max(longest, *map(len, rows))

    def _layer_bytes(self, i: int, widths: Widths) -> int:
        like = self.layers[i] if self.layers[i].shape is not None else self.now
        groups = -(-like.head_dim // GROUP)
        return self.pages[i] * like.kv_heads * PAGE_TOKENS * (GROUP // 8 * groups * sum(widths) + 4)

    def bytes_at(self, widths: Sequence[Widths]) -> int:
        """Bytes at these widths; the largest part of a layer twice, for its copy while it grows or is recoded."""
        pages = [self._layer_bytes(i, each) for i, each in enumerate(widths)]
        return self.fixed + sum(pages) + max(self.exact, *pages)

    def cheapest(self, widths: Sequence[Widths]) -> tuple[int, Widths] | None:
        """The fall that costs least for the bytes that it frees: (layer, its new widths). None if nothing can fall."""
        steps: list[tuple[float, int, int, Widths]] = []
        for i, layer in enumerate(self.layers):
            like = layer if layer.shape is not None else self.now
            if layer.table is not None and layer.table.pool.tables > 1:
                continue  # forks read its pages: a copy would free nothing
            for side, bits in enumerate(widths[i]):
                if bits > LEAST_BITS and self.pages[i]:
                    to = min(bits - 1, MOST_AFTER)
                    fewer = (to, widths[i][1]) if side == 0 else (widths[i][0], to)
                    freed = self._layer_bytes(i, widths[i]) - self._layer_bytes(i, fewer)
                    cost = added_cost(self.limit.costs[i][side], bits, to, int(layer.spec.tries), like.head_dim)
                    steps.append((cost / freed, 1 - side, i, fewer))  # ties: values first, then the first layer
        return min(steps)[2:] if steps else None


def _exact_bytes(layer: LayerStorage, like: LayerStorage, after: int, batch: int) -> tuple[int, int]:
    """Bytes of sinks and window after the forward, and by how much they grow."""
    total = grown = 0
    most = layer.spec.sinks, layer.spec.window
    for side, need, whole in zip(("sink", "window"), exact_rows(layer.spec, after), most):
        present = getattr(layer, f"{side}_k")
        have = 0 if present is None else present.shape[2]
        rows = with_room(have, need, whole)
        row = 2 * batch * like.kv_heads * like.head_dim * like.dtype.itemsize
        total, grown = total + rows * row, grown + (rows - have) * row
    return total, grown
