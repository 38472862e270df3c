/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_H
#define KVD_H

/*
 * libkvd: use the KV cache of a kvd daemon in place.
 *
 * A process opens a connection (kvd_open), opens a space (kvd_space_open: one model's cache in the
 * caller's domain), and then works on blocks of pool memory that all processes of the domain map at
 * once:
 *
 *      look up      kvd_lookup    tokens in, the longest stored prefix out, pinned; no system call, no copy
 *      fill         kvd_alloc     blocks of one's own; write keys and values straight into them
 *      publish      kvd_seal      blocks with their tokens; from then on everybody finds them, nobody writes them
 *      let go       kvd_unpin     or kvd_free for blocks that were not sealed
 *
 * Caveats, before any function:
 *
 *  - A sealed block is read-only, for its author too: pins, and blocks once they are sealed, have
 *    addresses where a write is SIGSEGV. The same memory is mapped a second time, for filling it:
 *    writable for the whole domain, which trusts its code, under "isolation = shared"; under
 *    "isolation = arena" only where the block is one's own. On a GPU there is one mapping, and
 *    nothing stops a kernel from writing what it should only read.
 *  - A lookup that finds nothing returns 0 tokens. There is no other way to learn of a hit: only
 *    the tokens that kvd_lookup counts are valid, and only until kvd_unpin.
 *  - A pin never expires. A stopped or slow process keeps what it holds; it costs quota, nobody's
 *    correctness. The daemon takes pins back when the kernel says that the process is gone.
 *  - Nothing here survives fork(): the child gets -ECHILD from every call and must open its own
 *    connection (the mappings are not inherited).
 *  - If the daemon dies, pinned blocks and allocated blocks stay readable and writable until they
 *    are let go (their memory belongs to whoever maps it). kvd_alloc, kvd_seal and the like return
 *    -ECONNRESET or -ECONNREFUSED while it is away; the library reconnects by itself on the next
 *    call that asks the daemon (see kvd_catch_up), and lookups then see the new daemon's cache.
 *    Blocks allocated before that are refused by kvd_seal with -ESTALE: free them.
 *  - Every call ends. kvd_lookup, kvd_lookup_keys, kvd_match, kvd_available, kvd_counters and
 *    kvd_paged_attention never wait for the daemon or for another thread, and kvd_unpin does not.
 *    Every other call may, for 5 seconds altogether, whatever it waits for, however many threads
 *    wait with it and whatever signals arrive, and then returns -ETIMEDOUT. Those with a time
 *    limit of their own (kvd_lease, kvd_sequence_wait) may take that much longer; kvd_prefix_sample
 *    gives a worker a minute, and calls that wait for a GPU's stream (kvd_cuda.h) take what the
 *    stream takes. Calls that cannot fail (kvd_free, kvd_space_close, kvd_sequence_close) leave
 *    what they could not say in time to a later call.
 *  - All calls may be made from many threads at once, on the same handles. A struct kvd_pin or
 *    kvd_block belongs to one thread at a time. The library starts no threads, installs no signal
 *    handlers and prints nothing.
 *
 * Every function that can fail returns a negative errno; kvd_error() then holds one line in words.
 * Sizes are in bytes unless a name says tokens or blocks. Token ids are uint32_t below the space's
 * vocabulary size.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

#define KVD_VERSION "0.1.0"
#define KVD_NAME_MAX 63 /* longest space or domain name, without the NUL: [A-Za-z0-9._-]+ */

typedef struct kvd kvd;
typedef struct kvd_space kvd_space;

/* ---- geometry: every field that changes bytes ------------------------------------------------ */

enum kvd_dtype { KVD_F32 = 1, KVD_F16 = 2, KVD_BF16 = 3, KVD_I8 = 4 };
enum kvd_order { KVD_HND = 1, KVD_NHD = 2 }; /* order of head, token, dimension inside a plane */
/* keys stored after/before rotation */
enum kvd_rope { KVD_ROPE_POST = 1, KVD_ROPE_PRE = 2, KVD_ROPE_NONE = 3 };
enum kvd_kind { KVD_CAUSAL = 1, KVD_BIDIRECTIONAL = 2 };
/* XXH3-128 with the space's secret; XXH64 of the ids */
enum kvd_keys { KVD_KEYS_SERVE = 1, KVD_KEYS_PAPER = 2 };
/* priority: the methods' opinion of each block */
enum kvd_policy { KVD_LRU = 1, KVD_FIFO = 2, KVD_PRIORITY = 3 };

