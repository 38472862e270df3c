/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_WIDE_H
#define KVD_BASE_WIDE_H

/*
 * The functions outside of kernels/ that use the widest vectors. All variants give equal results.
 */

#include "ipc/base/layout.h"

struct kvd_wide {
        /* XXH3-128 with a secret of KVD_SECRET_BYTES, for long inputs */
        struct kvd_key (*hash)(const void *data, size_t bytes, const uint8_t *secret);
        /*
         * Packs n tokens into 16 and 0, 1, 2, 4 or 8 high bits (pack.h). Returns the OR of all high
         * bits, in both halves of the word.
         */
        uint32_t (*pack)(uint32_t *to, const uint32_t *tokens, uint32_t n, uint32_t high_bits);
};

extern const struct kvd_wide kvd_wide_plain;
#if defined(__x86_64__)
extern const struct kvd_wide kvd_wide_avx2, kvd_wide_avx512;
#endif

const struct kvd_wide *kvd_wide_best(void); /* for this processor (key.c) */

#endif
