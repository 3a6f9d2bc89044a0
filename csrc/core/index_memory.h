/* Memory of one call, which its thread keeps for the next one. */
#ifndef TQ_INDEX_MEMORY_H
#define TQ_INDEX_MEMORY_H
#include <stddef.h>
#include <stdint.h>

/** At most so many bytes are kept, until the thread ends. */
#define TQ_INDEX_KEPT ((size_t)8 << 20)

/** 64-byte aligned memory with anything in it, or NULL. A call that is inside another one gets its own. */
void *tq_index_borrow(size_t bytes);
/** Ends the use of what tq_index_borrow gave; NULL: of nothing. */
void tq_index_return(void *memory);

/** Arrays that lie one after the other. It is filled twice: without memory, to learn how much there must be, and with it.
 */
typedef struct {
    uint8_t *memory; /* NULL the first time */
    size_t bytes;    /* so far */
    int overflow;    /* whether they are too many to count */
} tq_index_arrays;

/** The next array, of n times m elements, 64-byte aligned; NULL the first time. n and m are at least 0. */
void *tq_index_array(tq_index_arrays *arrays, int64_t n, int64_t m, size_t element);
#endif
