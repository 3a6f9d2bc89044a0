"""generate() on a patched model, against the same model with its own cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from models import KINDS, prompts, storages, tiny
from specs import WAVE, bare
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast

import turboquant
from turboquant import TurboQuantCache
from turboquant.kvcache.storage import LayerStorage
from turboquant.models.names import CACHE

WIDE = bare(2, 2, sinks=3, window=512, **WAVE)  # nothing ever leaves the window: exact
PACKED = bare(3, 3, prefill="packed")


def generate(model, inputs, tokens=40, **options):
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, **options}
    return model.generate(**inputs, max_new_tokens=tokens, **options)


def assert_same(got, want, tolerance=1e-4):
    assert torch.equal(got.sequences, want.sequences)
    a, b = torch.stack(got.logits), torch.stack(want.logits)
    assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_a_wide_window_gives_the_same_text(kind):
    model, inputs = tiny(kind), prompts(3, 25, (0, 6, 24))
    want = generate(model, inputs, 15)
    for prefill in ("exact", "packed"):
        got = generate(turboquant.patch(model, WIDE.with_(prefill=prefill)), inputs, 15)
        assert type(got.past_key_values) is TurboQuantCache and got.past_key_values.get_seq_length() == 39
        assert_same(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_is_each_sequence_alone(kind):
    """With sinks, window and centre, packed sequences have the logits that they have alone, up to rounding, and the
    same bytes except for a few codes, where rounding of hidden states moves a number across a threshold."""
    model, lengths = tiny(kind), (60, 41, 7)
    spec = PACKED.with_(**WAVE, sinks=1, window=16)
    turboquant.patch(model, spec)
    inputs, more = prompts(3, 60, tuple(60 - n for n in lengths)), prompts(3, 15, seed=1)["input_ids"]

    def logits(ids, mask):
        cache, parts = TurboQuantCache(model, spec), []
        for start, stop in [(0, 60), *((t, t + 1) for t in range(60, 75))]:
            start, stop = max(0, start - 75 + ids.shape[1]), stop - 75 + ids.shape[1]
            where = (mask.cumsum(1) - 1).clamp(min=0)[
                :, start:stop
            ]  # as generate does: rotary positions of real tokens
            out = model(ids[:, start:stop], mask[:, :stop], position_ids=where, past_key_values=cache)
            parts.append(out.logits)
        return torch.cat(parts, 1), cache

    with torch.no_grad():
        ids = torch.cat([inputs["input_ids"], more], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(more)], 1)
        together, cache = logits(ids, mask)
        for b, length in enumerate(lengths):
            alone, own = logits(ids[b : b + 1, 60 - length :], mask[b : b + 1, 60 - length :])
            difference = (together[b, 60 - length :] - alone[0]).abs().amax(-1)
            assert difference.median() < 1e-4 * alone.abs().max() and difference.max() < 0.1 * alone.abs().max()
            for ours, theirs in zip(storages(cache), storages(own)):
                assert (ours.pages[ours.table.rows[b]] != theirs.pages).float().mean() < 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_packed_logits_are_close_and_sliding_layers_stay_small(kind):
    """Logits with all tokens packed, in a prompt and one by one, are close to exact ones, and closer with more bits."""
    model, ids, error = tiny(kind, initializer_range=0.06), prompts(2, 290)["input_ids"], {}

    def logits(cache):
        pieces = [(0, 270), *((t, t + 1) for t in range(270, 280)), (280, 290)]
        with torch.no_grad():
            return torch.cat([model(ids[:, a:b], past_key_values=cache).logits for a, b in pieces], 1)

    want = logits(DynamicCache(config=model.config))
    for bits in (3, 5):
        spec = bare(bits, bits, prefill="packed", tries=0, **WAVE)
        cache = TurboQuantCache(turboquant.patch(model, spec), spec)
        error[bits] = ((logits(cache) - want).norm() / want.norm()).item()
    assert error[5] < 0.4 * error[3] and error[5] < 0.1, error
    for layer in cache.layers:
        held = [sum(page != -1 for page in row) for row in layer.storage.table.rows]
        assert held == ([3, 3] if not layer.storage.sliding_window else [2, 2])
    sliding = "sliding" in kind or "alternating" in kind
    assert sliding == any(layer.storage.sliding_window for layer in cache.layers)


def test_packed_text_follows_the_full_cache():
    """At 5 bits the next logits are within 20 % with random weights. test_quality.py tests trained weights."""
    model, inputs = tiny(), prompts(4, 50)
    want = generate(model, inputs, 1).logits[0]
    turboquant.patch(model, bare(5, 5, prefill="packed", **WAVE))
    got = generate(model, inputs, 1).logits[0]
    assert (got - want).norm() / want.norm() < 0.2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    model, inputs = tiny(dtype=dtype), prompts(2, 20, (3, 0))
    want = generate(model, inputs, 8).logits[0].float()
    got = generate(turboquant.patch(model, WIDE.with_(prefill="packed")), inputs, 8)
    assert got.past_key_values.layers[0].storage.window_k.dtype == dtype
    assert (got.logits[0].float() - want).abs().max() < 0.05 * want.abs().max()


def test_sampling():
    model, inputs = tiny(), prompts(2, 12, (0, 5))
    outs = []
    for patch in (lambda m: m, lambda m: turboquant.patch(m, WIDE)):
        model = patch(model)
        torch.manual_seed(3)
        outs.append(generate(model, inputs, do_sample=True, temperature=1.3, top_k=20, num_return_sequences=3))
    assert outs[0].sequences.shape == (6, 52)
    assert_same(outs[1], outs[0])


def test_beams():
    model, inputs = tiny(), prompts(2, 12, (0, 5))
    want = generate(model, inputs, 12, num_beams=3, output_logits=False)
    got = generate(turboquant.patch(model, WIDE), inputs, 12, num_beams=3, output_logits=False)
    assert torch.equal(got.sequences, want.sequences) and got.past_key_values.layers[0].max_batch_size == 6


def test_packed_beams_score_what_a_forward_scores():
    """The scores that beam search reports for its winners are those of their tokens in one forward, with a packed cache
    of its own."""
    model, inputs = turboquant.patch(tiny(), PACKED.with_(sinks=2)), prompts(2, 140)
    got = generate(model, inputs, 10, num_beams=3, output_logits=False, output_scores=True, length_penalty=0.0)
    with torch.no_grad():
        logits = model(got.sequences).logits[:, 139:-1].log_softmax(-1)
    scores = logits.gather(2, got.sequences[:, 140:, None]).sum((1, 2))
    assert torch.allclose(got.sequences_scores, scores, rtol=0.02, atol=0.02)


def test_embeddings_in():
    model, inputs = tiny(), prompts(2, 12, (0, 5))
    embeds = dict(
        inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]), attention_mask=inputs["attention_mask"]
    )
    want = generate(model, embeds, 10)
    assert_same(generate(turboquant.patch(model, WIDE), embeds, 10), want)


@pytest.mark.parametrize("kind", ["llama", "mistral, sliding"])
def test_turns_carried_over(kind):
    """Three turns of a chat on one cache, each longer than the last."""
    model, texts = tiny(kind), []
    for patch, make in ((lambda m: m, DynamicCache), (lambda m: turboquant.patch(m, WIDE), None)):
        model = patch(model)
        cache = make() if make else TurboQuantCache(model, WIDE)
        ids = prompts(1, 10)["input_ids"]
        for turn in range(3):
            out = generate(model, dict(input_ids=ids, attention_mask=torch.ones_like(ids)), 10, past_key_values=cache)
            assert out.past_key_values is cache and cache.get_seq_length() == out.sequences.shape[1] - 1
            ids = torch.cat([out.sequences, prompts(1, 8, seed=turn)["input_ids"]], 1)
        texts.append(ids)
    assert torch.equal(*texts)


def test_turns_of_a_packed_cache_are_one_conversation():
    """Turns on one cache give the bytes of one pass over the whole conversation."""
    model = turboquant.patch(tiny(), PACKED)
    cache, ids = TurboQuantCache(model, PACKED), prompts(1, 150)["input_ids"]
    for turn in range(3):
        out = generate(model, dict(input_ids=ids), 20, past_key_values=cache)
        ids = torch.cat([out.sequences, prompts(1, 30, seed=turn)["input_ids"]], 1)
    whole = TurboQuantCache(model, PACKED)
    with torch.no_grad():
        model(out.sequences[:, :-1], past_key_values=whole)
    for a, b in zip(storages(cache), storages(whole)):
        differing = (a.pages != b.pages).float().mean()
        assert (
            a.pages.shape == b.pages.shape and differing < 0.01
        )  # rounding of hidden states moves few codes across a threshold


@pytest.mark.parametrize("fields", [dict(), dict(sinks=4, window=32), dict(**WAVE)], ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen2, some layers sliding"])
def test_chunked_prefill(kind, fields):
    """Several forwards over a prompt store and see the same as one, in "packed" mode."""
    model, spec, ids = (
        turboquant.patch(tiny(kind), PACKED.with_(**fields)),
        PACKED.with_(**fields),
        prompts(2, 300)["input_ids"],
    )
    with torch.no_grad():
        whole = model(ids, past_key_values=TurboQuantCache(model, spec)).logits
        cache, parts = TurboQuantCache(model, spec), []
        for start, stop in [(0, 64), (64, 65), (65, 200), (200, 300)]:
            parts.append(model(ids[:, start:stop], past_key_values=cache).logits)
    difference = (torch.cat(parts, 1) - whole).abs().amax(-1)
    # A hidden state that differs in its last bits may fall on the other side of a code's threshold: rare, and small.
    assert difference.median() < 1e-4 * whole.abs().max() and difference.max() < 0.15 * whole.abs().max()


def test_generate_in_chunks():
    model, inputs = tiny(), prompts(2, 50, (0, 9))
    want = generate(model, inputs, 10, prefill_chunk_size=16)
    assert_same(generate(turboquant.patch(model, WIDE), inputs, 10, prefill_chunk_size=16), want)


def test_a_prompt_that_does_not_continue_the_cache_is_warned_of(recwarn):
    model, inputs = turboquant.patch(tiny(), PACKED), prompts(2, 20, (0, 0))
    cache = TurboQuantCache(model, PACKED)
    ids = inputs["input_ids"]

    def turn(ids: torch.Tensor, cache: TurboQuantCache = cache, **how) -> torch.Tensor:
        mask = torch.ones_like(ids)
        return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, **{CACHE: cache}, **how)

    said = turn(ids)
    longer = torch.cat([said, ids], 1)
    branch = cache.fork()
    turn(longer)
    turn(longer, branch, num_beams=1, do_sample=True)
    fresh = TurboQuantCache(model, PACKED)
    turn(ids, fresh, num_beams=2, num_return_sequences=1)
    assert not [w for w in recwarn if "`input_ids`" in str(w.message)]  # conversations that go on

    cache.crop(23)
    before = cache.get_seq_length()
    with pytest.raises(ValueError, match="must be the whole text so far, longer than the 23 .* got 20 tokens"):
        turn(ids)
    with pytest.raises(ValueError, match="must be the whole text so far, longer than the 23 .* got 5 tokens"):
        turn(ids[:, :5])
    assert cache.get_seq_length() == before
    other = longer.clone()
    other[1, 21] = (other[1, 21] + 1) % 50
    with pytest.warns(UserWarning, match="begin with the 23 tokens .* others from position 21 on"):
        turn(other)
    cache.reset()
    turn(other)
    assert len([w for w in recwarn if "`input_ids`" in str(w.message)]) == 0


def test_tokens_of_a_first_forward_that_failed_are_not_those_of_the_cache(recwarn, monkeypatch):
    model, ids = turboquant.patch(tiny(), PACKED), prompts(1, 20)["input_ids"]
    cache = TurboQuantCache(model)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no memory"), torch.no_grad():
        patched.setattr(LayerStorage, "store", Mock(side_effect=RuntimeError("no memory")))
        model(ids, **{CACHE: cache})
    others = prompts(1, 20, seed=5)["input_ids"]
    with torch.no_grad():
        model(others, **{CACHE: cache})
    model.generate(torch.cat([others, ids], 1), max_new_tokens=2, **{CACHE: cache})
    assert not [w for w in recwarn if "`input_ids`" in str(w.message)]


def test_generate_in_chunks_that_are_padding_alone():
    model, inputs = tiny(), prompts(3, 50, (0, 30, 44))
    want = generate(model, inputs, 10)
    if not torch.equal(generate(model, inputs, 10, prefill_chunk_size=16).sequences, want.sequences):
        pytest.skip(f"transformers {transformers.__version__} itself gives such chunks other positions")
    turboquant.patch(model, WIDE)
    assert_same(generate(model, inputs, 10, prefill_chunk_size=16), want)


def test_autocast():
    """Rotary embeddings make keys float32 again, and values stay bfloat16. Both are stored as SDPA reads them."""
    model, inputs = tiny(), prompts(2, 20, (3, 0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = generate(model, inputs, 8).logits[0].float()
        got = generate(turboquant.patch(model, WIDE.with_(prefill="packed")), inputs, 8)
    assert got.past_key_values.layers[0].storage.window_k.dtype == torch.bfloat16
    assert (got.logits[0].float() - want).abs().max() < 0.05 * want.abs().max()


@pytest.mark.parametrize("options", [dict(num_beams=3), dict(num_beams=3, num_return_sequences=2)], ids=str)
def test_beams_over_a_prefix(options):
    """The prefix is encoded once and repeated for every beam, as docs/using.md says."""
    model, ids = turboquant.patch(tiny(), WIDE), prompts(1, 60)["input_ids"]
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    want = generate(model, inputs, 6, **options).sequences
    prefix = TurboQuantCache(model)
    with torch.no_grad():
        model(ids[:, :50], past_key_values=prefix)
    with pytest.raises(ValueError, match=r"holds 50 positions of 1 sequences.* for 3 beams .*interleave\(3\) first"):
        generate(model, inputs, 6, past_key_values=prefix.fork(), **options)
    beams = prefix.fork()
    beams.batch_repeat_interleave(3)
    assert torch.equal(generate(model, inputs, 6, past_key_values=beams, **options).sequences, want)
    assert prefix.layers[0].max_batch_size == 1


SPECULATIVE = {"all packed": bare(5, 5), "a window": PACKED.with_(window=16, sinks=2), "default": "default"}


@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
@pytest.mark.parametrize("kind", ["llama", "mistral, sliding", "mistral, sliding, wide"])
@pytest.mark.parametrize("spec", SPECULATIVE.values(), ids=SPECULATIVE)
def test_speculative_decoding(spec, kind, how):
    """Drafts are verified several tokens at a time and taken back by `crop`: the text is that of plain decoding."""
    sizes = dict(sliding_window=500) if "wide" in kind else {}  # wider than the text
    model = turboquant.patch(tiny(kind.removesuffix(", wide"), **sizes), spec)
    inputs = dict(input_ids=prompts(1, 8)["input_ids"].repeat(1, 25))
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    # transformers 4.57 needs an EOS token; an assistant makes its mask from the ids, where 0 is padding
    options = dict(eos_token_id=95, output_logits=False, suppress_tokens=[0, 95])
    want = generate(model, inputs, 40, **options).sequences
    if how == "assistant":
        assistant = tiny(kind.removesuffix(", wide"), num_hidden_layers=1, **sizes)
        options["assistant_model"] = turboquant.patch(assistant, spec)
    else:
        options["prompt_lookup_num_tokens"] = 20
    got = generate(model, inputs, 40, **options)
    assert torch.equal(got.sequences, want) and got.past_key_values.get_seq_length() == want.shape[1] - 1


@pytest.mark.parametrize("spec", SPECULATIVE.values(), ids=SPECULATIVE)
def test_a_draft_is_verified_as_its_tokens_would_be_decoded(spec):
    """A draft reads its own tokens as they are stored, and tokens that `crop` brings back into the window are exact."""
    model, ids = turboquant.patch(tiny(), spec), prompts(1, 320)["input_ids"]
    draft, wrong, cache = ids[:, 299:], ids[:, 200:221], TurboQuantCache(model)
    with torch.no_grad():
        model(ids[:, :299], past_key_values=cache)
        plain = cache.fork()
        want = torch.cat([model(draft[:, i : i + 1], past_key_values=plain).logits for i in range(21)], 1)
        cache.activate_past_recording()
        for tokens in (wrong, draft):
            cache.crop(299)
            got = model(tokens, past_key_values=cache).logits
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, False], ids=["", "static shapes"])
def test_a_compiled_decode_step(dynamic):
    """torch.compile compiles what lies between the cache's calls; the answers are the same."""
    spec = PACKED.with_(window=16, sinks=2)
    model, ids = turboquant.patch(tiny(), spec), prompts(1, 60)["input_ids"]

    def logits(step):
        cache = TurboQuantCache(model, spec)
        with torch.no_grad():
            model(ids[:, :40], past_key_values=cache)
            return torch.cat([step(ids[:, t : t + 1], past_key_values=cache).logits for t in range(40, 60)], 1)

    want = logits(model)
    assert (
        logits(torch.compile(model, backend="eager", dynamic=dynamic)) - want
    ).abs().max() <= 1e-4 * want.abs().max()


