/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Exact copies whose bytes go to files and come back. The test plays the disk process and moves the
 * bytes. Every block that is brought back is compared.
 */

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "store/file/file.h"
#include "store/file_tier.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

#define SLOT file_slot_bytes(BLOCK_BYTES, 0)
#define SLOTS 64u
#define EXTENT_BYTES(slots) ((uint64_t)DISK_SECTOR + (slots)*SLOT)
#define MEMORY 16u /* number of copies that memory has room for */
/* copies at which none goes to a file yet; one place is reserved for copies that come back */
#define FEW (MEMORY - MEMORY / 4 - 1)
#define BLOCKS 40u
#define MOST_FILES 2u

struct written {
        struct kvd_label label;
        uint8_t block[BLOCK_BYTES];
};

static struct written slots[FILE_SLOTS]; /* the file has one extent */
static struct file_super super;
static const int32_t no_errors[KVD_DISK_ITEMS];
static struct space *space;
static struct attachment *a;
static struct table t;

/* ---- a disk process -------------------------------------------------------------------------- */

static void look(void) {
        struct file_super copies[FILE_COPIES];

        for (uint32_t i = 0; i < FILE_COPIES; i++)
                memcpy(&copies[i], &super, sizeof super);
        store_disk_looked(store, 0, copies, sizeof copies);
}

static const struct store_disk_question *now(void) {
        const struct store_disk_question *q;
        bool later;

        while ((q = store_disk_next(store, &later)) && q->what == STORE_DISK_SUPER) {
                memcpy(&super, q->super, sizeof super);
                store_disk_told(store, 0);
        }
        return q;
}

static void open_it(uint32_t n_slots) {
        struct store_disk_config config = {.there = true,
                                           .bytes = FILE_HEAD + EXTENT_BYTES(n_slots)};

        fixture_open(64, MEMORY);
        ck_assert_int_eq(store_disk_begin(store, &config), 0);
        fixture_super(&super, 1, EXTENT_BYTES(n_slots));
        look();
        ck_assert_int_eq(now()->what, STORE_DISK_SCAN);
        store_disk_scanned(store, 0, 0, NULL, 0);
        space = fixture_space("s", 0);
        a = fixture_attach(space);
        set(space, "kvreviver", "on");
        set(space, "pressure", "off");
        table_open(&t, a, 64, true);
}

static void close_files(void) {
        check_clean(space);
        fixture_close();
}

static struct store_disk_info info(void) {
        struct store_disk_info ret;

        store_disk_get_info(store, &ret);
        return ret;
}

static void move(const struct store_disk_question *q, int32_t *errors) {
        for (uint32_t i = 0; i < q->n; i++) {
                struct written *s = &slots[q->items[i].place % FILE_SLOTS];
                uint64_t offset;
                int fd = store_disk_memory(store, i, &offset);

                ck_assert_int_ge(fd, 0);
                if (q->what == STORE_DISK_WRITE) {
                        s->label = q->items[i].label;
                        ck_assert_int_eq(pread(fd, s->block, BLOCK_BYTES, (off_t)offset),
                                         BLOCK_BYTES);
                } else if (memcmp(&s->label, &q->items[i].label, sizeof s->label) == 0) {
                        ck_assert_int_eq(pwrite(fd, s->block, BLOCK_BYTES, (off_t)offset),
                                         BLOCK_BYTES);
                } else {
                        errors[i] = -EBADMSG;
                }
        }
}

static void answer(const struct store_disk_question *q) {
        int32_t errors[KVD_DISK_ITEMS] = {0};

        move(q, errors);
        store_disk_moved(store, errors, NULL, q->n);
}

/* The next question, which must be about copies, or NULL. */
static const struct store_disk_question *asked(void) {
        const struct store_disk_question *q = NULL;

        for (uint32_t i = 0; !q && i < 100; i++) {
                idle();
                work();
                q = now();
        }
        ck_assert(!q || q->copies);
        return q;
}

/* Does all work, of the disk and the worker, and takes the changes, until there is nothing left. */
static void play(void) {
        for (uint32_t quiet = 0; quiet < 4; quiet++) {
                const struct store_disk_question *q;

                idle();
                q = now();
                if (q)
                        answer(q);
                quiet = q ? 0 : quiet;
                quiet = work() ? 0 : quiet;
                table_sync(&t, NULL);
                table_check(&t);
        }
        check_clean(space);
}

