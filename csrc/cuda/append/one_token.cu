// One new token per sequence. One warp per (side, sequence, KV head) stores the new row and packs the row that it
// pushes out. Latency is all that counts, so everything is loaded as early as possible: tables before the previous
// kernel has ended, the new row at once, the old row and the words to merge with as soon as length and page are known.
// After the loads, most instructions wait for the one before. UsualArgs has constants for what is usual, which halves
// the number of instructions, about 900 (measured.md).
#include "cuda/append/encode_warp.cuh"
#include "cuda/tile/pack.cuh"

namespace tq
{
namespace
{

/** Bits of a word that belong to the token, and their new values. */
struct Change {
    uint32_t mask, bits;
};

/** Returns the change of word w in a lane whose row r of 4 is the key; x, y: codes of columns 0..3, 4..7, in bytes. */
__device__ __forceinline__ Change key_change(int bits, int w, int r, uint32_t x, uint32_t y)
{
    const uint32_t row = row_of_bytes(x & LOW_NIBBLES, y & LOW_NIBBLES), every = 0x11111111u;
    if (bits == 2) return {0x03030303u << 2 * r, (w ? y : x) << 2 * r};
    if (bits == 1) return {every << r, (x | y << 4) << r};
    if (bits == 3) return r < 3 ? Change{w == r ? 0x77777777u : 0, row} : Change{0x88888888u, (row >> w & every) << 3};
    if (w < 4) return {w == r ? 0xffffffffu : 0, row};
    if (bits == TQ_WIDE_BITS)
        return {w - 4 == r ? 0xffffffffu : 0, row_of_bytes(x >> 4 & LOW_NIBBLES, y >> 4 & LOW_NIBBLES)};
    if (bits == 6) return {0x03030303u << 2 * r, ((w == 4 ? x : y) >> 4 & 0x03030303u) << 2 * r};
    return {every << r, (x >> 4 & 0x01010101u | (y & 0x10101010u)) << r};
}

/** The same in a lane whose column n (of eight) is the value. c: codes of the lane's four rows. */
__device__ __forceinline__ Change value_change(int bits, int w, int n, const uint32_t (&c)[4])
{
    const int byte = 8 * (n % 4), nibble = 4 * n, bit = byte + 4 * (n / 4);
    const uint32_t row = w % 4 == 0 ? c[0] : w % 4 == 1 ? c[1] : w % 4 == 2 ? c[2] : c[3];
    if (bits == 2) return {w == n / 4 ? 0xffu << byte : 0, (c[0] | c[1] << 2 | c[2] << 4 | c[3] << 6) << byte};
    if (bits == 1) return {0xfu << bit, (c[0] | c[1] << 1 | c[2] << 2 | c[3] << 3) << bit};
    if (bits == 3) return {0xfu << nibble, (row | (c[3] >> w & 1) << 3) << nibble};
    if (w < 4) return {0xfu << nibble, (row & 15) << nibble};
    if (bits == TQ_WIDE_BITS) return {0xfu << nibble, row >> 4 << nibble};
    if (bits == 6)
        return {w - 4 == n / 4 ? 0xffu << byte : 0, (c[0] >> 4 | c[1] >> 4 << 2 | c[2] >> 4 << 4 | c[3] >> 4 << 6)
                                                        << byte};
    return {0xfu << bit, (c[0] >> 4 | c[1] >> 4 << 1 | c[2] >> 4 << 2 | c[3] >> 4 << 3) << bit};
}

/** The words that have bits of the token: loaded early, merged with its codes and stored late. An item is a group and a
 *  lane with such words. Token i is a row of key tiles, in four lanes from 4 (i % 8) on, or a column of value tiles,
 *  in lanes 4 g + i % 4. FINE, with i in token tile h: only two of the four key lanes, or of a lane's four value rows,
 *  from 2 h on. BITS: width of all groups, whose tiles are then side by side; 0 if widths may differ. */
template <int PER_LANE, bool FINE, bool IS_KEY, int BITS> struct OneToken {
    static constexpr int TOKENS = TILE_TOKENS<FINE>, CHANNELS = TQ_TILE * TQ_TILE / TOKENS;
    static constexpr int LANES = !IS_KEY ? 8 : FINE ? 2 : 4, NEEDED = 32 * PER_LANE / CHANNELS * LANES;
    static constexpr int ITEMS = NEEDED > 32 ? NEEDED / 32 : 1, WORDS = BITS ? BITS : TQ_WIDE_BITS;
    static constexpr bool MERGES = !(IS_KEY && BITS == 4); // false: each word belongs to one token
    uint32_t *words[ITEMS];
    uint32_t old[ITEMS][WORDS];

    static __device__ __forceinline__ int bits_of(const AppendSide &side, int group)
    {
        return BITS ? BITS : side.bits[group];
    }

    template <class Args>
    __device__ __forceinline__ void load(const Args &a, const AppendSide &side, uint8_t *record, uint32_t token,
                                         uint32_t lane)
    {
        const uint32_t i = token % TQ_TILE, h = token % TOKENS / TQ_TILE, sub = lane % LANES;
        uint8_t *tiles =
            tiles_of(side, record, token / TOKENS) + 4 * (IS_KEY ? 4 * (i % 8) + 2 * h + sub : 4 * sub + i % 4);
#pragma unroll
        for (int item = 0; item < ITEMS; item++) {
            const int group = lane / LANES + 32 / LANES * item, bits = group < a.groups ? bits_of(side, group) : 0,
                      offset = BITS ? 4 * TQ_TILE * BITS * group : side.offset[group];
            words[item] = bits ? reinterpret_cast<uint32_t *>(tiles + offset) : nullptr;
#pragma unroll
            for (int w = 0; w < WORDS; w++)
                if (MERGES && w < bits) old[item][w] = words[item][TQ_TILE * w];
        }
    }

    __device__ __forceinline__ void store(const AppendSide &side, const uint8_t *codes, uint32_t token, uint32_t lane)
    {
        const uint32_t i = token % TQ_TILE, h = token % TOKENS / TQ_TILE, sub = lane % LANES,
                       column = column_of_token(i);
#pragma unroll
        for (int item = 0; item < ITEMS; item++) {
            if (!words[item]) continue;
            const int group = lane / LANES + 32 / LANES * item, bits = bits_of(side, group);
            const uint8_t *of_group = codes + CHANNELS * group;
            uint32_t c[4], full[4], x, y; // full: all ones in the rows that the token has
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
                if constexpr (IS_KEY) change = key_change(bits, w, i / 8, x, y);
                else change = value_change(bits, w, column / 16 * 4 + column % 4, c);
                if constexpr (!IS_KEY && FINE)
                    change.mask &= value_change(bits, w, column / 16 * 4 + column % 4, full).bits;
                if (!change.mask) continue;
                words[item][TQ_TILE * w] =
                    MERGES ? (old[item][w] & ~change.mask) | (change.bits & change.mask) : change.bits;
            }
        }
    }
};

/** Makes the compiler compute x no later than here. */
__device__ __forceinline__ void by_now(float &x) { asm volatile("" : "+f"(x)); }
__device__ __forceinline__ void by_now(uint32_t &x) { asm volatile("" : "+r"(x)); }

template <bool FINE, int BITS>
__device__ __forceinline__ auto books_of(const AppendArgs &a, const AppendSide &side, int lane)
{
    if constexpr (BITS != 0) return lane_book(a.books[BITS], lane);
    else return SliceBooks<FINE>(a, side, lane);
}

/** Stores the exact copies by index of the newest token. */
template <class Args, int PER_LANE>
__device__ __forceinline__ void store_in_rows(const Args &a, const Work &work, int position,
                                              const uint32_t (&bits)[PER_LANE], int lane)
{
    char *sink = position < a.rows.sinks ? sink_at(a, work, position) : nullptr,
         *tail = a.rows.slots ? tail_at(a, work, position) : nullptr;
    if (sink) store_bits(a, sink, bits, lane);
    if (tail) store_bits(a, tail, bits, lane);
}

/** RESIDUALS: known at compile time that rows are keys with a wave or a metric. */
template <int PER_LANE, bool FINE, bool IS_KEY, int BITS, bool RESIDUALS, class Args>
__device__ __forceinline__ void append_one(const Args &a, const Work &work, float *row, uint8_t *codes, int lane)
{
    const AppendSide &side = a.side[!IS_KEY];
    const Head head = head_of(a, work);
    auto books = books_of<FINE, BITS>(a, side, lane);
    Flips<PER_LANE> flips(a.signs, lane);
    if constexpr (BITS != 0) { // constant memory, slow where lanes differ: read it while the previous kernel runs
        by_now(books.threshold), by_now(books.level);
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) by_now(flips.bit[k]);
    }
    wait_for_stream();

