// Attention of many query tokens and its harness, on a GPU that the host simulates: tests/test_chunk_kernel.py.
#include "cuda/attend/chunk/chunk.cu"
#include "cuda/attend/chunk/cut.cu"

#include "chunk_harness.cu"

namespace tq
{

alignas(128) thread_local uint8_t chunk::chunk_memory[SIMULATED_SHARED];

uint8_t *simulated_shared_memory() { return chunk::chunk_memory; }

} // namespace tq
