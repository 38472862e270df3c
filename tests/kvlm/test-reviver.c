/* SPDX-License-Identifier: Apache-2.0 */

/* KVReviver in kvlm: the parts as a machine, and what queries see of tokens that have no slot. */

#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/kvlm/lossy.h"
#include "tools/kvlm/parts.h"
#include "tools/kvlm/vague.h"

/* ---- the machine ---- */

enum { TOKENS = 600 };

struct mirror { /* what the moves alone say */
        enum part part[TOKENS];
        uint32_t promotions;
        bool refuses;
};

static void demote(void *data, uint32_t token) {
        struct mirror *m = data;

        ck_assert_int_le(m->part[token], PART_CANDIDATE);
        m->part[token] = PART_VAGUE;
}

static void bury(void *data, uint32_t token) {
        struct mirror *m = data;

        ck_assert_int_eq(m->part[token], PART_VAGUE);
        m->part[token] = PART_GONE;
}

static bool promote(void *data, uint32_t token) {
        struct mirror *m = data;

        ck_assert_int_eq(m->part[token], PART_VAGUE);
        if (m->refuses)
                return false;
        m->part[token] = PART_CANDIDATE;
        m->promotions++;
        return true;
}

static uint64_t state;

static uint32_t pick(uint32_t n) { /* xorshift64* */
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        return (uint32_t)(state * 0x2545f4914f6cdd1du >> 32) % n;
}

/* Plain ifs: check's asserts take a microsecond each. */
static void check_parts(const struct parts *p, const struct mirror *m, bool compressed) {
        uint32_t size[4] = {0}, wrong = 0;

        for (uint32_t i = 0; i < p->n; i++) {
                size[p->part[i] & 3]++;
                wrong += p->part[i] > PART_GONE || (p->part[i] == PART_RECENT) != (i >= p->oldest_recent);
                wrong += parts_resident(p, i) ? m->part[i] > PART_CANDIDATE : m->part[i] != p->part[i];
        }
        ck_assert_uint_eq(wrong, 0);
        ck_assert_mem_eq(size, p->size, sizeof size);
        ck_assert_uint_eq(size[0] + size[1] + size[2] + size[3], p->n);
        if (!compressed)
                return;
        ck_assert_uint_le(size[PART_RECENT], p->limits.recent);
        ck_assert_uint_le(size[PART_CANDIDATE], p->limits.candidate);
        ck_assert_uint_le(size[PART_VAGUE], p->limits.vague);
}

/* Scores that are all 0, all equal, of a few values, or any. */
static void draw_scores(float *scores, uint32_t n) {
        uint32_t kind = pick(4), values = kind == 2 ? 3 : 1 << 20;

        for (uint32_t i = 0; i < n; i++)
                scores[i] = kind == 0 ? 0.0f : kind == 1 ? 0.25f : (float)pick(values) / (float)values;
}

static uint32_t fuzz_one(uint32_t ops) {
        const struct parts_limits limits = {pick(60), pick(60), pick(3) ? UINT32_MAX : pick(200),
                                            1.0f + (float)pick(3) * 0.1f, pick(30)};
        struct mirror m = {.refuses = pick(4) == 0};
        const struct parts_moves moves = {demote, bury, promote, &m};
        float scores[TOKENS];
        struct parts *p;

        ck_assert_int_eq(parts_new(&limits, TOKENS, &p), 0);
        for (uint32_t i = 0; i < ops && p->n < TOKENS; i++) {
                uint32_t before = m.promotions;
                struct parts old;

                parts_push(p, pick(8));
                check_parts(p, &m, false);
                draw_scores(scores, p->n);
                if (p->n > 0 && pick(10) == 0) { /* K14: negative scores, and NaN, are rejected */
                        uint32_t bad = pick(p->n);
                        float good = scores[bad];

                        old = *p;
                        scores[bad] = pick(2) ? -0.5f : NAN;
                        ck_assert_int_eq(parts_compress(p, scores, &moves), -EINVAL);
                        ck_assert_mem_eq(&old, p, sizeof old);
                        scores[bad] = good;
                }
                ck_assert_int_eq(parts_compress(p, scores, &moves), 0);
                ck_assert_uint_le(m.promotions - before, limits.swaps);
                check_parts(p, &m, true);
        }
        parts_free(p);
        return m.promotions;
}

START_TEST(K14_every_token_is_in_one_part) {
        uint32_t promotions = 0;

        state = 14;
        for (uint32_t ops = 0; ops < 100000; ops += 150)
                promotions += fuzz_one(150);
        ck_assert_uint_gt(promotions, 1000);
}
END_TEST

