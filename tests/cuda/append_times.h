// Times of appending, for append_harness.cu: medians, over random numbers. Inputs and outputs take turns, so that work
// larger than L2 does not find them there. Bytes are those read plus written, beside a copy in the same run.
#include <algorithm>
#include <functional>
#include <memory>

/** Whether a row of a table is timed: with TQ_ROWS=n only the first n rows. */
static bool wanted(size_t row)
{
    const char *rows = getenv("TQ_ROWS");
    return !rows || row < (size_t)atoi(rows);
}

static double median_us(cudaStream_t stream, int repeats, const std::function<void(int)> &work)
{
    std::vector<double> us;
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
    for (int i = -3; i < repeats; i++) {
        check(cudaEventRecord(begin, stream), "record");
        work(i + 3);
        check(cudaEventRecord(end, stream), "record");
        check(cudaEventSynchronize(end), "synchronize");
        float ms;
        check(cudaEventElapsedTime(&ms, begin, end), "time");
        if (i >= 0) us.push_back(1000 * ms);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
}

/** One layer's cache and one append to it, on the device alone. */
struct Layer {
    tq_plan plan;
    tq_append_params p = {};
    std::vector<void *> owned;

    template <class T> T *get(size_t n)
    {
        void *at;
        check(cudaMalloc(&at, n * sizeof(T) + 256), "cudaMalloc");
        owned.push_back(at);
        return (T *)at;
    }
    ~Layer()
    {
        for (void *at : owned) cudaFree(at);
    }

    /** `before` tokens are stored already, then `tokens` come. rows: random numbers that fill k and v. */
    Layer(const tq_plan &plan_, int batch, int heads, int before, int tokens, int sinks, int window, int dtype,
          bool tokens_first, const std::vector<uint8_t> &rows)
        : plan(plan_)
    {
        const int length = before + tokens, pages = (length + plan.page_tokens - 1) / plan.page_tokens;
        const size_t dim = plan.head_dim, bytes = dtype_size(dtype), numbers = (size_t)batch * heads * tokens * dim;
        p.layer.batch = batch, p.tokens = tokens, p.layer.kv_heads = heads, p.layer.sinks = sinks,
        p.layer.window = window, p.layer.max_pages = pages, p.layer.dtype = dtype;
        p.layer.n_pages = (int64_t)batch * pages;
        for (const void **x : {&p.k, &p.v}) {
            uint8_t *at = get<uint8_t>(numbers * bytes);
            for (size_t done = 0; done < numbers * bytes; done += rows.size())
                check(cudaMemcpy(at + done, rows.data(), std::min(rows.size(), numbers * bytes - done),
                                 cudaMemcpyHostToDevice),
                      "copy");
            *x = at;
        }
        p.k_stride_batch = p.v_stride_batch = (int64_t)heads * tokens * dim;
        p.k_stride_head = p.v_stride_head = tokens_first ? dim : tokens * dim;
        p.k_stride_token = p.v_stride_token = tokens_first ? heads * dim : dim;
        const size_t exact = (size_t)batch * heads * dim * bytes;
        for (void **x : {&p.layer.sink_k, &p.layer.sink_v}) *x = sinks ? get<uint8_t>(exact * sinks) : nullptr;
        for (void **x : {&p.layer.window_k, &p.layer.window_v}) {
            if (!window) continue;
            *x = get<uint8_t>(exact * window);
            check(cudaMemcpy(*x, rows.data(), std::min(rows.size(), exact * window), cudaMemcpyHostToDevice), "copy");
        }
        p.layer.pages = get<uint8_t>((size_t)p.layer.n_pages * heads * plan.record_bytes);
        std::vector<int32_t> table(p.layer.n_pages), lengths(batch, length);
        for (size_t i = 0; i < table.size(); i++)
            table[i] = (int32_t)((i * 7919) % table.size()); // 7919 is prime: no page twice
        int32_t *t = get<int32_t>(table.size()), *l = get<int32_t>(batch);
        check(cudaMemcpy(t, table.data(), 4 * table.size(), cudaMemcpyHostToDevice), "copy");
        check(cudaMemcpy(l, lengths.data(), 4 * lengths.size(), cudaMemcpyHostToDevice), "copy");
        p.layer.block_table = t, p.layer.lengths = l;
        if (plan.moments) give_moments(heads);
    }

    /** Gives keys a wave and a metric, the same in all layers. */
    void give_moments(int heads)
    {
        std::mt19937 random(5);
        const Moments moments({plan.head_dim, heads, plan.wave_pairs, plan.metric}, plan, random);
        int32_t *turns = get<int32_t>(moments.turns.size());
        float *numbers = get<float>(moments.numbers.size());
        check(cudaMemcpy(turns, moments.turns.data(), 4 * moments.turns.size(), cudaMemcpyHostToDevice), "copy");
        check(cudaMemcpy(numbers, moments.numbers.data(), 4 * moments.numbers.size(), cudaMemcpyHostToDevice), "copy");
        p.layer.key.turns = turns;
        use_numbers(plan, false, heads, moments.numbers.size(), numbers, &p.layer.key);
    }

    void append(cudaStream_t stream) const
    {
        tq_error error;
        check(tq_cuda_append(&plan, &p, nullptr, stream, &error), error, "tq_cuda_append");
    }
    /** Returns the bytes that an append reads and writes if all of it is packed. */
    double packed_bytes() const
    {
        const double numbers = (double)p.layer.batch * p.layer.kv_heads * p.tokens * plan.head_dim;
        return numbers * 2 * dtype_size(p.layer.dtype) +
               (double)p.layer.batch * p.layer.kv_heads * p.tokens / plan.page_tokens * plan.record_bytes;
    }
};

/** Returns widths of groups. Neighbouring groups of 16 channels differ, which is slowest to encode. */
static std::vector<int> widths(int bits, int group)
{
    return group == TQ_TILE ? std::vector<int>{bits} : std::vector<int>{bits, bits - 1};
}

/** moments: with a wave of all pairs and a metric of rank 4. */
static tq_plan timed_plan(int dim, int rotation, int scale, int bits, int group, bool moments, int tries)
{
    const std::vector<int> each = widths(bits, group);
    return make_plan(dim, 128, rotation, 0, scale, each, each, group, moments ? dim / 2 : 0, moments ? 5 : 0, tries);
}

static void time_encode(double ceiling, cudaStream_t stream, const std::vector<uint8_t> &rows)
{
    struct Row {
        int dim, bits, scale, rotation, dtype, tokens;
        bool tokens_first;
        int group = TQ_TILE;
        bool moments = false;
        int tries = 0;
    };
    const Row table[] = {{128, 4, 0, 1, TQ_BF16, 32768, false},
                         {128, 4, 0, 1, TQ_BF16, 32768, true},
                         {128, 3, 0, 1, TQ_BF16, 32768, false},
                         {128, 2, 0, 1, TQ_BF16, 32768, false},
                         {128, 1, 0, 1, TQ_BF16, 32768, false},
                         {128, 4, 1, 1, TQ_BF16, 32768, false},
                         {128, 4, 0, 1, TQ_F16, 32768, false},
                         {64, 4, 0, 1, TQ_BF16, 65536, false},
                         {80, 4, 0, 1, TQ_BF16, 32768, false},
                         {96, 4, 0, 1, TQ_BF16, 32768, false},
                         {256, 4, 0, 1, TQ_BF16, 16384, false},
                         {128, 4, 0, 1, TQ_BF16, 2048, false},
                         {112, 4, 0, 1, TQ_BF16, 32768, false},
                         {128, 5, 0, 1, TQ_BF16, 32768, false},
                         {128, 4, 0, 2, TQ_BF16, 32768, false},
                         {128, 4, 0, 1, TQ_F32, 32768, false},
                         {128, 4, 0, 1, TQ_BF16, 32768, false, 16},
                         {80, 4, 0, 1, TQ_BF16, 32768, false, 16},
                         {128, 4, 0, 1, TQ_BF16, 32768, false, 32, true},
                         {128, 3, 0, 1, TQ_BF16, 32768, false, 32, true},
                         {128, 2, 0, 1, TQ_BF16, 32768, false, 32, true},
                         {64, 4, 0, 1, TQ_BF16, 65536, false, 32, true},
                         {256, 4, 0, 1, TQ_BF16, 16384, false, 32, true},
                         {80, 4, 0, 1, TQ_BF16, 32768, false, 32, true},
                         {96, 4, 0, 1, TQ_BF16, 32768, false, 32, true},
                         {128, 4, 0, 1, TQ_BF16, 32768, false, 32, false, 3},
                         {128, 3, 0, 1, TQ_BF16, 32768, false, 32, false, 3},
                         {128, 4, 0, 1, TQ_BF16, 32768, false, 32, false, 5},
                         {128, 4, 0, 1, TQ_BF16, 32768, false, 32, false, 7},
                         {64, 4, 0, 1, TQ_BF16, 65536, false, 32, false, 3},
                         {256, 4, 0, 1, TQ_BF16, 16384, false, 32, false, 3},
                         {80, 4, 0, 1, TQ_BF16, 32768, false, 32, false, 3},
                         {128, 5, 0, 1, TQ_BF16, 32768, false, 32, false, 3},
                         {128, 4, 0, 1, TQ_BF16, 32768, false, 32, true, 3},
                         {128, 3, 0, 1, TQ_BF16, 32768, false, 32, true, 3},
                         {128, 4, 0, 1, TQ_BF16, 32768, false, 32, true, 5},
                         {64, 4, 0, 1, TQ_BF16, 65536, false, 32, true, 3},
                         {256, 4, 0, 1, TQ_BF16, 16384, false, 32, true, 3}};
    printf("encode, K and V of 8 KV heads            us     TB/s   of a copy\n");
    for (const Row &r : table) {
        if (!wanted(&r - table)) break;
        const tq_plan plan = timed_plan(r.dim, r.rotation, r.scale, r.bits, r.group, r.moments, r.tries);
        std::unique_ptr<Layer> layers[2];
        float *matrix = nullptr;
        for (auto &layer : layers) {
            layer.reset(new Layer(plan, 1, 8, 0, r.tokens, 0, 0, r.dtype, r.tokens_first, rows));
            if (r.rotation != TQ_ROTATION_DENSE) continue;
            matrix = layer->get<float>((size_t)r.dim * r.dim);
            std::vector<float> m((size_t)r.dim * r.dim), random_numbers;
            Random random(3);
            for (float &x : m) x = random.normal();
            check(cudaMemcpy(matrix, m.data(), 4 * m.size(), cudaMemcpyHostToDevice), "copy");
            layer->p.layer.key.rotation = layer->p.layer.value.rotation = matrix;
        }
        const double us = median_us(stream, 20, [&](int i) { layers[i % 2]->append(stream); });
        const double rate = layers[0]->packed_bytes() / us * 1e-6;
        printf("dim %3d, %d bits, scale %d, rotation %d, dtype %d, %5d tokens%s%s%s, tries %d %8.1f %7.3f %6.1f %%\n",
               r.dim, r.bits, r.scale, r.rotation, r.dtype, r.tokens, r.tokens_first ? " (tokens first)" : "",
               r.group == TQ_TILE ? "" : " (groups of 16)", r.moments ? " (moments)" : "", r.tries, us, rate,
               100 * rate / ceiling);
    }
}

/** Times an append in each of 32 layers, as a CUDA graph. */
static void time_steps(cudaStream_t stream, const std::vector<uint8_t> &rows)
{
    struct Row {
        int batch, tokens, dim, bits, window, group = TQ_TILE;
        bool moments = false;
        int tries = 0;
    };
    const Row table[] = {{1, 1, 128, 4, 128},
                         {8, 1, 128, 4, 128},
                         {16, 1, 128, 4, 128},
                         {64, 1, 128, 4, 128},
                         {1, 1, 128, 3, 128},
                         {64, 1, 128, 2, 128},
                         {1, 1, 128, 4, 0},
                         {64, 1, 128, 4, 0},
                         {1, 1, 256, 4, 128},
                         {1, 1, 80, 4, 128},
                         {1, 1, 64, 4, 128},
                         {1, 5, 128, 4, 128},
                         {16, 8, 128, 4, 128},
                         {1, 32, 128, 4, 128},
                         {1, 64, 128, 4, 128},
                         {1, 512, 128, 4, 128},
                         {1, 1, 128, 4, 128, 16},
                         {64, 1, 128, 4, 128, 16},
                         {16, 8, 128, 4, 128, 16},
                         {1, 1, 128, 4, 128, 32, true},
                         {8, 1, 128, 4, 128, 32, true},
                         {64, 1, 128, 4, 128, 32, true},
                         {1, 1, 128, 4, 0, 32, true},
                         {64, 1, 128, 4, 0, 32, true},
                         {1, 1, 80, 4, 128, 32, true},
                         {1, 1, 64, 4, 128, 32, true},
                         {1, 1, 128, 4, 128, 32, false, 3},
                         {64, 1, 128, 4, 128, 32, false, 3},
                         {1, 1, 128, 4, 128, 32, true, 3},
                         {64, 1, 128, 4, 128, 32, true, 3},
                         {1, 1, 128, 4, 128, 32, true, 5},
                         {1, 1, 128, 5, 128, 32, true},
                         {1, 1, 128, 5, 128, 32, true, 3},
                         {16, 8, 128, 4, 128, 32, false, 3}};
    printf("append in a graph of 32 layers, 8 KV heads, 4 sinks     us a layer\n");
    for (const Row &r : table) {
        if (!wanted(&r - table)) break;
        const tq_plan plan = timed_plan(r.dim, 1, 0, r.bits, r.group, r.moments, r.tries);
        std::vector<std::unique_ptr<Layer>> layers;
        for (int i = 0; i < 32; i++)
            layers.emplace_back(new Layer(plan, r.batch, 8, 1000, r.tokens, 4, r.window, TQ_BF16, false, rows));
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
        for (auto &layer : layers) layer->append(stream);
        check(cudaStreamEndCapture(stream, &graph), "capture");
        check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
        const double us = median_us(stream, 20, [&](int) { check(cudaGraphLaunch(exec, stream), "launch"); });
        printf("batch %2d, %3d tokens, dim %3d, %d bits, window %3d%s%s, tries %d %12.2f\n", r.batch, r.tokens, r.dim,
               r.bits, r.window, r.group == TQ_TILE ? "" : " (groups of 16)", r.moments ? " (moments)" : "", r.tries,
               us / 32);
        cudaGraphExecDestroy(exec);
        cudaGraphDestroy(graph);
    }
}

static void times()
{
    cudaStream_t stream;
    check(cudaStreamCreate(&stream), "stream");
    Random random(1);
    std::vector<uint8_t> rows((size_t)4099 * 256 * 2); // so that no pattern of tiles repeats
    for (size_t i = 0; i < rows.size() / 2; i++) store(rows, i, TQ_BF16, random.normal());
    const size_t bytes = (size_t)1 << 30;
    void *from, *to;
    check(cudaMalloc(&from, bytes), "cudaMalloc");
    check(cudaMalloc(&to, bytes), "cudaMalloc");
    check(cudaMemset(from, 0x5a, bytes), "memset");
    const double copy = median_us(
        stream, 10, [&](int) { check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "copy"); });
    const double ceiling = 2.0 * bytes / copy * 1e-6;
    printf("copy: %.3f TB/s read and written\n", ceiling);
    cudaFree(from);
    cudaFree(to);
    time_encode(ceiling, stream, rows);
    time_steps(stream, rows);
}
