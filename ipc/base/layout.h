/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_LAYOUT_H
#define KVD_BASE_LAYOUT_H

/*
 * What daemon and clients share: the index of a space (one memfd, written by the daemon, mapped
 * read-only by clients) and a client's pin page (one memfd per client and space, written by that
 * client only).
 *
 *      index   +--------------------+ 0
 *              | struct kvd_index   |   geometry, offsets, secret, growth, counters
 *              +--------------------+ table_off
 *              | block table        |   table_slots x 8: tag and block id, in buckets of a line
 *              +--------------------+ run_table_off
 *              | run table          |   run_table_slots x 8: tag and run id
 *              +--------------------+ desc_off
 *              | descriptors        |   capacity x desc_stride: struct kvd_desc, then block_tokens token ids
 *              +--------------------+ run_off
 *              | runs               |   run_capacity x run_stride: struct kvd_run, then its tokens, packed
 *              +--------------------+ memory_off
 *              | memory             |   max_segments x 4: moves when a segment gets other memory
 *              +--------------------+ change_off
 *              | changes            |   change_slots x 4: ids of the blocks that came or went last
 *              +--------------------+ record_off
 *              | records            |   capacity x 8: handle of the block's record in the file; 0: none
 *              +--------------------+ hint_off
 *              | hints              |   hint_slots x 8: which records follow which; without a file: none
 *              +--------------------+ proof_off
 *              | proofs             |   capacity x 8: of blocks; VMM: else they are in the descriptors
 *              +--------------------+ size
 *
 *      pins    +--------------------+ 0
 *              | struct kvd_pinpage |   the client's own counters
 *              +--------------------+ KVD_PINS_OFF
 *              | words              |   capacity x 8: struct kvd_pin_words, how it uses the block
 *              +--------------------+ kvd_use_off(capacity)
 *              | use                |   capacity x 4: struct kvd_use, what its attention says of the block
 *              +--------------------+ kvd_asked_off(capacity)
 *              | asked              |   KVD_ASKED_WORDS x 8: what it looked up last, while somebody reads
 *              +--------------------+ kvd_posts_off(capacity)
 *              | posts              |   KVD_POSTS x kvd_post_stride(block_tokens): struct kvd_post, a ring
 *              +--------------------+
 *
 * Both are sparse: pages that were never touched take no memory. The size of a layout never changes
 * while it is mapped; a space that must hold more is a new space.
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
#define KVD_LAYOUT_VERSION 15u

#define KVD_RUN_BLOCKS 16u       /* blocks of one run: their ids fill one cache line */
#define KVD_MAX_SEGMENTS 8192u
#define KVD_SECRET_BYTES 192u

/* ---- slot word: what a block is, and which incarnation of it --------------------------------- */

enum kvd_state {
        KVD_ABSENT = 0,   /* its segment has no memory at the moment, or it never had any */
        KVD_FREE = 1,
        KVD_FILLING = 2,  /* owned by one client, who writes it; invisible to others */
        KVD_SEALED = 3,   /* in the index; immutable */
        /* the daemon asks whether anybody uses it; goes back to SEALED, or on to FREE */
        KVD_RETIRING = 4,
        /* lost its session, but the process that may still write it is not gone yet */
        KVD_LIMBO = 5,
        KVD_N_STATES
};

/*
 * A block's incarnation: id in the low, generation in the high half. Generations start at 1, so 0
 * names nothing.
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
        /* belongs to sequences (sequence.h), is in no table; depth: position of its first token */
        KVD_DESC_PRIVATE = 1,
        KVD_DESC_APPROX = 2,  /* private, and its contents were revived from a sketch */
        KVD_DESC_POISONED = 4, /* its writer died before the data was there; in no table */
        /* private, and each head has its own tokens in it, whose ids nobody knows */
        KVD_DESC_COMPACT = 8,
};

