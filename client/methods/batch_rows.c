/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What the requests of a batch see, as the arrays that the kernels read. A row without a reader has
 * no holes: a sequence that was compacted often has many entries without tokens.
 */

#include <errno.h>
#include <string.h>

#include "client/methods/batch.h"
#include "client/methods/reader.h"
#include "ipc/base/sys.h"

enum { MOST_SLOTS = 1 << 30 }; /* of a row; times block_tokens, they are counted in 32 bits */

/* ---- requests -------------------------------------------------------------------------------- */

static int check_reader(const struct kvd_request *q) {
        if (!q->reader)
                return 0;
        if (q->reader->sequence != q->sequence)
                return client_fail(-EINVAL, "the reader is that of another sequence");
        return q->reader->n == q->table.n ?
                       0 :
                       client_fail(-EINVAL, "%u new tokens, and the reader's pass has %u",
                                   q->table.n, q->reader->n);
}

static int check(struct rows *rows, struct kvd_space *space, const struct kvd_request *q) {
        uint32_t n_blocks = DIV_UP(q->table.first + q->table.n, space->geometry.block_tokens);
        struct view *view = NULL;
        uint64_t slots = (uint64_t)q->table.first + q->table.n;
        int r = attend_find_table(space, &q->table, &view);

        if (r < 0)
                return r;
        slots += q->sequence ? (uint64_t)q->sequence->n * space->geometry.block_tokens : 0;
        if ((rows->view && rows->view != view) || (q->sequence && q->sequence->view != view))
                return client_fail(
                        -ESTALE, "the requests' tables and sequences belong to different daemons");
        rows->view = view;
        if (slots > MIN(MOST_SLOTS, UINT32_MAX / space->geometry.block_tokens))
                return client_fail(-EINVAL, "%llu slots are more than a GPU's kernels take",
                                   (unsigned long long)slots);
        for (uint32_t i = 0; r == 0 && i < n_blocks; i++)
                r = attend_check_block(view, q->table.blocks[i]);
        return r < 0 ? r : check_reader(q);
}

/* Its reader may change a sequence in the middle of a step, and other rows would not know. */
static int check_alone(const struct rows *rows, const struct kvd_request *q) {
        for (uint32_t i = 0; q->sequence && i < rows->n; i++)
                if (rows->at[i].sequence == q->sequence && (rows->at[i].reader || q->reader))
                        return client_fail(-EINVAL, "a sequence with a reader is in two requests");
        return 0;
}

static int make_room(struct rows *rows, uint32_t n) {
        struct row *at;

        if (n <= rows->room)
                return 0;
        at = sys->calloc(2 * (size_t)n, sizeof *at);
        if (!at)
                return client_fail(-ENOMEM, "no memory for %u requests", n);
        free(rows->at);
        rows->at = at;
        rows->room = 2 * n;
        return 0;
}

static void add(struct rows *rows, uint32_t i, uint32_t token, const struct kvd_request *q) {
        rows->at[i] = (struct row){.table = q->table,
                                   .sequence = q->sequence,
                                   .reader = q->reader,
                                   .mass = q->reader ? reader_mass(q->reader) : q->mass,
                                   .token = token};
        rows->most = MAX(rows->most, q->table.n);
        rows->n_single += rows->most == 1;
        rows->looks |= q->reader && reader_looks(q->reader);
}

int rows_take(struct rows *rows, struct kvd_space *space, uint32_t n,
              const struct kvd_request *requests) {
        uint32_t token = 0;
        int r = make_room(rows, n);

        rows->n = rows->most = rows->n_single = 0;
        rows->looks = false;
        rows->view = NULL;
        for (; r == 0 && rows->n < n; token += requests[rows->n++].table.n) {
                r = check(rows, space, &requests[rows->n]);
                if (r == 0)
                        r = check_alone(rows, &requests[rows->n]);
                if (r < 0)
                        break;
                add(rows, rows->n, token, &requests[rows->n]);
        }
        rows->n = r == 0 ? n : 0;
        return r;
}

void rows_free(struct rows *rows) {
        free(rows->at);
        free(rows->cells);
        *rows = (struct rows){0};
}

/* ---- entries --------------------------------------------------------------------------------- */

static bool is_seen(const struct row *row, const struct kvd_entry *e) {
        return row->reader || e->data;
}

