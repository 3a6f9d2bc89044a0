/* Checks and times tq_cuda_attend without Python: random caches in turboquant.h's bit layout, answers in float64.
 * make harness builds it into build/cuda-harness.
 *   attend_harness check [filter [k/n]]    every case whose name contains the filter, or every n-th of those from the
 *                                          k-th on (k counts from 0), so that n processes share the float64 answers,
 *                                          which take long. Exit status 1 if a case fails. A filter that starts with
 *                                          attend_ is one of kernels' names. "error" is over the case's largest number,
 *                                          that of rows over the row's norm, which is bounded for fp16 queries
 *   attend_harness time [filter]           median times of decode shapes in a CUDA graph, whose inputs exceed the L2
 *                                          cache; pages are shuffled unless TQ_HARNESS_IN_ORDER is set
 * TQ_HARNESS_UNEVEN: all cases and shapes have a schedule for any lengths */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attend_cases.h"
#include "moments.h"
#include "turboquant_cuda.h"

static void cuda_ok(cudaError_t e, int line)
{
    if (e == cudaSuccess) return;
    printf("line %d: %s\n", line, cudaGetErrorString(e));
    exit(2);
}
#define CUDA(call) cuda_ok((call), __LINE__)

static void tq_ok(tq_status s, const tq_error &e, int line)
{
    if (s == TQ_OK) return;
    printf("line %d: `%s[%lld]` must be %s, got %g\n", line, e.argument, (long long)e.index, e.wants, e.got);
    exit(2);
}
#define TQ(call) tq_ok((call), error, __LINE__)

using Doubles = std::vector<double>;

/* ---- plans ---- */

static int bits_of(const std::string &digits, int g) { return digits[std::min<size_t>(g, digits.size() - 1)] - '0'; }

static tq_plan make_plan(const Case &c)
{
    int channels = c.fine ? TQ_FINE_GROUP : TQ_TILE, groups = (c.head_dim + channels - 1) / channels;
    std::vector<int64_t> words = {TQ_FORMAT_VERSION, c.head_dim, c.page_tokens, channels, c.codebook, 0, 7};
    for (int side = 0; side < 2; side++) words.insert(words.end(), {c.rotation, 0, 0, 0});
    words.insert(words.end(), {c.pairs, c.metric, 0, c.variance});
    for (const std::string &bits : {c.key_bits, c.value_bits.empty() ? c.key_bits : c.value_bits})
        for (int g = 0; g < groups; g++) words.push_back(bits_of(bits, g) + (g ? 0 : TQ_PLAN_NEW_BLOCK));
    tq_plan plan;
    tq_error error;
    TQ(tq_plan_init(&plan, words.data(), words.size(), &error));
    return plan;
}

/* ---- the format, as turboquant.h draws it ---- */

static void put_bits(uint32_t *words, int word, int lane, int shift, uint32_t value, uint32_t mask)
{
    uint32_t &w = words[32 * word + lane];
    w = (w & ~(mask << shift)) | value << shift;
}

static void put_code(uint8_t *tile, int bits, int row, int column, uint32_t code)
{
    uint32_t *words = (uint32_t *)tile;
    int g = row % 8, r = row / 8, t = column % 16 / 4, n = column % 4 + 4 * (column / 16), lane = 4 * g + t;
    switch (bits) {
    case 8: put_bits(words, 4 + r, lane, 4 * n, code >> 4, 15), put_bits(words, r, lane, 4 * n, code & 15, 15); break;
    case 1: put_bits(words, 0, lane, 8 * (n % 4) + r + 4 * (n / 4), code, 1); break;
    case 2: put_bits(words, n / 4, lane, 8 * (n % 4) + 2 * r, code, 3); break;
    case 3:
        if (r < 3) put_bits(words, r, lane, 4 * n, code, 7);
        else
            for (int k = 0; k < 3; k++) put_bits(words, k, lane, 4 * n + 3, code >> k & 1, 1);
        break;
    case 6:
        put_bits(words, 4 + n / 4, lane, 8 * (n % 4) + 2 * r, code >> 4, 3),
            put_bits(words, r, lane, 4 * n, code & 15, 15);
        break;
    case 5: put_bits(words, 4, lane, 8 * (n % 4) + r + 4 * (n / 4), code >> 4, 1); /* and */
    case 4: put_bits(words, r, lane, 4 * n, code & 15, 15); break;
    }
}

static int column_of(int token) { return 4 * (token % 8) + token / 8; }

/** Writes the code of a token of a page, for a channel of group g. */
static void put_token_code(const tq_plan &plan, uint8_t *record, int side, int token, int g, int channel, uint32_t code)
{
    const tq_side &layout = side ? plan.value : plan.key;
    int i = token % 32, half = token / 32 % 2;
    bool fine = plan.group_channels == TQ_FINE_GROUP;
    uint8_t *at = record + layout.codes_offset + token / plan.tile_tokens * layout.tile_bytes + layout.offset[g];
    if (side == 0) put_code(at, layout.bits[g], i, fine ? channel % 8 + 8 * half + channel / 8 * 16 : channel, code);
    else put_code(at, layout.bits[g], fine ? channel + 16 * half : channel, column_of(i), code);
}

/* ---- numbers of the model's dtype ---- */

static float rounded(float x, int dtype)
{
    if (dtype == TQ_F16) return __half2float(__float2half(x));
    if (dtype == TQ_BF16) return __bfloat162float(__float2bfloat16(x));
    return x;
}

