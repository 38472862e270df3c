/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The file tier of a real daemon. Evicted blocks come back, even after kvd was killed; deleted ones
 * do not. A disk process that dies, or a file that is not kvd's, costs blocks and nothing else.
 */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "client/kvd.h"
#include "ipc/base/layout.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/daemon/children/deep.h"
#include "tests/daemon/children/file_tier.h"
#include "tests/daemon/children/objects.h"
#include "tests/lib/log_lines.h"
#include "tests/lib/oracle.h"
#include "tests/lib/suite.h"

/* ---- tests ----------------------------------------------------------------------------------- */

/* Number of fetches whose time was measured. */
static uint64_t timed_fetches(void) {
        struct kvd_slice words = peer_ok(watcher, MSG(space_info)).space_info_reply.client_counters;
        uint64_t all[KVD_CLIENT_WORDS], n = 0;

        ck_assert_uint_eq(words.size, sizeof all);
        memcpy(all, words.data, sizeof all);
        for (uint32_t i = 0; i < KVD_LATENCY_BUCKETS; i++)
                n += all[kvd_latency_sum(KVD_LATENCY_FETCH) + 1 + i];
        ck_assert_uint_eq(n > 0, all[kvd_latency_sum(KVD_LATENCY_FETCH)] > 0);
        return n;
}

START_TEST(evicted_blocks_come_back) {
        write_chain();
        evict_all();
        ck_assert_uint_eq(resident(tokens), 0);
        ck_assert_uint_eq(timed_fetches(), 0);
        ck_assert_int_eq(fetch(tokens), BLOCKS * BLOCK_TOKENS);
        ck_assert_uint_eq(timed_fetches(), 1);
        ck_assert_uint_eq(resident(tokens), BLOCKS);
        ck_assert_uint_eq(tier().hits, BLOCKS);
        ck_assert_uint_eq(tier().misses, 0);
        ck_assert_int_eq(fetch(tokens), BLOCKS * BLOCK_TOKENS);
        ck_assert_uint_eq(tier().hits, BLOCKS);
}
END_TEST

START_TEST(lookups_say_what_is_below) {
        uint32_t other[BLOCKS * BLOCK_TOKENS], ids[BLOCKS];
        struct kvd_pin pin = {0};

        WAIT_UNTIL(below(tokens) == 0); /* unknown until the daemon has reported it */
        write_chain();
        ck_assert_uint_eq(below(tokens), 0);
        peer_ok(watcher, MSG(evict, .space = kvd_slice_of("s"), .blocks = 5));
        ck_assert_uint_eq(below(tokens), 5 * BLOCK_TOKENS);
        evict_all();
        ck_assert_uint_eq(below(tokens), BLOCKS * BLOCK_TOKENS);
        ck_assert_uint_eq(below_salted(tokens, 1), 0);
        memcpy(other, tokens, sizeof other);
        other[5 * BLOCK_TOKENS]++;
        ck_assert_uint_eq(below(other), 5 * BLOCK_TOKENS);
        ck_assert_int_eq(kvd_lookup(space, 0, tokens, 3 * BLOCK_TOKENS - 1, ids, BLOCKS, &pin), 0);
        ck_assert_uint_eq(pin.n_below, 2 * BLOCK_TOKENS);
        fetch(other);
        ck_assert_uint_eq(below(other), 0);
        ck_assert_uint_eq(below(tokens), (BLOCKS - 5) * BLOCK_TOKENS);
        ck_assert_int_eq(kvd_lookup(space, 0, tokens, BLOCKS * BLOCK_TOKENS, ids, 3, &pin),
                         3 * BLOCK_TOKENS);
        ck_assert_uint_eq(pin.n_below, 0); /* the blocks behind may be resident */
        kvd_unpin(space, &pin);
        fetch(tokens);
        ck_assert_uint_eq(below(tokens), 0);
}
END_TEST

