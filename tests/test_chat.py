"""`turboquant chat`: turns on one cache, with and without a chat template."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

pytest.importorskip("turboquant._core")
import models  # noqa: F401  skips without torch and transformers

from turboquant.cli import main

pytestmark = pytest.mark.usefixtures("kept_profiles")

DEMO = str(ROOT / "demo" / "turboquant_demo")
LINE = r"\[([\d,]+) tokens: ([\d,]+) bytes held, ([\d,]+) in bfloat16, [\d.]+x, [\d.]+ tokens a second\]"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}\n{% endfor %}{{ 'a:' if add_generation_prompt }}"
)


def numbers(text: str) -> list[list[int]]:
    return [[int(n.replace(",", "")) for n in found] for found in re.findall(LINE, text)]


def talk(monkeypatch, *messages: str) -> None:
    said = iter(messages)

    def read(prompt: str) -> str:
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)


def test_turns_on_one_cache(monkeypatch, capsys):
    from turboquant.hf.cache import TurboQuantCache

    made, plain = [], TurboQuantCache.__init__
    monkeypatch.setattr(TurboQuantCache, "__init__", lambda self, *a, **k: made.append(1) or plain(self, *a, **k))
    talk(monkeypatch, "Marley was dead, to begin with.", "", "There is no doubt whatever about that.")
    assert main(["chat", DEMO, "--tokens", "12", "--temperature", "0", "--spec", "3"]) == 0
    out, err = capsys.readouterr()
    (first, held, full), (second, _, later) = numbers(err)
    assert second > first + 12 and full < later and held > 0 and len(made) == 1
    # 4 layers, 2 KV heads of 64 channels, keys and values, 2 bytes; the last token is not in the cache yet
    assert later == (second - 1) * 4 * 2 * 64 * 2 * 2
    assert len(out.split()) > 8


def test_a_chat_template(monkeypatch, capsys):
    """A template that writes earlier turns differently gets a new cache for each turn."""
    from turboquant.cli import commands as cli
    from turboquant.hf.cache import TurboQuantCache

    made, init = [], TurboQuantCache.__init__
    monkeypatch.setattr(TurboQuantCache, "__init__", lambda self, *a, **k: made.append(1) or init(self, *a, **k))

    plain = cli._tokenizer

    def with_template(name):
        tokenizer = plain(name)
        tokenizer.chat_template = "{{ messages|length }}" + TEMPLATE
        return tokenizer

    monkeypatch.setattr(cli, "_tokenizer", with_template)
    talk(monkeypatch, "Who was dead?", "And then?")
    assert main(["chat", DEMO, "--tokens", "8", "--seed", "3"]) == 0
    assert len(numbers(capsys.readouterr().err)) == 2 and len(made) == 2


@pytest.mark.parametrize(("options", "wants"), [
    (["--tokens", "0"], "--tokens must be in 1..1048576, got 0"),
    (["--temperature", "-1"], "--temperature must be in 0..100, got -1.0"),
    (["--spec", "calibrated-3"], "--profile must name a file for calibrated-3"),
    (["--spec", "defalt"], "did you mean 'default'"),
    (["--spec", "9"], "--spec must be a preset or a number of bits, got 9.0"),
])  # fmt: skip
def test_wrong_options(options, wants, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["chat", DEMO, *options])
    assert ended.value.code == 2 and wants in capsys.readouterr().err