static void append_number(std::vector<uint8_t> &to, float x, int dtype)
{
    uint8_t bytes[4];
    int n = dtype == TQ_F32 ? 4 : 2;
    if (dtype == TQ_F32) memcpy(bytes, &x, 4);
    if (dtype == TQ_F16) {
        __half h = __float2half(x);
        memcpy(bytes, &h, 2);
    }
    if (dtype == TQ_BF16) {
        __nv_bfloat16 h = __float2bfloat16(x);
        memcpy(bytes, &h, 2);
    }
    to.insert(to.end(), bytes, bytes + n);
}

static float read_number(const std::vector<uint8_t> &from, size_t i, int dtype)
{
    float x = 0;
    __half h;
    __nv_bfloat16 b;
    if (dtype == TQ_F32) memcpy(&x, &from[4 * i], 4);
    if (dtype == TQ_F16) {
        memcpy(&h, &from[2 * i], 2);
        x = __half2float(h);
    }
    if (dtype == TQ_BF16) {
        memcpy(&b, &from[2 * i], 2);
        x = __bfloat162float(b);
    }
    return x;
}

/* ---- rotations in float64 ---- */

static void hadamard_inverse(const tq_plan &plan, double *x)
{
    int d = plan.head_dim, p = 1;
    while (2 * p <= d) p *= 2;
    for (int pass = p < d ? 1 : 0; pass >= 0; pass--) {
        double *part = pass ? x + d - p : x;
        for (int step = 1; step < p; step *= 2)
            for (int i = 0; i < p; i++)
                if (!(i & step)) {
                    double a = part[i], b = part[i + step];
                    part[i] = a + b;
                    part[i + step] = a - b;
                }
        for (int i = 0; i < p; i++) part[i] *= (plan.signs[pass][i / 32] >> (i % 32) & 1 ? -1 : 1) / sqrt((double)p);
    }
}

static void unrotate(const tq_plan &plan, const std::vector<float> &matrix, double *x)
{
    int d = plan.head_dim;
    if (plan.rotation == TQ_ROTATION_HADAMARD) hadamard_inverse(plan, x);
    if (plan.rotation != TQ_ROTATION_DENSE) return;
    Doubles y(d, 0);
    for (int r = 0; r < d; r++)
        for (int c = 0; c < d; c++) y[c] += (double)matrix[r * d + c] * x[r];
    std::copy(y.begin(), y.end(), x);
}

static MomentSizes moment_sizes(const Case &c)
{
    return {c.head_dim, c.heads, c.pairs, c.metric, c.wave_size, c.neighbours};
}

/* ---- device memory ---- */

struct DeviceArray {
    void *at = nullptr;
    DeviceArray(const void *from, size_t bytes)
    {
        if (!bytes) return;
        CUDA(cudaMalloc(&at, bytes));
        CUDA(cudaMemcpy(at, from, bytes, cudaMemcpyHostToDevice));
    }
    template <class T> explicit DeviceArray(const std::vector<T> &v) : DeviceArray(v.data(), v.size() * sizeof(T)) {}
    DeviceArray(const DeviceArray &) = delete;
    ~DeviceArray() { cudaFree(at); }
    template <class T> T *as() const { return (T *)at; }
};

/* ---- one case ---- */

/** Returns the name of the kernel that runs a case. */
static std::string kernel_of(const Case &c)
{
    tq_plan plan = make_plan(c);
    tq_error error;
    tq_attend_params p = {};
    int longest = 0;
    for (int n : c.lengths) longest = std::max(longest, n);
    p.layer.batch = (int)c.lengths.size(), p.layer.kv_heads = c.heads, p.layer.sinks = c.sinks;
    p.layer.window = c.window, p.layer.dtype = c.dtype;
    p.layer.max_pages = (std::max(0, longest - c.sinks - c.window) + c.page_tokens - 1) / c.page_tokens + c.spare_pages;
    p.query_tokens = c.tokens, p.query_heads = c.heads * c.group, p.causal = c.causal, p.sliding_window = c.sliding;
    p.schedule_kind = c.even ? TQ_SCHEDULE_EQUAL : TQ_SCHEDULE_LINE, p.softmax_scale = 1, p.softcap = c.softcap;
    char name[TQ_CUDA_KERNEL_NAME_BYTES];
    TQ(tq_cuda_attend_kernel(&plan, &p, nullptr, name, &error));
    return name;
}

