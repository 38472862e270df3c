/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_BICACHE_TABLE_H
#define KVLM_BICACHE_TABLE_H

/* Which share of a request gives how many shallow layers (methods.md 2.3.3, "btable"), as profiling found it. */

#include <stdbool.h>
#include <stdint.h>

enum { BICACHE_ENTRIES = 101 };

struct bicache_step {
        uint8_t ratio; /* percent, ascending */
        uint16_t depth; /* from there on, at least 1 */
};

struct bicache_table {
        bool include_gen; /* the share is of prompt and region; else of the prompt */
        uint32_t n;
        struct bicache_step steps[BICACHE_ENTRIES];
};

/* {"def": "INCLUDE_GEN" or "PROMPT_ONLY", "entries": [[ratio, depth], ...]}; -EINVAL, and what was wrong is noted. */
int bicache_table_read(const char *path, uint32_t layers, struct bicache_table *ret);

uint32_t bicache_table_depth(const struct bicache_table *, uint32_t ratio); /* 1 below the first entry */
uint32_t bicache_table_deepest(const struct bicache_table *);

/* round(100 part / whole), halves to even */
uint32_t bicache_ratio(uint32_t part, uint32_t whole);

#endif
