// One new token a sequence. A warp takes a (side, sequence, KV head): it puts the new row where it belongs and packs the one that
// this pushes out. All of it is latency, so whatever can be loaded before it is needed is: tables before the kernel in front has
// ended, the new row at once, the old row and the words to merge with as soon as the length and the page are known.
#include "encode_warp.cuh"
#include "pack.cuh"

namespace tq
{
namespace
{

/** Bits of a word that belong to the token, and their new values. */
struct Change {
    uint32_t mask, bits;
};

/** Word w of the lane of a key tile that has row r = i / 8 of its four; x, y: the row's codes of columns 0..3 and 4..7, in bytes.
 *  8 bits are a width where FINE. */
template <bool FINE> __device__ __forceinline__ Change key_change(int bits, int w, int r, uint32_t x, uint32_t y)
{
    const uint32_t row = row_of_bytes(x & LOW_NIBBLES, y & LOW_NIBBLES), every = 0x11111111u;
    if (bits == 2) return {0x03030303u << 2 * r, (w ? y : x) << 2 * r};
    if (bits == 1) return {every << r, (x | y << 4) << r};
    if (bits == 3) return r < 3 ? Change{w == r ? 0x77777777u : 0, row} : Change{0x88888888u, (row >> w & every) << 3};
    if (w < 4) return {w == r ? 0xffffffffu : 0, row};
    if (FINE && bits == TQ_WIDE_BITS)
        return {w - 4 == r ? 0xffffffffu : 0, row_of_bytes(x >> 4 & LOW_NIBBLES, y >> 4 & LOW_NIBBLES)};
    return {every << r, (x >> 4 & 0x01010101u | (y & 0x10101010u)) << r};
}

/** The same for the lane of a value tile that has the token as column n of its eight; c: the codes of its four rows. */
template <bool FINE> __device__ __forceinline__ Change value_change(int bits, int w, int n, const uint32_t (&c)[4])
{
    const int byte = 8 * (n % 4), nibble = 4 * n, bit = byte + 4 * (n / 4);
    const uint32_t row = w % 4 == 0 ? c[0] : w % 4 == 1 ? c[1] : w % 4 == 2 ? c[2] : c[3];
    if (bits == 2) return {w == n / 4 ? 0xffu << byte : 0, (c[0] | c[1] << 2 | c[2] << 4 | c[3] << 6) << byte};
    if (bits == 1) return {0xfu << bit, (c[0] | c[1] << 1 | c[2] << 2 | c[3] << 3) << bit};
    if (bits == 3) return {0xfu << nibble, (row | (c[3] >> w & 1) << 3) << nibble};
    if (w < 4) return {0xfu << nibble, (row & 15) << nibble};
    if (FINE && bits == TQ_WIDE_BITS) return {0xfu << nibble, row >> 4 << nibble};
    return {0xfu << bit, (c[0] >> 4 | c[1] >> 4 << 1 | c[2] >> 4 << 2 | c[3] >> 4 << 3) << bit};
}

/** The words that a token has bits in: loaded early, merged with its codes and stored late. An item is a group and a lane of its
 *  tile that has such words, for token i: lanes 4 (i % 8) .. of four for keys (the token is a row), 4 g + i % 4 for values (a
 *  column). FINE, for token i of token tile h: of those four lanes two, from 2 h on; of a lane's four rows two, from 2 h on. */
template <int PER_LANE, bool FINE, bool IS_KEY> struct OneToken {
    static constexpr int TOKENS = TILE_TOKENS<FINE>, CHANNELS = TQ_TILE * TQ_TILE / TOKENS;
    static constexpr int LANES = !IS_KEY ? 8 : FINE ? 2 : 4, NEEDED = 32 * PER_LANE / CHANNELS * LANES;
    static constexpr int ITEMS = NEEDED > 32 ? NEEDED / 32 : 1, WORDS = FINE ? TQ_WIDE_BITS : TQ_MAX_BITS;
    uint32_t *words[ITEMS];
    uint32_t old[ITEMS][WORDS];

    __device__ __forceinline__ void load(const AppendArgs &a, const AppendSide &side, uint8_t *record, int token,
                                         int lane)
    {
        const int i = token % TQ_TILE, h = token % TOKENS / TQ_TILE, sub = lane % LANES;
        uint8_t *tiles =
            tiles_of(side, record, token / TOKENS) + 4 * (IS_KEY ? 4 * (i % 8) + 2 * h + sub : 4 * sub + i % 4);
#pragma unroll
        for (int item = 0; item < ITEMS; item++) {
            const int group = lane / LANES + 32 / LANES * item, bits = group < a.groups ? side.bits[group] : 0;
            words[item] = bits ? reinterpret_cast<uint32_t *>(tiles + side.offset[group]) : nullptr;
#pragma unroll
            for (int w = 0; w < WORDS; w++)
                if (w < bits) old[item][w] = words[item][TQ_TILE * w];
        }
    }

    __device__ __forceinline__ void store(const AppendSide &side, const uint8_t *codes, int token, int lane)
    {
        const int i = token % TQ_TILE, h = token % TOKENS / TQ_TILE, sub = lane % LANES, column = column_of_token(i);
#pragma unroll
        for (int item = 0; item < ITEMS; item++) {
            if (!words[item]) continue;
            const int group = lane / LANES + 32 / LANES * item, bits = side.bits[group];
            const uint8_t *of_group = codes + CHANNELS * group;
            uint32_t c[4], full[4], x, y; // full: all bits of the rows that are the token's
            if constexpr (IS_KEY) {
                x = *reinterpret_cast<const uint32_t *>(of_group + 4 * sub);
                y = *reinterpret_cast<const uint32_t *>(of_group + CHANNELS / 2 + 4 * sub);
            } else {
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    c[r] = of_group[(sub + 8 * r) % CHANNELS];
                    full[r] = !FINE || r / 2 == h ? (1u << bits) - 1 : 0;
                }
            }
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                if (w >= bits) break;
                Change change;
                if constexpr (IS_KEY) change = key_change<FINE>(bits, w, i / 8, x, y);
                else change = value_change<FINE>(bits, w, column / 16 * 4 + column % 4, c);
                if constexpr (!IS_KEY && FINE)
                    change.mask &= value_change<FINE>(bits, w, column / 16 * 4 + column % 4, full).bits;
                if (change.mask) words[item][TQ_TILE * w] = (old[item][w] & ~change.mask) | (change.bits & change.mask);
            }
        }
    }
};

