"""The calculator of the docs, in headless Chromium: it has the numbers of `turboquant.cli.calc`, and it is drawn."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from conftest import ROOT

pytest.importorskip("turboquant._core")
from turboquant import sizes
from turboquant.cli import calc, main
from turboquant.cli.calc_table import GPUS, MODELS
from turboquant.named_specs import named_or_bits

BROWSER = shutil.which("chromium")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="chromium is not there: apt install chromium")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calculator")
    make = [sys.executable, str(ROOT / "docs" / "calculator" / "make.py"), str(folder)]
    subprocess.run(make, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True)
    return folder / "index.html"


def chromium(page: Path, *options: str, link: str = "") -> str:
    """Returns what Chromium prints. It has no network: no host name resolves."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
               "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={page.parent / 'profile'}",
               *options, f"{page.as_uri()}{link}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Shown(HTMLParser):
    """The text of elements by class, and the cells of the table of results and of the one of all presets."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: dict[str, str] = {}
        self.rows: list[list[str]] = []
        self.all: list[list[str]] = []
        self.inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        name = dict(attributes).get("class") or ""
        if tag in ("p", "pre", "div"):
            self.inside = name
            self.table = self.all if name == "all" else self.rows
        elif tag == "tr":
            self.table.append([])
        elif tag in ("th", "td"):
            self.table[-1].append("")
            self.inside = "cell"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("p", "pre", "td", "th"):
            self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "cell":
            self.table[-1][-1] += data
        else:
            self.words[self.inside] = self.words.get(self.inside, "") + data


def shown(page: Path, **settings: object) -> Shown:
    return Shown(chromium(page, "--dump-dom", link=f"#{urlencode(settings)}" if settings else ""))


# ---- the numbers ----


def some_settings() -> list[dict[str, Any]]:
    """Every model with every spec (one spec if it is refused), with changing context, batch, memory and GPU."""
    contexts = cycle((1, 5, 20, 21, 133, 260, 700, 4097, 8191, 32768, 100_000, 1_048_576, 2**24))
    batches, gpus = cycle((1, 2, 3, 8, 64, 257)), cycle(GPUS)
    memories = cycle((1000, 10**8, 16 * 2**30, 40 * 10**9, 10**13))
    data = json.loads(subprocess.run(  # the specs that the page offers
        [sys.executable, "-c", "import sys, json; sys.path.insert(0, 'docs/calculator'); import make; "
         "print(json.dumps([name for some in make.SPECS.values() for name in some]))"],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True, capture_output=True, text=True).stdout)  # fmt: skip
    settings = []
    for model in MODELS:
        for spec in data if not calc.read_model(model).refused else data[:1]:
            settings.append({"model": model, "batch": next(batches), "tokens": next(contexts), "spec": spec,
                             "memory": next(memories), "gpu": next(gpus)})  # fmt: skip
    return settings


def expected(one: dict[str, Any]) -> dict[str, tuple[Callable[[int], int], list[float]]]:
    """(tokens -> bytes, [seconds of a step, share of the bandwidth]) of each cache, with -1 where it is not timed."""
    model, batch, context, gpu = calc.read_model(one["model"]), one["batch"], one["tokens"], one["gpu"]
    caches: dict[str, Any] = {name: (item, lambda n, item=item: sizes.full_bytes(model, batch, n, item))
                              for name, item in calc.FULL.items()}  # fmt: skip
    spec = named_or_bits(one["spec"], "--spec")
    if not sizes.not_packed(model, spec):
        caches[one["spec"]] = spec, lambda n: sum(sizes.packed_parts(model, spec, batch, n).values())
    rows = {}
    for name, (stored, size) in caches.items():
        try:
            seconds = calc.decode_seconds(model, stored, batch, context, gpu)
            step = [seconds, calc.bytes_read(model, stored, batch, context) / seconds / GPUS[gpu]]
        except NotImplementedError:
            step = [-1, -1]
        rows[name] = size, step
    return rows


def fits(size: Callable[[int], int], tokens: int | None, memory: int) -> bool:
    if tokens is None:
        return size(sizes.MOST_TOKENS) <= memory
    return (tokens == 0 or size(tokens) <= memory) and size(tokens + 1) > memory


def test_every_model_and_spec(page):
    """All numbers are computed in one page, by the function that the page itself calls."""
    settings = some_settings()
    assert len(settings) > 1000
    asked = page.with_name("asked.html")
    asked.write_text(page.read_text() + f"""<script>
        const found = {json.dumps(settings)}.map((one) => document.getElementById("calculator").calculate(one).map(
            (cache) => [cache.name, cache.bytes, cache.fit, cache.step?.seconds ?? -1, cache.step?.share ?? -1]));
        document.body.innerHTML = `<pre class="found">${{JSON.stringify(found)}}</pre>`;
        </script>""")  # fmt: skip
    found = json.loads(Shown(chromium(asked, "--dump-dom")).words["found"])
    assert len(found) == len(settings)
    for one, caches in zip(settings, found):
        wanted = expected(one)
        assert [cache[0] for cache in caches] == list(wanted)
        for name, held, tokens, *step in caches:
            size, wanted_step = wanted[name]
            assert held == size(one["tokens"]) and fits(size, tokens, one["memory"]), (one, name)
            assert step == pytest.approx(wanted_step, rel=1e-12), (one, name)


LINKS = [
    dict(model="llama-3.1-8b", batch=8, tokens=32768, spec="default", memory="40GB", gpu="h200"),
    dict(model="gemma-3-27b", batch=2, tokens=100000, spec="calibrated-3", memory="16 GiB", gpu="l4"),
    dict(model="qwen3-0.6b", batch=1, tokens=700, spec="skainet-balanced", memory="", gpu="h100"),
    dict(model="gemma-4-26b-a4b", batch=1, tokens=9000, spec="paper-mse-4", memory="8GB", gpu="h100"),
    dict(model="gemma-4-26b-a4b", batch=2, tokens=9000, spec="esm-default", memory="8GB", gpu="h100"),
    dict(model="deepseek-v3", batch=3, tokens=5000, spec="2.5", memory="1.5gb", gpu="b200"),
]


@pytest.mark.parametrize("settings", LINKS, ids=lambda settings: f"{settings['model']}-{settings['spec']}")
def test_page_and_command_print_the_same(settings, page, capsys):
    """A link sets the inputs. The command that the page names prints the same text in every cell."""
    seen = shown(page, **settings)
    assert "wrong" not in seen.words
    command = shlex.split(seen.words["command"])
    assert command[:3] == ["turboquant", "calc", settings["model"]]
    for name in ("batch", "tokens", "spec", "gpu"):
        assert command[command.index(f"--{name}") + 1] == str(settings[name])
    assert ("--memory" in command) == bool(settings["memory"])
    refused = main(command[1:])
    printed = capsys.readouterr().out
    about, _, _, _, *lines = printed.splitlines()
    assert seen.words["about"] == about
    assert seen.words.get("refused", "") == (printed.splitlines()[-1] if refused else "")
    heads, *rows = seen.rows
    assert len(rows) == 4 - refused and bool(seen.all) != bool(calc.read_model(settings["model"]).refused)
    for cells, line in zip(rows, lines):
        assert " ".join(cells).split() == line.replace("ms,", "ms").split()
    measured = settings["gpu"] in ("h100", "h200")
    assert any(f"({'estimate' if measured else 'guess'})" in head for head in heads)
    assert ("an estimate from times measured on this GPU" in seen.words["how"]) == measured


def test_all_presets_side_by_side(page):
    """Each row is the one that the table of results has when this preset is chosen."""
    for settings in LINKS[1:3]:
        seen = shown(page, **settings)
        heads, *rows = seen.all
        assert heads == seen.rows[0] and len({row[0] for row in rows}) == len(rows) > 35
        assert seen.rows[-1] in rows
        other = rows[12]
        assert other[0] != settings["spec"] and other == shown(page, **settings | {"spec": other[0]}).rows[-1]


def test_sliders(page):
    """Sliders follow the fields, and fields follow the sliders."""
    asked = page.with_name("slid.html")
    asked.write_text(
        page.read_text()
        + """<script>
        const slider = (name) => document.querySelector(`[data-of=${name}]`);
        const field = (name) => document.querySelector(`[name=${name}]`);
        const found = [["batch", "tokens", "memory"].map((name) => slider(name).value)];
        for (const [name, value] of [["batch", 5], ["tokens", 12.25], ["memory", 6]]) {
            slider(name).value = value;
            slider(name).dispatchEvent(new Event("input", { bubbles: true }));
        }
        found.push(["batch", "tokens", "memory"].map((name) => field(name).value));
        found.push([document.querySelector("#calculator .command").textContent]);
        document.body.innerHTML = `<pre class="found">${JSON.stringify(found)}</pre>`;
        </script>"""
    )
    before, after, command = json.loads(Shown(chromium(asked, "--dump-dom")).words["found"])
    assert before == ["3", "15", "5.375"]  # 8 sequences of 32,768 tokens, 40 GB
    assert after == ["32", "4864", "64GB"]
    assert "--batch 32 --tokens 4864 " in command[0] and "--memory 64GB" in command[0]


@pytest.mark.parametrize(("settings", "wants"), [
    (dict(batch=0), "batch must be in 1..2147483647, got \"0\"."),
    (dict(tokens="many"), "tokens must be in 1..2147483647, got \"many\"."),
    (dict(memory="40"), "memory must be empty or a size above 0 such as 40GB or 512MiB, got \"40\"."),
    (dict(model="<b>lama"), "model must be one of the list, got"),
])  # fmt: skip
def test_wrong_settings(settings, wants, page):
    seen = shown(page, **settings)
    assert seen.words["wrong"].startswith(wants) and not seen.rows


def test_nothing_comes_from_elsewhere(page):
    text = page.read_text()
    assert not re.search(r"\b(src|href|action)\s*=|https?:|url\(|@import|\bfetch\(|XMLHttpRequest|\bimport\(", text)
    assert "@data@" not in text and "@script@" not in text and len(text) < 200_000


# ---- what is seen ----


@pytest.mark.parametrize(("width", "height"), [(1000, 2700), (390, 3600)])
def test_screenshot(width, height, page, tmp_path):
    """All four lines and their labels are drawn in their colours, and nothing is wider than the page."""
    image = pytest.importorskip("PIL.Image")
    chromium(page, f"--screenshot={tmp_path / 'page.png'}", f"--window-size={width},{height}")
    with image.open(tmp_path / "page.png") as file:
        seen = file.convert("RGB")
    assert seen.size == (width, height)
    colours = {colour: count for count, colour in seen.getcolors(2**24)}
    assert len(colours) > 200 and max(colours.values()) < 0.97 * width * height
    for name in re.findall(r"--(?:fp32|bf16|fp8|packed): #(\w{6})", page.read_text()):
        assert colours.get(tuple(bytes.fromhex(name)), 0) > 100, name
    for edge in ((width - 8, 0, width, height), (0, height - 8, width, height)):  # margins, right and below
        assert len(seen.crop(edge).getcolors(2**24)) == 1
