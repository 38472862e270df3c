/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Which blocks leave when there is too little room: watermarks, the order of relief, priorities,
 * and policy `priority`.
 */

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

static struct space *space;
static struct attachment *a;
static struct table t;

static void setup(void) {
        fixture_open(112, 100);
        space = fixture_space("s", 100);
        a = fixture_attach(space);
        ck_assert_uint_eq(usage_of(space).max_blocks, 100);
        set(space, "kvreviver.vague", "0"); /* only exact copies, unless a test changes it */
        table_open(&t, a, 200, true);
}

static void teardown(void) {
        idle();
        check_clean(space);
        fixture_close();
}

/* Reports attention and selections for an entry, as a client does. */
static void use(uint32_t slot, uint16_t mass, uint16_t hits) {
        *table_use(&t, t.slots[slot].ref) = (struct kvd_use){mass, hits};
}

/* Runs the loop's turns: relief, jobs, and the client's syncs. */
static void settle(void) {
        for (int i = 0; i < 20; i++) {
                idle();
                work();
                table_sync(&t, NULL);
        }
        idle();
        check_clean(space);
        table_check(&t);
}

static uint32_t resident(uint32_t from, uint32_t n) {
        uint32_t r = 0;

        for (uint32_t i = from; i < from + n; i++)
                r += t.slots[i].ref != 0;
        return r;
}

START_TEST(nothing_leaves_below_the_mark_or_without_a_method) {
        ck_assert_int_eq(table_append(&t, 95 * BT, 1), 0);
        settle();
        ck_assert_uint_eq(resident(0, 95), 95);
        set(space, "pressure.high", "0.96");
        set(space, "kvreviver", "on");
        settle();
        ck_assert_uint_eq(resident(0, 95), 95);
        set(space, "pressure.high", "0.9");
        set(space, "pressure", "off");
        settle();
        ck_assert_uint_eq(resident(0, 95), 95);
        set(space, "pressure", "on");
        settle();
        ck_assert_uint_eq(resident(0, 95), 80); /* down to the low mark */
        ck_assert_uint_eq(counter(space, KVD_SPACE_RELIEVED), 15);
        ck_assert_uint_eq(usage_of(space).spilled, 15);
        table_close(&t);
}
END_TEST

START_TEST(the_least_attended_go_first) {
        set(space, "keydiff.sink_blocks", "1");
        set(space, "pressure.keydiff", "0");
        ck_assert_int_eq(table_append(&t, 92 * BT, 1), 0);
        for (uint32_t i = 0; i < 92; i++)
                use(i, i >= 20 && i < 32 ? 3 : 300 + i, 0);
        use(0, 1, 0); /* the sink stays, however little attention it gets */
        set(space, "kvreviver", "on");
        settle();
        ck_assert_uint_eq(resident(20, 12), 0);
        ck_assert_uint_eq(resident(0, 20), 20);
        ck_assert_uint_eq(resident(32, 60), 60);
        table_close(&t);
}
END_TEST

/* Attention weighs half and selections a third: the ranks of both together decide. */
START_TEST(signals_are_weighed_and_may_be_missing) {
        set(space, "pressure.keydiff", "0");
        ck_assert_int_eq(table_append(&t, 92 * BT, 1), 0);
        for (uint32_t i = 0; i < 92; i++)
                use(i, (uint16_t)(i < 40 ? 500 : 10), (uint16_t)(i < 30 || i >= 80 ? 500 : 10));
        set(space, "kvreviver", "on");
        settle();
        ck_assert_uint_eq(resident(0, 40), 40);
        ck_assert_uint_eq(resident(40, 40), 28); /* neither attended nor selected */
        ck_assert_uint_eq(resident(80, 12), 12);
        table_close(&t);
}
END_TEST

