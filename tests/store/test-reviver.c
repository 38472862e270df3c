/* SPDX-License-Identifier: Apache-2.0 */

/* Blocks leave and come back: exactly, approximately, or not at all. */

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ipc/base/sys.h"
#include "store/check/check.h"
#include "tests/lib/oracle.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

static struct space *space;
static struct attachment *a;
static struct table t;

static const uint32_t all[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

static void setup(void) {
        fixture_open(64, 64);
        space = fixture_space("s", 0);
        a = fixture_attach(space);
        set(space, "kvreviver", "on");
        set(space, "pressure", "off");
        set(space, "kvreviver.vague", "0.8"); /* of a quarter of an epoch */
        table_open(&t, a, 32, true);
}

static void teardown(void) {
        idle();
        check_clean(space);
        fixture_close();
}

/* Appends n blocks, has them summarised, and cools them. */
static void cooled(uint32_t n, enum kvd_cool how) {
        ck_assert_int_eq(table_append(&t, n * BT, 10), 0);
        work();
        ck_assert_int_eq(sequence_cool(a, t.number, how, all, n), (int)n);
        ck_assert_uint_eq(work(), 1);
        ck_assert_uint_eq(table_sync(&t, NULL), n);
        idle();
        table_check(&t);
        check_clean(space);
}

static void revive(enum kvd_revive how, uint32_t n, uint32_t want_exact, uint32_t want_approx) {
        uint32_t exact, approx;

        ck_assert_int_eq(sequence_revive(a, t.number, how, all, n, &exact, &approx), 0);
        ck_assert_uint_eq(exact, want_exact);
        ck_assert_uint_eq(approx, want_approx);
}

/* ---- exactly --------------------------------------------------------------------------------- */

START_TEST(what_left_comes_back_byte_by_byte) {
        uint64_t before;

        cooled(6, KVD_COOL_SPILL);
        ck_assert_uint_eq(usage_of(space).private, 0);
        ck_assert_uint_eq(usage_of(space).spilled, 6);
        before = counter(space, KVD_SPACE_SUMMARISED);
        revive(KVD_REVIVE_BOTH, 6, 6, 0);
        check_clean(space);
        ck_assert_uint_eq(work(), 1);
        check_clean(space);
        ck_assert_uint_eq(table_sync(&t, NULL), 6);
        table_check(&t);
        ck_assert_uint_eq(counter(space, KVD_SPACE_REVIVED_EXACT), 6);
        ck_assert_uint_eq(usage_of(space).spilled, 0);
        /* their summaries came back with them */
        ck_assert_uint_eq(counter(space, KVD_SPACE_SUMMARISED), before);
        for (uint32_t i = 0; i < 6; i++)
                ck_assert_uint_eq(t.slots[i].flags, KVD_ENTRY_OWN);
        table_close(&t);
}
END_TEST

/* A worker may keep the file open, so the bytes must be overwritten. */
START_TEST(copies_of_a_deleted_space_are_erased) {
        static const uint8_t nothing[6 * BLOCK_BYTES];
        uint8_t copies[6 * BLOCK_BYTES];
        uint64_t bytes;
        int fd;

        cooled(6, KVD_COOL_SPILL);
        fd = dup(space_copies_fd(space, &bytes));
        ck_assert_int_eq(pread(fd, copies, sizeof copies, 0), sizeof copies);
        ck_assert_int_ne(memcmp(copies, nothing, sizeof copies), 0);
        attachment_free(a, false);
        ck_assert_int_eq(space_delete(space, true), 0);
        idle();
        ck_assert_int_eq(pread(fd, copies, sizeof copies, 0), sizeof copies);
        ck_assert_int_eq(memcmp(copies, nothing, sizeof copies), 0);
        close(fd);
        space = fixture_space("s", 0);
}
END_TEST

/* Approximate keys are rotated to the positions of their tokens, which the worker must be told. */
START_TEST(the_worker_is_told_where_tokens_stand) {
        const struct kvd_job_item *items;

        ck_assert_int_eq(table_append(&t, 5 * BT, 10), 0);
        work();
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_VAGUE, all + 1, 4), 4);
        ck_assert(worker_take());
        ck_assert_uint_eq(worker_job->n_items, 4);
        items = (const struct kvd_job_item *)(worker_job + 1);
        for (uint32_t i = 0; i < 4; i++) {
                ck_assert_int_eq(items[i].position, (int32_t)((i + 1) * BT));
                ck_assert_uint_eq(items[i].n_tokens, BT);
        }
        worker_do();
        ck_assert_uint_eq(table_sync(&t, NULL), 4);
        idle();
        table_close(&t);
}
END_TEST

static uint32_t mappings(void) {
        FILE *f = fopen("/proc/self/maps", "re");
        char line[512];
        uint32_t n = 0;

        ck_assert_ptr_nonnull(f);
        while (fgets(line, sizeof line, f))
                n += strstr(line, "/memfd:kvd-sketch") != NULL;
        fclose(f);
        return n;
}

/* The daemon maps a sketch only while it writes the header. */
START_TEST(a_sketch_costs_the_daemon_no_mapping) {
        cooled(2, KVD_COOL_VAGUE);
        ck_assert_ptr_nonnull(sequence_find(a, t.number)->sketches);
        ck_assert_uint_eq(mappings(), 0);
        table_close(&t);
}
END_TEST

