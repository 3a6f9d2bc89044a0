/* csrc/cuda/device/device.cuh for the simulated GPU (real/ links to its folder). What is assembly there is C++ here. */
#ifndef TQ_SIMULATED_DEVICE_CUH
#define TQ_SIMULATED_DEVICE_CUH
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define prmt of_asm_prmt
#define reciprocal of_asm_reciprocal
#define exp2_fast of_asm_exp2_fast
#define tanh_fast of_asm_tanh_fast
#define bf16_of_float of_asm_bf16_of_float
#define bf16_of_floats of_asm_bf16_of_floats
#define barrier_init of_asm_barrier_init
#define barrier_arrive of_asm_barrier_arrive
#define barrier_wait of_asm_barrier_wait
#define barrier_expect of_asm_barrier_expect
#define copy_bulk of_asm_copy_bulk
#define store_16 of_asm_store_16
#define mma_halves of_asm_mma_halves
#define store_number of_asm_store_number
#include "real/device.cuh"
#undef prmt
#undef reciprocal
#undef exp2_fast
#undef tanh_fast
#undef bf16_of_float
#undef bf16_of_floats
#undef barrier_init
#undef barrier_arrive
#undef barrier_wait
#undef barrier_expect
#undef copy_bulk
#undef store_16
#undef mma_halves
#undef store_number

#include "../../../prmt.h"

namespace tq
{

inline float reciprocal(float x) { return 1 / x; }
inline float exp2_fast(float x) { return exp2f(x); }
inline float tanh_fast(float x) { return tanhf(x); }
inline uint16_t bf16_of_float(float x)
{
    const uint32_t bits = __float_as_uint(x);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint32_t bf16_of_floats(float lo, float hi) { return bf16_of_float(lo) | (uint32_t)bf16_of_float(hi) << 16; }
inline void store_number(void *p, int64_t i, int dtype, float x)
{
    if (dtype == TQ_F32) static_cast<float *>(p)[i] = x;
    else if (dtype == TQ_F16) static_cast<__half *>(p)[i] = __float2half_rn(x);
    else static_cast<uint16_t *>(p)[i] = bf16_of_float(x);
}

inline void barrier_init(uint32_t at, int count) { simulated::block.barriers[at] = {count, count, 0, 0}; }
inline void barrier_arrive(uint32_t at)
{
    simulated::Barrier &b = simulated::barrier_at(at);
    b.pending--;
    simulated::end_phase_if_complete(b);
}
inline void barrier_expect(uint32_t at, uint32_t bytes)
{
    simulated::Barrier &b = simulated::barrier_at(at);
    b.bytes += (int)bytes;
    b.pending--;
    simulated::end_phase_if_complete(b);
}
inline void barrier_wait(uint32_t at, int parity)
{
    simulated::Barrier &b = simulated::barrier_at(at);
    while (b.phase == parity) simulated::yield();
}
inline void copy_bulk(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier, uint64_t)
{
    if (to % 16 || (uintptr_t)from % 16 || bytes % 16) printf("a bulk copy that is not aligned\n"), exit(3);
    simulated::block.copies.push_back({simulated::block.shared + to, static_cast<const uint8_t *>(from), bytes, barrier,
                                       (int)simulated::random_below(40)});
    simulated::block.changes++;
}
inline void store_16(uint32_t to, uint4 x)
{
    if (to % 16) printf("a store that is not aligned\n"), exit(3);
    memcpy(simulated::block.shared + to, &x, 16);
}

inline void mma_halves(float (&c)[4], uint4 a, uint2 b)
{
    struct Operands {
        uint4 a;
        uint2 b;
    } own = {a, b};
    simulated::meet_in_warp((uint64_t)&own);
    const Operands *of[32];
    for (int i = 0; i < 32; i++) of[i] = (const Operands *)simulated::seen_in_warp()[i];
    const auto half_of = [](uint32_t word, int i) { return (float)value_of_bits<_Float16>(word >> 16 * i); };
    const int lane = simulated::now->lane;
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            const uint4 &x = of[4 * row + k % 8 / 2]->a;
            const uint2 &y = of[4 * column + k % 8 / 2]->b;
            const uint32_t left = k < 8 ? i < 2 ? x.x : x.y : i < 2 ? x.z : x.w;
            c[i] += half_of(left, k % 2) * half_of(k < 8 ? y.x : y.y, k % 2);
        }
    }
    simulated::meet_in_warp(0);
}

} // namespace tq
#endif
