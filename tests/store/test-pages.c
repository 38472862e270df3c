/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Which pages the pool's memory gets: the parts of segments for which the store asks for 2 MiB pages,
 * and what it does if some are reserved. Here nothing makes large pages: the test notes the wishes.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/shared_file.h"
#include "ipc/base/sys.h"
#include "store/cache/cache.h"
#include "store/keep.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

#define POOL (64u * SHARED_LARGE)
#define SEGMENT (4u * SHARED_LARGE)

static uint64_t block_bytes = 128 << 10, nodes;
static struct wish { uint64_t from, to; } wishes[256];
static unsigned n_wishes, n_index;
static int index_fd = -1;
static bool busy;

/* The kernel makes a large page only where a small one exists. */
static void expect_pages(int fd, uint64_t bytes) {
        struct stat st;

        ck_assert_int_eq(fstat(fd, &st), 0);
        ck_assert_uint_ge((uint64_t)st.st_blocks * 512, bytes / SHARED_LARGE * sys_page_bytes());
}

static void expect_data(int fd, uint64_t from, uint64_t to) {
        for (uint64_t at = from; at < to; at += SHARED_LARGE) {
                off_t data = lseek(fd, (off_t)at, SEEK_DATA);

                ck_assert_int_ge(data, (off_t)at);
                ck_assert_int_lt(data, (off_t)(at + SHARED_LARGE));
        }
}

static void want(void *arg, int fd, uint64_t from, uint64_t bytes) {
        ck_assert_uint_eq(from % SHARED_LARGE, 0);
        ck_assert_uint_eq(bytes % SHARED_LARGE, 0);
        ck_assert_uint_gt(bytes, 0);
        if (fd == index_fd) {
                expect_data(fd, from, from + bytes);
                n_index += (unsigned)(bytes / SHARED_LARGE);
                return;
        }
        ck_assert_uint_lt(n_wishes, ARRAY_SIZE(wishes));
        expect_pages(fd, from + bytes);
        wishes[n_wishes++] = (struct wish){from, from + bytes};
}

static bool is_busy(void *arg) {
        return busy;
}

static void open_store(enum store_pages pages) {
        const struct store_config config = {.pool_bytes = POOL,
                                            .segment_bytes = SEGMENT,
                                            .pages = pages,
                                            .nodes = nodes,
                                            .max_attachments = 4};
        const struct domain_config all = {.name = "d", .client_quota = POOL};

        ck_assert_int_eq(store_new(&config, &store), 0);
        store_on_large(store, &(struct store_large){want, is_busy, NULL});
        ck_assert_int_eq(store_domain(store, &all, &domain), 0);
}

static struct space *open_space(const char *name) {
        struct space_spec spec = {.geometry = {.block_bytes = block_bytes, .block_tokens = 4}};
        struct space *space;
        bool created;

        snprintf(spec.name, sizeof spec.name, "%s", name);
        strcpy(spec.geometry.layout, "test");
        ck_assert_msg(space_open(domain, &spec, true, &space, &created) == 0, "%s",
                      store_why(store));
        return space;
}

static uint32_t allocate(struct attachment *a, uint32_t n) {
        kvd_ref refs[64];
        int got = space_allocate(a, n, refs);

        ck_assert_int_gt(got, 0);
        return (uint32_t)got;
}

static void tear_down(void) {
        store = store_free(store);
}

/* All of a segment is wanted, once and in order, before or when its blocks are given out. */
START_TEST(every_part_of_a_segment_is_wanted_once) {
        struct attachment *a;
        struct space *space;
        uint64_t next = 0;

        open_store(STORE_PAGES_AUTO);
        space = open_space("s");
        a = fixture_attach(space);
        ck_assert_uint_eq(space_index(space)->segment_bytes, SEGMENT);
        for (uint32_t n = 0; n < 2 * SEGMENT / block_bytes;)
                n += allocate(a, 16);
        for (unsigned i = 0; i < n_wishes; i++) {
                ck_assert_uint_eq(wishes[i].from, next % SEGMENT);
                next = next / SEGMENT * SEGMENT + wishes[i].to;
        }
        ck_assert_uint_eq(next, 2 * SEGMENT);
}
END_TEST

