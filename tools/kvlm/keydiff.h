/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_KEYDIFF_H
#define KVLM_KEYDIFF_H

/* KeyDiff's scores (kernels/keydiff.h) of what lies in blocks, for all KV heads of a layer. */

#include "tools/kvlm/forward.h"

size_t keydiff_scratch(const struct block_shape *); /* floats */

/* scores[head * n + slot], slots below n. scratch: keydiff_scratch() floats. */
void keydiff_scores(const struct kvd_ops *, const struct block_shape *, uint8_t *const *blocks, uint32_t layer,
                    uint32_t n, float *scores, float *scratch);

#endif
