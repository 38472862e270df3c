/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What one query needs most of a sequence, for engines that bring their own attention. The
 * estimates are those by which a reader's attention selects tokens and keeps blocks, or bounds of scores (Quest).
 */

#include <errno.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "client/internal.h"
#include "client/methods/reader.h"

static uint32_t top_tokens(struct kvd_reader *r, uint32_t layer, uint32_t head, const float *q,
                           uint32_t n, uint32_t *to) {
        const struct selection *s = r->selection;

        if (s->labelled)
                labels_score(r, layer, head, q);
        if (s->complete < r->n_entries)
                labels_prefer_holes(r, head, 0, r->n_used);
        return labels_top(r, head, 0, r->n_used, MIN(n, r->n_used), to);
}

static uint32_t top_blocks(struct kvd_reader *r, uint32_t layer, uint32_t head, const float *q,
                           uint32_t n, uint32_t *to) {
        const struct selection *s = r->selection;
        struct desk *d = s->desks + head;

        d->looked = false;
        memset(d->share, 0, r->max_blocks * sizeof *d->share);
        if (s->labelled) {
                labels_score(r, layer, head, q);
                labels_share(r, head, 0, r->n_entries);
        }
        for (uint32_t i = 0; i < r->n_entries; i++)
                if (r->fill[i] == 0 || !s->rows[i])
                        d->share[i] = r->fill[i] == 0 ? -INFINITY : FLT_MAX;
        return s->ops->top(to, d->share, r->n_entries, MIN(n, r->n_entries), 0, d->numbers);
}

static int check(struct kvd_reader *r, uint32_t layer, enum kvd_select what, uint32_t n) {
        int e = reader_check(r, layer);

        if (e < 0)
                return e;
        if (n == 0)
                return client_fail(-EINVAL, "0 tokens or blocks to select");
        switch (what) {
        case KVD_SELECT_TOKENS:
        case KVD_SELECT_BLOCKS:
                return r->selection ?
                               0 :
                               client_fail(-EOPNOTSUPP, "neither hshare nor kvreviver was on "
                                                        "when the reader was made, so it has "
                                                        "no labels");
        case KVD_SELECT_BOUNDS: return bounds_prepare(r, layer);
        default: return client_fail(-EINVAL, "no such way to select: %d", (int)what);
        }
}

int kvd_reader_select(struct kvd_reader *r, uint32_t layer, enum kvd_select what, const float *q,
                      uint32_t n, uint32_t *to, uint32_t *n_to) {
        size_t width = (size_t)r->group * r->geometry->head_dim;
        int e = check(r, layer, what, n);

        for (uint32_t h = 0; e == 0 && h < r->geometry->kv_heads; h++, q += width, to += n)
                n_to[h] = what == KVD_SELECT_TOKENS ? top_tokens(r, layer, h, q, n, to) :
                          what == KVD_SELECT_BLOCKS ? top_blocks(r, layer, h, q, n, to) :
                                                      bounds_top(r, layer, h, q, n, to);
        return e;
}
