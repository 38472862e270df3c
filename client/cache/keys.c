/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Objects by key, for engines that supply hashes of their data instead of tokens. An object of n
 * blocks is a chain in a group of its own (KVD_GROUP_KEYED), in which each block has the words of
 * the key for tokens. So keys are compared in full, and never meet the tokens of a prompt. Since
 * parents outlive their children, an object that has lost any block has lost its last one, and a
 * lookup of the whole finds nothing.
 */

#include <errno.h>
#include <string.h>

#include "client/gpu/gpu_view.h"

/* maximum size of an object: its words fit in one message, so it is sealed whole or not at all */
#define KEY_BLOCKS 1024u

struct object {
        uint32_t n;
        uint32_t words[KEY_BLOCKS * KVD_KEY_MOST];
};

static uint32_t key_words(const struct kvd_space *space) {
        return kvd_full_tokens(&space->geometry, KVD_GROUP_KEYED);
}

static int check_keyed(const struct kvd_space *space, uint32_t n_blocks) {
        if (space_check(space) < 0)
                return -ECHILD;
        if (!kvd_has_keys(&space->geometry, space->options.kind))
                return client_fail(-EINVAL, "keys need a causal space of opaque blocks with "
                                            "block_tokens of 4 or more");
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
                   struct object *ret) {
        uint32_t each = key_words(space);

        for (uint32_t i = 0; i < n_blocks; i++)
                memcpy(ret->words + i * each, key, each * sizeof *ret->words);
        ret->n = n_blocks * each;
}

/* ---- finding --------------------------------------------------------------------------------- */

/* Looks up n keys, at most LOOKUP_AHEAD. */
static int64_t look_up(struct kvd_space *space, const uint8_t *keys, uint32_t n, uint32_t n_blocks,
                       uint32_t *blocks, struct kvd_pin *pins) {
        uint32_t first[LOOKUP_AHEAD * KVD_KEY_MOST], each = key_words(space);
        struct object all;
        int64_t found = 0;

        memcpy(first, keys, n * each * sizeof *first);
        lookup_ahead(space, first, pins, n);
        for (uint32_t i = 0; i < n; i++) {
                repeat(space, first + i * each, n_blocks, &all);
                found += lookup_object(space, all.words, all.n, blocks + (size_t)i * n_blocks,
                                       &pins[i]) > 0;
        }
        return found;
}

int64_t kvd_lookup_keys(struct kvd_space *space, const void *keys, uint32_t n_keys,
                        uint32_t blocks_per_key, uint32_t *blocks, struct kvd_pin *pins) {
        size_t key_bytes = key_words(space) * sizeof(uint32_t);
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

int64_t kvd_fetch_key(struct kvd_space *space, uint64_t salt, const void *key, uint32_t n,
                      int *fd) {
        struct object all;
        int64_t r = check_keyed(space, n);

        *fd = -1;
        if (r < 0)
                return r;
        repeat(space, key, n, &all);
        r = fetch_chain(space, KVD_GROUP_KEYED, salt, all.words, all.n, fd);
        return r < 0 ? r : r / key_words(space);
}

/* ---- publishing ------------------------------------------------------------------------------ */

int kvd_seal_key(struct kvd_space *space, const void *key, uint32_t n, struct kvd_block *blocks,
                 struct kvd_pin *pin) {
        struct kvd_pin whole = {.group = KVD_GROUP_KEYED, .salt = pin->salt};
        struct object all;
        int r = check_keyed(space, n);

        if (r == 0)
                r = check_pins(pin, 1);
        if (r < 0)
                return r;
        repeat(space, key, n, &all);
        r = seal_check_any(space, &whole, n, blocks, all.n);
        if (r == 0)
                r = seal_blocks(space, &whole, n, blocks, all.words, all.n, NULL, NULL);
        if (r > 0)
                *pin = whole;
        return r;
}

int kvd_post_key(struct kvd_space *space, uint64_t salt, const void *key, uint32_t n,
                 struct kvd_block *blocks) {
        struct kvd_pin whole = {.group = KVD_GROUP_KEYED, .salt = salt};
        struct object all;
        int r = check_keyed(space, n);

        if (r < 0)
                return r;
        repeat(space, key, n, &all);
        r = seal_check_any(space, &whole, n, blocks, all.n);
        return r < 0 ? r : post_blocks(space, &whole, n, blocks, all.words, all.n);
}
