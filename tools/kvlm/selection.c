/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Estimates which tokens a query needs, from the labels that the daemon's worker makes of keys.
 * HShare: a decoded token attends to the first, the newest and the selected tokens only. Similar
 * layers, heads and queries share one selection; the worker decides which are similar, from what
 * the prompt's last queries would have selected. KVReviver: labels remain when a block leaves, so
 * they tell which of the missing blocks a query needs.
 *
 * In the daemon's memory, the labels of a block are together for all layers and heads, but a query
 * reads those of one head, of all blocks. They are therefore copied here in that order, and read at
 * twice the speed.
 *
 * Places are counted in columns: column c is slot p->used[c]. Tokens whose block has no labels yet
 * are attended to like the newest ones.
 */

#include <errno.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "kernels/attend_inner.h"
#include "kernels/hshare.h"
#include "tools/kvlm/refuse.h"
#include "tools/kvlm/pooled_internal.h"

struct choice {
        uint32_t *middle; /* slots, ascending */
        uint32_t n_middle;
        uint32_t recent;     /* first column from which all are attended to */
        uint32_t renumbered; /* p->renumbered when it was made */
        bool made;           /* if false, all are attended to */
};

struct desk { /* of a KV head; used by the thread that processes that head */
        struct kvd_label_query *query; /* [group] */
        float *rotated;                /* [group][dim] */
        float *scores, *total;         /* [group][slots], [slots] */
        uint32_t *numbers, *list;      /* scratch [2 slots]: columns or slots */
        float *share;                  /* [blocks] share of the attention, estimated from labels */
        bool looked;                   /* share is that of the current layer */
        uint64_t selections;
        double ms;
};

struct selection {
        bool hshare, ready; /* ready: decoding has begun */
        struct kvd_window window;
        uint32_t every; /* queries in a group: the first one selects */
        uint32_t dense; /* number of first layers that attend to all tokens */
        uint32_t dim, slots;
        const struct kvd_hshare_ops *ops;
        struct kvd_label_shape shape;
        const uint8_t **rows;     /* [blocks] labels in the daemon's memory; NULL if none */
        uint8_t *labels;          /* [layer][head][slot] of labelled entries */
        uint32_t complete;        /* entries before this one have labels, or never will */
        uint32_t labelled;        /* one past the last entry with labels */
        bool holes;               /* some entry before that has no labels yet */
        bool absent;              /* some entry before that will never have labels */
        uint32_t *layers, *heads; /* the source of each selection: [layers], [layers][kv_heads] */
        /* [layer][head][CALIBRATION][group * dim]: position p is at p % CALIBRATION */
        float *queries;
        struct choice *choices; /* [layer][head] */
        struct desk *desks;     /* [head] */
};

static size_t index_of(const struct pooled *p, uint32_t layer, uint32_t head) {
        return (size_t)layer * p->setup.kv_heads + head;
}

/* ---- life ------------------------------------------------------------------------------------ */

void selection_free(struct pooled *p) {
        struct selection *s = p->selection;

        if (!s)
                return;
        for (uint32_t h = 0; s->desks && h < p->setup.kv_heads; h++) {
                struct desk *d = s->desks + h;

                free(d->query);
                free(d->rotated);
                free(d->scores);
                free(d->numbers);
                free(d->list);
                free(d->share);
        }
        for (size_t i = 0; s->choices && i < index_of(p, p->setup.layers, 0); i++)
                free(s->choices[i].middle);
        free(s->desks);
        free(s->choices);
        free(s->queries);
        free(s->heads);
        free(s->layers);
        free(s->labels);
        free(s->rows);
        free(s);
        p->selection = NULL;
}

static bool make_desk(struct desk *d, const struct pooled *p, const struct selection *s) {
        size_t group = p->setup.group;

        d->query = calloc(group, sizeof *d->query);
        d->rotated = calloc(group * s->dim, sizeof *d->rotated);
        d->scores = calloc((group + 1) * s->slots, sizeof *d->scores);
        d->total = d->scores + group * s->slots;
        d->numbers = calloc(2 * (size_t)s->slots, sizeof *d->numbers);
        d->list = calloc(s->slots, sizeof *d->list);
        d->share = calloc(p->room, sizeof *d->share);
        return d->query && d->rotated && d->scores && d->numbers && d->list && d->share;
}

