/* AVX-512 with VNNI and VBMI (Ice Lake, Sapphire Rapids, Zen 4 on). */
#include "avx512_vnni.h"
#include "table.h"

TQ_TABLE(avx512_vnni, vector);
