/* The one channel for errors: a status and, if the caller gave a tq_error, that struct filled in. */
#include "internal.h"

const char *tq_status_message(tq_status status)
{
    switch (status) {
    case TQ_OK: return "success";
    case TQ_E_VALUE: return "an argument has a value that is out of range or does not fit the others";
    case TQ_E_TYPE: return "an argument has the wrong type";
    case TQ_E_MEMORY: return "out of memory";
    case TQ_E_UNSUPPORTED: return "this machine does not support the request";
    case TQ_E_CUDA: return "the CUDA runtime reported an error";
    }
    return "unknown status";
}

tq_status tq_fail(tq_error *error, tq_status status, const char *argument, int64_t index, double got, const char *wants)
{
    if (error) *error = (tq_error){status, argument, wants, index, got};
    return status;
}

tq_status tq_need(const tq_array *arrays, int32_t n, tq_error *error)
{
    for (int32_t i = 0; i < n; i++)
        if (!arrays[i].at) return tq_refuse(error, arrays[i].name, 0, "a pointer, not NULL");
    return TQ_OK;
}

tq_status tq_product(int64_t a, int64_t b, int64_t *out, const char *argument, tq_error *error)
{
    if (__builtin_mul_overflow(a, b, out)) return tq_refuse(error, argument, a, "small enough that sizes fit 63 bits");
    return TQ_OK;
}

int tq_overlap(const void *a, int64_t a_bytes, const void *b, int64_t b_bytes)
{
    if (!a || !b || a_bytes <= 0 || b_bytes <= 0) return 0;
    uintptr_t a0 = (uintptr_t)a, b0 = (uintptr_t)b;
    return a0 < b0 + (uintptr_t)b_bytes && b0 < a0 + (uintptr_t)a_bytes;
}
