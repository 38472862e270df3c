/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks that are sealed before their data is there. The spaces are in host memory but have a
 * semaphore page: the store does not read the data, and the test writes the semaphores as streams
 * would.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "ipc/base/semaphore.h"
#include "store/cache/cache.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

static struct space *space;
static struct attachment *a, *b;
static uint32_t next_token;

static shm_u64 *semaphore_words(const struct space *s) {
        return s->parts.semaphores->page.at;
}

static struct space *ordered_space(const char *name) {
        struct space *s = fixture_space(name, 64);

        s->ix->semaphore_rows = 8;
        ck_assert_int_eq(semaphores_new(s), 0);
        return s;
}

static void open_all(void) {
        fixture_open(64, 64);
        next_token = 0;
        space = ordered_space("s");
        a = fixture_attach(space);
        b = fixture_attach(space);
}

static void close_all(void) {
        check_clean(space);
        fixture_close();
}

/* Seals n blocks with fresh tokens. slot: semaphore + 1, 0 for none, as in the message. */
static int seal_n(struct attachment *by, kvd_ref parent, uint32_t n, uint32_t slot, uint64_t value,
                  kvd_ref *ret) {
        struct seal_request q = {.parent = parent,
                                 .n_blocks = n,
                                 .n_tokens = n * BT,
                                 .semaphore = slot,
                                 .semaphore_value = value};
        kvd_ref blocks[16];
        uint32_t tokens[16 * BT];

        ck_assert_int_eq(space_allocate(by, n, blocks), (int)n);
        for (uint32_t i = 0; i < n * BT; i++)
                tokens[i] = next_token++;
        q.blocks = blocks;
        q.tokens = tokens;
        return space_seal(by, &q, ret);
}

static kvd_ref seal(struct attachment *by, kvd_ref parent, uint32_t slot, uint64_t value) {
        kvd_ref ret = 0;

        ck_assert_msg(seal_n(by, parent, 1, slot, value, &ret) == 0, "%s", store_why(store));
        return ret;
}

static shm_u64 *word_of(const struct attachment *of, uint32_t slot) {
        return &semaphore_words(space)[attachment_semaphore_row(of) * SEMAPHORES + slot - 1];
}

static const struct kvd_desc *desc_of(kvd_ref ref) {
        return kvd_index_desc(space->ix, kvd_ref_id(ref));
}

static bool is_poisoned(kvd_ref ref) {
        return desc_of(ref)->flags & KVD_DESC_POISONED;
}

START_TEST(data_arrives) {
        kvd_ref first = seal(a, KVD_ROOT, 3, 7), second = seal(a, first, 3, 8);

        ck_assert_uint_eq(desc_of(first)->semaphore, semaphore_at(a->seat, 2));
        ck_assert_uint_eq(desc_of(first)->semaphore_value, 7);
        ck_assert_uint_eq(space->ix->n_pending, 2);
        check_clean(space);
        ck_assert(store_look_at_semaphores(store));
        *word_of(a, 3) = 7;
        ck_assert(store_look_at_semaphores(store));
        ck_assert_uint_eq(desc_of(first)->semaphore, 0);
        ck_assert_uint_ne(desc_of(second)->semaphore, 0);
        *word_of(a, 3) = 9;
        ck_assert(!store_look_at_semaphores(store));
        ck_assert_uint_eq(space->ix->n_pending, 0);
        ck_assert_uint_eq(counter(space, KVD_SPACE_ORDERED), 2);
}
END_TEST

START_TEST(data_that_is_there_at_once) {
        *word_of(a, 1) = 5;
        ck_assert_uint_eq(desc_of(seal(a, KVD_ROOT, 1, 5))->semaphore, 0);
        ck_assert_uint_eq(space->ix->n_pending, 0);
}
END_TEST

