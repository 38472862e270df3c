/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_BRING_H
#define KVD_STORE_FILE_BRING_H

/* A chain that comes back from a tier, block by block, whichever tier that is. */

#include "store/cache/cache.h"

struct bringing {
        struct kvd_list_node waiting;
        struct space *space;           /* NULL: it is unused, or nobody's any more */
        struct attachment *attachment; /* NULL: it ends with the answer that is awaited */
        kvd_ref last;                  /* block that the next one comes behind, held; 0: the root */
        uint32_t group;
        uint64_t root;
        int fd;                        /* owned; -1 */
        uint64_t begun_ns;
};

/* Behind the block where at ends, in that list. *fd is what becomes readable at its end. */
int bring_begin(struct bringing *b, struct kvd_list *list, struct attachment *a,
                const struct chain_at *at, int *fd);
/* Tells who waits for it, once. */
void bring_tell(struct bringing *b);
/* ... and it is over. */
void bring_end(struct bringing *b);

/*
 * A block (of room_take, held) that was filled, or was not: then it is freed. Returns the one that
 * has the content now, behind which the next one comes; 0: there is none.
 */
kvd_ref bring_settle(struct bringing *b, kvd_ref block, const uint32_t *tokens, bool filled);

#endif
