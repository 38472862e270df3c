/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_CACHE_H
#define KVLM_CACHE_H

/*
 * The blocks of a sequence. With a daemon, a stored prefix is pinned and used in place, and the
 * rest is filled straight into pool blocks and published. Without a daemon, or if the pool has no
 * free blocks, blocks are private memory behind the same table. A sequence never fails because of
 * the daemon.
 *
 * With a device, all blocks are in its memory, and those of one table are of one kind: the pool's,
 * or private. Blocks described as computed, found or sealed are so in the order of its stream.
 */

#include "client/kvd.h"
#include "tools/kvlm/device.h"
#include "tools/kvlm/forward.h"

struct cache_options {
        const char *space;  /* NULL: do not share */
        const char *socket; /* NULL: the library's default */
        struct kvd_geometry geometry;
        struct kvd_space_options space_options;
        struct block_shape shape;
        struct device *device; /* NULL: host memory */
        double rope_theta;     /* of stored keys; 0: do not tell the space */
};

struct cache;

int cache_new(const struct cache_options *, struct cache **ret);
struct cache *cache_free(struct cache *);
const struct cache_options *cache_options(const struct cache *);
kvd_space *cache_space(struct cache *); /* NULL if not shared, or while the daemon is away */

/*
 * Fetches blocks of these tokens from the tiers below the daemon's pool, and waits up to a limit.
 */
void cache_fetch(kvd_space *space, uint32_t group, const uint32_t *tokens, uint32_t n_tokens);

enum block_kind {
        BLOCK_PRIVATE, /* private memory */
        BLOCK_FILLING, /* pool block that we write */
        BLOCK_SEALED,  /* pool block that we wrote and published */
        BLOCK_REUSED,  /* pool block written by another client */
        BLOCK_OWN,     /* pool block in the request's own table there: see pooled.h */
};

struct sequence {
        struct cache *cache;
        uint32_t *tokens;
        uint32_t n_tokens, capacity; /* capacity: of tokens */
        uint32_t n_computed;         /* number of tokens whose keys and values are in the blocks */
        uint32_t n_public; /* first token that must not be published; UINT32_MAX if none */

        uint8_t **blocks;        /* the block table */
        struct kvd_block *pool;  /* of the blocks that are not private */
        uint8_t *kinds;          /* enum block_kind */
        uint32_t n_blocks, room; /* number of blocks, and room for blocks in the table */
        /* on a device: memory for all private blocks; NULL until needed */
        uint8_t *arena;
        uint32_t n_chained; /* blocks that pin covers: reused or sealed */
        struct kvd_pin pin;

        uint32_t not_found; /* number of last tokens that are computed even if stored; at least 1 */
        uint32_t n_reused;  /* number of tokens that were found */
        uint32_t n_refused; /* number of failures of the pool or the daemon */
        bool fetched;       /* a fetch from the tiers below the pool was tried */
        bool alone;         /* further blocks are private */
        bool unpublished;   /* blocks that are not sealed yet stay unpublished */
        /* called when the pool is full; true: try again. NULL: never */
        bool (*on_full)(void *data, uint32_t tries);
        void *on_full_data;
};

/* Makes a sequence with the tokens of a prompt, which are copied. */
int sequence_new(struct cache *, const uint32_t *tokens, uint32_t n_tokens, uint32_t capacity,
                 struct sequence **ret);
int sequence_new_private(struct cache *, const uint32_t *tokens, uint32_t n_tokens,
                         struct sequence **ret);
struct sequence *sequence_free(struct sequence *);

/*
 * Finds stored blocks for the tokens that are not computed yet: whole blocks only, and never the
 * last token, whose logits are needed. Called before each chunk, since another process may be ahead
 * with the same text.
 */
void sequence_find(struct sequence *);

/*
 * Makes sure that there are blocks for n_tokens tokens. 0; -ENOMEM; or 1 if the found blocks were
 * not valid (see sequence_check) and the sequence starts over.
 */
int sequence_extend(struct sequence *, uint32_t n_tokens);

/*
 * Called when n_computed tokens are computed: seals the full blocks. If the daemon dies meanwhile,
 * blocks whose state is unknown are dropped, and s->n_computed decreases: those tokens must be
 * computed again.
 */
void sequence_publish(struct sequence *, uint32_t n_computed);

/*
 * Checks that everything that was found was really written. To be called when the stream has
 * completed, and before anything computed from the blocks is published or printed: on a GPU, a
 * block's producer may have died before the write completed. False: the sequence starts over, in
 * private memory.
 */
bool sequence_check(struct sequence *);

uint32_t sequence_shared_blocks(const struct sequence *); /* blocks that other processes can use */

#endif
