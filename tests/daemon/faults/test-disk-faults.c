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

static char file[64], self[256];
static uint32_t patience_s;

/* ---- what kvd says --------------------------------------------------------------------------- */

static struct kvd_msg_tier_info_reply tier(struct run *r) {
        return peer_ok(r->watcher, MSG(tier_info)).tier_info_reply;
}

static bool is(struct run *r, const char *state) {
        return kvd_slice_is(tier(r).state, state);
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
        snprintf(setting, sizeof setting, "daemon.file=%s", file);
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

        WAIT_UNTIL(is_degraded(r) == is(r, "off"));
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

static bool is_ours(enum fault_call call) {
        static const enum fault_call calls[] = {FAULT_pread,   FAULT_pwrite,     FAULT_fdatasync,
                                                FAULT_uring,   FAULT_completion, FAULT_mmap,
                                                FAULT_calloc,  FAULT_getrandom,  FAULT_madvise,
                                                FAULT_sendmsg, FAULT_recvmsg};

        for (uint32_t i = 0; i < ARRAY_SIZE(calls); i++)
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
        patience_s = BUSY_S;
        s->on = true;
        start(&r);
        session(&r);
        erased = erase(&r);
        leave(&r);
        connect_to(&r);
        s->on = false;
        expect_service(&r);
        if (s->fault.error == FAULT_SHORT && (is(&r, "off") || tier(&r).errors))
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

static bool has_file_open(pid_t pid) {
        char link[64], target[128];

        for (int fd = 3; fd < 64; fd++) {
                ssize_t n;

                snprintf(link, sizeof link, "/proc/%d/fd/%d", pid, fd);
                n = readlink(link, target, sizeof target - 1);
                target[MAX(n, 0)] = 0;
                if (strcmp(target, file) == 0)
                        return true;
        }
        return false;
}

/* 0: the disk process has not been started or has not opened the file yet. */
static pid_t process_of(const struct run *r) {
        char children[64];
        int pid, found = 0;
        FILE *f;

        snprintf(children, sizeof children, "/proc/%d/task/%d/children", r->d.in.pid, r->d.in.pid);
        f = fopen(children, "re");
        while (f && !found && fscanf(f, "%d", &pid) == 1)
                if (has_file_open(pid))
                        found = pid;
        if (f)
                fclose(f);
        return found;
}

static pid_t disk_of(const struct run *r) {
        pid_t pid;

        WAIT_UNTIL((pid = process_of(r)) != 0);
        return pid;
}

/*
 * Stops the disk process and holds it at its exit: even the kernel cannot end a process whose disk
 * hangs.
 */
static pid_t hold(const struct run *r) {
        pid_t pid = disk_of(r);

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
        pid = hold(&r);
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

/* Kills the disk process at random moments. It is replaced, and nothing is lost. */
static void is_killed(struct fault_state *s) {
        struct fault fault = {N_FAULT_CALLS, 0, 0, false};
        struct run r = {.s = s};

        patience_s = FOR_EVER_S;
        fault_set(s, &fault);
        start_written(&r);
        evict_all(&r);
        for (uint32_t i = 0; i < 10; i++) {
                pid_t pid = disk_of(&r);

                make_chain(&r, 40 + i);
                usleep(i * 100);
                kill(pid, SIGKILL);
                fetch(&r, 1);
                WAIT_UNTIL(process_of(&r) && process_of(&r) != pid);
                WAIT_UNTIL((fetch(&r, 1), resident(&r, 1) == BLOCKS));
                evict_all(&r);
        }
        if (is(&r, "off") || !erase(&r))
                die("the file is off");
        end(&r);
        printf("is killed: replaced\n");
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
                return disk_main();
        }
        fd = memfd_create("faults", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, sizeof *s) < 0 || !(s = fault_state_of(fd)) ||
            readlink("/proc/self/exe", self, sizeof self - 1) < 0)
                die("setup: %s", strerror(errno));
        snprintf(path, sizeof path, "/proc/%d/fd/%d", getpid(), fd);
        setenv("KVD_TEST_FAULTS", path, 1);
        snprintf(file, sizeof file, "/dev/shm/kvd-disk-faults-%d", getpid());
        is_killed(s);
        hang_in_the_kernel(s);
        break_for_good(s, EIO);
        break_for_good(s, ENOSPC);
        hang(s, FAULT_completion, 2, false);
        hang(s, FAULT_completion, 2, true);
        fault_sweep(s, "disk process", 20, run, NULL);
        unlink(file);
        return 0;
}