    const Span span = span_of(a, work.b);
    uint32_t fresh_bits[PER_LANE], old_bits[PER_LANE];
    float x[PER_LANE], centre[PER_LANE];
    if (a.query_start_loc && !span.length) return; // k may have no token of this sequence
    load_bits(a, fresh_row(a, work, head, span, span.length - 1), fresh_bits, lane);
    // Moments are loaded as early as the key: it becomes a residual while the block table's entry is on its way.
    const bool moments = Args::USUAL ? RESIDUALS : IS_KEY && has_moments(a, work);
    [[maybe_unused]] WarpResidual<PER_LANE> residual;
    if constexpr (RESIDUALS) residual = WarpResidual<PER_LANE>(a.moments, work.h, a.head_dim, lane);
#pragma unroll
    for (int k = 0; k < PER_LANE; k++)
        centre[k] = head.centre && lane + 32 * k < a.head_dim ? head.centre[lane + 32 * k] : 0.0f;
    if (!span.length) return; // padding
    const int position = span.length - 1;
    const bool to_sinks = position < a.sinks, to_ring = !to_sinks && a.window, packs = span.first < span.last;
    char *slot = to_sinks ? head.sinks + position * a.row_bytes : ring_row(a, head, position);
    const int32_t page = packs ? page_of(a, work, span.first) : -1;
    uint8_t *record = nullptr;
    const uint32_t token = a.page_tokens.remainder((uint32_t)span.first);
    OneToken<PER_LANE, FINE, IS_KEY, BITS> one;
    const auto find_record = [&] {
        record = record_of_page(a, work, page);
        if (record) one.load(a, side, record, token, lane);
    };
    if (packs && to_ring) load_bits(a, slot, old_bits, lane);
    if constexpr (!RESIDUALS) find_record();

