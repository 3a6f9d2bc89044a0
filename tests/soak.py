"""Random operations on caches, checked against a slow model: no token is lost or doubled, no page is lost.

The model of a cache is a list of token numbers for each sequence. A token's key and value come from a table. A token is
encoded without looking at others, so what it decodes to comes from a second table. Sinks and window must hold the rows
of the first table exactly, and packed tokens must decode to those of the second, bit for bit and in order.

    python tests/soak.py --minutes 30 --seed 7       make soak; tests/test_soak.py is a short form

After each round it runs every other property test of the suite, with more examples and another seed each time.
"""

from __future__ import annotations

import argparse
import copy
import pickle
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import count
from pathlib import Path

import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from specs import bare
from streams import CONFIG, check, forward

from turboquant import CacheSpec, TurboQuantCache

HERE = Path(__file__).resolve().parent
TOKENS, HEADS, DIM, LAYERS = 512, 1, 8, 2
SPECS = [
    bare(2, 3, prefill="packed"),
    bare(3, 3, prefill="packed", sinks=3, window=20),
    bare(4, 1, prefill="packed", sinks=1, window=150),
    bare(1, 1, prefill="packed", overrides={1: {"window": 9, "key_bits": 5}}),
]
done: Counter[str] = Counter()  # operations, by name


def table() -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    shape = (LAYERS, TOKENS, HEADS, DIM)
    return torch.randn(shape, generator=make), torch.randn(shape, generator=make)


KEYS, VALUES = table()


