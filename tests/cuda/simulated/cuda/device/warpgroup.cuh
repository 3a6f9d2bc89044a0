/* Products of warp groups on the simulated GPU. They read and write as late as possible, when a thread waits. */
#ifndef TQ_CUDA_DEVICE_WARPGROUP_CUH
#define TQ_CUDA_DEVICE_WARPGROUP_CUH
#include "cuda/device/device.cuh"

namespace tq
{

inline uint64_t describe_operand(uint32_t address, uint32_t along_k, uint32_t along_rows)
{
    if (address % 16 || along_k % 16 || along_rows % 16) printf("an operand that is not aligned\n"), exit(3);
    return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)(along_k >> 4) << 16 | (uint64_t)(along_rows >> 4) << 32;
}

/** Returns number (row, k) of an operand in core matrices. */
inline float operand(uint64_t at, int row, int k)
{
    const uint32_t first = (uint32_t)(at & 0x3fff) << 4, along_k = (uint32_t)(at >> 16 & 0x3fff) << 4,
                   along_rows = (uint32_t)(at >> 32 & 0x3fff) << 4;
    _Float16 x;
    memcpy(&x, simulated::block.shared + first + k / 8 * along_k + row / 8 * along_rows + row % 8 * 16 + k % 8 * 2, 2);
    return (float)x;
}

template <int N> void queue_product(float (&c)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add)
{
    simulated::now->products.push_back({c, a, 0, b, N, add, false});
}
inline void queue_shared_product(float (&c)[64], uint64_t a, uint64_t b, bool add)
{
    simulated::now->products.push_back({c, nullptr, a, b, 128, add, false});
}
inline void order_products() {}
inline void end_batch() { simulated::now->products.back().ends = true; }

/** Computes one product of the warp. */
inline void multiply(const simulated::Product *(&of_lane)[32], int warp)
{
    const int n = of_lane[0]->n;
    std::vector<float> b(16 * n), a(16 * 16);
    for (int column = 0; column < n; column++)
        for (int k = 0; k < 16; k++) b[16 * column + k] = operand(of_lane[0]->b_at, column, k);
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++) {
            if (!of_lane[0]->a) {
                a[16 * row + k] = operand(of_lane[0]->a_at, 16 * (warp % 4) + row, k);
                continue;
            }
            const uint32_t word = of_lane[row % 8 * 4 + k % 8 / 2]->a[row / 8 + k / 8 * 2];
            _Float16 x;
            memcpy(&x, reinterpret_cast<const char *>(&word) + k % 2 * 2, 2);
            a[16 * row + k] = (float)x;
        }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < n / 2; i++) {
            const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            float sum = of_lane[lane]->add ? of_lane[lane]->c[i] : 0;
            for (int k = 0; k < 16; k++) sum += a[16 * row + k] * b[16 * column + k];
            of_lane[lane]->c[i] = sum;
        }
}

template <int LEFT> void wait_for_batches()
{
    using namespace simulated;
    Meeting &m = block.warps[now->warp];
    const bool is_last = m.arrived == 31;
    if (is_last) {
        Thread *lanes = &block.threads[32 * now->warp];
        int batches = 0;
        for (const Product &p : lanes[0].products) batches += p.ends;
        while (batches > LEFT) {
            const Product *of_lane[32];
            for (int lane = 0; lane < 32; lane++) of_lane[lane] = &lanes[lane].products[0];
            multiply(of_lane, now->warp);
            batches -= of_lane[0]->ends;
            for (int lane = 0; lane < 32; lane++) lanes[lane].products.erase(lanes[lane].products.begin());
        }
    }
    meet_in_warp(0);
}

template <int N> void take_results(float (&)[N]) {}
template <int N> void take_fewer_registers() {}
template <int N> void take_more_registers() {}
template <int THREADS> void meet_at(int barrier) { simulated::meet_named(barrier, THREADS); }
inline void meet(int group) { simulated::meet_named(group + 1, 128); }

} // namespace tq
#endif
