/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Exact copies of a sequence's blocks in a file. More blocks than the memory for copies holds leave
 * and come back byte for byte. A process that dies meanwhile costs no other copy and leaks no slot.
 */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/layout.h"
#include "ipc/base/util.h"
#include "tests/daemon/blocks.h"
#include "tests/lib/amount.h"
#include "tests/lib/oracle.h"
#include "tests/lib/suite.h"

#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})
#define MEMORY_BYTES (UINT64_C(256) << 10)
#define BLOCK_BYTES UINT64_C(16384)
#define RECORD_BYTES (BLOCK_BYTES + 4096)
#define CHAIN 4u
#define WAIT_NS UINT64_C(240000000000) /* longer than a test may take */

static struct instance in;
static struct user u;
static char file[64], file_setting[96];

/*
 * Tests stop the disk process, with ASan on a busy machine for more than 30 s. It must not count as
 * hanging meanwhile.
 */
static const char *const *settings(void) {
        static const char *list[8];

        snprintf(file_setting, sizeof file_setting, "daemon.file=%s", file);
        memcpy(list,
               SETTINGS("daemon.pool=4M", "daemon.segment=1M", "daemon.spill=256K", file_setting,
                        "daemon.file_size=16M", "daemon.file_depth=0", "daemon.file_timeout=3600"),
               sizeof list);
        return list;
}

static struct kvd_msg_tier_info_reply tier(void) {
        return peer_ok(u.peer, MSG(tier_info)).tier_info_reply;
}

static bool is_on(void) {
        struct kvd_slice state = tier().state;

        return state.size == 2 && memcmp(state.data, "on", 2) == 0;
}

static void connect_to_it(void) {
        user_open(&u, in.socket, (const char *const[]){"kvreviver=on", "pressure=off", NULL});
        WAIT_UNTIL(is_on());
}

static void start(void) {
        instance_make_dir(&in);
        snprintf(file, sizeof file, "/dev/shm/kvd-test-copies-%d", getpid());
        unlink(file);
        instance_again(&in, settings());
        connect_to_it();
}

static void stop(void) {
        user_check(&u);
        user_close(&u);
        instance_end(&in);
        unlink(file);
}

static void expect_no_copy(void) {
        WAIT_UNTIL(tier().copies == 0);
        ck_assert_uint_eq(tier().used, tier().records * RECORD_BYTES);
}

/* Spills all blocks, and waits until most copies are in the file. */
static void spill(void) {
        user_append(&u, USER_BLOCKS);
        user_spill(&u);
        WAIT_UNTIL(tier().copies >= USER_BLOCKS - MEMORY_BYTES / BLOCK_BYTES);
        user_check(&u);
}

static void ask_for_all(void) {
        uint32_t slots[USER_BLOCKS];

        for (uint32_t i = 0; i < USER_BLOCKS; i++)
                slots[i] = i;
        ck_assert_int_ge(kvd_sequence_revive(u.sequence, USER_BLOCKS, slots, KVD_REVIVE_EXACT), 0);
}

START_TEST(more_than_memory_takes_leaves_and_comes_back) {
        uint64_t in_memory;

        spill();
        in_memory = peer_ok(u.peer, MSG(space_info)).space_info_reply.copy_bytes;
        ck_assert_uint_le(in_memory, MEMORY_BYTES);
        WAIT_UNTIL(tier().copies_written >= tier().copies);
        user_revive(&u);
        ck_assert_uint_eq(user_counter(&u, KVD_SPACE_REVIVE_BROKEN), 0);
        ck_assert_uint_eq(tier().copies_lost, 0);
        expect_no_copy();
        for (int round = 0; round < AMOUNT(5, 1); round++) {
                user_spill(&u);
                user_revive(&u);
        }
        user_check(&u);
        stop();
}
END_TEST

/*
 * A client that waits gets all blocks, even those that do not fit in memory yet. If a busy machine
 * frees no room for a second, the rest is refused and counted, and the client asks again.
 */
START_TEST(a_waiting_client_gets_all) {
        uint64_t refused = 0, before, missing;

        spill();
        do {
                before = refused;
                ask_for_all();
                ck_assert_int_ge(kvd_sequence_wait(u.sequence, WAIT_NS), 0);
                refused = user_counter(&u, KVD_SPACE_REVIVE_REFUSED);
                missing = USER_BLOCKS - user_resident(&u);
                ck_assert_uint_le(missing, refused - before);
        } while (missing);
        stop();
}
END_TEST

/* 0: its sequence is closed; 1: its process ends. */
START_TEST(closed_sequences_leave_no_slot) {
        pid_t pid;

        if (_i == 1) {
                pid = fork();
                if (pid == 0) {
                        connect_to_it();
                        spill();
                        kill(getpid(), SIGKILL);
                }
                waitpid(pid, NULL, 0);
        } else {
                spill();
                user_close(&u);
                connect_to_it();
        }
        expect_no_copy();
        stop();
}
END_TEST

