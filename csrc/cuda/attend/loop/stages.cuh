/* A team's stages (shared memory that units are loaded into, and its barriers), and where the next unit is. */
#ifndef TQ_CUDA_ATTEND_LOOP_STAGES_CUH
#define TQ_CUDA_ATTEND_LOOP_STAGES_CUH
#include "cuda/attend/rows/sequence.cuh"
#include "cuda/attend/variant.h"
#include "cuda/tile/fragments.cuh"

namespace tq
{

/** Whether kernel V runs on the architecture being compiled: bulk copies are used on compute capability 9.x alone
 *  (look_at_device). Elsewhere the kernel is left empty. */
template <class V> __device__ constexpr bool is_for_this_device()
{
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1000)
    return !V::BULK;
#else
    return true;
#endif
}

/** Keys or values of a unit in shared memory. A stage is |key codes|value codes|key scales|value scales|. If a page is
 *  two units, the copy of the scales also brings scales of the other unit, which then lie between them. */
struct StageView {
    const uint8_t *codes;
    const uint8_t *scales; /* fp16, in column order: number 4 g + r of a tile is of its token g + 8 r, r = 0..3 */
};

/** The scales of a lane's tokens in TILES tiles. Word i has those of its tokens 2 i and 2 i + 1. */
template <int TILES> struct LaneScales {
    uint32_t pair[2 * TILES];

    __device__ __forceinline__ void load(StageView side, int first, int lane)
    {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            uint2 four = *reinterpret_cast<const uint2 *>(side.scales + 2 * ((first + tile) * TQ_TILE + (lane & ~3)));
            pair[2 * tile] = four.x;
            pair[2 * tile + 1] = four.y;
        }
    }
    __device__ __forceinline__ float operator[](int i) const
    {
        __half2 h = *reinterpret_cast<const __half2 *>(&pair[i / 2]);
        return i % 2 ? __high2float(h) : __low2float(h);
    }
    /** Whether these are value scales of the absent record. */
    __device__ __forceinline__ bool absent() const { return pair[0] == NO_PAGE; }
    __device__ __forceinline__ bool any_zero() const
    {
        bool any = false;
#pragma unroll
        for (int i = 0; i < 4 * TILES; i++) any |= !(pair[i / 2] & (i % 2 ? 0xffff0000u : 0x0000ffffu));
        return any;
    }
    __device__ __forceinline__ void clear(int i) { pair[i / 2] &= i % 2 ? 0x0000ffffu : 0xffff0000u; }
};

/** A team's ring of stages. Key codes with all scales, and value codes, have separate barriers, so that the next unit's
 *  keys are loaded while this unit's values are used. Addresses are in shared memory. A stage has four barriers: full
 *  keys, full values, empty keys, empty values; a team of one warp never waits for an empty stage. ONE_STAGE: there is
 *  only one stage, and the team has V::TEAM_WARPS warps. */
template <class V, bool ONE_STAGE_ = false> struct Ring {
    static constexpr bool ONE_STAGE = ONE_STAGE_;
    uint32_t stages, barriers; /* of the team */
    int stage, parity;         /* of the current unit */
    uint64_t policy;           /* of its copies */

    __device__ __forceinline__ uint32_t barrier(int stage_, int which) const
    {
        return barriers + (ONE_STAGE ? 0 : 32 * stage_) + 8 * which;
    }

    __device__ __forceinline__ StageView view(const AttendArgs &a, const SideArgs &side) const
    {
        const uint8_t *at =
            shared_bytes + (stages - shared_address(shared_bytes)) + (ONE_STAGE ? 0 : stage * a.stage_bytes);
        return {at + side.at_codes, at + side.at_scales};
    }

    __device__ __forceinline__ static int team_warps(const AttendArgs &a)
    {
        return ONE_STAGE || V::TEAM_WARPS > 1 ? V::TEAM_WARPS : a.team_warps;
    }

    /** Whether a thread of the team issues copies of pages. With bulk copies the first warp does (one lane issues all);
     *  otherwise every thread issues its share. */
    __device__ __forceinline__ static bool sends(int thread) { return !V::BULK || thread < 32; }

    /** Issues the copies that fill half a stage. which: 0 for key codes and all scales, 1 for value codes. All threads
     *  for which `sends` is true call it. */
    __device__ __forceinline__ void fill(const AttendArgs &a, int stage_, int which, const uint8_t *record,
                                         int32_t unit, int thread) const
    {
        uint32_t to = stages + (ONE_STAGE ? 0 : stage_ * a.stage_bytes), full = barrier(stage_, which);
        int second = V::TILES == 4 ? 0 : unit & (a.page_units - 1); /* four tiles are at least a page */
        const CopyArgs *c = a.copies[second];
        const int first = which ? COPY_VALUES : COPY_KEYS, last = which ? COPY_VALUES : COPY_SCALES;
        if constexpr (V::BULK) {
            if (!elect_lane()) return;
            barrier_expect(full, a.copy_bytes[second][which]);
#pragma unroll
            for (int k = 0; k < COPIES; k++)
                if (k >= first && k <= last) copy_bulk(to + c[k].to, record + c[k].from, c[k].bytes, full, policy);
        } else {
            for (int k = first; k <= last; k++)
                for (int i = 16 * thread; i < c[k].bytes; i += 16 * 32 * a.team_warps)
                    copy_16(to + c[k].to + i, record + c[k].from + i);
            barrier_arrive_after_copies(full);
        }
    }

    __device__ __forceinline__ void advance(const AttendArgs &a)
    {
        if (ONE_STAGE || ++stage == a.stages) stage = 0, parity ^= 1;
    }
};

