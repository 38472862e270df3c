/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A question to the disk process is one frame, which has room for a limited number of blocks, and
 * for descriptors of a limited number of segments.
 */

#include "store/file/volume.h"
#include "store/file_tier.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

#define SEGMENT_BLOCKS 16u /* blocks per segment in the fixture's spaces */
#define SEGMENTS (KVD_DISK_FILES + 6)
#define BLOCKS (SEGMENTS * SEGMENT_BLOCKS)
#define EXTENT_BYTES ((uint64_t)DISK_SECTOR + SEGMENTS * file_slot_bytes(BLOCK_BYTES, 0))

static struct space *space;
static struct attachment *a;

/* Opens an existing file; a new one would get larger extents. */
static void open_file(void) {
        struct store_disk_config config = {.there = true, .bytes = FILE_HEAD + EXTENT_BYTES};
        struct file_super super = {.serial = 1,
                                   .bytes = FILE_HEAD + EXTENT_BYTES,
                                   .extent_bytes = EXTENT_BYTES,
                                   .opening = 1,
                                   .next_epoch = 1,
                                   .secret = "not much of a secret",
                                   .set = 1};
        struct file_super copies[FILE_COPIES];

        file_sector_seal(super.secret, FILE_SUPER, &super.mark);
        for (uint32_t i = 0; i < FILE_COPIES; i++)
                copies[i] = super;
        fixture_open(BLOCKS, 0);
        ck_assert_int_eq(store_disk_begin(store, &config), 0);
        store_disk_looked(store, 0, copies, sizeof copies);
}

/* The next question, after writes of superblocks, which are done at once. */
static const struct store_disk_question *asked(enum store_disk_ask what) {
        const struct store_disk_question *q = NULL;

        for (uint32_t i = 0; !q && i < 1000; i++) {
                idle();
                while ((q = store_disk_next(store, &(bool){false})) && q->what == STORE_DISK_SUPER)
                        store_disk_told(store, 0);
        }
        ck_assert(q && q->what == what);
        return q;
}

/* Seals one block in each segment, each a chain of its own. The others are not sealed. */
static void seal_one_in_each(void) {
        static kvd_ref refs[BLOCKS];
        bool sealed[SEGMENTS] = {false};
        uint32_t tokens[BT] = {0};
        struct seal_request q = {.n_blocks = 1, .n_tokens = BT, .tokens = tokens};

        for (uint32_t i = 0; i < BLOCKS; i++)
                ck_assert_int_eq(space_allocate(a, 1, &refs[i]), 1);
        for (uint32_t i = 0; i < BLOCKS; i++) {
                uint32_t segment = kvd_segment_of(space_index(space), kvd_ref_id(refs[i]));

                tokens[0] = 1000 + i;
                q.blocks = &refs[i];
                if (!sealed[segment])
                        ck_assert_int_eq(space_seal(a, &q, &refs[i]), 0);
                sealed[segment] = true;
        }
}

static uint32_t segments_of(const struct store_disk_question *q) {
        bool met[SEGMENTS] = {false};
        uint32_t n = 0;

        for (uint32_t i = 0; i < q->n; i++) {
                uint32_t segment = kvd_segment_of(space_index(space),
                                                  kvd_ref_id(q->items[i].block));

                n += !met[segment];
                met[segment] = true;
        }
        return n;
}

/* Answers the next write. Returns the number of segments in it. */
static uint32_t write_one(void) {
        static const int32_t errors[KVD_DISK_ITEMS];
        const struct store_disk_question *q = asked(STORE_DISK_WRITE);
        uint32_t segments = segments_of(q);

        store_disk_moved(store, errors, NULL, q->n);
        return segments;
}

START_TEST(a_question_has_blocks_of_so_many_segments) {
        open_file();
        asked(STORE_DISK_SCAN);
        store_disk_scanned(store, 0, 0, NULL, 0);
        space = fixture_space("s", 0);
        ck_assert_uint_eq(space_index(space)->segment_blocks, SEGMENT_BLOCKS);
        a = fixture_attach(space);
        seal_one_in_each();
        ck_assert_int_eq(space_demote(space), 1);
        ck_assert_uint_eq(write_one(), KVD_DISK_FILES);
        ck_assert_uint_eq(write_one(), SEGMENTS - KVD_DISK_FILES);
        check_clean(space);
        fixture_close();
}
END_TEST

SUITE("disk-questions", TESTS(a_question_has_blocks_of_so_many_segments))
