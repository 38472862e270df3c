/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_H
#define KVD_H

/*
 * libkvd: use the KV cache of a kvd daemon in place.
 *
 * A process opens a connection (kvd_open), opens a space (kvd_space_open: one model's cache in the
 * caller's domain), and then works on blocks of pool memory that all processes of the domain map:
 *
 *      look up      kvd_lookup    find and pin the longest stored prefix; no system call, no copy
 *      fill         kvd_alloc     get empty blocks, and write keys and values straight into them
 *      publish      kvd_seal      make blocks read-only and findable by their tokens
 *      release      kvd_unpin     or kvd_free for blocks that were not sealed
 *
 * Rules for all calls:
 *
 *  - A sealed block is read-only, even for the process that filled it: writing through the address
 *    of a pin or of a sealed block raises SIGSEGV. The same memory is also mapped writable, for
 *    filling: all of it under "isolation = shared", where the domain trusts its code; only the
 *    caller's own blocks under "isolation = arena". A GPU has a single mapping, and nothing stops a
 *    kernel from writing to blocks that it should only read.
 *  - A lookup that finds nothing returns 0 tokens. Only the tokens that kvd_lookup counts are
 *    valid, and only until kvd_unpin.
 *  - A pin never expires. A stopped or slow process keeps its pins; that costs quota, but never
 *    correctness. The daemon releases the pins of a process when the kernel reports its exit.
 *  - Nothing survives fork(): every call in the child returns -ECHILD. The mappings are not
 *    inherited; the child must open its own connection.
 *  - If the daemon dies, pinned blocks stay readable and allocated blocks stay writable until they
 *    are released, because the memory belongs to the processes that map it. kvd_alloc, kvd_seal and
 *    other calls that need the daemon return -ECONNRESET or -ECONNREFUSED while no daemon runs. The
 *    next such call (kvd_catch_up is one) reconnects, and lookups then see the new daemon's cache.
 *    kvd_seal refuses blocks of the old daemon with -ESTALE: free them.
 *  - Every call ends. kvd_lookup, kvd_lookup_keys, kvd_match, kvd_available, kvd_counters,
 *    kvd_paged_attention and kvd_unpin never wait for the daemon or for another thread. Any other
 *    call may wait, but for at most 5 seconds in total, regardless of signals and of other waiting
 *    threads, and then returns -ETIMEDOUT. Calls with a time limit of their own (kvd_lease,
 *    kvd_sequence_wait) may take that much longer. kvd_prefix_sample waits up to a minute for a
 *    worker, and calls that wait for a GPU stream (kvd_cuda.h) take as long as the stream takes.
 *    Calls that cannot fail (kvd_free, kvd_space_close, kvd_sequence_close) leave messages that
 *    they could not send in time to a later call.
 *  - All calls are thread-safe on shared handles. A struct kvd_pin or kvd_block belongs to one
 *    thread at a time. The library starts no threads, installs no signal handlers and prints
 *    nothing.
 *
 * Every function that can fail returns a negative errno; kvd_error() then returns a one-line
 * message. Sizes are in bytes unless a name says tokens or blocks. Token ids are uint32_t below the
 * space's vocabulary size.
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

/*
 * KVD_Q8 and KVD_Q4 are quantised. A row (head_dim numbers, of one token and KV head) is head_dim
 * codes of 8 or 4 bits without a sign, then a scale and a least number, both f16, for each 64 codes
 * in order (or fewer, at the end): number i is least + code * scale. Codes of 4 bits lie two to a
 * byte, the first in the low half. Each 64 numbers of a key are transformed first (libkvd(3)), so
 * that a few large ones do not take the codes of the others (QuaRot, arXiv 2404.00456). A row has
 * head_dim or head_dim / 2 bytes, and 4 for each 64 numbers. head_dim must be even, and state_width
 * must be 0. kvd_paged_write (kvd_attend.h) quantises. It stores NaNs for each 64 numbers of which
 * one is not finite, or whose transform is not.
 *
 * KVD_E4M3 and KVD_E5M2 are numbers of 8 bits (OFP8, revision 1.0; E4M3 without infinities), without
 * scales. An engine that divides keys or values by scales (of a layer, or of a head) includes these in
 * the fingerprint, multiplies its queries by a key's scale, and results of attention by a value's.
 * kvd_paged_write rounds to nearest, and limits to the largest finite number.
 */
