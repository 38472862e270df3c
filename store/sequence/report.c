/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Every answer to sync tells the client whether work for its sequence is still under way, and how
 * much memory its copies and sketches take. Scoring does not count as such work: no client asks for
 * it, and it only changes an order.
 */

#include "store/hooks.h"
#include "store/sequence/sequence.h"

void sequence_report(struct attachment *a, uint32_t number, struct sequence_report *ret) {
        struct sequence *q = sequence_find(a, number);

        *ret = (struct sequence_report){0};
        if (!q)
                return;
        ret->pending = q->changes.n || hooks_sequence_pending(q->space, q);
        ret->copy_bytes = q->n_copies * space_block_bytes(a->space);
        for (const struct sketch *s = q->sketches; s; s = s->next)
                ret->sketch_bytes += s->bytes;
}
