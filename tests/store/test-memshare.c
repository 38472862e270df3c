/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The store's part of MemShare: which blocks are compared, and what is done with the answer. Random
 * operations check references and tables.
 */

#include <errno.h>
#include <math.h>
#include <string.h>

#include "tests/lib/oracle.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

static struct space *space;
static struct attachment *a;
static struct table t;

static void setup(void) {
        fixture_open(128, 64);
        space = fixture_space("s", 0);
        a = fixture_attach(space);
        set(space, "memshare", "on");
        set(space, "pressure", "off");
        set(space, "memshare.min_step_tokens", "4");
        table_open(&t, a, 64, true);
}

static void teardown(void) {
        idle();
        check_clean(space);
        fixture_close();
}

/* Appends a step of n full blocks, and asks to share it. */
static int step(struct table *u, uint32_t n, uint32_t token) {
        uint32_t first = u->n_tokens;

        ck_assert_int_eq(table_append(u, n * BT, token), 0);
        return sequence_share(u->a, u->number, first, n * BT);
}

static void two_like_steps(void) {
        ck_assert_int_eq(table_append(&t, 2 * BT, 1), 0);
        ck_assert_int_eq(step(&t, 4, 500), 1);
        ck_assert_int_eq(table_append(&t, 3 * BT + 1, 900), 0);
        ck_assert_int_eq(step(&t, 4, 500), 1);
        ck_assert_int_eq(table_append(&t, BT, 1500), 0);
}

START_TEST(a_repeated_step_is_shared) {
        two_like_steps();
        work();
        check_clean(space);
        /* the last two blocks of the sequence are left alone */
        ck_assert_uint_eq(table_sync(&t, NULL), 3);
        idle();
        table_check(&t);
        check_clean(space);
        for (uint32_t i = 0; i < 3; i++) {
                ck_assert_uint_eq(t.slots[10 + i].ref, t.slots[2 + i].ref);
                ck_assert_uint_eq(t.slots[10 + i].flags, KVD_ENTRY_OWN | KVD_ENTRY_SHARED);
                ck_assert_int_eq(t.slots[10 + i].delta,
                                 (int)(t.slots[10].position - t.slots[2].position));
        }
        ck_assert_uint_eq(usage_of(space).private, 12);
        ck_assert_uint_eq(usage_of(space).shared, 3);
        ck_assert_uint_eq(counter(space, KVD_SPACE_SHARED), 3);
        ck_assert_uint_eq(counter(space, KVD_SPACE_STEPS), 2);
        table_close(&t);
        idle();
        ck_assert_uint_eq(usage_of(space).private + usage_of(space).shared, 0);
}
END_TEST

/*
 * Algorithm 1 protects no block for its position: the first blocks of a sequence and the newest may
 * be replaced, too.
 */
START_TEST(the_papers_profile_spares_no_block) {
        struct table u;

        set(space, "memshare.profile", "paper");
        set(space, "memshare.cross_seq", "on");
        table_open(&u, a, 64, true);
        ck_assert_int_eq(step(&u, 4, 500), 1);
        ck_assert_int_eq(step(&t, 4, 500), 1);
        ck_assert_int_eq(step(&t, 4, 500), 1);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 8);
        for (uint32_t i = 0; i < 8; i++)
                ck_assert_uint_eq(t.slots[i].flags, KVD_ENTRY_OWN | KVD_ENTRY_SHARED);
        idle();
        check_clean(space);
        table_close(&t);
        table_close(&u);
}
END_TEST

/* ---- the threshold --------------------------------------------------------------------------- */

static float threshold_of_job(void) {
        float tau;

        while (worker_take() && worker_job->kind != KVD_JOB_COMPARE)
                worker_do();
        memcpy(&tau, &worker_job->param[0], sizeof tau);
        worker_do();
        return tau;
}

