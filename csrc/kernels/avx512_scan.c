/* The scan of an index, compiled for this instruction set. */
#include "scan_signs.h"

const tq_scan_kernels tq_scan_avx512 = TQ_SCAN_TABLE;
