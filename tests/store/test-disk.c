/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The file tier as a disk process sees it, which the test plays: the questions that it gets, and
 * what the store does after answers that a disk rarely gives.
 */

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/key.h"
#include "store/account.h"
#include "store/file/catalog.h"
#include "store/file_tier.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

#define N 3u /* blocks per chain */
#define SLOT file_slot_bytes(BLOCK_BYTES, 0)
#define EXTENT_BYTES(slots) ((uint64_t)DISK_SECTOR + (slots)*SLOT)

#define MOST_FILES 2u

/* The superblock of each file, and how many times it was written. */
static struct file_super supers[MOST_FILES];
static uint32_t told[MOST_FILES];
static struct kvd_disk_found records[N];
static uint32_t n_records;
static uint32_t n_files;
static bool whole; /* spaces are bidirectional */
static uint32_t tokens[N * BT];
static struct space *space;
static struct attachment *attachment;

/* ---- a disk process -------------------------------------------------------------------------- */

/* Reports the file as its process does after opening it. */
static void look(uint32_t file) {
        struct file_super copies[FILE_COPIES] = {supers[file], supers[file]};

        store_disk_looked(store, file, 0, copies, sizeof copies);
}

/* Opens n files with so many extents each. */
static void open_files(uint32_t n, uint32_t extents, uint64_t extent_bytes) {
        struct store_disk_config config = {.n_files = n};

        n_files = n;
        for (uint32_t i = 0; i < n; i++)
                config.bytes[i] = FILE_HEAD + extents * extent_bytes;
        fixture_open(64, 0);
        ck_assert_int_eq(store_disk_begin(store, &config), 0);
        for (uint32_t i = 0; i < n; i++)
                look(i);
}

static void open_file(uint32_t extents, uint64_t extent_bytes) {
        if (!supers[0].serial)
                fixture_super(supers, 0, extents, extent_bytes);
        open_files(1, extents, extent_bytes);
}

/* The next question to a file, or NULL. Writes of superblocks are done at once. */
static const struct store_disk_question *asked_of(uint32_t file) {
        const struct store_disk_question *q;
        bool later;

        while ((q = store_disk_next(store, file, &later)) && q->what == STORE_DISK_SUPER) {
                memcpy(&supers[file], q->super, sizeof supers[file]);
                told[file]++;
                store_disk_told(store, file, 0);
        }
        return q;
}

static const struct store_disk_question *asked_from(uint32_t file, enum store_disk_ask what) {
        const struct store_disk_question *q = NULL;

        for (uint32_t i = 0; !q && i < 1000; i++) {
                idle();
                for (uint32_t other = 0; other < n_files; other++)
                        if (other != file && what != STORE_DISK_SCAN)
                                ck_assert_ptr_null(asked_of(other));
                q = asked_of(file);
        }
        ck_assert_msg(q && q->what == what, "%d is asked instead of %d", q ? (int)q->what : -1,
                      what);
        return q;
}

static const struct store_disk_question *asked(enum store_disk_ask what) {
        return asked_from(0, what);
}

static uint64_t epoch_of_first(void) {
        return supers[0].namespaces[0].epoch;
}

/* Answers a question, whose first `fails` items fail. The next scan finds the written records. */
static void moved(const struct store_disk_question *q, uint32_t fails) {
        int32_t errors[KVD_DISK_ITEMS] = {0};

        for (uint32_t i = 0; i < q->n && i < fails; i++)
                errors[i] = -EIO;
        for (uint32_t i = 0; q->what == STORE_DISK_WRITE && i < q->n && n_records < N; i++)
                records[n_records++] = (struct kvd_disk_found){.label = q->items[i].label,
                                                               .key = file_key(supers[0].secret,
                                                                               &q->items[i].label,
                                                                               q->items[i].tokens),
                                                               .place = q->items[i].place};
        store_disk_moved(store, 0, errors, NULL, q->n);
}

