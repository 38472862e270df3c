/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What a sequence's tokens see of it. Before each pass a reader takes the entries as the daemon has
 * left them: their tokens, rotations and labels.
 */

#include "client/methods/reader.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "client/internal.h"
#include "client/methods/attend.h"
#include "ipc/base/sys.h"

enum { USE_EVERY = 4 }; /* passes of decoding between reports of use */

double reader_setting(const struct kvd_reader *r, const char *name) {
        double value = 0;

        kvd_space_setting(r->sequence->space, name, &value);
        return value;
}

/* ---- the entries as they are ----------------------------------------------------------------- */

static void rotate(struct kvd_reader *r) {
        r->rotated = false;
        for (uint32_t i = 0; i < r->n_entries; i++) {
                r->deltas[i] = r->frequencies && r->entries[i].data ? r->entries[i].delta : 0;
                r->rotated |= r->deltas[i] != 0;
        }
        if (!r->rotated)
                return;
        kvd_rotations(r->deltas, r->n_entries, r->frequencies, r->geometry->head_dim / 2,
                      r->rotation, r->rotations, r->max_blocks);
}

static void list_used(struct kvd_reader *r) {
        uint32_t bt = r->geometry->block_tokens, n = 0;

        r->gaps = false;
        for (uint32_t i = 0; i < r->n_entries; i++) {
                r->gaps |= r->fill[i] < bt;
                for (uint32_t j = 0; j < r->fill[i]; j++)
                        r->used[n++] = i * bt + j;
        }
        r->n_used = n;
}

/* Returns the first entry that has changed, or was appended. */
static uint32_t take_entries(struct kvd_reader *r) {
        uint32_t before = r->n_entries, first = UINT32_MAX;
        bool refilled = false;

        r->entries = kvd_sequence_entries(r->sequence, &r->n_entries);
        for (uint32_t i = 0; i < r->n_entries; i++) {
                const struct kvd_entry *e = r->entries + i;
                uint32_t fill = e->flags & KVD_ENTRY_DROPPED ? 0 : e->n_tokens;
                uint64_t row = (uint64_t)e->row << 32 | e->row_generation;

                if (i >= before || row != r->rows[i] || fill != r->fill[i])
                        first = MIN(first, i);
                refilled |= i < before && fill != r->fill[i];
                r->packed |= (e->flags & KVD_ENTRY_COMPACT) != 0;
                r->rows[i] = row;
                r->fill[i] = fill;
        }
        if (first != UINT32_MAX)
                list_used(r);
        r->renumbered += refilled;
        return first;
}

void reader_refresh(struct kvd_reader *r) {
        uint32_t changed = take_entries(r);

        r->late &= changed >= r->n_entries;
        rotate(r);
        selection_refresh(r);
        labels_refresh(r, changed);
}

int reader_wait(struct kvd_reader *r) {
        int n = kvd_sequence_wait(r->sequence, r->late ? 0 : r->timeout_ns);

        if (n == -ETIMEDOUT && !r->late) {
                r->late = true;
                r->stats.late++;
        }
        r->failed = n == -ETIMEDOUT ? 0 : MIN(n, 0);
        reader_refresh(r);
        return n == -ETIMEDOUT ? 1 : MAX(n, 0);
}

/* ---- life ------------------------------------------------------------------------------------ */

struct kvd_reader *kvd_reader_free(struct kvd_reader *r) {
        if (!r)
                return NULL;
        bounds_free(r);
        rounds_free(r);
        residency_free(r);
        selection_free(r);
        free(r->hits);
        free(r->mass);
        free(r->rotations);
        free(r->rotation);
        free(r->deltas);
        free(r->used);
        free(r->fill);
        free(r->rows);
        free(r->frequencies);
        free(r);
        return NULL;
}

