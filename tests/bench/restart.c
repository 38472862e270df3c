/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How long a cache is away when its daemon is killed, by the number of blocks in it. kvd runs under
 * its keeper (kvd --keep), this process is a client, and the clock starts with the signal. It
 * measures what a client sees: the first answered allocation, and when all chains are found again.
 */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ipc/base/util.h"
#include "tests/bench/harness.h"
#include "tests/bench/kvd_side.h"
#include "tests/bench/temporary.h"

#define KILLS 5u
#define ASKED 256u /* blocks; more than a client has in stock, so that a daemon must answer */
#define PATIENCE_NS (UINT64_C(60) * 1000000000)

struct seen {
        double allocated_ms, served_ms, owner_ms;
        uint64_t found; /* blocks */
};

/* The kvd that the keeper started last; 0 if none. */
static pid_t served_by(const struct process *keeper) {
        char path[64];
        int pid = 0;
        FILE *f;

        snprintf(path, sizeof path, "/proc/%d/task/%d/children", keeper->pid, keeper->pid);
        f = fopen(path, "re");
        if (!f)
                return 0;
        if (fscanf(f, "%d", &pid) != 1)
                pid = 0;
        fclose(f);
        return pid;
}

static void pause_briefly(void) {
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
}

static int wait_for_blocks(kvd_space *space, uint64_t began) {
        struct kvd_block blocks[ASKED];
        int r = 0;

        while (r != (int)ASKED && now_ns() - began < PATIENCE_NS) {
                r = kvd_alloc(space, ASKED, blocks);
                if (r > 0)
                        kvd_free(space, (uint32_t)r, blocks);
                if (r != (int)ASKED)
                        pause_briefly();
        }
        return r == (int)ASKED ? 0 : -ETIMEDOUT;
}

/* Trunks are counted once. */
static uint64_t count_found(kvd_space *space, const struct chains *chains) {
        uint32_t ids[CHAIN_BLOCKS], tokens[CHAIN_TOKENS], n;
        uint64_t found = 0;

        for (uint32_t i = 0; i < chains->n_chains; i++) {
                struct kvd_pin pin = {0};

                chain_tokens(chains, i, tokens);
                kvd_lookup(space, 0, tokens, CHAIN_TOKENS, ids, CHAIN_BLOCKS, &pin);
                n = pin.n_blocks;
                found += i % TRUNK_CHAINS == 0 ? n : n - MIN(n, TRUNK_BLOCKS);
                kvd_unpin(space, &pin);
        }
        return found;
}

static int kill_and_wait(struct kvd_side *side, const struct chains *chains, struct seen *ret) {
        pid_t pid = served_by(&side->daemon);
        struct process next = NO_PROCESS;
        uint64_t began = now_ns();
        int r;

        if (pid <= 0 || kill(pid, SIGKILL) < 0)
                return -ESRCH;
        r = wait_for_blocks(side->space, began);
        if (r < 0)
                return r;
        ret->allocated_ms = (double)(now_ns() - began) / 1e6;
        next.pid = served_by(&side->daemon);
        ret->owner_ms = (double)process_cpu_ns(&next) / 1e6;
        r = kvd_catch_up(side->space);
        if (r < 0)
                return r;
        ret->found = count_found(side->space, chains);
        ret->served_ms = (double)(now_ns() - began) / 1e6;
        return next.pid == pid ? -EIO : 0;
}

static int show(struct kvd_side *side, const struct chains *chains) {
        double allocated[KILLS], served[KILLS], owner[KILLS];
        uint64_t least = chains->n_blocks;

        for (uint32_t i = 0; i < KILLS; i++) {
                struct seen seen;
                int r;

                process_settle(&(struct process){.pid = served_by(&side->daemon), .fd = -1});
                r = kill_and_wait(side, chains, &seen);
                if (r < 0)
                        return r;
                allocated[i] = seen.allocated_ms;
                served[i] = seen.served_ms;
                owner[i] = seen.owner_ms;
                least = MIN(least, seen.found);
        }
        printf("%9llu %11.1f (%.1f) %11.1f (%.1f) %11.1f %9.3f %%\n",
               (unsigned long long)chains->n_blocks, spread_of(allocated, KILLS).median,
               spread_of(allocated, KILLS).max, spread_of(served, KILLS).median,
               spread_of(served, KILLS).max, spread_of(owner, KILLS).median,
               100.0 * (double)least / (double)chains->n_blocks);
        return least == chains->n_blocks ? 0 : -EIO;
}

static int restart(const char *program, const char *dir, uint64_t n_blocks) {
        struct chains chains = chains_plan(n_blocks);
        struct kvd_side side;
        int r = kvd_side_start(&side, program, dir, &tiny_geometry, n_blocks + 4 * ASKED, "--keep");

        if (r < 0)
                return r;
        r = fill_chains(&side, &chains);
        if (r >= 0)
                r = show(&side, &chains);
        if (r < 0)
                say("%llu blocks: %s %s\n", (unsigned long long)n_blocks, strerror(-r),
                    kvd_error());
        kvd_side_end(&side);
        return r;
}

static int restart_all(char **argv, const char *dir) {
        int r = 0;

        setenv("TMPDIR", dir, 1);
        printf("   blocks  first alloc ms (most)  all served ms (most)  owner ms     found\n");
        for (char **blocks = argv + 2; r >= 0 && *blocks; blocks++)
                r = restart(argv[1], dir, strtoull(*blocks, NULL, 0));
        return r;
}

int main(int argc, char **argv) {
        if (argc < 3) {
                say("usage: %s KVD BLOCKS...\n", argv[0]);
                return 2;
        }
        return with_temporary(restart_all, argv) < 0;
}
