"""The byte format: places of bits, sizes, golden files, reading bytes that C did not write."""

import runpy

import numpy as np
import pytest
import reference as ref
import reference_modes as modes
import tolerance
from cases import aligned_pages, keywords, random_transform, realigned
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from turboquant import _core
from turboquant.transforms import transforms as arrays

GOLDEN = ROOT / "tests" / "golden"
make = runpy.run_path(str(GOLDEN / "make.py"))
GOOD, MODES = make["CASES"], make["MODES"]


@st.composite
def plans(draw: st.DrawFn) -> ref.Plan:
    """Any plan with head_dim up to 256."""
    head_dim, group = 8 * draw(st.integers(1, 32)), draw(st.sampled_from((32, 16)))
    widths = st.lists(
        st.sampled_from((0, *ref.WIDTHS)), min_size=-(-head_dim // group), max_size=-(-head_dim // group)
    ).map(tuple)
    return ref.Plan(
        head_dim,
        draw(widths.filter(any)),
        draw(widths),
        rotation=draw(st.sampled_from((ref.NONE, ref.HADAMARD))),
        codebook=draw(st.integers(0, 1)),
        scale=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 2**63 - 1)),
        page_tokens=draw(st.sampled_from((32, 64, 96, 128) if group == 32 else (64, 128))),
        group=group,
    )


# ---- places ----


@pytest.mark.parametrize("bits", ref.WIDTHS)
def test_every_bit_of_a_tile_has_one_code(bits: int) -> None:
    assert sorted(ref.tile_places(bits).ravel()) == list(range(32 * 32 * bits))


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("group", [32, 16])
def test_every_cell_of_a_tile_is_one_token_and_channel(side: str, group: int) -> None:
    p = ref.plan(64, 4, 4, group=group)
    row, column = ref.cell(p, side, np.arange(p.tile_tokens)[:, None], np.arange(group)[None])
    assert sorted((32 * row + column).ravel()) == list(range(1024))