START_TEST(what_is_not_taken_is_undone) {
        ck_assert_int_eq(table_append(&t, 5 * BT, 10), 0);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_VAGUE, all, 5), 5);
        work();
        ck_assert_uint_eq(table_sync(&t, takes_nothing), 0);
        check_clean(space);
        work(); /* takes them out of the sketch again */
        check_clean(space);
        table_check(&t);
        ck_assert_uint_eq(usage_of(space).spilled + usage_of(space).vague, 0);
        ck_assert_uint_eq(usage_of(space).private, 5);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, all, 5), 5);
        work();
        table_sync(&t, NULL);
        revive(KVD_REVIVE_EXACT, 5, 5, 0);
        work();
        ck_assert_uint_eq(table_sync(&t, takes_nothing), 0);
        idle();
        check_clean(space);
        ck_assert_uint_eq(usage_of(space).private, 0);
        ck_assert_uint_eq(usage_of(space).spilled, 5);
        table_close(&t);
}
END_TEST

START_TEST(unanswered_changes_are_proposed_again) {
        struct kvd_change first[KVD_SYNC_CHANGES], second[KVD_SYNC_CHANGES];
        uint32_t taken[] = {1, 0};

        ck_assert_int_eq(table_append(&t, 4 * BT, 10), 0);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, all, 4), 4);
        ck_assert_uint_eq(table_peek(&t, first), 0);
        work();
        ck_assert_uint_eq(table_peek(&t, first), 4);
        ck_assert_uint_eq(table_peek(&t, second), 4);
        ck_assert_mem_eq(first, second, 4 * sizeof *first);
        ck_assert_int_eq(sequence_sync(a, t.number, taken, 2, second), 2);
        ck_assert_mem_eq(first + 2, second, 2 * sizeof *first);
        ck_assert_int_eq(sequence_sync(a, t.number, (uint32_t[]){1, 1, 1}, 3, second), -EINVAL);
        check_clean(space);
        ck_assert_uint_eq(usage_of(space).spilled, 1);
        table_close(&t);
}
END_TEST

START_TEST(a_broken_copy_is_never_shown) {
        struct sequence *q = sequence_find(a, t.number);

        cooled(3, KVD_COOL_SPILL);
        worker_spoil(space, q->entries[1].place);
        revive(KVD_REVIVE_EXACT, 3, 3, 0);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 3);
        table_check(&t);
        ck_assert_uint_eq(t.slots[1].flags, KVD_ENTRY_OWN | KVD_ENTRY_DROPPED);
        ck_assert_uint_eq(t.slots[1].ref, 0);
        ck_assert_uint_ne(t.slots[0].ref, 0);
        ck_assert_uint_eq(counter(space, KVD_SPACE_REVIVE_BROKEN), 1);
        revive(KVD_REVIVE_BOTH, 3, 0, 0);
        check_clean(space);
        table_close(&t);
}
END_TEST

START_TEST(no_room_is_a_refusal) {
        struct table u;

        cooled(8, KVD_COOL_SPILL);
        table_open(&u, a, 64, true);
        while (table_append(&u, BT, 1000) == 0)
                ;
        revive(KVD_REVIVE_EXACT, 8, 8, 0);
        work();
        ck_assert_uint_eq(counter(space, KVD_SPACE_REVIVE_REFUSED), 8);
        check_clean(space);
        table_close(&u);
        idle();
        revive(KVD_REVIVE_EXACT, 8, 8, 0);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 8);
        table_check(&t);
        table_close(&t);
}
END_TEST

START_TEST(copies_take_no_more_than_their_share) {
        struct space *other;
        struct table u;
        int cooling;

        fixture_close();
        fixture_open(64, 10); /* copies of all spaces */
        space = fixture_space("s", 0);
        other = fixture_space("other", 32);
        a = fixture_attach(space);
        set(space, "kvreviver", "on");
        set(other, "kvreviver", "on");
        table_open(&t, a, 32, true);
        ck_assert_int_eq(table_append(&t, 8 * BT, 10), 0);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, all, 8), 8);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 8);
        table_open(&u, fixture_attach(other), 32, true);
        ck_assert_int_eq(table_append(&u, 8 * BT, 10), 0);
        cooling = sequence_cool(u.a, u.number, KVD_COOL_SPILL, all, 8);
        work();
        ck_assert_int_eq(cooling, 2);
        ck_assert_uint_eq(table_sync(&u, NULL), 2);
        check_clean(other);
        table_check(&u);
        table_close(&t);
        idle();
        ck_assert_int_eq(sequence_cool(u.a, u.number, KVD_COOL_SPILL, all + 2, 6), 6);
        work();
        ck_assert_uint_eq(table_sync(&u, NULL), 6);
        check_clean(other);
        table_close(&u);
}
END_TEST

static void reopen(uint64_t spill_blocks) {
        fixture_close();
        fixture_open(64, spill_blocks);
        space = fixture_space("s", 0);
        a = fixture_attach(space);
        set(space, "kvreviver", "on");
        set(space, "pressure", "off");
        table_open(&t, a, 32, true);
        ck_assert_int_eq(table_append(&t, 8 * BT, 10), 0);
        work();
}

static void leaves(uint32_t n) {
        ck_assert_uint_eq(work(), n > 0);
        ck_assert_uint_eq(table_sync(&t, NULL), n);
        check_clean(space);
        table_check(&t);
}

/* It was taken, answered with success, and no block left. */
START_TEST(cooling_without_memory_for_copies_fails_aloud) {
        reopen(3);
        /* as many as there is memory for, and no more */
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, all, 8), 3);
        check_clean(space);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, all, 8), -EDQUOT);
        ck_assert_ptr_nonnull(strstr(store_why(store), "exact copies in memory"));
        leaves(3); /* what was accepted before */
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, all, 8), -EDQUOT);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_VAGUE, all, 8), -EDQUOT);
        ck_assert_uint_eq(store_jobs_waiting(store), 0);
        /* nothing was asked of memory */
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, all, 3), 0);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_DROP, all + 7, 1), 1);
        revive(KVD_REVIVE_EXACT, 1, 1, 0);
        leaves(1 + 1); /* the one that is dropped, and the one that comes back */
        /* a block that is back has a copy that gives way */
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, all + 3, 4), 1);
        leaves(1);
        table_close(&t);
}
END_TEST

