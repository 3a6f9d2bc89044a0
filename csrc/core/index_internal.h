/* What the files of the vector index share. */
#ifndef TQ_INDEX_INTERNAL_H
#define TQ_INDEX_INTERNAL_H
#include "internal.h"
#include "scan_kernels.h"

/** The table for the instruction set in use, or NULL with *error filled. */
const tq_scan_kernels *tq_get_scan_kernels(tq_error *error);
/** Levels by width and rank. */
void tq_index_levels(const tq_index_layout *layout, tq_scan_layout *scan);
/** What a level of a width counts, in units of u; 0 without bits. */
float tq_index_book_step(int32_t bits);
#endif