/* ---- copies ---------------------------------------------------------------------------------- */

static uint32_t cool_some(uint32_t from, uint32_t n) {
        uint32_t entries[BLOCKS];

        for (uint32_t i = 0; i < n; i++)
                entries[i] = from + i;
        return (uint32_t)sequence_cool(a, t.number, KVD_COOL_SPILL, entries, n);
}

/* Spills n blocks of the sequence, four at a time, as memory has room for no more. */
static void spill(uint32_t n) {
        ck_assert_int_eq(table_append(&t, n * BT, 10), 0);
        for (uint32_t i = 0; i < n; i += 4) {
                ck_assert_uint_eq(cool_some(i, 4), 4);
                play();
        }
        ck_assert_uint_eq(usage_of(space).spilled, n);
        ck_assert_uint_eq(usage_of(space).private, 0);
}

static void want(uint32_t from, uint32_t n) {
        uint32_t entries[BLOCKS], exact, approx;

        for (uint32_t i = 0; i < n; i++)
                entries[i] = from + i;
        ck_assert_int_eq(sequence_revive(a, t.number, KVD_REVIVE_EXACT, entries, n, &exact,
                                         &approx),
                         0);
}

static uint32_t resident(void) {
        uint32_t n = 0;

        for (uint32_t i = 0; i < t.n; i++)
                n += t.slots[i].ref != 0;
        return n;
}

static bool is_below(uint32_t entry) {
        const struct entry *e = &sequence_find(a, t.number)->entries[entry];

        return e->place != KVD_NOWHERE && !place_is_here(space, e->place);
}

static uint32_t first_below(void) {
        uint32_t i = 0;

        while (!is_below(i))
                i++;
        return i;
}

static void expect_no_slot(void) {
        ck_assert_uint_eq(info().copies, 0);
        ck_assert_uint_eq(info().used, 0);
}

START_TEST(what_memory_has_no_room_for_goes_to_the_file_and_comes_back) {
        open_it(2 * SLOTS);
        spill(BLOCKS);
        ck_assert_uint_ge(info().copies, BLOCKS - MEMORY + MEMORY / 4);
        ck_assert_uint_le(usage_of(space).copy_bytes, FEW * BLOCK_BYTES);
        ck_assert_uint_eq(info().records, 0);
        want(0, BLOCKS);
        play();
        ck_assert_uint_eq(resident(), BLOCKS);
        ck_assert_uint_eq(counter(space, KVD_SPACE_REVIVED_EXACT), BLOCKS);
        ck_assert_uint_eq(counter(space, KVD_SPACE_REVIVE_BROKEN), 0);
        expect_no_slot();
        table_close(&t);
        idle();
        close_files();
}
END_TEST

/* Copies that memory has room for are not written. */
START_TEST(few_copies_stay_in_memory) {
        open_it(2 * SLOTS);
        spill(FEW - FEW % 4);
        expect_no_slot();
        ck_assert_uint_eq(info().copies_written, 0);
        close_files();
}
END_TEST

/* A client cools and revives repeatedly, more blocks than memory has room for. */
START_TEST(round_and_round) {
        open_it(2 * SLOTS);
        spill(BLOCKS);
        for (uint32_t round = 0; round < 20; round++) {
                want(round % 3 * 8, 24);
                play();
                ck_assert_uint_eq(resident(), 24);
                for (uint32_t i = 0; i < 24; i += 4) {
                        ck_assert_uint_eq(cool_some(round % 3 * 8 + i, 4), 4);
                        play();
                }
                ck_assert_uint_eq(resident(), 0);
        }
        want(0, BLOCKS);
        play();
        ck_assert_uint_eq(resident(), BLOCKS);
        expect_no_slot();
        close_files();
}
END_TEST

/* ---- their end ------------------------------------------------------------------------------- */

