/* How packed pages lie in shared memory once they are decoded, as operands of products. */
#ifndef TQ_CUDA_ATTEND_CHUNK_LAYOUT_H
#define TQ_CUDA_ATTEND_CHUNK_LAYOUT_H
#include "cuda/attend/chunk/sizes.h"
#include "cuda/tile/levels.h"

namespace tq
{
namespace chunk
{

/* ---- decoded pages: core matrices of 8 rows x 16 bytes ----
 * Operand B of Q K^T is keys [token][channel], that of P V values [channel][token]. Padding keeps the stores of a warp apart in the banks
 * of shared memory. */
template <int GROUPS> struct Decoded {
    static constexpr int CHUNKS = 4 * GROUPS; /* of 8 channels */
    static constexpr int KEY_ROWS = 144, KEY_K = PAGE / 8 * KEY_ROWS + 32, KEY_BYTES = CHUNKS * KEY_K;
    static constexpr int VALUE_ROWS = 128, VALUE_K = CHUNKS * VALUE_ROWS + 32, VALUE_BYTES = PAGE / 8 * VALUE_K;
    static constexpr int QUERY_BYTES = CHUNKS * 16 * TEAM_ROWS; /* of TEAM_ROWS rows: [chunk][row][8 channels] */
};

/** The place of a lane's number n in the 16 bytes that it stores, as unpack_half_exactly orders them: 0 2, 1 3, 4 6, 5 7. Its own inverse. */
__host__ __device__ constexpr int swap_middle(int i) { return (i & 4) | (i & 1) << 1 | (i >> 1 & 1); }

/** The channel at position k of a product of queries and keys. */
__host__ __device__ constexpr int channel_at(int k)
{
    const int t = k / 8 % 4, n = swap_middle(k % 8);
    return k / 32 * 32 + 16 * (n / 4) + 4 * t + n % 4;
}
/** The token of a page in row k of decoded keys, and at position k of decoded values. */
__host__ __device__ constexpr int token_at(int k)
{
    const int t = k / 8 % 4, n = swap_middle(k % 8);
    return k / 32 * 32 + 8 * (n % 4) + 4 * (n / 4) + t;
}
/** Where lane 4 g + t stores its row 0 of a tile; row r: 16 * swap_middle(r) bytes further for keys, r * VALUE_ROWS for values. */
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
 * A page's scales are divided by 2^e, with e such that the largest is in 1..2, so that they fit fp16 whatever they are. A decoded number is
 *     scale / 2^e * level * unit_of(bits)
 * where 4 and 5 bits have levels as bytes of subnormal numbers (unpack_half_exactly), and 1 and 2 bits half of a level. */
__host__ __device__ constexpr bool is_small(int bits) { return has_sign(bits); }
__host__ __device__ constexpr float unit_of(int bits) { return is_small(bits) ? 0x1p-9f : bits <= 2 ? 0.5f : 1.0f; }

struct Side {
    uint8_t bits[MOST_GROUPS];
    uint16_t width[MOST_GROUPS]; /* 1 << bits, for with_width */
    int32_t offset[MOST_GROUPS];
    int32_t tile_bytes, codes_offset, scales_offset;
    bool one_width;
    float factor[MOST_BITS + 1]; /* from a decoded number by 2^e to the vector's, without steps */
    tq_transform transform;
};

/** The column of a token of a page among its scales. */
__host__ __device__ constexpr int scale_of(int token)
{
    return token / TQ_TILE * TQ_TILE + 4 * (token % 8) + token % TQ_TILE / 8;
}

} // namespace chunk
} // namespace tq
#endif
