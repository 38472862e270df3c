/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_SEALED_H
#define KVD_DAEMON_PROCESS_REMOTE_SEALED_H

/*
 * What lies on the servers, version 1. A name is an HMAC-SHA-256, cut to 128 bits, of what the
 * block is (ipc/base/remote.h). A record is
 *
 *      mark      magic, version, size, nonce, tag; little-endian
 *      label     what it is, its tokens, and its bytes: AES-256-GCM, with a key of its own that
 *                comes from the name, and the mark and the name as what is authenticated besides
 *
 * Keys come from the secret that machines share, and from the tenant. Without a secret anybody can
 * make them: then records are checked against accidents alone.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/base/remote.h"

struct sealed_keys { /* of a tenant's spaces of one kind */
        uint8_t names[KVD_REMOTE_KEY], records[KVD_REMOTE_KEY], prefixes[KVD_REMOTE_KEY];
};

/* Of a file's bytes; there may be none. */
void sealed_secret(const void *data, size_t bytes, uint8_t ret[static KVD_REMOTE_KEY]);
void sealed_keys(const uint8_t secret[static KVD_REMOTE_KEY], const char *tenant,
                 const struct kvd_remote_content *content, struct sealed_keys *ret);

struct kvd_key sealed_name(const struct sealed_keys *keys, const struct kvd_remote_item *item,
                           const uint32_t *tokens);

/* Stands for the block before the first one of a bidirectional prefix with these tokens. */
struct kvd_key sealed_prefix(const struct sealed_keys *keys, const uint32_t *tokens,
                             uint32_t n_tokens);

/* Of a record, all in all. */
uint64_t sealed_bytes(uint32_t n_tokens, uint64_t block_bytes);

/* Writes sealed_bytes. False: there are no random numbers, or no memory. */
bool sealed_make(const struct sealed_keys *keys, const struct kvd_remote_item *item,
                 const uint32_t *tokens, const void *block, uint64_t bytes, uint8_t *to);

/*
 * Fills the block. 0; -EBADMSG: it is not the record of that item, as it was; what is in the block
 * then is nonsense.
 */
int sealed_open(const struct sealed_keys *keys, const struct kvd_remote_item *item,
                const uint32_t *tokens, const uint8_t *record, size_t size, void *block,
                uint64_t bytes);

#endif
