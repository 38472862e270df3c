/* SPDX-License-Identifier: Apache-2.0 */

/* Sequences and private blocks: their life, refusals, and lost jobs. */

#include <errno.h>
#include <stdio.h>
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
}

static void teardown(void) {
        check_clean(space);
        fixture_close();
}

/* ---- life ------------------------------------------------------------------------------------ */

START_TEST(private_blocks_live_and_die_with_their_sequence) {
        table_open(&t, a, 32, true);
        ck_assert_int_eq(table_append(&t, 3 * BT + 1, 10), 0);
        ck_assert_int_eq(table_append(&t, 2 * BT, 100), 0);
        check_clean(space);
        table_check(&t);
        ck_assert_uint_eq(usage_of(space).private, 6);
        ck_assert_uint_eq(usage_of(space).leaves, 0);
        ck_assert_uint_eq(t.slots[4].position, 3 * BT + 1);
        ck_assert_uint_eq(counter(space, KVD_SPACE_APPENDED), 6);
        table_close(&t);
        check_clean(space);
        idle();
        ck_assert_uint_eq(usage_of(space).private, 0);
        ck_assert_uint_eq(usage_of(space).sealed, 0);
}
END_TEST

START_TEST(a_pin_outlives_the_sequence) {
        struct kvd_pin_words *words;
        kvd_ref ref;

        table_open(&t, a, 32, true);
        ck_assert_int_eq(table_append(&t, 2 * BT, 10), 0);
        words = t.words;
        ref = t.slots[0].ref;
        atomic_fetch_add(&words[kvd_ref_id(ref)].pins, 1);
        ck_assert_int_eq(sequence_close(a, t.number), 0);
        atomic_store(&words[kvd_ref_id(t.slots[1].ref)].pins, 0);
        idle();
        check_clean(space);
        ck_assert_uint_eq(usage_of(space).private, 1);
        ck_assert(block_current(space, ref));
        atomic_store(&words[kvd_ref_id(ref)].pins, 0);
        idle();
        ck_assert_uint_eq(usage_of(space).private, 0);
}
END_TEST

START_TEST(nobody_evicts_what_a_sequence_names) {
        kvd_ref refs[64];
        int got = 0, n;

        table_open(&t, a, 64, false);
        ck_assert_int_eq(table_append(&t, 20 * BT, 10), 0);
        while ((n = space_allocate(a, 64, refs + got)) > 0 && got < 44)
                got += n;
        ck_assert_int_eq(got, 44);
        ck_assert_int_eq(space_allocate(a, 1, refs), -ENOBUFS);
        space_evict(space, 0, KVD_ROOT, &(bool){false});
        table_check(&t);
        table_close(&t);
        /* closing frees the blocks only in idle work */
        ck_assert_int_eq(space_allocate(a, 1, refs), -ENOBUFS);
        idle();
        ck_assert_int_ge(space_allocate(a, 4, refs), 1);
}
END_TEST

START_TEST(a_client_that_is_lost_leaves_nothing) {
        table_open(&t, a, 32, true);
        ck_assert_int_eq(table_append(&t, 9 * BT, 10), 0);
        attachment_orphan(a);
        idle();
        check_clean(space);
        ck_assert_uint_eq(usage_of(space).sequences, 0);
        ck_assert_uint_eq(usage_of(space).private, 9); /* its process may still read them */
        table_forget(&t);
        attachment_free(a, true);
        idle();
        ck_assert_uint_eq(usage_of(space).private, 0);
}
END_TEST

/* ---- refusals -------------------------------------------------------------------------------- */

