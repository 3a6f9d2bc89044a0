"""The typed functions of turboquant.ops equal the operators, bit for bit, in eager mode and compiled."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from threading import Barrier, Thread
from typing import Any

import forks
import numpy as np
import pytest
from conftest import ROOT

torch = pytest.importorskip("torch", reason="torch is not installed")
import ops_cases  # noqa: E402
from ops_cases import DEVICES, tq  # noqa: E402

from turboquant import Plan, ops  # noqa: E402

PLAN, DENSE, KEYS_ONLY = (Plan.from_words(p.words) for p in (ops_cases.PLAN, ops_cases.DENSE, ops_cases.KEYS_ONLY))

Pair = tuple[Any, Any, Any, Any]


def draw(rng: np.random.Generator, device: str, tokens: int = 140) -> Pair:
    """q of the last token, k, v and a centre."""
    k, v = (torch.from_numpy(rng.standard_normal((2, 3, tokens, 64)).astype(np.float32)).to(device) for _ in range(2))
    return torch.cat([k[:, :, -1:], v[:, :, -1:]], 1).contiguous(), k, v, k.mean((0, 2))


def raw(op: str, *args: Any, packed: Any, **kwargs: Any) -> Any:
    """Calls an operator with the tensors of a PackedKV."""
    names = {a.name for a in getattr(tq, op).default._schema.arguments}
    held = {n: getattr(packed, n) for n in ("pages", "block_table", "lengths") if n in names}
    held["plan"] = packed.plan.words
    return getattr(tq, op)(**dict(zip(("q", "k", "v"), args)), **held, **packed.transforms, **kwargs)


@pytest.mark.parametrize("device", DEVICES)
def test_schedules(device: str, rng: np.random.Generator) -> None:
    q, k, v, _ = draw(rng, device)
    packed = ops.pack(k, v, PLAN)
    want = ops.attend(q, packed)
    made = ops.schedule(q, packed)
    assert torch.equal(ops.attend(q, packed, schedule=made), want)
    packed.lengths.copy_(torch.tensor([140, 60]))
    again = ops.schedule(q, packed, lengths=[140, 60], out=made)
    assert again.table.data_ptr() == made.table.data_ptr() and len(again.table)
    assert torch.equal(ops.attend(q, packed, schedule=again), ops.attend(q, packed))
    made.table.fill_(-1)
    packed.lengths.copy_(torch.tensor([140, 130]))
    again = ops.schedule(q, packed, lengths=[140, 130], out=made)
    assert again is made and (device == "cpu" or int(made.table[0, 0]) >= 0)  # written, though they are about equal
    assert torch.equal(ops.attend(q, packed, schedule=made), ops.attend(q, packed))
    equal = ops.schedule(q, packed, lengths=[140, 123])
    assert len(equal.table) == 0 and len(ops.schedule(q, packed, lengths=[140, 60], out=equal).table) > 0
    assert len(ops.schedule(q, packed, lengths=[140, 122]).table) > 0
    with pytest.raises(ValueError, match="`schedule`"):
        ops.attend(q, packed, schedule=ops.Schedule(made.table[:, :2].contiguous()))


@pytest.mark.parametrize("device", DEVICES)
def test_pack_and_attend(device: str, rng: np.random.Generator) -> None:
    q, k, v, centre = draw(rng, device)
    packed = ops.pack(k, v, PLAN, transforms={"key_numbers": centre})
    assert torch.equal(packed.pages, tq.quantize(k=k, v=v, plan=PLAN.words, key_numbers=centre))
    assert packed.lengths.tolist() == [140, 140] and packed.plan == PLAN
    assert torch.equal(packed.pages, ops.quantize(PLAN, k, v, transforms={"key_numbers": centre}))
    out = ops.attend(q, packed)
    options: dict[str, Any] = dict(starts=packed.lengths - 100, softmax_scale=0.1, sliding_window=60,
                                   softcap=20.0)  # fmt: skip
    for given in ({}, {"causal": False}, options):
        got, expected = ops.attend(q, packed, **given, return_lse=True), raw("attend", q, packed=packed, **given)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.equal(ops.attend(q, packed, return_lse=True)[0], out)
    kept = ops.dequantize(packed)
    for got, x in zip(kept, (k, v), strict=True):
        assert got.shape == x.shape and float((got - x).square().mean()) < 0.05
    expected = torch.nn.functional.scaled_dot_product_attention(q, *kept, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_appending_is_packing(device: str, rng: np.random.Generator) -> None:
    q, k, v, centre = draw(rng, device)
    whole = ops.pack(k, v, PLAN, max_tokens=300, transforms={"key_numbers": centre})
    packed = ops.pack(k[:, :, :3], v[:, :, :3], PLAN, max_tokens=300, transforms={"key_numbers": centre})
    assert len(packed) == 3 and packed.capacity == 384 and packed.pages.shape[0] == 6
    ops.append(packed, k[:, :, 3:-1], v[:, :, 3:-1])
    out = ops.append_attend(q, k[:, :, -1:], v[:, :, -1:], packed)
    assert len(packed) == 140 and packed.lengths.tolist() == [140, 140]
    assert torch.equal(packed.pages, whole.pages) and torch.equal(out, ops.attend(q, whole))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sinks, window", [(4, 32), (4, 0), (0, 32), (100, 100)])
def test_sinks_and_window(sinks: int, window: int, device: str, rng: np.random.Generator) -> None:
    """The operators give the same with the same tensors. Sinks and window hold their tokens exactly."""
    q, k, v, centre = draw(rng, device)
    packed = ops.pack(
        k[:, :, :40], v[:, :, :40], PLAN, max_tokens=300, sinks=sinks, window=window, transforms={"key_numbers": centre}
    )
    assert (packed.sinks, packed.window) == (sinks, window) and packed.nbytes > packed.pages.nbytes
    assert packed.capacity == sinks + window + 128 * -(-(300 - sinks - window) // 128)
    ops.append(packed, k[:, :, 40:130], v[:, :, 40:130])
    held = raw_cache(packed)
    out, lse = ops.append_attend(q, k[:, :, 130:131], v[:, :, 130:131], packed), ops.attend(q, packed, return_lse=True)
    assert torch.equal(out, lse[0])
    lengths = torch.full((2,), 131, dtype=torch.int32, device=device)
    one = {"k": k[:, :, 130:131], "v": v[:, :, 130:131]}
    want = tq.append_attend(PLAN.words, q, lengths=lengths, **one, **held, key_numbers=centre)
    assert torch.equal(out, want) and all(torch.equal(held[name], getattr(packed, name)) for name in held)
    q9 = torch.from_numpy(rng.standard_normal((2, 6, 9, 64)).astype(np.float32)).to(device)
    ops.append_attend(q9, k[:, :, 131:], v[:, :, 131:], packed)
    for got, x in zip(ops.dequantize(packed), (k, v), strict=True):
        assert got.shape == x.shape and float((got - x).square().mean()) < 0.05
        assert torch.equal(got[:, :, :sinks], x[:, :, :sinks])
        assert torch.equal(got[:, :, 140 - window :], x[:, :, 140 - window :])
    out, lse = ops.attend(q, packed, return_lse=True)
    keys, values = (x.double().repeat_interleave(2, 1) for x in ops.dequantize(packed))
    logits = (q.double() @ keys.transpose(2, 3)) / 8
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), rtol=0, atol=2e-3)
    torch.testing.assert_close(out.double(), logits.softmax(-1) @ values, rtol=1e-3, atol=2e-3)
    assert ops.attend_kernel(q, packed)
    assert torch.equal(ops.attend(q, packed, schedule=ops.schedule(q, packed)), out)


def raw_cache(packed: Any) -> dict[str, Any]:
    """Returns copies of the block table and of the tensors that `append` writes to, without those that are None."""
    names = ("pages", "block_table", "sink_k", "sink_v", "window_k", "window_v")
    return {name: held.clone() for name in names if (held := getattr(packed, name)) is not None}


def test_tokens_of_shorter_sequences(rng: np.random.Generator) -> None:
    """`dequantize` puts the tokens of each sequence in order, whatever its length, and zeros behind them."""
    _, k, v, _ = draw(rng, "cpu")
    packed = ops.pack(k, v, Plan(64, 8, 8), sinks=4, window=32)
    for lengths in ([140, 3], [140, 20], [140, 90]):
        packed.lengths.copy_(torch.tensor(lengths))
        packed.pages.zero_(), packed.window_k.zero_(), packed.window_v.zero_()
        short = torch.cat([torch.zeros_like(k), k], 2)
        for b, n in enumerate(lengths):
            short[b, :, -140:] = 0
            short[b, :, 280 - n :] = k[b, :, :n]
        tq.append(packed.plan.words, short, short, packed.lengths, packed.pages, packed.block_table,
                  **packed.arguments())  # fmt: skip
        for got in ops.dequantize(packed):
            for b, n in enumerate(lengths):
                torch.testing.assert_close(got[b, :, :n], k[b, :, :n], rtol=0, atol=0.1)
                assert not got[b, :, n:].any()


def test_keys_alone_with_a_window(rng: np.random.Generator) -> None:
    _, k, _, _ = draw(rng, "cpu")
    packed = ops.pack(k, None, KEYS_ONLY, sinks=4, window=32)
    assert packed.sink_v is None and packed.window_v is None
    got, none = ops.dequantize(packed)
    assert got.shape == k.shape and none.shape == (2, 3, 0, 64)
    assert torch.equal(got[:, :, :4], k[:, :, :4]) and torch.equal(got[:, :, 108:], k[:, :, 108:])


def test_what_it_says_of_itself(rng: np.random.Generator) -> None:
    _, k, v, centre = draw(rng, "cpu")
    packed = ops.pack(k, v, bits=4, transforms={"key_numbers": centre})
    assert packed.nbytes == packed.pages.nbytes + 2 * 2 * 4 + 2 * 4 + centre.nbytes
    assert repr(packed) == (
        "PackedKV(batch=2, kv_heads=3, tokens=140, capacity=256, sinks=0, window=0, head_dim=64, key_bits=4, "
        f"value_bits=4, nbytes={packed.nbytes}, device='cpu')"
    )
    exact = ops.pack(k, v, bits=4, sinks=4, window=32)
    assert exact.nbytes == exact.pages.nbytes + 2 * 4 + 2 * 4 + 2 * 2 * 3 * 36 * 64 * 4
    assert "capacity=164, sinks=4, window=32, " in repr(exact)
    assert "key_bits=(2, 4)" in repr(ops.pack(k, v, Plan(64, (2, 4), 4)))
    keys = ops.pack(k, None, bits=3)
    assert len(keys) == 140 and ops.dequantize(keys)[1].shape == (2, 3, 0, 64)
    assert ops.pack(k, None, KEYS_ONLY).plan == KEYS_ONLY


def test_rotate_and_merge(rng: np.random.Generator) -> None:
    q, k, v, _ = draw(rng, "cpu")
    assert torch.equal(ops.rotate(PLAN, k), tq.rotate(x=k, plan=PLAN.words))
    matrix = torch.linalg.qr(torch.randn(40, 40))[0].contiguous()
    x = ops.rotate(DENSE, ops.rotate(DENSE, k[..., :40], matrix), matrix, inverse=True)
    torch.testing.assert_close(x, k[..., :40].contiguous(), rtol=0, atol=1e-5)
    halves = [ops.attend(q, ops.pack(k[:, :, a:b], v[:, :, a:b], PLAN), causal=False, return_lse=True)
              for a, b in ((0, 128), (128, 140))]  # fmt: skip
    out, lse = ops.merge(*(torch.stack(x) for x in zip(*halves)))
    whole = ops.attend(q, ops.pack(k, v, PLAN), return_lse=True)
    for got, expected in zip((out, lse), whole):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sinks, window", [(0, 0), (4, 16)])
def test_compiled_steps(sinks: int, window: int, device: str, rng: np.random.Generator) -> None:
    """The step is one graph, compiled at most twice: then the number of tokens is symbolic."""
    torch._dynamo.reset()
    q, k, v, centre = draw(rng, device)
    packed, compiled = (ops.pack(k[:, :, :100], v[:, :, :100], PLAN, max_tokens=140, sinks=sinks, window=window,
                                 transforms={"key_numbers": centre}) for _ in range(2))  # fmt: skip
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def step(packed: Any, k: Any, v: Any) -> tuple[Any, ...]:
        ops.append(packed, k, v)
        out, lse = ops.attend(q, packed, return_lse=True)
        return ops.rotate(packed.plan, out), lse, ops.append_attend(q, k, v, packed), *ops.dequantize(packed)

    run = torch.compile(step, fullgraph=True, backend=count)
    with torch.no_grad():
        for i in range(100, 106):
            one = k[:, :, i : i + 1], v[:, :, i : i + 1]
            for got, expected in zip(run(compiled, *one), step(packed, *one), strict=True):
                assert torch.equal(got, expected)
    assert len(compiled) == len(packed) == 112 and torch.equal(compiled.lengths, packed.lengths)
    assert torch.equal(compiled.pages, packed.pages) and len(graphs) <= 2


@pytest.mark.parametrize("device", DEVICES)
def test_packed_in_inference_mode(device: str, rng: np.random.Generator) -> None:
    """What was packed in either mode can be appended to in both."""
    q, k, v, _ = draw(rng, device)
    whole = ops.pack(k, v, PLAN)
    for inference in (True, False):
        with torch.inference_mode(inference):
            packed = ops.pack(k[:, :, :100], v[:, :, :100], PLAN, max_tokens=140)
        ops.append(packed, k[:, :, 100:120], v[:, :, 100:120])
        with torch.inference_mode(not inference):
            ops.append(packed, k[:, :, 120:130], v[:, :, 120:130])
        ops.append_attend(q.expand(-1, -1, 10, -1), k[:, :, 130:], v[:, :, 130:], packed)
        assert len(packed) == 140 and packed.lengths.tolist() == [140, 140]
        assert torch.equal(packed.pages, whole.pages) and torch.equal(ops.attend(q, packed), ops.attend(q, whole))


def inference_copy(x: Any) -> Any:
    with torch.inference_mode():
        return x.clone()


REFUSED: dict[str, tuple[type[Exception], Any, str]] = {
    "a plan's name": (TypeError, lambda k, p: ops.pack(k, k, "default"), "plan"),
    "a plan of a number": (TypeError, lambda k, p: ops.pack(k, k, 4), "plan"),
    "the words of a plan": (TypeError, lambda k, p: ops.pack(k, k, PLAN.words), "must be a turboquant.Plan"),
    "three dimensions": (
        ValueError,
        lambda k, p: ops.pack(k[0], k[0], PLAN),
        "pack: `k` must be [batch, kv_heads, tokens, head_dim], got (3, 140, 64)",
    ),
    "neither": (TypeError, lambda k, p: ops.pack(k, k), "pack: `plan` must be given, or else `bits`, got neither"),
    "both": (TypeError, lambda k, p: ops.pack(k, k, p.plan, bits=4), "must be given, or else `bits`, got both"),
    "9 bits": (ValueError, lambda k, p: ops.pack(k, k, bits=9), "pack: `bits` must be in 0..6 or 8"),
    "bits in words": (TypeError, lambda k, p: ops.pack(k, k, bits="4"), "pack: `bits` must be "),
    "an array": (TypeError, lambda k, p: ops.pack(k.numpy(), k, bits=4), "pack: `k` must be a tensor, got ndarray"),
    "a list": (TypeError, lambda k, p: ops.attend([1.0], p), "attend: `q` must be a tensor, got list"),
    "a cap in words": (
        TypeError,
        lambda k, p: ops.attend(k, p, softcap="20"),
        "attend: `softcap` must be a number, got str",
    ),
    "a scale that is a flag": (
        TypeError,
        lambda k, p: ops.attend(k, p, softmax_scale=True),
        "must be a number or None",
    ),
    "half a window": (
        TypeError,
        lambda k, p: ops.attend(k, p, sliding_window=1.5),
        "`sliding_window` must be an integer",
    ),
    "causal, perhaps": (TypeError, lambda k, p: ops.attend(k, p, causal=1), "`causal` must be True or False, got int"),
    "starts as a list": (
        TypeError,
        lambda k, p: ops.attend(k, p, starts=[0]),
        "`starts` must be a tensor or None, got list",
    ),
    "a table": (TypeError, lambda k, p: ops.attend(k, p, schedule=k), "`schedule` must be a Schedule or None"),
    "half a token": (TypeError, lambda k, p: ops.pack(k, k, bits=4, max_tokens=3.5), "`max_tokens` must be an integer"),
    "a centre as a list": (
        TypeError,
        lambda k, p: ops.pack(k, k, bits=4, transforms={"key_numbers": [0]}),
        "pack: `transforms['key_numbers']` must be a ",
    ),
    "values as an array": (TypeError, lambda k, p: ops.append(p, k, k.numpy()), "append: `v` must be a tensor or None"),
    "a matrix in words": (
        TypeError,
        lambda k, p: ops.rotate(p.plan, k, "dense"),
        "rotate: `matrix` must be a tensor or",
    ),
    "pages": (
        TypeError,
        lambda k, p: ops.attend(k, p.pages),
        "attend: `packed` must be a PackedKV, as `pack` returns it, got Tensor",
    ),
    "no lengths": (
        TypeError,
        lambda k, p: ops.append(dataclasses.replace(p, lengths=None), k, k),
        "append: `packed.lengths` must be a tensor, got NoneType",
    ),
    "pages as an array": (
        TypeError,
        lambda k, p: ops.attend(k, dataclasses.replace(p, pages=p.pages.numpy())),
        "attend: `packed.pages` must be a tensor, got ndarray",
    ),
    "no transforms": (
        TypeError,
        lambda k, p: ops.dequantize(dataclasses.replace(p, transforms=None)),
        "dequantize: `packed.transforms` must be a dict, got NoneType",
    ),
    "a window of many digits": (
        ValueError,
        lambda k, p: ops.attend(k, p, sliding_window=10**30),
        "attend: `sliding_window` must be in 0..2147483647, got 1000000000000000000000000000000",
    ),
    "swapped": (TypeError, lambda k, p: ops.append(k, k, p), "append: `packed` must be a PackedKV"),
    "a full table": (
        ValueError,
        lambda k, p: ops.append(p, k, k),
        "append: `packed` must have room for 280 tokens (pack with max_tokens), got one for 256",
    ),
    "a full table, both": (
        ValueError,
        lambda k, p: ops.append_attend(k, k, k, p),
        "append_attend: `packed` must have ",
    ),
    "keys of one dimension": (
        ValueError,
        lambda k, p: ops.append(p, k[0, 0, 0], k[0, 0, 0]),
        "append: `k` must be [batch, kv_heads, tokens, head_dim], got (64,)",
    ),
    "a number that is none": (
        ValueError,
        lambda k, p: ops.pack(k * torch.nan, k, PLAN),
        "pack: `k[0, 0, 0, 0]` must be finite",
    ),
    "keys in float64": (TypeError, lambda k, p: ops.pack(k.double(), k.double(), PLAN), "pack: `k` must be float32, "),
    "fewer values": (ValueError, lambda k, p: ops.pack(k, k[:, :1], PLAN), "pack: `v` must be float32 [2, 3, 140, 64]"),
    "room for less than nothing": (
        ValueError,
        lambda k, p: ops.pack(k, k, PLAN, max_tokens=-1),
        "pack: `max_tokens` must be in 0..1073741823, got -1",
    ),
    "room for too many": (
        ValueError,
        lambda k, p: ops.pack(k, k, PLAN, max_tokens=2**70),
        "pack: `max_tokens` must be in 0..1073741823, got 1180591620717411303424",
    ),
    "sinks in words": (TypeError, lambda k, p: ops.pack(k, k, PLAN, sinks="4"), "pack: `sinks` must be an integer"),
    "a window of less than nothing": (
        ValueError,
        lambda k, p: ops.pack(k, k, PLAN, window=-1),
        "pack: `window` must be in 0..1073741823, got -1",
    ),
    "a window that is no tensor": (
        TypeError,
        lambda k, p: ops.attend(k, dataclasses.replace(p, window_k=[0.0])),
        "attend: `packed.window_k` must be a tensor or None, got list",
    ),
    "keys of sinks alone": (
        ValueError,
        lambda k, p: ops.attend(k[:, :, :1], dataclasses.replace(p, sink_k=k[:, :, :4].clone())),
        "attend: `sink_v` must be ",
    ),
    "a window of other heads": (
        ValueError,
        lambda k, p: ops.append(dataclasses.replace(p, window_k=k[:, :2], window_v=k[:, :2]), k[:, :, :1], k[:, :, :1]),
        "append: `window_k` must be ",
    ),
    "words for a plan": (
        TypeError,
        lambda k, p: ops.attend(k, dataclasses.replace(p, plan=PLAN.words)),
        "attend: `plan` must be a turboquant.Plan, got (",
    ),
    "one length": (
        TypeError,
        lambda k, p: ops.schedule(k, p, lengths=140),
        "schedule: `lengths` must be a list of integers, got 140",
    ),
    "lengths of floats": (
        TypeError,
        lambda k, p: ops.schedule(k, p, lengths=[140.0, 140]),
        "schedule: `lengths` must be a list of integers, got [140.0, 140]",
    ),
    "lengths of other sequences": (
        ValueError,
        lambda k, p: ops.schedule(k, p, lengths=[140]),
        "schedule: `lengths` must have one for each of 2 sequences, got [140]",
    ),
    "one length for all": (
        ValueError,
        lambda k, p: ops.append(dataclasses.replace(p, lengths=p.lengths[:1].expand(2)), k[:, :, :1], k[:, :, :1]),
        "append: `packed.lengths` must be contiguous, got strides (0,)",
    ),
    "lengths of inference mode": (
        ValueError,
        lambda k, p: ops.append(dataclasses.replace(p, lengths=inference_copy(p.lengths)), k[:, :, :1], k[:, :, :1]),
        "append: `packed.lengths` must not be of inference mode outside it",
    ),
    "queries of other sequences": (
        ValueError,
        lambda k, p: ops.attend(k[:1], p),
        "attend: `q` must be of 2 sequences, as `packed` is, got (1, 3, 140, 64)",
    ),
    "keys of other sequences": (
        ValueError,
        lambda k, p: ops.append_attend(k[:, :, :1], k[:1, :, :1], k[:1, :, :1], p),
        "append_attend: `k` must be of 2 sequences, as `packed` is, got (1, 3, 1, 64)",
    ),
    "keys of other heads": (
        ValueError,
        lambda k, p: ops.append(p, k[:, :2, :1], k[:, :2, :1]),
        "append: `k` must be of 3 KV heads, as `packed` is, got (2, 2, 1, 64)",
    ),
    "a rotation that is not finite": (
        ValueError,
        lambda k, p: ops.pack(k, k, bits=4, transforms={"rotation": torch.full((1, 64, 64), torch.nan)}),
        "pack: `transforms['rotation']` must have finite numbers only, got nan",
    ),
    "a centre that is not finite": (
        ValueError,
        lambda k, p: ops.pack(k, k, bits=4, transforms=ops.transforms(value_centre=torch.full((3, 64), -torch.inf))),
        "pack: `transforms['value_numbers']` must have finite numbers only, got -inf",
    ),
    "not finite": (
        ValueError,
        lambda k, p: ops.append(p, k[:, :, :1] / 0, k[:, :, :1]),
        "append: `k[0, 0, 0, 0]` must be finite",
    ),
    "a number that is not finite": (
        ValueError,
        lambda k, p: ops.quantize(
            PLAN, k, k.index_put(tuple(map(torch.tensor, (1, 0, 5, 3))), torch.tensor(torch.nan))
        ),
        "quantize: `v[1, 0, 5, 3]` must be finite and at most 16384 in magnitude, got nan",
    ),
    "keys for the plan": (TypeError, lambda k, p: ops.quantize(k, k, p.plan), "must be a turboquant.Plan, got Tensor"),
    "queries in float16 over a window": (
        TypeError,
        lambda k, p: ops.attend(k[:, :, :1].half(), ops.pack(k, k, PLAN, window=16)),
        "attend: `q` must be float32 like sinks and window, got float16",
    ),
    "keys in float16 over sinks": (
        TypeError,
        lambda k, p: ops.append(ops.pack(k, k, PLAN, sinks=4), k[:, :, :1].half(), k[:, :, :1].half()),
        "append: `k` must be float32 like sinks and window, got float16",
    ),
    "several queries over a window": (
        ValueError,
        lambda k, p: ops.attend(k[:, :, :5], ops.pack(k, k, PLAN, window=16)),
        "attend: `q` must be of one token a sequence: with a window, several causal queries need append_attend",
    ),
    "no values": (
        ValueError,
        lambda k, p: ops.append(p, k[:, :, :1], None),
        "append: `v` must be given, because the plan has values, got None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    kind, call, message = REFUSED[name]
    k = torch.ones(2, 3, 140, 64)
    packed = ops.pack(k, k, PLAN)
    before = packed.pages.clone()
    with pytest.raises(kind) as caught:
        call(k, packed)
    assert message in str(caught.value), str(caught.value)
    assert type(caught.value) is kind
    assert len(packed) == 140 and packed.lengths.tolist() == [140, 140] and torch.equal(packed.pages, before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["attend", "attend_kernel", "schedule"])
def test_query_heads_are_a_multiple_of_kv_heads(name: str, device: str) -> None:
    k = torch.zeros(1, 2, 3, 64, device=device)
    packed = ops.pack(k, k, Plan(64, 4, 4))
    with pytest.raises(ValueError, match=f"{name}: `q` must be of a multiple of 2 heads, .*, got 3 heads"):
        getattr(ops, name)(torch.zeros(1, 3, 1, 64, device=device), packed)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [0, 16])
def test_no_queries(window: int, device: str) -> None:
    """They give an empty result, and store no token."""
    k = torch.ones(2, 3, 140, 64, device=device)
    packed = ops.pack(k, k, PLAN, window=window)
    none, q = k[:, :, :0], torch.ones(2, 6, 5, 64, device=device)[:, :, :0]
    for out, lse in (
        ops.attend(q, packed, return_lse=True),
        ops.attend(q, packed, causal=False, return_lse=True),
        ops.append_attend(q, none, none, packed, return_lse=True),
    ):
        assert out.shape == (2, 6, 0, 64) and lse.shape == (2, 6, 0)
    assert len(packed) == 140 and packed.lengths.tolist() == [140, 140]


def test_documented() -> None:
    for name in set(ops.__all__) - {"PackedKV"}:
        function = getattr(ops, name)
        assert inspect.signature(function).return_annotation is not inspect.Signature.empty
        assert len(function.__doc__) > 100, name


def test_example() -> None:
    done = forks.python((ROOT / "examples" / "attend.py").read_text())
    assert done.returncode == 0, done.stderr
    lines = [line.replace(",", "") for line in done.stdout.splitlines()]
    sizes = [int(line.partition(" bytes")[0].split()[-1]) for line in lines[:5]]
    cosines = [float(line.partition("cosine ")[2].split()[0]) for line in lines if "cosine" in line]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 2 * 2 * 4 * 1000 * 128 * 2
    assert cosines[:4] == sorted(cosines[:4], reverse=True) and cosines[1] > 0.99 and cosines[3] > 0.85
    assert "the bytes are the same: True" in done.stdout and "the output is the same: True" in done.stdout


def test_tokens_that_were_stored_count_also_if_attention_fails(rng: np.random.Generator) -> None:
    """The new token has taken the place of one that left the window, so it must not be appended again."""
    q, k, v, _ = draw(rng, "cpu", 300)
    packed = ops.pack(k[:, :, :-1], v[:, :, :-1], PLAN, window=8, max_tokens=300)
    last = k[:, :, -1:], v[:, :, -1:]
    want = ops.append_attend(q, *last, copy.deepcopy(packed))
    table = packed.block_table.clone()
    packed.block_table[0, 0] = 99  # a page that is only read
    with pytest.raises(ValueError, match=r"append_attend: stored the tokens; `block_table\[0\]` must be "):
        ops.append_attend(q, *last, packed)
    packed.block_table.copy_(table)
    assert len(packed) == 300 and packed.lengths.tolist() == [300, 300]
    assert torch.equal(ops.attend(q, packed), want)


@pytest.mark.parametrize("together", [False, True], ids=["append", "append_attend"])
def test_appends_from_threads_lose_no_token(together: bool) -> None:
    """Each call either stores its tokens or is an error that changes nothing."""
    k = torch.randn(1, 2, 300, 64)
    packed = ops.pack(k, k, bits=4, max_tokens=4000)
    one, start = k[:, :, :1].contiguous(), Barrier(4)
    errors: list[str] = []

    def work() -> None:
        start.wait()
        for _ in range(100):
            try:
                ops.append_attend(one, one, one, packed) if together else ops.append(packed, one, one)
            except RuntimeError as error:
                errors.append(str(error))

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(packed) == packed.lengths.item() == 700 - len(errors)
    wanted = "append_attend" if together else "append"
    assert all(error.startswith(f"{wanted}: another thread appends to `packed`") for error in errors)
    stored, _ = ops.dequantize(packed)
    torch.testing.assert_close(stored[:, :, 300:], stored[:, :, :1].expand_as(stored[:, :, 300:]))


def test_an_append_beside_another_is_an_error() -> None:
    k = torch.randn(1, 2, 3, 64)
    packed = ops.pack(k, k, bits=4, max_tokens=40)
    seen: list[str] = []

    def beside(*_: Any, **__: Any) -> None:
        def work() -> None:
            for call in (lambda: ops.append(packed, k, k), lambda: ops.append_attend(k, k, k, packed)):
                with pytest.raises(RuntimeError, match="another thread appends to `packed`"):
                    call()
                seen.append("refused")

        thread = Thread(target=work)
        thread.start()
        thread.join()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_append", beside)
        ops.append(packed, k, k)
    assert seen == ["refused", "refused"] and len(packed) == 6
    with pytest.raises(TypeError):
        ops.append(packed, k.double(), k.double())
    ops.append(packed, k, k)  # a failed call holds nothing
    assert len(packed) == 9 and "_writer" not in vars(packed)
