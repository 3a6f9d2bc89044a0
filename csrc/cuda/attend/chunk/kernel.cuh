/* The kernel on pages. A block has a piece of the line, and two kinds of teams of four warps:
 *
 *   producers   two teams: copy packed pages ahead, decode each once for all rows of the block
 *   consumers   one or two teams with 64 rows each: products on tensor cores (WGMMA), softmax between them
 *
 * Page j + 1 is weighed while the products with the values of page j run, as in FlashAttention-3 (arXiv 2407.08608).
 * Decoded keys and decoded values have two stages each. A team loads its queries itself, so that those of the next
 * segment arrive while the products with the last values run. */
#ifndef TQ_CUDA_ATTEND_CHUNK_KERNEL_CUH
#define TQ_CUDA_ATTEND_CHUNK_KERNEL_CUH
#include "cuda/attend/chunk/cursor.cuh"
#include "cuda/attend/chunk/wave.cuh"
#include "cuda/device/warpgroup.cuh"

namespace tq
{
namespace chunk
{

constexpr int MOST_SLOTS = 4;  /* slots of packed pages in shared memory */
constexpr int INFOS = 4;       /* PageInfos in use: of two stages, and of pages that consumers still weigh */
constexpr int PRODUCERS = 256; /* threads */
constexpr float HEADROOM = 8;  /* a row's reference moves when a weight would exceed 2^HEADROOM */

/** The facts about a page that consumers need. */
struct PageInfo {
    float key_factor;     /* 2^e of its decoded keys */
    float value_exponent; /* e of its value scales. Decoded values are divided by 2^e, so weights have that factor */
    float sum_factor;     /* 2^-e, which undoes that factor in the sum of weights */
    int32_t seen;         /* tokens that exist, from the first on; 0: there is no such page */
};

/** SCORES: logits are computed before they are weighed, for the variance term and the soft-cap. WAVE: keys have one. */
template <int GROUPS, int TEAMS, bool SCORES, bool WAVE> struct Shape {
    using D = Decoded<GROUPS>;
    static constexpr int THREADS = 128 * TEAMS + PRODUCERS;
    static constexpr int ROWS = TEAM_ROWS * TEAMS;
    /* Registers of a thread. A block starts with 65,536 / THREADS for each. */
    static constexpr int CONSUMER_REGISTERS = TEAMS == 2 ? 192 : 232, PRODUCER_REGISTERS = TEAMS == 2 ? 64 : 136;
    static_assert(128 * TEAMS * CONSUMER_REGISTERS + PRODUCERS * PRODUCER_REGISTERS <= 65536);
    /* Offsets in shared memory. */
    static constexpr int AT_KEYS = TEAMS * D::QUERY_BYTES, AT_VALUES = AT_KEYS + 2 * D::KEY_BYTES,
                         AT_INFOS = AT_VALUES + 2 * D::VALUE_BYTES,
                         AT_SQUARES = AT_INFOS + INFOS * (int)sizeof(PageInfo),
                         AT_SEEN = AT_SQUARES + (SCORES ? INFOS * PAGE * 4 : 0), AT_BARRIERS = AT_SEEN + 8 * MOST_SLOTS,
                         AT_RING = (AT_BARRIERS + 8 * (MOST_SLOTS + 9 + TEAMS) + 127) / 128 * 128;
};

/** Shared addresses of barriers. */
template <class S> struct Barriers {
    uint32_t first;

    __device__ __forceinline__ uint32_t packed(int slot) const { return first + 8 * slot; }
    __device__ __forceinline__ uint32_t keys_full(int stage) const { return first + 8 * (MOST_SLOTS + stage); }
    __device__ __forceinline__ uint32_t keys_empty(int stage) const { return first + 8 * (MOST_SLOTS + 2 + stage); }
    __device__ __forceinline__ uint32_t values_full(int stage) const { return first + 8 * (MOST_SLOTS + 4 + stage); }
    __device__ __forceinline__ uint32_t values_empty(int stage) const { return first + 8 * (MOST_SLOTS + 6 + stage); }
    __device__ __forceinline__ uint32_t wave() const { return first + 8 * (MOST_SLOTS + 8); }
    __device__ __forceinline__ uint32_t queries(int team) const { return first + 8 * (MOST_SLOTS + 9 + team); }
};

__device__ __forceinline__ void arrive_for_warp(uint32_t bar, int lane)
{
    __syncwarp();
    if (lane % (32 / ARRIVALS) == 0) barrier_arrive(bar);
}

/* Barriers 1 and 2 of the block are those of consumers (`meet`). */
__device__ __forceinline__ void producers_meet() { meet_at<PRODUCERS>(3); }

// ---- producers ----

/** Sets the scales of tokens from `seen` on to 0, since anything may be stored there. Called by all producers. */
__device__ __forceinline__ void hide_tokens(const Args &a, uint8_t *record, int seen)
{
    for (int i = threadIdx.x; i < 2 * PAGE; i += PRODUCERS) {
        const int side = i / PAGE, token = i % PAGE;
        if (token < seen) continue;
        uint8_t *scales = record + (side ? a.value.scales_offset : a.key.scales_offset);
        reinterpret_cast<uint16_t *>(scales)[scale_of(token)] = 0;
    }
}

/** The facts about the page in a slot that thread 0 gives the other producers. */
struct SlotInfo {
    int32_t seen, wave; /* PageInfo.seen; index of the page's rows in wave_pages */
};

/** Starts to copy the cursor's page to a slot. */
template <class S>
__device__ __forceinline__ void load_page(const Args &a, const Cursor &at, uint8_t *shared, const Barriers<S> &bars,
                                          int slot)
{
    const uint32_t page = (uint32_t)a.block_table[(int64_t)at.b * a.max_pages + at.page];
    const bool is_there = page < a.page_limit;
    reinterpret_cast<SlotInfo *>(shared + S::AT_SEEN)[slot] = {
        is_there ? min(PAGE, at.length - PAGE * at.page) : 0,
        (int32_t)wave_page_at(a, a.wave_sets > 1 ? at.b : 0, at.page, at.h)};
    if (!is_there) {
        barrier_arrive(bars.packed(slot));
        return;
    }
    barrier_expect(bars.packed(slot), (uint32_t)a.record_bytes);
    copy_bulk(shared_address(shared) + S::AT_RING + slot * a.slot_bytes,
              a.pages + page * a.page_bytes + at.h * a.record_bytes, (uint32_t)a.record_bytes, bars.packed(slot),
              copy_policy(false));
}

template <int GROUPS, bool SCORES, bool WAVE, class S>
__device__ __forceinline__ void produce(const Args &a, uint8_t *shared, const Barriers<S> &bars, int warp, int lane)
{
    using D = Decoded<GROUPS>;
    constexpr int COUNT = (GROUPS + 1) / 2; /* groups of a warp */
    const uint32_t base = shared_address(shared);
    const int token_tile = warp % 4, first = warp / 4 * COUNT;
    Cursor ahead(a); /* only thread 0, which copies, advances it */
    const int32_t n = ahead.left;
    if (threadIdx.x == 0)
        for (int j = 0; j < min(n, a.ring); j++) {
            load_page<S>(a, ahead, shared, bars, j);
            ahead.next_page(a);
        }
    /* If there is room, a copy of a page's rows of the wave lies behind the ring while the page's keys are decoded. */
    const int wave_steps = WAVE ? a.wave->fast_steps + 1 : 0;
    const bool has_copy = WAVE && a.ring > 1 && wave_steps * wave_step_bytes(GROUPS) <= a.wave_room;
    uint8_t *wave_copy = shared + S::AT_RING + a.ring * a.slot_bytes;
    const auto load_wave =
        [&](int from) { /* from: the slot of the page. Thread 0 */
                        const uint32_t bytes = wave_steps * wave_step_bytes(GROUPS);
                        barrier_expect(bars.wave(), bytes);
                        copy_bulk(shared_address(wave_copy),
                                  reinterpret_cast<const uint8_t *>(a.wave_pages) +
                                      (int64_t)reinterpret_cast<const SlotInfo *>(shared + S::AT_SEEN)[from].wave *
                                          bytes,
                                  bytes, bars.wave(), copy_policy(false));
        };
    if (has_copy && threadIdx.x == 0 && n > 0) load_wave(0);
    int slot = 0, slot_parity = 0;
#pragma unroll 1
    for (int32_t j = 0; j < n; j++) {
        uint8_t *record = shared + S::AT_RING + slot * a.slot_bytes;
        const int stage = j & 1, empty_parity = (j >> 1 & 1) ^ 1;
        barrier_wait(bars.packed(slot), slot_parity);
        const SlotInfo info = reinterpret_cast<const SlotInfo *>(shared + S::AT_SEEN)[slot];
        if (info.seen < PAGE) {
            hide_tokens(a, record, info.seen);
            shared_writes_before_copies();
            producers_meet();
        }
        int key_exponent = exponent_of(record + a.key.scales_offset, lane), wave_exponent = NO_WAVE;
        const int value_exponent = exponent_of(record + a.value.scales_offset, lane);
        if constexpr (WAVE) { /* keys must fit fp16 with the wave, too */
            wave_exponent = a.wave->exponent[info.wave % a.heads];
            key_exponent = max(key_exponent, wave_exponent - 2);
        }
        if (j > 1) barrier_wait(bars.keys_empty(stage), empty_parity);
        if (threadIdx.x == 0)
            reinterpret_cast<PageInfo *>(shared + S::AT_INFOS)[j % INFOS] = {
                power_of_two(key_exponent), (float)value_exponent, power_of_two(-value_exponent), info.seen};
        if constexpr (SCORES)
            if (threadIdx.x < PAGE) {
                const __half *scales = reinterpret_cast<const __half *>(record + a.key.scales_offset);
                const float scale = __half2float(scales[scale_of(token_at(threadIdx.x))]);
                reinterpret_cast<float *>(shared + S::AT_SQUARES)[j % INFOS * PAGE + threadIdx.x] = scale * scale;
            }
        const uint32_t keys = base + S::AT_KEYS + stage * D::KEY_BYTES;
        if constexpr (WAVE) {
            const uint4 *page = has_copy ? reinterpret_cast<const uint4 *>(wave_copy)
                                         : a.wave_pages + (int64_t)info.wave * wave_steps * wave_step_words(GROUPS);
            const __half2 by = __float2half2_rn(power_of_two(wave_exponent - key_exponent));
            if (has_copy) barrier_wait(bars.wave(), j & 1);
            decode_keys_and_add<GROUPS, COUNT>(
                a.key, a.tables, record, keys, key_exponent, token_tile, first, lane, [&](int group) {
                    return WaveAddend<GROUPS>(a.wave_basis, page, wave_steps, token_tile, group, by, lane);
                });
        } else {
            decode_side<true, GROUPS, COUNT>(a.key, a.tables, record, keys, key_exponent, token_tile, first, lane);
        }
        shared_writes_before_copies();
        arrive_for_warp(bars.keys_full(stage), lane);
        if (has_copy && threadIdx.x == 0 && j + 1 < n) {
            barrier_wait(bars.keys_full(stage), j >> 1 & 1); /* all producers have read the rows of page j */
            load_wave(slot + 1 == a.ring ? 0 : slot + 1);
        }
        if (j > 1) barrier_wait(bars.values_empty(stage), empty_parity);
        decode_side<false, GROUPS, COUNT>(a.value, a.tables, record, base + S::AT_VALUES + stage * D::VALUE_BYTES,
                                          value_exponent, token_tile, first, lane);
        shared_writes_before_copies();
        arrive_for_warp(bars.values_full(stage), lane);
        producers_meet(); /* all producers have read the packed page */
        if (threadIdx.x == 0 && j + a.ring < n) {
            load_page<S>(a, ahead, shared, bars, slot);
            ahead.next_page(a);
        }
        if (++slot == a.ring) slot = 0, slot_parity ^= 1;
    }
}

// ---- consumers ----

/** The online softmax of a thread's two rows: s[4 i + 2 r + c] is column 8 i + 2 t + c of row r. */
struct Softmax {
    float reference[2], sum[2], factor[2]; /* factor: of earlier sums, if the reference moved */
    bool moved;                            /* whether the reference of any row of the warp did */

