// Compares appending, rotating, dequantising and merging on the device with the C core, byte for byte; times appending.
//
//   make harness && build/cuda-harness/append_harness [check] [moments] [searches] [wide] [time]   moments ..: these checks alone
#include "blocked_plans.h"
#include "cuda/tile/quantize.cuh"
#include "moments.h"

static int failures = 0, checks = 0;

/** Checks that bytes are equal. loose: of a plan with a matrix, a wave or a metric, whose codes have a tolerance
 *  (tests/tolerance.py checks that), one byte in `loose` may differ, or 64 if that is more. */
static bool same(const std::string &name, const char *what, const void *want, const void *got, size_t bytes,
                 int loose = 0)
{
    checks++;
    if (!memcmp(want, got, bytes)) return true;
    size_t at = 0, different = 0;
    for (size_t i = bytes; i-- > 0;)
        if (((const uint8_t *)want)[i] != ((const uint8_t *)got)[i]) at = i, different++;
    if (loose && different <= std::max<size_t>(64, bytes / loose)) return true;
    if (failures++ < 30)
        printf("FAILED: %s: %s differs in %zu of %zu bytes, first at %zu\n", name.c_str(), what, different, bytes, at);
    return false;
}

/** Checks that numbers of rows of `dim` differ by at most `limit` of the row's largest, as sums in another order do.
 *  Numbers that are not finite in `want` are not compared. */
static void near(const std::string &name, const char *what, const std::vector<float> &want,
                 const std::vector<float> &got, int dim, float limit)
{
    checks++;
    for (size_t row = 0; row < want.size(); row += dim) {
        float most = 0;
        for (int i = 0; i < dim; i++) most = fmaxf(most, fabsf(want[row + i]));
        for (int i = 0; i < dim; i++)
            if (std::isfinite(want[row + i]) && !(fabsf(want[row + i] - got[row + i]) <= limit * most)) {
                if (failures++ < 30) printf("FAILED: %s: %s is off at %zu\n", name.c_str(), what, row + i);
                return;
            }
    }
}

// ---- append ----

/** Appends to one cache. The first has `padding` tokens fewer for each sequence. */
struct Case {
    std::string name;
    int dim = 128, batch = 2, heads = 2, sinks = 4, window = 16, page_tokens = 128, max_pages = 3;
    int rotation = TQ_ROTATION_HADAMARD, law = TQ_CODEBOOK_NORMAL, scale = TQ_SCALE_EDEN, dtype = TQ_BF16;
    int group = TQ_TILE;       // or 16
    int pairs = 0, metric = 0; // pairs of a wave; 1 + the metric's rank, or 0
    int tries = 0;
    bool neighbours = false; // the wave's pairs are channels 2 i and 2 i + 1, not i and i + dim / 2
    std::vector<int> key_bits = {4}, value_bits = {4}, appends = {70, 1, 1, 5, 33, 1};
    const BlockedPlan *blocked = nullptr; // a plan that is not plain, in place of rotation, law, scale and bits
    std::vector<int> padding = {0, 3};
    bool tokens_first = false; // k and v are [batch, tokens, heads, dim], as projections make them
    bool centred = false, stepped = false, shared_matrix = false;
    int bad_numbers = 0; // in each append
    bool bad_pages = false, bad_lengths = false;
    int shift = 0; // k and v start so many bytes behind where cudaMalloc puts them
    int rows = -1; // kind of fill_hard_rows; -1: fill_rows
};

static tq_plan plan_of(const Case &c)
{
    if (c.blocked) return plan_of(words_of(*c.blocked, c.dim, c.page_tokens));
    return make_plan(c.dim, c.page_tokens, c.rotation, c.law, c.scale, c.key_bits, c.value_bits, c.group, c.pairs,
                     c.metric, c.tries);
}

struct Side {
    const tq_side &plan;
    Array<uint8_t> sinks, ring;
    Array<float> matrix, numbers; // numbers: after fill_side
    std::vector<float> centre, steps, moments;
    Side(const tq_side &side, size_t sinks_bytes, size_t ring_bytes, size_t matrix_floats, size_t centre_floats,
         size_t steps_floats, const std::vector<float> &moments_, int heads)
        : plan(side), sinks(sinks_bytes), ring(ring_bytes), matrix(matrix_floats),
          numbers(centre_floats + (steps_floats / heads + 3) / 4 * 4 * heads + moments_.size()), centre(centre_floats),
          steps(steps_floats), moments(moments_)
    {
    }
};

static tq_transform transform_of(Side &side, const tq_plan &plan, const Case &c, bool device)
{
    tq_transform t = {};
    t.rotation = device ? side.matrix.or_null() : side.matrix.host_or_null();
    t.rotation_stride_head = c.shared_matrix ? 0 : (int64_t)side.plan.matrix_rows * c.dim;
    use_numbers(plan, &side.plan == &plan.value, c.heads, side.numbers.host.size(),
                device ? side.numbers.or_null() : side.numbers.host_or_null(), &t);
    return t;
}

static void fill_side(Side &side, const Case &c, Random &random)
{
    const bool has_table = side.plan.levels == TQ_LEVELS_TABLE;
    const size_t matrix = (size_t)side.plan.matrix_rows * c.dim, table = has_table ? side.plan.step_columns : 0;
    for (size_t i = 0; i < side.matrix.host.size(); i += matrix)
        fill_matrix(&side.matrix.host[i], side.plan, c.dim, random);
    for (float &x : side.centre) x = random.normal();
    for (float &x : side.steps) x = expf(random.normal());
    for (size_t i = 0; table && i < side.steps.size(); i += table) fill_table(&side.steps[i], side.plan, random);
    for (uint8_t &x : side.sinks.host) x = 0;
    for (uint8_t &x : side.ring.host) x = 0;
    const std::vector<float> joined = join_numbers(c.heads, side.centre, side.steps, side.moments);
    std::copy(joined.begin(), joined.end(), side.numbers.host.begin());
    side.matrix.up(), side.numbers.up(), side.sinks.up(), side.ring.up();
}