static bool has_open(pid_t pid, const char *path) {
        struct stat wanted, st;
        char link[64];

        ck_assert_int_eq(stat(path, &wanted), 0);
        for (int fd = 3; pid && fd < 256; fd++) {
                snprintf(link, sizeof link, "/proc/%d/fd/%d", pid, fd);
                if (stat(link, &st) == 0 && st.st_dev == wanted.st_dev &&
                    st.st_ino == wanted.st_ino)
                        return true;
        }
        return false;
}

/* Locks the file, as the disk process of a killed kvd does, until the next kvd opens it. */
static pid_t hold_file(void) {
        int ends[2];
        char byte = 0;
        pid_t pid;

        ck_assert_int_eq(pipe(ends), 0);
        pid = fork();
        if (pid == 0) {
                int fd = open(file, O_RDWR | O_CLOEXEC);

                if (fd < 0 || flock(fd, LOCK_EX) < 0 || write(ends[1], &byte, 1) != 1)
                        _exit(1);
                WAIT_UNTIL(has_open(child_of(getppid(), "kvd"), file));
                usleep(20000);
                _exit(0);
        }
        ck_assert_int_eq(read(ends[0], &byte, 1), 1);
        close(ends[0]);
        close(ends[1]);
        return pid;
}

START_TEST(a_killed_daemons_disk_process_is_waited_for) {
        pid_t pid;

        write_chain();
        leave_it();
        instance_kill(&in);
        pid = hold_file();
        start_again("on");
        ck_assert_int_eq(wait_status(pid), 0);
        ck_assert_uint_eq(tier().records, BLOCKS);
}
END_TEST

START_TEST(warm_after_a_restart) {
        write_chain();
        restart(_i);
        ck_assert_uint_eq(tier().records, BLOCKS);
        ck_assert_uint_eq(resident(tokens), 0);
        ck_assert_uint_gt(below(tokens), 0); /* perhaps unknown until the daemon has reported it */
        WAIT_UNTIL(below(tokens) == BLOCKS * BLOCK_TOKENS);
        ck_assert_int_eq(fetch(tokens), BLOCKS * BLOCK_TOKENS);
        ck_assert_uint_eq(resident(tokens), BLOCKS);
        /* blocks that are in the file are not written again */
        peer_ok(watcher, MSG(evict, .space = kvd_slice_of("s"), .blocks = 1));
        make_chain(tokens);
        ck_assert_uint_eq(tier().records, BLOCKS);
        ck_assert_uint_eq(tier().written_bytes, 0);
}
END_TEST

START_TEST(only_missing_blocks_are_fetched) {
        write_chain();
        peer_ok(watcher, MSG(evict, .space = kvd_slice_of("s"), .blocks = 5));
        ck_assert_uint_eq(resident(tokens), BLOCKS - 5);
        ck_assert_int_eq(fetch(tokens), BLOCKS * BLOCK_TOKENS);
        ck_assert_uint_eq(resident(tokens), BLOCKS);
        ck_assert_uint_eq(tier().hits, 5);
}
END_TEST

START_TEST(others_are_not_there) {
        uint32_t other[BLOCKS * BLOCK_TOKENS];
        int fd;

        write_chain();
        evict_all();
        memcpy(other, tokens, sizeof other);
        other[5 * BLOCK_TOKENS]++;
        ck_assert_int_eq(fetch(other), 5 * BLOCK_TOKENS);
        ck_assert_uint_eq(resident(other), 5);
        other[0]++;
        ck_assert_int_eq(fetch(other), 0);
        ck_assert_int_eq(kvd_fetch(space, 0, 1, tokens, BLOCK_TOKENS, &fd), 0);
        ck_assert_int_eq(fd, -1);
        ck_assert_int_eq(kvd_fetch(space, 1, 0, tokens, BLOCK_TOKENS, &fd), -EINVAL);
}
END_TEST

