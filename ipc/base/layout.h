/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_LAYOUT_H
#define KVD_BASE_LAYOUT_H

/*
 * Memory that the daemon and its clients share: the index of a space (one memfd, written by the
 * daemon, mapped read-only by clients) and a client's pin page (one memfd per client and space,
 * written by that client, except for fields marked as the daemon's). Sections start on pages of
 * 4096 bytes.
 *
 *      index   +--------------------+ 0
 *              | struct kvd_index   |   geometry, offsets, secret, epochs, counters, settings
 *              +--------------------+ table_off
 *              | block table        |   table_slots x 8: tag and block id + 1, in buckets
 *              +--------------------+ run_table_off
 *              | run table          |   run_table_slots x 8: tag and run id
 *              +--------------------+ desc_off
 *              | descriptors        |   capacity x desc_stride: struct kvd_desc, then block_tokens token ids
 *              +--------------------+ run_off
 *              | runs               |   run_capacity x run_stride: struct kvd_run, then its tokens, packed
 *              +--------------------+ memory_off
 *              | memory             |   max_segments x 4: changes when a segment gets other memory
 *              +--------------------+ change_off
 *              | changes            |   change_slots x 4: ring, ids of blocks that entered or left the index
 *              +--------------------+ record_off
 *              | records            |   capacity x 8: handle of the block's record in the file; 0: none
 *              +--------------------+ hint_off
 *              | hints              |   hint_slots x 8: which record follows which
 *              +--------------------+ proof_off
 *              | proofs             |   capacity x 8: proof of each block, in VMM spaces only
 *              +--------------------+ promise_off
 *              | promises             |   capacity x (n_shards - 1) x 16: struct kvd_promise
 *              +--------------------+ size
 *
 *      pins    +--------------------+ 0
 *              | struct kvd_pinpage |   the client's counters
 *              +--------------------+ KVD_PINS_OFF
 *              | words              |   capacity x 8: struct kvd_pin_words, the client's pins of the block
 *              +--------------------+ kvd_use_off(capacity)
 *              | use                |   capacity x 4: struct kvd_use, attention that the block receives
 *              +--------------------+ kvd_asked_off(capacity)
 *              | asked              |   KVD_ASKED_WORDS x 8: ring of the last lookups (struct kvd_asked)
 *              +--------------------+ kvd_groups_off(capacity)
 *              | groups             |   a bit for each KVD_GROUP_IDS ids: whether the client has used their words
 *              +--------------------+ kvd_posts_off(capacity)
 *              | posts              |   kvd_posts(block_tokens) x kvd_post_stride(block_tokens): ring of struct kvd_post
 *              +--------------------+
 *
 * Without a file tier (hint_slots is 0) records and hints are empty. Host spaces keep the proof of
 * a block in desc.semaphore_value; spaces behind legacy handles have no proofs.
 *
 * Both files are sparse: pages that were never touched take no memory. The size of an index or a
 * pin page never changes; a space that must hold more is a new space.
 */

#include <assert.h>
#include <stdalign.h>
#include <stdint.h>

#include "ipc/base/geometry.h"
#include "ipc/base/settings.h"
#include "ipc/base/shm.h"
#include "ipc/base/text.h"
#include "ipc/base/util.h"

#define KVD_INDEX_MAGIC UINT64_C(0x317864690064766b) /* "kvd\0idx1" little endian */
#define KVD_PINS_MAGIC UINT64_C(0x316e69700064766b)  /* "kvd\0pin1" */
#define KVD_LAYOUT_VERSION 19u

#define KVD_RUN_BLOCKS 16u /* blocks in a run: their ids fill one cache line */
#define KVD_MAX_SEGMENTS 8192u
#define KVD_SHARDS 8u /* maximum number of GPUs of a pool */
#define KVD_SECRET_BYTES 192u

/* ---- slot word: a block's state and generation ----------------------------------------------- */

enum kvd_state {
        KVD_ABSENT = 0, /* the block's segment has no memory */
        KVD_FREE = 1,
        KVD_FILLING = 2, /* owned by one client, which writes it; invisible to others */
        KVD_SEALED = 3,  /* immutable; readable by all clients of the space */
        /* the daemon checks whether a client pins it; becomes SEALED again, or FREE */
        KVD_RETIRING = 4,
        /* its client has disconnected, but the client's process may still write it */
        KVD_LIMBO = 5,
        KVD_N_STATES
};

