/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Everything at once: random requests of all methods, changing settings, and clients that do not
 * answer.
 */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/kvd_methods.h"
#include "ipc/base/sequence.h"
#include "ipc/base/util.h"
#include "tests/daemon/hostile/methods.h"
#include "tests/lib/oracle.h"

#define BT VICTIM_BT
#define MSG(name_, ...) \
        ((struct kvd_msg){.number = KVD_MSG_##name_, .serial = 1, .name_ = {__VA_ARGS__}})

/* ---- a storm of requests --------------------------------------------------------------------- */

/*
 * Four storms at once, three of them in one space. SEED in the environment selects other requests.
 */
static void storms(const struct hostile *h) {
        uint64_t seed = getenv("SEED") ? strtoull(getenv("SEED"), NULL, 0) : 100;
        int status;

        for (uint64_t i = 0; i < 4; i++)
                if (fork() == 0) {
                        methods_storm(h->daemon.socket, i < 3 ? "storm" : "storm2", seed + i,
                                      12000);
                        fflush(stdout);
                        _exit(0);
                }
        for (int i = 0; i < 4; i++)
                if (wait(&status) < 0 || status)
                        die("a storm ended with %#x", status);
}

/* ---- many small sketches --------------------------------------------------------------------- */

/* A sketch for every block: each costs the daemon a descriptor, and all clients share those. */
static void a_sketch_for_every_block(const struct hostile *h) {
        struct asker a = methods_open(h->daemon.socket, "sketches");
        uint32_t slots[64], before = hostile_fds(h), most = before;

        methods_set(&a, "kvreviver.epoch", "1");
        for (uint32_t i = 0; i < 64; i++)
                slots[i] = i;
        for (uint32_t k = 0; k < 40; k++) {
                uint32_t q = methods_sequence(&a, 64), n = methods_append(&a, q, 60);

                methods_cool(&a, q, KVD_COOL_VAGUE, slots, n);
                methods_sync(&a, q, 1, 20);
                most = MAX(most, hostile_fds(h));
        }
        if (most > before + 2048)
                die("the daemon's descriptors grew from %u to %u", before, most);
        printf("  descriptors of the daemon: %u, at most %u\n", before, most);
}

/* ---- clients that do not answer -------------------------------------------------------------- */

static void press(const struct asker *a) {
        methods_set(a, "pressure.high", "0.01");
        methods_set(a, "pressure.low", "0");
        methods_set(a, "kvreviver.budget", "0");
        methods_set(a, "keydiff.sink_blocks", "0");
        methods_set(a, "memshare.recent_guard", "0");
}

/*
 * Pressure relief proposes changes, but the client does not answer. The blocks stay, and the
 * sequence does not change.
 */
static void never_answers(const struct hostile *h) {
        struct asker a = methods_open(h->daemon.socket, "deaf"),
                     b = methods_open(h->daemon.socket, "deaf");
        uint32_t q = methods_sequence(&a, 200), other;

        press(&a);
        for (uint32_t i = 0; i < 10; i++) {
                methods_append(&a, q, 10);
                hostile_goes_on(h, 20);
        }
        other = methods_sequence(&b, 64); /* a client that answers is served */
        for (uint32_t i = 0; i < 20; i++) {
                methods_append(&b, other, 2);
                methods_sync(&b, other, 1, 2);
        }
        methods_ask(&b, MSG(table, .space = b.space, .op = 2, .sequence = other));
}

/* Clients that are stopped while changes are on their way to them, and then killed or continued. */
static void stopped_with_changes(const struct hostile *h) {
        pid_t pids[4];
        int ready[2], status;
        char byte;

        if (pipe(ready) < 0)
                die("pipe");
        for (uint32_t i = 0; i < ARRAY_SIZE(pids); i++) {
                pids[i] = fork();
                if (pids[i] == 0) {
                        struct asker a = methods_open(h->daemon.socket, "halted");
                        uint32_t q = methods_sequence(&a, 64), slots[8] = {0, 1, 2, 3, 4, 5, 6, 7};

                        methods_append(&a, q, 16);
                        methods_cool(&a, q, KVD_COOL_VAGUE, slots, ARRAY_SIZE(slots));
                        methods_ask(&a, MSG(cool, .space = a.space, .sequence = q,
                                            .how = KVD_COOL_DROP, .slots = {slots, sizeof slots}));
                        if (write(ready[1], "r", 1) != 1)
                                die("pipe");
                        raise(SIGSTOP);
                        _exit(0);
                }
                if (read(ready[0], &byte, 1) != 1 ||
                    waitpid(pids[i], &status, WUNTRACED) != pids[i])
                        die("a client did not stop");
        }
        hostile_goes_on(h, 100);
        for (uint32_t i = 0; i < ARRAY_SIZE(pids); i++) {
                kill(pids[i], i % 2 ? SIGKILL : SIGCONT);
                waitpid(pids[i], &status, 0);
        }
}

/* All that follows the pins in the client's page (use, lookups, posts) is noise, all the time. */
static void noise_about_use(const struct hostile *h) {
        struct kvd_msg request = victim_space_message(), reply;
        struct asker a = methods_open(h->daemon.socket, "noise");
        struct random random = {99};
        uint32_t q = methods_sequence(&a, 200), second;
        const struct kvd_index *index;
        struct kvd_fds fds;
        uint32_t *words;
        uint64_t bytes, use;

        press(&a);
        request.space.name = kvd_slice_of(a.name);
        second = raw_attach(h->daemon.socket);
        if (raw_call((int)second, &request, &reply, &fds) != 1 || fds.n != 2)
                die("the space cannot be opened");
        bytes = reply.space_reply.pin_bytes;
        words = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds.fd[1], 0);
        index = mmap(NULL, reply.space_reply.index_bytes, PROT_READ, MAP_SHARED, fds.fd[0], 0);
        if (words == MAP_FAILED || index == MAP_FAILED)
                die("mmap");
        use = kvd_use_off(index->capacity) / 4;
        methods_set(&a, "policy", "priority");
        for (uint32_t i = 0; i < 30; i++) {
                methods_append(&a, q, 5);
                for (uint32_t k = 0; k < 20000; k++)
                        __atomic_store_n(&words[use +
                                                random_below(&random, (uint32_t)(bytes / 4 - use))],
                                         random_below(&random, UINT32_MAX), __ATOMIC_RELAXED);
                methods_sync(&a, q, random_below(&random, 2), 2);
        }
}

/* ---- memory that is only read ---------------------------------------------------------------- */

static void refused(bool done, const char *what) {
        if (done)
                die("%s was not refused", what);
}

/* As another user: a process of the daemon's own user may do anything to the daemon anyway. */
static void write_summaries(const struct hostile *h) {
        struct asker a = methods_open(h->daemon.socket, "summaries");
        struct kvd_msg request = MSG(summaries, .space = a.space), reply;
        struct kvd_fds fds;
        char path[64];
        uint64_t bytes;

        if (raw_call(a.fd, &request, &reply, &fds) != 1 ||
            reply.number != KVD_MSG_summaries_reply || fds.n != 1)
                die("no summaries");
        bytes = reply.summaries_reply.bytes;
        refused(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds.fd[0], 0) != MAP_FAILED,
                "mapping to write");
        refused(pwrite(fds.fd[0], "x", 1, 0) == 1, "writing the summaries");
        refused(ftruncate(fds.fd[0], 0) == 0, "shrinking the summaries");
        refused(fallocate(fds.fd[0], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0,
                "punching a hole");
        if (mmap(NULL, bytes, PROT_READ, MAP_SHARED, fds.fd[0], 0) == MAP_FAILED)
                die("the summaries cannot be read");
        request.summaries.space = 1234;
        raw_expect_refusal(a.fd, &request, EBADF);
        if (getuid() == 0 &&
            (setresgid(65534, 65534, 65534) < 0 || setresuid(65534, 65534, 65534) < 0))
                die("cannot become user nobody");
        if (getuid() != 65534)
                return;
        snprintf(path, sizeof path, "/proc/self/fd/%d", fds.fd[0]);
        refused(open(path, O_RDWR) >= 0, "opening the summaries again, to write");
}

const struct attack_row storm_attacks[] =
        {{"storms of requests about sequences", storms, 8},
         {"a sketch for every block", a_sketch_for_every_block, 1},
         {"a client that never answers proposals", never_answers, 2},
         {"clients stopped with changes on the way", stopped_with_changes, 4},
         {"noise in use counters", noise_about_use, 2},
         {"writing the summaries", write_summaries, 1},
         {0}};