/* Writes all of the deep space's blocks to a new file, and evicts them. */
static kvd_space *write_deep(uint32_t of) {
        kvd_space *deep;
        uint32_t below;

        pool = "daemon.pool=32M";
        file_size = "daemon.file_size=64M";
        unlink(file);
        restart(false);
        deep = deep_space(handle, of);
        deep_seal(deep, DEEP_BLOCKS);
        WAIT_UNTIL(tier().records == DEEP_BLOCKS);
        WAIT_UNTIL(tier().written_bytes >= DEEP_BYTES);
        while (peer_ok(watcher, MSG(evict, .space = kvd_slice_of("deep"))).evict_reply.more)
                ;
        ck_assert_uint_eq(deep_resident(deep, &below), 0);
        return deep;
}

/*
 * Only the first 15,360 tokens of a chain used to come back, and lookups promised more. The daemon
 * dies after the first part.
 */
START_TEST(a_chain_of_any_length_comes_back) {
        const uint32_t most = KVD_FETCH_TOKENS;
        uint32_t found = 0, before = 0, below;
        kvd_space *deep = write_deep(KVD_CAUSAL);

        ck_assert(deep_fetch(deep));
        ck_assert_uint_eq(deep_resident(deep, &below), most);
        kvd_space_close(deep);
        restart(true);
        deep = deep_space(handle, KVD_CAUSAL);
        WAIT_UNTIL(tier().records == DEEP_BLOCKS);
        while (found < DEEP_TOKENS) {
                found = deep_resident(deep, &below);
                if (found == DEEP_TOKENS)
                        break;
                ck_assert_uint_ge(below, 1);
                ck_assert(found == 0 || found > before);
                before = found;
                ck_assert(deep_fetch(deep));
        }
        ck_assert_uint_eq(below, 0);
        ck_assert(!deep_fetch(deep));
        ck_assert_uint_eq(tier().records, DEEP_BLOCKS);
        kvd_space_close(deep);
}
END_TEST

/* One of more than 15,360 tokens was never written. The daemon is killed in between. */
START_TEST(a_prefix_of_any_length_comes_back) {
        kvd_space *deep = write_deep(KVD_BIDIRECTIONAL);
        uint32_t below;

        ck_assert(deep_fetch(deep));
        ck_assert_uint_eq(deep_resident(deep, &below), DEEP_TOKENS);
        kvd_space_close(deep);
        restart(true);
        deep = deep_space(handle, KVD_BIDIRECTIONAL);
        WAIT_UNTIL(deep_resident(deep, &below) == 0 && below == DEEP_TOKENS);
        ck_assert(deep_fetch(deep));
        ck_assert_uint_eq(deep_resident(deep, &below), DEEP_TOKENS);
        ck_assert(!deep_fetch(deep));
        kvd_space_close(deep);
}
END_TEST

/* ---- a daemon that dies between two parts of a prefix ---------------------------------------- */

static struct {
        const struct kvd_sys *under; /* the wrapped system calls */
        uint32_t parts;              /* messages sent that are as large as a part */
} sending;

static ssize_t count_parts(int fd, const struct msghdr *message, int flags) {
        sending.parts += message->msg_iov->iov_len >= KVD_FETCH_TOKENS * sizeof(uint32_t);
        return sending.under->sendmsg(fd, message, flags);
}

/* Behind the first part's reply, the daemon dies. */
static ssize_t receive_and_kill(int fd, struct msghdr *message, int flags) {
        ssize_t n = sending.under->recvmsg(fd, message, flags);

        if (n > 0 && sending.parts == 1) {
                sys = sending.under;
                watcher = peer_close(watcher);
                instance_kill(&in);
                instance_again(&in, settings());
                watcher = peer_attach(in.socket);
        }
        return n;
}