/** Puts bad numbers into the device's k (or v), and what the contract stores for them into the host's. Adds flags. */
static void spoil(Array<uint8_t> &x, int count, const Case &c, int tokens, const int32_t *lengths, bool is_value,
                  Random &random, std::vector<int64_t> &flags)
{
    std::vector<uint8_t> mended = x.host;
    for (int i = 0; i < count; i++) {
        const int b = random.below(c.batch), h = random.below(c.heads), t = random.below(tokens),
                  channel = random.below(c.dim);
        const size_t row =
            c.tokens_first ? ((size_t)b * tokens + t) * c.heads + h : ((size_t)b * c.heads + h) * tokens + t;
        const float values[] = {NAN, INFINITY, -INFINITY, 20000.0f, -32768.0f}, bad = values[random.below(5)];
        store(x.host, row * c.dim + channel, c.dtype, bad);
        store(mended, row * c.dim + channel, c.dtype, isfinite(bad) ? copysignf(TQ_MAX_INPUT, bad) : 0.0f);
        const int64_t position = (int64_t)lengths[b] - tokens + t;
        if (position >= 0) flags.push_back(1 + position + ((int64_t)b << 32) + ((int64_t)is_value << 62));
    }
    x.up();
    x.host = mended; // the core refuses bad numbers
}

/** So many rows are made; further rows repeat them. A prime, so that no pattern of tiles repeats. */
constexpr size_t MADE_ROWS = 65537;

static void run(const Case &c)
{
    Random random(c.dim * 1000003 + c.scale * 101 + c.key_bits[0] * 7 + c.window + c.appends[0]);
    const tq_plan plan = plan_of(c);
    const bool values = plan.value.tile_bytes;
    const int64_t bytes = dtype_size(c.dtype), row = c.dim * bytes, rows = (int64_t)c.batch * c.heads;
    const int64_t n_pages = (int64_t)c.batch * c.max_pages + 2,
                  capacity = c.sinks + c.window + c.max_pages * c.page_tokens;
    std::mt19937 seed(c.dim);
    const Moments moments({c.dim, c.heads, c.pairs, c.metric, 5.0f, c.neighbours}, plan, seed);
    auto make_side = [&](bool is_value) {
        const bool any = !is_value || values;
        const tq_side &side = is_value ? plan.value : plan.key;
        return new Side(side, any ? rows * c.sinks * row : 0, any ? rows * c.window * row : 0,
                        (size_t)side.matrix_rows * c.dim * (c.shared_matrix ? 1 : c.heads),
                        any && c.centred ? (size_t)c.heads * c.dim : 0,
                        any && (c.stepped || c.blocked) ? (size_t)c.heads * side.step_columns : 0,
                        is_value ? std::vector<float>() : moments.numbers, c.heads);
    };
    Side *sides[2] = {make_side(false), make_side(true)};
    for (Side *side : sides) fill_side(*side, c, random);
    Array<int32_t> turns(moments.turns.size());
    std::copy(moments.turns.begin(), moments.turns.end(), turns.host.begin());
    turns.up();

    // Pages start with random bytes: what is not written has to stay.
    Array<uint8_t> pages(n_pages * c.heads * plan.record_bytes);
    for (uint8_t &x : pages.host) x = (uint8_t)random.word();
    pages.up();
    const std::vector<uint8_t> untouched = pages.host;
    Array<int32_t> table((size_t)c.batch * c.max_pages), lengths(c.batch);
    std::vector<int32_t> order(n_pages - 2);
    for (size_t i = 0; i < order.size(); i++) order[i] = (int32_t)i;
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random.below((int)i)]);
    for (size_t i = 0; i < order.size(); i++) table.host[i] = order[i];
    Array<int64_t> flag(1);
    flag.up();

    bool first = true;
    for (int tokens : c.appends) {
        for (int b = 0; b < c.batch; b++) {
            lengths.host[b] += tokens - (first ? std::min(tokens, c.padding[b % c.padding.size()]) : 0);
            if (lengths.host[b] > capacity) printf("FAILED: %s overflows its pages\n", c.name.c_str()), exit(1);
        }
        first = false;
        const std::vector<int32_t> true_lengths = lengths.host, true_table = table.host;
        std::vector<int32_t> device_lengths = true_lengths, device_table = true_table;
        if (c.bad_lengths) device_lengths[0] = -7, lengths.host[0] = 0;
        if (c.bad_pages)
            for (size_t i = 0; i < device_table.size(); i += 2) {
                device_table[i] = i % 4 ? (int32_t)n_pages + 5 : -3;
                table.host[i] = (int32_t)(n_pages - 1 - i % 4 / 2); // the core writes to a page that is not compared
            }
        std::swap(lengths.host, device_lengths), std::swap(table.host, device_table);
        lengths.up(), table.up();
        std::swap(lengths.host, device_lengths), std::swap(table.host, device_table);

        Array<uint8_t> k(rows * tokens * row), v(values ? rows * tokens * row : 0);
        for (Array<uint8_t> *x : {&k, &v}) {
            if (x->host.empty()) continue;
            const size_t all = x->host.size(), made = std::min<size_t>(rows * tokens, MADE_ROWS);
            if (c.rows < 0) fill_rows(x->host, made, c.dim, c.dtype, random);
            else fill_hard_rows(x->host, made, c.dim, c.dtype, c.rows, random);
            for (size_t at = made * row; at < all; at += made * row)
                memcpy(&x->host[at], x->host.data(), std::min(made * row, all - at));
        }
        k.up(), v.up();
        std::vector<int64_t> flags;
        if (c.bad_numbers) spoil(k, c.bad_numbers, c, tokens, true_lengths.data(), false, random, flags);
        if (c.bad_numbers && values) spoil(v, c.bad_numbers, c, tokens, true_lengths.data(), true, random, flags);

        for (Array<uint8_t> *x : {&k, &v}) { // Array has room behind its numbers
            const std::vector<uint8_t> numbers = x->down();
            if (c.shift && !numbers.empty())
                check(cudaMemcpy(x->device + c.shift, numbers.data(), numbers.size(), cudaMemcpyHostToDevice), "shift");
        }

        tq_append_params p = {};
        p.layer.batch = c.batch, p.tokens = tokens, p.layer.kv_heads = c.heads, p.layer.sinks = c.sinks,
        p.layer.window = c.window, p.layer.max_pages = c.max_pages;
        p.layer.dtype = c.dtype, p.layer.n_pages = n_pages;
        p.k_stride_batch = p.v_stride_batch = (int64_t)c.heads * tokens * c.dim;
        p.k_stride_head = p.v_stride_head = c.tokens_first ? c.dim : (int64_t)tokens * c.dim;
        p.k_stride_token = p.v_stride_token = c.tokens_first ? (int64_t)c.heads * c.dim : c.dim;
        tq_append_params d = p;
        p.k = k.host_or_null(), p.v = v.host_or_null(), p.layer.lengths = lengths.host.data(),
        p.layer.block_table = table.host.data();
        p.layer.sink_k = sides[0]->sinks.host_or_null(), p.layer.sink_v = sides[1]->sinks.host_or_null();
        p.layer.window_k = sides[0]->ring.host_or_null(), p.layer.window_v = sides[1]->ring.host_or_null();
        p.layer.key = transform_of(*sides[0], plan, c, false), p.layer.value = transform_of(*sides[1], plan, c, false);
        void *aligned = aligned_alloc(64, (pages.bytes() + 63) / 64 * 64); // the core wants pages aligned
        memcpy(aligned, pages.host.data(), pages.bytes());
        p.layer.pages = (uint8_t *)aligned;
        d.k = k.device + c.shift, d.v = values ? v.device + c.shift : nullptr, d.layer.lengths = lengths.device,
        d.layer.block_table = table.device, d.layer.pages = pages.device;
        d.layer.sink_k = sides[0]->sinks.or_null(), d.layer.sink_v = sides[1]->sinks.or_null();
        d.layer.window_k = sides[0]->ring.or_null(), d.layer.window_v = sides[1]->ring.or_null();
        d.layer.key = transform_of(*sides[0], plan, c, true), d.layer.value = transform_of(*sides[1], plan, c, true);
        p.layer.key.turns = turns.host_or_null(), d.layer.key.turns = turns.or_null();

        tq_error error;
        size_t workspace_bytes;
        check(tq_append_workspace_bytes(&plan, &p, &workspace_bytes, &error), error, "tq_append_workspace_bytes");
        void *workspace = aligned_alloc(64, (workspace_bytes + 63) / 64 * 64);
        check(tq_append(&plan, &p, workspace, workspace_bytes, &error), error, (c.name + ": tq_append").c_str());
        free(workspace);
        memcpy(pages.host.data(), aligned, pages.bytes());
        free(aligned);
        check(tq_cuda_append(&plan, &d, flag.device, nullptr, &error), error, (c.name + ": tq_cuda_append").c_str());
        check(cudaDeviceSynchronize(), c.name.c_str());

        const std::string name = c.name + ", append of " + std::to_string(tokens);
        const size_t compared = (size_t)(n_pages - 2) * c.heads * plan.record_bytes;
        const bool equal = !plan.key.matrix_rows && !plan.value.matrix_rows && !plan.moments;
        // With tries, a row may also have another factor, and so other codes.
        bool good = same(name, "pages", pages.host.data(), pages.down().data(), compared,
                         equal        ? 0
                         : plan.tries ? 25
                                      : 200);
        good &= same(name, "page never named", untouched.data() + compared, pages.down().data() + compared,
                     pages.bytes() - compared);
        for (Side *side : sides) {
            good &= same(name, "sinks", side->sinks.host.data(), side->sinks.down().data(), side->sinks.bytes());
            good &= same(name, "window", side->ring.host.data(), side->ring.down().data(), side->ring.bytes());
        }
        const int64_t got_flag = flag.down()[0];
        bool named = flags.empty() && !got_flag;
        for (int64_t f : flags) named |= f == got_flag;
        checks++;
        if (!named && failures++ < 30) printf("FAILED: %s: the flag is %lx\n", name.c_str(), (long)got_flag);
        flag.up();
        lengths.host = true_lengths, table.host = true_table;
        if (!good) break;
        if (c.bad_lengths || c.bad_pages) break; // the two sides differ from here on
    }
    delete sides[0];
    delete sides[1];
}

