/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_FORMAT_H
#define KVD_BASE_FORMAT_H

/*
 * How a row of numbers is stored: those of one token and KV head, of one layer's keys or values. Plain
 * numbers lie one behind the other. Quantised ones are codes without a sign, followed by the scale
 * and the least number of each group of KVD_GROUP codes, two f16: number i is least + code * scale.
 * The last group may be smaller. Codes of 4 bits lie two to a byte, the first in the low half. What is
 * quantised of a key is its transform (kernels/turn.h); of a value, the value itself.
 *
 * A row needs nothing outside itself. So tokens are written one by one, and rows may move.
 *
 * Kernels for GPUs, which are C++, take the constants only.
 */

#define KVD_GROUP 64u      /* numbers with a common scale */
#define KVD_SCALE_BYTES 4u /* of a group: scale, least */

#ifndef __cplusplus

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/base/enums.h"

struct kvd_format {
        uint8_t bits;   /* of a number, or a code; 0: there is no such format */
        bool quantised; /* into codes */
};

static inline struct kvd_format kvd_format(uint32_t dtype) {
        static const struct kvd_format formats[KVD_dtype_end] = {
                [KVD_dtype_f32] = {32, false},  [KVD_dtype_f16] = {16, false},
                [KVD_dtype_bf16] = {16, false}, [KVD_dtype_i8] = {8, false},
                [KVD_dtype_q8] = {8, true},     [KVD_dtype_q4] = {4, true},
                [KVD_dtype_e4m3] = {8, false},  [KVD_dtype_e5m2] = {8, false},
        };

        return formats[dtype < KVD_dtype_end ? dtype : 0];
}

static inline bool kvd_is_narrow(uint32_t dtype) {
        uint8_t bits = kvd_format(dtype).bits;

        return bits > 0 && bits < 16;
}

static inline bool kvd_is_quantised(uint32_t dtype) {
        return kvd_format(dtype).quantised;
}

/* Bytes of n numbers without their scales; n is even if they are quantised. */
static inline size_t kvd_code_bytes(uint32_t dtype, size_t n) {
        return n * kvd_format(dtype).bits / 8;
}

/* Bytes of a row of n numbers. */
static inline size_t kvd_format_row(uint32_t dtype, size_t n) {
        size_t groups = kvd_is_quantised(dtype) ? (n + KVD_GROUP - 1) / KVD_GROUP : 0;

        return kvd_code_bytes(dtype, n) + groups * KVD_SCALE_BYTES;
}

#endif
#endif