def decoded(spec: CacheSpec) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each layer, what the keys and the values of the table decode to, each [TOKENS, HEADS, DIM]."""
    from turboquant.ops import dequantize, pack

    out = []
    for i in range(LAYERS):
        plan = spec.for_layer(i, LAYERS).plan(DIM)
        k, v = (x[i].transpose(0, 1).unsqueeze(0).contiguous() for x in (KEYS, VALUES))
        both = dequantize(pack(k, v, plan))
        out.append(tuple(x[0].transpose(0, 1) for x in both))
    return out


DECODED = {spec: decoded(spec) for spec in SPECS}


class Lives(RuleBasedStateMachine):
    """Up to four caches, of which some are forks or copies of others, and what each should hold."""

    @initialize(spec=st.sampled_from(SPECS), sliding=st.sampled_from([0, 0, 140]), batch=st.integers(1, 3),
                pads=st.lists(st.integers(0, 30), min_size=3, max_size=3), tokens=st.integers(31, 400))  # fmt: skip
    def begin(self, spec: CacheSpec, sliding: int, batch: int, pads: list[int], tokens: int) -> None:
        self.spec, self.sliding, self.random = spec, sliding, random.Random(tokens)
        cache = TurboQuantCache(CONFIG, spec)
        self.caches: list[tuple[TurboQuantCache, list[list[int]], int]] = [(cache, [[] for _ in range(batch)], 0)]
        self.feed(0, tokens, pads[:batch])

    def feed(self, which: int, tokens: int, pads: list[int] | None = None) -> None:
        cache, texts, positions = self.caches[which]
        new = torch.tensor([[self.random.randrange(TOKENS) for _ in range(tokens)] for _ in texts])
        k, v = (x[:, new].transpose(2, 3) for x in (KEYS, VALUES))
        q = torch.zeros(LAYERS, len(texts), 2 * HEADS, tokens, DIM)
        mask = torch.arange(tokens)[None] >= torch.tensor(pads)[:, None] if pads else None
        out = forward(cache, [(q[i], k[i], v[i]) for i in range(LAYERS)], mask, local_size=self.sliding or None)
        assert torch.isfinite(out).all()
        for b, text in enumerate(texts):
            text += new[b].tolist()[pads[b] if pads else 0 :]
        self.caches[which] = cache, texts, positions + tokens

    def pick(self, n: int) -> int:
        return n % len(self.caches)

    @rule(n=st.integers(0, 3), tokens=st.sampled_from([2, 7, 31, 128, 129, 260]))
    def chunk(self, n: int, tokens: int) -> None:
        self.append(n, tokens)

    @rule(n=st.integers(0, 3), steps=st.integers(1, 12))
    def decode(self, n: int, steps: int) -> None:
        for _ in range(steps):
            self.append(n, 1)

    @rule(tokens=st.integers(1, 3))
    def all_of_them(self, tokens: int) -> None:
        for n in range(len(self.caches)):
            self.append(n, tokens)

    def append(self, n: int, tokens: int) -> None:
        done["append"] += 1
        which = self.pick(n)
        if not self.caches[which][2]:
            self.feed(which, max(tokens, 4), [self.random.randrange(4) for _ in self.caches[which][1]])
        elif self.caches[which][2] < 1500:
            self.feed(which, tokens)

    @rule(n=st.integers(0, 3))
    def record(self, n: int) -> None:
        done["record"] += 1
        self.caches[self.pick(n)][0].activate_past_recording()

    @rule(n=st.integers(0, 3), back=st.sampled_from([0, 1, 2, 5, 30, 127, 300]))
    def crop(self, n: int, back: int) -> None:
        done["crop"] += 1
        which = self.pick(n)
        cache, texts, positions = self.caches[which]
        if back >= positions - 30:
            return
        try:
            cache.crop(-back)
        except NotImplementedError:
            done["crop refused"] += 1
            return
        self.caches[which] = cache, [text[: len(text) - back] for text in texts], positions - back

    @rule(n=st.integers(0, 3), order=st.lists(st.integers(0, 5), min_size=1, max_size=5))
    def reorder(self, n: int, order: list[int]) -> None:
        done["reorder"] += 1
        which = self.pick(n)
        cache, texts, positions = self.caches[which]
        order = [b % len(texts) for b in order]
        cache.reorder_cache(torch.tensor(order))
        self.caches[which] = cache, [list(texts[b]) for b in order], positions

    @precondition(lambda self: len(self.caches) < 4)
    @rule(n=st.integers(0, 3), tokens=st.integers(0, 3))
    def fork(self, n: int, tokens: int) -> None:
        source = self.pick(n)
        self.copied(source, "fork")
        for which in (source, len(self.caches) - 1) if tokens else ():
            self.append(which, tokens)  # so that fork and source no longer share the last page

    @precondition(lambda self: len(self.caches) < 4)
    @rule(n=st.integers(0, 3), how=st.sampled_from(["deepcopy", "pickle", "file"]))
    def copy(self, n: int, how: str) -> None:
        self.copied(n, how)

    def copied(self, n: int, how: str) -> None:
        done[how] += 1
        cache, texts, positions = self.caches[self.pick(n)]
        if how == "fork":
            other = cache.fork()
        elif how == "deepcopy":
            other = copy.deepcopy(cache)
        elif how == "pickle":
            other = pickle.loads(pickle.dumps(cache))
        else:
            with tempfile.TemporaryDirectory() as folder:
                cache.save(Path(folder) / "c")
                other = TurboQuantCache.load(Path(folder) / "c", CONFIG)
        self.caches.append((other, copy.deepcopy(texts), positions))

    @rule(n=st.integers(0, 3))
    def offload(self, n: int) -> None:
        done["offload"] += 1
        for layer in self.caches[self.pick(n)][0].layers:
            layer.offload()

    @rule(n=st.integers(0, 3))
    def reset(self, n: int) -> None:
        done["reset"] += 1
        which = self.pick(n)
        cache, texts, _ = self.caches[which]
        cache.reset()
        self.caches[which] = cache, [[] for _ in texts], 0

    @precondition(lambda self: len(self.caches) > 1)
    @rule(n=st.integers(0, 3))
    def drop(self, n: int) -> None:
        done["drop"] += 1
        del self.caches[self.pick(n)]

    @rule(n=st.integers(0, 3))
    def bad_number(self, n: int) -> None:
        """A forward that is refused in its first layer changes nothing."""
        done["bad number"] += 1
        cache, texts, positions = self.caches[self.pick(n)]
        if positions:
            k = torch.full((len(texts), HEADS, 3, DIM), float("nan"))
            q = torch.zeros(len(texts), 2 * HEADS, 3, DIM)
            try:
                forward(cache, [(q, k, k)] * LAYERS, local_size=self.sliding or None)
            except ValueError:
                return
            raise AssertionError("a NaN was stored")

    def teardown(self) -> None:
        for which in range(len(getattr(self, "caches", []))):
            self.verify(which)

    @rule(n=st.integers(0, 3))
    def look(self, n: int) -> None:
        done["look"] += 1
        self.verify(self.pick(n))

    def verify(self, which: int) -> None:
        check(*(cache for cache, _, _ in self.caches))
        cache, texts, positions = self.caches[which]
        assert cache.get_seq_length() == positions
        for i, layer in enumerate(cache.layers):
            if positions:
                self.verify_layer(i, layer.storage, texts)

    def verify_layer(self, i: int, stored: object, texts: list[list[int]]) -> None:
        sinks, window = stored.spec.sinks, stored.spec.window
        packed = [max(0, len(text) - sinks - window) for text in texts]
        counts = torch.tensor(packed, dtype=torch.int32)
        k, v = (
            torch.ops.turboquant.dequantize(stored.plan.words, stored.pages, stored.block_table, counts, max(packed))
            if max(packed)
            else (None, None)
        )
        for b, text in enumerate(texts):
            row = stored.table.rows[b]
            gone = row.count(-1) * 128
            assert row[: gone // 128] == [-1] * (gone // 128) and len(row) == -(-packed[b] // 128)
            assert not gone or gone + sinks <= len(text) - self.sliding
            for held, whole in ((k, DECODED[self.spec][i][0]), (v, DECODED[self.spec][i][1])):
                if packed[b]:
                    want = whole[torch.tensor(text[sinks + gone : sinks + packed[b]], dtype=torch.int64)]
                    assert torch.equal(held[b, :, gone : packed[b]].transpose(0, 1), want)
            for name, whole in (("k", KEYS[i]), ("v", VALUES[i])):
                for p in range(min(sinks, len(text))):
                    assert torch.equal(getattr(stored, f"sink_{name}")[b, :, p], whole[text[p]])
                ring = getattr(stored, f"window_{name}")  # has fewer rows than the window until it is full
                for p in range(max(sinks, len(text) - window), len(text)):
                    assert torch.equal(ring[b, :, p % ring.shape[2]], whole[text[p]])


def soak(minutes: float, first: int, examples: int = 100, steps: int = 80) -> Counter[str]:
    """Runs rounds of random operations and of all property tests, each with the next seed, until the time is over. A
    failure ends it and shows the smallest example; `--seed` with the last seed printed repeats that round."""
    end = time.monotonic() + 60 * minutes
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    how = settings(max_examples=examples, stateful_step_count=steps, deadline=None, database=None, derandomize=False,
                   suppress_health_check=checks)  # fmt: skip
    properties = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis", "--hypothesis-profile=explore",
                  f"--ignore={HERE / 'test_soak.py'}", str(HERE)]  # fmt: skip
    for number in count(first):
        print(f"seed {number}", flush=True)
        run_state_machine_as_test(seed(number)(Lives), settings=how)
        print(f"{sum(done.values()):,} operations: {dict(done)}", flush=True)
        if time.monotonic() < end:
            subprocess.run([*properties, f"--hypothesis-seed={number}"], check=True)
        if time.monotonic() >= end:
            return done
    raise AssertionError


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, help="of the first round; by chance unless given")
    arguments = parser.parse_args()
    soak(arguments.minutes, secrets.randbelow(2**31) if arguments.seed is None else arguments.seed)
