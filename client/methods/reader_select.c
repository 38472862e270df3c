/* SPDX-License-Identifier: Apache-2.0 */

/*
 * HShare: a decoded token sees the first, the newest and the selected tokens only. Similar layers,
 * heads and queries share one selection; the worker decides which are similar, from what the
 * prompt's last queries would have selected. Tokens whose entry has no labels yet are seen like the
 * newest ones.
 */

#include <errno.h>
#include <math.h>
#include <string.h>

#include "client/gpu/gpu_view.h"
#include "client/methods/reader.h"
#include "ipc/base/sys.h"

enum { MOST_ASKED = 1024 }; /* blocks of bits: kvd_sequence_critical takes no more */

struct choice {
        uint32_t *middle; /* slots, ascending */
        uint32_t n_middle;
        uint32_t recent;     /* first column from which all are seen */
        uint32_t renumbered; /* that of the reader when it was made */
        bool made;           /* if false, all are seen */
};

/* ---- life ------------------------------------------------------------------------------------ */

static void free_desk(struct desk *d) {
        free(d->query);
        free(d->rotated);
        free(d->scores);
        free(d->numbers);
        free(d->list);
        free(d->share);
}

static void free_asked(struct kvd_reader *r) {
        struct selection *s = r->selection;

        if (s->n_asked)
                kvd_free(r->sequence->space, s->n_asked, s->asked);
        free(s->asked);
        s->asked = NULL;
        s->n_asked = 0;
}

void selection_free(struct kvd_reader *r) {
        struct selection *s = r->selection;

        if (!s)
                return;
        free_asked(r);
        for (uint32_t h = 0; s->desks && h < r->geometry->kv_heads; h++)
                free_desk(s->desks + h);
        for (size_t i = 0; s->choices && i < reader_index(r, r->geometry->layers, 0); i++)
                free(s->choices[i].middle);
        free(s->n_lists);
        free(s->lists);
        free(s->desks);
        free(s->choices);
        free(s->queries);
        free(s->heads);
        free(s->layers);
        free(s->labels);
        free(s->rows);
        free(s);
        r->selection = NULL;
}

static bool make_desk(struct desk *d, const struct kvd_reader *r) {
        size_t group = r->group, slots = r->slots;

        d->query = sys->calloc(group, sizeof *d->query);
        d->rotated = sys->calloc(group * r->geometry->head_dim, sizeof *d->rotated);
        d->scores = sys->calloc((group + 1) * slots, sizeof *d->scores);
        d->total = d->scores + group * slots;
        d->numbers = sys->calloc(2 * slots, sizeof *d->numbers);
        d->list = sys->calloc(slots, sizeof *d->list);
        d->share = sys->calloc(r->max_blocks, sizeof *d->share);
        return d->query && d->rotated && d->scores && d->numbers && d->list && d->share;
}

static bool allocate(const struct kvd_reader *r, struct selection *s) {
        size_t heads = reader_index(r, r->geometry->layers, 0),
               width = (size_t)r->group * r->geometry->head_dim;
        bool made;

        s->rows = sys->calloc(r->max_blocks, sizeof *s->rows);
        s->layers = sys->calloc(r->geometry->layers, sizeof *s->layers);
        s->heads = sys->calloc(heads, sizeof *s->heads);
        s->queries = sys->calloc(heads * READER_CALIBRATION * width, sizeof *s->queries);
        s->choices = sys->calloc(heads, sizeof *s->choices);
        s->desks = sys->calloc(r->geometry->kv_heads, sizeof *s->desks);
        s->lists = sys->calloc(r->geometry->kv_heads, sizeof *s->lists);
        s->n_lists = sys->calloc(r->geometry->kv_heads, sizeof *s->n_lists);
        made = s->rows && s->layers && s->heads && s->queries && s->choices && s->desks &&
               s->lists && s->n_lists;
        for (size_t i = 0; made && s->hshare && i < heads; i++)
                made = (s->choices[i].middle = sys->calloc(s->slots, sizeof(uint32_t))) != NULL;
        for (uint32_t h = 0; made && h < r->geometry->kv_heads; h++)
                made = make_desk(s->desks + h, r);
        return made;
}

/* Until the worker decides otherwise, each layer and head selects for itself. */
static void share_nothing(const struct kvd_reader *r, struct selection *s) {
        for (uint32_t l = 0; l < r->geometry->layers; l++) {
                s->layers[l] = l;
                for (uint32_t h = 0; h < r->geometry->kv_heads; h++)
                        s->heads[reader_index(r, l, h)] = h;
        }
}

void selection_refresh(struct kvd_reader *r) {
        if (r->selection && r->packed)
                share_nothing(r, r->selection);
}

