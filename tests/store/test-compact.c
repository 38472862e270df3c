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
 * The compaction at the end of the sequence, by stage: 0 waits, 1 is with the worker, 2 is with a
 * worker that is lost later, 3 is offered, 4 was told to the client.
 */
static void end_in_the_middle(uint32_t stage) {
        struct kvd_change changes[KVD_SYNC_CHANGES];

        if (stage == 1 || stage == 2)
                ck_assert(worker_take());
        if (stage > 2)
                work();
        if (stage == 4)
                ck_assert_uint_eq(table_peek(&t, changes), 8);
        table_close(&t);
        check_clean(space);
        idle();
        check_clean(space);
        if (stage == 1)
                worker_do();
        if (stage == 2)
                worker_die();
        idle();
        work();
        ck_assert_uint_eq(usage_of(space).private, 0);
}

START_TEST(a_sequence_that_ends_meanwhile_leaves_nothing) {
        append(8 * BT);
        work();
        ck_assert_int_eq(compact(0, 8, 2 * BT), 8);
        end_in_the_middle((uint32_t)_i);
        ck_assert_uint_eq(usage_of(space).filling, 0);
}
END_TEST

START_TEST(a_sequence_that_ends_meanwhile_leaves_the_client_its_scores) {
        kvd_ref score;

        ck_assert_int_eq(space_allocate(a, 1, &score), 1);
        append(8 * BT);
        work();
        ck_assert_int_eq(sequence_compact(a, t.number,
                                          &(struct compact_request){.n = 8,
                                                                    .keep = 2 * BT,
                                                                    .scores = &score,
                                                                    .n_scores = 1}),
                         8);
        end_in_the_middle((uint32_t)_i);
        ck_assert_uint_eq(usage_of(space).filling, 1);
        ck_assert_uint_eq(space_release(a, &score, 1), 1);
        ck_assert_uint_eq(usage_of(space).filling, 0);
}
END_TEST

/* ---- by the client's scores ------------------------------------------------------------------ */

/* A block that this client is filling: it holds the scores of 64 tokens. */
static kvd_ref score_block(struct attachment *of) {
        kvd_ref ref = 0;

        ck_assert_int_eq(space_allocate(of, 1, &ref), 1);
        return ref;
}

static int compact_by(uint32_t first, uint32_t n, uint32_t keep, const kvd_ref *scores,
                      uint32_t n_scores) {
        const struct compact_request req = {.first = first,
                                            .n = n,
                                            .keep = keep,
                                            .scores = scores,
                                            .n_scores = n_scores};

        return sequence_compact(a, t.number, &req);
}

static void refused(int r, int error, const char *why) {
        ck_assert_int_eq(r, error);
        ck_assert_msg(strstr(store_why(store), why), "%s", store_why(store));
        ck_assert(!pending());
        check_clean(space);
}

/* Takes the job of a compaction of n entries, and looks at its items. */
static void expect_job(uint32_t n, uint32_t n_to, kvd_ref score) {
        const struct kvd_job_item *items = (const struct kvd_job_item *)(worker_job + 1);

        while (worker_take() && worker_job->kind != KVD_JOB_COMPACT)
                worker_do();
        ck_assert_uint_eq(worker_job->n_items, n + n_to + 1);
        ck_assert_uint_eq(worker_job->param[0], n);
        ck_assert_uint_eq(worker_job->param[1], n_to);
        ck_assert_uint_eq(worker_job->param[3], 1);
        ck_assert_uint_eq(items[n + n_to].ref, score);
        ck_assert_uint_eq(items[n + n_to].flags, KVD_JOB_SCORES);
}

/* The rest of the sequence is not read, since there is no anchor. */
START_TEST(a_worker_gets_the_scores_after_the_blocks) {
        kvd_ref score = score_block(a);

        set(space, "keydiff", "off");
        append(8 * BT);
        ck_assert_int_eq(compact_by(2, 4, BT + 1, &score, 1), 4);
        expect_job(4, 2, score);
        worker_do();
        ck_assert_uint_eq(table_sync(&t, NULL), 4);
        expect_packed(2, 10 + 5 * BT - 1, BT + 1);
        ck_assert_uint_eq(space_release(a, &score, 1), 1);
        ck_assert_int_eq(compact(2, 4, BT), -EOPNOTSUPP); /* by KeyDiff, which is off */
        work();
        idle();
        check_clean(space);
        ck_assert_uint_eq(usage_of(space).filling, 0);
        table_close(&t);
}
END_TEST

