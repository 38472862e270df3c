/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The file tier, while a call of its disk process fails, is short, or never ends. This program is
 * also the disk process (kvd --disk), with a table of system calls that the test controls through
 * shared memory. Whatever happens, blocks that are found are right, fetches end in time, clients
 * allocate and publish, erased blocks do not come back, and the daemon reports a file tier that is
 * off. The file is in memory, so that no slow disk disturbs the test.
 */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/kvd.h"
#include "daemon/process/disk/main.h"
#include "ipc/base/degraded.h"
#include "ipc/base/util.h"
#include "tests/lib/amount.h"
#include "tests/lib/daemon_process.h"
#include "tests/lib/fault.h"
#include "tests/lib/oracle.h"
#include "tests/lib/peer.h"

#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})
#define BLOCKS 6u
#define BT 16u
#define BLOCK_BYTES 16384u

struct run {
        struct fault_state *s; /* of the disk process */
        struct daemon_process d;
        struct peer_end *watcher;
        kvd *kvd;
        kvd_space *space;
};

/*
 * Values of daemon.file_timeout. With FEW_S, a disk process that gets no processor for a while may
 * seem to hang, too.
 */
enum { FEW_S = 1, BUSY_S = 15, FOR_EVER_S = 3600 };

static char file[64], second[72], self[256]; /* second: "" if there is one file */
static uint32_t patience_s;

/* ---- what kvd says --------------------------------------------------------------------------- */

static uint32_t n_files(void) {
        return second[0] ? 2 : 1;
}

static struct kvd_msg_tier_info_reply tier_of(struct run *r, uint32_t number) {
        return peer_ok(r->watcher, MSG(tier_info, .tier = number)).tier_info_reply;
}

/* The sum over all files, with the texts of the last one. */
static struct kvd_msg_tier_info_reply tier(struct run *r) {
        struct kvd_msg_tier_info_reply all = tier_of(r, 0), second_one;

        if (n_files() == 1)
                return all;
        second_one = tier_of(r, 1);
        second_one.records += all.records;
        second_one.written_bytes += all.written_bytes;
        second_one.errors += all.errors;
        return second_one;
}

static bool file_is(struct run *r, uint32_t number, const char *state) {
        struct kvd_slice is = tier_of(r, number).state;

        return is.size == strlen(state) && memcmp(is.data, state, is.size) == 0;
}

/* Whether the tier has this state: "off" only if all files are off. */
static bool is(struct run *r, const char *state) {
        for (uint32_t i = 0; i < n_files(); i++)
                if (!file_is(r, i, "off"))
                        return file_is(r, i, state);
        return strcmp(state, "off") == 0;
}

static bool is_a_file_off(struct run *r) {
        return file_is(r, 0, "off") || (n_files() > 1 && file_is(r, 1, "off"));
}

static bool is_degraded(struct run *r) {
        struct kvd_slice all = peer_ok(r->watcher, MSG(daemon_info)).daemon_info_reply.degraded;
        uint64_t n[KVD_N_DEGRADED] = {0};

        memcpy(n, all.data, MIN(all.size, sizeof n));
        return n[KVD_DEGRADED_file_tier] != 0;
}

/* ---- a client -------------------------------------------------------------------------------- */

static void make_tokens(uint32_t chain, uint32_t *ret) {
        for (uint32_t i = 0; i < BLOCKS * BT; i++)
                ret[i] = chain % 10000 * 100 + i;
}

static void connect_to(struct run *r) {
        static const struct kvd_geometry geometry = {.layers = 1,
                                                     .kv_heads = 2,
                                                     .head_dim = 64,
                                                     .block_tokens = BT,
                                                     .dtype = KVD_F32,
                                                     .vocab = 1u << 20};

        r->watcher = peer_attach(r->d.in.socket);
        if (kvd_open(r->d.in.socket, &r->kvd) < 0 ||
            kvd_space_open(r->kvd, "s", &geometry, NULL, &r->space) < 0)
                die("%s", kvd_error());
}

static void leave(struct run *r) {
        kvd_space_close(r->space);
        kvd_close(r->kvd);
        peer_close(r->watcher);
}

