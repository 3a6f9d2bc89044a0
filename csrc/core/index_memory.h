/* Memory of one call, which its thread keeps for the next one. */
#ifndef TQ_INDEX_MEMORY_H
#define TQ_INDEX_MEMORY_H
#include <stddef.h>
#include <stdint.h>

/** The most bytes that a thread keeps, until it ends. */
#define TQ_INDEX_KEPT ((size_t)8 << 20)

/** Returns 64-byte aligned, uninitialised memory, or NULL. A call inside another one gets memory of its own. */
void *tq_index_borrow(size_t bytes);
/** Gives back memory of tq_index_borrow. Does nothing for NULL. */
void tq_index_return(void *memory);

/** Arrays that lie one after the other. They are placed twice: without memory, to count the bytes, and then with it. */
typedef struct {
    uint8_t *memory; /* NULL: bytes are only counted */
    size_t bytes;    /* so far */
    int overflow;    /* whether `bytes` has overflowed */
} tq_index_arrays;

/** Places the next array, of n * m elements, 64-byte aligned. Returns NULL without memory. n and m are at least 0. */
void *tq_index_array(tq_index_arrays *arrays, int64_t n, int64_t m, size_t element);
#endif
