"""A slow reference of the index: codes by counting thresholds in NumPy, scores in float64, selection by sorting."""

from __future__ import annotations

import numpy as np
from scipy import special

from turboquant import _core
from turboquant.index.transform import widened


def lloyd_max_64():
    """Levels of N(0, 1) by Lloyd's iteration: each becomes the mean of its cell."""
    levels = np.linspace(0.05, 3.7, 32)
    for _ in range(20_000):
        edges = np.concatenate([[0], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        levels = -np.diff(np.exp(-edges * edges / 2)) / np.sqrt(2 * np.pi) / -np.diff(special.ndtr(-edges))
    return np.concatenate([-levels[::-1], levels])


_SIX = lloyd_max_64()


def levels_of(u, bits):
    """The level that each number of u is quantised to with `bits` bits, in units of u."""
    if bits == 0:
        return np.zeros_like(u)
    if bits == 8:
        return (np.clip(np.rint(u * 32) + 128, 1, 255) - 128) / 32
    if bits == 6:
        step = np.float32(_core.index_step(6))
        own = np.rint(_SIX / step).astype(np.float32)  # Lloyd-Max levels in int8 times the step
        assert np.abs(own).max() <= 127 and np.abs(own * step - _SIX).max() <= step * 0.51
        return own[np.searchsorted((own[1:] + own[:-1]) * (np.float32(0.5) * step), u, side="right")] * step
    book = _core.codebook(0, 8, int(bits))
    ranks = np.searchsorted(book["thresholds"], u, side="right")
    return book["levels"][book["code_of_rank"][ranks]] * np.float32(book["step"])


SIZES = np.array([1, 0.84375, 0.9375, 1.0625, 1.1875, 1.25, 1.3125, 1.4375], np.float32)


def lane_sums(x):
    """Sums of rows of float32 as the core adds them: lanes of 32, then halves."""
    lanes = np.zeros((len(x), 32), np.float32)
    for at in range(0, x.shape[1], 32):
        lanes[:, : x.shape[1] - at] += x[:, at : at + 32]
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    return lanes[:, 0]


def sized(bits, lead, steps):
    """Whether rows have sizes (turboquant_index.h)."""
    return len({*bits.tolist()}) == len({*lead.tolist()}) == len({*steps.tolist()}) == 1 and (
        bits[0] in (3, 4, 5, 6, 8) and lead[0] in (1, 2)
    )


def sizes_of(u, bits):
    """The size of each row of u."""
    if bits == 8:
        ordered = np.sort(SIZES[SIZES >= 1])
        fits = np.abs(u).max(axis=1, keepdims=True) * ordered <= np.float32(127 / 32)
        return ordered[np.maximum(fits.sum(axis=1), 1) - 1]
    best, gains = np.ones(len(u), np.float32), np.zeros(len(u), np.float32)
    for size in SIZES[:5]:
        c = np.rint(levels_of(u * size, bits) / np.float32(_core.index_step(bits))).astype(np.float32)
        along = lane_sums(u * c)
        gain = along * (along / lane_sums(c * c))
        best, gains = np.where(gain > gains, size, best), np.maximum(gain, gains)
    return best


def encode(bits, lead, steps, z):
    """Returns (levels, scales) of rotated rows z. Levels are those of u times the row's size. If all groups that have
    bits have 8 and none leads, u is instead multiplied so that its largest magnitude is 127 / 32."""
    step, coded = np.repeat(steps, 32)[: z.shape[1]], np.repeat(bits, 32)[: z.shape[1]] > 0
    t = (z / step).astype(np.float32)
    rms = np.sqrt((t[:, coded].astype(np.float64) ** 2).mean(axis=1))
    u = t * (1 / np.where(rms > 0, rms, 1)).astype(np.float32)[:, None]
    v = u
    if not any(lead) and {*bits.tolist()} <= {0, 8}:
        largest = np.abs(np.where(coded, t, 0)).max(axis=1) * (1 / np.where(rms > 0, rms, 1)).astype(np.float32)
        v = u * np.where(largest > 0, np.float32(127 / 32) / np.where(largest > 0, largest, 1), 1)[:, None]
    elif sized(bits, lead, steps):
        v = u * sizes_of(u, int(bits[0]))[:, None]
    levels = np.concatenate([levels_of(v[:, 32 * g : 32 * g + 32], b) for g, b in enumerate(bits)], axis=1)
    weight = np.where(coded, step.astype(np.float64), 0) ** 2
    product = (weight * u * levels).sum(1)
    return levels, np.where(rms > 0, rms * (weight * u * u).sum(1) / np.where(product > 0, product, 1), 0)


def rotated(t, x):
    """Returns z of vectors x, in float32. x is not normalised here."""
    z = np.zeros((len(x), t.channels), np.float32)
    z[:, : t.dim] = x if t.mean is None else x - t.mean
    plan, matrix = t.space(0)[0], None if t.matrix is None else widened(t.matrix)
    return _core.rotate(plan, z, matrix, inverse=matrix is not None)  # t.matrix is the inverse rotation


def rotated_back(t, z):
    inverse = None if t.matrix is None else widened(t.matrix)
    x = _core.rotate(t.space(0)[0], z, inverse, inverse=inverse is None)[:, : t.dim]
    return x if t.mean is None else x + t.mean


def list_values(t, metric, x):
    """Returns [n, lists] float64. A row belongs to the list with the largest value; a query reads the largest ones."""
    values = x.astype(np.float64) @ t.lists.directions.T.astype(np.float64)
    return values - (t.lists.directions.astype(np.float64) ** 2).sum(1) / 2 if metric == "l2" else values


class SlowIndex:
    """A slow `turboquant.Index`, with the rotation, bit widths and mean of `index`, which is still empty."""

    def __init__(self, index):
        self.transform, self.metric = index._contents.transform, index.metric
        self.rows = {}  # id: (decoded coordinates, offset, vector), in the order in which they were added
        self.lists = {}  # id: list
        self.next_id = 0

    def _prepared(self, x):
        x = x.astype(np.float64)
        return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32) if self.metric == "cosine" else x

    def add(self, x, ids=None):
        ids = range(self.next_id, self.next_id + len(x)) if ids is None else ids
        t, given, x = self.transform, x, self._prepared(x)
        if t.lists is not None:
            self._add_to_lists(x.astype(np.float32), ids, given)
            return
        levels, scales = encode(t.bits, t.lead, t.steps, rotated(t, x.astype(np.float32)))
        decoded = levels * np.repeat(t.steps.astype(np.float64), 32)[: t.channels] * scales[:, None]
        mean = np.zeros(x.shape[1]) if t.mean is None else t.mean.astype(np.float64)
        for i, row, own, vector in zip(ids, x, decoded, given, strict=True):
            offset = -((row - mean) @ (row - mean)) / 2 if self.metric == "l2" else (row - mean) @ mean
            self.rows[int(i)] = own, offset, vector
            self.next_id = max(self.next_id, int(i) + 1)

    def _add_to_lists(self, x, ids, given):
        t = self.transform
        lists = list_values(t, self.metric, x).argmax(axis=1)
        centres = t.lists.centres(lists)
        rest = x - centres
        levels, scales = encode(t.bits, t.lead, t.steps, rotated(t, rest))
        decoded = levels * np.repeat(t.steps.astype(np.float64), 32)[: t.channels] * scales[:, None]
        r, c = rest.astype(np.float64), centres.astype(np.float64)
        offsets = -(r * r).sum(1) / 2 if self.metric == "l2" else (r * c).sum(1)
        offsets -= (rotated(t, centres) * decoded).sum(1)
        for i, row in zip(ids, zip(decoded, offsets, given, strict=True), strict=True):
            self.rows[int(i)] = row
            self.next_id = max(self.next_id, int(i) + 1)
        self.lists |= dict(zip(map(int, ids), lists.tolist(), strict=True))

    def centre(self, i):
        """Returns what is added to the decoded row with the id i."""
        t = self.transform
        return 0 if t.lists is None else t.lists.centres(np.array([self.lists[i]]))[0]

    def remove(self, ids):
        for i in ids:
            del self.rows[i]

    def scores(self, query):
        """{id: score}. Larger is better, except with l2."""
        t, query = self.transform, self._prepared(query)
        z = rotated(t, query[None].astype(np.float32))[0].astype(np.float64)
        mean = np.zeros(len(query)) if t.mean is None else t.mean.astype(np.float64)
        own = {i: z @ decoded + offset for i, (decoded, offset, _) in self.rows.items()}
        if t.lists is not None:
            values = list_values(t, self.metric, query[None])[0]
            if self.metric == "l2":
                return {i: max(0, query @ query - 2 * (values[self.lists[i]] + v)) for i, v in own.items()}
            values *= t.lists.lengths
            return {i: v + values[self.lists[i]] for i, v in own.items()}
        if self.metric == "l2":
            return {i: max(0, (query - mean) @ (query - mean) - 2 * v) for i, v in own.items()}
        return {i: v + query @ mean for i, v in own.items()}

    def search(self, query, k, allowed=None):
        """(scores, ids) of the k best; fewer where fewer are left."""
        found = [(s, i) for i, s in self.scores(query).items() if allowed is None or i in allowed]
        found.sort(key=lambda one: (one[0] if self.metric == "l2" else -one[0], one[1]))
        return [s for s, _ in found[:k]], [i for _, i in found[:k]]


# ---- rows with a mean and unequal variances, and exact results of a search of them ----

METRICS = ["ip", "cosine", "l2"]


def rows(n, dim=64, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, dim)) / np.sqrt(1 + np.arange(dim) / 8) + 0.1).astype(np.float32)


def exact(queries, x, metric):
    """float64 [queries, n], larger first."""
    queries, x = queries.astype(np.float64), x.astype(np.float64)
    if metric == "cosine":
        queries, x = (a / np.linalg.norm(a, axis=1, keepdims=True) for a in (queries, x))
    return -((queries[:, None] - x) ** 2).sum(axis=2) if metric == "l2" else queries @ x.T


def recall(ids, scores):
    truth = np.argsort(-scores, axis=1)[:, : ids.shape[1]]
    return np.mean([len(np.intersect1d(a, b)) / ids.shape[1] for a, b in zip(ids, truth, strict=True)])
