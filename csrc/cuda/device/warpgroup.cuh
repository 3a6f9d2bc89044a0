/* WGMMA, the tensor-core products of four warps on compute capability 9.0 (sm_90a), and barriers of the four. Not
 * compiled into kernels for other devices. */
#ifndef TQ_CUDA_DEVICE_WARPGROUP_CUH
#define TQ_CUDA_DEVICE_WARPGROUP_CUH
#include "cuda/device/device.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "compile for sm_90a, not sm_90, which lacks these products: the kernels of attend_many_rows would be empty"
#endif

namespace tq
{

/** Returns the descriptor of an operand in shared memory. It consists of core matrices of 8 rows (of B: columns) x 16
 *  bytes. along_k, along_rows: bytes from one to the next, below 2^18. They and address are multiples of 16. */
__device__ __forceinline__ uint64_t describe_operand(uint32_t address, uint32_t along_k, uint32_t along_rows)
{
    return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)(along_k >> 4) << 16 | (uint64_t)(along_rows >> 4) << 32;
}

/** Returns the descriptor of an operand B in the layout of host.h. */
template <int N> __device__ __forceinline__ uint64_t describe_b(uint32_t address)
{
    return describe_operand(address, N / 8 * PIECE_BYTES, PIECE_BYTES);
}

#define TQ_OUT_16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define TQ_OUT_32 TQ_OUT_16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define TQ_OUT_64 TQ_OUT_32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define TQ_OUT_96 TQ_OUT_64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define TQ_OUT_128 TQ_OUT_96 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TQ_C4(t, i) t(c[i]), t(c[i + 1]), t(c[i + 2]), t(c[i + 3])
#define TQ_C8(t, i) TQ_C4(t, i), TQ_C4(t, i + 4)
#define TQ_C16(t, i) TQ_C8(t, i), TQ_C8(t, i + 8)
#define TQ_C32(t, i) TQ_C16(t, i), TQ_C16(t, i + 16)
#define TQ_C48(t, i) TQ_C32(t, i), TQ_C16(t, i + 32)
#define TQ_C64(t, i) TQ_C32(t, i), TQ_C32(t, i + 32)
#define TQ_PRODUCT(kind, outs, a0, a1, a2, a3, desc, more, rest, ...)                                                  \
    asm volatile("{ .reg .pred p;\n"                                                                                   \
                 "setp.ne.b32 p, " more ", 0;\n"                                                                       \
                 "wgmma.mma_async.sync.aligned." kind " {" outs "}, {" a0 "," a1 "," a2 "," a3 "}, " desc ", p" rest   \
                 "; }"                                                                                                 \
                 : __VA_ARGS__                                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add))

/** Queues c (64 x N, float32) = a (64 x 16, fp16) b, plus c if `add`. Warp w holds rows 16 w .. 16 w + 15. Of these
 *  lane 4 g + t has a0: row g, k 2 t and 2 t + 1; a1: row g + 8; a2, a3: the same at k + 8; c[4 j], c[4 j + 1]: row g,
 *  columns 8 j + 2 t and + 1; c[4 j + 2], c[4 j + 3]: row g + 8. Do not touch a and c before wait_for_batches. */
template <int N>
__device__ __forceinline__ void queue_product(float (&c)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TQ_T(x) "+f"(x)
    if constexpr (N == 16)
        TQ_PRODUCT("m64n16k16.f32.f16.f16", TQ_OUT_16, "%8", "%9", "%10", "%11", "%12", "%13", ", 1, 1, 0",
                   TQ_C8(TQ_T, 0));
    else if constexpr (N == 32)
        TQ_PRODUCT("m64n32k16.f32.f16.f16", TQ_OUT_32, "%16", "%17", "%18", "%19", "%20", "%21", ", 1, 1, 0",
                   TQ_C16(TQ_T, 0));
    else if constexpr (N == 64)
        TQ_PRODUCT("m64n64k16.f32.f16.f16", TQ_OUT_64, "%32", "%33", "%34", "%35", "%36", "%37", ", 1, 1, 0",
                   TQ_C32(TQ_T, 0));
    else if constexpr (N == 96)
        TQ_PRODUCT("m64n96k16.f32.f16.f16", TQ_OUT_96, "%48", "%49", "%50", "%51", "%52", "%53", ", 1, 1, 0",
                   TQ_C48(TQ_T, 0));
    else
        TQ_PRODUCT("m64n128k16.f32.f16.f16", TQ_OUT_128, "%64", "%65", "%66", "%67", "%68", "%69", ", 1, 1, 0",
                   TQ_C64(TQ_T, 0));
#undef TQ_T
#endif
}

