/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_BICACHE_TABLE_H
#define KVLM_BICACHE_TABLE_H

/*
 * A table of shares and shallow layers (kernels/btable.h) from a file, for who has no daemon or
 * compares tables.
 */

#include "kernels/btable.h"

/*
 * {"def": "INCLUDE_GEN" or "PROMPT_ONLY", "entries": [[percent, layers], ...]}; -EINVAL: what was
 * wrong is noted.
 */
int bicache_table_read(const char *path, uint32_t layers, struct kvd_btable *ret);

uint32_t bicache_table_deepest(const struct kvd_btable *); /* what any share may ask for */

#endif