static struct store_disk_info info(void) {
        struct store_disk_info ret;

        store_disk_get_info(store, 0, &ret);
        return ret;
}

static void scan_one_extent(void) {
        asked(STORE_DISK_SCAN);
        store_disk_scanned(store, 0, 0, n_records ? SLOT : 0, records, n_records);
        ck_assert_int_eq(info().state, STORE_DISK_ON);
        space = fixture_space("s", 0);
        attachment = fixture_attach(space);
}

/* Ends the test, without more answers of the disk. */
static void close_file(void) {
        attachment = attachment_free(attachment, false);
        fixture_close();
}

static void forget_files(void) {
        memset(supers, 0, sizeof supers);
        memset(told, 0, sizeof told);
        n_records = 0;
        whole = false;
}

/* ---- chains ---------------------------------------------------------------------------------- */

/* Seals a chain of n blocks, whose tokens count up from `first`. */
static void make_chain(uint32_t n, uint32_t first) {
        kvd_ref refs[N];
        struct seal_request q = {.n_blocks = n,
                                 .blocks = refs,
                                 .n_tokens = n * BT,
                                 .tokens = tokens};

        for (uint32_t i = 0; i < ARRAY_SIZE(tokens); i++)
                tokens[i] = first + i;
        if (whole) {
                q.root = q.n_tokens;
                q.prefix_key = kvd_key_prefix(space_index(space), tokens, q.n_tokens);
        }
        ck_assert_int_eq(space_allocate(attachment, n, refs), (int)n);
        ck_assert_int_eq(space_seal(attachment, &q, refs), 0);
}

/* The blocks that a fetch of the last chain promises. Answers the reads that it asks for. */
static int64_t fetch(uint32_t n) {
        struct fetch_request q = {.n_tokens = n * BT, .tokens = tokens};
        int fd;
        int64_t promised = space_fetch(attachment, &q, &fd);

        if (fd >= 0)
                moved(asked(STORE_DISK_READ), 0);
        return promised / BT;
}

static void evict(void) {
        bool more = true;

        while (more)
                space_evict(space, N, KVD_ROOT, &more);
}

static int demoted(void) {
        return space_demoted(space, &(uint64_t){0});
}

/* ---- tests ----------------------------------------------------------------------------------- */

START_TEST(what_the_disk_did_not_take_is_said) {
        open_file(1, EXTENT_BYTES(4));
        scan_one_extent();
        make_chain(1, 1000);
        make_chain(1, 2000);
        ck_assert_int_eq(space_demote(space), 1);
        moved(asked(STORE_DISK_WRITE), 1);
        for (uint32_t i = 0; i < 1000 && demoted() == 1; i++)
                ck_assert_ptr_null(asked_of(0));
        ck_assert_int_eq(demoted(), -ENOSPC);
        ck_assert_ptr_nonnull(strstr(store_why(store), "1 blocks could not be written"));
        ck_assert_uint_eq(info().records, 1);
        close_file();
}
END_TEST

/* A restart once found 416 of 480 records: the last write had not been answered. */
START_TEST(unanswered_writes_do_not_count_as_written) {
        const struct store_disk_question *q;

        open_file(1, EXTENT_BYTES(4));
        scan_one_extent();
        make_chain(N, 1000);
        space_demote(space);
        q = asked(STORE_DISK_WRITE);
        ck_assert_uint_eq(q->n, N);
        ck_assert_uint_eq(info().records, 0);
        ck_assert_uint_eq(info().used, 0);
        moved(q, 1);
        ck_assert_uint_eq(info().records, N - 1);
        ck_assert_uint_eq(info().used, (N - 1) * SLOT);
        close_file();
}
END_TEST

/* Another process opens the file again, and gets the question that was not answered. */
static void lose_process(void) {
        store_disk_lost(store, 0);
        ck_assert_ptr_null(asked_of(0));
        look(0);
}

