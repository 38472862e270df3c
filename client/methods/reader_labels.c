/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Estimates what a query needs from the labels that the daemon's worker makes of keys.
 *
 * In the daemon's memory, the labels of a block are together for all layers and heads, but a query
 * reads those of one head, of all blocks. They are therefore copied here in that order, and read at
 * twice the speed.
 */

#include <float.h>
#include <math.h>
#include <string.h>

#include "client/internal.h"
#include "client/methods/reader.h"
#include "ipc/base/sys.h"
#include "kernels/attend_inner.h"

/* Blocks that may leave count as at least this part of a query's attention. */
#define LEAST_REST 0.2f

/* ---- labels ---------------------------------------------------------------------------------- */

static uint8_t *labels_of(const struct kvd_reader *r, uint32_t layer, uint32_t head) {
        const struct selection *s = r->selection;

        return s->labels + reader_index(r, layer, head) * s->slots * s->shape.label_bytes;
}

/* The number of channels is known with the first label. */
static bool copy_labels(struct kvd_reader *r, uint32_t entry) {
        struct selection *s = r->selection;
        size_t bytes = (size_t)r->geometry->block_tokens * s->shape.label_bytes;

        if (!s->labels)
                s->labels = sys->calloc(reader_index(r, r->geometry->layers, 0) * s->slots,
                                        s->shape.label_bytes);
        for (uint32_t l = 0; s->labels && l < r->geometry->layers; l++)
                for (uint32_t h = 0; h < r->geometry->kv_heads; h++)
                        memcpy(labels_of(r, l, h) + entry * bytes,
                               s->rows[entry] + l * (size_t)s->shape.layer_stride +
                                       h * (size_t)s->shape.head_stride,
                               bytes);
        return s->labels;
}

static void take_labels(struct kvd_reader *r, uint32_t entry) {
        struct selection *s = r->selection;

        s->rows[entry] = kvd_sequence_labels(r->sequence, entry, &s->shape);
        if (s->rows[entry] && !copy_labels(r, entry))
                s->rows[entry] = NULL;
}

void labels_refresh(struct kvd_reader *r, uint32_t changed) {
        struct selection *s = r->selection;
        bool complete = true;

        if (!s)
                return;
        for (uint32_t i = changed; i < r->n_entries; i++)
                s->rows[i] = NULL;
        s->complete = MIN(s->complete, changed);
        for (uint32_t i = s->complete; i < r->n_entries; i++) {
                if (r->fill[i] > 0 && !s->rows[i])
                        take_labels(r, i);
                complete &= s->rows[i] || r->fill[i] == 0;
                s->complete = complete ? i + 1 : s->complete;
        }
        for (s->labelled = r->n_entries; s->labelled > 0 && !s->rows[s->labelled - 1];)
                s->labelled--;
        s->holes = s->complete < s->labelled;
        s->absent = false;
        for (uint32_t i = 0; i < s->labelled; i++)
                s->absent |= !s->rows[i];
}

/* ---- scores ---------------------------------------------------------------------------------- */

static void label_queries(struct kvd_reader *r, uint32_t layer, uint32_t head, const float *q) {
        const struct selection *s = r->selection;
        const uint16_t *channels = s->shape.channel +
                                   reader_index(r, layer, head) * s->shape.channels;

        for (uint32_t g = 0; g < r->group; g++)
                s->ops->query(s->desks[head].query + g, q + (size_t)g * r->geometry->head_dim,
                              channels, s->shape.channels);
}

/*
 * The keys of a block that stands in for another one were made at another position, so queries are
 * rotated for them.
 */
static void score_rotated(struct kvd_reader *r, uint32_t layer, uint32_t head, const float *q) {
        const struct selection *s = r->selection;
        const uint8_t *labels = labels_of(r, layer, head);
        struct desk *d = s->desks + head;
        const struct kvd_attention a = {.ops = r->ops,
                                        .dim = r->geometry->head_dim,
                                        .rotations = r->rotations};
        uint32_t ready = 0, bt = r->geometry->block_tokens;

        for (uint32_t i = 0; i < s->labelled; i++) {
                if (!r->rotation[i] || !s->rows[i])
                        continue;
                if (r->rotation[i] != ready) {
                        kvd_attend_rotate(&a, d->rotated, q, r->rotation[i], r->group);
                        label_queries(r, layer, head, d->rotated);
                        ready = r->rotation[i];
                }
                s->ops->scores(d->scores + i * bt, s->slots, &labels, 0, s->slots,
                               s->shape.channels, d->query, r->group, i * bt, bt);
        }
}