/* how: 0: no question is out; 1: copies are being read; 2: copies are being written. */
static const struct store_disk_question *leave_one_out(uint32_t how) {
        const struct store_disk_question *q = NULL;

        spill(BLOCKS - 8);
        if (how == 1)
                want(0, BLOCKS - 8);
        if (how == 2) {
                ck_assert_int_eq(table_append(&t, 4 * BT, 10), 0);
                ck_assert_uint_eq(cool_some(BLOCKS - 8, 4), 4);
                work();
                table_sync(&t, NULL);
        }
        if (how)
                q = asked();
        ck_assert(!how || q);
        if (how)
                ck_assert_int_eq(q->what, how == 1 ? STORE_DISK_READ : STORE_DISK_WRITE);
        check_clean(space);
        return q;
}

START_TEST(a_sequence_that_ends_leaves_no_slot) {
        const struct store_disk_question *q;

        open_it(2 * SLOTS);
        q = leave_one_out((uint32_t)_i);
        table_close(&t);
        idle();
        check_clean(space);
        ck_assert_uint_ge(info().copies, q ? q->n : 0);
        ck_assert(q || !info().copies);
        if (q)
                answer(q);
        ck_assert_ptr_null(now()); /* no reader waits any more */
        expect_no_slot();
        ck_assert_uint_eq(usage_of(space).copy_bytes, 0);
        table_open(&t, a, 64, true);
        spill(BLOCKS);
        want(0, BLOCKS);
        play();
        ck_assert_uint_eq(resident(), BLOCKS);
        close_files();
}
END_TEST

START_TEST(a_deleted_space_leaves_no_slot) {
        const struct store_disk_question *q;

        open_it(2 * SLOTS);
        q = leave_one_out((uint32_t)_i);
        attachment_free(a, false);
        ck_assert_int_eq(space_delete(space, true), 0);
        idle();
        if (q)
                store_disk_moved(store, no_errors, NULL, q->n); /* it had descriptors */
        ck_assert_ptr_null(now());
        idle();
        expect_no_slot();
        space = fixture_space("s", 0);
        a = fixture_attach(space);
        set(space, "kvreviver", "on");
        set(space, "pressure", "off");
        table_open(&t, a, 64, true);
        spill(BLOCKS);
        want(0, BLOCKS);
        play();
        ck_assert_uint_eq(resident(), BLOCKS);
        close_files();
}
END_TEST

/* ---- what disks do --------------------------------------------------------------------------- */

START_TEST(one_that_rotted_is_lost_and_never_shown) {
        uint32_t lost;

        open_it(2 * SLOTS);
        spill(BLOCKS);
        lost = first_below();
        for (uint32_t i = 0; i < SLOTS; i++) /* the disk process notices it; or a worker does */
                if (_i == 0)
                        slots[i].label.sequence ^= slots[i].label.sequence == 0 ? 0 : 1;
                else
                        slots[i].block[7] ^= 1;
        want(lost, 1);
        play();
        ck_assert_uint_eq(resident(), 0);
        ck_assert_uint_eq(t.slots[lost].flags, KVD_ENTRY_OWN | KVD_ENTRY_DROPPED);
        ck_assert_uint_eq(counter(space, KVD_SPACE_REVIVE_BROKEN), 1);
        ck_assert_uint_eq(info().copies_lost, _i == 0);
        ck_assert_uint_eq(info().wrong, _i == 0);
        table_close(&t);
        idle();
        expect_no_slot();
        close_files();
}
END_TEST

static void lose_process(void) {
        store_disk_lost(store);
        look();
}

/* The process dies while nothing is out, or copies are read or written (leave_one_out). */
START_TEST(a_process_that_dies_costs_no_copy) {
        open_it(2 * SLOTS);
        leave_one_out((uint32_t)_i);
        lose_process();
        check_clean(space);
        play();
        want(0, t.n);
        play();
        ck_assert_uint_eq(resident(), t.n);
        ck_assert_uint_eq(counter(space, KVD_SPACE_REVIVE_BROKEN), 0);
        close_files();
}
END_TEST

/* A revival is refused after three deaths, and the copy is still there. */
START_TEST(processes_that_die_and_die_are_a_refusal) {
        uint32_t one;

        open_it(2 * SLOTS);
        spill(BLOCKS);
        one = first_below();
        want(one, 1);
        for (uint32_t i = 0; i < 3; i++) {
                ck_assert_int_eq(asked()->what, STORE_DISK_READ);
                lose_process();
        }
        ck_assert_uint_eq(counter(space, KVD_SPACE_REVIVE_REFUSED), 1);
        play();
        ck_assert_uint_eq(resident(), 0);
        want(one, 1);
        play();
        ck_assert_uint_eq(resident(), 1);
        close_files();
}
END_TEST