/* The next question must be a superblock. It is not answered. */
static void expect_super(void) {
        const struct store_disk_question *q = NULL;
        bool later;

        for (uint32_t i = 0; !q && i < 1000; i++) {
                idle();
                q = store_disk_next(store, 0, &later);
        }
        ck_assert(q && q->what == STORE_DISK_SUPER);
}

START_TEST(a_name_that_was_not_answered_is_asked_again) {
        open_file(1, EXTENT_BYTES(4));
        scan_one_extent();
        make_chain(N, 1000);
        space_demote(space);
        expect_super();
        lose_process();
        ck_assert_uint_eq(epoch_of_first(), 0);
        moved(asked(STORE_DISK_WRITE), 0);
        ck_assert_uint_ne(epoch_of_first(), 0);
        ck_assert_uint_eq(info().records, N);
        close_file();
}
END_TEST

START_TEST(what_was_deleted_is_erased_by_the_next_process) {
        open_file(1, EXTENT_BYTES(4));
        scan_one_extent();
        make_chain(N, 1000);
        space_demote(space);
        moved(asked(STORE_DISK_WRITE), 0);
        ck_assert_uint_eq(supers[0].n_namespaces, 1);
        attachment = attachment_free(attachment, false);
        ck_assert_int_eq(space_delete(space, true), 0);
        expect_super();
        lose_process();
        ck_assert(store_disk_erasing(store, "d", "s"));
        ck_assert_ptr_null(asked_of(0));
        ck_assert_uint_eq(supers[0].n_namespaces, 0);
        ck_assert(!store_disk_erasing(store, "d", "s"));
        close_file();
}
END_TEST

/* Each record size has a list of extents with room, and the number of lists is limited. */
START_TEST(records_of_too_many_sizes_are_left_alone) {
        const uint32_t sizes = CATALOG_CLASSES + 1;
        struct kvd_disk_found found = {.label = {.sequence = 1, .epoch = 7, .n_tokens = BT}};

        fixture_super(supers, 0, sizes, EXTENT_BYTES(256));
        supers[0].namespaces[supers[0].n_namespaces++] = (struct kvd_disk_namespace){{1, 2}, 7};
        file_sector_seal(supers[0].secret, FILE_SUPER, &supers[0].mark);
        open_file(sizes, EXTENT_BYTES(256));
        for (uint32_t i = 0; i < sizes; i++) {
                ck_assert_uint_eq(asked(STORE_DISK_SCAN)->extent, i);
                found.label.sequence++;
                found.key.tag = found.label.sequence << 32;
                found.place = i * (uint64_t)FILE_SLOTS;
                store_disk_scanned(store, 0, 0, (2 + i) * DISK_SECTOR, &found, 1);
        }
        ck_assert_int_eq(info().state, STORE_DISK_ON);
        ck_assert_uint_eq(info().records, sizes - 1);
        fixture_close();
}
END_TEST

/* After a restart, a fetch tells the order in a chain: its end is evicted before its middle. */
START_TEST(chains_go_from_their_ends_after_a_restart) {
        open_file(1, EXTENT_BYTES(N));
        scan_one_extent();
        make_chain(N, 1000);
        space_demote(space);
        moved(asked(STORE_DISK_WRITE), 0);
        close_file();
        open_file(1, EXTENT_BYTES(N));
        scan_one_extent();
        ck_assert_int_eq(fetch(1), 1);
        ck_assert_int_eq(fetch(N), N); /* the first is resident, so its record is the coldest */
        make_chain(1, 2000);
        space_demote(space);
        moved(asked(STORE_DISK_WRITE), 0);
        ck_assert_uint_eq(info().evicted, 1);
        evict();
        for (uint32_t i = 0; i < N * BT; i++)
                tokens[i] = 1000 + i;
        ck_assert_int_eq(fetch(N), N - 1);
        close_file();
}
END_TEST

