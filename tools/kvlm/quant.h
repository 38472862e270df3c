/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_QUANT_H
#define KVLM_QUANT_H

/*
 * Numbers in 4 bits, in groups of 32 (the last one may be smaller): of each group the least and the step as f16, then
 * the codes, those of the first half of the group in the low halves of the bytes, the others in the high halves. A
 * number is least + code * step; its error is at most half a step and what f16 rounds off.
 */

#include "kernels/ops.h"

enum { QUANT_GROUP = 32, QUANT_GROUP_BYTES = 4 + QUANT_GROUP / 2 };

static inline size_t quant_bytes(uint32_t n) {
        uint32_t rest = n % QUANT_GROUP;

        return (size_t)n / QUANT_GROUP * QUANT_GROUP_BYTES + (rest ? 4 + (rest + 1) / 2 : 0);
}

void quant_pack(const struct kvd_ops *, uint8_t *to, const float *from, uint32_t n);
void quant_unpack(float *to, const uint8_t *from, uint32_t n);

#endif
