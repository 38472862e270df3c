/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Exact copies of sequences' blocks, while their disk fails, is full or hangs, or while their
 * domain is at its limit on the disk. This program is also the disk process, as test-disk-faults
 * is. No byte may ever be wrong. A lost copy must be reported as lost, and approximated if the
 * sketch contains its block. Nothing else may be lost, neither blocks in memory nor published ones.
 */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/process/disk/main.h"
#include "ipc/base/degraded.h"
#include "ipc/base/layout.h"
#include "ipc/base/util.h"
#include "tests/daemon/blocks.h"
#include "tests/lib/daemon_process.h"
#include "tests/lib/suite.h"

#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})
#define WAIT_NS UINT64_C(120000000000) /* more than a test may take */
#define IN_MEMORY 16u                  /* copies that spill has room for */

static struct fault_state *s; /* of the disk process */
static struct daemon_process d;
static struct user u;
static char self[256], file[64];

/* ---- this program as another ----------------------------------------------------------------- */

static void be_child(int argc, char **argv) {
        char path[64];
        int fd;

        if (argc > 1 && strcmp(argv[1], "--worker") == 0) {
                execv(getenv("KVD"), argv);
                exit(127);
        }
        if (argc > 1 && strcmp(argv[1], "--disk") == 0) {
                fd = open(getenv("KVD_TEST_FAULTS"), O_RDWR | O_CLOEXEC);
                s = fault_state_of(fd);
                close(fd);
                fault_install(s);
                exit(disk_main());
        }
        signal(SIGPIPE, SIG_IGN);
        fd = memfd_create("faults", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, sizeof *s) < 0 || !(s = fault_state_of(fd)) ||
            readlink("/proc/self/exe", self, sizeof self - 1) < 0)
                exit(1);
        snprintf(path, sizeof path, "/proc/%d/fd/%d", getpid(), fd);
        setenv("KVD_TEST_FAULTS", path, 1);
}

/* ---- a daemon with that disk ----------------------------------------------------------------- */

static struct kvd_msg_tier_info_reply tier(void) {
        return peer_ok(u.peer, MSG(tier_info)).tier_info_reply;
}

static bool is(const char *state) {
        struct kvd_slice now = tier().state;

        return now.size == strlen(state) && memcmp(now.data, state, now.size) == 0;
}

static bool is_degraded(void) {
        struct kvd_slice all = user_info(&u).degraded;
        uint64_t n[KVD_N_DEGRADED] = {0};

        memcpy(n, all.data, MIN(all.size, sizeof n));
        return n[KVD_DEGRADED_file_tier] != 0;
}

static void start(struct fault fault, const char *timeout, const char *quota) {
        static const struct fault none = {.call = N_FAULT_CALLS};
        static struct fault_state well;
        static char setting[96], user[48];

        fault_set(&well, &none);
        fault_set(s, &fault);
        snprintf(file, sizeof file, "/dev/shm/kvd-copies-faults-%d", getpid());
        snprintf(setting, sizeof setting, "daemon.file=%s", file);
        snprintf(user, sizeof user, "domain d.users=%u", getuid());
        unlink(file);
        d = (struct daemon_process){.worker = self,
                                    .settings = SETTINGS("daemon.pool=4M", "daemon.segment=1M",
                                                         "daemon.spill=256K", setting,
                                                         "daemon.file_size=4M",
                                                         "daemon.file_depth=0", timeout, user,
                                                         quota)};
        ck_assert(daemon_process_start(&d, &well));
        user_open(&u, d.in.socket,
                  (const char *const[]){"kvreviver=on", "kvreviver.max_load=1000000",
                                        "pressure=off", NULL});
        WAIT_UNTIL(is("on"));
}

static void stop(void) {
        user_check(&u);
        user_close(&u);
        daemon_process_stop(&d);
        unlink(file);
}

static pid_t disk_process(void) {
        pid_t pid;

        WAIT_UNTIL((pid = child_of(d.in.pid, "kvd-disk")) > 0);
        return pid;
}

/* ---- copies ---------------------------------------------------------------------------------- */

static void wait_for_it(void) {
        int r = kvd_sequence_wait(u.sequence, WAIT_NS);

        ck_assert_msg(r >= 0, "%s", kvd_error());
        user_check(&u);
}