START_TEST(nonsense_is_refused) {
        kvd_ref ret;

        seal(a, KVD_ROOT, 1, 5);
        ck_assert_int_eq(seal_n(a, KVD_ROOT, 1, 1, 0, &ret), -EINVAL);
        ck_assert_int_eq(seal_n(a, KVD_ROOT, 1, SEMAPHORES + 1, 9, &ret), -EINVAL);
        ck_assert_int_eq(seal_n(a, KVD_ROOT, 1, 2, (uint64_t)SEMAPHORE_VALUE_MAX + 1, &ret),
                         -EINVAL);
        ck_assert_uint_eq(space->ix->n_pending, 1);
}
END_TEST

/* Threads of a client that share a stream may seal in any order. */
START_TEST(values_out_of_order) {
        kvd_ref late = seal(a, KVD_ROOT, 1, 6), early = seal(a, KVD_ROOT, 1, 4);

        *word_of(a, 1) = 5;
        store_look_at_semaphores(store);
        ck_assert_uint_ne(desc_of(late)->semaphore, 0);
        check_clean(space);
        b->words[kvd_ref_id(late)].pins++;
        attachment_free(a, true);
        ck_assert(is_poisoned(late) && !is_poisoned(early));
        ck_assert_uint_eq(desc_of(early)->semaphore, 0);
        ck_assert_uint_eq(semaphore_words(space)[0], 6);
        b->words[kvd_ref_id(late)].pins--;
        store_look_at_semaphores(store);
}
END_TEST

START_TEST(pending_is_not_evicted) {
        kvd_ref ref = seal(a, KVD_ROOT, 1, 1);
        bool more;

        ck_assert_int_eq(space_evict(space, 0, KVD_ROOT, &more), 0);
        ck_assert_int_eq(space_evict(space, 0, ref, &more), 0);
        *word_of(a, 1) = 1;
        ck_assert_int_eq(space_evict(space, 0, KVD_ROOT, &more), 1); /* it reads the semaphores */
        ck_assert_uint_eq(space->ix->n_pending, 0);
}
END_TEST

START_TEST(segment_with_pending_stays) {
        kvd_ref ref = seal(a, KVD_ROOT, 1, 1);
        struct space *other = fixture_space("other", 64);
        struct attachment *c = fixture_attach(other);
        kvd_ref blocks[64];

        space_allocate(c, 64, blocks);
        ck_assert_uint_eq(space->blocks[kvd_ref_id(ref)].state, KVD_SEALED);
        check_clean(other);
}
END_TEST

START_TEST(pending_is_not_borrowed) {
        uint32_t tokens[BT] = {0, 1, 2, 3}, number, first;
        kvd_ref ref = seal(a, KVD_ROOT, 1, 1);
        struct append_request req = {.n_blocks = 1,
                                     .blocks = &ref,
                                     .n_tokens = BT,
                                     .tokens = tokens};

        ck_assert_int_eq(sequence_open(b, 8, &number), 0);
        ck_assert_int_eq(sequence_append(b, number, &req, &first), -EAGAIN);
        *word_of(a, 1) = 1;
        ck_assert_int_eq(sequence_append(b, number, &req, &first), 0);
}
END_TEST

/* Summaries are requested once the data is there, not before. */
START_TEST(worker_gets_it_later) {
        set(space, "kvreviver.on", "on");
        seal(a, KVD_ROOT, 1, 1);
        ck_assert_uint_eq(work(), 0);
        *word_of(a, 1) = 1;
        store_look_at_semaphores(store);
        ck_assert_uint_gt(work(), 0);
        ck_assert_uint_eq(counter(space, KVD_SPACE_SUMMARISED), 1);
}
END_TEST

/* A method that is switched on marks all blocks for summaries, also pending ones. */
START_TEST(method_turned_on_meanwhile) {
        seal(a, KVD_ROOT, 1, 1);
        set(space, "kvreviver.on", "on");
        ck_assert_uint_eq(work(), 0);
        *word_of(a, 1) = 1;
        store_look_at_semaphores(store);
        ck_assert_uint_gt(work(), 0);
}
END_TEST

