/* SPDX-License-Identifier: Apache-2.0 */

/* One object, whose bytes follow from its key, and lookups and fetches of it and of others. */

#include "tests/daemon/children/objects.h"

#include <poll.h>
#include <unistd.h>

#include "tests/lib/instance.h"
#include "tests/lib/oracle.h"
#include "tests/lib/suite.h"

const uint32_t object_tokens[] = {8, 256};

/* Beyond the vocabulary, as the words of a hash are. */
static const uint32_t key[8] = {UINT32_MAX, 0, 1, UINT32_MAX - 1, 70000, 70000, 5, 6};

kvd_space *object_space(kvd *handle, uint32_t block_tokens) {
        const struct kvd_geometry geometry = {.block_bytes = OBJECT_BYTES,
                                              .block_tokens = block_tokens,
                                              .vocab = 1000,
                                              .layout = "test.v1"};
        kvd_space *space;

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

int64_t object_fetch(kvd_space *space, uint64_t salt) {
        struct pollfd p = {.events = POLLIN};
        int64_t n = kvd_fetch_key(space, salt, key, OBJECT_BLOCKS, &p.fd);

        ck_assert_msg(n >= 0, "%s", kvd_error());
        if (p.fd < 0)
                return n;
        ck_assert_int_eq(poll(&p, 1, PATIENCE_MS), 1);
        close(p.fd);
        return n;
}
