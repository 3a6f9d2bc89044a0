"""Random numbers and random rotations of tests/reference.py: Philox, and tq_haar.

THE HAAR RECIPE (tq_haar). All float64; only +, -, *, /, sqrt and frexp; no fused multiply-add; sums are sequential.

    Gaussians   one sequence for the whole matrix. Blocks n = 0, 1, 2, .. of stream 2^32 give four words each, used as
                the pairs (w0, w1) and (w2, w3). For a pair, a = (w0 + 0.5) / 2^32 * 2 - 1 and b likewise from w1 (both
                exact). r = a*a + b*b. If r >= 1 the pair is dropped. Otherwise f = sqrt((-2 * ln(r)) / r), and the
                next two Gaussians are a*f, then b*f.
    ln(r)       frexp: r = m * 2^e, 0.5 <= m < 1. If m < 0.70710678118654752440: m = m + m, e = e - 1.
                t = (m - 1) / (m + 1);  s = t*t;  p = 1/41;  for k = 39, 37, .., 3, 1: p = p*s + 1/k  (1/k is rounded).
                ln(r) = 2*t*p + e * 0.693147180559945309417232, in the order (2*t)*p, e*ln2, sum.
    Matrix      M = identity, dim x dim. For k = 1, 2, .., dim, on the trailing block B = M[dim-k.., dim-k..] (k x k):
                  v[0..k-1] = the next k Gaussians
                  norm2 = 0.0 + v[0]*v[0] + v[1]*v[1] + ..  in this order;  norm = sqrt(norm2)
                  sign = 1 if v[0] >= 0 else -1
                  beta = 1 / (norm2 + |v[0]| * norm)
                  v[0] = v[0] + sign * norm
                  w[j] = 0.0 + v[0]*B[0,j] + v[1]*B[1,j] + ..  in this order, then w[j] = beta * w[j]
                  B[i,j] = sign * (v[i]*w[j] - B[i,j])
                The block becomes -sign * H * diag(1, the block before), H = I - beta v v^T the reflection that takes
                the Gaussian vector to -sign * norm * e_0: its first column is that vector, normalised. (Stewart 1980.)
    Result      float32(M), round to nearest even.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 (Salmon et al., SC11)."""
    c, k, mask = list(counter), list(key), 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & mask, (p0 >> 32) ^ c[3] ^ k[1], p0 & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def random(seed: int, stream: int, block: int) -> list[int]:
    """tq_random."""
    mask = 0xFFFFFFFF
    return philox([block & mask, block >> 32, stream & mask, stream >> 32], [seed & mask, seed >> 32])


def logarithm(r: float) -> float:
    """ln(r), by the recipe above."""
    m, e = math.frexp(r)
    if m < 0.70710678118654752440:
        m, e = m + m, e - 1
    t = (m - 1.0) / (m + 1.0)
    s, p = t * t, 1.0 / 41.0
    for k in range(39, 0, -2):
        p = p * s + 1.0 / k
    return 2.0 * t * p + e * 0.693147180559945309417232


def gaussians(seed: int) -> Iterator[float]:
    """The endless sequence of the recipe above."""
    block = 0
    while True:
        words = random(seed, 1 << 32, block)
        block += 1
        for w0, w1 in (words[:2], words[2:]):
            a, b = ((w + 0.5) / 2.0**32 * 2.0 - 1.0 for w in (w0, w1))
            r = a * a + b * b
            if r < 1.0:
                f = math.sqrt(-2.0 * logarithm(r) / r)
                yield a * f
                yield b * f


def haar(seed: int, dim: int) -> F32:
    """tq_haar, by the recipe above."""
    draw, matrix = gaussians(seed), np.eye(dim)
    for k in range(1, dim + 1):
        block = matrix[dim - k :, dim - k :]
        v = [next(draw) for _ in range(k)]
        norm2 = 0.0
        for x in v:
            norm2 = norm2 + x * x
        norm = math.sqrt(norm2)
        sign = 1.0 if v[0] >= 0 else -1.0
        beta = 1.0 / (norm2 + abs(v[0]) * norm)
        v[0] = v[0] + sign * norm
        w = np.zeros(k)
        for i in range(k):
            w = w + v[i] * block[i]
        w = beta * w
        for i in range(k):
            block[i] = sign * (v[i] * w - block[i])
    return matrix.astype(np.float32)
