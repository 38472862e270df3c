/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_BRING_H
#define KVD_STORE_FILE_BRING_H

/* A chain that comes back from a tier, block by block, whichever tier that is. */

#include "store/cache/cache.h"
#include "store/disk.h"

#define BRING_IN_A_ROW 8u /* questions for fetches; then what is to be written has a turn */

struct bringing { /* the first part of its kind's struct */
        struct kvd_list_node waiting;  /* in its tier's queue until its end; the first is next */
        uint64_t round;                /* of the queue: a domain has one fetch in each */
        uint64_t turn;                 /* of its domain: a client has one fetch in each */
        uint64_t bytes;                /* of its memory, which its domain is charged for */
        struct space *space;
        struct attachment *attachment; /* NULL: it ends with the answer that is awaited */
        struct chain_at chain;         /* its beginning */
        kvd_ref last;                  /* block that the next one comes behind, held; 0: the root */
        int fd;                        /* owned; -1 */
        uint64_t begun_ns;
};

/*
 * How far a chain is resident. A bidirectional prefix is that whole or not at all: what is left of it
 * is not gone on from, because its tokens do not say that it is of this one.
 */
struct chain_at bring_walk(const struct space *space, const struct fetch_request *q);
/* Can the block there come, as far as chains come back at all? */
bool bring_reaches(const struct space *space, const struct fetch_request *q,
                   const struct chain_at *at);

/*
 * Enters a fetch behind the block where at ends, in memory of so many bytes. Domains take turns in
 * the queue, and the clients of a domain take turns in its turns. -EBUSY: too many fetches of its
 * own domain wait already, whatever others ask for.
 */
int bring_begin(struct kvd_list *queue, size_t bytes, struct attachment *a,
                const struct fetch_request *q, const struct chain_at *at, struct bringing **ret);
/* Nothing came yet, and somebody else has brought or made the whole prefix of these tokens. */
bool bring_is_needless(const struct bringing *b, const uint32_t *tokens);
/* Tells who waits for it, once. */
void bring_tell(struct bringing *b);
/* ... and frees it. */
void bring_end(struct bringing *b);

/*
 * A block (of room_take, held) that was filled, or was not: then it is freed. tokens: its own, and
 * behind those of a bidirectional prefix's first block the others'. Returns the one that has the
 * content now, behind which the next one comes; 0: there is none.
 */
kvd_ref bring_settle(struct bringing *b, kvd_ref block, const uint32_t *tokens, bool filled);

#endif
