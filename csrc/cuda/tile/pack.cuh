// Packs codes to the words of a tile (turboquant.h, "tile") and unpacks them. Lane l = 4 g + t of a warp has rows
// g + 8 r (r = 0..3) with eight columns each. Here a row is a word of eight nibbles: nibble n is the low four bits of
// c(r, n). The bits above those are rows of their own.
#ifndef TQ_CUDA_TILE_PACK_CUH
#define TQ_CUDA_TILE_PACK_CUH
#include "cuda/device/device.cuh"

namespace tq
{

struct Rows {
    uint32_t low[4], high[4]; // high: only from 5 bits on
};

/** Codes of 6 and 8 bits are packed as two planes: the low four bits and, four words later, the others. */
constexpr int MOST_PACKED_BITS = 5;

__device__ __forceinline__ int planes_of(int bits) { return bits > MOST_PACKED_BITS ? 2 : 1; }

/** Returns the number of bits of a plane, the first of which is bit 4 * plane of the codes. */
__device__ __forceinline__ int plane_bits(int bits, int plane)
{
    return bits <= MOST_PACKED_BITS ? bits : plane ? bits - 4 : 4;
}

struct Words {
    uint32_t at[MOST_PACKED_BITS];
};

/** Returns the bits of a where mask has ones, those of b elsewhere. */
__device__ __forceinline__ uint32_t choose(uint32_t a, uint32_t b, uint32_t mask) { return ((a ^ b) & mask) ^ b; }

constexpr uint32_t LOW_NIBBLES = 0x0f0f0f0fu;

/** Moves nibbles 0..3 of x to the low halves of four bytes, and 4..7 to their high halves: c(n), c(n + 4) in byte n. */
__device__ __forceinline__ uint32_t nibbles_by_four(uint32_t x)
{
    uint32_t even = x & LOW_NIBBLES, odd = x >> 4 & LOW_NIBBLES; // columns 0 2 4 6 and 1 3 5 7
    return prmt(even, odd, 0x5140) | prmt(even, odd, 0x7362) << 4;
}

/** Packs rows of single bits: byte i, bit r + 4 h = c(r, 4 h + i). */
__device__ __forceinline__ uint32_t pack_bit(const uint32_t (&rows)[4])
{
    return nibbles_by_four(rows[0] | rows[1] << 1 | rows[2] << 2 | rows[3] << 3);
}

/** Packs a lane's codes, of up to 5 bits. The first `bits` words of the result are the lane's. */
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

/** Returns the bits of a lane's words that belong to the codes marked by all-ones nibbles in `marked`. */
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

/** Stores the lane's words of a tile, if all its codes are given. words: the first of them. */
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

/** The same for the codes marked by all-ones nibbles; bits of other codes keep their value. Only one warp at a time may
 *  write a tile. */
__device__ __forceinline__ void store_marked(uint32_t *words, int bits, const Rows &rows, const uint32_t (&marked)[4])
{
    const Words packed = pack_lane(bits, rows), mask = pack_mask(bits, marked);
#pragma unroll
    for (int w = 0; w < MOST_PACKED_BITS; w++)
        if (w < bits && mask.at[w]) words[TQ_TILE * w] = (words[TQ_TILE * w] & ~mask.at[w]) | packed.at[w];
}

/** Packs eight codes below 16, the bytes of a (columns 0..3) and of b (columns 4..7), to the nibbles of a row. */
__device__ __forceinline__ uint32_t row_of_bytes(uint32_t a, uint32_t b)
{
    return prmt((a | a >> 4) & 0x00ff00ffu, (b | b >> 4) & 0x00ff00ffu, 0x6420);
}

__device__ __forceinline__ int column_of_token(int i) { return 4 * (i % 8) + i / 8; }

__device__ __forceinline__ int token_of_column(int c) { return 8 * (c % 4) + c / 4; }

/** Returns the column of a tile that is column n (0..7) of lane 4 g + t. */
__device__ __forceinline__ int column_of_lane(int t, int n) { return 16 * (n / 4) + 4 * t + n % 4; }

/** A token and a channel of a tile. */
struct Place {
    int token, channel;
};

/** Returns token and channel of code (r, n) of a lane. fine: in a tile of 64 tokens x 16 channels. */
__device__ __forceinline__ Place place_of(bool fine, bool is_key, int lane, int r, int n)
{
    const int row = lane / 4 + 8 * r, column = column_of_lane(lane % 4, n);
    if (!fine) return is_key ? Place{row, column} : Place{token_of_column(column), row};
    if (is_key) return {row | (column & 8) << 2, (column & 7) | (column & 16) >> 1};
    return {token_of_column(column) | (row & 16) << 1, row & 15};
}

/** Sets the nibbles of the codes of tokens begin .. end - 1 of a 32 x 32 tile to ones, in the rows of a lane. */
__device__ __forceinline__ void mark_tokens(bool is_key, int begin, int end, int lane, uint32_t (&marked)[4])
{
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int token = place_of(false, is_key, lane, i / 8, i % 8).token;
        if (token >= begin && token < end) marked[i / 8] |= 15u << 4 * (i % 8);
    }
}