struct kvd_desc {
        shm_u64 slot;           /* version word of everything below */
        struct kvd_key key;     /* chain key */
        kvd_ref parent;         /* the block before it, in the incarnation it was sealed behind */
        uint32_t depth;         /* blocks before it in its chain */
        uint16_t n_tokens;      /* less than block_tokens: a tail, never a parent */
        uint16_t group;         /* layer group */
        /* of its chain. Causal: the salt; bidirectional: tokens of the whole prefix */
        uint64_t root;
        uint32_t flags;         /* enum kvd_desc_flags */
        uint32_t semaphore;     /* device spaces, see semaphore.h; 0: the data is there */
        uint64_t semaphore_value; /* in host spaces: proof of what is above, and of the incarnation */
        uint32_t tokens[];      /* block_tokens, unused ones 0 */
};
static_assert(sizeof(struct kvd_desc) == 64 && offsetof(struct kvd_desc, tokens) == 64,
              "layout is ABI: bump KVD_LAYOUT_VERSION");

/*
 * 16 consecutive blocks of a chain, found with one probe. leaf is the version word: the last
 *    block's incarnation, 0
 * while the run is rewritten. A run is written once per leaf: whoever knows that the leaf is still
 * sealed knows that ids and tokens are still true, because a parent stays as long as its children
 * do.
 */
struct kvd_run {
        shm_u64 leaf;
        struct kvd_key key;  /* of the run's tokens and the run before it */
        kvd_ref parent;      /* last block of the run before it, or KVD_ROOT */
        uint32_t group;
        uint32_t pad;         /* must be 0 */
        uint64_t root;        /* as in its blocks */
        uint64_t reserved[2]; /* must be 0 */
        uint32_t ids[KVD_RUN_BLOCKS];
        uint32_t tokens[]; /* packed (pack.h) */
};
static_assert(sizeof(struct kvd_run) == 128 && offsetof(struct kvd_run, ids) == 64,
              "layout is ABI: bump KVD_LAYOUT_VERSION");

/* ---- tables: from keys to ids ---------------------------------------------------------------- */

/*
 * A table is buckets of one cache line. A key has two of them, its home and another one, each chosen
 * by other bits; its entry is in the home if there was room, else in the other, else there is none.
 * No entry ever moves: one write makes it, and one takes it away. So whatever keys somebody picks,
 * entering, removing and looking cost two lines at most, and the worst that comes of it is that
 * blocks of the same space are not found.
 *
 * There are three slots for each id. So when all ids are used, a bucket is home to 2.7 entries on
 * average (Poisson), one entry in 1,100 finds its home full, 0.6 % of all buckets are full, and five
 * entries in a million at most have no place: their blocks are counted as unindexed, and missed.
 */
#define KVD_BUCKET_SLOTS 8u
#define KVD_BUCKETS 2u /* of a key */

/* Slot: low half of the key's high word as tag, id + 1 in the low half; 0 is empty. */
static inline uint64_t kvd_table_slot(struct kvd_key key, uint32_t id) {
        return (key.hi << 32) | ((uint64_t)id + 1);
}

/* First slot of a key's home (0) or of its other bucket (1) in a table of so many slots. */
static inline uint32_t kvd_bucket(uint32_t slots, struct kvd_key key, uint32_t which) {
        uint64_t bits = which ? key.lo >> 32 : (uint32_t)key.lo;

        return (uint32_t)(bits * (slots / KVD_BUCKET_SLOTS) >> 32) * KVD_BUCKET_SLOTS;
}

/* The i-th place of a key in a bucket: keys begin at different ones, so that the first is mostly it. */
static inline uint32_t kvd_bucket_slot(struct kvd_key key, uint32_t i) {
        return ((uint32_t)(key.hi >> 32) + i) % KVD_BUCKET_SLOTS;
}

/* ---- what lies below the pool ---------------------------------------------------------------- */

enum kvd_below {
        KVD_BELOW_FILE = 1,    /* hints tell what it has */
        KVD_BELOW_UNTOLD = 2,  /* ... but not yet all of it */
        KVD_BELOW_SERVERS = 4, /* other machines fill them, too: nobody knows without asking */
};

