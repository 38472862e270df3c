/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention for one token or many. Keys and values are read in place: first a pointer to each
 * column's key is collected, so that the blocks' addresses do not matter. A value lies at the same
 * distance (v_offset - k_offset) from its key in every block. Queries are processed in tiles of
 * rows, which reuse what was loaded: the scores of all columns that the tile sees, softmax, and the
 * weighted sum of values by column. The last tokens of a tile see more columns than the first; the
 * additional columns are added token by token. If the newest columns are given as floats, they are
 * a part of their own, with sums of their own, which are added to the others in the end.
 *
 * All weights of a row exist before they are used, so the mass of a block is a sum over its
 * columns. The partial maxima that a kernel needs if it visits blocks separately are not needed.
 */

#include <math.h>
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
        size_t exact_sum;  /* the results of the columns that are given as floats */
        size_t visible;    /* uint32_t per token of the call: one past the last column it sees */
        size_t hidden;     /* the same: the first column it sees */
        size_t mass;       /* the attention of one token, per column */
        size_t positions;  /* uint32_t per column */
        size_t rows;       /* per column, a pointer to its key */
        size_t exact_rows; /* the same for those of one tile that are given as floats */
        size_t end;
        size_t ld;
};

/* Some tokens of the call, and their queries. */
struct tile {
        uint32_t token, n, rows;
        uint32_t from, to; /* columns that its tokens see */
        uint32_t exact;    /* the first of them that is given as floats */
};

/* Columns of a tile whose keys and values are stored alike. */
struct part {
        const uint8_t *const *keys; /* per column */
        ptrdiff_t value;            /* bytes from a key to its value */
        enum kvd_number type;
        uint32_t from, to;
        float *sum; /* the tile's results */
};

/* ---- scratch ---- */

static uint32_t tile_tokens(const struct kvd_attention *a) {
        return MIN(a->n, MAX(1, TILE / a->group));
}

/* Rounds up to whole cache lines, so that no vector crosses two of them. */
static size_t room(size_t floats) {
        return ALIGN_UP(floats, LINE / sizeof(float));
}

/* The most columns that a call can have. */
static size_t most_columns(const struct kvd_attention *a) {
        size_t all = kvd_attend_keys(a), window = kvd_attend_window(a);

        if (a->chosen)
                return a->n_chosen;
        return window ? MIN(all, a->n + window + a->block_tokens) : all;
}

static struct scratch lay_out(const struct kvd_attention *a) {
        size_t rows = (size_t)tile_tokens(a) * a->group, wide = kvd_attend_sum(a->dim);
        size_t columns = most_columns(a), exact = MIN(columns, a->exact_span);
        /* an odd number of lines, so that rows begin in different cache sets */
        struct scratch s = {.ld = room(columns) | room(1)};