START_TEST(a_prefix_whose_daemon_dies_between_its_parts_comes_back) {
        kvd_space *deep = write_deep(KVD_BIDIRECTIONAL);
        struct kvd_sys table = *sys;
        uint32_t below;
        int fd;

        table.sendmsg = count_parts;
        table.recvmsg = receive_and_kill;
        sending.under = sys;
        sys = &table;
        ck_assert_int_eq(kvd_fetch(deep, 0, 0, deep_tokens(), DEEP_TOKENS, &fd), -ECONNRESET);
        ck_assert_int_eq(fd, -1);
        ck_assert_uint_eq(sending.parts, 1);
        WAIT_UNTIL(deep_resident(deep, &below) == 0 && below == DEEP_TOKENS);
        ck_assert(deep_fetch(deep));
        ck_assert_uint_eq(deep_resident(deep, &below), DEEP_TOKENS);
        kvd_space_close(deep);
}
END_TEST

/* ---- evict --to file ------------------------------------------------------------------------- */

static struct kvd_msg to_file(uint32_t to) {
        return peer_call(watcher, MSG(evict, .space = kvd_slice_of("s"), .to = to));
}

/* Waits for the end of evict --to file; returns 0 or its error. */
static uint32_t wait_for_the_file(void) {
        struct kvd_msg m;

        do {
                usleep(1000);
                m = to_file(2);
        } while (m.number != KVD_MSG_error && m.evict_reply.more);
        return m.number == KVD_MSG_error ? m.error.code : 0;
}

static uint32_t all_to_file(void) {
        ck_assert_uint_eq(to_file(1).evict_reply.more, 1);
        return wait_for_the_file();
}

/* Blocks are written only at their second use, and the pool holds more than the file. */
static void with_a_small_file(void) {
        leave_it();
        instance_stop(&in);
        unlink(file);
        pool = "daemon.pool=16M";
        file_size = "daemon.file_size=4M";
        depth = "daemon.file_depth=1000000000";
        start_again("on");
}

static void make_rounds(uint32_t from, uint32_t to) {
        uint32_t chain[BLOCKS * BLOCK_TOKENS];

        for (; from < to; from++) {
                for (uint32_t i = 0; i < ARRAY_SIZE(chain); i++)
                        chain[i] = from * 1000 + i;
                make_chain(chain);
        }
}

/* This used to succeed although the first blocks were evicted from the file for the last ones. */
START_TEST(evict_to_a_full_file_says_so) {
        uint64_t evicted;

        with_a_small_file();
        make_rounds(0, 3);
        ck_assert_uint_eq(all_to_file(), 0);
        ck_assert_uint_eq(tier().records, 3 * BLOCKS);
        make_rounds(3, 20);
        ck_assert_uint_eq(all_to_file(), ENOSPC);
        ck_assert_uint_ge(tier().records, 3 * BLOCKS);
        evicted = tier().evicted;
        ck_assert_uint_eq(wait_for_the_file(), ENOSPC);
        evict_all();
        /* records of blocks that left the pool may be evicted for blocks in the pool */
        make_rounds(20, 23);
        ck_assert_uint_eq(all_to_file(), 0);
        ck_assert_uint_gt(tier().evicted, evicted);
}
END_TEST

/*
 * kvctl was killed. Blocks made afterwards used to be written, too, and the next kvctl got the old
 * result.
 */
START_TEST(a_killed_evict_to_file_leaves_nothing_behind) {
        with_a_small_file();
        make_rounds(0, 1);
        ck_assert_uint_eq(to_file(1).evict_reply.more, 1);
        WAIT_UNTIL(tier().records == BLOCKS);
        WAIT_UNTIL(!to_file(2).evict_reply.more);
        make_rounds(1, 2);
        usleep(300000); /* more than enough for a wrong write */
        ck_assert_uint_eq(tier().records, BLOCKS);
        ck_assert_uint_eq(all_to_file(), 0);
        ck_assert_uint_eq(tier().records, 2 * BLOCKS);
}
END_TEST

#define LONG_BLOCKS 100u

