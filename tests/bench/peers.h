/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BENCH_PEERS_H
#define KVD_BENCH_PEERS_H

/*
 * Alternatives in which an index, or blocks, could be kept: LMDB, a B+ tree in shared memory; Redis
 * over a Unix socket, with a raw client; the smallest C daemon, a hash table behind a socket. Each
 * gets its best case: ready keys, keys inserted in an order that suits it, one transaction or one
 * batch for a whole chain, server and client on one processor.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tests/bench/chains.h"
#include "tests/bench/harness.h"
#include "tests/bench/process.h"

#define PEER_VALUE "a block's place" /* 16 bytes with its end */
#define PEER_KEYS 128u
#define RUN_BLOCKS 16u
#define RUN_TOKENS (RUN_BLOCKS * BLOCK_TOKENS)

enum peer_verb { PEER_FIND, PEER_PUT, PEER_READ };

struct peer {
        const char *name;
        int (*fill)(struct peer *peer, uint64_t n_blocks);
        int (*prepare)(struct peer *peer); /* not timed: what a client has ready. May be NULL */
        int (*run)(struct peer *peer);     /* number of keys found or stored, or an error */
        void (*end)(struct peer *peer);

        void *world; /* of the case */
        enum peer_verb verb;
        uint32_t n;
        struct block_key keys[PEER_KEYS];
        const uint32_t *tokens; /* of each key, for a peer with runs */
        const void *value;      /* of each key, for PEER_PUT */
        size_t bytes;           /* of a value, for PEER_PUT and PEER_READ */
        uint64_t sum; /* of bytes that were read, so that no compiler leaves reading out */
};

/* -ENOSYS if it is not installed. runs: a key is that of a run's last block, as kvd's index has it. */
int lmdb_peer_new(const char *dir, uint64_t map_bytes, bool runs, struct peer **ret);
int redis_peer_new(const char *dir, struct peer **ret);
int socket_peer_new(struct peer **ret);

/* ---- all peers of a case --------------------------------------------------------------------- */

struct peers {
        struct peer *lmdb, *redis, *socket; /* NULL if not installed, or not wanted */
};

/* Starts LMDB and Redis. Fails if one of them is installed, but does not start. */
int peers_start(struct peers *peers, const char *dir, uint64_t map_bytes, void *world);
int peers_fill(struct peers *peers, uint64_t n_blocks);
void peers_end(struct peers *peers);

/* A peer's contender, whose choose fills in the request. */
struct contender peer_contender(struct peer *peer, int (*choose)(void *peer, uint32_t item));

/* Adds all peers; reports those that are not installed. */
void peers_add(struct contest *contest, const struct peers *peers,
               int (*choose)(void *peer, uint32_t item));

/* ---- nothing but the socket: a request of one size, an answer of another --------------------- */

int echo_start(struct process *ret);
int echo_ask(const struct process *echo, size_t request_bytes, size_t answer_bytes);

#endif
