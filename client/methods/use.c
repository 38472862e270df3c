/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Use of a sequence's blocks, and statistics for the caller. The engine reports how its attention
 * used each block, and the daemon reads that from our page when it must choose between blocks.
 * Neither needs a request.
 */

#include <string.h>

#include "client/internal.h"
#include "ipc/base/summary.h"

/* ---- use by attention ------------------------------------------------------------------------ */

#define BETA 0.1f
#define SUM_UNIT 16.0f /* of a sum of scores: 16 bits hold 4,095 averages */

/* kvreviver.profile = paper: scores add up. Otherwise a moving average. */
static uint16_t renew(uint16_t old, float now, bool sum) {
        float value = sum ? (float)old + SUM_UNIT * now :
                            (1 - BETA) * (float)old + BETA * 256 * now;

        return value >= UINT16_MAX ? UINT16_MAX : value > 0 ? (uint16_t)(value + 0.5f) : 0;
}

static shm_u32 *use_word(const struct kvd_sequence *s, uint32_t block) {
        return (shm_u32 *)((uint8_t *)s->view->page + kvd_use_off(s->view->ix->capacity)) + block;
}

/* Both numbers are one word, so that a reader never sees halves of two updates. */
void use_begin(struct kvd_sequence *s, uint32_t block, struct kvd_use use) {
        uint32_t word;

        memcpy(&word, &use, sizeof word);
        kvd_group_use(s->view->groups, block);
        atomic_store_explicit(use_word(s, block), word, memory_order_relaxed);
}

void kvd_sequence_use(struct kvd_sequence *s, uint32_t slot, float mass, float hits) {
        struct kvd_use use;
        uint32_t word;
        bool sum;

        if (slot >= s->n || !s->entries[slot].data || forked(s->space->handle))
                return;
        sum = kvd_setting_get(s->view->ix->settings, KVD_kvreviver_profile) == KVD_PAPER;
        word = atomic_load_explicit(use_word(s, s->entries[slot].block), memory_order_relaxed);
        memcpy(&use, &word, sizeof use);
        use_begin(s, s->entries[slot].block,
                  (struct kvd_use){renew(use.mass, mass, sum), renew(use.hits, hits, sum)});
}

/* ---- counts ---------------------------------------------------------------------------------- */

/* Dropped and shared entries have no summary of their own. */
static bool has_summary(const struct kvd_sequence *s, const struct kvd_entry *e) {
        return !(e->flags & (KVD_ENTRY_DROPPED | KVD_ENTRY_SHARED)) &&
               kvd_settings_read_summaries(s->view->ix->settings);
}

static void add_bytes(const struct kvd_sequence *s, const struct kvd_entry *e,
                      struct kvd_sequence_stats *ret) {
        if (forked(s->space->handle)) /* nothing is mapped in a child */
                return;
        if (e->data && !(e->flags & KVD_ENTRY_SHARED))
                ret->resident_bytes += s->view->ix->block_bytes;
        if (has_summary(s, e))
                ret->label_bytes += kvd_summary_of(s->view->ix).row_bytes;
}

void kvd_sequence_stats(const struct kvd_sequence *s, struct kvd_sequence_stats *ret) {
        *ret = (struct kvd_sequence_stats){.blocks = s->n,
                                           .tokens = s->n_tokens,
                                           .revived_exact = s->arrived[0],
                                           .revived_approx = s->arrived[1],
                                           .copy_bytes = s->copy_bytes,
                                           .sketch_bytes = s->sketch_bytes};
        for (uint32_t i = 0; i < s->n; i++) {
                const struct kvd_entry *e = &s->entries[i];

                ret->resident += e->data != NULL;
                ret->own += (e->flags & KVD_ENTRY_OWN) != 0;
                ret->borrowed += (e->flags & KVD_ENTRY_BORROWED) != 0;
                ret->spilled += (e->flags & KVD_ENTRY_SPILLED) != 0;
                ret->vague += (e->flags & KVD_ENTRY_VAGUE) != 0;
                ret->approximate += (e->flags & KVD_ENTRY_APPROX) != 0;
                ret->dropped += (e->flags & KVD_ENTRY_DROPPED) != 0;
                ret->compacted += (e->flags & KVD_ENTRY_COMPACT) != 0;
                add_bytes(s, e, ret);
                if (!(e->flags & KVD_ENTRY_SHARED))
                        continue;
                ret->shared++;
                ret->shared_tokens += e->n_tokens;
                ret->bytes_saved += s->view->ix->block_bytes;
        }
}