/* Without exact copies it is the sketch that gets no memory. */
START_TEST(cooling_without_memory_for_a_sketch_fails_aloud) {
        reopen(3);
        set(space, "kvreviver.spill", "off");
        set(space, "kvreviver.vague", "0.8");
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_VAGUE, all, 8), -EDQUOT);
        ck_assert_uint_eq(store_jobs_waiting(store), 0);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, all, 8), 0); /* is off */
        /* no memory is asked for: the setting says that no sketch may be made */
        set(space, "kvreviver.vague", "0");
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_VAGUE, all, 8), 8);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 0);
        check_clean(space);
        table_close(&t);
}
END_TEST

/* A sketch is made when blocks are copied, so the copies that are accepted before leave it memory. */
START_TEST(copies_leave_memory_for_the_sketch_of_their_tokens) {
        uint64_t sketch;

        reopen(64);
        set(space, "kvreviver.vague", "0.8");
        sketch = sketch_wanted(sequence_find(a, t.number), BT);
        ck_assert_uint_gt(sketch, BLOCK_BYTES);
        reopen(sketch / BLOCK_BYTES + 2);
        set(space, "kvreviver.vague", "0.8");
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_VAGUE, all, 8), 2);
        leaves(2);
        for (uint32_t i = 0; i < 2; i++)
                ck_assert_uint_eq(t.slots[i].flags,
                                  KVD_ENTRY_OWN | KVD_ENTRY_VAGUE | KVD_ENTRY_SPILLED);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_VAGUE, all, 8), -EDQUOT);
        table_close(&t);
        /* a sketch that does not fit anyway takes no memory from copies */
        reopen(3);
        set(space, "kvreviver.vague", "0.8");
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_VAGUE, all, 8), 3);
        leaves(3);
        ck_assert_uint_eq(t.slots[0].flags, KVD_ENTRY_OWN | KVD_ENTRY_SPILLED);
        table_close(&t);
}
END_TEST

/* The memory of an accepted copy is reserved: another sequence cannot take it. */
START_TEST(accepted_copies_keep_their_memory) {
        struct table u;

        reopen(3);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, all, 2), 2);
        table_open(&u, a, 32, true);
        ck_assert_int_eq(table_append(&u, 8 * BT, 300), 0);
        ck_assert_int_eq(sequence_cool(a, u.number, KVD_COOL_SPILL, all, 8), 1);
        ck_assert(worker_take());
        worker_die(); /* the next one repeats the job */
        check_clean(space);
        ck_assert_int_eq(sequence_cool(a, u.number, KVD_COOL_SPILL, all, 8), -EDQUOT);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 2);
        ck_assert_uint_eq(table_sync(&u, NULL), 1);
        check_clean(space);
        ck_assert_int_eq(table_append(&u, BT, 400), 0);
        table_close(&t);
        idle();
        /* one that waits gives its memory back when its sequence ends */
        ck_assert_int_eq(sequence_cool(a, u.number, KVD_COOL_SPILL, all, 8), 2);
        table_close(&u);
        idle();
        ck_assert_uint_eq(store->account.used[KVD_COST_spill], 0);
}
END_TEST

/* ---- approximately --------------------------------------------------------------------------- */

/*
 * Only with one token per cell are collisions certain not to matter: with few tokens the median may
 * be wrong.
 */
START_TEST(first_approximately_then_exactly) {
        cooled(2, KVD_COOL_VAGUE);
        ck_assert_uint_eq(t.slots[0].flags, KVD_ENTRY_OWN | KVD_ENTRY_VAGUE | KVD_ENTRY_SPILLED);
        revive(KVD_REVIVE_BOTH, 2, 2, 2);
        ck_assert_uint_eq(work(), 1);
        ck_assert_uint_eq(table_sync(&t, NULL), 2);
        ck_assert_uint_eq(t.slots[0].flags, KVD_ENTRY_OWN | KVD_ENTRY_APPROX);
        table_check(&t);
        check_clean(space);
        ck_assert_uint_ge(work(), 1);
        ck_assert_uint_eq(table_sync(&t, NULL), 2);
        work(); /* FORGET */
        idle();
        ck_assert_uint_eq(t.slots[0].flags, KVD_ENTRY_OWN);
        table_check(&t);
        check_clean(space);
        ck_assert_uint_eq(usage_of(space).private, 2);
        ck_assert_uint_eq(counter(space, KVD_SPACE_REVIVED_APPROX), 2);
        ck_assert_uint_eq(counter(space, KVD_SPACE_REVIVED_EXACT), 2);
        ck_assert_ptr_null(sequence_find(a, t.number)->sketches);
        table_close(&t);
}
END_TEST

START_TEST(an_approximation_cools_to_what_it_was) {
        cooled(3, KVD_COOL_VAGUE);
        revive(KVD_REVIVE_APPROX, 3, 0, 3);
        work();
        table_sync(&t, NULL);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, all, 3), 3);
        ck_assert_uint_eq(work(), 0); /* an approximation is not copied */
        ck_assert_uint_eq(table_sync(&t, NULL), 3);
        ck_assert_uint_eq(t.slots[0].flags, KVD_ENTRY_OWN | KVD_ENTRY_VAGUE | KVD_ENTRY_SPILLED);
        revive(KVD_REVIVE_EXACT, 3, 3, 0);
        work();
        table_sync(&t, NULL);
        table_check(&t);
        check_clean(space);
        table_close(&t);
}
END_TEST

