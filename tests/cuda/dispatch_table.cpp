// The choice between attention kernels (csrc/cuda/attend/choose/), compiled without CUDA: kernels are named, not run.
// Linked with choose.cu, arguments.cu and the two cut.cu, which are host code, and with the C core.
//
//   dispatch_table rows      a line for each kernel that the table lists: row number, name
//   dispatch_table overlaps  pairs of its rows that are for the same case
//   dispatch_table gpus      a line for each GPU that has a name, then one with all names as an error has them
//   dispatch_table NAME      as below on that GPU: the first three integers are not used
//   dispatch_table ways      as below, a line for each way that the choice compares, by number, and an empty line
//   dispatch_table           for each line of integers on stdin
//                                processors hopper (1; 0: compute capability 8.0, 2: 8.6) large_clusters batch
//                                query_tokens query_heads kv_heads max_pages sinks window sliding_window causal dtype
//                                schedule_kind words...
//                            a line: the name of the kernel, thread blocks, threads, shared bytes, blocks that share a
//                            segment, cluster, what the call costs in nanoseconds, rows of a tile, of a block of
//                            prepare, of one of combine; behind the name of CHUNK they are those of the cheapest
//                            other way
#include <cstdio>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "cuda/attend/choose/compiled.h"
#include "cuda/attend/choose/cut.h"
#include "cuda/attend/choose/gpus.h"

namespace tq
{
namespace
{

struct Make {
    template <Strategy, class V> static void (*kernel())(AttendArgs)
    {
        return [](AttendArgs) {};
    }
};

} // namespace

KernelChoice compiled_kernel(int row, int row_quads, int tiles)
{
    return kernels_of_rows<Make, 0, 1>(row, row_quads, tiles);
}

} // namespace tq

using namespace tq;

static void print_rows()
{
    char name[TQ_CUDA_KERNEL_NAME_BYTES];
    for (int row = 0; row < KERNEL_ROWS; row++)
        for (int tiles : {2, 4})
            for (int row_quads : {1, 2, 4, 8}) {
                KernelChoice k = compiled_kernel(row, row_quads, tiles);
                if (!k.kernel) continue;
                for (int ragged = 0; ragged <= (k.ragged != nullptr); ragged++) {
                    k.is_ragged = ragged;
                    name_kernel(k, name);
                    std::printf("%d %s\n", row, name);
                }
            }
}

/** Prints pairs of rows that are for the same case. */
static void print_overlaps()
{
    for (int i = 0; i < KERNEL_ROWS; i++)
        for (int j = 0; j < i; j++) {
            const KernelRow &a = KERNELS[i], &b = KERNELS[j];
            if (a.strategy == b.strategy && a.hopper == b.hopper && a.width == b.width && a.tile_16 == b.tile_16 &&
                a.wave == b.wave && a.first_groups <= b.last_groups && b.first_groups <= a.last_groups)
                std::printf("%d %d\n", j, i);
        }
}

static std::string choose(const std::vector<int64_t> &x, const Gpu *gpu, int wanted)
{
    constexpr size_t PARAMS = 14;
    tq_error error = {};
    tq_plan plan;
    if (x.size() <= PARAMS || tq_plan_init(&plan, x.data() + PARAMS, x.size() - PARAMS, &error) != TQ_OK)
        return std::string("refused: ") + (error.argument ? error.argument : "too few numbers");
    Device device = device_of({"", x[1] == 1 ? 9 : 8, (int)x[0], x[1] == 1 ? 228 : x[1] ? 100 : 164, (int)x[2]});
    if (gpu) device = device_of(*gpu);
    device.wanted = wanted;
    tq_attend_params p = {};
    p.layer.batch = (int)x[3], p.query_tokens = (int)x[4], p.query_heads = (int)x[5], p.layer.kv_heads = (int)x[6];
    p.layer.max_pages = (int)x[7], p.layer.sinks = (int)x[8], p.layer.window = (int)x[9], p.sliding_window = (int)x[10];
    p.causal = (int)x[11], p.layer.dtype = (int)x[12], p.schedule_kind = (int)x[13];
    p.layer.n_pages = (int64_t)p.layer.batch * p.layer.max_pages;
    Launch l;
    char name[TQ_CUDA_KERNEL_NAME_BYTES];
    if (fill_args(plan, p, &l, &error) != TQ_OK) return std::string("refused: ") + error.argument;
    if (choose_kernel(plan, device, &l, &error) != TQ_OK) return std::string("refused: ") + error.argument;
    name_kernel(l.kernel, name);
    if (chooses_chunk(plan, p, device, l)) name_chunk(plan, p, name);
    std::ostringstream line;
    line << name << ' ' << l.blocks << ' ' << l.threads << ' ' << l.shared_bytes << ' ' << l.args.fused.sharing << ' '
         << l.args.fused.cluster << ' ' << (int64_t)(1000 * l.us) << ' ' << l.args.tile_rows << ' '
         << l.args.prepare_rows << ' ' << l.args.combine_rows;
    return line.str();
}

int main(int argc, char **argv)
{
    if (argc > 1 && !std::strcmp(argv[1], "rows")) return print_rows(), 0;
    if (argc > 1 && !std::strcmp(argv[1], "overlaps")) return print_overlaps(), 0;
    if (argc > 1 && !std::strcmp(argv[1], "gpus")) {
        for (const Gpu &gpu : GPUS) std::printf("%s\n", gpu.name);
        return std::puts(TQ_CUDA_GPU_NAMES), 0;
    }
    const Gpu *gpu = nullptr;
    for (const Gpu &known : GPUS)
        if (argc > 1 && !std::strcmp(argv[1], known.name)) gpu = &known;
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::vector<int64_t> x;
        for (int64_t word; words >> word;) x.push_back(word);
        const bool ways = argc > 1 && !std::strcmp(argv[1], "ways");
        std::string one = choose(x, gpu, ways ? 0 : -1);
        for (int way = 1; ways && one.find("refused"); one = choose(x, gpu, way++)) std::cout << one << '\n';
        std::cout << (ways ? "" : one) << '\n';
    }
}
