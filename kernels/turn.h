/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_TURN_H
#define KVD_KERNELS_TURN_H

/*
 * The transform of quantised keys. A few channels of keys are much larger than the others, so codes
 * of 4 bits with a common scale leave little of the others. The orthonormal Walsh-Hadamard transform
 * spreads each number over its group (QuaRot, arXiv 2404.00456, section 4). Fixed signs before and
 * after it let no plain pattern, as an offset of all channels, become a single number. Together they
 * are their own inverse, and keep lengths and products. So attention transforms queries, not keys.
 * Values have no such channels, and gain nothing from it.
 */

#include <math.h>

#include "ipc/base/format.h"
#include "ipc/base/util.h"
#include "kernels/lanes.h"

KERNEL void turn_signs(float *x, uint32_t n) {
        for (uint32_t i = 0; i < n; i++)
                x[i] = TURN_SIGNS >> i & 1 ? -x[i] : x[i];
}

/* Writes the sums of pairs, then their differences. log2(n) such steps are the transform. */
KERNEL void turn_step(float *to, const float *x, uint32_t n) {
        for (uint32_t i = 0; i < n / 2; i++) {
                to[i] = x[2 * i] + x[2 * i + 1];
                to[n / 2 + i] = x[2 * i] - x[2 * i + 1];
        }
}

/* n: a power of two. */
KERNEL void turn_power(float *x, uint32_t n) {
        float other[KVD_GROUP], scale = 1.0f / sqrtf((float)n);
        bool here = true;

        turn_signs(x, n);
        for (uint32_t left = n; left > 1; left /= 2, here = !here)
                turn_step(here ? other : x, here ? x : other, n);
        for (uint32_t i = 0; i < n; i++)
                x[i] = scale * (here ? x[i] : other[i]);
        turn_signs(x, n);
}

/*
 * Transforms n numbers in place. If n is not a power of two, it is split into powers of two, the
 * largest first, and each part is transformed alone.
 */
KERNEL void turn_group(float *x, uint32_t n) {
        for (uint32_t part; n > 0; x += part, n -= part) {
                part = 1u << (31 - __builtin_clz(n));
                turn_power(x, part);
        }
}

/* Transforms a key of dim numbers in place, if its type is quantised. */
KERNEL void turn_key(float *x, uint32_t dim, enum kvd_number type) {
        for (uint32_t d = 0; d < dim && kvd_is_quantised(type); d += KVD_GROUP)
                turn_group(x + d, MIN(dim - d, KVD_GROUP));
}

#endif