/*
 * A block holds block_tokens token slots of (layers / layer_groups) consecutive layers. Inside it,
 * for each layer in order: the K plane, then the V plane, each of kv_heads * block_tokens *
 * head_dim elements in the given order (HND: [head][token][dim], NHD: [token][head][dim]); behind
 * the last layer the state plane, if there is one, of block_tokens * state_width elements
 * (BiCache's boundary hidden state).
 *
 * Or blocks are opaque: block_bytes of whatever an engine keeps per block, under a name for its
 * layout. All of layers to state_width but block_tokens are 0 then. The methods (kvd_methods.h)
 * need planes, and are refused.
 */
struct kvd_geometry {
        uint32_t layers;
        uint32_t kv_heads;
        uint32_t head_dim;
        uint32_t block_tokens; /* tokens per block: 1 to 256; 0 means 16 */
        uint32_t layer_groups; /* divides layers; 0 means 1 */
        uint32_t dtype;        /* enum kvd_dtype, of K, V and state */
        uint32_t order;        /* enum kvd_order; 0 means KVD_HND */
        uint32_t rope;         /* enum kvd_rope; 0 means KVD_ROPE_POST */
        uint32_t state_width;  /* elements per token of the state plane, 0: none */
        /* token ids are below this, larger ones are refused; 0, if opaque: any word is one */
        uint32_t vocab;
        /* of everything else that changes bytes: weights, tokenizer, RoPE parameters */
        uint64_t fingerprint[2];
        /* of an opaque block, a multiple of 64; 0: planes, as described above */
        uint64_t block_bytes;
        /* of opaque blocks: what is inside, by a name of 1 to 31 of [A-Za-z0-9._-] */
        char layout[32];
};

/*
 * KVD_SPACE_FIXED: addresses never change while the space is open (host spaces only), for engines
 * that keep pointers or tensors of all of it. When the daemon is replaced, the new pool comes to
 * the same addresses, which cannot be before every pin and block of the old one was let go: until
 * then kvd_alloc and kvd_seal say -ESTALE and lookups find nothing. -ENOSPC: the new pool is larger
 * than what was reserved. What nobody holds has no memory in between: a read there is SIGSEGV.
 * kvd_dlpack_layer and kvd_dlpack_memory hold nothing then, and last until the space is closed.
 */
enum kvd_space_flags { KVD_SPACE_FIXED = 1 };

struct kvd_space_options {
        uint32_t kind;   /* enum kvd_kind; 0 means KVD_CAUSAL */
        uint32_t keys;   /* enum kvd_keys; 0 means KVD_KEYS_SERVE */
        uint32_t policy; /* enum kvd_policy; 0 means KVD_LRU */
        uint32_t flags;  /* enum kvd_space_flags; others are -EINVAL */
        /* upper bound of the space's size; 0: what the domain's quota allows */
        uint64_t max_blocks;
};

/*
 * Bytes of one block, or 0 if the geometry is impossible (kvd_space_open says what is wrong with
 * it).
 */
uint64_t kvd_block_bytes(const struct kvd_geometry *geometry);

/*
 * Adds a part to a fingerprint, which begins as {0, 0}: names, versions, settings, weights,
 * whatever changes the bytes of a block. Parts and their order count: "ab" is not "a" and "b". The
 * same on every machine; not for secrets (XXH3-128).
 */
void kvd_fingerprint(uint64_t fingerprint[2], const void *data, size_t bytes);

/* ---- connection ------------------------------------------------------------------------------ */

/*
 * Connects to the daemon at a socket path; NULL takes $KVD_SOCKET, then /run/kvd-0.sock. The handle
 * is freed by kvd_close, which returns NULL. -ENOENT, -ECONNREFUSED: no daemon there; -ENOTSOCK:
 * that is a folder or a file; -EACCES: not allowed to use the socket; -EPERM: the server is of a
 * user who is not expected, and was told nothing; -EPROTO: not a kvd, or another protocol version.
 *
 * The server must be root's or the caller's own (in what it listens as: a service manager's socket
 * is root's), or of the user to whom root gave the socket's folder: all folders above it are
 * root's, and nobody else may write to any of them. $KVD_SERVER_USER, a name or a number, states
 * another user; then only he and root are expected. kvd_open_expecting takes such a statement as
 * well; NULL and "" leave it to the environment. -EINVAL: there is no user of that name. Each
 * connection that the handle makes later is held to the same.
 */
