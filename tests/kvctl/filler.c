/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client for kvctl to look at: fills a space with known chains, holds some of its blocks, and
 * stays until its standard input ends.
 *
 *      filler SPACE
 *
 *      chain A  40 blocks, 640 tokens
 *      chain B  the first 20 blocks of A, then 6 more, the last with 4 tokens: 404 tokens; pinned
 *      3 blocks are being filled
 *
 * It looks A up once before it is stored and once after: 2 lookups, 1 hit, 1280 tokens asked, 640
 * found. Then it looks up the first 320 tokens of B, to continue it: 1 more hit.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/kvd.h"

#define BLOCK_TOKENS 16u
#define A_BLOCKS 40u
#define COMMON_BLOCKS 20u
#define B_BLOCKS 6u
#define B_LAST_TOKENS 4u
#define FILLING_BLOCKS 3u

static const struct kvd_geometry geometry = {
        .layers = 2,
        .kv_heads = 2,
        .head_dim = 8,
        .block_tokens = BLOCK_TOKENS,
        .dtype = KVD_F32,
        .vocab = 100000,
        .fingerprint = {0x0123456789abcdef, 0xfedcba9876543210},
};

_Noreturn static void die(const char *what) {
        fprintf(stderr, "filler: %s: %s\n", what, kvd_error());
        exit(1);
}

static void take(kvd_space *space, uint32_t n, struct kvd_block *blocks) {
        for (uint32_t got = 0; got < n;) {
                int r = kvd_alloc(space, n - got, blocks + got);

                if (r < 0)
                        die("kvd_alloc");
                got += (uint32_t)r;
        }
        for (uint32_t i = 0; i < n; i++)
                memset(blocks[i].data, (int)i, kvd_block_bytes(&geometry));
}

static void seal(kvd_space *space, struct kvd_pin *pin, uint32_t n, const uint32_t *tokens,
                 uint32_t n_tokens) {
        struct kvd_block blocks[A_BLOCKS];

        take(space, n, blocks);
        if (kvd_seal(space, pin, n, blocks, tokens, n_tokens) != (int)n)
                die("kvd_seal");
}

static void expect_tokens(int64_t found, int64_t expected) {
        if (found != expected)
                die("kvd_lookup found another number of tokens");
}

static void fill(kvd_space *space, struct kvd_pin *held) {
        uint32_t a[A_BLOCKS * BLOCK_TOKENS], b[B_BLOCKS * BLOCK_TOKENS], ids[A_BLOCKS];
        uint32_t n_b = (B_BLOCKS - 1) * BLOCK_TOKENS + B_LAST_TOKENS;
        struct kvd_pin pin = {0};

        for (uint32_t i = 0; i < A_BLOCKS * BLOCK_TOKENS; i++)
                a[i] = 1000 + i;
        for (uint32_t i = 0; i < n_b; i++)
                b[i] = 5000 + i;
        expect_tokens(kvd_lookup(space, 0, a, A_BLOCKS * BLOCK_TOKENS, ids, A_BLOCKS, &pin), 0);
        seal(space, &pin, A_BLOCKS, a, A_BLOCKS * BLOCK_TOKENS);
        if (kvd_session(space, "agent-7", KVD_KEEP_HIGH, 3600, &pin, 1) < 0)
                die("kvd_session");
        expect_tokens(kvd_lookup(space, 0, a, A_BLOCKS * BLOCK_TOKENS, ids, A_BLOCKS, &pin),
                      A_BLOCKS * BLOCK_TOKENS);
        kvd_unpin(space, &pin);
        expect_tokens(kvd_lookup(space, 0, a, COMMON_BLOCKS * BLOCK_TOKENS, ids, A_BLOCKS, held),
                      COMMON_BLOCKS * BLOCK_TOKENS);
        seal(space, held, B_BLOCKS, b, n_b);
}

int main(int argc, char **argv) {
        struct kvd_block filling[FILLING_BLOCKS];
        struct kvd_pin held = {0};
        kvd_space *space = NULL;
        kvd *handle = NULL;
        char byte;

        if (argc != 2)
                return 2;
        if (kvd_open(NULL, &handle) < 0)
                die("kvd_open");
        if (kvd_space_open(handle, argv[1], &geometry, NULL, &space) < 0)
                die("kvd_space_open");
        fill(space, &held);
        take(space, FILLING_BLOCKS, filling);
        puts("ready");
        fflush(stdout);
        while (read(STDIN_FILENO, &byte, 1) > 0)
                continue;
        kvd_free(space, FILLING_BLOCKS, filling);
        kvd_unpin(space, &held);
        kvd_space_close(space);
        kvd_close(handle);
        return 0;
}
