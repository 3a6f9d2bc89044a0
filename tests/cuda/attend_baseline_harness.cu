// Checks attention and dequantising on the device for plans that are not plain, over pages that the C core wrote,
// against float64 over what the core decodes from them, and against the core's own attention.
//
//   make harness && build/cuda-harness/attend_baseline_harness [filter]
#include <functional>

#include "blocked_plans.h"
#include "moments.h"

struct Case {
    std::string name;
    const BlockedPlan *plan = nullptr;
    int dim = 64, page_tokens = 128, heads = 2, group = 2, tokens = 1, dtype = TQ_F32;
    std::vector<int> lengths = {150}, starts = {};
    int sinks = 0, window = 0, sliding = 0, causal = 1, spare_pages = 0;
    int pairs = 0, metric = 0; // pairs of the wave; 1 + the metric's rank
    bool fresh = false, centred = true, shared_matrix = false;
    bool absent = false;          // the block table names some pages outside the cache
    float softcap = 0, scale = 0; // 0: head_dim^-1/2
};

static int failures = 0, checks = 0;
static double worst_of_all = 0;

static bool expect(bool good, const std::string &name, const char *what, double got)
{
    checks++;
    if (!good && failures++ < 30) printf("FAILED: %s: %s, %g\n", name.c_str(), what, got);
    return good;
}

/** Memory aligned as the core requires, and its copy on the device. */
struct Aligned {
    size_t bytes;
    uint8_t *host, *device;

    Aligned(size_t n, int fill) : bytes((n + 255) / 256 * 256), host((uint8_t *)aligned_alloc(256, bytes + 256))
    {
        check(cudaMalloc((void **)&device, bytes + 256), "cudaMalloc");
        memset(host, fill, bytes);
    }
    ~Aligned() { free(host), cudaFree(device); }
    Aligned(const Aligned &) = delete;
    Aligned &operator=(const Aligned &) = delete;
    void up() { check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "copy to the device"); }
};

/** The keys or the values of a case: numbers, transform, exact tokens. */
struct Side {
    Array<float> matrix, numbers;
    std::vector<float> centre, table;
    Array<int32_t> turns;
    Array<uint8_t> x, sinks, ring, fresh; // x: all tokens [batch, heads, most, dim], right-aligned
    std::vector<float> decoded;           // packed tokens [batch, heads, packed, dim], by the core
    tq_transform host = {}, device = {};

    Side(const tq_plan &whole, bool is_key, const Case &c, int most, Random &random)
        : Side(whole, is_key ? whole.key : whole.value, is_key, c, most, random)
    {
    }
    Side(const tq_plan &whole, const tq_side &plan, bool is_key, const Case &c, int most, Random &random)
        : matrix((size_t)plan.matrix_rows * c.dim * (c.shared_matrix ? 1 : c.heads)),
          numbers((size_t)c.heads *
                  ((c.centred ? c.dim : 0) + (plan.step_columns + 3) / 4 * 4 + (is_key ? whole.moments : 0))),
          centre(c.centred ? c.heads * c.dim : 0), table((size_t)plan.step_columns * c.heads),
          turns(is_key ? 3 * whole.wave_pairs : 0), x(exact(c, most)), sinks(exact(c, c.sinks)),
          ring(exact(c, c.window)), fresh(exact(c, c.fresh ? c.tokens : 0))
    {
        const size_t one = (size_t)plan.matrix_rows * c.dim;
        for (size_t i = 0; i < matrix.host.size(); i += one) fill_matrix(&matrix.host[i], plan, c.dim, random);
        for (size_t i = 0; i < table.size(); i += plan.step_columns) fill_table(&table[i], plan, random);
        for (float &one_centre : centre) one_centre = 0.5f * random.normal();
        for (size_t i = 0; i < x.host.size() / dtype_size(c.dtype); i++) store(x.host, i, c.dtype, random.normal());
        for (Array<uint8_t> *rows : {&sinks, &ring}) std::fill(rows->host.begin(), rows->host.end(), 0xff);
        std::mt19937 seed(c.dim);
        const Moments given({c.dim, c.heads, c.pairs, c.metric, 5.0f, c.group == 3}, whole, seed);
        const bool moved = is_key && whole.moments;
        for (size_t i = 0; i < turns.host.size(); i++) turns.host[i] = given.turns[i];
        const std::vector<float> joined =
            join_numbers(c.heads, centre, table, moved ? given.numbers : std::vector<float>());
        std::copy(joined.begin(), joined.end(), numbers.host.begin());
        const int64_t stride = c.shared_matrix ? 0 : (int64_t)one;
        host.rotation = matrix.host_or_null(), device.rotation = matrix.or_null();
        host.rotation_stride_head = device.rotation_stride_head = stride;
        host.turns = turns.host_or_null(), device.turns = turns.or_null();
        use_numbers(whole, !is_key, c.heads, joined.size(), numbers.host_or_null(), &host);
        use_numbers(whole, !is_key, c.heads, joined.size(), numbers.or_null(), &device);
        matrix.up(), numbers.up(), turns.up();
    }
    static size_t exact(const Case &c, int tokens)
    {
        return c.lengths.size() * c.heads * tokens * c.dim * (size_t)dtype_size(c.dtype);
    }
};

