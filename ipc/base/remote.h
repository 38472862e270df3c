/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_REMOTE_H
#define KVD_BASE_REMOTE_H

/* What the daemon and its remote process tell each other of blocks (msg.def, remote_*). */

#include "ipc/base/layout.h"

/*
 * A block on the servers is called by its name: 128 bits that only they can compute who have the
 * key, of what the space is, of the name of the block before it (0: it is the first; bidirectional:
 * that of the whole prefix), and of its tokens.
 */
struct kvd_remote_item {
        struct kvd_key parent; /* name of the block before it, unless behind says which one that is */
        struct kvd_key name;   /* get */
        uint64_t root;         /* of its chain, as in blocks (layout.h) */
        uint64_t offset;       /* of the block, in one of the descriptors */
        uint32_t file;         /* ... which one */
        uint32_t behind;       /* put: item of the same message that it is behind, plus 1; 0: none */
        uint32_t group, n_tokens;
};

/* What a space is: only blocks of an equal one are of use to it. Its bytes are hashed. */
struct kvd_remote_content {
        struct kvd_shape geometry;
        char space[KVD_NAME_MAX + 1]; /* its name, if the geometry has no fingerprint */
};

#define KVD_REMOTE_ITEMS 64u   /* of one message, with one descriptor each at most */
#define KVD_REMOTE_TOKENS 8192u
#define KVD_REMOTE_FOUND 512u  /* blocks that one remote_find looks for */
#define KVD_REMOTE_KEY 32u     /* bytes of a secret */
#define KVD_REMOTE_BYTES (UINT64_C(16) << 20) /* of blocks in one message, unless it is one */
#define KVD_REMOTE_MOST (UINT64_C(128) << 20) /* of a block */

#endif
