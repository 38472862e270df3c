/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A lookup makes no system call. This is a proof, not a measurement: a process whose filter kills
 * it at any system call, even exit, does 10,000 lookups and reports them in shared memory.
 *
 *      parent    starts a kvd and fills it
 *      child     connects, asks once, gives up all system calls, asks on, raises a flag, spins until it is killed
 *      early     connects before anything is there, gives up all system calls, and asks for what lies in memory
 *                by which the pool has grown since: it misses
 *
 * The filter is tested too: another child makes one harmless call under it, which must kill it.
 */

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/bench/kvd_side.h"
#include "tests/bench/temporary.h"

#define LOOKUPS 10000u
#define PATIENCE_MS 60000
#define SKIPPED 77

enum { SET_UP, REFUSED, WRONG, DONE, EARLY, GROWN };

static _Atomic int *stage; /* of the child; in shared memory */

static int give_up_system_calls(void) {
        struct sock_filter kill[] = {BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS)};
        struct sock_fprog program = {.len = ARRAY_SIZE(kill), .filter = kill};

        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
                return -errno;
        return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0 ? -errno : 0;
}

static _Noreturn void spin(void) {
        for (;;)
                atomic_signal_fence(memory_order_seq_cst);
}

/* ---- child ----------------------------------------------------------------------------------- */

/* A lookup of n tokens, of which the first known ones are stored. */
static bool ask(kvd_space *space, const uint32_t *tokens, uint32_t n, uint32_t known) {
        uint32_t ids[CHAIN_BLOCKS];
        struct kvd_pin pin = {0};
        int64_t found;

        found = kvd_lookup(space, 0, tokens, n, ids, CHAIN_BLOCKS, &pin);
        kvd_unpin(space, &pin);
        return found == known && kvd_match(space, 0, tokens, n) == known;
}

/*
 * Whole chains, chains that end inside a run, chains whose second half is not stored, and unknown
 * ones.
 */
static bool ask_all_ways(kvd_space *space, const struct chains *chains, uint32_t i) {
        uint32_t tokens[CHAIN_TOKENS], half = TRUNK_BLOCKS * BLOCK_TOKENS;

        chain_tokens(chains, i % chains->n_chains, tokens);
        switch (i % 4) {
        case 0: return ask(space, tokens, CHAIN_TOKENS, CHAIN_TOKENS);
        case 1: return ask(space, tokens, CHAIN_TOKENS - 5, CHAIN_TOKENS - BLOCK_TOKENS);
        case 2: tokens[half]++; return ask(space, tokens, CHAIN_TOKENS, half);
        default: tokens[0]++; return ask(space, tokens, CHAIN_TOKENS, 0);
        }
}

static _Noreturn void child(const char *socket, const struct chains *chains) {
        kvd_space *space;
        kvd *handle;
        int result = DONE;

        if (kvd_open(socket, &handle) < 0 ||
            kvd_space_open(handle, "bench", &tiny_geometry, NULL, &space) < 0) {
                fprintf(stderr, "child: %s\n", kvd_error());
                _exit(1);
        }
        for (uint32_t i = 0; i < 4; i++)
                if (!ask_all_ways(space, chains, i))
                        result = WRONG;
        if (give_up_system_calls() < 0) {
                atomic_store(stage, REFUSED);
                spin();
        }
        for (uint32_t i = 0; i < LOOKUPS; i++)
                if (!ask_all_ways(space, chains, i))
                        result = WRONG;
        atomic_store(stage, result);
        spin();
}

/* Later blocks can be found by kvd_match, which reads only the index, but cannot be read. */
static _Noreturn void early_child(const char *socket, const struct chains *chains) {
        uint32_t tokens[CHAIN_TOKENS], ids[CHAIN_BLOCKS];
        int result = DONE;
        kvd_space *space;
        kvd *handle;

        if (kvd_open(socket, &handle) < 0 ||
            kvd_space_open(handle, "bench", &tiny_geometry, NULL, &space) < 0)
                _exit(1);
        ask_all_ways(space, chains, 3);
        atomic_store(stage, give_up_system_calls() < 0 ? REFUSED : EARLY);
        while (atomic_load(stage) != GROWN)
                atomic_signal_fence(memory_order_seq_cst);
        for (uint32_t i = 0; i < LOOKUPS; i++) {
                struct kvd_pin pin = {0};

                chain_tokens(chains, i % chains->n_chains, tokens);
                if (kvd_match(space, 0, tokens, CHAIN_TOKENS) != CHAIN_TOKENS ||
                    kvd_lookup(space, 0, tokens, CHAIN_TOKENS, ids, CHAIN_BLOCKS, &pin) != 0)
                        result = WRONG;
        }
        atomic_store(stage, result);
        spin();
}