/** A cache that the core filled, and queries. */
struct World {
    const Case &c;
    tq_plan plan;
    int batch, most, packed, used_pages, max_pages, n_pages;
    Random random;
    Side key, value;
    Aligned pages;
    Array<int32_t> table, lengths, starts;
    Array<uint8_t> q;

    explicit World(const Case &case_)
        : c(case_), plan(plan_of(words_of(*c.plan, c.dim, c.page_tokens, c.pairs, c.metric))),
          batch((int)c.lengths.size()), most(std::max(c.tokens, *std::max_element(c.lengths.begin(), c.lengths.end()))),
          packed(std::max(0, most - c.sinks - c.window)), used_pages((packed + c.page_tokens - 1) / c.page_tokens),
          max_pages(used_pages + c.spare_pages), n_pages(batch * used_pages + 2),
          random(c.dim + c.window + 7 * c.group), key(plan, true, c, most, random), value(plan, false, c, most, random),
          pages((size_t)n_pages * c.heads * plan.record_bytes, 0xff), table((size_t)batch * max_pages), lengths(batch),
          starts(c.starts.size()), q((size_t)batch * c.heads * c.group * c.tokens * c.dim * dtype_size(c.dtype))
    {
        std::vector<int32_t> order(n_pages);
        for (int i = 0; i < n_pages; i++) order[i] = i;
        for (int i = n_pages; i > 1; i--) std::swap(order[i - 1], order[random.below(i)]);
        for (int b = 0; b < batch; b++)
            for (int i = 0; i < max_pages; i++)
                table.host[b * max_pages + i] = i < used_pages ? order[b * used_pages + i] : 0x40000000;
        starts.host.assign(c.starts.begin(), c.starts.end());
        for (size_t i = 0; i < q.host.size() / dtype_size(c.dtype); i++) store(q.host, i, c.dtype, 2 * random.normal());
        const int old = c.fresh ? most - c.tokens : most;
        append(0, old, c.fresh ? c.tokens : 0);
        if (!c.fresh) return;
        const std::vector<uint8_t> before[2] = {key.ring.host, value.ring.host};
        append(old, c.tokens, 0);
        key.ring.host = before[0], value.ring.host = before[1];
    }

    tq_layer layer_of(bool device)
    {
        auto at = [&](auto &array) { return device ? array.or_null() : array.host_or_null(); };
        tq_layer l = {};
        l.batch = batch, l.kv_heads = c.heads, l.max_pages = max_pages, l.sinks = c.sinks, l.window = c.window;
        l.dtype = c.dtype, l.n_pages = n_pages, l.pages = device ? pages.device : pages.host;
        l.block_table = at(table), l.lengths = at(lengths);
        l.sink_k = at(key.sinks), l.sink_v = at(value.sinks), l.window_k = at(key.ring), l.window_v = at(value.ring);
        l.key = device ? key.device : key.host, l.value = device ? value.device : value.host;
        return l;
    }

