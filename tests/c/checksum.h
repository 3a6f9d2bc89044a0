/* A checksum of bytes: FNV-1a (Fowler, Noll, Vo). */
#ifndef TQ_TESTS_CHECKSUM_H
#define TQ_TESTS_CHECKSUM_H
#include <stddef.h>
#include <stdint.h>

static inline uint64_t checksum(const void *data, size_t bytes)
{
    const uint8_t *at = data;
    uint64_t sum = 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes; i++) sum = (sum ^ at[i]) * 0x100000001b3u;
    return sum;
}
#endif