START_TEST(equal_scores_do_not_swap) {
        static const struct parts_limits limits = {2, 2, UINT32_MAX, 1.0f, 100};
        static const float levels[] = {0.0f, 0.5f};
        struct mirror m = {0};
        const struct parts_moves moves = {demote, bury, promote, &m};
        float scores[TOKENS];
        struct parts *p;

        ck_assert_int_eq(parts_new(&limits, TOKENS, &p), 0);
        parts_push(p, 50);
        for (size_t level = 0; level < ARRAY_SIZE(levels); level++) {
                for (uint32_t i = 0; i < 50; i++)
                        scores[i] = levels[level];
                ck_assert_int_eq(parts_compress(p, scores, &moves), 0);
        }
        ck_assert_uint_eq(m.promotions, 0);
        for (uint32_t i = 0; i < 48; i++) /* of equal ones the older left first */
                ck_assert_int_eq(p->part[i], i < 46 ? PART_VAGUE : PART_CANDIDATE);
        parts_free(p);
}
END_TEST

START_TEST(better_tokens_come_back) {
        static const struct parts_limits limits = {1, 2, UINT32_MAX, 1.1f, 100};
        struct mirror m = {0};
        const struct parts_moves moves = {demote, bury, promote, &m};
        float scores[] = {0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.0f};
        struct parts *p;

        ck_assert_int_eq(parts_new(&limits, 6, &p), 0);
        parts_push(p, 6);
        ck_assert_int_eq(parts_compress(p, scores, &moves), 0);
        ck_assert_int_eq(p->part[2], PART_VAGUE);
        scores[2] = 0.44f; /* exactly 1.1 times the worst is not enough */
        scores[3] = 0.4f;
        ck_assert_int_eq(parts_compress(p, scores, &moves), 0);
        ck_assert_int_eq(p->part[2], PART_VAGUE);
        scores[2] = 0.45f;
        ck_assert_int_eq(parts_compress(p, scores, &moves), 0);
        ck_assert_int_eq(p->part[2], PART_CANDIDATE);
        ck_assert_int_eq(p->part[3], PART_VAGUE);
        ck_assert_uint_eq(m.promotions, 1);
        parts_free(p);
}
END_TEST

/* ---- what is left of tokens ---- */

enum { LAYERS = 2, HEADS = 2, DIM = 7, ROW = 2 * HEADS * DIM, CAPACITY = 64 };

static struct methods parameters;

/* 300 tokens of budget: 30 cells, 10 in each row of the sketch. */
static struct relief *relief_of(const char *more[][2], size_t n) {
        const char *values[METHOD_NAMES] = {0};
        static struct relief r;

        for (size_t i = 0; i < METHOD_NAMES; i++) {
                values[i] = strcmp(method_name(i), "budget") == 0 ? "300" : NULL;
                for (size_t j = 0; j < n; j++)
                        values[i] = strcmp(method_name(i), more[j][0]) == 0 ? more[j][1] : values[i];
        }
        ck_assert_int_eq(methods_read(values, &parameters), 0);
        r = (struct relief){.m = &parameters, .budget = 300, .heads = HEADS};
        r.setup = (struct relief_setup){
                .methods = &parameters,
                .ops = kvd_ops_pick(NULL),
                .shape = {.tokens = 16, .type = KVD_NUMBER_F32, .kv_heads = HEADS, .head_dim = DIM},
                .layers = LAYERS,
                .group = 1,
                .prompt = CAPACITY,
                .capacity = CAPACITY,
        };
        return &r;
}

static const uint8_t *row_of(uint32_t token) {
        static float row[ROW];

        state = token + 1;
        for (uint32_t i = 0; i < ROW; i++)
                row[i] = (float)pick(2001) / 1000.0f - 1.0f;
        return (const uint8_t *)row;
}

/* How far what is read of a token is from what it was. */
static double error_of(const struct vague *v, const struct relief *r, uint32_t layer, uint32_t token) {
        const float *row = (const float *)row_of(token);
        float keys[DIM], values[DIM];
        uint32_t places[8];
        double worst = 0.0;

        for (uint32_t h = 0; h < HEADS; h++) {
                vague_read(v, r, layer, h, &token, 1, keys, values, places);
                for (uint32_t d = 0; d < DIM; d++) {
                        worst = fmax(worst, fabs((double)keys[d] - (double)row[2 * h * DIM + d]));
                        worst = fmax(worst, fabs((double)values[d] - (double)row[(2 * h + 1) * DIM + d]));
                }
        }
        return worst;
}