/*
 * The coldest records of long chains are their first blocks, which cannot be evicted. The file used
 * to take no more blocks then.
 */
START_TEST(a_file_full_of_long_chains_goes_on) {
        static uint32_t chain[LONG_BLOCKS * BLOCK_TOKENS];
        struct kvd_block blocks[LONG_BLOCKS];

        file_size = "daemon.file_size=4M";
        unlink(file);
        pool = "daemon.pool=16M";
        restart(false);
        for (uint32_t round = 0; round < 4; round++) {
                uint64_t written = tier().written_bytes;
                struct kvd_pin pin = {0};
                uint32_t n = 0;

                for (uint32_t i = 0; i < ARRAY_SIZE(chain); i++)
                        chain[i] = round * 10000 + i;
                for (int r; n < LONG_BLOCKS; n += (uint32_t)r) {
                        r = kvd_alloc(space, LONG_BLOCKS - n, blocks + n);
                        ck_assert_int_gt(r, 0);
                }
                ck_assert_int_ge(kvd_seal(space, &pin, n, blocks, chain, ARRAY_SIZE(chain)), 0);
                kvd_unpin(space, &pin);
                WAIT_UNTIL(tier().written_bytes >= written + LONG_BLOCKS * (uint64_t)RECORD_BYTES);
        }
        ck_assert_uint_gt(tier().evicted, LONG_BLOCKS);
}
END_TEST

/* Deleted blocks do not come back after a restart. */
START_TEST(deleted_is_deleted) {
        write_chain();
        ck_assert_uint_eq(peer_ok(watcher,
                                  MSG(space_delete, .space = kvd_slice_of("s"), .force = 1))
                                  .space_delete_reply.erasing,
                          1);
        WAIT_UNTIL(is_erased());
        restart(true);
        WAIT_UNTIL(below(tokens) == 0);
        ck_assert_int_eq(fetch(tokens), 0);
        ck_assert_uint_eq(tier().records, 0);
}
END_TEST

/* A space without clients was dropped to make room. Its blocks in the file are found again. */
START_TEST(a_dropped_space_comes_back) {
        char name[16];

        write_chain();
        space = kvd_space_close(space);
        handle = kvd_close(handle);
        WAIT_UNTIL(peer_ok(watcher, MSG(daemon_info)).daemon_info_reply.clients == 1);
        for (uint32_t i = 0; i < 64; i++) {
                snprintf(name, sizeof name, "other%u", i);
                peer_ok(watcher, MSG(space, .name = kvd_slice_of(name), .create = 2, .layers = 1,
                                     .kv_heads = 1, .head_dim = 8, .dtype = 2, .vocab = 10));
        }
        peer_refused(watcher, MSG(space, .name = kvd_slice_of("s")), -ENOENT);
        connect_to_it();
        ck_assert_int_gt(fetch(tokens), 0);
        ck_assert_uint_eq(resident(tokens), BLOCKS);
}
END_TEST

static bool why_has(const char *words) {
        char line[160];

        return strstr(kvd_slice_copy(tier().why, line, sizeof line), words);
}

static pid_t disk_process(void) {
        return child_of(in.pid, "kvd-disk");
}

/* If blocks were not written, the result says so. */
START_TEST(the_disk_dies_during_evict_to_file) {
        pid_t pid;
        uint32_t r;

        depth = "daemon.file_depth=1000000000";
        restart(false);
        make_chain(tokens);
        WAIT_UNTIL((pid = disk_process()) > 0);
        ck_assert_int_eq(kill(pid, SIGSTOP), 0);
        ck_assert_uint_eq(to_file(1).evict_reply.more, 1);
        usleep(20000);
        ck_assert_int_eq(kill(pid, SIGKILL), 0);
        r = wait_for_the_file();
        ck_assert_msg(r == 0 || r == ENOSPC, "%s", strerror((int)r));
        ck_assert_uint_eq(r == 0, tier().records == BLOCKS);
        ck_assert_msg(r == 0 || why_has("last error: a process that works for the daemon ended"),
                      "%d", r);
        ck_assert_uint_eq(resident(tokens), BLOCKS);
        ck_assert_uint_eq(all_to_file(), 0);
        evict_all();
        fetch(tokens);
        ck_assert_uint_eq(resident(tokens), BLOCKS);
}
END_TEST

