/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_REMOTE_H
#define KVD_BASE_REMOTE_H

/* Blocks in the messages between the daemon and its remote process (msg.def, remote_*). */

#include "ipc/base/layout.h"

/*
 * A block on the servers has a name of 128 bits: a keyed hash, which needs the machines' secret, of
 * the space's content, of the name of the block before it (0: it is the first; bidirectional: the
 * name of the whole prefix), and of its tokens.
 */
struct kvd_remote_item {
        struct kvd_key parent; /* name of the block before it, unless behind is set */
        struct kvd_key name;   /* get: name of the block */
        uint64_t root;         /* of its chain, as in struct kvd_desc (layout.h) */
        uint64_t offset;       /* of the block's memory in the descriptor */
        uint32_t file;         /* index of the descriptor in the message */
        uint32_t behind;       /* put: 1 + number of its parent's item in the same message, or 0 */
        uint32_t group, n_tokens;
};

/* Identifies the content of a space; its bytes are hashed. Equal spaces share their blocks. */
struct kvd_remote_content {
        struct kvd_shape geometry;
        char space[KVD_NAME_MAX + 1]; /* name of the space if the geometry has no fingerprint */
};

#define KVD_REMOTE_ITEMS 64u    /* items of one message, each with one descriptor at most */
#define KVD_REMOTE_TOKENS 8192u /* tokens of one message */
#define KVD_REMOTE_FOUND 512u   /* blocks that servers are asked for at once in a remote_find */
#define KVD_REMOTE_KEY 32u      /* bytes of a secret */
#define KVD_REMOTE_BYTES (UINT64_C(16) << 20) /* bytes of blocks in one message of several blocks */
#define KVD_REMOTE_MOST (UINT64_C(128) << 20) /* bytes of a block */

/*
 * The memory that comes with remote_find, since the tokens and names of a long bidirectional prefix
 * fit in no message. The daemon writes the tokens before the request, and the process the names
 * before its reply: that of the block before the first one that was looked for (0: none;
 * bidirectional: that of the prefix), then those of the blocks found, up to the first one missing.
 */
struct kvd_remote_chain {
        uint32_t tokens[KVD_WHOLE_TOKENS];
        struct kvd_key names[1 + KVD_WHOLE_BLOCKS];
};

#endif
