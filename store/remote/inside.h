/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_REMOTE_INSIDE_H
#define KVD_STORE_REMOTE_INSIDE_H

/*
 * The remote tier of a store, and its state of a space. A request to the remote process is a struct
 * store_remote_question.
 */

#include "store/cache/cache.h"
#include "store/file/bring.h"
#include "store/remote_tier.h"
#include "store/tier/carry.h"

struct pull {
        struct bringing to;    /* in remote->pulls */
        uint32_t first;        /* number of resident blocks of these tokens */
        struct kvd_key behind; /* name of the block before the tokens; 0: none */
        uint32_t n_tokens;
        bool found;     /* FIND was answered: n and names are set */
        uint32_t n, at; /* n: blocks on the servers; at: blocks of these done */
        struct kvd_key names[KVD_REMOTE_FOUND + 1]; /* of the block before them, then of each */
        uint32_t tokens[];
};

struct remote { /* of a store */
        struct store *store;
        enum store_remote_state state;
        struct store_remote_config config;
        void (*wanted)(void *data, bool soon);
        void *data;

        bool asked;        /* a request is outstanding, at the servers or at a worker */
        bool ready;        /* question is complete, and is sent to the servers next */
        uint64_t asked_ns; /* time of the request */
        struct store_remote_question question; /* the current request */
        struct pull *pulling;                  /* FIND, GET: the fetch; or NULL */
        struct kvd_list pulls;                 /* owned; a queue */
        uint32_t pulls_in_a_row; /* requests for fetches since writes last had a turn */
        uint32_t turn;           /* number of the space to sweep next */
        uint64_t push_at_ns;     /* no writes before this time, if push_pause_ns is not 0 */
        uint64_t push_pause_ns;  /* current back-off; 0: the last write succeeded */
        kvd_ref looking;         /* FIND: last block of the prefix to write; 0: for a fetch */
        uint32_t prefix[KVD_FETCH_TOKENS]; /* tokens of that prefix */
        uint64_t epoch;                    /* counts servers' returns: they may have lost blocks */
        struct store_remote_info info;
        char refusal[128];                /* store_remote_refused */
        struct carry *carry;              /* owned; NULL if the pool is in host memory */
        int32_t errors[KVD_REMOTE_ITEMS]; /* of the carry's items */
};

struct remote_name { /* of a block that is on the servers */
        struct kvd_key name;
        kvd_ref block; /* the block that had the id when name was noted */
        uint64_t epoch;
};

struct remote_space {
        bool unswept;               /* something has changed since the last full round */
        uint32_t hand;              /* block to look at next */
        uint32_t looked;            /* blocks looked at in this round */
        uint64_t changes;           /* carry_changes when unswept was last set */
        kvd_ref first;              /* first block of the bidirectional prefix of that name */
        struct kvd_key prefix;      /* name of a bidirectional prefix */
        struct remote_name names[]; /* by block id */
};

static inline struct remote_space *remote_space_of(const struct space *space) {
        return space->parts.remote;
}

/* NULL if there are no servers, all are away, or the space cannot use them. */
struct remote *remote_for(const struct space *space);
void remote_want(struct remote *remote, bool soon);
/* Counts an error and remembers its text. */
void remote_failed(struct remote *remote, int error);
void remote_begin_question(struct remote *remote, enum store_remote_ask what, struct space *space);
/* Is there no room for one more block in the request? */
bool remote_question_is_full(const struct remote *remote);
/* Is there a place in host memory for one more block, if it needs one? May evict a cold copy. */
bool remote_has_room(const struct remote *remote);
/* Can the next request be of that space's blocks? Like host_may_begin. */
bool remote_may_begin(struct remote *remote, struct space *space);
void remote_question_add(struct remote *remote, const struct store_remote_item *item);
uint64_t remote_space_bytes(const struct kvd_index *ix); /* memory that a space is charged for */

/* The name of a resident block, if it is known to be on the servers; or NULL. */
const struct kvd_key *remote_name_of(const struct remote *remote, const struct space *space,
                                     uint32_t id);
void remote_note(const struct remote *remote, struct space *space, uint32_t id,
                 struct kvd_key name);

/* push.c: requests to write blocks (PUT), or to look for those that exist already (FIND). */
bool push_next(struct remote *remote, bool *later);
void push_found(struct remote *remote, const struct kvd_key *names, uint32_t n);
void push_done(struct remote *remote, const struct kvd_key *names, const int32_t *errors,
               uint32_t n);

/* pull.c: requests for fetches (FIND, GET). */
bool pull_next(struct remote *remote, bool *later);
void pull_found(struct remote *remote, const struct kvd_key *names, uint32_t n);
void pull_done(struct remote *remote, const int32_t *errors, uint32_t n);
void pulls_end(struct remote *remote, const struct space *space, const struct attachment *a);
void pulls_end_all(struct remote *remote, bool wait);

#endif