    /** Appends columns first .. first + n - 1 of x with the core. Lengths are the final ones less `missing`. */
    void append(int first, int n, int missing)
    {
        tq_append_params p = {};
        for (int b = 0; b < batch; b++) lengths.host[b] = std::max(0, c.lengths[b] - missing);
        p.layer = layer_of(false), p.tokens = n, p.threads = 1;
        const size_t at = (size_t)first * c.dim * dtype_size(c.dtype);
        p.k = key.x.host.data() + at, p.v = value.x.host.data() + at;
        p.k_stride_token = p.v_stride_token = c.dim;
        p.k_stride_head = p.v_stride_head = (int64_t)most * c.dim;
        p.k_stride_batch = p.v_stride_batch = (int64_t)c.heads * most * c.dim;
        tq_error error;
        size_t bytes;
        check(tq_append_workspace_bytes(&plan, &p, &bytes, &error), error, "tq_append_workspace_bytes");
        Aligned workspace(bytes, 0);
        check(tq_append(&plan, &p, workspace.host, bytes, &error), error, (c.name + ": tq_append").c_str());
    }

    /** Keeps one of three entries of the block table; the others name no page. */
    void lose_pages()
    {
        for (size_t i = 0; i < table.host.size(); i++)
            if (i % 3 != 1) table.host[i] = i % 3 ? (int32_t)(n_pages + (i * 2654435761u >> 4)) : i % 2 ? n_pages : -1;
    }
    bool has_page(int b, int index) const
    {
        const int32_t page = table.host[(size_t)b * max_pages + index / c.page_tokens];
        return page >= 0 && page < n_pages;
    }

    /** Decodes the packed tokens with the core. Checks that the device decodes the same, and 0 where it has no page. */
    void decode()
    {
        Array<int32_t> counts(batch);
        for (int b = 0; b < batch; b++) counts.host[b] = std::max(0, c.lengths[b] - c.sinks - c.window);
        const size_t numbers = (size_t)batch * c.heads * packed * c.dim;
        Array<float> k(numbers), v(numbers);
        key.decoded.resize(numbers), value.decoded.resize(numbers);
        counts.up(), k.up(), v.up(), pages.up(), table.up();
        tq_error error;
        tq_layer on_host = layer_of(false), on_device = layer_of(true);
        on_host.lengths = counts.host.data(), on_device.lengths = counts.device;
        check(tq_dequantize(&plan, &on_host, packed, key.decoded.data(), value.decoded.data(), &error), error,
              "tq_dequantize");
        const std::vector<int32_t> whole = table.host;
        if (c.absent) lose_pages(), table.up();
        check(tq_cuda_dequantize(&plan, &on_device, packed, TQ_F32, k.device, v.device, nullptr, 0, nullptr, &error),
              error, "tq_cuda_dequantize");
        check(cudaDeviceSynchronize(), "dequantize");
        const std::pair<std::vector<float>, std::vector<float> *> sides[] = {{k.down(), &key.decoded},
                                                                             {v.down(), &value.decoded}};
        for (const auto &[got, want] : sides) {
            double largest = 0, error_of = 0;
            for (size_t i = 0; i < numbers; i++) {
                const int b = (int)(i / ((size_t)c.heads * packed * c.dim)), index = (int)(i / c.dim % packed);
                const double wanted = has_page(b, index) ? (*want)[i] : 0;
                largest = std::max(largest, fabs(wanted));
                error_of = std::max(error_of, fabs(got[i] - wanted));
                if (got[i] != got[i]) error_of = HUGE_VAL;
            }
            /* float32 sums are in another order; A^-1 stretches their differences by up to 30 */
            expect(error_of <= (c.metric ? 6e-5 : 2e-6) * largest, c.name, "dequantize is off by", error_of);
        }
        table.host = whole;
    }
};

/** A row of the output and its log-sum-exp, in float64. */
struct Answer {
    std::vector<double> out;
    double lse = -HUGE_VAL;
};