enum kvd_dtype {
        KVD_F32 = 1,
        KVD_F16 = 2,
        KVD_BF16 = 3,
        KVD_I8 = 4,
        KVD_Q8 = 5,
        KVD_Q4 = 6,
        KVD_E4M3 = 7,
        KVD_E5M2 = 8,
};
enum kvd_order { KVD_HND = 1, KVD_NHD = 2 }; /* order of head, token, dimension inside a plane */
/* keys are stored after, before or without rotation */
enum kvd_rope { KVD_ROPE_POST = 1, KVD_ROPE_PRE = 2, KVD_ROPE_NONE = 3 };
enum kvd_kind { KVD_CAUSAL = 1, KVD_BIDIRECTIONAL = 2 };
/* hash of blocks: XXH3-128 with the space's secret; XXH64 of the token ids */
enum kvd_keys { KVD_KEYS_SERVE = 1, KVD_KEYS_PAPER = 2 };
/* order of eviction; KVD_PRIORITY: lowest first by the methods' scores */
enum kvd_policy { KVD_LRU = 1, KVD_FIFO = 2, KVD_PRIORITY = 3 };

/*
 * A block holds block_tokens token slots of (layers / layer_groups) consecutive layers. For each
 * layer in order it contains the K plane, then the V plane, each of kv_heads * block_tokens *
 * head_dim elements in the given order (HND: [head][token][dim], NHD: [token][head][dim]). The
 * optional state plane of block_tokens * state_width elements (a hidden state)
 * follows the last layer.
 *
 * Alternatively, blocks are opaque: block_bytes bytes in a format of the engine, which layout
 * names. The fields from layers to state_width, except block_tokens, are then 0. The methods
 * (kvd_methods.h) need planes and refuse opaque blocks.
 */
struct kvd_geometry {
        uint32_t layers;
        uint32_t kv_heads;
        uint32_t head_dim;
        uint32_t block_tokens; /* tokens per block: 1 to 256, opaque blocks 4096; 0 means 16 */
        uint32_t layer_groups; /* divides layers; 0 means 1 */
        uint32_t dtype;        /* enum kvd_dtype, of K, V and state */
        uint32_t order;        /* enum kvd_order; 0 means KVD_HND */
        uint32_t rope;         /* enum kvd_rope; 0 means KVD_ROPE_POST */
        uint32_t state_width;  /* elements per token of the state plane; 0 if none */
        /* vocabulary size: larger token ids are refused; 0 (opaque blocks only): no limit */
        uint32_t vocab;
        /* hash of everything else that changes bytes: weights, tokenizer, RoPE parameters */
        uint64_t fingerprint[2];
        /* size of an opaque block, a multiple of 64; 0: blocks of planes, as described above */
        uint64_t block_bytes;
        /* opaque blocks: name of their format, 1 to 31 of [A-Za-z0-9._-] */
        char layout[32];
};

/*
 * KVD_SPACE_FIXED: addresses never change while the space is open (host spaces only), for engines
 * that keep pointers to or tensors of the whole pool. When the daemon is replaced, the new pool is
 * mapped at the same addresses once every pin and block of the old one has been released. Until
 * then kvd_alloc and kvd_seal return -ESTALE, lookups find nothing, and reading a block that this
 * process does not hold may raise SIGSEGV. -ENOSPC: the new pool is larger than the reserved range.
 * Tensors of kvd_dlpack_layer and kvd_dlpack_memory keep no mapping alive, and are valid until the
 * space is closed.
 *
 * KVD_SPACE_INDEX_ONLY: maps no memory of the pool, and uses no GPU, for a process that finds,
 * allocates and publishes blocks which other processes write and read (a scheduler). The addresses
 * of blocks must not be used. It passes no shard. Calls that use memory, sequences or streams return
 * -EOPNOTSUPP.
 */
enum kvd_space_flags { KVD_SPACE_FIXED = 1, KVD_SPACE_INDEX_ONLY = 2 };