static bool allocate(struct pooled *p, struct selection *s) {
        size_t heads = index_of(p, p->setup.layers, 0);
        bool made;

        s->rows = calloc(p->room, sizeof *s->rows);
        s->layers = calloc(p->setup.layers, sizeof *s->layers);
        s->heads = calloc(heads, sizeof *s->heads);
        s->queries = calloc(heads * CALIBRATION * p->setup.group * s->dim, sizeof *s->queries);
        s->choices = calloc(heads, sizeof *s->choices);
        s->desks = calloc(p->setup.kv_heads, sizeof *s->desks);
        made = s->rows && s->layers && s->heads && s->queries && s->choices && s->desks;
        for (size_t i = 0; made && s->hshare && i < heads; i++)
                made = (s->choices[i].middle = calloc(s->slots, sizeof(uint32_t))) != NULL;
        for (uint32_t h = 0; made && h < p->setup.kv_heads; h++)
                made = make_desk(s->desks + h, p, s);
        return made;
}

/* Until the worker decides otherwise, each layer and head selects for itself. */
static void share_nothing(struct pooled *p) {
        struct selection *s = p->selection;

        for (uint32_t l = 0; l < p->setup.layers; l++) {
                s->layers[l] = l;
                for (uint32_t h = 0; h < p->setup.kv_heads; h++)
                        s->heads[index_of(p, l, h)] = h;
        }
}

int selection_new(struct pooled *p, bool hshare) {
        struct selection *s = calloc(1, sizeof *s);

        p->selection = s;
        if (!s)
                return refuse(-ENOMEM, "out of memory");
        *s = (struct selection){.hshare = hshare,
                                .dim = 2 * p->half,
                                .slots = p->capacity,
                                .ops = p->setup.ops->hshare,
                                .every = 1};
        if (hshare) {
                s->window =
                        (struct kvd_window){(uint32_t)pooled_setting(p, "hshare.sinks"),
                                            (uint32_t)MAX(pooled_setting(p, "hshare.recent"), 1),
                                            (uint32_t)pooled_setting(p, "hshare.top")};
                s->every = (uint32_t)lrint(1 / MAX(pooled_setting(p, "hshare.query_ratio"), 1e-6));
                s->dense = (uint32_t)MIN(pooled_setting(p, "hshare.dense_layers"), p->setup.layers);
        }
        if (!allocate(p, s))
                return refuse(-ENOMEM, "out of memory for a sequence of %u tokens", p->capacity);
        share_nothing(p);
        return 0;
}

/* ---- labels ---------------------------------------------------------------------------------- */

static uint8_t *labels_of(const struct pooled *p, uint32_t layer, uint32_t head) {
        const struct selection *s = p->selection;

        return s->labels + index_of(p, layer, head) * s->slots * s->shape.label_bytes;
}

/* The number of channels is known with the first label. */
static bool copy_labels(struct pooled *p, uint32_t block) {
        struct selection *s = p->selection;
        size_t bytes = (size_t)p->bt * s->shape.label_bytes;

        if (!s->labels)
                s->labels = calloc(index_of(p, p->setup.layers, 0) * s->slots,
                                   s->shape.label_bytes);
        for (uint32_t l = 0; s->labels && l < p->setup.layers; l++)
                for (uint32_t h = 0; h < p->setup.kv_heads; h++)
                        memcpy(labels_of(p, l, h) + block * bytes,
                               s->rows[block] + l * (size_t)s->shape.layer_stride +
                                       h * (size_t)s->shape.head_stride,
                               bytes);
        return s->labels;
}

static void take_labels(struct pooled *p, uint32_t block) {
        struct selection *s = p->selection;
        const uint8_t *before = s->rows[block];

        s->rows[block] = kvd_sequence_labels(p->table, block, &s->shape);
        if (s->rows[block] && s->rows[block] != before && !copy_labels(p, block))
                s->rows[block] = NULL;
}