static Answer answer(const World &w, int b, int head, int token)
{
    const Case &c = w.c;
    const int d = c.dim, length = c.lengths[b], position = length - c.tokens + token, h = head / c.group,
              start = c.starts.empty() ? 0 : c.starts[b], end = c.causal ? position + 1 : length,
              newest = end - c.window, oldest = std::max(start, c.sliding ? position - c.sliding + 1 : 0);
    const size_t kv = (size_t)b * c.heads + h, row = (((size_t)b * c.heads * c.group + head) * c.tokens + token) * d;
    auto number = [&](const Side &side, int j, int i) -> double {
        if (j < c.sinks || j >= newest) return load(side.x.host, (kv * w.most + w.most - length + j) * d + i, c.dtype);
        return side.decoded[(kv * w.packed + j - c.sinks) * d + i];
    };
    auto is_read = [&](int j) { return j < c.sinks || j >= newest || w.has_page(b, j - c.sinks); };
    Answer a;
    std::vector<double> logits, sums(d, 0.0);
    double top = -HUGE_VAL, sum = 0;
    for (int j = oldest; j < end; j++) {
        double logit = 0;
        for (int i = 0; i < d; i++) logit += load(w.q.host, row + i, c.dtype) * number(w.key, j, i);
        logit *= c.scale ? c.scale : 1 / sqrt((double)d);
        if (c.softcap > 0) logit = c.softcap * tanh(logit / c.softcap);
        logits.push_back(is_read(j) ? logit : -HUGE_VAL);
        top = std::max(top, logits.back());
    }
    for (int j = oldest; j < end; j++) {
        if (!is_read(j)) continue;
        const double weight = exp(logits[j - oldest] - top);
        sum += weight;
        for (int i = 0; i < d; i++) sums[i] += weight * number(w.value, j, i);
    }
    for (double x : sums) a.out.push_back(sum > 0 ? x / sum : 0);
    if (sum > 0) a.lse = top + log(sum);
    return a;
}

static tq_attend_params params_of(World &w, bool device, void *out, float *lse)
{
    const Case &c = w.c;
    tq_attend_params p = {};
    auto at = [&](auto &array) { return device ? array.or_null() : array.host_or_null(); };
    p.layer = w.layer_of(device);
    p.query_tokens = c.tokens, p.query_heads = c.heads * c.group, p.causal = c.causal;
    p.sliding_window = c.sliding, p.threads = 1, p.softmax_scale = c.scale ? c.scale : 1 / sqrtf((float)c.dim);
    p.softcap = c.softcap, p.q = at(w.q), p.q_stride_token = c.dim;
    p.q_stride_head = (int64_t)c.tokens * c.dim, p.q_stride_batch = p.q_stride_head * p.query_heads;
    p.starts = at(w.starts), p.fresh_k = at(w.key.fresh);
    p.fresh_v = at(w.value.fresh), p.fresh_k_stride_token = p.fresh_v_stride_token = c.dim;
    p.fresh_k_stride_head = p.fresh_v_stride_head = (int64_t)c.tokens * c.dim;
    p.fresh_k_stride_batch = p.fresh_v_stride_batch = p.fresh_k_stride_head * c.heads;
    p.out = out, p.lse = lse;
    return p;
}

/** Copies the new tokens to fresh_k and fresh_v. */
static void copy_fresh(World &w)
{
    const size_t row = w.c.dim * (size_t)dtype_size(w.c.dtype), tokens = w.c.tokens;
    for (Side *side : {&w.key, &w.value})
        for (size_t i = 0; side->fresh.bytes() && i < (size_t)w.batch * w.c.heads; i++)
            memcpy(&side->fresh.host[i * tokens * row], &side->x.host[(i * w.most + w.most - tokens) * row],
                   tokens * row);
}

/** Compares out and lse of the device with float64, and with the core if it has an answer. */
static void compare(World &w, const std::vector<uint8_t> &got, const std::vector<float> &lse,
                    const std::vector<uint8_t> &core, const std::vector<float> &core_lse)
{
    const Case &c = w.c;
    double worst = 0, worst_lse = 0, apart = 0, largest = 0;
    bool pattern = true;
    for (int b = 0; b < w.batch; b++)
        for (int head = 0; head < c.heads * c.group; head++)
            for (int token = 0; token < c.tokens; token++) {
                const size_t row = ((size_t)b * c.heads * c.group + head) * c.tokens + token;
                const Answer want = answer(w, b, head, token);
                pattern &= std::isinf(want.lse) == (lse[row] == -INFINITY);
                if (!std::isinf(want.lse)) {
                    worst_lse = std::max(worst_lse, fabs(lse[row] - want.lse));
                    if (!core.empty()) apart = std::max(apart, (double)fabsf(lse[row] - core_lse[row]));
                }
                for (int i = 0; i < c.dim; i++) {
                    const double x = load(got, row * c.dim + i, c.dtype), y = want.out[i],
                                 rounding = c.dtype == TQ_F32 ? 0 : fabs(y) * (c.dtype == TQ_F16 ? 0x1p-11 : 0x1p-8);
                    largest = std::max(largest, fabs(y));
                    worst = std::max(worst, fabs(x - y) - rounding);
                    if (!core.empty())
                        apart = std::max(apart, fabs(x - load(core, row * c.dim + i, c.dtype)) - 2 * rounding);
                    if (x != x) worst = HUGE_VAL;
                }
            }
    const double scale = largest > 0 ? largest : 1;
    worst_of_all = std::max(worst_of_all, worst / scale);
    expect(pattern, c.name, "another row attended nothing", 0);
    expect(worst <= 2e-5 * scale, c.name, "attend is off float64 by, of the largest output", worst / scale);
    expect(worst_lse <= 1e-4, c.name, "lse is off float64 by", worst_lse);
    // the core does not round queries in this format, so both are float32 sums of the same numbers
    expect(apart <= 4e-5 * scale + 1e-4, c.name, "attend is off the C core by", apart);
}