struct kvd_space_options {
        uint32_t kind;   /* enum kvd_kind; 0 means KVD_CAUSAL */
        uint32_t keys;   /* enum kvd_keys; 0 means KVD_KEYS_SERVE */
        uint32_t policy; /* enum kvd_policy; 0 means KVD_LRU */
        uint32_t flags;  /* enum kvd_space_flags; unknown bits are -EINVAL */
        /* maximum size of the space; 0: as much as the domain's quota allows */
        uint64_t max_blocks;
        /*
         * A pool on several GPUs has an equal part of each block, a shard, on each of them. 1 to
         * their number: the shard whose memory this process maps, in the order of the daemon's
         * setting device; 0: the only one. -EINVAL: the pool is in host memory.
         */
        uint32_t shard;
        uint32_t reserved; /* must be 0 */
};

/*
 * Returns the size of one block in bytes, or 0 if the geometry is invalid (kvd_space_open reports
 * why).
 */
uint64_t kvd_block_bytes(const struct kvd_geometry *geometry);

/*
 * Adds data to a fingerprint, which begins as {0, 0}: names, versions, settings, weights, and
 * everything else that changes the bytes of a block. Order and division of the data matter: adding
 * "ab" differs from adding "a" and then "b". The result is the same on every machine. The hash
 * (XXH3-128) is not cryptographic.
 */
void kvd_fingerprint(uint64_t fingerprint[2], const void *data, size_t bytes);

/* ---- connection ------------------------------------------------------------------------------ */

/*
 * Connects to the daemon at a socket path; NULL means $KVD_SOCKET, or else /run/kvd-0.sock. Free
 * the handle with kvd_close, which returns NULL. -ENOENT, -ECONNREFUSED: no daemon there;
 * -ENOTSOCK: the path is a directory or a regular file; -EACCES: no permission to use the socket;
 * -EPERM: the server runs as an unexpected user, and was sent nothing; -EPROTO: the server is not
 * kvd, or speaks another protocol version.
 *
 * The library trusts servers of root, of the caller's own user, and of the user who owns the
 * socket's directory if every directory above it is root's and no other user may write to any of
 * them. (The kernel reports the user that called listen: root, if a service manager did.)
 * $KVD_SERVER_USER, a name or a number, names another user; then only that user and root are
 * trusted. server_user does the same and overrides the environment, unless it is NULL or "".
 * -EINVAL: there is no user of that name. The rule also applies to later connections of the handle.
 */
int kvd_open(const char *socket_path, kvd **ret);
int kvd_open_expecting(const char *socket_path, const char *server_user, kvd **ret);
kvd *kvd_close(kvd *handle);

/*
 * Makes several processes one client, for an engine whose scheduler allocates, pins and publishes
 * blocks that its workers read and write. The pins and unsealed blocks of a connection (even those
 * of spaces that it has closed) are kept until no process of the team is left, so that the
 * scheduler's death does not give away a block that a worker still writes. All processes pass the
 * same random bytes, not all zero, before they open a space. A handle that reconnects joins again
 * by itself. -EINVAL: all bytes are zero; -EBUSY: the handle is in another team.
 */
int kvd_join(kvd *handle, const uint8_t team[16]);

/*
 * Returns a one-line message about this thread's last failed call; "" if none failed. Valid until
 * the thread's next call.
 */
const char *kvd_error(void);

const char *kvd_version(void); /* version of the library; KVD_VERSION is that of the header */

/* ---- space ----------------------------------------------------------------------------------- */

/*
 * Attaches to the space of that name in the caller's domain, and creates it if it does not exist.
 * -EEXIST: the space exists with another geometry, kind, keys or policy; kvd_error() names the
 * first field that differs. options may be NULL (all defaults). Maps the index (read-only) and the
 * pool. Free the handle with kvd_space_close, which returns NULL, after releasing every pin and
 * block of the space. If the daemon is replaced, the space attaches to the new one by itself; if
 * that refuses it, calls return its error.
 */
int kvd_space_open(kvd *handle, const char *name, const struct kvd_geometry *geometry,
                   const struct kvd_space_options *options, kvd_space **ret);
kvd_space *kvd_space_close(kvd_space *space);

/*
 * Addresses of the space's blocks in this process, for engines that keep their own tables of block
 * ids.
 */