void selection_refresh(struct pooled *p, bool all) {
        struct selection *s = p->selection;
        bool complete = true;

        if (!s || !p->table)
                return;
        s->complete = all ? 0 : s->complete;
        for (uint32_t i = s->complete; i < p->n_entries; i++) {
                bool none = p->flags[i] & KVD_ENTRY_DROPPED || p->fill[i] == 0;

                if (none)
                        s->rows[i] = NULL;
                else
                        take_labels(p, i);
                complete &= s->rows[i] || none;
                s->complete = complete ? i + 1 : s->complete;
        }
        for (s->labelled = p->n_entries; s->labelled > 0 && !s->rows[s->labelled - 1];)
                s->labelled--;
        s->holes = s->complete < s->labelled;
        s->absent = false;
        for (uint32_t i = 0; i < s->labelled; i++)
                s->absent |= !s->rows[i];
}

static void label_queries(struct pooled *p, uint32_t layer, uint32_t head, const float *q) {
        const struct selection *s = p->selection;
        const uint16_t *channels = s->shape.channel + index_of(p, layer, head) * s->shape.channels;

        for (uint32_t g = 0; g < p->setup.group; g++)
                s->ops->query(s->desks[head].query + g, q + (size_t)g * s->dim, channels,
                              s->shape.channels);
}

/*
 * The keys of a block that stands in for another one were made at another position, so queries are
 * rotated for them.
 */
static void score_rotated(struct pooled *p, uint32_t layer, uint32_t head, const float *q) {
        const struct selection *s = p->selection;
        const uint8_t *labels = labels_of(p, layer, head);
        struct desk *d = s->desks + head;
        const struct kvd_attention a = {.ops = p->setup.ops,
                                        .dim = s->dim,
                                        .rotations = p->rotations};
        uint32_t ready = 0;

        for (uint32_t i = 0; i < s->labelled; i++) {
                if (!p->rotation[i] || !s->rows[i])
                        continue;
                if (p->rotation[i] != ready) {
                        kvd_attend_rotate(&a, d->rotated, q, p->rotation[i], p->setup.group);
                        label_queries(p, layer, head, d->rotated);
                        ready = p->rotation[i];
                }
                s->ops->scores(d->scores + i * p->bt, s->slots, &labels, 0, s->slots,
                               s->shape.channels, d->query, p->setup.group, i * p->bt, p->bt);
        }
}

/* Excludes slots that hold no token or have no label. */
static void forget_empty(const struct pooled *p, struct desk *d) {
        const struct selection *s = p->selection;

        for (uint32_t i = 0; i < s->labelled; i++)
                for (uint32_t j = s->rows[i] ? p->fill[i] : 0; j < p->bt; j++)
                        for (uint32_t g = 0; g < p->setup.group; g++)
                                d->scores[g * s->slots + i * p->bt + j] = -INFINITY;
}

/* Computes one score per slot of a labelled entry, for the heads that share a KV head. */
static void score(struct pooled *p, uint32_t layer, uint32_t head, const float *q) {
        const struct selection *s = p->selection;
        struct desk *d = s->desks + head;
        const uint8_t *labels = labels_of(p, layer, head);
        uint32_t n = s->labelled * p->bt;

        label_queries(p, layer, head, q);
        s->ops->scores(d->scores, s->slots, &labels, 0, s->slots, s->shape.channels, d->query,
                       p->setup.group, 0, n);
        if (p->rotated)
                score_rotated(p, layer, head, q);
        if (p->gaps || s->absent)
                forget_empty(p, d);
        s->ops->aggregate(d->total, d->scores, s->slots, n, p->setup.group,
                          1 / sqrtf((float)s->dim), KVD_AGGREGATE_SUM);
}

