/* SPDX-License-Identifier: Apache-2.0 */

/*
 * LMDB at its fastest, without durability: no sync, a writable map, one read transaction that is
 * renewed, keys inserted in order so that pages are full, values copied past the caches into the map.
 * Either with a record for each block, or with what kvd has: one for each run of 16 blocks, with its
 * tokens, which are compared.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <lmdb.h>

#include "client/kvd.h"
#include "ipc/base/util.h"
#include "tests/bench/peers.h"

struct run_record {
        uint32_t ids[RUN_BLOCKS];
        uint32_t tokens[RUN_TOKENS];
};

struct lmdb_peer {
        struct peer peer;
        bool runs;
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

                r = mdb_put(txn, dbi, &key, &data, flags | MDB_RESERVE);
                if (!r)
                        kvd_copy(data.mv_data, value.mv_data, value.mv_size);
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

static int fill_blocks(struct lmdb_peer *lmdb, uint64_t n_blocks) {
        MDB_val value = {.mv_size = sizeof PEER_VALUE, .mv_data = (void *)PEER_VALUE};
        struct block_key *keys;
        int r;

        keys = calloc(n_blocks, sizeof *keys);
        if (!keys)
                return -ENOMEM;
        for (uint64_t i = 0; i < n_blocks; i++)
                keys[i] = block_key(i);
        qsort(keys, n_blocks, sizeof *keys, by_bytes);
        r = put(lmdb, keys, n_blocks, value, MDB_APPEND);
        free(keys);
        return r;
}

/* Runs are named after their last block. */
static int put_runs(MDB_txn *txn, MDB_dbi dbi, uint64_t n_runs) {
        struct run_record record;
        int r = 0;

        for (uint64_t run = 0; run < n_runs && !r; run++) {
                uint64_t first = run * RUN_BLOCKS;
                struct block_key name = block_key(first + RUN_BLOCKS - 1);
                MDB_val key = {.mv_size = sizeof name, .mv_data = &name},
                        value = {.mv_size = sizeof record, .mv_data = &record};

                for (uint32_t i = 0; i < RUN_BLOCKS; i++) {
                        record.ids[i] = (uint32_t)(first + i);
                        block_tokens(first + i, record.tokens + (size_t)i * BLOCK_TOKENS);
                }
                r = mdb_put(txn, dbi, &key, &value, 0);
        }
        return r;
}

static int fill_runs(struct lmdb_peer *lmdb, uint64_t n_runs) {
        MDB_txn *txn;
        int r = mdb_txn_begin(lmdb->env, NULL, 0, &txn);

        if (r)
                return error_of(r);
        r = put_runs(txn, lmdb->dbi, n_runs);
        if (r)
                mdb_txn_abort(txn);
        else
                r = mdb_txn_commit(txn);
        return error_of(r);
}

static int fill(struct peer *peer, uint64_t n_blocks) {
        struct lmdb_peer *lmdb = container_of(peer, struct lmdb_peer, peer);

        return lmdb->runs ? fill_runs(lmdb, n_blocks / RUN_BLOCKS) : fill_blocks(lmdb, n_blocks);
}

static bool is_run(const struct run_record *run, const uint32_t *tokens) {
        return memcmp(run->tokens, tokens, sizeof run->tokens) == 0;
}

static int get_all(struct lmdb_peer *lmdb) {
        struct peer *peer = &lmdb->peer;
        uint32_t found = 0;

        for (; found < peer->n; found++) {
                MDB_val key = {.mv_size = sizeof *peer->keys, .mv_data = &peer->keys[found]}, value;

                if (mdb_get(lmdb->reader, lmdb->dbi, &key, &value))
                        break;
                if (lmdb->runs && !is_run(value.mv_data, peer->tokens + (size_t)found * RUN_TOKENS))
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

int lmdb_peer_new(const char *dir, uint64_t map_bytes, bool runs, struct peer **ret) {
        struct lmdb_peer *lmdb = calloc(1, sizeof *lmdb);
        int r;

        if (!lmdb)
                return -ENOMEM;
        lmdb->runs = runs;
        lmdb->peer = (struct peer){.name = runs ? "lmdb-runs" : "lmdb",
                                   .fill = fill,
                                   .run = run,
                                   .end = end};
        r = error_of(open_env(lmdb, dir, map_bytes));
        if (r < 0)
                end(&lmdb->peer);
        else
                *ret = &lmdb->peer;
        return r;
}