/* Number of blocks that are found; the contents of each must be right. */
static uint32_t resident(struct run *r, uint32_t chain) {
        uint32_t tokens[BLOCKS * BT], ids[BLOCKS];
        struct kvd_pin pin = {0};
        int64_t n;

        make_tokens(chain, tokens);
        kvd_catch_up(r->space);
        n = kvd_lookup(r->space, 0, tokens, BLOCKS * BT, ids, BLOCKS, &pin);
        if (n < 0)
                die("kvd_lookup: %s", kvd_error());
        for (uint32_t i = 0; i < n / BT; i++)
                if (oracle_wrong(kvd_pin_block(&pin, ids[i]), BLOCK_BYTES,
                                 oracle_seed(1, tokens, (i + 1) * BT)))
                        die("wrong bytes");
        kvd_unpin(r->space, &pin);
        return (uint32_t)(n / BT);
}

static void make_chain(struct run *r, uint32_t chain) {
        uint32_t tokens[BLOCKS * BT], n = 0;
        struct kvd_block blocks[BLOCKS];
        struct kvd_pin pin = {0};

        make_tokens(chain, tokens);
        while (n < BLOCKS) {
                int got = kvd_alloc(r->space, BLOCKS - n, blocks + n);

                if (got <= 0)
                        die("kvd_alloc: %s", kvd_error());
                n += (uint32_t)got;
        }
        for (uint32_t i = 0; i < BLOCKS; i++)
                oracle_fill(blocks[i].data, BLOCK_BYTES, oracle_seed(1, tokens, (i + 1) * BT));
        if (kvd_seal(r->space, &pin, BLOCKS, blocks, tokens, BLOCKS * BT) < 0)
                die("kvd_seal: %s", kvd_error());
        WAIT_UNTIL(resident(r, chain) == BLOCKS); /* it may miss while the index changes */
        kvd_unpin(r->space, &pin);
}

static void fetch(struct run *r, uint32_t chain) {
        struct pollfd p = {.events = POLLIN};
        uint32_t tokens[BLOCKS * BT];

        make_tokens(chain, tokens);
        if (kvd_fetch(r->space, 0, 0, tokens, BLOCKS * BT, &p.fd) < 0)
                die("kvd_fetch: %s", kvd_error());
        if (p.fd < 0)
                return;
        if (poll(&p, 1, PATIENCE_MS) != 1)
                die("a fetch has not ended in time");
        close(p.fd);
}

static void evict_all(struct run *r) {
        while (peer_ok(r->watcher, MSG(evict, .space = kvd_slice_of("s"))).evict_reply.more)
                ;
}

/* ---- a daemon with that disk ----------------------------------------------------------------- */

static void start(struct run *r) {
        static const struct fault none = {.call = N_FAULT_CALLS};
        static struct fault_state well;
        static char setting[160], timeout[40];

        fault_set(&well, &none);
        snprintf(setting, sizeof setting, "daemon.file=%s%s%s", file, second[0] ? "," : "", second);
        snprintf(timeout, sizeof timeout, "daemon.file_timeout=%u", patience_s);
        r->d = (struct daemon_process){.worker = self,
                                       .settings = SETTINGS("daemon.max_clients=16", setting,
                                                            "daemon.file_size=4M",
                                                            "daemon.file_depth=0", timeout)};
        if (!daemon_process_start(&r->d, &well))
                die("the daemon did not start");
        connect_to(r);
        WAIT_UNTIL(is(r, "on") || is(r, "off"));
}

static void end(struct run *r) {
        leave(r);
        daemon_process_stop(&r->d);
}

static bool is_written(const struct kvd_msg_tier_info_reply *t) {
        return t->records == BLOCKS && t->written_bytes >= BLOCKS * (uint64_t)BLOCK_BYTES;
}

/* Waits until each block has been written or skipped, or until something else has failed. */
static void wait_for_writing(struct run *r) {
        for (uint32_t i = 0; i < 200 && is(r, "on"); i++) {
                struct kvd_msg_tier_info_reply t = tier(r);

                if (is_written(&t))
                        return;
                if (t.errors && i < 180)
                        i = 180;
                usleep(1000);
        }
}

/* Returns false if it is unknown whether the space was erased. */
static bool erase(struct run *r) {
        struct kvd_msg m = MSG(space_delete, .space = kvd_slice_of("s"), .force = 1);

        for (;;) {
                struct kvd_msg a = peer_call(r->watcher, m);

                if (is(r, "off"))
                        return false;
                if (a.number == KVD_MSG_error ? a.error.code == ENOENT :
                                                !a.space_delete_reply.erasing)
                        return true;
                usleep(1000);
        }
}