/* Excludes slots that hold no token or have no label. */
static void forget_empty(const struct kvd_reader *r, struct desk *d) {
        const struct selection *s = r->selection;
        uint32_t bt = r->geometry->block_tokens;

        for (uint32_t i = 0; i < s->labelled; i++)
                for (uint32_t j = s->rows[i] ? r->fill[i] : 0; j < bt; j++)
                        for (uint32_t g = 0; g < r->group; g++)
                                d->scores[g * s->slots + i * bt + j] = -INFINITY;
}

void labels_score(struct kvd_reader *r, uint32_t layer, uint32_t head, const float *q) {
        const struct selection *s = r->selection;
        struct desk *d = s->desks + head;
        const uint8_t *labels = labels_of(r, layer, head);
        uint32_t n = s->labelled * r->geometry->block_tokens;

        label_queries(r, layer, head, q);
        s->ops->scores(d->scores, s->slots, &labels, 0, s->slots, s->shape.channels, d->query,
                       r->group, 0, n);
        if (r->rotated)
                score_rotated(r, layer, head, q);
        if (r->gaps || s->absent)
                forget_empty(r, d);
        s->ops->aggregate(d->total, d->scores, s->slots, n, r->group, r->scale, KVD_AGGREGATE_SUM);
}

static float weight_of(const struct kvd_reader *r, const float *weights, uint32_t entry) {
        uint32_t bt = r->geometry->block_tokens;
        float sum = 0;

        for (uint32_t j = 0; r->selection->rows[entry] && j < r->fill[entry]; j++)
                sum += weights[entry * bt + j];
        return sum;
}

/*
 * Many heads of a pretrained model give most of their attention to the first token, which stays. What
 * matters is how they share out the rest. With a single query head, the scores are not weights yet.
 */
void labels_share(struct kvd_reader *r, uint32_t head, uint32_t from, uint32_t to) {
        const struct selection *s = r->selection;
        struct desk *d = s->desks + head;
        const float *weights = d->total;
        float all = (float)r->group, rest = 0;

        if (r->group == 1) {
                all = r->ops->softmax(d->scores, s->labelled * r->geometry->block_tokens, r->scale);
                weights = d->scores;
        }
        for (uint32_t i = from; i < MIN(to, s->labelled); i++)
                rest += weight_of(r, weights, i);
        rest = MAX(rest, all * LEAST_REST);
        for (uint32_t i = 0; i < s->labelled; i++)
                d->share[i] = MAX(d->share[i], weight_of(r, weights, i) / rest);
}

/* ---- the highest ----------------------------------------------------------------------------- */

uint32_t labels_prefer_holes(struct kvd_reader *r, uint32_t head, uint32_t from, uint32_t n) {
        const struct selection *s = r->selection;
        uint32_t found = 0;

        for (uint32_t c = from; c < from + n; c++)
                if (!s->rows[r->used[c] / r->geometry->block_tokens]) {
                        s->desks[head].total[r->used[c]] = FLT_MAX;
                        found++;
                }
        return found;
}

uint32_t labels_top(struct kvd_reader *r, uint32_t head, uint32_t from, uint32_t n, uint32_t z,
                    uint32_t *to) {
        struct desk *d = r->selection->desks + head;
        const float *scores = d->total + from;
        uint32_t found;

        if (r->gaps) {
                for (uint32_t c = 0; c < n; c++)
                        d->scores[c] = d->total[r->used[from + c]];
                scores = d->scores;
        }
        found = r->selection->ops->top(to, scores, n, z, from, d->numbers);
        for (uint32_t i = 0; r->gaps && i < found; i++)
                to[i] = r->used[to[i]];
        return found;
}
