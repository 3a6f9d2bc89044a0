/* Unpacks the words of tiles to tensor-core fragments. All CUDA attention unpacks codes here, except that to plans that
 * are not plain (tile/pack.cuh).
 *
 * A tile (turboquant.h) is 32 rows x 32 columns; a lane's words hold rows g + 8 r, r = 0..3. It is fed to mma.m16n8k32
 * as two halves of 16 rows, half 0 with r = 0, 1 and half 1 with r = 2, 3: a0 and a2 come from row g + 8 (2 half), a1
 * and a3 from the row 8 below it; a0, a1 are columns 0..3 of the lane's eight, a2, a3 columns 4..7.
 *
 * The bytes of a fragment depend on the width and on the reading:
 *   width  reading         bytes                                       as u8 or s8      costs per tile, beside the loads
 *   1, 2   ROW_FACTOR      code * 2^(bits r): a mask, no look-up       u8               8 to 9 operations, 2 products
 *   1, 2   SCALED          code << (8 - bits)                          u8               about 15, 2
 *   3      these two       level                                       s8               14 + 7 shifts, 2
 *   3      OFFSET          128 + level                                 u8               the same
 *   4      TWO_PRODUCTS    (level + 1, or 0 if negative), then         s8               24, 4
 *                          (level, or -1 if not negative)
 *   5      TWO_PRODUCTS    (level, or level - 1 if negative),          s8               32 + 7 shifts, 4
 *                          then (0, or 1 if negative)
 *   4, 5   otherwise       128 + level                                 u8               32, or 40 + 7 shifts, 2
 *   6      any             128 + level                                 u8               some 80, 2
 *   8      any             128 + level                                 u8               some 40, 2
 * Look-ups and masks limit the whole kernel: they share a pipe of half the issue rate. Right shifts would use it too.
 * So kernels for one width and four rows compute them on the multipliers, as high words of products. In other kernels
 * latency is the limit, and shifts are faster (measured.md). At 4 to 6 bits a second load replaces a shift, and the
 * multipliers compute complements of selectors (8 of the 24 operations at 4 bits).
 * The caller of a product subtracts the offset of the bytes times the sum of the other factor. The offset is
 * (2^bits - 1) / 2 for codes (in ROW_FACTOR times their factor) and 128 for 128 + level. A tile of 16 channels has two
 * token tiles in different lanes or rows; two products use one each (multiply_fine_keys, multiply_fine_values). SCALED
 * bytes are as large as those of other widths, so that in a mixed plan all groups use the same number of query bits.
 * TWO_PRODUCTS needs levels of at most 126 at 4 bits, which holds for every codebook. */
#ifndef TQ_CUDA_TILE_FRAGMENTS_CUH
#define TQ_CUDA_TILE_FRAGMENTS_CUH
#include "cuda/device/device.cuh"
#include "cuda/tile/levels.h"