static const int DIMS[] = {8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 120, 128, 136, 160, 192, 248, 256};

static std::vector<int> mixed_bits(int groups, bool any, Random &random)
{
    std::vector<int> bits;
    for (int g = 0; g < groups; g++) bits.push_back(random.below(any ? 8 : 5));
    for (int &b : bits)
        if (b == 7) b = TQ_WIDE_BITS;
    bits[random.below(groups)] = 3;
    return bits;
}

static void check_appends(int thin)
{
    Random random(5);
    int n = 0;
    auto go = [&](Case c, const std::string &name) {
        c.name = name + ", dim " + std::to_string(c.dim) + ", bits " + std::to_string(c.key_bits[0]) + "/" +
                 std::to_string(c.value_bits[0]) + ", scale " + std::to_string(c.scale) + ", dtype " +
                 std::to_string(c.dtype) + ", rotation " + std::to_string(c.rotation) + ", sinks " +
                 std::to_string(c.sinks) + ", window " + std::to_string(c.window);
        if (n++ % thin == 0) run(c);
    };
    // every width x head_dim x scale, laws and dtypes in turn
    const int widths[] = {1, 2, 3, 4, 5, 6, 8};
    for (int dim : DIMS)
        for (int i = 0; i < 7; i++)
            for (int scale = 0; scale < 4; scale++) {
                const int bits = widths[i];
                Case c;
                c.dim = dim, c.key_bits = {bits}, c.value_bits = {widths[6 - i]}, c.scale = scale;
                c.law = (bits + scale) % 2, c.dtype = (bits + scale + dim / 8) % 3, c.tokens_first = scale % 2;
                c.appends = {61, 1, 36, 3, 1};
                go(c, "width x dim x scale");
            }
    for (int dim : DIMS)
        for (int i = 0; i < 8; i++) { // mixed plans, up to 4 bits and of any; rotations, centres and steps
            Case c;
            c.dim = dim, c.rotation = i % 4 == 3   ? (int)TQ_ROTATION_DENSE
                                      : i % 4 == 2 ? (int)TQ_ROTATION_NONE
                                                   : (int)TQ_ROTATION_HADAMARD;
            c.key_bits = mixed_bits((dim + 31) / 32, i % 2, random),
            c.value_bits = mixed_bits((dim + 31) / 32, i % 2, random);
            c.centred = i & 1 || i == 4, c.stepped = i & 2, c.shared_matrix = i == 7, c.dtype = 2 - i % 3,
            c.scale = i % 2 * (i / 2);
            c.appends = {33, 1, 2, 95, 1};
            go(c, "mixed plan");
        }
    for (int sinks : {0, 1, 4, 40}) // windows, sinks, padding, pages
        for (int window : {0, 1, 7, 32, 100})
            for (int pages : {32, 96, 128}) {
                Case c;
                c.dim = window % 2 ? 128 : 64, c.sinks = sinks, c.window = window, c.page_tokens = pages,
                c.max_pages = 1 + 400 / pages;
                c.batch = 4, c.padding = {0, 1, 29, 150}, c.appends = {40, 1, 1, 31, 130, 1, 32, 64, 1, 12, 33};
                c.key_bits = {3}, c.value_bits = {2 + window % 3}, c.heads = 1, c.tokens_first = pages == 96;
                go(c, "geometry");
            }
    for (int dim : {64, 80, 128, 256, 112}) // keys alone; bad numbers; bad pages; bad lengths
        for (int i = 0; i < 8; i++) {
            Case c;
            c.dim = dim, c.key_bits = {1 + i % 4}, c.value_bits = {i < 2 ? 0 : 4 - i % 3},
            c.bad_numbers = i < 2   ? 0
                            : i < 5 ? 1 + i % 2
                                    : 0;
            c.bad_pages = i == 5, c.bad_lengths = i == 6, c.window = i % 3 * 8, c.sinks = i % 2 * 2, c.centred = i % 2,
            c.stepped = i == 4;
            c.dtype = i == 3 ? TQ_F16 : TQ_BF16;
            c.appends = i == 5 ? std::vector<int>{300} : std::vector<int>{50, 1, 9, 70};
            go(c, i < 2    ? "keys alone"
                  : i < 5  ? "bad numbers"
                  : i == 5 ? "bad pages"
                  : i == 6 ? "bad length"
                           : "plain");
        }
}

