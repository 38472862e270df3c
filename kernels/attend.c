/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention for one token or many. Keys and values are read in place: first a pointer to each
 * column's key is collected, so that the blocks' addresses do not matter. A value lies at the same
 * distance (v_offset - k_offset) from its key in every block. Queries are processed in tiles of
 * rows, which reuse what was loaded: the scores of all columns that the tile sees, softmax, and the
 * weighted sum of values by column. The last tokens of a tile see more columns than the first; the
 * additional columns are added token by token.
 *
 * All weights of a row exist before they are used, so the mass of a block is a sum over its
 * columns. The partial maxima that a kernel needs if it visits blocks separately are not needed.
 */

#include <string.h>

#include "ipc/base/util.h"
#include "kernels/attend_inner.h"
#include "kernels/attend_rows.h"

enum { TILE = 64, LINE = 64 }; /* rows; bytes */

/* Offsets into the scratch memory, in floats. */
struct scratch {
        size_t scores;             /* one tile: rows of ld columns */
        size_t q, rotated, placed; /* the tile's queries: given, rotated, in the kernels' order */
        size_t stage;              /* keys, rearranged by the kernels */
        size_t sum, total; /* the tile's results, and their divisors; 0 if the row sees nothing */
        size_t visible;    /* uint32_t per token of the call: number of columns it sees */
        size_t rows;       /* per column, a pointer to its key */
        size_t end;
        size_t ld;
};

/* Some tokens of the call, and their queries. */
struct tile {
        uint32_t token, n, rows;
        uint32_t columns; /* that the last token sees */
};

/* ---- scratch ---- */

static uint32_t tile_tokens(const struct kvd_attention *a) {
        return MIN(a->n, MAX(1, TILE / a->group));
}

/* Rounds up to whole cache lines, so that no vector crosses two of them. */
static size_t room(size_t floats) {
        return ALIGN_UP(floats, LINE / sizeof(float));
}

static struct scratch lay_out(const struct kvd_attention *a) {
        size_t rows = (size_t)tile_tokens(a) * a->group, wide = kvd_attend_sum(a->dim);
        size_t columns = a->chosen ? a->n_chosen : kvd_attend_keys(a);
        /* an odd number of lines, so that rows begin in different cache sets */
        struct scratch s = {.ld = room(columns) | room(1)};

        s.q = s.scores + rows * s.ld;
        s.rotated = s.q + room(rows * a->dim);
        s.placed = s.rotated + (a->rotation ? room(rows * a->dim) : 0);
        s.stage = s.placed + rows * wide;
        s.sum = s.stage + kvd_attend_stage(a->dim) / sizeof(float);
        s.total = s.sum + rows * wide;
        s.visible = s.total + room(rows);
        s.rows = s.visible + room(a->n);
        s.end = s.rows + columns * (sizeof(uint8_t *) / sizeof(float)) + room(1);
        return s;
}

size_t kvd_attend_scratch(const struct kvd_attention *a) {
        return lay_out(a).end;
}

static float *part(const struct kvd_attention *a, size_t at) {
        return (float *)ALIGN_UP((uintptr_t)a->scratch, LINE) + at;
}

static const uint8_t **rows_of(const struct kvd_attention *a, const struct scratch *s) {
        return (const uint8_t **)part(a, s->rows);
}

static const uint32_t *visible_of(const struct kvd_attention *a, const struct scratch *s) {
        return (const uint32_t *)(part(a, s->visible));
}

/* ---- visible positions ---- */

static void name_rows(const struct kvd_attention *a, const uint8_t **rows,
                      const struct kvd_stretch *r) {
        size_t step = a->stride * (a->type == KVD_NUMBER_F32 ? sizeof(float) : sizeof(uint16_t));
        const uint8_t *row = a->blocks[r->block] + a->k_offset +
                             (r->position - r->block * a->block_tokens) * step;

        for (uint32_t i = 0; i < r->n; i++)
                rows[r->column + i] = row + i * step;
}

/* Collects the key pointer of each column, and how many columns each token sees. */
static void see(const struct kvd_attention *a, const struct scratch *s) {
        uint32_t *visible = (uint32_t *)part(a, s->visible), t = 0;
        const uint8_t **rows = rows_of(a, s);
        struct kvd_stretch r = {0};

        while (kvd_attend_next(a, &r)) {
                name_rows(a, rows, &r);
                if (a->n_keys)
                        continue;
                for (; t < a->n && a->first + t < r.position; t++)
                        visible[t] = r.column;
                for (; t < a->n && a->first + t < r.position + r.n; t++)
                        visible[t] = r.column + (a->first + t - r.position) + 1;
        }
        for (; t < a->n; t++)
                visible[t] = r.column;
}

/* ---- scores ---- */

