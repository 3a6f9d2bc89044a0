"""A Sphinx extension that turns this project's docstrings, plain text made for `help()`, into reStructuredText.

It knows paragraphs; entries such as ``name, name: text`` and ``name   text``, one after the other, whose further lines
may be indented; indented blocks, which are tables of such entries or code. Text in backticks stays code.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from sphinx.util.inspect import signature, stringify_signature

_NAME = r"\**[A-Za-z_][\w.*]*"
_NAMES = rf"({_NAME}(?:, {_NAME})*(?: \([^)]*\))?)"
_ENTRY = re.compile(rf"(?![A-Z]){_NAMES}: +(?=\S)|{_NAMES}  +(?=\S)")
_CODE = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)


def _text(words: str) -> str:
    """Escapes a paragraph, in which only backticks have a meaning."""
    parts = _CODE.split(words)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([\\*|])", r"\\\1", parts[i])
        parts[i] = re.sub(r"_(?=\W|$)", r"\\_", parts[i])
    for i in range(1, len(parts), 2):  # a letter after a backtick would join them
        if not parts[i].startswith("``") and not re.fullmatch(r"`[\w.]+`", parts[i]):
            parts[i] = f"`{parts[i]}`"
        if parts[i + 1][:1].isalnum():
            parts[i + 1] = "\\ " + parts[i + 1]
    return "".join(parts)


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    """Yields runs of lines without a blank one."""
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line)
        elif block:
            yield block
            block = []


def _entry(names: str, text: list[str]) -> list[str]:
    term = re.sub(_NAME, lambda m: f"``{m[0]}``", names.partition(" (")[0])
    rest = _text(names[len(names.partition(" (")[0]) :])
    return [term + rest, *textwrap.indent(_text("\n".join(s.strip() for s in text)), "   ").split("\n"), ""]


def _described(block: list[str]) -> list[str]:
    """Converts a block at the margin: a paragraph, entries, or one after the other."""
    out: list[str] = []
    names, text = "", [block[0]]
    for i, line in enumerate(block):
        start = _ENTRY.match(line)
        new = not line.startswith(" ") and i and block[i - 1].rstrip().endswith(".") and re.match(r"[A-Z`]", line)
        if start or (names and new) or i == 0:
            if i:
                out += _entry(names, text) if names else [_text("\n".join(text)), ""]
            names, text = (start[1] or start[2], [line[start.end() :]]) if start else ("", [line])
        else:
            text.append(line.strip())
    return [*out, *(_entry(names, text) if names else [_text("\n".join(text)), ""])]


def to_rst(docstring: list[str]) -> list[str]:
    """Returns the lines of a docstring, without its common indentation, as reStructuredText."""
    out: list[str] = []
    for block in _blocks(docstring):
        if not block[0].startswith("    "):
            out += "\n".join(_described(block)).split("\n")
            continue
        inner = textwrap.dedent("\n".join(block)).split("\n")
        if all(_ENTRY.match(line) for line in inner if not line.startswith(" ")):
            out += "\n".join(_described(inner)).split("\n")
        else:
            out += ["::", "", *(f"    {line}" for line in inner), ""]
    return out


def _process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


def _signature(app: Any, what: str, name: str, obj: Any, options: Any, args: str | None, returned: Any) -> Any:
    """Shows a dataclass by its fields, also if it has a `__new__` of its own, with defaults that are Python."""
    if args and what == "class" and dataclasses.is_dataclass(obj):
        args = stringify_signature(signature(obj.__init__, bound_method=True), show_return_annotation=False,
                                   unqualified_typehints=True)  # fmt: skip
        args = args.replace("<factory>", "{}")
    return args, returned


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True}
