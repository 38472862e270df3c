/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Memory of the host below a pool on a GPU, over the stand-in driver: chains that leave the pool
 * come back byte by byte, whatever becomes of the worker that moves them, and nothing of it is left
 * when they are forgotten. With an argument, blocks are opaque, as engines' are that kvd stores for.
 */

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/daemon/file_tier.h"
#include "tests/lib/suite.h"

/* ---- life ------------------------------------------------------------------------------------ */

static const char *settings_now[] = {"daemon.pool=16M", "daemon.segment=2M", "daemon.reserve=1M",
                                     "daemon.host_tier_depth=0", "daemon.host_tier=8M", NULL};

static void start_with(const char *host_tier) {
        settings_now[4] = host_tier;
        instance_start(&in, settings_now);
        watcher = peer_attach(in.socket);
        connect_to_it();
}

static void end(void) {
        leave_it();
        instance_end_clean(&in);
}

static uint64_t copies(void) {
        return peer_ok(watcher, MSG(space_info)).space_info_reply.copy_bytes / BLOCK_BYTES;
}

/* ---- chains ---------------------------------------------------------------------------------- */

static const uint32_t *chain(uint32_t which) {
        static uint32_t ret[BLOCKS * BLOCK_TOKENS];

        for (uint32_t i = 0; i < ARRAY_SIZE(ret); i++)
                ret[i] = 1000 * which + i;
        return ret;
}

static int begin_fetch(uint32_t which) {
        int fd;

        ck_assert_msg(kvd_fetch(space, 0, 0, chain(which), BLOCKS * BLOCK_TOKENS, &fd) >= 0, "%s",
                      kvd_error());
        return fd;
}

static void end_fetch(int fd) {
        struct pollfd p = {.fd = fd, .events = POLLIN};

        if (fd < 0)
                return;
        ck_assert_int_eq(poll(&p, 1, PATIENCE_MS), 1);
        close(fd);
}

/* All that was made is there, and nothing is on its way. */
static bool has(uint64_t records) {
        return tier_of(0).records == records && copies() == records &&
               tier_of(0).written_bytes >= records * BLOCK_BYTES;
}

static void make_and_keep(uint32_t which) {
        make_chain(chain(which));
        WAIT_UNTIL(has(BLOCKS));
}

static pid_t worker(void) {
        return (pid_t)peer_ok(watcher, MSG(daemon_info)).daemon_info_reply.worker;
}

/* ---- tests ----------------------------------------------------------------------------------- */

START_TEST(evicted_blocks_come_back) {
        struct kvd_pin pin = {0};
        uint32_t ids[BLOCKS];

        start_with("daemon.host_tier=8M");
        ck_assert(kvd_slice_is(tier_of(0).name, "host"));
        ck_assert(kvd_slice_is(tier_of(0).state, "on"));
        make_and_keep(1);
        evict_all();
        ck_assert_uint_eq(resident(chain(1)), 0);
        ck_assert_int_eq(kvd_lookup(space, 0, chain(1), BLOCKS * BLOCK_TOKENS, ids, BLOCKS, &pin),
                         0);
        ck_assert_uint_eq(pin.n_below, BLOCKS * BLOCK_TOKENS);
        fetch(chain(1));
        ck_assert_uint_eq(resident(chain(1)), BLOCKS);
        ck_assert_uint_eq(tier_of(0).hits, BLOCKS);
        ck_assert_uint_eq(tier_of(0).errors, 0);
        end();
}
END_TEST

/* 5 MiB of blocks in 4 MiB: what comes last is there, what came first is not, and nothing is wrong. */
START_TEST(it_is_bounded) {
        uint32_t found = 0;

        start_with("daemon.host_tier=4M");
        for (uint32_t i = 0; i < 13; i++) {
                make_chain(chain(i));
                usleep(300000);
        }
        WAIT_UNTIL(tier_of(0).evicted > 0);
        ck_assert_uint_le(copies() * BLOCK_BYTES, 4 << 20);
        ck_assert_uint_eq(copies(), tier_of(0).records);
        evict_all();
        for (uint32_t i = 0; i < 13; i++) {
                fetch(chain(i));
                found += resident(chain(i));
                evict_all();
        }
        ck_assert_uint_gt(found, 0);
        ck_assert_uint_eq(tier_of(0).wrong, 0);
        end();
}
END_TEST

/* A space has eight places for each of its blocks: what finds none is written nowhere. */
START_TEST(there_are_no_places_left) {
        uint32_t n = 0;

        max_blocks = 2 * BLOCKS;
        start_with("daemon.host_tier=15M");
        while (!tier_of(0).errors) {
                make_chain(chain(n++));
                WAIT_UNTIL(tier_of(0).errors || has(n * (uint64_t)BLOCKS));
        }
        ck_assert_uint_eq(n, 8 * 2 + 1);
        ck_assert_uint_eq(copies(), 8 * max_blocks);
        ck_assert(kvd_slice_is(tier_of(0).state, "on"));
        evict_all();
        fetch(chain(0));
        ck_assert_uint_eq(resident(chain(0)), BLOCKS);
        end();
}
END_TEST