START_TEST(a_disk_process_that_dies_is_replaced) {
        pid_t pid = disk_process();

        ck_assert_int_gt(pid, 0);
        write_chain();
        evict_all();
        ck_assert_int_eq(kill(pid, SIGKILL), 0);
        WAIT_UNTIL(disk_process() && disk_process() != pid);
        WAIT_UNTIL((fetch(tokens), resident(tokens) == BLOCKS));
        ck_assert(tier_is("on"));
}
END_TEST

/* Each lookup used to wait for a whole second until the process was killed. */
START_TEST(a_disk_process_that_hangs_is_not_waited_for) {
        pid_t pid;
        int fd;

        timeout = "daemon.file_timeout=90";
        restart(false);
        write_chain();
        evict_all();
        pid = disk_process();
        ck_assert_int_eq(kill(pid, SIGSTOP), 0);
        ck_assert_int_eq(kvd_fetch(space, 0, 0, tokens, n_tokens, &fd), n_tokens);
        close(fd);
        WAIT_UNTIL(tier_is("hanging"));
        ck_assert_int_eq(kvd_fetch(space, 0, 0, tokens, n_tokens, &fd), 0);
        ck_assert_int_eq(fd, -1);
        ck_assert_int_eq(kill(pid, SIGCONT), 0);
        WAIT_UNTIL(tier_is("on"));
        ck_assert_int_eq(disk_process(), pid);
        fetch(tokens);
        ck_assert_uint_eq(resident(tokens), BLOCKS);
}
END_TEST

/* kvd used to go on silently, and the next daemon found nothing. */
START_TEST(a_deleted_file_is_reported) {
        write_chain();
        ck_assert(!why_has("deleted"));
        ck_assert_int_eq(unlink(file), 0);
        WAIT_UNTIL(why_has("deleted, moved or replaced"));
        ck_assert(tier_is("on"));
}
END_TEST

/* A corrupt record is a miss, and so are the blocks behind it. */
START_TEST(rot_is_a_miss) {
        write_chain();
        evict_all();
        rot(tokens, 2);
        ck_assert_int_eq(fetch(tokens), BLOCKS * BLOCK_TOKENS);
        ck_assert_uint_eq(resident(tokens), 2);
        ck_assert_uint_ge(tier().misses, 1);
        ck_assert_uint_eq(below(tokens), 0);
        ck_assert_int_eq(fetch(tokens), 2 * BLOCK_TOKENS);
}
END_TEST

static void make_round(uint32_t round, uint32_t *chain) {
        for (uint32_t i = 0; i < BLOCKS * BLOCK_TOKENS; i++)
                chain[i] = round * 1000 + i;
}

/* If blocks exceed the file, cold records are evicted. */
START_TEST(a_full_file_goes_on) {
        uint32_t chain[BLOCKS * BLOCK_TOKENS];

        for (uint32_t round = 0; round < 60; round++) {
                uint64_t written = tier().written_bytes;

                make_round(round, chain);
                make_chain(chain);
                WAIT_UNTIL(tier().written_bytes >= written + BLOCKS * (uint64_t)RECORD_BYTES);
        }
        ck_assert_uint_gt(tier().evicted, 0);
        ck_assert_uint_le(tier().used, 16 << 20);
        evict_all();
        for (uint32_t round = 0; round < 60; round++) {
                uint32_t said;

                make_round(round, chain);
                said = below(chain);
                ck_assert_int_eq(fetch(chain), said);
                ck_assert_uint_eq(below(chain), 0);
                evict_all();
        }
        ck_assert_int_eq(fetch(chain), BLOCKS * BLOCK_TOKENS);
        ck_assert_uint_eq(resident(chain), BLOCKS);
}
END_TEST