/* A file that hangs delays no client. Once it works again, its copies are there. */
START_TEST(a_file_that_hangs_is_not_waited_for) {
        const struct store_disk_question *q;

        open_it(2 * SLOTS);
        spill(BLOCKS);
        want(0, BLOCKS);
        q = asked();
        ck_assert_int_eq(q->what, STORE_DISK_READ);
        store_disk_hangs(store);
        check_clean(space);
        play();
        ck_assert_uint_eq(sequence_find(a, t.number)->n_fetching, 0);
        ck_assert_uint_lt(resident(), BLOCKS);
        ck_assert_uint_eq(counter(space, KVD_SPACE_REVIVE_BROKEN), 0);
        want(0, BLOCKS);
        play();
        ck_assert_uint_lt(resident(), BLOCKS);
        if (_i == 0)
                answer(q);
        lose_process();
        play();
        want(0, BLOCKS);
        play();
        want(0, BLOCKS); /* also copies that were read when no client waited */
        play();
        ck_assert_uint_eq(resident(), BLOCKS);
        close_files();
}
END_TEST

/* Only the copies in the file are lost, whether a client waits for them or asks later. */
START_TEST(a_file_that_is_off_costs_what_it_has) {
        uint32_t below = 0;

        open_it(2 * SLOTS);
        spill(BLOCKS);
        below = (uint32_t)info().copies;
        if (_i) {
                want(0, BLOCKS);
                asked();
        }
        store_disk_off(store, "a test");
        check_clean(space);
        want(0, BLOCKS);
        play();
        ck_assert_uint_eq(counter(space, KVD_SPACE_REVIVE_BROKEN), below);
        ck_assert_uint_eq(info().copies_lost, below);
        ck_assert_uint_eq(resident(), BLOCKS - below);
        ck_assert_uint_gt(below, 0);
        table_close(&t);
        idle();
        if (_i)
                store_disk_lost(store);
        expect_no_slot();
        close_files();
}
END_TEST

/* Copies may use half of the file. The others stay in memory, and then in the pool. */
START_TEST(a_full_file_takes_no_more) {
        uint64_t cooled;

        open_it(20);
        ck_assert_int_eq(table_append(&t, BLOCKS * BT, 10), 0);
        for (uint32_t i = 0; i < BLOCKS; i += 2) {
                cool_some(i, 2);
                play();
        }
        cooled = usage_of(space).spilled;
        ck_assert_uint_eq(info().copies, 10);
        ck_assert_uint_eq(cooled, MEMORY - 1 + 10); /* one place is for copies that come back */
        ck_assert_uint_eq(resident(), BLOCKS - cooled);
        for (uint32_t i = 0; i < BLOCKS; i++) {
                want(i, 1);
                play();
        }
        ck_assert_uint_eq(resident(), BLOCKS);
        expect_no_slot();
        close_files();
}
END_TEST

/* If there is no memory for a copy that comes back, the revival is refused. */
START_TEST(without_memory_nothing_comes) {
        uint64_t refused;

        open_it(20);
        for (uint32_t i = 0; i < FEW + 10; i++) {
                ck_assert_int_eq(table_append(&t, BT, 10 + i * BT), 0);
                ck_assert_uint_eq(cool_some(i, 1), 1);
                play();
        }
        refused = counter(space, KVD_SPACE_REVIVE_REFUSED);
        while (spill_charge(space, BLOCK_BYTES))
                ;
        want(first_below(), 1);
        while (counter(space, KVD_SPACE_REVIVE_REFUSED) == refused) {
                work();
                ck_assert_ptr_null(now());
        }
        spill_discharge(space, usage_of(space).sketch_bytes);
        check_clean(space);
        want(0, t.n);
        play();
        ck_assert_uint_eq(resident(), t.n);
        close_files();
}
END_TEST