/* An extent has two pieces of hints. Before the second, clients ask the daemon what is there. */
START_TEST(idle_work_goes_on_until_clients_are_told_all) {
        open_file(1, EXTENT_BYTES(N));
        scan_one_extent();
        make_chain(N, 1000);
        space_demote(space);
        moved(asked(STORE_DISK_WRITE), 0);
        close_file();
        open_file(1, EXTENT_BYTES(N));
        scan_one_extent();
        ck_assert_uint_eq(space_index(space)->below, KVD_BELOW_FILE | KVD_BELOW_UNTOLD);
        idle();
        ck_assert_uint_eq(space_index(space)->below, KVD_BELOW_FILE);
        close_file();
}
END_TEST

/* Writes all blocks of the space that can be written. Returns the last result of space_demoted. */
static int demote_all(void) {
        const struct store_disk_question *q;
        int r = space_demote(space);

        ck_assert_int_eq(r, 1);
        for (uint32_t i = 0; r == 1 && i < 1000; i++) {
                idle();
                q = asked_of(0);
                if (q)
                        moved(q, 0);
                r = demoted();
        }
        return r;
}

/* A quota of a quarter of the pool allows a quarter of the file: seven records. */
START_TEST(evict_to_file_takes_no_more_than_a_domains_share) {
        struct domain_config q = {.name = "q",
                                  .quota = 16 * BLOCK_BYTES,
                                  .client_quota = UINT64_MAX};
        struct space *neighbours;
        struct attachment *neighbour;

        open_file(1, EXTENT_BYTES(14));
        scan_one_extent();
        make_chain(N, 1000);
        ck_assert_int_eq(demote_all(), 0);
        neighbours = space;
        neighbour = attachment;

        ck_assert_int_eq(store_domain(store, &q, &domain), 0);
        space = fixture_space("s", 0);
        attachment = fixture_attach(space);
        for (uint32_t i = 2; i < 5; i++)
                make_chain(N, i * 1000);
        ck_assert_int_eq(demote_all(), -ENOSPC);
        ck_assert_ptr_nonnull(strstr(store_why(store), "2 blocks could not be written"));
        ck_assert_uint_eq(info().records, N + 7);
        ck_assert_uint_eq(info().evicted, 0);
        attachment = attachment_free(attachment, false);

        space = neighbours;
        attachment = neighbour;
        evict();
        for (uint32_t i = 0; i < N * BT; i++)
                tokens[i] = 1000 + i;
        ck_assert_int_eq(fetch(N), N);
        close_file();
}
END_TEST

/* ---- two files ------------------------------------------------------------------------------- */

static enum store_disk_state state_of(uint32_t file) {
        struct store_disk_info i;

        store_disk_get_info(store, file, &i);
        return i.state;
}

static void scan(uint32_t file) {
        asked_from(file, STORE_DISK_SCAN);
        store_disk_scanned(store, file, 0, 0, NULL, 0);
}

static void open_two(void) {
        for (uint32_t i = 0; i < 2; i++)
                fixture_super(supers, i, 1, EXTENT_BYTES(8));
        open_files(2, 1, EXTENT_BYTES(8));
        scan(0);
        ck_assert_int_eq(state_of(0), STORE_DISK_SCANNING); /* file 1 may have parts of chains */
        scan(1);
        ck_assert_int_eq(state_of(0), STORE_DISK_ON);
        ck_assert_int_eq(state_of(1), STORE_DISK_ON);
        space = whole ? fixture_whole_space("s") : fixture_space("s", 0);
        attachment = fixture_attach(space);
}

/* The next question must be a write or read of n blocks. */
static const struct store_disk_question *expect(uint32_t file, enum store_disk_ask what,
                                                uint32_t n) {
        const struct store_disk_question *q = NULL;

        for (uint32_t i = 0; !q && i < 1000; i++) {
                idle();
                q = asked_of(file);
        }
        ck_assert_msg(q && q->what == what && q->n == n, "file %u: %d of %u, not %d of %u", file,
                      q ? (int)q->what : -1, q ? q->n : 0, what, n);
        return q;
}