def test_columns() -> None:
    columns = [ref.column(i) for i in range(32)]
    assert sorted(columns) == list(range(32))
    assert all(8 * (c % 4) + c // 4 == i for i, c in enumerate(columns))


def test_a_record_by_hand() -> None:
    """One vector, one code, one scale, followed through the drawing in turboquant.h with pencil and paper.

    3 bits, 40 channels, so 2 groups. Token 26 is row g + 8r with g = 2, r = 3, so its codes are the spare bits of the
    nibbles of words 0, 1, 2. Channel 37 is column 5 of group 1: t = 1, n = 1, lane 4g + t = 9. Its value, the other way
    round: row 5 (g = 5, r = 0), column 4 (26 % 8) + 26 / 8 = 11: t = 2, n = 3, lane 22, nibble 3 of word 0.
    """
    p = ref.plan(40, 3, 3, rotation=ref.NONE, scale=ref.NORM, page_tokens=32)
    lonely = np.zeros((1, 1, 32, 40), np.float32)
    lonely[0, 0, 26, 37] = 1.0  # rms of the token: sqrt(1 / 40); rank 7. All other channels of it: 0, rank 4
    pages = aligned_pages(1, 1, p.record_bytes)
    _core.append(p.words, lonely, lonely, np.array([32], np.int32), pages, np.zeros((1, 1), np.int32))
    record = pages[0, 0]
    keys, values = (record[at : at + 2 * 384].view("<u4").reshape(2, 3, 32) for at in (0, 2 * 384))
    assert [keys[1, w, 9] >> (4 * 1 + 3) & 1 for w in range(3)] == [1, 1, 1]  # code 7
    assert [keys[1, w, 9] >> (4 * 0 + 3) & 1 for w in range(3)] == [0, 0, 1]  # its neighbour, channel 36: code 4
    assert values[1, 0, 22] >> (4 * 3) & 7 == 7
    assert values[1, 0, 22] >> (4 * 2) & 7 == 4  # column 10 is token 18: u = 0, rank 4
    scales = record[4 * 384 :].view("<f2").reshape(2, 32)
    assert (scales[:, 11] == np.float16(np.sqrt(1 / 40))).all()
    assert (np.delete(scales, 11, axis=1) == 0).all()


@given(plans())
def test_sizes_and_offsets(p: ref.Plan) -> None:
    info = _core.plan_info(p.words)
    assert _core.record_bytes(p.words) == info["record_bytes"] == p.record_bytes
    assert p.record_bytes % (256 if p.page_tokens == 128 else 64) == 0
    for side in ("key", "value"):
        assert info[f"{side}_bits"] == p.bits(side)
        assert info[f"{side}_tile_bytes"] == p.tile_bytes(side)
        assert info[f"{side}_tile_offsets"] == tuple(128 * sum(p.bits(side)[:g]) for g in range(p.groups))
        assert info[f"{side}_coded_channels"] == p.coded(side).sum()
        if any(p.bits(side)):
            assert info[f"{side}_codes_offset"] == p.codes_offset(side)
            assert info[f"{side}_scales_offset"] == p.scales_offset(side)
    assert (info["group_channels"], info["tile_tokens"]) == (p.group, p.tile_tokens)
    names = ("head_dim", "groups", "page_tokens", "rotation", "codebook", "scale", "seed")
    assert {n: info[n] for n in names} == {n: getattr(p, n) for n in names}
    pages = _core.new_pages(p.words, 3, 2)
    assert pages.shape == (3, 2, p.record_bytes)
    assert pages.ctypes.data % 64 == 0
    assert not pages.any()


# ---- bytes that C did not write ----


def random_bytes(rng: np.random.Generator, p: ref.Plan, n_pages: int, kv_heads: int) -> np.ndarray:
    """Random pages: any bits are valid codes, and scales are finite numbers."""
    pages = aligned_pages(n_pages, kv_heads, p.record_bytes)
    pages[...] = rng.integers(0, 256, pages.shape, np.uint8)
    for record in pages.reshape(-1, p.record_bytes):
        for side in ("key", "value"):
            scales = ref.scale_view(p, side, record)
            scales[:] = rng.uniform(-4, 4, len(scales))
    return pages


@given(plans(), st.integers(0, 2**32))
def test_dequantize_reads_any_bytes(p: ref.Plan, seed: int) -> None:
    rng = np.random.default_rng(seed)
    c = ref.Cache(random_bytes(rng, p, 5, 2), rng.permutation(5)[:4].reshape(2, 2).astype(np.int32))
    key, value = (random_transform(rng, p, 2) for _ in range(2))
    if not any(p.value_bits):
        value = ref.Transform()
    counts, most = np.array([p.page_tokens + 7, 3], np.int32), p.page_tokens + 9
    k, v = _core.dequantize(p.words, c.pages, c.block_table, counts, most, **keywords(key, value))
    assert k.shape == (2, 2, most, p.head_dim)
    assert (v is None) == (not any(p.value_bits))
    for side, got, transform in (("key", k, key), ("value", v, value)):
        for b, head in np.ndindex(2, 2) if got is not None else ():
            want = ref.decode_packed(p, side, c, b, head, int(counts[b]), transform)
            np.testing.assert_allclose(got[b, head, : counts[b]], want, rtol=0, atol=2e-6 * abs(want).max())
            assert not got[b, head, counts[b] :].any()


@pytest.mark.parametrize("group", [32, 16])
@pytest.mark.parametrize("bits", ref.WIDTHS)
def test_padding_channels_are_not_read(bits: int, group: int, rng: np.random.Generator) -> None:
    p = ref.plan(40, bits, bits, group=group)
    pages = random_bytes(rng, p, 1, 1)
    other = realigned(pages)
    for side in ("key", "value"):
        string = np.unpackbits(other[0, 0], bitorder="little")
        padding = ref.code_places(p, side)[-1][:, 8:]
        string[padding] = 1 - string[padding]
        other[0, 0] = np.packbits(string, bitorder="little")
    assert (other != pages).any()
    table, counts = np.zeros((1, 1), np.int32), np.array([128], np.int32)
    for one, two in zip(
        _core.dequantize(p.words, pages, table, counts, 128), _core.dequantize(p.words, other, table, counts, 128)
    ):
        np.testing.assert_array_equal(one, two)
    q = rng.standard_normal((3, 40)).astype(np.float32)
    np.testing.assert_array_equal(_core.dot(p.words, q, pages, 128), _core.dot(p.words, q, other, 128))
    args = (table, counts)
    for one, two in zip(*(_core.attend(p.words, q[None, None], x, *args, causal=False) for x in (pages, other))):
        np.testing.assert_array_equal(one, two)


# ---- golden files ----


def golden(name: str) -> bytes:
    return (GOLDEN / "good" / f"{name}.pages").read_bytes()


def test_no_golden_file_is_without_a_case() -> None:
    assert {path.stem for path in (GOLDEN / "good").iterdir()} == {*GOOD, *MODES}


@pytest.mark.parametrize("name", [*GOOD, *MODES])
def test_golden_files_are_what_the_reference_makes(name: str) -> None:
    assert golden(name) == make["build"](name)


@pytest.mark.parametrize("name", GOOD)
def test_core_writes_golden_pages(name: str) -> None:
    p, n, _ = GOOD[name]
    (k, v), (key, value) = make["vectors"](name), make["transforms"](name)
    n_pages = -(-n // p.page_tokens)
    pages, table = _core.new_pages(p.words, n_pages, 1), np.arange(n_pages, dtype=np.int32)[None]
    values = None if v is None else v[None, None]
    transform = keywords(key, value if v is not None else None)
    _core.append(p.words, k[None, None], values, np.array([n], np.int32), pages, table, **transform)
    if tolerance.has_matrix(p):
        x = dict(key=k[None, None], value=values)
        tolerance.check_pages(p, pages, table, x, dict(key=key, value=value))
        return
    assert pages.tobytes() == golden(name)


@pytest.mark.parametrize("name", GOOD)
def test_core_reads_golden_pages(name: str) -> None:
    p, n, _ = GOOD[name]
    pages = realigned(np.frombuffer(golden(name), np.uint8).reshape(-1, 1, p.record_bytes))
    key, value = make["transforms"](name)
    c, most = ref.Cache(pages, np.arange(len(pages), dtype=np.int32)[None]), np.array([n], np.int32)
    transform = keywords(key, value if any(p.value_bits) else None)
    back = _core.dequantize(p.words, pages, c.block_table, most, n, **transform)
    for side, got, transform in zip(("key", "value"), back, (key, value)):
        if got is not None:
            want = ref.decode_packed(p, side, c, 0, 0, n, transform)
            np.testing.assert_allclose(got[0, 0], want, rtol=0, atol=2e-6 * abs(want).max(initial=0))


@pytest.mark.parametrize("name", MODES)
def test_core_writes_and_reads_golden_pages_that_are_not_plain(name: str) -> None:
    p, n = MODES[name]
    payload = np.frombuffer(golden(name), np.uint8).reshape(-1, 1, p.record_bytes)
    (k, v), sides = make["vectors"](name), dict(zip(("key", "value"), make["mode_transforms"](name)))
    transform = {}
    for side, t in sides.items():
        for field, array in (
            () if p.side(side) is None else (("rotation", t.matrix), ("centre", t.centre), ("steps", t.table))
        ):
            if array is not None:
                transform[f"{side}_{field}"] = array[None]
    given = dict(arrays(**transform))
    table, counts = np.arange(len(payload), dtype=np.int32)[None], np.array([n], np.int32)
    pages = _core.new_pages(p.words, len(payload), 1)
    values = None if v is None else v[None, None]
    _core.append(p.words, k[None, None], values, counts, pages, table, **given)
    if tolerance.has_matrix(p):
        x = {side: rows[None, None] for side, rows in (("key", k), ("value", v)) if rows is not None}
        tolerance.check_pages(p, pages, table, x, {side: [t] for side, t in sides.items()})
    else:
        np.testing.assert_array_equal(pages, payload)
    back = _core.dequantize(p.words, realigned(payload), table, counts, n, **given)
    for side, x, got in zip(sides, (k, v), back):
        if x is None:
            continue
        want = modes.decode(p, side, *modes.encode(p, side, x, sides[side]), sides[side])
        np.testing.assert_allclose(got[0, 0], want, rtol=0, atol=4e-6 * abs(want).max())