int kvd_open(const char *socket_path, kvd **ret);
int kvd_open_expecting(const char *socket_path, const char *server_user, kvd **ret);
kvd *kvd_close(kvd *handle);

/*
 * Several processes as one client: an engine whose scheduler allocates, pins and publishes blocks
 * that its workers write and read. What one connection of a team holds (pins, blocks being filled,
 * also of spaces it has closed) is kept until no process of the team is left, so that a scheduler's
 * death gives nobody a block that its worker still writes. The processes name a team by the same
 * random bytes, not all zero, each before it opens a space; a reconnected handle joins again by
 * itself. -EINVAL: all zero; -EBUSY: the handle is in another team.
 */
int kvd_join(kvd *handle, const uint8_t team[16]);

/*
 * One line about the last failed call of this thread; "" if none failed. Valid until the thread's
 * next call.
 */
const char *kvd_error(void);

const char *kvd_version(void); /* of the library, as KVD_VERSION is of the header */

/* ---- space ----------------------------------------------------------------------------------- */

/*
 * Attaches to the space of that name in the caller's domain, creating it if there is none.
 * Geometry, kind, keys and policy of an existing space must be equal: -EEXIST and kvd_error() names
 * the first field that differs. options may be NULL (all defaults). Maps the index read-only and
 * the pool; the handle is freed by kvd_space_close (returns NULL), after every pin and block of it
 * was let go. If the daemon dies, the space attaches anew by itself; if the new daemon refuses it,
 * calls return that error.
 */
int kvd_space_open(kvd *handle, const char *name, const struct kvd_geometry *geometry,
                   const struct kvd_space_options *options, kvd_space **ret);
kvd_space *kvd_space_close(kvd_space *space);

/*
 * Where the space's blocks lie in this process. For engines that keep their own tables of block
 * ids.
 */
struct kvd_space_memory {
        /* block b lies at base + b * block_bytes; writable where the caller may write */
        uint8_t *base;
        const uint8_t *sealed; /* the same memory, as pins give it out. On a GPU: equal to base */
        uint64_t block_bytes;
        /* ids below this fit the reserved addresses, and there are no others */
        uint32_t blocks;
        /* ids below this are mapped at present; beyond, only blocks that the caller holds */
        uint32_t mapped;
};

/*
 * Maps what the pool has grown by as well, so that blocks of which another process of the same
 * engine told may be used: call it again when an id is not below mapped. Addresses stay what they
 * are until the daemon is replaced, or for ever (KVD_SPACE_FIXED); under isolation = arena the memory
 * behind them may be replaced where no block is held, and this call maps the new one, too. With the
 * daemon gone: what is mapped.
 */
int kvd_space_memory(kvd_space *space, struct kvd_space_memory *ret);

/* ---- look up and pin ------------------------------------------------------------------------- */

/*
 * What holds a stored prefix. {0} holds nothing. Filled by kvd_lookup and kvd_seal, emptied by
 * kvd_unpin. One pin on the deepest block keeps the whole chain: a parent is never evicted before
 * its children. kvd_unpin makes it {0}. base is the address of block 0: block b lies at base + b *
 * block_bytes (see kvd_pin_block).
 */
struct kvd_pin {
        void *view;          /* private: the mapping that base belongs to */
        uint8_t *base;       /* NULL if the pin holds nothing; read-only, but on a GPU */
        uint64_t block_bytes;
        /* in: extra key of the chain (LoRA, images, a tenant), see kvd_lookup; 0: none */
        uint64_t salt;
        uint32_t leaf;       /* deepest block of the chain */
        uint32_t generation; /* of that block */
        uint32_t n_blocks;   /* blocks of the chain */
        uint32_t n_tokens;   /* tokens of the chain that are valid */
        uint32_t group;      /* layer group */
        /*
         * out, of kvd_lookup: tokens right behind them that lie below the pool (kvd_fetch), see
         * there
         */
        uint32_t n_below;
        /* private: what was posted behind the chain (kvd_post): how many, and the last of them */
        uint32_t n_posted, posted, posted_generation;
};

#define KVD_BELOW_UNKNOWN UINT32_MAX