static void answer(uint32_t file, uint32_t n, int error) {
        int32_t errors[N] = {error, error, error};

        store_disk_moved(store, file, errors, NULL, n);
}

/* The first and last block go to file 0, the middle one to file 1. */
static void write_chain_to_both(void) {
        make_chain(N, 1000);
        space_demote(space);
        ck_assert_ptr_null(asked_of(0)); /* no write before file 1 has its superblock, too */
        expect(1, STORE_DISK_WRITE, 1);
        expect(0, STORE_DISK_WRITE, 2);
        answer(1, 1, 0);
        answer(0, 2, 0);
        evict();
}

static struct store_disk_info info_of(uint32_t file) {
        struct store_disk_info ret;

        store_disk_get_info(store, file, &ret);
        return ret;
}

/* Each file has its own last error, which is kept when the file works again. */
START_TEST(the_last_error_of_a_file_is_kept) {
        open_two();
        make_chain(N, 1000);
        space_demote(space);
        ck_assert_ptr_null(asked_of(0));
        expect(1, STORE_DISK_WRITE, 1);
        expect(0, STORE_DISK_WRITE, 2);
        ck_assert_str_eq(info_of(1).last_error, "");
        answer(1, 1, -ENOSPC);
        answer(0, 2, 0);
        ck_assert_uint_eq(info_of(1).errors, 1);
        ck_assert_str_eq(info_of(1).last_error, strerror(ENOSPC));
        ck_assert_uint_eq(info_of(0).errors, 0);
        ck_assert_str_eq(info_of(0).last_error, "");
        check_clean(space);
        close_file();
}
END_TEST

static int begin_fetch(void) {
        struct fetch_request q = {.n_tokens = N * BT, .tokens = tokens};
        int fd;

        ck_assert_int_eq(space_fetch(attachment, &q, &fd), N * BT);
        return fd;
}

static bool has_ended(int fd) {
        struct pollfd p = {.fd = fd, .events = POLLIN};

        return poll(&p, 1, 0) == 1;
}

static uint64_t resident(void) {
        return usage_of(space).sealed;
}

START_TEST(both_are_asked_at_once_and_answer_in_any_order) {
        int fd;

        open_two();
        write_chain_to_both();
        fd = begin_fetch();
        expect(0, STORE_DISK_READ, 2);
        expect(1, STORE_DISK_READ, 1);
        for (uint32_t i = 0; i < 2; i++)
                answer((uint32_t)_i ^ i, (_i ^ (int)i) ? 1 : 2, 0);
        ck_assert(has_ended(fd));
        ck_assert_uint_eq(resident(), N);
        close(fd);
        check_clean(space);
        close_file();
}
END_TEST

/* File 1 does not answer: the blocks before its own are found, and waiting clients are told. */
START_TEST(a_chain_ends_where_a_file_hangs) {
        int fd;

        open_two();
        write_chain_to_both();
        fd = begin_fetch();
        expect(0, STORE_DISK_READ, 2);
        expect(1, STORE_DISK_READ, 1);
        if (_i)
                answer(0, 2, 0);
        store_disk_hangs(store, 1);
        ck_assert_int_eq(state_of(1), STORE_DISK_HANGS);
        ck_assert_int_eq(state_of(0), STORE_DISK_ON);
        ck_assert_uint_eq(store_disk_files_off(store), 1);
        if (!_i)
                answer(0, 2, 0);
        ck_assert(has_ended(fd));
        ck_assert_uint_eq(resident(), 1);
        close(fd);
        check_clean(space);
        store_disk_lost(store, 1);
        ck_assert_int_eq(state_of(1), STORE_DISK_HANGS); /* until it is opened again */
        look(1);
        ck_assert_ptr_null(asked_of(1));
        ck_assert_int_eq(state_of(1), STORE_DISK_ON);
        check_clean(space);
        close_file();
}
END_TEST

