/* What a search keeps: heaps of the best so far, and rows that may be among the best. */
#ifndef TQ_INDEX_POOL_H
#define TQ_INDEX_POOL_H
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    double score; /* of a row, in float32, or the value of a list */
    int64_t id;
} hit;

static inline int better(hit a, hit b) { return a.score > b.score || (a.score == b.score && a.id < b.id); }

/** A heap whose root is the worst of the best. */
typedef struct {
    hit *hits;
    int64_t n;
} heap;

static inline void sift_down(hit *hits, int64_t n, int64_t at)
{
    hit moved = hits[at];
    for (int64_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && better(hits[child], hits[child + 1])) child++;
        if (!better(moved, hits[child])) break;
        hits[at] = hits[child];
    }
    hits[at] = moved;
}

/** Removes the worst hit of a heap that is not empty, and returns it. */
static inline hit take_worst(heap *h)
{
    hit worst = h->hits[0];
    h->hits[0] = h->hits[--h->n];
    sift_down(h->hits, h->n, 0);
    return worst;
}

/** Adds a hit, if it is among the best k so far. */
static inline void keep(heap *h, int64_t k, hit new_hit)
{
    if (h->n == k) {
        if (!better(new_hit, h->hits[0])) return;
        h->hits[0] = new_hit;
        sift_down(h->hits, k, 0);
        return;
    }
    int64_t at = h->n++;
    for (; at && better(h->hits[(at - 1) / 2], new_hit); at = (at - 1) / 2) h->hits[at] = h->hits[(at - 1) / 2];
    h->hits[at] = new_hit;
}

typedef struct {
    hit hit;
    float upper;
} candidate;

/** The results of one thread for one query. */
typedef struct {
    float *lows; /* the k largest lower bounds, the least first, as a heap */
    int64_t n_lows, n, room;
    candidate *candidates, *first; /* first: the initial array, which the pool does not own */
    float limit; /* rows with upper bounds below it are out: the k-th largest lower bound, or a first limit */
    int failed;  /* no memory */
} pool;

static inline void push_low(pool *p, int64_t k, float low)
{
    float *lows = p->lows;
    int64_t at = 0;
    if (p->n_lows < k) {
        for (at = p->n_lows++; at && lows[(at - 1) / 2] > low; at = (at - 1) / 2) lows[at] = lows[(at - 1) / 2];
    } else {
        if (low <= lows[0]) return;
        for (int64_t child; (child = 2 * at + 1) < k; at = child) {
            if (child + 1 < k && lows[child + 1] < lows[child]) child++;
            if (low <= lows[child]) break;
            lows[at] = lows[child];
        }
    }
    lows[at] = low;
    if (p->n_lows == k && lows[0] > p->limit) p->limit = lows[0];
}

static inline void free_candidates(pool *p)
{
    if (p->candidates != p->first) free(p->candidates);
}

/** Makes room for one more candidate: drops those below the limit, then doubles the room if half of it is full. */
static inline int make_room(pool *p)
{
    int64_t n = 0;
    for (int64_t i = 0; i < p->n; i++)
        if (p->candidates[i].upper >= p->limit) p->candidates[n++] = p->candidates[i];
    p->n = n;
    if (2 * n < p->room) return 1;
    int64_t room = 2 * p->room;
    candidate *larger = malloc((size_t)room * sizeof *larger);
    if (!larger) {
        p->failed = 1;
        return 0;
    }
    memcpy(larger, p->candidates, (size_t)n * sizeof *larger);
    free_candidates(p);
    p->candidates = larger;
    p->room = room;
    return 1;
}

static inline void push_candidate(pool *p, candidate c)
{
    if (p->n < p->room || make_room(p)) p->candidates[p->n++] = c;
}
#endif
