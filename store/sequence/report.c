/* SPDX-License-Identifier: Apache-2.0 */

/*
 * With every answer to sync a client is told whether anything is still under way for its sequence, and what its copies and
 * sketches cost. Scoring is left out: nobody asked for it, and nothing comes of it but an order.
 */

#include "store/hooks.h"
#include "store/sequence/sequence.h"

static bool waits_for_worker(const struct sequence *q) {
        const struct ticket *const tickets[] = {&q->cooling, &q->reviving, &q->forgetting, &q->rebuilding,
                                                &q->comparing, &q->compacting};

        for (uint32_t i = 0; i < ARRAY_SIZE(tickets); i++)
                if (job_pending(tickets[i]))
                        return true;
        return hooks_sequence_pending(q->space, q);
}

/* Entries may wait for room, or for a sketch to be made anew, while no job is asked for. */
static bool is_pending(const struct sequence *q) {
        return q->changes.n || q->cool.n || q->revive.n || q->compact.n || waits_for_worker(q);
}

void sequence_report(struct attachment *a, uint32_t number, struct sequence_report *ret) {
        const struct sequence *q = sequence_find(a, number);

        *ret = (struct sequence_report){0};
        if (!q)
                return;
        ret->pending = is_pending(q);
        ret->copy_bytes = q->n_copies * a->space->ix->block_bytes;
        for (const struct sketch *s = q->sketches; s; s = s->next)
                ret->sketch_bytes += s->bytes;
}