/* Each fetch once waited for the client's whole timeout, until the process was killed. */
START_TEST(fetches_do_not_wait_for_a_slow_file) {
        struct fetch_request q = {.n_tokens = N * BT, .tokens = tokens};
        int first, second, third;

        open_file(1, EXTENT_BYTES(4));
        scan_one_extent();
        make_chain(N, 1000);
        space_demote(space);
        moved(asked(STORE_DISK_WRITE), 0);
        evict();
        first = begin_fetch();
        expect(0, STORE_DISK_READ, N);
        second = begin_fetch();
        store_disk_slow(store, 0);
        ck_assert_int_eq(state_of(0), STORE_DISK_HANGS);
        ck_assert(has_ended(second));
        ck_assert(!has_ended(first)); /* its read is still out */
        ck_assert_int_eq(space_fetch(attachment, &q, &third), 0);
        ck_assert_int_eq(third, -1);
        answer(0, N, 0);
        ck_assert(has_ended(first));
        ck_assert_int_eq(state_of(0), STORE_DISK_ON);
        ck_assert_uint_eq(resident(), N);
        evict();
        close(begin_fetch());
        check_clean(space);
        close_file();
}
END_TEST

/* The tier stays open meanwhile: the other file takes all writes. */
START_TEST(one_hangs_and_the_other_is_written_to) {
        open_two();
        write_chain_to_both();
        store_disk_hangs(store, 1);
        for (uint32_t round = 2; round < 4; round++) {
                make_chain(1, round * 1000);
                space_demote(space);
                expect(0, STORE_DISK_WRITE, 1);
                answer(0, 1, 0);
        }
        close_file();
}
END_TEST

/* UBSan found index -1 of the namespaces here. */
START_TEST(what_no_file_knows_is_erased_at_once) {
        open_file(1, EXTENT_BYTES(4));
        scan_one_extent();
        attachment = attachment_free(attachment, false);
        ck_assert_int_eq(space_delete(space, true), 0);
        ck_assert(!store_disk_erasing(store, "d", "s"));
        ck_assert_ptr_null(asked_of(0));
        close_file();
}
END_TEST

/*
 * A record is written only after the file's superblock names its epoch. A deletion is complete only
 * after both superblocks have dropped the namespace.
 */
START_TEST(what_is_deleted_is_deleted_in_both) {
        open_two();
        write_chain_to_both();
        ck_assert_uint_eq(supers[0].n_namespaces, 1);
        ck_assert_uint_eq(supers[1].n_namespaces, 1);
        attachment = attachment_free(attachment, false);
        ck_assert_int_eq(space_delete(space, true), 0);
        ck_assert_ptr_null(asked_of(_i));
        ck_assert(store_disk_erasing(store, "d", "s"));
        ck_assert_ptr_null(asked_of(!_i));
        ck_assert(!store_disk_erasing(store, "d", "s"));
        ck_assert_uint_eq(supers[0].n_namespaces, 0);
        ck_assert_uint_eq(supers[1].n_namespaces, 0);
        fixture_close();
}
END_TEST

/* One domain has used all its names. A space of another domain is still written. */
START_TEST(names_in_a_file_have_shares) {
        struct domain_config other = {.name = "other", .client_quota = UINT64_MAX};
        struct space *hog;
        uint64_t n;

        open_file(1, EXTENT_BYTES(4));
        scan_one_extent();
        hog = fixture_space("hog", 16);
        n = account_room(domain, KVD_COST_file_names);
        ck_assert_uint_ge(n, 100);
        ck_assert_int_eq(account_charge(hog, KVD_COST_file_names, n), 0);
        make_chain(N, 1000);
        for (int i = 0; i < 10; i++) {
                idle();
                ck_assert_ptr_null(asked_of(0));
        }
        ck_assert_uint_eq(supers[0].n_namespaces, 0);
        check_clean(space);
        attachment = attachment_free(attachment, false);
        ck_assert_int_eq(store_domain(store, &other, &domain), 0);
        space = fixture_space("s", 0);
        attachment = fixture_attach(space);
        make_chain(N, 1000);
        space_demote(space);
        moved(asked(STORE_DISK_WRITE), 0);
        ck_assert_uint_eq(supers[0].n_namespaces, 1);
        check_clean(space);
        close_file();
}
END_TEST