/*
 * Once calls succeed again, clients must be served. The tier must serve, too, unless it reports
 * that it is off.
 */
static void expect_service(struct run *r) {
        bool off;

        WAIT_UNTIL(is_degraded(r) == is_a_file_off(r));
        off = is(r, "off");
        make_chain(r, 2);
        for (uint32_t i = 0; !off && i < 100 && tier(r).records < BLOCKS; i++)
                usleep(1000);
        evict_all(r);
        fetch(r, 2);
        make_chain(r, 3);
}

static void session(struct run *r) {
        make_chain(r, 1);
        wait_for_writing(r);
        evict_all(r);
        fetch(r, 1);
        resident(r, 1);
}

/* Calls that use the disk; with two files, other calls, too. */
static bool is_ours(enum fault_call call) {
        static const enum fault_call calls[] = {FAULT_pread,   FAULT_pwrite,     FAULT_fdatasync,
                                                FAULT_uring,   FAULT_completion, FAULT_mmap,
                                                FAULT_calloc,  FAULT_getrandom,  FAULT_madvise,
                                                FAULT_sendmsg, FAULT_recvmsg};

        for (uint32_t i = 0; i < (n_files() > 1 ? ARRAY_SIZE(calls) : 5); i++)
                if (calls[i] == call)
                        return true;
        return false;
}

static void run(struct fault_state *s, void *arg) {
        struct run r = {.s = s};
        bool erased;

        if (!is_ours(s->fault.call))
                return;
        unlink(file);
        unlink(second);
        patience_s = BUSY_S;
        s->on = true;
        start(&r);
        session(&r);
        erased = erase(&r);
        leave(&r);
        connect_to(&r);
        s->on = false;
        expect_service(&r);
        if (s->fault.error == FAULT_SHORT && (is_a_file_off(&r) || tier(&r).errors))
                die("a short call was not completed");
        end(&r);
        start(&r);
        fetch(&r, 1);
        if (erased && resident(&r, 1))
                die("erased blocks came back");
        end(&r);
}

/* ---- for good -------------------------------------------------------------------------------- */

/* A disk that fails permanently turns the tier off, and does no other harm. */
static void break_for_good(struct fault_state *s, int error) {
        struct fault fault = {FAULT_completion, error, 2, true};
        struct run r = {.s = s};

        patience_s = FOR_EVER_S;
        unlink(file);
        fault_set(s, &fault);
        start(&r);
        session(&r);
        s->on = true;
        for (uint32_t i = 10; i < 20000 && !is(&r, "off"); i++) {
                make_chain(&r, i);
                if (i % 16 == 0)
                        evict_all(&r);
                usleep(1000);
        }
        if (!is(&r, "off") || !is_degraded(&r))
                die("a disk that fails for good (%d) does not turn the tier off: %llu errors",
                    error, (unsigned long long)tier(&r).errors);
        expect_service(&r);
        end(&r);
        printf("for good, errno %d: off\n", error);
}

/*
 * Returns false if the daemon took the process for hanging too early, because the process got no
 * processor.
 */
static bool hangs(struct fault_state *s, enum fault_call call, uint32_t nth, bool forever) {
        struct fault fault = {call, FAULT_HANG, nth, forever};
        struct run r = {.s = s};

        patience_s = FEW_S;
        unlink(file);
        fault_set(s, &fault);
        start(&r);
        session(&r);
        s->on = true;
        for (uint32_t i = 10; i < 4000 && !s->injected; i++) {
                make_chain(&r, i);
                if (i % 16 == 0)
                        evict_all(&r);
        }
        WAIT_UNTIL(s->injected || is(&r, "off"));
        if (!s->injected) {
                end(&r);
                return false;
        }
        fetch(&r, 1);
        make_chain(&r, 1);
        WAIT_UNTIL(is(&r, forever ? "off" : "on") && is_degraded(&r) == forever);
        expect_service(&r);
        end(&r);
        return true;
}

/* Only the disk process waits for a call that does not end, and for at most file_timeout. */
static void hang(struct fault_state *s, enum fault_call call, uint32_t nth, bool forever) {
        for (int tries = 0; !hangs(s, call, nth, forever); tries++)
                if (tries == 10)
                        die("the disk process was taken for hanging too early, in every try");
        printf("hangs%s: %s\n", forever ? " for good" : "", forever ? "off" : "on again");
}