/** Whether a case's plan is plain, as some are with few groups. attend_harness checks those. */
static bool is_plain(const Case &c)
{
    return plan_of(words_of(*c.plan, c.dim, c.page_tokens, c.pairs, c.metric)).is_plain;
}

static void run(const Case &c)
{
    World w(c);
    w.decode();
    copy_fresh(w);
    for (Side *side : {&w.key, &w.value}) side->sinks.up(), side->ring.up(), side->fresh.up();
    w.q.up(), w.starts.up(), w.lengths.up();
    if (c.absent) w.lose_pages();
    w.table.up();
    const size_t rows = w.q.host.size() / dtype_size(c.dtype) / c.dim;
    Array<uint8_t> out(w.q.host.size()), core(w.q.host.size());
    Array<float> lse(rows), core_lse(rows);
    tq_attend_params p = params_of(w, true, out.or_null(), lse.or_null());
    tq_error error;
    size_t bytes;
    tq_cuda_attend_call call;
    check(tq_cuda_attend_prepare(&w.plan, &p, &call, &bytes, &error), error, "tq_cuda_attend_prepare");
    Aligned workspace(bytes, 0xff);
    workspace.up();
    std::vector<uint8_t> first;
    for (int i = 0; i < 2; i++) { // twice: the workspace is left usable, and results repeat
        std::fill(out.host.begin(), out.host.end(), 0xff);
        out.up();
        check(tq_cuda_attend(&call, workspace.device, bytes, nullptr, &error), error, c.name.c_str());
        check(cudaDeviceSynchronize(), c.name.c_str());
        if (i == 0) first = out.down();
    }
    const std::vector<uint8_t> got = out.down();
    expect(got == first, c.name, "does not repeat", 0);
    if (c.absent) return compare(w, got, lse.down(), {}, {}); // an error of the core
    tq_attend_params on_host = params_of(w, false, core.host_or_null(), core_lse.host_or_null());
    check(tq_attend_workspace_bytes(&w.plan, &on_host, &bytes, &error), error, "tq_attend_workspace_bytes");
    Aligned host_workspace(bytes, 0);
    check(tq_attend(&w.plan, &on_host, host_workspace.host, bytes, &error), error, "tq_attend");
    compare(w, got, lse.down(), core.host, core_lse.host);
}