/* Deletions that the file has not seen take up places. One domain must leave some to others. */
START_TEST(deletions_while_a_file_opens_do_not_turn_it_off) {
        struct store_disk_config config = {.n_files = 1, .bytes = {FILE_HEAD + EXTENT_BYTES(4)}};
        uint32_t n = 0;
        char name[16];

        n_files = 1;
        fixture_super(supers, 0, 1, EXTENT_BYTES(4));
        fixture_open(64, 0);
        ck_assert_int_eq(store_disk_begin(store, &config), 0);
        for (; store_disk_may_erase(store, "d") == 0 && n < 1000; n++) {
                snprintf(name, sizeof name, "n%u", n);
                ck_assert_int_eq(space_delete(fixture_space(name, 16), true), 0);
                idle();
        }
        ck_assert_uint_gt(n, 100);
        ck_assert_uint_lt(n, 256);
        ck_assert_int_eq(store_disk_may_erase(store, "other"), 0);
        look(0);
        scan_one_extent();
        ck_assert_int_eq(store_disk_may_erase(store, "d"), 0);
        close_file();
}
END_TEST

/* Until the hanging file works again and its records are erased, or until it is off. */
START_TEST(a_deletion_waits_for_a_file_that_hangs) {
        open_two();
        write_chain_to_both();
        attachment = attachment_free(attachment, false);
        store_disk_hangs(store, 1);
        ck_assert_int_eq(space_delete(space, true), 0);
        ck_assert_ptr_null(asked_of(0));
        ck_assert(store_disk_erasing(store, "d", "s"));
        store_disk_lost(store, 1);
        if (_i)
                store_disk_file_off(store, 1, "the test");
        else
                look(1);
        ck_assert_ptr_null(asked_of(1));
        ck_assert(!store_disk_erasing(store, "d", "s"));
        ck_assert_uint_eq(supers[1].n_namespaces, (unsigned)_i);
        fixture_close();
}
END_TEST

/* A new process that opens a file of another life has another file: it is turned off. */
START_TEST(another_file_is_off) {
        open_two();
        store_disk_lost(store, 1);
        fixture_super(supers, 1, 1, EXTENT_BYTES(8));
        supers[1].life = 77;
        file_sector_seal(supers[1].secret, FILE_SUPER, &supers[1].mark);
        look(1);
        ck_assert_int_eq(state_of(1), STORE_DISK_OFF);
        ck_assert_int_eq(state_of(0), STORE_DISK_ON);
        close_file();
}
END_TEST

/* ---- a bidirectional prefix in two files ----------------------------------------------------- */

static void open_two_for_prefixes(void) {
        whole = true;
        open_two();
        write_chain_to_both();
}

/* The number of blocks of the prefix that are resident: all or none are found. */
static int64_t found(void) {
        struct fetch_request q = {.n_tokens = N * BT, .tokens = tokens};
        int fd = -1;
        int64_t n;

        store_disk_hangs(store, 0); /* so that nothing can be read */
        n = space_fetch(attachment, &q, &fd);
        ck_assert_int_eq(fd, -1);
        store_disk_lost(store, 0);
        look(0);
        ck_assert_ptr_null(asked_of(0));
        return n / BT;
}

static void answer_all(uint32_t first) {
        answer(first, first ? 1 : 2, 0);
        answer(!first, first ? 2 : 1, 0);
}

static int ask_for_prefix(void) {
        int fd = begin_fetch();

        expect(0, STORE_DISK_READ, 2);
        expect(1, STORE_DISK_READ, 1);
        return fd;
}