    __device__ __forceinline__ void start()
    {
#pragma unroll
        for (int r = 0; r < 2; r++) reference[r] = -INFINITY, sum[r] = 0, factor[r] = 1;
        moved = false;
    }

    /** Turns products into weights 2^(logit - reference + value_exponent), which are at most 2^HEADROOM. */
    template <bool SCORES>
    __device__ __forceinline__ void weigh(const Args &a, float (&s)[64], const Row (&rows)[2], const PageInfo &page,
                                          const float *squares, int t)
    {
        float scale[2] = {rows[0].scale * page.key_factor, rows[1].scale * page.key_factor};
        if constexpr (SCORES) {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const float2 square = *reinterpret_cast<const float2 *>(squares + 8 * i + 2 * t);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float *x = s + 4 * i + 2 * r;
                    x[0] = fmaf(x[0], scale[r], fmaf(square.x, -rows[r].variance, rows[r].bias));
                    x[1] = fmaf(x[1], scale[r], fmaf(square.y, -rows[r].variance, rows[r].bias));
                }
            }
            if (a.softcap > 0) {
                const float cap = a.softcap * LOG2_E, inverse = reciprocal(cap);
#pragma unroll
                for (int i = 0; i < 64; i++) s[i] = cap * tanh_fast(s[i] * inverse);
            }
            scale[0] = scale[1] = 1.0f;
        }
        if (page.seen < PAGE)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int n = swap_middle(2 * t + c), token = 8 * (n % 4) + 4 * (n / 4); /* token_at(2 t + c) */
#pragma unroll
                for (int i = 0; i < 16; i++)
                    if (token + i / 4 * 32 + i % 4 >= page.seen) s[4 * i + c] = s[4 * i + 2 + c] = -INFINITY;
            }
        float top[2] = {s[0], s[2]};
#pragma unroll
        for (int i = 0; i < 16; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) top[r] = fmaxf(top[r], fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
#pragma unroll
        for (int r = 0; r < 2; r++) top[r] = fmaf(top[r], scale[r], page.value_exponent);
        moved = __any_sync(ALL_LANES, top[0] > reference[0] + HEADROOM || top[1] > reference[1] + HEADROOM);
        if (moved)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                top[r] = fmaxf(top[r], __shfl_xor_sync(ALL_LANES, top[r], 1));
                top[r] = fmaxf(top[r], __shfl_xor_sync(ALL_LANES, top[r], 2));
                const float now = fmaxf(reference[r], top[r]);
                factor[r] = exp2_fast(reference[r] - (now == -INFINITY ? 0.0f : now)); /* 0 for the first page */
                sum[r] *= factor[r];
                reference[r] = now;
            }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            /* If the reference is still -inf, all logits of the row are -inf. */
            const float add = page.value_exponent - (reference[r] == -INFINITY ? 0.0f : reference[r]);
            float part[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < 16; i++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float &x = s[4 * i + 2 * r + c];
                    x = exp2_fast(fmaf(x, scale[r], add));
                    part[c] += x;
                }
            sum[r] = fmaf(part[0] + part[1], page.sum_factor, sum[r]);
        }
    }

    /** Rescales earlier sums if the reference moved, and makes operand A of weights. No product with values may run. */
    template <int N>
    __device__ __forceinline__ void apply(float (&o)[N], const float (&s)[64], uint32_t (&weights)[8][4])
    {
        if (moved)
#pragma unroll
            for (int i = 0; i < N; i++) o[i] *= factor[i / 2 & 1];
#pragma unroll
        for (int i = 0; i < 32; i++) weights[i / 4][i % 4] = as_word(__floats2half2_rn(s[2 * i], s[2 * i + 1]));
    }
};

