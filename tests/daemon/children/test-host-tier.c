/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The host tier below a pool on a GPU, with the stand-in driver. Chains that leave the pool come
 * back byte for byte, even if the worker that moves them dies, and leave nothing behind when they
 * are deleted. With an argument, blocks are opaque.
 */

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/kvd_methods.h"
#include "ipc/base/util.h"
#include "tests/daemon/children/file_tier.h"
#include "tests/lib/amount.h"
#include "tests/lib/suite.h"

/* ---- life ------------------------------------------------------------------------------------ */

static const char *settings_now[] = {"daemon.pool=16M", "daemon.segment=2M",
                                     "daemon.host_tier_depth=0", "daemon.host_tier=8M", NULL};

static void start_with(const char *host_tier) {
        settings_now[3] = host_tier;
        instance_start(&in, settings_now);
        watcher = peer_attach(in.socket);
        connect_to_it();
}

static void end(void) {
        leave_it();
        instance_end_clean(&in);
        if (file[0])
                unlink(file);
        file[0] = 0;
}

static void start_with_file(const char *host_tier) {
        char path[160];

        snprintf(file, sizeof file, "/var/tmp/kvd-test-host-%d", getpid());
        snprintf(path, sizeof path, "daemon.file=%s", file);
        unlink(file);
        instance_start(&in, SETTINGS("daemon.pool=16M", "daemon.segment=2M", path,
                                     "daemon.file_size=16M", "daemon.file_depth=0", host_tier));
        watcher = peer_attach(in.socket);
        connect_to_it();
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

/* Whether host memory has this number of records, all of them written. */
static bool has(uint64_t records) {
        return tier_of(0).records == records && copies() == records &&
               tier_of(0).written_bytes >= records * RECORD_BYTES;
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

/* 5 MiB of blocks in 4 MiB: some are evicted, some are found, and none is wrong. */
START_TEST(it_is_bounded) {
        uint32_t found = 0;

        start_with("daemon.host_tier=4M");
        for (uint32_t i = 0; i < 13; i++) {
                make_chain(chain(i));
                WAIT_UNTIL(tier_of(0).written_bytes >= (i + 1) * (uint64_t)BLOCKS * RECORD_BYTES);
        }
        WAIT_UNTIL(tier_of(0).evicted > 0);
        ck_assert_uint_le(copies() * BLOCK_BYTES, 4 << 20);
        WAIT_UNTIL(copies() == tier_of(0).records);
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

/* A space has eight places per block. When they are used up, the coldest records are evicted. */
START_TEST(there_are_no_places_left) {
        uint32_t n = 0;

        max_blocks = 2 * BLOCKS;
        start_with("daemon.host_tier=15M");
        for (; n < 8 * 2; n++) {
                make_chain(chain(n));
                WAIT_UNTIL(has((n + 1) * (uint64_t)BLOCKS));
        }
        ck_assert_uint_eq(tier_of(0).evicted, 0);
        make_chain(chain(n));
        WAIT_UNTIL(tier_of(0).evicted == BLOCKS && has(8 * max_blocks));
        ck_assert_uint_eq(tier_of(0).errors, 0);
        evict_all();
        fetch(chain(n));
        ck_assert_uint_eq(resident(chain(n)), BLOCKS);
        fetch(chain(1));
        ck_assert_uint_eq(resident(chain(1)), BLOCKS);
        end();
}
END_TEST

/* Opens the daemon's memfd of the copies. */
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

static uint64_t memory_of(int fd) {
        struct stat st;

        ck_assert_int_eq(fstat(fd, &st), 0);
        return (uint64_t)st.st_blocks * 512;
}

/* All its host memory is freed, even if a worker maps it and it takes several steps. */
START_TEST(a_deleted_space_leaves_nothing) {
        int fd;

        start_with("daemon.host_tier=15M");
        for (uint32_t i = 1; i <= 30; i++) {
                make_chain(chain(i));
                WAIT_UNTIL(has(i * (uint64_t)BLOCKS));
        }
        fd = open_copies();
        WAIT_UNTIL(memory_of(fd) >= 11 << 20);
        make_chain(chain(31)); /* some of it may be on its way */
        peer_ok(watcher, MSG(space_delete, .space = kvd_slice_of("s"), .force = 1));
        WAIT_UNTIL(tier_of(0).records == 0 && memory_of(fd) == 0);
        close(fd);
        space = kvd_space_close(space);
        handle = kvd_close(handle);
        connect_to_it();
        ck_assert_int_lt(begin_fetch(1), 0);
        ck_assert_uint_eq(resident(chain(1)), 0);
        make_and_keep(1);
        end();
}
END_TEST

static void kill_worker(void) {
        pid_t pid;

        WAIT_UNTIL((pid = worker()) > 0);
        kill(pid, SIGKILL);
}

/* Workers are killed while blocks are on their way down and up; the next worker moves them. */
static void kill_workers(uint32_t tier) {
        for (uint32_t i = 0; i < 4; i++) {
                uint64_t before = tier_of(tier).written_bytes;

                make_chain(chain(i));
                WAIT_UNTIL(i % 2 == 0 || tier_of(tier).written_bytes > before);
                kill_worker();
        }
        WAIT_UNTIL(tier_of(tier).written_bytes >= UINT64_C(4) * BLOCKS * RECORD_BYTES);
        ck_assert_uint_eq(tier_of(tier).records, 4 * BLOCKS);
        for (uint32_t i = 0; i < 4; i++) {
                int fd;

                evict_all();
                fd = begin_fetch(i);
                if (i % 2 && fd >= 0)
                        kill_worker();
                end_fetch(fd);
                fetch(chain(i)); /* a fetch that was lost twice is a miss */
                ck_assert_uint_eq(resident(chain(i)), BLOCKS);
        }
        ck_assert_uint_eq(tier_of(tier).wrong, 0);
}

START_TEST(a_worker_that_dies) {
        start_with("daemon.host_tier=8M");
        kill_workers(0);
        end();
}
END_TEST

/* The host tier ends with its daemon; that of the next one is empty and has its full size. */
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

static void flip_copies(void) {
        int fd = open_copies();
        uint8_t byte;

        for (uint64_t i = 0; i < BLOCKS; i++) {
                off_t at = (off_t)(i * BLOCK_BYTES + 5000);

                ck_assert_int_eq(pread(fd, &byte, 1, at), 1);
                byte ^= 1;
                ck_assert_int_eq(pwrite(fd, &byte, 1, at), 1);
        }
        close(fd);
}

/* No client sees a copy that was corrupted in memory. */
START_TEST(a_flipped_copy_is_a_miss) {
        start_with("daemon.host_tier=8M");
        make_and_keep(1);
        evict_all();
        flip_copies();
        fetch(chain(1));
        ck_assert_uint_eq(resident(chain(1)), 0);
        ck_assert_uint_gt(tier_of(0).wrong, 0);
        make_and_keep(1);
        end();
}
END_TEST

/* The client leaves before its blocks come. */
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

/* ---- with a file behind it: tier 0 is host memory, tier 1 the file --------------------------- */

static void make_and_write(uint32_t from, uint32_t to) {
        uint64_t before = tier_of(1).written_bytes;

        for (uint32_t i = from; i < to; i++)
                make_chain(chain(i));
        WAIT_UNTIL(tier_of(1).written_bytes - before >=
                   (to - from) * (uint64_t)BLOCKS * RECORD_BYTES);
}

static void fetch_whole(uint32_t which) {
        evict_all();
        fetch(chain(which));
        ck_assert_uint_eq(resident(chain(which)), BLOCKS);
}

/* Blocks without room in host memory come from the disk, and colder ones are evicted for them. */
START_TEST(a_file_is_behind_it) {
        start_with_file("daemon.host_tier=1M");
        WAIT_UNTIL(kvd_slice_is(tier_of(1).state, "on"));
        ck_assert(kvd_slice_is(tier_of(0).name, "host"));
        for (uint32_t i = 0; i < 6; i++)
                make_and_write(i, i + 1);
        ck_assert_uint_eq(tier_of(1).records, 6 * BLOCKS);
        ck_assert_uint_gt(tier_of(0).evicted, 0);
        ck_assert_uint_le(tier_of(0).used, 1 << 20);
        ck_assert_uint_eq(tier_of(0).records, copies());
        fetch_whole(5);
        ck_assert_uint_eq(tier_of(0).hits, BLOCKS);
        ck_assert_uint_eq(tier_of(1).hits, 0);
        fetch_whole(0);
        ck_assert_uint_eq(tier_of(1).hits, BLOCKS);
        fetch_whole(0);
        ck_assert_uint_eq(tier_of(0).hits, 2 * BLOCKS);
        ck_assert_uint_eq(tier_of(1).hits, BLOCKS);
        ck_assert_uint_le(tier_of(0).used, 1 << 20);
        ck_assert_uint_eq(tier_of(0).records, copies());
        end();
}
END_TEST

START_TEST(a_flipped_copy_is_read_from_the_file) {
        start_with_file("daemon.host_tier=8M");
        make_and_write(1, 2);
        evict_all();
        flip_copies();
        fetch(chain(1));
        ck_assert_uint_eq(resident(chain(1)), 0);
        ck_assert_uint_eq(tier_of(0).wrong, BLOCKS);
        fetch_whole(1);
        ck_assert_uint_eq(tier_of(1).hits, BLOCKS);
        ck_assert_uint_eq(tier_of(1).wrong, 0);
        end();
}
END_TEST

/* Without host_tier, host memory holds only blocks on their way. */
START_TEST(nothing_stays_on_its_way) {
        start_with_file("daemon.host_tier=0");
        WAIT_UNTIL(kvd_slice_is(tier_of(0).state, "on"));
        make_chain(chain(1));
        WAIT_UNTIL(tier_of(0).written_bytes >= BLOCKS * (uint64_t)RECORD_BYTES);
        ck_assert_uint_eq(copies(), 0);
        fetch_whole(1);
        ck_assert_uint_eq(copies(), 0);
        end();
}
END_TEST

START_TEST(a_worker_that_dies_before_a_file) {
        start_with_file("daemon.host_tier=0");
        kill_workers(0);
        end();
}
END_TEST

/* The space is deleted while its blocks are on their way down or up. */
START_TEST(a_space_that_is_deleted_on_its_way) {
        start_with_file("daemon.host_tier=1M");
        for (uint32_t i = 0; i < 8; i++) {
                uint32_t way = i % 3; /* delete at once, when in memory, when in the file */
                uint64_t before = tier_of(way == 2).written_bytes;

                make_chain(chain(i));
                WAIT_UNTIL(way == 0 || tier_of(way == 2).written_bytes > before);
                if (i % 2)
                        close(begin_fetch(i));
                peer_ok(watcher, MSG(space_delete, .space = kvd_slice_of("s"), .force = 1));
                WAIT_UNTIL(tier_of(1).records == 0 && tier_of(0).records == 0);
                space = kvd_space_close(space);
                handle = kvd_close(handle);
                connect_to_it();
        }
        make_and_write(1, 2);
        fetch_whole(1);
        end();
}
END_TEST

#define WAIT_NS UINT64_C(120000000000)
#define OWN 900u /* blocks of a sequence: most of the pool, more than fit into memory for copies */

/* Spills entries until no more leave; returns the number of exact copies. */
static uint64_t spill_all(kvd_sequence *sequence) {
        uint64_t n = 0, before;

        do {
                before = n;
                for (uint32_t slot = 0; slot < OWN; slot++)
                        kvd_sequence_cool(sequence, 1, &slot, KVD_COOL_SPILL);
                ck_assert_int_ge(kvd_sequence_wait(sequence, WAIT_NS), 0);
                n = copies();
        } while (n > before);
        return n;
}

static void append_own(kvd_sequence *sequence) {
        for (uint32_t i = 0; i < OWN; i++) {
                struct kvd_block block;

                ck_assert_int_eq(kvd_alloc(space, 1, &block), 1);
                memset(block.data, (int)i, BLOCK_BYTES);
                ck_assert_msg(kvd_sequence_append(sequence, 1, &block, chain(100 + i),
                                                  BLOCK_TOKENS) >= 0,
                              "%s", kvd_error());
        }
}

/* Revives all entries from memory and file, with as many requests as needed; checks their bytes. */
static void revive_all(kvd_sequence *sequence) {
        const struct kvd_entry *entries;
        uint32_t n, there = 0;

        for (uint32_t tries = 0; there < OWN && tries < 100; tries++) {
                for (uint32_t slot = 0; slot < OWN; slot++)
                        kvd_sequence_revive(sequence, 1, &slot, KVD_REVIVE_EXACT);
                ck_assert_int_ge(kvd_sequence_wait(sequence, WAIT_NS), 0);
                entries = kvd_sequence_entries(sequence, &n);
                ck_assert_uint_eq(n, OWN);
                there = 0;
                for (uint32_t i = 0; i < OWN; i++) {
                        const uint8_t *data = entries[i].data;

                        for (uint32_t k = 0; data && k < BLOCK_BYTES; k++)
                                ck_assert_uint_eq(data[k], (uint8_t)i);
                        there += data != NULL;
                }
        }
        ck_assert_uint_eq(there, OWN);
}

/* Copies used to take all of this memory, so that no block could reach the file or come back. */
START_TEST(copies_leave_room_on_the_way) {
        kvd_sequence *sequence;
        uint64_t spilled;

        start_with_file("daemon.spill=16M"); /* the minimum */
        WAIT_UNTIL(kvd_slice_is(tier_of(0).state, "on"));
        ck_assert_int_eq(kvd_space_set(space, "kvreviver", 1), 0);
        ck_assert_int_eq(kvd_sequence_open(space, OWN, &sequence), 0);
        append_own(sequence);
        spilled = spill_all(sequence);
        ck_assert_uint_ge(spilled, 256);
        ck_assert_uint_lt(spilled, OWN);
        ck_assert_uint_gt(tier_of(0).copies, 0); /* blocks below get some of their memory */
        make_chain(chain(1));
        WAIT_UNTIL(tier_of(0).written_bytes >=
                   (tier_of(0).copies_written + BLOCKS) * (uint64_t)RECORD_BYTES);
        fetch_whole(1);
        ck_assert_uint_eq(tier_of(0).hits, BLOCKS);
        revive_all(sequence);
        ck_assert_uint_eq(tier_of(0).copies, 0);
        kvd_sequence_close(sequence);
        end();
}
END_TEST

/* With legacy handles, a space is one segment and cannot be deleted while it has clients. */
SUITE("host-tier", opaque = argc > 1,
      TESTS(evicted_blocks_come_back, it_is_bounded, there_are_no_places_left,
            a_flipped_copy_is_a_miss, a_client_that_leaves, a_daemon_that_is_killed,
            a_file_is_behind_it, a_flipped_copy_is_read_from_the_file, nothing_stays_on_its_way),
      WHEN(strcmp(getenv("KVD_TEST_BACKEND"), "cuda") == 0,
           TESTS(a_deleted_space_leaves_nothing, a_worker_that_dies,
                 a_worker_that_dies_before_a_file, a_space_that_is_deleted_on_its_way),
           WHEN(AMOUNT(!opaque, false), TESTS(copies_leave_room_on_the_way))))
