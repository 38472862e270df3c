/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A client with which the script "instructions" counts the daemon's instructions: it takes and
 * publishes N times 16 blocks out of a full pool, each of which evicts another block. The cost of
 * blocks is the difference of two runs with different N: owner_loop KVD seal|post N.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/temporary.h"
#include "tests/bench/work.h"

#define POOL_BLOCKS 65536u
#define BATCH 16u

static int post(struct batch *batch, uint32_t times) {
        int r = 0;

        for (uint32_t i = 0; i < times && r == 0; i++) {
                r = batch_blocks(batch, 0);
                if (r == 0)
                        r = batch_post(batch);
                if (r == 0)
                        r = batch_let_go(batch);
        }
        return r;
}

static int loop(const char *program, const char *dir, bool posts, uint32_t n) {
        static struct kvd_side side;
        static struct batch batch = {.kvd = &side, .n = BATCH};
        int r = kvd_side_start(&side, program, dir, &tiny_geometry, POOL_BLOCKS);

        if (r == 0)
                r = batch_publish(&batch, POOL_BLOCKS / BATCH * 9 / 8);
        if (r == 0)
                r = posts ? post(&batch, n) : batch_publish(&batch, n);
        kvd_side_end(&side);
        return r;
}

int main(int argc, char **argv) {
        char dir[64];
        int r;

        if (argc != 4) {
                fprintf(stderr, "usage: %s KVD seal|post N\n", argv[0]);
                return 2;
        }
        process_stay_on(-1);
        if (temporary_make(dir, sizeof dir) < 0)
                return 1;
        r = loop(argv[1], dir, strcmp(argv[2], "post") == 0, (uint32_t)atoi(argv[3]));
        temporary_remove(dir);
        if (r < 0)
                fprintf(stderr, "owner_loop: %s\n", strerror(-r));
        return r < 0;
}
