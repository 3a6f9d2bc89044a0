/* The functions of a vector instruction set, for TQ_TABLE. codes.h and product.h say what a unit defines before it
 * includes this file. */
#ifndef TQ_KERNELS_TABLE_H
#define TQ_KERNELS_TABLE_H
#include "codes.h"
#include "product.h"
#include "recode.h"
#include "softmax.h"
#include "wave.h"

#endif