/* Returns how often the process went to sleep. */
static unsigned long sleeps_of(pid_t pid) {
        unsigned long n = 0;
        char path[64], line[128];
        FILE *f;

        snprintf(path, sizeof path, "/proc/%d/status", pid);
        f = fopen(path, "re");
        ck_assert(f != NULL);
        while (fgets(line, sizeof line, f) && sscanf(line, "voluntary_ctxt_switches: %lu", &n) != 1)
                ;
        fclose(f);
        return n;
}

/* True if the disk process sleeps on while the daemon answers requests. */
static bool is_left_alone(pid_t pid) {
        unsigned long before = sleeps_of(pid);

        for (int i = 0; i < 20; i++) {
                usleep(2000);
                tier();
        }
        return sleeps_of(pid) <= before + 2;
}

/* The daemon used to try to start a process for such a file for ever, and logged each attempt. */
START_TEST(a_file_whose_processes_always_die_is_off_and_stays_quiet) {
        char line[512];

        stop();
        log_catch();
        start();
        while (!tier_is("off")) {
                pid_t pid = child_of(in.pid, "kvd-disk");

                if (pid > 0)
                        kill(pid, SIGKILL);
        }
        WAIT_UNTIL(child_of(in.pid, "kvd-disk") <= 0);
        for (int i = 0; i < 100; i++) { /* longer than the longest pause before the next start */
                usleep(20000);
                tier();
        }
        snprintf(line, sizeof line, "%u, %u", log_count("is off: its process ends again and again"),
                 log_count("cannot be started"));
        log_let_go();
        ck_assert_str_eq(line, "1, 0");
}
END_TEST

static void evict_objects(void) {
        struct kvd_msg_evict_reply r;

        do {
                r = peer_ok(watcher, MSG(evict, .space = kvd_slice_of("objects"))).evict_reply;
        } while (r.more);
}

/* Objects by key and chains of tokens, in blocks of all sizes. */
START_TEST(objects_come_back_beside_chains) {
        const uint32_t block_tokens = object_tokens[_i];
        kvd_space *objects = object_space(handle, block_tokens);

        object_seal(objects);
        beside_seal(objects);
        WAIT_UNTIL(tier().records == 2 * OBJECT_BLOCKS);
        for (uint32_t i = 0; i < 2; i++) {
                WAIT_UNTIL(tier().written_bytes >= (1 - i) * 2 * OBJECT_BLOCKS * OBJECT_BYTES);
                evict_objects();
                ck_assert(!object_is_there(objects));
                WAIT_UNTIL(object_below(objects) == OBJECT_BLOCKS * 8);
                ck_assert_int_eq(object_fetch(objects, OBJECT_SALT + 1), 0);
                ck_assert_int_eq(object_fetch(objects, OBJECT_SALT), OBJECT_BLOCKS);
                ck_assert(object_is_there(objects));
                ck_assert_uint_eq(beside_blocks(objects), 0);
                ck_assert_int_eq(beside_fetch(objects), OBJECT_BLOCKS * block_tokens);
                ck_assert_uint_eq(beside_blocks(objects), OBJECT_BLOCKS);
                kvd_space_close(objects);
                restart(i == 0);
                objects = object_space(handle, block_tokens);
        }
        kvd_space_close(objects);
}
END_TEST

/* kvctl asks for tiers until there are no more. */
START_TEST(there_is_one_tier) {
        for (uint32_t i = 1; i < 4; i++)
                peer_refused(watcher, MSG(tier_info, .tier = i), -ENOENT);
}
END_TEST

/* ---- a file that is not this kvd's ----------------------------------------------------------- */

static void stop_it(void) {
        leave_it();
        instance_stop(&in);
}

