"""Snapshots of a window, from which `crop` brings back tokens that have left it.

A window is a ring (turboquant.h, "the cache"): position p of a sequence of length n lies in row p % window while
n - window <= p < n. While a layer records, every forward first takes a snapshot of the ring; a crop builds the ring of
the shorter text from these. Positions count padding here: those of sequence b alone are smaller by padding[b].
"""

from __future__ import annotations

import torch

from .exact import laid_out

__all__ = ["PastWindows"]

_DRAFT = 64  # tokens that a crop may take back of one forward, and with a longer window as many as that
_MOST = 1 + _DRAFT  # snapshots: of forwards between two crops; as many as one forward leaves with a window of 1

_Pair = tuple[torch.Tensor, torch.Tensor]


class PastWindows:
    """Snapshots of one layer's window, keys and values, each [batch, kv_heads, window, head_dim]; older ones may have
    fewer rows, as the window had then."""

    def __init__(self) -> None:
        self.snapshots: list[tuple[int, _Pair]] = []  # (positions then, ring), oldest first

    def add(self, positions: int, ring: _Pair) -> None:
        """Keeps `ring`, of this many positions. Nothing else may write to it."""
        self.snapshots = [*self.snapshots, (positions, ring)][-_MOST:]

    def add_fresh(self, before: int, fresh: _Pair, ring: _Pair, padding: tuple[int, ...]) -> None:
        """Keeps the last tokens of a forward of more tokens than the window: some of them enter and leave it at once.

        fresh   its keys and values, [batch, kv_heads, tokens, head_dim], of positions `before` and on
        ring    the window before it
        """
        tokens, window = fresh[0].shape[2], ring[0].shape[2]
        end, first = before + tokens, before - _column(padding, ring[0].device)
        for after in range(end - -(-_DRAFT // window) * window, end, window):
            if after > before:
                index = _held(after, padding, window, first.device) - first
                taken = (index >= 0)[:, None, :, None]
                where = index.clamp(0, tokens - 1)[:, None, :, None].expand_as(ring[0])
                self.add(after, tuple(torch.where(taken, new.gather(2, where), old) for new, old in zip(fresh, ring)))  # type: ignore[arg-type]

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
        """The ring of `keep` positions, with as many rows as now, if `reaches` is true."""
        window, device = now[0].shape[2], now[0].device
        held, pad = _held(keep, padding, window, device), _column(padding, device)
        keys, values = now
        for then, (past_keys, past_values) in self.snapshots:
            inside = ((held >= then - pad - window) & (held < then - pad))[:, None, :, None]
            past_keys, past_values = (laid_out(past, window, sinks) for past in (past_keys, past_values))
            keys, values = torch.where(inside, past_keys, keys), torch.where(inside, past_values, values)
        inside = ((held >= positions - pad - window) & (held < positions - pad))[:, None, :, None]
        return torch.where(inside, now[0], keys), torch.where(inside, now[1], values)

    def cropped(self, keep: int) -> None:
        """Drops snapshots that are newer than `keep`, and all but the last of the older ones."""
        self.snapshots = [(then, ring) for then, ring in self.snapshots if then <= keep][-1:]


def _column(padding: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64 [batch, 1]; where the sequences have the same padding, the host does not wait for the device."""
    if len(set(padding)) == 1:
        return torch.full((len(padding), 1), padding[0], device=device)
    return torch.tensor(padding, device=device).view(-1, 1)


def _held(positions: int, padding: tuple[int, ...], window: int, device: torch.device) -> torch.Tensor:
    """[batch, window]: the position of each sequence, its padding not counted, that row r holds; negative for none."""
    last = positions - 1 - _column(padding, device)
    return last - (last - torch.arange(window, device=device)) % window