START_TEST(an_entry_without_scores_of_its_own_is_named) {
        const uint32_t gone[] = {2}, leaving[] = {3};
        kvd_ref score = score_block(a);

        append(8 * BT);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, gone, 1), 1);
        work();
        table_sync(&t, NULL);
        refused(compact_by(1, 2, BT, &score, 1), -EINVAL, "entry 2 is not resident");
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, leaving, 1), 1);
        ck_assert_int_eq(compact_by(3, 3, BT, &score, 1), -EBUSY);
        ck_assert_ptr_nonnull(strstr(store_why(store), "entry 3 is busy"));
        work();
        table_sync(&t, NULL);
        ck_assert_int_eq(compact(4, 2, BT), 2);
        work();
        ck_assert_int_eq(compact_by(4, 4, BT, &score, 1), -EBUSY); /* offered, not taken yet */
        ck_assert_ptr_nonnull(strstr(store_why(store), "entry 4 is busy"));
        table_sync(&t, NULL);
        ck_assert_int_eq(compact_by(4, 4, BT, &score, 1), 3); /* entry 5 was dropped: no column */
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 3);
        space_release(a, &score, 1);
        table_close(&t);
}
END_TEST

START_TEST(borrowed_shared_and_approximate_entries_have_no_scores) {
        static const char *const why[] = {"borrowed or shared", "borrowed or shared",
                                          "approximate"};
        static const uint32_t flags[] = {KVD_ENTRY_BORROWED, KVD_ENTRY_OWN | KVD_ENTRY_SHARED,
                                         KVD_ENTRY_OWN | KVD_ENTRY_APPROX};
        kvd_ref score = score_block(a);

        append(4 * BT);
        for (uint32_t i = 0; i < ARRAY_SIZE(flags); i++) {
                struct entry *e = &sequence_find(a, t.number)->entries[1];

                e->flags = (uint16_t)flags[i];
                ck_assert_int_eq(compact_by(0, 4, BT, &score, 1), -EINVAL);
                e->flags = KVD_ENTRY_OWN;
                ck_assert_msg(strstr(store_why(store), "entry 1 is") &&
                                      strstr(store_why(store), why[i]),
                              "%s", store_why(store));
                check_clean(space);
        }
        space_release(a, &score, 1);
        table_close(&t);
}
END_TEST

START_TEST(blocks_that_cannot_hold_the_scores_are_refused) {
        static kvd_ref many[KVD_JOB_ITEMS];
        struct attachment *b = fixture_attach(space);
        kvd_ref score = score_block(a), foreign = score_block(b), twice[] = {score, score};

        append(17 * BT); /* 16 x BT tokens in 2 layers fill a block */
        work();
        refused(compact_by(0, 17, BT, &score, 1), -EINVAL, "the scores do not fit");
        refused(compact_by(0, 16, BT, &foreign, 1), -ESTALE, "is filling");
        refused(compact_by(0, 16, BT, twice, 2), -ESTALE, "is filling");
        refused(compact_by(0, 16, BT, &t.slots[0].ref, 1), -ESTALE, "is filling");
        refused(compact_by(0, 16, BT, many, KVD_JOB_ITEMS - 16), -E2BIG, "more than 3840");
        refused(compact_by(0, 16, BT, many, KVD_JOB_ITEMS - 17), -ESTALE, "is filling");
        refused(compact_by(0, 16, 0, &score, 1), -EINVAL, "nothing is kept");
        ck_assert_int_eq(compact_by(0, 16, 16 * BT, &score, 1), 0);
        ck_assert_int_eq(compact_by(0, 16, BT, &score, 1), 16);
        ck_assert_int_eq(compact_by(16, 1, 1, &score, 1), -EBUSY);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 16);
        ck_assert_uint_eq(space_release(a, &score, 1), 1);
        ck_assert_uint_eq(space_release(b, &foreign, 1), 1);
        table_close(&t);
}
END_TEST

START_TEST(scores_that_are_freed_too_early_change_nothing) {
        kvd_ref score = score_block(a);

        append(8 * BT);
        work();
        ck_assert_int_eq(compact_by(0, 8, 2 * BT, &score, 1), 8);
        ck_assert_uint_eq(space_release(a, &score, 1), 1);
        ck_assert_uint_eq(work(), 0);
        ck_assert(!pending());
        expect_whole();
        ck_assert_uint_eq(usage_of(space).filling, 0);
        score = score_block(a);
        ck_assert_int_eq(compact_by(0, 8, 2 * BT, &score, 1), 8);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 8);
        space_release(a, &score, 1);
        table_close(&t);
}
END_TEST

