/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Computes keys of blocks in one pass over their tokens. All variants of the hash give the same
 * bits; the fastest one for the processor is used.
 */

#include "ipc/base/key.h"

#include "ipc/base/enums.h"
#include "ipc/base/wide.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "token ids are hashed as they lie in memory");

/*
 * In test builds that make collisions common, cuts a key to KVD_HASH_BITS bits with equal tags. The
 * multiplication spreads the bits over the word that buckets are chosen by; otherwise all keys
 * would share two buckets, and most blocks would get no entry.
 */
static struct kvd_key cut(struct kvd_key key) {
#if KVD_HASH_BITS < 64
        uint64_t bits = key.lo & ((UINT64_C(1) << KVD_HASH_BITS) - 1);

        return (struct kvd_key){bits * UINT64_C(0x9e3779b97f4a7c15), 0};
#else
        return key;
#endif
}

static struct kvd_key from_xxh128(XXH128_hash_t h) {
        return cut((struct kvd_key){h.low64, h.high64});
}

static struct kvd_key from_xxh64(uint64_t h) {
        return cut((struct kvd_key){h, h >> 32});
}

static struct kvd_key keyed(const struct kvd_index *ix, const void *data, size_t bytes) {
        return from_xxh128(XXH3_128bits_withSecret(data, bytes, ix->secret, KVD_SECRET_BYTES));
}

/* ---- long inputs ----------------------------------------------------------------------------- */

#define LONG_BYTES 256u /* from this length on, wide vectors are worth an indirect call */

const struct kvd_wide *kvd_wide_best(void) {
#if defined(__x86_64__)
        if (__builtin_cpu_supports("avx512f"))
                return &kvd_wide_avx512;
        if (__builtin_cpu_supports("avx2"))
                return &kvd_wide_avx2;
#endif
        return &kvd_wide_plain;
}

static struct kvd_key keyed_long(const struct kvd_index *ix, const void *data, size_t bytes) {
        return cut(kvd_wide_best()->hash(data, bytes, ix->secret));
}

static struct kvd_key keyed_tokens(const struct kvd_index *ix, const uint32_t *tokens, uint32_t n) {
        size_t bytes = (size_t)n * sizeof *tokens;

        return bytes >= LONG_BYTES ? keyed_long(ix, tokens, bytes) : keyed(ix, tokens, bytes);
}

/* ---- keys ------------------------------------------------------------------------------------ */

static bool paper(const struct kvd_index *ix) {
        return ix->keys == KVD_keys_paper;
}

struct kvd_key kvd_key_root(const struct kvd_index *ix, uint32_t group, uint64_t salt) {
        struct {
                char tag[4];
                uint32_t group;
                uint64_t salt;
        } in = {"kvd", group, salt};

        if (paper(ix))
                return from_xxh64(salt ? XXH64(&salt, sizeof salt, group) : group);
        return keyed(ix, &in, sizeof in);
}

struct kvd_key kvd_key_prefix(const struct kvd_index *ix, const uint32_t *tokens,
                              uint32_t n_tokens) {
        return paper(ix) ? from_xxh64(XXH64(tokens, (size_t)n_tokens * sizeof *tokens, 0)) :
                           keyed_tokens(ix, tokens, n_tokens);
}

struct kvd_key kvd_key_prefix_root(const struct kvd_index *ix, struct kvd_key prefix,
                                   uint32_t group) {
        struct {
                char tag[8];
                uint64_t group;
                struct kvd_key prefix;
        } in = {"kvdbidi", group, prefix};

        return paper(ix) ? from_xxh64(prefix.lo + group) : keyed(ix, &in, sizeof in);
}

/* Of the key before and a hash of tokens, which may be very many. */
static struct kvd_key behind(const struct kvd_index *ix, struct kvd_key before,
                             const uint32_t *words, uint32_t n) {
        struct {
                struct kvd_key before, own;
        } in = {.before = before};

        in.own = keyed_tokens(ix, words, n);
        return keyed(ix, &in, sizeof in);
}

struct kvd_key kvd_key_block(const struct kvd_index *ix, struct kvd_key parent,
                             const uint32_t *tokens, uint32_t n) {
        struct {
                struct kvd_key parent;
                uint32_t tokens[KVD_MAX_PLANE_TOKENS];
        } in;
        size_t bytes = (size_t)n * sizeof *tokens;

        if (paper(ix))
                return from_xxh64(XXH64(tokens, bytes, parent.lo));
        if (n > KVD_MAX_PLANE_TOKENS)
                return behind(ix, parent, tokens, n);
        in.parent = parent;
        memcpy(in.tokens, tokens, bytes);
        return keyed(ix, &in, sizeof in.parent + bytes);
}

struct kvd_key kvd_key_run(const struct kvd_index *ix, struct kvd_key before,
                           const uint32_t *tokens, uint32_t n, const uint32_t *packed) {
        return paper(ix) ? from_xxh64(XXH64(tokens, (size_t)n * sizeof *tokens, before.lo)) :
                           behind(ix, before, packed, ix->run_words);
}

uint64_t kvd_hint(uint64_t handle, uint32_t group, uint64_t root, const uint32_t *tokens,
                  uint32_t n) {
        uint64_t behind[3] = {handle, root, group};

        return XXH3_64bits_withSeed(tokens, n * sizeof *tokens, XXH3_64bits(behind, sizeof behind));
}

uint64_t kvd_hint_root(const uint32_t *tokens, uint32_t n_tokens) {
        return XXH3_64bits(tokens, n_tokens * sizeof *tokens);
}

uint64_t kvd_key_proof(const struct kvd_index *ix, const void *data, size_t bytes) {
        return XXH3_64bits_withSecret(data, bytes, ix->secret, KVD_SECRET_BYTES);
}