START_TEST(without_a_copy_a_sketch_is_all_there_is) {
        set(space, "kvreviver.spill", "off");
        cooled(3, KVD_COOL_VAGUE);
        ck_assert_uint_eq(t.slots[2].flags, KVD_ENTRY_OWN | KVD_ENTRY_VAGUE);
        revive(KVD_REVIVE_BOTH, 3, 0, 3);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 3);
        ck_assert_uint_eq(t.slots[2].flags, KVD_ENTRY_OWN | KVD_ENTRY_APPROX);
        check_clean(space);
        table_close(&t);
}
END_TEST

/* The bytes of sketches that a check counts if its first piece has this much of its budget left. */
static uint64_t counted_sketches(uint64_t left) {
        struct check_report report = {0};
        struct walk w = {.space = space,
                         .report = &report,
                         .audit = &space->audit,
                         .spent = CHECK_SPENDS - left};
        uint64_t at = 0;

        space->audit = (struct audit){.whole = true};
        while (!check_sequences(&w, &at))
                w.spent = 0;
        ck_assert_uint_eq(report.broken, 0);
        return space->audit.sketch_bytes;
}

/* A check that stopped between a sequence and its first entry once counted it twice (Q20). */
START_TEST(a_check_counts_a_sketch_once_wherever_it_stops) {
        uint64_t bytes;

        cooled(3, KVD_COOL_VAGUE);
        bytes = counted_sketches(CHECK_SPENDS);
        ck_assert_uint_gt(bytes, 0);
        for (uint64_t left = 1; left < 4096; left++)
                ck_assert_uint_eq(counted_sketches(left), bytes);
        check_clean(space);
        table_close(&t);
}
END_TEST

START_TEST(an_overloaded_sketch_revives_nothing) {
        uint32_t exact, approx;

        cooled(8, KVD_COOL_VAGUE); /* 32 tokens in 24 cells */
        set(space, "kvreviver.max_load", "1");
        ck_assert_int_eq(sequence_revive(a, t.number, KVD_REVIVE_APPROX, all, 8, &exact, &approx),
                         -ENODATA);
        ck_assert_uint_eq(counter(space, KVD_SPACE_REVIVE_REFUSED), 8);
        revive(KVD_REVIVE_BOTH, 8, 8, 0);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 8);
        table_check(&t);
        table_close(&t);
}
END_TEST

/* The approximation that was wanted is not possible any more when the job is written. */
START_TEST(what_was_not_wanted_does_not_come_back) {
        cooled(8, KVD_COOL_VAGUE);
        revive(KVD_REVIVE_APPROX, 8, 0, 8);
        set(space, "kvreviver.max_load", "1");
        work();
        table_sync(&t, NULL);
        table_check(&t);
        ck_assert_uint_eq(counter(space, KVD_SPACE_REVIVE_REFUSED), 8);
        ck_assert_uint_eq(usage_of(space).private, 0);
        ck_assert_uint_eq(t.slots[0].flags, KVD_ENTRY_OWN | KVD_ENTRY_VAGUE | KVD_ENTRY_SPILLED);
        table_close(&t);
}
END_TEST

/*
 * With default settings, a sequence of 16,384 tokens has sketches of 51 cells, each of which stands
 * for two tokens.
 */
START_TEST(a_sketch_takes_no_more_than_it_answers_for) {
        static uint32_t slots[1000];
        uint32_t vague = 0, exact, approx;
        struct sequence *q;

        teardown();
        fixture_open(1300, 1300);
        space = fixture_space("s", 0);
        a = fixture_attach(space);
        set(space, "kvreviver", "on");
        set(space, "pressure", "off");
        table_open(&t, a, 1200, false);
        q = sequence_find(a, t.number);
        ck_assert_int_eq(table_append(&t, 1000 * BT, 10), 0);
        for (uint32_t i = 0; i < 1000; i++)
                slots[i] = i;
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_VAGUE, slots, 1000), 1000);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 1000);
        for (uint32_t i = 0; i < 1000; i++) {
                ck_assert(t.slots[i].flags & KVD_ENTRY_SPILLED);
                vague += !!(t.slots[i].flags & KVD_ENTRY_VAGUE);
        }
        ck_assert_uint_eq(vague, 2 * (51 * 2 / BT)); /* 4,000 tokens are two epochs */
        for (struct sketch *s = q->sketches; s; s = s->next)
                ck_assert(sketch_answers(q, s));
        ck_assert_int_eq(sequence_revive(a, t.number, KVD_REVIVE_APPROX, slots, 1000, &exact,
                                         &approx),
                         0);
        ck_assert_uint_eq(approx, vague);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), vague);
        check_clean(space);
        ck_assert_int_eq(sequence_close(a, t.number), 0);
}
END_TEST

START_TEST(a_sketch_too_small_for_a_block_is_not_made) {
        set(space, "kvreviver.vague", "0.1"); /* 3 cells */
        set(space, "kvreviver.max_load", "1");
        cooled(8, KVD_COOL_VAGUE);
        ck_assert_ptr_null(sequence_find(a, t.number)->sketches);
        ck_assert_uint_eq(usage_of(space).vague, 0);
        ck_assert_uint_eq(usage_of(space).spilled, 8);
        ck_assert_uint_eq(usage_of(space).sketch_bytes, 0);
        ck_assert_int_eq(table_append(&t, 4 * BT, 100), 0);
        /* without copies, a block that no sketch can hold stays */
        set(space, "kvreviver.spill", "off");
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_VAGUE, all + 8, 4), 4);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 0);
        for (uint32_t i = 8; i < 12; i++)
                ck_assert_uint_eq(t.slots[i].flags, KVD_ENTRY_OWN);
        idle();
        check_clean(space);
        table_close(&t);
}
END_TEST

/* ---- copies that are kept -------------------------------------------------------------------- */