static void measure(struct rows *rows, struct row *row, uint32_t block_tokens) {
        row->n_entries = row->n_seen = 0;
        if (row->sequence)
                row->entries = kvd_sequence_entries(row->sequence, &row->n_entries);
        for (uint32_t i = 0; i < row->n_entries; i++) {
                const struct kvd_entry *e = row->entries + i;

                row->n_seen += is_seen(row, e);
                rows->n_turned += e->data && e->delta != 0;
                rows->gaps |= e->data && e->n_tokens < block_tokens;
        }
        row->n_slots = row->n_seen * block_tokens + row->table.first + row->table.n;
        rows->longest = MAX(rows->longest, row->n_slots);
}

/* Of row i: tokens of each block, 0 if it is not resident or the table's; its entry; its delta. */
static uint32_t *fill_of(const struct rows *rows, uint32_t i) {
        return rows->cells + (size_t)i * rows->ld;
}

static uint32_t *entries_of(const struct rows *rows, uint32_t i) {
        return fill_of(rows, rows->n + i);
}

static int32_t *deltas_of(const struct rows *rows, uint32_t i) {
        return (int32_t *)fill_of(rows, 2 * rows->n + i);
}

static uint32_t tokens_of(const struct kvd_entry *e) {
        return e->data ? e->n_tokens : 0;
}

static int32_t delta_of(const struct kvd_entry *e) {
        return e->data ? e->delta : 0;
}

static uint32_t id_of(const struct kvd_entry *e) {
        return e->data ? e->block : GPU_NO_BLOCK;
}

static void take_entries(struct rows *rows, uint32_t i) {
        uint32_t *fill = fill_of(rows, i), *entries = entries_of(rows, i), n = 0;
        const struct row *row = rows->at + i;
        int32_t *deltas = deltas_of(rows, i);

        memset(deltas, 0, rows->ld * sizeof *deltas);
        for (uint32_t k = 0; k < row->n_entries; k++)
                if (is_seen(row, row->entries + k)) {
                        fill[n] = tokens_of(row->entries + k);
                        deltas[n] = delta_of(row->entries + k);
                        entries[n++] = k;
                }
}

static int make_cells(struct rows *rows) {
        size_t room = 3 * (size_t)rows->n * rows->ld;

        if (room <= rows->cells_room)
                return 0;
        free(rows->cells);
        rows->cells_room = 2 * room;
        rows->cells = sys->calloc(rows->cells_room, sizeof *rows->cells);
        if (rows->cells)
                return 0;
        rows->cells_room = 0;
        return client_fail(-ENOMEM, "no memory for tables of %u blocks", rows->ld);
}

int rows_refresh(struct rows *rows, const struct kvd_shape *g, const float *frequencies) {
        int r;

        rows->longest = rows->n_turned = 0;
        rows->gaps = false;
        for (uint32_t i = 0; i < rows->n; i++)
                measure(rows, rows->at + i, g->block_tokens);
        rows->ld = DIV_UP(rows->longest, g->block_tokens);
        if (rows->n_turned && (!frequencies || g->head_dim % 2 != 0))
                return client_fail(-EINVAL,
                                   "an entry has a delta, and the batch has no frequencies");
        r = make_cells(rows);
        for (uint32_t i = 0; r == 0 && i < rows->n; i++)
                take_entries(rows, i);
        return r;
}

bool rows_have_moved(const struct rows *rows, const struct tables *sent) {
        for (uint32_t i = 0; i < rows->n; i++) {
                const uint32_t *ids = sent->ids + (size_t)i * rows->ld, *fill = fill_of(rows, i);
                const struct row *row = rows->at + i;

                for (uint32_t k = 0; row->reader && k < row->n_entries; k++) {
                        const struct kvd_entry *e = row->entries + k;

                        if (ids[k] != id_of(e) || fill[k] != tokens_of(e) ||
                            deltas_of(rows, i)[k] != delta_of(e))
                                return true;
                }
        }
        return false;
}

/* ---- arrays ---------------------------------------------------------------------------------- */

static uint8_t *place(uint8_t **at, size_t bytes) {
        uint8_t *here = *at;

        *at += ALIGN_UP(bytes, ATTEND_LINE);
        return here;
}

struct tables rows_lay_out(const struct rows *rows, const struct kvd_shape *g, uint8_t *base) {
        size_t blocks = (size_t)rows->n * rows->ld * sizeof(uint32_t);
        uint8_t *at = base;
        struct tables t;