/** Packs tokens begin .. end - 1 of a tile to the words of a lane. codes: a byte per code, from token 0 and the tile's
 *  first channel on, tokens `stride` bytes apart. bits, shift: those of a plane; it begins at bit `shift` of a code.
 *  WHOLE: all tokens of the tile; otherwise bits of the other tokens keep their value. FINE: as in place_of. */
template <bool WHOLE, bool FINE = false>
__device__ __forceinline__ void pack_tile(uint32_t *words, int bits, bool is_key, const uint8_t *codes, int stride,
                                          int begin, int end, int lane, int shift = 0)
{
    Rows rows = {};
    uint32_t marked[4] = {};
#pragma unroll
    for (int r = 0; r < 4; r++) {
        uint32_t x = 0, y = 0; // columns 0..3 and 4..7, a byte each
        if (is_key) {
            const Place four = place_of(FINE, true, lane, r, 0);
            const uint8_t *at = codes + stride * four.token + four.channel;
            if (WHOLE || (four.token >= begin && four.token < end)) {
                x = *reinterpret_cast<const uint32_t *>(at);
                y = *reinterpret_cast<const uint32_t *>(at + (FINE ? 8 : 16));
                marked[r] = 0xffffffffu;
            }
        } else {
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const Place one = place_of(FINE, false, lane, r, n);
                if (!WHOLE && (one.token < begin || one.token >= end)) continue;
                const uint32_t code = codes[stride * one.token + one.channel];
                if (n < 4) x |= code << 8 * n;
                else y |= code << 8 * (n - 4);
                marked[r] |= 15u << 4 * n;
            }
        }
        x >>= shift, y >>= shift;
        rows.low[r] = row_of_bytes(x & LOW_NIBBLES, y & LOW_NIBBLES);
        rows.high[r] = row_of_bytes(x >> 4 & 0x01010101u, y >> 4 & 0x01010101u);
    }
    if constexpr (WHOLE) store_whole(words + lane, bits, rows);
    else store_marked(words + lane, bits, rows, marked);
}

/** Returns the rows of a lane whose words are words[32 w]: the inverse of pack_lane, but also for 6 and 8 bits. */
__device__ __forceinline__ Rows unpack_lane(int bits, const uint32_t *words)
{
    Rows rows = {};
    uint32_t plane = 0; // single bits, as pack_bit packs them
    if (bits == 1) {
        plane = words[0];
    } else if (bits == 2) {
        const uint32_t low = words[0], high = words[TQ_TILE];
#pragma unroll
        for (int r = 0; r < 4; r++) rows.low[r] = row_of_bytes(low >> 2 * r & 0x03030303u, high >> 2 * r & 0x03030303u);
    } else if (bits == 3) {
        const uint32_t w[3] = {words[0], words[TQ_TILE], words[2 * TQ_TILE]};
#pragma unroll
        for (int r = 0; r < 3; r++) rows.low[r] = w[r] & 0x77777777u;
        rows.low[3] = (w[0] >> 3 & 0x11111111u) | (w[1] >> 2 & 0x22222222u) | (w[2] >> 1 & 0x44444444u);
    } else {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            rows.low[r] = words[TQ_TILE * r];
            if (bits == 8) rows.high[r] = words[TQ_TILE * (4 + r)];
        }
        if (bits == 6) {
            const uint32_t low = words[TQ_TILE * 4], high = words[TQ_TILE * 5];
#pragma unroll
            for (int r = 0; r < 4; r++)
                rows.high[r] = row_of_bytes(low >> 2 * r & 0x03030303u, high >> 2 * r & 0x03030303u);
        }
        if (bits == 5) plane = words[TQ_TILE * 4];
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const uint32_t row = row_of_bytes(plane >> r & 0x01010101u, plane >> (r + 4) & 0x01010101u);
        if (bits == 1) rows.low[r] = row;
        if (bits == 5) rows.high[r] = row;
    }
    return rows;
}

/** Returns code (r, n) of a lane. */
__device__ __forceinline__ uint32_t code_of(const Rows &rows, int r, int n)
{
    return (rows.low[r] >> 4 * n & 15) | (rows.high[r] >> 4 * n & 15) << 4;
}

} // namespace tq
#endif
