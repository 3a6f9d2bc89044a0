"""`turboquant calc`: it counts the bytes of real caches, knows models as transformers does, and has measured times."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT

pytest.importorskip("turboquant._core")
import models
from models import torch, transformers
from profiles import calibrate, profile_of

import turboquant
from turboquant import CacheSpec
from turboquant.cli import calc, calc_table, main
from turboquant.cli.calc import decode_seconds, read_model
from turboquant.cli.calc_table import GPUS, MODELS, TIMED, TIMED_BYTES, TIMES
from turboquant.models.names import CACHE
from turboquant.named_specs import presets
from turboquant.sizes import Layer, Model, full_bytes, packed_parts, tokens_that_fit

# ---- bytes ----

FREE = {name: spec for name, spec in presets().items() if not spec.calibrated}
LENGTHS = (1, 5, 19, 20, 21, 132, 133, 260, 261, 700)


def counted(model, name="small"):
    """The `Model` that calc reads from the configuration of a transformers model."""
    return Model(name, "", calc.layers_of(model.config, name))


def held(model, spec, batch, tokens, **given):
    """A cache that holds a random prompt."""
    cache = turboquant.TurboQuantCache(model, spec, **given)
    ids = torch.randint(1, 96, (batch, tokens), generator=torch.Generator().manual_seed(tokens))
    with torch.no_grad():
        model(ids, **{CACHE: cache})
    return cache


@pytest.mark.parametrize("name", FREE)
def test_bytes_of_every_preset(name):
    model = models.tiny(head_dim=64)
    turboquant.patch(model, FREE[name])
    for batch, tokens in ((1, 700), (2, 133), (3, 7)):
        cache = held(model, FREE[name], batch, tokens)
        parts = packed_parts(counted(model), FREE[name], batch, tokens, 4)
        assert parts == {part: size for part, size in cache.report().parts.items() if size}
        assert sum(parts.values()) == cache.nbytes


@pytest.mark.parametrize(("kind", "dtype"), [("llama", torch.float32), ("mistral, sliding", torch.float32),
                                             ("gemma3, alternating", torch.bfloat16)])  # fmt: skip
def test_bytes_at_every_length(kind, dtype):
    """At these prompt lengths sinks and window grow, pages begin, and pages leave a sliding window."""
    model = models.tiny(kind, dtype)
    for spec in (presets()["default"], presets()["paper-mse-4"], presets()["default"].with_(sinks=3, window=40)):
        turboquant.patch(model, spec)
        for tokens in LENGTHS:
            for batch in (1, 2):
                cache = held(model, spec, batch, tokens)
                parts = packed_parts(counted(model), spec, batch, tokens, model.dtype.itemsize)
                assert sum(parts.values()) == cache.nbytes, (tokens, batch, parts, cache.report().parts)


def test_bytes_where_layers_differ_in_size():
    shared_keys = pytest.importorskip("test_shared_keys")
    if shared_keys.VERSION < (5, 20):
        pytest.skip("this transformers has no Gemma 4")
    model = shared_keys.made("gemma 4, keys made as values are")
    plain = presets()["default"].with_(sinks=3, window=40, centre="none")  # a wave has fewer pairs than are counted
    for spec in (plain, presets()["paper-mse-4"]):
        turboquant.patch(model, spec)
        for tokens in (20, 300, 700):
            cache = held(model, spec, 2, tokens)
            parts = packed_parts(counted(model), spec, 2, tokens, 4)
            assert sum(parts.values()) == cache.nbytes, (tokens, parts, cache.report().parts)
    memory = 300_000
    turboquant.patch(model, tokens=700, memory=memory)
    assert 0.9 * memory < held(model, None, 1, 700).nbytes <= memory


def test_bytes_of_a_calibrated_preset():
    model = models.tiny(head_dim=64)
    found = calibrate(model, [torch.randint(1, 96, (4, 600), generator=torch.Generator().manual_seed(0))])
    axes = (CacheSpec(budget=3, method="axes"), CacheSpec(budget=4, method="axes", group=16))
    for spec in (*axes, presets()["turboesm"]):
        turboquant.patch(model, spec, profile=profile_of(found))
        cache = held(model, spec, 2, 700, profile=profile_of(found))
        # A calibration rounds a budget down to whole bits of groups of its own layers and heads.
        assert packed_parts(counted(model), spec, 2, 700, 4) == pytest.approx(cache.report().parts, rel=0.01)


def test_bytes_of_a_cache_that_grew_token_by_token():
    model = models.tiny()
    spec = presets()["default"]
    turboquant.patch(model, spec)
    cache = held(model, spec, 1, 100)
    with torch.no_grad():
        for _ in range(200):
            model(torch.ones(1, 1, dtype=torch.int64), **{CACHE: cache})
    pages = cache.report().parts["pages"]
    assert packed_parts(counted(model), spec, 1, 300, 4)["pages"] == pages


def test_full_bytes():
    layers = (Layer("full", 2, 8), Layer("sliding", 2, 8, 100), Layer("latent", 1, 24), Layer("none", 0, 0),
              Layer("full", 9, 8, shared=True), Layer("chunked", 1, 16, 50))  # fmt: skip
    model = Model("m", "", layers)
    assert full_bytes(model, 3, 70, 2) == 3 * 2 * (2 * 2 * 8 * 70 + 2 * 2 * 8 * 70 + 24 * 70 + 2 * 16 * 50)
    stored = 2 * 2 * 8 * 200 + 2 * 2 * 8 * 100 + 24 * 200 + 2 * 16 * 50
    assert full_bytes(model, 1, 200, 1) == stored
    assert calc.bytes_read(model, 1, 1, 200) == stored + 2 * 9 * 8 * 200


@pytest.mark.parametrize(("kind", "fields"), [
    ("LlamaConfig", dict(num_hidden_layers=3)),
    ("Gemma3TextConfig", dict(num_hidden_layers=6, sliding_window=32)),
    ("Gemma3nTextConfig", dict(num_hidden_layers=10, num_kv_shared_layers=5, sliding_window=32, laurel_rank=4,
                               activation_sparsity_pattern=None, vocab_size_per_layer_input=96,
                               hidden_size_per_layer_input=8)),
    ("Qwen3_5TextConfig", dict(num_hidden_layers=8, linear_num_key_heads=2, linear_num_value_heads=2,
                               linear_key_head_dim=8, linear_value_head_dim=8)),
    ("DeepseekV3Config", dict(num_hidden_layers=2, head_dim=8, num_key_value_heads=4, moe_intermediate_size=32,
                              kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
                              n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2,
                              first_k_dense_replace=1)),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_full_bytes_are_those_of_a_dynamic_cache(kind, fields):
    """For full, sliding, shared, hybrid and latent layers. transformers stores one token less than a sliding window
    has, because the newest token is added when attention reads the window."""
    if not hasattr(transformers, kind):
        pytest.skip(f"this transformers has no {kind}")
    common = dict(vocab_size=96, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
                  head_dim=16)  # fmt: skip
    config = getattr(transformers, kind)(**{**common, **fields})
    alone = transformers.AutoModelForCausalLM.from_config(config).eval()
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        alone(torch.ones(2, 70, dtype=torch.int64), past_key_values=cache)
    sides = [getattr(layer, side, None) for layer in cache.layers for side in ("keys", "values")]
    held = sum(one.nbytes for one in sides if one is not None)
    model = counted(alone)
    newest = sum(4 * 2 * one.stores(1) for one in model.layers if one.window)
    assert full_bytes(model, 2, 70, 4) == held + newest


def test_docs_memory_tells_the_same():
    """The numbers are those of the example in docs/memory.md."""
    parts = packed_parts(read_model("llama-3-8b"), presets()["default"], 1, 32768)
    assert parts["pages"] == 255 * 128 * 33792 and parts["sinks"] + parts["window"] == 132 * 2 * 8 * 128 * 2 * 32


def test_tokens_that_fit():
    model, spec = read_model("gemma-3-4b"), presets()["default"]

    def size(tokens):
        return sum(packed_parts(model, spec, 2, tokens).values())

    for memory in (10**8, 10**9, 3 * 10**10):
        fits = tokens_that_fit(size, memory)
        assert size(fits) <= memory < size(fits + 1)
    assert tokens_that_fit(size, 1000) == 0
    assert tokens_that_fit(lambda tokens: min(tokens, 4096), 5000) is None


# ---- models ----

# Model -> (configuration class, the fields that calc reads and that differ from the defaults of the class).
CONFIGS = {
    "llama-3-8b": ("LlamaConfig", dict(num_key_value_heads=8)),
    "llama-3-70b": ("LlamaConfig", dict(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64,
                                        num_key_value_heads=8)),
    "gemma-3-4b": ("Gemma3TextConfig", dict(hidden_size=2560, num_hidden_layers=34, sliding_window=1024)),
    "gemma-3-27b": ("Gemma3TextConfig", dict(hidden_size=5376, num_hidden_layers=62, num_attention_heads=32,
                                             num_key_value_heads=16, head_dim=128, sliding_window=1024)),
    "qwen3-8b": ("Qwen3Config", dict(num_hidden_layers=36, num_key_value_heads=8, sliding_window=None)),
    "qwen3-32b": ("Qwen3Config", dict(hidden_size=5120, num_hidden_layers=64, num_attention_heads=64,
                                      num_key_value_heads=8, sliding_window=None)),
    "qwen2.5-7b": ("Qwen2Config", dict(hidden_size=3584, num_hidden_layers=28, num_attention_heads=28,
                                       num_key_value_heads=4, use_sliding_window=False, sliding_window=131072)),
    "mistral-7b-v0.1": ("MistralConfig", {}),
    "mixtral-8x7b": ("MixtralConfig", {}),
    "gemma-2-2b": ("Gemma2Config", {}),
    "olmo-2-7b": ("Olmo2Config", {}),
    "gpt-oss-120b": ("GptOssConfig", {}),
    "gemma-3n-e4b": ("Gemma3nTextConfig", {}),
    "deepseek-v3": ("DeepseekV3Config", {}),
    "llama-4-scout": ("Llama4TextConfig", {}),
    "qwen3.5-27b": ("Qwen3_5TextConfig", dict(hidden_size=5120, num_hidden_layers=64, num_attention_heads=24)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_are_those_of_transformers(name):
    """Most of these are the defaults of a class, which transformers documents as those of this model."""
    kind, fields = CONFIGS[name]
    if not hasattr(transformers, kind):
        pytest.skip(f"this transformers has no {kind}")
    config = getattr(transformers, kind)(**fields)
    assert calc.layers_of(config, name) == read_model(name).layers


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-4b", "qwen3-8b", "mistral-7b-v0.1", "deepseek-v3",
                                  "gemma-3n-e4b", "gpt-oss-120b"])  # fmt: skip
def test_folders_and_files(name, tmp_path, monkeypatch):
    """Models have few layers, so that they are made quickly. Whether one is refused does not depend on their number."""
    kind, fields = CONFIGS[name]
    count = 10 if name == "gemma-3n-e4b" else 6
    small = dict(num_hidden_layers=count, vocab_size=96, intermediate_size=64)
    if name == "gemma-3n-e4b":
        small |= dict(num_kv_shared_layers=5, activation_sparsity_pattern=None, vocab_size_per_layer_input=96)
    getattr(transformers, kind)(**{**fields, **small}).save_pretrained(tmp_path)
    row = MODELS[name]._replace(layers=count, shared=5 * (name == "gemma-3n-e4b"))
    for path in (tmp_path, tmp_path / "config.json"):
        found = read_model(str(path))
        assert found.layers == calc._from_row(name, row).layers
        assert bool(found.refused) == bool(read_model(name).refused), found.refused


def test_layers_with_heads_of_their_own():
    config = getattr(transformers, "Gemma4TextConfig", None)
    if config is None:
        pytest.skip("this transformers has no Gemma 4")
    sliding = dict(num_key_value_heads=8, head_dim=256, sliding_window=1024)
    full = dict(global_head_dim=512, num_global_key_value_heads=2, attention_k_eq_v=True)
    text = config(num_hidden_layers=30, num_attention_heads=16, **sliding, **full)
    if not getattr(text, "per_layer_attributes", None):
        pytest.skip("this transformers has one configuration for all layers")
    assert calc.layers_of(text, "gemma 4") == read_model("gemma-4-26b-a4b").layers


def test_the_table(capsys):
    assert len(MODELS) >= 20 and len({row.source for row in MODELS.values()}) == len(MODELS)
    assert all(re.fullmatch(r"[\w-]+/[\w.-]+ config\.json", row.source) for row in MODELS.values())
    assert main(["calc"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(MODELS) and all(row.source in line for row, line in zip(MODELS.values(), said))
    for name, row in MODELS.items():
        hub = row.source.partition(" ")[0]
        assert read_model(name) == read_model(hub) == read_model(hub.partition("/")[2].upper())


# ---- time ----


@pytest.mark.parametrize("gpu", TIMES)
def test_times_are_those_measured(gpu):
    rows = json.loads((ROOT / "benchmarks" / "results" / gpu / "attend.json").read_text())["rows"]
    measured: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        at, found = row["params"], row["metrics"]
        if row["bench"] == "ceilings":
            assert GPUS[gpu] == round(found["read_tbps"] * 1e12)
        if row["bench"] != "attend" or at["group"] > 8 or at["head_dim"] != 128:
            continue
        tokens, column = at["batch"] * at["kv_heads"] * at["tokens"], "mixed" if "," in at["bits"] else at["bits"]
        assert found["bytes"] == TIMED_BYTES[column] * tokens
        measured.setdefault((column, tokens), []).append(found["us"])
        if column == "4":
            measured.setdefault(("bf16", tokens), []).append(min(found["cudnn_us"], found["flash_us"]))
    assert {(column, tokens) for column in TIMES[gpu] for tokens in TIMED} == set(measured)
    for (column, tokens), us in measured.items():
        assert TIMES[gpu][column][TIMED.index(tokens)] == pytest.approx(sum(us) / len(us), abs=0.051)


def test_a_step_of_a_measured_shape_takes_what_was_measured():
    one = Model("one", "", (Layer("full", 8, 128),))
    spec = presets()["paper-mse-4"]
    assert decode_seconds(one, spec, 16, 32768, "h100") == pytest.approx(188.7e-6)
    assert decode_seconds(one, 2, 16, 32768, "h200") == pytest.approx(478.8e-6)
    assert decode_seconds(one, spec, 1, 1, "h100") == pytest.approx(5.2e-6)  # not below the shortest time measured
    twice = decode_seconds(one, spec, 64, 32768, "h100")
    assert twice == pytest.approx(4 * 188.7e-6)
    slower = decode_seconds(one, spec, 64, 32768, "l4") / twice
    assert slower == pytest.approx(GPUS["h100"] / GPUS["l4"], rel=0.01)
    eight = Model("eight", "", (Layer("full", 8, 128),) * 8)
    times = [decode_seconds(eight, spec, 1, 2**i, "h100") for i in range(24)]
    assert times == sorted(times)
    with pytest.raises(NotImplementedError, match="not timed"):
        decode_seconds(one, presets()["skainet-balanced"], 1, 100, "h100")


@pytest.mark.parametrize(
    "spec,column",
    [
        (CacheSpec(4, 3), "4"),
        (CacheSpec(3, 2), "3"),
        (CacheSpec(1, 2), "2"),
        (CacheSpec(5, 5), "4"),
        (CacheSpec(budget=3), "3"),
        (CacheSpec(budget=3.5), "mixed"),
        (CacheSpec(budget=2.5, method="widths"), "3"),
        (CacheSpec(budget=3, method="axes"), "mixed"),
        (CacheSpec(2.5, 2.5), "mixed"),
        (CacheSpec(4, (4, 4, 3, 3)), "mixed"),
    ],
    ids=str,
)
def test_widths_count_as_their_mean(spec, column):
    assert calc.timed_as(spec) == column


# ---- the command ----


def test_a_table_of_sizes(capsys):
    arguments = ["calc", "llama-3-8b", "--batch", "2", "--tokens", "4096", "--spec", "default,3,turboesm"]
    assert main([*arguments, "--memory", "10 GB"]) == 0
    out = capsys.readouterr().out
    size = sum(packed_parts(read_model("llama-3-8b"), presets()["default"], 2, 4096).values())
    cells = re.search(r"^default +([\d,]+) +([\d.]+) +([\d.]+)x +([\d,]+) +([\d.]+) ms, +(\d+)%$", out, re.MULTILINE)
    assert int(cells[1].replace(",", "")) == size and float(cells[2]) == pytest.approx(size / 2**30, abs=1e-3)
    bf16 = 2 * 4096 * 32 * 2 * 8 * 128 * 2
    read = calc.bytes_read(read_model("llama-3-8b"), presets()["default"], 2, 4096)
    assert int(cells[6]) == pytest.approx(100 * read / (1e-3 * float(cells[5])) / GPUS["h100"], abs=0.6)
    assert f"{bf16:,}" in out and float(cells[3]) == pytest.approx(bf16 / size, abs=0.01)
    assert re.search(r"^turboesm .* not timed$", out, re.MULTILINE)
    assert "estimate" in out and "guess" not in out
    assert main([*arguments, "--gpu", "L4"]) == 0
    assert "step, L4 (guess)" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "why"), [
    ("deepseek-v3", "its attention is latent"),
    ("gemma-3n-e4b", "some of its layers share keys and values"),
    ("llama-4-scout", "some of its layers attend in chunks"),
])  # fmt: skip
def test_models_that_are_not_counted(name, why, capsys):
    """Their full caches are counted, and one sentence says why the packed ones are not."""
    assert main(["calc", name]) == 1
    out = capsys.readouterr().out
    assert re.search(rf"^Its cache packed by 4, 3, 2 is not counted: {why}\.$", out, re.MULTILINE)
    assert re.search(r"^bf16 +[\d,]{9,}", out, re.MULTILINE)
    assert not re.search(r"^4 ", out, re.MULTILINE)
    with pytest.raises(NotImplementedError, match=why):
        packed_parts(read_model(name), presets()["default"], 1, 1)


def test_a_preset_that_is_not_counted(capsys):
    """The preset is named, and the others are counted."""
    assert main(["calc", "gemma-4-26b-a4b", "--spec", "4,esm-default"]) == 1
    out = capsys.readouterr().out
    assert "\nIts cache packed by esm-default is not counted: " in out
    assert re.search(r"^4 +[\d,]{9,}", out, re.MULTILINE)


def test_more_memory_than_floats_count(capsys):
    assert main(["calc", "llama-3-8b", "--memory", "9" * 310 + "TB"]) == 0
    assert len(re.findall("no limit", capsys.readouterr().out)) == 6


@pytest.mark.parametrize(("arguments", "wants"), [
    (["lama-3-8b"], "got 'lama-3-8b': did you mean llama-3-8b"),
    (["meta-llama/Llama-3-8B"], "did you mean"),
    (["no such thing at all"], "`turboquant calc` without a model lists the table"),
    ([str(ROOT / "README.md")], "MODEL must be a folder with a config.json, or such a file"),
    (["llama-3-8b", "--tokens", "0"], "--tokens must be in 1..2147483647, got 0"),
    (["llama-3-8b", "--tokens", "many"], "argument --tokens: invalid int value: 'many'"),
    (["llama-3-8b", "--batch", "-1"], "--batch must be in 1..2147483647, got -1"),
    (["llama-3-8b", "--memory", "40"], "--memory must be a size above 0 such as 40GB or 512MiB, got '40'"),
    (["llama-3-8b", "--memory", "0GB"], "--memory must be a size above 0"),
    (["llama-3-8b", "--memory", "lots"], "--memory must be a size above 0"),
    (["llama-3-8b", "--gpu", "h300"], "--gpu must be one of h100, h200,"),
    (["llama-3-8b", "--spec", "defalt"], "did you mean 'default'"),
    (["llama-3-8b", "--spec", "9"], "--spec must be a preset or a number of bits, got 9.0: `key_bits` must be in"),
    (["llama-3-8b", "--spec", "inf"], "--spec must be a preset or a number of bits, got inf"),
    (["llama-3-8b", "--spec", ""], "--spec must be a preset, got ''"),
])  # fmt: skip
def test_wrong_arguments(arguments, wants, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["calc", *arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and wants in error and "Traceback" not in error


_NO_DECODER = "MODEL must be a decoder with attention, got"


@pytest.mark.parametrize(("name", "fields", "wants"), [
    ("T5Config", dict(vocab_size=96, d_model=64, num_layers=2, num_heads=4), _NO_DECODER),
    ("EsmConfig", dict(vocab_size=33, hidden_size=64, num_attention_heads=4, pad_token_id=1), _NO_DECODER),
    ("MambaConfig", dict(num_hidden_layers=2), _NO_DECODER),
    ("SamConfig", {}, _NO_DECODER),
    ("MiMoV2FlashConfig", {}, "keys of 192 and values of 128 channels"),
])  # fmt: skip
def test_models_without_such_a_cache_are_refused(name, fields, wants, tmp_path, capsys):
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    getattr(transformers, name)(**fields).save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        main(["calc", str(tmp_path)])
    assert wants in capsys.readouterr().err


def test_the_table_needs_neither_torch_nor_transformers(tmp_path):
    blocked = "import sys; sys.modules.update(torch=None, transformers=None); from turboquant.cli import main; "
    for model, code in (("llama-3-8b", 0), (str(tmp_path), 2)):
        run = subprocess.run([sys.executable, "-c", f"{blocked}sys.exit(main(['calc', {model!r}]))"], cwd=ROOT,
                             capture_output=True, text=True)  # fmt: skip
        assert run.returncode == code, run.stderr
    assert "calc needs: pip install 'turboquant-attention[hf]'" in run.stderr


def test_dtypes_are_those_of_torch():
    assert {name: getattr(torch, name).itemsize for name in calc_table.ITEM_BYTES} == calc_table.ITEM_BYTES


def test_a_refused_option_prints_no_result(capsys):
    with pytest.raises(SystemExit):
        main(["calc", "llama-3-8b", "--quality", "0.1"])
    shown = capsys.readouterr()
    assert shown.out == "" and "--profile must be a file" in shown.err and len(shown.err.splitlines()) == 1


def test_a_closed_standard_output():
    for command in ("presets", "calc"):
        done = subprocess.run(f"exec {sys.executable} -m turboquant {command} >&-", shell=True, cwd=ROOT,
                              capture_output=True, text=True)  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
