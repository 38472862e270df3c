/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_ATTEND_MIX_H
#define KVD_KERNELS_ATTEND_MIX_H

/*
 * Members of struct kvd_attend_ops, one set per instruction set, and what the files that define
 * them share.
 */

#include "ipc/base/util.h"
#include "kernels/attend_rows.h"
#include "kernels/lanes.h"

enum {
#if defined(KVD_ISA_AVX512)
        ATTEND_ROWS = 4, /* queries that are processed together, if they are few */
#else
        ATTEND_ROWS = 2,
#endif
        ATTEND_AHEAD =
                8192,     /* bytes of rows to prefetch ahead: what memory delivers in its latency */
        ATTEND_MANY = 16, /* number of queries from which laying keys side by side pays */
};

/* Rows to prefetch ahead: a multiple of 16. */
KERNEL uint32_t attend_ahead(size_t row) {
        return (uint32_t)MAX(ATTEND_AHEAD / KVD_LANES / row, 2) * KVD_LANES;
}

void KVD_VARIANT(kvd_attend_mix)(float *sum, const float *p, size_t ld,
                                 const uint8_t *const *values, ptrdiff_t offset, uint32_t n,
                                 enum kvd_number type, uint32_t rows, uint32_t dim);
void KVD_VARIANT(kvd_attend_finish)(float *to, float *sum, const float *total, enum kvd_number type,
                                    uint32_t rows, uint32_t dim);

#endif