/*
 * Finds the longest stored prefix of tokens[0..n_tokens), compares its tokens, and pins it. Returns
 * the number of tokens that are valid (0: nothing found), and writes the ids of its blocks, first
 * to last, to blocks[], which has room for max_blocks; a longer prefix is cut there. The count is a
 * multiple of block_tokens unless the last block is a sealed partial one that ends exactly at
 * n_tokens. In a bidirectional space the answer is n_tokens or 0. Makes no system call, takes no
 * lock and never waits for the daemon. So blocks in memory by which the pool has grown are missed
 * (what is before them in the chain is found) until a call that asks the daemon has mapped it:
 * kvd_seal, kvd_alloc when its magazine is empty, or kvd_catch_up. pin must hold nothing; on 0 it
 * still holds nothing. pin->salt is read: chains of different salts are strangers, and never share a block, whatever their tokens. A
 * token id beyond the vocabulary is in no chain: what is before it is found. -EINVAL: group out of
 * range, a pin that holds something, or a salt in a bidirectional space. If the daemon is dead the
 * answer is still right for as long as its memory is mapped.
 *
 * pin->n_below then says, whatever was found, how many more of the tokens lie in the daemon's
 * file, so that nobody need ask who has nothing to fetch: 0: nothing that kvd_fetch would bring,
 * as always without a tier below the pool; KVD_BELOW_UNKNOWN: only kvd_fetch finds out, because
 * servers that other machines fill as well may have it, or because the daemon has just begun to
 * look into its file. It counts what one fetch brings, 512 blocks at most, and never what no fetch
 * brings. It is a hint: what was written this moment may be missing, and once in thousands of times
 * kvd_fetch finds less. In a bidirectional space it is n_tokens where nothing was found, or 0. 0
 * where max_blocks cut the answer. kvd_unpin makes it 0.
 */
int64_t kvd_lookup(kvd_space *space, uint32_t group, const uint32_t *tokens, uint32_t n_tokens,
                   uint32_t *blocks, uint32_t max_blocks, struct kvd_pin *pin);

/*
 * What lookups do not do, since it may wait: maps what the pool has grown by, and attaches to the
 * daemon that took the place of one that ended. Every call that asks the daemon does that as well;
 * who only looks up calls this now and then, and before a lookup that should miss nothing. One
 * system call where there is nothing to do. 0, or why not; after a failure -EAGAIN at once, for as
 * long as the failure took and a tenth of a second.
 */
int kvd_catch_up(kvd_space *space);

/*
 * Brings up what the daemon's file has of a chain, behind what is in the pool of it, or else what
 * its remote servers have. Returns how many tokens of the prefix are in the pool, or will be
 * (servers are only being asked yet: they may have more), and does not wait for them: *fd becomes
 * readable when that has ended, well or not, so that the caller waits as long as it is worth
 * (poll), and then looks up. -1: there is nothing to wait for. The descriptor is the caller's to
 * close, at any time; what is on its way comes all the same. 512 blocks come at a time, and more by
 * asking again, of the first 15,360 tokens and 4,096 blocks; nothing else is written below the pool,
 * nor is a block that is not full. salt as in struct kvd_pin. In a bidirectional space the tokens are
 * a whole prefix, which comes whole or not at all; one of more than 15,360 tokens or 512 blocks does
 * not. -EBUSY: too many fetches of the caller's own domain wait already; -EINVAL: group out of range,
 * or a salt in a bidirectional space.
 */
int64_t kvd_fetch(kvd_space *space, uint32_t group, uint64_t salt, const uint32_t *tokens,
                  uint32_t n_tokens, int *fd);

/*
 * The same search without a pin: a hint for schedulers, true at no particular time. Counts blocks
 * that are not mapped yet as well.
 */
int64_t kvd_match(kvd_space *space, uint32_t group, const uint32_t *tokens, uint32_t n_tokens);
int64_t kvd_match_salted(kvd_space *space, uint32_t group, uint64_t salt, const uint32_t *tokens,
                         uint32_t n_tokens);

/*
 * Lets go. The blocks must not be read afterwards. A pin that holds nothing is fine. Cannot fail.
 */
void kvd_unpin(kvd_space *space, struct kvd_pin *pin);

static inline uint8_t *kvd_pin_block(const struct kvd_pin *pin, uint32_t block) {
        return pin->base + (uint64_t)block * pin->block_bytes;
}

/* ---- fill and publish ------------------------------------------------------------------------ */

struct kvd_block {
        /*
         * block_bytes bytes to write to; contents are undefined at first. Once sealed: to read from
         */
        uint8_t *data;
        void *view;    /* private */
        uint32_t id;
        uint32_t generation;
};