static bool allocate(struct kvd_reader *r, const float *frequencies) {
        uint32_t dim = r->geometry->head_dim;

        r->rows = sys->calloc(r->max_blocks, sizeof *r->rows);
        r->fill = sys->calloc(r->max_blocks, sizeof *r->fill);
        r->used = sys->calloc(r->slots, sizeof *r->used);
        r->deltas = sys->calloc(r->max_blocks, sizeof *r->deltas);
        r->rotation = sys->calloc(r->max_blocks, sizeof *r->rotation);
        r->rotations = sys->calloc((size_t)r->max_blocks * dim, sizeof *r->rotations);
        r->mass = sys->calloc(r->max_blocks, sizeof *r->mass);
        r->hits = sys->calloc(r->max_blocks, sizeof *r->hits);
        if (!r->rows || !r->fill || !r->used || !r->deltas || !r->rotation || !r->rotations ||
            !r->mass || !r->hits)
                return false;
        if (!frequencies || dim % 2 != 0)
                return true;
        r->frequencies = sys->calloc(dim / 2, sizeof *r->frequencies);
        if (r->frequencies)
                memcpy(r->frequencies, frequencies, dim / 2 * sizeof *frequencies);
        return r->frequencies;
}

static int check_options(const struct kvd_shape *g, const struct kvd_reader_options *o) {
        const struct kvd_heads heads = {.heads = o->heads, .scale = o->scale};

        if (g->layer_groups > 1)
                return client_fail(-EINVAL, "sequences of several layer groups");
        return attend_check_heads(g, &heads);
}

static int add_methods(struct kvd_reader *r) {
        bool hshare = reader_setting(r, "hshare") > 0, reviver = reader_setting(r, "kvreviver") > 0;
        int e = hshare || reviver ? selection_new(r, hshare) : 0;

        if (e == 0 && reviver)
                e = residency_new(r);
        return e == 0 && reviver ? rounds_new(r) : e;
}

int kvd_reader_new(struct kvd_sequence *s, const struct kvd_reader_options *o,
                   struct kvd_reader **ret) {
        const struct kvd_shape *g = &s->space->geometry;
        struct kvd_reader *r;
        int e = space_check(s->space) < 0 ? -ECHILD : check_options(g, o);

        if (e < 0)
                return e;
        r = sys->calloc(1, sizeof *r);
        if (!r)
                return client_fail(-ENOMEM, "out of memory");
        *r = (struct kvd_reader){.sequence = s,
                                 .geometry = g,
                                 .ops = client_ops(),
                                 .group = o->heads / g->kv_heads,
                                 .scale = o->scale,
                                 .timeout_ns = o->timeout_ns,
                                 .max_blocks = s->max_blocks,
                                 .slots = s->max_blocks * g->block_tokens};
        e = allocate(r, o->frequencies) ? add_methods(r) : -ENOMEM;
        if (e < 0) {
                kvd_reader_free(r);
                return client_fail(e, "out of memory for a sequence of %u blocks", s->max_blocks);
        }
        *ret = r;
        return 0;
}

/* ---- passes ---------------------------------------------------------------------------------- */

void kvd_reader_begin(struct kvd_reader *r, uint32_t behind, uint32_t n) {
        r->behind = behind;
        r->n = n;
        r->measures = r->ready && r->decoded % USE_EVERY == 0;
        if (r->measures)
                memset(r->mass, 0, r->max_blocks * sizeof *r->mass);
        reader_refresh(r);
}

bool reader_looks(const struct kvd_reader *r) {
        return r->selection;
}

float *reader_mass(const struct kvd_reader *r) {
        return r->measures ? r->mass : NULL;
}

/* Of tokens [first, first + n) of the pass. */
static int look(struct kvd_reader *r, uint32_t layer, const float *q, size_t ldq, uint32_t first,
                uint32_t n) {
        size_t width = (size_t)r->group * r->geometry->head_dim;

        for (uint32_t h = 0; h < r->geometry->kv_heads; h++)
                reader_look_at(r, layer, h, q + first * ldq + h * width, ldq, n);
        return MIN(reader_fetch(r), 0);
}

int reader_check(const struct kvd_reader *r, uint32_t layer) {
        if (space_check(r->sequence->space) < 0)
                return -ECHILD;
        return layer < r->geometry->layers ?
                       0 :
                       client_fail(-EINVAL, "layer %u of %u", layer, r->geometry->layers);
}

int kvd_reader_look(struct kvd_reader *r, uint32_t layer, const float *q, size_t ldq) {
        int e = reader_check(r, layer);

        r->in_rounds = false;
        return e < 0 ? e : look(r, layer, q, ldq, 0, r->n);
}