/*
 * A reference to a block's incarnation: id in the low half, generation in the high half.
 * Generations start at 1, so 0 refers to no block. A slot word holds the state in the low byte and
 * the generation in the high half.
 */
typedef uint64_t kvd_ref;
#define KVD_ROOT ((kvd_ref)0) /* parent of a chain's first block */

static inline kvd_ref kvd_ref_make(uint32_t id, uint32_t generation) {
        return (uint64_t)generation << 32 | id;
}

static inline uint32_t kvd_ref_id(kvd_ref ref) {
        return (uint32_t)ref;
}

static inline uint32_t kvd_ref_generation(kvd_ref ref) {
        return (uint32_t)(ref >> 32);
}

static inline uint64_t kvd_slot_make(enum kvd_state state, uint32_t generation) {
        return (uint64_t)generation << 32 | (uint64_t)state;
}

static inline enum kvd_state kvd_slot_state(uint64_t slot) {
        return (enum kvd_state)(slot & 0xff);
}

static inline uint32_t kvd_slot_generation(uint64_t slot) {
        return (uint32_t)(slot >> 32);
}

/* ---- descriptor and run ---------------------------------------------------------------------- */

struct kvd_key {
        uint64_t lo, hi;
};

enum kvd_desc_flags {
        /* belongs to a sequence (sequence.h), in no table; depth: position of its first token */
        KVD_DESC_PRIVATE = 1,
        KVD_DESC_APPROX = 2,   /* private; contents revived from a sketch */
        KVD_DESC_POISONED = 4, /* its writer died before it wrote the data; in no table */
        /* private; each head holds different tokens, whose ids are not recorded */
        KVD_DESC_COMPACT = 8,
};

struct kvd_desc {
        shm_u64 slot;       /* slot word; the version word of the other fields */
        struct kvd_key key; /* key of the chain that ends with this block (key.h) */
        kvd_ref parent;     /* the block before it in its chain, or KVD_ROOT */
        uint32_t depth;     /* number of blocks before it in its chain */
        uint16_t n_tokens;  /* if less than kvd_full_tokens, the block has no children */
        uint16_t group;     /* layer group, or KVD_GROUP_KEYED */
        /* causal: salt of the chain; bidirectional: number of tokens of the whole prefix */
        uint64_t root;
        uint32_t flags;           /* enum kvd_desc_flags */
        uint32_t semaphore;       /* device spaces, see semaphore.h; 0: the data is there */
        uint64_t semaphore_value; /* host spaces: proof of the fields above and the incarnation */
        uint32_t tokens[];        /* block_tokens token ids; unused ones are 0 */
};
static_assert(sizeof(struct kvd_desc) == 64 && offsetof(struct kvd_desc, tokens) == 64,
              "layout is ABI: bump KVD_LAYOUT_VERSION");

/*
 * If several streams write a block, because it has several shards: what each of them promises,
 * except for the one in the descriptor. Means something while desc.semaphore is not 0.
 */
struct kvd_promise {
        uint64_t value;
        uint32_t semaphore; /* as desc.semaphore; 0: no further stream */
        uint32_t writer;    /* in messages: writer_token of the stream's client; else 0 */
};
static_assert(sizeof(struct kvd_promise) == 16, "layout is ABI: bump KVD_LAYOUT_VERSION");

/*
 * 16 consecutive blocks of a chain, found with one probe. leaf is the version word: the reference
 * of the last block, or 0 while the run is rewritten or unused. A run is written once per leaf.
 * While the leaf is sealed, ids and tokens are valid, because a parent stays as long as its
 * children do.
 */
struct kvd_run {
        shm_u64 leaf;
        struct kvd_key key; /* key of the run's tokens and the previous run (key.h) */
        kvd_ref parent;     /* last block of the previous run, or KVD_ROOT */
        uint32_t group;
        uint32_t pad;         /* must be 0 */
        uint64_t root;        /* as in the blocks' descriptors */
        uint64_t reserved[2]; /* must be 0 */
        uint32_t ids[KVD_RUN_BLOCKS];
        uint32_t tokens[]; /* packed (pack.h) */
};
static_assert(sizeof(struct kvd_run) == 128 && offsetof(struct kvd_run, ids) == 64,
              "layout is ABI: bump KVD_LAYOUT_VERSION");

