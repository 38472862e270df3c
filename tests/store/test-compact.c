/* SPDX-License-Identifier: Apache-2.0 */

/*
 * KeyDiff's compaction in the store: a range of entries gets fewer blocks, all at once or not at
 * all.
 */

#include <errno.h>
#include <string.h>

#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

static struct space *space;
static struct attachment *a;
static struct table t;

static void setup(void) {
        fixture_open(64, 64);
        space = fixture_space("s", 0);
        a = fixture_attach(space);
        set(space, "keydiff", "on");
        set(space, "kvreviver", "on");
        set(space, "pressure", "off");
        table_open(&t, a, 48, true);
}

static void teardown(void) {
        idle();
        check_clean(space);
        fixture_close();
}

static void append(uint32_t n_tokens) {
        ck_assert_msg(table_append(&t, n_tokens, 10 + t.n_tokens) == 0, "%s", store_why(store));
}

static int compact(uint32_t first, uint32_t n, uint32_t keep) {
        const struct compact_request req = {.first = first, .n = n, .keep = keep};

        return sequence_compact(a, t.number, &req);
}

/* Entries from `slot` on have n tokens that count up from first_token, and zeros after them. */
static void expect_packed(uint32_t slot, uint32_t first_token, uint32_t n) {
        for (uint32_t i = 0; i < n; i += BT, slot++) {
                float have[BLOCK_BYTES / 4], want[BLOCK_BYTES / 4] = {0};

                ck_assert_uint_eq(t.slots[slot].flags, KVD_ENTRY_OWN | KVD_ENTRY_COMPACT);
                ck_assert_uint_eq(t.slots[slot].n_tokens, MIN(BT, n - i));
                block_floats(space, t.slots[slot].ref, have);
                for (uint32_t k = 0; k < MIN(BT, n - i); k++)
                        token_floats(first_token + i + k, k, want);
                ck_assert_mem_eq(have, want, sizeof want);
        }
}

static void expect_dropped(uint32_t from, uint32_t to) {
        for (uint32_t i = from; i < to; i++)
                ck_assert_uint_eq(t.slots[i].flags, KVD_ENTRY_OWN | KVD_ENTRY_DROPPED);
}

static void expect_whole(void) {
        check_clean(space);
        table_check(&t);
        for (uint32_t i = 0; i < t.n; i++)
                ck_assert_uint_eq(t.slots[i].flags, KVD_ENTRY_OWN);
}

static bool pending(void) {
        struct sequence_report report;

        sequence_report(a, t.number, &report);
        return report.pending;
}

/* ---- taken ----------------------------------------------------------------------------------- */

START_TEST(a_range_becomes_fewer_blocks) {
        append(6 * BT);
        work();
        table_sync(&t, NULL);
        ck_assert(!pending());
        ck_assert_int_eq(compact(1, 4, 6), 4);
        ck_assert(pending());
        check_clean(space);
        ck_assert_uint_eq(usage_of(space).filling, 2); /* the new blocks are allocated at once */
        ck_assert_uint_eq(work(), 2); /* the second job summarises the new blocks */
        check_clean(space);
        table_check(&t);
        ck_assert(pending());
        ck_assert_uint_eq(table_sync(&t, NULL), 4);
        ck_assert(!pending());
        expect_packed(1, 10 + 5 * BT - 6, 6);
        expect_dropped(3, 5);
        idle();
        check_clean(space);
        table_check(&t);
        ck_assert_uint_eq(usage_of(space).private, 4);
        ck_assert_uint_eq(counter(space, KVD_SPACE_COMPACTED), 2);
        append(5); /* positions in the sequence are unchanged */
        ck_assert_uint_eq(t.slots[6].position, 6 * BT);
        table_check(&t);
        table_close(&t);
}
END_TEST