static void ask(enum kvd_revive how) {
        uint32_t slots[USER_BLOCKS];

        for (uint32_t i = 0; i < USER_BLOCKS; i++)
                slots[i] = i;
        ck_assert_int_ge(kvd_sequence_revive(u.sequence, USER_BLOCKS, slots, how), 0);
}

/* Asks for all blocks to leave. Those that have a copy leave, and all if there is a sketch. */
static void cool_once(void) {
        uint32_t slots[USER_BLOCKS];

        for (uint32_t i = 0; i < USER_BLOCKS; i++)
                slots[i] = i;
        user_cool(&u, USER_BLOCKS, slots, KVD_COOL_VAGUE);
        user_sync(&u);
        user_resident(&u);
        usleep(1000);
}

/* Cools until no block is in memory and most copies are in the file. */
static void spill(void) {
        user_append(&u, USER_BLOCKS);
        while (user_resident(&u))
                cool_once();
        WAIT_UNTIL(tier().copies >= USER_BLOCKS - IN_MEMORY &&
                   tier().copies_written == tier().copies);
        user_check(&u);
}

/*
 * Asks for all blocks. True if all that were not lost are back in memory: a disk that seems to hang
 * returns none for a while.
 */
static bool are_back(void) {
        ask(KVD_REVIVE_EXACT);
        wait_for_it();
        return user_resident(&u) >= USER_BLOCKS - tier().copies_lost;
}

static uint32_t approximate(void) {
        return user_flags(&u, KVD_ENTRY_APPROX);
}

static const struct fault nothing = {N_FAULT_CALLS, 0, 0, false};

/*
 * A caller that asks for both gets exact blocks where the disk has them, and approximations of the
 * rest.
 */
START_TEST(unreadable_copies_are_approximated) {
        start((struct fault){FAULT_completion, EIO, 1, _i}, "daemon.file_timeout=1800", NULL);
        spill();
        s->on = true;
        ask(KVD_REVIVE_BOTH);
        wait_for_it();
        ck_assert_uint_gt(s->injected, 0);
        ck_assert_uint_eq(user_resident(&u), USER_BLOCKS);
        ck_assert_uint_eq(approximate(), tier().copies_lost);
        ck_assert_uint_eq(user_counter(&u, KVD_SPACE_REVIVE_BROKEN), tier().copies_lost);
        if (_i)
                ck_assert_uint_ge(approximate(), USER_BLOCKS - IN_MEMORY);
        else
                ck_assert_uint_lt(approximate(), USER_BLOCKS - IN_MEMORY);
        s->on = false;
        WAIT_UNTIL(tier().copies == 0);
        stop();
}
END_TEST

/* A caller that asks for exact copies only is told which ones are lost. */
START_TEST(exact_requests_report_lost_copies) {
        start((struct fault){FAULT_completion, EIO, 1, true}, "daemon.file_timeout=1800", NULL);
        spill();
        s->on = true;
        ask(KVD_REVIVE_EXACT);
        wait_for_it();
        ck_assert_uint_ge(tier().copies_lost, USER_BLOCKS - IN_MEMORY);
        ck_assert_uint_eq(user_resident(&u), USER_BLOCKS - tier().copies_lost);
        ck_assert_uint_eq(user_flags(&u, KVD_ENTRY_VAGUE), tier().copies_lost);
        ck_assert_uint_eq(approximate(), 0);
        ask(KVD_REVIVE_APPROX);
        wait_for_it();
        ck_assert_uint_eq(user_resident(&u), USER_BLOCKS);
        stop();
}
END_TEST

/* From some write on, the disk is full or fails. Copies that cannot be written stay in memory. */
START_TEST(unwritable_copies_are_not_lost) {
        static const int errors[] = {ENOSPC, EIO};

        start((struct fault){FAULT_completion, errors[_i % 2], 1 + 2 * (uint32_t)(_i / 2), true},
              "daemon.file_timeout=1800", NULL);
        s->on = true;
        user_append(&u, USER_BLOCKS);
        for (uint32_t i = 0; i<100; i += s->injected> 0)
                cool_once();
        WAIT_UNTIL(is("off") || is("on"));
        WAIT_UNTIL(is_degraded() == is("off"));
        WAIT_UNTIL(are_back());
        ck_assert_uint_eq(user_counter(&u, KVD_SPACE_REVIVE_BROKEN), tier().copies_lost);
        ck_assert_uint_eq(approximate(), 0);
        if (_i < 2)
                ck_assert_uint_eq(tier().copies_lost, 0);
        s->on = false;
        stop();
}
END_TEST