def test_inference_mode():
    """A cache that was filled in inference mode goes on outside of it, and the other way round."""
    model, inputs = turboquant.patch(tiny(), PACKED.with_(window=16, sinks=2)), prompts(2, 40, (0, 7))
    want = generate(model, inputs)
    with torch.inference_mode():
        inside = generate(model, inputs)
    assert_same(inside, want, 0)
    tokens = torch.tensor([[5], [6]])
    with torch.no_grad():
        outside = model(tokens, past_key_values=inside.past_key_values).logits
    with torch.inference_mode():
        assert torch.equal(model(tokens, past_key_values=want.past_key_values).logits, outside)


@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_positions(use_cache):
    """Several texts in one row, told apart by position_ids alone, give what they give without a patch. The model itself
    keeps them apart only if it has no cache."""
    model, ids = tiny(), prompts(1, 30)["input_ids"]
    where = torch.cat([torch.arange(12), torch.arange(18)])[None]
    with torch.no_grad():
        want = model(ids, position_ids=where, use_cache=use_cache).logits
        turboquant.patch(model, WIDE)
        got = model(ids, position_ids=where, use_cache=use_cache)
        assert use_cache == (type(got.past_key_values) is TurboQuantCache)
        assert (got.logits - want).abs().max() <= 1e-4 * want.abs().max()
        apart = torch.cat([model(part, use_cache=False).logits for part in (ids[:, :12], ids[:, 12:])], 1)
    assert ((want - apart).abs().max() < 1e-3) == (not use_cache)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices")