template <int PER_LANE, bool FINE, bool IS_KEY>
__device__ __forceinline__ void append_one(const AppendArgs &a, const Work &work, float *row, uint8_t *codes, int lane)
{
    const AppendSide &side = a.side[!IS_KEY];
    const Head head = head_of(a, work);
    const SliceBooks<FINE> books(a, side, lane);
    wait_for_stream();

    const Span span = span_of(a, work.b);
    uint32_t fresh_bits[PER_LANE], old_bits[PER_LANE];
    float x[PER_LANE], centre[PER_LANE];
    load_bits(a, head.fresh, fresh_bits, lane);
#pragma unroll
    for (int k = 0; k < PER_LANE; k++)
        centre[k] = head.centre && lane + 32 * k < a.head_dim ? head.centre[lane + 32 * k] : 0.0f;
    if (!span.length) return; // padding
    const int position = span.length - 1;
    const bool to_sinks = position < a.sinks, to_ring = !to_sinks && a.window, packs = span.first < span.last;
    char *slot = to_sinks ? head.sinks + position * a.row_bytes : ring_row(a, head, position);
    uint8_t *record = packs ? record_of(a, work, span.first) : nullptr;
    if (packs && to_ring) load_bits(a, slot, old_bits, lane);
    const int token = (int)a.page_tokens.remainder((uint32_t)span.first);
    OneToken<PER_LANE, FINE, IS_KEY> one;
    if (record) one.load(a, side, record, token, lane);

    numbers_of_bits(a, fresh_bits, x);
    if (mend_numbers(a, x, fresh_bits) && lane == 0) report_bad(a.flag, work, position);
    if (to_sinks || to_ring) store_bits(a, slot, fresh_bits, lane);
    if (!record) return;
    if (to_ring) {
        numbers_of_bits(a, old_bits, x);
        if (mend_numbers(a, x, old_bits) && lane == 0) report_bad(a.flag, work, span.first + a.sinks);
    }
    if (head.centre)
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) x[k] = __fsub_rn(x[k], centre[k]);
    if (a.rotation == TQ_ROTATION_HADAMARD) rotate_warp(a, x, row, lane);
    const __half scale = encode_warp(a, side, head.steps, books, x, codes, lane);
    __syncwarp();
    one.store(side, codes, token, lane);
    if (lane == 0) *scale_at(side, record, token) = scale;
}

template <int PER_LANE, bool FINE>
__global__ void __launch_bounds__(32) append_step(const __grid_constant__ AppendArgs a)
{
    __shared__ float row[32 * PER_LANE];
    __shared__ __align__(4) uint8_t codes[32 * PER_LANE];
    const Work work = work_of(a, blockIdx.x);
    if (work.side == 0) append_one<PER_LANE, FINE, true>(a, work, row, codes, threadIdx.x);
    else append_one<PER_LANE, FINE, false>(a, work, row, codes, threadIdx.x);
}

} // namespace

tq_status launch_append_step(const AppendArgs &args, cudaStream_t stream, tq_error *error)
{
    return with_channels_per_lane(args, [&](auto per_lane, auto fine) {
        return launch(append_step<per_lane(), fine()>, (int64_t)args.sides * args.batch * args.kv_heads, 32, 0, stream,
                      error, args);
    });
}

} // namespace tq