struct kvd_space_memory {
        /* address of block 0; block b is at base + b * block_bytes, writable if the caller may */
        uint8_t *base;
        const uint8_t *sealed; /* the same memory, read-only, as in pins; equal to base on a GPU */
        uint64_t block_bytes;  /* bytes per block; on several GPUs, per shard of one */
        uint32_t blocks;       /* number of blocks in the reserved range: all ids are below this */
        /* ids below this are mapped now; from here on, only blocks that the caller holds */
        uint32_t mapped;
        const void *view; /* for libkvd: as in pins and blocks */
};

/*
 * Fills *ret, after mapping memory by which the pool has grown. Call it again when another process
 * of the engine passes a block id that is not below mapped. Addresses change only when the daemon
 * is replaced, or never with KVD_SPACE_FIXED. Under isolation = arena the memory behind addresses
 * without a held block may be replaced; this call maps the new memory as well. Without a daemon it
 * returns the current mapping.
 */
int kvd_space_memory(kvd_space *space, struct kvd_space_memory *ret);

/* ---- look up and pin ------------------------------------------------------------------------- */

/*
 * Holds a stored prefix in place; {0} holds nothing. kvd_lookup and kvd_seal fill it, kvd_unpin
 * resets it to {0}. A pin on the deepest block holds the whole chain, because a parent is never
 * evicted before its children. Block b is at base + b * block_bytes (see kvd_pin_block).
 */
struct kvd_pin {
        void *view;           /* private: the mapping that base belongs to */
        uint8_t *base;        /* address of block 0, read-only (not on a GPU); NULL if empty */
        uint64_t block_bytes; /* bytes per block, as in kvd_space_memory */
        /* in: extra key of the chain (LoRA, images, a tenant), see kvd_lookup; 0 if none */
        uint64_t salt;
        uint32_t leaf;       /* id of the chain's deepest block */
        uint32_t generation; /* generation of that block */
        uint32_t n_blocks;   /* number of blocks in the chain */
        uint32_t n_tokens;   /* number of valid tokens in the chain */
        uint32_t group;      /* layer group; 65535: an object that was found by key */
        uint32_t n_below;    /* out: further tokens that kvd_fetch could load, see kvd_lookup */
        /* private: number of blocks posted behind the chain (kvd_post), and the last of them */
        uint32_t n_posted, posted, posted_generation;
};

#define KVD_BELOW_UNKNOWN UINT32_MAX

/*
 * Finds the longest stored prefix of tokens[0..n_tokens), compares its tokens, and pins it. Returns
 * the number of valid tokens (0: nothing found) and writes the ids of their blocks, first to last,
 * to blocks[]. At most max_blocks blocks are returned. The result is a multiple of block_tokens,
 * unless the chain ends in a sealed partial block that ends exactly at n_tokens. In a bidirectional
 * space it is n_tokens or 0. Makes no system call, takes no lock and never waits for the daemon.
 * Therefore it misses blocks in memory that was added to the pool but is not mapped here yet (it
 * returns the part of the chain before them). kvd_catch_up, kvd_seal, and kvd_alloc when its
 * magazine is empty map that memory. pin must be empty; if the result is 0 it stays empty.
 * pin->salt is an input: chains with different salts never share a block. The prefix ends before a
 * token id beyond the vocabulary. -EINVAL: invalid group, a pin that is not empty, or a salt in a
 * bidirectional space. If the daemon is dead, the result stays correct while its memory is mapped.
 *
 * In all cases pin->n_below is set to the number of further tokens in the daemon's file, so that
 * the caller can skip a useless kvd_fetch. 0: kvd_fetch would load nothing, as always without a
 * tier below the pool, or max_blocks cut the result. KVD_BELOW_UNKNOWN: only kvd_fetch can tell,
 * because remote servers are shared with other machines, or because the daemon is still reading its
 * file. The number covers one fetch, at most 512 blocks. It is a hint: it may miss what was written
 * just now, and in rare cases (once in thousands of calls) kvd_fetch finds less. In a bidirectional
 * space it is n_tokens if nothing was found in the pool and the file has the prefix, or else 0.
 * kvd_unpin resets it to 0.
 */