static pid_t disk_process(void) {
        pid_t pid;

        WAIT_UNTIL((pid = child_of(in.pid, "kvd-disk")) > 0);
        return pid;
}

/* The process is stopped before it dies, so that it has work then. 0: to read; 1: to write. */
START_TEST(a_disk_process_that_dies_costs_no_copy) {
        pid_t pid = disk_process();

        if (_i == 0)
                spill();
        ck_assert_int_eq(kill(pid, SIGSTOP), 0);
        if (_i == 0) {
                ask_for_all();
        } else {
                user_append(&u, 16);
                for (uint32_t i = 0; i < 15; i++)
                        ck_assert_int_eq(kvd_sequence_cool(u.sequence, 1, &i, KVD_COOL_SPILL), 1);
                WAIT_UNTIL((user_sync(&u), user_resident(&u)) <= 4);
        }
        usleep(50000);
        ck_assert_int_eq(kill(pid, SIGKILL), 0);
        WAIT_UNTIL(disk_process() != pid && is_on());
        user_revive(&u);
        ck_assert_uint_eq(user_counter(&u, KVD_SPACE_REVIVE_BROKEN), 0);
        user_spill(&u);
        user_revive(&u);
        stop();
}
END_TEST

static uint64_t moved(struct peer_end *watcher) {
        struct kvd_msg_tier_info_reply t = peer_ok(watcher, MSG(tier_info)).tier_info_reply;

        return t.copies_written + t.copies_read;
}

/*
 * Three of four die at random; the fourth lives until it has moved a copy, on any machine: a file
 * whose processes die without a reply again and again is turned off.
 */
static _Noreturn void kill_disks(pid_t parent) {
        struct peer_end *watcher = peer_attach(in.socket);
        uint32_t random = 12345;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (uint32_t i = 0; getppid() == parent; i++) {
                pid_t pid = disk_process();
                uint64_t before = moved(watcher);

                random = random * 1103515245 + 12345;
                usleep(20000 + random % 100000);
                if (i % 4 == 3)
                        WAIT_UNTIL(moved(watcher) != before);
                kill(pid, SIGKILL);
                WAIT_UNTIL(child_of(in.pid, "kvd-disk") != pid);
        }
        _exit(0);
}

/* Requests that are repeated succeed at last, and every byte is right at every moment. */
START_TEST(no_byte_is_lost_with_disk_processes_that_die_at_random) {
        pid_t killer, parent = getpid(), first = disk_process();

        user_append(&u, USER_BLOCKS);
        killer = fork();
        if (killer == 0)
                kill_disks(parent);
        for (int round = 0; round < 5 || child_of(in.pid, "kvd-disk") == first; round++) {
                user_spill(&u);
                user_revive(&u);
        }
        kill(killer, SIGKILL);
        waitpid(killer, NULL, 0);
        ck_assert_uint_eq(user_counter(&u, KVD_SPACE_REVIVE_BROKEN), 0);
        user_spill(&u);
        user_revive(&u);
        stop();
}
END_TEST

static uint64_t copy_bytes(void) {
        return peer_ok(u.peer, MSG(space_info)).space_info_reply.copy_bytes;
}

static uint64_t written_before; /* number of copies, when there was none in the file */

static bool some_are_on_their_way(void) {
        struct kvd_msg_tier_info_reply t = tier();

        return t.copies > t.copies_written - written_before;
}

static void spill_each(void) {
        for (uint32_t i = 0; i < USER_BLOCKS; i++)
                user_cool(&u, 1, &i, KVD_COOL_SPILL);
}

/* With new blocks: what has been written once is not written again. */
static void begin_again(void) {
        kvd_sequence_close(u.sequence);
        expect_no_copy();
        written_before = tier().copies_written;
        ck_assert_int_eq(kvd_sequence_open(u.space, USER_BLOCKS, &u.sequence), 0);
        user_append(&u, USER_BLOCKS);
}

/*
 * Stops the disk process, and spills until copies are sent to it. If it is stopped in the middle of
 * other work, such as its superblock, no copy is sent before that is done: all is repeated then.
 */
static void stop_under_way(pid_t disk) {
        for (;;) {
                ck_assert_int_eq(kill(disk, SIGSTOP), 0);
                spill_each();
                for (int i = 0; i < 1000; i++, usleep(1000)) {
                        user_sync(&u);
                        if (some_are_on_their_way())
                                return;
                }
                ck_assert_int_eq(kill(disk, SIGCONT), 0);
                begin_again();
        }
}

/* Moves copies until it is killed. read: from the file; otherwise to it, and says when some move. */
static _Noreturn void move_copies(bool read, int say) {
        pid_t disk = disk_process();

        connect_to_it();
        if (read) {
                spill();
                WAIT_UNTIL(tier().copies_written == tier().copies);
                ck_assert_int_eq(kill(disk, SIGSTOP), 0);
                ask_for_all();
        } else {
                user_append(&u, USER_BLOCKS);
                stop_under_way(disk);
                ck_assert_int_eq(write(say, "x", 1), 1);
        }
        for (;; usleep(1000))
                user_sync(&u);
}

