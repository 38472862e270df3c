/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The file tier as a disk process sees it, which the test plays: what it is asked, and what the
 * store makes of answers that a disk rarely gives.
 */

#include <errno.h>
#include <string.h>

#include "store/disk.h"
#include "store/file/volume.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

#define EPOCH 7u
#define N 3u /* blocks of a chain */
#define SLOT file_slot_bytes(BLOCK_BYTES)
#define EXTENT_BYTES(slots) ((uint64_t)DISK_SECTOR + (slots) * SLOT)

static const uint8_t secret[KVD_SECRET_BYTES] = "not much of a secret";
static struct kvd_disk_namespace known; /* by the file; epoch 0: nothing is */
static struct kvd_disk_found records[N];
static uint32_t n_records;
static uint64_t opening;
static uint32_t tokens[N * BT];
static struct space *space;
static struct attachment *attachment;

/* ---- a disk process -------------------------------------------------------------------------- */

static struct store_disk_opened file_of(uint32_t extents, uint64_t extent_bytes) {
        static struct kvd_disk_file file;

        file = (struct kvd_disk_file){.extent_bytes = extent_bytes, .extents = extents};
        return (struct store_disk_opened){.opening = ++opening,
                                          .n_files = 1,
                                          .files = &file,
                                          .n_namespaces = known.epoch != 0,
                                          .namespaces = &known,
                                          .secret = secret};
}

static void open_file(uint32_t extents, uint64_t extent_bytes) {
        struct store_disk_config config = {.n_files = 1,
                                           .bytes = {(extents + 1) * extent_bytes}};
        struct store_disk_opened opened = file_of(extents, extent_bytes);

        fixture_open(64, 0);
        ck_assert_int_eq(store_disk_begin(store, &config), 0);
        ck_assert_int_eq(store_disk_opened(store, &opened), 0);
}

static const struct store_disk_question *asked(enum store_disk_ask what) {
        const struct store_disk_question *q = NULL;
        bool later = true;

        for (uint32_t i = 0; !q && i < 1000; i++) {
                idle();
                q = store_disk_next(store, &later);
        }
        ck_assert_msg(q && q->what == what, "%d is asked instead of %d", q ? (int)q->what : -1,
                      what);
        return q;
}

/* What was written is what a scan finds in the next life. */
static void moved(const struct store_disk_question *q, uint32_t fails) {
        int32_t errors[KVD_DISK_ITEMS] = {0};

        for (uint32_t i = 0; i < q->n && i < fails; i++)
                errors[i] = -EIO;
        for (uint32_t i = 0; q->what == STORE_DISK_WRITE && i < q->n && n_records < N; i++)
                records[n_records++] = (struct kvd_disk_found){
                        .label = q->items[i].label,
                        .key = file_key(secret, &q->items[i].label, q->items[i].tokens),
                        .place = q->items[i].place};
        store_disk_moved(store, errors, NULL, q->n);
}

static void name(void) {
        known = (struct kvd_disk_namespace){asked(STORE_DISK_NAMESPACE)->id, EPOCH};
        store_disk_named(store, 0, EPOCH);
}

static struct store_disk_info info(void) {
        struct store_disk_info ret;

        store_disk_get_info(store, 0, &ret);
        return ret;
}

static void scan_one_extent(void) {
        asked(STORE_DISK_SCAN);
        store_disk_scanned(store, 0, n_records ? SLOT : 0, records, n_records);
        ck_assert_int_eq(info().state, STORE_DISK_ON);
        space = fixture_space("s", 0);
        attachment = fixture_attach(space);
}

static void close_file(void) {
        attachment = attachment_free(attachment, false);
        fixture_close();
}

/* ---- chains ---------------------------------------------------------------------------------- */

/* Of so many blocks, whose tokens count up from one. */
static void make_chain(uint32_t n, uint32_t first) {
        kvd_ref refs[N];
        struct seal_request q = {.n_blocks = n,
                                 .blocks = refs,
                                 .n_tokens = n * BT,
                                 .tokens = tokens};

        for (uint32_t i = 0; i < ARRAY_SIZE(tokens); i++)
                tokens[i] = first + i;
        ck_assert_int_eq(space_allocate(attachment, n, refs), (int)n);
        ck_assert_int_eq(space_seal(attachment, &q, refs), 0);
}

/* Blocks that a fetch promises of the chain that was made last; what it asks for is read. */
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

/* ---- tests ----------------------------------------------------------------------------------- */