int64_t kvd_lookup(kvd_space *space, uint32_t group, const uint32_t *tokens, uint32_t n_tokens,
                   uint32_t *blocks, uint32_t max_blocks, struct kvd_pin *pin);

/*
 * Does what lookups do not do because it may wait: maps memory by which the pool has grown, and
 * attaches to the new daemon if the old one was replaced. Every call that sends the daemon a
 * request does this too. A process that makes only lookups should call this periodically, and
 * before a lookup that must not miss anything. If there is nothing to do it costs one system call.
 * Returns 0 or a negative errno. After a failure, calls return -EAGAIN at once for the time that
 * the failure took plus 100 ms, or until another call has attached.
 */
int kvd_catch_up(kvd_space *space);

/*
 * Starts to load the part of a chain that follows its blocks in the pool from the daemon's file, or
 * else from its remote servers. Returns the number of tokens of the prefix that are in the pool or
 * on their way (servers may have more, which is not known yet), without waiting. *fd becomes
 * readable when loading has ended, successfully or not: poll it for as long as waiting pays off,
 * then look up. *fd is -1 if there is nothing to wait for. Otherwise the caller owns it and may
 * close it at any time; loading continues. salt is as in struct kvd_pin.
 *
 * One call loads at most 512 blocks and 15,360 tokens; call again for more when it has ended. Only
 * full blocks can be loaded, so nothing else is stored below the pool. In a bidirectional space the
 * tokens are a whole prefix, of at most 131,072 tokens and 8,192 blocks, which is loaded completely
 * or not at all. -EBUSY: too many fetches of the caller's own domain are queued; -EINVAL: invalid
 * group, or a salt in a bidirectional space.
 */
int64_t kvd_fetch(kvd_space *space, uint32_t group, uint64_t salt, const uint32_t *tokens,
                  uint32_t n_tokens, int *fd);

/*
 * Does the same search without pinning, as a hint for schedulers: the result may be out of date
 * when it is returned. Also counts blocks that are not mapped yet.
 */
int64_t kvd_match(kvd_space *space, uint32_t group, const uint32_t *tokens, uint32_t n_tokens);
int64_t kvd_match_salted(kvd_space *space, uint32_t group, uint64_t salt, const uint32_t *tokens,
                         uint32_t n_tokens);

/* Releases the pin; its blocks must not be read afterwards. The pin may be empty. Cannot fail. */
void kvd_unpin(kvd_space *space, struct kvd_pin *pin);

static inline uint8_t *kvd_pin_block(const struct kvd_pin *pin, uint32_t block) {
        return pin->base + (uint64_t)block * pin->block_bytes;
}

/* ---- fill and publish ------------------------------------------------------------------------ */

struct kvd_block {
        uint8_t *data; /* block_bytes bytes, uninitialised; writable until sealed, then read-only */
        void *view;    /* private */
        uint32_t id;
        uint32_t generation;
};

/*
 * Allocates up to n blocks to fill. Returns the number of blocks, 1 to n; it is less than n if no
 * more are available. Blocks come from a small magazine that the library keeps (without a system
 * call) and that replies to kvd_seal refill, or else from the daemon, which evicts unpinned blocks
 * if necessary. Ids ascend, and are consecutive as far as possible: in a new space they are 0, 1, 2
 * and so on. All blocks of a call belong to one daemon. Does not wait until blocks become free. -ENOBUFS: every block of the pool is pinned or
 * being filled, or the daemon was still searching for an unused one at the call's deadline;
 * -EDQUOT: the quota of the caller or its domain is used up; -ETIMEDOUT: the daemon did not answer,
 * and no block was allocated.
 */
int kvd_alloc(kvd_space *space, uint32_t n, struct kvd_block *blocks);

/*
 * Keeps at least n blocks in the magazine from now on, so that the next kvd_alloc of up to n blocks
 * cannot fail. Later calls replace the blocks that kvd_alloc takes, as long as the daemon has any.
 * n replaces the previous reserve; it is 0 initially. Reserved blocks count as blocks being filled.
 * Returns the number of blocks in the magazine, which is less than n if the pool or the quota is
 * exhausted.
 */
int kvd_reserve(kvd_space *space, uint32_t n);

