/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/client/killpoints/chains.h"

#include <errno.h>

#include "ipc/base/util.h"
#include "tests/lib/oracle.h"

#define BLOCK_BYTES 256u
#define VOCAB 5000u

const struct kvd_geometry chain_geometry = {.layers = 1,
                                            .kv_heads = 1,
                                            .head_dim = 8,
                                            .block_tokens = BT,
                                            .dtype = KVD_F32,
                                            .vocab = VOCAB};

void chain_tokens(uint32_t chain, uint32_t n, uint32_t *ret) {
        for (uint32_t i = 0; i < n; i++) {
                uint32_t owner = i < TRUNK * BT ? chain / 4 : 1000 + chain;

                ret[i] = (i * 37 + owner * 101) % VOCAB;
        }
}

static uint64_t seed_of(const uint32_t *tokens, uint32_t n_tokens, bool whole, uint32_t block) {
        uint32_t end = MIN((block + 1) * BT, n_tokens);

        return whole ? oracle_seed(oracle_seed(7, tokens, n_tokens) + block, tokens, end) :
                       oracle_seed(3, tokens, end);
}

void chain_fill(const uint32_t *tokens, uint32_t n_tokens, bool whole, uint32_t first, uint32_t n,
                struct kvd_block *blocks) {
        for (uint32_t i = 0; i < n; i++)
                oracle_fill(blocks[i].data, BLOCK_BYTES,
                            seed_of(tokens, n_tokens, whole, first + i));
}

size_t chain_wrong(const struct kvd_pin *pin, const uint32_t *ids, const uint32_t *tokens,
                   bool whole) {
        size_t wrong = 0;

        for (uint32_t i = 0; i < pin->n_blocks; i++)
                wrong += oracle_wrong(kvd_pin_block(pin, ids[i]), BLOCK_BYTES,
                                      seed_of(tokens, pin->n_tokens, whole, i));
        return wrong;
}

size_t blocks_wrong(const uint32_t *tokens, uint32_t n_tokens, bool whole, uint32_t first,
                    uint32_t n, const struct kvd_block *blocks) {
        size_t wrong = 0;

        for (uint32_t i = 0; i < n; i++)
                wrong += oracle_wrong(blocks[i].data, BLOCK_BYTES,
                                      seed_of(tokens, n_tokens, whole, first + i));
        return wrong;
}

int take_blocks(struct kvd_space *space, uint32_t n, struct kvd_block *blocks) {
        uint32_t got = 0;

        while (got < n) {
                int r = kvd_alloc(space, n - got, blocks + got);

                if (r < 0) {
                        kvd_free(space, got, blocks);
                        return r;
                }
                got += (uint32_t)r;
        }
        return 0;
}

int chain_publish(struct kvd_space *space, struct kvd_pin *pin, const uint32_t *tokens,
                  uint32_t n_tokens, bool whole) {
        uint32_t n = DIV_UP(n_tokens, BT) - pin->n_blocks, from = pin->n_tokens;
        struct kvd_block blocks[CHAIN_BLOCKS + 1];
        int r;

        if (n == 0)
                return 0;
        r = take_blocks(space, n, blocks);
        if (r < 0)
                return r;
        chain_fill(tokens, n_tokens, whole, pin->n_blocks, n, blocks);
        r = kvd_seal(space, pin, n, blocks, tokens + from, n_tokens - from);
        if (r < 0)
                kvd_free(space, n, blocks);
        return r;
}