/*
 * A record's hint says which tokens are in it and which record it is behind, so that who holds a
 * chain's last block goes on along records as along blocks, without asking anybody. It is in one of
 * two buckets, as keys are, and stays there. Hints are no more than that: other tokens look alike
 * once in 2^16, a hint that has no place is missing, and what the file has is decided by kvd_fetch.
 */
#define KVD_HANDLE_BITS 48u

#define KVD_FETCH_BLOCKS 512u   /* that one kvd_fetch brings at most */
#define KVD_FETCH_TOKENS 15360u /* of a chain, from its beginning on, that fit into a request */
#define KVD_FETCH_DEPTH 4096u   /* ... and blocks that a request goes along */

/*
 * What can come back, which decides what is written, looked for and hinted at: of a causal chain its
 * first blocks, if they are full; a bidirectional prefix whole.
 */
static inline uint32_t kvd_fetch_most(uint32_t block_tokens) {
        return MIN(KVD_FETCH_TOKENS / block_tokens, KVD_FETCH_DEPTH) * block_tokens;
}

static inline bool kvd_fetch_reaches(uint64_t depth, uint32_t block_tokens) {
        return (depth + 1) * block_tokens <= kvd_fetch_most(block_tokens);
}

static inline bool kvd_fetch_takes(uint64_t n_tokens, uint32_t block_tokens) {
        return n_tokens <= KVD_FETCH_TOKENS && DIV_UP(n_tokens, block_tokens) <= KVD_FETCH_BLOCKS;
}

static inline struct kvd_key kvd_hint_key(uint64_t hint) {
        return (struct kvd_key){hint, hint * UINT64_C(0x9e3779b97f4a7c15)};
}

/* Slot: 16 bits of the hint as tag, and the handle of its record below; 0 is empty. */
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
#define KVD_TIERS_ROOM 4u

struct kvd_index {
        uint64_t magic;
        uint32_t version;
        uint32_t header_bytes;
        uint64_t size;        /* bytes of the whole index */
        /* random. The first is the cache's, which may outlive its daemon; the second this index's */
        uint64_t instance[2];
        struct kvd_shape geometry;
        /* KVD_kind_*, KVD_keys_*, KVD_policy_*; arena: 1 if isolated by writer */
        uint32_t kind, keys, policy, arena;
        uint64_t block_bytes;
        uint64_t segment_bytes;  /* of address space; all segments are of one size */
        uint32_t segment_blocks; /* of one segment, at most */
        uint32_t capacity;       /* block ids */
        uint32_t run_capacity;
        uint32_t max_segments;
        uint64_t desc_off, table_off, run_off, run_table_off, memory_off, change_off;
        uint64_t record_off, hint_off;
        uint64_t proof_off;      /* VMM; else 0 */
        uint32_t desc_stride, run_stride;
        uint32_t run_words;      /* of a run's tokens, packed */
        uint32_t table_slots, run_table_slots; /* whole buckets */
        uint32_t change_slots;
        uint32_t hint_slots;     /* whole buckets; 0: the space has no file below it */
        uint8_t secret[KVD_SECRET_BYTES];
        uint32_t backend;        /* enum kvd_backend (device.h) */
        uint32_t semaphore_rows; /* of the semaphore page (semaphore.h); 0 in host spaces */
        uint8_t device[16];      /* UUID of the GPU that the pool is on; zeros in host spaces */

        /* for the daemon after this one, see store/cache/adopt.c */
        char name[KVD_NAME_MAX + 1], domain[KVD_NAME_MAX + 1];
        uint32_t life;           /* how many indexes the cache has had, this one included */
        uint32_t max_blocks;     /* as asked for, 0: what quota and pool allow; may change, as policy may */
        uint64_t proof;          /* of what is above and does not change */

