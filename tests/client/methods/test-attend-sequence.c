/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvd_sequence_attention against the definition of attention over what is visible: full and partial
 * entries, missing ones, and ones whose keys were made at other positions, in all types and orders.
 * The Python tests have compaction and choices (tests/python/test_sequence.py).
 */

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "client/internal.h"
#include "client/kvd_attend.h"
#include "tests/client/methods/attend_reference.h"
#include "tests/lib/instance.h"
#include "tests/lib/suite.h"

enum { TOKENS = 4, HEADS = 2, QUERIES = 4, DIM = 16, ROW = HEADS * DIM, ENTRIES = 4, MOST = 20 };

static const uint32_t fills[ENTRIES] = {4, 3, 4, 4}; /* tokens of each entry */
static const float frequencies[DIM / 2] = {1.0f, 0.5f, 0.25f, 0.1f, 0.05f, 0.02f, 0.01f, 0.001f};

static struct instance server;
static kvd *handle;
static kvd_space *space;
static kvd_sequence *table;
static struct kvd_block tail;
static struct kvd_geometry geometry;
static float keys[MOST][ROW], values[MOST][ROW]; /* of all tokens, in order */
static uint64_t state = 3;
static uint32_t first_plain = 8; /* slot from which on each is a position */

static float random_float(void) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        return (float)((double)(state >> 33) / (UINT32_C(1) << 30) - 1.0);
}

static struct kvd_table behind(uint32_t first, uint32_t n) {
        return (struct kvd_table){tail.view, &tail.id, 1, first, n};
}

/* ---- a sequence ------------------------------------------------------------------------------ */

/* Writes tokens [first, first + n) to the start of a block that is being filled. */
static void fill(struct kvd_block *block, uint32_t first, uint32_t n) {
        struct kvd_table t = {block->view, &block->id, 1, 0, n};

        memset(block->data, 0xff, kvd_block_bytes(&geometry)); /* NaN */
        ck_assert_msg(kvd_paged_write(space, 0, &t, keys[first], values[first], ROW) == 0, "%s",
                      kvd_error());
}

static void start(uint32_t dtype, uint32_t order) {
        static const uint32_t tokens[TOKENS] = {1, 2, 3, 4};

        geometry = (struct kvd_geometry){.layers = 1,
                                         .kv_heads = HEADS,
                                         .head_dim = DIM,
                                         .block_tokens = TOKENS,
                                         .dtype = dtype,
                                         .order = order,
                                         .vocab = 100};
        instance_start(&server, SETTINGS("daemon.segment=2M"));
        ck_assert_int_eq(kvd_open(server.socket, &handle), 0);
        ck_assert_int_eq(kvd_space_open(handle, "space", &geometry, NULL, &space), 0);
        ck_assert_int_eq(kvd_sequence_open(space, ENTRIES, &table), 0);
        for (uint32_t i = 0; i < MOST; i++) {
                for (uint32_t d = 0; d < ROW; d++) {
                        keys[i][d] = random_float();
                        values[i][d] = random_float();
                }
                reference_round_key(keys[i], ROW, dtype);
                reference_round(values[i], ROW, dtype);
        }
        for (uint32_t i = 0, first = 0; i < ENTRIES; first += fills[i++]) {
                struct kvd_block block;

                ck_assert_int_eq(kvd_alloc(space, 1, &block), 1);
                fill(&block, first, fills[i]);
                ck_assert_int_eq(kvd_sequence_append(table, 1, &block, tokens, fills[i]), 1);
        }
        ck_assert_int_eq(kvd_alloc(space, 1, &tail), 1);
        fill(&tail, 15, TOKENS);
}

static void stop(void) {
        kvd_free(space, 1, &tail);
        table = kvd_sequence_close(table);
        space = kvd_space_close(space);
        handle = kvd_close(handle);
        instance_end_clean(&server);
}

/* ---- against the definition ------------------------------------------------------------------ */

/* A key as it is delta positions later. */
static void turn(float *to, const float *key, int32_t delta) {
        for (uint32_t d = 0; d < DIM / 2; d++) {
                double angle = (double)frequencies[d] * delta, c = cos(angle), s = sin(angle);

                to[d] = (float)(key[d] * c - key[d + DIM / 2] * s);
                to[d + DIM / 2] = (float)(key[d + DIM / 2] * c + key[d] * s);
        }
}

