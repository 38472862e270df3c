/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_BYTES_H
#define KVD_KERNELS_BYTES_H

/* Rounds to numbers of 8 bits (kvd_ops.write_row), on processors and GPUs. */

#include <math.h>
#include <string.h>

#include "kernels/variants.h"

KERNEL uint32_t bits_of(float x) {
        uint32_t bits;

        memcpy(&bits, &x, sizeof bits);
        return bits;
}

/*
 * A number without its sign: the nearest, even on a tie, and no larger than most. fraction: its bits;
 * smallest: the least subnormal.
 */
KERNEL uint32_t byte_of(float magnitude, uint32_t fraction, float smallest, uint32_t most) {
        const uint32_t shift = 23 - fraction, bits = bits_of(magnitude);
        /* half of the least normal number */
        const uint32_t least = bits_of(smallest) + ((fraction - 1) << 23);
        uint32_t code = bits_of(magnitude + 0x1p23f * smallest) & 0xff; /* of subnormals */

        if (bits >= least + (1u << 23))
                code = (bits - least + ((1u << (shift - 1)) - 1) + (bits >> shift & 1)) >> shift;
        if (code > most)
                code = most;
        return bits > 0x7f800000 ? 0x7f : code;
}

KERNEL uint8_t e4m3_of(float x) {
        return (uint8_t)(byte_of(fabsf(x), 3, 0x1p-9f, 0x7e) | (bits_of(x) >> 24 & 0x80));
}

KERNEL uint8_t e5m2_of(float x) {
        return (uint8_t)(byte_of(fabsf(x), 2, 0x1p-16f, 0x7b) | (bits_of(x) >> 24 & 0x80));
}

#endif