namespace tq
{

/** Returns ~x = -1 - x, computed on the multipliers. */
__device__ __forceinline__ uint32_t complement(const LevelTables &tables, uint32_t x)
{
    return x * tables.ones + tables.ones;
}

/** Returns x >> by, by in 0..7 or 16. MULTIPLY: on the multipliers, if the other pipe is the limit. More latency. */
template <bool MULTIPLY> __device__ __forceinline__ uint32_t shift_right(const LevelTables &tables, uint32_t x, int by)
{
    if (by == 0) return x;
    return MULTIPLY ? __umulhi(x, tables.right[by == 16 ? 0 : by]) : x >> by;
}

/** A lane's words of a tile. At 4 to 6 bits `high` has the high halves of words with nibbles, which are selectors: a
 *  load costs less than a shift, which uses the pipe of the look-ups. */
template <int BITS> struct TileWords {
    uint32_t w[BITS], high[has_sign(BITS) ? 4 : 1];
};

/** Loads a lane's words of a tile. tile: the first of them, in shared memory. */
template <int BITS> __device__ __forceinline__ TileWords<BITS> load_tile(const uint8_t *tile)
{
    TileWords<BITS> t;
#pragma unroll
    for (int i = 0; i < BITS; i++) t.w[i] = *reinterpret_cast<const uint32_t *>(tile + 128 * i);
    if constexpr (has_sign(BITS))
#pragma unroll
        for (int r = 0; r < 4; r++) t.high[r] = *reinterpret_cast<const uint16_t *>(tile + 128 * r + 2);
    return t;
}

/** Makes a selector word of each row r, whose nibbles are 3-bit codes. The spare bits of three rows hold the fourth. */
template <bool MULTIPLY>
__device__ __forceinline__ void selectors3(const LevelTables &tables, const TileWords<3> &t, uint32_t (&s)[4])
{
#pragma unroll
    for (int r = 0; r < 3; r++) s[r] = t.w[r] & 0x77777777u;
    s[3] = (shift_right<MULTIPLY>(tables, t.w[0], 3) & 0x11111111u) |
           (shift_right<MULTIPLY>(tables, t.w[1], 2) & 0x22222222u) |
           (shift_right<MULTIPLY>(tables, t.w[2], 1) & 0x44444444u);
}

/** Returns the selector word of four codes of row r: columns 4 h .. 4 h + 3 of the lane's eight. With bit 3 of a nibble
 *  set, prmt replicates the sign bit of the byte it selects. At 4 bits this bit is set for negative codes, at 5 and 6
 *  bits for magnitudes of 8 to 15 (mod 16). */
template <int BITS> __device__ __forceinline__ uint32_t nibbles(const TileWords<BITS> &t, int r, int h)
{
    return h ? t.high[r] : t.w[r];
}

/** Looks up four magnitudes of 5 or 6 bits in two tables of 8: one for nibbles with bit 3 clear, one for the others. No
 *  byte of a table is above 127, so it gives 0 where the other one applies. */
__device__ __forceinline__ uint32_t look_up_both(const uint32_t (&table)[4], uint32_t word, uint32_t complemented)
{
    return prmt(table[0], table[1], word) | prmt(table[2], table[3], complemented);
}

/** Four codes of 5 or 6 bits. */
struct Signed {
    uint32_t magnitudes, negative; /* bytes; negative: 1 or 0 */
};

/** MULTIPLY: as in shift_right. */
template <bool MULTIPLY>
__device__ __forceinline__ Signed signed_of(const LevelTables &tables, const TileWords<5> &t, int r, int h)
{
    const uint32_t word = nibbles(t, r, h);
    return {look_up_both(tables.magnitude5, word, complement(tables, word)),
            shift_right<MULTIPLY>(tables, t.w[4], r + 4 * h) & 0x01010101u};
}

template <bool MULTIPLY>
__device__ __forceinline__ Signed signed_of(const LevelTables &tables, const TileWords<6> &t, int r, int h)
{
    const uint32_t word = nibbles(t, r, h), complemented = complement(tables, word);
    const uint32_t fifth = shift_right<MULTIPLY>(tables, t.w[4 + h], 2 * r) & 0x01010101u;
    return {look_up_both(tables.magnitude6, word, complemented) ^
                (look_up_both(tables.change6, word, complemented) & fifth * 255),
            shift_right<MULTIPLY>(tables, t.w[4 + h], 2 * r + 1) & 0x01010101u};
}

/** Returns 128 + level of four codes of 5 or 6 bits: m ^ 128, or (m ^ 127) + 1 if negative. */
template <bool MULTIPLY, int BITS>
__device__ __forceinline__ uint32_t offset_levels(const LevelTables &tables, const TileWords<BITS> &t, int r, int h)
{
    const Signed four = signed_of<MULTIPLY>(tables, t, r, h);
    return (four.magnitudes ^ (four.negative * tables.ones + 0x80808080u)) + four.negative;
}

template <int BITS> struct Width {
    static constexpr int value = BITS;
};

/** Calls f(Width<bits>()), or nothing for 0 bits. width: 1 << bits, bits 0..6 or 8. It tests bits, because comparisons
 *  would become a jump table, which has to be loaded. The order matters, too (measured.md). MOST: no width is larger;
 *  with up to 5 there is no code for 6 and 8 bits. */
template <int MOST = TQ_WIDE_BITS, class F> __device__ __forceinline__ void with_width(uint32_t width, F f)
{
    if (width & (1 << 3 | 1 << 4)) {
        if (width & 1 << 3) f(Width<3>());
        else f(Width<4>());
    } else if (width & 1 << 5) {
        f(Width<5>());
    } else if (width & 1 << 2) {
        f(Width<2>());
    } else if (width & 1 << 1) {
        f(Width<1>());
    } else if constexpr (MOST > 5) {
        if (width & 1 << TQ_WIDE_BITS) f(Width<TQ_WIDE_BITS>());
        else if (width & 1 << 6) f(Width<6>());
    }
}

/** The same for tiles of 16 channels, which mostly have few bits. */
template <class F> __device__ __forceinline__ void with_fine_width(uint32_t width, F f)
{
    if (width & (1 << 1 | 1 << 2)) {
        if (width & 1 << 2) f(Width<2>());
        else f(Width<1>());
    } else if (width & (1 << 3 | 1 << 4)) {
        if (width & 1 << 3) f(Width<3>());
        else f(Width<4>());
    } else if (width & 1 << 5) {
        f(Width<5>());
    } else if (width & 1 << TQ_WIDE_BITS) {
        f(Width<TQ_WIDE_BITS>());
    } else if (width & 1 << 6) {
        f(Width<6>());
    }
}

/** Unpacks fragment a of a half, for widths and readings with one product. MULTIPLY: as in shift_right. */
template <int BITS, Reading READING, bool MULTIPLY = false>
__device__ __forceinline__ void unpack_half(const TileWords<BITS> &t, int half, const LevelTables &tables,
                                            uint32_t (&a)[4])
{
    if constexpr (BITS == 1) {
        uint32_t high = t.w[0] >> 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int r = 2 * half + i, up = READING == Reading::SCALED ? 7 - r : 0;
            a[i] = t.w[0] << up & 0x01010101u << (r + up);
            a[2 + i] = high << up & 0x01010101u << (r + up);
        }
    } else if constexpr (BITS == 2) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int r = 2 * half + (i & 1), up = READING == Reading::SCALED ? 6 - 2 * r : 0;
            a[i] = t.w[i >> 1] << up & 0x03030303u << (2 * r + up);
        }
    } else if constexpr (BITS == 3) {
        uint32_t s[4];
        const uint32_t (&table)[2] = READING == Reading::OFFSET ? tables.offset3 : tables.level3;
        selectors3<MULTIPLY>(tables, t, s);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            a[i] = prmt(table[0], table[1], s[2 * half + i]);
            a[2 + i] = prmt(table[0], table[1], shift_right<MULTIPLY>(tables, s[2 * half + i], 16));
        }
    } else if constexpr (BITS == TQ_WIDE_BITS) { /* nibbles of two tiles of 4 bits, even and odd columns, to bytes */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t low = t.w[2 * half + i], high = t.w[4 + 2 * half + i];
            uint32_t even = (low & 0x0f0f0f0fu) | (high << 4 & 0xf0f0f0f0u),
                     odd = (low >> 4 & 0x0f0f0f0fu) | (high & 0xf0f0f0f0u);
            a[i] = prmt(even, odd, 0x5140);
            a[2 + i] = prmt(even, odd, 0x7362);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int r = 2 * half + (i & 1), h = i >> 1;
            if constexpr (BITS == 4) {
                /* bit 3 of a nibble replicates the (clear) sign bit of a magnitude: negative codes give 0, and with the
                 * bit flipped the others do */
                uint32_t plus = nibbles(t, r, h), minus = plus ^ 0x88888888u;
                a[i] = 0x80808080u + prmt(tables.magnitude4[0], tables.magnitude4[1], plus) -
                       prmt(tables.magnitude4[0], tables.magnitude4[1], minus);
            } else {
                a[i] = offset_levels<MULTIPLY>(tables, t, r, h);
            }
        }
    }
}

