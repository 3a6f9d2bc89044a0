"""tq_append: bytes equal to the reference, bit for bit; tokens where the header says they live."""

import numpy as np
import pytest
import reference as ref
import tolerance
from cases import aligned_pages, awkward_rows, empty_cache, keywords, orthogonal, random_transform, realigned
from conftest import ALL_HEAD_DIMS, HEAD_DIMS, ODD_HEAD_DIMS, WIDE_HEAD_DIMS
from core_calls import core_append
from hypothesis import given
from hypothesis import strategies as st

from turboquant import _core
from turboquant.plan import Plan, Side
from turboquant.transforms import transforms

ROTATIONS = {"none": ref.NONE, "hadamard": ref.HADAMARD, "dense": ref.DENSE}
SCALES = (ref.EDEN, ref.NORM, ref.NORM_CORRECTED, ref.LEAST_SQUARES)
DTYPES = ("float32", "float16", "bfloat16")
AFFINE = Plan(64, *2 * (Side(8, "none", "affine", 32),)).words


def assert_same(got: ref.Cache, want: ref.Cache) -> None:
    np.testing.assert_array_equal(got.pages, want.pages)
    for name, array in want.arrays().items():
        bits = np.uint32 if array.dtype == np.float32 else np.uint16
        np.testing.assert_array_equal(getattr(got, name).view(bits), array.view(bits), err_msg=name)


def twins(rng: np.random.Generator, p: ref.Plan, lengths: list[int], **sizes) -> tuple[ref.Cache, ref.Cache]:
    """Two equal empty caches."""
    c = empty_cache(rng, p, np.array(lengths), **sizes)
    other = c.copy()
    other.pages = realigned(c.pages)
    return c, other


def mixed_bits(rng: np.random.Generator, head_dim: int, group: int = 32) -> tuple[int, ...]:
    groups = -(-head_dim // group)
    bits = rng.choice((0, *ref.WIDTHS), groups)
    bits[rng.integers(groups)] = rng.choice(ref.WIDTHS)
    return tuple(int(b) for b in bits)


# ---- every bits x rotation x scale x head_dim ----


# Each case tests two of the four scales, alternating from case to case. The other two are slow tests.
HALF = pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])


