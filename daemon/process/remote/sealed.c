/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Names and records, by libcrypto. A record is decrypted directly into the block's memory, so that
 * its bytes are touched once. The block is not used before the record has been verified.
 */

#include "daemon/process/remote/sealed.h"

#include <errno.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <string.h>

#include "ipc/base/key.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define MAGIC UINT64_C(0x6d65720064766b) /* "kvd\0rem" */
#define VERSION 1u
#define PIECE (1 << 30) /* bytes of one call: libcrypto's sizes are ints */

struct mark {
        uint64_t magic, bytes; /* bytes: of the whole record */
        uint32_t version;
        uint8_t nonce[12], tag[16];
};
#define AUTHENTICATED offsetof(struct mark, nonce)

struct label {
        struct kvd_key parent;
        uint64_t root, block_bytes;
        uint32_t group, n_tokens;
        uint32_t tokens[KVD_MAX_BLOCK_TOKENS];
};

/* ---- keys and names -------------------------------------------------------------------------- */

static void hmac(const uint8_t *key, const void *data, size_t n, uint8_t *ret) {
        unsigned size = KVD_REMOTE_KEY;

        if (!HMAC(EVP_sha256(), key, KVD_REMOTE_KEY, data, n, ret, &size))
                abort();
}

void sealed_secret(const void *data, size_t bytes, uint8_t ret[static KVD_REMOTE_KEY]) {
        static const uint8_t none[KVD_REMOTE_KEY];

        hmac(none, data, bytes, ret);
}

void sealed_keys(const uint8_t secret[static KVD_REMOTE_KEY], const char *tenant,
                 const struct kvd_remote_content *content, struct sealed_keys *ret) {
        struct {
                char use[16], tenant[KVD_NAME_MAX + 1];
                struct kvd_remote_content content;
        } in;

        memset(&in, 0, sizeof in);
        strncpy(in.tenant, tenant, KVD_NAME_MAX);
        in.content = *content;
        memcpy(in.use, "kvd names", 9);
        hmac(secret, &in, sizeof in, ret->names);
        memcpy(in.use, "kvd records", 11);
        hmac(secret, &in, sizeof in, ret->records);
        memcpy(in.use, "kvd prefixes", 12);
        hmac(secret, &in, sizeof in, ret->prefixes);
}

static size_t label_bytes(uint32_t n_tokens) {
        return offsetof(struct label, tokens) + n_tokens * sizeof(uint32_t);
}

static void write_label(const struct kvd_remote_item *item, const uint32_t *tokens,
                        uint64_t block_bytes, struct label *ret) {
        *ret = (struct label){.parent = item->parent,
                              .root = item->root,
                              .block_bytes = block_bytes,
                              .group = item->group,
                              .n_tokens = item->n_tokens};
        memcpy(ret->tokens, tokens, item->n_tokens * sizeof *tokens);
}

struct kvd_key sealed_name(const struct sealed_keys *keys, const struct kvd_remote_item *item,
                           const uint32_t *tokens) {
        uint8_t hash[KVD_REMOTE_KEY];
        struct kvd_key name;
        struct label label;

        write_label(item, tokens, 0, &label);
        hmac(keys->names, &label, label_bytes(item->n_tokens), hash);
        memcpy(&name, hash, sizeof name);
        return name;
}

struct kvd_key sealed_prefix(const struct sealed_keys *keys, const uint32_t *tokens,
                             uint32_t n_tokens) {
        uint8_t hash[KVD_REMOTE_KEY];
        struct kvd_key name;

        hmac(keys->prefixes, tokens, n_tokens * sizeof *tokens, hash);
        memcpy(&name, hash, sizeof name);
        return name;
}

/* ---- records --------------------------------------------------------------------------------- */

uint64_t sealed_bytes(uint32_t n_tokens, uint64_t block_bytes) {
        return sizeof(struct mark) + label_bytes(n_tokens) + block_bytes;
}