/* A write that fails leaves the copy in memory. */
START_TEST(what_the_disk_did_not_take_stays_in_memory) {
        const struct store_disk_question *q;
        int32_t errors[KVD_DISK_ITEMS];

        open_it(2 * SLOTS);
        q = NULL;
        ck_assert_int_eq(table_append(&t, 16 * BT, 10), 0);
        ck_assert_uint_eq(cool_some(0, 14), 14);
        work();
        table_sync(&t, NULL);
        q = asked();
        ck_assert_int_eq(q->what, STORE_DISK_WRITE);
        for (uint32_t i = 0; i < KVD_DISK_ITEMS; i++)
                errors[i] = -EIO;
        store_disk_moved(store, errors, NULL, q->n);
        ck_assert_uint_eq(info().copies, 0);
        check_clean(space);
        play();
        want(0, 14);
        play();
        ck_assert_uint_eq(resident(), 16);
        close_files();
}
END_TEST

/*
 * A copy that is wanted while it is being written comes from memory, and stays there. _i 1: even if
 * a worker is about to read it when the write ends.
 */
START_TEST(one_that_is_wanted_while_it_goes_stays) {
        const struct store_disk_question *q;

        open_it(2 * SLOTS);
        q = leave_one_out(2);
        want(0, t.n);
        if (_i)
                ck_assert(worker_take());
        else
                work();
        check_clean(space);
        answer(q);
        check_clean(space);
        if (_i)
                worker_do();
        ck_assert_uint_eq(counter(space, KVD_SPACE_REVIVE_BROKEN), 0);
        play();
        ck_assert_uint_eq(resident(), t.n);
        close_files();
}
END_TEST

/* A quota of a quarter of the pool allows a quarter of the file, of which copies may use half. */
START_TEST(a_domain_has_no_more_than_its_share) {
        struct domain_config q = {.name = "q",
                                  .quota = 16 * BLOCK_BYTES,
                                  .client_quota = UINT64_MAX};

        open_it(64);
        ck_assert_int_eq(store_domain(store, &q, &domain), 0);
        space = fixture_space("s", 0);
        a = fixture_attach(space);
        set(space, "kvreviver", "on");
        set(space, "pressure", "off");
        table_open(&t, a, 64, true);
        for (uint32_t i = 0; i < BLOCKS; i++) {
                ck_assert_int_eq(table_append(&t, BT, 10 + i), 0);
                cool_some(i, 1);
                play();
                if (resident())
                        break;
        }
        ck_assert_uint_eq(info().copies, (FILE_HEAD + EXTENT_BYTES(64)) / 4 / 2 / SLOT);
        ck_assert_uint_eq(usage_of(space).copy_bytes, (MEMORY / 4 - 1) * BLOCK_BYTES);
        close_files();
}
END_TEST

/* The label of a copy has nothing but a sequence number, unlike that of a record. */
START_TEST(copies_are_no_records) {
        struct kvd_label none = {0};

        open_it(2 * SLOTS);
        spill(BLOCKS);
        for (uint32_t i = 0; i < SLOTS; i++) {
                ck_assert_uint_eq(slots[i].label.epoch, 0);
                none.sequence = slots[i].label.sequence;
                ck_assert_mem_eq(&slots[i].label, &none, sizeof none);
        }
        close_files();
}
END_TEST

static void forget(void) {
        memset(slots, 0, sizeof slots);
        memset(&super, 0, sizeof super);
}

SUITE("copies", FIXTURE(forget, forget),
      LOOPS(2, one_that_rotted_is_lost_and_never_shown, a_file_that_hangs_is_not_waited_for,
            a_file_that_is_off_costs_what_it_has, one_that_is_wanted_while_it_goes_stays),
      LOOPS(3, a_sequence_that_ends_leaves_no_slot, a_deleted_space_leaves_no_slot,
            a_process_that_dies_costs_no_copy),
      TESTS(what_memory_has_no_room_for_goes_to_the_file_and_comes_back, few_copies_stay_in_memory,
            round_and_round, processes_that_die_and_die_are_a_refusal, a_full_file_takes_no_more,
            without_memory_nothing_comes, what_the_disk_did_not_take_stays_in_memory,
            a_domain_has_no_more_than_its_share, copies_are_no_records))
