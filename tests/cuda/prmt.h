/* prmt of csrc/cuda/device/device.cuh for a host compiler, as the PTX manual defines it. */
#ifndef TQ_TESTS_PRMT_H
#define TQ_TESTS_PRMT_H
#include <stdint.h>

namespace tq
{

inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t s)
{
    const uint64_t bytes = (uint64_t)b << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t nibble = s >> 4 * i & 15, byte = (uint32_t)(bytes >> 8 * (nibble & 7) & 255);
        r |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return r;
}

} // namespace tq
#endif