/* What clients reported when blocks left the last time does not count any more. */
START_TEST(the_newest_reports_count) {
        set(space, "pressure.keydiff", "0");
        set(space, "keydiff.sink_blocks", "0");
        ck_assert_int_eq(table_append(&t, 92 * BT, 1), 0);
        for (uint32_t i = 0; i < 92; i++)
                use(i, i < 12 ? 1 : i < 52 ? 300 : 500, 0);
        set(space, "kvreviver", "on");
        settle();
        ck_assert_uint_eq(resident(0, 12), 0);
        ck_assert_int_eq(table_append(&t, 12 * BT, 1), 0);
        for (uint32_t i = 12; i < 104; i++)
                use(i, i < 52 || i >= 92 ? 500 : 300, 0);
        settle();
        ck_assert_uint_eq(resident(12, 40) + resident(92, 12), 52);
        ck_assert_uint_eq(resident(52, 40), 28);
        table_close(&t);
}
END_TEST

/* Those with copies leave without a job, and a client that sleeps until something happens must hear of it. */
START_TEST(clients_hear_of_blocks_that_leave_at_once) {
        uint32_t copied[20], exact, approx, before;

        set(space, "kvreviver", "on");
        set(space, "pressure.keydiff", "0");
        set(space, "keydiff.sink_blocks", "0");
        ck_assert_int_eq(table_append(&t, 80 * BT, 1), 0);
        for (uint32_t i = 0; i < ARRAY_SIZE(copied); i++)
                copied[i] = i;
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, copied, 20), 20);
        settle();
        ck_assert_int_eq(sequence_revive(a, t.number, KVD_REVIVE_EXACT, copied, 20, &exact,
                                         &approx),
                         0);
        settle();
        ck_assert_uint_eq(resident(0, 80), 80);
        ck_assert_int_eq(table_append(&t, 12 * BT, 1), 0);
        for (uint32_t i = 0; i < 92; i++)
                use(i, i < 20 ? 1 : 500, 0);
        work();
        before = atomic_load(&space->ix->sync_epoch);
        idle();
        ck_assert_uint_ne(atomic_load(&space->ix->sync_epoch), before);
        ck_assert_uint_eq(table_sync(&t, NULL), 12);
        ck_assert_uint_eq(resident(0, 20), 8);
        table_close(&t);
}
END_TEST

START_TEST(without_reports_keydiff_decides) {
        ck_assert_int_eq(table_append(&t, 92 * BT, 1), 0);
        set(space, "keydiff.sink_blocks", "0");
        set(space, "kvreviver", "on");
        settle(); /* the tests' worker gives later blocks higher scores */
        ck_assert_uint_eq(resident(0, 12), 0);
        ck_assert_uint_eq(resident(12, 80), 80);
        table_close(&t);
}
END_TEST

/* Entries that have left have no keys to score; they would get the score of block 0. */
START_TEST(only_what_is_there_is_scored) {
        uint32_t jobs = 0;

        ck_assert_int_eq(table_append(&t, 92 * BT, 1), 0);
        set(space, "keydiff.sink_blocks", "0");
        set(space, "kvreviver", "on");
        settle();
        ck_assert_uint_eq(resident(0, 92), 80);
        ck_assert_int_eq(table_append(&t, 15 * BT, 1), 0);
        idle();
        for (; worker_take(); worker_do())
                if (worker_job->kind == KVD_JOB_SCORE) {
                        ck_assert_uint_le(worker_job->n_items, resident(0, 107));
                        jobs++;
                }
        ck_assert_uint_gt(jobs, 0);
        settle();
        table_close(&t);
}
END_TEST

START_TEST(a_sequence_keeps_its_budget) {
        set(space, "kvreviver.budget", "0.97");
        ck_assert_int_eq(table_append(&t, 100 * BT, 1), 0);
        set(space, "kvreviver", "on");
        settle();
        /* nine tenths of the budget: the sketch has the rest */
        ck_assert_uint_eq(resident(0, 100), 88);
        table_close(&t);
}
END_TEST

/*
 * By default relief makes only exact copies. A sketch would cost as much and stand for fewer
 * tokens.
 */
START_TEST(relief_copies_and_leaves_sketches_alone) {
        set(space, "kvreviver.vague", "0.1");
        ck_assert_int_eq(table_append(&t, 95 * BT, 1), 0);
        set(space, "kvreviver", "on");
        settle();
        ck_assert_uint_eq(resident(0, 95), 80);
        ck_assert_uint_eq(usage_of(space).spilled, 15);
        ck_assert_uint_eq(usage_of(space).vague, 0);
        ck_assert_uint_eq(usage_of(space).sketch_bytes, 0);
        table_close(&t);
}
END_TEST