/* ---- tables: from keys to ids ---------------------------------------------------------------- */

/*
 * A table is an array of buckets of one cache line. A key has two buckets, its home and an
 * alternate one, chosen by different bits. An entry goes into the home bucket if that has an empty
 * slot, else into the alternate one; if both are full, the key gets no entry. Entries never move:
 * one store enters a key, one store removes it. So for any choice of keys, entering, removing and
 * finding one touch at most two cache lines, and keys chosen by an attacker can only make blocks of
 * the attacker's own space unfindable.
 *
 * The table has three slots for each id. With all ids in use, a bucket is home to 2.7 entries on
 * average (Poisson), one entry in 1,100 finds its home full, 0.6 % of the buckets are full, and at
 * most five entries in a million find no slot. A block without an entry is sealed but cannot be
 * found; KVD_SPACE_UNINDEXED counts these blocks.
 */
#define KVD_BUCKET_SLOTS 8u
#define KVD_BUCKETS 2u /* buckets of a key */

/* A slot has a tag (low half of key.hi) in the high half and id + 1 in the low half; 0: empty. */
static inline uint64_t kvd_table_slot(struct kvd_key key, uint32_t id) {
        return (key.hi << 32) | ((uint64_t)id + 1);
}

/* First slot of a key's home (which = 0) or alternate bucket (1), in a table of `slots` slots. */
static inline uint32_t kvd_bucket(uint32_t slots, struct kvd_key key, uint32_t which) {
        uint64_t bits = which ? key.lo >> 32 : (uint32_t)key.lo;

        return (uint32_t)(bits * (slots / KVD_BUCKET_SLOTS) >> 32) * KVD_BUCKET_SLOTS;
}

/* Slot i of the search for a key in a bucket. Keys start at different slots, to spread them. */
static inline uint32_t kvd_bucket_slot(struct kvd_key key, uint32_t i) {
        return ((uint32_t)(key.hi >> 32) + i) % KVD_BUCKET_SLOTS;
}

/* ---- tiers below the pool -------------------------------------------------------------------- */

enum kvd_below {
        KVD_BELOW_FILE = 1,    /* a file tier; hints describe its records */
        KVD_BELOW_UNTOLD = 2,  /* ... but the daemon has not entered all hints yet */
        KVD_BELOW_SERVERS = 4, /* servers that other machines fill, too: only a fetch can tell */
};

/*
 * A record's hint is a hash of its tokens, group and root and of the record before it. With hints,
 * a client that holds the last resident block of a chain follows the chain through the file's
 * records without a request to the daemon. A hint is in one of two buckets, like a key, and stays
 * there. It proves nothing: a slot has 16 bits of it as tag, so that other tokens match once in
 * 2^16, and a hint is missing if its buckets are full. kvd_fetch decides what the file has.
 */
#define KVD_HANDLE_BITS 48u

#define KVD_FETCH_BLOCKS 512u   /* blocks that one kvd_fetch brings, at most */
#define KVD_FETCH_TOKENS 15360u /* tokens of a chain that fit in a request */
#define KVD_FETCH_DEPTH 4096u   /* blocks of a chain that one fetch walks */
/* of a bidirectional prefix, whose tokens a client sends with several requests */
#define KVD_WHOLE_TOKENS 131072u
#define KVD_WHOLE_BLOCKS 8192u

/*
 * Fetches can bring back the full blocks of a causal chain, one request after the other, and a
 * bidirectional prefix as a whole. Nothing else is written to a tier, looked for in one, or hinted
 * at. kvd_fetch_most is the number of tokens of a causal chain that one request brings, and
 * kvd_fetch_takes tells whether a bidirectional prefix of that length can come back.
 */
static inline uint32_t kvd_fetch_most(uint32_t block_tokens) {
        return MIN(KVD_FETCH_TOKENS / block_tokens, KVD_FETCH_DEPTH) * block_tokens;
}

static inline bool kvd_fetch_takes(uint64_t n_tokens, uint32_t block_tokens) {
        return n_tokens <= KVD_WHOLE_TOKENS && DIV_UP(n_tokens, block_tokens) <= KVD_WHOLE_BLOCKS;
}

