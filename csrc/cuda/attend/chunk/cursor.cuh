/* The walk of a block through its piece of the line. All lanes of a warp must make a Cursor together. */
#ifndef TQ_CUDA_ATTEND_CHUNK_CURSOR_CUH
#define TQ_CUDA_ATTEND_CHUNK_CURSOR_CUH
#include "cuda/attend/chunk/params.h"

namespace tq
{
namespace chunk
{

struct Cursor {
    int32_t left; /* pages of the piece that are left, this one included */
    int32_t b, h, tile, page, pages, tiles, length;

    __device__ __forceinline__ explicit Cursor(const Args &a)
    {
        const int lane = threadIdx.x % 32;
        const int32_t total = a.line[a.batch], unit = piece_begin(a, blockIdx.x, total);
        left = piece_begin(a, blockIdx.x + 1, total) - unit;
        b = h = tile = page = pages = tiles = length = 0;
        if (left <= 0) return;
        for (int32_t first = 0;; first += 32) { /* finds the first sequence that ends behind the unit */
            const uint32_t behind = __ballot_sync(ALL_LANES, a.line[min(first + lane + 1, a.batch)] > unit);
            if (!behind) continue;
            b = first + __ffs(behind) - 1;
            break;
        }
        take_sequence(a);
        const int32_t in = unit - a.line[b], segment = in / pages;
        page = in - segment * pages;
        h = segment / tiles;
        tile = segment - h * tiles;
    }

    __device__ __forceinline__ int32_t segment(const Args &a) const { return (b * a.heads + h) * a.tiles + tile; }
    /** Returns how many pages of the segment are left in the piece, this one included. */
    __device__ __forceinline__ int32_t here() const { return min(left, pages - page); }
    /** Moves to the next page of the piece. Returns true if it belongs to another segment. */
    __device__ __forceinline__ bool next_page(const Args &a)
    {
        page++, left--;
        if (page < pages) return false;
        next(a);
        return true;
    }
    __device__ __forceinline__ void next_segment(const Args &a)
    {
        const int32_t n = here();
        page += n, left -= n;
        if (page == pages) next(a);
    }

private:
    __device__ __forceinline__ void take_sequence(const Args &a)
    {
        const Share share(a, b);
        length = share.length, pages = share.pages, tiles = share.tiles;
    }
    __device__ __forceinline__ void next(const Args &a)
    {
        page = 0;
        if (left <= 0 || ++tile < tiles) return;
        tile = 0;
        if (++h < a.heads) return;
        h = 0;
        do {
            b++;
            take_sequence(a);
        } while (pages == 0 || tiles == 0);
    }
};

} // namespace chunk
} // namespace tq
#endif