/* The papers protect no token for its position alone. */
START_TEST(papers_profiles_protect_nothing) {
        set(space, "keydiff.profile", "paper");
        set(space, "kvreviver.recent", "0");
        set(space, "pressure.keydiff", "0");
        ck_assert_int_eq(table_append(&t, 92 * BT, 1), 0);
        for (uint32_t i = 0; i < 92; i++)
                use(i, i < 4 || i >= 84 ? 1 : 300, 0);
        set(space, "kvreviver", "on");
        settle();
        ck_assert_uint_eq(resident(0, 4) + resident(84, 8), 0);
        ck_assert_uint_eq(resident(4, 80), 80);
        table_close(&t);
}
END_TEST

START_TEST(the_largest_sequence_gives) {
        struct table u;

        table_open(&u, a, 100, true);
        ck_assert_int_eq(table_append(&u, 20 * BT, 1), 0);
        ck_assert_int_eq(table_append(&t, 72 * BT, 1), 0);
        set(space, "kvreviver", "on");
        settle();
        ck_assert_uint_eq(table_sync(&u, NULL), 0);
        ck_assert_uint_eq(resident(0, 72), 60);
        table_close(&t);
        table_close(&u);
}
END_TEST

START_TEST(a_refusal_starts_relief) {
        kvd_ref refs[64];

        set(space, "pressure.high", "1");
        set(space, "pressure.low", "1");
        set(space, "kvreviver", "on");
        while (table_append(&t, BT, 1) == 0)
                ;
        ck_assert_uint_eq(t.n, 100);
        settle();
        ck_assert_uint_eq(usage_of(space).spilled, 16);
        ck_assert_int_gt(space_allocate(a, 16, refs), 0);
        table_close(&t);
}
END_TEST

START_TEST(without_room_for_copies_nothing_goes_but_if_it_may) {
        fixture_close();
        fixture_open(112, 5);
        space = fixture_space("s", 100);
        a = fixture_attach(space);
        table_open(&t, a, 200, true);
        set(space, "kvreviver.vague", "0");
        ck_assert_int_eq(table_append(&t, 95 * BT, 1), 0);
        set(space, "kvreviver", "on");
        settle();
        ck_assert_uint_eq(resident(0, 95), 90);
        set(space, "kvreviver.drop", "on");
        ck_assert_int_eq(table_append(&t, BT, 1), 0);
        settle();
        ck_assert_uint_eq(resident(0, 96), 80);
        ck_assert_uint_eq(counter(space, KVD_SPACE_DROPPED), 11);
        table_close(&t);
}
END_TEST

START_TEST(like_steps_are_shared_before_anything_leaves) {
        set(space, "memshare", "on");
        set(space, "memshare.min_step_tokens", "4");
        worker_verdict = 1;
        for (uint32_t i = 0; i < 19; i++) {
                ck_assert_int_eq(table_append(&t, 5 * BT, 500), 0);
                ck_assert_int_eq(sequence_share(a, t.number, i * 5 * BT, 5 * BT), 1);
        }
        while (worker_take()) /* all comparisons are done before relief begins */
                worker_do();
        worker_verdict = 0;
        set(space, "kvreviver", "on");
        settle();
        ck_assert_uint_gt(usage_of(space).shared, 80);
        ck_assert_uint_eq(usage_of(space).spilled, 0);
        table_close(&t);
}
END_TEST

/* Blocks that did not match before may match now. */
START_TEST(each_time_of_need_compares_anew) {
        set(space, "memshare", "on");
        set(space, "memshare.min_step_tokens", "4");
        worker_verdict = 1;
        for (uint32_t i = 0; i < 19; i++) {
                ck_assert_int_eq(table_append(&t, 5 * BT, 500), 0);
                ck_assert_int_eq(sequence_share(a, t.number, i * 5 * BT, 5 * BT), 1);
        }
        settle();
        ck_assert_uint_eq(usage_of(space).shared, 0);
        set(space, "pressure.high", "1");
        set(space, "pressure.low", "1");
        worker_verdict = 0;
        settle();
        ck_assert_uint_eq(usage_of(space).shared, 0);
        set(space, "pressure.low", "0.8");
        set(space, "pressure.high", "0.9");
        settle();
        ck_assert_uint_gt(usage_of(space).shared, 80);
        table_close(&t);
}
END_TEST

