"""A Sphinx extension that puts into pages what programs print about themselves, so that it cannot go stale.

``.. operators::`` describes each of ``torch.ops.turboquant``; ``.. help-of:: COMMAND`` is what COMMAND --help prints.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

from docstrings import to_rst
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

COLUMNS = 100


class Operators(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        import torch

        import turboquant.ops  # noqa: F401

        registered = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
        lines = []
        names = {name.partition(".")[0] for library, name in registered if library == "turboquant"}
        for name in sorted(names):
            head, _, text = getattr(torch.ops.turboquant, name).__doc__.partition("\n\n")
            overloads = [one.partition(" -> ") for one in re.split(rf" (?={name}\.)", " ".join(head.split()))]
            returned = overloads[0][2]
            body = to_rst([f"Returns ``{returned}``.", "", *(line.removeprefix("    ") for line in text.split("\n"))])
            for start, (call, _, _) in zip((".. py:function::", *["                "] * len(overloads)), overloads):
                lines.append(f"{start} torch.ops.turboquant.{call}")
            lines.append("")
            lines += [*(f"   {line}" for line in "\n".join(body).split("\n")), ""]
        parent = nodes.Element()
        self.state.nested_parse(StringList(lines, "torch.ops.turboquant"), 0, parent)
        return parent.children


class HelpOf(SphinxDirective):
    required_arguments = 1
    optional_arguments = 9

    def run(self) -> list[nodes.Node]:
        command = [*self.arguments, "--help"]
        assert command[0] == "turboquant"
        run = [sys.executable, "-m", *command]
        environment = os.environ | {"COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
        said = subprocess.run(run, capture_output=True, text=True, check=True, env=environment).stdout
        text = f"$ {' '.join(command)}\n{said.rstrip()}"
        return [nodes.literal_block(text, text, language="console")]


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("operators", Operators)
    app.add_directive("help-of", HelpOf)
    return {"parallel_read_safe": True}