    numbers_of_bits(a, fresh_bits, x);
    if (mend_numbers(a, x, fresh_bits) && lane == 0) report_bad(a.flag, work, position);
    if (to_sinks || to_ring) store_bits(a, slot, fresh_bits, lane);
    if (a.rows.sinks || a.rows.slots) store_in_rows(a, work, position, fresh_bits, lane);
    if (RESIDUALS ? !packs : !record) return;
    if constexpr (Args::SETTLED) // while the old row is on its way
        if (head.centre && !moments) rotate_registers(a, flips, centre, lane);
    if (to_ring) {
        numbers_of_bits(a, old_bits, x);
        if (mend_numbers(a, x, old_bits) && lane == 0) report_bad(a.flag, work, span.first + a.sinks);
    }
    if (moments) {
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) {
            x[k] = __fsub_rn(x[k], centre[k]);
            centre[k] = 0.0f;
        }
        if constexpr (RESIDUALS) {
            residual.take(a.head_dim, a.moments.metric, wave_position(a, work, span.first + a.sinks), row, x, lane);
        } else {
#pragma unroll
            for (int k = 0; k < PER_LANE; k++)
                if (lane + 32 * k < a.head_dim) row[lane + 32 * k] = x[k];
            key_to_residual(a.moments, work.h, wave_position(a, work, span.first + a.sinks), row);
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) x[k] = lane + 32 * k < a.head_dim ? row[lane + 32 * k] : 0.0f;
        }
    }
    if constexpr (RESIDUALS) {
        find_record();
        if (!record) return;
    }
    __half scale;
    if constexpr (Args::SETTLED) {
        rotate_settled(a, flips, x, centre, lane);
    } else {
        if (head.centre && !moments)
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) x[k] = __fsub_rn(x[k], centre[k]);
        if (a.rotation == TQ_ROTATION_HADAMARD) rotate_warp(a, x, row, lane);
    }
    if constexpr (BITS != 0) {
        scale = encode_one_width(a, side, BITS, books, x, codes, lane);
    } else {
        scale = encode_warp(a, side, head.steps, books, x, codes, lane);
    }
    __syncwarp();
    one.store(side, codes, token, lane);
    if (lane == 0) *scale_at(side, record, token) = scale;
}

