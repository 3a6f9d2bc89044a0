/* The instructions and small helpers that the CUDA kernels share. No kernel, no format knowledge. */
#ifndef TQ_CUDA_DEVICE_DEVICE_CUH
#define TQ_CUDA_DEVICE_DEVICE_CUH
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <float.h>
#include <stdint.h>

#include "cuda/device/host.h"

namespace tq
{

constexpr uint32_t ALL_LANES = 0xffffffffu;

/* ---- host: errors ---- */

#define TQ_TEXT(x) #x
#define TQ_VERSION_TEXT(major, minor) TQ_TEXT(major) "." TQ_TEXT(minor)
#define TQ_TOOLKIT TQ_VERSION_TEXT(__CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__)

/** Returns the "must be" text for an error of the CUDA runtime, whose `got` is the cudaError_t. */
inline const char *what_helps(cudaError_t e)
{
    switch (e) {
    case cudaErrorInsufficientDriver:
        return "under a GPU driver for CUDA " TQ_TOOLKIT
               " or newer: update the driver, or build turboquant with an older CUDA toolkit (tensors on the CPU work)";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
        return "a GPU that this build has code for: build turboquant with TURBOQUANT_CUDA_ARCHS for it, or update the driver";
    default: return "accepted by the CUDA runtime (got is its cudaError_t)";
    }
}

inline tq_status check_cuda(cudaError_t e, const char *argument, tq_error *error)
{
    if (e == cudaSuccess) return TQ_OK;
    cudaGetLastError(); /* clears the error, so that no later call reports it */
    return fail(error, TQ_E_CUDA, argument, -1, (double)e, what_helps(e));
}

/* ---- bytes and matrices ---- */

/** Byte i of the result is byte (nibble i of s) & 7 of b:a; nibbles of 8 and more give that byte's sign bit eight
 *  times. */
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t s)
{
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(s));
    return r;
}

/** Returns the sum of four signed bytes. */
__device__ __forceinline__ int sum_of_bytes(uint32_t x) { return __dp4a((int)x, 0x01010101, 0); }

/** c (16 x 8, int32) += a (16 x 32) b (32 x 8), bytes signed or not. Lane 4 g + t holds a0: row g, columns 4 t ..; a1:
 *  row g + 8; a2, a3: the same with columns 16 + 4 t ..; b0, b1: rows 4 t .. and 16 + 4 t .. of column g; c0, c1: row
 *  g, columns 2 t, 2 t + 1; c2, c3: row g + 8. */
template <bool A_UNSIGNED, bool B_UNSIGNED>
__device__ __forceinline__ void mma(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
#define TQ_MMA(types)                                                                                                  \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." types                                                        \
                 ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                          \
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (A_UNSIGNED && B_UNSIGNED) TQ_MMA("u8.u8");
    else if constexpr (A_UNSIGNED) TQ_MMA("u8.s8");
    else if constexpr (B_UNSIGNED) TQ_MMA("s8.u8");
    else TQ_MMA("s8.s8");
#undef TQ_MMA
}

/** c (16 x 8) += a (16 x 16) b (16 x 8), fp16. Lane 4 g + t holds a0: row g, columns 2 t ..; a1: row g + 8; a2, a3: the
 *  same with columns 2 t + 8 ..; b0, b1: rows 2 t .. and 2 t + 8 .. of column g; c0, c1: row g, columns 2 t, 2 t + 1;
 *  c2, c3: row g + 8. */
__device__ __forceinline__ void mma_halves(float (&c)[4], uint4 a, uint2 b)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

__device__ __forceinline__ float reciprocal(float x) /* within 1 ulp; x and 1 / x must be normal */
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float exp2_fast(float x) /* within 2 ulp; exp2(-inf) = 0 */
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/** Returns tanh(x) within 2e-7 (absolute), which is enough for a logit. */
__device__ __forceinline__ float tanh_fast(float x)
{
    return 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(fminf(2 * LOG2_E * x, 126.0f)));
}

/* ---- programmatic dependent launch (compute capability 9.0; elsewhere kernels do not overlap) ---- */

/** Waits until all earlier kernels have ended and their writes are visible. */
__device__ __forceinline__ void wait_for_previous()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/** Lets the next kernel start once every block has called this. It must still wait for this one's results. */
__device__ __forceinline__ void let_next_start()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* ---- clusters of blocks (compute capability 9.0) ---- */