/* Compacts packed blocks, of which one is not full, and blocks after a partly filled one. */
START_TEST(what_is_packed_is_packed_again) {
        append(2 * BT + 1);
        append(3 * BT);
        ck_assert_int_eq(compact(0, 3, BT + 2), 3);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 3);
        expect_packed(0, 10 + BT - 1, BT + 2);
        ck_assert_int_eq(compact(0, 6, 2 * BT + 3), 5);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 5);
        expect_packed(0, 20, 2 * BT); /* the last 11 of 10 to 30 */
        expect_packed(3, 20 + 2 * BT, 3);
        expect_dropped(2, 3); /* by the first compaction */
        expect_dropped(4, 6);
        idle();
        check_clean(space);
        table_close(&t);
}
END_TEST

START_TEST(parts_of_blocks_are_brought_together) {
        for (uint32_t i = 0; i < 4; i++)
                append(1);
        ck_assert_int_eq(compact(0, 4, 100), 4);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 4);
        ck_assert_uint_eq(t.slots[0].n_tokens, 4);
        expect_packed(0, 10, 4);
        ck_assert_int_eq(compact(0, 4, 100), 0); /* once is enough */
        ck_assert_int_eq(compact(0, 4, 3), 1);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 1);
        expect_packed(0, 11, 3);
        table_close(&t);
}
END_TEST

/* ---- not taken, not possible, lost ----------------------------------------------------------- */

START_TEST(what_is_not_taken_leaves_nothing) {
        append(6 * BT);
        ck_assert_int_eq(compact(0, 6, BT), 6);
        work();
        ck_assert_uint_eq(table_sync(&t, takes_nothing), 0);
        idle();
        expect_whole();
        ck_assert_uint_eq(usage_of(space).private, 6);
        ck_assert_int_eq(compact(0, 6, BT), 6);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 6);
        expect_packed(0, 10 + 5 * BT, BT);
        table_close(&t);
}
END_TEST

START_TEST(a_full_pool_refuses_it_and_loses_nothing) {
        struct table other;

        append(32 * BT);
        table_open(&other, a, 64, true);
        while (table_append(&other, BT, 1) == 0)
                ;
        work();
        ck_assert_int_eq(compact(0, 20, 4 * BT), -ENOBUFS);
        ck_assert_ptr_nonnull(strstr(store_why(store), "no room for the packed blocks"));
        ck_assert(!pending());
        expect_whole();
        ck_assert_uint_eq(work(), 0);
        table_close(&other);
        idle();
        ck_assert_int_eq(compact(0, 20, 4 * BT), 20);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 20);
        expect_packed(0, 10 + 16 * BT, 4 * BT);
        table_close(&t);
}
END_TEST

START_TEST(what_makes_no_sense_is_refused) {
        append(4 * BT);
        ck_assert_int_eq(compact(0, 0, 1), -EINVAL);
        ck_assert_int_eq(compact(5, 1, 1), -EINVAL);
        ck_assert_int_eq(compact(1, UINT32_MAX, 1), -EINVAL);
        ck_assert_int_eq(compact(0, 4, 0), -EINVAL);
        ck_assert_int_eq(compact(0, 4, 4 * BT), 0);
        ck_assert_int_eq(compact(0, 4, UINT32_MAX), 0);
        ck_assert_int_eq(compact(0, 2, BT), 2);
        ck_assert_int_eq(compact(2, 2, BT), -EBUSY);
        work();
        ck_assert_int_eq(compact(2, 2, BT), 2); /* the first one may wait for its client */
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 4);
        set(space, "keydiff", "off");
        ck_assert_int_eq(compact(0, 4, 1), -EOPNOTSUPP);
        ck_assert_ptr_nonnull(strstr(store_why(store), "keydiff is off"));
        table_close(&t);
}
END_TEST

