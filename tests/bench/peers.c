/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>

#include "tests/bench/peers.h"
#include "tests/bench/report.h"

#ifndef KVD_BENCH_LMDB
int lmdb_peer_new(const char *dir, uint64_t map_bytes, bool runs, struct peer **ret) {
        return -ENOSYS;
}
#endif

int peers_start(struct peers *peers, const char *dir, uint64_t map_bytes, void *world) {
        int r = lmdb_peer_new(dir, map_bytes, false, &peers->lmdb);

        if (r >= 0 || r == -ENOSYS)
                r = redis_peer_new(dir, &peers->redis);
        if (peers->lmdb)
                peers->lmdb->world = world;
        if (peers->redis)
                peers->redis->world = world;
        return r == -ENOSYS ? 0 : r;
}

int peers_fill(struct peers *peers, uint64_t n_blocks) {
        int r = peers->lmdb ? peers->lmdb->fill(peers->lmdb, n_blocks) : 0;

        if (r >= 0 && peers->redis)
                r = peers->redis->fill(peers->redis, n_blocks);
        if (r >= 0 && peers->socket)
                r = peers->socket->fill(peers->socket, n_blocks);
        return r;
}

static void end(struct peer *peer) {
        if (peer)
                peer->end(peer);
}

void peers_end(struct peers *peers) {
        end(peers->lmdb);
        end(peers->redis);
        end(peers->socket);
        *peers = (struct peers){0};
}

static int run(void *ctx) {
        struct peer *peer = ctx;

        return peer->run(peer) != (int)peer->n;
}

struct contender peer_contender(struct peer *peer, int (*choose)(void *, uint32_t)) {
        return (struct contender){peer->name, choose, run, NULL, peer};
}

static void add(struct contest *contest, struct peer *peer, const char *name,
                int (*choose)(void *, uint32_t)) {
        if (peer)
                contest_add(contest, peer_contender(peer, choose));
        else
                report_absent(contest->name, name, "not installed");
}

void peers_add(struct contest *contest, const struct peers *peers,
               int (*choose)(void *, uint32_t)) {
        add(contest, peers->lmdb, "lmdb", choose);
        add(contest, peers->redis, "redis", choose);
        if (peers->socket)
                contest_add(contest, peer_contender(peers->socket, choose));
}