        alignas(64) shm_u32 n_segments; /* segments that exist; grows only */
        shm_u32 alive;                  /* 0: the space was deleted */
        shm_u32 clock;                  /* moves as the daemon allocates and seals; orders uses */
        shm_u32 lease_epoch;            /* moves whenever a compute lease ends; a futex word */
        /* moves whenever there is news for a sequence or a sample; a futex word */
        shm_u32 sync_epoch;
        /* sealed blocks whose order the daemon has not yet seen fulfilled */
        shm_u32 n_pending;
        /* moves when clients should unmap segments (message drain) */
        shm_u32 drain_epoch;
        /* moves whenever a job of the space has ended, however; a futex word */
        shm_u32 job_epoch;
        /* host spaces: moves whenever a segment gets another memfd, see kvd_index_memory */
        shm_u32 memory_epoch;
        shm_u32 n_pages;                /* pin pages that are kept for the daemon after this one */
        shm_u32 n_followers;            /* clients note what they look up while somebody reads it */
        shm_u32 below;                  /* enum kvd_below: tiers that are there, and work */

        alignas(64) shm_u64 changes_begun; /* blocks that came or went, see kvd_index_changes */
        shm_u64 changes;                /* ... of which those are written that somebody may read */

        alignas(64) shm_u64 counters[KVD_SPACE_COUNTERS_ROOM];

        /* the methods */
        alignas(64) shm_u64 settings[KVD_SETTINGS_ROOM]; /* by enum kvd_setting */
        /* BiCache's table: 0 none, 1 + the value of bicache.r_def that it was made with */
        shm_u32 depth_def;
        shm_u32 depth[101];     /* layers to reuse at a prefix ratio of so many percent */
        uint32_t label_channels; /* of a key in its label, see summary.h */
        /* where each tier's places of exact copies end, see tier.h */
        uint32_t tier_end[KVD_TIERS_ROOM];
};
static_assert(sizeof(struct kvd_index) <= 4096, "the header has one page");
static_assert(KVD_N_SPACE_COUNTERS <= KVD_SPACE_COUNTERS_ROOM, "room for counters");

#define KVD_INDEX_HEADER_BYTES 4096u

/* ---- segments -------------------------------------------------------------------------------- */

/*
 * In host spaces a segment is as long as its blocks. On a GPU all segments of the pool are of one
 * size, whatever the blocks of a space: a block that would lie across two of them is never used,
 * its id stays KVD_ABSENT for ever.
 */
static inline uint32_t kvd_segment_of(const struct kvd_index *ix, uint32_t id) {
        if (ix->backend == 0)
                return id / ix->segment_blocks;
        return (uint32_t)((uint64_t)id * ix->block_bytes / ix->segment_bytes);
}

/* Blocks of a segment: from first on, before end. */
static inline uint32_t kvd_segment_first(const struct kvd_index *ix, uint32_t segment) {
        return (uint32_t)DIV_UP(segment * ix->segment_bytes, ix->block_bytes);
}

static inline uint32_t kvd_segment_end(const struct kvd_index *ix, uint32_t segment) {
        return (uint32_t)((segment + UINT64_C(1)) * ix->segment_bytes / ix->block_bytes);
}

/* Block ids of the first n segments. */
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
 * Behind them, how long calls took: of each kind the sum in ns, then how many took less than 64 ns,
 * 128 ns, and so on. The last bucket has what took longer than all.
 */
enum kvd_latency {
        KVD_LATENCY_LOOKUP,   /* one in KVD_LATENCY_SAMPLED */
        KVD_LATENCY_SEAL,     /* requests to the daemon */
        KVD_LATENCY_ALLOCATE, /* requests to the daemon: most allocations need none */
        KVD_LATENCY_FETCH,    /* from the request to the end; counted by the daemon */
        KVD_N_LATENCIES
};

#define KVD_LATENCY_SAMPLED 64u
#define KVD_LATENCY_BUCKETS 32u
#define KVD_LATENCY_FIRST 6u /* the first bucket ends at 1 << this */
#define KVD_CLIENT_COUNTERS_ROOM 16u
#define KVD_CLIENT_WORDS \
        (KVD_CLIENT_COUNTERS_ROOM + KVD_N_LATENCIES * (1u + KVD_LATENCY_BUCKETS))
