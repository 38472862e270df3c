/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks by key, for engines that supply hashes of their data instead of tokens. A key has as many
 * bytes as the tokens of one block. An object of n blocks is the chain whose tokens are the key,
 * repeated n times. So keys are compared like tokens. Since parents outlive their children, an
 * object that has lost any block has lost its last one, and a lookup of the whole finds nothing.
 */

#include <errno.h>
#include <string.h>

#include "client/internal.h"

#define KEY_TOKENS 8u /* tokens of the longest key: 32 bytes */
/* maximum size of an object: its tokens fit in one message, so it is sealed whole or not at all */
#define KEY_BLOCKS 1024u

struct key_tokens {
        uint32_t n;
        uint32_t tokens[KEY_BLOCKS * KEY_TOKENS];
};

static int check_keyed(const struct kvd_space *space, uint32_t n_blocks) {
        const struct kvd_shape *g = &space->geometry;

        if (space_check(space) < 0)
                return -ECHILD;
        if (space->options.kind == KVD_BIDIRECTIONAL || g->vocab ||
            g->block_tokens < KEY_TOKENS / 2 || g->block_tokens > KEY_TOKENS)
                return client_fail(-EINVAL, "keys of 16 to 32 bytes need a causal space of opaque "
                                            "blocks, with vocab 0 and block_tokens 4 to 8, a "
                                            "quarter of the key's bytes");
        if (n_blocks == 0 || n_blocks > KEY_BLOCKS)
                return client_fail(-EINVAL, "an object has 1 to %u blocks, not %u", KEY_BLOCKS,
                                   n_blocks);
        return 0;
}

/* Checks all pins before any is filled, so that a failed call fills none. */
static int check_pins(const struct kvd_pin *pins, uint32_t n) {
        for (uint32_t i = 0; i < n; i++)
                if (pins[i].view)
                        return client_fail(-EINVAL,
                                           "pin %u holds something already; kvd_unpin it first", i);
        return 0;
}

static void repeat(const struct kvd_space *space, const void *key, uint32_t n_blocks,
                   struct key_tokens *ret) {
        uint32_t bt = space->geometry.block_tokens;

        for (uint32_t i = 0; i < n_blocks; i++)
                memcpy(ret->tokens + i * bt, key, bt * sizeof *ret->tokens);
        ret->n = n_blocks * bt;
}

/* Looks up n keys, at most LOOKUP_AHEAD. */
static int64_t look_up(struct kvd_space *space, const uint8_t *keys, uint32_t n, uint32_t n_blocks,
                       uint32_t *blocks, struct kvd_pin *pins) {
        uint32_t first[LOOKUP_AHEAD * KEY_TOKENS], bt = space->geometry.block_tokens;
        struct key_tokens all;
        int64_t found = 0;

        memcpy(first, keys, n * bt * sizeof *first);
        lookup_ahead(space, first, pins, n);
        for (uint32_t i = 0; i < n; i++) {
                repeat(space, first + i * bt, n_blocks, &all);
                found += lookup_whole(space, all.tokens, all.n, blocks + (size_t)i * n_blocks,
                                      &pins[i]) > 0;
        }
        return found;
}

int64_t kvd_lookup_keys(struct kvd_space *space, const void *keys, uint32_t n_keys,
                        uint32_t blocks_per_key, uint32_t *blocks, struct kvd_pin *pins) {
        size_t key_bytes = space->geometry.block_tokens * sizeof(uint32_t);
        int64_t found = 0;
        int r = check_keyed(space, blocks_per_key);

        if (r == 0)
                r = check_pins(pins, n_keys);
        for (uint32_t i = 0; r == 0 && i < n_keys; i += LOOKUP_AHEAD)
                found += look_up(space, (const uint8_t *)keys + i * key_bytes,
                                 MIN(n_keys - i, LOOKUP_AHEAD), blocks_per_key,
                                 blocks + (size_t)i * blocks_per_key, pins + i);
        return r < 0 ? r : found;
}

int kvd_seal_key(struct kvd_space *space, const void *key, uint32_t n, struct kvd_block *blocks,
                 struct kvd_pin *pin) {
        struct key_tokens all;
        int r = check_keyed(space, n);

        if (r == 0)
                r = check_pins(pin, 1);
        if (r < 0)
                return r;
        repeat(space, key, n, &all);
        return kvd_seal(space, pin, n, blocks, all.tokens, all.n);
}
