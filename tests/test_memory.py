"""A cache holds the bytes that it reports, and nothing else of the history."""

from __future__ import annotations

import ctypes
import functools
import gc
import multiprocessing
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from models import tiny
from specs import WAVE, bare
from transformers import LlamaConfig, LlamaForCausalLM

import turboquant
from turboquant import TurboQuantCache

TOKENS = 1024
DEMO = dict(
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64
)  # the shape of the shipped model
SMALL = dict(hidden_size=64, intermediate_size=64, vocab_size=64)


def in_a_process_of_its_own(test: Callable[[], None]) -> Callable[[], None]:
    """Runs a test that counts the memory of the whole process in a new process, without what other tests left
    behind."""

    @functools.wraps(test)
    def run() -> None:
        if multiprocessing.parent_process():
            return test()
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            process.submit(run).result()

    return run


def reachable(root: object) -> Iterator[torch.Tensor]:
    """Every tensor that can be reached from an object through attributes, containers and anything the garbage collector
    knows."""
    seen, queue = set(), [root]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(
            item, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
        ):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        queue += gc.get_referents(item)
        queue += list(vars(item).values()) if hasattr(item, "__dict__") else []


def bytes_of(tensors: Iterator[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def alive() -> int:
    """Bytes of all tensors in the process."""
    gc.collect()
    return bytes_of(t for t in gc.get_objects() if issubclass(type(t), torch.Tensor))


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def allocated() -> int:
    """Bytes in use from malloc, including mapped blocks, as the C library counts them."""
    try:
        info = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("the C library has no mallinfo2: glibc 2.33 or later counts allocations")
    info.restype = _Mallinfo
    gc.collect()
    now = info()
    return now.uordblks + now.hblkhd


@pytest.mark.slow
@in_a_process_of_its_own
def test_after_a_thousand_generated_tokens():
    """At 3 bits without sinks and window, tensors hold `bytes_per_token` for each token, to 2 %, counted in three ways.
    Memory from malloc grows by at most 200,000 bytes more."""
    spec = bare(3, 3)
    torch.manual_seed(0)
    model = turboquant.patch(LlamaForCausalLM(LlamaConfig(**SMALL, **DEMO, max_position_embeddings=2048)).eval(), spec)
    cache = TurboQuantCache(model, spec)
    model.generate(
        torch.tensor([[1]]), max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0
    )  # allocates what is allocated only once
    tensors_before, malloc_before = alive(), allocated()
    text = model.generate(
        torch.tensor([[1]]),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        past_key_values=cache,
    )
    assert text.shape == (1, TOKENS + 1) and cache.get_seq_length() == TOKENS
    del text
    claimed = TOKENS * spec.bytes_per_token(64, kv_heads=2, n_layers=4)
    assert spec.bytes_per_token(64, kv_heads=2) == 2 * 2 * (64 * 3 // 8 + 2)
    found = {
        "nbytes": cache.nbytes,
        "reachable": bytes_of(reachable(cache)),
        "all tensors of the process": alive() - tensors_before,
    }
    for what, count in found.items():
        assert claimed <= count <= 1.02 * claimed, (what, count, claimed)
    # In the whole process, the Python objects of the cache and what transformers keeps of a call come on top.
    grown = allocated() - malloc_before
    assert claimed <= grown <= claimed + 200_000, (grown, claimed)
    full = TOKENS * 2 * 2 * 64 * 4 * 4
    assert grown < 0.3 * full
    report = cache.report()
    assert (
        report.effective_bits == pytest.approx(spec.effective_bits(64), rel=0.02) and report.nbytes == found["nbytes"]
    )
    for layer in report.layers:
        assert layer.tokens == TOKENS and layer.nbytes == pytest.approx(claimed / 4, rel=0.02)


@pytest.mark.slow
@in_a_process_of_its_own
def test_a_long_history_of_a_wide_model():
    """Memory from malloc grows by the claimed bytes, to 2 %: 8 KV heads of 128 channels, 8,192 tokens, 3 bits."""
    spec, config = (
        bare(3, 3),
        LlamaConfig(num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=8, head_dim=128),
    )
    k = torch.randn(1, 8, 1024, 128)
    cache = TurboQuantCache(config, spec)
    layer, before = cache.layers[0], allocated()
    for done in range(0, 8192, 1024):
        fresh, value = cache.update(k, k, 0)
        store(layer, fresh.keys, value, done)
    del fresh, value
    claimed = 8192 * spec.bytes_per_token(128, kv_heads=8)
    assert claimed <= allocated() - before <= 1.02 * claimed
    assert claimed <= cache.nbytes == bytes_of(reachable(cache)) <= 1.02 * claimed


def store(layer, k, v, before):
    """Stores tokens as a layer's `attend` does, without the attention, which would take long here."""
    after = before + k.shape[2]
    lengths = layer._shared.lengths(after, layer.storage.padding, layer.storage.device)
    layer.storage.store(k, k, v, lengths, layer.storage.padding, 0, None)


def test_nothing_of_the_full_precision_history_stays():
    """The largest floating-point tensor that a cache reaches is its window, whatever was fed to it."""
    model = turboquant.patch(tiny(), bare(3, 3, sinks=2, window=8, **WAVE))
    with torch.no_grad():
        cache = model(torch.randint(0, 96, (2, 400))).past_key_values
        model(torch.randint(0, 96, (2, 50)), past_key_values=cache)
    floats = [t for t in reachable(cache) if t.is_floating_point()]
    assert max(t.numel() for t in floats) == 2 * 2 * 8 * 32 == cache.layers[0].storage.window_k.numel()
    assert bytes_of(reachable(cache)) == cache.nbytes == cache.report().nbytes


def test_a_failed_forward_leaves_nothing_behind():
    model = turboquant.patch(tiny(), bare(3, 3))
    with torch.no_grad():
        cache = model(torch.randint(0, 96, (1, 300))).past_key_values
        held = cache.nbytes
        bad = torch.full((1, 300, 64), float("nan"))
        with pytest.raises((ValueError, RuntimeError), match="layer 0"):
            model(inputs_embeds=bad, past_key_values=cache)
    assert cache.nbytes == held == bytes_of(reachable(cache))


@pytest.mark.slow
@in_a_process_of_its_own
def test_ten_thousand_lives_leave_nothing():
    """Caches are made, filled, forked and dropped 10,000 times. Resident memory is within 1 % of that after 1,000
    times."""
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    spec, k = bare(3, 3, sinks=1, window=4), torch.randn(1, 1, 20, 8)

    def life():
        cache = TurboQuantCache(config, spec)
        layer = cache.layers[0]
        layer.lazy_initialization(k)
        lengths = layer._shared.lengths(20, layer.storage.padding, layer.storage.device)
        layer.storage.store(k, k, k, lengths, layer.storage.padding, 0, None)
        fork = cache.fork()
        fork.reorder_cache(torch.tensor([0, 0]))
        assert cache.nbytes and fork.get_seq_length() == 20

    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    for _ in range(1000):
        life()
    before = resident()
    for _ in range(9000):
        life()
    assert resident() <= 1.01 * before