static_assert(KVD_N_CLIENT_COUNTERS <= KVD_CLIENT_COUNTERS_ROOM, "histograms are behind counters");

/* Where the sum is. */
static inline uint32_t kvd_latency_sum(enum kvd_latency which) {
        return KVD_CLIENT_COUNTERS_ROOM + (uint32_t)which * (1 + KVD_LATENCY_BUCKETS);
}

/* Where to count a call that took so long. */
static inline uint32_t kvd_latency_bucket(enum kvd_latency which, uint64_t ns) {
        uint32_t bits = ns ? 64 - (uint32_t)__builtin_clzll(ns) : 0;
        uint32_t bucket = bits > KVD_LATENCY_FIRST ? bits - KVD_LATENCY_FIRST : 0;

        return kvd_latency_sum(which) + 1 + MIN(bucket, KVD_LATENCY_BUCKETS - 1);
}

struct kvd_pinpage {
        uint64_t magic;
        uint32_t version;
        uint32_t capacity;
        alignas(64) shm_u64 counters[KVD_CLIENT_WORDS]; /* as above; for show only */
        /* blocks of the chains of this client's pins, once for each pin */
        alignas(64) shm_u64 held;
        /*
         * Written by the daemon: life of the index that these pins refer to. Another one than that
         * of the client's own means that the daemon was replaced, and its index says nothing any more.
         */
        shm_u32 epoch;
        shm_u32 left;                  /* 1: the client has no more of the space mapped */

        /* written by the daemon: what the client may expect of it, see store/cache/available.c */
        alignas(64) shm_u64 held_seen; /* held, when pins were last looked at */
        shm_u32 held_alone;            /* blocks that only this client held then */
        shm_u32 available;             /* blocks that it would be given now */
        /* blocks that client_quota would let it fill besides those that it fills */
        shm_u32 may_fill;

        /* words of struct kvd_asked: begun, and written; the client's own */
        alignas(64) shm_u64 asked_begun;
        shm_u64 asked;
        shm_u64 not_noted;             /* lookups, while another thread's was being noted */

        /* posts: written, and whether the daemon was told that there are some; the client's own */
        alignas(64) shm_u64 posted;
        shm_u32 kicked;                /* 0, or KVD_KICKED, KVD_KICKED_HARD */
        /* written by the daemon: posts that it took, those of them that it refused, and why the last */
        alignas(64) shm_u64 posts_taken;
        shm_u64 posts_refused;
        shm_u32 posts_errno;
};
static_assert(sizeof(struct kvd_pinpage) <= 4096, "the pins begin in the next page");

#define KVD_PINS_OFF 4096u

/* Side by side, since whoever lets go of a block, or evicts it, needs both. */
struct kvd_pin_words {
        shm_u32 pins;  /* how often the client uses the block */
        shm_u32 touch; /* index clock when it last let go of it; 0: it never did */
};
static_assert(sizeof(struct kvd_pin_words) == 8, "layout is ABI: bump KVD_LAYOUT_VERSION");

/*
 * What a client's attention says of a block: a moving average each, 0 if it says nothing. For the
 * order of relief.
 */
struct kvd_use {
        uint16_t mass; /* attention mass per token, 256 is the average of its sequence; saturates */
        uint16_t hits; /* selections by HShare, decayed, 256 is one per step and token; saturates */
};

static inline uint64_t kvd_use_off(uint32_t capacity) {
        return KVD_PINS_OFF + ALIGN_UP((uint64_t)capacity * sizeof(struct kvd_pin_words), 4096);
}

/*
 * A lookup, as its client notes it: words at the place asked % KVD_ASKED_WORDS and behind it,
 * round the end. keys are the low halves of its blocks' chain keys, n_keys of them: all of its
 * tokens' blocks, or the first KVD_ASKED_KEYS. They tell equal prefixes, and nothing of tokens.
 */
struct kvd_asked {
        uint32_t n_keys, group;
        uint32_t n_tokens, found; /* tokens asked for, and found */
        uint64_t keys[];
};
#define KVD_ASKED_WORDS 8192u /* a power of two */
#define KVD_ASKED_KEYS 4096u
#define KVD_ASKED_HEAD (sizeof(struct kvd_asked) / sizeof(uint64_t))

