/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Calls the hooks of all parts of the store (hooks.h). The table belongs to the store, so that the
 * cache does not know which parts there are.
 */

#include "store/cache/inside.h"
#include "store/hooks.h"

#define EACH(space, h) \
        for (const struct hooks *const *h##_at = space_store(space)->hooks, *h; (h = *h##_at); \
             h##_at++)

/* ---- spaces ---------------------------------------------------------------------------------- */

void hooks_lay_out(const struct space *space, uint64_t max_blocks, struct kvd_index *ix) {
        EACH(space, h)
                if (h->lay_out)
                        h->lay_out(space, max_blocks, ix);
}

int hooks_space_begins(struct space *space) {
        int r = 0;

        EACH(space, h) {
                space->parts.n_begun++;
                if (h->space_begins)
                        r = h->space_begins(space);
                if (r < 0)
                        break;
        }
        return r;
}

void hooks_setting_changed(struct space *space) {
        EACH(space, h)
                if (h->setting_changed)
                        h->setting_changed(space);
}

bool hooks_idle(struct space *space) {
        bool more = false;

        EACH(space, h)
                if (h->idle)
                        more |= h->idle(space);
        return more;
}

void hooks_space_leaves(struct space *space) {
        EACH(space, h)
                if (h->space_leaves)
                        h->space_leaves(space);
}

bool hooks_space_buried(struct space *space) {
        EACH(space, h)
                if (h->space_buried && h->space_buried(space))
                        return true;
        return false;
}

void hooks_store_ends(struct store *store) {
        for (const struct hooks *const *h = store->hooks; *h; h++)
                if ((*h)->store_ends)
                        (*h)->store_ends(store);
}

/* Only for parts that have begun. */
void hooks_space_ends(struct space *space) {
        uint32_t i = 0;

        EACH(space, h)
                if (i++ < space->parts.n_begun && h->space_ends)
                        h->space_ends(space);
}

void hooks_usage(const struct space *space, struct space_usage *ret) {
        EACH(space, h)
                if (h->usage)
                        h->usage(space, ret);
}

/* ---- attachments ----------------------------------------------------------------------------- */

int hooks_attachment_begins(struct attachment *a) {
        int r = 0;

        EACH(a->space, h) {
                if (h->attachment_begins)
                        r = h->attachment_begins(a);
                if (r < 0)
                        break;
        }
        return r;
}

bool hooks_attachment_stops(struct attachment *a) {
        bool more = false;

        EACH(a->space, h)
                if (h->attachment_stops)
                        more |= h->attachment_stops(a);
        return more;
}

void hooks_attachment_ends(struct attachment *a) {
        EACH(a->space, h)
                if (h->attachment_ends)
                        h->attachment_ends(a);
}

void hooks_attachment_buried(struct attachment *a) {
        EACH(a->space, h)
                if (h->attachment_buried)
                        h->attachment_buried(a);
}

/* ---- sequences ------------------------------------------------------------------------------- */

void hooks_sequence_begins(struct space *space, struct sequence *q) {
        EACH(space, h)
                if (h->sequence_begins)
                        h->sequence_begins(q);
}

bool hooks_sequence_pending(const struct space *space, struct sequence *q) {
        EACH(space, h)
                if (h->sequence_pending && h->sequence_pending(q))
                        return true;
        return false;
}

void hooks_sequence_ends(struct space *space, struct sequence *q) {
        EACH(space, h)
                if (h->sequence_ends)
                        h->sequence_ends(q);
}

const struct hooks *hooks_of_change(const struct space *space, enum kvd_change_kind kind) {
        EACH(space, h)
                if (h->change == kind)
                        return h;
        return NULL;
}