START_TEST(death_before_the_write) {
        kvd_ref there = seal(a, KVD_ROOT, 1, 1), never, behind, other;
        bool more;

        never = seal(a, there, 1, 2);
        behind = seal(b, never, 0, 0);
        other = seal(b, there, 0, 0);
        *word_of(a, 1) = 1;
        b->words[kvd_ref_id(behind)].pins++;
        attachment_orphan(a);
        ck_assert_uint_eq(*word_of(a, 1), 1); /* its GPU work may still run */
        ck_assert(!is_poisoned(never));
        attachment_free(a, true);

        ck_assert(!is_poisoned(there) && is_poisoned(never) && is_poisoned(behind) &&
                  !is_poisoned(other));
        /* waiting readers continue */
        ck_assert_uint_ge(semaphore_words(space)[semaphore_at(0, 0) - 1], 2);
        ck_assert_uint_eq(space->ix->n_pending, 0);
        ck_assert(space->blocks[kvd_ref_id(there)].indexed &&
                  !space->blocks[kvd_ref_id(never)].indexed &&
                  !space->blocks[kvd_ref_id(behind)].indexed);
        /* its child is pinned */
        ck_assert_uint_eq(space->blocks[kvd_ref_id(never)].state, KVD_SEALED);
        check_clean(space);
        idle();
        check_clean(space);
        b->words[kvd_ref_id(behind)].pins--;
        store_look_at_semaphores(store);
        ck_assert(!store_look_at_semaphores(store));
        ck_assert_uint_eq(space->blocks[kvd_ref_id(never)].state, KVD_FREE);
        ck_assert_uint_eq(counter(space, KVD_SPACE_POISONED), 2);
        ck_assert_int_eq(space_evict(space, 0, KVD_ROOT, &more), 2);
}
END_TEST

START_TEST(nothing_behind_poison) {
        kvd_ref never = seal(a, KVD_ROOT, 1, 1), ret;

        b->words[kvd_ref_id(never)].pins++;
        attachment_free(a, true);
        ck_assert_int_eq(seal_n(b, never, 1, 0, 0, &ret), -ESTALE);
        b->words[kvd_ref_id(never)].pins--;
        store_look_at_semaphores(store);
}
END_TEST

/* Its hold and its charge stayed for as long as the session, a week perhaps. */
START_TEST(sessions_leave_poisoned_blocks) {
        kvd_ref there = seal(b, KVD_ROOT, 0, 0), never = seal(a, there, 1, 1), ends[2];
        struct session_request q = {.name = "pinned",
                                    .keep = KVD_keep_pinned,
                                    .ttl_s = 60,
                                    .n_blocks = 2,
                                    .blocks = ends};
        bool more;

        ends[0] = seal(b, never, 0, 0);
        ends[1] = seal(b, never, 0, 0);
        ck_assert_int_eq(space_session(b, &q), 0);
        q.name = "high";
        q.keep = KVD_keep_high;
        ck_assert_int_eq(space_session(b, &q), 0);
        ck_assert_uint_eq(domain_used(domain, KVD_COST_session_pins), 6 * BLOCK_BYTES);
        attachment_free(a, true);
        store_look_at_semaphores(store);
        check_clean(space);
        ck_assert_uint_eq(usage_of(space).sealed, 1);
        ck_assert_uint_eq(domain_used(domain, KVD_COST_session_pins), BLOCK_BYTES);
        ck_assert_int_eq(space_evict(space, 0, KVD_ROOT, &more), 0);
        ck_assert_int_eq(space_session_end(space, 0, "pinned"), 0);
        ck_assert_int_eq(space_evict(space, 0, KVD_ROOT, &more), 1);
}
END_TEST

/* A chain of 16 has a run, which must no longer be found either. */
START_TEST(poison_in_the_middle_of_a_run) {
        kvd_ref refs[16], tail[8];

        ck_assert_int_eq(seal_n(b, KVD_ROOT, 4, 0, 0, refs), 0);
        ck_assert_int_eq(seal_n(a, refs[3], 4, 1, 1, refs + 4), 0);
        ck_assert_int_eq(seal_n(b, refs[7], 8, 0, 0, tail), 0);
        ck_assert_uint_eq(usage_of(space).runs, 1);
        attachment_free(a, true);
        ck_assert_uint_eq(usage_of(space).runs, 0);
        store_look_at_semaphores(store); /* frees children first, then their parents */
        ck_assert_uint_eq(usage_of(space).sealed, 4);
}
END_TEST