START_TEST(who_came_back_leaves_again_without_a_copy) {
        cooled(8, KVD_COOL_SPILL);
        for (uint32_t round = 0; round < 3; round++) {
                revive(KVD_REVIVE_EXACT, 8, 8, 0);
                ck_assert_uint_eq(work(), 1);
                ck_assert_uint_eq(table_sync(&t, NULL), 8);
                ck_assert_uint_eq(usage_of(space).copy_bytes, 8 * BLOCK_BYTES);
                table_check(&t);
                ck_assert_int_eq(sequence_cool(a, t.number, round ? KVD_COOL_VAGUE : KVD_COOL_SPILL,
                                               all, 8),
                                 8);
                ck_assert_uint_eq(work(), 0);
                ck_assert_uint_eq(table_sync(&t, NULL), 8);
                ck_assert_uint_eq(t.slots[7].flags, KVD_ENTRY_OWN | KVD_ENTRY_SPILLED);
                idle();
                check_clean(space);
        }
        table_close(&t);
}
END_TEST

START_TEST(kept_copies_give_way_to_others) {
        struct space *other;
        struct table u;

        fixture_close();
        fixture_open(64, 10); /* room for 10 copies of all spaces */
        space = fixture_space("s", 32);
        other = fixture_space("other", 32);
        a = fixture_attach(space);
        set(space, "kvreviver", "on");
        set(other, "kvreviver", "on");
        table_open(&t, a, 32, true);
        cooled(8, KVD_COOL_SPILL);
        revive(KVD_REVIVE_EXACT, 8, 8, 0);
        work();
        table_sync(&t, NULL);
        ck_assert_int_eq(table_append(&t, 4 * BT, 200), 0);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, all + 8, 4), 4);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 4);
        ck_assert_uint_le(store->account.used[KVD_COST_spill], 10 * BLOCK_BYTES);
        check_clean(space);
        table_open(&u, fixture_attach(other), 32, true); /* evicts copies of s, too */
        ck_assert_int_eq(table_append(&u, 6 * BT, 10), 0);
        ck_assert_int_eq(sequence_cool(u.a, u.number, KVD_COOL_SPILL, all, 6), 6);
        work();
        ck_assert_uint_eq(table_sync(&u, NULL), 6);
        check_clean(space);
        check_clean(other);
        revive(KVD_REVIVE_EXACT, 12, 4, 0); /* the copies of blocks that had left are still there */
        work();
        table_sync(&t, NULL);
        table_check(&t);
        table_close(&u);
        table_close(&t);
}
END_TEST

/* ---- changing places ------------------------------------------------------------------------- */

static void attend(uint32_t slot, uint16_t mass) {
        *table_use(&t, t.slots[slot].ref) = (struct kvd_use){.mass = mass};
}

/* A pool of 32 blocks, all in use. Entries 0 to 7 have left. */
static void fill_up(struct table *u) {
        table_close(&t);
        idle();
        fixture_close();
        fixture_open(32, 64);
        space = fixture_space("s", 32);
        a = fixture_attach(space);
        set(space, "kvreviver", "on");
        set(space, "pressure", "off");
        set(space, "kvreviver.recent", "0");
        set(space, "keydiff.sink_blocks", "0");
        table_open(&t, a, 32, true);
        cooled(8, KVD_COOL_SPILL);
        ck_assert_int_eq(table_append(&t, 8 * BT, 100), 0);
        table_open(u, a, 64, true);
        while (table_append(u, BT, 1000) == 0)
                ;
        for (uint32_t i = 8; i < 16; i++)
                attend(i, (uint16_t)(100 + (i * 5) % 8));
        work();
}

START_TEST(where_there_is_no_room_places_change) {
        uint32_t resident = 0;
        struct table u;

        fill_up(&u);
        revive(KVD_REVIVE_EXACT, 3, 3, 0);
        for (int i = 0; i < 6; i++) {
                struct sequence_report report;

                work();
                check_clean(space);
                sequence_report(a, t.number, &report);
                if (!report.pending)
                        break;
                table_sync(&t, NULL);
                idle();
        }
        table_check(&t);
        for (uint32_t i = 0; i < 3; i++)
                ck_assert_uint_ne(t.slots[i].ref, 0);
        for (uint32_t i = 8; i < 16; i++) {
                /* those with the least mass have left */
                ck_assert_int_eq(t.slots[i].ref != 0, (i * 5) % 8 >= 3);
                resident += t.slots[i].ref != 0;
        }
        ck_assert_uint_eq(resident, 5);
        ck_assert_uint_eq(counter(space, KVD_SPACE_REVIVE_REFUSED), 0);
        ck_assert_uint_eq(u.n, 24);
        table_close(&u);
        table_close(&t);
}
END_TEST

START_TEST(who_does_not_make_way_is_not_asked_again) {
        struct table u;

        fill_up(&u);
        revive(KVD_REVIVE_EXACT, 3, 3, 0);
        work();
        ck_assert_uint_eq(table_sync(&t, takes_nothing), 0);
        for (int i = 0; i < 20 && work(); i++)
                table_sync(&t, takes_nothing);
        ck_assert_uint_eq(counter(space, KVD_SPACE_REVIVE_REFUSED), 3);
        idle();
        check_clean(space);
        table_check(&t);
        table_close(&u);
        table_close(&t);
}
END_TEST

static ssize_t same_getrandom(void *to, size_t n, unsigned flags) {
        memset(to, 5, n);
        return (ssize_t)n;
}

/* Reads all approximations that the client may read. */
static void read_approximations(float ret[6][BLOCK_BYTES / 4]) {
        cooled(6, KVD_COOL_VAGUE);
        revive(KVD_REVIVE_APPROX, 6, 0, 6);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 6);
        for (uint32_t i = 0; i < 6; i++)
                block_floats(attachment_space(a), t.slots[i].ref, ret[i]);
        table_close(&t);
        idle();
}

