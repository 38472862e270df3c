/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client for kvctl to look at: fills a space with chains of CHAIN blocks and pins every one,
 * until it is refused more, and stays until its standard input ends.
 *
 *      hoarder SPACE
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/kvd.h"

enum { BLOCK_TOKENS = 16, CHAIN = 8, MOST = 4096 };

static const struct kvd_geometry geometry = {
        .layers = 2,
        .kv_heads = 2,
        .head_dim = 8,
        .block_tokens = BLOCK_TOKENS,
        .dtype = KVD_F32,
        .vocab = 1000000,
        .fingerprint = {1, 2},
};

/* 0: sealed and pinned; or a negative errno of kvd_alloc or kvd_seal. */
static int add_chain(kvd_space *space, uint32_t first, struct kvd_pin *pin) {
        struct kvd_block blocks[CHAIN];
        uint32_t tokens[CHAIN * BLOCK_TOKENS];
        int r = 0;

        for (uint32_t got = 0; got < CHAIN; got += (uint32_t)r) {
                r = kvd_alloc(space, CHAIN - got, blocks + got);
                if (r < 0) {
                        kvd_free(space, got, blocks);
                        return r;
                }
        }
        for (uint32_t i = 0; i < CHAIN * BLOCK_TOKENS; i++)
                tokens[i] = first + i;
        return kvd_seal(space, pin, CHAIN, blocks, tokens, CHAIN * BLOCK_TOKENS);
}

int main(int argc, char **argv) {
        static struct kvd_pin pins[MOST];
        kvd_space *space;
        kvd *handle;
        int r = 0;
        char byte;

        if (argc != 2 || kvd_open(NULL, &handle) < 0 ||
            kvd_space_open(handle, argv[1], &geometry, NULL, &space) < 0) {
                fprintf(stderr, "hoarder: %s\n", kvd_error());
                return 1;
        }
        for (uint32_t i = 0; i < MOST && r >= 0; i++)
                r = add_chain(space, i * CHAIN * BLOCK_TOKENS, &pins[i]);
        printf("%s\n", r == -ENOBUFS ? "ready" : kvd_error());
        fflush(stdout);
        return read(STDIN_FILENO, &byte, 1) < 0;
}