/* Appends the tokens of a block to what is visible. */
static uint32_t see(float (*k)[ROW], float (*v)[ROW], uint32_t n, uint32_t first, uint32_t tokens,
                    int32_t delta) {
        for (uint32_t i = first; i < first + tokens; i++, n++) {
                memcpy(v[n], values[i], sizeof v[n]);
                for (uint32_t h = 0; h < HEADS; h++)
                        turn(k[n] + h * DIM, keys[i] + h * DIM, delta);
        }
        return n;
}

/* All that is stored. Returns the number of tokens before the tail's. */
static uint32_t see_all(float (*k)[ROW], float (*v)[ROW]) {
        uint32_t n = 0;

        for (uint32_t i = 0, at = 0; i < ENTRIES; at += fills[i++])
                if (table->entries[i].data)
                        n = see(k, v, n, at, fills[i], table->entries[i].delta);
        see(k, v, n, 15, TOKENS, 0);
        return n;
}

/* Replaces the last of n visible tokens, those of slots first to slot, by the exact rows. */
static void see_exact(float (*k)[ROW], float (*v)[ROW], uint32_t n, const struct kvd_exact *e,
                      uint32_t first, uint32_t slot, uint32_t end) {
        for (uint32_t s = first; e && s <= slot; s++) {
                size_t row = (s + e->n - end) * e->ld;

                memcpy(k[n - 1 + s - slot], e->k + row, sizeof k[0]);
                memcpy(v[n - 1 + s - slot], e->v + row, sizeof v[0]);
        }
}

static void expect_visible(const struct kvd_heads *heads, uint32_t first, uint32_t n) {
        static float k[MOST][ROW], v[MOST][ROW];
        float q[TOKENS][QUERIES * DIM], out[TOKENS][QUERIES * DIM];
        struct history h = {&geometry, k[0], v[0]};
        struct kvd_seen seen = {.sequence = table, .frequencies = frequencies};
        struct kvd_table t = behind(first, n);
        double expected[DIM];

        for (uint32_t i = 0; i < n * QUERIES * DIM; i++)
                q[i / (QUERIES * DIM)][i % (QUERIES * DIM)] = random_float();
        ck_assert_msg(kvd_sequence_attention(&seen, 0, &t, heads, q[0], QUERIES * DIM, out[0],
                                             QUERIES * DIM) == 0,
                      "%s", kvd_error());
        for (uint32_t i = 0; i < n; i++) {
                uint32_t slot = ENTRIES * TOKENS + first + i, n_seen = see_all(k, v);

                if (heads->exact)
                        see_exact(k, v, n_seen + first + i + 1, heads->exact,
                                  MAX(first_plain, slot / heads->exact->span * heads->exact->span),
                                  slot, ENTRIES * TOKENS + first + n);
                for (uint32_t head = 0; head < QUERIES; head++) {
                        reference_attend(&h, n_seen + first + i, heads, head, q[i] + head * DIM,
                                         expected);
                        for (uint32_t d = 0; d < DIM; d++)
                                ck_assert_double_eq_tol(out[i][head * DIM + d], expected[d], 1e-5);
                }
        }
}

START_TEST(a_sequence_is_seen_as_it_is) {
        const float sinks[QUERIES] = {1, -2, 0.5f, 3};
        struct kvd_heads plain = {.heads = QUERIES, .scale = 0.3f}, capped = plain;
        uint8_t *data;

        capped.cap = 0.8f;
        capped.sinks = sinks;
        start(KVD_F32 + (uint32_t)_i / 2, _i % 2 ? KVD_HND : KVD_NHD);
        expect_visible(&plain, 0, TOKENS);
        expect_visible(&capped, 3, 1);
        table->entries[2].delta = 5; /* as if MemShare had found it 5 positions before */
        table->entries[3].delta = -9;
        expect_visible(&plain, 0, 3);
        data = table->entries[1].data;
        table->entries[1].data = NULL;
        expect_visible(&capped, 2, 2);
        table->entries[1].data = data;
        data = table->entries[3].data;
        table->entries[3].data = NULL;
        expect_visible(&plain, 0, 1);
        table->entries[3].data = data;
        stop();
}
END_TEST

/*
 * Exact rows that are far from what is stored: seen from the token's span on, up to the last entry
 * that is not plain.
 */