static std::vector<Case> all_cases(const std::vector<BlockedPlan> &plans)
{
    std::vector<Case> cases;
    auto add = [&](const BlockedPlan &plan, const std::string &name, const std::function<void(Case &)> &change) {
        Case c;
        c.plan = &plan;
        change(c);
        c.name = name + ", \"" + plan.name + "\", dim " + std::to_string(c.dim) + ", dtype " + std::to_string(c.dtype);
        cases.push_back(c);
    };
    for (const BlockedPlan &plan : plans) { // every plan x head_dim, some tokens packed, some exact
        for (int d : {8, 24, 64, 80, 96, 128, 200, 256})
            add(plan, "dim", [&](Case &c) {
                c.dim = d, c.lengths = {97, 300}, c.sinks = 2, c.window = d / 8 % 2 * 10, c.dtype = d / 8 % 3;
                c.shared_matrix = d == 96, c.centred = d != 80, c.page_tokens = d == 24 ? 32 : 128;
            });
        add(plan, "several queries, fresh", [](Case &c) {
            c.tokens = 5, c.group = 3, c.fresh = true, c.sinks = 4, c.window = 16, c.lengths = {3, 70, 200};
        });
        add(plan, "starts", [](Case &c) { c.lengths = {64, 64, 290}, c.starts = {37, 64, 130}, c.window = 5; });
        add(plan, "long", [](Case &c) { c.heads = 1, c.lengths = {2500}, c.page_tokens = 96; });
        for (int d : {40, 128, 256})
            add(plan, "moments", [&](Case &c) {
                c.dim = d, c.pairs = (d / 2 + 7) / 8 * 8, c.metric = d == 40 ? 2 : 5, c.tokens = 3, c.group = 3;
                c.fresh = true, c.sinks = 4, c.window = 16, c.lengths = {3, 70, 200}, c.starts = {0, 9, 100};
            });
        add(plan, "a metric alone", [](Case &c) { c.metric = 3, c.centred = false, c.lengths = {150}; });
        add(plan, "a wave alone", [](Case &c) { c.pairs = 16, c.softcap = 15, c.dtype = TQ_BF16, c.lengths = {150}; });
    }
    for (size_t i : {0u, 2u, 5u, 8u, 12u}) { // every shape, with plans of each kind
        const BlockedPlan &plan = plans[i];
        for (int n : {0, 1, 31, 32, 33, 127, 128, 129})
            add(plan, "length " + std::to_string(n), [&](Case &c) { c.lengths = {n, 65}; });
        for (int n : {0, 1, 4, 20, 21, 52, 53})
            add(plan, "sinks, window, length " + std::to_string(n),
                [&](Case &c) { c.lengths = {n, 100}, c.sinks = 4, c.window = 16; });
        for (int group : {1, 3, 8, 9, 16}) add(plan, "group", [&](Case &c) { c.group = group, c.heads = 1; });
        for (int tokens : {2, 8, 33}) {
            add(plan, "queries", [&](Case &c) { c.tokens = tokens, c.lengths = {140, 20}; });
            add(plan, "queries, fresh", [&](Case &c) {
                c.tokens = tokens, c.fresh = true, c.window = 40, c.sinks = 3, c.lengths = {190, 50, 20};
            });
        }
        for (int dtype : {TQ_F16, TQ_BF16})
            add(plan, "16 bits", [&](Case &c) { c.dtype = dtype, c.sinks = 4, c.window = 32, c.lengths = {170, 30}; });
        add(plan, "sliding window, softcap",
            [](Case &c) { c.sliding = 33, c.softcap = 15, c.sinks = 2, c.window = 8, c.lengths = {40, 150}; });
        add(plan, "sliding inside the window",
            [](Case &c) { c.sliding = 5, c.sinks = 2, c.window = 8, c.lengths = {40, 7}; });
        add(plan, "queries, sliding, starts", [](Case &c) {
            c.tokens = 8, c.fresh = true, c.sinks = 4, c.window = 64, c.sliding = 100, c.lengths = {400, 90};
            c.starts = {250, 3};
        });
        add(plan, "not causal", [](Case &c) { c.causal = 0, c.tokens = 3, c.lengths = {9, 100}; });
        add(plan, "not causal, window",
            [](Case &c) { c.causal = 0, c.tokens = 3, c.window = 20, c.sinks = 1, c.lengths = {9, 100}; });
        add(plan, "negative scale", [](Case &c) { c.scale = -0.3f, c.lengths = {100}; });
        add(plan, "room to grow", [](Case &c) { c.spare_pages = 40, c.lengths = {300}; });
        add(plan, "pages of 32 and 96", [](Case &c) { c.page_tokens = 96, c.lengths = {500, 31, 97}; });
    }
    for (const BlockedPlan &plan : plans)
        for (int sinks : {0, 4})
            add(plan, "absent pages, sinks " + std::to_string(sinks), [=](Case &c) {
                c.absent = true, c.sinks = sinks, c.window = 5 * sinks, c.page_tokens = 64, c.lengths = {300, 100, 3};
            });
    return cases;
}

int main(int argc, char **argv)
{
    const std::vector<BlockedPlan> plans = blocked_plans();
    int run_cases = 0;
    for (const Case &c : all_cases(plans))
        if (!is_plain(c) && (argc < 2 || c.name.find(argv[1]) != std::string::npos)) run(c), run_cases++;
    printf("%s: %d comparisons in %d cases, %d failed; worst output %.1e of the largest\n",
           failures ? "FAILED" : "passed", checks, run_cases, failures, worst_of_all);
    return failures || !run_cases ? 1 : 0; // a filter that names no case has checked nothing
}
