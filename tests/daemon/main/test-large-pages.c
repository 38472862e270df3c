/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages of 64 KiB. The daemon is a thread of the test, so that the system calls of both it and
 * libkvd behave as such a kernel's do.
 */

#include <string.h>
#include <sys/mman.h>

#include "client/conn/conn.h"
#include "client/kvd.h"
#include "ipc/base/layout.h"
#include "ipc/base/mapped.h"
#include "ipc/base/shared_file.h"
#include "tests/lib/inproc.h"
#include "tests/lib/large_pages.h"
#include "tests/lib/oracle.h"
#include "tests/lib/session.h"
#include "tests/lib/suite.h"

static struct inproc daemon_thread;

static void set_up(void) {
        large_pages_begin();
        inproc_start(&daemon_thread, SETTINGS("daemon.pool=8M"));
}

static void tear_down(void) {
        inproc_stop(&daemon_thread);
        ck_assert_uint_eq(large_pages_refused(), 0);
}

START_TEST(a_session_works) {
        session_run(daemon_thread.in.socket);
        session_expect_service(daemon_thread.in.socket);
}
END_TEST

static const uint64_t sizes[] = {64, 3 * 4096, 4096, 5 * 4096 + 1024, 65536, 3 * 65536};

static void fill_and_check(kvd_space *space, uint64_t bytes) {
        struct kvd_block blocks[24];
        int n = kvd_alloc(space, ARRAY_SIZE(blocks), blocks);

        ck_assert_msg(n > 0, "%s", kvd_error());
        for (int i = 0; i < n; i++)
                oracle_fill(blocks[i].data, bytes, (uint64_t)i);
        for (int i = 0; i < n; i++)
                ck_assert_uint_eq(oracle_wrong(blocks[i].data, bytes, (uint64_t)i), 0);
        kvd_free(space, (uint32_t)n, blocks);
}

/* Segments are whole pages, whatever the block size. */
START_TEST(segments_are_whole_pages_for_any_block_size) {
        const struct kvd_geometry geometry = {.block_bytes = sizes[_i],
                                              .layout = "test",
                                              .block_tokens = 4,
                                              .vocab = 1000};
        struct kvd_msg_space_info_reply info;
        struct conn *conn = instance_connect(&daemon_thread.in);
        kvd *handle;
        kvd_space *space;

        ck_assert_int_eq(kvd_open(daemon_thread.in.socket, &handle), 0);
        ck_assert_msg(kvd_space_open(handle, "s", &geometry, NULL, &space) == 0, "%s", kvd_error());
        for (int i = 0; i < 3; i++)
                fill_and_check(space, sizes[_i]);
        space_facts(conn, 0, &info);
        ck_assert_uint_gt(info.segment_bytes, 0);
        ck_assert_uint_eq(info.segment_bytes % LARGE_PAGE, 0);
        kvd_space_close(space);
        kvd_close(handle);
        conn_close(conn);
}
END_TEST

/* The daemon frees its per-block memory in pieces. */
START_TEST(a_large_space_is_deleted) {
        const struct kvd_geometry geometry = {.block_bytes = 64,
                                              .layout = "test",
                                              .block_tokens = 4,
                                              .vocab = 1000};
        const struct kvd_msg_space_delete request = {.space = kvd_slice_of("s")};
        struct conn *conn = instance_connect(&daemon_thread.in);
        kvd *handle;
        kvd_space *space;

        ck_assert_int_eq(kvd_open(daemon_thread.in.socket, &handle), 0);
        ck_assert_msg(kvd_space_open(handle, "s", &geometry, NULL, &space) == 0, "%s", kvd_error());
        fill_and_check(space, 64);
        kvd_space_close(space);
        kvd_close(handle);
        ck_assert_msg(conn_call(conn, KVD_MSG_space_delete, &request, NULL) == 0, "%s",
                      kvd_error());
        instance_expect_clean(&daemon_thread.in);
        conn_close(conn);
}
END_TEST

/* Disk and remote processes map blocks of a memory file one by one. */
START_TEST(a_block_within_a_page_is_mapped) {
        const uint64_t offset = 5 * 4096 + 64, bytes = 2 * LARGE_PAGE;
        struct mapped mapped;
        struct shared_file file;
        uint8_t *at;

        ck_assert_int_eq(shared_file_new("test", 4 * LARGE_PAGE, SHARED_MAPPED, &file), 0);
        oracle_fill((uint8_t *)file.at + offset, bytes, 1);
        at = mapped_begin(file.fd, offset, bytes, &mapped);
        ck_assert_ptr_nonnull(at);
        ck_assert_uint_eq(oracle_wrong(at, bytes, 1), 0);
        mapped_end(&mapped, 1);
        shared_file_close(&file);
}
END_TEST

SUITE("large pages", FIXTURE(set_up, tear_down), TESTS(a_session_works),
      LOOPS(ARRAY_SIZE(sizes), segments_are_whole_pages_for_any_block_size),
      TESTS(a_large_space_is_deleted, a_block_within_a_page_is_mapped))