        s.q = s.scores + rows * s.ld;
        s.rotated = s.q + room(rows * a->dim);
        s.placed = s.rotated + (a->rotation ? room(rows * a->dim) : 0);
        s.stage = s.placed + rows * wide;
        s.sum = s.stage + kvd_attend_stage(a->dim) / sizeof(float);
        s.exact_sum = s.sum + rows * wide;
        s.total = s.exact_sum + (exact ? rows * wide : 0);
        s.visible = s.total + room(rows);
        s.hidden = s.visible + room(a->n);
        s.mass = s.hidden + room(a->n);
        s.positions = s.mass + room(columns);
        s.rows = s.positions + room(columns);
        s.exact_rows = s.rows + room(columns * (sizeof(uint8_t *) / sizeof(float)));
        s.end = s.exact_rows + exact * (sizeof(uint8_t *) / sizeof(float)) + room(1);
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

static uint32_t *positions_of(const struct kvd_attention *a, const struct scratch *s) {
        return (uint32_t *)part(a, s->positions);
}

static uint32_t *visible_of(const struct kvd_attention *a, const struct scratch *s) {
        return (uint32_t *)part(a, s->visible);
}

static uint32_t *hidden_of(const struct kvd_attention *a, const struct scratch *s) {
        return (uint32_t *)part(a, s->hidden);
}

/* ---- visible positions ---- */

/* The number of n ascending positions that are below a bound. */
static uint32_t below(const uint32_t *positions, uint32_t n, int64_t bound) {
        uint32_t from = 0;

        while (from < n) {
                uint32_t middle = from + (n - from) / 2;

                if (positions[middle] < bound)
                        from = middle + 1;
                else
                        n = middle;
        }
        return from;
}

/* Counts, for each token t, the columns at positions below base + t. */
static void count_below(uint32_t *counts, uint32_t tokens, int64_t base, const uint32_t *positions,
                        uint32_t n) {
        uint32_t c = below(positions, n, base);

        for (uint32_t t = 0; t < tokens; t++) {
                counts[t] = c;
                c += c < n && positions[c] == base + t;
        }
}

/* Finds the columns, and which of them each token sees: positions [end - window + t, end + t). */
static void see(const struct kvd_attention *a, const struct scratch *s) {
        uint32_t *positions = positions_of(a, s), window = kvd_attend_window(a),
                 n = kvd_attend_columns(a, rows_of(a, s), positions);
        int64_t end = (int64_t)a->first + 1;

        count_below(visible_of(a, s), a->n, a->n_keys ? a->n_keys : end, positions, n);
        count_below(hidden_of(a, s), a->n, window ? end - window : INT32_MIN, positions, n);
}

/* ---- parts ---- */

static struct part stored_part(const struct kvd_attention *a, const struct scratch *s,
                               const struct tile *tile) {
        return (struct part){.keys = rows_of(a, s) + tile->from,
                             .value = (ptrdiff_t)(a->v_offset - a->k_offset),
                             .type = a->type,
                             .from = tile->from,
                             .to = tile->exact,
                             .sum = part(a, s->sum)};
}

static struct part exact_part(const struct kvd_attention *a, const struct scratch *s,
                              const struct tile *tile) {
        const uint8_t **keys = (const uint8_t **)part(a, s->exact_rows);
        const uint32_t *positions = positions_of(a, s);

        for (uint32_t c = tile->exact; c < tile->to; c++)
                keys[c - tile->exact] = (const uint8_t *)(a->exact_k +
                                                          (positions[c] - a->exact_first) *
                                                                  a->exact_ld);
        return (struct part){.keys = keys,
                             .value = (const uint8_t *)a->exact_v - (const uint8_t *)a->exact_k,
                             .type = KVD_NUMBER_F32,
                             .from = tile->exact,
                             .to = tile->to,
                             .sum = part(a, s->exact_sum)};
}

/* The first column from which on a tile's tokens see what is given as floats. */
static uint32_t find_exact(const struct kvd_attention *a, const struct scratch *s,
                           const struct tile *tile) {
        uint32_t position = a->first + tile->token;

        if (!a->exact_k)
                return tile->to;
        return MAX(tile->from, below(positions_of(a, s), tile->to,
                                     MAX(a->exact_first, position - position % a->exact_span)));
}

/* ---- scores ---- */

static void place(const struct kvd_attention *a, const struct scratch *s, const struct tile *tile,
                  enum kvd_number type, uint32_t rotation) {
        const float *q = part(a, s->q);
        float *rotated = part(a, s->rotated);