START_TEST(the_threshold_is_what_strangers_say) {
        set(space, "memshare.tau_block", "0.5");
        set(space, "memshare.calibrate", "0.1");
        ck_assert_int_eq(step(&t, 2, 100), 1); /* too few pairs to calibrate */
        work();
        ck_assert(share_distance(space) == 0.5f);
        ck_assert_uint_eq(counter(space, KVD_SPACE_TAU_BLOCK), 500000);
        for (uint32_t i = 1; i < 9; i++)
                ck_assert_int_eq(step(&t, 4, 1000 * i), 1);
        ck_assert(threshold_of_job() == share_distance(space));
        work();
        ck_assert_uint_eq(counter(space, KVD_SPACE_CALIBRATED), 128);
        ck_assert(share_distance(space) == 1.12f);
        ck_assert_uint_eq(counter(space, KVD_SPACE_TAU_BLOCK), 1120000);
        set(space, "memshare.metric", "fro_norm"); /* another metric needs its own threshold */
        ck_assert(share_distance(space) == 0.5f);
        ck_assert_int_eq(step(&t, 4, 9000), 1);
        work();
        ck_assert(share_distance(space) == 1.12f);
        ck_assert_int_eq(step(&t, 4, 10000), 1); /* calibrated already */
        work();
        ck_assert_uint_eq(counter(space, KVD_SPACE_CALIBRATED), 256);
        set(space, "memshare.calibrate", "0");
        ck_assert(share_distance(space) == 0.5f);
        table_close(&t);
}
END_TEST

/* Repeated blocks are not unrelated pairs: they would lower the threshold. */
START_TEST(blocks_with_the_same_words_are_not_measured) {
        set(space, "memshare.calibrate", "0.1");
        for (uint32_t i = 0; i < 9; i++)
                ck_assert_int_eq(step(&t, 4, 500), 1);
        while (worker_take()) {
                if (worker_job->kind == KVD_JOB_CALIBRATE)
                        for (uint32_t i = 0; i < worker_job->n_items; i += 2) {
                                const struct kvd_job_item *items =
                                        (const struct kvd_job_item *)(worker_job + 1);

                                ck_assert_uint_ne(items[i].position % 16,
                                                  items[i + 1].position % 16);
                        }
                worker_do();
        }
        ck_assert_uint_gt(counter(space, KVD_SPACE_CALIBRATED), 0);
        table_sync(&t, NULL);
        table_close(&t);
}
END_TEST

START_TEST(nonsense_is_no_threshold) {
        float nonsense[128];

        set(space, "memshare.calibrate", "0.1");
        for (uint32_t i = 1; i < 9; i++)
                ck_assert_int_eq(step(&t, 4, 1000 * i), 1);
        for (uint32_t i = 0; i < 128; i++)
                nonsense[i] = i % 2 ? NAN : i % 4 ? -1.0f : INFINITY;
        while (worker_take() && worker_job->kind != KVD_JOB_CALIBRATE)
                worker_do();
        worker_answer(nonsense, worker_job->n_items / 2 * sizeof *nonsense);
        ck_assert(share_distance(space) == 0.27f);
        ck_assert_uint_eq(counter(space, KVD_SPACE_CALIBRATED), 0);
        work();
        table_close(&t);
}
END_TEST

START_TEST(without_alignment_there_is_no_delta) {
        set(space, "memshare.align", "none");
        two_like_steps();
        work();
        table_sync(&t, NULL);
        ck_assert_uint_eq(t.slots[10].flags, KVD_ENTRY_OWN | KVD_ENTRY_SHARED);
        ck_assert_int_eq(t.slots[10].delta, 0);
        table_close(&t);
}
END_TEST

START_TEST(what_is_not_taken_stays) {
        two_like_steps();
        work();
        ck_assert_uint_eq(table_sync(&t, takes_nothing), 0);
        table_check(&t);
        check_clean(space);
        ck_assert_uint_eq(usage_of(space).private, 15);
        table_close(&t);
}
END_TEST

START_TEST(short_steps_and_others_are_not_compared) {
        set(space, "memshare.min_step_tokens", "16");
        ck_assert_int_eq(step(&t, 3, 500), 0);
        ck_assert_int_eq(table_append(&t, 1, 1), 0);
        ck_assert_int_eq(sequence_share(a, t.number, 2, 3), 0);
        ck_assert_int_eq(step(&t, 4, 500), 1);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 0);
        table_close(&t);
}
END_TEST