static bool has_open(pid_t pid, const char *path) {
        char link[64], target[128];

        for (int fd = 3; fd < 64; fd++) {
                ssize_t n;

                snprintf(link, sizeof link, "/proc/%d/fd/%d", pid, fd);
                n = readlink(link, target, sizeof target - 1);
                target[MAX(n, 0)] = 0;
                if (strcmp(target, path) == 0)
                        return true;
        }
        return false;
}

/* The process of a file; 0 if it has not been started or has not opened the file yet. */
static pid_t process_of(const struct run *r, const char *path) {
        char children[64];
        int pid, found = 0;
        FILE *f;

        snprintf(children, sizeof children, "/proc/%d/task/%d/children", r->d.in.pid, r->d.in.pid);
        f = fopen(children, "re");
        while (f && !found && fscanf(f, "%d", &pid) == 1)
                if (has_open(pid, path))
                        found = pid;
        if (f)
                fclose(f);
        return found;
}

static pid_t disk_of(const struct run *r, const char *path) {
        pid_t pid;

        WAIT_UNTIL((pid = process_of(r, path)) != 0);
        return pid;
}

/*
 * Stops the disk process and holds it at its exit: even the kernel cannot end a process whose disk
 * hangs.
 */
static pid_t hold(const struct run *r, const char *path) {
        pid_t pid = disk_of(r, path);

        if (ptrace(PTRACE_SEIZE, pid, 0, PTRACE_O_TRACEEXIT) < 0 || kill(pid, SIGSTOP) < 0 ||
            waitpid(pid, NULL, __WALL) != pid)
                die("the disk process cannot be held: %s", strerror(errno));
        return pid;
}

/*
 * Starts the daemon, and writes a chain to its file. On a busy machine that may exceed the timeout,
 * and the daemon takes the disk for hanging. The test then starts again.
 */
static void start_written(struct run *r) {
        struct kvd_msg_tier_info_reply t;

        for (;; end(r)) {
                unlink(file);
                start(r);
                make_chain(r, 1);
                WAIT_UNTIL((t = tier(r), is_written(&t)) || !is(r, "on"));
                if (is_written(&t) && is(r, "on"))
                        return;
        }
}

static void hang_in_the_kernel(struct fault_state *s) {
        struct fault fault = {N_FAULT_CALLS, 0, 0, false};
        struct run r = {.s = s};
        pid_t pid;

        patience_s = FEW_S;
        fault_set(s, &fault);
        start_written(&r);
        evict_all(&r);
        pid = hold(&r, file);
        fetch(&r, 1);
        WAIT_UNTIL(is(&r, "hanging") && is_degraded(&r));
        for (uint32_t i = 10; i < 20; i++) {
                make_chain(&r, i);
                fetch(&r, 1);
        }
        if (!is(&r, "hanging") || tier(&r).queue > 1 || kill(pid, 0) < 0)
                die("hanging %d, %llu fetches wait, process %d is %s", is(&r, "hanging"),
                    (unsigned long long)tier(&r).queue, pid, kill(pid, 0) < 0 ? "gone" : "there");
        WAIT_UNTIL(ptrace(PTRACE_DETACH, pid, 0, 0) == 0); /* only once it has reached its exit */
        WAIT_UNTIL(is(&r, "on") && !is_degraded(&r));
        WAIT_UNTIL((fetch(&r, 1), resident(&r, 1) == BLOCKS));
        expect_service(&r);
        end(&r);
        printf("hangs in the kernel: hanging, on again\n");
}

/* In the disk process: replaces the second file with something that is not a file. */
static void lose_second(int number) {
        char path[64], target[64];

        (void)number;
        for (int fd = 3; fd < 64; fd++) {
                ssize_t n;

                snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
                n = readlink(path, target, sizeof target - 1);
                target[MAX(n, 0)] = 0;
                if (n > 2 && strcmp(target + n - 2, "-b") == 0)
                        dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), fd);
        }
}

/* Writes a chain to the files that work, evicts it and fetches it. True if all of it is back. */
static bool goes_on(struct run *r, uint32_t chain) {
        make_chain(r, chain);
        usleep(20000);
        evict_all(r);
        fetch(r, chain);
        return resident(r, chain) == BLOCKS;
}

/* Uses a new chain each time. */
static void use(struct run *r) {
        static uint32_t chain = 1000;

        goes_on(r, ++chain);
}

