/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_BRING_H
#define KVD_STORE_FILE_BRING_H

/* Fetching a chain block by block, from whichever tier has it. */

#include "store/cache/cache.h"
#include "store/file_tier.h"

#define BRING_IN_A_ROW 8u /* consecutive requests for fetches before writes get a turn */

struct bringing {                     /* first member of struct fetch and struct pull */
        struct kvd_list_node waiting; /* in its tier's queue until it ends; the first is next */
        uint64_t round;               /* of the queue: a domain has one fetch in each */
        uint64_t turn;                /* of its domain: a client has one fetch in each */
        uint64_t bytes;               /* size of the fetch, charged to its domain */
        struct space *space;
        struct attachment *attachment; /* NULL: cancelled, ends with the pending answer */
        struct chain_at chain;         /* its beginning */
        kvd_ref last;                  /* parent of the next block, held; 0: the root */
        int fd;                        /* owned eventfd; -1 once signalled */
        uint64_t begun_ns;
};

/*
 * Is the block behind which tokens are fetched one of the chain? 0, or -ESTALE, -EINVAL.
 */
int bring_check(const struct space *space, const struct fetch_request *q);
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

/*
 * Allocates a fetch of that many bytes, which continues the chain after at->leaf, and queues it.
 * Domains take turns in the queue, and the clients of a domain share its turns. -EBUSY: too many
 * fetches of the same domain are queued; other domains do not count.
 */
int bring_begin(struct kvd_list *queue, size_t bytes, struct attachment *a,
                const struct fetch_request *q, const struct chain_at *at, struct bringing **ret);
/* Nothing has arrived yet, and the whole bidirectional prefix of these tokens became resident. */
bool bring_is_needless(const struct bringing *b, const uint32_t *tokens);
/* Signals the eventfd, once. */
void bring_tell(struct bringing *b);
/* Signals the eventfd if that was not done yet, and frees the fetch. */
void bring_end(struct bringing *b);

/*
 * Seals a block of room_take, which the caller holds, as the chain's next one if it was filled, and
 * frees it otherwise. tokens: those of the block; of a bidirectional prefix's first block: those of
 * the whole prefix. Returns the block that has the content now, which may be another one that had
 * it already; the next block follows it. 0 if none.
 */
kvd_ref bring_settle(struct bringing *b, kvd_ref block, const uint32_t *tokens, bool filled);

#endif
