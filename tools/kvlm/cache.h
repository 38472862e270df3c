/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_CACHE_H
#define KVLM_CACHE_H

/*
 * Where the blocks of a sequence come from. With a daemon: a stored prefix is pinned and used where
 * it is, the rest is filled straight into pool blocks and published. Without one, or when the pool
 * has none to give, blocks are private memory behind the same table. A sequence never fails because
 * of the daemon.
 *
 * With a device all blocks are in its memory, and those of one table are of one kind, the pool's or
 * private ones. What is said to be computed, found or sealed is so for its stream.
 */

#include "client/kvd.h"
#include "tools/kvlm/device.h"
#include "tools/kvlm/forward.h"

struct cache_options {
        const char *space; /* NULL: do not share */
        const char *socket; /* NULL: the library's default */
        struct kvd_geometry geometry;
        struct kvd_space_options space_options;
        struct block_shape shape;
        struct device *device; /* NULL: host memory */
        double rope_theta; /* of keys as they are stored; 0: nobody needs to know */
};

struct cache;

int cache_new(const struct cache_options *, struct cache **ret);
struct cache *cache_free(struct cache *);
const struct cache_options *cache_options(const struct cache *);
kvd_space *cache_space(struct cache *); /* the space, or NULL: not shared, or the daemon is away */

/* Waits for what the daemon has below its pool of these tokens, as long as that is worth it. */
void cache_fetch(kvd_space *space, uint32_t group, const uint32_t *tokens, uint32_t n_tokens);

enum block_kind {
        BLOCK_PRIVATE, /* our own memory */
        BLOCK_FILLING, /* of the pool, ours to write */
        BLOCK_SEALED,  /* of the pool, written and published by us */
        BLOCK_REUSED,  /* of the pool, written by somebody else */
        BLOCK_OWN,     /* of the pool, in the request's own table there: see pooled.h */
};

struct sequence {
        struct cache *cache;
        uint32_t *tokens;
        uint32_t n_tokens, capacity; /* of tokens */
        uint32_t n_computed; /* tokens whose keys and values are in the blocks */
        uint32_t n_public;   /* tokens from there on are not published; UINT32_MAX: all are */

        uint8_t **blocks; /* the block table */
        struct kvd_block *pool; /* of blocks that are not private */
        uint8_t *kinds;   /* enum block_kind */
        uint32_t n_blocks, room; /* blocks that are there, and that the table has room for */
        /* on a device: memory for as many private blocks; NULL: not needed so far */
        uint8_t *arena;
        uint32_t n_chained; /* blocks that pin covers: reused or sealed */
        struct kvd_pin pin;

        uint32_t not_found; /* last tokens that are computed even if they are stored; 1 at least */
        uint32_t n_reused; /* tokens that were there */
        uint32_t n_refused; /* times that the pool or the daemon let us down */
        bool fetched;      /* the tiers below the pool were asked */
        bool alone;        /* so further blocks are private */
        bool unpublished;  /* and blocks that were not sealed stay so */
        /* the pool is full: shall we try once more? NULL: no */
        bool (*on_full)(void *data, uint32_t tries);
        void *on_full_data;
};

/* Takes the tokens of a prompt. */
int sequence_new(struct cache *, const uint32_t *tokens, uint32_t n_tokens, uint32_t capacity,
                 struct sequence **ret);
int sequence_new_private(struct cache *, const uint32_t *tokens, uint32_t n_tokens,
                         struct sequence **ret);
struct sequence *sequence_free(struct sequence *);

/*
 * Finds what is stored of the tokens that are not computed yet: whole blocks, and never the last
 * token, whose logits somebody wants. Worth a try before each chunk: another process may be ahead
 * with the same text.
 */
void sequence_find(struct sequence *);

/*
 * Blocks for so many tokens. -ENOMEM. 1: what had been found was useless (see sequence_check), and
 * the sequence begins anew.
 */
int sequence_extend(struct sequence *, uint32_t n_tokens);

/*
 * So many tokens are computed: seals the blocks that are full. If the daemon dies over it, blocks
 * whose fate nobody knows are given up, and n_computed is less than before: compute them again.
 */
void sequence_publish(struct sequence *, uint32_t n_computed);

/*
 * When the stream has passed, and before anything computed from the blocks is given away: was
 * everything that we found really written? On a GPU its producer may have died in between. False:
 * the sequence begins anew, in private memory.
 */
bool sequence_check(struct sequence *);

uint32_t sequence_shared_blocks(const struct sequence *); /* blocks that other processes can use */

#endif