static bool run_case(const Case &c)
{
    tq_plan plan = make_plan(c);
    tq_error error;
    std::mt19937 random(1234);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform(0.5f, 1.5f);
    int d = c.head_dim, H = c.heads, B = (int)c.lengths.size(), T = c.tokens, groups = plan.groups, pt = c.page_tokens,
        G = c.group;
    tq_codebook books[TQ_MAX_BITS + 1] = {};
    auto level_of = [&](int bits, uint32_t code) {
        return bits == TQ_WIDE_BITS ? ((int)code - 128) * TQ_WIDE_STEP : books[bits].levels[code] * books[bits].step;
    };
    for (int b = 1; b <= TQ_MAX_BITS; b++) TQ(tq_get_codebook((tq_codebook_law)plan.codebook, d, b, &books[b], &error));
    auto largest_code = [&](int bits) {
        uint32_t largest = 0;
        for (uint32_t code = 1; code < 1u << bits; code++)
            if (level_of(bits, code) > level_of(bits, largest)) largest = code;
        return largest;
    };
    const bool ragged = !c.counts.empty();
    const int packed_from = c.by_index ? 0 : c.sinks, packed_to = c.by_index ? 0 : c.window; /* tokens without a page */
    std::vector<int32_t> query_start_loc = {0};
    for (int n : c.counts) query_start_loc.push_back(query_start_loc.back() + n);
    auto count_of = [&](int b) { return ragged ? c.counts[b] : T; };
    int max_packed = 0, from = c.released, first_page = std::max(0, from - packed_from) / pt;
    for (int n : c.lengths) max_packed = std::max(max_packed, n - packed_from - packed_to);
    int all_pages = (max_packed + pt - 1) / pt, used_pages = all_pages - std::min(first_page, all_pages);
    int max_pages = all_pages + c.spare_pages, n_pages = B * used_pages + 3;
    Moments moments(moment_sizes(c), plan, random);
    std::vector<int32_t> order(n_pages), table((size_t)B * max_pages, 0x7fffffff);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);

    std::vector<float> centre[2], steps[2], matrix[2];
    for (int side = 0; side < 2; side++) {
        if (c.centres)
            for (int i = 0; i < H * d; i++) centre[side].push_back(normal(random));
        if (c.steps && !(c.variance && side == 0)) /* plans with the term have no steps of keys */
            for (int i = 0; i < H * groups; i++) steps[side].push_back(uniform(random));
        if (c.rotation != TQ_ROTATION_DENSE) continue;
        matrix[side].resize((size_t)d * d);
        std::vector<double> workspace((size_t)d * (d + 2));
        TQ(tq_haar(side + 5, d, matrix[side].data(), workspace.data(), &error));
    }

    /* exact numbers [side][b][h][position][d], and packed ones as they decode */
    std::vector<Doubles> exact[2], packed[2], key_scales; /* key_scales: of packed tokens, [b][h][position] */
    std::vector<uint8_t> pages((size_t)n_pages * H * plan.record_bytes, 0xff);
    for (int b = 0; b < B; b++) {
        int n = c.lengths[b], n_packed = std::max(0, n - packed_from - packed_to),
            start = c.starts.empty() ? 0 : c.starts[b];
        for (int i = first_page; i < (n_packed + pt - 1) / pt; i++)
            table[(size_t)b * max_pages + i] = order[b * used_pages + i - first_page];
        for (int h = 0; h < H; h++)
            for (int side = 0; side < 2; side++) {
                const tq_side &layout = side ? plan.value : plan.key;
                exact[side].push_back(Doubles((size_t)std::max(0, n - from) * d));
                packed[side].push_back(Doubles((size_t)std::max(0, n - from) * d, NAN));
                for (double &x : exact[side].back()) x = rounded(normal(random), c.dtype);
                if (side == 0) key_scales.push_back(Doubles((size_t)std::max(0, n - from), NAN));
                for (int j = std::max(0, from - packed_from); j < n_packed; j++) {
                    int position = packed_from + j, token = j % pt, tile = token / 32, i = token % 32;
                    if (position < start) continue; /* never stored */
                    uint8_t *record =
                        &pages[((size_t)order[b * used_pages + j / pt - first_page] * H + h) * plan.record_bytes];
                    auto &boosts = side == 0 ? c.boost : c.value_boost;
                    double boost = boosts ? boosts(position, n) : 1;
                    bool same = c.same_values && side;
                    __half scale = __float2half(same ? 1.0f : (float)(uniform(random) * boost));
                    memcpy(record + layout.scales_offset + 2 * (tile * 32 + column_of(i)), &scale, 2);
                    if (side == 0) key_scales.back()[position - from] = __half2float(scale);
                    double *x = &packed[side].back()[(size_t)(position - from) * d];
                    for (int ch = 0; ch < plan.group_channels * groups; ch++) {
                        int g = ch / plan.group_channels, bits = layout.bits[g];
                        if (ch < d) x[ch] = 0;
                        if (!bits) continue;
                        uint32_t code = same ? largest_code(bits) : random() & ((1u << bits) - 1);
                        put_token_code(plan, record, side, token, g, ch % plan.group_channels, code);
                        if (ch < d)
                            x[ch] = (double)level_of(bits, code) * __half2float(scale) *
                                    (steps[side].empty() ? 1 : steps[side][h * groups + g]);
                    }
                    unrotate(plan, matrix[side], x);
                    if (side == 0) moments.apply(h, position + (c.offsets.empty() ? 0 : c.offsets[b]), x);
                    if (c.centres)
                        for (int ch = 0; ch < d; ch++) x[ch] += centre[side][h * d + ch];
                }
            }
    }
    const int64_t there = c.no_pages ? 0 : n_pages;
    auto is_absent = [&](int b, int position) {
        const int32_t page = table[(size_t)b * max_pages + (position - packed_from) / pt];
        return page < 0 || page >= there;
    };
    if (c.absent) /* one of three entries stays */
        for (size_t i = 0; i < table.size(); i++)
            if (i % 3 != 1) table[i] = i % 3 ? (int32_t)(n_pages + (i * 2654435761u >> 4)) : i % 2 ? n_pages : -1;

    /* rows of exact tokens by index */
    const int sink_row_count = B + 1, tail_row_count = 2 * B + 1;
    std::vector<int32_t> sink_rows, tail_rows;
    for (int b = 0; b < B && c.by_index; b++) {
        sink_rows.push_back(b % 3 == 2 ? -1 : b % 5 == 4 ? sink_row_count : B - b);
        for (int j = 0; j < 2 && c.slots; j++)
            tail_rows.push_back(b % 4 == 1 + j ? -1 : b % 7 == 5 ? tail_row_count : 2 * B - 2 * b - j);
    }
    auto has_sinks = [&](int b) { return !c.by_index || (sink_rows[b] >= 0 && sink_rows[b] < sink_row_count); };
    auto tail_row = [&](int b, int page) {
        const int32_t row = c.slots ? tail_rows[2 * b + page % 2] : -1;
        return row < tail_row_count ? row : -1;
    };
    auto tail_from = [&](int b) { /* the first position that is read from rows of tails */
                                  const int n = c.lengths[b], page = (n - 1) / pt, first = std::max(0, n - c.window);
                                  if (!c.window || !n || tail_row(b, page) < 0) return n;
                                  return first < page * pt && tail_row(b, page - 1) < 0 ? page * pt : first;
    };

    /* dense arrays */
    std::vector<uint8_t> q, sinks[2], window[2], fresh[2];
    Doubles qd;
    const int unused = 2; /* tokens of a ragged batch that no sequence has */
    const size_t rows = ragged ? (size_t)(query_start_loc[B] + unused) * H * G : (size_t)B * H * G * T;
    auto row_of = [&](int b, int h, int i) {
        return ragged ? (size_t)(query_start_loc[b] + i) * H * G + h : ((size_t)b * H * G + h) * T + i;
    };
    for (size_t i = 0; i < rows * d; i++) {
        float x = rounded(c.query_size * normal(random), c.dtype);
        qd.push_back(x);
        append_number(q, x, c.dtype);
    }
    auto put_token = [&](std::vector<uint8_t> &to, size_t at, const Doubles &x, int position) {
        std::vector<uint8_t> row;
        for (int ch = 0; ch < d; ch++) append_number(row, (float)x[(size_t)position * d + ch], c.dtype);
        std::copy(row.begin(), row.end(), to.begin() + at * row.size());
    };
    for (int side = 0; side < 2 && c.by_index; side++) {
        const size_t row_bytes = (size_t)d * (c.dtype == TQ_F32 ? 4 : 2);
        sinks[side].assign((size_t)sink_row_count * H * c.sinks * row_bytes, 0xff);
        window[side].assign((size_t)tail_row_count * H * c.slots * row_bytes, 0xff);
        for (int b = 0; b < B; b++)
            for (int h = 0; h < H; h++) {
                const Doubles &x = exact[side][b * H + h];
                for (int i = 0; i < std::min(c.sinks, c.lengths[b]) && has_sinks(b); i++)
                    put_token(sinks[side], ((size_t)sink_rows[b] * H + h) * c.sinks + i, x, i);
                for (int i = tail_from(b); i < c.lengths[b]; i++)
                    put_token(window[side], ((size_t)tail_row(b, i / pt) * H + h) * c.slots + i % c.slots, x, i);
            }
    }
    for (int b = 0; b < B && !c.by_index; b++)
        for (int h = 0; h < H; h++)
            for (int side = 0; side < 2; side++) {
                const Doubles &x = exact[side][b * H + h];
                int n = c.lengths[b], before = c.fresh ? n - T : n;
                auto put = [&](std::vector<uint8_t> &to, int position) {
                    for (int ch = 0; ch < d; ch++)
                        append_number(
                            to, position >= from && position < n ? (float)x[(size_t)(position - from) * d + ch] : NAN,
                            c.dtype);
                };
                for (int i = 0; i < c.sinks; i++) put(sinks[side], i);
                for (int i = 0; i < c.window; i++) {
                    int position = -1;
                    for (int k = std::max(c.sinks, before - c.window); k < before; k++)
                        if (k % c.window == i) position = k;
                    put(window[side], position);
                }
                for (int i = 0; i < (c.fresh ? T : 0); i++) put(fresh[side], n - T + i);
            }

    const size_t shift = c.shifted ? 4 * (c.dtype == TQ_F32 ? 4 : 2) : 0;
    for (auto *x : {&q, &sinks[0], &sinks[1], &window[0], &window[1], &fresh[0], &fresh[1]})
        if (!x->empty()) x->insert(x->begin(), shift, 0xff);
    auto behind = [&](const DeviceArray &x) { return x.at ? (void *)(x.as<char>() + shift) : nullptr; };
    const std::vector<float> numbers[2] = {join_numbers(H, centre[0], steps[0], moments.numbers),
                                           join_numbers(H, centre[1], steps[1])};
    DeviceArray d_q(q), d_pages(pages), d_table(table), d_lengths(c.lengths), d_starts(c.starts), d_sk(sinks[0]),
        d_sv(sinks[1]), d_wk(window[0]), d_wv(window[1]), d_fk(fresh[0]), d_fv(fresh[1]), d_kn(numbers[0]),
        d_vn(numbers[1]), d_mk(matrix[0]), d_mv(matrix[1]), d_turns(moments.turns), d_loc(query_start_loc),
        d_sink_rows(sink_rows), d_tail_rows(tail_rows), d_ends(c.ends), d_offsets(c.offsets);
    const size_t out_row = c.strided ? 2 * d : d, lse_row = c.strided ? 3 : 1;
    size_t out_bytes = rows * out_row * (c.dtype == TQ_F32 ? 4 : 2);
    std::vector<uint8_t> poison(out_bytes, 0xff), out(out_bytes);
    std::vector<float> lse(rows * lse_row, NAN);
    DeviceArray d_out(std::vector<uint8_t>(out_bytes + shift)), d_lse(lse);
    tq_attend_params p = {};
    p.layer.batch = B, p.query_tokens = T, p.query_heads = H * G, p.layer.kv_heads = H, p.layer.sinks = c.sinks,
    p.layer.window = c.window, p.layer.max_pages = max_pages;
    p.layer.dtype = c.dtype, p.causal = c.causal, p.sliding_window = c.sliding,
    p.schedule_kind = c.even ? TQ_SCHEDULE_EQUAL : TQ_SCHEDULE_LINE, p.softmax_scale = c.scale_sign / sqrtf((float)d),
    p.softcap = c.softcap;
    p.layer.n_pages = there, p.q = behind(d_q), p.q_stride_batch = (int64_t)H * G * T * d,
    p.q_stride_head = ragged ? d : (int64_t)T * d, p.q_stride_token = ragged ? (int64_t)H * G * d : d;
    if (ragged) p.query_start_loc = d_loc.as<int32_t>(), p.total_tokens = query_start_loc[B] + unused;
    if (c.by_index) {
        p.layer.sink_rows = d_sink_rows.as<int32_t>(), p.layer.n_sink_rows = sink_row_count;
        if (c.slots) p.layer.tail_rows = d_tail_rows.as<int32_t>(), p.layer.n_tail_rows = tail_row_count;
        p.layer.tail_slots = c.slots;
    }
    p.ends = d_ends.as<int32_t>(), p.layer.position_offset = d_offsets.as<int32_t>();
    if (c.strided) {
        const int64_t q_strides[] = {p.q_stride_batch, p.q_stride_head, p.q_stride_token};
        int64_t *out_strides[] = {&p.out_stride_batch, &p.out_stride_head, &p.out_stride_token},
                *lse_strides[] = {&p.lse_stride_batch, &p.lse_stride_head, &p.lse_stride_token};
        for (int i = 0; i < 3; i++) *out_strides[i] = 2 * q_strides[i], *lse_strides[i] = q_strides[i] / d * 3;
    }
    p.layer.pages = d_pages.as<uint8_t>(), p.layer.block_table = d_table.as<int32_t>(),
    p.layer.lengths = d_lengths.as<int32_t>(), p.starts = d_starts.as<int32_t>();
    p.layer.sink_k = behind(d_sk), p.layer.sink_v = behind(d_sv), p.layer.window_k = behind(d_wk),
    p.layer.window_v = behind(d_wv);
    p.fresh_k = behind(d_fk), p.fresh_v = behind(d_fv);
    p.fresh_k_stride_batch = p.fresh_v_stride_batch = (int64_t)H * T * d,
    p.fresh_k_stride_head = p.fresh_v_stride_head = (int64_t)T * d;
    p.fresh_k_stride_token = p.fresh_v_stride_token = d;
    p.layer.key.rotation = d_mk.as<float>(), p.layer.value.rotation = d_mv.as<float>();
    p.layer.key.turns = d_turns.as<int32_t>();
    use_numbers(plan, false, H, numbers[0].size(), d_kn.at, &p.layer.key);
    use_numbers(plan, true, H, numbers[1].size(), d_vn.at, &p.layer.value);
    p.out = behind(d_out), p.lse = c.no_lse ? nullptr : d_lse.as<float>();
    size_t workspace_bytes;
    tq_cuda_attend_call call;
    TQ(tq_cuda_attend_prepare(&plan, &p, &call, &workspace_bytes, &error));
    std::vector<uint8_t> workspace(workspace_bytes, 0xff);
    DeviceArray d_workspace(workspace);
    int processors;
    CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
    const int64_t schedule_rows = (int64_t)TQ_SCHEDULE_ROWS * processors + B;
    DeviceArray d_schedule(std::vector<uint8_t>(16 * schedule_rows, 0xff));
    std::vector<uint8_t> again;
    for (int run = 0; run < 2;
         run++) { /* twice: the workspace must be left usable, and results must repeat, with a schedule too */
        if (out_bytes) CUDA(cudaMemcpy(p.out, poison.data(), out_bytes, cudaMemcpyHostToDevice));
        if (run && B && !c.even) {
            TQ(tq_cuda_schedule(&plan, &p, d_schedule.as<int32_t>(), schedule_rows, nullptr, &error));
            p.schedule = d_schedule.as<int32_t>(), p.schedule_rows = schedule_rows;
            TQ(tq_cuda_attend_prepare(&plan, &p, &call, &workspace_bytes, &error));
        }
        TQ(tq_cuda_attend(&call, d_workspace.at, workspace_bytes, nullptr, &error));
        CUDA(cudaDeviceSynchronize());
        if (out_bytes) CUDA(cudaMemcpy(out.data(), p.out, out_bytes, cudaMemcpyDeviceToHost));
        if (!run) again = out;
    }
    if (rows) CUDA(cudaMemcpy(lse.data(), d_lse.at, lse.size() * 4, cudaMemcpyDeviceToHost));
    size_t bound;
    TQ(tq_cuda_attend_workspace_bound(&plan, &p, &bound, &error));
    if (bound < workspace_bytes) printf("%zu bytes of workspace, above the bound of %zu\n", workspace_bytes, bound);

    double worst = 0, largest = 0, worst_lse = 0, largest_logit = 0;
    bool pattern = bound >= workspace_bytes, repeats = again == out;
    Doubles of_rows; /* the error of a row of the output, over the row's norm */
    std::vector<bool> written(rows);
    for (int b = 0; b < B; b++)
        for (int h = 0; h < H * G; h++)
            for (int i = 0; i < count_of(b); i++) {
                size_t row = row_of(b, h, i);
                written[row] = true;
                if ((i + h) % c.every && i + 1 < count_of(b)) {
                    for (int ch = 0; ch < d; ch++)
                        pattern = pattern && fabs(read_number(out, row * out_row + ch, c.dtype)) < INFINITY;
                    continue;
                }
                int n = c.lengths[b], position = n - count_of(b) + i, start = c.starts.empty() ? 0 : c.starts[b],
                    kv = b * H + h / G;
                int lo = start, hi = c.causal ? position + 1 : n, newest = (c.causal ? position + 1 : n) - c.window;
                if (c.sliding) lo = std::max(lo, position - c.sliding + 1);
                if (!c.ends.empty()) hi = std::min(hi, c.ends[b]);
                std::vector<std::pair<double, const double *>> terms;
                double top = -INFINITY, r = 0; /* of the variance term, as turboquant.h names it */
                Doubles shrunk(qd.begin() + row * d, qd.begin() + (row + 1) * d);
                moments.undo_metric(h / G, shrunk.data());
                for (double x : shrunk) r += x * x * p.softmax_scale * p.softmax_scale / (2 * d);
                for (int j = std::max(lo, 0); j < hi; j++) {
                    bool is_exact =
                        c.by_index ? (j < c.sinks && has_sinks(b)) || j >= tail_from(b) : j < c.sinks || j >= newest;
                    if (is_exact && !c.by_index && j >= c.sinks && !c.fresh && j < n - c.window)
                        continue; /* no longer in the ring */
                    if (!is_exact && is_absent(b, j)) continue;
                    const double *k = &(is_exact ? exact : packed)[0][kv][(size_t)(j - from) * d],
                                 *v = &(is_exact ? exact : packed)[1][kv][(size_t)(j - from) * d];
                    double x = 0;
                    for (int ch = 0; ch < d; ch++) x += qd[row * d + ch] * k[ch];
                    x *= p.softmax_scale;
                    if (!is_exact) x -= r * plan.variance * key_scales[kv][j - from] * key_scales[kv][j - from];
                    if (c.softcap > 0) x = c.softcap * tanh(x / c.softcap);
                    terms.push_back({x, v});
                    largest_logit = std::max(largest_logit, fabs(x));
                    top = std::max(top, x);
                }
                double sum = 0;
                Doubles want(d, 0);
                for (auto &t : terms) {
                    double w = exp(t.first - top);
                    sum += w;
                    for (int ch = 0; ch < d; ch++) want[ch] += w * t.second[ch];
                }
                if (!c.no_lse && terms.empty() != (lse[row * lse_row] == -INFINITY)) pattern = false;
                if (!c.no_lse && !terms.empty())
                    worst_lse = std::max(worst_lse, fabs(lse[row * lse_row] - (top + log(sum))) /
                                                        (c.pairs ? 1 : std::max(1.0, fabs(top) / 10)));
                if (!c.no_lse && !terms.empty() && !(fabs(lse[row * lse_row]) < INFINITY)) pattern = false;
                double off = 0, norm = 0;
                for (int ch = 0; ch < d; ch++) {
                    double w = sum > 0 ? want[ch] / sum : 0, got = read_number(out, row * out_row + ch, c.dtype);
                    double ulp = c.dtype == TQ_F32 ? 0 : fabs(w) * (c.dtype == TQ_F16 ? 1.0 / 2048 : 1.0 / 256);
                    largest = std::max(largest, fabs(w));
                    if (!(got == got)) pattern = false;
                    worst = std::max(worst, fabs(got - w) - ulp);
                    off += (got - w) * (got - w), norm += w * w;
                }
                if (norm > 0 && off == off) of_rows.push_back(sqrt(off / norm));
            }
    const size_t row_bytes = rows ? out_bytes / rows : 0;
    for (size_t row = 0; row < rows; row++) { /* nothing beside the rows is written */
        const size_t used = written[row] ? row_bytes * d / out_row : 0;
        for (size_t i = used; i < row_bytes; i++) pattern = pattern && out[row * row_bytes + i] == 0xff;
        for (size_t i = written[row]; i < lse_row; i++) pattern = pattern && !(lse[row * lse_row + i] < INFINITY);
    }
    double relative = largest > 0 ? worst / largest : worst, allowed = c.dtype == TQ_F32 ? 3e-4 : 1e-3;
    allowed =
        std::max(allowed, std::min(2.5e-5 * largest_logit, 1e-2)); /* queries have 16 bits: errors grow with logits */
    std::sort(of_rows.begin(), of_rows.end());
    const double median = of_rows.empty() ? 0 : of_rows[of_rows.size() / 2],
                 last = of_rows.empty() ? 0 : of_rows.back();
    const bool rows_ok = c.dtype != TQ_F16 || (median <= 1e-3 && last <= 4e-3);
    bool ok = pattern && repeats && relative <= allowed && worst_lse <= 2e-3 && rows_ok;
    printf("%s %-44s error %.1e  rows: median %.1e worst %.1e  lse %.1e%s%s%s\n", ok ? "ok   " : "WRONG",
           c.name.c_str(), relative, median, last, worst_lse, pattern ? "" : "  -inf/NaN pattern",
           repeats ? "" : "  not repeatable", rows_ok ? "" : "  rows off");
    return ok;
}

