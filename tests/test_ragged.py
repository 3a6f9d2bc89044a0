"""Ragged batches, exact tokens by index, ends and position offsets of torch.ops.turboquant.*, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mode_cases
import numpy as np
import pytest
import reference as ref
import reference_ragged as slow
from cases import FAR, aligned_pages, keywords, make_case, random_moments, random_transform

torch = pytest.importorskip("torch", reason="torch is not installed")
from ops_cases import ACCURACY, DENSE, DEVICES, DTYPES, MIXED, PLAN, ROUNDING, array, needs_cuda, on, tensor  # noqa: E402
from torch import Tensor  # noqa: E402

from turboquant import ops  # noqa: E402

tq = torch.ops.turboquant
WAVE = ref.plan(128, 3, 4, wave_pairs=64, metric=3)
SMALL = ref.plan(64, 4, 4, page_tokens=32, wave_pairs=32)  # pages so small that tails lie in two of them
TERM = ref.plan(64, 2, 3, page_tokens=32, wave_pairs=32, metric=3, variance_term=True)
PLANS = {"plain": PLAN, "mixed": MIXED, "dense": DENSE, "wave": WAVE, "small pages": SMALL, "variance term": TERM}

# New tokens and lengths of each sequence.
BATCHES: dict[str, tuple[list[int], list[int]]] = {
    "single tokens": ([1, 1, 1], [1, 70, 129]),
    "one token beside a chunk": ([1, 37, 1], [90, 140, 2]),
    "padding": ([0, 3, 0, 2, 1], [50, 40, 0, 0, 33]),
    "more tokens than the length": ([9, 4], [5, 4]),
    "nothing": ([0, 0], [9, 0]),
    "a draft": ([4, 4, 4], [130, 31, 64]),
}


class Ragged:
    """A random layer, filled by the reference in two steps, and the second step's queries."""

    def __init__(
        self,
        rng: np.random.Generator,
        p: ref.Plan,
        new: list[int],
        lengths: list[int],
        *,
        dtype: str = "float32",
        sinks: int = 0,
        slots: int = 0,
        window: int = 0,
        offset: bool = False,
        heads: tuple[int, int] = (2, 2),
        **query: Any,
    ) -> None:
        batch, (kv_heads, group) = len(new), heads
        self.plan, self.dtype, self.lengths = p, dtype, np.array(lengths, np.int32)
        self.key, self.value = (random_transform(rng, p, kv_heads) for _ in range(2))
        turns, moments = random_moments(rng, p, kv_heads, 3.0)
        self.key = replace(self.key, turns=turns, moments=moments)
        needed = [-(-n // p.page_tokens) for n in lengths]
        table = np.full((batch, max(needed, default=0) + 1), FAR, np.int32)
        free = list(rng.permutation(sum(needed) + 2))
        for b, n in enumerate(needed):
            table[b, :n] = [free.pop() for _ in range(n)]
        offsets = rng.integers(-5000, 5000, batch).astype(np.int32) if offset else None
        cache = ref.Cache(aligned_pages(sum(needed) + 2, kv_heads, p.record_bytes), table, position_offset=offsets)
        self.layer = slow.Paged(cache)
        if sinks or slots:
            rows = rng.permutation(3 * batch + 2).astype(np.int32)
            shape = (3 * batch + 2, kv_heads, sinks, p.head_dim), (3 * batch + 2, kv_heads, slots, p.head_dim)
            sink, tail = (ref.narrow(np.full(x, np.nan, np.float32), dtype) for x in shape)
            absent = rng.random((batch, 3)) < 0.3
            if sinks:
                self.layer.sink_rows = np.where(absent[:, 0], -1, rows[:batch]).astype(np.int32)
                self.layer.sink_k, self.layer.sink_v = sink.copy(), sink.copy()
            if slots:
                self.layer.tail_rows = np.where(absent[:, 1:], -1, rows[batch : 3 * batch].reshape(batch, 2))
                self.layer.tail_rows = self.layer.tail_rows.astype(np.int32)
                self.layer.window_k, self.layer.window_v = tail.copy(), tail.copy()
        before = np.maximum(self.lengths - new, 0).astype(np.int32)
        self.steps = []
        for counts, after in ((before, before), (np.array(new), self.lengths)):
            loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
            # tokens behind the last sequence, and those in front of position 0, must not be read
            k, v = (rng.standard_normal((loc[-1] + 2, kv_heads, p.head_dim)).astype(np.float32) for _ in range(2))
            k[loc[-1] :] = v[loc[-1] :] = np.nan
            for b, n in enumerate(after):
                k[loc[b] : max(loc[b], loc[b + 1] - n)] = v[loc[b] : max(loc[b], loc[b + 1] - n)] = np.nan
            self.steps.append((ref.narrow(k, dtype), ref.narrow(v, dtype), loc, after))
        self.loc, self.longest = self.steps[1][2], max(new, default=0)
        q = 3 * rng.standard_normal((self.loc[-1] + 2, kv_heads * group, p.head_dim)).astype(np.float32)
        q[self.loc[-1] :] = np.nan
        self.query = slow.Request(
            ref.narrow(q, dtype), self.loc, self.lengths, window=window, key=self.key, value=self.value, **query
        )

    def append(self) -> slow.Paged:
        """Fills the layer by the reference and returns it."""
        for k, v, loc, lengths in self.steps:
            slow.append(self.plan, self.layer, k, v, loc, lengths, self.key, self.value)
        return self.layer

    def arrays(self, device: str) -> dict[str, Any]:
        """Returns the arguments that `append` and `attend` share."""
        names = ("sink_k", "sink_v", "window_k", "window_v", "sink_rows", "tail_rows")
        given = {name: getattr(self.layer, name) for name in names if getattr(self.layer, name) is not None}
        c = self.layer.cache
        given |= dict(pages=c.pages, block_table=c.block_table, **keywords(self.key, self.value))
        if c.position_offset is not None:
            given["position_offset"] = c.position_offset
        return on(device, given, self.dtype)

    def attend(self, device: str, **more: Any) -> dict[str, Any]:
        options = ("causal", "sliding_window", "softmax_scale", "softcap", "window")
        given = {name: getattr(self.query, name) for name in options}
        arrays = {name: x for name in ("starts", "ends") if (x := getattr(self.query, name)) is not None}
        arrays |= dict(q=self.query.q, lengths=self.lengths, query_start_loc=self.loc)
        return self.arrays(device) | given | on(device, arrays, self.dtype) | dict(max_query_len=self.longest) | more


def check(case: Ragged, device: str, got: tuple[Tensor, Tensor], want: np.ndarray, want_lse: np.ndarray) -> None:
    out, lse = got
    seen, plan = np.isfinite(want_lse), case.plan
    accuracy = ACCURACY.get((device, case.dtype), 1e-3)
    if device == "cuda":
        accuracy = max(accuracy, 2.5e-5 * float(abs(want_lse[seen]).max(initial=0)), 1e-3 if plan.wave_pairs else 0)
    np.testing.assert_array_equal(np.isneginf(array(lse)), ~seen)
    np.testing.assert_allclose(array(lse)[seen], want_lse[seen], rtol=accuracy, atol=2 * accuracy)
    limit = accuracy * abs(want).max(initial=0) + 2 * ROUNDING[case.dtype] * abs(want)
    assert (abs(ref.widen(array(out)) - want) <= limit).all()
    assert not array(out)[~seen].any()


# Exact tokens by index, and what queries see.
HOW: dict[str, dict[str, Any]] = {
    "all packed": {},
    "sinks": dict(sinks=4),
    "tail": dict(slots=32, window=20),
    "sinks and tail": dict(sinks=3, slots=29, window=29, offset=True, softcap=20.0),
    "tail of one": dict(slots=1, window=1),
    "rows that are not read": dict(sinks=2, slots=8, window=0, sliding_window=30),
    "not causal": dict(sinks=4, slots=16, window=16, causal=False),
    "offset": dict(offset=True, softmax_scale=0.2),
}


# Every batch with small pages; then every plan with every entry of HOW, and the batches in turn.
COVER = [("small pages", batch, how) for batch in BATCHES for how in ("all packed", "sinks and tail")] + [
    (plan, list(BATCHES)[(i + j) % len(BATCHES)], how) for i, plan in enumerate(PLANS) for j, how in enumerate(HOW)
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("plan", "batch", "how"), COVER)
def test_ragged_matches_the_reference(plan: str, batch: str, how: str, device: str, rng: np.random.Generator) -> None:
    """`append` writes the reference's pages and rows, and attention over them is the reference's."""
    new, lengths = BATCHES[batch]
    dtype = list(DTYPES)[int(rng.integers(3))]
    case = Ragged(rng, PLANS[plan], new, lengths, dtype=dtype, **HOW[how])
    got = case.arrays(device)
    layer = case.append()
    for k, v, loc, after in case.steps:
        arguments = on(device, dict(k=k, v=v, query_start_loc=loc, lengths=after), dtype)
        tq.append(case.plan.words, **arguments, **got, max_query_len=int(np.diff(loc).max(initial=0)))
    pages = array(got["pages"])
    if case.plan.rotation == ref.DENSE or case.plan.wave_pairs:  # a number between two codes may get either
        assert (pages != layer.cache.pages).mean() < 0.005
    else:
        np.testing.assert_array_equal(pages, layer.cache.pages)
    for name in ("sink_k", "sink_v", "window_k", "window_v"):
        if name in got:
            np.testing.assert_array_equal(array(got[name]), getattr(layer, name), err_msg=name)
    layer.cache.pages[:] = pages
    check(case, device, tq.attend(case.plan.words, **case.attend(device)), *slow.attend(case.plan, layer, case.query))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(20))
def test_random_batches(seed: int, device: str) -> None:
    rng = np.random.default_rng([seed, 56])
    batch = int(rng.integers(1, 9))
    new = rng.integers(0, rng.choice([2, 5, 40]), batch)
    lengths = new * (rng.random(batch) < 0.9) + rng.integers(0, 150, batch)
    slots = int(rng.integers(0, 33))
    more: dict[str, Any] = dict(
        sinks=int(rng.integers(0, 6)), slots=slots, window=int(rng.integers(0, slots + 1)), offset=rng.random() < 0.5
    )
    if rng.random() < 0.5:
        more["starts"] = np.array([rng.integers(0, n + 1) for n in lengths], np.int32)
    if rng.random() < 0.5:
        more["ends"] = np.array([rng.integers(0, n + 1) for n in lengths], np.int32)
    plan = list(PLANS.values())[seed % len(PLANS)]
    heads = [(1, 8), (2, 1), (2, 4), (1, 16)][seed % 4]
    case = Ragged(rng, plan, [*new], [*lengths], dtype=list(DTYPES)[seed % 3], heads=heads, **more)
    want = slow.attend(plan, case.append(), case.query)
    check(case, device, tq.attend(plan.words, **case.attend(device)), *want)

    # out and lse are strided, q is a part of a wider array; rows of no sequence are not written
    arguments = case.attend(device)
    wide = torch.full((*arguments["q"].shape[:2], 3 * plan.head_dim), 9.0, dtype=DTYPES[case.dtype], device=device)
    tokens, query_heads = arguments["q"].shape[:2]
    wide[..., 8 : plan.head_dim + 8] = arguments["q"]
    out = torch.full((query_heads, tokens, 2 * plan.head_dim), 7.0, dtype=DTYPES[case.dtype], device=device)
    lse = torch.full((query_heads, tokens), 7.0, device=device)
    bytes_ = tq.attend_workspace(plan.words, **arguments)
    arguments |= dict(
        q=wide[..., 8 : plan.head_dim + 8],
        out=out.transpose(0, 1)[..., : plan.head_dim],
        lse=lse.t(),
        workspace=torch.empty(bytes_, dtype=torch.uint8, device=device),
    )
    tq.attend.out(plan.words, **arguments)
    last = int(case.loc[-1])
    assert (out[:, last:] == 7).all() and (out[..., plan.head_dim :] == 7).all() and (lse[:, last:] == 7).all()
    arguments["out"][last:], arguments["lse"][last:] = 0, -np.inf
    check(case, device, (arguments["out"], arguments["lse"]), *want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("plan", [PLAN, MIXED, WAVE, ref.plan(128, 4, 4)], ids=["plain", "mixed", "wave", "4 bits"])
def test_a_batch_is_a_ragged_batch(
    plan: ref.Plan, tokens: int, group: int, device: str, rng: np.random.Generator
) -> None:
    """`append` and `attend` of [batch, heads, tokens, head_dim] equal those of the same numbers as a ragged batch, bit
    for bit, with each schedule."""
    lengths = torch.tensor([300, 71, 140], dtype=torch.int32, device=device)
    key, value = (random_transform(rng, plan, 2) for _ in range(2))
    turns, moments = random_moments(rng, plan, 2)
    key = replace(key, turns=turns, moments=moments)
    transforms = on(device, keywords(key, value))

    def draw(*size: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(size).astype(np.float32)).to(device, torch.bfloat16)

    k, v = draw(3, 2, 300, plan.head_dim), draw(3, 2, 300, plan.head_dim)
    table = torch.from_numpy(rng.permutation(30).reshape(3, 10).astype(np.int32)).to(device)
    pages = [torch.zeros(30, 2, plan.record_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    before = lengths - tokens
    for pool in pages:
        tq.append(plan.words, k, v, before, pool, table, **transforms)
    new = draw(3, 2, tokens, plan.head_dim), draw(3, 2, tokens, plan.head_dim)
    loc = torch.arange(0, 3 * tokens + 1, tokens, dtype=torch.int32, device=device)
    ragged = dict(query_start_loc=loc, max_query_len=tokens)

    def flat(x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)

    tq.append(plan.words, *new, lengths, pages[0], table, **transforms)
    tq.append(plan.words, *map(flat, new), lengths, pages[1], table, **transforms, **ragged)
    assert torch.equal(*pages)
    q = draw(3, 2 * group, tokens, plan.head_dim)
    line = torch.zeros((ops.schedule_rows(3, lengths.device), 4), dtype=torch.int32, device=device)
    tq.schedule(plan.words, line, flat(q), pages[0], table, lengths, **ragged)
    for schedule in (None, line, line[:0]):
        options = transforms | dict(schedule=schedule)
        out, lse = tq.attend(plan.words, q, pages[0], table, lengths, **options)
        got, got_lse = tq.attend(plan.words, flat(q), pages[0], table, lengths, **options, **ragged)
        assert torch.equal(got, flat(out)) and torch.equal(got_lse, flat(lse[..., None])[..., 0])


@pytest.mark.parametrize("device", DEVICES)
def test_a_ring_with_single_queries(device: str, rng: np.random.Generator) -> None:
    """A cache's own sinks and window, with at most one query a sequence."""
    case = make_case(rng, PLAN, [40, 0, 170, 9], sinks=4, window=16)
    loc = np.array([0, 1, 1, 2, 3], np.int32)
    q = case.query.q[[0, 2, 3], :, 0]
    arguments = {name: x for name, x in case.arguments.items() if name not in ("q", "dtype")}
    got = tq.attend(q=tensor(q).to(device), **on(device, arguments | dict(query_start_loc=loc)), max_query_len=1)
    want, want_lse = slow.attend_to_cache(PLAN, case.cache, replace(case.query, q=q), loc)
    limit = ACCURACY[device, "float32"]
    np.testing.assert_allclose(array(got[0]), want, rtol=0, atol=limit * abs(want).max())
    np.testing.assert_allclose(array(got[1]), want_lse, rtol=limit, atol=2 * limit)


@pytest.mark.parametrize("device", DEVICES)
def test_a_ragged_append_to_a_ring(device: str, rng: np.random.Generator) -> None:
    from cases import empty_cache

    last = np.array([50, 3, 90], np.int32)
    want = empty_cache(rng, PLAN, last, kv_heads=2, sinks=4, window=16, fill=0)
    for x in want.arrays().values():
        x[:] = 0
    got = on(device, dict(pages=want.pages, block_table=want.block_table, **want.arrays()))
    key, value = (random_transform(rng, PLAN, 2) for _ in range(2))
    lengths = np.zeros(3, np.int32)
    for counts in ([40, 0, 30], [1, 1, 1], [9, 2, 59]):
        loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lengths = (lengths + counts).astype(np.int32)
        k, v = (rng.standard_normal((loc[-1], 2, 64)).astype(np.float32) for _ in range(2))
        for b in range(3):
            alone = ref.Cache(
                want.pages, want.block_table[b : b + 1], **{n: x[b : b + 1] for n, x in want.arrays().items()}
            )
            rows = [x[None, loc[b] : loc[b + 1]].swapaxes(1, 2) for x in (k, v)]
            ref.append(PLAN, alone, *rows, lengths[b : b + 1], key, value)
        arguments = on(device, dict(k=k, v=v, lengths=lengths, query_start_loc=loc, **keywords(key, value)))
        tq.append(PLAN.words, **arguments, **got, max_query_len=max(counts))
    np.testing.assert_array_equal(array(got["pages"]), want.pages)
    for name, x in want.arrays().items():
        np.testing.assert_array_equal(array(got[name]), x, err_msg=name)


@pytest.mark.parametrize("device", DEVICES)
def test_offsets_turn_waves_as_positions_do(device: str, rng: np.random.Generator) -> None:
    """A prompt behind left padding that is stored, with an offset of minus the padding, decodes to the prompt alone."""
    k, v = (torch.from_numpy(rng.standard_normal((1, 2, 90, 128)).astype(np.float32)).to(device) for _ in range(2))
    key, value = (random_transform(rng, WAVE, 2) for _ in range(2))
    turns, moments = random_moments(rng, WAVE, 2)
    transforms = on(device, keywords(replace(key, turns=turns, moments=moments), value))
    table = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    pad = 20
    padded = [torch.cat([x, torch.cat([torch.zeros_like(x[:, :, :pad]), x[:, :, :-pad]], 2)]) for x in (k, v)]
    lengths, offset = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([90, 90], [0, -pad]))
    pages = torch.zeros(2, 2, WAVE.record_bytes, dtype=torch.uint8, device=device)
    tq.append(WAVE.words, *padded, lengths, pages, table, **transforms, position_offset=offset)
    decoded = tq.dequantize(WAVE.words, pages, table, lengths, 90, **transforms, position_offset=offset)
    for x in decoded:
        torch.testing.assert_close(x[1, :, pad:], x[0, :, :-pad], rtol=0, atol=2e-4 * float(x.abs().max()))
    q = torch.from_numpy(rng.standard_normal((1, 4, 1, 128)).astype(np.float32)).to(device).expand(2, -1, -1, -1)
    out, lse = tq.attend(
        WAVE.words,
        q.contiguous(),
        pages,
        table,
        torch.tensor([90 - pad, 90], dtype=torch.int32, device=device),
        starts=torch.tensor([0, pad], dtype=torch.int32, device=device),
        position_offset=offset,
        **transforms,
    )
    torch.testing.assert_close(out[0], out[1], rtol=0, atol=2e-3)
    torch.testing.assert_close(lse[0], lse[1], rtol=0, atol=2e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_the_bound_of_workspace_holds(device: str) -> None:
    """No smaller batch needs more workspace."""
    plan, rng = ref.plan(128, 4, 4, wave_pairs=64), np.random.default_rng(3)
    wave = ref.Transform(turns=np.zeros((64, 3), np.int32), moments=np.zeros((8, 128), np.float32))
    transforms = on(device, keywords(wave))

    def sizes(batch: int, longest: int, pages: int) -> dict[str, Any]:
        tokens = min(batch * longest, 4096)
        q = torch.empty(128, dtype=torch.bfloat16, device=device).expand(tokens, 32, 128)
        pool = torch.empty((4, 8, plan.record_bytes), dtype=torch.uint8, device=device)
        integers = {"block_table": (batch, pages), "lengths": (batch,), "query_start_loc": (batch + 1,)}
        arrays = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in integers.items()}
        return dict(q=q, pages=pool, max_query_len=longest, **arrays, **transforms)

    bound = tq.attend_workspace(plan.words, **sizes(64, 512, 40))
    for _ in range(100):
        batch, longest, pages = (int(rng.integers(1, most + 1)) for most in (64, rng.choice([1, 8, 512]), 40))
        arguments = sizes(batch, longest, pages)
        if device == "cpu":  # all lengths are 0, so the call itself can run
            out = torch.empty(arguments["q"].shape, dtype=torch.bfloat16)
            tq.attend.out(plan.words, **arguments, out=out, workspace=torch.empty(bound, dtype=torch.uint8))
        assert tq.attend_workspace(plan.words, **arguments) <= bound


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("schedule", ["line", "equal", "none"])
@pytest.mark.parametrize("plan", [WAVE, ref.plan(128, 4, 4, wave_pairs=64, metric=5), PLAN], ids=["3", "4", "plain"])
def test_a_graph_serves_other_batches(
    plan: ref.Plan, schedule: str, tokens: int, device: str, rng: np.random.Generator
) -> None:
    """A graph of `schedule`, `append` and `attend` gives what the calls give, whatever its arrays hold by then."""
    batch, group, slots = 6, 4, 3
    key, value = (random_transform(rng, plan, 2) for _ in range(2))
    turns, moments = random_moments(rng, plan, 2)
    transforms = on(device, keywords(replace(key, turns=turns, moments=moments), value))

    def draw(*size: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(size).astype(np.float32)).to(device, torch.bfloat16)

    pages = torch.from_numpy(aligned_pages(40, 2, plan.record_bytes)).to(device)
    table = torch.from_numpy(rng.permutation(40)[:36].reshape(6, 6).astype(np.int32)).to(device)
    full = torch.full((batch,), 768, dtype=torch.int32, device=device)
    tq.append(plan.words, *(draw(batch, 2, 768, plan.head_dim) for _ in "kv"), full, pages, table, **transforms)
    exact = {name: draw(9, 2, 4, plan.head_dim) for name in ("sink_k", "sink_v")}
    exact |= {name: draw(20, 2, slots, plan.head_dim) for name in ("window_k", "window_v")}
    k, v = (draw(batch * tokens, 2, plan.head_dim) for _ in range(2))
    q, wide = draw(batch * tokens, 2 * group, plan.head_dim), draw(batch * tokens, 2 * group, 2 * plan.head_dim)
    sizes = dict(lengths=(batch,), query_start_loc=(batch + 1,), sink_rows=(batch,), tail_rows=(batch, 2))
    held = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
    ragged = dict(max_query_len=tokens, **{name: held[name] for name in list(sizes)[1:]})
    line = torch.zeros((ops.schedule_rows(batch, held["lengths"].device), 4), dtype=torch.int32, device=device)
    given = {"line": line, "equal": line[:0], "none": None}[schedule]
    lse = torch.zeros(batch * tokens, 2 * group, device=device)

    def step(out: Tensor) -> None:
        if schedule == "line":
            tq.schedule(plan.words, line, q, pages, table, held["lengths"], sinks=4, window=2, **ragged)
        tq.append(plan.words, k, v, held["lengths"], pages, table, **exact, **transforms, **ragged)
        tq.attend.out(
            plan.words, q, pages, table, held["lengths"], window=2, schedule=given, out=out, lse=lse,
            **exact, **transforms, **ragged,
        )  # fmt: skip

    def fill(lengths: list[int], counts: list[int]) -> None:
        loc = np.concatenate([[0], np.cumsum(counts)])
        rows = rng.permutation(9)[:batch], rng.permutation(20)[: 2 * batch].reshape(batch, 2)
        absent = [np.where(rng.random(x.shape) < 0.3, -1, x) for x in rows]
        for name, x in zip(sizes, (np.array(lengths), loc, *absent), strict=True):
            held[name].copy_(torch.from_numpy(x.astype(np.int32)))

    fill([300, 4, 129, 700, 66, 31], [tokens] * batch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(wide[..., : plan.head_dim])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(wide[..., : plan.head_dim])
    for lengths, counts in (
        ([301, 5, 130, 701, 67, 32], [tokens] * batch),
        ([90, 700, 400, 9, 7, 0], [1, tokens, 1, tokens, 0, 0]),
        ([0, 0, 0, 0, 0, 0], [0] * batch),
        ([768, 768, 768, 768, 768, 768], [tokens] * batch),
    ):
        fill(lengths, counts)
        wide.fill_(7)
        lse.fill_(7)
        graph.replay()
        got, got_lse, n = wide.clone(), lse.clone(), sum(counts)
        wide.fill_(7)
        lse.fill_(7)
        step(wide[..., : plan.head_dim])
        assert torch.equal(got, wide) and torch.equal(got_lse, lse)
        assert (got[n:] == 7).all() and (got[..., plan.head_dim :] == 7).all() and (got_lse[n:] == 7).all()
        assert bool(torch.isfinite(got[:n]).all()) and not bool((got_lse[:n] == 7).any())


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("batch,schedule", [(1, None), (64, "line"), (64, "equal")])
def test_serving_runs_fast_kernels(batch: int, schedule: str | None, device: str, rng: np.random.Generator) -> None:
    """Steps of one token, with rows of sinks and a wave, run fused kernels and append one token."""
    plan = ref.plan(128, 4, 4, wave_pairs=64, metric=5)
    turns, moments = random_moments(rng, plan, 8)
    wave = ref.Transform(turns=turns, moments=moments)
    sizes = {"block_table": (batch, 64), "lengths": (batch,), "query_start_loc": (batch + 1,), "sink_rows": (batch,)}
    arrays: dict[str, Any] = {name: torch.zeros(x, dtype=torch.int32, device=device) for name, x in sizes.items()}
    arrays |= {name: torch.zeros(2, 8, 4, 128, device=device).bfloat16() for name in ("sink_k", "sink_v")}
    pool = torch.zeros((4, 8, plan.record_bytes), dtype=torch.uint8, device=device)
    line = torch.zeros((ops.schedule_rows(batch, pool.device), 4), dtype=torch.int32, device=device)
    q = torch.zeros(batch, 32, 128, device=device).bfloat16()
    arguments = arrays | on(device, keywords(wave)) | dict(pages=pool, max_query_len=1)
    arguments["schedule"] = {None: None, "line": line, "equal": line[:0]}[schedule]
    assert tq.attend_kernel(plan.words, q, **arguments).startswith("attend_fused_4bit_d128_4x")
    k = torch.zeros(batch, 8, 128, device=device).bfloat16()
    kept = {name: x for name, x in arguments.items() if name != "schedule"}
    assert tq.append_kernel(plan.words, k, k, **kept) == "append_one_token"


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["blocks of 32", "affine, plain"])
def test_plans_that_are_not_plain_agree_with_the_cpu(
    name: str, how: str, device: str, rng: np.random.Generator
) -> None:
    """The reference has no such plans. Their bytes are the CPU's, because these rotations are Hadamard or none."""
    plan: Any = mode_cases.PLANS[name](64)
    case = Ragged(
        rng, PLAN, [1, 37, 0, 4], [90, 140, 7, 300], **HOW[how]
    )  # only its arrays are used: its pages are of another size
    pages = aligned_pages(12, 2, plan.record_bytes)
    table = np.arange(12, dtype=np.int32).reshape(4, 3)
    found: dict[str, Any] = {}
    for where in ("cpu", device):
        shared = case.arrays(where) | on(where, dict(pages=pages, block_table=table))
        shared = {name: x for name, x in shared.items() if not name.endswith("numbers")}
        for k, v, loc, lengths in case.steps:
            new = on(where, dict(k=k, v=v, lengths=lengths, query_start_loc=loc))
            tq.append(plan.words, **shared, **new, max_query_len=300)
        out, lse = tq.attend(plan.words, **case.attend(where) | shared | dict(key_numbers=None, value_numbers=None))
        found[where] = [x.cpu().float() for x in (shared["pages"], out, lse)]
    (pages_cpu, *want), (pages_cuda, *got) = found["cpu"], found[device]
    assert torch.equal(pages_cpu, pages_cuda)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("seed", range(6))
def test_wrong_contents_are_harmless_on_cuda(seed: int, device: str) -> None:
    """Contents that are an error on a CPU neither fault nor make a kernel write outside `out` (turboquant_cuda.h)."""
    rng = np.random.default_rng([seed, 57])
    case = Ragged(rng, WAVE, [1, 5, 0, 3], [9, 140, 7, 60], sinks=4, slots=16, window=12, offset=True)
    case.append()
    given, (k, v, _, _) = case.attend(device), case.steps[1]
    tokens, heads, dim = given["q"].shape
    names = ("query_start_loc", "lengths", "sink_rows", "tail_rows", "ends", "starts", "position_offset", "block_table")
    for _ in range(5):
        wrong = {}
        for name in names:
            shape = given[name].shape if name in given else (4,)
            wrong[name] = rng.choice([-(2**31), -1, 0, 1, 4, 7, 200, 2**31 - 1], tuple(shape)).astype(np.int32)
        wrong = on(device, wrong)
        guarded = torch.full((tokens + 2, heads, dim), 7.0, device=device)
        new = on(device, dict(k=k, v=v))
        kept = {name: x for name, x in (given | wrong).items() if name in (*case.arrays(device), *names[:4], names[6])}
        tq.append(WAVE.words, **new, **kept, max_query_len=5)
        tq.attend.out(WAVE.words, **given | wrong, out=guarded[1:-1])
        torch.cuda.synchronize()
        assert (guarded[0] == 7).all() and (guarded[-1] == 7).all()


REFUSED: dict[str, tuple[str, Any, str]] = {
    "descending": ("query_start_loc", [0, 1, 0, 3], "`query_start_loc[2]` must be no less than"),
    "past the end": ("query_start_loc", [0, 1, 2, 99], "`query_start_loc[3]` must be in 0..tokens"),
    "too many of one": ("query_start_loc", [0, 0, 0, 3], "`query_start_loc[3]` must be at most max_query_len"),
    "of 64 bits": (
        "query_start_loc",
        torch.zeros(4, dtype=torch.int64),
        "`query_start_loc` must be int32 [*]",
    ),
    "none": ("query_start_loc", [], "`query_start_loc` must be of batch + 1 numbers"),
    "a negative length": ("max_query_len", -1, "`max_query_len` must be at least 0, got -1"),
    "lengths of another batch": ("lengths", [1, 2], "`lengths` must be int32 [3], got int32 [2]"),
    "a row of sinks": ("sink_rows", [0, 99, -1], "`sink_rows[1]` must be -1 or a row of sink_k, got 99"),
    "a row of tails": (
        "tail_rows",
        [[0, 1], [2, 3], [-2, 4]],
        "`tail_rows[4]` must be -1 or a row of window_k",
    ),
    "a window past the slots": ("window", 17, "`window` must be at most the tokens of a row of window_k, got 17"),
    "rows of sinks alone": ("tail_rows", None, "`window` must be 0 without tail_rows"),
    "ends past the length": ("ends", [0, 41, 0], "`ends[1]` must be in 0..lengths, got 41"),
    "offsets of another batch": ("position_offset", [0], "`position_offset` must be int32 [3], got int32 [1]"),
    "out of another dtype": ("out", torch.zeros(5, 4, 64).half(), "`out` must be float32 [5, 4, 64], got float16"),
    "out that overlaps itself": (
        "out",
        torch.zeros(64).expand(5, 4, 64),
        "`out` must be of strides that keep",
    ),
    "an lse of another shape": ("lse", torch.zeros(4, 5), "`lse` must be float32 [5, 4], got float32 [4, 5]"),
    "little workspace": ("workspace", torch.zeros(64, dtype=torch.uint8), "`workspace` must be of at least "),
    "queries of four dimensions": ("q", torch.zeros(1, 4, 3, 64), "`q` must be float32 [*, *, 64]"),
    "fresh tokens": ("fresh_k", torch.zeros(3, 2, 1, 64), "`fresh_k` must be "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, rng: np.random.Generator) -> None:
    case = Ragged(rng, PLAN, [1, 1, 1], [9, 40, 3], sinks=4, slots=16, window=16)
    case.append()
    argument, value, message = REFUSED[name]
    arguments = case.attend("cpu") | dict(out=torch.zeros(5, 4, 64))
    if isinstance(value, list):
        value = torch.tensor(value, dtype=torch.int32)
    with pytest.raises((ValueError, TypeError)) as caught:
        tq.attend.out(PLAN.words, **arguments | {argument: value})
    assert str(caught.value).startswith(f"attend: {message}"), str(caught.value)
    assert not arguments["out"].any()


def test_refusals_of_append_and_of_rings(rng: np.random.Generator) -> None:
    case = Ragged(rng, PLAN, [1, 1, 1], [9, 40, 3], sinks=4, slots=16, window=16)
    k, v, loc, lengths = case.steps[1]
    arguments = case.arrays("cpu") | on("cpu", dict(k=k, v=v, query_start_loc=loc, lengths=lengths))
    before = arguments["pages"].clone()
    for change, message in (
        (dict(max_query_len=0), r"`query_start_loc\[1\]` must be at most max_query_len"),
        (dict(query_start_loc=None, max_query_len=1), "`max_query_len` must be 0 without query_start_loc, got 1"),
        (dict(sink_rows=None), "`sink_k` must be float32 "),
        (dict(v=arguments["v"][:2]), r"`v` must be float32 \[5, 2, 64\], got float32 \[2, 2, 64\]"),
        (dict(k=arguments["k"] * np.nan), r"`k\[0, 0, 0\]` must be finite"),
        (
            dict(lengths=torch.tensor([9, 400, 3], dtype=torch.int32)),
            r"`lengths\[1\]` must be in 0..max_pages",
        ),
    ):
        with pytest.raises(ValueError, match=f"append: {message}"):
            tq.append(PLAN.words, **dict(max_query_len=1) | arguments | change)
    assert torch.equal(before, arguments["pages"])
    ring = make_case(rng, PLAN, [40], query_tokens=2, window=16)
    given = {name: x for name, x in ring.arguments.items() if name not in ("q", "dtype")}
    given = on("cpu", given | dict(query_start_loc=np.array([0, 2], np.int32)))
    with pytest.raises(ValueError, match="attend: `tail_rows` must be given: with query_start_loc and several queries"):
        tq.attend(q=torch.zeros(2, 4, 64), **given, max_query_len=2)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str, rng: np.random.Generator) -> None:
    case = Ragged(rng, PLAN, [2, 1], [9, 40], sinks=4, slots=16, window=16, offset=True)
    k, v, loc, lengths = case.steps[1]
    new = on(device, dict(k=k, v=v, query_start_loc=loc, lengths=lengths))
    torch.library.opcheck(tq.append.default, (PLAN.words,), case.arrays(device) | new | dict(max_query_len=2))
    case.append()
    arguments = case.attend(device)
    torch.library.opcheck(tq.attend.default, (PLAN.words,), arguments)
    out = torch.zeros(5, 4, 64, device=device)
    torch.library.opcheck(tq.attend.out, (PLAN.words,), arguments | dict(out=out, lse=out[..., 0].clone()))
