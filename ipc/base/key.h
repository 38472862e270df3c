/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_KEY_H
#define KVD_BASE_KEY_H

/*
 * Keys find candidates; tokens decide. The index is hashed by them and nothing else trusts them, so
 * that a collision, made or met, costs a miss (tests run with 8-bit keys).
 *
 *      keys = serve    XXH3-128 with the space's 192-byte secret; token ids as little-endian u32
 *        block         H(parent's key, tokens of the block)
 *        run           H(key of the run before, H(tokens of the run's 16 blocks, packed))
 *        prefix        H(all tokens of a bidirectional prefix)
 *      keys = paper    XXH64 as in BiCache (section 4.2 and its code): prefix = XXH64(ids, seed 0);
 *                      block and run: XXH64(tokens, seed = key before)
 *
 * A chain starts from a root: of layer group and salt (causal), or of group and whole prefix
 * (bidirectional). The latter makes blocks of different prefixes strangers to each other even where
 * their tokens are alike, which is right: in a bidirectional model every key and value depends on
 * the whole prefix.
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
/* packed: the same n tokens as a run holds them (pack.h) */
struct kvd_key kvd_key_run(const struct kvd_index *ix, struct kvd_key before,
                           const uint32_t *tokens, uint32_t n, const uint32_t *packed);

/*
 * What a record of the file is found by without the file (layout.h): full blocks of these tokens,
 * behind the record with that handle (0: it is a chain's first). No secret: who makes two alike
 * gains that somebody asks in vain.
 */
uint64_t kvd_hint(uint64_t handle, uint32_t group, uint64_t root, const uint32_t *tokens,
                  uint32_t n);

/* The root of records of a bidirectional prefix: prefixes that have the same are strangers all the same. */
uint64_t kvd_hint_root(const uint32_t *tokens, uint32_t n_tokens);

/* Says that whoever knew the space's secret wrote these bytes. */
uint64_t kvd_key_proof(const struct kvd_index *ix, const void *data, size_t bytes);

static inline bool kvd_key_equal(struct kvd_key a, struct kvd_key b) {
        return a.lo == b.lo && a.hi == b.hi;
}

#endif