static void place(const struct kvd_attention *a, const struct scratch *s, const struct tile *tile,
                  uint32_t rotation) {
        const float *q = part(a, s->q);
        float *rotated = part(a, s->rotated);

        if (rotation)
                kvd_attend_rotate(a, rotated, q, rotation, tile->rows);
        a->ops->attend->place(part(a, s->placed), rotation ? rotated : q, a->type, tile->rows,
                              a->dim);
}

static void score_run(const struct kvd_attention *a, const struct scratch *s,
                      const struct tile *tile, uint32_t from, uint32_t to) {
        a->ops->attend->scores(part(a, s->scores) + from, s->ld, rows_of(a, s) + from, to - from,
                               a->type, part(a, s->placed), tile->rows, a->dim, part(a, s->stage));
}

/* Splits the columns into runs that need the same rotation of their queries. */
static void score_rotated(const struct kvd_attention *a, const struct scratch *s,
                          const struct tile *tile) {
        uint32_t from = 0, rotation = 0;
        struct kvd_stretch r = {0};

        while (kvd_attend_next(a, &r) && r.column < tile->columns) {
                if (a->rotation[r.block] == rotation)
                        continue;
                score_run(a, s, tile, from, r.column);
                from = r.column;
                rotation = a->rotation[r.block];
                place(a, s, tile, rotation);
        }
        score_run(a, s, tile, from, tile->columns);
}

static void score(const struct kvd_attention *a, const struct scratch *s, const struct tile *tile) {
        size_t width = (size_t)a->group * a->dim;
        float *q = part(a, s->q);

        for (uint32_t i = 0; i < tile->n; i++)
                memcpy(q + i * width, a->q + (tile->token + i) * a->ldq, width * sizeof *q);
        place(a, s, tile, 0);
        if (a->rotation)
                score_rotated(a, s, tile);
        else
                score_run(a, s, tile, 0, tile->columns);
}

/* ---- weights, sums, results ---- */

/* Turns the scores that each row sees into e^(score - largest of the row), and sums them. */
static void weigh(const struct kvd_attention *a, const struct scratch *s, const struct tile *tile) {
        const uint32_t *visible = visible_of(a, s) + tile->token;
        float *total = part(a, s->total);

        for (uint32_t r = 0; r < tile->rows; r++) {
                float *p = part(a, s->scores) + r * s->ld;
                uint32_t seen = visible[r / a->group];

                total[r] = seen == 0 ? 0.0f : a->ops->softmax(p, seen, a->scale);
                if ((a->block_mass || a->token_mass) && seen > 0)
                        kvd_attend_mass(a, p, total[r], seen);
        }
}

/* Adds columns [from, to) to the sums of the tile's rows, from row number row on. */
static void mix_rows(const struct kvd_attention *a, const struct scratch *s, uint32_t row,
                     uint32_t rows, uint32_t from, uint32_t to) {
        a->ops->attend->mix(part(a, s->sum) + row * kvd_attend_sum(a->dim),
                            part(a, s->scores) + row * s->ld + from, s->ld, rows_of(a, s) + from,
                            (ptrdiff_t)(a->v_offset - a->k_offset), to - from, a->type, rows,
                            a->dim);
}

static void mix(const struct kvd_attention *a, const struct scratch *s, const struct tile *tile) {
        const uint32_t *visible = visible_of(a, s) + tile->token;
        float *sum = part(a, s->sum);

        memset(sum, 0, tile->rows * kvd_attend_sum(a->dim) * sizeof *sum);
        mix_rows(a, s, 0, tile->rows, 0, visible[0]);
        for (uint32_t i = 1; i < tile->n; i++)
                mix_rows(a, s, i * a->group, a->group, visible[0], visible[i]);
}

static void deliver(const struct kvd_attention *a, const struct scratch *s,
                    const struct tile *tile) {
        size_t width = a->group * kvd_attend_sum(a->dim);

        for (uint32_t i = 0; i < tile->n; i++)
                a->ops->attend->finish(a->out + (tile->token + i) * a->ldo,
                                       part(a, s->sum) + i * width,
                                       part(a, s->total) + (size_t)i * a->group, a->type, a->group,
                                       a->dim);
}

void kvd_attend(const struct kvd_attention *a) {
        const struct scratch s = lay_out(a);
        struct tile tile = {0};

        see(a, &s);
        for (; tile.token < a->n; tile.token += tile.n) {
                tile.n = MIN(tile_tokens(a), a->n - tile.token);
                tile.rows = tile.n * a->group;
                tile.columns = visible_of(a, &s)[tile.token + tile.n - 1];
                score(a, &s, &tile);
                weigh(a, &s, &tile);
                mix(a, &s, &tile);
                deliver(a, &s, &tile);
        }
}
