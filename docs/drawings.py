"""Draws docs/life_of_a_key.svg and docs/life_of_a_query.svg.

python docs/drawings.py
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
WIDTH, LINE = 860, 17
COLOURS = {"exact": "#fdf1d8", "packed": "#dcebfb", "result": "#e2f3e1", "plain": "#ffffff"}
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" \
font-family="sans-serif" font-size="12">
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">\
<path d="M0,0 L8,4 L0,8 z" fill="#444"/></marker></defs>
<rect width="{w}" height="{h}" fill="#fff"/>"""


class Drawing:
    """Boxes of text and arrows between them; sizes are in pixels."""

    def __init__(self, height: int) -> None:
        self.parts = [HEAD.format(w=WIDTH, h=height)]

    def text(self, x: float, y: float, words: str, anchor: str = "middle", style: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="#222"{style}>{escape(words)}</text>')

    def box(self, x: int, y: int, width: int, height: int, lines: str, kind: str = "plain") -> None:
        """Draws a box of text, whose first line is bold."""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{COLOURS[kind]}" '
                          'stroke="#777"/>')  # fmt: skip
        rows = lines.split("\n")
        top = y + height / 2 - LINE * (len(rows) - 1) / 2 + 4
        for i, row in enumerate(rows):
            self.text(x + width / 2, top + LINE * i, row, style="" if i else ' font-weight="bold"')

    def arrow(self, *points: tuple[int, int], words: str = "") -> None:
        """Draws an arrow through points, with words beside the middle of its last stretch."""
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="#444" marker-end="url(#tip)"/>')
        if words:
            (x0, y0), (x1, y1) = points[-2:]
            self.text((x0 + x1) / 2 + (8 if x0 == x1 else 0), (y0 + y1) / 2 + (4 if x0 == x1 else -6), words,
                      "start" if x0 == x1 else "middle")  # fmt: skip

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def key() -> str:
    d = Drawing(600)
    d.box(20, 20, 240, 62, "key k of one token, one KV head\nafter RoPE, in the model's dtype\n128 channels: 256 bytes")
    d.box(300, 20, 250, 62, "sinks: the first 4 tokens\nexact, for good", "exact")
    d.box(590, 20, 250, 62, "window: the last 128 tokens\nexact, until newer ones push it out", "exact")
    d.arrow((260, 51), (300, 51))
    d.arrow((550, 51), (590, 51), words="or")
    d.arrow((715, 82), (715, 112), (140, 112), (140, 142))
    d.text(430, 106, "a token leaves the window once, and is quantised then; its codes never change")
    steps = [
        ("subtract the centre", "k - c\nc: the mean key of the head"),
        ("rotate", "z = R (k - c)\nrandom signs, Hadamard:\nchannels become alike"),
        ("divide by the rms", "u = z / rms(z)\neach coordinate is now\nlike one of N(0, 1)"),
        ("round", "to the nearest of 16 levels\n(Lloyd-Max for N(0, 1)):\n128 codes of 4 bits"),
    ]
    for i, (name, lines) in enumerate(steps):
        d.box(20 + 210 * i, 142, 190, 90, f"{name}\n{lines}")
        if i:
            d.arrow((20 + 210 * i - 20, 187), (20 + 210 * i, 187))
    d.box(440, 272, 190, 74, "scale\nrms(z) <u, u> / <levels, u>\none binary16 number")
    d.box(650, 272, 190, 74, "codes\n128 x 4 bits = 64 bytes,\nlaid out for tensor cores")
    d.arrow((745, 232), (745, 272))
    d.arrow((660, 232), (660, 252), (535, 252), (535, 272))
    d.text(20, 300, "The scale makes inner products with any", "start")
    d.text(20, 318, "query right on average, over random rotations.", "start")
    d.text(20, 336, "64 + 2 bytes: 3.88 times fewer than 256.", "start")
    d.arrow((535, 346), (535, 400))
    d.arrow((745, 346), (745, 400))
    d.box(20, 400, 820, 44, "record of one page and one KV head: 128 tokens, 16,896 bytes", "packed")
    parts = (("key codes", 360), ("value codes", 360), ("key scales", 50), ("value scales", 50))
    x = 20
    for name, width in parts:
        d.box(x, 444, width, 40, "" if width < 100 else name, "packed")
        x += width
    d.text(840, 504, "key scales, value scales", "end")
    d.text(20, 532, "Values take the same way without a centre. Pages of a layer stand in one tensor,", "start")
    d.text(20, 550, "[pages, KV heads, record bytes]; a block table says which pages a sequence has.", "start")
    d.text(20, 580, "Numbers are those of 4 bits and 128 channels, and of the preset default.", "start")
    return d.svg()


def query() -> str:
    d = Drawing(560)
    d.box(20, 20, 250, 62, "queries of one token\nthe query heads of one KV head,\nin the model's dtype")
    d.box(330, 20, 220, 62, "rotate\nR q, and fixed point:\nintegers of 15 or 16 bits")
    d.arrow((270, 51), (330, 51))
    d.box(20, 142, 250, 96, "exact tokens: sinks, window\nscore = <q, k>\nin the model's dtype", "exact")
    d.box(330, 142, 510, 96, "packed tokens, page by page\nscore = scale of k x <R q, levels of k> + <q, centre>\n"
          "codes become int8 levels in registers;\nint8 products, summed in integers", "packed")  # fmt: skip
    d.arrow((145, 82), (145, 142))
    d.arrow((440, 82), (440, 142))
    d.box(20, 288, 820, 52, "one softmax over all tokens\n"
          "parts of a long cache run on their own and are merged by their log-sum-exp")  # fmt: skip
    d.arrow((145, 238), (145, 288))
    d.arrow((585, 238), (585, 288))
    d.box(20, 390, 250, 74, "exact values\nsum of weight x v", "exact")
    d.box(
        330, 390, 330, 74, "packed values\nsum of (weight x scale of v) x levels of v,\nin the rotated space", "packed"
    )
    d.arrow((145, 340), (145, 390), words="weights")
    d.arrow((495, 340), (495, 390), words="weights")
    d.box(700, 390, 140, 74, "rotate back\nR^T, once for\nall tokens")
    d.arrow((660, 427), (700, 427))
    d.box(330, 494, 220, 46, "output of the head", "result")
    d.arrow((145, 464), (145, 517), (330, 517))
    d.arrow((770, 464), (770, 517), (550, 517))
    d.text(20, 548, "No key or value is decoded to memory.", "start")
    return d.svg()


DRAWINGS = {"life_of_a_key.svg": key, "life_of_a_query.svg": query}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (HERE / name).write_text(draw(), encoding="utf-8")