START_TEST(the_newest_tokens_are_seen_as_they_were) {
        static const uint32_t spans[] = {1, 3, 8, 10, 12, 20, 1000};
        static float k[TOKENS * ENTRIES + TOKENS][ROW + 1], v[TOKENS * ENTRIES + TOKENS][ROW + 1];

        start(KVD_F32 + (uint32_t)_i / 2, _i % 2 ? KVD_HND : KVD_NHD);
        for (uint32_t i = 0; i < ARRAY_SIZE(k); i++)
                for (uint32_t d = 0; d < ROW; d++) {
                        k[i][d] = 3 * random_float();
                        v[i][d] = 3 * random_float();
                }
        for (uint32_t i = 0; i < 4 * ARRAY_SIZE(spans); i++) {
                struct kvd_exact exact = {k[0], v[0], ROW + 1, ENTRIES * TOKENS + TOKENS,
                                          spans[i / 4]};
                struct kvd_heads heads = {.heads = QUERIES, .scale = 0.3f, .exact = &exact};

                table->entries[2].delta = i % 4 < 2 ? 0 : 3;
                first_plain = i % 4 < 2 ? 8 : 12;
                expect_visible(&heads, 0, TOKENS);
                exact.n -= TOKENS - 2;
                if (i % 2)
                        expect_visible(&heads, 1, 1);
        }
        table->entries[2].delta = 0;
        stop();
}
END_TEST

/* ---- bounds (Quest) -------------------------------------------------------------------------- */

#define SCALE 0.3f

/* What an entry's keys can score at most for a query head; a turned key never scores more. */
static double bound(uint32_t entry, uint32_t first, uint32_t head, const float *q) {
        int32_t delta = table->entries[entry].delta;
        float least[DIM], most[DIM], back[DIM], turned[DIM];
        double sum = 0;

        for (uint32_t i = first; i < first + fills[entry]; i++)
                for (uint32_t d = 0; d < DIM; d++) {
                        const float *key = keys[i] + head * DIM;

                        least[d] = i == first ? key[d] : fminf(least[d], key[d]);
                        most[d] = i == first ? key[d] : fmaxf(most[d], key[d]);
                }
        turn(back, q, -delta);
        for (uint32_t d = 0; d < DIM; d++)
                sum += fmax((double)back[d] * least[d], (double)back[d] * most[d]);
        for (uint32_t i = first; i < first + fills[entry]; i++) {
                double score = 0;

                turn(turned, keys[i] + head * DIM, delta);
                for (uint32_t d = 0; d < DIM; d++)
                        score += (double)q[d] * turned[d];
                ck_assert_double_le(score, sum + 1e-4);
        }
        return sum;
}

/* The weight of each entry for a KV head: the sum of softmax over its query heads. */
static void weigh(uint32_t head, const float *q, const bool known[ENTRIES], double ret[ENTRIES]) {
        memset(ret, 0, ENTRIES * sizeof *ret);
        for (uint32_t g = 0; g < QUERIES / HEADS; g++, q += DIM) {
                double weight[ENTRIES] = {0}, all = 0;

                for (uint32_t i = 0, first = 0; i < ENTRIES; first += fills[i++])
                        weight[i] = known[i] ? exp(SCALE * bound(i, first, head, q)) : 0;
                for (uint32_t i = 0; i < ENTRIES; i++)
                        all += weight[i];
                for (uint32_t i = 0; i < ENTRIES; i++)
                        ret[i] += weight[i] / all;
        }
}

/* Those that were selected weigh at least as much as those that were not; ascending. */
static void expect_heaviest(const double weight[ENTRIES], const uint32_t *to, uint32_t n) {
        double lightest = INFINITY;
        bool chosen[ENTRIES] = {false};

        for (uint32_t i = 0; i < n; i++) {
                ck_assert_uint_lt(to[i], ENTRIES);
                ck_assert(i == 0 || to[i] > to[i - 1]);
                chosen[to[i]] = true;
                lightest = fmin(lightest, weight[to[i]]);
        }
        for (uint32_t i = 0; i < ENTRIES; i++)
                ck_assert(chosen[i] || weight[i] <= lightest + 1e-5);
}

static void expect_bounds(kvd_reader *reader, const bool known[ENTRIES]) {
        uint32_t to[HEADS * (ENTRIES + 1)], n_to[HEADS], n_known = 0;
        float q[QUERIES * DIM];
        double weight[ENTRIES];

        for (uint32_t i = 0; i < ENTRIES; i++)
                n_known += known[i];
        for (uint32_t i = 0; i < QUERIES * DIM; i++)
                q[i] = 2 * random_float();
        kvd_reader_begin(reader, 1, 1);
        for (uint32_t n = 1; n <= ENTRIES + 1; n++) {
                ck_assert_msg(kvd_reader_select(reader, 0, KVD_SELECT_BOUNDS, q, n, to, n_to) == 0,
                              "%s", kvd_error());
                for (uint32_t h = 0; h < HEADS; h++) {
                        ck_assert_uint_eq(n_to[h], MIN(n, n_known));
                        weigh(h, q + h * (QUERIES / HEADS) * DIM, known, weight);
                        expect_heaviest(weight, to + h * n, n_to[h]);
                }
        }
}