static inline struct kvd_key kvd_hint_key(uint64_t hint) {
        return (struct kvd_key){hint, hint * UINT64_C(0x9e3779b97f4a7c15)};
}

/* Slot: 16 bits of the hint's hash as tag, then the 48-bit handle of its record; 0: empty. */
static inline uint64_t kvd_hint_slot(uint64_t hint, uint64_t handle) {
        return kvd_hint_key(hint).hi >> KVD_HANDLE_BITS << KVD_HANDLE_BITS | handle;
}

static inline uint64_t kvd_hint_handle(uint64_t slot) {
        return slot & ((UINT64_C(1) << KVD_HANDLE_BITS) - 1);
}

/* ---- index header ---------------------------------------------------------------------------- */

enum kvd_space_counter {
#define KVD_COUNTER(name, unit, text) KVD_SPACE_##name,
#include "ipc/base/counters.def"
        KVD_N_SPACE_COUNTERS
};

#define KVD_SPACE_COUNTERS_ROOM 48u

struct kvd_index {
        uint64_t magic;
        uint32_t version;
        uint32_t header_bytes;
        uint64_t size; /* bytes of the whole index */
        /* random ids: [0] of the cache, which may outlive its daemon; [1] of this index */
        uint64_t instance[2];
        struct kvd_shape geometry;
        /* KVD_kind_*, KVD_keys_*, KVD_policy_*; arena: 1 with isolation = arena */
        uint32_t kind, keys, policy, arena;
        uint64_t block_bytes;
        uint64_t segment_bytes;  /* address space of a segment; the same for all */
        uint32_t segment_blocks; /* maximum number of whole blocks in a segment */
        uint32_t capacity;       /* number of block ids */
        uint32_t run_capacity;   /* number of run ids */
        uint32_t max_segments;
        uint64_t desc_off, table_off, run_off, run_table_off, memory_off, change_off;
        uint64_t record_off, hint_off;
        uint64_t proof_off;                    /* 0 unless the backend is VMM */
        uint64_t promise_off;                  /* 0 if there is one shard */
        uint32_t desc_stride, run_stride;      /* bytes */
        uint32_t run_words;                    /* u32 words of a run's packed tokens (pack.h) */
        uint32_t table_slots, run_table_slots; /* multiples of KVD_BUCKET_SLOTS */
        uint32_t change_slots;                 /* a power of two */
        uint32_t hint_slots; /* multiple of KVD_BUCKET_SLOTS; 0: the space has no file tier */
        uint8_t secret[KVD_SECRET_BYTES];
        uint32_t backend;        /* enum kvd_backend (device.h) */
        uint32_t semaphore_rows; /* rows of the semaphore page (semaphore.h); 0 in host spaces */
        /*
         * A block has an equal part on each GPU of the pool, its shards, at the same place. Shard i is
         * on the GPU with UUID devices[i]. In host spaces there is one shard, and no UUID.
         */
        uint64_t shard_bytes; /* block_bytes / n_shards */
        uint32_t n_shards;
        uint32_t pad; /* must be 0 */
        uint8_t devices[KVD_SHARDS][16];

        /* for the next daemon, see store/cache/adopt.c */
        char name[KVD_NAME_MAX + 1], domain[KVD_NAME_MAX + 1];
        uint32_t life;       /* number of indexes that the cache has had, including this one */
        uint32_t max_blocks; /* as requested; 0: as many as quota and pool allow */
        uint64_t proof;      /* of the fields above, but for max_blocks and policy */

        /* A word that "moves" is incremented. */
        alignas(64) shm_u32 n_segments; /* number of segments; never decreases */
        shm_u32 alive;                  /* 0: the space was deleted */
        shm_u32 clock;                  /* moves when the space is used; orders uses of blocks */
        shm_u32 lease_epoch;            /* moves when a compute lease ends; a futex word */
        /* moves when there is news for a sequence or a sample; a futex word */
        shm_u32 sync_epoch;
        /* number of sealed blocks whose data the daemon has not seen arrive (device spaces) */
        shm_u32 n_pending;
        /* moves when clients should unmap segments (message drain) */
        shm_u32 drain_epoch;
        /* moves when a job of the space ends, whether it succeeded or failed; a futex word */
        shm_u32 job_epoch;
        /* host spaces: moves when a segment gets another memfd, see kvd_index_memory */
        shm_u32 memory_epoch;
        shm_u32 n_pages;     /* number of pin pages kept for the next daemon */
        shm_u32 n_followers; /* clients note their lookups while this is not 0 */
        shm_u32 below;       /* enum kvd_below: tiers that exist and work */

