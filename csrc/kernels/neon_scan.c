/* The scan of an index, compiled for this instruction set. */
#include "scan.h"

const tq_scan_kernels tq_scan_neon = {"neon", scan_unpack, scan_products, scan_product};
