/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_BELOW_H
#define KVD_STORE_BELOW_H

/*
 * A tier below the pool: the file (or host memory instead of one), or the servers. The same sweep
 * (sweep.c) chooses what is written to each tier, and the same fetches (bring.c) bring blocks
 * back. They know a tier by its struct below_ops; how a block is found and moved is the tier's
 * own business. A tier has one request at a time:
 *
 *      below_next ──► bring_next ──► ask_names, or begin_read and add_read ──► its process
 *                └──► sweep_next ──► begin_write and add_write ──────────────► its process
 *
 *      answer ──► bring_done, or the tier's own function for what was written
 */

#include "store/cache/cache.h"
#include "store/file_tier.h"

struct fetch;
struct below;

#define BELOW_ITEMS 256u /* blocks of a request, at most */
static_assert(BELOW_ITEMS >= KVD_DISK_ITEMS, "a request of the file's");

/*
 * What a tier calls a block. File: the record's sequence, then where it is. Servers: a key. All
 * zeros: the root of a chain; the file has its records' root in the second word then.
 */
struct below_name {
        uint64_t word[2];
};

/* What a tier has of a chain, behind its resident blocks. */
struct below_found {
        uint32_t n;     /* number of blocks; if names are asked for later: the most it may find */
        uint32_t first; /* the fetch also keeps the tokens of so many resident blocks before */
        uint32_t n_tokens;              /* number of tokens that the fetch keeps, in all */
        struct below_name before;       /* name of the block before these tokens */
        const struct below_name *names; /* of each block; NULL: asked for later */
};

struct below_ops {
        bool evicts;          /* it has room for some blocks only, and drops others for them */
        bool knows_by_tokens; /* all tokens of a bidirectional prefix, even behind what it has */
        struct below_space *(*state)(const struct space *space);
        bool (*serves)(const struct below *b, const struct space *space); /* now? */
        /* Can a request of the space's blocks be made now? */
        bool (*may_begin)(struct below *b, struct space *space);
        /* Is there no room for one more block in the request? */
        bool (*is_full)(const struct below *b);

        /*
         * Fetches. find: false if there is nothing to fetch. at: the end of the resident blocks.
         * ask_names makes the request that sets f->n and f->names; NULL: find has named all.
         */
        bool (*find)(struct below *b, struct space *space, const struct fetch_request *q,
                     const struct chain_at *at, struct below_found *ret);
        void (*ask_names)(struct below *b, struct fetch *f);
        void (*begin_read)(struct below *b, struct space *space);
        bool (*may_read)(struct below *b, const struct fetch *f, uint32_t i); /* its i-th block */
        void (*add_read)(struct below *b, const struct fetch *f, uint32_t i, kvd_ref to);
        void (*end_read)(struct below *b); /* with at least one block; NULL: nothing to do */
        /* Counts the i-th block of the request, which was read or not. */
        void (*was_read)(struct below *b, uint32_t i, int error);

        /*
         * The sweep. begin_write: 1: the request has begun; 0: the space cannot be written now;
         * -EAGAIN: the same space is next again.
         */
        int (*begin_write)(struct below *b, struct space *space);
        void (*passes)(struct below *b, struct space *space, uint32_t id); /* NULL: nothing to do */
        /* Does the tier have the block, or will it with this request? */
        bool (*has)(const struct below *b, const struct space *space, uint32_t id);
        /* 0; -EAGAIN: not with this request, but with the next one; else it is passed over. */
        int (*add_write)(struct below *b, struct space *space, uint32_t id);
        /*
         * The same for a bidirectional prefix: b->path_at has the blocks behind those that the tier
         * has; all, and b->prefix its tokens, if it has none, or if knows_by_tokens. Reduces b->path
         * to the blocks to write.
         */
        int (*add_prefix)(struct below *b, struct space *space);
        bool (*end_write)(struct below *b); /* true: there is a request */
        /* NULL: nothing to do. all: the round wrote all blocks */
        void (*end_round)(struct below *b, struct space *space, bool all);

        /* The tier has the block now, by that name. */
        void (*note)(struct below *b, struct space *space, uint32_t id, struct below_name name);
};

struct below { /* first member of a tier's state */
        const struct below_ops *ops;
        struct below *next; /* in store->below, in the order in which fetches ask */
        struct store *store;
        struct carry *carry; /* host memory that blocks pass through; NULL if the pool is there */
        uint32_t depth;      /* tokens; blocks ending there or later are written at first use */
        /* called when there may be a request; soon: a client waits for it */
        void (*wanted)(void *data, bool soon);
        void *data;

        struct kvd_list fetches;     /* owned; a queue */
        uint64_t n_fetches, queue;   /* number of fetches; number of them under way */
        struct fetch *reading;       /* the fetch that the request is for; or NULL */
        struct space *space;         /* of the blocks; NULL: it has left */
        kvd_ref blocks[BELOW_ITEMS]; /* that the request reads into or writes, held */
        uint32_t n_blocks;
        uint32_t reads_in_a_row;            /* requests for fetches since writes last had a turn */
        uint32_t turn;                      /* number of the space to sweep next */
        uint32_t path;                      /* blocks to write of the path that the sweep is at */
        uint32_t path_at[KVD_WHOLE_BLOCKS]; /* scratch: these, the last one first */
        uint32_t prefix[KVD_WHOLE_TOKENS];  /* scratch: tokens of a bidirectional prefix */
};

struct below_space {     /* first member of a tier's state of a space */
        bool unswept;    /* something has changed since the last full round */
        bool all;        /* in this round blocks are written even if they are not admitted */
        uint32_t hand;   /* block to look at next */
        uint32_t looked; /* blocks looked at in this round */
        uint32_t path;   /* blocks of the hand's path before the last request; 0: it begins */
        uint32_t left; /* all: blocks that could not be written, for want of room or by an error */
        uint64_t changes; /* carry_changes when unswept was last set */
};

/* The tier comes last in store->below. */
void below_begin(struct below *b, struct store *store, const struct below_ops *ops);
void below_want(const struct below *b, bool soon);
/* The tier came or went, or may have lost blocks: every space is swept again. */
void below_changes(struct below *b);
/* The tier's state of the space; NULL if it does not serve the space now. */
struct below_space *below_space_of(const struct below *b, const struct space *space);
/* Adds a block to those of the request; lets all of them go when what was written is known. */
void below_hold(struct below *b, struct space *space, kvd_ref block);
void below_let_go(struct below *b);
/* Makes the next request: for a fetch or, in turn or if none waits, to write. True: there is one. */
bool below_next(struct below *b, bool *later);

/* ---- sweep.c --------------------------------------------------------------------------------- */

bool sweep_next(struct below *b, bool *later);
/* Adds the blocks of the path. Returns as add_write does. */
int sweep_add_path(struct below *b, struct space *space);
/* Begins a new round. */
void sweep_again(struct below_space *bs);
void sweep_go_on(const struct space *space, struct below_space *bs); /* passes over a block */

#endif
