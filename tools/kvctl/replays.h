/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_REPLAYS_H
#define KVCTL_REPLAYS_H

/*
 * Replays that are not sent yet. A connection gets its replies as fast as it reads them; one that
 * reads late delays only itself.
 */

#include "ipc/base/list.h"
#include "tools/kvctl/publish.h"

#define REPLAYS_UNREAD 1024u /* of one connection */

/* A connection that has asked, and what it has not been sent yet. */
struct replay {
        struct kvd_list_node node;
        struct asker asker;
        uint64_t asked[REPLAYS_UNREAD]; /* numbers of first batches, the oldest first */
        size_t n_asked;
        uint64_t next; /* of the oldest: the number of its next batch */
};

/* Sends one message. 1: it was the last one of the oldest replay; 0: more follow; or negative. */
typedef int (*replay_send)(void *arg, struct replay *replay);

/*
 * False: out of memory. A connection that leaves more than REPLAYS_UNREAD replays unread loses all
 * of them, and standard error says so.
 */
bool replays_add(struct kvd_list *replays, const struct asker *asker, uint64_t seq);
/* Sends what connections have room for, and drops ended ones. 0, or an error of send(). */
int replays_send(struct kvd_list *replays, struct publisher *publisher, replay_send send,
                 void *arg);
void replays_clear(struct kvd_list *replays);

#endif