START_TEST(a_deleted_space_leaves_nothing) {
        start_with("daemon.host_tier=8M");
        make_and_keep(1);
        make_chain(chain(2)); /* some of it may be on its way */
        peer_ok(watcher, MSG(space_delete, .space = kvd_slice_of("s"), .force = 1));
        WAIT_UNTIL(tier_of(0).records == 0);
        space = kvd_space_close(space);
        handle = kvd_close(handle);
        connect_to_it();
        ck_assert_int_lt(begin_fetch(1), 0);
        ck_assert_uint_eq(resident(chain(1)), 0);
        make_and_keep(1);
        end();
}
END_TEST

/* The worker is killed while blocks go and come: they go and come by the next one. */
START_TEST(a_worker_that_dies) {
        start_with("daemon.host_tier=8M");
        for (uint32_t i = 0; i < 4; i++) {
                make_chain(chain(i));
                if (i % 2)
                        usleep(200000); /* in the middle of it, perhaps */
                WAIT_UNTIL(worker() > 0);
                kill(worker(), SIGKILL);
        }
        WAIT_UNTIL(has(4 * BLOCKS));
        for (uint32_t i = 0; i < 4; i++) {
                int fd;

                evict_all();
                fd = begin_fetch(i);
                if (i % 2 && fd >= 0) {
                        WAIT_UNTIL(worker() > 0);
                        kill(worker(), SIGKILL);
                }
                end_fetch(fd);
                fetch(chain(i)); /* lost twice, it is a miss */
                ck_assert_uint_eq(resident(chain(i)), BLOCKS);
        }
        ck_assert_uint_eq(tier_of(0).wrong, 0);
        end();
}
END_TEST

/* It ends with its daemon: the next one begins empty, and has all of its room. */
START_TEST(a_daemon_that_is_killed) {
        start_with("daemon.host_tier=8M");
        make_and_keep(1);
        evict_all();
        begin_fetch(1);
        leave_it();
        instance_kill(&in);
        instance_again(&in, settings_now);
        watcher = peer_attach(in.socket);
        connect_to_it();
        ck_assert_uint_eq(tier_of(0).records, 0);
        ck_assert_uint_eq(copies(), 0);
        ck_assert_uint_eq(resident(chain(1)), 0);
        make_and_keep(1);
        evict_all();
        fetch(chain(1));
        ck_assert_uint_eq(resident(chain(1)), BLOCKS);
        end();
}
END_TEST

/* The memfd of the copies, as its owner has it. */
static int open_copies(void) {
        char folder[64], path[128], name[64];
        struct dirent *entry;
        int found = -1;
        DIR *dir;

        snprintf(folder, sizeof folder, "/proc/%d/fd", in.pid);
        dir = opendir(folder);
        ck_assert_ptr_nonnull(dir);
        while (found < 0 && (entry = readdir(dir))) {
                ssize_t n;

                snprintf(path, sizeof path, "%s/%.16s", folder, entry->d_name);
                n = readlink(path, name, sizeof name - 1);
                name[MAX(n, 0)] = 0;
                if (strstr(name, "kvd-spill"))
                        found = open(path, O_RDWR | O_CLOEXEC);
        }
        closedir(dir);
        ck_assert_int_ge(found, 0);
        return found;
}

/* What became another block on the way, or in memory, is not shown to anybody. */
START_TEST(a_flipped_copy_is_a_miss) {
        uint8_t byte;
        int fd;

        start_with("daemon.host_tier=8M");
        make_and_keep(1);
        evict_all();
        fd = open_copies();
        for (uint64_t i = 0; i < BLOCKS; i++) {
                off_t at = (off_t)(i * BLOCK_BYTES + 5000);

                ck_assert_int_eq(pread(fd, &byte, 1, at), 1);
                byte ^= 1;
                ck_assert_int_eq(pwrite(fd, &byte, 1, at), 1);
        }
        close(fd);
        fetch(chain(1));
        ck_assert_uint_eq(resident(chain(1)), 0);
        ck_assert_uint_gt(tier_of(0).wrong, 0);
        make_and_keep(1);
        end();
}
END_TEST

/* Who asked is gone before it comes. */
START_TEST(a_client_that_leaves) {
        int fd;

        start_with("daemon.host_tier=8M");
        make_and_keep(1);
        evict_all();
        fd = begin_fetch(1);
        kvd_space_close(space);
        kvd_close(handle);
        end_fetch(fd);
        connect_to_it();
        WAIT_UNTIL(tier_of(0).queue == 0);
        fetch(chain(1));
        ck_assert_uint_eq(resident(chain(1)), BLOCKS);
        end();
}
END_TEST

/* By legacy handles a space is one segment, and is not deleted under its clients. */
SUITE("host-tier",
      opaque = argc > 1,
      TESTS(evicted_blocks_come_back, it_is_bounded, there_are_no_places_left,
            a_flipped_copy_is_a_miss, a_client_that_leaves, a_daemon_that_is_killed),
      WHEN(strcmp(getenv("KVD_TEST_BACKEND"), "cuda") == 0,
           TESTS(a_deleted_space_leaves_nothing, a_worker_that_dies)))