START_TEST(who_is_busy_or_gone_is_left_alone) {
        const uint32_t gone[] = {1, 2}, leaving[] = {4};

        append(8 * BT);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, gone, 2), 2);
        work();
        table_sync(&t, NULL);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, leaving, 1), 1);
        ck_assert_int_eq(compact(0, 8, BT), 5);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, (uint32_t[]){0, 7}, 2), 0);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 6);
        ck_assert_uint_eq(t.slots[1].flags, KVD_ENTRY_OWN | KVD_ENTRY_SPILLED);
        ck_assert_uint_eq(t.slots[4].flags, KVD_ENTRY_OWN | KVD_ENTRY_SPILLED);
        expect_packed(0, 10 + 7 * BT, BT);
        expect_dropped(5, 8);
        check_clean(space);
        table_close(&t);
}
END_TEST

static void lose(uint32_t times) {
        for (uint32_t i = 0; i < times; i++) {
                while (worker_take() && worker_job->kind != KVD_JOB_COMPACT)
                        worker_do();
                check_clean(space);
                worker_die();
                idle();
                check_clean(space);
                table_check(&t);
        }
}

START_TEST(a_worker_that_is_lost_is_made_up_for_once) {
        append(8 * BT);
        work();
        ck_assert_int_eq(compact(0, 8, 3 * BT - 1), 8);
        lose(1);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 8);
        expect_packed(0, 10 + 5 * BT + 1, 3 * BT - 1);
        append(8 * BT);
        work();
        ck_assert_int_eq(compact(8, 8, 2 * BT), 8);
        lose(2);
        ck_assert_uint_eq(work(), 0);
        ck_assert(!pending());
        ck_assert_uint_eq(usage_of(space).private, 3 + 8);
        for (uint32_t i = 8; i < 16; i++)
                ck_assert_uint_eq(t.slots[i].flags, KVD_ENTRY_OWN);
        table_close(&t);
}
END_TEST

START_TEST(a_worker_that_cannot_leaves_it_as_it_was) {
        const uint32_t errors[2] = {EIO, 0};

        append(8 * BT);
        work();
        for (uint32_t i = 0; i < 3; i++) {
                ck_assert_int_eq(compact(0, 8, 2 * BT), 8);
                ck_assert(worker_take());
                if (i == 0)
                        worker_fail(EOPNOTSUPP);
                else
                        worker_answer(errors, i * sizeof *errors); /* EIO, then a wrong length */
                ck_assert(!pending());
                idle();
                expect_whole();
        }
        table_close(&t);
}
END_TEST

/*
 * The compaction at the end of the sequence, by _i: 0 waits, 1 is with the worker, 2 is with a
 * worker that is lost later, 3 is offered, 4 was told to the client.
 */
START_TEST(a_sequence_that_ends_meanwhile_leaves_nothing) {
        struct kvd_change changes[KVD_SYNC_CHANGES];

        append(8 * BT);
        work();
        ck_assert_int_eq(compact(0, 8, 2 * BT), 8);
        if (_i == 1 || _i == 2)
                ck_assert(worker_take());
        if (_i > 2)
                work();
        if (_i == 4)
                ck_assert_uint_eq(table_peek(&t, changes), 8);
        table_close(&t);
        check_clean(space);
        idle();
        check_clean(space);
        if (_i == 1)
                worker_do();
        if (_i == 2)
                worker_die();
        idle();
        work();
        ck_assert_uint_eq(usage_of(space).private, 0);
        ck_assert_uint_eq(usage_of(space).filling, 0);
}
END_TEST

/* ---- and the others -------------------------------------------------------------------------- */