        t.ids = (uint32_t *)place(&at, blocks);
        t.lengths = (uint32_t *)place(&at, rows->n * sizeof *t.lengths);
        t.starts = (uint32_t *)place(&at, (rows->n + 1) * sizeof *t.starts);
        t.rotation = (uint32_t *)place(&at, rows->n_turned ? blocks : 0);
        t.rotations = (float *)place(&at, (size_t)rows->n_turned * g->head_dim * sizeof(float));
        t.bytes = (size_t)(at - base);
        return t;
}

static void write_ids(const struct rows *rows, uint32_t i, uint32_t block_tokens, uint32_t *to) {
        const struct row *row = rows->at + i;
        uint32_t n_blocks = DIV_UP(row->table.first + row->table.n, block_tokens);

        for (uint32_t k = 0; k < row->n_seen; k++)
                *to++ = id_of(row->entries + entries_of(rows, i)[k]);
        memcpy(to, row->table.blocks, n_blocks * sizeof *to);
}

/* Adds the row's rotations behind n others. Returns how many there are now. */
static uint32_t write_turns(const struct rows *rows, uint32_t i, uint32_t half,
                            const float *frequencies, uint32_t n, uint32_t *rotation,
                            float *rotations) {
        uint32_t more = kvd_rotations(deltas_of(rows, i), rows->ld, frequencies, half, rotation,
                                      rotations + (size_t)n * 2 * half, rows->n_turned - n);

        for (uint32_t k = 0; k < rows->ld; k++)
                rotation[k] += rotation[k] ? n : 0;
        return n + more;
}

void rows_write(const struct rows *rows, const struct kvd_shape *g, const float *frequencies,
                struct tables *to) {
        uint32_t turns = 0, begin = 0;

        memset(to->ids, 0xff, (size_t)rows->n * rows->ld * sizeof *to->ids); /* GPU_NO_BLOCK */
        for (uint32_t i = 0; i < rows->n; i++) {
                const struct row *row = rows->at + i;
                size_t at = (size_t)i * rows->ld;

                write_ids(rows, i, g->block_tokens, to->ids + at);
                to->lengths[i] = row->n_slots;
                /* of the rows that are not decoded: from their first token on */
                to->starts[i] = begin;
                begin += i < rows->n_single ? 0 : row->table.n;
                if (rows->n_turned)
                        turns = write_turns(rows, i, g->head_dim / 2, frequencies, turns,
                                            to->rotation + at, to->rotations);
        }
        to->starts[rows->n] = begin;
}

void rows_add_mass(const struct rows *rows, const struct kvd_shape *g, uint32_t i,
                   const float *from) {
        const struct row *row = rows->at + i;

        for (uint32_t k = 0; k < row->n_seen; k++)
                for (uint32_t h = 0; h < g->kv_heads; h++)
                        row->mass[entries_of(rows, i)[k]] += from[(size_t)h * rows->ld + k];
}

/* ---- lists of slots -------------------------------------------------------------------------- */

static uint32_t most_of(const struct row *row, uint32_t head, uint32_t block_tokens) {
        uint32_t behind = row->n_slots - row->n_seen * block_tokens;

        return row->seen.chosen ? row->seen.n_chosen[head] + behind : row->n_slots;
}

uint32_t rows_most_listed(const struct rows *rows, const struct kvd_shape *g) {
        uint32_t most = 1;

        for (uint32_t i = 0; i < rows->n; i++)
                for (uint32_t h = 0; h < g->kv_heads; h++)
                        most = MAX(most, most_of(rows->at + i, h, g->block_tokens));
        return most;
}

void rows_list(const struct rows *rows, const struct kvd_shape *g, uint32_t ld, uint32_t *n,
               uint32_t *to) {
        for (uint32_t i = 0; i < rows->n; i++)
                for (uint32_t h = 0; h < g->kv_heads; h++, n++, to += ld) {
                        const struct row *row = rows->at + i;
                        const struct kvd_seen *seen = &row->seen;

                        *n = attend_list(fill_of(rows, i), row->n_seen, g->block_tokens,
                                         row->n_slots, seen->chosen ? seen->chosen[h] : NULL,
                                         seen->chosen ? seen->n_chosen[h] : 0, to);
                }
}
