/* Memory that a thread keeps between calls of the index: a search of one query takes less time than the system needs
 * for new pages. The destructor of a key frees it when the thread ends. */
#include "index_memory.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { LINE = 64 };

#if defined(__SANITIZE_ADDRESS__) /* the line after each array is poisoned, as after memory of malloc */
void __asan_poison_memory_region(const volatile void *memory, size_t bytes);
void __asan_unpoison_memory_region(const volatile void *memory, size_t bytes);
enum { GAP = LINE };
#else
enum { GAP = 0 };
#endif

/** Lies in front of the memory. */
typedef struct {
    size_t bytes;
    void *start; /* what malloc gave */
} header;

static pthread_key_t kept;
static atomic_int keeps; /* whether there is a key */
static pthread_once_t kept_once = PTHREAD_ONCE_INIT;

static void free_kept(void *h) { free(((header *)h)->start); }

static void make_key(void) { keeps = pthread_key_create(&kept, free_kept) == 0; }

/* Leaves no destructor behind when the library is unloaded. */
__attribute__((destructor)) static void forget_key(void)
{
    if (!keeps) return;
    header *h = pthread_getspecific(kept);
    keeps = 0;
    pthread_key_delete(kept);
    if (h) free_kept(h);
}

void *tq_index_borrow(size_t bytes)
{
    pthread_once(&kept_once, make_key);
    header *h = keeps ? pthread_getspecific(kept) : NULL;
    if (h) {
        pthread_setspecific(kept, NULL);
        if (h->bytes >= bytes) return h + 1;
        free_kept(h);
    }
    if (bytes > SIZE_MAX / 2) return NULL;
    void *start = malloc(bytes + 2 * LINE);
    if (!start) return NULL;
    uintptr_t memory = ((uintptr_t)start + sizeof *h + LINE - 1) / LINE * LINE;
    h = (header *)memory - 1;
    *h = (header){bytes, start};
    return h + 1;
}

void tq_index_return(void *memory)
{
    if (!memory) return;
    header *h = (header *)memory - 1;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(memory, h->bytes);
#endif
    if (!keeps || h->bytes > TQ_INDEX_KEPT || pthread_getspecific(kept) || pthread_setspecific(kept, h)) free_kept(h);
}

void *tq_index_array(tq_index_arrays *arrays, int64_t n, int64_t m, size_t element)
{
    size_t count, bytes = 0, lines, start = arrays->bytes;
    if (__builtin_mul_overflow((size_t)n, (size_t)m, &count) || __builtin_mul_overflow(count, element, &bytes) ||
        __builtin_add_overflow(bytes, LINE - 1 + GAP, &lines) ||
        __builtin_add_overflow(start, lines / LINE * LINE, &arrays->bytes))
        arrays->overflow = 1;
    if (!arrays->memory || arrays->overflow) return NULL;
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(arrays->memory + start + bytes, arrays->bytes - start - bytes);
#endif
    return arrays->memory + start;
}