        alignas(64) shm_u64 changes_begun; /* number of changes, see kvd_index_changes, ... */
        shm_u64 changes;                   /* ... and number of those that readers may read */

        alignas(64) shm_u64 counters[KVD_SPACE_COUNTERS_ROOM];

        /* the methods */
        alignas(64) shm_u64 settings[KVD_SETTINGS_ROOM]; /* by enum kvd_setting */
        /* table of depths: 0: none, else 1 + the value of r_def that it was built with */
        shm_u32 depth_def;
        shm_u32 depth[101];      /* number of layers to reuse, by prefix ratio in percent */
        uint32_t label_channels; /* channels of a key in its label, see summary.h */
        uint32_t n_places;       /* maximum number of exact copies, see place.h */
};
static_assert(sizeof(struct kvd_index) <= 4096, "the header has one page");
static_assert(KVD_N_SPACE_COUNTERS <= KVD_SPACE_COUNTERS_ROOM, "room for counters");

#define KVD_INDEX_HEADER_BYTES 4096u

/* ---- segments -------------------------------------------------------------------------------- */

/*
 * In host spaces a segment holds a whole number of blocks. On a GPU all segments of the pool have
 * the same size, whatever the block size of a space: a block that would straddle two segments is
 * never used, and its id stays KVD_ABSENT.
 */
static inline uint32_t kvd_segment_of(const struct kvd_index *ix, uint32_t id) {
        if (ix->backend == 0)
                return id / ix->segment_blocks;
        return (uint32_t)((uint64_t)id * ix->block_bytes / ix->segment_bytes);
}

/* The blocks of a segment: ids from first to end - 1. */
static inline uint32_t kvd_segment_first(const struct kvd_index *ix, uint32_t segment) {
        return (uint32_t)DIV_UP(segment * ix->segment_bytes, ix->block_bytes);
}

static inline uint32_t kvd_segment_end(const struct kvd_index *ix, uint32_t segment) {
        return (uint32_t)((segment + UINT64_C(1)) * ix->segment_bytes / ix->block_bytes);
}

/* Bytes of a segment on each GPU of the pool; in host spaces, of the segment. */
static inline uint64_t kvd_shard_segment(const struct kvd_index *ix) {
        return ix->segment_bytes / ix->n_shards;
}

/* Number of block ids in the first n segments. */
static inline uint32_t kvd_segments_ids(const struct kvd_index *ix, uint32_t n) {
        return (uint32_t)(n * ix->segment_bytes / ix->block_bytes);
}

/* ---- pin page -------------------------------------------------------------------------------- */

enum kvd_client_counter {
        KVD_CLIENT_LOOKUPS,
        KVD_CLIENT_HITS,
        KVD_CLIENT_TOKENS_ASKED,
        KVD_CLIENT_TOKENS_FOUND,
        KVD_CLIENT_RETRIES,
        KVD_N_CLIENT_COUNTERS
};

/*
 * Behind the counters are latency histograms of calls: for each kind the sum in ns, then the number
 * of calls below 64 ns, from 64 ns to below 128 ns, and so on. The last bucket counts all longer
 * calls.
 */
enum kvd_latency {
        KVD_LATENCY_LOOKUP,   /* one call in KVD_LATENCY_SAMPLED */
        KVD_LATENCY_SEAL,     /* requests to the daemon */
        KVD_LATENCY_ALLOCATE, /* requests to the daemon; most allocations need none */
        KVD_LATENCY_FETCH,    /* from the request to the end; counted by the daemon */
        KVD_N_LATENCIES
};

