/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The invariants of spaces on a GPU. Each chunk of its memory is where its state says (G). Pending
 * and poisoned blocks are counted and listed as such (F).
 */

#include <string.h>

#include "store/check/check.h"
#include "store/device/chunk.h"

/* ---- memory ---------------------------------------------------------------------------------- */

static const char *wrong(const struct chunk *chunk) {
        bool placed = chunk->state == USED || chunk->state == DRAINING;

        if (placed != (chunk->segment != NULL) || placed != (chunk->space != NULL))
                return "a chunk's state does not fit its segment";
        if (placed && chunk->segment->chunk != chunk)
                return "a chunk and its segment do not name each other";
        if (placed && chunk->domain != space_domain(chunk->space))
                return "a chunk has changed domains";
        if (chunk->state < USED && chunk->domain)
                return "a chunk that a domain had used is handed out as new";
        if (chunk->state == DRAINING && chunk->segment->n_ready)
                return "a segment with blocks is being unmapped";
        return NULL;
}

void check_chunks(struct walk *w) {
        const struct space *space = w->space;
        struct device_pool *pool = pool_of(space_store(space));
        uint32_t count[N_STATES] = {0};
        const char *what = NULL;

        for (uint32_t i = 0; pool && i < pool->n; i++) {
                count[pool->chunks[i].state]++;
                what = what ?: wrong(&pool->chunks[i]);
        }
        for (uint32_t i = 0; pool && i < space_index(space)->max_segments; i++) {
                const struct chunk *chunk = space_segment(space, i)->chunk;

                if (space_segment(space, i)->n_ready && (!chunk || chunk->state != USED))
                        what = "a segment has blocks and no memory";
        }
        if (pool && !what && memcmp(count, pool->count, sizeof count) != 0)
                what = "the chunks of a state are miscounted";
        expect(w, !what, "G1 %s", what);
}

/* ---- pending and poisoned blocks ------------------------------------------------------------- */

void check_pending(struct walk *w, uint32_t id) {
        const struct space *s = w->space;
        const struct block *b = &s->blocks[id];
        const struct kvd_desc *desc = kvd_index_desc(s->ix, id);

        if (!b->pending && !b->poisoned)
                return;
        expect(w, b->state == KVD_SEALED && !b->private,
               "F1 block %u is pending or poisoned, but is private or not sealed", id);
        expect(w, !b->pending || desc->semaphore,
               "F2 block %u waits for data, but its descriptor names no semaphore", id);
        expect(w, !b->poisoned || (!b->indexed && !b->run && (desc->flags & KVD_DESC_POISONED)),
               "F3 block %u is poisoned and can be found", id);
}

void check_pending_sums(struct walk *w) {
        const struct space *s = w->space;
        uint64_t listed = 0;

        for (uint32_t i = 0; i < s->n_attachments; i++)
                listed += s->attachments[i] ? attachment_pending(s->attachments[i]) : 0;
        expect(w,
               w->audit->pending == s->unready.n_pending && w->audit->pending == s->ix->n_pending,
               "F4 blocks that wait for data are miscounted");
        expect(w, w->audit->pending == listed, "F5 a block waits for data that no client promised");
        expect(w, w->audit->poisoned == s->unready.poisoned.n, "F6 poisoned blocks are miscounted");
}
