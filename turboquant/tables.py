"""Tables for terminals, in Markdown, and in HTML for notebooks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape

__all__ = ["html", "measures", "table"]


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,), markdown: bool = False) -> str:
    """Returns rows of cells as lines of text. The first row is the head.

    left      columns that are aligned to the left; the others, numbers, are aligned to the right
    markdown  write Markdown; otherwise columns are as wide as their widest cell, two blanks apart
    """
    columns = range(len(rows[0]))
    if markdown:
        rule = ["---" if i in left else "---:" for i in columns]
        return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))
    aligned = [_aligned(cells, i in left) for i, cells in enumerate(zip(*rows, strict=True))]
    return "\n".join("  ".join(row).rstrip() for row in zip(*aligned))


def html(rows: Sequence[Sequence[str]], left: Collection[int] = (0,), notes: Sequence[str] = ()) -> str:
    """Returns rows as an HTML table with notes below it, one line each. Notebooks show results in this form."""

    def line(row: Sequence[str], tag: str) -> str:
        sides = ("left" if i in left else "right" for i in range(len(row)))
        return "".join(f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>' for side, cell in zip(sides, row))

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows[1:])
    below = "<br>".join(map(escape, notes))
    return f"<table><thead><tr>{line(rows[0], 'th')}</tr></thead><tbody>{body}</tbody></table><p>{below}</p>"


def measures(numbers: Mapping[str, float]) -> list[tuple[str, str]]:
    """Returns a table's rows of names and numbers."""
    return [("measure", "value"), *((name.replace("_", " "), f"{number:,.6g}") for name, number in numbers.items())]


def _aligned(cells: Sequence[str], left: bool) -> list[str]:
    width = max(map(len, cells))
    return [cell.ljust(width) if left else cell.rjust(width) for cell in cells]