START_TEST(nonsense_is_refused_and_changes_nothing) {
        struct attachment *b = fixture_attach(space);
        uint32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8}, first, number;
        kvd_ref own[2], foreign;
        struct append_request q = {.own = true,
                                   .n_blocks = 2,
                                   .blocks = own,
                                   .n_tokens = 8,
                                   .tokens = tokens};
        struct kvd_change changes[KVD_SYNC_CHANGES];

        ck_assert_int_eq(sequence_open(a, 0, &number), -EINVAL);
        ck_assert_int_eq(sequence_open(a, UINT32_MAX, &number), -EDQUOT);
        table_open(&t, a, 3, false);
        ck_assert_int_eq(space_allocate(a, 2, own), 2);
        ck_assert_int_eq(space_allocate(b, 1, &foreign), 1);
        ck_assert_int_eq(sequence_append(b, t.number, &q, &first), -ENOENT);
        ck_assert_int_eq(sequence_append(a, t.number + 1, &q, &first), -ENOENT);
        ck_assert_int_eq(sequence_close(b, t.number), -ENOENT);
        q.n_tokens = 4;
        ck_assert_int_eq(sequence_append(a, t.number, &q, &first), -EINVAL);
        q.n_tokens = 9;
        ck_assert_int_eq(sequence_append(a, t.number, &q, &first), -EINVAL);
        q.n_tokens = 8;
        tokens[7] = 100000;
        ck_assert_int_eq(sequence_append(a, t.number, &q, &first), -EINVAL);
        tokens[7] = 8;
        q.blocks = (kvd_ref[]){own[0], own[0]};
        ck_assert_int_eq(sequence_append(a, t.number, &q, &first), -ESTALE);
        q.blocks = (kvd_ref[]){own[0], foreign};
        ck_assert_int_eq(sequence_append(a, t.number, &q, &first), -ESTALE);
        q.blocks = own;
        ck_assert_int_eq(sequence_append(a, t.number, &q, &first), 0);
        ck_assert_int_eq(sequence_append(a, t.number, &q, &first), -ENOSPC);
        ck_assert_int_eq(sequence_cool(a, t.number, 4, tokens, 1), -EINVAL);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_DROP, (uint32_t[]){2}, 1), -EINVAL);
        ck_assert_int_eq(sequence_share(a, t.number, 5, 4), -EINVAL);
        ck_assert_int_eq(sequence_sync(a, t.number, tokens, 1, changes), -EINVAL);
        ck_assert_int_eq(sequence_share(a, t.number, 0, 8), 0); /* memshare is off */
        /* kvreviver is off */
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, (uint32_t[]){0}, 1), 0);
        ck_assert_uint_eq(store_jobs_waiting(store), 0);
}
END_TEST

START_TEST(sequences_of_a_space_are_counted) {
        uint32_t number;

        for (uint32_t i = 0; i < KVD_MAX_SEQUENCES - KVD_MAX_SEQUENCES / 16; i++)
                ck_assert_int_eq(sequence_open(a, 1, &number), 0);
        ck_assert_int_eq(sequence_open(a, 1, &number), -EUSERS);
        ck_assert_int_eq(sequence_close(a, number), 0);
        ck_assert_int_eq(sequence_close(a, number), -ENOENT);
        ck_assert_int_eq(sequence_open(a, 1, &number), 0);
}
END_TEST

/* ---- borrowing ------------------------------------------------------------------------------- */

