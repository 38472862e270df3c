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

#include "ipc/base/device.h"
#include "ipc/base/key.h"
#include "store/account.h"
#include "store/file/file.h"
#include "store/file_tier.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

#define N 3u /* blocks per chain */
#define SLOT file_slot_bytes(BLOCK_BYTES, 0)
#define EXTENT_BYTES(slots) ((uint64_t)DISK_SECTOR + (slots)*SLOT)

static struct file_super super;
static struct kvd_disk_found records[N];
static uint32_t n_records;
static bool whole; /* spaces are bidirectional */
static uint32_t tokens[N * BT];
static struct space *space;
static struct attachment *attachment;

/* ---- a disk process -------------------------------------------------------------------------- */

/* Reports the file as its process does after opening it. */
static void look(void) {
        struct file_super copies[FILE_COPIES];

        for (uint32_t i = 0; i < FILE_COPIES; i++)
                memcpy(&copies[i], &super, sizeof super);
        store_disk_looked(store, 0, copies, sizeof copies);
}

static void open_it(uint32_t extents, uint64_t extent_bytes) {
        struct store_disk_config config = {.there = true,
                                           .bytes = FILE_HEAD + extents * extent_bytes};

        if (!super.serial)
                fixture_super(&super, extents, extent_bytes);
        fixture_open(64, 0);
        ck_assert_int_eq(store_disk_begin(store, &config), 0);
        look();
}

/* The next question, or NULL. Writes of superblocks are done at once. */
static const struct store_disk_question *now(void) {
        const struct store_disk_question *q;
        bool later;

        while ((q = store_disk_next(store, &later)) && q->what == STORE_DISK_SUPER) {
                memcpy(&super, q->super, sizeof super);
                store_disk_told(store, 0);
        }
        return q;
}

static const struct store_disk_question *asked(enum store_disk_ask what) {
        const struct store_disk_question *q = NULL;

        for (uint32_t i = 0; !q && i < 1000; i++) {
                idle();
                q = now();
        }
        ck_assert_msg(q && q->what == what, "%d is asked instead of %d", q ? (int)q->what : -1,
                      what);
        return q;
}

static uint64_t epoch_of_first(void) {
        return super.namespaces[0].epoch;
}

/* Answers a question, whose first `fails` items fail. The next scan finds the written records. */
static void moved(const struct store_disk_question *q, uint32_t fails) {
        int32_t errors[KVD_DISK_ITEMS] = {0};

        for (uint32_t i = 0; i < q->n && i < fails; i++)
                errors[i] = -EIO;
        for (uint32_t i = 0; q->what == STORE_DISK_WRITE && i < q->n && n_records < N; i++)
                records[n_records++] = (struct kvd_disk_found){.label = q->items[i].label,
                                                               .key = file_key(super.secret,
                                                                               &q->items[i].label,
                                                                               q->items[i].tokens),
                                                               .place = q->items[i].place};
        store_disk_moved(store, errors, NULL, q->n);
}

static struct store_disk_info info(void) {
        struct store_disk_info ret;

        store_disk_get_info(store, &ret);
        return ret;
}

static void scan_one_extent(void) {
        asked(STORE_DISK_SCAN);
        store_disk_scanned(store, 0, n_records ? SLOT : 0, records, n_records);
        ck_assert_int_eq(info().state, STORE_DISK_ON);
        space = whole ? fixture_whole_space("s") : fixture_space("s", 0);
        attachment = fixture_attach(space);
}

/* Ends the test, without more answers of the disk. */
static void close_file(void) {
        attachment = attachment_free(attachment, false);
        fixture_close();
}

static void forget_file(void) {
        memset(&super, 0, sizeof super);
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
        open_it(1, EXTENT_BYTES(4));
        scan_one_extent();
        make_chain(1, 1000);
        make_chain(1, 2000);
        ck_assert_int_eq(space_demote(space), 1);
        moved(asked(STORE_DISK_WRITE), 1);
        for (uint32_t i = 0; i < 1000 && demoted() == 1; i++)
                ck_assert_ptr_null(now());
        ck_assert_int_eq(demoted(), -ENOSPC);
        ck_assert_ptr_nonnull(strstr(store_why(store), "1 blocks could not be written"));
        ck_assert_uint_eq(info().records, 1);
        close_file();
}
END_TEST

/* Answers what is asked in so many rounds. Returns the number of the last round with a question. */
static uint32_t serve(uint32_t rounds) {
        const struct store_disk_question *q;
        uint32_t last = 0;

        for (uint32_t i = 1; i <= rounds; i++) {
                idle();
                q = now();
                if (!q)
                        continue;
                moved(q, 0);
                last = i;
        }
        return last;
}