/** The same for N = 128, with a (64 x 16) in shared memory as well; a: its descriptor. */
__device__ __forceinline__ void queue_shared_product(float (&c)[64], uint64_t a, uint64_t b, bool add)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TQ_T(x) "+f"(x)
    asm volatile("{ .reg .pred p;\n"
                 "setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" TQ_OUT_128 "}, %64, %65, p, 1, 1, 0, 0; }"
                 : TQ_C64(TQ_T, 0)
                 : "l"(a), "l"(b), "r"((int)add));
#undef TQ_T
#endif
}

/** The same for bytes: a (64 x 32), with k 4 t .. in a0, a1 and 16 + 4 t .. in a2, a3; b signed; c int32. */
template <bool A_UNSIGNED, int N>
__device__ __forceinline__ void queue_product(int (&c)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TQ_T(x) "+r"(x)
#define TQ_BYTES(types)                                                                                                \
    if constexpr (N == 32)                                                                                             \
        TQ_PRODUCT("m64n32k32.s32." types, TQ_OUT_32, "%16", "%17", "%18", "%19", "%20", "%21", "", TQ_C16(TQ_T, 0));  \
    else TQ_PRODUCT("m64n64k32.s32." types, TQ_OUT_64, "%32", "%33", "%34", "%35", "%36", "%37", "", TQ_C32(TQ_T, 0))
    if constexpr (A_UNSIGNED) {
        TQ_BYTES("u8.s8");
    } else {
        TQ_BYTES("s8.s8");
    }
#undef TQ_BYTES
#undef TQ_T
#endif
}

#undef TQ_PRODUCT
#undef TQ_C64
#undef TQ_C48
#undef TQ_C32
#undef TQ_C16
#undef TQ_C8
#undef TQ_C4
#undef TQ_OUT_128
#undef TQ_OUT_96
#undef TQ_OUT_64
#undef TQ_OUT_32
#undef TQ_OUT_16

/** To be called before products that read registers written since the last products were queued. */
__device__ __forceinline__ void order_products()
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.fence.sync.aligned;");
#endif
}

/** Ends a batch of products. */
__device__ __forceinline__ void end_batch()
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.commit_group.sync.aligned;");
#endif
}

/** Waits until all batches but the last LEFT have ended. */
template <int LEFT> __device__ __forceinline__ void wait_for_batches()
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT));
#endif
}

/** Keeps the compiler from moving uses of c ahead of this call. Belongs after the wait for products that write c. */
template <int N> __device__ __forceinline__ void take_results(float (&c)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i])::"memory");
}

template <int N> __device__ __forceinline__ void take_results(int (&c)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(c[i])::"memory");
}

/** Set the registers of a thread, for all warps of a group. More come only when other groups have given up as many. */
template <int N> __device__ __forceinline__ void take_fewer_registers()
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
template <int N> __device__ __forceinline__ void take_more_registers()
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

/** Synchronises the four warps of a group, and their writes to shared memory. group: index in the block. */
__device__ __forceinline__ void meet(int group)
{
    asm volatile("barrier.sync.aligned %0, 128;" ::"r"(group + 1) : "memory");
}

/** Synchronises THREADS threads of a block. barrier: other than those of `meet` and of __syncthreads. */
template <int THREADS> __device__ __forceinline__ void meet_at(int barrier)
{
    asm volatile("barrier.sync.aligned %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

/** Does what meet does, and returns to all whether `said` is true in any thread. */
__device__ __forceinline__ bool meet_any(int group, bool said)
{
    int any;
    asm volatile("{ .reg .pred p, q;\n"
                 "setp.ne.b32 p, %2, 0;\n"
                 "barrier.red.or.aligned.pred q, %1, 128, p;\n"
                 "selp.b32 %0, 1, 0, q; }"
                 : "=r"(any)
                 : "r"(group + 1), "r"((int)said)
                 : "memory");
    return any != 0;
}

} // namespace tq
#endif
