/* How decoded pages lie in shared memory, as operands of products. */
#ifndef TQ_CUDA_ATTEND_CHUNK_LAYOUT_H
#define TQ_CUDA_ATTEND_CHUNK_LAYOUT_H
#include "cuda/attend/chunk/sizes.h"
#include "cuda/tile/levels.h"

namespace tq
{
namespace chunk
{

/* ---- decoded pages: core matrices of 8 rows x 16 bytes ----
 * Operand B of Q K^T is the keys, [token][channel]; that of P V is the values, [channel][token]. Padding spreads the
 * stores of a warp over the banks of shared memory. */
template <int GROUPS> struct Decoded {
    static constexpr int CHUNKS = 4 * GROUPS; /* chunks of 8 channels */
    static constexpr int KEY_ROWS = 144, KEY_K = PAGE / 8 * KEY_ROWS + 32, KEY_BYTES = CHUNKS * KEY_K;
    static constexpr int VALUE_ROWS = 128, VALUE_K = CHUNKS * VALUE_ROWS + 32, VALUE_BYTES = PAGE / 8 * VALUE_K;
    static constexpr int QUERY_BYTES = CHUNKS * 16 * TEAM_ROWS; /* TEAM_ROWS rows: [chunk][row][8 channels] */
};

/** Returns the place of a lane's number i in unpack_half_exactly's order: 0 2, 1 3, 4 6, 5 7. It is its own inverse. */
__host__ __device__ constexpr int swap_middle(int i) { return (i & 4) | (i & 1) << 1 | (i >> 1 & 1); }

/** Returns the channel at position k of the inner dimension of Q K^T. */
__host__ __device__ constexpr int channel_at(int k)
{
    const int t = k / 8 % 4, n = swap_middle(k % 8);
    return k / 32 * 32 + 16 * (n / 4) + 4 * t + n % 4;
}
/** Returns the token of a page that is row k of decoded keys and position k of decoded values. */
__host__ __device__ constexpr int token_at(int k)
{
    const int t = k / 8 % 4, n = swap_middle(k % 8);
    return k / 32 * 32 + 8 * (n % 4) + 4 * (n / 4) + t;
}
/** Return the byte at which lane 4 g + t stores its row 0 of a tile. Row r lies 16 * swap_middle(r) bytes further for
 *  keys, and r * VALUE_ROWS bytes further for values. */
template <int GROUPS> __host__ __device__ inline int key_at(int token_tile, int group, int lane)
{
    using D = Decoded<GROUPS>;
    const int g = lane / 4, t = lane % 4;
    return (4 * group + t) * D::KEY_K + (4 * token_tile + g % 4) * D::KEY_ROWS + g / 4 * 64;
}
template <int GROUPS> __host__ __device__ inline int value_at(int token_tile, int group, int lane)
{
    using D = Decoded<GROUPS>;
    const int g = lane / 4, t = lane % 4;
    return (4 * token_tile + t) * D::VALUE_K + 4 * group * D::VALUE_ROWS + g * 16;
}

/* ---- units of decoded numbers ----
 * The scales of a page are divided by 2^e, with e such that the largest is in 1..2: any scales fit fp16 then. A decoded
 * number is scale / 2^e * level * unit_of(bits). The unit is there because unpack_half_exactly gives levels of 4 and
 * 5 bits as bytes of subnormal numbers, and half of a level at 1 and 2 bits. */
__host__ __device__ constexpr bool is_small(int bits) { return has_sign(bits); }
__host__ __device__ constexpr float unit_of(int bits) { return is_small(bits) ? 0x1p-9f : bits <= 2 ? 0.5f : 1.0f; }

struct Side {
    uint8_t bits[MOST_GROUPS];
    uint16_t width[MOST_GROUPS]; /* 1 << bits, for with_width */
    int32_t offset[MOST_GROUPS];
    int32_t tile_bytes, codes_offset, scales_offset;
    bool one_width;
    float factor[MOST_BITS + 1]; /* by width: decoded number * 2^e * factor is the vector's number, before steps */
    tq_transform transform;
};

/** Returns the index of a token of a page among the page's scales, which are in column order. */
__host__ __device__ constexpr int scale_of(int token)
{
    return token / TQ_TILE * TQ_TILE + 4 * (token % 8) + token % TQ_TILE / 8;
}

} // namespace chunk
} // namespace tq
#endif