/* What the daemon does without requests. */
static void rest(void) {
        store_look_at_pins(store);
        while (store_idle(store))
                ;
}

START_TEST(memory_is_filled_ahead_once_large_pages_have_come) {
        struct attachment *a;
        struct space *space;
        uint64_t free_before;

        open_store(STORE_PAGES_AUTO);
        space = open_space("s");
        a = fixture_attach(space);
        busy = true;
        allocate(a, 1);
        rest();
        free_before = usage_of(space).free;
        rest();
        ck_assert_uint_eq(usage_of(space).free, free_before);
        busy = false; /* nobody asks meanwhile */
        rest();
        ck_assert_uint_gt(usage_of(space).free, free_before);
}
END_TEST

static void fill_and_release(struct attachment *a, uint64_t bytes) {
        static kvd_ref refs[POOL / (128 << 10)];
        uint32_t n = 0;
        int got;

        while (n < bytes / block_bytes) {
                got = space_allocate(a, (uint32_t)(bytes / block_bytes) - n, refs + n);
                ck_assert_msg(got >= 0, "%s", store_why(store));
                n += (uint32_t)got;
                idle();
        }
        ck_assert_uint_eq(space_release(a, refs, n), n);
        idle();
}

static unsigned wishes_from_0(void) {
        unsigned n = 0;

        for (unsigned i = 0; i < n_wishes; i++)
                n += wishes[i].from == 0;
        return n;
}

/* Its memory went to another space, and what it gets later are small pages again. */
START_TEST(a_segment_that_is_filled_again_wants_them_again) {
        struct attachment *one, *two;
        unsigned first, second;

        open_store(STORE_PAGES_AUTO);
        one = fixture_attach(open_space("one"));
        two = fixture_attach(open_space("two"));
        fill_and_release(one, POOL);
        first = wishes_from_0();
        ck_assert_uint_gt(first, 2);
        fill_and_release(two, POOL);
        second = wishes_from_0();
        ck_assert_uint_ge(second, first + 2);
        fill_and_release(one, POOL);
        ck_assert_uint_ge(wishes_from_0(), second + 2);
}
END_TEST

/* ... as its ids get memory, and never a part that has no page yet. */
START_TEST(the_index_has_them_too) {
        struct attachment *a;
        struct space *space;
        const struct kvd_index *ix;

        block_bytes = 1 << 10;
        open_store(STORE_PAGES_AUTO);
        space = open_space("s");
        ix = space_index(space);
        index_fd = space->index.fd;
        a = fixture_attach(space);
        for (uint32_t n = 0; n < ix->capacity / 2;)
                n += allocate(a, 64);
        ck_assert_uint_ge(n_index, ix->capacity / 2 * ix->desc_stride / SHARED_LARGE - 1);
        ck_assert_uint_le(n_index, ix->size / SHARED_LARGE);
}
END_TEST

START_TEST(small_pages_are_not_enlarged) {
        open_store(STORE_PAGES_SMALL);
        allocate(fixture_attach(open_space("s")), 16);
        ck_assert_uint_eq(n_wishes, 0);
}
END_TEST

/* Blocks whose segments would be much larger keep small pages. */
START_TEST(segments_of_odd_blocks_stay_as_they_are) {
        struct space *space;

        block_bytes = 9 * 61 * 4096;
        open_store(STORE_PAGES_AUTO);
        space = open_space("s");
        allocate(fixture_attach(space), 1);
        ck_assert_uint_le(space_index(space)->segment_bytes, SEGMENT * 3 / 2);
        ck_assert_uint_eq(n_wishes, 0);
}
END_TEST

START_TEST(segments_are_whole_large_pages_if_that_costs_little) {
        struct space *space;

        block_bytes = 3 << 18;
        open_store(STORE_PAGES_AUTO);
        space = open_space("s");
        ck_assert_uint_eq(space_index(space)->segment_bytes % (3 * SHARED_LARGE), 0);
        ck_assert_uint_le(space_index(space)->segment_bytes, SEGMENT * 3 / 2);
}
END_TEST

/* ---- NUMA ------------------------------------------------------------------------------------ */

enum { FIRST = 1, THIRD = 2 }; /* homes: places in the list of nodes 0 and 2 */

static uint64_t placed[3]; /* bytes, by node */

