/* Decodes packed pages to operands B in shared memory. Warps of producers do nothing else. */
#ifndef TQ_CUDA_ATTEND_CHUNK_DECODE_CUH
#define TQ_CUDA_ATTEND_CHUNK_DECODE_CUH
#include "cuda/attend/chunk/layout.h"
#include "cuda/tile/fragments.cuh"

namespace tq
{
namespace chunk
{

/** Returns e of a page's scales (layout.h). Called by one warp. */
__device__ __forceinline__ int exponent_of(const uint8_t *scales, int lane)
{
    const uint2 four = *reinterpret_cast<const uint2 *>(scales + 8 * lane);
    const uint32_t two = __vmaxu2(four.x & 0x7fff7fffu, four.y & 0x7fff7fffu);
    const uint32_t largest = __reduce_max_sync(ALL_LANES, max(two & 0xffffu, two >> 16));
    return (int)(largest >> 10) - 15; /* -15 if all are subnormal: then the largest may be below 2^e */
}

/** Returns 2^x, for x in -126..127. */
__device__ __forceinline__ float power_of_two(int x) { return __int_as_float((127 + x) << 23); }

/** Returns two scales times `by`. select: their bytes in x and y, as prmt takes it. */
__device__ __forceinline__ __half2 scaled(uint32_t x, uint32_t y, uint32_t select, float by)
{
    const float2 two = __half22float2(as_halves(prmt(x, y, select)));
    return __floats2half2_rn(two.x * by, two.y * by);
}

/** The scales for a lane's numbers, at widths with one unit: s[r] for row r of keys, s[w] for word w of values. */
struct LaneScales {
    __half2 s[4];

    /** scales: of the token tile, in column order. by: 2^-e, times -2^15 for levels that are subnormal (unit_of). */
    template <bool KEY> static __device__ __forceinline__ LaneScales of(const uint8_t *scales, float by, int lane)
    {
        const int g = lane / 4, t = lane % 4;
        if constexpr (KEY) { /* of tokens g + 8 r, which are columns 4 g + r */
            const uint2 four = *reinterpret_cast<const uint2 *>(scales + 8 * g);
            const __half2 low = scaled(four.x, 0, 0x3210, by), high = scaled(four.y, 0, 0x3210, by);
            return {{__low2half2(low), __high2half2(low), __low2half2(high), __high2half2(high)}};
        } else { /* of the lane's columns 0 2, 1 3, 4 6, 5 7 */
            const uint2 low = *reinterpret_cast<const uint2 *>(scales + 8 * t),
                        high = *reinterpret_cast<const uint2 *>(scales + 32 + 8 * t);
            return {{scaled(low.x, low.y, 0x5410, by), scaled(low.x, low.y, 0x7632, by),
                     scaled(high.x, high.y, 0x5410, by), scaled(high.x, high.y, 0x7632, by)}};
        }
    }
};

struct NoAddend {};
template <class A> constexpr bool ADDS = true;
template <> constexpr bool ADDS<NoAddend> = false;

/** Decodes a tile. tile: the lane's first word. to: where the lane stores its row 0 (layout.h). add(half, words) sets
 *  words[i] to the addends of row 2 half + i, in the order of the stored words. They are multiplied by add.by. */
template <bool KEY, int GROUPS, int BITS, class A>
__device__ __forceinline__ void decode_tile(const uint8_t *tile, uint32_t to, const LevelTables &tables,
                                            const LaneScales &scales, const A &add)
{
    const TileWords<BITS> words = load_tile<BITS>(tile);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t x[2][4], more[2][4];
        if constexpr (ADDS<A>) add(half, more);
        unpack_half_exactly<BITS>(words, half, tables, x);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int r = 2 * half + i;
            const uint32_t levels[4] = {x[0][i], x[0][2 + i], x[1][i], x[1][2 + i]};
            uint32_t y[4];
#pragma unroll
            for (int word = 0; word < 4; word++) {
                __half2 number = __hmul2(as_halves(levels[word]), scales.s[KEY ? r : word]);
                if constexpr (ADDS<A>) number = __hfma2(as_halves(more[i][word]), add.by, number);
                y[word] = as_word(number);
            }
            store_16(to + (KEY ? 16 * swap_middle(r) : r * Decoded<GROUPS>::VALUE_ROWS),
                     make_uint4(y[0], y[1], y[2], y[3]));
        }
    }
}

/** Decodes a warp's part of one side of a page: at most COUNT groups from `first` on of a token tile. e: layout.h. */
template <bool KEY, int GROUPS, int COUNT>
__device__ __forceinline__ void decode_side(const Side &side, const LevelTables &tables, const uint8_t *record,
                                            uint32_t to, int e, int token_tile, int first, int lane)
{
    const uint8_t *codes = record + side.codes_offset + token_tile * side.tile_bytes + 4 * lane,
                  *scales = record + side.scales_offset + token_tile * TQ_TILE * (int)sizeof(__half);
    const auto tile_at = [&](int group) {
        return KEY ? key_at<GROUPS>(token_tile, group, lane) : value_at<GROUPS>(token_tile, group, lane);
    };
    const auto scales_for = [&](int bits) {
        return LaneScales::of<KEY>(scales, is_small(bits) ? -power_of_two(15 - e) : power_of_two(-e), lane);
    };
    if (side.one_width) {
        with_width<MOST_BITS>(side.width[0], [&](auto width) {
            constexpr int BITS = decltype(width)::value;
            const LaneScales s = scales_for(BITS);
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                if (GROUPS % COUNT && first + i >= GROUPS) break;
                decode_tile<KEY, GROUPS, BITS>(codes + (first + i) * 128 * BITS, to + tile_at(first + i), tables, s,
                                               NoAddend());
            }
        });
        return;
    }
#pragma unroll 1
    for (int i = 0; i < COUNT && first + i < GROUPS; i++)
        with_width<MOST_BITS>(side.width[first + i], [&](auto width) {
            constexpr int BITS = decltype(width)::value;
            decode_tile<KEY, GROUPS, BITS>(codes + side.offset[first + i], to + tile_at(first + i), tables,
                                           scales_for(BITS), NoAddend());
        });
}

/** Decodes keys as decode_side does, with add_to(group) as the `add` of decode_tile. */
template <int GROUPS, int COUNT, class F>
__device__ __forceinline__ void decode_keys_and_add(const Side &side, const LevelTables &tables, const uint8_t *record,
                                                    uint32_t to, int e, int token_tile, int first, int lane, F add_to)
{
    const uint8_t *codes = record + side.codes_offset + token_tile * side.tile_bytes + 4 * lane,
                  *scales = record + side.scales_offset + token_tile * TQ_TILE * (int)sizeof(__half);
#pragma unroll 1
    for (int i = 0; i < COUNT && first + i < GROUPS; i++) {
        const int group = first + i;
        with_width<MOST_BITS>(side.width[group], [&](auto width) {
            constexpr int BITS = decltype(width)::value;
            decode_tile<true, GROUPS, BITS>(
                codes + side.offset[group], to + key_at<GROUPS>(token_tile, group, lane), tables,
                LaneScales::of<true>(scales, is_small(BITS) ? -power_of_two(15 - e) : power_of_two(-e), lane),
                add_to(group));
        });
    }
}

} // namespace chunk
} // namespace tq
#endif