#define KVD_LATENCY_SAMPLED 64u
#define KVD_LATENCY_BUCKETS 32u
#define KVD_LATENCY_FIRST 6u /* the first bucket ends at 1 << KVD_LATENCY_FIRST ns */
#define KVD_CLIENT_COUNTERS_ROOM 16u
#define KVD_CLIENT_WORDS (KVD_CLIENT_COUNTERS_ROOM + KVD_N_LATENCIES * (1u + KVD_LATENCY_BUCKETS))
static_assert(KVD_N_CLIENT_COUNTERS <= KVD_CLIENT_COUNTERS_ROOM, "histograms are behind counters");

/* Index of the sum in the page's counters. */
static inline uint32_t kvd_latency_sum(enum kvd_latency which) {
        return KVD_CLIENT_COUNTERS_ROOM + (uint32_t)which * (1 + KVD_LATENCY_BUCKETS);
}

/* Index of the bucket that counts a call of ns nanoseconds. */
static inline uint32_t kvd_latency_bucket(enum kvd_latency which, uint64_t ns) {
        uint32_t bits = ns ? 64 - (uint32_t)__builtin_clzll(ns) : 0;
        uint32_t bucket = bits > KVD_LATENCY_FIRST ? bits - KVD_LATENCY_FIRST : 0;

        return kvd_latency_sum(which) + 1 + MIN(bucket, KVD_LATENCY_BUCKETS - 1);
}

struct kvd_pinpage {
        uint64_t magic;
        uint32_t version;
        uint32_t capacity;
        /* enum kvd_client_counter, then the histograms; used for statistics only */
        alignas(64) shm_u64 counters[KVD_CLIENT_WORDS];
        /* number of blocks in the chains of this client's pins, counted once for each pin */
        alignas(64) shm_u64 held;
        shm_u64 moved; /* number of changes of other pins: of sequences' entries, tensors, streams */
        /*
         * Written by the daemon: life of the index that the pins refer to. If it differs from life
         * in the client's index, the daemon was replaced and that index is no longer valid.
         */
        shm_u32 epoch;
        shm_u32 left; /* 1: the client has unmapped the space */

        /* written by the daemon: how much the client may allocate, see store/cache/available.c */
        alignas(64) shm_u64 held_seen; /* value of held when the daemon last scanned the pins */
        shm_u32 held_alone;            /* number of blocks that only this client held then */
        shm_u32 available;             /* number of blocks that the client could allocate now */
        shm_u32 may_fill;              /* number of further blocks that client_quota allows */

        /* ring of struct kvd_asked: number of words begun, and of words complete */
        alignas(64) shm_u64 asked_begun;
        shm_u64 asked;
        shm_u64 not_noted; /* lookups not noted, as another thread was noting one */

        /* number of posts that the client has written */
        alignas(64) shm_u64 posted;
        shm_u32 kicked; /* 0, or KVD_KICKED, KVD_KICKED_HARD: see struct kvd_post */
        /* written by the daemon: number of posts taken, number of those refused, the last error */
        alignas(64) shm_u64 posts_taken;
        shm_u64 posts_refused;
        shm_u32 posts_errno;
};
static_assert(sizeof(struct kvd_pinpage) <= 4096, "the pins begin in the next page");

#define KVD_PINS_OFF 4096u

/* Adjacent, because unpinning and evicting a block each need both. */
struct kvd_pin_words {
        shm_u32 pins;  /* number of the client's pins of the block */
        shm_u32 touch; /* index clock when the client last unpinned it; 0: never */
};
static_assert(sizeof(struct kvd_pin_words) == 8, "layout is ABI: bump KVD_LAYOUT_VERSION");

/*
 * Block ids are divided into groups. Before a client first pins a block of a group, it sets the
 * group's bit (step C2b of tests/client/spin/pins.pml), which stays set. So the daemon reads no pins
 * of a client in groups that the client never used, and their pages stay holes.
 */
#define KVD_GROUP_IDS 512u /* words of a page */

static inline shm_u64 *kvd_group_word(shm_u64 *groups, uint32_t id) {
        return &groups[id / KVD_GROUP_IDS / 64];
}

static inline uint64_t kvd_group_bit(uint32_t id) {
        return UINT64_C(1) << id / KVD_GROUP_IDS % 64;
}

/*
 * C2b. Another thread may have set the bit. If the daemon did not see it after D2, then D2 precedes
 * that thread's fetch_or, this load and this thread's second look (C5) in the single order of seq_cst
 * accesses, and C5 sees D2. An acquire load would not be part of that order.
 */
