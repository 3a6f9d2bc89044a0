/* posix_memalign, which torch takes the memory of CPU tensors from, with a failure to order; preloaded by
 * tests/out_of_memory.py. */
#define _ISOC11_SOURCE
#include <errno.h>
#include <stdlib.h>

static long calls; /* to the failure, this one included; 0: none is to come */

/** The n-th call from here on fails, once; 0: none does. Returns how many calls there were still to go. */
long tq_test_fail_allocation(long n)
{
    long left = calls;
    calls = n;
    return left;
}

int posix_memalign(void **out, size_t alignment, size_t bytes)
{
    if (calls > 0 && --calls == 0) return ENOMEM;
    void *found = aligned_alloc(alignment, bytes);
    if (!found) return ENOMEM;
    *out = found;
    return 0;
}