template <int GROUPS, int TEAMS, bool SCORES, class S>
__device__ __forceinline__ void consume(const Args &a, uint8_t *shared, const Barriers<S> &bars, int team, int warp,
                                        int lane)
{
    using D = Decoded<GROUPS>;
    constexpr int SUMS = 16 * GROUPS; /* of a thread */
    const uint32_t base = shared_address(shared);
    const int thread = threadIdx.x % 128, t = lane % 4;
    Cursor at(a);
    const auto load_queries = [&] {
        if (thread || at.left <= 0) return;
        barrier_expect(bars.queries(team), D::QUERY_BYTES);
        copy_bulk(base + team * D::QUERY_BYTES,
                  a.queries + ((int64_t)at.segment(a) * TEAMS + team) * (D::QUERY_BYTES / sizeof(__half)),
                  D::QUERY_BYTES, bars.queries(team), copy_policy(false));
    };
    load_queries();
    const uint64_t queries = describe_operand(base + team * D::QUERY_BYTES, 16 * TEAM_ROWS, 128),
                   keys = describe_operand(base + S::AT_KEYS, D::KEY_K, D::KEY_ROWS),
                   values = describe_operand(base + S::AT_VALUES, D::VALUE_K, D::VALUE_ROWS);
    float s[64], o[SUMS];
    uint32_t weights[8][4];
    Softmax softmax;
    Row rows[2];
    const auto multiply_keys = [&](int stage) {
        take_results(s);
        order_products();
#pragma unroll
        for (int k = 0; k < 2 * GROUPS; k++)
            queue_shared_product(s, queries + k * (2 * 16 * TEAM_ROWS / 16),
                                 keys + stage * (D::KEY_BYTES / 16) + k * (2 * D::KEY_K / 16), k > 0);
        end_batch();
    };
    const auto multiply_values = [&](int stage) {
        take_results(o);
        order_products();
#pragma unroll
        for (int k = 0; k < PAGE / 16; k++)
            queue_product<TQ_TILE * GROUPS>(o, weights[k],
                                            values + stage * (D::VALUE_BYTES / 16) + k * (2 * D::VALUE_K / 16), true);
        end_batch();
    };
    const auto weigh = [&](int32_t j) {
        softmax.weigh<SCORES>(a, s, rows, reinterpret_cast<const PageInfo *>(shared + S::AT_INFOS)[j % INFOS],
                              reinterpret_cast<const float *>(shared + S::AT_SQUARES) + j % INFOS * PAGE, t);
    };
    int32_t j = 0; /* index of the page in the piece */
    int query_parity = 0;
#pragma unroll 1
    while (at.left > 0) {
        const int32_t segment = at.segment(a), last = j + at.here() - 1;
        const int64_t row = 64 * team + 16 * warp + lane / 4; /* in the segment; the thread's other row is row + 8 */
#pragma unroll
        for (int r = 0; r < 2; r++) rows[r] = a.row_args[(int64_t)segment * S::ROWS + row + 8 * r];
        softmax.start();
#pragma unroll
        for (int i = 0; i < SUMS; i++) o[i] = 0;
        barrier_wait(bars.queries(team), query_parity);
        query_parity ^= 1;
        barrier_wait(bars.keys_full(j & 1), j >> 1 & 1);
        multiply_keys(j & 1);
        wait_for_batches<0>();
        take_results(s);
        arrive_for_warp(bars.keys_empty(j & 1), lane);
        weigh(j);
        softmax.apply(o, s, weights);
#pragma unroll 1
        while (j < last) {
            const int before = j & 1, before_parity = j >> 1 & 1;
            j++;
            const int stage = j & 1;
            barrier_wait(bars.keys_full(stage), j >> 1 & 1);
            multiply_keys(stage);
            barrier_wait(bars.values_full(before), before_parity);
            multiply_values(before);
            wait_for_batches<1>();
            take_results(s);
            arrive_for_warp(bars.keys_empty(stage), lane);
            weigh(j);
            wait_for_batches<0>();
            take_results(o);
            arrive_for_warp(bars.values_empty(before), lane);
            softmax.apply(o, s, weights);
        }
        at.next_segment(a);
        meet(team); /* all warps of the team are done with the queries */
        load_queries();
        barrier_wait(bars.values_full(j & 1), j >> 1 & 1);
        multiply_values(j & 1);
        wait_for_batches<0>();
        take_results(o);
        arrive_for_warp(bars.values_empty(j & 1), lane);
        j++;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = softmax.sum[r];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            const int64_t slot = (int64_t)(blockIdx.x + segment) * S::ROWS + row + 8 * r;
            float2 *to = reinterpret_cast<float2 *>(a.sums + slot * (TQ_TILE * GROUPS)) + t;
#pragma unroll
            for (int i = 0; i < SUMS / 4; i++) to[4 * i] = make_float2(o[4 * i + 2 * r], o[4 * i + 2 * r + 1]);
            if (t == 0) a.totals[slot] = {softmax.reference[r], sum};
        }
    }
}

