/* A GPU of compute capability 9.0 for a host compiler, as far as csrc/cuda/attend/chunk needs one
 * (tests/test_chunk_kernel.py). Threads of a block are fibers of one thread, which switch only where a thread waits.
 * Bulk copies and products of warp groups end late: a copy arrives some turns later, and products read and write memory
 * and registers as late as they may, when a thread waits for them. Barriers have the phases and counts of the
 * hardware's. There is no model of time, and none of caches or of the order of memory accesses. */
#ifndef TQ_SIMULATED_CUDA_RUNTIME_H
#define TQ_SIMULATED_CUDA_RUNTIME_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <map>
#include <vector>

#include "cuda/device/host.h"

/* ---- the language ---- */
#define __global__
#define __constant__ static const
#define __shared__ thread_local /* blocks run one after the other */
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __noinline__ __attribute__((noinline))
#define __CUDA_ARCH_FEAT_SM90_ALL 1
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::max;
using std::min;
inline uint32_t max(uint32_t a, int b) { return std::max(a, (uint32_t)b); }

/* ---- fibers ---- */
namespace simulated
{

extern "C" void simulated_switch(void **from, void *to);
__asm__(".text\n.globl simulated_switch\nsimulated_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

struct Index {
    unsigned x = 0, y = 0, z = 0;
};

struct Product { /* a thread's share */
    float *c;
    const uint32_t *a; /* registers; null: shared memory at a_at */
    uint64_t a_at, b_at;
    int n;
    bool add, ends;
};

struct Thread {
    void *stack_pointer = nullptr;
    Index index;
    int lane, warp;
    bool done = false;
    std::vector<Product> products;
};

/** 32 lanes meet, and each sees what all of them brought. */
struct Meeting {
    int arrived = 0;
    unsigned turn = 0;
    uint64_t brought[32], seen[32];
};

struct Barrier {
    int count = 0, pending = 0, bytes = 0, phase = 0;
};

struct Copy {
    uint8_t *to;
    const uint8_t *from;
    uint32_t bytes, barrier;
    int wait;
};

constexpr int STACK = 1 << 16;

struct Block {
    std::vector<Thread> threads;
    std::vector<Meeting> warps;
    struct Named {
        int arrived = 0;
        unsigned turn = 0;
    } named[16];
    std::map<uint32_t, Barrier> barriers;
    std::vector<Copy> copies;
    std::vector<uint8_t> stacks;
    void *scheduler = nullptr;
    Index index, grid;
    uint8_t *shared = nullptr;
    uint32_t random = 1;
    uint64_t changes = 0; /* how often anything changed that a thread may wait for */
    std::function<void()> body;
};
inline Block block;
inline Thread *now;

inline uint32_t random_below(uint32_t n)
{
    block.random = block.random * 1664525u + 1013904223u;
    return (uint32_t)((uint64_t)(block.random >> 8) * n >> 24);
}

inline void yield() { simulated_switch(&now->stack_pointer, block.scheduler); }

inline void begin_fiber()
{
    block.body();
    now->done = true;
    block.changes++;
    for (;;) yield();
}

inline Barrier &barrier_at(uint32_t at)
{
    auto found = block.barriers.find(at);
    if (found != block.barriers.end()) return found->second;
    printf("no barrier at %u\n", at);
    exit(3);
}

inline void end_phase_if_complete(Barrier &b)
{
    if (b.pending < 0) printf("more arrivals than a barrier has\n"), exit(3);
    if (b.pending || b.bytes) return;
    b.phase ^= 1;
    b.pending = b.count;
    block.changes++;
}

inline void move_copies()
{
    for (size_t i = 0; i < block.copies.size();) {
        Copy &c = block.copies[i];
        if (c.wait-- > 0) {
            i++;
            continue;
        }
        memcpy(c.to, c.from, c.bytes);
        Barrier &b = barrier_at(c.barrier);
        b.bytes -= (int)c.bytes;
        end_phase_if_complete(b);
        block.copies.erase(block.copies.begin() + i);
    }
}

inline uint64_t meet_in_warp(uint64_t bring, int from_lane = -1)
{
    Meeting &m = block.warps[now->warp];
    m.brought[now->lane] = bring;
    if (++m.arrived == 32) {
        m.arrived = 0;
        memcpy(m.seen, m.brought, sizeof m.seen);
        m.turn++, block.changes++;
    } else {
        for (const unsigned turn = m.turn; m.turn == turn;) yield();
    }
    return from_lane < 0 ? 0 : m.seen[from_lane];
}
inline const uint64_t *seen_in_warp() { return block.warps[now->warp].seen; }

inline void meet_named(int id, int threads)
{
    Block::Named &n = block.named[id];
    if (++n.arrived == threads) {
        n.arrived = 0;
        n.turn++, block.changes++;
    } else {
        for (const unsigned turn = n.turn; n.turn == turn;) yield();
    }
}

/** Runs a block to its end. */
inline void run_block(int threads)
{
    block.threads.assign(threads, {});
    block.warps.assign((threads + 31) / 32, {});
    for (Block::Named &n : block.named) n = {};
    block.barriers.clear();
    block.copies.clear();
    block.stacks.resize((size_t)threads * STACK + 64);
    for (int i = 0; i < threads; i++) {
        Thread &t = block.threads[i];
        t.index.x = i, t.lane = i % 32, t.warp = i / 32;
        uintptr_t top = ((uintptr_t)block.stacks.data() + (size_t)(i + 1) * STACK) / 64 * 64;
        void **at = (void **)(top - 8);
        *at-- = nullptr;            /* the return address of begin_fiber, which never returns */
        *at = (void *)&begin_fiber; /* aligned as behind a call */
        t.stack_pointer = at - 6;
    }
    uint64_t changes = block.changes;
    int idle = 0;
    for (bool more = true; more;) {
        more = false;
        move_copies();
        for (Thread &t : block.threads) {
            if (t.done) continue;
            more = true;
            if (random_below(8) == 0) continue; /* so that threads drift apart */
            now = &t;
            simulated_switch(&block.scheduler, t.stack_pointer);
        }
        idle = block.changes == changes ? idle + 1 : 0;
        changes = block.changes;
        if (idle > 10000) printf("a block waits for ever\n"), exit(3);
    }
}

} // namespace simulated

#define threadIdx (simulated::now->index)
#define blockIdx (simulated::block.index)
#define gridDim (simulated::block.grid)

struct BlockDim {
    operator unsigned() const { return (unsigned)simulated::block.threads.size(); }
};
struct BlockDims {
    BlockDim x;
};
inline BlockDims simulated_block_dims;
#define blockDim simulated_block_dims

inline void __syncthreads() { simulated::meet_named(0, (int)simulated::block.threads.size()); }
inline void __syncwarp() { simulated::meet_in_warp(0); }

/* ---- functions of the language ---- */
template <class T> uint64_t bits_of_value(T x)
{
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof x);
    return bits;
}
template <class T> T value_of_bits(uint64_t bits)
{
    T x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
template <class T> T __shfl_sync(uint32_t, T x, int lane)
{
    return value_of_bits<T>(simulated::meet_in_warp(bits_of_value(x), lane & 31));
}
template <class T> T __shfl_xor_sync(uint32_t, T x, int mask)
{
    return value_of_bits<T>(simulated::meet_in_warp(bits_of_value(x), simulated::now->lane ^ mask));
}
template <class T> T __shfl_up_sync(uint32_t, T x, int by)
{
    const int lane = simulated::now->lane;
    return value_of_bits<T>(simulated::meet_in_warp(bits_of_value(x), lane >= by ? lane - by : lane));
}
template <class T, class F> T reduce_in_warp(T x, F f)
{
    simulated::meet_in_warp(bits_of_value(x));
    const uint64_t *seen = simulated::seen_in_warp();
    T y = value_of_bits<T>(seen[0]);
    for (int i = 1; i < 32; i++) y = f(y, value_of_bits<T>(seen[i]));
    return y;
}
template <class T> T __reduce_max_sync(uint32_t, T x)
{
    return reduce_in_warp(x, [](T a, T b) { return a > b ? a : b; });
}
template <class T> T __reduce_add_sync(uint32_t, T x)
{
    return reduce_in_warp(x, [](T a, T b) { return (T)(a + b); });
}
inline bool __any_sync(uint32_t, bool x)
{
    return reduce_in_warp((int)x, [](int a, int b) { return a | b; });
}
inline bool __all_sync(uint32_t, bool x) { return !__any_sync(0, !x); }
inline uint32_t __ballot_sync(uint32_t, bool x)
{
    return reduce_in_warp(x ? 1u << simulated::now->lane : 0u, [](uint32_t a, uint32_t b) { return a | b; });
}
inline uint32_t __match_any_sync(uint32_t, int x)
{
    simulated::meet_in_warp((uint32_t)x);
    uint32_t same = 0;
    for (int i = 0; i < 32; i++) same |= (uint32_t)(simulated::seen_in_warp()[i] == (uint32_t)x) << i;
    return same;
}
inline int __ffs(uint32_t x) { return __builtin_ffs((int)x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }
inline int __dp4a(int a, int b, int c)
{
    for (int i = 0; i < 4; i++) c += (int8_t)(a >> 8 * i) * (int8_t)(b >> 8 * i);
    return c;
}
inline uint32_t __vmaxu2(uint32_t a, uint32_t b)
{
    return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
}
inline int __float_as_int(float x) { return value_of_bits<int>(bits_of_value(x)); }
inline uint32_t __float_as_uint(float x) { return value_of_bits<uint32_t>(bits_of_value(x)); }
inline float __int_as_float(int x) { return value_of_bits<float>(bits_of_value(x)); }
inline float __uint_as_float(uint32_t x) { return value_of_bits<float>(bits_of_value(x)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frsqrt_rn(float x) { return (float)(1 / sqrt((double)x)); }
inline float rsqrtf(float x) { return __frsqrt_rn(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __sinf(float x) { return sinf(x); }
template <class T> T __ldcg(const T *p) { return *p; }
inline uint32_t __cvta_generic_to_shared(const void *p)
{
    return (uint32_t)((const uint8_t *)p - simulated::block.shared);
}

/* ---- the runtime ---- */
enum cudaError_t {
    cudaSuccess,
    cudaErrorInsufficientDriver,
    cudaErrorNoKernelImageForDevice,
    cudaErrorUnsupportedPtxVersion
};
enum { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaStreamCaptureModeGlobal };
using cudaStream_t = void *;
using cudaGraph_t = std::vector<std::function<void()>> *;
using cudaGraphExec_t = cudaGraph_t;
using cudaEvent_t = int;
inline cudaGraph_t simulated_capture;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char *cudaGetErrorString(cudaError_t) { return ""; }
inline cudaError_t cudaMalloc(void **p, size_t n)
{
    *p = aligned_alloc(256, (n + 511) / 256 * 256);
    return cudaSuccess;
}
inline cudaError_t cudaFree(void *p) { return free(p), cudaSuccess; }
inline cudaError_t cudaMemcpy(void *to, const void *from, size_t n, int) { return memcpy(to, from, n), cudaSuccess; }
inline cudaError_t cudaMemset(void *to, int x, size_t n) { return memset(to, x, n), cudaSuccess; }
inline cudaError_t cudaStreamCreate(cudaStream_t *s) { return *s = nullptr, cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamBeginCapture(cudaStream_t, int)
{
    return simulated_capture = new std::vector<std::function<void()>>(), cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *g)
{
    *g = simulated_capture;
    return simulated_capture = nullptr, cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, int) { return *e = g, cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
inline cudaError_t cudaGraphDestroy(cudaGraph_t g) { return delete g, cudaSuccess; }
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t)
{
    for (auto &launch : *e) launch();
    return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t *) { return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t, cudaEvent_t) { return *ms = 1, cudaSuccess; }
#endif