static inline void kvd_group_use(shm_u64 *groups, uint32_t id) {
        shm_u64 *word = kvd_group_word(groups, id);

        if (!(atomic_load_explicit(word, memory_order_seq_cst) & kvd_group_bit(id)))
                atomic_fetch_or_explicit(word, kvd_group_bit(id), memory_order_seq_cst);
}

/*
 * How much attention a client's sequence pays to a block: moving averages, 0 if unknown. They order
 * the blocks that leave first under memory pressure.
 */
struct kvd_use {
        uint16_t mass; /* attention mass per token; 256: average of the sequence; saturates */
        uint16_t hits; /* decayed selections; 256: one per step and token; saturates */
};

static inline uint64_t kvd_use_off(uint32_t capacity) {
        return KVD_PINS_OFF + ALIGN_UP((uint64_t)capacity * sizeof(struct kvd_pin_words), 4096);
}

/*
 * A lookup, as its client notes it while n_followers is not 0: words from index asked %
 * KVD_ASKED_WORDS on, wrapping around at the end of the ring. keys are the low halves of the chain
 * keys of the first blocks looked up, KVD_ASKED_KEYS at most. Equal keys mean equal prefixes; keys
 * reveal no tokens.
 */
struct kvd_asked {
        uint32_t n_keys, group;
        uint32_t n_tokens, found; /* number of tokens requested, and found */
        uint64_t keys[];
};
#define KVD_ASKED_WORDS 8192u /* a power of two */
#define KVD_ASKED_KEYS 4096u
#define KVD_ASKED_HEAD (sizeof(struct kvd_asked) / sizeof(uint64_t))

static inline uint64_t kvd_asked_off(uint32_t capacity) {
        return kvd_use_off(capacity) + ALIGN_UP((uint64_t)capacity * sizeof(struct kvd_use), 4096);
}

/*
 * A filled block that the daemon is to seal, without a reply. The client writes the post at index
 * posted % kvd_posts, increments posted, and then exchanges kicked for KVD_KICKED, or for
 * KVD_KICKED_HARD if half of the ring is full. It sends message post only if the old value was
 * less. The daemon exchanges kicked for 0 before it reads posted. A daemon that polls the ring
 * leaves KVD_KICKED in place, and so gets no message before the ring is half full.
 * tests/client/spin/post.pml models the protocol.
 */
struct kvd_post {
        kvd_ref block;
        kvd_ref parent;      /* as in message seal, or a block posted earlier */
        uint64_t root;       /* as in message seal */
        uint32_t group, pad; /* pad: must be 0 */
        uint32_t tokens[];   /* kvd_full_tokens of them: only full blocks are posted */
};
#define KVD_POSTS 64u                         /* at most */
#define KVD_POSTS_BYTES (UINT64_C(256) << 10) /* of a ring of fewer posts, about */
#define KVD_POSTS_LEAST 8u
#define KVD_KICKED 1u
#define KVD_KICKED_HARD 2u

static inline uint64_t kvd_post_stride(uint32_t block_tokens) {
        return ALIGN_UP(sizeof(struct kvd_post) + block_tokens * sizeof(uint32_t), 64);
}

/* Number of posts in a ring: fewer if blocks have very many tokens, which take long to fill. */
static inline uint32_t kvd_posts(uint32_t block_tokens) {
        uint64_t fit = KVD_POSTS_BYTES / kvd_post_stride(block_tokens);

        return (uint32_t)MAX(MIN(fit, KVD_POSTS), KVD_POSTS_LEAST);
}

static inline uint64_t kvd_groups_off(uint32_t capacity) {
        return kvd_asked_off(capacity) + KVD_ASKED_WORDS * sizeof(uint64_t);
}

static inline uint64_t kvd_posts_off(uint32_t capacity) {
        uint64_t groups = DIV_UP((uint64_t)capacity, KVD_GROUP_IDS);

        return kvd_groups_off(capacity) + ALIGN_UP(DIV_UP(groups, 64) * sizeof(shm_u64), 4096);
}

static inline uint64_t kvd_pinpage_bytes(const struct kvd_index *ix) {
        uint32_t bt = ix->geometry.block_tokens;

        return kvd_posts_off(ix->capacity) + ALIGN_UP(kvd_posts(bt) * kvd_post_stride(bt), 4096);
}