/** 4 bits, TWO_PRODUCTS: the level is the sum of the two fragments' bytes. MULTIPLY: as in shift_right. */
template <bool MULTIPLY>
__device__ __forceinline__ void unpack_half_twice(const TileWords<4> &t, int half, const LevelTables &tables,
                                                  uint32_t (&plus)[4], uint32_t (&minus)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = 2 * half + (i & 1);
        uint32_t word = nibbles(t, r, i >> 1);
        plus[i] = prmt(tables.plus4[0], tables.plus4[1], word);
        minus[i] = prmt(tables.minus4[0], tables.minus4[1], complement(tables, word));
    }
}

/** 5 bits, TWO_PRODUCTS: the same. */
template <bool MULTIPLY>
__device__ __forceinline__ void unpack_half_twice(const TileWords<5> &t, int half, const LevelTables &tables,
                                                  uint32_t (&first)[4], uint32_t (&second)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const Signed four = signed_of<MULTIPLY>(tables, t, 2 * half + (i & 1), i >> 1);
        first[i] = four.magnitudes ^ four.negative * 255;
        second[i] = four.negative;
    }
}

/* ---- fp16 operands, for products of many rows ---- */

__device__ __forceinline__ __half2 as_halves(uint32_t x) { return *reinterpret_cast<__half2 *>(&x); }
__device__ __forceinline__ uint32_t as_word(__half2 x) { return *reinterpret_cast<uint32_t *>(&x); }