START_TEST(a_prefix_comes_from_both_whole) {
        int fd;

        open_two_for_prefixes();
        ck_assert_int_eq(found(), 0);
        fd = ask_for_prefix();
        answer_all((uint32_t)_i);
        ck_assert(has_ended(fd));
        ck_assert_int_eq(found(), N);
        close(fd);
        check_clean(space);
        close_file();
}
END_TEST

static void second_fails(uint32_t how) {
        if (how == 0)
                answer(1, 1, -EBADMSG);
        else if (how == 1)
                store_disk_hangs(store, 1);
        else
                store_disk_file_off(store, 1, "the test");
}

/* The blocks that the other file has brought are not found, and are evicted first. */
START_TEST(a_prefix_is_missed_where_one_of_two_fails) {
        bool first = _i % 2;
        int fd;

        open_two_for_prefixes();
        fd = ask_for_prefix();
        if (first)
                answer(0, 2, 0);
        second_fails((uint32_t)_i / 2);
        if (!first && _i / 2) {
                ck_assert(has_ended(fd)); /* without waiting for file 0 */
                answer(0, 2, 0);
        } else if (!first) {
                answer(0, 2, 0);
        }
        ck_assert(has_ended(fd));
        ck_assert_int_eq(found(), 0);
        ck_assert_uint_eq(resident(), first);
        close(fd);
        check_clean(space);
        if (_i / 2 == 2)
                answer(1, 1, -EIO); /* the question that was out */
        check_clean(space);
        close_file();
}
END_TEST

/* Blocks whose write failed are written again. Until then the prefix is missed. */
START_TEST(what_a_prefix_lacks_is_written_again) {
        struct fetch_request q = {.n_tokens = N * BT, .tokens = tokens};
        int fd;

        whole = true;
        open_two();
        make_chain(N, 1000);
        space_demote(space);
        ck_assert_ptr_null(asked_of(0));
        expect(1, STORE_DISK_WRITE, 1);
        expect(0, STORE_DISK_WRITE, 2);
        answer(0, 2, 0);
        answer(1, 1, -EIO);
        evict();
        ck_assert_int_eq(space_fetch(attachment, &q, &fd), 0);
        ck_assert_int_eq(fd, -1);
        make_chain(N, 1000);
        space_demote(space);
        for (uint32_t i = 0; i < 1000 && demoted() == 1; i++)
                for (uint32_t file = 0; file < 2; file++) {
                        const struct store_disk_question *w = asked_of(file);

                        idle();
                        if (w)
                                answer(file, w->n, 0);
                }
        ck_assert_int_eq(demoted(), 0);
        evict();
        close(begin_fetch());
        check_clean(space);
        close_file();
}
END_TEST

SUITE("disk-answers", FIXTURE(forget_files, forget_files),
      LOOPS(2, both_are_asked_at_once_and_answer_in_any_order, a_chain_ends_where_a_file_hangs,
            what_is_deleted_is_deleted_in_both, a_deletion_waits_for_a_file_that_hangs),
      TESTS(the_last_error_of_a_file_is_kept, one_hangs_and_the_other_is_written_to,
            another_file_is_off, what_a_prefix_lacks_is_written_again),
      LOOPS(2, a_prefix_comes_from_both_whole), LOOPS(6, a_prefix_is_missed_where_one_of_two_fails),
      TESTS(what_the_disk_did_not_take_is_said, unanswered_writes_do_not_count_as_written,
            fetches_do_not_wait_for_a_slow_file, a_name_that_was_not_answered_is_asked_again,
            what_was_deleted_is_erased_by_the_next_process, what_no_file_knows_is_erased_at_once,
            deletions_while_a_file_opens_do_not_turn_it_off, names_in_a_file_have_shares,
            records_of_too_many_sizes_are_left_alone, chains_go_from_their_ends_after_a_restart,
            idle_work_goes_on_until_clients_are_told_all,
            evict_to_file_takes_no_more_than_a_domains_share))
