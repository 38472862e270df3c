/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_REMOTE_INSIDE_H
#define KVD_STORE_REMOTE_INSIDE_H

/*
 * The remote tier of a store, and its state of a space. A request to the remote process is a struct
 * store_remote_question.
 */

#include "store/below/below.h"
#include "store/below/carry.h"
#include "store/cache/cache.h"
#include "store/remote_tier.h"

static_assert(BELOW_ITEMS >= KVD_REMOTE_ITEMS, "a request of the servers'");

struct remote { /* of a store */
        struct below below;
        struct store *store;
        enum store_remote_state state;

        bool asked;        /* a request is outstanding, at the servers or at a worker */
        bool ready;        /* question is complete, and is sent to the servers next */
        uint64_t asked_ns; /* time of the request */
        struct store_remote_question question; /* the current request */
        uint64_t push_at_ns;    /* no writes before this time, if push_pause_ns is not 0 */
        uint64_t push_pause_ns; /* current back-off; 0: the last write succeeded */
        kvd_ref looking;        /* FIND: last block of the prefix to write; 0: for a fetch */
        uint64_t epoch;         /* counts servers' returns: they may have lost blocks */
        struct store_remote_info info;
        char refusal[128];                /* store_remote_refused */
        int32_t errors[KVD_REMOTE_ITEMS]; /* of the carry's items */
};

struct remote_name { /* of a block that is on the servers */
        struct kvd_key name;
        kvd_ref block; /* the block that had the id when name was noted */
        uint64_t epoch;
};

struct remote_space {
        struct below_space below;
        kvd_ref first;              /* first block of the bidirectional prefix of that name */
        struct kvd_key prefix;      /* name of a bidirectional prefix */
        struct remote_name names[]; /* by block id */
};

static inline struct remote *remote_of(const struct below *b) {
        return container_of(b, struct remote, below);
}
static inline struct remote_space *remote_space_of(const struct space *space) {
        return space->parts.remote;
}

/* NULL if there are no servers, all are away, or the space cannot use them. */
struct remote *remote_for(const struct space *space);
void remote_want(struct remote *remote, bool soon);
/* Counts an error and remembers its text. */
void remote_failed(struct remote *remote, int error);
void remote_begin_question(struct remote *remote, enum store_remote_ask what, struct space *space);
/* Is there a place in host memory for one more block, if it needs one? May evict a cold copy. */
bool remote_has_room(const struct remote *remote);
/* Can the next request be of that space's blocks? Like host_may_begin. */
bool remote_may_begin(struct below *b, struct space *space);
void remote_question_add(struct remote *remote, const struct store_remote_item *item);
uint64_t remote_space_bytes(const struct kvd_index *ix); /* memory that a space is charged for */

/* The name of a resident block, if it is known to be on the servers; or NULL. */
const struct kvd_key *remote_name_of(const struct remote *remote, const struct space *space,
                                     uint32_t id);
/*
 * A block of a bidirectional prefix counts as not on the servers behind one that is missing: its
 * last block, by which the sweep picks it, must not be known before the others.
 */
bool remote_counts(const struct remote *remote, const struct space *space, uint32_t id);
void remote_note(const struct remote *remote, struct space *space, uint32_t id,
                 struct kvd_key name);

/* writes.c */
int remote_begin_write(struct below *b, struct space *space);
bool remote_has(const struct below *b, const struct space *space, uint32_t id);
int remote_add_write(struct below *b, struct space *space, uint32_t id);
int remote_add_prefix(struct below *b, struct space *space);
bool remote_end_write(struct below *b);
void remote_prefix_found(struct remote *remote, const struct kvd_key *names, uint32_t n);
void remote_written(struct remote *remote, const struct kvd_key *names, const int32_t *errors,
                    uint32_t n);

extern const struct below_ops remote_below; /* remote.c; reads.c and writes.c have most of it */

/* reads.c */
bool remote_find(struct below *b, struct space *space, const struct fetch_request *q,
                 const struct chain_at *at, struct below_found *ret);
void remote_ask_names(struct below *b, struct fetch *f);
void remote_named(struct remote *remote, const struct kvd_key *names, uint32_t n);
void remote_begin_read(struct below *b, struct space *space);
bool remote_may_read(struct below *b, const struct fetch *f, uint32_t i);
void remote_add_read(struct below *b, const struct fetch *f, uint32_t i, kvd_ref to);
void remote_was_read(struct below *b, uint32_t i, int error);
void remote_note_name(struct below *b, struct space *space, uint32_t id, struct below_name name);

#endif