extern __shared__ __align__(128) uint8_t chunk_memory[];

template <int GROUPS, int TEAMS, bool SCORES, bool WAVE>
__global__ void __launch_bounds__(Shape<GROUPS, TEAMS, SCORES, WAVE>::THREADS, 1)
    attend_chunk_pages(const __grid_constant__ Args a)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = Shape<GROUPS, TEAMS, SCORES, WAVE>;
    const int group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0), warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0),
              lane = threadIdx.x % 32;
    const Barriers<S> bars = {shared_address(chunk_memory) + S::AT_BARRIERS};
    if (threadIdx.x == 0) {
        for (int i = 0; i < MOST_SLOTS; i++) barrier_init(bars.packed(i), 1);
        for (int i = 0; i < 2; i++) {
            barrier_init(bars.keys_full(i), ARRIVALS * PRODUCERS / 32);
            barrier_init(bars.values_full(i), ARRIVALS * PRODUCERS / 32);
            barrier_init(bars.keys_empty(i), ARRIVALS * 4 * TEAMS);
            barrier_init(bars.values_empty(i), ARRIVALS * 4 * TEAMS);
        }
        barrier_init(bars.wave(), 1);
        for (int i = 0; i < TEAMS; i++) barrier_init(bars.queries(i), 1);
        barrier_init_fence();
    }
    __syncthreads();
    wait_for_previous();
    if (group < PRODUCERS / 128) {
        take_fewer_registers<S::PRODUCER_REGISTERS>();
        produce<GROUPS, SCORES, WAVE>(a, chunk_memory, bars, warp, lane);
    } else {
        take_more_registers<S::CONSUMER_REGISTERS>();
        consume<GROUPS, TEAMS, SCORES>(a, chunk_memory, bars, group - PRODUCERS / 128, warp % 4, lane);
    }
#endif
}

} // namespace chunk
} // namespace tq
#endif