/* The child of a dead client's block is still being written by another client's stream. */
START_TEST(pending_behind_poison) {
        kvd_ref never = seal(a, KVD_ROOT, 1, 1), behind = seal(b, never, 5, 1);

        attachment_free(a, true);
        ck_assert(is_poisoned(behind));
        ck_assert_uint_eq(space->ix->n_pending, 1);
        check_clean(space);
        ck_assert(store_look_at_semaphores(store));
        /* still being written */
        ck_assert_uint_eq(space->blocks[kvd_ref_id(behind)].state, KVD_SEALED);
        *word_of(b, 5) = 1;
        ck_assert(!store_look_at_semaphores(store));
        ck_assert_uint_eq(usage_of(space).sealed, 0);
}
END_TEST

START_TEST(both_die) {
        kvd_ref never = seal(a, KVD_ROOT, 1, 1), behind = seal(b, never, 5, 1);

        attachment_free(b, true);
        ck_assert(is_poisoned(behind) && !is_poisoned(never));
        attachment_free(a, true);
        ck_assert_uint_eq(usage_of(space).sealed, 0);
        ck_assert_uint_eq(usage_of(space).poisoned + usage_of(space).pending, 0);
}
END_TEST

/* Few blocks are freed at once when the client ends, without idle work. */
START_TEST(what_a_producer_was_filling_is_free_when_it_ends) {
        kvd_ref blocks[4], never = seal(a, KVD_ROOT, 1, 2);

        ck_assert_int_eq(space_allocate(a, 4, blocks), 4);
        ck_assert_uint_eq(usage_of(space).filling, 4);
        attachment_free(a, true);
        ck_assert(is_poisoned(never));
        ck_assert_uint_eq(usage_of(space).filling + usage_of(space).limbo, 0);
        idle();
        ck_assert_uint_eq(usage_of(space).sealed, 0);
}
END_TEST

/* A row's values continue where its previous client ended. */
START_TEST(row_is_used_again) {
        uint32_t row = attachment_semaphore_row(a);
        kvd_ref ret;

        seal(a, KVD_ROOT, 1, 41);
        attachment_free(a, true);
        idle();
        a = fixture_attach(space);
        ck_assert_uint_eq(attachment_semaphore_row(a), row);
        ck_assert_uint_eq(*word_of(a, 1), 41);
        ck_assert_uint_eq(desc_of(seal(a, KVD_ROOT, 1, 41))->semaphore, 0);
        ck_assert_int_eq(seal_n(a, KVD_ROOT, 1, 1, 42, &ret), 0);
        ck_assert_uint_eq(space->ix->n_pending, 1);
}
END_TEST

START_TEST(row_waits_for_the_wake) {
        uint32_t row = attachment_semaphore_row(a);
        struct store_wake wake, again;

        store_set_wakes(store, true);
        seal(a, KVD_ROOT, 1, 3);
        seal(a, KVD_ROOT, 64, 4);
        attachment_free(a, true);
        idle();
        a = fixture_attach(space);
        ck_assert_uint_ne(attachment_semaphore_row(a), row);
        ck_assert(store_next_wake(store, &wake));
        ck_assert_uint_eq(wake.n, 2);
        ck_assert_uint_eq(wake.words[0], row * SEMAPHORES);
        ck_assert_uint_eq(wake.words[1], 3);
        ck_assert_uint_eq(wake.words[2], row * SEMAPHORES + 63);
        ck_assert_uint_eq(wake.words[3], 4);
        ck_assert_int_eq(wake.fd, space_semaphore_fd(space));
        ck_assert(!store_next_wake(store, &again)); /* one wake at a time */
        store_wake_done(store, false);
        ck_assert(store_next_wake(store, &again));
        store_wake_done(store, true);
        ck_assert(!store_next_wake(store, &again));
        idle();
        b = fixture_attach(space);
        ck_assert_uint_eq(attachment_semaphore_row(b), row);
}
END_TEST

