/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The client with which the script "instructions" counts; also useful with a profiler.
 *
 *      kvd-loop KVD lookup N      N hot lookups of a chain of 128 blocks, in measured_lookups
 *      kvd-loop KVD alloc N       N blocks taken out of the library's stock and put back, in measured_blocks
 *      kvd-loop KVD seal|post N   N times 16 blocks, taken out of a full pool and published, each of which evicts another.
 *                                 Their cost is the difference of two runs with different N
 */

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/temporary.h"
#include "tests/bench/work.h"

#define ENTRIES 4096u
#define POOL_BLOCKS 65536u
#define BATCH 16u

static uint32_t tokens[CHAIN_TOKENS], ids[CHAIN_BLOCKS];

__attribute__((noinline)) static int measured_lookups(kvd_space *space, uint32_t n) {
        int64_t found = CHAIN_TOKENS;

        for (uint32_t i = 0; i < n && found == CHAIN_TOKENS; i++) {
                struct kvd_pin pin = {0};

                found = kvd_lookup(space, 0, tokens, CHAIN_TOKENS, ids, CHAIN_BLOCKS, &pin);
                kvd_unpin(space, &pin);
        }
        return found == CHAIN_TOKENS ? 0 : -1;
}

__attribute__((noinline)) static int measured_blocks(kvd_space *space, uint32_t n) {
        struct kvd_block block;

        for (uint32_t i = 0; i < n; i++) {
                if (kvd_alloc(space, 1, &block) != 1)
                        return -1;
                kvd_free(space, 1, &block);
        }
        return 0;
}

/* The first call warms up, and fills the stock. */
static int client_loop(struct kvd_side *side, int (*measured)(kvd_space *, uint32_t), uint32_t n) {
        struct chains chains = chains_plan(ENTRIES);
        int r = fill_chains(side, &chains);

        chain_tokens(&chains, 0, tokens);
        if (r == 0)
                r = measured(side->space, 1);
        return r ? r : measured(side->space, n);
}

static int owner_loop(struct kvd_side *side, bool posts, uint32_t n) {
        static struct batch batch;
        int r;

        batch = (struct batch){.kvd = side, .n = BATCH};
        r = batch_publish(&batch, POOL_BLOCKS / BATCH * 9 / 8);
        if (!posts)
                return r ? r : batch_publish(&batch, n);
        for (uint32_t i = 0; i < n && r == 0; i++) {
                r = batch_blocks(&batch, 0);
                if (r == 0)
                        r = batch_post(&batch);
                if (r == 0)
                        r = batch_let_go(&batch);
        }
        return r;
}

static int loop(char **argv, const char *dir) {
        uint32_t n = (uint32_t)atoi(argv[3]);
        struct kvd_side side;
        int r = kvd_side_start(&side, argv[1], dir, &tiny_geometry, POOL_BLOCKS, NULL);

        if (r < 0)
                return r;
        r = strcmp(argv[2], "lookup") == 0 ? client_loop(&side, measured_lookups, n) :
            strcmp(argv[2], "alloc") == 0  ? client_loop(&side, measured_blocks, n) :
                                             owner_loop(&side, strcmp(argv[2], "post") == 0, n);
        kvd_side_end(&side);
        return r;
}

int main(int argc, char **argv) {
        int r;

        if (argc != 4) {
                fprintf(stderr, "usage: %s KVD lookup|alloc|seal|post N\n", argv[0]);
                return 2;
        }
        process_stay();
        r = with_temporary(loop, argv);
        if (r)
                fprintf(stderr, "loop: %s\n", strerror(-r));
        return r != 0;
}