/* Makes another sketch of the same ordinals, as full as the first. */
static void disturb(struct attachment *b, struct table *u) {
        table_open(u, b, 32, true);
        ck_assert_int_eq(table_append(u, 6 * BT, 5000), 0);
        ck_assert_int_eq(sequence_cool(b, u->number, KVD_COOL_VAGUE, all, 6), 6);
        work();
        ck_assert_uint_eq(table_sync(u, NULL), 6);
}

START_TEST(other_sketches_change_no_approximation) {
        static float alone[6][BLOCK_BYTES / 4], beside[6][BLOCK_BYTES / 4];
        struct domain *own = domain;
        struct space *foreign;
        struct table u, v;

        struct kvd_sys no_chance = *sys;

        /* two sketches are compared: their salts must be the same */
        no_chance.getrandom = same_getrandom;
        sys = &no_chance;
        read_approximations(alone);
        ck_assert_int_eq(store_domain(store,
                                      &(struct domain_config){.name = "e",
                                                              .client_quota = UINT64_MAX},
                                      &domain),
                         0);
        foreign = fixture_space("s", 24);
        domain = own;
        set(foreign, "kvreviver", "on");
        set(foreign, "kvreviver.vague", "0.8");
        disturb(fixture_attach(foreign), &u);
        disturb(a, &v); /* another sequence of the same space */
        table_open(&t, a, 32, true);
        read_approximations(beside);
        ck_assert_mem_eq(alone, beside, sizeof alone);
        check_clean(foreign);
        table_close(&u);
        table_close(&v);
        sys = &kvd_sys_real;
}
END_TEST

/* ---- workers that are lost ------------------------------------------------------------------- */

START_TEST(a_lost_worker_loses_nothing) {
        ck_assert_int_eq(table_append(&t, 6 * BT, 10), 0);
        work();
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_VAGUE, all, 6), 6);
        ck_assert(worker_take());
        worker_die();
        check_clean(space);
        work();
        check_clean(space);
        ck_assert_uint_eq(table_sync(&t, NULL), 6);
        ck_assert_uint_eq(usage_of(space).vague, 6);
        revive(KVD_REVIVE_APPROX, 6, 0, 6);
        ck_assert(worker_take());
        worker_die();
        check_clean(space);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 6);
        revive(KVD_REVIVE_EXACT, 6, 6, 0);
        ck_assert(worker_take());
        worker_die();
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 6);
        ck_assert(worker_take());
        ck_assert_uint_eq(worker_job->kind, KVD_JOB_FORGET);
        worker_die();
        check_clean(space);
        work();
        idle();
        check_clean(space);
        table_check(&t);
        ck_assert_uint_eq(usage_of(space).private, 6);
        ck_assert_uint_eq(usage_of(space).vague + usage_of(space).spilled, 0);
        ck_assert_uint_eq(counter(space, KVD_SPACE_JOBS_LOST), 4);
        table_close(&t);
}
END_TEST

START_TEST(lost_twice_is_given_up) {
        cooled(4, KVD_COOL_SPILL);
        revive(KVD_REVIVE_EXACT, 4, 4, 0);
        for (int i = 0; i < 2; i++) {
                ck_assert(worker_take());
                worker_die();
                check_clean(space);
        }
        ck_assert(!worker_take());
        ck_assert_uint_eq(table_sync(&t, NULL), 0);
        ck_assert_uint_eq(usage_of(space).spilled, 4);
        revive(KVD_REVIVE_EXACT, 4, 4, 0);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 4);
        table_check(&t);
        table_close(&t);
}
END_TEST

/*
 * The sketch holds four blocks with copies and two without. A worker dies while it inserts two
 * more.
 */
START_TEST(a_half_written_sketch_is_made_anew_from_the_copies) {
        uint32_t exact, approx;

        cooled(4, KVD_COOL_VAGUE);
        set(space, "kvreviver.spill", "off");
        ck_assert_int_eq(table_append(&t, 4 * BT, 200), 0);
        work();
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_VAGUE, all + 4, 2), 2);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 2);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_VAGUE, all + 6, 2), 2);
        ck_assert(worker_take());
        worker_die();
        check_clean(space);
        ck_assert_int_eq(sequence_revive(a, t.number, KVD_REVIVE_APPROX, all, 4, &exact, &approx),
                         -ENODATA);
        ck_assert(worker_take());
        ck_assert_uint_eq(worker_job->kind, KVD_JOB_REBUILD);
        ck_assert_uint_eq(worker_job->n_items, 4);
        worker_do();
        check_clean(space);
        work();
        table_sync(&t, NULL);
        table_check(&t);
        ck_assert_uint_eq(t.slots[0].flags, KVD_ENTRY_OWN | KVD_ENTRY_VAGUE | KVD_ENTRY_SPILLED);
        ck_assert_uint_eq(t.slots[4].flags, KVD_ENTRY_OWN | KVD_ENTRY_DROPPED);
        ck_assert_uint_eq(t.slots[7].flags, KVD_ENTRY_OWN | KVD_ENTRY_VAGUE);
        revive(KVD_REVIVE_APPROX, 4, 0, 4);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 4);
        check_clean(space);
        table_close(&t);
}
END_TEST

