/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/labels.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/note.h"

/* ---- life ---- */

/* 32 of them, a quarter of the heads of large models; small heads are labelled as a whole. */
static uint32_t channel_count(const struct relief *r) {
        uint32_t asked = r->m->hshare.channels;

        return asked ? asked : MIN(32, r->setup.shape.head_dim);
}

static int allocate(struct labels *l, const struct relief *r) {
        size_t heads = (size_t)r->setup.layers * r->heads;

        l->channels = calloc(heads * l->n_channels, sizeof *l->channels);
        l->data = calloc(heads, l->bytes);
        l->queries = calloc(heads * CALIBRATION * l->width, sizeof *l->queries);
        l->desks = calloc(r->heads, sizeof *l->desks);
        if (!l->channels || !l->data || !l->queries || !l->desks)
                return -ENOMEM;
        for (uint32_t h = 0; h < r->heads; h++) {
                struct label_desk *d = l->desks + h;

                d->query = calloc(l->group, sizeof *d->query);
                d->scores = calloc((size_t)(l->group + 1) * l->room, sizeof *d->scores);
                d->numbers = calloc(3 * (size_t)l->room, sizeof *d->numbers);
                if (!d->query || !d->scores || !d->numbers)
                        return -ENOMEM;
        }
        return 0;
}

static int check_channels(const struct relief *r, uint32_t n) {
        const struct methods *m = r->m;
        uint32_t dim = r->setup.shape.head_dim;

        if (n > dim || (m->hshare.n_given > 0 && m->hshare.given[m->hshare.n_given - 1] >= dim))
                return note(-EINVAL, "--labels: a head of this model has %u channels", dim);
        return 0;
}

int labels_new(const struct relief *r, struct labels **ret) {
        struct labels *l = calloc(1, sizeof *l);
        int e;

        if (!l)
                return note(-ENOMEM, "out of memory");
        l->n_channels = channel_count(r);
        l->group = r->setup.group;
        l->width = (size_t)l->group * r->setup.shape.head_dim;
        l->room = r->setup.capacity;
        l->bytes = l->room * kvd_label_bytes(l->n_channels);
        e = check_channels(r, l->n_channels);
        if (e == 0 && allocate(l, r) < 0)
                e = note(-ENOMEM, "out of memory for labels of %u tokens", r->setup.capacity);
        if (e < 0) {
                labels_free(l, r->heads);
                return e;
        }
        *ret = l;
        return 0;
}

struct labels *labels_free(struct labels *l, uint32_t heads) {
        if (!l)
                return NULL;
        for (uint32_t h = 0; l->desks && h < heads; h++) {
                free(l->desks[h].query);
                free(l->desks[h].scores);
                free(l->desks[h].numbers);
        }
        free(l->desks);
        free(l->queries);
        free(l->data);
        free(l->channels);
        free(l);
        return NULL;
}

uint64_t labels_bytes(const struct labels *l, const struct relief *r) {
        return (uint64_t)r->n * kvd_label_bytes(l->n_channels) * r->setup.layers * r->heads;
}

/* ---- making them ---- */

static uint16_t *channels_of(const struct labels *l, const struct relief *r, uint32_t layer, uint32_t head) {
        return l->channels + relief_index(r, layer, head) * l->n_channels;
}

static uint8_t *labels_of(const struct labels *l, const struct relief *r, uint32_t layer, uint32_t head) {
        return l->data + relief_index(r, layer, head) * l->bytes;
}

static const uint8_t *key_at(const struct relief *r, const uint8_t *const *blocks, size_t keys, uint32_t slot) {
        const struct block_shape *s = &r->setup.shape;

        return blocks[slot / s->tokens] + keys + slot % s->tokens * (s->head_bytes / s->tokens);
}

static void label(struct labels *l, const struct relief *r, uint32_t layer, uint32_t head, uint32_t position,
                  const uint8_t *key) {
        uint8_t *to = labels_of(l, r, layer, head) + position * kvd_label_bytes(l->n_channels);

        r->setup.ops->hshare->label(to, key, r->setup.shape.head_dim, r->setup.shape.type, 1,
                                    channels_of(l, r, layer, head), l->n_channels);
}

