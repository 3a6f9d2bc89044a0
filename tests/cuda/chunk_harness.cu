// Checks and times attention of many query tokens over packed pages (csrc/cuda/attend/chunk) without Python: pages are
// made by the core library, answers are float64 over what it decodes.
//   chunk_harness check [filter]                  cases whose name contains the filter; exit status 1 if one fails
//   chunk_harness time [filter] [query tokens]    median times of 8 to 2,048 query tokens over 32k packed tokens, in a
//                                                 CUDA graph whose calls take turns with four copies of the pages, more
//                                                 than the L2 cache holds; pages are shuffled
#include "harness.h"

#include <numeric>
#include <random>

#include "cuda/attend/chunk/chunk.h"
#include "moments.h"

namespace
{

struct Case {
    std::string name;
    std::vector<int> key_bits = {4}, value_bits = {4}; /* by group, in turn */
    int head_dim = 128, heads = 2, group = 4, tokens = 40, dtype = TQ_F16, rotation = TQ_ROTATION_HADAMARD, law = 0;
    std::vector<int> lengths = {1000}; /* packed tokens */
    std::vector<int> counts = {};      /* of a ragged batch: query tokens of each sequence, `tokens` at most */
    int pairs = 0, metric = 0;         /* pairs of the wave; 1 + the metric's rank */
    float wave_size = 20;
    bool neighbours = false;
    bool variance = false, centres = false, steps = false;
    bool absent = false;  /* of three entries of the block table two name no page */
    bool strided = false; /* out and lse have twice the room */
    float softcap = 0, query_size = 2, scale_sign = 1;
    int sinks = 0;                 /* the position of packed index 0 */
    std::vector<int> offsets = {}; /* of positions */
    float key_size = 1, value_size = 1;
    bool hard_scales = false; /* tokens of very different size side by side */
};

double dot(const double *x, const float *y, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

/** The core takes pages that are 64-byte aligned. */
struct alignas(64) Line {
    uint8_t bytes[64];
};

/** Packed tokens of a layer, as the core library makes and decodes them. */
struct Packed {
    const Case &c;
    tq_plan plan;
    int batch, max_pages, n_pages, longest;
    std::vector<int32_t> table;
    Array<Line> pages;
    std::vector<float> k, v; /* decoded: [batch][heads][longest][head_dim] */
    Array<float> numbers[2];
    Array<int32_t> turns;
    tq_layer host = {}, device = {}; /* lengths and the block table are the caller's */
    std::vector<int32_t> offsets;

    Packed(const Case &from, const tq_plan &p, int seed, const Moments &moments)
        : c(from), plan(p), batch((int)c.lengths.size()), max_pages(pages_of(c) + 1), n_pages(batch * max_pages + 3),
          longest(*std::max_element(c.lengths.begin(), c.lengths.end())), table((size_t)batch * max_pages),
          pages((size_t)n_pages * c.heads * plan.record_bytes / sizeof(Line)),
          numbers{Array<float>(count_of(0, moments)), Array<float>(count_of(1, moments))}, turns(moments.turns.size()),
          offsets(c.offsets)
    {
        Random random(seed);
        std::vector<int32_t> order(n_pages);
        std::iota(order.begin(), order.end(), 0);
        for (int i = n_pages - 1; i > 0; i--) std::swap(order[i], order[random.below(i + 1)]);
        std::copy(order.begin(), order.begin() + table.size(), table.begin());
        for (int side = 0; side < 2; side++) {
            std::vector<float> centre, steps;
            for (int i = 0; c.centres && i < c.heads * c.head_dim; i++) centre.push_back(random.normal());
            for (int i = 0; has_steps(side) && i < c.heads * plan.groups; i++) steps.push_back(0.5f + random.uniform());
            numbers[side].host = join_numbers(c.heads, centre, steps, side ? std::vector<float>() : moments.numbers);
            numbers[side].up();
        }
        turns.host = moments.turns;
        turns.up();
        /* Bytes that are never written are NaN, if they are read as numbers. */
        memset(pages.host.data(), 0xff, pages.bytes());
        for (tq_layer *l : {&host, &device}) {
            l->batch = batch, l->kv_heads = c.heads, l->max_pages = max_pages, l->dtype = TQ_F32;
            l->n_pages = n_pages;
            l->pages = (l == &host ? pages.host.data() : pages.device)->bytes;
            for (int side = 0; side < 2; side++) {
                tq_transform &t = side ? l->value : l->key;
                Array<float> &x = numbers[side];
                use_numbers(plan, side, c.heads, x.host.size(), l == &host ? x.host_or_null() : x.or_null(), &t);
            }
            if (plan.moments) l->key.turns = l == &host ? turns.host_or_null() : turns.or_null();
        }
        host.block_table = table.data();
        if (longest) append(random), decode();
        pages.up();
    }

    static int pages_of(const Case &c)
    {
        return (*std::max_element(c.lengths.begin(), c.lengths.end()) + TQ_PAGE_TOKENS - 1) / TQ_PAGE_TOKENS;
    }
    bool has_steps(int side) const { return c.steps && !(c.variance && side == 0); } // the term excludes key steps
    size_t count_of(int side, const Moments &m) const
    {
        const size_t d = c.centres ? c.head_dim : 0, steps = has_steps(side) ? (plan.groups + 3) / 4 * 4 : 0;
        return c.heads * (d + steps) + (side ? 0 : m.numbers.size());
    }
    const float *row(const std::vector<float> &of, int b, int h, int j) const
    {
        return &of[(((size_t)b * c.heads + h) * longest + j) * c.head_dim];
    }
    double key_scale(int b, int h, int j) const
    {
        const uint8_t *record =
            host.pages + ((size_t)table[(size_t)b * max_pages + j / 128] * c.heads + h) * plan.record_bytes;
        const int i = j % 128;
        uint16_t scale;
        memcpy(&scale, record + plan.key.scales_offset + 2 * (i / 32 * 32 + 4 * (i % 8) + i % 32 / 8), 2);
        return tq_f32_from_f16(scale);
    }

private:
    void append(Random &random)
    {
        tq_append_params p = {};
        tq_error error;
        const size_t rows = (size_t)batch * c.heads * longest, d = c.head_dim;
        std::vector<float> x[2];
        for (int side = 0; side < 2; side++)
            for (size_t row = 0; row < rows; row++) {
                const float size =
                    (side ? c.value_size : c.key_size) * (c.hard_scales ? expf(1.5f * random.normal()) : 1.0f);
                for (size_t i = 0; i < d; i++) x[side].push_back(size * random.normal());
            }
        /* Shorter sequences are padded on the left. Positions are those that attention uses. */
        std::vector<int32_t> places(batch, c.sinks);
        for (int b = 0; b < batch && !offsets.empty(); b++) places[b] += offsets[b];
        p.layer = host;
        p.layer.lengths = c.lengths.data();
        p.layer.position_offset = places.data();
        p.tokens = longest;
        p.k = x[0].data(), p.v = x[1].data();
        p.k_stride_token = p.v_stride_token = d;
        p.k_stride_head = p.v_stride_head = d * longest;
        p.k_stride_batch = p.v_stride_batch = d * longest * c.heads;
        size_t bytes;
        check(tq_append_workspace_bytes(&plan, &p, &bytes, &error), error, "tq_append_workspace_bytes");
        std::vector<uint8_t> workspace(bytes + 64);
        check(tq_append(&plan, &p, workspace.data() + (64 - (uintptr_t)workspace.data() % 64) % 64, bytes, &error),
              error, "tq_append");
    }

    void decode()
    {
        tq_error error;
        tq_layer l = host;
        l.lengths = c.lengths.data();
        l.sinks = c.sinks;
        l.position_offset = offsets.empty() ? nullptr : offsets.data();
        k.resize((size_t)batch * c.heads * longest * c.head_dim);
        v.resize(k.size());
        check(tq_dequantize(&plan, &l, longest, k.data(), v.data(), &error), error, "tq_dequantize");
    }
};

tq_plan plan_of_case(const Case &c)
{
    return make_plan(c.head_dim, TQ_PAGE_TOKENS, c.rotation, c.law, TQ_SCALE_EDEN, c.key_bits, c.value_bits, TQ_TILE,
                     c.pairs, c.metric, 0, c.variance);
}

MomentSizes moment_sizes(const Case &c) { return {c.head_dim, c.heads, c.pairs, c.metric, c.wave_size, c.neighbours}; }

struct Errors {
    std::vector<double> rows;
    double lse = 0, logit = 0; /* logit: the largest */

    double median()
    {
        if (rows.empty()) return 0;
        std::sort(rows.begin(), rows.end());
        return rows[rows.size() / 2];
    }
    double worst() const { return rows.empty() ? 0 : *std::max_element(rows.begin(), rows.end()); }
};

bool run_case(const Case &c)
{
    const tq_plan plan = plan_of_case(c);
    std::mt19937 generator(99);
    const Moments moments(moment_sizes(c), plan, generator);
    Packed packed(c, plan, 5, moments);
    tq_error error;
    Random random(7);
    const bool ragged = !c.counts.empty();
    const int batch = packed.batch, heads = c.heads * c.group, d = c.head_dim, unused = 2;
    std::vector<int32_t> loc = {0};
    for (int n : c.counts) loc.push_back(loc.back() + n);
    const size_t tokens = ragged ? (size_t)loc[batch] + unused : (size_t)batch * c.tokens, rows = tokens * heads;
    const auto row_of = [&](int b, int head, int i) {
        return ragged ? (size_t)(loc[b] + i) * heads + head : ((size_t)b * heads + head) * c.tokens + i;
    };
    const int out_row = c.strided ? 2 * d : d, lse_row = c.strided ? 3 : 1;
    Array<uint8_t> q(rows * d * 2), out(rows * out_row * 2);
    Array<float> lse(rows * lse_row);
    for (size_t i = 0; i < rows * d; i++) store(q.host, i, c.dtype, c.query_size * random.normal());
    q.up();
    Array<int32_t> lengths(batch), table(packed.table.size()), starts(loc.size()), offsets(packed.offsets.size());
    std::vector<int32_t> entries = packed.table;
    if (c.absent)
        for (size_t i = 0; i < entries.size(); i++)
            if (i % 3 != 1) entries[i] = i % 3 ? packed.n_pages + (int32_t)i : -1 - (int32_t)i;
    table.host = entries, starts.host = loc, offsets.host = packed.offsets;
    table.up(), starts.up(), offsets.up();

    tq_attend_params p = {};
    p.layer = packed.device;
    p.layer.dtype = c.dtype, p.layer.sinks = c.sinks;
    p.layer.block_table = table.device, p.layer.lengths = lengths.device;
    p.layer.position_offset = offsets.or_null();
    p.query_tokens = c.tokens, p.query_heads = heads;
    p.softmax_scale = c.scale_sign / sqrtf((float)d), p.softcap = c.softcap;
    p.q = q.device, p.out = out.device, p.lse = lse.device;
    p.q_stride_token = ragged ? (int64_t)heads * d : d;
    p.q_stride_head = ragged ? d : (int64_t)c.tokens * d;
    p.q_stride_batch = ragged ? 0 : (int64_t)heads * c.tokens * d;
    if (ragged) p.query_start_loc = starts.device, p.total_tokens = (int32_t)tokens;
    if (c.strided) {
        p.out_stride_token = ragged ? (int64_t)heads * out_row : out_row;
        p.out_stride_head = ragged ? out_row : (int64_t)c.tokens * out_row;
        p.out_stride_batch = ragged ? 0 : (int64_t)heads * c.tokens * out_row;
        p.lse_stride_token = ragged ? (int64_t)heads * lse_row : lse_row;
        p.lse_stride_head = ragged ? lse_row : (int64_t)c.tokens * lse_row;
        p.lse_stride_batch = ragged ? 0 : (int64_t)heads * c.tokens * lse_row;
    }
    size_t bytes;
    check(tq::chunk_workspace_bytes(plan, p, &bytes, &error), error, "chunk_workspace_bytes");
    Array<uint8_t> workspace(bytes);
    check(cudaMemset(workspace.device, 0xff, bytes), "cudaMemset"); // NaN
    cudaStream_t stream;
    check(cudaStreamCreate(&stream), "cudaStreamCreate");
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    check(tq::attend_chunk(plan, p, workspace.device, bytes, stream, &error), error, "attend_chunk");
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");

    Errors errors;
    bool good = true;
    std::vector<uint8_t> before;
    for (int round = 0; round < 3; round++) { // twice the same, then with other lengths
        if (round != 1)
            for (int b = 0; b < batch; b++) lengths.host[b] = round ? c.lengths[b] * (b % 2 ? 1 : 2) / 3 : c.lengths[b];
        lengths.up();
        check(cudaMemset(out.device, 0xff, out.bytes()), "cudaMemset");
        check(cudaMemset(lse.device, 0xff, lse.bytes()), "cudaMemset");
        check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
        check(cudaStreamSynchronize(stream), "the kernels");
        const std::vector<uint8_t> got = out.down();
        const std::vector<float> got_lse = lse.down();
        if (round == 1) {
            if (got != before) printf("    a second call differs\n"), good = false;
            continue;
        }
        before = got;
        const int samples = 40;
        for (int n = 0; n < samples; n++) {
            const int b = n % batch, head = random.below(heads), h = head / c.group,
                      count = ragged ? c.counts[b] : c.tokens, length = lengths.host[b];
            if (!count) continue;
            const int i = n < batch ? count - 1 : random.below(count);
            const size_t row = row_of(b, head, i);
            std::vector<double> query(d), original(d), logit(length, -INFINITY), want(d, 0.0);
            for (int x = 0; x < d; x++) query[x] = original[x] = load(q.host, row * d + x, c.dtype);
            moments.undo_metric(h, original.data());
            double square = 0, top = -INFINITY, sum = 0;
            for (double x : original) square += x * x;
            const double variance = plan.variance * (double)p.softmax_scale * p.softmax_scale * square / (2.0 * d);
            for (int j = 0; j < length; j++) {
                const int32_t page = entries[(size_t)b * packed.max_pages + j / 128];
                if (page < 0 || page >= packed.n_pages) continue;
                double x = p.softmax_scale * dot(query.data(), packed.row(packed.k, b, h, j), d);
                if (c.variance) x -= variance * packed.key_scale(b, h, j) * packed.key_scale(b, h, j);
                if (c.softcap > 0) x = c.softcap * tanh(x / c.softcap);
                logit[j] = x, top = std::max(top, x), errors.logit = std::max(errors.logit, fabs(x));
            }
            for (int j = 0; j < length; j++) {
                if (logit[j] == -INFINITY) continue;
                const double w = exp(logit[j] - top);
                sum += w;
                for (int x = 0; x < d; x++) want[x] += w * packed.row(packed.v, b, h, j)[x];
            }
            double off = 0, norm = 0;
            for (int x = 0; x < d; x++) {
                const double y = sum ? want[x] / sum : 0, e = load(got, row * out_row + x, c.dtype) - y;
                off += e * e, norm += y * y;
            }
            const float l = got_lse[row * lse_row];
            if (!sum) {
                if (off != 0 || l != -INFINITY)
                    printf("    a row that sees nothing: %g, lse %g\n", sqrt(off), l), good = false;
                continue;
            }
            errors.rows.push_back(off == off ? sqrt(off / norm) : INFINITY);
            const double lse_off = fabs(l - (top + log(sum)));
            errors.lse = std::max(errors.lse, lse_off == lse_off ? lse_off : INFINITY);
        }
        if (ragged) // tokens of no sequence are not written
            for (size_t i = (size_t)loc[batch] * heads * out_row * 2; i < got.size(); i++)
                if (got[i] != 0xff) {
                    printf("    written behind the last query\n"), good = false;
                    break;
                }
    }
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    /* bf16: the rounding of `out`. Errors of logits are in proportion to the numbers that logits are sums of: with a
     * metric and a wave, these are larger than logits. */
    const double rounding = c.dtype == TQ_BF16 ? 2e-3 : 0,
                 more = std::max(1.0, errors.logit / 10) * (c.metric ? 1.5 : 1) * (c.pairs ? 2.5 : 1);
    const double median = errors.median(), worst = errors.worst();
    good = good && median <= 1e-3 * more + rounding && worst <= 4e-3 * more + rounding && errors.lse <= 4e-3 * more;
    printf("%-64s median %.1e  worst %.1e  lse %.1e  logits to %.0f  %s\n", c.name.c_str(), median, worst, errors.lse,
           errors.logit, good ? "ok" : "FAILED");
    fflush(stdout);
    return good;
}

std::string digits(const std::vector<int> &bits)
{
    std::string text;
    for (int x : bits) text += (char)('0' + x);
    return text;
}

std::vector<Case> all_cases()
{
    std::vector<Case> cases;
    const auto add = [&](std::string name, auto change) {
        Case c;
        change(c);
        c.name = name;
        if (c.pairs > c.head_dim / 2) c.pairs = (c.head_dim / 2 + 7) / 8 * 8;
        if (tq::chunk_takes(plan_of_case(c))) cases.push_back(c);
    };
    add("plain", [](Case &) {});
    add("one token", [](Case &c) { c.lengths = {1}, c.tokens = 1, c.heads = 1, c.group = 1; });
    for (int tokens : {1, 16, 17, 32, 33, 64, 200})
        add(std::to_string(tokens) + " query tokens", [=](Case &c) { c.tokens = tokens; });
    for (int length : {127, 128, 129, 256, 4096, 20000})
        add(std::to_string(length) + " packed tokens", [=](Case &c) { c.lengths = {length}; });
    for (int d : {128, 64, 96, 80, 40})
        for (std::vector<int> keys : {std::vector<int>{1}, {2}, {3}, {4}, {5}, {5, 3, 1, 2}})
            for (std::vector<int> values : {keys, std::vector<int>{3}})
                add("dim " + std::to_string(d) + ", bits " + digits(keys) + "/" + digits(values), [=](Case &c) {
                    c.key_bits = keys, c.value_bits = values, c.head_dim = d, c.lengths = {700, 0, 129};
                    c.tokens = keys[0] % 2 ? 40 : 7, c.dtype = d == 64 ? TQ_BF16 : TQ_F16;
                });
    for (bool bf16 : {false, true})
        for (int pairs : {0, 64})
            for (int metric : {0, 1, 5}) {
                const std::string tag = std::string(bf16 ? ", bf16" : "") + (pairs ? ", wave" : "") +
                                        (metric ? ", metric " + std::to_string(metric) : "");
                const auto set = [=](Case &c) {
                    c.dtype = bf16 ? TQ_BF16 : TQ_F16, c.pairs = pairs, c.metric = metric, c.query_size = 1;
                    c.lengths = {3000, 2, 700, 300, 129, 6100, 64, 0};
                };
                add("ragged lengths" + tag, set);
                add("ragged queries" + tag, [=](Case &c) {
                    set(c);
                    c.counts = {40, 1, 7, 64, 0, 33, 5, 3}, c.tokens = 64, c.strided = true;
                });
                add("everything" + tag, [=](Case &c) {
                    set(c);
                    c.centres = c.steps = true, c.sinks = 4, c.key_bits = {4}, c.value_bits = {3};
                    c.offsets = {0, 12345, -700, 3, 1 << 28, 9, -2, 4};
                });
                add("neighbours" + tag, [=](Case &c) { set(c), c.neighbours = true, c.sinks = 3, c.head_dim = 64; });
                add("variance term" + tag, [=](Case &c) { set(c), c.variance = c.centres = true, c.key_bits = {2}; });
                add("soft-cap" + tag, [=](Case &c) { set(c), c.softcap = 5, c.centres = true; });
                add("soft-cap and variance term" + tag,
                    [=](Case &c) { set(c), c.softcap = 5, c.variance = true, c.key_bits = {3}, c.tokens = 10; });
                add("absent pages" + tag, [=](Case &c) { set(c), c.absent = true; });
            }
    for (int d : {128, 64, 96, 80})
        for (int sinks : {0, 4, 100000})
            add("wave, dim " + std::to_string(d) + ", from " + std::to_string(sinks), [=](Case &c) {
                c.head_dim = d, c.pairs = d / 2, c.metric = 5, c.sinks = sinks, c.query_size = 1, c.lengths = {2000};
                c.key_bits = {3};
            });
    for (int pairs : {8, 24, 32})
        add(std::to_string(pairs) + " pairs", [=](Case &c) { c.pairs = pairs, c.query_size = 1; });
    add("a large wave", [](Case &c) { c.pairs = 64, c.wave_size = 200, c.query_size = 0.3f; });
    add("negative scale", [](Case &c) { c.scale_sign = -1; });
    add("zero queries", [](Case &c) { c.query_size = 0; });
    add("large logits", [](Case &c) { c.query_size = 12; });
    for (float size : {1e-3f, 300.0f})
        add("keys and values of size " + std::to_string(size),
            [=](Case &c) { c.key_size = c.value_size = size, c.query_size = size < 1 ? 1000.0f : 0.01f; });
    add("tokens of different sizes", [](Case &c) { c.hard_scales = true, c.query_size = 0.5f; });
    add("no rotation", [](Case &c) { c.rotation = TQ_ROTATION_NONE; });
    add("sphere", [](Case &c) { c.law = TQ_CODEBOOK_SPHERE, c.key_bits = {3}; });
    add("600 sequences", [](Case &c) {
        c.lengths.clear();
        for (int i = 0; i < 600; i++) c.lengths.push_back(i * 37 % 200);
        c.heads = 1, c.tokens = 20;
    });
    add("a long one and short ones", [](Case &c) {
        c.lengths = {1, 30000, 0, 200, 5, 5, 5};
        c.heads = 1, c.tokens = 130;
    });
    return cases;
}

// ---- times ----

void time_shape(const std::string &filter, const std::vector<int> &key_bits, const std::vector<int> &value_bits,
                bool wave, bool variance, int only)
{
    Case c;
    c.key_bits = key_bits, c.value_bits = value_bits, c.heads = 8, c.group = 4, c.dtype = TQ_BF16;
    c.lengths = {64 * 128};
    c.variance = variance;
    if (wave) c.pairs = 64, c.metric = 5;
    const tq_plan plan = plan_of_case(c);
    const std::string tag = digits(key_bits) + "/" + digits(value_bits) + " bits" + (wave ? ", wave" : "") +
                            (variance ? ", variance term" : "");
    if (tag.find(filter) == std::string::npos) return;
    if (!tq::chunk_takes(plan)) {
        printf("%s: not taken\n", tag.c_str());
        return;
    }
    std::mt19937 generator(99);
    Moments moments(moment_sizes(c), plan, generator);
    if (wave) // Llama 3's angles
        for (int i = 0; i < c.pairs; i++)
            moments.turns[3 * i + 2] = (int32_t)llround(pow(5e5, -2.0 * i / c.head_dim) * pow(2, 32) / (2 * M_PI));
    Packed packed(c, plan, 5, moments);
    const int copies = 4, length = 32768, n = length / 128, total = copies * n, some = packed.n_pages - 3 - 1;
    const size_t page_bytes = c.heads * plan.record_bytes;
    uint8_t *pages;
    check(cudaMalloc((void **)&pages, total * page_bytes), "cudaMalloc");
    for (int i = 0; i < total; i++) // the sequence's pages, repeated
        check(cudaMemcpy(pages + i * page_bytes, packed.device.pages + packed.table[i % some] * page_bytes, page_bytes,
                         cudaMemcpyDeviceToDevice),
              "cudaMemcpy");
    Array<int32_t> table(total), lengths(1);
    std::iota(table.host.begin(), table.host.end(), 0);
    std::shuffle(table.host.begin(), table.host.end(), generator);
    lengths.host[0] = length;
    table.up(), lengths.up();
    const int heads = c.heads * c.group, d = c.head_dim;
    for (int tokens : {8, 16, 32, 64, 128, 256, 512, 1024, 2048}) {
        if (only && tokens != only) continue;
        Random random(3);
        Array<uint8_t> q((size_t)heads * tokens * d * 2), out(q.host.size());
        Array<float> lse((size_t)heads * tokens);
        for (size_t i = 0; i < q.host.size() / 2; i++) store(q.host, i, c.dtype, random.normal());
        q.up();
        tq_attend_params p = {};
        tq_error error;
        p.layer = packed.device;
        p.layer.dtype = c.dtype, p.layer.sinks = 4, p.layer.lengths = lengths.device, p.layer.max_pages = n;
        p.layer.pages = pages, p.layer.n_pages = total;
        p.query_tokens = tokens, p.query_heads = heads, p.softmax_scale = 1 / sqrtf((float)d);
        p.q = q.device, p.out = out.device, p.lse = lse.device;
        p.q_stride_token = d, p.q_stride_head = (int64_t)tokens * d, p.q_stride_batch = (int64_t)heads * tokens * d;
        size_t bytes;
        check(tq::chunk_workspace_bytes(plan, p, &bytes, &error), error, "chunk_workspace_bytes");
        Array<uint8_t> workspace(bytes);
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t replay;
        check(cudaStreamCreate(&stream), "cudaStreamCreate");
        check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
        const int calls = 12;
        for (int i = 0; i < calls; i++) {
            p.layer.block_table = table.device + i % copies * n;
            check(tq::attend_chunk(plan, p, workspace.device, bytes, stream, &error), error, "attend_chunk");
        }
        check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
        check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
        cudaEvent_t from, to;
        check(cudaEventCreate(&from), "cudaEventCreate");
        check(cudaEventCreate(&to), "cudaEventCreate");
        std::vector<float> times;
        for (int i = 0; i < 12; i++) {
            check(cudaEventRecord(from, stream), "cudaEventRecord");
            check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
            check(cudaEventRecord(to, stream), "cudaEventRecord");
            check(cudaEventSynchronize(to), "the kernels");
            float ms;
            check(cudaEventElapsedTime(&ms, from, to), "cudaEventElapsedTime");
            times.push_back(ms * 1e3f / calls);
        }
        std::sort(times.begin(), times.end());
        const double us = times[times.size() / 2];
        printf("%-32s %5d query tokens x 32k: %8.1f us  %4.0f TFLOP/s  workspace %.1f MB\n", tag.c_str(), tokens, us,
               4.0 * heads * tokens * (double)length * d / us * 1e-6, bytes * 1e-6);
        fflush(stdout);
        cudaGraphExecDestroy(replay), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
        cudaEventDestroy(from), cudaEventDestroy(to);
    }
    cudaFree(pages);
}

} // namespace

int main(int argc, char **argv)
{
    const std::string mode = argc > 1 ? argv[1] : "check", filter = argc > 2 ? argv[2] : "";
    const int only = argc > 3 ? atoi(argv[3]) : 0;
    if (mode == "check") {
        int ran = 0, failed = 0;
        for (const Case &c : all_cases())
            if (c.name.find(filter) != std::string::npos) ran++, failed += !run_case(c);
        printf("%d of %d cases failed\n", failed, ran);
        return failed || !ran;
    }
    if (mode != "time") {
        printf("chunk_harness check [filter] | time [filter] [query tokens]\n");
        return 2;
    }
    for (bool wave : {false, true}) {
        for (int bits : {4, 3, 2}) time_shape(filter, {bits}, {bits}, wave, false, only);
        time_shape(filter, {4}, {3}, wave, false, only);
        time_shape(filter, {4}, {4}, wave, true, only);
    }
    return 0;
}