/** Checks thousands of tokens, as in prompts: widths x laws, scales, dtypes, and tiles that are part-filled; then rows
 *  whose sums round, cancel, tie or are exact. A warp of append_prefill has one or two tiles of a side. */
static void check_many_appends(int thin)
{
    for (int i = 0; i < 24; i += thin) {
        Case c;
        c.batch = 3, c.heads = 4, c.key_bits = {1 + i % 4}, c.value_bits = {1 + (i + i / 4) % 4};
        c.scale = i % 5 == 4 ? TQ_SCALE_NORM : TQ_SCALE_EDEN, c.law = i / 2 % 2, c.dtype = i % 3 ? TQ_BF16 : TQ_F16;
        c.centred = i % 4 == 1, c.sinks = i % 4 == 3 ? 5 : 0, c.window = i % 5 == 2 ? 33 : 0, c.tokens_first = i % 2;
        c.page_tokens = i % 3 == 1 ? 96 : 128, c.padding = {0, 3, 1150}, c.bad_numbers = i % 7 == 6 ? 3 : 0;
        c.appends = {50 + 13 * i, 5000, 3};
        c.max_pages = 6000 / c.page_tokens;
        c.name = "many tokens, bits " + std::to_string(c.key_bits[0]) + "/" + std::to_string(c.value_bits[0]) +
                 ", case " + std::to_string(i);
        run(c);
    }
    for (int i = 0; i < HARD_ROWS * 4; i += thin) {
        Case c;
        c.batch = 2, c.heads = 4, c.key_bits = {1 + i % 4}, c.value_bits = {1 + i % 4}, c.rows = i / 4;
        c.dtype = i / 2 % 2 ? TQ_F16 : TQ_BF16, c.law = i % 2, c.centred = i % 3 == 2, c.appends = {6000};
        c.dim = i % 7 == 2 ? 64 : i % 7 == 5 ? 256 : 128;
        if (i % 5 == 3) c.key_bits = {4, 1, 3, 2}, c.value_bits = {2, 2, 3}; // one group after the other, and again
        c.sinks = c.window = 0, c.max_pages = 47;
        c.name = "hard rows " + std::to_string(c.rows) + ", bits " + std::to_string(c.key_bits[0]);
        run(c);
    }
}

/** Checks so many tokens that each warp of append_prefill takes several neighbouring tiles of a side, on up to 144
 *  multiprocessors; in the last case more than 32 tiles. */
static void check_long_appends(int thin)
{
    for (int i = 0; i < 10; i += thin) {
        Case c;
        c.dim = i == 9 ? 256 : 64 << i % 3, c.batch = 1, c.heads = i == 9 ? 1 : 8;
        c.key_bits = {4 - i % 4}, c.value_bits = {1 + (i + i / 4) % 4};
        if (i % 4 == 3) c.key_bits = {4, 3}, c.value_bits = {2, 1};
        if (i == 9) c.value_bits = {0};
        c.dtype = i / 3 % 2 ? TQ_F16 : TQ_BF16, c.centred = i % 2, c.tokens_first = i % 4 == 1;
        c.padding = {i % 5}, c.sinks = i % 3, c.window = i == 4 ? 33 : 0;
        c.appends = {i == 9 ? 1200000 : 2900000 / c.dim};
        c.max_pages = c.appends[0] / c.page_tokens + 1;
        c.name = "long, dim " + std::to_string(c.dim) + ", case " + std::to_string(i);
        run(c);
    }
}