/** Initialises a team's barriers. One of its threads calls it. */
template <class V, bool ONE_STAGE>
__device__ __forceinline__ void init_barriers(const AttendArgs &a, const Ring<V, ONE_STAGE> &ring)
{
    int stages = ONE_STAGE ? 1 : a.stages, team_warps = ring.team_warps(a), used = team_warps > 1 ? 4 : 2;
#pragma unroll 1
    for (int i = 0; i < stages; i++)
#pragma unroll(ONE_STAGE ? 4 : 1)
        for (int k = 0; k < used; k++)
            barrier_init(ring.barrier(i, k), k >= 2 ? ARRIVALS * team_warps : V::BULK ? 1 : 32 * team_warps);
    barrier_init_fence();
}

/** Releases half of the current unit's stage and, if `more`, starts to load that half of another unit there. */
template <class R>
__device__ __forceinline__ void refill(const AttendArgs &a, const R &ring, int which, bool more, const uint8_t *record,
                                       int32_t unit, int thread)
{
    __syncwarp();
    if (ring.team_warps(a) > 1) {
        uint32_t empty = ring.barrier(ring.stage, 2 + which);
        if (thread % (32 / ARRIVALS) == 0) barrier_arrive(empty);
        if (R::sends(thread)) barrier_wait(empty, ring.parity);
    }
    if (more && ring.sends(thread)) ring.fill(a, ring.stage, which, record, unit, thread);
}

/** Where the next unit to load is. */
struct UnitPlace {
    int32_t unit;         /* in its sequence */
    uint32_t table, head; /* the sequence's first entry in the block table; offset of the KV head's record in a page */

    __device__ __forceinline__ UnitPlace(const AttendArgs &a, int32_t unit_, int32_t b, int32_t h)
        : unit(unit_), table((uint32_t)b * (uint32_t)a.p.layer.max_pages), head(h * (uint32_t)a.record_bytes)
    {
    }
    /** Returns the index of the unit's page in the block table. */
    __device__ __forceinline__ uint32_t entry(const AttendArgs &a) const
    {
        return table + (uint32_t)(unit >> (a.page_units - 1));
    }
    __device__ __forceinline__ int32_t page(const AttendArgs &a) const { return a.p.layer.block_table[entry(a)]; }
    /** Returns the address of the unit's record in `page`, or of the absent record if the cache has no such page. A
     *  branch that skips absent pages would cost time (measured.md). */
    __device__ __forceinline__ const uint8_t *record(const AttendArgs &a, int32_t page) const
    {
        const uint8_t *there = a.p.layer.pages + ((uint64_t)(uint32_t)page * a.page_bytes + head);
        return (uint32_t)page < a.page_limit ? there : a.absent_record;
    }
};

/** Returns the packed index of the first token of a unit. tiles: token tiles of a unit. */
__device__ __forceinline__ int32_t first_token(const AttendArgs &a, int32_t unit, int tiles)
{
    const int32_t second = a.page_units - 1, page = unit >> second;
    return page * a.page_tokens + (unit & second) * tiles * TQ_TILE;
}

} // namespace tq
#endif