/* ---- timing ---- */

__global__ void fill_pages(uint32_t *words, int64_t n, int64_t record_words, int64_t scale_from)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t x = (i + 1) * 0x9E3779B97F4A7C15ull;
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
        x = (x ^ x >> 27) * 0x94D049BB133111EBull;
        uint32_t r = (uint32_t)(x >> 32);
        words[i] = i % record_words < scale_from ? r : 0x38003800u | (r & 0x03ff03ffu); /* scales in [0.5, 1) */
    }
}

struct Shape {
    const char *bits; /* "f..": of groups of 16 channels; "m..": with a wave of all pairs and a metric of rank 4 */
    int batch, heads, group, length, head_dim, tokens, window;
    double baseline_us; /* the best bf16 attention seen, 0: unknown */
};

static void time_shape(const Shape &s, int rotation)
{
    Case c;
    const bool has_moments = s.bits[0] == 'm';
    c.fine = s.bits[0] == 'f';
    c.key_bits = s.bits + (c.fine || has_moments), c.head_dim = s.head_dim, c.rotation = rotation, c.heads = s.heads;
    if (has_moments) c.pairs = s.head_dim / 2, c.metric = 1 + TQ_MAX_METRIC_RANK;
    tq_plan plan = make_plan(c);
    tq_error error;
    int B = s.batch, H = s.heads, G = s.group, T = s.tokens, d = s.head_dim,
        pages_each = (s.length - s.window + 127) / 128;
    int64_t bytes = (int64_t)B * H * pages_each * plan.record_bytes,
            /* data that is read once leaves L2 first, so older data may stay; with 2 GB it is 3 % at most */
        copies = std::max<int64_t>(1, std::min<int64_t>(256, 2000000000 / std::max<int64_t>(bytes, 1)));
    int64_t n_pages = copies * B * pages_each;
    void *pages;
    CUDA(cudaMalloc(&pages, n_pages * H * plan.record_bytes));
    fill_pages<<<2048, 256>>>((uint32_t *)pages, n_pages * H * plan.record_bytes / 4, plan.record_bytes / 4,
                              plan.key.scales_offset / 4);
    CUDA(cudaDeviceSynchronize());
    std::mt19937 random(1);
    Moments moments(moment_sizes(c), plan, random);
    std::vector<int32_t> table(n_pages), lengths(B, s.length);
    std::iota(table.begin(), table.end(), 0);
    if (!getenv("TQ_HARNESS_IN_ORDER"))
        std::shuffle(table.begin(), table.end(), random); /* otherwise pages follow each other */
    std::vector<uint8_t> q;
    std::normal_distribution<float> normal;
    for (int i = 0; i < B * H * G * T * d; i++) append_number(q, normal(random), TQ_BF16);
    std::vector<uint8_t> ring((size_t)B * H * s.window * d * 2, 0x3c), fresh((size_t)B * H * T * d * 2, 0x3c);
    std::vector<float> matrix((size_t)d * d, 0.01f);
    DeviceArray d_q(q), d_table(table), d_lengths(lengths), d_ring(ring), d_fresh(fresh),
        d_out(std::vector<uint8_t>(q.size())), d_matrix(matrix), d_turns(moments.turns), d_moments(moments.numbers);
    tq_attend_params p = {};
    p.layer.batch = B, p.query_tokens = T, p.query_heads = H * G, p.layer.kv_heads = H, p.layer.window = s.window,
    p.layer.max_pages = pages_each, p.layer.dtype = TQ_BF16, p.causal = 1,
    p.schedule_kind = getenv("TQ_HARNESS_UNEVEN") ? TQ_SCHEDULE_LINE : TQ_SCHEDULE_EQUAL;
    p.softmax_scale = 1 / sqrtf((float)d), p.layer.n_pages = n_pages;
    p.q = d_q.at, p.q_stride_batch = (int64_t)H * G * T * d, p.q_stride_head = (int64_t)T * d, p.q_stride_token = d;
    p.layer.block_table = d_table.as<int32_t>();
    p.layer.pages = (uint8_t *)pages, p.layer.lengths = d_lengths.as<int32_t>(), p.out = d_out.at,
    p.layer.window_k = p.layer.window_v = d_ring.at;
    if (s.window && T > 1) p.fresh_k = p.fresh_v = d_fresh.at;
    p.fresh_k_stride_batch = p.fresh_v_stride_batch = (int64_t)H * T * d,
    p.fresh_k_stride_head = p.fresh_v_stride_head = (int64_t)T * d;
    p.fresh_k_stride_token = p.fresh_v_stride_token = d;
    p.layer.key.turns = d_turns.as<int32_t>();
    use_numbers(plan, false, H, moments.numbers.size(), d_moments.at, &p.layer.key);
    if (rotation == TQ_ROTATION_DENSE) p.layer.key.rotation = p.layer.value.rotation = d_matrix.as<float>();
    size_t workspace_bytes;
    tq_cuda_attend_call call;
    TQ(tq_cuda_attend_prepare(&plan, &p, &call, &workspace_bytes, &error));
    void *workspace;
    CUDA(cudaMalloc(&workspace, workspace_bytes));
    cudaStream_t stream;
    CUDA(cudaStreamCreate(&stream));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    int launches = (int)std::max<int64_t>(copies, bytes < 100000000 ? 20 : 8); /* a graph's own start takes 7 us */
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < launches; i++) {
        p.layer.block_table = d_table.as<int32_t>() + (i % copies) * B * pages_each;
        TQ(tq_cuda_attend_prepare(&plan, &p, &call, &workspace_bytes, &error));
        TQ(tq_cuda_attend(&call, workspace, workspace_bytes, stream, &error));
    }
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t e0, e1;
    CUDA(cudaEventCreate(&e0));
    CUDA(cudaEventCreate(&e1));
    std::vector<float> times;
    float warm_ms = 0; /* clocks rise slowly */
    for (int i = 0; i < 20 || (warm_ms < 30 && i < 2000); i++) {
        CUDA(cudaEventRecord(e0, stream));
        CUDA(cudaGraphLaunch(exec, stream));
        CUDA(cudaEventRecord(e1, stream));
        CUDA(cudaEventSynchronize(e1));
        float ms;
        CUDA(cudaEventElapsedTime(&ms, e0, e1));
        warm_ms += ms;
    }
    for (int i = 0; i < 25; i++) {
        CUDA(cudaEventRecord(e0, stream));
        CUDA(cudaGraphLaunch(exec, stream));
        CUDA(cudaEventRecord(e1, stream));
        CUDA(cudaEventSynchronize(e1));
        float ms;
        CUDA(cudaEventElapsedTime(&ms, e0, e1));
        times.push_back(1000 * ms / launches);
    }
    std::sort(times.begin(), times.end());
    double us = times[times.size() / 2];
    char label[160];
    snprintf(label, sizeof label, "%d,%d,%d,%d d%d bits %s%s%s%s", B, H, G, s.length, d, s.bits,
             T > 1 ? (" T" + std::to_string(T)).c_str() : "", s.window ? (" w" + std::to_string(s.window)).c_str() : "",
             rotation == TQ_ROTATION_DENSE ? " dense" : "");
    printf("%-44s %8.2f us (%.2f..%.2f)  %.2f TB/s", label, us, times.front(), times.back(), bytes / us / 1e6);
    if (s.baseline_us > 0) printf("  %.2fx", s.baseline_us / us);
    printf("  [%.0f MB x %d]\n", bytes / 1e6, (int)copies);
    fflush(stdout);
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaStreamDestroy(stream));
    CUDA(cudaFree(pages));
    CUDA(cudaFree(workspace));
}