/* It is killed while its copies are on their way between the file and its space's memory. */
START_TEST(a_client_that_is_killed_meanwhile_leaves_no_slot) {
        pid_t disk = disk_process(), pid;
        int said[2];
        char x;

        ck_assert_int_eq(pipe(said), 0);
        pid = fork();
        if (pid == 0)
                move_copies(_i == 0, said[1]);
        close(said[1]);
        if (_i == 0) {
                WAIT_UNTIL(tier().copies >= USER_BLOCKS - MEMORY_BYTES / BLOCK_BYTES);
                WAIT_UNTIL(copy_bytes() == MEMORY_BYTES);
        } else {
                ck_assert_int_eq(read(said[0], &x, 1), 1);
        }
        close(said[0]);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        user_check(&u);
        ck_assert_int_eq(kill(disk, SIGCONT), 0);
        expect_no_copy();
        WAIT_UNTIL(copy_bytes() == 0);
        user_check(&u);
        spill();
        user_revive(&u);
        stop();
}
END_TEST

static void publish(uint32_t *tokens) {
        struct kvd_block blocks[CHAIN];
        struct kvd_pin pin = {0};

        for (uint32_t i = 0; i < CHAIN * 16; i++)
                tokens[i] = 500 + i;
        for (uint32_t n = 0; n < CHAIN;) {
                int r = kvd_alloc(u.space, CHAIN - n, blocks + n);

                ck_assert_msg(r > 0, "%s", kvd_error());
                n += (uint32_t)r;
        }
        for (uint32_t i = 0; i < CHAIN; i++)
                oracle_fill(blocks[i].data, BLOCK_BYTES, i);
        ck_assert_int_ge(kvd_seal(u.space, &pin, CHAIN, blocks, tokens, CHAIN * 16), 0);
        kvd_unpin(u.space, &pin);
        WAIT_UNTIL(tier().records == CHAIN && tier().written_bytes >= CHAIN * RECORD_BYTES);
}

/* The sequence and its copies end with the daemon; a published chain does not. */
START_TEST(a_daemon_that_dies_leaves_no_slot_and_loses_no_record) {
        uint32_t tokens[CHAIN * 16];
        uint64_t used;
        int fd;

        publish(tokens);
        used = tier().used;
        spill();
        ck_assert_uint_gt(tier().used, used);
        if (_i) { /* kills it while copies are read */
                ask_for_all();
                usleep((useconds_t)_i * 1000);
        }
        instance_kill(&in);
        user_close(&u);
        instance_again(&in, settings());
        connect_to_it();
        ck_assert_uint_eq(tier().copies, 0);
        ck_assert_uint_eq(tier().records, CHAIN);
        ck_assert_uint_eq(tier().used, used);
        ck_assert_int_eq(kvd_fetch(u.space, 0, 0, tokens, CHAIN * 16, &fd), CHAIN * 16);
        close(fd);
        spill();
        user_revive(&u);
        stop();
}
END_TEST

/* Flips a bit of each sector, so that every copy is corrupt. */
static void rot(void) {
        int fd = open(file, O_RDWR | O_CLOEXEC);
        uint8_t byte;

        ck_assert_int_ge(fd, 0);
        for (off_t at = (256 << 10) + 77; pread(fd, &byte, 1, at) == 1; at += 4096) {
                byte ^= 1;
                ck_assert_int_eq(pwrite(fd, &byte, 1, at), 1);
        }
        close(fd);
}

START_TEST(corrupt_copies_are_never_shown) {
        uint64_t lost;

        spill();
        WAIT_UNTIL(tier().copies_written == tier().copies); /* none is under way */
        rot();
        ask_for_all();
        ck_assert_int_ge(kvd_sequence_wait(u.sequence, WAIT_NS), 1);
        lost = tier().copies_lost;
        ck_assert_uint_gt(lost, 0);
        ck_assert_uint_eq(user_counter(&u, KVD_SPACE_REVIVE_BROKEN), lost);
        ck_assert_uint_eq(tier().wrong, lost);
        ck_assert_uint_eq(user_flags(&u, KVD_ENTRY_DROPPED), lost);
        ck_assert_uint_eq(user_resident(&u), USER_BLOCKS - lost);
        expect_no_copy();
        stop();
}
END_TEST

SUITE("copies-in-files", FIXTURE(start, NULL),
      TESTS(more_than_memory_takes_leaves_and_comes_back, a_waiting_client_gets_all,
            no_byte_is_lost_with_disk_processes_that_die_at_random, corrupt_copies_are_never_shown),
      LOOPS(2, closed_sequences_leave_no_slot, a_client_that_is_killed_meanwhile_leaves_no_slot,
            a_disk_process_that_dies_costs_no_copy),
      LOOPS(3, a_daemon_that_dies_leaves_no_slot_and_loses_no_record))
