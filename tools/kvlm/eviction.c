/* SPDX-License-Identifier: Apache-2.0 */

/*
 * KeyDiff: after each chunk of the prompt, and when a growing sequence exceeds its budget by a
 * certain number of tokens, the daemon keeps the most distinctive tokens of each layer and head.
 * The first blocks and the newest tokens stay.
 */

#include <math.h>

#include "ipc/base/util.h"
#include "tools/kvlm/pooled_internal.h"

uint32_t eviction_budget(kvd_space *space) {
        double on = 0, budget = 0;

        kvd_space_setting(space, "keydiff", &on);
        kvd_space_setting(space, "keydiff.budget", &budget);
        return on > 0 ? (uint32_t)budget : 0;
}

static uint32_t chunk(const struct pooled *p) {
        return (uint32_t)MAX(pooled_setting(p, "keydiff.block"), p->bt);
}

uint32_t eviction_limit(const struct pooled *p, uint32_t first) {
        uint32_t left = pooled_dense(p) - first;

        return p->evicts ? MIN(left, chunk(p) - first % chunk(p)) : left;
}

static bool is_due(const struct pooled *p) {
        if (!p->table || p->stuck || p->n_used <= p->evicts)
                return false;
        if (p->n > pooled_dense(p))
                return p->n_used > p->evicts + (uint32_t)pooled_setting(p, "keydiff.slack");
        return p->n == pooled_dense(p) || p->n % chunk(p) == 0;
}

/* Number of tokens in use in entries [from, to). */
static uint32_t tokens_in(const struct pooled *p, uint32_t from, uint32_t to) {
        uint32_t n = 0;

        for (uint32_t i = from; i < to; i++)
                n += p->fill[i];
        return n;
}

/*
 * The first of the newest entries that together, with the block that is not full, hold the recent
 * part of the budget.
 */
static uint32_t recent_from(const struct pooled *p, uint32_t sinks) {
        uint32_t recent = (uint32_t)lrint(pooled_setting(p, "keydiff.recent_frac") * p->evicts),
                 i = p->n_entries;

        for (uint32_t n = p->n_used - tokens_in(p, 0, i); i > sinks && n < recent; n += p->fill[i])
                i--;
        return i;
}

void eviction_settle(struct pooled *p) {
        uint32_t sinks = MIN((uint32_t)pooled_setting(p, "keydiff.sink_blocks"), p->n_entries), end,
                 stay;

        if (!is_due(p))
                return;
        end = recent_from(p, sinks);
        stay = p->n_used - tokens_in(p, sinks, end);
        if (end == sinks)
                return;
        if (kvd_sequence_compact(p->table, sinks, end - sinks,
                                 p->evicts > stay ? p->evicts - stay : 1, NULL) < 0)
                return;
        p->stats.evictions++;
        pooled_wait(p);
}