static void read_settings(const struct kvd_reader *r, struct selection *s) {
        double layers = r->geometry->layers;

        s->window = (struct kvd_window){(uint32_t)reader_setting(r, "hshare.sinks"),
                                        (uint32_t)MAX(reader_setting(r, "hshare.recent"), 1),
                                        (uint32_t)reader_setting(r, "hshare.top")};
        s->every = (uint32_t)lrint(1 / MAX(reader_setting(r, "hshare.query_ratio"), 1e-6));
        s->dense = (uint32_t)MIN(reader_setting(r, "hshare.dense_layers"), layers);
}

int selection_new(struct kvd_reader *r, bool hshare) {
        struct selection *s = sys->calloc(1, sizeof *s);

        r->selection = s;
        if (!s)
                return -ENOMEM;
        *s = (struct selection){.hshare = hshare,
                                .slots = r->slots,
                                .ops = r->ops->hshare,
                                .every = 1};
        if (hshare)
                read_settings(r, s);
        if (!allocate(r, s))
                return -ENOMEM;
        share_nothing(r, s);
        return 0;
}

/* ---- selecting ------------------------------------------------------------------------------- */

/* The first column whose slot is not below slot. */
static uint32_t column_of(const struct kvd_reader *r, uint32_t slot) {
        uint32_t low = 0, high = r->n_used;

        if (!r->gaps)
                return MIN(slot, r->n_used);
        while (low < high) {
                uint32_t middle = low + (high - low) / 2;

                if (r->used[middle] < slot)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low;
}

/* The columns to select from for the last of n tokens. 0: it sees all. */
static uint32_t middle_of(const struct kvd_reader *r, uint32_t n, uint32_t *from) {
        const struct selection *s = r->selection;
        uint32_t found = kvd_window_middle(&s->window, n, from),
                 labelled = column_of(r, s->labelled * r->geometry->block_tokens);

        return found == 0 || labelled <= *from ? 0 : MIN(found, labelled - *from);
}

/* After labels_score: selects slots among columns [from, from + n). Returns how many. */
static uint32_t pick(struct kvd_reader *r, uint32_t head, uint32_t from, uint32_t n, uint32_t *to) {
        const struct selection *s = r->selection;
        uint32_t holes = s->holes ? labels_prefer_holes(r, head, from, n) : 0;

        return labels_top(r, head, from, n, s->window.middle + holes, to);
}

static void look_at(struct kvd_reader *r, uint32_t layer, uint32_t head, const float *q) {
        struct desk *d = r->selection->desks + head;

        labels_score(r, layer, head, q);
        d->looked = r->residency != NULL;
        if (d->looked)
                labels_share(r, head, residency_first(r), residency_end(r));
}

static void select_tokens(struct kvd_reader *r, uint32_t layer, uint32_t head, const float *q) {
        struct selection *s = r->selection;
        struct choice *c = s->choices + reader_index(r, layer, head);
        uint32_t from, n = middle_of(r, r->n_used + r->behind, &from);

        c->made = n > 0;
        if (!c->made)
                return;
        look_at(r, layer, head, q);
        c->n_middle = pick(r, head, from, n, c->middle);
        c->recent = from + n;
        c->renumbered = r->renumbered;
        s->desks[head].selections++;
}

/*
 * Whether a layer and head must select now. A choice that names slots no longer in use is made
 * again at once, whichever query of the group is due.
 */
static bool is_due(const struct kvd_reader *r, uint32_t layer, uint32_t head) {
        const struct selection *s = r->selection;
        const struct choice *c = s->choices + reader_index(r, layer, head);
        uint32_t t = c->made && c->renumbered != r->renumbered ? 0 : r->decoded;

        return s->hshare && r->n == 1 && layer >= s->dense &&
               kvd_share_chooses(s->layers, s->heads, r->geometry->kv_heads, layer, head, t,
                                 s->every);
}

/* Whether a head uses a choice that was made before, or that of another head or layer. */
static bool need_not_look(const struct kvd_reader *r, uint32_t layer, uint32_t head) {
        const struct selection *s = r->selection;
        size_t own = reader_index(r, layer, head);
        const struct choice *c = s->choices + own;

        return s->hshare && r->n == 1 && layer >= s->dense &&
               (s->layers[layer] != layer || s->heads[own] != head ||
                (c->made && c->renumbered == r->renumbered));
}

/* The selection that a head of a layer uses; NULL if it sees all. */
static const struct choice *choice_of(const struct kvd_reader *r, uint32_t layer, uint32_t head) {
        const struct selection *s = r->selection;
        uint32_t source = s->layers[layer];
        const struct choice *c = s->choices +
                                 reader_index(r, source, s->heads[reader_index(r, source, head)]);

        return s->hshare && r->n == 1 && layer >= s->dense && c->made &&
                               c->renumbered == r->renumbered ?
                       c :
                       NULL;
}

static const float *query_at(const struct kvd_reader *r, uint32_t layer, uint32_t head,
                             uint32_t token) {
        return r->selection->queries +
               (reader_index(r, layer, head) * READER_CALIBRATION + token % READER_CALIBRATION) *
                       r->group * r->geometry->head_dim;
}

/* Keeps the queries of the prompt's last tokens. */
static void keep_queries(struct kvd_reader *r, uint32_t layer, uint32_t head, const float *q,
                         size_t ldq) {
        size_t width = (size_t)r->group * r->geometry->head_dim;

        for (uint32_t i = r->n - MIN(r->n, READER_CALIBRATION); i < r->n; i++)
                memcpy((float *)query_at(r, layer, head, r->tokens + i), q + i * ldq,
                       width * sizeof *q);
}

void reader_look(struct kvd_reader *r, uint32_t layer, uint32_t head, const float *q, size_t ldq) {
        reader_look_at(r, layer, head, q, ldq, r->n);
}

void reader_look_at(struct kvd_reader *r, uint32_t layer, uint32_t head, const float *q, size_t ldq,
                    uint32_t n) {
        struct selection *s = r->selection;
        uint64_t started;
        struct desk *d;

        if (!s)
                return;
        d = s->desks + head;
        d->looked = false;
        if (!r->ready) {
                keep_queries(r, layer, head, q, ldq);
                return;
        }
        if (s->labelled == 0)
                return;
        started = sys_now_ns();
        memset(d->share, 0, r->max_blocks * sizeof *d->share);
        if (is_due(r, layer, head))
                select_tokens(r, layer, head, q);
        if (r->residency && !d->looked && !need_not_look(r, layer, head))
                for (uint32_t i = 0; i < n; i++)
                        look_at(r, layer, head, q + i * ldq);
        d->ns += sys_now_ns() - started;
}

int reader_fetch(struct kvd_reader *r) {
        const struct selection *s = r->selection;
        bool looked = false;

        if (r->residency)
                residency_forget(r);
        for (uint32_t h = 0; r->residency && h < r->geometry->kv_heads; h++)
                if (s->desks[h].looked) {
                        residency_share(r, s->desks[h].share);
                        looked = true;
                }
        return looked ? residency_fetch(r) : 0;
}

/* ---- what is seen ---------------------------------------------------------------------------- */

/* The first tokens, the selected ones, and all newer ones. */
static uint32_t list_choice(const struct kvd_reader *r, const struct choice *c, uint32_t *list) {
        uint32_t n = r->selection->window.sinks;

        memcpy(list, r->used, n * sizeof *list);
        memcpy(list + n, c->middle, c->n_middle * sizeof *list);
        n += c->n_middle;
        memcpy(list + n, r->used + c->recent, (r->n_used - c->recent) * sizeof *list);
        return n + r->n_used - c->recent;
}

static bool list_chosen(struct kvd_reader *r, uint32_t layer) {
        struct selection *s = r->selection;
        bool chosen = false;

        for (uint32_t h = 0; h < r->geometry->kv_heads; h++) {
                const struct choice *c = choice_of(r, layer, h);

                s->lists[h] = c ? s->desks[h].list : r->used;
                s->n_lists[h] = c ? list_choice(r, c, s->desks[h].list) : r->n_used;
                chosen |= c != NULL;
        }
        return chosen;
}

void reader_seen(struct kvd_reader *r, uint32_t layer, struct kvd_seen *ret) {
        bool chosen = r->selection && r->ready && list_chosen(r, layer);

        *ret = (struct kvd_seen){.sequence = r->sequence,
                                 .frequencies = r->frequencies,
                                 .chosen = chosen ? r->selection->lists : NULL,
                                 .n_chosen = chosen ? r->selection->n_lists : NULL,
                                 .mass = reader_mass(r)};
}

void selection_hits(const struct kvd_reader *r, uint32_t *hits) {
        const struct selection *s = r->selection;

        for (size_t i = 0; s && i < reader_index(r, r->geometry->layers, 0); i++)
                for (uint32_t k = 0; s->choices[i].made && k < s->choices[i].n_middle; k++)
                        hits[s->choices[i].middle[k] / r->geometry->block_tokens]++;
}

/* ---- where decoding begins ------------------------------------------------------------------- */

struct sets { /* for each layer, head and query, a row of bits, one per slot */
        uint32_t queries, words;
        uint64_t *bits;
};

static void mark(const struct sets *sets, size_t row, const uint32_t *slots, uint32_t n) {
        for (uint32_t i = 0; i < n; i++)
                sets->bits[row * sets->words + slots[i] / 64] |= UINT64_C(1) << slots[i] % 64;
}

/* What one of the prompt's last queries would have selected, and which blocks it needs. */
static void look_back_from(struct kvd_reader *r, const struct sets *sets, uint32_t layer,
                           uint32_t head, uint32_t i) {
        struct desk *d = r->selection->desks + head;
        uint32_t from, n = middle_of(r, r->n_used + r->behind, &from);
        size_t row = reader_index(r, layer, head) * sets->queries + i;

        look_at(r, layer, head, query_at(r, layer, head, r->tokens - sets->queries + i));
        if (sets->bits && layer >= r->selection->dense && n > 0)
                mark(sets, row, d->list, pick(r, head, from, n, d->list));
}

static void look_back(struct kvd_reader *r, const struct sets *sets) {
        for (uint32_t l = 0; l < r->geometry->layers; l++)
                for (uint32_t h = 0; h < r->geometry->kv_heads; h++) {
                        struct desk *d = r->selection->desks + h;

                        memset(d->share, 0, r->max_blocks * sizeof *d->share);
                        for (uint32_t i = 0; i < sets->queries; i++)
                                look_back_from(r, sets, l, h, i);
                        if (r->residency)
                                residency_share(r, d->share);
                }
}

void selection_take(struct kvd_reader *r) {
        struct selection *s = r->selection;
        size_t heads = reader_index(r, r->geometry->layers, 0);
        _cleanup_(freep) uint8_t *answer = NULL;
        int e;

        if (!s || !s->n_asked)
                return;
        answer = sys->calloc(r->geometry->layers + heads, 1);
        if (!answer)
                return;
        e = kvd_sequence_sharing(r->sequence, answer, answer + r->geometry->layers);
        for (uint32_t l = 0; e > 0 && !r->packed && l < r->geometry->layers; l++)
                s->layers[l] = answer[l];
        for (size_t i = 0; e > 0 && !r->packed && i < heads; i++)
                s->heads[i] = answer[r->geometry->layers + i];
        if (e != 0)
                free_asked(r);
}

/* The next daemon's blocks may be elsewhere, and do not serve this sequence. */
static int write_block(const struct kvd_reader *r, const struct kvd_block *to, const void *from,
                       size_t bytes) {
        struct view *view = r->sequence->view;

        if (to->view != view)
                return client_fail(-ESTALE, "the block is the next daemon's");
        if (view->device)
                return device_store(view, to->data, from, bytes);
        memcpy(to->data, from, bytes);
        return 0;
}

/* The worker reads the bits in place, from blocks of ours that we keep as long as it needs them. */
static int ask_sharing(struct kvd_reader *r, const struct sets *sets) {
        uint64_t bytes = reader_index(r, r->geometry->layers, 0) * sets->queries * sets->words *
                         sizeof(uint64_t);
        uint64_t block_bytes = r->sequence->view->ix->block_bytes;
        struct selection *s = r->selection;
        uint32_t n = (uint32_t)DIV_UP(bytes, block_bytes);
        int got, e = 0;

        if (n > MOST_ASKED)
                return 0;
        s->asked = sys->calloc(n, sizeof *s->asked);
        got = s->asked ? kvd_alloc(r->sequence->space, n, s->asked) : 0;
        s->n_asked = (uint32_t)MAX(got, 0);
        for (uint32_t i = 0; e == 0 && s->n_asked == n && i < n; i++)
                e = write_block(r, &s->asked[i], (const uint8_t *)sets->bits + i * block_bytes,
                                MIN(block_bytes, bytes - i * block_bytes));
        if (e < 0 || s->n_asked < n ||
            kvd_sequence_critical(r->sequence, n, s->asked, sets->queries, sets->words,
                                  s->window.middle) < 0) {
                free_asked(r);
                return 0;
        }
        got = reader_wait(r);
        selection_take(r);
        return got;
}

static bool shares(const struct kvd_reader *r) {
        uint32_t from;

        return r->selection->hshare && !r->packed &&
               middle_of(r, r->n_used + r->behind, &from) > 0 &&
               (reader_setting(r, "hshare.layer_ratio") < 1 ||
                reader_setting(r, "hshare.head_ratio") < 1);
}

int selection_begin(struct kvd_reader *r) {
        struct sets sets = {.queries = MIN(READER_CALIBRATION, r->tokens),
                            .words = DIV_UP(r->n_entries * r->geometry->block_tokens, 64)};
        _cleanup_(freep) uint64_t *bits = NULL;

        if (r->selection->labelled == 0)
                return 0;
        if (shares(r)) {
                bits = sys->calloc(reader_index(r, r->geometry->layers, 0) * sets.queries *
                                           sets.words,
                                   sizeof *bits);
                if (!bits)
                        return -ENOMEM;
        }
        sets.bits = bits;
        if (bits || r->residency)
                look_back(r, &sets);
        return bits ? ask_sharing(r, &sets) : 0;
}