/* With a single query head, the scores are not weights yet. */
static void find_shares(struct pooled *p, struct desk *d) {
        const struct selection *s = p->selection;
        const float *weights = d->total;
        float all = (float)p->setup.group;

        if (p->setup.group == 1) {
                all = p->setup.ops->softmax(d->scores, s->labelled * p->bt,
                                            1 / sqrtf((float)s->dim));
                weights = d->scores;
        }
        for (uint32_t i = 0; i < p->n_entries; i++) {
                d->share[i] = 0;
                for (uint32_t j = 0; i < s->labelled && s->rows[i] && j < p->fill[i]; j++)
                        d->share[i] += weights[i * p->bt + j] / all;
        }
}

/* ---- selecting ------------------------------------------------------------------------------- */

/* The first column whose slot is not below slot. */
static uint32_t column_of(const struct pooled *p, uint32_t slot) {
        uint32_t low = 0, high = p->n_used;

        if (!p->gaps)
                return MIN(slot, p->n_used);
        while (low < high) {
                uint32_t middle = low + (high - low) / 2;

                if (p->used[middle] < slot)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low;
}

/* The columns to select from for the token in column now - 1. 0: it attends to all. */
static uint32_t middle_of(const struct pooled *p, uint32_t now, uint32_t *from) {
        const struct selection *s = p->selection;
        uint32_t n = kvd_window_middle(&s->window, now, from),
                 labelled = column_of(p, s->labelled * p->bt);

        return n == 0 || labelled <= *from ? 0 : MIN(n, labelled - *from);
}

/* Ranks unlabelled slots above all others. Returns how many there are. */
static uint32_t prefer_holes(const struct pooled *p, struct desk *d, uint32_t from, uint32_t n) {
        const struct selection *s = p->selection;
        uint32_t found = 0;

        for (uint32_t c = from; s->holes && c < from + n; c++)
                if (!s->rows[p->used[c] / p->bt]) {
                        d->total[p->used[c]] = FLT_MAX;
                        found++;
                }
        return found;
}

/* After score(): picks the slots to attend to among columns [from, from + n). Returns how many. */
static uint32_t pick(struct pooled *p, uint32_t head, uint32_t from, uint32_t n, uint32_t *to) {
        const struct selection *s = p->selection;
        struct desk *d = s->desks + head;
        uint32_t z = s->window.middle + prefer_holes(p, d, from, n), found;
        const float *scores = d->total + from;

        if (p->gaps) {
                for (uint32_t c = 0; c < n; c++)
                        d->scores[c] = d->total[p->used[from + c]];
                scores = d->scores;
        }
        found = s->ops->top(to, scores, n, z, from, d->numbers);
        for (uint32_t i = 0; p->gaps && i < found; i++)
                to[i] = p->used[to[i]];
        return found;
}

static void select_tokens(struct pooled *p, uint32_t layer, uint32_t head, const float *q) {
        struct selection *s = p->selection;
        struct choice *c = s->choices + index_of(p, layer, head);
        uint32_t from, n = middle_of(p, p->n_used + 1, &from);

        c->made = n > 0;
        if (!c->made)
                return;
        score(p, layer, head, q);
        if (p->residency)
                find_shares(p, s->desks + head);
        s->desks[head].looked = p->residency != NULL;
        c->n_middle = pick(p, head, from, n, c->middle);
        c->recent = from + n;
        c->renumbered = p->renumbered;
        s->desks[head].selections++;
}

/*
 * Whether a layer and head must select now. A choice that names slots no longer in use is made
 * again at once, whichever query of the group is due.
 */
static bool is_due(const struct pooled *p, uint32_t layer, uint32_t head) {
        const struct selection *s = p->selection;
        const struct choice *c = s->choices + index_of(p, layer, head);
        uint32_t t = c->made && c->renumbered != p->renumbered ? 0 : p->decoded;

        return s->hshare && layer >= s->dense &&
               kvd_share_chooses(s->layers, s->heads, p->setup.kv_heads, layer, head, t, s->every);
}

/* Keeps the queries of the prompt's last tokens. */
static void keep_queries(struct pooled *p, uint32_t layer, uint32_t head,
                         const struct kvd_attention *a) {
        struct selection *s = p->selection;
        size_t width = (size_t)p->setup.group * s->dim;
        float *to = s->queries + index_of(p, layer, head) * CALIBRATION * width;

        for (uint32_t i = a->n - MIN(a->n, CALIBRATION); i < a->n && p->n + i < pooled_dense(p);
             i++)
                memcpy(to + (p->n + i) % CALIBRATION * width, a->q + i * a->ldq,
                       width * sizeof *to);
}

/* The selection that a head of a layer attends to; NULL if it attends to all. */
static const struct choice *choice_of(const struct pooled *p, uint32_t layer, uint32_t head) {
        const struct selection *s = p->selection;
        uint32_t source = s->layers[layer];
        const struct choice *c = s->choices +
                                 index_of(p, source, s->heads[index_of(p, source, head)]);

        return s->hshare && layer >= s->dense && c->made && c->renumbered == p->renumbered ? c :
                                                                                             NULL;
}

void pooled_look(struct pooled *p, uint32_t layer, uint32_t head, const struct kvd_attention *a) {
        struct selection *s = p->selection;
        struct desk *d = s->desks + head;
        double started;

        d->looked = false;
        if (!s->ready) {
                keep_queries(p, layer, head, a);
                return;
        }
        if (a->n != 1 || s->labelled == 0)
                return;
        started = sys_now_ms();
        if (is_due(p, layer, head))
                select_tokens(p, layer, head, a->q);
        if (p->residency && !d->looked && !choice_of(p, layer, head)) {
                score(p, layer, head, a->q);
                find_shares(p, d);
                d->looked = true;
        }
        d->ms += sys_now_ms() - started;
}

void pooled_fetch(struct pooled *p, uint32_t layer) {
        const struct selection *s = p->selection;
        bool looked = false;

        for (uint32_t h = 0; p->residency && h < p->setup.kv_heads; h++)
                if (s->desks[h].looked) {
                        residency_share(p, s->desks[h].share);
                        looked = true;
                }
        if (looked)
                residency_fetch(p);
}

/* The first tokens, the selected ones, and all newer ones; this token's own slot is the last. */
void pooled_choose(struct pooled *p, uint32_t layer, uint32_t head, struct kvd_attention *a) {
        const struct selection *s = p->selection;
        const struct choice *c = s->ready && a->n == 1 ? choice_of(p, layer, head) : NULL;
        uint32_t n = s->window.sinks, *list = s->desks[head].list;

        if (!c)
                return;
        memcpy(list, p->used, n * sizeof *list);
        memcpy(list + n, c->middle, c->n_middle * sizeof *list);
        n += c->n_middle;
        memcpy(list + n, p->used + c->recent, (p->n_used + 1 - c->recent) * sizeof *list);
        a->chosen = list;
        a->n_chosen = n + p->n_used + 1 - c->recent;
}

void selection_hits(const struct pooled *p, uint32_t *hits) {
        const struct selection *s = p->selection;

        for (size_t i = 0; s && i < index_of(p, p->setup.layers, 0); i++)
                for (uint32_t k = 0; s->choices[i].made && k < s->choices[i].n_middle; k++)
                        hits[s->choices[i].middle[k] / p->bt]++;
}

void selection_stats(const struct pooled *p, struct pooled_stats *stats) {
        for (uint32_t h = 0; p->selection && h < p->setup.kv_heads; h++) {
                stats->selections += p->selection->desks[h].selections;
                stats->selection_ms += p->selection->desks[h].ms;
        }
}

/* ---- where decoding begins ------------------------------------------------------------------- */

struct sets { /* for each layer, head and query, a row of bits, one per slot */
        uint32_t queries, words;
        uint64_t *bits;
};

static const float *query_at(const struct pooled *p, uint32_t layer, uint32_t head,
                             uint32_t position) {
        const struct selection *s = p->selection;

        return s->queries + (index_of(p, layer, head) * CALIBRATION + position % CALIBRATION) *
                                    p->setup.group * s->dim;
}

/*
 * Computes what the prompt's last queries would have selected and, for KVReviver, which blocks they
 * need.
 */
static void look_back(struct pooled *p, const struct sets *sets) {
        struct selection *s = p->selection;
        uint32_t from, n = middle_of(p, p->n_used, &from);

        for (uint32_t l = 0; l < p->setup.layers; l++)
                for (uint32_t h = 0; h < p->setup.kv_heads; h++)
                        for (uint32_t i = 0; i < sets->queries; i++) {
                                size_t row = index_of(p, l, h) * sets->queries + i;
                                uint32_t *list = s->desks[h].list, found = 0;

                                score(p, l, h, query_at(p, l, h, p->n - sets->queries + i));
                                if (p->residency) {
                                        find_shares(p, s->desks + h);
                                        residency_share(p, s->desks[h].share);
                                }
                                if (sets->bits && l >= s->dense && n > 0)
                                        found = pick(p, h, from, n, list);
                                for (uint32_t j = 0; j < found; j++)
                                        sets->bits[row * sets->words + list[j] / 64] |=
                                                UINT64_C(1) << list[j] % 64;
                        }
}

static void take_sharing(struct pooled *p) {
        struct selection *s = p->selection;
        size_t heads = index_of(p, p->setup.layers, 0);
        _cleanup_(freep) uint8_t *answer = calloc(p->setup.layers + heads, 1);

        if (!answer || kvd_sequence_sharing(p->table, answer, answer + p->setup.layers) <= 0)
                return;
        for (uint32_t l = 0; l < p->setup.layers; l++)
                s->layers[l] = answer[l];
        for (size_t i = 0; i < heads; i++)
                s->heads[i] = answer[p->setup.layers + i];
}

/* The worker reads the bits in place, from blocks of ours that we keep as long as it needs them. */
static int ask_sharing(struct pooled *p, const struct sets *sets) {
        uint64_t bytes = index_of(p, p->setup.layers, 0) * sets->queries * sets->words *
                         sizeof(uint64_t);
        uint64_t block_bytes = cache_options(p->s->cache)->shape.block_bytes;
        uint32_t n = (uint32_t)DIV_UP(bytes, block_bytes);
        struct kvd_block *blocks = calloc(n, sizeof *blocks);
        int got = blocks ? kvd_alloc(p->space, n, blocks) : 0;

        for (uint32_t i = 0; blocks && got == (int)n && i < n; i++)
                memcpy(blocks[i].data, (const uint8_t *)sets->bits + i * block_bytes,
                       MIN(block_bytes, bytes - i * block_bytes));
        if (got == (int)n && kvd_sequence_critical(p->table, n, blocks, sets->queries, sets->words,
                                                   p->selection->window.middle) == 0) {
                pooled_wait(p);
                take_sharing(p);
        }
        if (got > 0)
                kvd_free(p->space, (uint32_t)got, blocks);
        free(blocks);
        return 0;
}

static bool shares(const struct pooled *p) {
        uint32_t from;

        return p->selection->hshare && middle_of(p, p->n_used, &from) > 0 &&
               (pooled_setting(p, "hshare.layer_ratio") < 1 ||
                pooled_setting(p, "hshare.head_ratio") < 1);
}

int selection_begin(struct pooled *p) {
        struct selection *s = p->selection;
        struct sets sets = {.queries = MIN(CALIBRATION, p->n), .words = DIV_UP(p->n_slots, 64)};
        _cleanup_(freep) uint64_t *bits = NULL;

        pooled_wait(p);
        selection_refresh(p, false);
        s->ready = true;
        if (s->labelled == 0)
                return 0;
        if (shares(p)) {
                bits = calloc(index_of(p, p->setup.layers, 0) * sets.queries * sets.words,
                              sizeof *bits);
                if (!bits)
                        return refuse(-ENOMEM, "out of memory for a sharing configuration");
        }
        sets.bits = bits;
        if (bits || p->residency)
                look_back(p, &sets);
        return bits ? ask_sharing(p, &sets) : 0;
}