/* A disk that dies while it is used turns off; the other disk stays on. */
static void one_of_two_dies(struct fault_state *s) {
        struct fault fault = {N_FAULT_CALLS, 0, 0, false};
        struct run r = {.s = s};

        patience_s = FOR_EVER_S;
        unlink(file);
        unlink(second);
        fault_set(s, &fault);
        start(&r);
        WAIT_UNTIL(file_is(&r, 0, "on") && file_is(&r, 1, "on"));
        session(&r);
        if (!file_is(&r, 1, "on") || is_degraded(&r))
                die("two files are not on");
        kill(disk_of(&r, second), SIGUSR1);
        WAIT_UNTIL((use(&r), file_is(&r, 1, "off") && is(&r, "on") && is_degraded(&r)));
        WAIT_UNTIL(goes_on(&r, 95));
        if (!erase(&r))
                die("nothing can be erased");
        leave(&r);
        connect_to(&r);
        make_chain(&r, 96);
        end(&r);
        printf("one of two dies: off, the other is on\n");
}

static bool are_on(struct run *r) {
        return file_is(r, 0, "on") && file_is(r, 1, "on");
}

/* Files turn on one at a time. A chain that is written before both are on is in one file only. */
static bool is_in_both(struct run *r) {
        struct kvd_msg_tier_info_reply t;

        make_chain(r, 1);
        WAIT_UNTIL((t = tier(r), is_written(&t)) || t.errors || !are_on(r));
        return is_written(&t) && are_on(r) && tier_of(r, 0).records && tier_of(r, 1).records;
}

/* On a busy machine a file may seem to hang at the start. The test then starts again. */
static void start_well(struct run *r, struct fault fault) {
        for (int tries = 0;; tries++) {
                unlink(file);
                unlink(second);
                fault_set(r->s, &fault);
                start(r);
                WAIT_UNTIL(is_a_file_off(r) || are_on(r));
                if (!is_a_file_off(r) && is_in_both(r))
                        break;
                if (tries == (patience_s == FEW_S ? 10 : 0))
                        die("a file is off, or a chain is in one of them");
                end(r);
        }
        evict_all(r);
}

/* ---- one that hangs -------------------------------------------------------------------------- */

static struct kvd_sys hanging;
static const struct kvd_sys *faulty;
static struct fault_state *shared;

/* While the fault is on, reads of the second file do not end. */
static ssize_t hanging_pread(int fd, void *to, size_t n, off_t at) {
        char path[64], target[128];
        ssize_t size;

        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        size = readlink(path, target, sizeof target);
        while (shared->on && size > 2 && memcmp(target + size - 2, "-b", 2) == 0)
                pause();
        return faulty->pread(fd, to, n, at);
}

/* Completions do not identify their file. */
static int no_uring(int result) {
        (void)result;
        errno = ENOSYS;
        return -1;
}

static void install_hanging(struct fault_state *s) {
        if (s->fault.call != N_FAULT_CALLS || s->fault.error != FAULT_HANG)
                return;
        shared = s;
        faulty = sys;
        hanging = *sys;
        hanging.pread = hanging_pread;
        hanging.uring = no_uring;
        sys = &hanging;
}

/* This once turned off the whole tier: each process that was started hung, too. */
static void one_of_two_hangs(struct fault_state *s) {
        struct fault fault = {N_FAULT_CALLS, FAULT_HANG, 0, false};
        struct run r = {.s = s};
        struct kvd_slice why;

        patience_s = FEW_S;
        start_well(&r, fault);
        s->on = true;
        fetch(&r, 1);
        WAIT_UNTIL(file_is(&r, 1, "off") && is(&r, "on") && is_degraded(&r));
        why = tier_of(&r, 1).why;
        if (!memmem(why.data, why.size, "hangs", 5))
                die("it is off for the reason \"%.*s\"", (int)why.size, (const char *)why.data);
        WAIT_UNTIL(goes_on(&r, 95));
        if (!erase(&r))
                die("nothing can be erased");
        end(&r);
        printf("one of two hangs: off, the other is on\n");
}

/*
 * Returns whether the other file's process stayed. In an old version one process served all files,
 * so all of them hung.
 */
