/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/base/key.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#ifndef KVD_HASH_BITS
#define KVD_HASH_BITS 128
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "token ids are hashed as they lie in memory");

/* What is left of a key in builds that make collisions common. */
static struct kvd_key cut(struct kvd_key key) {
#if KVD_HASH_BITS < 64
        return (struct kvd_key){key.lo & ((UINT64_C(1) << KVD_HASH_BITS) - 1), 0};
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

static bool paper(const struct kvd_index *ix) {
        return ix->keys == KVD_KEYS_PAPER;
}

struct kvd_key kvd_key_root(const struct kvd_index *ix, uint32_t group) {
        struct {
                char tag[8];
                uint64_t group;
        } in = {"kvdroot", group};

        return paper(ix) ? from_xxh64(group) : keyed(ix, &in, sizeof in);
}

struct kvd_key kvd_key_prefix(const struct kvd_index *ix, const uint32_t *tokens, uint32_t n_tokens) {
        size_t bytes = (size_t)n_tokens * sizeof *tokens;

        return paper(ix) ? from_xxh64(XXH64(tokens, bytes, 0)) : keyed(ix, tokens, bytes);
}

struct kvd_key kvd_key_prefix_root(const struct kvd_index *ix, struct kvd_key prefix, uint32_t group) {
        struct {
                char tag[8];
                uint64_t group;
                struct kvd_key prefix;
        } in = {"kvdbidi", group, prefix};

        return paper(ix) ? from_xxh64(prefix.lo + group) : keyed(ix, &in, sizeof in);
}

struct kvd_key kvd_key_block(const struct kvd_index *ix, struct kvd_key parent, const uint32_t *tokens, uint32_t n) {
        struct {
                struct kvd_key parent;
                uint32_t tokens[KVD_MAX_BLOCK_TOKENS];
        } in;
        size_t bytes = (size_t)n * sizeof *tokens;

        if (paper(ix))
                return from_xxh64(XXH64(tokens, bytes, parent.lo));
        in.parent = parent;
        memcpy(in.tokens, tokens, bytes);
        return keyed(ix, &in, sizeof in.parent + bytes);
}

struct kvd_key kvd_key_run(const struct kvd_index *ix, struct kvd_key before, const uint32_t *tokens, uint32_t n) {
        struct {
                struct kvd_key before, own;
        } in = {.before = before};

        if (paper(ix))
                return from_xxh64(XXH64(tokens, (size_t)n * sizeof *tokens, before.lo));
        in.own = keyed(ix, tokens, (size_t)n * sizeof *tokens);
        return keyed(ix, &in, sizeof in);
}
