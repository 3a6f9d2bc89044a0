// Look-ups of CUDA attention (csrc/cuda/tile/fragments.cuh) on the host, with emulated prmt (tests/test_fragments.py).
#include "cuda/tile/fragments.cuh"
#include "cuda/tile/codebooks.h"

namespace tq
{
namespace
{

/** Returns byte i of a fragment's register, as a number. */
int32_t byte_of(uint32_t x, int i, bool is_signed) { return is_signed ? (int8_t)(x >> 8 * i) : (uint8_t)(x >> 8 * i); }

enum Way { ONE_PRODUCT, TWO_PRODUCTS, EXACTLY };

/** Writes the level of a lane's code (r, n) to out[r][n]. tile: the lane's first word, aligned as in shared memory. */
template <int BITS, bool MULTIPLY>
void levels_of_lane(Way way, const uint8_t *tile, const LevelTables &tables, int32_t (&out)[4][8])
{
    const TileWords<BITS> words = load_tile<BITS>(tile);
    for (int half = 0; half < 2; half++) {
        uint32_t a[4], second[4] = {}, exact[2][4];
        if constexpr (BITS == 4 || BITS == 5) {
            if (way == TWO_PRODUCTS) unpack_half_twice<MULTIPLY>(words, half, tables, a, second);
        }
        if (way == ONE_PRODUCT) unpack_half<BITS, Reading::ROW_FACTOR, MULTIPLY>(words, half, tables, a);
        if (way == EXACTLY) unpack_half_exactly(words, half, tables, exact);
        for (int k = 0; k < 16; k++) {
            const int i = k / 4, r = 2 * half + i % 2, h = i / 2, n = k % 4; /* register i: row r, columns 4 h .. */
            int32_t &level = out[r][4 * h + n];
            if (way == EXACTLY) { /* in step h: columns 0, 2 in register i % 2, 1 and 3 two registers further */
                const uint32_t x = exact[h][i % 2 + 2 * (n % 2)] >> 16 * (n / 2) & 0xffff;
                level = x & 0x8000 ? (int32_t)(x & 0x7fff) : -(int32_t)x; /* LEVEL_UNIT is negative */
            } else {
                const bool is_signed = way == TWO_PRODUCTS || BITS == 3;
                level = byte_of(a[i], n, is_signed) + byte_of(second[i], n, true) - (is_signed ? 0 : 128);
            }
        }
    }
}

template <bool MULTIPLY>
void levels_of(int bits, Way way, const uint8_t *tile, const LevelTables &tables, int32_t (&out)[4][8])
{
    switch (bits) {
    case 3: return levels_of_lane<3, MULTIPLY>(way, tile, tables, out);
    case 4: return levels_of_lane<4, MULTIPLY>(way, tile, tables, out);
    case 5: return levels_of_lane<5, MULTIPLY>(way, tile, tables, out);
    case 6: return levels_of_lane<6, MULTIPLY>(way, tile, tables, out);
    default: return levels_of_lane<TQ_WIDE_BITS, MULTIPLY>(way, tile, tables, out);
    }
}

} // namespace
} // namespace tq

/** Looks up a tile's levels for N(0, 1): words [bits][32] -> out [32 lanes][4][8]. way: tq::Way. multiply: MULTIPLY. */
extern "C" void fragments(int bits, int way, int multiply, const uint32_t *words, int32_t (*out)[4][8])
{
    tq_codebook books[TQ_WIDE_BITS + 1] = {};
    for (int b = 1; b <= TQ_MAX_BITS; b++) tq_get_codebook(TQ_CODEBOOK_NORMAL, 0, b, &books[b], nullptr);
    tq::LevelTables tables = {};
    tq::fill_level_tables(books, &tables);
    for (int lane = 0; lane < 32; lane++) {
        const uint8_t *tile = reinterpret_cast<const uint8_t *>(words + lane);
        if (multiply) tq::levels_of<true>(bits, (tq::Way)way, tile, tables, out[lane]);
        else tq::levels_of<false>(bits, (tq::Way)way, tile, tables, out[lane]);
    }
}