/*
 * Takes up to n blocks to fill, from a small magazine that the library keeps (then no system call)
 * and fills with what replies to kvd_seal bring, or from the daemon, who evicts unpinned blocks if
 * it must. Returns how many it got, 1 to n; fewer
 * than n where there are no more. -ETIMEDOUT: the daemon did not answer, and none was taken. Ids ascend, and are consecutive as far as the magazine has such:
 * a fresh space gives 0, 1, 2 and so on. -ENOBUFS: the pool is full and everything in it is pinned
 * or being filled: let something go or wait; -EDQUOT: the caller's or its domain's quota is used
 * up. Both are refusals at once, never a stall.
 */
int kvd_alloc(kvd_space *space, uint32_t n, struct kvd_block *blocks);

/*
 * The magazine holds at least n blocks from now on, if the pool has them: then the next kvd_alloc
 * of up to n cannot fail. What kvd_alloc takes of them is replaced from the daemon on a later call,
 * as long as there is something to be had. n is the floor until the next kvd_reserve; 0, the
 * beginning, is none. Counts as blocks being filled. Returns how many the magazine holds, which is
 * less than n where pool or quota are at their end.
 */
int kvd_reserve(kvd_space *space, uint32_t n);

/*
 * How many blocks kvd_alloc could give now, for schedulers: magazine + free + growth that pool,
 * quota and max_blocks allow + sealed blocks that nobody holds; at most what the client may be
 * filling. Reads shared memory, makes no system call.
 *
 * It is an estimate. What the daemon knows is as of the last answer to this process, or of a look
 * that it takes every tenth of a second; blocks that others allocated or pinned since are missing
 * from it, so it errs high by those. Blocks that this process pinned since are taken off with their
 * whole chains, and those that it let go of are added in proportion: where its pins share blocks it
 * errs low and high by these until the next look. It errs low by what the daemon could take from
 * larger spaces, and, under isolation = arena, from segments of processes that are gone.
 */
int64_t kvd_available(kvd_space *space);

/*
 * Gives back blocks that were not sealed. Their contents are lost. Cannot fail (a dead daemon frees
 * them too).
 */
void kvd_free(kvd_space *space, uint32_t n, struct kvd_block *blocks);

/*
 * Publishes blocks[0..n), which the caller filled completely, as the continuation of the chain that
 * pin holds (an empty pin: the start of a chain in pin->group, under pin->salt).
 * tokens[0..n_tokens) are the tokens in these blocks, oldest first; all but the last block are
 * full, and a last one that is not full ends its chain for good (zero its unused slots). On success
 * the pin holds the longer chain and every block is sealed. Where the same content was sealed by
 * somebody else before, blocks[i] becomes that block (its id, data and generation) and the caller's
 * own is freed: use the new one. In a bidirectional space the pin must be empty and the tokens are
 * the whole prefix. Returns n. A call of more than 8,192 tokens (or 2,048 blocks) goes to the
 * daemon in pieces: if a later piece fails, the result is the number of blocks that are sealed and
 * in the pin (the rest are still the caller's), and the next call says why. On a negative result
 * the pin and the blocks are as before, and still the caller's. Where the daemon did not answer
 * (-ETIMEDOUT, -ECONNRESET, -EPROTO) or its answer cannot be used, nobody knows whether the blocks
 * were sealed: their data is NULL then, and all that can be done with them is kvd_free. -ESTALE:
 * blocks of a daemon that is gone, or blocks that are not the caller's; -EINVAL: counts that do not
 * fit, token ids beyond the vocabulary, or a chain that ended with a partial block. If the daemon
 * dies in the middle (-ECONNRESET), nothing of it is visible in the next daemon: free the blocks.
 */
int kvd_seal(kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
             const uint32_t *tokens, uint32_t n_tokens);

/*
 * kvd_seal for engines that cannot put another block into a running table. ids[i] becomes the block
 * that holds the content of blocks[i] now. Where that is the caller's, it was sealed, and blocks[i]
 * becomes {0}. Where the content was sealed by somebody else before, blocks[i] stays as it is: the
 * caller's, unpublished, to be kvd_free'd when nothing reads it any more. The pin holds the chain
 * of ids. After a call that sealed only some, ids of the rest are undefined.
 */
int kvd_seal_keep(kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
                  const uint32_t *tokens, uint32_t n_tokens, uint32_t *ids);