def test_layers_on_two_devices(tmp_path):
    """Each layer's pages lie where the layer is, and the lengths on both."""
    pytest.importorskip("accelerate")
    tiny(num_hidden_layers=4).save_pretrained(tmp_path)
    devices = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    devices |= {f"model.layers.{i}": i // 2 for i in range(4)}
    inputs = {name: x.to(0) for name, x in prompts(2, 40, (0, 7)).items()}
    outs = []
    for device_map in ({"": 0}, devices):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, device_map=device_map).eval()
        outs.append(generate(turboquant.patch(model, PACKED), inputs))
    assert [layer.storage.pages.device.index for layer in outs[1].past_key_values.layers] == [0, 0, 1, 1]
    assert_same(outs[1], outs[0], 1e-3)


DIGEST = """
import hashlib, torch
from test_generate import generate, prompts, tiny, turboquant
out = generate(turboquant.patch(tiny(), "paper-mse-3"), prompts(3, 40, (0, 9, 30)))
held = hashlib.sha256(out.sequences.numpy().tobytes())
for layer in out.past_key_values.layers:
    held.update(layer.storage.pages.numpy().tobytes())
print(held.hexdigest())
"""


@pytest.mark.slow
def test_the_same_bytes_in_every_process():
    here, package = Path(__file__).parent, Path(turboquant.__file__).parent.parent
    paths = [str(here), str(package), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    digests = [
        subprocess.run(
            [sys.executable, "-c", DIGEST], cwd=here, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in "12"
    ]  # fmt: skip
    assert len(digests[0]) == 65 and digests[0] == digests[1]


@pytest.mark.parametrize("sampled", [False, True])
def test_the_same_text_on_any_number_of_threads(sampled):
    model, inputs, before = turboquant.patch(tiny(), "paper-mse-3"), prompts(3, 40, (0, 9, 30)), torch.get_num_threads()
    texts = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            torch.manual_seed(4)
            texts.append(generate(model, inputs, 15, do_sample=sampled, temperature=1.3).sequences)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(text, texts[0]) for text in texts)


def test_the_same_text_every_time():
    model, inputs = turboquant.patch(tiny(), "paper-mse-2"), prompts(3, 40, (0, 9, 30))
    first, second = generate(model, inputs), generate(model, inputs)
    assert torch.equal(first.sequences, second.sequences)
    for a, b in zip(storages(first.past_key_values), storages(second.past_key_values)):
        assert torch.equal(a.pages, b.pages)


def test_a_bad_number_in_the_middle_of_a_text():
    model, inputs = turboquant.patch(tiny(), PACKED), prompts(1, 20)
    with torch.no_grad():
        out = model(**inputs)
        cache, good = out.past_key_values, model.get_input_embeddings()(torch.tensor([[5]]))
        bad = good.clone()
        bad[0, 0, 3] = float("nan")
        with pytest.raises((ValueError, RuntimeError), match="layer 0: append(_attend)?: `k"):
            model(inputs_embeds=bad, past_key_values=cache)
        assert cache.get_seq_length() == 20
        model(inputs_embeds=good, past_key_values=cache)
        assert cache.get_seq_length() == 21


def test_the_shipped_model_writes_the_same_text():
    """Trained weights: with a window that holds everything, the greedy text is that of the full cache."""
    folder = Path(__file__).resolve().parents[1] / "demo" / "turboquant_demo"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    passage = (folder / "a_christmas_carol.txt").read_text(encoding="utf-8").split("\n\n", 1)[1]
    ids = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))(passage)["input_ids"][:300]
    inputs = dict(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, 300, dtype=torch.long))
    want = generate(model, inputs, 60, eos_token_id=None, pad_token_id=0)
    for prefill in ("exact", "packed"):
        got = generate(
            turboquant.patch(model, WIDE.with_(prefill=prefill)), inputs, 60, eos_token_id=None, pad_token_id=0
        )
        assert_same(got, want)