/* The daemon kills the hanging disk process after five seconds; the next one reads the copies. */
START_TEST(copies_return_after_a_disk_hangs) {
        start((struct fault){FAULT_completion, FAULT_HANG, 1, false}, "daemon.file_timeout=5",
              NULL);
        spill();
        s->on = true;
        ask(KVD_REVIVE_BOTH);
        wait_for_it();
        ck_assert_uint_eq(user_resident(&u), USER_BLOCKS);
        WAIT_UNTIL(is("on"));
        WAIT_UNTIL(are_back() && !approximate());
        ck_assert_uint_gt(s->injected, 0);
        ck_assert_uint_eq(user_resident(&u), USER_BLOCKS);
        ck_assert_uint_eq(tier().copies_lost, 0);
        stop();
}
END_TEST

/*
 * Stops the disk process and holds it at its exit: even the kernel cannot end a process whose disk
 * hangs.
 */
static pid_t hold(void) {
        pid_t pid = disk_process();

        ck_assert_int_eq(ptrace(PTRACE_SEIZE, pid, 0, PTRACE_O_TRACEEXIT), 0);
        ck_assert_int_eq(kill(pid, SIGSTOP), 0);
        ck_assert_int_eq(waitpid(pid, NULL, __WALL), pid);
        return pid;
}

/* No client waits for this disk, and its copies are intact once it works again. */
START_TEST(a_disk_hanging_in_the_kernel_delays_no_client) {
        pid_t pid;

        start(nothing, "daemon.file_timeout=5", NULL);
        spill();
        pid = hold();
        ask(KVD_REVIVE_BOTH);
        wait_for_it();
        WAIT_UNTIL(is("hanging") && is_degraded());
        ck_assert_uint_eq(user_resident(&u), USER_BLOCKS);
        ck_assert_uint_ge(approximate(), USER_BLOCKS - IN_MEMORY);
        ask(KVD_REVIVE_EXACT); /* is refused at once */
        wait_for_it();
        ck_assert_uint_ge(approximate(), USER_BLOCKS - IN_MEMORY);
        ck_assert_uint_eq(tier().copies_lost, 0);
        WAIT_UNTIL(ptrace(PTRACE_DETACH, pid, 0, 0) == 0); /* only once it has reached its exit */
        WAIT_UNTIL(is("on") && !is_degraded());
        WAIT_UNTIL(are_back() && !approximate());
        ck_assert_uint_eq(user_resident(&u), USER_BLOCKS);
        stop();
}
END_TEST

/* Cools until the use of the file has not changed 200 times in a row. */
static void cool_until_full(void) {
        uint64_t used = 0;

        WAIT_UNTIL((cool_once(), tier().copies > 0));
        for (uint32_t same = 0; same < 200; same++) {
                cool_once();
                same = tier().used == used ? same : 0;
                used = tier().used;
        }
}

/* The pool has 4 MiB, and so has the file. The domain's limit is the same in both. */
START_TEST(a_domain_has_its_share_and_no_more) {
        uint64_t most = (UINT64_C(5) << 20) / 4 / 2;

        start(nothing, "daemon.file_timeout=1800", "domain d.quota=1280K");
        user_append(&u, USER_BLOCKS / 2);
        user_append(&u, USER_BLOCKS / 2);
        cool_until_full();
        ck_assert_uint_le(tier().used, most);
        ck_assert_uint_gt(user_resident(&u), 0);
        ck_assert(!is_degraded());
        user_revive(&u);
        ck_assert_uint_eq(tier().copies_lost, 0);
        stop();
}
END_TEST

SUITE("copies-faults", be_child(argc, argv),
      TESTS(exact_requests_report_lost_copies, copies_return_after_a_disk_hangs,
            a_disk_hanging_in_the_kernel_delays_no_client, a_domain_has_its_share_and_no_more),
      LOOPS(2, unreadable_copies_are_approximated), LOOPS(6, unwritable_copies_are_not_lost))