static void run(const char *command) {
        setenv("FILE", file, 1);
        ck_assert_int_eq(system(command), 0);
}

/* Stops kvd, and replaces its file. */
static void write_foreign(const char *bytes) {
        stop_it();
        setenv("BYTES", bytes, 1);
        run("yes precious | head -c $BYTES >$FILE");
}

/* The disk process used to be asked to open such a file again and again without a pause. */
START_TEST(a_file_that_cannot_be_used_costs_nothing) {
        pid_t pid;

        write_foreign("5000");
        start_again("off");
        WAIT_UNTIL((pid = disk_process()) > 0);
        ck_assert(is_left_alone(pid) || is_left_alone(pid));
}
END_TEST

/* Starts kvd, which leaves the file unchanged for that reason, and stops it. */
static void expect_unchanged(const char *why) {
        run("cp $FILE $FILE-copy");
        start_again("off");
        ck_assert(why_has(why));
        make_chain(tokens);
        stop_it();
        run("cmp $FILE $FILE-copy && rm $FILE-copy");
}

/*
 * kvd used to cut or extend it to the configured size before it looked at it, and took a file of
 * another size for an unused one.
 */
START_TEST(a_file_of_another_kvd_and_size_stays) {
        write_chain();
        stop_it();
        file_size = _i ? "daemon.file_size=8M" : "daemon.file_size=32M";
        expect_unchanged("another file_size");
        file_size = "daemon.file_size=16M";
        start_again("on");
        fetch(tokens);
        ck_assert_uint_eq(resident(tokens), BLOCKS);
}
END_TEST

/* The file may be shorter than the part that kvd reads, or longer than file_size. */
START_TEST(foreign_files_are_not_changed) {
        static const char *const bytes[] = {"100", "5000", "70000", "20000000"};

        write_foreign(bytes[_i]);
        expect_unchanged("not kvd's");
        unlink(file);
        start_again("on");
}
END_TEST

/* kvd was killed while it filled the file with zeros, or another program cut it. */
START_TEST(a_file_that_is_too_short_is_filled) {
        struct stat st;

        write_chain();
        stop_it();
        ck_assert_int_eq(truncate(file, _i ? 6 << 20 : 0), 0);
        ck_assert_int_eq(truncate(file, 6 << 20), 0);
        start_again("on");
        ck_assert_int_eq(stat(file, &st), 0);
        ck_assert_int_eq(st.st_size, 16 << 20);
        ck_assert_uint_eq(tier().records, _i ? BLOCKS : 0);
        if (_i == 0)
                write_chain();
        evict_all();
        fetch(tokens);
        ck_assert_uint_eq(resident(tokens), BLOCKS);
}
END_TEST

SUITE("file", FIXTURE(start, stop),
      LOOPS(2, warm_after_a_restart, a_file_of_another_kvd_and_size_stays,
            a_file_that_is_too_short_is_filled),
      LOOPS(3, objects_come_back_beside_chains), LOOPS(4, foreign_files_are_not_changed),
      TESTS(there_is_one_tier, evicted_blocks_come_back, a_file_full_of_long_chains_goes_on,
            lookups_say_what_is_below, a_chain_of_any_length_comes_back,
            a_prefix_of_any_length_comes_back,
            a_prefix_whose_daemon_dies_between_its_parts_comes_back,
            a_killed_daemons_disk_process_is_waited_for,
            a_disk_process_that_hangs_is_not_waited_for, a_deleted_file_is_reported,
            only_missing_blocks_are_fetched, others_are_not_there, deleted_is_deleted,
            a_dropped_space_comes_back, evict_to_a_full_file_says_so,
            a_killed_evict_to_file_leaves_nothing_behind, the_disk_dies_during_evict_to_file,
            a_disk_process_that_dies_is_replaced, rot_is_a_miss, a_full_file_goes_on,
            a_file_that_cannot_be_used_costs_nothing,
            a_file_whose_processes_always_die_is_off_and_stays_quiet))
