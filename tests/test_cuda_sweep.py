"""Random sequences of calls, on a CPU and on a GPU: bytes, outputs, log-sum-exps, and memory that no call may write.

    python -m pytest tests/test_cuda_sweep.py                                    64 shards of 4 sequences
    TURBOQUANT_SWEEP_SECONDS=600 python -m pytest -n 16 tests/test_cuda_sweep.py each worker draws for so long
    python tests/test_cuda_sweep.py 7000123                                      one seed again, as a failure names it

TURBOQUANT_SWEEP_SEED is added to seeds. TURBOQUANT_SWEEP_COUNTS names a folder for files that count what was drawn. The
GPU gets the CPU's bytes before it attends, so that a code at a threshold changes nothing that follows.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mode_cases
import numpy as np
import pytest
import reference_modes as modes
from cases import awkward_rows, orthogonal, random_moments

torch = pytest.importorskip("torch", reason="torch is not installed")
from ops_cases import DTYPES, ROUNDING, needs_cuda, tq  # noqa: E402
from torch import Tensor  # noqa: E402

import turboquant  # noqa: E402
from turboquant import ops  # noqa: E402
from turboquant.plan import Plan, Side  # noqa: E402
from turboquant.transforms import transforms as joined  # noqa: E402

SECONDS, BASE = (int(os.environ.get(f"TURBOQUANT_SWEEP_{name}", "0")) for name in ("SECONDS", "SEED"))
SHARDS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) if SECONDS else 64
WORK = 3e8  # products of attention, and operations of append, in one sequence of calls: about 0.2 s of a CPU
PATH = "TURBOQUANT_CUDA_PATH"
FAR = 2**30  # what entries of block tables hold that are not used
DIMS = [128] * 10 + [64] * 5 + [16, 32, 48, 80, 96, 112, 160, 192, 256, 256, 320, 384, 448, 512]
WIDTHS = [1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5, 5, 6, 8]
PRESETS = [name for name, spec in turboquant.presets().items() if spec.budget is None]
counts: Counter[str] = Counter()
worst: dict[str, float] = {}  # largest error over its bound, by what was compared
Results = dict[str, tuple[Tensor, Tensor]]  # out and lse, by device


@dataclass
class Draw:
    """One sequence of calls. What is not here is drawn from the same seed while it runs."""

    seed: int
    plan: Plan
    dtype: str
    kv_heads: int
    group: int
    lengths: list[int]  # after the prompt
    steps: list[int]  # new tokens of each step, of a sequence at most
    ragged: bool
    sinks: int
    window: int  # of the ring
    slots: int  # of exact tokens by index
    spare: int  # columns of the block table that no sequence uses
    gap: int  # bytes between pages
    fill: int  # of pages before the first append
    spread: float  # of queries
    path: str  # PATH
    awkward: bool  # rows of zeros, of tiny and of the largest numbers


def draw_plan(r: random.Random) -> Plan:
    dim, kind = r.choice(DIMS), r.random()
    if kind < 0.14:
        dim = min(dim, 256)
        if kind < 0.07:
            return turboquant.presets()[r.choice(PRESETS)].plan(max(dim, 64), wave_pairs=32, rank=r.randrange(5))
        return Plan.from_words(mode_cases.PLANS[r.choice(list(mode_cases.PLANS))](dim).words)
    usual = kind < 0.6  # a plan that fast kernels take
    dim, widths = (r.choice([128, 128, 128, 64, 64, 256]), [1, 5, *[2, 3, 4] * 4]) if usual else (dim, WIDTHS)
    group = 16 if dim <= 256 and not usual and r.random() < 0.15 else 32
    groups = -(-dim // group)
    shape = r.choice(["one", "one", "one", "sides"] if usual else ["one", "sides", "groups"])
    key: Any = r.choice(widths)
    value: Any = key if shape == "one" else r.choice(widths)
    if shape == "groups":
        key, value = ([r.choice([0, *WIDTHS]) for _ in range(groups)] for _ in "kv")
        key[r.randrange(groups)] = value[r.randrange(groups)] = r.choice(WIDTHS)
    rotation = "hadamard" if usual else r.choice(["hadamard"] * 3 + ["dense", "none"])
    scale = r.choice(["eden"] * 6 + ["norm", "norm_corrected", "least_squares"])
    codebook = r.choice(["normal"] * 4 + ["uniform"] + ["sphere"] * (dim <= 256))
    pairs, metric, most = 0, None, -(-dim // 16) * 8
    if r.random() < 0.45:
        pairs = r.choice([0, most, most, 8, r.randrange(8, most + 1, 8)])
        metric = r.choice([None, 0, 1, 2, 3, 4, 4])
    keys_only = not usual and r.random() < 0.05
    term = scale == "eden" and codebook == "normal" and shape != "groups" and not keys_only and r.random() < 0.3
    page = 128 if usual else r.choice([128, 128, 64] + [32, 96] * (group == 32))
    tries = r.choice([0, 0, 3, 5, 7]) if scale == "eden" else 0
    sides = Side(key, rotation), None if keys_only else Side(value, rotation)
    return Plan(dim, *sides, page, group, codebook, scale, r.randrange(2**40), pairs, metric, tries, term)


def draw_lengths(r: random.Random, batch: int, longest: int) -> list[int]:
    kind = r.choice(["equal", "about equal", "lognormal", "empty", "one long", "any"])
    others = {
        "equal": lambda: longest,
        "about equal": lambda: r.randint(longest - longest // 9, longest),
        "lognormal": lambda: min(longest, int(longest * r.lognormvariate(-1.5, 1))),
        "empty": lambda: r.choice([0, 0, 1, r.randint(0, longest)]),
        "one long": lambda: r.randint(0, min(longest, 40)),
        "any": lambda: r.randint(0, longest),
    }[kind]
    lengths = [longest, *(others() for _ in range(batch - 1))]
    return r.sample(lengths, batch)


def draw(seed: int) -> Draw:
    r = random.Random(seed)
    plan = draw_plan(r)
    many = r.choice([2, r.randint(3, 20), r.randint(3, 20), r.randint(64, 600)])
    steps = [1, *r.choice([[], [1], [1, 1], [many], [many], [many, 1], [1, many]])]
    n = {
        "batch": r.choice([1, 1, 1, 2, 3, 4, 8, 16, 33, 64, 70, r.randint(1, 70)]),
        "kv_heads": r.choice([1, 1, 2, 2, 3, 4, 8, 8, 9]),
        "group": r.choice([1, 2, 3, 4, 4, 4, 5, 7, 8, 8, 12, 16, 32, 40, r.randint(1, 40)]),
        "longest": r.choice([20, 100, 128, 140, 300, 300, 700, 1500, 1500, 4000, 20000]),
    }
    if r.random() < 0.5:  # decoding
        n |= {"group": min(n["group"], r.choice([4, 8, 12])), "longest": min(n["longest"], 1500)}
        steps = [1] * r.choice([1, 2, 3]) if r.random() < 0.7 else [1, r.randint(2, 8)]
    weights = {"batch": 1, "kv_heads": 1, "group": 1, "longest": r.choice([1 / 30, 1 / 500]), "steps": 1 / 30}
    while True:  # halves the largest number until the work is small enough
        stored = n["batch"] * n["kv_heads"] * (n["longest"] + sum(steps)) * plan.head_dim
        attended = stored * n["group"] * sum(steps) * (2 if plan.is_plain else 30)
        stored *= 40 * (1 + plan.tries) * (1 if plan.is_plain else 4)
        if max(stored, attended) < WORK or (max(n.values()) < 40 and max(steps) < 4):
            break
        sizes = {**n, "steps": max(steps)}
        names = [name for name in sizes if sizes[name] > 1 and (attended > stored or name not in ("group", "steps"))]
        name = max(names, key=lambda name: sizes[name] * weights[name])
        steps = [-(-x // 2) for x in steps] if name == "steps" else steps
        n |= {name: -(-n[name] // 2)} if name in n else {}
    ragged, exact = r.random() < 0.35, r.random() < 0.5
    ring = exact and (not ragged or (max(steps) == 1 and r.random() < 0.5))
    return Draw(
        seed, plan, r.choice(["float32", "float16", "bfloat16", "bfloat16"]), n["kv_heads"], n["group"],
        draw_lengths(r, n["batch"], n["longest"]), steps, ragged,
        sinks=r.choice([1, 4, 4, r.randint(1, 40)]) if r.random() < 0.4 else 0,
        window=r.choice([1, 16, 40, 128, r.randint(1, 200)]) if ring else 0,
        slots=r.randint(1, plan.page_tokens) if ragged and exact and not ring else 0,
        spare=r.choice([0, 2, 20, 60, 130, 300]), gap=64 * r.choice([0, 0, 1, 5]), fill=r.choice([0, 0xFF]),
        spread=r.choice([0.3, 1.0, 3.0]), path=r.choice([""] * 7 + ["hopper-line", "portable", "portable"]),
        awkward=r.random() < 0.1 and not has_tolerance(plan),
    )  # fmt: skip


def sides_of(plan: Plan) -> dict[str, Side]:
    return {name: side for name in ("key", "value") if isinstance(side := getattr(plan, name), Side)}


def has_tolerance(plan: Plan) -> bool:
    """Whether codes at thresholds may differ between a CPU and CUDA (docs/rounding.md)."""
    matrices = any("DENSE" in str(x.rotation.name) or x.sketch.name == "GAUSSIAN" for x in sides_of(plan).values())
    return matrices or plan.wave_pairs > 0 or plan.metric is not None


def llama3(base: float, half: int) -> Any:
    """Angles of rotary embeddings, in radians a position; with 500,000 as Llama 3 stretches them."""
    angles = base ** -(np.arange(half) / half)
    smooth = np.clip((8192 * angles / (2 * np.pi) - 1) / 3, 0, 1)
    return angles * (smooth + (1 - smooth) / 8) if base > 1e5 else angles


def draw_transforms(d: Draw, r: random.Random, rng: np.random.Generator) -> dict[str, Tensor]:
    plan, dim, parts = d.plan, d.plan.head_dim, {}
    for i, (name, side) in enumerate(sides_of(plan).items()):
        heads, rows = d.kv_heads if d.seed % 2 else 1, [np.zeros((0, dim), np.float32)]
        if side.rotation.name == "DENSE":
            rows.append(np.kron(orthogonal(dim // 8, i), orthogonal(8, i)))
        if side.sketch.name == "GAUSSIAN":
            rows.append(modes.gaussian(plan.seed, side.sketch_rows, dim))
        if len(rows) > 1:  # heads differ in the order of channels
            matrix = np.concatenate(rows).astype(np.float32)
            parts[f"{name}_rotation"] = np.stack([np.roll(matrix, h, 1) for h in range(heads)])
        if r.random() < 0.5:
            parts[f"{name}_centre"] = rng.standard_normal((d.kv_heads, dim)).astype(np.float32)
        if side.levels.name == "TABLE":
            table = np.sort(2 * rng.standard_normal((d.kv_heads, 2 ** side.bits[0])), -1)
            sign = np.full((d.kv_heads, int(side.sketch.name == "SIGN")), 0.25)
            parts[f"{name}_steps"] = np.concatenate([table, sign], 1).astype(np.float32)
        elif plan.is_plain and r.random() < 0.3 and not (plan.variance_term and name == "key"):
            parts[f"{name}_steps"] = np.exp(0.5 * rng.standard_normal((d.kv_heads, plan.groups))).astype(np.float32)
    metric, half, near = 0 if plan.metric is None else 1 + plan.metric, dim // 2, r.random() < 0.3
    shape: Any = SimpleNamespace(head_dim=dim, wave_pairs=plan.wave_pairs, metric=metric)
    turns, moments = random_moments(rng, shape, d.kv_heads, r.choice([1.0, 5.0, 20.0]), near)
    if turns is not None:
        used = turns[: min(half, len(turns))]
        used[:] = used[np.argsort(used[:, 0])] if r.random() < 0.6 else used
        angles = llama3(r.choice([1e4, 5e5]), half)[used[:, 0] // 2 if near else used[:, 0]]
        used[:, 2] = (angles / (2 * np.pi) * 2**32).round().astype(np.int64).astype(np.int32)
        parts["key_turns"] = turns
    if moments is not None:
        parts["key_moments"] = moments
    return {name: torch.from_numpy(x).clone() for name, x in joined(**parts).items()}


def limit(name: str, got: Tensor, bound: Tensor) -> None:
    """Asserts that no number is above its bound, and keeps the largest ratio."""
    ratio = float((got / bound.clamp(min=1e-30)).max()) if got.numel() else 0.0
    worst[name] = max(worst.get(name, 0.0), ratio)
    assert ratio <= 1, f"{name}: {ratio:.3g} times its bound"


def on(where: str, given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(where) if isinstance(x, Tensor) else x for name, x in given.items()}


def laid(where: str, x: Tensor, wide: bool) -> Tensor:
    """x on a device; if wide, with tokens before heads and gaps of NaN between rows."""
    y = x.transpose(-3, -2) if x.dim() == 4 else x
    room = torch.full((*y.shape[:-1], y.shape[-1] * (1 + wide)), torch.nan, dtype=x.dtype, device=where)
    view = room[..., 8 : 8 + y.shape[-1]] if wide else room
    view.copy_(y)
    return view.transpose(-3, -2) if x.dim() == 4 else view


class Sequence:
    """Runs a draw on the CPU and on a device."""

    def __init__(self, d: Draw, device: str) -> None:
        self.d, self.plan, self.words, self.device, self.batch = d, d.plan, d.plan.words, device, len(d.lengths)
        self.r, self.rng, self.type = random.Random(d.seed), np.random.default_rng(d.seed), DTYPES[d.dtype]
        self.make = torch.Generator().manual_seed(d.seed)
        self.transforms = draw_transforms(d, self.r, self.rng)
        self.fixed, self.lengths, self.longest_key = dict(self.transforms), torch.zeros(self.batch).int(), 0.0
        self.by_index = d.ragged and not d.window and bool(d.slots or (d.sinks and d.seed % 2))
        self.has_ways = device == "cuda" and not d.path and torch.cuda.get_device_capability()[0] == 9
        self.hidden = 0 if self.by_index else d.sinks + d.window  # tokens that are not in pages
        needed = [-(-max(0, n + sum(d.steps) - self.hidden) // self.plan.page_tokens) for n in d.lengths]
        order = self.r.sample(range(sum(needed) + 2), sum(needed) + 2)
        self.table = torch.full((self.batch, max(needed) + d.spare), FAR, dtype=torch.int32)
        for b, n in enumerate(needed):
            self.table[b, :n] = torch.tensor([order.pop() for _ in range(n)], dtype=torch.int32)
        self.record, shape = d.kv_heads * self.plan.record_bytes, (d.kv_heads, self.plan.record_bytes)
        pool = torch.full((sum(needed) + 4, self.record + d.gap), d.fill, dtype=torch.uint8)
        self.buffer = {w: pool.to(w, copy=True) for w in ("cpu", device)}
        self.state = {w: {"pages": x[1:-1, : self.record].unflatten(1, shape)} for w, x in self.buffer.items()}
        rows = 3 * self.batch + 2
        for part, n in (("sink", d.sinks), ("window", d.window or d.slots)):
            size = rows if self.by_index else self.batch, d.kv_heads, n, self.plan.head_dim
            for side, (w, state) in product("kv"[: len(sides_of(self.plan)) * (n > 0)], self.state.items()):
                state[f"{part}_{side}"] = torch.full(size, torch.nan, dtype=self.type, device=w)
        given = torch.tensor(self.r.sample(range(rows), 3 * self.batch), dtype=torch.int32)
        given[torch.rand(len(given), generator=self.make) < 0.2] = -1
        self.fixed |= {"sink_rows": given[: self.batch]} if self.by_index and d.sinks else {}
        self.fixed |= {"tail_rows": given[self.batch :].view(-1, 2).clone()} if d.slots else {}
        if self.plan.wave_pairs and self.r.random() < 0.3:
            self.fixed["position_offset"] = torch.randint(-5000, 5000, (self.batch,), generator=self.make).int()

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.make).to(self.type)

    def run(self) -> None:
        d, r = self.d, self.r
        self.step(d.lengths, d.lengths, False)
        for n in d.steps:
            tokens = [r.choice([0, 1, n, r.randint(0, n)]) if d.ragged else n for _ in d.lengths]
            after = [m + t if m or d.ragged else r.randint(0, t) for m, t in zip(self.lengths.tolist(), tokens)]
            self.step(tokens, after, self.plan.value is not None)
        self.decode()

    def step(self, tokens: list[int], after: list[int], attends: bool) -> None:
        """Appends tokens and perhaps attends, in one call or in two. `after`: the lengths."""
        d, r, dim, new = self.d, self.r, self.plan.head_dim, max(tokens)
        if not new:
            return
        total, ragged, wide = sum(tokens) + 2, {}, r.random() < 0.5
        heads, rows = d.kv_heads * d.group, (lambda n: (total, n, dim) if d.ragged else (self.batch, n, new, dim))
        k, v = self.random(*rows(d.kv_heads)), self.random(*rows(d.kv_heads))
        if d.awkward and k.numel() // dim >= 16:
            k = torch.from_numpy(awkward_rows(self.rng, k.numel() // dim, dim)).view(k.shape).to(self.type)
        self.longest_key = max(self.longest_key, float(k.float().norm(dim=-1).max()))
        q = self.random(*rows(heads)) * (d.spread / (4096 if d.awkward else 1))
        if d.ragged:  # rows that no sequence has must not be read
            ragged = {"query_start_loc": torch.tensor([0, *np.cumsum(tokens)]).int(), "max_query_len": new}
            k[-2:] = v[-2:] = q[-2:] = torch.nan
        for b, n in enumerate(after if not d.ragged else []):  # padding
            k[b, :, : max(0, new - n)] = v[b, :, : max(0, new - n)] = torch.nan
        self.lengths, both = torch.tensor(after, dtype=torch.int32), {"k": k, "v": v if self.plan.value else None}
        ring = {w: {x: y.clone() for x, y in s.items() if "window" in x} for w, s in self.state.items()}
        before, results = {w: x.clone() for w, x in self.buffer.items()}, {}
        one_call = attends and not d.ragged and r.random() < 0.4
        options = self.options(one_call)
        for w, state in self.state.items():
            given = on(w, {"block_table": self.table, "lengths": self.lengths, **ragged, **self.fixed}) | state
            given |= {x: None if y is None else laid(w, y, wide) for x, y in both.items()}
            flag = {} if w.startswith("cpu") else {"flag": torch.zeros(1, dtype=torch.int64, device=w)}
            if one_call:
                lse = torch.zeros(q.shape[:-1], device=w)
                results[w] = tq.append_attend(self.words, q.to(w), lse=lse, **given, **options, **flag), lse
            else:
                counts[tq.append_kernel(self.words, **given)] += 1
                tq.append(self.words, **given, **flag)
            assert not flag or not flag["flag"].item(), "append: a number was flagged"
        equal = self.check_bytes(before)
        if one_call and equal:  # otherwise each attended to bytes of its own
            counts["append_attend"] += 1
            self.check_attention("append_attend", q, options, results)
        elif attends and not one_call:
            fresh = not d.ragged and new > 1 and d.window > 0 and options.get("causal", True)
            for w in ring if fresh else ():
                ring[w] |= {f"fresh_{x}": laid(w, y, wide) for x, y in both.items() if y is not None}
            self.attend(q, ragged, options, ring if fresh else {w: {} for w in ring}, wide)

    def check_bytes(self, before: dict[str, Tensor]) -> bool:
        """Returns whether the device stored the CPU's bytes, and then gives it these."""
        used = torch.zeros(len(before["cpu"]), dtype=torch.bool)
        used[self.table[self.table < FAR].long() + 1] = True
        for w, x in self.buffer.items():
            assert torch.equal(x[~used.to(w)], before[w][~used.to(w)]), f"append: {w} wrote pages of no sequence"
            assert torch.equal(x[:, self.record :], before[w][:, self.record :]), f"append: {w} wrote between pages"
        for name, x in self.state["cpu"].items():
            y = self.state[self.device][name].cpu()
            same = torch.equal(x.view(torch.uint8), y.view(torch.uint8)) if name != "pages" else True
            assert same, f"append: {name} differs"
        want, got = self.buffer["cpu"], self.buffer[self.device].cpu()
        wrong, changed = int((want != got).sum()), int(((want != before["cpu"]) | (got != before["cpu"])).sum())
        few = (
            2 * self.plan.record_bytes // self.plan.page_tokens if self.plan.tries else 8
        )  # another factor: a whole row
        allowed = max(0.02 * changed, few) if has_tolerance(self.plan) else 0
        worst["bytes that differ"] = max(worst.get("bytes that differ", 0.0), wrong / max(allowed, 1))
        assert wrong <= allowed, f"append: {wrong} of {changed} bytes differ"
        self.buffer[self.device].copy_(want)
        return not wrong

    def options(self, one_call: bool) -> dict[str, Any]:
        r, some = self.r, {}
        if r.random() < 0.3:
            some["softcap"] = r.choice([5.0, 30.0, 50.0])
        if r.random() < 0.3:
            some["softmax_scale"] = r.choice([0.5, 1.0, 2.0]) * self.plan.head_dim**-0.5
        if r.random() < 0.25:
            some["sliding_window"] = r.choice([1, 33, 300, 1000])
        elif r.random() < 0.4 and not one_call:
            some["causal"] = False
        for name in ("starts", "ends"):
            if r.random() < 0.15 and not one_call:
                drawn = [r.choice([0, n, r.randint(0, n)]) for n in self.lengths.tolist()]
                some[name] = torch.tensor(drawn, dtype=torch.int32)
        return some

    def attend(self, q: Tensor, ragged: dict[str, Any], options: dict[str, Any], fresh: Any, wide: bool) -> None:
        """Attends with one schedule or with all, and perhaps in two parts."""
        d, r, table, made, merged = self.d, self.r, self.table.clone(), {}, {}
        if r.random() < 0.2 and not d.awkward:  # sequences share full pages, whatever they hold
            full = [max(0, n - self.hidden) // self.plan.page_tokens for n in self.lengths.tolist()]
            pool = [page for b, n in enumerate(full) for page in self.table[b, :n].tolist()]
            for b, n in enumerate(full):
                table[b, :n] = torch.tensor(r.choices(pool, k=n) if n else [], dtype=torch.int32)
        shared = {"block_table": table, "lengths": self.lengths, **ragged, **self.fixed, **options}
        shared |= {"window": r.randint(0, d.slots)} if d.slots else {}
        way = f"hopper-{r.randrange(18)}" if r.random() < 0.4 else ""  # perhaps not the cheapest
        way = way if self.has_ways else ""
        for kind in ["line", "none", "equal"] if r.random() < 0.4 else [r.choice(["line", "none", "equal"])]:
            results = {}
            for w, state in self.state.items():
                given, queries = on(w, shared) | state | fresh[w], laid(w, q, wide)
                os.environ.update({PATH: way} if way else {})
                try:
                    name = self.kernel(w, queries, given, kind)
                except RuntimeError as error:
                    if "has a way N" not in str(error):
                        raise
                    del os.environ[PATH]  # the call has fewer ways
                    name = self.kernel(w, queries, given, kind)
                results[w] = self.guarded(w, queries, given, ragged)
            if way:
                os.environ.pop(PATH, None)
            counts[name] += 1
            self.check_attention(name, q, options, results)
            made[kind] = results[self.device]
        if "none" in made and "line" in made:
            assert all(torch.equal(x, y) for x, y in zip(made["line"], made["none"])), f"{name}: a schedule changes it"
        if not fresh["cpu"] and not {"starts", "ends"} & set(options) and r.random() < 0.4:
            cut = torch.tensor([r.randint(0, n) for n in self.lengths.tolist()], dtype=torch.int32)
            for w, state in self.state.items():
                parts = [
                    tq.attend(self.words, q.to(w), **on(w, {**shared, x: cut}), **state) for x in ("ends", "starts")
                ]
                merged[w] = tq.merge(*(torch.stack(x) for x in zip(*parts)))
            counts["merge"] += 1
            self.check_attention("merge", q, options, merged, times=2)
            merged["cpu"] = tuple(x.cpu() for x in made[kind])  # the whole, by the device
            self.check_attention("merge", q, options, merged, times=3)

    def kernel(self, where: str, q: Tensor, given: dict[str, Any], kind: str) -> str:
        """Gives the call a schedule, and returns the name of the kernel."""
        if kind != "none":
            given["schedule"] = self.schedule(where, q, given, kind)
        return str(tq.attend_kernel(self.words, q, **given))

    def schedule(self, where: str, q: Tensor, given: dict[str, Any], kind: str) -> Tensor:
        rows = ops.schedule_rows(self.batch, torch.device(where)) if kind == "line" else 0
        table = torch.zeros((rows, 4), dtype=torch.int32, device=where)
        names = {argument.name for argument in tq.schedule.default._schema.arguments} - {"plan", "q", "sinks", "window"}
        exact = {"sinks": self.d.sinks, "window": given.get("window", self.d.window)}
        if kind == "line":
            tq.schedule(self.words, table, q, **exact, **{name: given[name] for name in names if name in given})
        return table

    def guarded(self, where: str, q: Tensor, given: dict[str, Any], ragged: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Attends into the middle of larger tensors. Nothing else may change."""
        lead = q.shape[:1] if not ragged else ()
        (heads, tokens), dim = (q.shape[-3:-1] if lead else (q.shape[1], q.shape[0])), q.shape[-1]
        room = torch.full((*lead, tokens + 2, heads, dim + 8), 7.0, dtype=q.dtype, device=where)
        lses = torch.full((*lead, tokens + 2, heads), 7.0, device=where)
        out, lse = room[..., 1:-1, :, :dim], lses[..., 1:-1, :]
        out, lse = (out.transpose(1, 2), lse.transpose(1, 2)) if lead else (out, lse)
        size = tq.attend_workspace(self.words, q, **given)
        space = torch.full((size + 512,), 0xA5, dtype=torch.uint8, device=where)
        kept = {name: x.clone() for name, x in (given | {"pages": self.buffer[where]}).items() if isinstance(x, Tensor)}
        tq.attend.out(self.words, q, **given, out=out, lse=lse, workspace=space[256 : 256 + size])
        for name, x in kept.items():
            y = self.buffer[where] if name == "pages" else given[name]
            assert torch.equal(x.nan_to_num(5.0), y.nan_to_num(5.0)), f"attend: {where} wrote {name}"
        result = out.clone(), lse.clone()
        if ragged:  # rows of no sequence
            assert (out[-2:] == 7).all() and (lse[-2:] == 7).all(), f"attend: {where} wrote a row of no sequence"
            result[0][-2:], result[1][-2:] = 0, -torch.inf
        out.fill_(7.0), lse.fill_(7.0)
        assert (room == 7).all() and (lses == 7).all(), f"attend: {where} wrote beside out or lse"
        assert (space[:256] == 0xA5).all() and (space[256 + size :] == 0xA5).all(), (
            f"attend: {where} left its workspace"
        )
        return result

    def check_attention(self, name: str, q: Tensor, options: dict[str, Any], results: Results, times: int = 1) -> None:
        """Compares with the CPU, rows relative to the longest of their sequence and KV head (turboquant_cuda.h)."""
        (want, want_lse), (out, lse) = ([x.cpu().float() for x in results[w]] for w in ("cpu", self.device))
        seen, rounding, half = ~want_lse.isneginf(), ROUNDING[self.d.dtype], self.d.dtype != "float32"
        assert want_lse[seen].isfinite().all() and want.isfinite().all(), f"{name}: the CPU's are not finite"
        assert torch.equal(seen, ~lse.isneginf()) and lse[seen].isfinite().all(), f"{name}: lse is not finite"
        assert out.isfinite().all() and not out[~seen].any(), (
            f"{name}: out is not finite, or not 0 where nothing is seen"
        )
        scale = options.get("softmax_scale", self.plan.head_dim**-0.5)
        product = scale * float(q.nan_to_num().float().norm(dim=-1).max()) * self.longest_key
        product *= 1 if self.plan.metric is None else 2  # it lengthens keys or queries
        if self.plan.codebook.name == "UNIFORM" and len({*self.plan.key_bits} - {0}) > 1:
            product *= 1.5  # steps differ, and the largest one decides how queries are rounded: turboquant_cuda.h
        accuracy, wave = 2e-4, self.plan.wave_pairs > 0  # a centre that is no mean cancels: turboquant.h
        if self.plan.is_plain:
            accuracy = 1e-3 * max(1.0, product * self.plan.head_dim**-0.5) + 2e-7 * options.get("softcap", 0.0)
            accuracy += (1e-3 if half else 2e-5) + ((1e-2 if wave else 4e-3) if "chunk" in name else 0)
        bound = accuracy * want_lse[seen].abs() + max(2 * accuracy, 2e-5 * product)
        limit("lse", (lse - want_lse)[seen].abs(), times * bound)
        size = want.norm(dim=-1)
        heads = size.unflatten(1, (self.d.kv_heads, self.d.group))
        largest = heads.amax((2, 3) if q.dim() == 4 else 2, keepdim=True).expand_as(heads).flatten(1, 2)
        bound = accuracy * largest + 2 * rounding * size + 1e-6 * self.plan.head_dim**0.5
        kind = "chunk" if "chunk" in name else "attend" if self.plan.is_plain else "attend_baseline"
        limit(f"{kind}, {self.d.dtype}", (out - want).norm(dim=-1), times * bound)

    def decode(self) -> None:
        """Compares `dequantize`, `recode` and `rotate`."""
        d, plan, r, found = self.d, self.plan, self.r, []
        packed = (self.lengths - self.hidden).clamp(min=0)
        given: dict[str, Any] = {"block_table": self.table, "lengths": packed, **self.transforms}
        given |= {name: x for name, x in self.fixed.items() if name == "position_offset"}
        given |= {"max_tokens": int(packed.max()), "sinks": 0 if self.by_index else d.sinks}
        for dtype in [torch.float32] + [self.type] * (not d.awkward):  # the largest numbers may decode to infinity
            found = [tq.dequantize(self.words, s["pages"], dtype=dtype, **on(w, given)) for w, s in self.state.items()]
            accuracy = 1e-4 if dtype == torch.float32 else 4e-3 + 2 * ROUNDING[d.dtype]
            for want, got in zip(*found):
                want, got = want.float(), got.cpu().float()
                assert got.isfinite().all(), "dequantize: not finite"
                size = want.norm(dim=-1)
                size = size.amax(-1, keepdim=True).expand_as(size) if size.numel() else size
                limit(f"dequantize, {dtype}", (got - want).norm(dim=-1), accuracy * size + 1e-6)
        widths = plan.key_bits, plan.value_bits
        if (
            plan.is_plain
            and plan.group == 32
            and plan.scale.name == "EDEN"
            and max(sum(widths, ())) <= 6
            and not d.fill
        ):
            bits = [tuple(b and r.randint(1, b) for b in side) for side in widths]
            key, value = (Side(b, plan.key.rotation) for b in bits)
            target = replace(plan, key=key, value=value, variance_term=False)
            recoded = [tq.recode(self.words, x["pages"].contiguous(), target.words).cpu() for x in self.state.values()]
            assert torch.equal(*recoded), "recode differs"
            counts["recode"] += 1
        matrix = None
        if plan.key.rotation.name == "DENSE":
            matrix = self.fixed["rotation"][0, : plan.head_dim].contiguous()
        given = {"x": self.random(3, 5, plan.head_dim).transpose(0, 1), "matrix": matrix, "inverse": r.random() < 0.5}
        want, got = (tq.rotate(self.words, **on(w, given)).cpu().float() for w in self.state)
        limit("rotate", (got - want).norm(dim=-1), (1e-5 + 2 * ROUNDING[d.dtype]) * want.norm(dim=-1))


def run(seed: int, device: str) -> None:
    """Runs one seed. An error says what was drawn."""
    d = draw(seed)
    try:
        if device == "cuda" and (d.path == "portable" or torch.cuda.get_device_capability()[0] == 9):
            os.environ.update({PATH: d.path} if d.path else {})
        Sequence(d, device).run()
    except Exception as error:
        where = " ".join(str(x.lineno) for x in traceback.extract_tb(error.__traceback__) if x.filename == __file__)
        raise AssertionError(f"seed {seed}: {error} [{type(error).__name__}, lines {where}] in {d}") from error
    finally:
        os.environ.pop(PATH, None)
    said = f"head_dim {d.plan.head_dim}", f"group {d.plan.group}", f"pages of {d.plan.page_tokens}", d.dtype
    counts.update([*said, "plain" if d.plan.is_plain else "not plain", "ragged" if d.ragged else "not ragged"])


def sweep(first: int, seconds: int, device: str) -> None:
    """Runs four seeds, or as many as there is time for, and shows all that failed."""
    failed, end, seed, threads = [], time.monotonic() + seconds, first, torch.get_num_threads()
    torch.set_num_threads(1)
    while (time.monotonic() < end if seconds else seed < first + 4) and len(failed) < 20:
        try:
            run(seed, device)
        except AssertionError as error:
            failed.append(str(error))
            if "CUDA error" in str(error):  # then every call fails
                break
        seed += 1
    torch.set_num_threads(threads)
    said = json.dumps({"seeds": seed - first, "worst": worst, "counts": dict(sorted(counts.items()))}, indent=1)
    print(said)
    if folder := os.environ.get("TURBOQUANT_SWEEP_COUNTS"):
        (Path(folder) / f"{first}.json").write_text(said)
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_calls(shard: int, device: str) -> None:
    sweep(BASE + 1_000_000 * shard, SECONDS, device)


if __name__ == "__main__":  # a seed, and perhaps a device: "cpu:0" compares the CPU with itself
    run(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cuda")
