/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_BICACHE_TABLE_H
#define KVLM_BICACHE_TABLE_H

/*
 * Reads a table of prefix ratios and shallow layers (kernels/btable.h) from a file, for use without
 * a daemon or to compare tables.
 */

#include "kernels/btable.h"

/*
 * Format: {"def": "INCLUDE_GEN" or "PROMPT_ONLY", "entries": [[percent, layers], ...]}. -EINVAL,
 * with a message, if it is wrong.
 */
int bicache_table_read(const char *path, uint32_t layers, struct kvd_btable *ret);

uint32_t bicache_table_deepest(const struct kvd_btable *); /* most layers of any ratio */

#endif
