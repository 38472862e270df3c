/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_HASH_H
#define KVD_BASE_HASH_H

/*
 * XXH3-128 with a secret of KVD_SECRET_BYTES, for long inputs; the same result from each variant.
 */

#include "ipc/base/layout.h"

typedef struct kvd_key (*kvd_hash)(const void *data, size_t bytes, const uint8_t *secret);

struct kvd_key kvd_hash_plain(const void *data, size_t bytes, const uint8_t *secret);
#if defined(__x86_64__)
struct kvd_key kvd_hash_avx2(const void *data, size_t bytes, const uint8_t *secret);
struct kvd_key kvd_hash_avx512(const void *data, size_t bytes, const uint8_t *secret);
#endif

kvd_hash kvd_hash_best(void); /* for this processor */

#endif