START_TEST(what_the_disk_did_not_take_is_said) {
        open_file(1, EXTENT_BYTES(4));
        scan_one_extent();
        make_chain(1, 1000);
        make_chain(1, 2000);
        ck_assert_int_eq(space_demote(space), 1);
        name();
        moved(asked(STORE_DISK_WRITE), 1);
        for (uint32_t i = 0; i < 1000 && space_demoted(space) == 1; i++)
                ck_assert_ptr_null(store_disk_next(store, &(bool){false}));
        ck_assert_int_eq(space_demoted(space), -ENOSPC);
        ck_assert_ptr_nonnull(strstr(store_why(store), "1 blocks did not go"));
        ck_assert_uint_eq(info().records, 1);
        close_file();
}
END_TEST

/* Another process opens the file anew, and is asked what the one before it did not answer. */
static void lose_process(void) {
        struct store_disk_opened opened = file_of(1, EXTENT_BYTES(4));

        store_disk_lost(store);
        ck_assert_int_eq(store_disk_opened(store, &opened), 0);
}

START_TEST(a_name_that_was_not_answered_is_asked_again) {
        open_file(1, EXTENT_BYTES(4));
        scan_one_extent();
        make_chain(N, 1000);
        space_demote(space);
        asked(STORE_DISK_NAMESPACE);
        lose_process();
        name();
        moved(asked(STORE_DISK_WRITE), 0);
        ck_assert_uint_eq(info().records, N);
        close_file();
}
END_TEST

START_TEST(what_was_deleted_is_erased_by_the_next_process) {
        open_file(1, EXTENT_BYTES(4));
        scan_one_extent();
        make_chain(N, 1000);
        space_demote(space);
        name();
        moved(asked(STORE_DISK_WRITE), 0);
        attachment = attachment_free(attachment, false);
        ck_assert_int_eq(space_delete(space, true), 0);
        asked(STORE_DISK_FORGET);
        lose_process();
        ck_assert(store_disk_erasing(store, "d", "s"));
        ck_assert(kvd_key_equal(asked(STORE_DISK_FORGET)->id, known.id));
        store_disk_forgotten(store, 0);
        ck_assert(!store_disk_erasing(store, "d", "s"));
        close_file();
}
END_TEST

/* Of each there is a list of extents with room, and there are 16. */
START_TEST(records_of_too_many_sizes_are_left_alone) {
        const uint32_t sizes = 17;
        struct kvd_disk_found found = {.label = {.sequence = 1, .epoch = EPOCH, .n_tokens = BT}};

        known = (struct kvd_disk_namespace){{1, 2}, EPOCH};
        open_file(sizes, EXTENT_BYTES(64));
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

/* What a fetch has seen of the chain after a restart counts: its end goes before its middle. */
START_TEST(chains_go_from_their_ends_after_a_restart) {
        open_file(1, EXTENT_BYTES(N));
        scan_one_extent();
        make_chain(N, 1000);
        space_demote(space);
        name();
        moved(asked(STORE_DISK_WRITE), 0);
        close_file();
        open_file(1, EXTENT_BYTES(N));
        scan_one_extent();
        ck_assert_int_eq(fetch(1), 1);
        ck_assert_int_eq(fetch(N), N); /* of which the first was here: it is the coldest now */
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

/* Writes all of the space that can go. Returns what space_demoted says at the end. */
static int demote_all(uint64_t epoch) {
        const struct store_disk_question *q;
        int r = space_demote(space);

        ck_assert_int_eq(r, 1);
        asked(STORE_DISK_NAMESPACE);
        store_disk_named(store, 0, epoch);
        for (uint32_t i = 0; r == 1 && i < 1000; i++) {
                idle();
                q = store_disk_next(store, &(bool){false});
                if (q)
                        moved(q, 0);
                r = space_demoted(space);
        }
        return r;
}

/* A quarter of the pool is a quarter of the file: seven of its records. */
START_TEST(evict_to_file_takes_no_more_than_a_domains_share) {
        struct domain_config q = {
                .name = "q", .quota = 16 * BLOCK_BYTES, .client_quota = UINT64_MAX};
        struct space *neighbours;
        struct attachment *neighbour;

        open_file(1, EXTENT_BYTES(14));
        scan_one_extent();
        make_chain(N, 1000);
        ck_assert_int_eq(demote_all(EPOCH), 0);
        neighbours = space;
        neighbour = attachment;

        ck_assert_int_eq(store_domain(store, &q, &domain), 0);
        space = fixture_space("s", 0);
        attachment = fixture_attach(space);
        for (uint32_t i = 2; i < 5; i++)
                make_chain(N, i * 1000);
        ck_assert_int_eq(demote_all(EPOCH + 1), -ENOSPC);
        ck_assert_ptr_nonnull(strstr(store_why(store), "2 blocks did not go"));
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

SUITE("disk-answers",
      TESTS(what_the_disk_did_not_take_is_said, a_name_that_was_not_answered_is_asked_again,
            what_was_deleted_is_erased_by_the_next_process,
            records_of_too_many_sizes_are_left_alone, chains_go_from_their_ends_after_a_restart,
            evict_to_file_takes_no_more_than_a_domains_share))