START_TEST(a_sketch_that_cannot_be_made_anew_is_dropped) {
        cooled(4, KVD_COOL_VAGUE);
        ck_assert_int_eq(table_append(&t, 2 * BT, 200), 0);
        work();
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_VAGUE, all + 4, 2), 2);
        ck_assert(worker_take());
        worker_fail(EIO);
        for (int i = 0; i < 2; i++) {
                ck_assert(worker_take());
                ck_assert_uint_eq(worker_job->kind, KVD_JOB_REBUILD);
                worker_die();
        }
        check_clean(space);
        ck_assert_uint_eq(table_sync(&t, NULL), 4);
        table_check(&t);
        ck_assert_uint_eq(t.slots[0].flags, KVD_ENTRY_OWN | KVD_ENTRY_SPILLED);
        ck_assert_uint_eq(t.slots[5].flags, KVD_ENTRY_OWN);
        ck_assert_ptr_null(sequence_find(a, t.number)->sketches);
        revive(KVD_REVIVE_EXACT, 4, 4, 0);
        work();
        ck_assert_uint_eq(table_sync(&t, NULL), 4);
        table_check(&t);
        table_close(&t);
}
END_TEST

/* ---- ends at every stage --------------------------------------------------------------------- */

/* stage: how much is done before the client is lost. */
START_TEST(a_client_may_go_at_any_stage) {
        int stage = _i;

        ck_assert_int_eq(table_append(&t, 6 * BT, 10), 0);
        work();
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_VAGUE, all, 6), 6);
        if (stage > 0)
                ck_assert(worker_take());
        if (stage > 1)
                worker_do();
        if (stage > 2)
                table_sync(&t, NULL);
        if (stage > 3)
                revive(KVD_REVIVE_BOTH, 6, 6, 6);
        if (stage > 4)
                ck_assert(worker_take());
        if (stage > 5)
                worker_do();
        if (stage > 6)
                table_sync(&t, NULL);
        if (stage > 7)
                ck_assert(worker_take());
        if (stage > 8)
                worker_do();
        if (stage > 9)
                table_sync(&t, NULL);
        if (stage > 10)
                ck_assert(worker_take()); /* FORGET */
        table_forget(&t);
        attachment_free(a, true);
        check_clean(space);
        idle();
        check_clean(space);
        if (stage == 1 || stage == 5 || stage == 8 || stage == 11)
                worker_do();
        ck_assert_uint_eq(work(), 0);
        idle();
        check_clean(space);
        ck_assert_uint_eq(usage_of(space).private + usage_of(space).filling +
                                  usage_of(space).sealed,
                          0);
        ck_assert_uint_eq(store->account.used[KVD_COST_spill], 0);
}
END_TEST

/* ---- failing calls --------------------------------------------------------------------------- */

static int calls_left;

static bool fails(void) {
        return calls_left-- == 0;
}

static void *failing_calloc(size_t n, size_t size) {
        return fails() ? NULL : kvd_sys_real.calloc(n, size);
}

static int failing_memfd(const char *name, unsigned flags) {
        errno = EMFILE;
        return fails() ? -1 : kvd_sys_real.memfd_create(name, flags);
}

static int failing_ftruncate(int fd, off_t n) {
        errno = ENOSPC;
        return fails() ? -1 : kvd_sys_real.ftruncate(fd, n);
}

static int failing_seals(int fd, int seals) {
        errno = EPERM;
        return fails() ? -1 : kvd_sys_real.add_seals(fd, seals);
}

static void *failing_mmap(void *at, size_t n, int prot, int flags, int fd, off_t off) {
        errno = ENOMEM;
        return fails() ? MAP_FAILED : kvd_sys_real.mmap(at, n, prot, flags, fd, off);
}

static ssize_t failing_getrandom(void *to, size_t n, unsigned flags) {
        return fails() ? -1 : kvd_sys_real.getrandom(to, n, flags);
}

static int failing_open(const char *path, int flags) {
        errno = EMFILE;
        return fails() ? -1 : kvd_sys_real.open(path, flags);
}

static void life_with_failures(void) {
        struct table u;
        uint32_t exact, approx, number;
        uint64_t bytes;

        if (sequence_open(a, 32, &number) < 0)
                return;
        memset(&u, 0, sizeof u);
        u.a = a;
        u.number = number;
        if (table_append(&u, 4 * BT, 10) == 0) {
                sequence_cool(a, number, KVD_COOL_VAGUE, all, 4);
                if (space_copies_fd(space, &bytes) >= 0 && space_summary_fd(space, true) >= 0)
                        work();
                table_sync(&u, NULL);
                sequence_revive(a, number, KVD_REVIVE_BOTH, all, 4, &exact, &approx);
                if (space_copies_fd(space, &bytes) >= 0)
                        work();
                table_sync(&u, NULL);
                table_check(&u);
        }
        check_clean(space);
        table_close(&u);
}

START_TEST(every_failing_call_is_survived) {
        struct kvd_sys failing = kvd_sys_real;
        int n = 0;

        failing.calloc = failing_calloc;
        failing.memfd_create = failing_memfd;
        failing.ftruncate = failing_ftruncate;
        failing.add_seals = failing_seals;
        failing.mmap = failing_mmap;
        failing.getrandom = failing_getrandom;
        failing.open = failing_open;
        table_close(&t);
        fixture_close();
        for (;; n++) {
                setup(); /* a fresh store */
                table_close(&t);
                calls_left = n;
                sys = &failing;
                life_with_failures();
                sys = &kvd_sys_real;
                idle();
                check_clean(space);
                ck_assert_uint_eq(store->account.used[KVD_COST_spill], 0);
                if (calls_left >= 0)
                        break;
                fixture_close();
        }
        ck_assert_int_gt(n, 15);
}
END_TEST

/* ---- random operations ----------------------------------------------------------------------- */

static struct random rnd;
static uint32_t refusals;

/* Refuses some changes. That a copy is lost can only be acknowledged. */
static bool sometimes(const struct kvd_change *c) {
        return random_below(&rnd, 4) != 0 || (c->kind == KVD_CHANGE_LEAVE && !t.slots[c->slot].ref);
}

