/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_REMOTE_INSIDE_H
#define KVD_STORE_REMOTE_INSIDE_H

/* The remote tier of a store, and what it keeps for a space. */

#include "store/cache/cache.h"
#include "store/file/bring.h"
#include "store/remote.h"
#include "store/tier/carry.h"

struct pull {
        struct bringing to;           /* in remote->pulls */
        uint32_t first;               /* blocks that were resident */
        uint32_t n_tokens;
        bool found;                   /* names is filled */
        uint32_t n, at;               /* blocks that are there; those that are done */
        struct kvd_key names[KVD_REMOTE_FOUND + 1]; /* the first: of the block before them */
        uint32_t tokens[];
};

struct remote { /* of a store */
        struct store *store;
        enum store_remote_state state;
        struct store_remote_config config;
        void (*wanted)(void *data, bool soon);
        void *data;

        bool asked;                   /* question is out, at the servers or at a worker */
        bool ready;                   /* ... it was at a worker, and the servers are asked next */
        uint64_t asked_ns;            /* when */
        struct store_remote_question question;
        struct pull *pulling;         /* FIND, GET: whose */
        struct kvd_list pulls;        /* owned */
        uint32_t pulls_in_a_row;      /* questions for fetches since writing last had a turn */
        uint32_t turn;                /* number of the space that is swept next */
        uint64_t push_at_ns;          /* not before then, since they took nothing last time */
        uint64_t push_pause_ns;       /* ... the pause after which that is; 0: they took all */
        kvd_ref looking;              /* FIND: last block of a prefix that is to be written; 0: none is */
        uint32_t prefix[KVD_FETCH_TOKENS]; /* ... its tokens */
        uint64_t epoch;               /* servers came back so often: what they had may be gone */
        struct store_remote_info info;
        char refusal[128];            /* store_remote_refused */
        struct carry *carry;          /* owned; NULL: the pool is in memory of the host */
        int32_t errors[KVD_REMOTE_ITEMS]; /* ... that it ended with */
};

struct remote_name { /* of a block that is on the servers */
        struct kvd_key name;
        kvd_ref block;                /* which one that is: its id may be another's by now */
        uint64_t epoch;
};

struct remote_space {
        bool unswept;                 /* something changed since its blocks were looked at */
        uint32_t hand;                /* block to look at next */
        uint32_t looked;              /* ... since something was found */
        uint64_t changes;             /* when it was last marked */
        kvd_ref first;                /* of a bidirectional prefix, whose name is known */
        struct kvd_key prefix;        /* ... it */
        struct remote_name names[];   /* by id */
};

/* NULL: there are no servers, or all are away, or the space is not for them. */
struct remote *remote_for(const struct space *space);
void remote_want(struct remote *remote, bool soon);
/* Counts an error, and keeps what it was. */
void remote_failed(struct remote *remote, int error);
void remote_begin_question(struct remote *remote, enum store_remote_ask what, struct space *space);
/* May one more block go along? Is there memory for it on its way? */
bool remote_question_is_full(const struct remote *remote);
bool remote_has_room(const struct remote *remote);
/* May blocks of that space be next? As host_may_begin. */
bool remote_may_begin(struct remote *remote, struct space *space);
void remote_question_add(struct remote *remote, const struct store_remote_item *item);
uint64_t remote_space_bytes(const struct kvd_index *ix); /* that a space is charged for */

/* The name of a resident block that is on the servers; NULL: it is not known to be. */
const struct kvd_key *remote_name_of(const struct remote *remote, const struct space *space,
                                     uint32_t id);
void remote_note(const struct remote *remote, struct space *space, uint32_t id,
                 struct kvd_key name);

/* push.c: fills the question with blocks to be written, or looks for those that are there. */
bool push_next(struct remote *remote, bool *later);
void push_found(struct remote *remote, const struct kvd_key *names, uint32_t n);
void push_done(struct remote *remote, const struct kvd_key *names, const int32_t *errors,
               uint32_t n);

/* pull.c: with blocks that somebody waits for. */
bool pull_next(struct remote *remote, bool *later);
void pull_found(struct remote *remote, const struct kvd_key *names, uint32_t n);
void pull_done(struct remote *remote, const int32_t *errors, uint32_t n);
void pulls_end(struct remote *remote, const struct space *space, const struct attachment *a);
void pulls_end_all(struct remote *remote, bool wait);

#endif