static inline uint64_t kvd_asked_off(uint32_t capacity) {
        return kvd_use_off(capacity) + ALIGN_UP((uint64_t)capacity * sizeof(struct kvd_use), 4096);
}

/*
 * A block that its client has filled, to be sealed behind another one without an answer. The client
 * writes it at the place posted % KVD_POSTS, moves posted, and sends a message only if it finds
 * kicked 0 (daemon and client each exchange or store it, and look at the other word afterwards). A
 * daemon that looks at the ring now and then leaves it KVD_KICKED, and is sent another message when
 * half of the ring is full. The protocol: tests/client/spin/post.pml.
 */
struct kvd_post {
        kvd_ref block;
        kvd_ref parent;   /* as in message seal; or a block that was posted before */
        uint64_t root;    /* as in message seal */
        uint32_t group, pad; /* pad: must be 0 */
        uint32_t tokens[]; /* block_tokens: a part-filled block is not posted */
};
#define KVD_POSTS 64u
#define KVD_KICKED 1u
#define KVD_KICKED_HARD 2u

static inline uint64_t kvd_post_stride(uint32_t block_tokens) {
        return ALIGN_UP(sizeof(struct kvd_post) + block_tokens * sizeof(uint32_t), 64);
}

static inline uint64_t kvd_posts_off(uint32_t capacity) {
        return kvd_asked_off(capacity) + KVD_ASKED_WORDS * sizeof(uint64_t);
}

static inline uint64_t kvd_pinpage_bytes(uint32_t capacity) {
        return kvd_posts_off(capacity) +
               ALIGN_UP(KVD_POSTS * kvd_post_stride(KVD_MAX_BLOCK_TOKENS), 4096);
}

/* ---- reading an index ------------------------------------------------------------------------ */

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
 * A number for each segment, which moves before the first block appears in other memory than before.
 * In host spaces, who has a segment mapped must map it again then; a block that is pinned, or being
 * filled, keeps the memfd of its segment. On a GPU nobody has it mapped when it moves.
 */
static inline shm_u32 *kvd_index_memory(const struct kvd_index *ix) {
        return (shm_u32 *)((uint8_t *)ix + ix->memory_off);
}

/*
 * The id of the n-th block that came into the cache or went is at n % change_slots, for those who
 * follow a space (tools/kvctl/follow.h). What has become of a block, its descriptor says; so ids
 * that were written over cost a reader a look at all descriptors, and nothing else.
 */
static inline shm_u32 *kvd_index_changes(const struct kvd_index *ix) {
        return (shm_u32 *)((uint8_t *)ix + ix->change_off);
}

static inline shm_u64 *kvd_index_records(const struct kvd_index *ix) {
        return (shm_u64 *)((uint8_t *)ix + ix->record_off);
}

/* The i-th place where a hint may be. */
static inline shm_u64 *kvd_index_hint(const struct kvd_index *ix, uint64_t hint, uint32_t i) {
        struct kvd_key key = kvd_hint_key(hint);

        return (shm_u64 *)((uint8_t *)ix + ix->hint_off) +
               kvd_bucket(ix->hint_slots, key, i / KVD_BUCKET_SLOTS) + kvd_bucket_slot(key, i);
}

/* Runs that so many blocks have room for: half of the chains may end in the middle of one. */
static inline uint32_t kvd_run_capacity(uint32_t capacity) {
        return capacity / 8 + 1;
}

/* Slots of a table of so many entries. */
uint32_t kvd_table_slots(uint64_t entries);

/*
 * Fills in strides, table sizes, offsets and size from geometry, capacities, max_segments,
 * hint_slots.
 */
void kvd_index_lay_out(struct kvd_index *ix);

/* -EPROTO if the header (from a daemon) does not describe an index that fits in bytes. */
int kvd_index_validate(const struct kvd_index *ix, uint64_t bytes);

#endif
