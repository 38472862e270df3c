/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_KEY_H
#define KVD_BASE_KEY_H

/*
 * Keys find candidates; comparing tokens decides. Nothing but the index's hash tables relies on
 * keys, so a collision, accidental or deliberate, costs only a miss (tests run with 8-bit keys).
 *
 *      keys = serve    XXH3-128 with the space's 192-byte secret; token ids as little-endian u32
 *        block         H(parent's key, tokens of the block); H(parent's key, H(tokens)) if the block
 *                      has more than 256
 *        run           H(key of the previous run, H(tokens of the run's 16 blocks, packed))
 *        prefix        H(all tokens of a bidirectional prefix)
 *      keys = paper    XXH64 as in BiCache (section 4.2 and its code): prefix = XXH64(ids, seed 0);
 *                      block and run: XXH64(tokens, seed = previous key)
 *
 * A chain starts from a root key: made of layer group and salt (causal), or of group and whole
 * prefix (bidirectional). So blocks of different bidirectional prefixes have different keys even if
 * their tokens are equal: in a bidirectional model every key and value depends on the whole prefix.
 */

#include "ipc/base/layout.h"

#ifndef KVD_HASH_BITS
#define KVD_HASH_BITS 128 /* 8: tests make collisions common */
#endif

struct kvd_key kvd_key_root(const struct kvd_index *ix, uint32_t group, uint64_t salt);
struct kvd_key kvd_key_prefix(const struct kvd_index *ix, const uint32_t *tokens,
                              uint32_t n_tokens);
struct kvd_key kvd_key_prefix_root(const struct kvd_index *ix, struct kvd_key prefix,
                                   uint32_t group);
struct kvd_key kvd_key_block(const struct kvd_index *ix, struct kvd_key parent,
                             const uint32_t *tokens, uint32_t n);
/* packed: the same n tokens in the format of a run (pack.h) */
struct kvd_key kvd_key_run(const struct kvd_index *ix, struct kvd_key before,
                           const uint32_t *tokens, uint32_t n, const uint32_t *packed);

/*
 * The hint of a record (layout.h): a block with these tokens, behind the record with that handle
 * (0: the first record of a chain). It needs no secret: a forged collision only costs a request
 * that finds nothing.
 */
uint64_t kvd_hint(uint64_t handle, uint32_t group, uint64_t root, const uint32_t *tokens,
                  uint32_t n);

/* The root of a bidirectional prefix's records. Collisions are harmless: tokens are compared. */
uint64_t kvd_hint_root(const uint32_t *tokens, uint32_t n_tokens);

/* A MAC of these bytes with the space's secret. */
uint64_t kvd_key_proof(const struct kvd_index *ix, const void *data, size_t bytes);

static inline bool kvd_key_equal(struct kvd_key a, struct kvd_key b) {
        return a.lo == b.lo && a.hi == b.hi;
}

#endif