/* K5: up to one token a column, permutations do not collide, and the sketch gives back what it got. */
START_TEST(K5_a_sketch_with_room_is_exact) {
        static const char *const keys[] = {"unsigned", "signed", "centred"};

        for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
                const char *options[][2] = {{"evict", "reviver"}, {"sketch-keys", keys[i]}, {"spill", "none"}};
                struct relief *r = relief_of(options, ARRAY_SIZE(options));
                struct vague *v;

                ck_assert_int_eq(vague_new(r, UINT32_MAX, &v), 0);
                ck_assert_uint_eq(v->columns, 10);
                for (uint32_t t = 0; t < 10; t++)
                        vague_put(v, r, 1, 5 * t, row_of(5 * t));
                for (uint32_t t = 0; t < 10; t++)
                        ck_assert_double_lt(error_of(v, r, 1, 5 * t), 1e-6);
                ck_assert_double_eq_tol(vague_load(v, 1), 1.0 / 3, 1e-9);
                ck_assert_double_eq(vague_load(v, 0), 0.0);
                vague_put(v, r, 1, 1, row_of(1)); /* the eleventh token has company */
                ck_assert_double_gt(error_of(v, r, 1, 1), 1e-3);
                vague_free(v, LAYERS);
        }
}
END_TEST

/* K11's point: who is taken out exactly leaves no trace, an estimate takes parts of others along. */
START_TEST(K11_exact_deletion_leaves_no_trace) {
        static const char *const ways[] = {"exact", "estimate", "tombstone"};
        double error[3];

        for (size_t i = 0; i < ARRAY_SIZE(ways); i++) {
                const char *options[][2] = {{"evict", "reviver"}, {"sketch-delete", ways[i]}, {"spill", "exact"}};
                struct relief *r = relief_of(options, ARRAY_SIZE(options));
                float row[ROW];
                struct vague *v;

                ck_assert_int_eq(vague_new(r, UINT32_MAX, &v), 0);
                for (uint32_t t = 0; t < 40; t++)
                        vague_put(v, r, 0, t, row_of(t));
                for (uint32_t t = 0; t < 30; t++) {
                        ck_assert(vague_row(v, r, 0, t, (uint8_t *)row));
                        ck_assert_mem_eq(row, row_of(t), sizeof row);
                        vague_remove(v, r, 0, t);
                        ck_assert(!vague_has(v, 0, t));
                }
                error[i] = 0.0;
                for (uint32_t t = 30; t < 40; t++)
                        error[i] = fmax(error[i], error_of(v, r, 0, t));
                vague_free(v, LAYERS);
        }
        ck_assert_double_lt(error[0], 1e-5); /* ten are left, and do not collide */
        ck_assert_double_gt(error[1], 0.1);
        ck_assert_double_gt(error[2], 0.1);
}
END_TEST

START_TEST(four_bits_keep_their_rows) {
        const char *options[][2] = {{"evict", "int4"}};
        struct relief *r = relief_of(options, ARRAY_SIZE(options));
        struct vague *v;

        ck_assert_int_eq(vague_new(r, UINT32_MAX, &v), 0);
        ck_assert_uint_eq(v->packed_bytes, 4 * (4 + 4));
        for (uint32_t t = 0; t < 50; t++)
                vague_put(v, r, 1, t, row_of(t));
        for (uint32_t t = 0; t < 50; t += 2)
                vague_remove(v, r, 1, t);
        for (uint32_t t = 1; t < 50; t += 2)
                ck_assert_double_lt(error_of(v, r, 1, t), 2.0 / 15 / 2 + 2e-3);
        ck_assert_uint_eq(vague_bytes(v, r), 25 * v->packed_bytes);
        vague_free(v, LAYERS);
}
END_TEST

/* ---- in kvlm ---- */

START_TEST(within_the_budget_all_is_exact) {
        static const char *const options[] = {
                "--evict reviver --budget 300", "--evict reviver --budget 100% --profile paper",
                "--evict int4 --budget 300 --decode-tail 100", "--evict reviver --budget 300 --threads 3 --spill none",
        };

        for (size_t i = 0; i < ARRAY_SIZE(options); i++)
                lossy_check_same("--chunk 256", options[i]);
}
END_TEST

/* Labels may bring everything back: then a query sees all tokens exactly, wherever they are. */
START_TEST(what_is_spilled_comes_back_exactly) {
        static const char *const options[] = {
                "--evict reviver --budget 80 --revive 1000 --decode-tail 90",
                "--evict reviver --budget 40 --revive 1000 --evict-every 48 --split .2:.4:.4",
                "--evict int4 --budget 40 --revive 1000 --decode-tail 90 --recent-frac 0 --sink-blocks 0 --kv-type f32",
        };

        ck_assert_double_lt(lossy_distance_between("--chunk 256", options[0]), 2e-5);
        ck_assert_double_lt(lossy_distance_between("--chunk 256", options[1]), 2e-5);
        ck_assert_double_lt(lossy_distance_between("--chunk 256", options[2]), 1.5); /* some are at 4 bit */
        ck_assert_double_gt(lossy_distance_between("--chunk 256", "--evict reviver --budget 80 --revive 0"), 1e-3);
}
END_TEST

