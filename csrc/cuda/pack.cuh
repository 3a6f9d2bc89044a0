// Codes to the words of a tile: turboquant.h, "tile". Lane l = 4 g + t of a warp has rows g + 8 r (r = 0..3) with eight columns
// each; here a row is a word of eight nibbles, nibble n = the low four bits of c(r, n), and the fifth bits are rows of their own.
#ifndef TQ_CUDA_PACK_CUH
#define TQ_CUDA_PACK_CUH
#include "device.cuh"

namespace tq
{

struct Rows {
    uint32_t low[4], high[4]; // high: only at 5 bits
};

struct Words {
    uint32_t at[TQ_MAX_BITS];
};

/** Bits of a where mask has ones, of b elsewhere. */
__device__ __forceinline__ uint32_t choose(uint32_t a, uint32_t b, uint32_t mask) { return ((a ^ b) & mask) ^ b; }

constexpr uint32_t LOW_NIBBLES = 0x0f0f0f0fu;

/** Nibbles 0..3 of x to the low halves of four bytes, and 4..7 of x to their high halves: c(n), c(n + 4) in byte n. */
__device__ __forceinline__ uint32_t nibbles_by_four(uint32_t x)
{
    uint32_t even = x & LOW_NIBBLES, odd = x >> 4 & LOW_NIBBLES; // columns 0 2 4 6 and 1 3 5 7
    return prmt(even, odd, 0x5140) | prmt(even, odd, 0x7362) << 4;
}

/** Rows of single bits: byte i, bit r + 4 h = c(r, 4 h + i). */
__device__ __forceinline__ uint32_t pack_bit(const uint32_t (&rows)[4])
{
    return nibbles_by_four(rows[0] | rows[1] << 1 | rows[2] << 2 | rows[3] << 3);
}

/** The first `bits` of the result are the lane's words. */
__device__ __forceinline__ Words pack_lane(int bits, const Rows &rows)
{
    const uint32_t (&c)[4] = rows.low;
    Words w = {};
    if (bits >= 4) {
#pragma unroll
        for (int r = 0; r < 4; r++) w.at[r] = c[r];
        if (bits == 5) w.at[4] = pack_bit(rows.high);
    } else if (bits == 3) {
#pragma unroll
        for (int r = 0; r < 3; r++) w.at[r] = c[r] | (c[3] >> r & 0x11111111u) << 3;
    } else if (bits == 2) {
        uint32_t low = c[0] | c[1] << 2, high = c[2] | c[3] << 2; // rows 0 1 and 2 3, still a nibble a column
        uint32_t even = choose(low, high << 4, LOW_NIBBLES), odd = choose(low >> 4, high, LOW_NIBBLES);
        w.at[0] = prmt(even, odd, 0x5140);
        w.at[1] = prmt(even, odd, 0x7362);
    } else if (bits == 1) {
        w.at[0] = pack_bit(c);
    }
    return w;
}

/** Bits of a lane's words that belong to the codes marked by all-ones nibbles in `marked`. */
__device__ __forceinline__ Words pack_mask(int bits, const uint32_t (&marked)[4])
{
    Rows rows;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        rows.low[r] = marked[r] & 0x11111111u * (bits >= 4 ? 15 : (1 << bits) - 1);
        rows.high[r] = marked[r] & 0x11111111u;
    }
    return pack_lane(bits, rows);
}

/** The lane's words of a tile of which all codes are given. words: the first of them. */
__device__ __forceinline__ void store_whole(uint32_t *words, int bits, const Rows &rows)
{
    const uint32_t (&c)[4] = rows.low;
    if (bits >= 4) {
#pragma unroll
        for (int r = 0; r < 4; r++) words[TQ_TILE * r] = c[r];
        if (bits == 5) words[TQ_TILE * 4] = pack_bit(rows.high);
        return;
    }
    const Words packed = pack_lane(bits, rows);
    words[0] = packed.at[0];
    if (bits >= 2) words[TQ_TILE] = packed.at[1];
    if (bits >= 3) words[TQ_TILE * 2] = packed.at[2];
}

/** The same for the codes marked by all-ones nibbles; the bits of others keep their value. One warp at a time may write a tile. */
__device__ __forceinline__ void store_marked(uint32_t *words, int bits, const Rows &rows, const uint32_t (&marked)[4])
{
    const Words packed = pack_lane(bits, rows), mask = pack_mask(bits, marked);
#pragma unroll
    for (int w = 0; w < TQ_MAX_BITS; w++)
        if (w < bits && mask.at[w]) words[TQ_TILE * w] = (words[TQ_TILE * w] & ~mask.at[w]) | packed.at[w];
}

/** Eight codes below 16 in the bytes of a and b (columns 0..3, 4..7) to the nibbles of a row. */
__device__ __forceinline__ uint32_t row_of_bytes(uint32_t a, uint32_t b)
{
    return prmt((a | a >> 4) & 0x00ff00ffu, (b | b >> 4) & 0x00ff00ffu, 0x6420);
}

__device__ __forceinline__ int column_of_token(int i) { return 4 * (i % 8) + i / 8; }

__device__ __forceinline__ int token_of_column(int c) { return 8 * (c % 4) + c / 4; }

/** Column n (0..7) of lane 4 g + t in a tile. */
__device__ __forceinline__ int column_of_lane(int t, int n) { return 16 * (n / 4) + 4 * t + n % 4; }

} // namespace tq
#endif
