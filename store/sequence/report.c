/* SPDX-License-Identifier: Apache-2.0 */

/*
 * With every answer to sync a client is told whether anything is still under way for its sequence,
 * and what its copies and sketches cost. Scoring is left out: nobody asked for it, and nothing
 * comes of it but an order.
 */

#include "store/hooks.h"
#include "store/sequence/sequence.h"

void sequence_report(struct attachment *a, uint32_t number, struct sequence_report *ret) {
        struct sequence *q = sequence_find(a, number);

        *ret = (struct sequence_report){0};
        if (!q)
                return;
        ret->pending = q->changes.n || hooks_sequence_pending(q->space, q);
        ret->copy_bytes = q->n_copies * a->space->ix->block_bytes;
        for (const struct sketch *s = q->sketches; s; s = s->next)
                ret->sketch_bytes += s->bytes;
}