/** Checks keys with a wave and a metric: part-filled token tiles and pages, single tokens, and so many tokens that a
 *  warp starts its wave anew (residual_rows.cuh). */
static void check_moments(int thin)
{
    int n = 0;
    const auto go = [&](Case c, const char *what) {
        c.name = std::string("moments, ") + what + ", dim " + std::to_string(c.dim) + ", bits " +
                 std::to_string(c.key_bits[0]) + ", pairs " + std::to_string(c.pairs) + ", metric " +
                 std::to_string(c.metric) + (c.neighbours ? ", neighbours" : "");
        if (n++ % thin == 0) run(c);
    };
    for (int dim : {64, 80, 96, 128, 256})
        for (int i = 0; i < 8; i++) {
            Case c;
            c.dim = dim,
            c.pairs = i == 3   ? 0
                      : i == 5 ? 8
                               : dim / 16 * 8,
            c.metric = i == 2  ? 0
                       : i % 3 ? 5
                               : 1 + i / 3;
            c.neighbours = i % 2, c.dtype = i % 4 == 3 ? TQ_F16 : TQ_BF16, c.centred = i % 3 == 1,
            c.tokens_first = i == 4;
            c.key_bits = {4 - i % 3}, c.value_bits = {2 + i % 3}, c.sinks = i % 4, c.window = i == 6 ? 33 : 0;
            c.appends = {700, 1, 33, 150, 1}, c.max_pages = 8;
            go(c, "a prompt and tokens");
        }
    for (int dim : {64, 128, 256}) {
        Case c;
        c.dim = dim, c.pairs = dim / 2, c.metric = 5, c.neighbours = dim == 256, c.batch = 1, c.heads = 8,
        c.padding = {3};
        c.appends = {(dim == 256 ? 3000000 : 6000000) / dim}, c.max_pages = c.appends[0] / c.page_tokens + 1;
        go(c, "long");
    }
}

/** Checks single tokens through more than two token tiles, so that each place is written beside tokens that are there
 *  already: with widths that append_one_token is compiled for (three of five cases), and others. */
static void check_single_appends(int thin)
{
    int n = 0;
    for (int dim : {64, 128, 256})
        for (int i = 0; i < 12; i++) {
            Case c;
            c.dim = dim, c.key_bits = {1 + i % 5}, c.value_bits = {i == 7 ? 0 : 2 + i % 3}, c.law = i / 2 % 2;
            c.dtype = i % 2 ? TQ_F16 : TQ_BF16, c.centred = i % 3 == 1, c.sinks = i % 4 == 2 ? 3 : 0;
            c.window = i % 5 == 3 ? 20 : i % 5 == 1 ? 1 : 0, c.padding = {0, 37}, c.tokens_first = i % 2;
            c.bad_numbers = i % 6 == 5, c.page_tokens = i % 4 == 3 ? 32 : 128, c.max_pages = 4;
            c.rows = i >= 8 ? i % HARD_ROWS : -1;
            c.appends = std::vector<int>(80, 1);
            c.name = "single tokens, dim " + std::to_string(dim) + ", bits " + std::to_string(c.key_bits[0]) + "/" +
                     std::to_string(c.value_bits[0]) + ", case " + std::to_string(i);
            if (n++ % thin == 0) run(c);
        }
}

/** Checks groups of 16 channels: widths, and part-filled tiles, pairs of token tiles and pages. */
static void check_fine_appends(int thin)
{
    static const int one_width[][2] = {{1, 8}, {2, 5}, {3, 4}, {4, 3}, {8, 8}, {5, 2}, {8, 1}};
    Random random(7);
    int n = 0;
    auto go = [&](Case c, const std::string &name) {
        c.group = TQ_FINE_GROUP;
        c.name = "groups of 16, " + name + ", dim " + std::to_string(c.dim) + ", scale " + std::to_string(c.scale) +
                 ", dtype " + std::to_string(c.dtype) + ", rotation " + std::to_string(c.rotation) + ", sinks " +
                 std::to_string(c.sinks) + ", window " + std::to_string(c.window);
        if (n++ % thin == 0) run(c);
    };
    for (int dim : DIMS)
        for (int i = 0; i < 14; i++) { // one width, then mixed ones
            Case c;
            const int groups = (dim + 15) / 16;
            c.dim = dim, c.rotation = i % 4 == 3   ? (int)TQ_ROTATION_DENSE
                                      : i % 4 == 2 ? (int)TQ_ROTATION_NONE
                                                   : (int)TQ_ROTATION_HADAMARD;
            c.key_bits = i < 7 ? std::vector<int>{one_width[i][0]} : mixed_bits(groups, true, random);
            c.value_bits = i < 7 ? std::vector<int>{one_width[i][1]} : mixed_bits(groups, true, random);
            c.centred = i % 2, c.stepped = i % 3 == 2, c.shared_matrix = i == 7, c.dtype = (i + dim / 8) % 3;
            c.scale = i % 5 % 4, c.law = i % 2, c.tokens_first = i % 4 == 1, c.page_tokens = i % 2 ? 64 : 128;
            c.appends = {61, 1, 36, 3, 1, 65, 1};
            go(c, "plan x dim");
        }
    int single = 0;
    for (int dim : {64, 128, 256}) // what append_one_token compiles for with groups of 32
        for (const auto &bits : {std::pair<int, int>{4, 4}, {3, 2}, {2, 3}, {4, 0}}) {
            Case c;
            c.dim = dim, c.key_bits = {bits.first}, c.value_bits = {bits.second},
            c.dtype = single++ % 2 ? TQ_F16 : TQ_BF16;
            c.centred = single % 3 == 1, c.window = single % 3 == 2 ? 20 : 0, c.padding = {0, 37}, c.max_pages = 2;
            c.appends = std::vector<int>(150, 1);
            go(c, "single tokens, bits " + std::to_string(bits.first) + "/" + std::to_string(bits.second));
        }
    for (int window : {0, 7, 32, 100}) // every token by itself through two tiles, then many at once
        for (int page_tokens : {64, 128}) {
            Case c;
            c.dim = window % 2 ? 128 : 80, c.heads = 1, c.batch = 4, c.sinks = window % 3, c.window = window;
            c.page_tokens = page_tokens, c.max_pages = 1 + 700 / page_tokens, c.padding = {0, 1, 29, 150};
            c.key_bits = {3, 8, 5, 0, 1, 2}, c.value_bits = {1, 5, 0, 8, 2, 4};
            c.appends = {150, 31, 64, 2, 130, 33, 128};
            c.appends.insert(c.appends.begin() + 1, 130, 1);
            go(c, "geometry");
        }
    for (int i = 0; i < 5; i++) {
        Case c;
        c.dim = 80, c.key_bits = {3, 4, 8}, c.value_bits = i == 0 ? std::vector<int>{0} : std::vector<int>{8, 2, 5};
        c.bad_numbers = i == 1 ? 2 : 0, c.bad_pages = i == 2, c.bad_lengths = i == 3, c.centred = i == 4;
        c.max_pages = 1 + 400 / c.page_tokens;
        c.appends = i == 2 ? std::vector<int>{300} : std::vector<int>{50, 1, 9, 70};
        go(c, i == 0 ? "keys alone" : i == 1 ? "bad numbers" : i == 2 ? "bad pages" : i == 3 ? "bad length" : "plain");
    }
}

