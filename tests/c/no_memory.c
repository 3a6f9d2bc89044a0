/* A posix_memalign that fails on request: torch allocates CPU tensors with it. Preloaded by tests/out_of_memory.py. */
#define _ISOC11_SOURCE
#include <errno.h>
#include <stdlib.h>

static long calls; /* until the failure, the failing one included; 0: none fails */

/** Makes the n-th call from here on fail, once; 0: none. Returns the calls left to a failure set before. */
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
