/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The object's bytes follow from its key, the chain's from its tokens. The chain begins with words
 * of the key as far as they are in the vocabulary.
 */

#include "tests/daemon/children/objects.h"

#include <unistd.h>

#include "tests/daemon/children/fetched.h"
#include "tests/lib/instance.h"
#include "tests/lib/oracle.h"
#include "tests/lib/suite.h"

const uint32_t object_tokens[] = {8, 2144, 4096};

static uint32_t bt; /* tokens of a block */

/* Beyond the vocabulary, as the words of a hash are. */
static const uint32_t key[8] = {UINT32_MAX, 0, 1, UINT32_MAX - 1, 70000, 70000, 5, 6};

kvd_space *object_space(kvd *handle, uint32_t block_tokens) {
        const struct kvd_geometry geometry = {.block_bytes = OBJECT_BYTES,
                                              .block_tokens = block_tokens,
                                              .vocab = 1000,
                                              .layout = "test.v1"};
        kvd_space *space;

        bt = block_tokens;
        ck_assert_msg(kvd_space_open(handle, "objects", &geometry, NULL, &space) == 0, "%s",
                      kvd_error());
        return space;
}

static uint64_t seed_of(uint32_t block) {
        return oracle_seed(block, key, sizeof key / sizeof *key);
}

void object_seal(kvd_space *space) {
        struct kvd_pin pin = {.salt = OBJECT_SALT};
        struct kvd_block blocks[OBJECT_BLOCKS];

        for (uint32_t i = 0; i < OBJECT_BLOCKS; i++) {
                ck_assert_msg(kvd_alloc(space, 1, &blocks[i]) == 1, "%s", kvd_error());
                oracle_fill(blocks[i].data, OBJECT_BYTES, seed_of(i));
        }
        ck_assert_msg(kvd_seal_key(space, key, OBJECT_BLOCKS, blocks, &pin) > 0, "%s", kvd_error());
        kvd_unpin(space, &pin);
}

static bool look_up(kvd_space *space, uint64_t salt, uint32_t *ids, struct kvd_pin *pin) {
        *pin = (struct kvd_pin){.salt = salt};
        kvd_catch_up(space);
        return kvd_lookup_keys(space, key, 1, OBJECT_BLOCKS, ids, pin) == 1;
}

bool object_is_there(kvd_space *space) {
        uint32_t ids[OBJECT_BLOCKS];
        struct kvd_pin pin;
        bool there;

        ck_assert(!look_up(space, OBJECT_SALT + 1, ids, &pin));
        there = look_up(space, OBJECT_SALT, ids, &pin);
        for (uint32_t i = 0; there && i < OBJECT_BLOCKS; i++)
                ck_assert_uint_eq(oracle_wrong(kvd_pin_block(&pin, ids[i]), OBJECT_BYTES,
                                               seed_of(i)),
                                  0);
        kvd_unpin(space, &pin);
        return there;
}

uint32_t object_below(kvd_space *space) {
        uint32_t ids[OBJECT_BLOCKS];
        struct kvd_pin pin;

        ck_assert(!look_up(space, OBJECT_SALT, ids, &pin));
        return pin.n_below;
}

static int64_t wait_for(int64_t n, int fd) {
        fetch_ended(n, fd);
        return n;
}

int64_t object_fetch(kvd_space *space, uint64_t salt) {
        int fd;
        int64_t n = kvd_fetch_key(space, salt, key, OBJECT_BLOCKS, &fd);

        return wait_for(n, fd);
}

/* ---- the chain ------------------------------------------------------------------------------- */

static uint32_t tokens[OBJECT_BLOCKS * 4096];

static void make_tokens(void) {
        for (uint32_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
                tokens[i] = key[i % 8] < 1000 ? key[i % 8] : i % 1000;
}

void beside_seal(kvd_space *space) {
        struct kvd_pin pin = {.salt = OBJECT_SALT};
        struct kvd_block blocks[OBJECT_BLOCKS];

        make_tokens();
        for (uint32_t i = 0; i < OBJECT_BLOCKS; i++) {
                ck_assert_msg(kvd_alloc(space, 1, &blocks[i]) == 1, "%s", kvd_error());
                oracle_fill(blocks[i].data, OBJECT_BYTES, oracle_seed(2, tokens, (i + 1) * bt));
        }
        ck_assert_msg(kvd_seal(space, &pin, OBJECT_BLOCKS, blocks, tokens, OBJECT_BLOCKS * bt) > 0,
                      "%s", kvd_error());
        kvd_unpin(space, &pin);
}

uint32_t beside_blocks(kvd_space *space) {
        struct kvd_pin pin = {.salt = OBJECT_SALT};
        uint32_t ids[OBJECT_BLOCKS], n;

        kvd_catch_up(space);
        ck_assert_int_ge(kvd_lookup(space, 0, tokens, OBJECT_BLOCKS * bt, ids, OBJECT_BLOCKS, &pin),
                         0);
        n = pin.n_blocks;
        for (uint32_t i = 0; i < n; i++)
                ck_assert_uint_eq(oracle_wrong(kvd_pin_block(&pin, ids[i]), OBJECT_BYTES,
                                               oracle_seed(2, tokens, (i + 1) * bt)),
                                  0);
        kvd_unpin(space, &pin);
        return n;
}

int64_t beside_fetch(kvd_space *space) {
        int fd;
        int64_t n = kvd_fetch(space, 0, OBJECT_SALT, tokens, OBJECT_BLOCKS * bt, &fd);

        return wait_for(n, fd);
}