/** Turns both halves of x, 1024 + 2^p code, into code - (2^BITS - 1) / 2, exactly. p >= 1, so constants fit fp16. */
template <int BITS> __device__ __forceinline__ uint32_t centre_codes(uint32_t x, int p)
{
    float half_range = 0.5f * ((1 << BITS) - 1), down = 1.0f / (1 << p);
    return as_word(__hfma2(as_halves(x), __float2half2_rn(down), __float2half2_rn(-1024 * down - half_range)));
}

/** Unpacks fragments a of a half for two steps of k16, exactly: codes - (2^bits - 1) / 2 for 1 and 2 bits; levels for 3
 *  and 8 bits; levels * LEVEL_UNIT for 4 to 6 bits, whose fp16 bits are a sign and a byte of magnitude, without
 *  arithmetic. Step j is columns 16 j .. 16 j + 15. Of a lane's four columns there, 0 and 2 are at k 2 t and 2 t + 1, 1
 *  and 3 at k 2 t + 8 and 2 t + 9. */
template <int BITS>
__device__ __forceinline__ void unpack_half_exactly(const TileWords<BITS> &t, int half, const LevelTables &tables,
                                                    uint32_t (&a)[2][4])
{
    const uint32_t magic = tables.magic;
    if constexpr (BITS <= 2) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint32_t word = BITS == 2 ? t.w[j * (BITS - 1)] : t.w[0], odd = word >> 8;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int r = 2 * half + i, p = BITS == 2 ? 2 * r : r + 4 * j, up = p ? 0 : 1; /* so that p + up >= 1 */
                uint32_t mask = (BITS == 2 ? 0x00030003u : 0x00010001u) << (p + up);
                a[j][i] = centre_codes<BITS>(word << up & mask | magic, p + up);
                a[j][2 + i] = centre_codes<BITS>(odd << up & mask | magic, p + up);
            }
        }
    } else if constexpr (has_sign(BITS)) {
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int r = 2 * half + i;
                uint32_t magnitudes, signs; /* 0 for negative codes, 0x80 for others; computed on the multipliers */
                if constexpr (BITS == 4) {
                    uint32_t word = nibbles(t, r, j);
                    magnitudes = prmt(tables.magnitude4[0], tables.magnitude4[1], word & 0x77777777u);
                    signs = prmt(0x40404040u, 0x40404040u, word) * tables.two; /* bit 3 replicates the sign bit: 0 */
                } else {
                    const Signed four = signed_of<false>(tables, t, r, j);
                    magnitudes = four.magnitudes;
                    signs = 0x80808080u - four.negative * 128;
                }
                a[j][i] = prmt(magnitudes, signs, 0x6240);
                a[j][2 + i] = prmt(magnitudes, signs, 0x7351);
            }
    } else { /* 128 + level in each byte */
        uint32_t bytes[4];
        unpack_half<BITS, Reading::OFFSET>(t, half, tables, bytes);
        __half2 offset = __float2half2_rn(-1024 - 128);
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t x = bytes[2 * j + i];
                a[j][i] = as_word(__hadd2(as_halves(prmt(x, magic, 0x7250)), offset));
                a[j][2 + i] = as_word(__hadd2(as_halves(prmt(x, magic, 0x7351)), offset));
            }
    }
}