/* ---- reading an index ------------------------------------------------------------------------ */

/* The n_shards - 1 promises of a block. */
static inline struct kvd_promise *kvd_index_promises(const struct kvd_index *ix, uint32_t id) {
        return (struct kvd_promise *)((uint8_t *)ix + ix->promise_off) +
               (uint64_t)id * (ix->n_shards - 1);
}

static inline struct kvd_desc *kvd_index_desc(const struct kvd_index *ix, uint32_t id) {
        return (struct kvd_desc *)((uint8_t *)ix + ix->desc_off + (uint64_t)id * ix->desc_stride);
}

static inline struct kvd_run *kvd_index_run(const struct kvd_index *ix, uint32_t id) {
        return (struct kvd_run *)((uint8_t *)ix + ix->run_off + (uint64_t)id * ix->run_stride);
}

static inline shm_u64 *kvd_index_table(const struct kvd_index *ix) {
        return (shm_u64 *)((uint8_t *)ix + ix->table_off);
}

static inline shm_u64 *kvd_index_run_table(const struct kvd_index *ix) {
        return (shm_u64 *)((uint8_t *)ix + ix->run_table_off);
}

/*
 * The memory version of each segment. It changes when the segment gets other memory, before a block
 * appears there. In host spaces a client must then map the segment again; while a client pins or
 * fills a block, its segment keeps its memfd. On a GPU no client has the segment mapped when its
 * version changes.
 */
static inline shm_u32 *kvd_index_memory(const struct kvd_index *ix) {
        return (shm_u32 *)((uint8_t *)ix + ix->memory_off);
}

/*
 * A ring for clients that follow a space (tools/kvctl/follow.h): entry n % change_slots is the id
 * of the n-th block that entered or left the index. The block's descriptor tells which. A reader
 * that finds entries overwritten has to look at all descriptors, but misses nothing.
 */
static inline shm_u32 *kvd_index_changes(const struct kvd_index *ix) {
        return (shm_u32 *)((uint8_t *)ix + ix->change_off);
}

static inline shm_u64 *kvd_index_records(const struct kvd_index *ix) {
        return (shm_u64 *)((uint8_t *)ix + ix->record_off);
}

/* The i-th slot where a hint may be, i < KVD_BUCKETS * KVD_BUCKET_SLOTS. */
static inline shm_u64 *kvd_index_hint(const struct kvd_index *ix, uint64_t hint, uint32_t i) {
        struct kvd_key key = kvd_hint_key(hint);

        return (shm_u64 *)((uint8_t *)ix + ix->hint_off) +
               kvd_bucket(ix->hint_slots, key, i / KVD_BUCKET_SLOTS) + kvd_bucket_slot(key, i);
}

/* Does the space have such chains: of a layer group, or objects by key? */
static inline bool kvd_has_group(const struct kvd_index *ix, uint32_t group) {
        return group < ix->geometry.layer_groups ||
               (group == KVD_GROUP_KEYED && kvd_has_keys(&ix->geometry, ix->kind));
}

/*
 * Do its chains have runs? The words of a key need not be in the vocabulary, so are not packed. Of
 * large blocks, a run would save only 15 probes for thousands of tokens.
 */
static inline bool kvd_has_runs(const struct kvd_shape *shape, uint32_t group) {
        return group != KVD_GROUP_KEYED && shape->block_tokens <= KVD_MAX_PLANE_TOKENS;
}

/* Number of runs for so many blocks: twice capacity / KVD_RUN_BLOCKS, as chains end in mid-run. */
static inline uint32_t kvd_run_capacity(const struct kvd_shape *shape, uint32_t capacity) {
        return kvd_has_runs(shape, 0) ? capacity / 8 + 1 : 1;
}

/* Number of slots of a table for so many entries. */
uint32_t kvd_table_slots(uint64_t entries);

/*
 * Sets strides, table sizes, offsets and size from geometry, capacities, max_segments, backend and
 * hint_slots.
 */
void kvd_index_lay_out(struct kvd_index *ix);

/* -EPROTO: the header (from a daemon) does not describe an index that fits in so many bytes. */
int kvd_index_validate(const struct kvd_index *ix, uint64_t bytes);

#endif