/* Nobody gets the block while the worker reads it. */
START_TEST(scores_that_are_freed_while_they_are_read_are_kept_till_then) {
        kvd_ref score = score_block(a), others[64];
        int n, got = 0;

        append(8 * BT);
        work();
        ck_assert_int_eq(compact_by(0, 8, 2 * BT, &score, 1), 8);
        expect_job(8, 2, score);
        ck_assert_uint_eq(space_release(a, &score, 1), 1);
        check_clean(space);
        while ((n = space_allocate(a, 64 - (uint32_t)got, others + got)) > 0)
                got += n;
        for (int i = 0; i < got; i++)
                ck_assert_uint_ne(kvd_ref_id(others[i]), kvd_ref_id(score));
        worker_do();
        ck_assert_uint_eq(table_sync(&t, NULL), 8);
        expect_packed(0, 10 + 6 * BT, 2 * BT);
        ck_assert_int_eq(space_allocate(a, 1, others + got), 1);
        space_release(a, others, (uint32_t)got + 1);
        idle();
        check_clean(space);
        table_close(&t);
}
END_TEST

static kvd_ref sealed(kvd_ref score) {
        static const uint32_t tokens[BT] = {900, 901, 902, 903};
        const struct seal_request seal = {.n_blocks = 1,
                                          .blocks = &score,
                                          .n_tokens = BT,
                                          .tokens = tokens};
        kvd_ref ret;

        ck_assert_msg(space_seal(a, &seal, &ret) == 0, "%s", store_why(store));
        ck_assert_uint_eq(ret, score);
        return ret;
}

/*
 * The client publishes the block of its scores, by _i: 0 before the job, 1 while a worker has it, 2
 * while a worker has it that is lost later.
 */
START_TEST(scores_that_are_sealed_meanwhile_harm_nobody) {
        kvd_ref score = score_block(a);

        append(8 * BT);
        work();
        ck_assert_int_eq(compact_by(0, 8, 2 * BT, &score, 1), 8);
        if (_i > 0)
                expect_job(8, 2, score);
        sealed(score);
        check_clean(space);
        if (_i == 1)
                worker_do();
        if (_i == 2)
                lose(1);
        work();
        ck_assert(pending() == (_i == 1));
        ck_assert_uint_eq(table_sync(&t, NULL), _i == 1 ? 8 : 0);
        if (_i == 1)
                expect_packed(0, 10 + 6 * BT, 2 * BT);
        else
                expect_whole();
        idle();
        check_clean(space);
        ck_assert_uint_eq(usage_of(space).filling, 0);
        table_close(&t);
}
END_TEST

START_TEST(a_lost_worker_is_made_up_for_while_the_scores_are_there) {
        kvd_ref score = score_block(a);

        append(8 * BT);
        work();
        ck_assert_int_eq(compact_by(0, 8, 2 * BT, &score, 1), 8);
        lose(1);
        expect_job(8, 2, score);
        worker_do();
        ck_assert_uint_eq(table_sync(&t, NULL), 8);
        expect_packed(0, 10 + 6 * BT, 2 * BT);
        append(8 * BT);
        work();
        ck_assert_int_eq(compact_by(8, 8, 2 * BT, &score, 1), 8);
        lose(1);
        ck_assert_uint_eq(space_release(a, &score, 1), 1);
        ck_assert_uint_eq(work(), 0);
        ck_assert(!pending());
        idle();
        check_clean(space);
        table_check(&t);
        for (uint32_t i = 8; i < 16; i++)
                ck_assert_uint_eq(t.slots[i].flags, KVD_ENTRY_OWN);
        ck_assert_uint_eq(usage_of(space).filling, 0);
        table_close(&t);
}
END_TEST

START_TEST(the_next_compaction_has_no_scores_of_the_last) {
        kvd_ref score = score_block(a);

        append(8 * BT);
        work();
        ck_assert_int_eq(compact_by(0, 4, BT, &score, 1), 4);
        expect_job(4, 1, score);
        worker_fail(EIO);
        ck_assert(!pending());
        expect_whole();
        ck_assert_int_eq(compact(0, 4, BT), 4);
        ck_assert(worker_take());
        ck_assert_uint_eq(worker_job->param[3], 0);
        worker_do();
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 4);
        space_release(a, &score, 1);
        table_close(&t);
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
      LOOPS(5, a_sequence_that_ends_meanwhile_leaves_nothing,
            a_sequence_that_ends_meanwhile_leaves_the_client_its_scores),
      LOOPS(3, scores_that_are_sealed_meanwhile_harm_nobody),
      TESTS(a_worker_gets_the_scores_after_the_blocks, an_entry_without_scores_of_its_own_is_named,
            borrowed_shared_and_approximate_entries_have_no_scores,
            blocks_that_cannot_hold_the_scores_are_refused,
            scores_that_are_freed_too_early_change_nothing,
            scores_that_are_freed_while_they_are_read_are_kept_till_then,
            a_lost_worker_is_made_up_for_while_the_scores_are_there,
            the_next_compaction_has_no_scores_of_the_last,
            a_packed_block_is_copied_and_comes_back_exactly,
            memshare_does_not_compare_packed_blocks, changes_of_one_compaction_come_in_one_answer))