static void take_comparison(void) {
        ck_assert(worker_take());
        while (worker_job->kind != KVD_JOB_COMPARE) {
                worker_do();
                ck_assert(worker_take());
        }
}

/*
 * Sinks, recent blocks, the tail, shared blocks and approximations are neither targets nor sources.
 */
START_TEST(targets_and_sources_are_chosen) {
        uint32_t targets = 0;

        ck_assert_int_eq(step(&t, 4, 500), 1); /* block 0 is the sink */
        ck_assert_int_eq(step(&t, 4, 500), 1);
        ck_assert_int_eq(step(&t, 4, 500), 1);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 6); /* all but the last two blocks */
        ck_assert_uint_ne(t.slots[8].ref, 0);
        ck_assert_int_eq(step(&t, 5, 500), 1);
        take_comparison(); /* the last two blocks of the step before, which are not the newest any more */
        for (uint32_t i = 0; i < worker_job->n_items; i++) {
                struct kvd_job_item *item = (struct kvd_job_item *)(worker_job + 1) + i;

                ck_assert_uint_eq(item->flags, item->slot >= 8 ? KVD_JOB_TARGET : KVD_JOB_SOURCE);
                ck_assert(item->slot < 8 || item->slot == 10 || item->slot == 11);
        }
        ck_assert_uint_eq(worker_job->n_results, 2);
        worker_do();
        take_comparison();
        for (uint32_t i = 0; i < worker_job->n_items; i++) {
                struct kvd_job_item *item = (struct kvd_job_item *)(worker_job + 1) + i;

                targets += item->flags == KVD_JOB_TARGET;
                ck_assert_uint_eq(item->flags, item->slot >= 12 ? KVD_JOB_TARGET : KVD_JOB_SOURCE);
                ck_assert_int_eq(item->slot < 12 && (t.slots[item->slot].flags & KVD_ENTRY_SHARED),
                                 0);
                ck_assert_uint_lt(item->slot, 15);
                ck_assert_int_eq(item->position, (int)t.slots[item->slot].position);
        }
        ck_assert_uint_eq(targets, 3);
        ck_assert_uint_eq(worker_job->n_results, 3);
        worker_do();
        table_sync(&t, NULL);
        table_check(&t);
        table_close(&t);
}
END_TEST

START_TEST(answers_are_not_believed) {
        struct kvd_match wrong[] = {{0, 0, 0, 1},
                                    {0, 77, 0, 1},
                                    {77, 0, 0, 1},
                                    {3, 0, 0, 1},
                                    {0, 3, __builtin_nanf(""), 1},
                                    {0, 3, 1e9f, 1},
                                    {0, 1, 0, 1}};
        struct kvd_match right[] = {{0, 3, 0.1f, 1}, {0, 4, 0.1f, 1}};

        for (uint32_t i = 0; i < ARRAY_SIZE(wrong); i++) {
                struct table u;

                table_open(&u, a, 64, true);
                step(&u, 4, 500);
                step(&u, 5, 500);
                while (worker_take() &&
                       !(worker_job->kind == KVD_JOB_COMPARE && worker_job->n_steps == 2))
                        worker_do();
                worker_answer(&wrong[i], sizeof wrong[i]);
                ck_assert_uint_eq(table_sync(&u, NULL), 0);
                check_clean(space);
                table_close(&u);
        }
        step(&t, 4, 500);
        step(&t, 5, 500);
        while (worker_take() && !(worker_job->kind == KVD_JOB_COMPARE && worker_job->n_steps == 2))
                worker_do();
        worker_answer(right, sizeof right);
        ck_assert_uint_eq(table_sync(&t, NULL), 1); /* the second match of a block is ignored */
        ck_assert_uint_eq(t.slots[4].ref, t.slots[0].ref);
        table_close(&t);
}
END_TEST

