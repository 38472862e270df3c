/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_SEALED_H
#define KVD_DAEMON_PROCESS_REMOTE_SEALED_H

/*
 * The format of data on the servers, version 1. A name is an HMAC-SHA-256, cut to 128 bits, of what
 * identifies the block (ipc/base/remote.h). A record consists of
 *
 *      mark      magic, size, version, nonce, tag; little-endian
 *      label     what identifies the block, and its tokens
 *      block     its bytes
 *
 * AES-256-GCM encrypts label and block with a key derived from the name. Magic, size, version and
 * name are authenticated in addition.
 *
 * Keys derive from the secret that machines share, the tenant and the content of the space. Without
 * a secret anybody can compute them: then records are only protected against accidents.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/base/remote.h"

struct sealed_keys { /* for a tenant's spaces with the same content */
        uint8_t names[KVD_REMOTE_KEY], records[KVD_REMOTE_KEY], prefixes[KVD_REMOTE_KEY];
};

/* Derives the secret from a file's bytes, or from no bytes. */
void sealed_secret(const void *data, size_t bytes, uint8_t ret[static KVD_REMOTE_KEY]);
void sealed_keys(const uint8_t secret[static KVD_REMOTE_KEY], const char *tenant,
                 const struct kvd_remote_content *content, struct sealed_keys *ret);

struct kvd_key sealed_name(const struct sealed_keys *keys, const struct kvd_remote_item *item,
                           const uint32_t *tokens);

/* The name that a bidirectional prefix with these tokens has as parent of its first block. */
struct kvd_key sealed_prefix(const struct sealed_keys *keys, const uint32_t *tokens,
                             uint32_t n_tokens);

/* Size of a whole record. */
uint64_t sealed_bytes(uint32_t n_tokens, uint64_t block_bytes);

/* Writes a record of sealed_bytes bytes. False: no random numbers, or no memory. */
bool sealed_make(const struct sealed_keys *keys, const struct kvd_remote_item *item,
                 const uint32_t *tokens, const void *block, uint64_t bytes, uint8_t *to);

/*
 * Fills the block. -EBADMSG: the record is damaged or belongs to another item; -ENOMEM. The block's
 * contents are undefined then.
 */
int sealed_open(const struct sealed_keys *keys, const struct kvd_remote_item *item,
                const uint32_t *tokens, const uint8_t *record, size_t size, void *block,
                uint64_t bytes);

#endif