/** To be called by all threads of all blocks of a cluster; cluster_wait returns when all have. Other blocks do not see
 *  writes made before, which would need a fence for the whole GPU, except barriers after barrier_init_fence. */
__device__ __forceinline__ void cluster_arrive()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/** Returns the address in block `rank` of the cluster that corresponds to this block's shared address. */
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, uint32_t rank)
{
    uint32_t address = 0;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
#endif
    return address;
}

/** Stores x in a block of the cluster and completes 16 bytes on a barrier there. Threads that wait for that barrier
 *  with barrier_wait_cluster see x. Cheaper than cluster_arrive and cluster_wait with a fence for the whole GPU. */
__device__ __forceinline__ void send_cluster(uint32_t to, float4 x, uint32_t bar)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(bar)
                 : "memory");
#endif
}

/* ---- warps ---- */

/** Returns the largest of the lanes' numbers, none of which may be NaN. It compares integers in the same order, because
 *  redux.sync is for integers. */
__device__ __forceinline__ float warp_max(float x)
{
    int bits = __float_as_int(x);
    bits = __reduce_max_sync(ALL_LANES, bits ^ (bits >> 31 & 0x7fffffff));
    return __int_as_float(bits ^ (bits >> 31 & 0x7fffffff));
}

/** Returns true in one lane; all 32 must call it. The compiler knows that it is one lane, so instructions with uniform
 *  registers, such as copy_bulk, get no loop over lanes. */
__device__ __forceinline__ bool elect_lane()
{
#if __CUDA_ARCH__ >= 900
    uint32_t elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
    return elected;
#else
    return threadIdx.x % 32 == 0;
#endif
}

/** Makes the compiler compute x here, not where it is used. ptxas may still move single instructions, but not whole
 *  chains. */