/** Checks prompts of thousands of tokens with head_dim 80 and 96, uniform codebooks through every kernel, and rows that
 *  may not be copied 16 bytes at a time. */
static void check_other_appends(int thin)
{
    int n = 0;
    auto go = [&](Case c, const std::string &name) {
        c.name = name + ", dim " + std::to_string(c.dim) + ", bits " + std::to_string(c.key_bits[0]) + "/" +
                 std::to_string(c.value_bits[0]) + ", dtype " + std::to_string(c.dtype) + ", group " +
                 std::to_string(c.group) + ", pages of " + std::to_string(c.page_tokens);
        if (n++ % thin == 0) run(c);
    };
    for (int i = 0; i < 8; i++) {
        Case c;
        c.dim = i % 2 ? 96 : 80, c.batch = 2, c.heads = 8, c.key_bits = {1 + i / 2}, c.value_bits = {4 - i / 2};
        if (i >= 6) c.key_bits = {4, 1, 3}, c.value_bits = {2, 3, 1};
        c.dtype = i / 2 % 2 ? TQ_F16 : TQ_BF16, c.centred = i % 4 > 1 || i == 1, c.tokens_first = i % 3 == 1;
        c.page_tokens = i % 3 == 0 ? 96 : i % 3 == 1 ? 128 : 32, c.sinks = i % 2, c.window = i == 4 ? 40 : 0;
        c.rows = i >= 4 ? i % HARD_ROWS : -1, c.scale = i == 2 ? TQ_SCALE_NORM : TQ_SCALE_EDEN, c.law = i % 3;
        c.bad_numbers = i == 3 ? 3 : 0, c.padding = {0, 1000}, c.appends = {50, 14500, 3};
        c.max_pages = 15000 / c.page_tokens;
        go(c, "many tokens");
    }
    for (int dim : {64, 80, 96, 128, 256, 112})
        for (int i = 0; i < 8; i++) { // through every kernel of groups of 32 and of 16
            Case c;
            c.law = TQ_CODEBOOK_UNIFORM, c.dim = dim, c.group = i < 5 ? TQ_TILE : TQ_FINE_GROUP;
            c.key_bits = {1 + i % 5}, c.value_bits = {5 - i % 5}, c.dtype = 2 - i % 3;
            if (i == 3) c.key_bits = {4}, c.value_bits = {3}; // for append_prefill and append_one_token
            if (i == 7) c.key_bits = {8, 3, 5}, c.value_bits = {4, 0, 2};
            c.scale = i == 1 ? TQ_SCALE_NORM : TQ_SCALE_EDEN, c.centred = i % 2, c.appends = {70, 1, 1, 5, 150, 1};
            go(c, "uniform codebook");
        }
    for (int dim : {64, 80, 96, 128, 256})
        for (int dtype : {TQ_F16, TQ_BF16})
            for (int shift : {2, 8}) {
                Case c;
                c.dim = dim, c.dtype = dtype, c.shift = shift, c.key_bits = {4}, c.value_bits = {3};
                c.centred = shift == 8, c.appends = {70, 1, 20, 150, 1};
                go(c, "rows " + std::to_string(shift) + " bytes further");
            }
}

#include "append_searches.h"
#include "append_wide.h"

/** Checks every plan that is not plain x head_dim, other geometries, and bad arguments. */
static void check_blocked_appends(int thin)
{
    static std::vector<BlockedPlan> plans = blocked_plans();
    plans.push_back({"keys alone", {{3}, 1, TQ_ROTATION_DENSE, TQ_LEVELS_AFFINE, TQ_SKETCH_GAUSSIAN}, {{}}});
    int n = 0;
    auto go = [&](Case c, const BlockedPlan &plan, const std::string &name) {
        c.blocked = &plan, c.max_pages = 1 + 400 / c.page_tokens;
        c.name = name + " \"" + plan.name + "\", dim " + std::to_string(c.dim) + ", dtype " + std::to_string(c.dtype) +
                 ", sinks " + std::to_string(c.sinks) + ", window " + std::to_string(c.window);
        if (n++ % thin == 0) run(c);
    };
    for (const BlockedPlan &plan : plans) {
        for (int dim : DIMS) {
            Case c;
            c.dim = dim, c.dtype = (dim / 8 + (int)plan.name.size()) % 3, c.tokens_first = dim % 3 == 0;
            c.centred = dim % 16 == 0, c.shared_matrix = dim == 64, c.appends = {61, 1, 36, 3, 1};
            go(c, plan, "plan x dim");
        }
        for (int window : {0, 7, 100}) {
            Case c;
            c.dim = window ? 80 : 128, c.heads = 1, c.batch = 4, c.sinks = window % 5, c.window = window;
            c.page_tokens = window == 7 ? 96 : 32, c.padding = {0, 1, 29, 150};
            c.appends = {40, 1, 1, 31, 130, 1, 32, 64, 1};
            go(c, plan, "geometry");
        }
        for (int i = 0; i < 3; i++) {
            Case c;
            c.dim = 64, c.bad_numbers = 2 * (i == 0), c.bad_pages = i == 1, c.bad_lengths = i == 2, c.centred = true;
            c.appends = i == 1 ? std::vector<int>{300} : std::vector<int>{50, 1, 9, 70};
            go(c, plan, i == 0 ? "bad numbers" : i == 1 ? "bad pages" : "bad length");
        }
    }
}

