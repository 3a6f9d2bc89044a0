"""Snapshots of a window, from which `crop` brings back tokens that have left it.

A window is a ring (turboquant.h, "the cache"): position p of a sequence of length n lies in row p % window while
n - window <= p < n. While a layer records, every forward first takes a snapshot of the ring; a crop builds the ring of
the shorter text from these. Positions count padding here: those of sequence b alone are smaller by padding[b].
"""

from __future__ import annotations

import torch

from .exact import laid_out

__all__ = ["PastWindows"]

_DRAFT = 64  # tokens of one forward that a crop can take back; with a longer window, as many as it has
_MOST = 1 + _DRAFT  # snapshots kept between two crops: as many as one forward leaves with a window of 1

_Pair = tuple[torch.Tensor, torch.Tensor]


class PastWindows:
    """Snapshots of one layer's window, keys and values, each [batch, kv_heads, window, head_dim]. Older ones have fewer
    rows if the window had fewer then."""

    def __init__(self) -> None:
        self.snapshots: list[tuple[int, _Pair]] = []  # (positions then, ring), oldest first

    def add(self, positions: int, ring: _Pair) -> None:
        """Keeps `ring`, the window at this many positions. Nothing else may write to it."""
        self.snapshots = [*self.snapshots, (positions, ring)][-_MOST:]

    def add_fresh(self, before: int, fresh: _Pair, ring: _Pair, padding: tuple[int, ...]) -> None:
        """Keeps snapshots within a forward of more tokens than the window, some of which enter and leave it at once.

        fresh   keys and values of the forward, [batch, kv_heads, tokens, head_dim], at positions `before` and on
        ring    the window before the forward
        """
        window, end = ring[0].shape[2], before + fresh[0].shape[2]
        for after in range(end - -(-_DRAFT // window) * window, end, window):
            if after > before:
                copies = ring[0].clone(), ring[1].clone()
                _copy(fresh, copies, max(before, after - window), after, padding, before)
                self.add(after, copies)

    def reaches(self, keep: int, positions: int, window: int, first: int) -> bool:
        """Whether the ring of `keep` positions can be built from that of `positions` and the snapshots.

        first   the first position that would have to be in it: those before are sinks or padding
        """
        lowest = keep
        for then in [positions, *(then for then, _ in reversed(self.snapshots))]:
            if then >= lowest:
                lowest = min(lowest, then - window)
        return lowest <= max(keep - window, first)

    def ring(self, keep: int, positions: int, now: _Pair, padding: tuple[int, ...], sinks: int) -> _Pair:
        """Builds the ring of `keep` positions, with as many rows as `now` has. `reaches` must be true."""
        window_then, window = (now[0].clone(), now[1].clone()), now[0].shape[2]
        stop = min(keep, positions - window)  # the first position that is in `now`
        for then, (keys, values) in reversed(self.snapshots):
            start = max(keep, then) - window
            if start < stop:
                past = laid_out(keys, window, sinks), laid_out(values, window, sinks)
                _copy(past, window_then, start, min(stop, then), padding)
                stop = start
        return window_then

    def cropped(self, keep: int) -> None:
        """Drops snapshots that are newer than `keep`, and all but the last of the older ones."""
        self.snapshots = [(then, ring) for then, ring in self.snapshots if then <= keep][-1:]


def _copy(of: _Pair, to: _Pair, start: int, stop: int, padding: tuple[int, ...], before: int | None = None) -> None:
    """Writes the tokens of positions start .. stop - 1 into the ring `to`. They lie in the same rows of the ring `of`,
    or, if `before` is given, one after the other in `of` from that position on. The host computes all rows."""
    window = to[0].shape[2]
    for b, pad in enumerate(padding):
        at = max(start, pad)
        while at < stop:
            row = (at - pad) % window
            count, first = min(stop - at, window - row), row if before is None else at - before
            for old, new in zip(of, to):
                new[b, :, row : row + count] = old[b, :, first : first + count]
            at += count