/*
 * kvd_seal without an answer, for blocks that fill one by one: publishes full blocks as the
 * continuation of the chain that pin holds and of what was posted behind it before, and returns n.
 * Mostly no system call; other processes find them within microseconds, if the daemon is not busy, or
 * within some 2 ms where so many post that it looks for posts by itself instead of being told.
 *
 * The blocks stay the caller's to read (data may not be written any more), until kvd_free lets go
 * of each; so does a block whose content somebody else had sealed before, of which nothing is told
 * here. The pin holds what it held. It goes on behind the posted blocks: in kvd_post, for as long as
 * the last of them was not freed, and in kvd_seal, after which it holds all of the chain.
 *
 * What is wrong with a block is known later, and told once, by the next kvd_post (which then posts
 * nothing) or kvd_flush. -ECANCELED: some were refused, and kvd_error() says how many, and why the
 * last: what kvd_seal refuses, and whatever was posted behind a refused block, or behind another
 * one's that has left the cache since. -ECONNRESET: a daemon ended before it had seen all of them.
 * Such blocks are not published, and stay the caller's all the same. Of this call: -ESTALE as
 * kvd_seal; -EINVAL: also a part-filled block, or a bidirectional space (kvd_seal them);
 * -ETIMEDOUT: the daemon takes none. A positive result less than n: so many were posted.
 *
 * kvd_flush waits until the daemon has seen all that was posted in the space, by any thread. 0, or
 * what was wrong with some of it. kvd_space_close flushes as well.
 */
int kvd_post(kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
             const uint32_t *tokens, uint32_t n_tokens);
int kvd_flush(kvd_space *space);

/*
 * Copies with non-temporal stores where that is faster (64 KiB and up): to fill a block from
 * private memory.
 */
void kvd_copy(void *to, const void *from, size_t bytes);

/* ---- blocks by key --------------------------------------------------------------------------- */

/*
 * For engines that name what they store by hashes. In a causal space of opaque blocks with vocab 0
 * and block_tokens 4 to 8, a key of 4 * block_tokens bytes (16 to 32), any bytes, names an object
 * of n blocks, 1 to 1,024: always the same n for one key. An object is found whole or not at all.
 * Keys are compared, not only hashed.
 *
 * kvd_lookup_keys looks for many at once: keys lie side by side, blocks is
 * [n_keys][blocks_per_key], pins is [n_keys] and each holds nothing. Afterwards a pin that holds
 * something (n_blocks is not 0) has its object, whose blocks are in its row; rows of others are
 * undefined. Returns how many were found. kvd_seal_key is kvd_seal of one object: blocks[i] may
 * become the block of somebody who was first. -EINVAL: not such a space, or counts out of range;
 * nothing is pinned then.
 */
int64_t kvd_lookup_keys(kvd_space *space, const void *keys, uint32_t n_keys,
                        uint32_t blocks_per_key, uint32_t *blocks, struct kvd_pin *pins);
int kvd_seal_key(kvd_space *space, const void *key, uint32_t n, struct kvd_block *blocks,
                 struct kvd_pin *pin);

/* ---- single flight (bidirectional prefixes) -------------------------------------------------- */

/*
 * Before computing a prefix that kvd_lookup did not find: asks for the right to compute it.
 * Returns 1: the caller computes it, seals it, and ends the lease; others wait meanwhile.
 *         0: another process finished it while we waited: look up again.
 * -EBUSY: another process still computes it after timeout_ms milliseconds (0: do not wait): compute privately.
 * The lease dies with its holder: who waits is woken.
 */
int kvd_lease(kvd_space *space, const uint32_t *tokens, uint32_t n_tokens, uint32_t timeout_ms);
int kvd_lease_end(kvd_space *space, const uint32_t *tokens, uint32_t n_tokens);

/* ---- numbers --------------------------------------------------------------------------------- */

struct kvd_counters { /* of this process in this space, since it was opened */
        uint64_t lookups, lookup_hits;          /* calls, calls that found something */
        uint64_t tokens_asked, tokens_found;    /* of all lookups */
        /* duplicate: sealed by another before us; what was posted counts as sealed */
        uint64_t blocks_allocated, blocks_sealed, blocks_duplicate;
        uint64_t refused;                       /* allocations refused by quota or a full pool */
        uint64_t retries;                       /* lookups that met an eviction in progress */
        uint64_t reconnects;
};
void kvd_counters(kvd_space *space, struct kvd_counters *ret);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