/* A context that has processed the authenticated but unencrypted data. NULL: out of memory. */
static EVP_CIPHER_CTX *begin(const struct sealed_keys *keys, struct kvd_key name,
                             const struct mark *mark, bool seals) {
        EVP_CIPHER_CTX *context = EVP_CIPHER_CTX_new();
        uint8_t key[KVD_REMOTE_KEY];
        int n;

        hmac(keys->records, &name, sizeof name, key);
        if (context &&
            EVP_CipherInit_ex(context, EVP_aes_256_gcm(), NULL, key, mark->nonce, seals) &&
            EVP_CipherUpdate(context, NULL, &n, (const uint8_t *)mark, AUTHENTICATED) &&
            EVP_CipherUpdate(context, NULL, &n, (const uint8_t *)&name, sizeof name))
                return context;
        EVP_CIPHER_CTX_free(context);
        return NULL;
}

static bool go_through(EVP_CIPHER_CTX *context, uint8_t *to, const uint8_t *from, uint64_t bytes) {
        for (uint64_t at = 0; at < bytes; at += PIECE) {
                int n = (int)MIN(bytes - at, (uint64_t)PIECE);

                if (!EVP_CipherUpdate(context, to + at, &n, from + at, n))
                        return false;
        }
        return true;
}

static bool make(EVP_CIPHER_CTX *context, const struct label *label, const void *block,
                 uint64_t bytes, uint8_t *to, struct mark *mark) {
        size_t head = label_bytes(label->n_tokens);
        int n;

        if (!go_through(context, to + sizeof *mark, (const uint8_t *)label, head) ||
            !go_through(context, to + sizeof *mark + head, block, bytes) ||
            !EVP_CipherFinal_ex(context, to, &n) ||
            !EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_GCM_GET_TAG, sizeof mark->tag, mark->tag))
                return false;
        memcpy(to, mark, sizeof *mark);
        return true;
}

bool sealed_make(const struct sealed_keys *keys, const struct kvd_remote_item *item,
                 const uint32_t *tokens, const void *block, uint64_t bytes, uint8_t *to) {
        struct mark mark = {.magic = MAGIC,
                            .version = VERSION,
                            .bytes = sealed_bytes(item->n_tokens, bytes)};
        EVP_CIPHER_CTX *context;
        struct label label;
        bool made;

        if (sys->getrandom(mark.nonce, sizeof mark.nonce, 0) != (ssize_t)sizeof mark.nonce)
                return false;
        context = begin(keys, item->name, &mark, true);
        write_label(item, tokens, bytes, &label);
        made = context && make(context, &label, block, bytes, to, &mark);
        EVP_CIPHER_CTX_free(context);
        return made;
}

/* The label must equal the wanted one, tokens included, and the tag must fit the whole record. */
static bool is_right(EVP_CIPHER_CTX *context, const struct label *wanted, const uint8_t *record,
                     struct mark *mark, void *block, uint64_t bytes) {
        size_t head = label_bytes(wanted->n_tokens);
        struct label label;
        uint8_t none[16];
        int n;

        return go_through(context, (uint8_t *)&label, record + sizeof *mark, head) &&
               memcmp(&label, wanted, head) == 0 &&
               go_through(context, block, record + sizeof *mark + head, bytes) &&
               EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_GCM_SET_TAG, sizeof mark->tag, mark->tag) &&
               EVP_CipherFinal_ex(context, none, &n) > 0;
}

int sealed_open(const struct sealed_keys *keys, const struct kvd_remote_item *item,
                const uint32_t *tokens, const uint8_t *record, size_t size, void *block,
                uint64_t bytes) {
        EVP_CIPHER_CTX *context;
        struct label label;
        struct mark mark;
        bool right;

        if (size != sealed_bytes(item->n_tokens, bytes))
                return -EBADMSG;
        memcpy(&mark, record, sizeof mark);
        if (mark.magic != MAGIC || mark.version != VERSION || mark.bytes != size)
                return -EBADMSG;
        context = begin(keys, item->name, &mark, false);
        if (!context)
                return -ENOMEM;
        write_label(item, tokens, bytes, &label);
        right = is_right(context, &label, record, &mark, block, bytes);
        EVP_CIPHER_CTX_free(context);
        return right ? 0 : -EBADMSG;
}