START_TEST(a_packed_block_is_copied_and_comes_back_exactly) {
        static const uint32_t slots[] = {0, 1};
        uint32_t exact, approx;

        append(8 * BT);
        ck_assert_int_eq(compact(0, 8, 2 * BT - 1), 8);
        work();
        table_sync(&t, NULL);
        /* a packed block is never put into a sketch */
        for (uint32_t how = KVD_COOL_SPILL; how <= KVD_COOL_VAGUE; how++) {
                ck_assert_int_eq(sequence_cool(a, t.number, how, slots, 2), 2);
                work();
                ck_assert_uint_eq(table_sync(&t, NULL), 2);
                ck_assert_uint_eq(t.slots[1].flags,
                                  KVD_ENTRY_OWN | KVD_ENTRY_COMPACT | KVD_ENTRY_SPILLED);
                check_clean(space);
                ck_assert_int_eq(sequence_revive(a, t.number, KVD_REVIVE_BOTH, slots, 2, &exact,
                                                 &approx),
                                 0);
                ck_assert_uint_eq(exact, 2);
                ck_assert_uint_eq(approx, 0);
                work();
                ck_assert_uint_eq(table_sync(&t, NULL), 2);
                expect_packed(0, 10 + 6 * BT + 1, 2 * BT - 1);
                idle();
                check_clean(space);
        }
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_DROP, slots, 2), 2);
        ck_assert_uint_eq(table_sync(&t, NULL), 2);
        expect_dropped(0, 8);
        idle();
        check_clean(space);
        table_close(&t);
}
END_TEST

START_TEST(memshare_does_not_compare_packed_blocks) {
        set(space, "memshare", "on");
        set(space, "memshare.min_step_tokens", "1");
        set(space, "memshare.recent_guard", "0");
        ck_assert_int_eq(table_append(&t, 4 * BT, 10), 0);
        ck_assert_int_eq(sequence_share(a, t.number, 0, 4 * BT), 1);
        ck_assert_int_eq(compact(0, 4, 2 * BT), 4);
        work();
        table_sync(&t, NULL);
        ck_assert_int_eq(table_append(&t, 4 * BT, 10), 0);
        ck_assert_int_eq(sequence_share(a, t.number, 4 * BT, 4 * BT), 1);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 0);
        check_clean(space);
        table_close(&t);
}
END_TEST

/* An answer has room for 1024 changes. Changes that belong together are not split. */
START_TEST(changes_of_one_compaction_come_in_one_answer) {
        struct kvd_change changes[KVD_SYNC_CHANGES];
        uint32_t slots[1000], taken[1000];

        teardown();
        fixture_open(1600, 1);
        space = fixture_space("s", 1600);
        a = fixture_attach(space);
        set(space, "keydiff", "on");
        set(space, "pressure", "off");
        table_open(&t, a, 1400, false);
        append(1100 * BT);
        for (uint32_t i = 0; i < 1000; i++) {
                slots[i] = i;
                taken[i] = 1;
        }
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_DROP, slots, 1000), 1000);
        ck_assert_int_eq(compact(1000, 100, 50 * BT), 100);
        work();
        ck_assert_uint_eq(table_peek(&t, changes), 1000);
        ck_assert_int_eq(sequence_sync(a, t.number, taken, 1000, changes), 100);
        for (uint32_t i = 0; i < 100; i++) {
                ck_assert_uint_eq(changes[i].kind, KVD_CHANGE_COMPACT);
                ck_assert_int_eq(changes[i].delta, 99 - (int)i);
                ck_assert_int_eq(changes[i].ref != 0, i < 50);
        }
        ck_assert_int_eq(compact(0, 1025, 1), -E2BIG);
        ck_assert_int_eq(sequence_close(a, t.number), 0);
}
END_TEST

SUITE("compact", FIXTURE(setup, teardown),
      TESTS(a_range_becomes_fewer_blocks, what_is_packed_is_packed_again,
            parts_of_blocks_are_brought_together, what_is_not_taken_leaves_nothing,
            a_full_pool_refuses_it_and_loses_nothing, what_makes_no_sense_is_refused,
            who_is_busy_or_gone_is_left_alone, a_worker_that_is_lost_is_made_up_for_once,
            a_worker_that_cannot_leaves_it_as_it_was),
      LOOPS(5, a_sequence_that_ends_meanwhile_leaves_nothing),
      TESTS(a_packed_block_is_copied_and_comes_back_exactly,
            memshare_does_not_compare_packed_blocks, changes_of_one_compaction_come_in_one_answer))