__device__ __forceinline__ void compute_here(int32_t &x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void compute_here(uint32_t &x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void compute_here(int64_t &x) { asm volatile("" : "+l"(x)); }
__device__ __forceinline__ void compute_here(float &x) { asm volatile("" : "+f"(x)); }

/** Returns threadIdx.x, read again: nothing that was computed from it earlier has to stay in a register until here. */
__device__ __forceinline__ int thread_again()
{
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

__device__ __forceinline__ int warp_sum(int x) { return __reduce_add_sync(ALL_LANES, x); }

__device__ __forceinline__ float warp_sum(float x)
{
#pragma unroll
    for (int k = 16; k; k >>= 1) x += __shfl_xor_sync(ALL_LANES, x, k);
    return x;
}

/* ---- numbers of the model's dtype ---- */

__device__ __forceinline__ int dtype_bytes(int dtype) { return dtype == TQ_F32 ? 4 : 2; }

// Conversions from and to bfloat16, as in cuda_bf16.h, which takes longer to compile than all of this.

__device__ __forceinline__ float float_of_bf16(uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); }

__device__ __forceinline__ uint16_t bf16_of_float(float x)
{
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

/** Converts two numbers; lo goes to the low half. */
__device__ __forceinline__ uint32_t bf16_of_floats(float lo, float hi)
{
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(hi), "f"(lo));
    return bits;
}

__device__ __forceinline__ float load_number(const void *p, int64_t i, int dtype)
{
    if (dtype == TQ_F32) return static_cast<const float *>(p)[i];
    if (dtype == TQ_F16) return __half2float(static_cast<const __half *>(p)[i]);
    return float_of_bf16(static_cast<const uint16_t *>(p)[i]);
}

__device__ __forceinline__ void store_number(void *p, int64_t i, int dtype, float x)
{
    if (dtype == TQ_F32) static_cast<float *>(p)[i] = x;
    else if (dtype == TQ_F16) static_cast<__half *>(p)[i] = __float2half_rn(x);
    else static_cast<uint16_t *>(p)[i] = bf16_of_float(x);
}

/** Four numbers as they lie in memory. Loads and conversions are separate, so that many loads can be in flight before
 *  the first is converted: the dtype is only known at run time, and a branch between two loads would make the second
 *  wait for the first. */
struct Quad {
    uint4 raw;
};

/** Loads numbers i .. i + 3. Their address must be a multiple of the size of all four. */
__device__ __forceinline__ Quad load_quad(const void *p, int64_t i, int dtype)
{
    const char *at = static_cast<const char *>(p) + i * dtype_bytes(dtype);
    Quad q;
    uint32_t wide = dtype == TQ_F32;
    asm volatile("{ .reg .pred w;\n"
                 "setp.ne.u32 w, %5, 0;\n"
                 "mov.u32 %2, 0;\n"
                 "mov.u32 %3, 0;\n"
                 "@w ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 "@!w ld.global.v2.u32 {%0, %1}, [%4]; }"
                 : "=&r"(q.raw.x), "=&r"(q.raw.y), "=&r"(q.raw.z), "=&r"(q.raw.w)
                 : "l"(at), "r"(wide));
    return q;
}

__device__ __forceinline__ float4 to_float4(const Quad &q, int dtype)
{
    if (dtype == TQ_F32)
        return make_float4(__uint_as_float(q.raw.x), __uint_as_float(q.raw.y), __uint_as_float(q.raw.z),
                           __uint_as_float(q.raw.w));
    if (dtype == TQ_F16) {
        float2 lo = __half22float2(*reinterpret_cast<const __half2 *>(&q.raw.x)),
               hi = __half22float2(*reinterpret_cast<const __half2 *>(&q.raw.y));
        return make_float4(lo.x, lo.y, hi.x, hi.y);
    }
    return make_float4(__uint_as_float(q.raw.x << 16), __uint_as_float(q.raw.x & 0xffff0000u),
                       __uint_as_float(q.raw.y << 16), __uint_as_float(q.raw.y & 0xffff0000u));
}

/** The same without a branch, for code that runs once: branches would become a jump table, which has to be loaded. In
 *  loops over tokens branches are faster (measured.md). */
__device__ __forceinline__ float4 to_float4_once(const Quad &q, int dtype)
{
    bool wide = dtype == TQ_F32, half = dtype == TQ_F16;
    float2 lo = __half22float2(*reinterpret_cast<const __half2 *>(&q.raw.x)),
           hi = __half22float2(*reinterpret_cast<const __half2 *>(&q.raw.y));
    auto choose = [&](uint32_t single, float of_half, uint32_t of_bfloat) {
        return wide ? __uint_as_float(single) : half ? of_half : __uint_as_float(of_bfloat);
    };
    return make_float4(choose(q.raw.x, lo.x, q.raw.x << 16), choose(q.raw.y, lo.y, q.raw.x & 0xffff0000u),
                       choose(q.raw.z, hi.x, q.raw.y << 16), choose(q.raw.w, hi.y, q.raw.y & 0xffff0000u));
}

__device__ __forceinline__ uint32_t pack_halves(float lo, float hi, int dtype)
{
    if (dtype == TQ_F16) {
        __half2 h = __floats2half2_rn(lo, hi);
        return *reinterpret_cast<uint32_t *>(&h);
    }
    return bf16_of_floats(lo, hi);
}

/** Stores numbers i .. i + 3. Their address must be a multiple of the size of all four. */
__device__ __forceinline__ void store_quad(void *p, int64_t i, int dtype, float4 x)
{
    if (dtype == TQ_F32) *reinterpret_cast<float4 *>(static_cast<float *>(p) + i) = x;
    else
        *reinterpret_cast<uint2 *>(static_cast<uint16_t *>(p) + i) =
            make_uint2(pack_halves(x.x, x.y, dtype), pack_halves(x.z, x.w, dtype));
}

/* ---- the Hadamard rotation of turboquant.h, one row by one warp ---- */

/** Runs one pass over part[0 .. n), n a power of two. Lane l holds numbers l + 32 i. All steps but the last only add,
 *  in the order of turboquant.h; a product with +-1 inside an fma is exact. The code is small on purpose: most kernels
 *  run it once. */
template <int PER_LANE>
__device__ __forceinline__ void hadamard_pass(float *part, int n, const uint32_t *signs, bool inverse, int lane)
{
    float x[PER_LANE], factor = __frsqrt_rn((float)n);
    uint32_t flip = 0; /* bit i: the sign of x[i] */
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        x[i] = lane + 32 * i < n ? part[lane + 32 * i] : 0;
        if (32 * i < n) flip |= (signs[i] >> lane & 1) << i;
        if (!inverse && flip >> i & 1) x[i] = -x[i];
    }
#pragma unroll 1
    for (int d = 1; d < min(n, 32); d *= 2) {
        float sign = lane & d ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (32 * i < n) x[i] = __fmaf_rn(sign, x[i], __shfl_xor_sync(ALL_LANES, x[i], d));
    }
#pragma unroll
    for (int d = 1; d < PER_LANE; d *= 2) {
        if (32 * d >= n) break;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (!(i & d)) {
                float a = x[i], b = x[i + d];
                x[i] = __fadd_rn(a, b);
                x[i + d] = __fsub_rn(a, b);
            }
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        if (lane + 32 * i >= n) continue;
        float y = __fmul_rn(x[i], factor);
        part[lane + 32 * i] = inverse && flip >> i & 1 ? -y : y;
    }
    __syncwarp();
}