static void seal_chain(uint32_t n, uint32_t token, kvd_ref *ret, uint32_t *tokens) {
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

START_TEST(a_prefix_is_borrowed_as_it_is_or_not_at_all) {
        uint32_t tokens[4 * BT], first;
        kvd_ref chain[4], swapped[2];
        struct append_request q = {.n_blocks = 4,
                                   .blocks = chain,
                                   .n_tokens = 4 * BT,
                                   .tokens = tokens};

        seal_chain(4, 7, chain, tokens);
        table_open(&t, a, 8, false);
        tokens[5]++;
        ck_assert_int_eq(sequence_append(a, t.number, &q, &first), -EINVAL);
        tokens[5]--;
        swapped[0] = chain[1];
        ck_assert_int_eq(sequence_append(a, t.number,
                                         &(struct append_request){.n_blocks = 1,
                                                                  .blocks = swapped,
                                                                  .n_tokens = BT,
                                                                  .tokens = tokens + BT},
                                         &first),
                         -EINVAL);
        q.n_tokens--;
        ck_assert_int_eq(sequence_append(a, t.number, &q, &first), -EINVAL);
        q.n_tokens++;
        swapped[0] = chain[0] + (UINT64_C(1) << 32);
        ck_assert_int_eq(sequence_append(a, t.number,
                                         &(struct append_request){.n_blocks = 1,
                                                                  .blocks = swapped,
                                                                  .n_tokens = BT,
                                                                  .tokens = tokens},
                                         &first),
                         -ESTALE);
        ck_assert_int_eq(sequence_append(a, t.number, &q, &first), 0);
        check_clean(space);
        /* only a pin would keep them */
        ck_assert_int_eq(space_evict(space, 0, KVD_ROOT, &(bool){false}), 4);
        check_clean(space);
        ck_assert_int_eq(sequence_close(a, t.number), 0);
        idle();
}
END_TEST

START_TEST(a_private_block_is_not_borrowed) {
        uint32_t first;

        table_open(&t, a, 8, false);
        ck_assert_int_eq(table_append(&t, BT, 1), 0);
        ck_assert_int_eq(sequence_append(a, t.number,
                                         &(struct append_request){.n_blocks = 1,
                                                                  .blocks = &t.slots[0].ref,
                                                                  .n_tokens = BT,
                                                                  .tokens = t.tokens},
                                         &first),
                         -ESTALE);
}
END_TEST

/* ---- jobs ------------------------------------------------------------------------------------ */

static int n_asked;

static void asked(void *data) {
        n_asked++;
}

START_TEST(summaries_are_made_only_for_who_reads_them) {
        table_open(&t, a, 32, false);
        store_on_job(store, asked, NULL);
        ck_assert_int_eq(table_append(&t, 3 * BT, 1), 0);
        ck_assert_uint_eq(store_jobs_waiting(store), 0);
        set(space, "keydiff", "on");
        idle();
        ck_assert_int_eq(n_asked, 1); /* for the blocks from before */
        ck_assert_int_eq(table_append(&t, 2 * BT, 50), 0);
        ck_assert_int_eq(n_asked, 1);
        ck_assert(worker_take());
        ck_assert_uint_eq(worker_job->kind, KVD_JOB_SUMMARISE);
        ck_assert_uint_eq(worker_job->n_items, 5);
        ck_assert(!worker_take());
        check_clean(space);
        worker_die();
        ck_assert_uint_eq(work(), 1);
        ck_assert_uint_eq(counter(space, KVD_SPACE_SUMMARISED), 5);
        ck_assert_uint_eq(counter(space, KVD_SPACE_JOBS_LOST), 1);
}
END_TEST

static bool pending(const struct table *of) {
        struct sequence_report report;

        sequence_report(a, of->number, &report);
        return report.pending;
}

/* A sequence is not pending once its own summaries are made, although the worker is still busy. */
START_TEST(only_who_has_blocks_without_a_summary_waits_for_one) {
        static struct table other;

        table_open(&t, a, 32, false);
        table_open(&other, a, 32, false);
        set(space, "keydiff", "on");
        ck_assert_int_eq(table_append(&t, 5 * BT, 1), 0);
        ck_assert(pending(&t));
        idle();
        ck_assert_uint_gt(work(), 0);
        ck_assert(!pending(&t));
        ck_assert_int_eq(table_append(&other, 2 * BT, 50), 0);
        ck_assert(worker_take());
        ck_assert_uint_eq(worker_job->kind, KVD_JOB_SUMMARISE);
        for (uint32_t i = 0; i < 3; i++) {
                ck_assert(!pending(&t));
                ck_assert(pending(&other));
        }
        worker_do();
        ck_assert(!pending(&other));
}
END_TEST

START_TEST(a_worker_holds_what_it_reads) {
        kvd_ref chain[4], refs[64];
        uint32_t tokens[4 * BT];
        bool more;

        set(space, "keydiff", "on");
        seal_chain(4, 7, chain, tokens);
        table_open(&t, a, 8, false);
        ck_assert_int_eq(table_append(&t, 2 * BT, 1), 0);
        ck_assert(worker_take());
        table_close(&t);
        idle();
        ck_assert_int_eq(space_evict(space, 0, KVD_ROOT, &more), 0);
        check_clean(space);
        ck_assert_uint_eq(usage_of(space).private, 2);
        worker_answer("nonsense", 8);
        idle();
        check_clean(space);
        ck_assert_uint_eq(usage_of(space).private, 0);
        ck_assert_uint_eq(counter(space, KVD_SPACE_SUMMARISED), 0);
        ck_assert_int_eq(space_evict(space, 0, KVD_ROOT, &more), 4);
        ck_assert_int_gt(space_allocate(a, 1, refs), 0);
}
END_TEST

START_TEST(answers_to_nothing_are_ignored) {
        store_job_done(store, 0, 0, NULL, 0);
        store_job_done(store, 77, 0, NULL, 0);
        store_job_lost(store, 77);
        set(space, "hshare", "on");
        table_open(&t, a, 8, false);
        ck_assert_int_eq(table_append(&t, BT, 1), 0);
        ck_assert(worker_take());
        store_job_done(store, worker_job->id + 1, 0, NULL, 0);
        worker_do();
        store_job_done(store, worker_job->id, 0, NULL, 0);
        store_job_lost(store, worker_job->id);
        ck_assert_uint_eq(counter(space, KVD_SPACE_SUMMARISED), 1);
}
END_TEST

START_TEST(a_space_may_go_while_a_worker_reads_it) {
        struct space *other = fixture_space("other", 16);
        struct attachment *b = fixture_attach(other);
        struct table u;

        set(other, "memshare", "on");
        table_open(&u, b, 8, false);
        ck_assert_int_eq(table_append(&u, 3 * BT, 1), 0);
        ck_assert(worker_take());
        ck_assert_int_eq(space_delete(other, true), 0);
        idle();
        worker_answer(NULL, 0);
        ck_assert(!worker_take());
}
END_TEST

/* ---- turns between domains ------------------------------------------------------------------- */

#define GREEDY 4u

static struct domain *other_domain(const char *name, uint64_t guarantee) {
        struct domain_config config = {.guarantee = guarantee, .client_quota = UINT64_MAX};
        struct domain *other;

        snprintf(config.name, sizeof config.name, "%s", name);
        ck_assert_int_eq(store_domain(store, &config, &other), 0);
        return other;
}

static struct space *space_of(struct domain *of, const char *name) {
        struct domain *before = domain;
        struct space *made;

        domain = of;
        made = fixture_space(name, 0);
        domain = before;
        return made;
}

static void ask_critical(struct attachment *of, const struct table *sequence, kvd_ref block) {
        const struct critical_request wanted = {.n_blocks = 1,
                                                .blocks = &block,
                                                .queries = 1,
                                                .words = 8,
                                                .selected = 1};

        ck_assert_msg(sequence_critical(of, sequence->number, &wanted) == 0, "%s",
                      store_why(store));
}

/*
 * One domain asks for configurations, which are urgent, and asks again after each answer. A job of
 * another domain waits for at most one of them.
 */
START_TEST(at_most_one_job_of_another_domain_is_done_first) {
        static struct table greedy[GREEDY];
        struct space *mine = space_of(other_domain("mine", 0), "mine");
        kvd_ref block;
        struct table u;
        uint32_t before, asked = 0; /* asked: in the order of completion */

        ck_assert_int_eq(space_allocate(a, 1, &block), 1);
        for (uint32_t i = 0; i < GREEDY; i++)
                table_open(&greedy[i], a, 8, false);
        table_open(&u, fixture_attach(mine), 64, false);
        set(mine, "keydiff", "on");
        for (uint32_t i = 0; i < GREEDY; i++)
                ask_critical(a, &greedy[i], block);
        for (uint32_t round = 0; round < 5; round++) {
                ck_assert_int_eq(table_append(&u, BT, 1 + round * BT), 0);
                idle();
                for (before = 0; before < 9 && worker_take(); before++) {
                        if (worker_job->kind != KVD_JOB_CONFIG)
                                break;
                        worker_fail(EIO);
                        ask_critical(a, &greedy[asked++ % GREEDY], block);
                }
                ck_assert_uint_le(before, 1);
                ck_assert_uint_eq(worker_job->space, space_number(mine));
                worker_do();
        }
}
END_TEST

/* A job takes very many pieces. A job of another domain waits for at most one of them. */
START_TEST(at_most_one_piece_of_a_long_job_is_done_first) {
        struct space *mine = space_of(other_domain("mine", 0), "mine");
        static struct table long_one, u;
        uint64_t id = 0;
        uint32_t before;
        kvd_ref block;

        ck_assert_int_eq(space_allocate(a, 1, &block), 1);
        table_open(&long_one, a, 8, false);
        table_open(&u, fixture_attach(mine), 64, false);
        set(mine, "keydiff", "on");
        ask_critical(a, &long_one, block);
        for (uint32_t round = 0; round < 5; round++) {
                ck_assert_int_eq(table_append(&u, BT, 1 + round * BT), 0);
                idle();
                for (before = 0; before < 9 && worker_take(); before++) {
                        if (worker_job->kind != KVD_JOB_CONFIG)
                                break;
                        ck_assert_uint_eq(worker_job->turn, round ? KVD_JOB_GO_ON : KVD_JOB_BEGIN);
                        ck_assert(!id || id == worker_job->id);
                        id = worker_job->id;
                        worker_rest();
                        check_clean(space);
                }
                ck_assert_uint_le(before, 1);
                ck_assert_uint_eq(worker_job->space, space_number(mine));
                worker_do();
        }
        ck_assert(worker_take());
        ck_assert_uint_eq(worker_job->id, id);
        worker_fail(EIO);
        ck_assert(!worker_take());
        check_clean(space);
}
END_TEST

static void take_config(void) {
        while (worker_take() && worker_job->kind != KVD_JOB_CONFIG)
                worker_do();
        ck_assert_uint_eq(worker_job->kind, KVD_JOB_CONFIG);
        ck_assert_uint_eq(worker_job->turn, KVD_JOB_BEGIN);
}

/* The worker is killed between two pieces: the job begins again each time. */
START_TEST(a_job_that_rests_when_the_worker_dies_begins_again) {
        struct space *mine = space_of(other_domain("mine", 0), "mine");
        static struct table u;
        kvd_ref block;

        ck_assert_int_eq(space_allocate(a, 1, &block), 1);
        table_open(&t, a, 8, false);
        table_open(&u, fixture_attach(mine), 64, false);
        set(mine, "keydiff", "on");
        ask_critical(a, &t, block);
        for (uint32_t round = 0; round < 5; round++) {
                take_config();
                worker_rest();
                if (round % 2 == 0) { /* the worker has no job */
                        store_job_lost(store, 0);
                        continue;
                }
                ck_assert_int_eq(table_append(&u, BT, 1 + round * BT), 0);
                idle();
                ck_assert(worker_take());
                ck_assert_uint_eq(worker_job->kind, KVD_JOB_SUMMARISE);
                worker_die();
        }
        check_clean(space);
        take_config();
        worker_die();
        take_config();
        worker_die(); /* the second worker that dies with this job */
        work();
        ck_assert_int_eq(sequence_sharing(a, t.number, (uint8_t[2]){0}, (uint8_t[2]){0}), -ENODATA);
}
END_TEST

/* The sequence or space that wanted the job ends. The worker ends the job, and blocks are freed. */
START_TEST(a_job_that_rests_ends_with_who_wanted_it) {
        struct space *other = fixture_space("other", 16);
        struct attachment *b = fixture_attach(other);
        static struct table u;
        kvd_ref block;

        ck_assert_int_eq(space_allocate(a, 1, &block), 1);
        table_open(&t, a, 8, false);
        ask_critical(a, &t, block);
        ck_assert(worker_take());
        worker_rest();
        table_close(&t);
        idle();
        check_clean(space);
        ck_assert(worker_take());
        ck_assert_uint_eq(worker_job->turn, KVD_JOB_END);
        worker_fail(ECANCELED);
        check_clean(space);
        ck_assert_int_eq(space_allocate(b, 1, &block), 1);
        table_open(&u, b, 8, false);
        ask_critical(b, &u, block);
        ck_assert(worker_take());
        worker_rest();
        ck_assert_uint_eq(store_jobs_waiting(store), 1);
        ck_assert_int_eq(space_delete(other, true), 0);
        ck_assert_uint_eq(store_jobs_waiting(store), 0);
        ck_assert(!worker_take());
        idle();
}
END_TEST

/* Of the next n jobs, how many belong to this space? */
static uint32_t jobs_of(const struct space *wanted, uint32_t n) {
        uint32_t found = 0;

        for (uint32_t i = 0; i < n; i++) {
                ck_assert(worker_take());
                found += worker_job->space == space_number(wanted);
                worker_fail(EIO);
        }
        return found;
}

START_TEST(a_guarantee_is_a_larger_part_of_the_worker) {
        static struct table tables[2][GREEDY * 2];
        struct space *spaces[] = {space, space_of(other_domain("half", 32 * BLOCK_BYTES), "half")};
        kvd_ref block;

        for (uint32_t s = 0; s < 2; s++) {
                struct attachment *of = fixture_attach(spaces[s]);

                ck_assert_int_eq(space_allocate(of, 1, &block), 1);
                for (uint32_t i = 0; i < GREEDY * 2; i++) {
                        table_open(&tables[s][i], of, 8, false);
                        ask_critical(of, &tables[s][i], block);
                }
        }
        /* the second domain's weight is nine times the first one's */
        ck_assert_uint_ge(jobs_of(spaces[1], 9), GREEDY * 2 - 1);
        ck_assert_uint_ge(jobs_of(space, 7), GREEDY * 2 - 2);
        ck_assert(!worker_take());
}
END_TEST

SUITE("sequence", FIXTURE(setup, teardown),
      TESTS(private_blocks_live_and_die_with_their_sequence, a_pin_outlives_the_sequence,
            nobody_evicts_what_a_sequence_names, a_client_that_is_lost_leaves_nothing,
            nonsense_is_refused_and_changes_nothing, sequences_of_a_space_are_counted,
            a_prefix_is_borrowed_as_it_is_or_not_at_all, a_private_block_is_not_borrowed,
            summaries_are_made_only_for_who_reads_them,
            only_who_has_blocks_without_a_summary_waits_for_one, a_worker_holds_what_it_reads,
            answers_to_nothing_are_ignored, a_space_may_go_while_a_worker_reads_it,
            at_most_one_job_of_another_domain_is_done_first,
            at_most_one_piece_of_a_long_job_is_done_first,
            a_job_that_rests_when_the_worker_dies_begins_again,
            a_job_that_rests_ends_with_who_wanted_it, a_guarantee_is_a_larger_part_of_the_worker))