template <int PER_LANE, bool FINE, class Args>
__global__ void __launch_bounds__(32) append_one_token(const __grid_constant__ Args a)
{
    __shared__ float row[32 * PER_LANE];
    __shared__ __align__(4) uint8_t codes[32 * PER_LANE];
    const Work work = work_of(a, blockIdx.x);
    if (work.side == 0) append_one<PER_LANE, FINE, true, 0, false>(a, work, row, codes, threadIdx.x % 32);
    else append_one<PER_LANE, FINE, false, 0, false>(a, work, row, codes, threadIdx.x % 32);
}

template <int PER_LANE, bool IS_KEY, bool RESIDUALS, class Args>
__device__ __forceinline__ void append_usual_one(const Args &a, const Work &work, float *row, uint8_t *codes)
{
    const int lane = threadIdx.x % 32;
    switch (a.side[!IS_KEY].one_width) {
    case 2: return append_one<PER_LANE, false, IS_KEY, 2, RESIDUALS>(a, work, row, codes, lane);
    case 3: return append_one<PER_LANE, false, IS_KEY, 3, RESIDUALS>(a, work, row, codes, lane);
    case 4: return append_one<PER_LANE, false, IS_KEY, 4, RESIDUALS>(a, work, row, codes, lane);
    }
}

/** MOMENTS: keys have a wave or a metric. The kernel without that code has fewer registers (55 instead of 92 at
 *  head_dim 128), and attention behind it starts earlier. The kernel with it tests for moments although it always has
 *  some: it is faster with that branch (measured.md). */
template <int PER_LANE, bool MOMENTS, class Args>
__global__ void __launch_bounds__(32) append_one_token_usual(const __grid_constant__ Args a)
{
    __shared__ float row[32 * PER_LANE];
    __shared__ __align__(4) uint8_t codes[32 * PER_LANE];
    const Work work = work_of(a, blockIdx.x);
    if (work.side) append_usual_one<PER_LANE, false, false>(a, work, row, codes);
    else if (MOMENTS && a.moments.any()) append_usual_one<PER_LANE, true, true>(a, work, row, codes);
    else append_usual_one<PER_LANE, true, false>(a, work, row, codes);
}

int64_t warps_of(const AppendArgs &args) { return (int64_t)args.sides * args.batch * args.kv_heads; }

bool is_usual(const AppendArgs &args)
{
    for (int side = 0; side < args.sides; side++)
        if (args.side[side].one_width < 2 || args.side[side].one_width > 4) return false;
    return args.tile_tokens == TQ_TILE && (args.head_dim == 64 || args.head_dim == 128 || args.head_dim == 256) &&
           args.dtype != TQ_F32 && args.rotation == TQ_ROTATION_HADAMARD && args.scale == TQ_SCALE_EDEN;
}

template <int PER_LANE> tq_status launch_usual(const AppendArgs &args, cudaStream_t stream, tq_error *error)
{
    const auto with = [&](const auto &a) {
        using Args = std::decay_t<decltype(a)>;
        const auto kernel = args.moments.any() ? append_one_token_usual<PER_LANE, true, Args>
                                               : append_one_token_usual<PER_LANE, false, Args>;
        return launch(kernel, warps_of(args), 32, 0, stream, error, a);
    };
    const bool whole = !args.query_start_loc && !args.position_offset && !args.rows.sinks && !args.rows.slots;
    if (args.tries && whole) return with(SearchArgs<WholeArgs<UsualArgs<PER_LANE>>>{{{{{args}}}}});
    if (args.tries) return with(SearchArgs<UsualArgs<PER_LANE>>{{{{args}}}});
    if (whole) return with(WholeArgs<UsualArgs<PER_LANE>>{{{args}}});
    return with(UsualArgs<PER_LANE>{{args}});
}

} // namespace

tq_status launch_append_one_token(const AppendArgs &args, bool settled, cudaStream_t stream, tq_error *error)
{
    if (is_usual(args)) {
        if (args.head_dim == 64) return launch_usual<2>(args, stream, error);
        if (args.head_dim == 128) return launch_usual<4>(args, stream, error);
        return launch_usual<8>(args, stream, error);
    }
    return with_channels_per_lane(args, settled, [&](auto per_lane, auto fine, const auto &as_it_is) {
        return launch(append_one_token<per_lane(), fine(), std::decay_t<decltype(as_it_is)>>, warps_of(args), 32, 0,
                      stream, error, as_it_is);
    });
}

} // namespace tq