static void time_all(const char *filter)
{
    /* baselines: cuDNN's SDPA in bf16 on an H200, in microseconds */
    std::vector<Shape> shapes;
    for (const char *bits : {"4", "3", "2"}) {
        shapes.push_back({bits, 16, 8, 4, 32768, 128, 1, 0, 488});
        shapes.push_back({bits, 8, 32, 1, 16384, 128, 1, 0, 487});
        shapes.push_back({bits, 64, 8, 4, 4096, 128, 1, 0, 255});
        shapes.push_back({bits, 8, 8, 8, 16384, 128, 1, 0, 0});
        shapes.push_back({bits, 16, 1, 16, 32768, 128, 1, 0, 0});
        shapes.push_back({bits, 64, 20, 1, 1024, 64, 1, 0, 0});
        shapes.push_back({bits, 1, 8, 4, 131072, 128, 1, 0, 139});
        shapes.push_back({bits, 1, 8, 4, 32768, 128, 1, 0, 50});
        shapes.push_back({bits, 1, 8, 4, 8192, 128, 1, 0, 23});
        shapes.push_back({bits, 1, 8, 4, 4096, 128, 1, 0, 0});
        shapes.push_back({bits, 1, 8, 4, 2048, 128, 1, 0, 0});
        shapes.push_back({bits, 1, 8, 4, 2048, 128, 1, 128, 0});
        shapes.push_back({bits, 16, 8, 4, 32768, 128, 1, 128, 488});
        shapes.push_back({bits, 16, 8, 4, 32768, 128, 8, 0, 0});
        shapes.push_back({bits, 1, 8, 4, 8192, 128, 4, 0, 0});
        shapes.push_back({bits, 4, 8, 4, 2048, 128, 8, 0, 0});
        shapes.push_back({bits, 64, 8, 4, 4096, 128, 1, 128, 0});
        shapes.push_back({bits, 1, 8, 4, 32768, 128, 1, 4096, 0});
        for (int heads : {1, 4, 7})
            for (int length : {8192, 12288, 16384}) shapes.push_back({bits, 1, heads, 4, length, 128, 1, 0, 0});
    }
    for (const char *bits : {"m4", "m3", "m2"}) {
        shapes.push_back({bits, 16, 8, 4, 32768, 128, 1, 0, 0});
        shapes.push_back({bits, 64, 8, 4, 4096, 128, 1, 0, 0});
        shapes.push_back({bits, 64, 20, 1, 1024, 64, 1, 0, 0});
        shapes.push_back({bits, 1, 8, 4, 32768, 128, 1, 0, 0});
        shapes.push_back({bits, 1, 8, 4, 8192, 128, 1, 0, 0});
        shapes.push_back({bits, 16, 8, 4, 32768, 128, 8, 0, 0});
        shapes.push_back({bits, 16, 8, 4, 32768, 128, 1, 128, 0});
    }
    shapes.push_back({"5430", 16, 8, 4, 32768, 128, 1, 0, 0});
    shapes.push_back({"4332", 16, 8, 4, 32768, 128, 1, 0, 0});
    shapes.push_back({"4332", 16, 8, 4, 32768, 128, 8, 0, 0});
    shapes.push_back({"4332", 16, 1, 16, 32768, 128, 1, 0, 0});
    for (const char *bits : {"f4", "f3", "f2", "f54322222", "f85422111"}) {
        shapes.push_back({bits, 16, 8, 4, 32768, 128, 1, 0, 0});
        shapes.push_back({bits, 64, 20, 1, 1024, 64, 1, 0, 0});
    }
    shapes.push_back({"f85422111", 1, 8, 4, 8192, 128, 1, 0, 0});
    shapes.push_back({"f85422111", 16, 8, 4, 32768, 128, 8, 0, 0});
    for (auto &s : shapes) {
        char name[100];
        snprintf(name, sizeof name, "%d,%d,%d,%d bits %s T%d w%d d%d", s.batch, s.heads, s.group, s.length, s.bits,
                 s.tokens, s.window, s.head_dim);
        if (!filter || strstr(name, filter)) time_shape(s, TQ_ROTATION_HADAMARD);
    }
    if (!filter || strstr("dense", filter)) {
        time_shape({"4", 1, 8, 4, 8192, 128, 1, 0, 23}, TQ_ROTATION_DENSE);
        time_shape({"4332", 16, 8, 4, 32768, 128, 1, 0, 0}, TQ_ROTATION_DENSE);
    }
}

int main(int argc, char **argv)
{
    const char *filter = argc > 2 ? argv[2] : nullptr;
    if (argc > 1 && !strcmp(argv[1], "time")) {
        time_all(filter);
        return 0;
    }
    int wrong = 0, run = 0, named = 0, first = 0, every = 1;
    if (argc > 3 && (sscanf(argv[3], "%d/%d", &first, &every) != 2 || first < 0 || first >= every)) {
        printf("k/n: %s, not such as 0/16\n", argv[3]);
        return 2;
    }
    const bool of_kernels = filter && !strncmp(filter, "attend_", 7);
    auto cases = all_cases();
    if (getenv("TQ_HARNESS_UNEVEN"))
        for (Case &c : cases) c.even = 0;
    for (auto &c : cases)
        if ((!filter || (of_kernels ? kernel_of(c) : c.name).find(filter) != std::string::npos) &&
            named++ % every == first)
            run++, wrong += !run_case(c);
    printf("%d cases, %d wrong\n", run, wrong);
    return wrong || !run ? 1 : 0; // a filter that names no case has checked nothing
}