void labels_follow(struct labels *l, const struct relief *r, uint32_t layer, uint32_t head,
                   const struct kvd_attention *a) {
        float *queries = l->queries + relief_index(r, layer, head) * CALIBRATION * l->width;

        for (uint32_t i = a->n - MIN(a->n, CALIBRATION); i < a->n && r->n + i < r->setup.prompt; i++)
                memcpy(queries + (r->n + i) % CALIBRATION * l->width, a->q + i * a->ldq, l->width * sizeof *queries);
        for (uint32_t i = 0; i < a->n && l->ready; i++)
                label(l, r, layer, head, r->n + i, key_at(r, a->blocks, a->k_offset, a->first + i));
}

/* mean |q_d k_d| over the last queries and the tokens in the slots. */
static void choose_channels(struct labels *l, const struct relief *r, uint32_t layer, uint32_t head,
                            const uint8_t *const *blocks, float *weights) {
        __typeof__(r->setup.ops->hshare->weigh) weigh = r->setup.ops->hshare->weigh;
        const struct block_shape *s = &r->setup.shape;
        uint32_t last = MIN(CALIBRATION, r->n);

        memset(weights, 0, s->head_dim * sizeof *weights);
        for (uint32_t p = r->n - last; p < r->n; p++)
                for (uint32_t slot = 0; slot < r->n_slots; slot += s->tokens)
                        if (blocks[slot / s->tokens])
                                weigh(weights, labels_query(l, r, layer, head, p), 0, l->group,
                                      key_at(r, blocks, relief_keys(r, layer, head), slot), s->head_dim, s->type,
                                      MIN(s->tokens, r->n_slots - slot), s->head_dim);
        kvd_label_channels(weights, s->head_dim, l->n_channels, channels_of(l, r, layer, head));
}

int labels_make(struct labels *l, const struct relief *r, uint8_t *const *table) {
        const uint8_t *const *blocks = (const uint8_t *const *)table;
        _cleanup_(freep) float *weights = calloc(r->setup.shape.head_dim, sizeof *weights);

        if (!weights)
                return note(-ENOMEM, "out of memory");
        for (uint32_t layer = 0; layer < r->setup.layers; layer++)
                for (uint32_t h = 0; h < r->heads; h++) {
                        const uint32_t *positions = relief_positions(r, layer, h);
                        size_t keys = relief_keys(r, layer, h);

                        if (r->m->hshare.n_given == 0)
                                choose_channels(l, r, layer, h, blocks, weights);
                        for (uint32_t i = 0; i < r->m->hshare.n_given; i++)
                                channels_of(l, r, layer, h)[i] = (uint16_t)r->m->hshare.given[i];
                        for (uint32_t i = 0; i < r->n_slots; i++)
                                if (blocks[i / r->setup.shape.tokens])
                                        label(l, r, layer, h, positions[i], key_at(r, blocks, keys, i));
                }
        l->ready = true;
        return 0;
}

/* ---- asking them ---- */

float *labels_score(struct labels *l, const struct relief *r, uint32_t layer, uint32_t head, const float *q,
                    uint32_t from, uint32_t n) {
        const struct kvd_hshare_ops *ops = r->setup.ops->hshare;
        const uint16_t *channels = channels_of(l, r, layer, head);
        const uint8_t *data = labels_of(l, r, layer, head);
        struct label_desk *d = l->desks + head;
        float *to = d->scores + (size_t)l->group * l->room;
        uint32_t dim = r->setup.shape.head_dim;

        for (uint32_t g = 0; g < l->group; g++)
                ops->query(d->query + g, q + (size_t)g * dim, channels, l->n_channels);
        ops->scores(d->scores, l->room, &data, 0, l->room, l->n_channels, d->query, l->group, from, n);
        ops->aggregate(to, d->scores, l->room, n, l->group, 1.0f / sqrtf((float)dim), KVD_AGGREGATE_SUM);
        return to;
}