/* Two spaces once evicted each other's records for ever, though nobody used them. */
START_TEST(a_file_that_is_too_small_is_not_written_for_ever) {
        struct space *first;

        open_it(1, EXTENT_BYTES(4));
        scan_one_extent();
        make_chain(N, 1000);
        first = space;
        attachment_free(attachment, false);
        space = fixture_space("other", 0);
        attachment = fixture_attach(space);
        make_chain(N, 2000);
        ck_assert_uint_gt(serve(200), 0);
        serve(200);
        ck_assert_uint_eq(serve(1000), 0);
        check_clean(first);
        check_clean(space);
        close_file();
}
END_TEST

/* A restart once found 416 of 480 records: the last write had not been answered. */
START_TEST(unanswered_writes_do_not_count_as_written) {
        const struct store_disk_question *q;

        open_it(1, EXTENT_BYTES(4));
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
        store_disk_lost(store);
        ck_assert_ptr_null(now());
        look();
}

/* The next question must be a superblock. It is not answered. */
static void expect_super(void) {
        const struct store_disk_question *q = NULL;
        bool later;

        for (uint32_t i = 0; !q && i < 1000; i++) {
                idle();
                q = store_disk_next(store, &later);
        }
        ck_assert(q && q->what == STORE_DISK_SUPER);
}

START_TEST(a_name_that_was_not_answered_is_asked_again) {
        open_it(1, EXTENT_BYTES(4));
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
        open_it(1, EXTENT_BYTES(4));
        scan_one_extent();
        make_chain(N, 1000);
        space_demote(space);
        moved(asked(STORE_DISK_WRITE), 0);
        ck_assert_uint_eq(super.n_namespaces, 1);
        attachment = attachment_free(attachment, false);
        ck_assert_int_eq(space_delete(space, true), 0);
        expect_super();
        lose_process();
        ck_assert(store_disk_erasing(store, "d", "s"));
        ck_assert_ptr_null(now());
        ck_assert_uint_eq(super.n_namespaces, 0);
        ck_assert(!store_disk_erasing(store, "d", "s"));
        close_file();
}
END_TEST

/* Each record size has a list of extents with room, and the number of lists is limited. */
START_TEST(records_of_too_many_sizes_are_left_alone) {
        const uint32_t sizes = CATALOG_CLASSES + 1;
        struct kvd_disk_found found = {.label = {.sequence = 1, .epoch = 7, .n_tokens = BT}};

        fixture_super(&super, sizes, EXTENT_BYTES(256));
        super.namespaces[super.n_namespaces++] = (struct kvd_disk_namespace){{1, 2}, 7};
        file_sector_seal(super.secret, FILE_SUPER, &super.mark);
        open_it(sizes, EXTENT_BYTES(256));
        for (uint32_t i = 0; i < sizes; i++) {
                ck_assert_uint_eq(asked(STORE_DISK_SCAN)->extent, i);
                found.label.sequence++;
                found.key.tag = found.label.sequence << 32;
                found.place = i * (uint64_t)FILE_SLOTS;
                store_disk_scanned(store, 0, (2 + i) * DISK_SECTOR, &found, 1);
        }
        ck_assert_int_eq(info().state, STORE_DISK_ON);
        ck_assert_uint_eq(info().records, sizes - 1);
        fixture_close();
}
END_TEST