/** c[half][block] += tile x b[block], both halves of one tile, for BLOCKS column blocks. MULTIPLY: as in
 *  shift_right. */
template <int BITS, Reading READING, bool TWO_PRODUCTS, bool MULTIPLY, bool B_UNSIGNED, int BLOCKS>
__device__ __forceinline__ void multiply_tile(const uint8_t *tile, const LevelTables &tables, const uint2 (&b)[BLOCKS],
                                              int (&c)[2][BLOCKS][4])
{
    TileWords<BITS> t = load_tile<BITS>(tile);
    constexpr bool BUSY = MULTIPLY || (TWO_PRODUCTS && BITS >= 5); /* look-ups are the limit, in mixed plans too */
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t a[4];
        constexpr bool TWICE = TWO_PRODUCTS && (BITS == 4 || BITS == 5);
        if constexpr (TWICE) {
            uint32_t second[4];
            unpack_half_twice<BUSY>(t, half, tables, a, second);
#pragma unroll
            for (int n = 0; n < BLOCKS; n++) mma<false, B_UNSIGNED>(c[half][n], second, b[n].x, b[n].y);
        } else {
            unpack_half<BITS, READING, BUSY>(t, half, tables, a);
        }
#pragma unroll
        for (int n = 0; n < BLOCKS; n++) mma<BITS != 3 && !TWICE, B_UNSIGNED>(c[half][n], a, b[n].x, b[n].y);
    }
}

/** Multiplies keys in a tile of 16 channels: lanes t = 0, 1 have tokens of its first token tile, the others of its
 *  second. b[token tile] is the query in those lanes and 0 in the others. c[token tile][half][block] += keys x b. */
template <int BITS, int BLOCKS>
__device__ __forceinline__ void multiply_fine_keys(const uint8_t *tile, const LevelTables &tables,
                                                   const uint2 (&b)[2][BLOCKS], int (*c)[2][BLOCKS][4])
{
    TileWords<BITS> t = load_tile<BITS>(tile);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t a[4];
        unpack_half<BITS, Reading::SCALED>(t, half, tables, a);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int n = 0; n < BLOCKS; n++) mma<BITS != 3, false>(c[h][half][n], a, b[h][n].x, b[h][n].y);
    }
}

/** Multiplies values in a tile of 16 channels, whose halves are two token tiles of the same channels.
 *  c[block] += values x weights of both. */
template <int BITS, int BLOCKS>
__device__ __forceinline__ void multiply_fine_values(const uint8_t *tile, const LevelTables &tables,
                                                     const uint2 (*weights)[BLOCKS], int (&c)[BLOCKS][4])
{
    TileWords<BITS> t = load_tile<BITS>(tile);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t a[4];
        unpack_half<BITS, Reading::SCALED>(t, half, tables, a);
#pragma unroll
        for (int n = 0; n < BLOCKS; n++) mma<BITS != 3, true>(c[n], a, weights[half][n].x, weights[half][n].y);
    }
}

} // namespace tq
#endif
