/* SPDX-License-Identifier: Apache-2.0 */

/*
 * LMDB at its fastest, without durability: no sync, a writable map, one read transaction that is
 * renewed, keys inserted in order so that pages are full.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <lmdb.h>

#include "ipc/base/util.h"
#include "tests/bench/harness.h"
#include "tests/bench/peers.h"

struct lmdb_peer {
        MDB_env *env;
        MDB_dbi dbi;
        MDB_txn *reader; /* reset between lookups */
};

static int error_of(int r) {
        return r > 0 ? -r : r ? -EIO : 0;
}

static int open_env(struct lmdb_peer *peer, const char *dir, uint64_t map_bytes) {
        MDB_txn *txn;
        int r;

        if ((r = mdb_env_create(&peer->env)))
                return r;
        if ((r = mdb_env_set_mapsize(peer->env, map_bytes)))
                return r;
        if ((r = mdb_env_open(peer->env, dir, MDB_NOSYNC | MDB_WRITEMAP | MDB_NOTLS | MDB_NORDAHEAD,
                              0600)))
                return r;
        if ((r = mdb_txn_begin(peer->env, NULL, 0, &txn)))
                return r;
        if ((r = mdb_dbi_open(txn, NULL, 0, &peer->dbi))) {
                mdb_txn_abort(txn);
                return r;
        }
        if ((r = mdb_txn_commit(txn)))
                return r;
        if ((r = mdb_txn_begin(peer->env, NULL, MDB_RDONLY, &peer->reader)))
                return r;
        mdb_txn_reset(peer->reader);
        return 0;
}

int lmdb_peer_new(const char *dir, uint64_t map_bytes, struct lmdb_peer **ret) {
        struct lmdb_peer *peer = calloc(1, sizeof *peer);
        int r;

        if (!peer)
                return -ENOMEM;
        r = error_of(open_env(peer, dir, map_bytes));
        if (r < 0) {
                lmdb_peer_free(peer);
                return r;
        }
        *ret = peer;
        return 0;
}

struct lmdb_peer *lmdb_peer_free(struct lmdb_peer *peer) {
        if (!peer)
                return NULL;
        if (peer->reader)
                mdb_txn_abort(peer->reader);
        if (peer->env)
                mdb_env_close(peer->env);
        free(peer);
        return NULL;
}

static int by_bytes(const void *a, const void *b) {
        return memcmp(a, b, sizeof(struct block_key));
}

static int put_all(MDB_txn *txn, MDB_dbi dbi, struct block_key *keys, uint64_t n, MDB_val value,
                   unsigned flags) {
        int r = 0;

        for (uint64_t i = 0; i < n && !r; i++) {
                MDB_val key = {.mv_size = sizeof *keys, .mv_data = &keys[i]}, data = value;

                r = mdb_put(txn, dbi, &key, &data, flags);
        }
        return r;
}

static int put(struct lmdb_peer *peer, struct block_key *keys, uint64_t n, MDB_val value,
               unsigned flags) {
        MDB_txn *txn;
        int r;

        r = mdb_txn_begin(peer->env, NULL, 0, &txn);
        if (r)
                return error_of(r);
        r = put_all(txn, peer->dbi, keys, n, value, flags);
        if (r) {
                mdb_txn_abort(txn);
                return error_of(r);
        }
        return error_of(mdb_txn_commit(txn));
}

int lmdb_peer_fill(struct lmdb_peer *peer, uint64_t n_blocks) {
        char value[PEER_VALUE_BYTES] = "a block's place";
        struct block_key *keys;
        int r;

        keys = calloc(n_blocks, sizeof *keys);
        if (!keys)
                return -ENOMEM;
        for (uint64_t i = 0; i < n_blocks; i++)
                keys[i] = block_key(i);
        qsort(keys, n_blocks, sizeof *keys, by_bytes);
        r = put(peer, keys, n_blocks, (MDB_val){.mv_size = sizeof value, .mv_data = value},
                MDB_APPEND);
        free(keys);
        return r;
}

int lmdb_peer_get(struct lmdb_peer *peer, const struct block_key *keys, uint32_t n, uint64_t *sum) {
        int found = 0;

        if (mdb_txn_renew(peer->reader))
                return -EIO;
        for (uint32_t i = 0; i < n; i++) {
                MDB_val key = {.mv_size = sizeof *keys, .mv_data = (void *)&keys[i]}, value;

                if (mdb_get(peer->reader, peer->dbi, &key, &value))
                        break;
                *sum += *(const uint8_t *)value.mv_data;
                found++;
        }
        mdb_txn_reset(peer->reader);
        return found;
}

int lmdb_peer_put(struct lmdb_peer *peer, const struct block_key *keys, uint32_t n,
                  const void *value, size_t bytes) {
        int r = put(peer, (struct block_key *)keys, n,
                    (MDB_val){.mv_size = bytes, .mv_data = (void *)value}, 0);

        return r < 0 ? r : (int)n;
}

int lmdb_peer_read(struct lmdb_peer *peer, struct block_key key, size_t bytes, uint64_t *sum) {
        MDB_val k = {.mv_size = sizeof key, .mv_data = &key}, value;
        int found = 0;

        if (mdb_txn_renew(peer->reader))
                return -EIO;
        if (mdb_get(peer->reader, peer->dbi, &k, &value) == 0 && value.mv_size == bytes) {
                *sum += sum_bytes(value.mv_data, bytes);
                found = 1;
        }
        mdb_txn_reset(peer->reader);
        return found;
}