static int note_node(void *at, size_t n, unsigned node) {
        ck_assert(node == 0 || node == 2);
        placed[node] += n;
        return 0;
}

static void on_nodes_0_and_2(void) {
        static struct kvd_sys table;

        table = *sys;
        table.prefer_node = note_node;
        sys = &table;
        nodes = 5;
        open_store(STORE_PAGES_AUTO);
}

static uint32_t taken; /* by allocated_at; they are in `refs` */
static kvd_ref refs[POOL / (128 << 10)];

/* Of the next n blocks, how many are in memory of that home? */
static uint32_t allocated_at(struct attachment *a, uint32_t home, uint32_t n) {
        uint32_t found = 0;

        for (taken = 0; taken < n;) {
                int got = space_allocate(a, n - taken, refs + taken);

                ck_assert_msg(got >= 0, "%s", store_why(store));
                for (int i = 0; i < got; i++)
                        found += block_segment(a->space, kvd_ref_id(refs[taken++]))->home == home;
                idle();
        }
        return found;
}

START_TEST(a_client_gets_memory_of_its_node_first) {
        const uint32_t half = POOL / 2 / (uint32_t)block_bytes;
        struct attachment *first, *third;
        struct space *space;

        on_nodes_0_and_2();
        space = open_space("s");
        first = fixture_attach(space);
        third = fixture_attach(space);
        attachment_near(first, 1 + 0);
        attachment_near(third, 1 + 2);
        for (int i = 0; i < 4; i++) { /* each leaves free blocks for the other */
                ck_assert_uint_eq(allocated_at(first, FIRST, 8), 8);
                ck_assert_uint_eq(allocated_at(third, THIRD, 8), 8);
        }
        ck_assert_uint_ge(placed[0], SEGMENT); /* and the index */
        ck_assert_uint_eq(placed[2], SEGMENT);
        ck_assert_uint_eq(allocated_at(third, THIRD, half - 32), half - 32);
        space_release(third, refs, taken);
        ck_assert_uint_eq(allocated_at(first, FIRST, half - 32), half - 32);
        ck_assert_uint_eq(allocated_at(first, THIRD, 32), 32); /* rather than none */
}
END_TEST

START_TEST(others_get_memory_of_all_nodes) {
        struct attachment *a;

        on_nodes_0_and_2();
        a = fixture_attach(open_space("s"));
        attachment_near(a, 1 + 1); /* not one of the pool's */
        ck_assert_uint_eq(allocated_at(a, THIRD, 4 * SEGMENT / (uint32_t)block_bytes),
                          2 * SEGMENT / block_bytes);
        ck_assert_uint_eq(a->home, 0);
}
END_TEST

START_TEST(without_nodes_the_kernel_decides) {
        static struct kvd_sys table;

        table = *sys;
        table.prefer_node = NULL;
        sys = &table;
        open_store(STORE_PAGES_AUTO);
        ck_assert_uint_eq(allocated_at(fixture_attach(open_space("s")), 0, 64), 64);
}
END_TEST

/* There are never so many reserved pages: a pool of 1 PiB. */
START_TEST(too_few_reserved_pages_are_refused) {
        const struct store_config config = {.pool_bytes = UINT64_C(1) << 50,
                                            .segment_bytes = SEGMENT,
                                            .pages = STORE_PAGES_HUGE,
                                            .max_attachments = 4};

        ck_assert_int_eq(store_new(&config, &store), 0);
        ck_assert_int_eq(store_check_pages(store, NULL, 0), -ENOMEM);
        ck_assert_ptr_nonnull(strstr(store_why(store), "pages = huge needs 536870912 reserved"));
}
END_TEST

SUITE("pages", FIXTURE(NULL, tear_down),
      TESTS(every_part_of_a_segment_is_wanted_once,
            memory_is_filled_ahead_once_large_pages_have_come,
            a_segment_that_is_filled_again_wants_them_again, the_index_has_them_too,
            small_pages_are_not_enlarged, segments_of_odd_blocks_stay_as_they_are,
            segments_are_whole_large_pages_if_that_costs_little, too_few_reserved_pages_are_refused,
            a_client_gets_memory_of_its_node_first, others_get_memory_of_all_nodes,
            without_nodes_the_kernel_decides))
