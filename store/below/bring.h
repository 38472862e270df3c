/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_BELOW_BRING_H
#define KVD_STORE_BELOW_BRING_H

/*
 * Fetches: each brings a part of a chain back from one tier below the pool. It holds the last
 * resident block of its chain, seals each block that arrives after it, and signals the client's
 * eventfd when it ends. fetch.c: beginning and end; turns.c: the queue; bring.c: requests and
 * answers.
 */

#include "store/below/below.h"

struct fetch {
        struct kvd_list_node waiting; /* in from->fetches until it ends; the first is next */
        uint64_t round;               /* of the queue: a domain has one fetch in each */
        uint64_t turn;                /* of its domain: a client has one fetch in each */
        uint64_t bytes;               /* size of the fetch, charged to its domain */
        struct below *from;
        struct space *space;
        struct attachment *attachment; /* NULL: cancelled, ends with the pending answer */
        struct chain_at chain;         /* its beginning */
        kvd_ref last;                  /* parent of the next block, held; 0: the root */
        int fd;                        /* owned eventfd; -1 once signalled */
        uint64_t begun_ns;

        bool found;     /* n and names are set */
        uint32_t n, at; /* n: blocks that the tier has; at: blocks of these done */
        uint32_t depth; /* of the first of them */
        uint32_t first; /* number of resident blocks before it whose tokens are kept, too */
        uint32_t n_tokens;
        uint32_t *tokens; /* from block depth - first on; behind names */
        struct below_name names
                []; /* of the block before the first one (until found: before tokens), then of each */
};

/* Number of the chain's blocks before the request's tokens, and of its tokens up to their end. */
uint32_t bring_before(const struct space *space, const struct fetch_request *q);
uint64_t bring_end_of(const struct space *space, const struct fetch_request *q);
/*
 * How far a chain is resident. A bidirectional prefix counts only if all of it is resident: a fetch
 * does not continue after a part, whose tokens do not prove that it belongs to this prefix.
 */
struct chain_at bring_walk(const struct space *space, const struct fetch_request *q);
/* Does q include the next block, and is that one within the limits of what can be fetched? */
bool bring_reaches(const struct space *space, const struct fetch_request *q,
                   const struct chain_at *at);
/* Nothing has arrived yet, and the whole bidirectional prefix became resident. */
bool fetch_is_needless(const struct fetch *f);

/* The tokens of the fetch's i-th block. */
const uint32_t *fetch_tokens(const struct fetch *f, uint32_t i);
/* Number of these. */
uint32_t fetch_n_tokens(const struct fetch *f, uint32_t i);

/*
 * turns.c: queues a fetch. Domains take turns in the queue, and the clients of a domain share its
 * turns. -EBUSY: too many fetches of the same domain are queued; other domains do not count.
 */
int turns_check(const struct kvd_list *queue, const struct attachment *a);
void turns_enqueue(struct kvd_list *queue, struct fetch *f);

/* Signals the eventfd if that was not done yet, and frees the fetch. */
void fetch_end(struct fetch *f);
/*
 * Ends the fetches of a client, or of a deleted space (a is NULL). A client's fetch that has an
 * outstanding request ends with the answer.
 */
void fetches_end(struct below *b, const struct space *space, const struct attachment *a);
/* Ends all fetches but one, which may be NULL; one with an outstanding request as above. */
void fetches_miss(struct below *b, const struct fetch *but);
/* Frees all fetches. */
void fetches_close(struct below *b);

/* Makes a request for the first fetch that can have one. True: there is one. */
bool bring_next(struct below *b, bool *later);
/* The request for a fetch was answered; blocks beyond the first n count as -ECANCELED. */
void bring_done(struct below *b, const int32_t *errors, uint32_t n);

#endif