@HALF
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("head_dim", (*ALL_HEAD_DIMS, *WIDE_HEAD_DIMS))
def test_bytes(head_dim: int, rotation: str, half: int, rng: np.random.Generator) -> None:
    k, v = (awkward_rows(rng, 41, head_dim)[None, None] for _ in range(2))
    for i, (bits, other) in enumerate(zip(ref.WIDTHS, ref.WIDTHS[::-1]), start=head_dim // 8):
        for scale in SCALES[(i + half) % 2 :: 2]:
            kind = dict(
                rotation=ROTATIONS[rotation],
                codebook=int(rng.integers(2 if head_dim <= 256 else 1)),
                scale=scale,
                page_tokens=32,
            )
            p = ref.plan(head_dim, bits, other, seed=int(rng.integers(2**63)), **kind)
            key, value = (random_transform(rng, p, 1, plain=scale % 2 == 0) for _ in range(2))
            got, want = twins(rng, p, [41], kv_heads=1, fill=0)
            core_append(p, got, k, v, [41], key, value)
            if tolerance.has_matrix(p):
                tolerance.check_pages(p, got.pages, got.block_table, dict(key=k, value=v), dict(key=key, value=value))
                continue
            ref.append(p, want, k, v, np.array([41]), key, value)
            np.testing.assert_array_equal(got.pages, want.pages, err_msg=f"{bits} bits, scale {scale}")


@pytest.mark.parametrize("group", [32, 16])
@pytest.mark.parametrize("head_dim", (*HEAD_DIMS, *ODD_HEAD_DIMS))
@pytest.mark.parametrize("rotation", ROTATIONS)
@HALF
def test_bytes_of_mixed_plans(head_dim: int, rotation: str, group: int, half: int, rng: np.random.Generator) -> None:
    for scale in SCALES[(head_dim // 8 + group // 16 + half) % 2 :: 2]:
        bits, kind = [mixed_bits(rng, head_dim, group) for _ in range(2)], dict(rotation=ROTATIONS[rotation])
        p = ref.plan(head_dim, *bits, **kind, scale=scale, group=group)
        key, value = (random_transform(rng, p, 2) for _ in range(2))
        k, v = (rng.standard_normal((3, 2, 150, head_dim)).astype(np.float32) for _ in range(2))
        if tolerance.has_matrix(p):
            got, _ = twins(rng, p, [150] * 3, kv_heads=2)
            core_append(p, got, k, v, [150] * 3, key, value)
            tolerance.check_pages(p, got.pages, got.block_table, dict(key=k, value=v), dict(key=key, value=value))
            continue
        got, want = twins(rng, p, [150, 97, 1], kv_heads=2)
        core_append(p, got, k, v, [150, 97, 1], key, value)
        ref.append(p, want, k, v, np.array([150, 97, 1]), key, value)
        assert_same(got, want)


def rows_to_settle(rng: np.random.Generator, head_dim: int) -> ref.F32:
    """Returns rows with numbers at the limits of `reference.settle`. The largest number is 1.5 (E = 0), and others are
    at and beside 2^-11, or odd multiples of 2^-19. Every row also comes in other magnitudes."""
    edge, unit = np.float32(2.0**-11), np.float32(2.0**-18)
    beside = [edge, *(np.nextafter(edge, np.float32(end)) for end in (0, 1)), edge / 2, 0, np.float32(2.0**-149)]
    rows = np.stack(
        [
            rng.choice(np.array(beside, np.float32), head_dim),
            (rng.integers(-(2**16), 2**16, head_dim) + np.float32(0.5)) * unit,
            rng.integers(-(2**12), 2**12, head_dim) * (unit / 4) + edge,
            rng.standard_normal(head_dim) * np.exp(3 * rng.standard_normal(head_dim)) / 1e4,
            np.where(rng.random(head_dim) < 0.5, 1.5, edge),
        ]
    )
    rows = np.clip(rows, -1.5, 1.5).astype(np.float32)
    rows *= rng.choice(np.array([-1, 1], np.float32), rows.shape)
    rows[:, rng.integers(head_dim)] = 1.5
    sizes = np.array([1, 2.0**-40, 2.0**-75, 2.0**12, 2.0**-14], np.float32)  # at 2^-75, rows count as zero
    return np.concatenate([rows * size for size in sizes])


@pytest.mark.parametrize("centred", [False, True], ids=["", "centred"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_bytes_of_settled_rows(head_dim: int, dtype: str, centred: bool, rng: np.random.Generator) -> None:
    for bits in (*ref.WIDTHS, (3, 0, 8, 6, 1, 4, 5, 2) * (head_dim // 256 or 1)):
        p = ref.plan(head_dim, bits if isinstance(bits, int) else bits[: head_dim // 32])
        k = ref.widen(ref.narrow(rows_to_settle(rng, head_dim)[None, None], dtype))
        n = k.shape[2]
        centre = rng.standard_normal((1, head_dim)).astype(np.float32) * np.float32(0.1) if centred else None
        key = ref.Transform(centre=centre)
        got, want = twins(rng, p, [n], kv_heads=1)
        core_append(p, got, k, None, [n], key, ref.Transform())
        ref.append(p, want, k, None, np.array([n]), key, ref.Transform())
        assert_same(got, want)


def test_sums_of_settled_rows_do_not_depend_on_their_order(rng: np.random.Generator) -> None:
    """Float32 sums of 32 numbers of settled rows, with any signs, do not depend on the order of the numbers. Tensor
    cores need that. Sums of rows that are not settled do depend on it."""
    rows = np.concatenate([rows_to_settle(rng, 128) for _ in range(20)])

    def orders(x: ref.F32) -> int:
        parts = x.reshape(len(x), 4, 32) * rng.choice(np.array([-1, 1], np.float32), 32)
        sums = []
        for _ in range(10):
            total = np.zeros(parts.shape[:-1], np.float32)
            for i in rng.permutation(32):
                total = total + parts[..., i]
            sums.append(total)
        return int((np.ptp(sums, axis=0) > 0).sum())

    assert orders(ref.settle(rows)) == 0
    assert orders(rows) > 100
    moved, largest = abs(ref.settle(rows) - rows).max(axis=1), abs(rows).max(axis=1)
    assert (moved <= largest * 2.0**-11).all()


@pytest.mark.parametrize("head_dim", [264, 768, 1048, 4096])
def test_bytes_of_long_vectors(head_dim: int, rng: np.random.Generator) -> None:
    """Plans without values may have up to 4,096 channels."""
    p = ref.plan(head_dim, mixed_bits(rng, head_dim))
    k = awkward_rows(rng, 35, head_dim)[None, None]
    got, want = twins(rng, p, [35], kv_heads=1)
    core_append(p, got, k, None, [35], ref.Transform(), ref.Transform())
    ref.append(p, want, k, None, np.array([35]), ref.Transform(), ref.Transform())
    assert_same(got, want)


@pytest.mark.parametrize("bits", ref.WIDTHS[:-1])
@pytest.mark.parametrize("law, head_dim", [(ref.NORMAL, 32), (ref.SPHERE, 8), (ref.SPHERE, 64)])
def test_numbers_at_the_thresholds(bits: int, law: int, head_dim: int, rng: np.random.Generator) -> None:
    """Coordinates at a threshold and one ulp to either side: the rank is how many thresholds are <= u."""
    p = ref.plan(head_dim, bits, rotation=ref.NONE, codebook=law, page_tokens=128)
    thresholds = ref.codebook(law, head_dim, bits).thresholds
    beside = [np.nextafter(thresholds, np.float32(end)) for end in (-9, 9)]
    t = np.concatenate([thresholds, *beside])
    likely = np.exp(-(t.astype(np.float64) ** 2) / 2)
    x = rng.choice(t, (5000, head_dim), p=likely / likely.sum()).astype(np.float32)
    filler = x[:, -head_dim // 4 :]
    filler[...] = 0
    filler += np.sqrt(np.maximum(0, head_dim - (x**2).sum(axis=1, keepdims=True)) / filler.shape[1])
    x = x[ref.tree(x * x) == head_dim][:100]  # mean square 1 to the bit, so u is x
    assert len(x) == 100
    got, want = twins(rng, p, [len(x)], kv_heads=1)
    core_append(p, got, x[None, None], None, [len(x)], ref.Transform(), ref.Transform())
    ref.append(p, want, x[None, None], None, np.array([len(x)]), ref.Transform(), ref.Transform())
    assert_same(got, want)


def test_scales_beyond_binary16_are_clamped(rng: np.random.Generator) -> None:
    p = ref.plan(64, 3, rotation=ref.NONE)
    x = np.full((1, 1, 5, 64), 16384, np.float32) * np.array([1, 0.5, 1e-3, 1e-9, 0], np.float32)[:, None]
    key = ref.Transform(steps=np.full((1, 2), 0.125, np.float32))
    got, want = twins(rng, p, [5], kv_heads=1, fill=0)
    core_append(p, got, x, None, [5], key, ref.Transform())
    ref.append(p, want, x, None, np.array([5]), key, ref.Transform())
    assert_same(got, want)
    _, scales = ref.unpack(p, "key", got.pages[got.block_table[0, 0], 0])
    assert scales[0] == scales[1] == 65504
    assert 0 < scales[2] < 65504
    assert scales[4] == 0


def test_where_vectors_count_as_zero() -> None:
    """A vector with a sum of squares below FLT_MIN = 2^-126 gets the codes of u = 0; at FLT_MIN it is quantised."""
    edge = np.float32(2.0**-63)
    heights = np.array([edge, np.nextafter(edge, np.float32(0)), edge * np.float32(0.75), 0], np.float32)
    x = np.zeros((1, 1, 4, 32), np.float32)
    x[0, 0, :, 5] = heights
    p, steps = ref.plan(32, 4, rotation=ref.NONE, scale=ref.NORM, page_tokens=32), np.full((1, 1), 2.0**-20, np.float32)
    for key in (ref.Transform(), ref.Transform(steps=steps)):
        pages, table = aligned_pages(1, 1, p.record_bytes), np.zeros((1, 1), np.int32)
        moved = x * np.float32(2.0**-20) if key.steps is not None else x
        _core.append(p.words, moved, None, np.array([4], np.int32), pages, table, **keywords(key))
        codes, scales = ref.unpack(p, "key", pages[0, 0])
        assert codes[:4, 5].tolist() == [7, 0, 0, 0]  # the largest level, then the first one above 0
        assert codes[0, 5] == ref.codebook(ref.NORMAL, 32, 4).code_of_rank[15]
        assert (scales == 0).all()  # 2^-63 is below binary16's range anyway


# ---- sinks, pages, window ----


@pytest.mark.parametrize("sinks, window", [(0, 0), (4, 0), (0, 5), (3, 40), (4, 128), (40, 1), (200, 7)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_token_by_token(sinks: int, window: int, dtype: str, rng: np.random.Generator) -> None:
    """70 appends of one token, as in decoding. The second sequence begins with 29 tokens of left padding."""
    p = ref.plan(24, 3, 2, page_tokens=32)
    key, value = (random_transform(rng, p, 2) for _ in range(2))
    k, v = (ref.narrow(rng.standard_normal((2, 2, 70, 24)).astype(np.float32), dtype) for _ in range(2))
    got, want = twins(rng, p, [70, 41], kv_heads=2, sinks=sinks, window=window, dtype=dtype)
    for i in range(70):
        part, lengths = np.s_[:, :, i : i + 1], np.array([i + 1, max(0, i - 28)])
        ref.append(p, want, k[part], v[part], lengths, key, value)
        core_append(p, got, k[part], v[part], lengths, key, value, dtype)  # k and v are strided views
        assert_same(got, want)


def test_where_tokens_live() -> None:
    """Sinks, pages and window hold the tokens that turboquant.h says: the numbers stored tell their positions."""
    p = ref.plan(8, 5, 5, rotation=ref.NONE, scale=ref.NORM, page_tokens=32)
    x = np.zeros((1, 1, 50, 8), np.float32) + np.arange(50, dtype=np.float32)[:, None] * 4
    c = empty_cache(np.random.default_rng(0), p, np.array([50]), kv_heads=1, sinks=2, window=7)
    core_append(p, c, x, x, [50], ref.Transform(), ref.Transform())
    assert c.sink_k[0, 0, :, 0].tolist() == [0, 4]
    assert c.window_v[0, 0, :, 0].tolist() == [4 * j for j in (49, 43, 44, 45, 46, 47, 48)]  # position % 7
    for j in range(2, 43):
        _, scales = ref.unpack(p, "value", c.pages[c.block_table[0, (j - 2) // 32], 0])
        assert scales[(j - 2) % 32] == np.float16(4 * j)


@given(st.data())
def test_cuts_do_not_matter(data: st.DataObject) -> None:
    """However a sequence is cut into appends, the cache is that of the reference after one append."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    sinks, window = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 70))
    lengths = data.draw(st.lists(st.integers(0, 150), min_size=1, max_size=3))
    head_dim = 8 * data.draw(st.integers(1, 6))
    p = ref.plan(
        head_dim, mixed_bits(rng, head_dim), mixed_bits(rng, head_dim), page_tokens=data.draw(st.sampled_from((32, 64)))
    )
    key, value = (random_transform(rng, p, 1) for _ in range(2))
    total = max(lengths)
    k, v = (rng.standard_normal((len(lengths), 1, total, head_dim)).astype(np.float32) for _ in range(2))
    got, want = twins(rng, p, lengths, kv_heads=1, sinks=sinks, window=window)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=6)))
    for first, last in zip([0, *cuts], [*cuts, total]):
        part = np.s_[:, :, first:last]
        core_append(p, got, k[part], v[part], np.maximum(np.array(lengths) - (total - last), 0), key, value)
    ref.append(p, want, k, v, np.array(lengths), key, value)
    if cuts:  # only stored tokens: windows may also keep older ones, which one big append never puts there
        for name in ("window_k", "window_v", "sink_k", "sink_v"):
            mine, theirs = getattr(got, name), getattr(want, name)
            if theirs is not None:
                stored = ~np.isnan(theirs)
                np.testing.assert_array_equal(mine[stored], theirs[stored])
        np.testing.assert_array_equal(got.pages, want.pages)
    else:
        assert_same(got, want)


def test_left_padding_stores_nothing(rng: np.random.Generator) -> None:
    """Left padding may hold anything, NaN included, and takes no space."""
    p = ref.plan(16, 4, 4, page_tokens=32)
    x = rng.standard_normal((2, 1, 40, 16)).astype(np.float32)
    x[1, :, :35] = rng.choice([np.inf, np.nan, 1e30], (35, 16))
    padded, want = twins(rng, p, [40, 5], kv_heads=1, sinks=2)
    core_append(p, padded, x, x, [40, 5], ref.Transform(), ref.Transform())
    clean = np.nan_to_num(x, posinf=0)
    ref.append(p, want, clean, clean, np.array([40, 5]), ref.Transform(), ref.Transform())
    assert_same(padded, want)


def test_strides_and_shared_transforms(rng: np.random.Generator) -> None:
    """k and v may be views of [batch, tokens, heads, head_dim]; one matrix may serve all heads."""
    p = ref.plan(48, 4, 3, rotation=ref.DENSE)
    k, v = (rng.standard_normal((2, 50, 3, 48)).astype(np.float32).transpose(0, 2, 1, 3) for _ in range(2))
    got, want = twins(rng, p, [50, 50], kv_heads=3)
    key = ref.Transform(orthogonal(48)[None], rng.standard_normal((3, 48)).astype(np.float32))
    value = ref.Transform(orthogonal(48, 1)[None], None, np.full((3, 2), 0.5, np.float32))
    core_append(p, got, k, v, [50, 50], key, value)
    tolerance.check_pages(p, got.pages, got.block_table, dict(key=k, value=v), dict(key=key, value=value))
    want.pages[...] = got.pages
    two = transforms(
        key_rotation=orthogonal(48), key_centre=key.centre, value_rotation=orthogonal(48, 1), value_steps=value.steps
    )
    got.pages[...] = 0xFF
    # The matrices have no leading dimension of 1 here.
    _core.append(p.words, k, v, np.array([50, 50], np.int32), got.pages, got.block_table, **two)
    assert_same(got, want)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_matter(threads: int, rng: np.random.Generator) -> None:
    p = ref.plan(64, 3, 3)
    k, v = (rng.standard_normal((3, 2, 200, 64)).astype(np.float32) for _ in range(2))
    got, want = twins(rng, p, [200, 150, 3], kv_heads=2, sinks=4, window=32)
    core_append(p, got, k, v, [200, 150, 3], ref.Transform(), ref.Transform(), threads=threads)
    ref.append(p, want, k, v, np.array([200, 150, 3]), ref.Transform(), ref.Transform())
    assert_same(got, want)


@pytest.mark.parametrize("batch, tokens", [(0, 3), (2, 0)])
def test_nothing_to_append(batch: int, tokens: int) -> None:
    p = ref.plan(16, 3, 3)
    x, pages = np.zeros((batch, 2, tokens, 16), np.float32), aligned_pages(1, 2, p.record_bytes, 0xFF)
    _core.append(p.words, x, x, np.zeros(batch, np.int32), pages, np.zeros((batch, 1), np.int32))
    assert (pages == 0xFF).all()


# ---- what quantising does to vectors ----


@pytest.mark.parametrize("stepped", [False, True], ids=["", "steps"])
@pytest.mark.parametrize("scale", SCALES)
def test_scales_do_what_they_say(scale: int, stepped: bool, rng: np.random.Generator) -> None:
    """Decoded vectors have the property that defines each scale, up to binary16 rounding, with steps or without."""
    p, count = ref.plan(128, 3, scale=scale), np.array([100], np.int32)
    x = rng.standard_normal((1, 1, 100, 128)).astype(np.float32)
    key = ref.Transform(steps=np.array([[0.5, 1, 2, 1.5]], np.float32) if stepped else None)
    c = empty_cache(rng, p, count, kv_heads=1)
    core_append(p, c, x, None, count, key, ref.Transform())
    table = c.block_table[:, :1].copy()
    back = _core.dequantize(p.words, c.pages, table, count, 100, **keywords(key))[0][0, 0].astype(np.float64)
    x = x[0, 0].astype(np.float64)
    xx, xb, bb = (x * x).sum(1), (x * back).sum(1), (back * back).sum(1)
    if scale == ref.EDEN:
        np.testing.assert_allclose(xb, xx, rtol=2e-3)  # unbiased: <x, back> = <x, x>
    elif scale == ref.NORM_CORRECTED:
        np.testing.assert_allclose(bb, xx, rtol=2e-3)
    elif scale == ref.LEAST_SQUARES:
        np.testing.assert_allclose(xb, bb, rtol=2e-3)  # the error is orthogonal to what is decoded
    elif not stepped:
        _, scales = ref.unpack(p, "key", c.pages[c.block_table[0, 0], 0])
        np.testing.assert_allclose(scales[:100], np.sqrt(xx / 128), rtol=1e-3)
    if not stepped:
        assert 0.02 < ((x - back) ** 2).sum() / xx.sum() < 0.05  # 3 bits: 0.0345


def test_inner_products_are_unbiased_over_rotations(rng: np.random.Generator) -> None:
    """Over 400 seeds the mean of <q, decoded x> is within 2 % of <q, x> with EDEN. With the norm scale it is
    off by more than 5 %."""
    x, q = rng.standard_normal((2, 64)).astype(np.float32)
    x[:4] *= 8
    q = (q + x).astype(np.float32)
    ratios = {}
    for scale in (ref.EDEN, ref.NORM):
        found = []
        for seed in range(400):
            p = ref.plan(64, 2, scale=scale, seed=seed, page_tokens=32)
            pages = _core.new_pages(p.words, 1, 1)
            _core.append(p.words, x[None, None, None], None, np.array([1], np.int32), pages, np.zeros((1, 1), np.int32))
            found.append(_core.dot(p.words, q[None], pages, 1)[0, 0])
        ratios[scale] = np.mean(found) / float(q.astype(np.float64) @ x)
    assert abs(ratios[ref.EDEN] - 1) < 0.02
    assert abs(ratios[ref.NORM] - 1) > 0.05


# ---- where subnormal numbers are flushed to zero ----


@pytest.mark.parametrize("size", [1e-3, 1e-5])
@pytest.mark.parametrize("words", [AFFINE, Plan(64, 4, 4).words], ids=["affine", "4 bits"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_flushed_subnormals_change_nothing(
    words: tuple[int, ...], dtype: type, size: float, rng: np.random.Generator
) -> None:
    """Scales and float16 numbers of small rows are subnormal in binary16, but not as the float32 that they become."""
    torch = pytest.importorskip("torch")
    k, v = ((rng.standard_normal((1, 1, 64, 64)) * size).astype(dtype) for _ in range(2))
    q = (rng.standard_normal((1, 1, 1, 64)) * 1000).astype(dtype)
    lengths, table = np.array([64], np.int32), np.zeros((1, 1), np.int32)

    def life() -> list[np.ndarray]:
        pages = _core.new_pages(words, 1, 1)
        _core.append(words, k, v, lengths, pages, table, threads=1)  # worker threads have a mode of their own
        return [
            pages,
            *_core.dequantize(words, pages, table, lengths, 64),
            *_core.attend(words, q, pages, table, lengths, threads=1),
        ]

    want = life()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        got = life()
    finally:
        torch.set_flush_denormal(False)
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a, b)
    assert abs(want[2]).max() > 0