static void random_slots(uint32_t *ret, uint32_t *n) {
        *n = 1 + random_below(&rnd, 6);
        for (uint32_t i = 0; i < *n; i++)
                ret[i] = random_below(&rnd, t.n);
}

static void one_step(void) {
        uint32_t slots[8], n, exact, approx;

        switch (random_below(&rnd, 10)) {
        case 0:
                if (t.n < 30)
                        refusals += table_append(&t, 1 + random_below(&rnd, 3 * BT),
                                                 random_below(&rnd, 90000)) < 0;
                break;
        case 1:
        case 2:
                random_slots(slots, &n);
                if (sequence_cool(a, t.number, 1 + random_below(&rnd, 2), slots, n) < 0)
                        ck_assert_ptr_nonnull(strstr(store_why(store), "exact copies in memory"));
                break;
        case 3:
                random_slots(slots, &n);
                if (random_below(&rnd, 40) == 0)
                        ck_assert_int_ge(sequence_cool(a, t.number, KVD_COOL_DROP, slots, n), 0);
                break;
        case 4:
        case 5:
                random_slots(slots, &n);
                sequence_revive(a, t.number, 1 + random_below(&rnd, 3), slots, n, &exact, &approx);
                break;
        case 6:
                n = random_below(&rnd, t.n); /* rarely: compaction cannot be undone */
                if (random_below(&rnd, 12) == 0)
                        ck_assert_int_ge(sequence_compact(a, t.number,
                                                          &(struct compact_request){
                                                                  .first = n,
                                                                  .n = MIN(t.n - n, 4),
                                                                  .keep = 1 +
                                                                          random_below(&rnd,
                                                                                       3 * BT)}),
                                         -EBUSY);
                break;
        case 7:
        case 8: table_sync(&t, sometimes); break;
        default: store_idle(store);
        }
}

static bool taken;

static void worker_step(void) {
        if (!taken)
                taken = worker_take();
        if (!taken || random_below(&rnd, 3) == 0)
                return;
        taken = false;
        switch (random_below(&rnd, 24)) {
        case 0: worker_die(); break;
        case 1: worker_fail(EIO); break;
        case 2: worker_answer("x", 1); break;
        default: worker_do();
        }
}

/* Begins another sequence with other settings, every 1,000 operations. */
static void begin_again(uint32_t round) {
        static const char *const words[] = {"off", "on"};

        set(space, "kvreviver.spill", words[round % 3 != 0]);
        set(space, "kvreviver.drop", words[round % 2]);
        set(space, "kvreviver.max_load", round % 5 ? "4" : "1000");
        set(space, "kvreviver.epoch", round % 4 ? "64" : "8");
        set(space, "kvreviver.delete", round % 7 ? "exact_or_tombstone" : "estimate");
        set(space, "keydiff", "on");
        table_open(&t, a, 32, true);
        ck_assert_int_eq(table_append(&t, 3 * BT, round * 100 % 90000), 0);
}

START_TEST(random_operations_keep_every_invariant) {
        rnd.state = 14;
        table_close(&t);
        for (uint32_t round = 0; round < 100; round++) {
                begin_again(round);
                for (uint32_t i = 0; i < 1000; i++) {
                        one_step();
                        worker_step();
                        if (i % 10 == 0)
                                check_clean(space);
                        if (i % 50 == 0)
                                table_check(&t);
                }
                table_close(&t);
                for (uint32_t i = 0; i < random_below(&rnd, 4); i++)
                        worker_step();
        }
        while (taken || store_jobs_waiting(store))
                worker_step();
        idle();
        ck_assert_uint_eq(usage_of(space).private, 0);
        ck_assert_uint_eq(store->account.used[KVD_COST_spill], 0);
        ck_assert_uint_gt(counter(space, KVD_SPACE_REVIVED_EXACT), 1000);
        ck_assert_uint_gt(counter(space, KVD_SPACE_REVIVED_APPROX), 1000);
        ck_assert_uint_gt(counter(space, KVD_SPACE_JOBS_LOST), 100);
}
END_TEST

SUITE("reviver", FIXTURE(setup, teardown),
      TESTS(what_left_comes_back_byte_by_byte, copies_of_a_deleted_space_are_erased,
            the_worker_is_told_where_tokens_stand, a_sketch_costs_the_daemon_no_mapping,
            what_is_not_taken_is_undone, unanswered_changes_are_proposed_again,
            a_broken_copy_is_never_shown, no_room_is_a_refusal,
            copies_take_no_more_than_their_share, cooling_without_memory_for_copies_fails_aloud,
            cooling_without_memory_for_a_sketch_fails_aloud,
            copies_leave_memory_for_the_sketch_of_their_tokens, accepted_copies_keep_their_memory,
            first_approximately_then_exactly, an_approximation_cools_to_what_it_was,
            without_a_copy_a_sketch_is_all_there_is, a_check_counts_a_sketch_once_wherever_it_stops,
            an_overloaded_sketch_revives_nothing, what_was_not_wanted_does_not_come_back,
            a_sketch_takes_no_more_than_it_answers_for, a_sketch_too_small_for_a_block_is_not_made,
            who_came_back_leaves_again_without_a_copy, kept_copies_give_way_to_others,
            where_there_is_no_room_places_change, who_does_not_make_way_is_not_asked_again,
            other_sketches_change_no_approximation, a_lost_worker_loses_nothing,
            lost_twice_is_given_up, a_half_written_sketch_is_made_anew_from_the_copies,
            a_sketch_that_cannot_be_made_anew_is_dropped),
      LOOPS(12, a_client_may_go_at_any_stage),
      TESTS(every_failing_call_is_survived, random_operations_keep_every_invariant))