/* K15: too full a sketch is not asked, and the tokens are as if they were evicted. */
START_TEST(K15_load_guard) {
        struct output o = lossy_run("--evict reviver --budget 100 --spill none --sketch-load 0 --json --max-tokens 8 "
                                    "--stop \\x01");
        struct output all = lossy_run("--evict reviver --budget 100 --spill none --sketch-load inf --json "
                                      "--max-tokens 8 --stop \\x01");

        ck_assert_int_eq(o.status, 0);
        ck_assert_double_gt(lossy_number(o.out, "revive_refused"), 0);
        ck_assert_double_eq(lossy_number(o.out, "revived_approximate"), 0);
        ck_assert_double_eq(lossy_number(o.out, "swapped_approximate"), 0);
        ck_assert_double_eq(lossy_number(all.out, "revive_refused"), 0);
        ck_assert_double_gt(lossy_number(all.out, "revived_approximate"), 0);
        ck_assert_double_gt(lossy_number(all.out, "sketch_load"), 5);
}
END_TEST

START_TEST(four_bits_are_close) {
        double narrow = lossy_distance_between("--chunk 256", "--evict int4 --budget 40% --spill none"),
               window = lossy_distance_between("--chunk 256", "--evict window --budget 40%");

        ck_assert_double_lt(narrow, window / 2);
        ck_assert_double_gt(narrow, 1e-4); /* or nothing was quantised */
}
END_TEST

START_TEST(memory_is_within_the_budget) {
        static const char *const methods[] = {"reviver --budget 100", "int4 --budget 100",
                                              "reviver --budget 100 --profile paper"};
        const double token = 2.0 * 4 * 2 * 10 * 4;

        for (size_t i = 0; i < ARRAY_SIZE(methods); i++) {
                char options[128];
                struct output o;

                snprintf(options, sizeof options, "--json --max-tokens 30 --stop \\x01 --evict %s", methods[i]);
                o = lossy_run(options);
                ck_assert_int_eq(o.status, 0);
                ck_assert_double_le(lossy_number(o.out, "kv_bytes"), (100 + 2 * 16) * token);
                ck_assert_double_le(lossy_number(o.out, "kv_bytes_peak"), (100 + 128 + 2 * 16) * token);
        }
}
END_TEST

START_TEST(threads_and_variants_do_not_matter) {
        static const char *const methods[] = {
                "--evict reviver --budget 90 --decode-tail 60", "--evict reviver --budget 90 --profile paper",
                "--evict int4 --budget 40 --decode-tail 60", "--evict reviver --budget 90 --spill none --kv-type bf16",
                "--evict reviver --budget 90 --sketch-delete tombstone --sketch-load inf --revive 0",
        };
        char more[256];

        for (size_t i = 0; i < ARRAY_SIZE(methods); i++) {
                snprintf(more, sizeof more, "%s --threads 3", methods[i]);
                lossy_check_same(methods[i], more);
                snprintf(more, sizeof more, "%s --variant scalar --threads 2", methods[i]);
                lossy_check_same(methods[i], more);
        }
}
END_TEST

int main(int argc, char **argv) {
        Suite *s = suite_create("kvlm-reviver");
        TCase *machine = tcase_create("parts"), *c = tcase_create("reviver");
        SRunner *runner;
        int failed;

        kvlm_program = argc > 1 ? argv[1] : "kvlm";
        suite_add_tcase(s, machine);
        tcase_set_timeout(machine, 100);
        tcase_add_test(machine, K14_every_token_is_in_one_part);
        tcase_add_test(machine, equal_scores_do_not_swap);
        tcase_add_test(machine, better_tokens_come_back);
        tcase_add_test(machine, K5_a_sketch_with_room_is_exact);
        tcase_add_test(machine, K11_exact_deletion_leaves_no_trace);
        tcase_add_test(machine, four_bits_keep_their_rows);
        suite_add_tcase(s, c);
        tcase_set_timeout(c, 100);
        tcase_add_checked_fixture(c, lossy_prepare, folder_remove);
        tcase_add_test(c, within_the_budget_all_is_exact);
        tcase_add_test(c, what_is_spilled_comes_back_exactly);
        tcase_add_test(c, K15_load_guard);
        tcase_add_test(c, four_bits_are_close);
        tcase_add_test(c, memory_is_within_the_budget);
        tcase_add_test(c, threads_and_variants_do_not_matter);
        runner = srunner_create(s);
        srunner_run_all(runner, CK_ENV);
        failed = srunner_ntests_failed(runner);
        srunner_free(runner);
        return failed != 0;
}
