/* What the files of the vector index share. */
#ifndef TQ_INDEX_INTERNAL_H
#define TQ_INDEX_INTERNAL_H
#include "internal.h"
#include "scan_kernels.h"

/** The table for the instruction set in use, or NULL with *error filled. */
const tq_scan_kernels *tq_get_scan_kernels(tq_error *error);
/** Levels by width and rank. */
void tq_index_levels(const tq_index_layout *layout, tq_scan_layout *scan);

enum { TQ_SCAN_BITS = 6 }; /* the widest codes that are ranks */

/** Levels of N(0, 1) by rank, in units of `step`, and what lies between them. */
typedef struct {
    int32_t n_levels;
    float step;
    int8_t levels[64];
    float thresholds[63]; /* rank = how many are <= u */
} tq_index_book;

/** The book of 1..6 bits. */
void tq_get_index_book(int32_t bits, tq_index_book *book);

/** A row's score, but for the query's constant, is at most scale * (sum * unit + margin) + offset, where `sum` is of table entries for
 *  its leading bits (kernels/scan_signs.h), unless what the other bits add, taken as normal, is beyond 2.5 or 4 standard deviations. */
typedef struct {
    float unit, margin;
} tq_sign_query;

/** Tables of 64 bytes for so many planes. */
int32_t tq_sign_tables(int32_t planes);
/** q [32 groups] counts `unit`; tables: [tq_sign_tables(planes), 64]. */
void tq_sign_query_make(const tq_index_layout *layout, const int16_t *q, double unit, uint8_t *tables,
                        tq_sign_query *out);
#endif