// ---- the others ----

/** Checks ranks at and beside thresholds. Codebooks up to 5 bits have cells; up to 4 bits, one comparison decides. */
static void check_books()
{
    for (int law = 0; law < 3; law++)
        for (int dim = 8; dim <= 256; dim += 8)
            for (int bits = 1; bits <= 5; bits++) {
                tq_codebook from;
                tq::Book book;
                tq_error error;
                check(tq_get_codebook((tq_codebook_law)law, dim, bits, &from, &error), error, "tq_get_codebook");
                bool good = tq::make_book(from, &book) && (bits == 5 || book.compares == 1);
                auto rank_is_right = [&](float u) {
                    int want = 0;
                    for (int k = 0; k + 1 < from.n_levels; k++) want += from.thresholds[k] <= u;
                    int got = (int)rintf(fminf(fmaxf(fmaf(u, book.per_cell, 0.5f), 0.0f), 1.0f) * (float)book.cells);
                    const int cell = got;
                    for (int i = 0; i < book.compares; i++) got += book.thresholds[cell + i] <= u;
                    return want == got;
                };
                for (float u = -20.0f; good && u < 20.0f; u += 0.001f) good = rank_is_right(u);
                for (int k = 0; good && k + 1 < from.n_levels; k++)
                    for (float toward : {-INFINITY, INFINITY})
                        good &=
                            rank_is_right(from.thresholds[k]) && rank_is_right(nextafterf(from.thresholds[k], toward));
                checks++;
                if (!good && failures++ < 30) printf("FAILED: cells of law %d, dim %d, %d bits\n", law, dim, bits);
            }
}

static void check_rotations()
{
    Random random(9);
    for (int dim : all_dims())
        for (int rotation = 0; rotation < 3; rotation++)
            for (int dtype = 0; dtype < 3; dtype++)
                for (int inverse = 0; inverse < 2; inverse++) {
                    const tq_plan plan = make_plan(dim, 128, rotation, 0, 0, {4}, {4});
                    const int rows = 37;
                    const std::string name = "rotate, dim " + std::to_string(dim) + ", rotation " +
                                             std::to_string(rotation) + ", dtype " + std::to_string(dtype) +
                                             (inverse ? ", inverse" : "");
                    Array<float> matrix(rotation == TQ_ROTATION_DENSE ? (size_t)dim * dim : 0);
                    for (float &m : matrix.host) m = random.normal();
                    matrix.up();
                    Array<uint8_t> x((size_t)rows * dim * dtype_size(dtype)), y(x.host.size());
                    fill_rows(x.host, rows, dim, dtype, random);
                    x.up();
                    std::vector<float> in(rows * dim), out(rows * dim);
                    for (size_t i = 0; i < in.size(); i++) in[i] = load(x.host, i, dtype);
                    tq_error error;
                    check(tq_rotate(&plan, matrix.host_or_null(), inverse, in.data(), out.data(), rows, &error), error,
                          "tq_rotate");
                    for (size_t i = 0; i < out.size(); i++) store(y.host, i, dtype, out[i]);
                    const bool in_place = dtype == 1;
                    check(tq_cuda_rotate(&plan, matrix.or_null(), inverse, (tq_dtype)dtype, x.device,
                                         in_place ? x.device : y.device, rows, nullptr, &error),
                          error, "tq_cuda_rotate");
                    check(cudaDeviceSynchronize(), name.c_str());
                    if (rotation == TQ_ROTATION_DENSE) {
                        std::vector<float> want(out.size()), got(out.size());
                        const std::vector<uint8_t> bytes = (in_place ? x : y).down();
                        for (size_t i = 0; i < got.size(); i++)
                            want[i] = load(y.host, i, dtype), got[i] = load(bytes, i, dtype);
                        near(name, "y", want, got, dim, dtype == TQ_F32 ? 2e-6f : dtype == TQ_F16 ? 2e-3f : 2e-2f);
                        continue;
                    }
                    same(name, "y", y.host.data(), (in_place ? x : y).down().data(), y.bytes());
                }
}