START_TEST(no_wake_where_nobody_waits) {
        struct store_wake wake;

        store_set_wakes(store, true);
        seal(a, KVD_ROOT, 1, 3);
        *word_of(a, 1) = 3;
        attachment_free(a, true);
        ck_assert(!store_next_wake(store, &wake));
        ck_assert_uint_eq(counter(space, KVD_SPACE_POISONED), 0);
}
END_TEST

/* Readers' streams wait in a page that outlives the space. */
START_TEST(space_deleted_meanwhile) {
        struct space *doomed = ordered_space("doomed");
        struct space *before = space;
        struct store_wake wake;
        uint64_t bytes = 4096;
        shm_u64 *page;
        kvd_ref ref;

        page = mmap(NULL, bytes, PROT_READ, MAP_SHARED, space_semaphore_fd(doomed), 0);
        ck_assert_ptr_ne(page, MAP_FAILED);
        store_set_wakes(store, true);
        space = doomed;
        ref = seal(fixture_attach(doomed), KVD_ROOT, 2, 6);
        ck_assert_uint_ne(ref, 0);
        space = before;
        ck_assert_int_eq(space_delete(doomed, true), 0);
        idle();
        ck_assert_uint_eq(page[1], 6);
        ck_assert(store_next_wake(store, &wake));
        ck_assert_uint_eq(wake.words[1], 6);
        store_wake_done(store, true);
        idle();
        ck_assert_ptr_null(store->deleted);
        munmap((void *)page, bytes);
}
END_TEST

/* Random operations, with checks of all invariants. */
START_TEST(at_random) {
        struct attachment *all[6] = {a, b};
        kvd_ref refs[64] = {0};
        uint64_t value = 1;
        bool more;

        srandom((unsigned)_i + 1);
        for (int step = 0; step < 2000; step++) {
                uint32_t who = (uint32_t)random() % 6, slot = 1 + (uint32_t)random() % 3,
                         k = (uint32_t)random() % 64;
                kvd_ref parent = k % 3 ? refs[k] : KVD_ROOT, ret[2] = {0};

                if (!all[who]) {
                        all[who] = fixture_attach(space);
                        continue;
                }
                switch (random() % 8) {
                case 0: *word_of(all[who], slot) = value; break;
                case 1:
                        attachment_free(all[who], true);
                        all[who] = NULL;
                        break;
                case 2: space_evict(space, 1 + k % 4, KVD_ROOT, &more); break;
                case 3: store_look_at_semaphores(store); break;
                default:
                        if (space->count[KVD_FILLING] + space->count[KVD_SEALED] < 40 &&
                            seal_n(all[who], parent, 1 + k % 2, random() % 2 ? slot : 0, ++value,
                                   ret) == 0)
                                refs[k] = ret[0];
                }
                if (step % 50 == 0)
                        check_clean(space);
        }
        for (uint32_t i = 0; i < 6; i++)
                attachment_free(all[i], true);
        a = b = NULL;
        idle();
        ck_assert(!store_look_at_semaphores(store));
        ck_assert_uint_eq(usage_of(space).poisoned + usage_of(space).pending, 0);
}
END_TEST

SUITE("semaphore", FIXTURE(open_all, close_all),
      TESTS(data_arrives, data_that_is_there_at_once, nonsense_is_refused, values_out_of_order,
            pending_is_not_evicted, segment_with_pending_stays, pending_is_not_borrowed,
            worker_gets_it_later, method_turned_on_meanwhile, death_before_the_write,
            nothing_behind_poison, sessions_leave_poisoned_blocks, poison_in_the_middle_of_a_run,
            pending_behind_poison, both_die, what_a_producer_was_filling_is_free_when_it_ends,
            row_is_used_again, row_waits_for_the_wake, no_wake_where_nobody_waits,
            space_deleted_meanwhile),
      LOOPS(20, at_random))
