/* The arguments of the kernels for many query tokens.
 *
 *   row       (query token, query head) of a KV head: row = token * heads_per_kv + head
 *   segment   (sequence, KV head, tile of rows): all packed pages of the sequence
 *   line      the pages of all segments, one after the other, cut into equal pieces, one for each block
 *   part      the result of a block's pages of a segment: a row's reference, sum of weights, and weighted values */
#ifndef TQ_CUDA_ATTEND_CHUNK_PARAMS_H
#define TQ_CUDA_ATTEND_CHUNK_PARAMS_H
#include "cuda/attend/chunk/layout.h"
#include "cuda/device/wave.cuh"

namespace tq
{
namespace chunk
{

/** A prepared row: base-2 logit = scale * 2^e * product + bias - variance * (key scale)^2, e of the decoded keys. */
struct Row {
    float scale, bias, variance, unused;
};

/** A row's part without the values. Weights are 2^(logit - reference). */
struct Total {
    float reference, sum;
};

struct WaveInfo;

struct Args {
    const uint8_t *pages;
    const int32_t *block_table, *lengths, *query_start_loc;
    int64_t page_bytes, record_bytes;
    uint32_t page_limit;
    int32_t batch, heads, max_pages, head_dim, groups, rotation; /* heads: KV heads */
    int32_t query_tokens, total_tokens, heads_per_kv, rows;      /* rows: upper bound for a KV head */
    int32_t tile_rows, tiles, segments;                          /* tiles: of rows, upper bound for a KV head */
    int32_t blocks;                                              /* of the kernel on pages */
    int32_t ring, slot_bytes;                                    /* slots of packed pages in shared memory */
    int32_t wave_room;                                           /* bytes behind the ring for rows of the wave */
    int32_t dtype;
    const void *q;
    void *out;
    float *lse;
    int64_t q_batch, q_head, q_token, out_batch, out_head, out_token, lse_batch, lse_head, lse_token;
    float softmax_scale, softcap, variance; /* variance: of a query of norm 1 and key scale 1, in base-2 logits */
    Side key, value;
    KeyMoments moments;
    HadamardSigns signs;
    LevelTables tables;
    int32_t sinks, wave_sets; /* wave_sets: 1, or one for each sequence with position_offset */
    const int32_t *position_offset;
    /* workspace */
    int32_t *line;   /* [batch + 2]: pages before each sequence, in all, and of the longest sequence */
    __half *queries; /* [segments][tile_rows / TEAM_ROWS][chunks][TEAM_ROWS][8], channels in the order of channel_at */
    Row *row_args;   /* [segments][tile_rows] */
    Total *totals;   /* [blocks + segments][tile_rows]: block i's part of segment s is at i + s */
    float *sums;     /* [blocks + segments][tile_rows][32 * groups], in the order of totals */
    WaveInfo *wave;  /* wave.cuh; NULL without a wave, as the next three */
    float *wave_rows;
    uint4 *wave_basis, *wave_pages;
};
static_assert(sizeof(Args) <= 4096, "kernel parameters");

/** The query tokens of a sequence: the first one's index in q, and their number. */
struct Queries {
    int32_t first, count;
};

__device__ __forceinline__ Queries queries_of(const Args &a, int32_t b)
{
    if (!a.query_start_loc) return {0, a.query_tokens};
    const int32_t first = min(max(a.query_start_loc[b], 0), a.total_tokens),
                  end = min(max(a.query_start_loc[b + 1], first), a.total_tokens);
    return {first, min(end - first, a.query_tokens)};
}

__device__ __forceinline__ int32_t length_of(const Args &a, int32_t b)
{
    return min(max(a.lengths[b], 0), a.max_pages * PAGE);
}

/** The share that a sequence has of the line. */
struct Share {
    int32_t length, pages, tiles; /* tiles of rows of a KV head */

    __device__ __forceinline__ Share(const Args &a, int32_t b)
        : length(length_of(a, b)), pages((length + PAGE - 1) / PAGE),
          tiles((queries_of(a, b).count * a.heads_per_kv + a.tile_rows - 1) / a.tile_rows)
    {
    }
    __device__ __forceinline__ int32_t units(const Args &a) const { return pages * tiles * a.heads; }
};

/** Returns how many blocks share a line of `total` pages. Each has at least one page, unless there is none. */
__device__ __forceinline__ int32_t blocks_of(const Args &a, int32_t total) { return max(min(a.blocks, total), 1); }
/** Returns the first page, in the line, of a block's piece. */
__device__ __forceinline__ int32_t piece_begin(const Args &a, int32_t block, int32_t total)
{
    const int32_t blocks = blocks_of(a, total);
    return (int32_t)((int64_t)min(block, blocks) * total / blocks);
}
/** Returns the block that has page `unit` of the line. */
__device__ __forceinline__ int32_t block_of(const Args &a, int32_t unit, int32_t total)
{
    return (int32_t)((((int64_t)unit + 1) * blocks_of(a, total) - 1) / total);
}

} // namespace chunk
} // namespace tq
#endif