/** Rotates row[0 .. dim) in place, dim a multiple of 8 up to 32 PER_LANE. row is in shared memory; all lanes of one
 *  warp call this. */
template <int PER_LANE = 8>
__device__ __forceinline__ void hadamard_row(float *row, int dim, const HadamardSigns &signs, bool inverse, int lane)
{
    int p = 1 << (31 - __clz(dim)), passes = p < dim ? 2 : 1;
#pragma unroll 1
    for (int i = 0; i < passes; i++) {
        int pass = inverse ? passes - 1 - i : i;
        hadamard_pass<PER_LANE>(pass ? row + dim - p : row, p, signs.pass(pass), inverse, lane);
    }
}

/* ---- asynchronous copies into shared memory; barriers and destinations by their shared address ---- */

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint32_t bar, int arrivals)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

/** To be called after barrier_init. A __syncthreads must follow before other threads or copies use the barriers. */
__device__ __forceinline__ void barrier_init_fence()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/** How many lanes of a warp arrive at a barrier behind which another warp overwrites what they have read. One is enough:
 *  it arrives after __syncwarp. compute-sanitizer's racecheck does not follow that and reports hazards, so in its builds
 *  (setup.py, build_sanitize) every lane arrives: slower (measured.md). */
#ifdef TQ_EVERY_LANE_ARRIVES
constexpr int ARRIVALS = 32;
#else
constexpr int ARRIVALS = 1;
#endif

__device__ __forceinline__ void barrier_arrive(uint32_t bar)
{
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" ::"r"(bar) : "memory");
}

/** Waits for the end of the phase of this parity. A new barrier's first phase has parity 0, the next ones 1, 0, .. */
__device__ __forceinline__ void barrier_wait(uint32_t bar, int parity)
{
#if __CUDA_ARCH__ >= 900
#define TQ_TEST_WAIT "mbarrier.try_wait.parity.shared.b64"
#else
#define TQ_TEST_WAIT "mbarrier.test_wait.parity.shared.b64"
#endif
    asm volatile("{ .reg .pred p;\n"
                 "WAIT: " TQ_TEST_WAIT " p, [%0], %1;\n"
                 "@p bra DONE;\n"
                 "bra WAIT;\n"
                 "DONE: }" ::"r"(bar),
                 "r"(parity)
                 : "memory");
#undef TQ_TEST_WAIT
}

/** Waits for the first phase of a barrier that send_cluster completes. */
__device__ __forceinline__ void barrier_wait_cluster(uint32_t bar)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p;\n"
                 "WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n"
                 "@p bra DONE;\n"
                 "bra WAIT;\n"
                 "DONE: }" ::"r"(bar)
                 : "memory");
#endif
}

/** Orders a thread's accesses to shared memory before later bulk copies. Belongs before the barrier between the two. */
__device__ __forceinline__ void shared_writes_before_copies()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/** Announces the bytes of bulk copies (compute capability 9.0). The same thread then copies them with copy_bulk. Sizes
 *  and addresses are multiples of 16. */
__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
#endif
}

/** Returns the L2 policy of copy_bulk. read_once: evict these bytes first, so that a KV cache that is streamed does not
 *  evict code and results. The constants are those of createpolicy (evict_first and evict_normal, all bytes); with the
 *  instruction itself the compiler would compute them at each copy, in ten operations. */
__device__ __forceinline__ uint64_t copy_policy(bool read_once)
{
    return read_once ? 0x12f0000000000000 : 0x1000000000000000;
}

__device__ __forceinline__ void copy_bulk(uint32_t to, const void *from, uint32_t bytes, uint32_t bar, uint64_t policy)
{
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(bar), "l"(policy)
        : "memory");
#endif
}

/** Starts a portable copy. The thread then calls wait_for_copies, or barrier_arrive_after_copies for a barrier that
 *  counts each thread once. */
__device__ __forceinline__ void copy_16(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_16(void *to, const void *from) { copy_16(shared_address(to), from); }

/** Stores x at a shared address, a multiple of 16. */
__device__ __forceinline__ void store_16(uint32_t to, uint4 x)
{
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

/** Waits for the thread's own copies. */
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

} // namespace tq
#endif