START_TEST(a_prefix_may_stand_in_and_is_never_replaced) {
        uint32_t tokens[4 * BT], first;
        kvd_ref chain[4];
        struct seal_request seal = {.n_blocks = 4,
                                    .blocks = chain,
                                    .n_tokens = 4 * BT,
                                    .tokens = tokens};
        struct append_request borrow = {.n_blocks = 4,
                                        .blocks = chain,
                                        .n_tokens = 4 * BT,
                                        .tokens = tokens};
        float floats[BLOCK_BYTES / 4];
        struct table u;

        /* The prefix has the contents of the first blocks of a table with the same tokens. */
        table_open(&u, a, 8, false);
        table_append(&u, 4 * BT, 500);
        for (uint32_t i = 0; i < 4 * BT; i++)
                tokens[i] = 500 + i;
        ck_assert_int_eq(space_allocate(a, 4, chain), 4);
        for (uint32_t i = 0; i < 4; i++) {
                block_floats(space, u.slots[i].ref, floats);
                fixture_write(space, chain[i], floats);
        }
        table_close(&u);
        ck_assert_int_eq(space_seal(a, &seal, chain), 0);
        ck_assert_int_eq(sequence_append(a, t.number, &borrow, &first), 0);
        for (uint32_t i = 0; i < 4; i++)
                t.slots[t.n++] = (struct slot){chain[i], KVD_ENTRY_BORROWED, i * BT, BT, 0};
        memcpy(t.tokens, tokens, sizeof tokens);
        t.n_tokens = 4 * BT;
        ck_assert_int_eq(sequence_share(a, t.number, 0, 4 * BT), 1);
        ck_assert_int_eq(step(&t, 4, 500), 1);
        ck_assert_int_eq(table_append(&t, 2 * BT, 900), 0);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 4);
        check_clean(space);
        for (uint32_t i = 0; i < 4; i++) {
                ck_assert_uint_eq(t.slots[i].ref, chain[i]);
                ck_assert_uint_eq(t.slots[4 + i].ref, chain[i]);
        }
        ck_assert_uint_eq(usage_of(space).sealed - usage_of(space).private, 4);
        table_close(&t);
}
END_TEST

START_TEST(other_sequences_only_if_that_is_wanted) {
        struct table u;

        table_open(&u, fixture_attach(space), 64, true);
        step(&u, 4, 500);
        step(&t, 6, 500);
        table_append(&t, 2 * BT, 900);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL) + table_sync(&u, NULL), 0);
        set(space, "memshare.cross_seq", "on");
        ck_assert_int_eq(sequence_share(t.a, t.number, 0, 4 * BT), 1);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 3);
        check_clean(space);
        table_close(&u); /* blocks that replace others stay */
        idle();
        table_check(&t);
        check_clean(space);
        ck_assert_uint_eq(usage_of(space).private, 8);
        table_close(&t);
}
END_TEST

/* A block that left and came back keeps its copy, until another block takes its place. */
START_TEST(a_shared_block_has_no_copy_of_what_it_was) {
        static const uint32_t again[] = {10, 11, 12};
        uint32_t first, exact, approx;

        set(space, "kvreviver", "on");
        ck_assert_int_eq(table_append(&t, 2 * BT, 1), 0);
        ck_assert_int_eq(step(&t, 4, 500), 1);
        ck_assert_int_eq(table_append(&t, 3 * BT + 1, 900), 0);
        first = t.n_tokens;
        ck_assert_int_eq(table_append(&t, 4 * BT, 500), 0);
        ck_assert_int_eq(table_append(&t, BT, 1500), 0);
        work();
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, again, 3), 3);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 3);
        ck_assert_int_eq(sequence_revive(a, t.number, KVD_REVIVE_EXACT, again, 3, &exact, &approx),
                         0);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 3);
        for (uint32_t i = 0; i < 3; i++)
                ck_assert_uint_ne(sequence_find(a, t.number)->entries[again[i]].place, KVD_NOWHERE);
        ck_assert_int_eq(sequence_share(a, t.number, first, 4 * BT), 1);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 3);
        for (uint32_t i = 0; i < 3; i++) {
                ck_assert_uint_eq(t.slots[again[i]].flags, KVD_ENTRY_OWN | KVD_ENTRY_SHARED);
                ck_assert_uint_eq(sequence_find(a, t.number)->entries[again[i]].place, KVD_NOWHERE);
        }
        check_clean(space);
        table_close(&t);
}
END_TEST

