/* SPDX-License-Identifier: Apache-2.0 */

#include "tests/daemon/children/deep.h"

#include "tests/daemon/children/fetched.h"
#include "tests/lib/oracle.h"
#include "tests/lib/suite.h"

#define MOST (DEEP_TOKENS / 16)

uint32_t deep_block_tokens = 64;

const uint32_t *deep_tokens(void) {
        static uint32_t tokens[DEEP_TOKENS];

        for (uint32_t i = 0; i < DEEP_TOKENS; i++)
                tokens[i] = 7 * i;
        return tokens;
}

static uint64_t seed_of(uint32_t block) {
        return oracle_seed(block, (const uint32_t[]){DEEP_TOKENS}, 1);
}

kvd_space *deep_space(kvd *handle, uint32_t kind) {
        const struct kvd_space_options options = {.kind = kind};
        const struct kvd_geometry geometry = {.block_bytes = DEEP_BLOCK_BYTES,
                                              .block_tokens = deep_block_tokens,
                                              .layout = "deep.v1"};
        kvd_space *space;

        ck_assert_msg(kvd_space_open(handle, "deep", &geometry, &options, &space) == 0, "%s",
                      kvd_error());
        return space;
}

void deep_seal(kvd_space *space, uint32_t n_blocks) {
        static struct kvd_block blocks[MOST];
        struct kvd_pin pin = {0};
        int r;

        for (uint32_t n = 0; n < n_blocks; n += (uint32_t)r) {
                r = kvd_alloc(space, n_blocks - n, blocks + n);
                ck_assert_msg(r > 0, "%s", kvd_error());
        }
        for (uint32_t i = 0; i < n_blocks; i++)
                oracle_fill(blocks[i].data, DEEP_BLOCK_BYTES, seed_of(i));
        ck_assert_msg(kvd_seal(space, &pin, n_blocks, blocks, deep_tokens(),
                               n_blocks * deep_block_tokens) >= 0,
                      "%s", kvd_error());
        kvd_unpin(space, &pin);
}

uint32_t deep_resident(kvd_space *space, uint32_t *below) {
        static uint32_t ids[MOST];
        struct kvd_pin pin = {0};
        int64_t n;

        kvd_catch_up(space);
        n = kvd_lookup(space, 0, deep_tokens(), DEEP_TOKENS, ids, MOST, &pin);
        ck_assert_int_ge(n, 0);
        for (uint32_t i = 0; i < n / deep_block_tokens; i++)
                ck_assert_uint_eq(oracle_wrong(kvd_pin_block(&pin, ids[i]), DEEP_BLOCK_BYTES,
                                               seed_of(i)),
                                  0);
        *below = pin.n_below;
        kvd_unpin(space, &pin);
        return (uint32_t)n;
}

bool deep_fetch(kvd_space *space) {
        int fd;
        int64_t n = kvd_fetch(space, 0, 0, deep_tokens(), DEEP_TOKENS, &fd);

        return fetch_ended(n, fd);
}
