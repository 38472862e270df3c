/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The program whose instructions the script "instructions" counts: measured_lookups makes hot
 * lookups of a chain of 128 blocks, and measured_blocks takes blocks out of the library's stock and
 * puts them back. Also useful with a profiler: lookup_loop KVD N [ENTRIES].
 */

#include <stdio.h>
#include <stdlib.h>

#include "ipc/base/util.h"
#include "tests/bench/harness.h"
#include "tests/bench/kvd_side.h"
#include "tests/bench/temporary.h"

static uint32_t tokens[CHAIN_TOKENS], ids[CHAIN_BLOCKS];

__attribute__((noinline)) static int64_t measured_lookups(kvd_space *space, uint32_t n) {
        int64_t found = 0;

        for (uint32_t i = 0; i < n; i++) {
                struct kvd_pin pin = {0};

                found = kvd_lookup(space, 0, tokens, CHAIN_TOKENS, ids, CHAIN_BLOCKS, &pin);
                kvd_unpin(space, &pin);
        }
        return found;
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

static int blocks_loop(kvd_space *space, uint32_t n) {
        struct kvd_block block;
        uint64_t begin;
        int r;

        if (kvd_alloc(space, 1, &block) != 1) /* fills the stock */
                return -1;
        begin = now_ns();
        r = measured_blocks(space, n);
        printf("%u blocks, %.1f ns to take and return each\n", n,
               (double)(now_ns() - begin) / n);
        kvd_free(space, 1, &block);
        return r;
}

static int loop(const char *program, const char *dir, uint32_t n, uint64_t entries) {
        struct chains chains = chains_plan(entries);
        struct kvd_side side;
        uint64_t begin;
        int r = 1;

        if (kvd_side_start(&side, program, dir, &tiny_geometry, chains.n_blocks * 9 / 8) < 0)
                return 1;
        if (fill_chains(&side, &chains) >= 0) {
                chain_tokens(&chains, 0, tokens);
                measured_lookups(side.space, 1);
                begin = now_ns();
                r = measured_lookups(side.space, n) != CHAIN_TOKENS;
                printf("%u lookups, %.1f ns each\n", n, (double)(now_ns() - begin) / n);
                r = blocks_loop(side.space, n) < 0 || r;
        }
        kvd_side_end(&side);
        return r;
}

int main(int argc, char **argv) {
        char dir[64];
        int r;

        if (argc < 3 || argc > 4) {
                fprintf(stderr, "usage: %s KVD N [ENTRIES]\n", argv[0]);
                return 2;
        }
        process_stay_on(-1);
        if (temporary_make(dir, sizeof dir) < 0)
                return 1;
        r = loop(argv[1], dir, (uint32_t)atoi(argv[2]),
                 argc == 4 ? strtoull(argv[3], NULL, 0) : 4096);
        temporary_remove(dir);
        return r;
}
