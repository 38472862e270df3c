/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "ipc/base/util.h"
#include "tests/bench/harness.h"
#include "tests/bench/kvd_side.h"

#define READY_FD 9

const struct kvd_geometry tiny_geometry = {
        .layers = 1,
        .kv_heads = 1,
        .head_dim = 4,
        .block_tokens = BLOCK_TOKENS,
        .dtype = KVD_I8,
        .vocab = VOCABULARY,
        .fingerprint = {0x6b7664, 1},
};

struct kvd_geometry large_geometry(uint32_t kib) {
        return (struct kvd_geometry){.layers = kib / 64,
                                     .kv_heads = 8,
                                     .head_dim = 128,
                                     .block_tokens = BLOCK_TOKENS,
                                     .dtype = KVD_F16,
                                     .vocab = VOCABULARY,
                                     .fingerprint = {0x6b7664, kib}};
}

/* Prints the log of a daemon that did not start, because its folder will be deleted. */
static void say_log(const char *log) {
        char line[512];
        FILE *f = fopen(log, "re");

        while (f && fgets(line, sizeof line, f))
                say("%s", line);
        if (f)
                fclose(f);
}

static int start_daemon(struct kvd_side *side, const char *program, const char *dir,
                        uint64_t pool_bytes, const char *option) {
        static unsigned number;
        char own[400], log[512], pool[32], ready[16];
        char *argv[] = {(char *)program, "--private",    own,  "--backend",
                        "host",          "--pool",       pool, "--ready-fd",
                        ready,           (char *)option, NULL};
        int r;

        snprintf(own, sizeof own, "%s/kvd-%u", dir, number++);
        if (mkdir(own, 0700) < 0)
                return -errno;
        snprintf(log, sizeof log, "%s/log", own);
        snprintf(pool, sizeof pool, "%llu", (unsigned long long)pool_bytes);
        snprintf(ready, sizeof ready, "%d", READY_FD);
        snprintf(side->socket, sizeof side->socket, "%s/kvd.sock", own);
        r = process_start_ready(argv, log, READY_FD, &side->daemon);
        if (r < 0)
                say_log(log);
        return r;
}

int kvd_side_start(struct kvd_side *side, const char *program, const char *dir,
                   const struct kvd_geometry *geometry, uint64_t n_blocks, const char *option) {
        struct kvd_space_options options = {.max_blocks = n_blocks};
        int r;

        *side = (struct kvd_side){.daemon = NO_PROCESS, .geometry = *geometry};
        r = start_daemon(side, program, dir,
                         n_blocks * kvd_block_bytes(geometry) + (UINT64_C(64) << 20), option);
        if (r < 0) {
                say("kvd does not start: %s\n", strerror(-r));
                return r;
        }
        r = kvd_open(side->socket, &side->handle);
        if (r >= 0)
                r = kvd_space_open(side->handle, "bench", &side->geometry, &options, &side->space);
        if (r < 0) {
                say("kvd: %s\n", kvd_error());
                kvd_side_end(side);
        }
        return r;
}

void kvd_side_end(struct kvd_side *side) {
        side->space = side->space ? kvd_space_close(side->space) : NULL;
        side->handle = side->handle ? kvd_close(side->handle) : NULL;
        process_end(&side->daemon);
}

int take_blocks(kvd_space *space, uint32_t n, struct kvd_block *blocks) {
        for (uint32_t got = 0; got < n;) {
                int r = kvd_alloc(space, n - got, blocks + got);

                if (r < 0) {
                        kvd_free(space, got, blocks);
                        return r;
                }
                got += (uint32_t)r;
        }
        return 0;
}

/* Seals the blocks of a prompt's chain that are not stored yet. */
static int store_chain(kvd_space *space, const uint32_t *tokens) {
        struct kvd_block blocks[CHAIN_BLOCKS];
        uint32_t ids[CHAIN_BLOCKS], missing;
        struct kvd_pin pin = {0};
        int64_t found;
        int r;

        found = kvd_lookup(space, 0, tokens, CHAIN_TOKENS, ids, CHAIN_BLOCKS, &pin);
        if (found < 0)
                return (int)found;
        missing = (CHAIN_TOKENS - (uint32_t)found) / BLOCK_TOKENS;
        r = take_blocks(space, missing, blocks);
        if (r >= 0) {
                r = kvd_seal(space, &pin, missing, blocks, tokens + found,
                             CHAIN_TOKENS - (uint32_t)found);
                if (r < 0)
                        kvd_free(space, missing, blocks);
        }
        kvd_unpin(space, &pin);
        return r < 0 ? r : r == (int)missing ? 0 : -EIO;
}

static int find_chain(kvd_space *space, const uint32_t *tokens) {
        uint32_t ids[CHAIN_BLOCKS];
        struct kvd_pin pin = {0};
        int64_t found;

        found = kvd_lookup(space, 0, tokens, CHAIN_TOKENS, ids, CHAIN_BLOCKS, &pin);
        kvd_unpin(space, &pin);
        return found == CHAIN_TOKENS ? 0 : -ENOMSG;
}

static int for_all_chains(struct kvd_side *side, const struct chains *chains,
                          int (*f)(kvd_space *, const uint32_t *)) {
        for (uint32_t i = 0; i < chains->n_chains; i++) {
                uint32_t tokens[CHAIN_TOKENS];
                int r;

                chain_tokens(chains, i, tokens);
                r = f(side->space, tokens);
                if (r < 0) {
                        say("kvd, chain %u of %u: %s %s\n", i, chains->n_chains, strerror(-r),
                            kvd_error());
                        return r;
                }
        }
        return 0;
}

int fill_chains(struct kvd_side *side, const struct chains *chains) {
        int r;

        r = for_all_chains(side, chains, store_chain);
        if (r < 0)
                return r;
        process_settle(&side->daemon);
        return for_all_chains(side, chains, find_chain);
}
