/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CRITICAL_H
#define KVD_KERNELS_CRITICAL_H

/*
 * Members of struct kvd_hshare_ops, one set per instruction set; shared by the files that define
 * them.
 */

#include "kernels/hshare.h"
#include "kernels/lanes.h"

enum { USUAL = 32, USUAL_BYTES = 20 }; /* usual channels, and bytes of their label */

void KVD_VARIANT(kvd_labels_of_keys)(uint8_t *labels, const void *k, size_t stride,
                                     enum kvd_number type, uint32_t n, uint32_t dim,
                                     const uint16_t *channels, uint32_t n_channels);
void KVD_VARIANT(kvd_label_of_query)(struct kvd_label_query *to, const float *q,
                                     const uint16_t *channels, uint32_t n_channels);
void KVD_VARIANT(kvd_critical_aggregate)(float *to, float *scores, size_t ld, uint32_t n,
                                         uint32_t group, float scale, enum kvd_aggregate how);
uint32_t KVD_VARIANT(kvd_critical_top)(uint32_t *to, const float *scores, uint32_t n, uint32_t z,
                                       uint32_t first, uint32_t *scratch);
void KVD_VARIANT(kvd_critical_overlap)(uint32_t *to, const uint64_t *a, const uint64_t *b,
                                       uint32_t rows, uint32_t words);
void KVD_VARIANT(kvd_critical_weigh)(float *weights, const float *q, size_t ldq, uint32_t group,
                                     const void *k, size_t stride, enum kvd_number type, uint32_t n,
                                     uint32_t dim);

#endif
