"""Every integer that a request or a file can set has bounds (turboquant.arguments.BOUNDS). Beyond them the call raises
an error that names the argument, before it allocates anything."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from profiles import made_calibration, profile_of

import turboquant
from turboquant.arguments import BOUNDS
from turboquant.cli import main, make_parser
from turboquant.cli.calc import read_model
from turboquant.files import read_header
from turboquant.measured.choice import Trial

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers")
import models  # noqa: E402

from turboquant import Codec, ops  # noqa: E402

DEMO = str(ROOT / "demo" / "turboquant_demo")


@cache
def filled() -> Any:
    """A cache of two sequences of 40 tokens."""
    model = models.tiny()
    held = turboquant.TurboQuantCache(
        model, turboquant.CacheSpec(key_bits=4, value_bits=4, centre="none", metric="none")
    )
    with torch.no_grad():
        turboquant.patch(model)
        model(torch.arange(80).view(2, 40), past_key_values=held)
    return held


@cache
def packed() -> tuple[Any, Any]:
    k = torch.ones(1, 1, 4, 64)
    return k, ops.pack(k, k, bits=4, max_tokens=64)


@cache
def index() -> Any:
    index = turboquant.Index(64)
    index.add(np.eye(64, dtype=np.float32))
    return index


@cache
def model() -> Any:
    return models.tiny()


def tokenizer(text: str, **_: Any) -> dict[str, list[int]]:
    return {"input_ids": list(range(10))}


def evaluate(**given: Any) -> Any:
    from turboquant.evaluation.decoder import evaluate as run

    return run(model(), torch.arange(8)[None], "default", **given)


def text_windows(windows: Any, length: Any) -> Any:
    from turboquant.evaluation.decoder import text_windows as run

    return run("a text", tokenizer, windows, length)


def scanned(size: Any) -> None:
    from turboquant.models.esm import check_batch_size

    check_batch_size(size)


def embedded(memory: Any) -> None:
    from esm_models import tiny_esm

    from turboquant import esm

    esm.embed(tiny_esm(), ["MK"], memory=memory)


def eye() -> Any:
    return np.eye(64, dtype=np.float32)[:1]


def _put(meta: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        meta = meta[key]
    meta[path[-1]] = value


@cache
def files() -> dict[str, Path]:
    """A file of each kind."""
    folder = Path(tempfile.mkdtemp())
    found = {name: folder / name for name in ("cache", "wave", "index", "profile", "calibrated", "config")}
    filled().save(found["cache"])
    profile = turboquant.measure(model())
    profile.save(found["profile"])
    turboquant.TurboQuantCache(model(), "default", profile=profile).save(found["wave"])
    profile_of(made_calibration(np.random.default_rng(0))).save(found["calibrated"])
    index().save(found["index"])
    model().config.save_pretrained(found["config"])
    return found


def forged(kind: str, *path: Any) -> Callable[[Any], Any]:
    """Returns a function that loads a file with a given number at `path` in the header."""
    profile = turboquant.Profile.load
    loaders = {"index": turboquant.Index.load, "profile": profile, "calibrated": profile}

    def load(value: Any) -> Any:
        def read(file: Any, form: str) -> Any:
            meta, tensors, start = read_header(file, form)
            _put(meta, path, value)
            return meta, tensors, start

        file = files()[kind]
        with pytest.MonkeyPatch.context() as patch:
            for module in ("files", "hf.persistence", "index.storage"):
                patch.setattr(f"turboquant.{module}.read_header", read)
            return loaders.get(kind, turboquant.TurboQuantCache.load)(file)

    return load


def configured(name: str) -> Callable[[Any], Any]:
    """Returns a function that reads a config.json with a given number as `name`, in `text_config` and at the top."""

    def read(value: Any) -> Any:
        file = Path(tempfile.mkdtemp(), "config.json")
        given = json.loads((files()["config"] / "config.json").read_text())
        for forged in ({"text_config": {name: value}}, {**given, name: value}):
            file.write_text(json.dumps(forged))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("transformers.AutoConfig.from_pretrained", pytest.fail)  # it makes lists of layers
                read_model(str(file))

    return read


@cache
def codec() -> Codec:
    return Codec(models.tiny(), turboquant.CacheSpec(4, 4, centre="none", metric="none"))


CALLS: dict[str, Callable[[Any], Any]] = {
    "crop: `tokens`": lambda n: filled().crop(n),
    "batch_repeat_interleave: `repeats`": lambda n: filled().batch_repeat_interleave(n),
    "pack: `max_tokens`": lambda n: ops.pack(packed()[0], packed()[0], bits=4, max_tokens=n),
    "pack: `sinks`": lambda n: ops.pack(packed()[0], packed()[0], bits=4, sinks=n),
    "pack: `window`": lambda n: ops.pack(packed()[0], packed()[0], bits=4, window=n),
    "attend: `sliding_window`": lambda n: ops.attend(packed()[0][:, :, :1], packed()[1], sliding_window=n),
    "append_attend: `sliding_window`": lambda n: ops.append_attend(
        *(packed()[0][:, :, :1],) * 3, packed()[1], sliding_window=n
    ),
    "schedule: `sliding_window`": lambda n: ops.schedule(packed()[0][:, :, :1], packed()[1], sliding_window=n),
    "Index: `dim`": lambda n: turboquant.Index(n),
    "Index: `bits`": lambda n: turboquant.Index(64, bits=n),
    "Index: `seed`": lambda n: turboquant.Index(64, seed=n),
    "Index: `lists`": lambda n: turboquant.Index(64, lists=n),
    "search: `k`": lambda n: index().search(eye(), n),
    "search: `factor`": lambda n: index().search(  # None is the default
        eye(), 1, refine=np.eye(64, dtype=np.float32), factor=0.5 if n is None else n
    ),
    "search: `threads`": lambda n: index().search(eye(), 1, threads=n),
    "range_search: `threads`": lambda n: index().range_search(eye(), 0.5, threads=n),
    "codec: `start`": lambda n: codec()._starting("codec", n),
    "codec: `page`": lambda n: codec().boundary(n),
    "codec: `tokens`": lambda n: codec().nbytes(n),
    "Codes: `vectors`": lambda n: turboquant.Codes(turboquant.Plan(64, 4), np.zeros((1, 1, 1), np.uint8), n),
    "load: `exponent`": forged("index", "exponent"),
    "load: `factor`": forged("index", "factor"),
    "load: `next_id`": forged("index", "next_id"),
    "load: `first_id`": forged("index", "first_id"),
    "cache file: `positions`": forged("cache", "positions"),
    "cache file: `kv_heads`": forged("cache", "sizes", 0, 0),
    "cache file: `head_dim`": forged("cache", "sizes", 0, 1),
    "cache file: `padding`": forged("cache", "padding", 1),
    "cache file: `released`": forged("cache", "released", 1),
    "cache file: `sliding_windows`": forged("cache", "sliding_windows", 0),
    "cache file: `moments`": forged("wave", "moments", "shapes", 0, 0),
    "Moments: `tokens`": forged("profile", "moments", "tokens"),
    "Calibration: `tokens`": forged("calibrated", "calibration", "tokens"),
    "Calibration: `seed`": forged("calibrated", "calibration", "seed"),
    "Calibration: `windows`": lambda n: made_calibration(np.random.default_rng(0), windows=(n,)),
    "Trial: `window`": lambda n: Trial(n, 4.0, "none", 32, 0.0),
    **{name: configured(name.split("`")[1]) for name in BOUNDS if name.startswith("config.json")},
    "evaluate: `chunk`": lambda n: evaluate(chunk=n),
    "evaluate: `batch`": lambda n: evaluate(batch=n),
    "evaluate: `generate`": lambda n: evaluate(generate=n),
    "text_windows: `windows`": lambda n: text_windows(n, 2),
    "text_windows: `length`": lambda n: text_windows(1, n),
    "calibrate: `sensitivity_batches`": lambda n: turboquant.calibrate(
        model(), [torch.arange(200).view(2, 100) % 50], sensitivity_batches=n
    ),
    "`batch_size`": scanned,
    "embed: `memory`": lambda n: embedded(0.5 if n is None else n),  # None is the default
    "`seed`": lambda n: turboquant.calibrate(model(), [torch.arange(200).view(2, 100) % 50], seed=n),
    "patch: `tokens`": lambda n: turboquant.patch(model(), memory="1 GiB", tokens=0.5 if n is None else n),
    "calc: --batch": lambda n: main(["calc", "llama-3-8b", "--batch", str(n)]),
    "calc: --tokens": lambda n: main(["calc", "llama-3-8b", "--tokens", str(n)]),
    "calibrate: --tokens": lambda n: main(["calibrate", DEMO, "--out", "o", "--text", "t", "--tokens", str(n)]),
    "calibrate: --seed": lambda n: main(["calibrate", DEMO, "--out", "o", "--seed", str(n)]),
    "chat: --seed": lambda n: main(["chat", DEMO, "--seed", str(n)]),
    "demo: --prompt-tokens": lambda n: main(["demo", "--prompt-tokens", str(n)]),
    "demo: --tokens": lambda n: main(["demo", "--tokens", str(n)]),
    "demo: --seed": lambda n: main(["demo", "--seed", str(n)]),
    "doctor: --tokens": lambda n: main(["doctor", "--tokens", str(n)]),
    "chat: --tokens": lambda n: main(["chat", DEMO, "--tokens", str(n)]),
    "eval: --batch": lambda n: main(["eval", DEMO, "--text", "t", "--spec", "default", "--batch", str(n)]),
    "eval: --generate": lambda n: main(["eval", DEMO, "--text", "t", "--spec", "default", "--generate", str(n)]),
    "eval: --proteins": lambda n: main(["eval", DEMO, "--fasta", "f", "--spec", "default", "--proteins", str(n)]),
    "eval: --windows": lambda n: main(["eval", DEMO, "--text", "t", "--spec", "default", "--windows", str(n)]),
    "eval: --length": lambda n: main(["eval", DEMO, "--text", "t", "--spec", "default", "--length", str(n)]),
    "esm-scan: --batch": lambda n: main(["esm-scan", "f", "--model", DEMO, "--csv", "-", "--batch", str(n)]),
    "esm-embed: --memory": lambda n: main(["esm-embed", "f", "--model", DEMO, "--out", "o", "--memory", str(n)]),
    "esm-embed: --window": lambda n: main(["esm-embed", "f", "--model", DEMO, "--out", "o", "--window", str(n)]),
    "esm-embed: --overlap": lambda n: main(["esm-embed", "f", "--model", DEMO, "--out", "o", "--overlap", str(n)]),
    "index build: --bits": lambda n: main(["index", "build", "x", "--out", "o", "--bits", str(n)]),
    "index build: --lists": lambda n: main(["index", "build", "x", "--out", "o", "--lists", str(n)]),
    "index build: --seed": lambda n: main(["index", "build", "x", "--out", "o", "--seed", str(n)]),
    "index search: -k": lambda n: main(["index", "search", "x", "q", "-k", str(n)]),
    "index search: --factor": lambda n: main(["index", "search", "x", "q", "--factor", str(n)]),
    "index search: --probe": lambda n: main(["index", "search", "x", "q", "--probe", str(n)]),
    "index search: --threads": lambda n: main(["index", "search", "x", "q", "--threads", str(n)]),
}
IN_FILES = ("load", "cache file", "Moments", "Calibration: `tokens`", "Calibration: `seed`", "config.json")
FILES = [name for name in BOUNDS if name.startswith(IN_FILES)]
OPTIONS = [name for name in BOUNDS if ": -" in name]


def test_every_bound_has_a_call() -> None:
    assert list(CALLS) == list(BOUNDS)


@pytest.mark.parametrize("name", BOUNDS)
def test_beyond_its_bounds(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (low, high), call = BOUNDS[name], CALLS[name]
    before = filled().get_seq_length()
    assert files()
    for value in (low - 1, high + 1, 2**64, -(2**63) - 1, 10**30):
        tracemalloc.start()
        text = f"{name.rpartition(': ')[2] if name in OPTIONS else name} must be in {low}..{high}, got {value}"
        if name in OPTIONS:
            with pytest.raises(SystemExit, match="^2$"):
                call(value)
            assert text in capsys.readouterr().err
        else:
            with pytest.raises(ValueError, match=re.escape(text)):
                call(value)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 4 << 20
    assert filled().get_seq_length() == before and len(packed()[1]) == 4


def no_integers(name: str) -> tuple[Any, ...]:
    """Values that are refused. A configuration may also have null, or a list with a number for each layer."""
    return (True, 1.0, "1", *(() if name.startswith("config.json") else (None, [1], float("nan"))))


@pytest.mark.parametrize("name, value", [(n, v) for n in BOUNDS if n not in OPTIONS for v in no_integers(n)], ids=repr)
def test_no_integer(name: str, value: Any) -> None:
    kind = ValueError if name in FILES else TypeError  # the file counts as one that turboquant did not write
    with pytest.raises(kind, match=re.escape(f"{name} must be an integer, got")):
        CALLS[name](value)


@pytest.mark.parametrize(
    "name",
    ["pack: `sinks`", "search: `k`", "search: `threads`", "attend: `sliding_window`", "schedule: `sliding_window`"],
)
def test_within(name: str) -> None:
    CALLS[name](BOUNDS[name][0])


def test_the_documented_table() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    rows = dict(re.findall(r"^\| (.+?) \| (-?[\d,]+ to [\d,]+) \|$", page, re.MULTILINE))
    assert rows == {name: f"{low:,} to {high:,}" for name, (low, high) in BOUNDS.items()}


def integer_options(parser: argparse.ArgumentParser, command: str = "") -> Iterator[str]:
    """The options of a command and those inside it that take an integer, as the table names them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inside in action.choices.items():
                yield from integer_options(inside, f"{command} {name}".strip())
        elif action.type is int:
            yield f"{command}: {max(action.option_strings, key=len)}"


def test_every_option_is_in_the_table() -> None:
    found = {*integer_options(make_parser())}
    assert found and found <= {*OPTIONS}, found - {*OPTIONS}
