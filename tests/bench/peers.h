/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BENCH_PEERS_H
#define KVD_BENCH_PEERS_H

/*
 * Alternatives in which an index, or blocks, could be kept. Each peer gets its best case: ready
 * keys, keys inserted in an order that suits it, one transaction or one batch for a whole chain,
 * server and client on one processor. Lookups return the number of keys that were found, or a
 * negative errno.
 */

#include <stddef.h>
#include <stdint.h>

#include "tests/bench/chains.h"
#include "tests/bench/process.h"

#define PEER_VALUE_BYTES 16u

/* ---- LMDB: a B+ tree in shared memory. -ENOSYS if it was not there when this was built ------- */

struct lmdb_peer;

int lmdb_peer_new(const char *dir, uint64_t map_bytes, struct lmdb_peer **ret);
struct lmdb_peer *lmdb_peer_free(struct lmdb_peer *peer);
int lmdb_peer_fill(struct lmdb_peer *peer, uint64_t n_blocks);
int lmdb_peer_get(struct lmdb_peer *peer, const struct block_key *keys, uint32_t n, uint64_t *sum);
int lmdb_peer_put(struct lmdb_peer *peer, const struct block_key *keys, uint32_t n,
                  const void *value, size_t bytes);
int lmdb_peer_read(struct lmdb_peer *peer, struct block_key key, size_t bytes, uint64_t *sum);

/* ---- Redis over a Unix socket, with a raw client. -ENOSYS: there is no redis-server ---------- */

enum redis_form { REDIS_PIPELINE, REDIS_EXISTS, REDIS_MGET, REDIS_SET };

struct redis_peer;

int redis_peer_new(const char *dir, struct redis_peer **ret);
struct redis_peer *redis_peer_free(struct redis_peer *peer);
int redis_peer_fill(struct redis_peer *peer, uint64_t n_blocks);

/*
 * Puts a request together (not timed), sends it and reads the whole answer (timed). value:
 * REDIS_SET only.
 */
int redis_peer_prepare(struct redis_peer *peer, enum redis_form form, const struct block_key *keys,
                       uint32_t n, const void *value, size_t bytes);
int redis_peer_ask(struct redis_peer *peer);

/* One GET of a large value, read into a buffer and summed. */
int redis_peer_read(struct redis_peer *peer, struct block_key key, size_t bytes, uint64_t *sum);

/* ---- the smallest C daemon: one request with all keys over a Unix socket, a hash table ------- */

struct socket_peer;

int socket_peer_new(uint64_t n_blocks, struct socket_peer **ret);
struct socket_peer *socket_peer_free(struct socket_peer *peer);
int socket_peer_get(struct socket_peer *peer, const struct block_key *keys, uint32_t n);

/* ---- nothing but the socket: a request of one size, an answer of another --------------------- */

struct echo_peer;

int echo_peer_new(struct echo_peer **ret);
struct echo_peer *echo_peer_free(struct echo_peer *peer);
int echo_peer_ask(struct echo_peer *peer, size_t request_bytes, size_t answer_bytes);
/* The two halves of an exchange: one message that wakes the peer, and its answer. */
int echo_peer_tell(struct echo_peer *peer, size_t request_bytes, size_t answer_bytes);
int echo_peer_hear(struct echo_peer *peer, size_t answer_bytes);
uint64_t echo_peer_cpu_ns(const struct echo_peer *peer);

#endif