/*
 * Estimates how many blocks kvd_alloc could return now, for schedulers: magazine + free blocks +
 * growth that pool, quota and max_blocks allow + unpinned sealed blocks, up to the client's limit
 * of blocks being filled. Reads shared memory; makes no system call.
 *
 * The daemon updates its numbers with each reply to this process, and every 100 ms (less often for
 * millions of blocks). Blocks that other processes allocated or pinned since then are still
 * counted. Blocks that this process pinned since then are subtracted with their whole chains, and
 * blocks that it unpinned are added back proportionally; this is imprecise if its pins share
 * blocks. Not counted: blocks that the daemon could take from larger spaces and, under isolation =
 * arena, from segments of processes that have exited.
 */
int64_t kvd_available(kvd_space *space);

/*
 * Returns blocks that were not sealed; their contents are lost. Cannot fail: if the daemon dies, it
 * frees them too.
 */
void kvd_free(kvd_space *space, uint32_t n, struct kvd_block *blocks);

/*
 * Publishes blocks[0..n), which the caller has filled completely, as the continuation of the chain
 * that pin holds. An empty pin starts a chain, with pin->group and pin->salt. tokens[0..n_tokens)
 * are the tokens in these blocks, oldest first. All blocks but the last must be full; a partial
 * last block ends its chain for good, and its unused slots must be zero. In a bidirectional space
 * the pin must be empty, and the tokens are the whole prefix. On success returns n: all blocks are
 * sealed, and the pin holds the longer chain. If another process had sealed the same content first,
 * blocks[i] becomes that block (its id, data and generation) and the caller's copy is freed.
 *
 * More than 8,192 tokens or 2,048 blocks are sent in several requests. If a later request fails,
 * the result is the number of blocks that are sealed and in the pin; the caller still owns the
 * rest, and the next call reports the error. On a negative result pin and blocks are unchanged, and
 * the caller still owns the blocks. Exception: if the daemon did not answer (-ETIMEDOUT,
 * -ECONNRESET, -EPROTO) or its answer is unusable, it is unknown whether the blocks were sealed.
 * Their data is then NULL, and they can only be freed. If the daemon dies during the call
 * (-ECONNRESET), the next daemon does not have the blocks; free them. -ESTALE: the blocks belong to
 * a previous daemon or not to the caller. -EINVAL: counts that do not match, a token id beyond the
 * vocabulary, or a chain that ended with a partial block.
 */
int kvd_seal(kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
             const uint32_t *tokens, uint32_t n_tokens);

/*
 * Does the same as kvd_seal, for engines that cannot replace a block in a table that is in use.
 * ids[i] is set to the block that now holds the content of blocks[i]. If that is the caller's
 * block, blocks[i] becomes {0}. If another process had sealed the same content first, blocks[i] is
 * unchanged and still the caller's: free it with kvd_free when no kernel reads it any more. The pin
 * holds the chain of ids. If only some blocks were sealed, the remaining ids are undefined.
 */
int kvd_seal_keep(kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
                  const uint32_t *tokens, uint32_t n_tokens, uint32_t *ids);

/*
 * Publishes full blocks without waiting for a reply, for blocks that fill one by one. They continue
 * the chain that pin holds and the blocks already posted behind it. Returns the number of posted
 * blocks; less than n if the rest could not be posted. Usually makes no system call. Other
 * processes find the blocks within microseconds if the daemon is not busy, or within about 2 ms if
 * so many clients post that the daemon polls for posts.
 *
 * The caller may read the blocks until it frees each with kvd_free, and must not write them any
 * more. This also holds for duplicates of content that another process had sealed first, which are
 * not reported. The pin keeps its chain. It can be extended further by kvd_post, unless the last
 * posted block was freed, and by kvd_seal, after which it holds the whole chain.
 *
 * Errors of posted blocks are reported once, by the next kvd_post (which then posts nothing) or
 * kvd_flush. -ECANCELED: the daemon refused some blocks, and kvd_error() gives their number and the
 * reason for the last. Reasons are those of kvd_seal, a refused block before them, and eviction of
 * another process's block before them. -ECONNRESET: a daemon ended before it had processed all
 * posts. Such blocks are not published and remain the caller's. Errors of the call itself: -ESTALE
 * as for kvd_seal; -EINVAL: also for a partial block and in a bidirectional space (use kvd_seal);
 * -ETIMEDOUT: the daemon does not process posts.
 *
 * kvd_flush waits until the daemon has processed all posts of all threads in the space. It returns
 * 0 or an error of posted blocks. kvd_space_close flushes as well.
 */