/* Exact rows without those of the last tokens of the pass, which are computed later. */
static const struct kvd_exact *exact_before(const struct kvd_exact *e, uint32_t more,
                                            struct kvd_exact *ret) {
        if (!e || e->n <= more)
                return NULL;
        *ret = *e;
        ret->n -= more;
        return ret;
}

/* Tokens [first, first + n) of the pass. */
static int attend(struct kvd_reader *r, uint32_t layer, const struct kvd_table *table,
                  const struct kvd_heads *heads, const float *q, size_t ldq, float *out, size_t ldo,
                  uint32_t first, uint32_t n) {
        struct kvd_table piece = *table;
        struct kvd_heads form = *heads;
        struct kvd_exact exact;
        struct kvd_seen seen;
        bool rounds = r->ready && r->residency;
        int e;

        r->in_rounds = rounds;
        e = look(r, layer, q, ldq, first, n);
        if (e < 0)
                return e;
        piece.first += first;
        piece.n = n;
        form.exact = exact_before(heads->exact, r->n - (first + n), &exact);
        if (rounds)
                return rounds_attend(r, layer, &piece, &form, q + first * ldq, ldq,
                                     out + first * ldo, ldo);
        reader_seen(r, layer, &seen);
        return kvd_sequence_attention(&seen, layer, &piece, &form, q + first * ldq, ldq,
                                      out + first * ldo, ldo);
}

/* If blocks may be missing, a few tokens at a time, because all of their blocks must fit at once. */
int kvd_reader_attention(struct kvd_reader *r, uint32_t layer, const struct kvd_table *table,
                         const struct kvd_heads *heads, const float *q, size_t ldq, float *out,
                         size_t ldo) {
        uint32_t most = r->ready && r->residency ? READER_PIECE : r->n;
        int e = reader_check(r, layer);

        if (e == 0 && (heads->heads != r->group * r->geometry->kv_heads || table->n != r->n))
                e = client_fail(-EINVAL, "%u heads and %u tokens in a pass of %u and %u",
                                heads->heads, table->n, r->group * r->geometry->kv_heads, r->n);
        for (uint32_t i = 0; e == 0 && i < r->n; i += most)
                e = attend(r, layer, table, heads, q, ldq, out, ldo, i, MIN(most, r->n - i));
        return e;
}

/*
 * Reports each entry's share of the attention per token, where 1 is the average, and how many of
 * its tokens were selected.
 */
static void report_use(struct kvd_reader *r) {
        float total = 0;

        for (uint32_t i = 0; i < r->n_entries; i++)
                total += r->mass[i];
        if (total <= 0)
                return;
        memset(r->hits, 0, r->max_blocks * sizeof *r->hits);
        selection_hits(r, r->hits);
        for (uint32_t i = 0; i < r->n_entries; i++)
                kvd_sequence_use(r->sequence, i,
                                 r->mass[i] / total * (float)r->n_used / (float)MAX(r->fill[i], 1),
                                 (float)r->hits[i] / (float)r->geometry->block_tokens);
}

int kvd_reader_decode(struct kvd_reader *r, uint32_t behind) {
        int changed, e;

        if (space_check(r->sequence->space) < 0)
                return -ECHILD;
        changed = reader_wait(r);
        r->behind = behind;
        r->ready = true;
        e = r->selection ? selection_begin(r) : 0;
        if (e < 0)
                return client_fail(e, "out of memory for a sharing configuration");
        return changed + e + (r->residency ? residency_settle(r) : 0);
}

int kvd_reader_end(struct kvd_reader *r) {
        r->tokens += r->n;
        r->n = 0;
        if (!r->ready)
                return 0;
        if (r->measures)
                report_use(r);
        r->decoded++;
        selection_take(r);
        return r->residency ? residency_settle(r) : 0;
}

void kvd_reader_stats(const struct kvd_reader *r, struct kvd_reader_stats *ret) {
        *ret = r->stats;
        for (uint32_t h = 0; r->selection && h < r->geometry->kv_heads; h++) {
                ret->selections += r->selection->desks[h].selections;
                ret->select_ns += r->selection->desks[h].ns;
        }
}
