/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_BELOW_PREFIX_H
#define KVD_STORE_BELOW_PREFIX_H

/*
 * The tokens of a bidirectional prefix that is fetched, if they do not fit in one request: each
 * client has at most one such prefix, which its requests append to.
 */

#include "store/cache/cache.h"
#include "store/file_tier.h"

/*
 * Appends the tokens of a request to those before. *q has all of them then. -ESTALE: the tokens
 * before are not there; -EINVAL: the prefix is too long, or not bidirectional.
 */
int prefix_append(struct attachment *a, struct fetch_request *q);
void prefix_free(struct attachment *a);
/* Bytes that the space is charged for. */
uint64_t prefix_bytes(const struct attachment *a);

#endif
