/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_QUANT_H
#define KVLM_QUANT_H

/*
 * Numbers in 4 bits, in groups of 32: of each group the least and the step as f16, then 16 bytes, byte j with the code
 * of number j in its low half and that of number j + 16 in its high half. A number is least + code * step; its error is at most half a step and what f16 rounds off.
 */

#include "kernels/ops.h"

enum { QUANT_GROUP = 32, QUANT_GROUP_BYTES = 4 + QUANT_GROUP / 2 };

static inline size_t quant_bytes(uint32_t n) {
        return (size_t)(n + QUANT_GROUP - 1) / QUANT_GROUP * QUANT_GROUP_BYTES;
}

void quant_pack(const struct kvd_ops *, uint8_t *to, const float *from, uint32_t n);
void quant_unpack(float *to, const uint8_t *from, uint32_t n);

#endif
