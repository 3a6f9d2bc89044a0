"""Makes codebook_tables.h: for every width and law, int8 magnitudes and one step of least distortion.

    python csrc/core/make_codebooks.py           writes the table
    python csrc/core/make_codebooks.py --check   fails if the committed table is not what would be written

The laws are N(0, 1) and one coordinate of sqrt(d) times a uniform unit vector of d dimensions, both with variance 1.
1 and 2 bits: the best uniform quantiser. 3 to 6 bits: Lloyd-Max levels (Max 1960, Lloyd 1982), rounded to integers
times the step of least distortion among the multiples of 2^-18 that give a largest magnitude of about 90 to 127.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.special import betainc, erf, gammaln

TABLE = Path(__file__).with_name("codebook_tables.h")
GRID = 2.0**18  # steps are multiples of 1 / GRID: exact in float32, and no rounding error elsewhere can move them
# a >= 0 -> the integrals of 1, x and x^2 over the density from 0 to a, stacked on a new first axis
Moments = Callable[[np.ndarray], np.ndarray]


def normal_moments(a: np.ndarray) -> np.ndarray:
    """Moments of N(0, 1)."""
    density = np.exp(-a * a / 2) / np.sqrt(2 * np.pi)
    mass = erf(a / np.sqrt(2)) / 2
    finite = np.where(np.isinf(a), 0.0, a)  # inf times a density of 0 is 0
    return np.stack([mass, 1 / np.sqrt(2 * np.pi) - density, mass - finite * density])


def sphere_moments(d: int) -> Moments:
    """Moments of a coordinate x of sqrt(d) times a uniform unit vector: density ~ (1 - x^2 / d)^((d - 3) / 2)."""
    peak = np.exp(gammaln(d / 2) - gammaln((d - 1) / 2)) / np.sqrt(np.pi)  # density of x / sqrt(d) at 0

    def moments(a: np.ndarray) -> np.ndarray:
        t2 = np.minimum(a * a / d, 1.0)  # the square of x / sqrt(d) has the law Beta(1/2, (d - 1) / 2)
        first = np.sqrt(d) * peak * (1 - (1 - t2) ** ((d - 1) / 2)) / (d - 1)
        return np.stack([betainc(0.5, (d - 1) / 2, t2) / 2, first, betainc(1.5, (d - 1) / 2, t2) / 2])

    return moments


def cells(levels: np.ndarray, moments: Moments) -> np.ndarray:
    """Moments of the cells of positive levels (last axis), cut at the midpoints: [3, ..., levels]."""
    inner = (levels[..., 1:] + levels[..., :-1]) / 2
    zero, end = np.zeros_like(levels[..., :1]), np.full_like(levels[..., :1], np.inf)
    edges = np.concatenate([zero, inner, end], axis=-1)
    return np.diff(moments(edges), axis=-1)


def distortion(levels: np.ndarray, moments: Moments) -> np.ndarray:
    """Mean squared error of the symmetric quantiser with these positive levels."""
    mass, first, second = cells(levels, moments)
    return 2 * (second - 2 * levels * first + levels * levels * mass).sum(axis=-1)


def lloyd_max(n: int, moments: Moments) -> np.ndarray:
    """The n positive levels of the best symmetric quantiser: each is the mean of its cell."""
    levels = (np.arange(n) + 0.5) * 2.5 / n
    while True:
        mass, first, _ = cells(levels, moments)
        better = first / mass
        if abs(better - levels).max() < 1e-13:
            return better
        levels = better


def uniform(bits: int, moments: Moments) -> tuple[float, np.ndarray]:
    """Returns the best step for odd magnitudes, and these."""
    odd = np.arange(1.0, 2.0**bits, 2.0)
    step = 1.0
    for _ in range(1000):
        mass, first, _ = cells(odd * step, moments)
        step = (odd * first).sum() / (odd * odd * mass).sum()
    return round(step * GRID) / GRID, odd.astype(int)


def rounded(bits: int, moments: Moments) -> tuple[float, np.ndarray]:
    """Returns the best step for Lloyd-Max levels, and the levels as integers in that step."""
    levels = lloyd_max(2 ** (bits - 1), moments)
    steps = np.arange(np.ceil(levels[-1] / 127.4 * GRID), np.floor(levels[-1] / 90 * GRID)) / GRID
    magnitudes = np.rint(levels / steps[:, None])
    best = np.argmin(distortion(magnitudes * steps[:, None], moments))
    return float(steps[best]), magnitudes[best].astype(int)


def codebook(bits: int, moments: Moments) -> tuple[float, np.ndarray]:
    """Returns the step and the positive magnitudes, ascending."""
    step, magnitudes = (uniform if bits <= 2 else rounded)(bits, moments)
    assert np.float32(step) == step and magnitudes[0] > 0 and magnitudes[-1] <= 127 and (np.diff(magnitudes) > 0).all()
    return step, magnitudes


def rows(moments: Moments, indent: str) -> str:
    """Returns the six rows of a law as C."""
    lines, next_line = [], f",\n{indent}     "
    for bits in range(1, 7):
        step, magnitudes = codebook(bits, moments)
        numbers = [", ".join(map(str, magnitudes[i : i + 16])) for i in range(0, len(magnitudes), 16)]
        lines.append(f"{indent}{{{step:.9g}f, {{{next_line.join(numbers)}}}}},\n")
    return "".join(lines)


def table() -> str:
    """Returns the whole header."""
    parts = [
        "/* Codebooks by law and width. Made by csrc/core/make_codebooks.py; do not edit. */\n",
        "#ifndef TURBOQUANT_CODEBOOK_TABLES_H\n#define TURBOQUANT_CODEBOOK_TABLES_H\n#include <stdint.h>\n\n",
        "/** Levels are plus and minus magnitudes[0 .. 2^(bits - 1) - 1], ascending, times step; the rest is 0. */\n",
        "typedef struct {\n    float step;\n    int8_t magnitudes[32];\n} tq_codebook_row;\n\n/* clang-format off */\n",
        "/* N(0, 1); index bits - 1. */\nstatic const tq_codebook_row tq_codebook_normal[6] = {\n",
        rows(normal_moments, "    "),
        "};\n\n/* A coordinate of sqrt(d) times a uniform unit vector of d dimensions; index d / 8 - 1, bits - 1. */\n",
        "static const tq_codebook_row tq_codebook_sphere[32][6] = {\n",
    ]
    for d in range(8, 257, 8):
        parts.append(f"    {{ /* d = {d} */\n{rows(sphere_moments(d), '        ')}    }},\n")
    parts.append("};\n/* clang-format on */\n#endif\n")
    return "".join(parts)


def main() -> None:
    text = table()
    if "--check" not in sys.argv[1:]:
        TABLE.write_text(text)
    elif TABLE.read_text() != text:
        sys.exit(f"{TABLE.name} is not what {Path(__file__).name} makes: run it without --check")


if __name__ == "__main__":
    main()