int kvd_post(kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
             const uint32_t *tokens, uint32_t n_tokens);
int kvd_flush(kvd_space *space);

/*
 * Copies bytes from private memory into a block, past the processor's caches from 64 KiB on (with
 * non-temporal stores).
 */
void kvd_copy(void *to, const void *from, size_t bytes);

/* ---- blocks by key --------------------------------------------------------------------------- */

/*
 * For engines that identify objects by hashes, in a causal space of opaque blocks with block_tokens
 * of 4 or more, beside the chains of tokens in that space. A key is 32 arbitrary bytes, for example
 * an SHA-256 (16 to 28 bytes, 4 * block_tokens, if block_tokens is 4 to 7), and names an object of
 * 1 to 1,024 blocks; the number must be the same whenever the key is used. An object is found
 * completely or not at all. Keys are compared in full, not only by hash. Key and salt together are
 * the name: an engine with several groups of blocks, such as sliding windows and Mamba states,
 * passes the group's number as salt. Lookups of tokens never find objects, whatever their keys, and
 * lookups of keys never find chains of tokens. The vocabulary does not limit keys.
 *
 * kvd_lookup_keys looks up n_keys consecutive keys. blocks is [n_keys][blocks_per_key]; pins is
 * [n_keys], all empty but for their salts. For each object found, its pin is filled (n_blocks is
 * not 0) and its row of blocks holds the ids; other rows are undefined. Returns the number of
 * objects found. n_below of a pin whose object was not found is not 0 if kvd_fetch_key could load
 * the object. n_tokens of a pin counts the words of its blocks' keys.
 *
 * kvd_seal_key publishes one object as kvd_seal does, under pin->salt; blocks[i] may become the
 * block of a process that was first. kvd_post_key publishes one as kvd_post does: without waiting,
 * and the blocks remain readable under their own ids until kvd_free, even if another process was
 * first. It returns the number of blocks posted; if that is less than n, the object will not be
 * found, and the posted blocks can only be freed. kvd_fetch_key loads what the tiers below the pool
 * have of one object of n blocks, as kvd_fetch does, and returns how many of its blocks are in the
 * pool or on their way.
 *
 * -EINVAL: the space has no keys, a pin is not empty, or a count is out of range; nothing is pinned
 * then. Other errors are those of kvd_seal, kvd_post and kvd_fetch.
 */
int64_t kvd_lookup_keys(kvd_space *space, const void *keys, uint32_t n_keys,
                        uint32_t blocks_per_key, uint32_t *blocks, struct kvd_pin *pins);
int kvd_seal_key(kvd_space *space, const void *key, uint32_t n, struct kvd_block *blocks,
                 struct kvd_pin *pin);
int kvd_post_key(kvd_space *space, uint64_t salt, const void *key, uint32_t n,
                 struct kvd_block *blocks);
int64_t kvd_fetch_key(kvd_space *space, uint64_t salt, const void *key, uint32_t n, int *fd);

/* ---- single flight (bidirectional prefixes) -------------------------------------------------- */

/*
 * Requests the right to compute a bidirectional prefix that kvd_lookup did not find. Returns 1: the
 * caller computes and seals the prefix, then calls kvd_lease_end; other processes wait meanwhile.
 * Returns 0: another process finished the prefix meanwhile; look up again. -EBUSY: another process
 * is still computing it after timeout_ms milliseconds (0: do not wait); compute it privately. If
 * the holder dies, its lease ends and waiting processes wake up.
 */
int kvd_lease(kvd_space *space, const uint32_t *tokens, uint32_t n_tokens, uint32_t timeout_ms);
int kvd_lease_end(kvd_space *space, const uint32_t *tokens, uint32_t n_tokens);

/* ---- sessions of agents ---------------------------------------------------------------------- */