START_TEST(bounds_select_the_blocks_whose_keys_may_score_most) {
        const struct kvd_reader_options options = {.heads = QUERIES,
                                                   .scale = SCALE,
                                                   .frequencies = frequencies};
        bool known[ENTRIES] = {true, false, true, true};
        kvd_reader *reader;
        uint8_t *data;

        start(KVD_F32 + (uint32_t)_i / 2, _i % 2 ? KVD_HND : KVD_NHD);
        ck_assert_int_eq(kvd_reader_new(table, &options, &reader), 0);
        data = table->entries[1].data;
        table->entries[1].data = NULL; /* not resident, and never seen */
        expect_bounds(reader, known);
        table->entries[1].data = data;
        known[1] = true;
        expect_bounds(reader, known);
        table->entries[1].data = NULL; /* its bounds are known */
        expect_bounds(reader, known);
        table->entries[1].data = data;
        table->entries[2].delta = 5;
        table->entries[3].delta = -9;
        expect_bounds(reader, known);
        kvd_reader_free(reader);
        stop();
}
END_TEST

/* ---- refusals -------------------------------------------------------------------------------- */

static int ask(struct kvd_seen seen, struct kvd_table t, uint32_t window) {
        static const float q[QUERIES * DIM];
        float out[QUERIES * DIM];
        struct kvd_heads heads = {.heads = QUERIES, .window = window, .scale = 1};

        seen.sequence = table;
        return kvd_sequence_attention(&seen, 0, &t, &heads, q, QUERIES * DIM, out, QUERIES * DIM);
}

static void expect_refused(int r, const char *words) {
        ck_assert_int_eq(r, -EINVAL);
        ck_assert_msg(strstr(kvd_error(), words), "'%s' says nothing of '%s'", kvd_error(), words);
}

START_TEST(what_has_no_order_or_no_rotation_is_refused) {
        start(KVD_F32, KVD_HND);
        ck_assert_int_eq(ask((struct kvd_seen){0}, behind(0, 1), 0), 0);
        expect_refused(ask((struct kvd_seen){0}, behind(0, 1), 3), "window over entry 1");
        expect_refused(ask((struct kvd_seen){0}, behind(TOKENS, 1), 0), "table of 1 blocks");
        table->entries[0].delta = 1;
        expect_refused(ask((struct kvd_seen){0}, behind(0, 1), 0), "frequencies");
        ck_assert_int_eq(ask((struct kvd_seen){.frequencies = frequencies}, behind(0, 1), 0), 0);
        stop();
}
END_TEST

START_TEST(a_selection_that_is_not_possible_is_refused) {
        const struct kvd_reader_options options = {.heads = QUERIES, .scale = SCALE};
        uint32_t to[HEADS * ENTRIES], n_to[HEADS] = {7, 7};
        static const float q[QUERIES * DIM];
        kvd_reader *reader;

        start(KVD_F32, KVD_HND);
        ck_assert_int_eq(kvd_reader_new(table, &options, &reader), 0);
        expect_refused(kvd_reader_select(reader, 1, KVD_SELECT_BOUNDS, q, 1, to, n_to), "layer 1");
        expect_refused(kvd_reader_select(reader, 0, KVD_SELECT_BOUNDS, q, 0, to, n_to), "0 tokens");
        expect_refused(kvd_reader_select(reader, 0, 4, q, 1, to, n_to), "no such way");
        for (enum kvd_select what = KVD_SELECT_TOKENS; what <= KVD_SELECT_BLOCKS; what++) {
                ck_assert_int_eq(kvd_reader_select(reader, 0, what, q, 1, to, n_to), -EOPNOTSUPP);
                ck_assert_ptr_nonnull(strstr(kvd_error(), "hshare"));
        }
        ck_assert_uint_eq(n_to[0], 7);
        /* without kvd_reader_begin there are no entries yet */
        ck_assert_int_eq(kvd_reader_select(reader, 0, KVD_SELECT_BOUNDS, q, 1, to, n_to), 0);
        ck_assert_uint_eq(n_to[0] + n_to[1], 0);
        kvd_reader_free(reader);
        stop();
}
END_TEST

SUITE("attend-sequence",
      LOOPS(6, a_sequence_is_seen_as_it_is, the_newest_tokens_are_seen_as_they_were,
            bounds_select_the_blocks_whose_keys_may_score_most),
      TESTS(what_has_no_order_or_no_rotation_is_refused,
            a_selection_that_is_not_possible_is_refused))