/* After a restart, a fetch tells the order in a chain: its end is evicted before its middle. */
START_TEST(chains_go_from_their_ends_after_a_restart) {
        open_it(1, EXTENT_BYTES(N));
        scan_one_extent();
        make_chain(N, 1000);
        space_demote(space);
        moved(asked(STORE_DISK_WRITE), 0);
        close_file();
        open_it(1, EXTENT_BYTES(N));
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
        open_it(1, EXTENT_BYTES(N));
        scan_one_extent();
        make_chain(N, 1000);
        space_demote(space);
        moved(asked(STORE_DISK_WRITE), 0);
        close_file();
        open_it(1, EXTENT_BYTES(N));
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
                q = now();
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

        open_it(1, EXTENT_BYTES(14));
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

/* ---- errors, and no answers ------------------------------------------------------------------ */

/* The next question must be a write or read of n blocks. */
static const struct store_disk_question *expect(enum store_disk_ask what, uint32_t n) {
        const struct store_disk_question *q = asked(what);

        ck_assert_uint_eq(q->n, n);
        return q;
}

static void answer(uint32_t n, int error) {
        int32_t errors[N] = {error, error, error};

        store_disk_moved(store, errors, NULL, n);
}

static void write_chain(void) {
        make_chain(N, 1000);
        space_demote(space);
        expect(STORE_DISK_WRITE, N);
        answer(N, 0);
        evict();
}

static void open_with_chain(void) {
        open_it(1, EXTENT_BYTES(8));
        scan_one_extent();
        write_chain();
}

/* An extent in which a write failed is not used again. */
static void open_two_extents(void) {
        open_it(2, EXTENT_BYTES(8));
        asked(STORE_DISK_SCAN);
        store_disk_scanned(store, 0, 0, NULL, 0);
        scan_one_extent();
}

/* It is kept when the file works again. */
START_TEST(the_last_error_of_a_file_is_kept) {
        open_two_extents();
        make_chain(1, 1000);
        space_demote(space);
        expect(STORE_DISK_WRITE, 1);
        ck_assert_str_eq(info().last_error, "");
        answer(1, -ENOSPC);
        make_chain(1, 2000);
        space_demote(space);
        asked(STORE_DISK_WRITE);
        answer(2, 0);
        ck_assert_uint_eq(info().errors, 1);
        ck_assert_str_eq(info().last_error, strerror(ENOSPC));
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

/* Waiting clients are told, and the file is used when it is opened again. */
START_TEST(a_fetch_ends_if_the_file_hangs) {
        int fd;

        open_with_chain();
        fd = begin_fetch();
        expect(STORE_DISK_READ, N);
        store_disk_hangs(store);
        ck_assert_int_eq(info().state, STORE_DISK_HANGS);
        ck_assert(store_disk_is_off(store));
        ck_assert(has_ended(fd));
        ck_assert_uint_eq(resident(), 0);
        close(fd);
        check_clean(space);
        store_disk_lost(store);
        ck_assert_int_eq(info().state, STORE_DISK_HANGS); /* until it is opened again */
        look();
        ck_assert_ptr_null(now());
        ck_assert_int_eq(info().state, STORE_DISK_ON);
        ck_assert(!store_disk_is_off(store));
        check_clean(space);
        close_file();
}
END_TEST

/* Each fetch once waited for the client's whole timeout, until the process was killed. */
START_TEST(fetches_do_not_wait_for_a_slow_file) {
        struct fetch_request q = {.n_tokens = N * BT, .tokens = tokens};
        int first, second, third;

        open_it(1, EXTENT_BYTES(4));
        scan_one_extent();
        make_chain(N, 1000);
        space_demote(space);
        moved(asked(STORE_DISK_WRITE), 0);
        evict();
        first = begin_fetch();
        expect(STORE_DISK_READ, N);
        second = begin_fetch();
        store_disk_slow(store);
        ck_assert_int_eq(info().state, STORE_DISK_HANGS);
        ck_assert(has_ended(second));
        ck_assert(!has_ended(first)); /* its read is still out */
        ck_assert_int_eq(space_fetch(attachment, &q, &third), 0);
        ck_assert_int_eq(third, -1);
        answer(N, 0);
        ck_assert(has_ended(first));
        ck_assert_int_eq(info().state, STORE_DISK_ON);
        ck_assert_uint_eq(resident(), N);
        evict();
        close(begin_fetch());
        check_clean(space);
        close_file();
}
END_TEST

/* UBSan found index -1 of the namespaces here. */
START_TEST(what_no_file_knows_is_erased_at_once) {
        open_it(1, EXTENT_BYTES(4));
        scan_one_extent();
        attachment = attachment_free(attachment, false);
        ck_assert_int_eq(space_delete(space, true), 0);
        ck_assert(!store_disk_erasing(store, "d", "s"));
        ck_assert_ptr_null(now());
        close_file();
}
END_TEST

/* One domain has used all its names. A space of another domain is still written. */
START_TEST(names_in_a_file_have_shares) {
        struct domain_config other = {.name = "other", .client_quota = UINT64_MAX};
        struct space *hog;
        uint64_t n;

        open_it(1, EXTENT_BYTES(4));
        scan_one_extent();
        hog = fixture_space("hog", 16);
        n = account_room(domain, KVD_COST_file_names);
        ck_assert_uint_ge(n, 100);
        ck_assert_int_eq(account_charge(hog, KVD_COST_file_names, n), 0);
        make_chain(N, 1000);
        for (int i = 0; i < 10; i++) {
                idle();
                ck_assert_ptr_null(now());
        }
        ck_assert_uint_eq(super.n_namespaces, 0);
        check_clean(space);
        attachment = attachment_free(attachment, false);
        ck_assert_int_eq(store_domain(store, &other, &domain), 0);
        space = fixture_space("s", 0);
        attachment = fixture_attach(space);
        make_chain(N, 1000);
        space_demote(space);
        moved(asked(STORE_DISK_WRITE), 0);
        ck_assert_uint_eq(super.n_namespaces, 1);
        check_clean(space);
        close_file();
}
END_TEST

/* Deletions that the file has not seen take up places. One domain must leave some to others. */
START_TEST(deletions_while_a_file_opens_do_not_turn_it_off) {
        struct store_disk_config config = {.there = true, .bytes = FILE_HEAD + EXTENT_BYTES(4)};
        uint32_t n = 0;
        char name[16];

        fixture_super(&super, 1, EXTENT_BYTES(4));
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
        look();
        scan_one_extent();
        ck_assert_int_eq(store_disk_may_erase(store, "d"), 0);
        close_file();
}
END_TEST

/* Until the hanging file works again and its records are erased, or until it is off. */
START_TEST(a_deletion_waits_for_a_file_that_hangs) {
        open_with_chain();
        attachment = attachment_free(attachment, false);
        store_disk_hangs(store);
        ck_assert_int_eq(space_delete(space, true), 0);
        ck_assert(store_disk_erasing(store, "d", "s"));
        store_disk_lost(store);
        if (_i)
                store_disk_off(store, "the test");
        else
                look();
        ck_assert_ptr_null(now());
        idle();
        ck_assert_int_eq(store_disk_erasing(store, "d", "s"), _i);
        ck_assert_uint_eq(super.n_namespaces, (unsigned)_i);
        fixture_close();
}
END_TEST

static void expect_off(const char *why) {
        ck_assert_int_eq(info().state, STORE_DISK_OFF);
        ck_assert_msg(strstr(info().why, why) != NULL, "%s", info().why);
        fixture_close();
}

static void begin_without_answer(void) {
        struct store_disk_config config = {.there = true, .bytes = FILE_HEAD + EXTENT_BYTES(4)};

        fixture_super(&super, 1, EXTENT_BYTES(4));
        fixture_open(64, 0);
        ck_assert_int_eq(store_disk_begin(store, &config), 0);
}

START_TEST(a_file_that_is_silent_at_the_start_is_off) {
        begin_without_answer();
        store_disk_hangs(store);
        expect_off("its disk hangs");
}
END_TEST

/* An opening leaves no bits for sequences; a reply has one superblock. */
START_TEST(an_answer_without_sense_turns_the_file_off) {
        begin_without_answer();
        if (_i) {
                store_disk_looked(store, 0, &super, sizeof super);
        } else {
                super.opening = 1 << 24;
                file_sector_seal(super.secret, FILE_SUPER, &super.mark);
                look();
        }
        expect_off(_i ? strerror(EPROTO) : "makes no sense");
}
END_TEST

/* The process answers for another extent than it was asked for. */
START_TEST(records_of_another_extent_do_not_count) {
        open_with_chain();
        attachment = attachment_free(attachment, false);
        fixture_close();
        for (uint32_t i = 0; i < n_records; i++)
                records[i].place += FILE_SLOTS;
        super.bytes += EXTENT_BYTES(8);
        file_sector_seal(super.secret, FILE_SUPER, &super.mark);
        open_it(2, EXTENT_BYTES(8));
        for (uint32_t i = 0; i < 2; i++) {
                asked(STORE_DISK_SCAN);
                store_disk_scanned(store, 0, SLOT, records, i ? 0 : n_records);
        }
        ck_assert_int_eq(info().state, STORE_DISK_ON);
        ck_assert_uint_eq(info().records, 0);
        fixture_close();
}
END_TEST

/* Copies in host memory below a pool on a GPU outlive nothing: a deletion waits for no answer. */
START_TEST(without_a_file_a_deletion_ends_at_once) {
        struct store_disk_config config = {.host = 64 << 20};
        uint64_t epoch;
        int number;

        fixture_open(64, 64);
        store->config.backend = KVD_BACKEND_VMM;
        ck_assert_int_eq(store_disk_begin(store, &config), 0);
        space = fixture_space("s", 16);
        ck_assert_int_eq(file_space_number(store->file, space), -1);
        number = file_enter_space(store->file, space);
        ck_assert_int_eq(file_space_number(store->file, space), number);
        ck_assert_int_eq(head_name(&store->file->head, file_space_of(space)->id, &epoch), 0);
        store->file->catalog.spaces[number].epoch = epoch;
        ck_assert_int_eq(space_delete(space, true), 0);
        ck_assert(!store_disk_erasing(store, "d", "s"));
        fixture_close();
}
END_TEST

/* A new process that opens a file of another life, or secret, has another file: it is off. */
START_TEST(another_file_is_off) {
        open_with_chain();
        store_disk_lost(store);
        fixture_super(&super, 1, EXTENT_BYTES(8));
        super.life = _i ? 77 : 0;
        super.secret[0] ^= !_i;
        file_sector_seal(super.secret, FILE_SUPER, &super.mark);
        look();
        ck_assert_int_eq(info().state, STORE_DISK_OFF);
        close_file();
}
END_TEST

/* ---- a bidirectional prefix ------------------------------------------------------------------ */

/* The number of blocks of the prefix that are resident: all or none are found. */
static int64_t found(void) {
        struct fetch_request q = {.n_tokens = N * BT, .tokens = tokens};
        int fd = -1;
        int64_t n;

        store_disk_hangs(store); /* so that nothing can be read */
        n = space_fetch(attachment, &q, &fd);
        ck_assert_int_eq(fd, -1);
        store_disk_lost(store);
        look();
        ck_assert_ptr_null(now());
        return n / BT;
}

START_TEST(a_prefix_comes_whole) {
        int fd;

        whole = true;
        open_with_chain();
        ck_assert_int_eq(found(), 0);
        fd = begin_fetch();
        expect(STORE_DISK_READ, N);
        answer(N, 0);
        ck_assert(has_ended(fd));
        ck_assert_int_eq(found(), N);
        close(fd);
        check_clean(space);
        close_file();
}
END_TEST

/* The blocks that were read nevertheless are not found. */
START_TEST(a_prefix_is_missed_if_a_block_is) {
        int32_t errors[N] = {0, 0, -EBADMSG};
        int fd;

        whole = true;
        open_with_chain();
        fd = begin_fetch();
        expect(STORE_DISK_READ, N);
        if (_i == 0)
                store_disk_moved(store, errors, NULL, N);
        else if (_i == 1)
                store_disk_hangs(store);
        else
                store_disk_off(store, "the test");
        ck_assert(has_ended(fd));
        if (_i < 2)
                ck_assert_int_eq(found(), 0);
        close(fd);
        check_clean(space);
        if (_i == 2)
                answer(N, -EIO); /* the question that was out */
        ck_assert_uint_eq(resident(), 0);
        check_clean(space);
        close_file();
}
END_TEST

/* Blocks whose write failed are written again. Until then the prefix is missed. */
START_TEST(what_a_prefix_lacks_is_written_again) {
        struct fetch_request q = {.n_tokens = N * BT, .tokens = tokens};
        int32_t errors[N] = {0, -EIO, 0};
        int fd;

        whole = true;
        open_two_extents();
        make_chain(N, 1000);
        space_demote(space);
        expect(STORE_DISK_WRITE, N);
        store_disk_moved(store, errors, NULL, N);
        evict();
        ck_assert_int_eq(space_fetch(attachment, &q, &fd), 0);
        ck_assert_int_eq(fd, -1);
        make_chain(N, 1000);
        ck_assert_int_eq(demote_all(), 0);
        evict();
        close(begin_fetch());
        check_clean(space);
        close_file();
}
END_TEST

SUITE("disk-answers", FIXTURE(forget_file, forget_file),
      LOOPS(2, a_deletion_waits_for_a_file_that_hangs, another_file_is_off,
            an_answer_without_sense_turns_the_file_off),
      LOOPS(3, a_prefix_is_missed_if_a_block_is),
      TESTS(a_file_that_is_silent_at_the_start_is_off, records_of_another_extent_do_not_count,
            without_a_file_a_deletion_ends_at_once, the_last_error_of_a_file_is_kept,
            a_fetch_ends_if_the_file_hangs, a_prefix_comes_whole,
            what_a_prefix_lacks_is_written_again, what_the_disk_did_not_take_is_said,
            unanswered_writes_do_not_count_as_written, fetches_do_not_wait_for_a_slow_file,
            a_file_that_is_too_small_is_not_written_for_ever,
            a_name_that_was_not_answered_is_asked_again,
            what_was_deleted_is_erased_by_the_next_process, what_no_file_knows_is_erased_at_once,
            deletions_while_a_file_opens_do_not_turn_it_off, names_in_a_file_have_shares,
            records_of_too_many_sizes_are_left_alone, chains_go_from_their_ends_after_a_restart,
            idle_work_goes_on_until_clients_are_told_all,
            evict_to_file_takes_no_more_than_a_domains_share))
