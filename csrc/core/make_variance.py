"""Makes variance_table.h: the mean squared error of a packed vector for a stored scale of 1.

    python csrc/core/make_variance.py

u is a vector of d channels with root mean square 1, uniform over directions, and c are the levels of its codes. With
the EDEN scale s, s c has the squared error s^2 (<c,c> - <c,u>^2 / d). The table has the mean of the bracket, divided by
d. Codebooks: normal law. Codes: of the factor tried that gives the largest cosine. Means are over 2^21 numbers.
"""

from pathlib import Path

import numpy as np
from make_codebooks import codebook, normal_moments

TABLE = Path(__file__).with_name("variance_table.h")
DIMS = 8 << np.arange(7)
BITS = (1, 2, 3, 4, 5, 6, 8)
NUMBERS = 2**21
TRIES = {  # turboquant.h, TQ_TRIES
    0: (1.0,),
    3: (1.0, 0.9, 1.125),
    5: (1.0, 0.84375, 0.9375, 1.0625, 1.1875),
    7: (1.0, 0.84375, 0.90625, 0.953125, 1.0625, 1.125, 1.21875),
}


def levels(bits: int) -> np.ndarray:
    """Returns the levels of a width, ascending."""
    if bits == 8:
        return np.arange(-127, 128) / 32
    step, magnitudes = codebook(bits, normal_moments)
    return step * np.concatenate([-magnitudes[::-1], magnitudes])


def sums(u: np.ndarray, book: np.ndarray, factor: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns <c,c> and <c,u> of each row."""
    c = book[np.searchsorted((book[1:] + book[:-1]) / 2, u * factor)]
    return (c * c).sum(-1), (c * u).sum(-1)


def mean_error(made: dict[float, tuple[np.ndarray, np.ndarray]], tries: int, d: int) -> float:
    """Returns the mean of the bracket, divided by d. made: `sums` by factor."""
    squares, products = (np.stack([made[factor][i] for factor in TRIES[tries]]) for i in range(2))
    best = (products**2 / squares).argmax(0)[None]
    kept, product = (np.take_along_axis(x, best, 0)[0] for x in (squares, products))
    return float((kept - product**2 / d).mean() / d)


def main() -> None:
    table = np.zeros((len(BITS), len(TRIES), len(DIMS)))
    for k, d in enumerate(DIMS):
        u = np.random.default_rng(d).standard_normal((NUMBERS // d, d))
        u /= np.sqrt((u * u).mean(-1, keepdims=True))
        for i, bits in enumerate(BITS):
            by_factor = {factor: sums(u, levels(bits), factor) for factor in sorted(set(sum(TRIES.values(), ())))}
            table[i, :, k] = [mean_error(by_factor, tries, int(d)) for tries in TRIES]
    lines = [
        "/* Mean squared errors of packed vectors. Made by csrc/core/make_variance.py; do not edit. */\n",
        "#ifndef TURBOQUANT_VARIANCE_TABLE_H\n#define TURBOQUANT_VARIANCE_TABLE_H\n\n",
        "/** Of a channel, for a scale of 1: by bits (1..6, then 8), tries (0, 3, 5, 7), channels (8, 16 .. 512). */\n",
        "/* clang-format off */\nstatic const float tq_variance_table[7][4][7] = {\n",
    ]
    for of_bits in table:
        rows = [", ".join(f"{x:.4g}f" for x in row) for row in of_bits]
        lines.append("    {{" + "},\n     {".join(rows) + "}},\n")
    TABLE.write_text("".join(lines) + "};\n/* clang-format on */\n#endif\n")


if __name__ == "__main__":
    main()