START_TEST(a_lost_comparison_is_made_again) {
        two_like_steps();
        while (worker_take() && worker_job->kind != KVD_JOB_COMPARE)
                worker_do();
        worker_die();
        check_clean(space);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 3);
        table_close(&t);
}
END_TEST

/* ---- random operations ----------------------------------------------------------------------- */

static struct random rnd;

static bool mostly(const struct kvd_change *c) {
        return random_below(&rnd, 5) != 0;
}

#define TABLES 6u

static void one_operation(struct table *tables, struct attachment **owners) {
        uint32_t k = random_below(&rnd, TABLES), slots[4];
        struct table *u = &tables[k];

        if (!u->a) {
                table_open(u, owners[k / 2], 64, true);
                return;
        }
        switch (random_below(&rnd, 16)) {
        case 0: table_close(u); break;
        case 1:
        case 2:
        case 3:
                if (u->n < 56)
                        table_append(u, 1 + random_below(&rnd, 2 * BT),
                                     random_below(&rnd, 4) * 1000);
                break;
        case 4:
        case 5:
        case 6:
                if (u->n < 56 && u->n && table_append(u, 3 * BT, random_below(&rnd, 3) * 1000) == 0)
                        sequence_share(u->a, u->number, u->n_tokens - 3 * BT, 3 * BT);
                break;
        case 7:
                for (uint32_t i = 0; i < 4 && u->n; i++)
                        slots[i] = random_below(&rnd, u->n);
                if (u->n)
                        sequence_cool(u->a, u->number, KVD_COOL_DROP, slots, 2);
                break;
        case 8:
        case 9:
        case 10: table_sync(u, mostly); break;
        case 11:
        case 12:
        case 13:
                if (worker_take())
                        random_below(&rnd, 12) ? worker_do() : worker_die();
                break;
        case 14:
                if (random_below(&rnd, 20) == 0) { /* the process of two sequences ends */
                        attachment_free(owners[k / 2], true);
                        table_forget(&tables[k / 2 * 2]);
                        table_forget(&tables[k / 2 * 2 + 1]);
                        idle(); /* folds its page, which frees its slot */
                        owners[k / 2] = fixture_attach(space);
                }
                break;
        default: store_idle(store);
        }
}

START_TEST(random_operations_keep_references_and_tables_right) {
        static struct table tables[TABLES];
        struct attachment *owners[TABLES / 2];

        rnd.state = 11;
        table_close(&t);
        set(space, "memshare.cross_seq", "on");
        set(space, "memshare.recent_guard", "0");
        for (uint32_t i = 0; i < TABLES / 2; i++)
                owners[i] = fixture_attach(space);
        for (uint32_t i = 0; i < 30000; i++) {
                one_operation(tables, owners);
                if (i % 7 == 0)
                        check_clean(space);
                for (uint32_t k = 0; i % 31 == 0 && k < TABLES; k++)
                        if (tables[k].a)
                                table_check(&tables[k]);
        }
        ck_assert_uint_gt(counter(space, KVD_SPACE_SHARED), 500);
        for (uint32_t i = 0; i < TABLES / 2; i++)
                attachment_free(owners[i], true);
        work();
        idle();
        ck_assert_uint_eq(usage_of(space).private + usage_of(space).shared, 0);
}
END_TEST

SUITE("memshare", FIXTURE(setup, teardown),
      TESTS(a_repeated_step_is_shared, the_papers_profile_spares_no_block,
            the_threshold_is_what_strangers_say, blocks_with_the_same_words_are_not_measured,
            nonsense_is_no_threshold, without_alignment_there_is_no_delta, what_is_not_taken_stays,
            short_steps_and_others_are_not_compared, targets_and_sources_are_chosen,
            answers_are_not_believed, a_prefix_may_stand_in_and_is_never_replaced,
            other_sequences_only_if_that_is_wanted, a_shared_block_has_no_copy_of_what_it_was,
            a_lost_comparison_is_made_again, random_operations_keep_references_and_tables_right))
