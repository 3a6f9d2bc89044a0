"""The one writer of tables, for terminals and in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["table"]


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,), markdown: bool = False) -> str:
    """Rows of cells as lines of text. The first row is the head.

    left      columns that are aligned to the left; all others are numbers, which end alike
    markdown  as Markdown; otherwise columns are as wide as their widest cell, two blanks apart
    """
    columns = range(len(rows[0]))
    if markdown:
        rule = ["---" if i in left else "---:" for i in columns]
        return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))
    aligned = [_aligned(cells, i in left) for i, cells in enumerate(zip(*rows, strict=True))]
    return "\n".join("  ".join(row).rstrip() for row in zip(*aligned))


def _aligned(cells: Sequence[str], left: bool) -> list[str]:
    width = max(map(len, cells))
    return [cell.ljust(width) if left else cell.rjust(width) for cell in cells]
