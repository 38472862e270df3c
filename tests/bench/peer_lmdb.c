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
#include "tests/bench/peers.h"

struct lmdb_peer {
        struct peer peer;
        MDB_env *env;
        MDB_dbi dbi;
        MDB_txn *reader; /* reset between lookups */
};

static int error_of(int r) {
        return r > 0 ? -r : r ? -EIO : 0;
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

static int put(struct lmdb_peer *lmdb, struct block_key *keys, uint64_t n, MDB_val value,
               unsigned flags) {
        MDB_txn *txn;
        int r;

        r = mdb_txn_begin(lmdb->env, NULL, 0, &txn);
        if (r)
                return error_of(r);
        r = put_all(txn, lmdb->dbi, keys, n, value, flags);
        if (r) {
                mdb_txn_abort(txn);
                return error_of(r);
        }
        return error_of(mdb_txn_commit(txn));
}

static int by_bytes(const void *a, const void *b) {
        return memcmp(a, b, sizeof(struct block_key));
}

static int fill(struct peer *peer, uint64_t n_blocks) {
        MDB_val value = {.mv_size = sizeof PEER_VALUE, .mv_data = (void *)PEER_VALUE};
        struct block_key *keys;
        int r;

        keys = calloc(n_blocks, sizeof *keys);
        if (!keys)
                return -ENOMEM;
        for (uint64_t i = 0; i < n_blocks; i++)
                keys[i] = block_key(i);
        qsort(keys, n_blocks, sizeof *keys, by_bytes);
        r = put(container_of(peer, struct lmdb_peer, peer), keys, n_blocks, value, MDB_APPEND);
        free(keys);
        return r;
}

static int get_all(struct lmdb_peer *lmdb) {
        struct peer *peer = &lmdb->peer;
        uint32_t found = 0;

        for (; found < peer->n; found++) {
                MDB_val key = {.mv_size = sizeof *peer->keys, .mv_data = &peer->keys[found]}, value;

                if (mdb_get(lmdb->reader, lmdb->dbi, &key, &value))
                        break;
                peer->sum += peer->verb == PEER_READ ? sum_bytes(value.mv_data, value.mv_size) :
                                                       *(const uint8_t *)value.mv_data;
        }
        return (int)found;
}

static int run(struct peer *peer) {
        struct lmdb_peer *lmdb = container_of(peer, struct lmdb_peer, peer);
        MDB_val value = {.mv_size = peer->bytes, .mv_data = (void *)peer->value};
        int r;

        if (peer->verb == PEER_PUT) {
                r = put(lmdb, peer->keys, peer->n, value, 0);
                return r < 0 ? r : (int)peer->n;
        }
        if (mdb_txn_renew(lmdb->reader))
                return -EIO;
        r = get_all(lmdb);
        mdb_txn_reset(lmdb->reader);
        return r;
}

static void end(struct peer *peer) {
        struct lmdb_peer *lmdb = container_of(peer, struct lmdb_peer, peer);

        if (lmdb->reader)
                mdb_txn_abort(lmdb->reader);
        if (lmdb->env)
                mdb_env_close(lmdb->env);
        free(lmdb);
}

static int open_env(struct lmdb_peer *lmdb, const char *dir, uint64_t map_bytes) {
        unsigned flags = MDB_NOSYNC | MDB_WRITEMAP | MDB_NOTLS | MDB_NORDAHEAD;
        MDB_txn *txn;
        int r;

        if ((r = mdb_env_create(&lmdb->env)) || (r = mdb_env_set_mapsize(lmdb->env, map_bytes)) ||
            (r = mdb_env_open(lmdb->env, dir, flags, 0600)) ||
            (r = mdb_txn_begin(lmdb->env, NULL, 0, &txn)))
                return r;
        if ((r = mdb_dbi_open(txn, NULL, 0, &lmdb->dbi))) {
                mdb_txn_abort(txn);
                return r;
        }
        if ((r = mdb_txn_commit(txn)) ||
            (r = mdb_txn_begin(lmdb->env, NULL, MDB_RDONLY, &lmdb->reader)))
                return r;
        mdb_txn_reset(lmdb->reader);
        return 0;
}

int lmdb_peer_new(const char *dir, uint64_t map_bytes, struct peer **ret) {
        struct lmdb_peer *lmdb = calloc(1, sizeof *lmdb);
        int r;

        if (!lmdb)
                return -ENOMEM;
        lmdb->peer = (struct peer){.name = "lmdb", .fill = fill, .run = run, .end = end};
        r = error_of(open_env(lmdb, dir, map_bytes));
        if (r < 0)
                end(&lmdb->peer);
        else
                *ret = &lmdb->peer;
        return r;
}