        if (rotation)
                kvd_attend_rotate(a, rotated, q, rotation, tile->rows);
        a->ops->attend->place(part(a, s->placed), rotation ? rotated : q, type, tile->rows, a->dim);
}

static void score_run(const struct kvd_attention *a, const struct scratch *s,
                      const struct tile *tile, const struct part *p, uint32_t from, uint32_t to) {
        a->ops->attend->scores(part(a, s->scores) + from, s->ld, p->keys + (from - p->from),
                               to - from, p->type, part(a, s->placed), tile->rows, a->dim,
                               part(a, s->stage));
}

/* Splits the columns into runs that need the same rotation of their queries. */
static void score_rotated(const struct kvd_attention *a, const struct scratch *s,
                          const struct tile *tile, const struct part *p) {
        const uint32_t *positions = positions_of(a, s);
        uint32_t from = p->from, rotation = 0;

        for (uint32_t c = from; c < p->to; c++) {
                uint32_t next = a->rotation[kvd_attend_block(a, positions[c])];

                if (next == rotation)
                        continue;
                if (c > from)
                        score_run(a, s, tile, p, from, c);
                from = c;
                rotation = next;
                place(a, s, tile, p->type, rotation);
        }
        score_run(a, s, tile, p, from, p->to);
}

static void score_part(const struct kvd_attention *a, const struct scratch *s,
                       const struct tile *tile, const struct part *p) {
        place(a, s, tile, p->type, 0);
        if (a->rotation)
                score_rotated(a, s, tile, p);
        else
                score_run(a, s, tile, p, p->from, p->to);
}

static void gather_queries(const struct kvd_attention *a, const struct scratch *s,
                           const struct tile *tile) {
        size_t width = (size_t)a->group * a->dim;
        float *q = part(a, s->q);

        for (uint32_t i = 0; i < tile->n; i++)
                memcpy(q + i * width, a->q + (tile->token + i) * a->ldq, width * sizeof *q);
}

/* ---- weights, sums, results ---- */

/* e^(sink - largest): infinite, and then all weights are 0, if the sink is larger by 88 or more. */
static float sink_weight(const struct kvd_ops *ops, float sink, float largest) {
        float two[] = {largest, sink};

        ops->softmax(two, 2, 1.0f);
        return two[1] / two[0];
}

/*
 * Turns n scores of a query head into e^(score - largest). Returns their sum, with the sink's.
 * weight: NULL, or where the logarithm of the sum of e^score goes.
 */
static float weigh_row(const struct kvd_attention *a, float *p, uint32_t n, uint32_t head,
                       float *weight) {
        float scale = a->scale, largest = 0.0f, sum;

        if (weight)
                *weight = -INFINITY;
        if (n == 0)
                return 0.0f;
        if (a->cap > 0) {
                a->ops->cap(p, n, scale, a->cap);
                scale = 1.0f;
        }
        if (a->sinks || weight)
                largest = scale * a->ops->largest(p, n);
        sum = a->ops->softmax(p, n, scale);
        if (a->sinks)
                sum += sink_weight(a->ops, a->sinks[head], largest);
        if (weight)
                *weight = largest + logf(sum);
        return sum;
}

/* Adds the attention of a tile's token to the masses. */
static void weigh_token(const struct kvd_attention *a, const struct scratch *s, uint32_t token,
                        uint32_t from, uint32_t n) {
        float *mass = part(a, s->mass);

        memset(mass, 0, n * sizeof *mass);
        for (uint32_t r = token * a->group; r < (token + 1) * a->group; r++) {
                const float *p = part(a, s->scores) + r * s->ld + from;
                float total = part(a, s->total)[r];

                for (uint32_t c = 0; c < n; c++)
                        mass[c] += p[c] / total;
        }
        kvd_attend_mass(a, mass, positions_of(a, s) + from, n);
}

static void weigh(const struct kvd_attention *a, const struct scratch *s, const struct tile *tile) {
        const uint32_t *visible = visible_of(a, s) + tile->token,
                       *hidden = hidden_of(a, s) + tile->token;
        float *total = part(a, s->total);

        for (uint32_t r = 0; r < tile->rows; r++) {
                uint32_t from = hidden[r / a->group], to = visible[r / a->group];

                total[r] = weigh_row(a, part(a, s->scores) + r * s->ld + from, to - from,
                                     r % a->group,
                                     a->weight ? a->weight + tile->token * a->group + r : NULL);
        }
        for (uint32_t t = 0; (a->block_mass || a->token_mass) && t < tile->n; t++)
                if (visible[t] > hidden[t])
                        weigh_token(a, s, t, hidden[t], visible[t] - hidden[t]);
}

/* Adds columns [from, to), as far as they are in a part, to the sums of rows from number row on. */
static void mix_rows(const struct kvd_attention *a, const struct scratch *s, const struct part *p,
                     uint32_t row, uint32_t rows, uint32_t from, uint32_t to) {
        from = MAX(from, p->from);
        to = MIN(to, p->to);
        if (from < to)
                a->ops->attend->mix(p->sum + row * kvd_attend_sum(a->dim),
                                    part(a, s->scores) + row * s->ld + from, s->ld,
                                    p->keys + (from - p->from), p->value, to - from, p->type, rows,
                                    a->dim);
}

/*
 * Adds the columns in their order: first those that only the tile's first tokens see, then those
 * that all of them see, then the rest.
 */
static void mix_part(const struct kvd_attention *a, const struct scratch *s,
                     const struct tile *tile, const struct part *p) {
        const uint32_t *visible = visible_of(a, s) + tile->token,
                       *hidden = hidden_of(a, s) + tile->token;
        uint32_t from = hidden[tile->n - 1], to = MAX(from, visible[0]);

        memset(p->sum, 0, tile->rows * kvd_attend_sum(a->dim) * sizeof *p->sum);
        for (uint32_t i = 0; hidden[i] < from; i++)
                mix_rows(a, s, p, i * a->group, a->group, hidden[i], MIN(from, visible[i]));
        mix_rows(a, s, p, 0, tile->rows, from, to);
        for (uint32_t i = 0; i < tile->n; i++)
                if (visible[i] > to)
                        mix_rows(a, s, p, i * a->group, a->group, to, visible[i]);
}

static void deliver(const struct kvd_attention *a, const struct scratch *s, const struct tile *tile,
                    const struct part *p) {
        size_t width = a->group * kvd_attend_sum(a->dim);

        for (uint32_t i = 0; i < tile->n; i++)
                a->ops->attend->finish(a->out + (tile->token + i) * a->ldo, p->sum + i * width,
                                       part(a, s->total) + (size_t)i * a->group, p->type, a->group,
                                       a->dim);
}

/* Adds a part's results to those that were delivered. */
static void add(const struct kvd_attention *a, const struct scratch *s, const struct tile *tile,
                const struct part *p) {
        size_t width = (size_t)a->group * a->dim;
        float *result = part(a, s->q);

        a->ops->attend->finish(result, p->sum, part(a, s->total), p->type, tile->rows, a->dim);
        for (uint32_t i = 0; i < tile->n; i++)
                a->ops->add(a->out + (tile->token + i) * a->ldo, result + i * width, width);
}

static void attend_tile(const struct kvd_attention *a, const struct scratch *s,
                        const struct tile *tile) {
        struct part stored = stored_part(a, s, tile), exact = {0};

        gather_queries(a, s, tile);
        score_part(a, s, tile, &stored);
        if (tile->exact < tile->to) {
                exact = exact_part(a, s, tile);
                score_part(a, s, tile, &exact);
        }
        weigh(a, s, tile);
        mix_part(a, s, tile, &stored);
        deliver(a, s, tile, &stored);
        if (tile->exact < tile->to) {
                mix_part(a, s, tile, &exact);
                add(a, s, tile, &exact);
        }
}

/* The tile that begins with a token: with floats, its tokens are of one span. */
static struct tile tile_at(const struct kvd_attention *a, const struct scratch *s, uint32_t token) {
        struct tile tile = {.token = token, .n = MIN(tile_tokens(a), a->n - token)};

        if (a->exact_k)
                tile.n = MIN(tile.n, a->exact_span - (a->first + token) % a->exact_span);
        tile.rows = tile.n * a->group;
        tile.from = hidden_of(a, s)[token];
        tile.to = visible_of(a, s)[token + tile.n - 1];
        tile.exact = find_exact(a, s, &tile);
        return tile;
}

void kvd_attend(const struct kvd_attention *a) {
        const struct scratch s = lay_out(a);
        struct tile tile;

        see(a, &s);
        for (uint32_t token = 0; token < a->n; token += tile.n) {
                tile = tile_at(a, &s, token);
                attend_tile(a, &s, &tile);
        }
}
