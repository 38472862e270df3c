/* SPDX-License-Identifier: Apache-2.0 */

/* Built instead of peer_lmdb.c if LMDB is not installed; the results then say so. */

#include <errno.h>
#include <stddef.h>

#include "tests/bench/peers.h"

int lmdb_peer_new(const char *dir, uint64_t map_bytes, struct lmdb_peer **ret) {
        return -ENOSYS;
}

struct lmdb_peer *lmdb_peer_free(struct lmdb_peer *peer) {
        return NULL;
}

int lmdb_peer_fill(struct lmdb_peer *peer, uint64_t n_blocks) {
        return -ENOSYS;
}

int lmdb_peer_get(struct lmdb_peer *peer, const struct block_key *keys, uint32_t n, uint64_t *sum) {
        return -ENOSYS;
}

int lmdb_peer_put(struct lmdb_peer *peer, const struct block_key *keys, uint32_t n,
                  const void *value, size_t bytes) {
        return -ENOSYS;
}

int lmdb_peer_read(struct lmdb_peer *peer, struct block_key key, size_t bytes, uint64_t *sum) {
        return -ENOSYS;
}