static _Noreturn void disobedient_child(void) {
        if (give_up_system_calls() < 0) {
                atomic_store(stage, REFUSED);
                spin();
        }
        getppid();
        atomic_store(stage, DONE);
        spin();
}

/* ---- parent ---------------------------------------------------------------------------------- */

/* Waits until the child left this stage or died. *killed_by: its signal. */
static void await_stage(pid_t pid, int from, int *killed_by) {
        int status = 0;

        *killed_by = 0;
        for (int ms = 0; ms < PATIENCE_MS && atomic_load(stage) == from; ms++) {
                if (waitpid(pid, &status, WNOHANG) == pid) {
                        *killed_by = WIFSIGNALED(status) ? WTERMSIG(status) : SIGKILL;
                        return;
                }
                nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
}

/*
 * Waits until the child has raised its flag or died, and ends it. Returns the stage that it
 * reached; *killed_by: the signal that killed it.
 */
static int watch(pid_t pid, int from, int *killed_by) {
        int reached;

        await_stage(pid, from, killed_by);
        reached = atomic_load(stage);
        if (!*killed_by) {
                kill(pid, SIGKILL);
                waitpid(pid, NULL, 0);
        }
        return reached;
}

static int check_filter(void) {
        int killed_by, reached;
        pid_t pid;

        atomic_store(stage, SET_UP);
        pid = fork();
        if (pid == 0)
                disobedient_child();
        reached = watch(pid, SET_UP, &killed_by);
        if (reached == REFUSED) {
                fprintf(stderr, "no seccomp here: skipped\n");
                return SKIPPED;
        }
        if (killed_by == SIGSYS)
                return 0;
        fprintf(stderr, "a process without system calls made one and lived\n");
        return 1;
}

static int judge(const char *which, int reached, int killed_by) {
        if (reached == DONE) {
                printf("%s: %u lookups, no system call\n", which, LOOKUPS);
                return 0;
        }
        fprintf(stderr, "%s: %s\n", which,
                reached == WRONG    ? "a lookup gave a wrong answer" :
                killed_by == SIGSYS ? "a lookup made a system call" :
                                      "the child did not finish");
        return 1;
}

static int check_lookups(const char *socket, const struct chains *chains) {
        int killed_by, reached;
        pid_t pid;

        atomic_store(stage, SET_UP);
        pid = fork();
        if (pid == 0)
                child(socket, chains);
        reached = watch(pid, SET_UP, &killed_by);
        return judge("mapped", reached, killed_by);
}

/* Fills the space after the child has connected. */
static int check_grown(struct kvd_side *side, const struct chains *chains) {
        int killed_by, reached, r;
        pid_t pid;

        atomic_store(stage, SET_UP);
        pid = fork();
        if (pid == 0)
                early_child(side->socket, chains);
        await_stage(pid, SET_UP, &killed_by);
        r = killed_by || atomic_load(stage) != EARLY ? -1 : fill_chains(side, chains);
        if (r == 0)
                atomic_store(stage, GROWN);
        reached = watch(pid, r == 0 ? GROWN : atomic_load(stage) + 1, &killed_by);
        return judge("grown", r < 0 ? SET_UP : reached, killed_by);
}

static int test(char **argv, const char *dir) {
        struct chains chains = chains_plan(8 * 1024);
        struct kvd_side side;
        int r;

        if (kvd_side_start(&side, argv[1], dir, &tiny_geometry, chains.n_blocks * 2, NULL) < 0)
                return 1;
        r = check_grown(&side, &chains);
        if (r == 0)
                r = check_lookups(side.socket, &chains);
        kvd_side_end(&side);
        return r;
}

int main(int argc, char **argv) {
        int r;

        if (argc != 2) {
                fprintf(stderr, "usage: %s KVD\n", argv[0]);
                return 2;
        }
        stage = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (stage == MAP_FAILED)
                return 1;
        r = check_filter();
        return r ? r : with_temporary(test, argv) != 0;
}