static bool one_of_two_hangs_in_the_kernel(struct fault_state *s) {
        struct run r = {.s = s};
        pid_t pid, other;
        bool same;

        patience_s = FEW_S;
        start_well(&r, (struct fault){N_FAULT_CALLS, 0, 0, false});
        other = disk_of(&r, file);
        pid = hold(&r, second);
        fetch(&r, 1);
        WAIT_UNTIL(file_is(&r, 1, "hanging") && is_degraded(&r));
        if (resident(&r, 1) > 1)
                die("blocks were read from a file that hangs");
        for (uint32_t i = 10; i < 20; i++)
                WAIT_UNTIL(goes_on(&r, i));
        if (!file_is(&r, 1, "hanging"))
                die("the file does not hang any more");
        WAIT_UNTIL(file_is(&r, 0, "on"));
        same = disk_of(&r, file) == other;
        WAIT_UNTIL(ptrace(PTRACE_DETACH, pid, 0, 0) == 0); /* only once it has reached its exit */
        WAIT_UNTIL(file_is(&r, 1, "on") && !is_degraded(&r));
        WAIT_UNTIL(goes_on(&r, 30));
        if (!erase(&r))
                die("nothing can be erased");
        end(&r);
        printf("one of two hangs in the kernel: hanging, the other is %s\n",
               same ? "on" : "on again");
        return same;
}

/*
 * Kills a file's process at random moments. It is replaced, the other process stays, and nothing is
 * lost.
 */
static void one_of_two_is_killed(struct fault_state *s, const char *path, const char *other) {
        struct run r = {.s = s};
        pid_t pid, stays;

        patience_s = FOR_EVER_S;
        start_well(&r, (struct fault){N_FAULT_CALLS, 0, 0, false});
        stays = disk_of(&r, other);
        for (uint32_t i = 0; i < 10; i++) {
                pid = disk_of(&r, path);
                make_chain(&r, 40 + i);
                usleep(i * 100);
                kill(pid, SIGKILL);
                fetch(&r, 1);
                WAIT_UNTIL(process_of(&r, path) && process_of(&r, path) != pid);
                WAIT_UNTIL((fetch(&r, 1), resident(&r, 1) == BLOCKS));
                evict_all(&r);
        }
        if (disk_of(&r, other) != stays)
                die("the other one was replaced, too");
        if (is_a_file_off(&r) || !erase(&r))
                die("a file is off");
        end(&r);
        printf("one of two is killed: replaced\n");
}

static void test_one(struct fault_state *s) {
        hang_in_the_kernel(s);
        break_for_good(s, EIO);
        break_for_good(s, ENOSPC);
        hang(s, FAULT_completion, 2, false);
        hang(s, FAULT_completion, 2, true);
        fault_sweep(s, "disk process", 20, run, NULL);
}

static void test_two(struct fault_state *s) {
        int tries = 0;

        snprintf(second, sizeof second, "%s-b", file);
        one_of_two_is_killed(s, file, second);
        one_of_two_is_killed(s, second, file);
        while (!one_of_two_hangs_in_the_kernel(s)) /* on a busy machine both may seem to hang */
                if (++tries == 3)
                        die("the other one was replaced, too");
        one_of_two_dies(s);
        one_of_two_hangs(s);
        if (AMOUNT(true, false))
                fault_sweep(s, "disk processes of two files", 1, run, NULL);
}

int main(int argc, char **argv) {
        struct fault_state *s;
        char path[64];
        int fd;

        signal(SIGPIPE, SIG_IGN);
        if (argc == 2 && strcmp(argv[1], "--disk") == 0) {
                fd = open(getenv("KVD_TEST_FAULTS"), O_RDWR | O_CLOEXEC);
                s = fault_state_of(fd);
                close(fd);
                fault_install(s);
                install_hanging(s);
                signal(SIGUSR1, lose_second);
                return disk_main();
        }
        fd = memfd_create("faults", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, sizeof *s) < 0 || !(s = fault_state_of(fd)) ||
            readlink("/proc/self/exe", self, sizeof self - 1) < 0)
                die("setup: %s", strerror(errno));
        snprintf(path, sizeof path, "/proc/%d/fd/%d", getpid(), fd);
        setenv("KVD_TEST_FAULTS", path, 1);
        snprintf(file, sizeof file, "/dev/shm/kvd-disk-faults-%d", getpid());
        if (argc == 2 && strcmp(argv[1], "--two") == 0)
                test_two(s);
        else
                test_one(s);
        unlink(file);
        unlink(second);
        return 0;
}
