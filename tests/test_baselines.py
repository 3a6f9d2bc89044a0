"""benchmarks/baselines.py: levels, scales and bits of each simulated format, and which layers and tokens it changes."""

from __future__ import annotations

import gzip
from importlib import import_module

import pytest
from conftest import ROOT
from models import prompts, tiny

torch = pytest.importorskip("torch")

from turboquant.models.texts import Sample  # noqa: E402


@pytest.fixture
def baselines(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module("baselines")


@pytest.fixture
def vectors():
    return torch.randn(2, 3, 70, 64, generator=torch.Generator().manual_seed(0))


BITS = {  # bits per number with heads of 64 channels in 30 layers
    "fp8 e4m3": 8.0,
    "NVFP4": 4.5,
    "q4_0": 4.5,
    "q4_0 after Hadamard": 4.5,
    "int4 per token and head": 4.5,
    "KIVI, 4 bits, groups of 32": 5.0,
    "KIVI, 2 bits, groups of 32": 3.0,
    "KVarN, keys 4, values 2 bits": (4 + 2 + 3 * (16 / 64 + 16 / 128)) / 2,
    "KVarN, keys 4, values 2 bits, its own exact tokens": 3.5625,
    "OSCAR, 2 bits": 2 + 2 * 16 / 64,
    "OSCAR, 2 bits, its own exact tokens": 2.5,
    "TurboQuant mse, 4 bits, 2 + 2 layers exact": (26 * 4.25 + 4 * 16) / 30,
    "TurboQuant mse, 3 bits, 2 + 2 layers exact": (26 * 3.25 + 4 * 16) / 30,
    "TurboQuant mse, 2 bits, 2 + 2 layers exact": (26 * 2.25 + 4 * 16) / 30,
}


def test_bits_count_scales_zero_points_and_exact_layers(baselines):
    found = {name: one.mean_bits(64, 30) for name, one in baselines.BASELINES.items()}
    assert found == pytest.approx(BITS)
    own = [
        baselines.BASELINES[f"{name}, its own exact tokens"]
        for name in ("KVarN, keys 4, values 2 bits", "OSCAR, 2 bits")
    ]
    assert [one.exact_tokens(4) for one in own] == ["128 sinks, tile of 128", "64 sinks, window 256"]
    assert own[1].mean_bits(64, 30, 640) == pytest.approx(16 / 2 + 2.5 / 2)
    assert own[0].mean_bits(64, 30, 384) == pytest.approx(16 / 2 + 3.5625 / 2)


# Upper bounds of the relative squared error on Gaussian numbers, a little above the error of each format.
ERRORS = {"fp8 e4m3": 8e-4, "NVFP4": 0.010, "q4_0": 0.009, "q4_0 after Hadamard": 0.009,
          "int4 per token and head": 0.010, "KIVI, 4 bits, groups of 32": 0.007, "KIVI, 2 bits, groups of 32": 0.17,
          "OSCAR, 2 bits": 0.19,
          "TurboQuant mse, 4 bits, 2 + 2 layers exact": 0.0097, "TurboQuant mse, 3 bits, 2 + 2 layers exact": 0.035,
          "TurboQuant mse, 2 bits, 2 + 2 layers exact": 0.119}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_the_format(name, baselines, vectors):
    one = baselines.BASELINES[name]
    for read_back in (one.keys, one.values):
        error = ((read_back(vectors) - vectors).square().sum() / vectors.square().sum()).item()
        assert 0.6 * ERRORS[name] < error < ERRORS[name]
        assert torch.isfinite(read_back(torch.zeros_like(vectors))).all()


def test_kvarn_divides_tiles_by_tokens_and_channels(baselines):
    """Errors of keys and values are those of their widths, a token of unusual size hardly changes the error of the
    other keys of its tile, and tiles of 128 tokens do not depend on each other."""
    one = baselines.BASELINES["KVarN, keys 4, values 2 bits"]
    x = torch.randn(1, 2, 200, 64, generator=torch.Generator().manual_seed(0))

    def error(read_back, rows, part=slice(None)):
        return ((read_back(rows) - rows)[:, :, part].square().sum() / rows[:, :, part].square().sum()).item()

    assert 0.006 < error(one.keys, x) < 0.011 and 0.14 < error(one.values, x) < 0.24
    louder = x.clone()
    louder[:, :, 50] *= 100
    others = [i for i in range(128) if i != 50]
    assert error(one.keys, louder, others) < 1.2 * error(one.keys, x, others)
    changed = x.clone()
    changed[:, :, 130] += 3
    assert torch.equal(one.keys(changed)[:, :, :128], one.keys(x)[:, :, :128])
    assert not torch.equal(one.keys(changed)[:, :, 131:], one.keys(x)[:, :, 131:])
    assert torch.isfinite(one.keys(torch.zeros_like(x))).all() and torch.isfinite(one.values(x[:, :, :1])).all()


def test_oscar_clips_and_rotates(baselines):
    x = torch.linspace(-1, 1, 64).view(1, 1, 1, 64)
    assert baselines._clipped(0.5)(x).abs().max() == pytest.approx(x.abs().sort().values[..., 32].item(), rel=1e-3)
    moment = torch.diag(torch.arange(1.0, 9.0))
    matrix = baselines._mixed(moment)
    assert torch.allclose(matrix @ matrix.T, torch.eye(8), atol=1e-6)
    plain = baselines._hadamard(8).flip(0)[:, [0, 4, 2, 6, 1, 5, 3, 7]]  # the axes of diagonal moments are channels
    assert torch.allclose(matrix.abs(), plain.abs(), atol=1e-6)


def test_oscar_learns_rotations_of_each_layer(baselines, monkeypatch):
    """Each layer has its own function for keys, which differs from that for values."""
    model = tiny()
    ids = prompts(1, 200)["input_ids"]
    monkeypatch.setattr(baselines, "sample", lambda *_: Sample((ids,), ""))
    one = baselines.BASELINES["OSCAR, 2 bits"]
    each = one.of_layers(model)
    assert len(each) == model.config.num_hidden_layers
    x = torch.randn(1, 1, 5, model.config.head_dim, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(each[0][0](x), each[1][0](x)) and not torch.equal(each[0][0](x), each[0][1](x))
    found = baselines.measured(model, ids, {"OSCAR": one}, sinks=4, generate=0)["OSCAR"]
    assert 0 < found["kl_divergence"] < 1 and found["effective_bits"] == one.bits(model.config.head_dim)


def test_levels_by_hand(baselines):
    x = torch.zeros(1, 1, 1, 32)
    x[..., :4] = torch.tensor([-8.0, 7.0, 7.4, 2.6])  # a step of 1: codes of -8..7
    assert baselines._q4_0(x)[0, 0, 0, :4].tolist() == [-8, 7, 7, 3]
    x[..., :6] = torch.tensor([6.0, -4.0, 3.4, 2.4, 0.8, 0.2])
    assert baselines._nvfp4(x)[0, 0, 0, :6].tolist() == pytest.approx([6, -4, 3, 2, 1, 0])
    assert baselines._fp8(torch.tensor([500.0, 1.06, 17.0])).tolist() == [448, 1, 16]
    # 32 tokens of a channel share a scale, the channels of a token do not
    rows = torch.arange(64.0).view(1, 1, 64, 1).expand(1, 1, 64, 32)
    got = baselines._kivi(4).keys(rows)[0, 0, :, 0]
    assert got[[0, 31, 32, 63]].tolist() == pytest.approx([0, 31, 32, 63], abs=0.02)
    assert (got - rows[0, 0, :, 0]).abs().max() == pytest.approx(31 / 15 / 2, abs=0.05)


def test_simulated_leaves_sinks_and_exact_layers_alone(baselines):
    model, ids = tiny(), prompts(1, 40)["input_ids"]
    zero = baselines.Baseline(torch.zeros_like, torch.zeros_like, lambda _: 0.0)
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
        with baselines.simulated(model, zero, sinks=40):
            assert torch.allclose(model(input_ids=ids, use_cache=False).logits, want, atol=1e-5)
        with baselines.simulated(model, zero, sinks=4):
            got = model(input_ids=ids, use_cache=False).logits
        differ = (got - want).abs().amax((0, 2))
        assert (differ[:4] < 1e-5).all() and (differ[5:] > 0.01).all()
        layers = model.config.num_hidden_layers
        kept = baselines.Baseline(torch.zeros_like, torch.zeros_like, lambda _: 0.0, exact_layers=-(-layers // 2))
        with baselines.simulated(model, kept, sinks=0):
            assert torch.allclose(model(input_ids=ids, use_cache=False).logits, want, atol=1e-5)
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, want)


def test_measured_has_the_metrics_of_evaluate(baselines):
    model, ids = tiny(), prompts(2, 60)["input_ids"]
    chosen = {name: baselines.BASELINES[name] for name in ("fp8 e4m3", "q4_0")}
    found = baselines.measured(model, ids, chosen, sinks=4, generate=20)
    assert 0 < found["fp8 e4m3"]["kl_divergence"] < found["q4_0"]["kl_divergence"] / 4
    assert found["fp8 e4m3"]["kl_divergence"] < found["fp8 e4m3"]["kl_divergence_p99"]
    assert 0 <= found["q4_0"]["tokens_until_parted"] <= 20 and found["q4_0"]["effective_bits"] == 4.5


def test_tables_have_perplexity_beside_divergence(monkeypatch):
    """There is one table for each text and way to measure, in the order of the rows."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    params = dict(model="smollm2", windows=8, length=2048, chunk=None, moments="text", exact="4 sinks")
    metrics = dict(effective_bits=4.3125, kl_divergence=0.01114, kl_divergence_p99=0.0806, kl_divergence_p999=0.21,
                   perplexity=21.857, reference_perplexity=21.706, top1_agreement=0.9435)  # fmt: skip
    rows = [
        {"params": {**params, "spec": spec, "text": text, **other}, "metrics": metrics}
        for spec, text, other in (
            ("default", "wikitext2", {}),
            ("fp8", "wikitext2", {}),
            ("default", "de", {"chunk": 16}),
        )
    ]
    lines = import_module("quality").real_tables(rows)
    row = "| default | 4 sinks | 4.31 | 0.0111 | 0.081 | 0.210 | 21.857 | 94.3 % |"
    assert lines[0].startswith(
        "smollm2, wikitext2, 8 x 2,048 tokens, moments of text, perplexity of the full cache 21.706"
    )
    assert lines[3:6] == [row, row.replace("default", "fp8"), ""] and len(lines) == 11
    assert "de, 8 x 2,048 tokens, 16 tokens of a forward, moments" in lines[6] and lines[9] == row


class Letters:
    """A tokenizer with one token per character. Texts start with `bos_token_id`, unless it is None."""

    def __init__(self, bos_token_id):
        self.bos_token_id = bos_token_id

    def __call__(self, text, add_special_tokens=True, **_):
        start = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return {"input_ids": start + [ord(c) for c in text]}


def test_windows_of_a_real_model_start_at_30_percent(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    texts = import_module("texts")
    text = "".join(map(chr, range(1000, 1000 + 405)))  # 101 windows of 4, and a token
    assert texts.real_windows(text, Letters(None), 8, 4)[:, 0].tolist() == [1000 + 4 * i for i in range(30, 101, 10)]
    found = texts.real_windows(text, Letters(7), 2, 4)
    assert found.tolist() == [[7, 1121, 1122, 1123], [7, 1401, 1402, 1403]]


def test_texts_of_a_folder(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    texts = import_module("texts")
    (tmp_path / "man1").mkdir()
    (tmp_path / "man1" / "b.1.gz").write_bytes(gzip.compress("Größe".encode()))
    (tmp_path / "a.1").write_text("zuerst")
    assert texts.text_of(str(tmp_path)) == "zuerst\nGröße"
    assert "def dumps(" in texts.text_of("source")
    with pytest.raises(SystemExit, match="no files"):
        texts.text_of(str(tmp_path / "absent"))