static void check_dequantize()
{
    Random random(11);
    for (int dim : all_dims())
        for (int i = 0; i < (dim > 256 ? 6 : 12); i += dim > 256 ? 2 : 1) { // from 6 on: groups of 16; odd: sphere
            const int rotation = i % 3, group = i < 6 ? TQ_TILE : TQ_FINE_GROUP, groups = (dim + group - 1) / group;
            const int page_tokens = i < 6 ? 96 : 128, heads = 2, batch = 2, max_pages = 2, max_tokens = 150;
            const bool values = i % 6 != 4;
            const auto bits = [&] { return mixed_bits(groups, true, random); };
            const tq_plan plan =
                make_plan(dim, page_tokens, rotation, i % 2, 0, bits(), values ? bits() : std::vector<int>{0}, group);
            const std::string name = "dequantize, dim " + std::to_string(dim) + ", case " + std::to_string(i);
            Array<uint8_t> pages(5 * heads * plan.record_bytes);
            for (uint8_t &x : pages.host) x = (uint8_t)random.word();
            for (size_t at = 0; at < pages.host.size(); at += plan.record_bytes) // scales that are numbers
                for (const tq_side *side : {&plan.key, &plan.value})
                    for (int t = 0; t < (side->tile_bytes ? plan.page_tokens : 0); t++) {
                        const uint16_t half = tq_f16_from_f32(expf(random.normal()));
                        memcpy(&pages.host[at + side->scales_offset + 2 * t], &half, 2);
                    }
            Array<int32_t> table(batch * max_pages), counts(batch);
            table.host = {3, 0, 4, 1};
            counts.host = {i == 0 ? 0 : 97 + i, 150};
            std::vector<float> centre(i % 2 ? heads * dim : 0), steps(i % 6 > 2 ? heads * groups : 0);
            Array<float> matrix(rotation == 2 ? (size_t)heads * dim * dim : 0);
            for (std::vector<float> *a : {&matrix.host, &centre, &steps})
                for (float &x : *a) x = expf(random.normal());
            const std::vector<float> joined = join_numbers(heads, centre, steps);
            Array<float> numbers(joined.size());
            std::copy(joined.begin(), joined.end(), numbers.host.begin());
            matrix.up(), numbers.up();
            pages.up(), table.up(), counts.up();
            Array<float> k((size_t)batch * heads * max_tokens * dim), v(values ? k.host.size() : 0);
            auto transform = [&](bool device) {
                tq_transform t = {};
                t.rotation = device ? matrix.or_null() : matrix.host_or_null(), t.rotation_stride_head = dim * dim;
                use_numbers(plan, false, heads, joined.size(), device ? numbers.or_null() : numbers.host_or_null(), &t);
                return t;
            };
            void *aligned = aligned_alloc(64, (pages.bytes() + 63) / 64 * 64);
            memcpy(aligned, pages.host.data(), pages.bytes());
            tq_layer host = {}, device;
            host.batch = batch, host.kv_heads = heads, host.max_pages = max_pages, host.n_pages = 5;
            device = host;
            host.pages = (uint8_t *)aligned, host.block_table = table.host.data(), host.lengths = counts.host.data();
            device.pages = pages.device, device.block_table = table.device, device.lengths = counts.device;
            host.key = transform(false), device.key = transform(true);
            if (values) host.value = host.key, device.value = device.key;
            tq_error error;
            check(tq_dequantize(&plan, &host, max_tokens, k.host.data(), v.host_or_null(), &error), error,
                  "tq_dequantize");
            free(aligned);
            check(tq_cuda_dequantize(&plan, &device, max_tokens, TQ_F32, k.device, v.or_null(), nullptr, 0, nullptr,
                                     &error),
                  error, "tq_cuda_dequantize");
            check(cudaDeviceSynchronize(), name.c_str());
            if (rotation == TQ_ROTATION_DENSE) {
                near(name, "k", k.host, k.down(), dim, 2e-6f);
                near(name, "v", v.host, v.down(), dim, 2e-6f);
                continue;
            }
            same(name, "k", k.host.data(), k.down().data(), k.bytes());
            same(name, "v", v.host.data(), v.down().data(), v.bytes());
        }
}

static void check_merge()
{
    Random random(13);
    for (int dim : {1, 64, 100, 256})
        for (int parts : {1, 2, 5}) {
            const int rows = 33;
            Array<float> outs((size_t)parts * rows * dim), lses(parts * rows), out(rows * dim), lse(rows);
            for (float &x : outs.host) x = random.normal();
            for (float &x : lses.host) x = random.below(4) ? 5 * random.normal() : -INFINITY;
            outs.up(), lses.up();
            tq_error error;
            check(tq_merge(outs.host.data(), lses.host.data(), parts, rows, dim, out.host.data(), lse.host.data(),
                           &error),
                  error, "tq_merge");
            check(tq_cuda_merge(outs.device, lses.device, parts, rows, dim, out.device, lse.device, nullptr, &error),
                  error, "tq_cuda_merge");
            check(cudaDeviceSynchronize(), "merge");
            const std::vector<float> got = out.down(), got_lse = lse.down();
            double worst = 0;
            for (size_t i = 0; i < got.size(); i++) worst = fmax(worst, fabs(got[i] - out.host[i]));
            for (int i = 0; i < rows; i++)
                if (!(got_lse[i] == lse.host[i] || fabs(got_lse[i] - lse.host[i]) < 2e-6 * (1 + fabs(lse.host[i]))))
                    worst = 1;
            checks++;
            if (!(worst < 4e-6) && failures++ < 30)
                printf("FAILED: merge, dim %d, %d parts: off by %g\n", dim, parts, worst);
        }
}

// ---- times ----

#if !defined(TQ_NO_TIMES)
#include "append_times.h"
#endif

int main(int argc, char **argv)
{
    bool all = argc < 2;
    int thin = getenv("TQ_THIN") ? atoi(getenv("TQ_THIN")) : 1;
    for (int i = 1; i < argc || all; i++, all = false) {
        if (argc < 2 || !strcmp(argv[i], "check")) {
            check_appends(thin);
            check_many_appends(thin);
            check_long_appends(thin);
            check_moments(thin);
            check_wide_appends(thin);
            check_single_appends(thin);
            check_fine_appends(thin);
            check_other_appends(thin);
            check_searches(thin);
            check_blocked_appends(thin);
            const int after_append = checks;
            check_books();
            check_rotations();
            check_dequantize();
            check_merge();
            printf("%s: %d comparisons (%d of appends), %d failed\n", failures ? "FAILED" : "passed", checks,
                   after_append, failures);
        }
        if (argc > 1 && (!strcmp(argv[i], "moments") || !strcmp(argv[i], "searches") || !strcmp(argv[i], "wide"))) {
            if (!strcmp(argv[i], "wide")) check_wide_appends(thin);
            else if (!strcmp(argv[i], "moments")) check_moments(thin);
            else check_searches(thin);
            printf("%s: %d comparisons, %d failed\n", failures ? "FAILED" : "passed", checks, failures);
        }
#if !defined(TQ_NO_TIMES)
        if (argc < 2 || !strcmp(argv[i], "time")) times();
#endif
        if (argc < 2) break;
    }
    return failures != 0;
}