/* ---- policy priority ------------------------------------------------------------------------- */

static void seal_chain(uint32_t n, uint32_t token, kvd_ref *ret) {
        uint32_t tokens[32 * BT];
        struct seal_request q = {.n_blocks = n,
                                 .blocks = ret,
                                 .n_tokens = n * BT,
                                 .tokens = tokens};

        for (uint32_t i = 0; i < n * BT; i++)
                tokens[i] = token + i;
        for (uint32_t got = 0; got < n;)
                got += (uint32_t)space_allocate(a, n - got, ret + got);
        ck_assert_int_eq(space_seal(a, &q, ret), 0);
}

static void attend(kvd_ref ref, uint16_t mass) {
        table_use(&t, ref)->mass = mass;
}

START_TEST(policy_priority_evicts_what_is_worth_least) {
        kvd_ref cold[4], hot[4], middle[4];
        bool more;

        seal_chain(4, 100, hot);
        seal_chain(4, 200, cold);
        seal_chain(4, 300, middle);
        set(space, "policy", "priority");
        for (uint32_t i = 0; i < 4; i++) {
                attend(hot[i], 60000);
                attend(cold[i], 1);
                attend(middle[i], 256);
        }
        idle();
        check_clean(space);
        ck_assert_int_eq(space_evict(space, 4, KVD_ROOT, &more), 4);
        ck_assert(!block_current(space, cold[0]) && block_current(space, hot[3]) &&
                  block_current(space, middle[3]));
        ck_assert_int_eq(space_evict(space, 4, KVD_ROOT, &more), 4);
        ck_assert(!block_current(space, middle[0]) && block_current(space, hot[3]));
        set(space, "policy", "lru");
        seal_chain(4, 200, cold);
        idle();
        check_clean(space);
        ck_assert_int_eq(space_evict(space, 4, KVD_ROOT, &more), 4);
        ck_assert(!block_current(space, hot[0]) && block_current(space, cold[3]));
        check_clean(space);
        table_close(&t);
}
END_TEST

/* Keys are compared before rotation, so the worker must know each block's position. */
static uint32_t work_that_scores(void) {
        uint32_t n = 0;

        while (worker_take()) {
                const struct kvd_job_item *items = (const struct kvd_job_item *)(worker_job + 1);

                for (uint32_t i = 0; worker_job->kind == KVD_JOB_SCORE && i < worker_job->n_items;
                     i++, n++) {
                        ck_assert_int_eq(items[i].position, (int32_t)(i * BT));
                        ck_assert_uint_eq(items[i].n_tokens, BT);
                }
                worker_do();
        }
        return n;
}

START_TEST(chains_without_a_score_are_scored_when_there_is_time) {
        kvd_ref chain[8];

        seal_chain(8, 100, chain);
        set(space, "policy", "priority");
        set(space, "keydiff", "on");
        idle();
        ck_assert_uint_ge(work_that_scores(), 8);
        for (uint32_t i = 0; i < 8; i++)
                ck_assert_uint_gt(space->blocks[kvd_ref_id(chain[i])].score, 0);
        idle();
        ck_assert_uint_eq(work(), 0);
        check_clean(space);
        table_close(&t);
}
END_TEST

SUITE("relief", FIXTURE(setup, teardown),
      TESTS(nothing_leaves_below_the_mark_or_without_a_method, the_least_attended_go_first,
            signals_are_weighed_and_may_be_missing, the_newest_reports_count,
            clients_hear_of_blocks_that_leave_at_once, without_reports_keydiff_decides,
            only_what_is_there_is_scored, a_sequence_keeps_its_budget,
            relief_copies_and_leaves_sketches_alone, papers_profiles_protect_nothing,
            the_largest_sequence_gives, a_refusal_starts_relief,
            without_room_for_copies_nothing_goes_but_if_it_may,
            like_steps_are_shared_before_anything_leaves, each_time_of_need_compares_anew,
            policy_priority_evicts_what_is_worth_least,
            chains_without_a_score_are_scored_when_there_is_time))