/*
 * A session says of a conversation that pauses (a tool runs, a person types) which chains it will
 * continue. Until it ends, their blocks are evicted after all others of the space (KVD_KEEP_HIGH),
 * or not at all (KVD_KEEP_PINNED).
 *
 * kvd_session begins a session with that name (1 to KVD_NAME_MAX printable ASCII characters, without
 * spaces and quotes), or replaces it: its chains, keep, and time. The chains are those of the pins,
 * which are released if the call succeeds, without counting as a use; empty pins are ignored. No
 * pin may be in the array twice: a copy of a struct is the same pin. A session belongs to the user
 * and the space, not to the process. It ends after the given seconds (1 to KVD_SESSION_SECONDS), by
 * kvd_session_end, or with the daemon. -EDQUOT: sessions would pin more than the space or the domain
 * may (KVD_KEEP_HIGH would not), or the domain is at a limit of kvctl domain; nothing has changed;
 * -ENOBUFS: the user or the space has too many sessions; -ESTALE: blocks or their daemon are gone,
 * look up again; -ENOENT: there is no session to end; -EINVAL: a wrong argument, or all pins are
 * empty.
 */
enum kvd_keep { KVD_KEEP_HIGH = 1, KVD_KEEP_PINNED = 2 };
#define KVD_SESSION_PINS 512 /* at most */
#define KVD_SESSION_SECONDS 604800

int kvd_session(kvd_space *space, const char *name, uint32_t keep, uint32_t seconds,
                struct kvd_pin *pins, uint32_t n_pins);
int kvd_session_end(kvd_space *space, const char *name);

/* ---- follow a space -------------------------------------------------------------------------- */

/* A full block of a chain of tokens that came into the cache. */
struct kvd_stored {
        uint64_t hash;   /* names the block and all tokens before it; never 0 */
        uint64_t parent; /* hash of the block before it; 0 if it begins a chain */
        uint64_t
                salt; /* of its chain; in a bidirectional space the number of tokens of its prefix */
        uint32_t depth; /* number of blocks before it */
        uint32_t group;
        uint32_t n_tokens;
        const uint32_t *tokens; /* valid during the call */
};

/* Called by kvd_follow_step in the caller's thread. They must not call kvd_follow_step or _end. */
struct kvd_follow_ops {
        void (*stored)(void *arg, const struct kvd_stored *block);
        void (*removed)(void *arg, uint64_t hash);
        void (*cleared)(void *arg);      /* all blocks are gone */
        void (*away)(void *arg, int is); /* the daemon is away, or is back; may be NULL */
};

typedef struct kvd_follow kvd_follow;

/*
 * Follows which blocks are in a space, as routers do that send requests where their prefix is.
 * There are no notifications: each kvd_follow_step reports the differences since the last one, at
 * first all blocks, parents before their children; a block is reported as removed before others in
 * its place are reported as stored. A step reads shared memory, and makes one system call to see
 * whether the daemon is there (kvd_catch_up); without one, the last state stays. Others do not
 * notice. Objects that are found by key and part-filled blocks are not reported. ops and arg must
 * outlive the follower. End it with kvd_follow_end, which returns NULL, before the space is closed.
 * A follower is for one thread at a time. Both return 0 or a negative errno: -ENOMEM, -ECHILD.
 */
int kvd_follow_begin(kvd_space *space, const struct kvd_follow_ops *ops, void *arg,
                     kvd_follow **ret);
int kvd_follow_step(kvd_follow *follow);
kvd_follow *kvd_follow_end(kvd_follow *follow);

/* ---- numbers --------------------------------------------------------------------------------- */

struct kvd_counters {                  /* of this process in this space, since it was opened */
        uint64_t lookups, lookup_hits; /* calls; calls that found something */
        uint64_t tokens_asked, tokens_found; /* sums over all lookups */
        /* sealed: includes posted blocks; duplicate: another process had sealed them first */
        uint64_t blocks_allocated, blocks_sealed, blocks_duplicate;
        uint64_t refused;    /* allocations refused by quota or a full pool */
        uint64_t retries;    /* searches repeated because of an eviction */
        uint64_t reconnects; /* times that the space attached again */
};
void kvd_counters(kvd_space *space, struct kvd_counters *ret);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
