/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One entry for each connection, so that replays of one connection are sent one after the other,
 * in the order of its requests, and never wait for another connection.
 */

#include "tools/kvctl/replays.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"

static void replay_free(struct replay *replay) {
        kvd_list_remove(&replay->node);
        free(replay);
}

void replays_clear(struct kvd_list *replays) {
        while (replays->first)
                replay_free(kvd_list_first(replays, struct replay, node));
}

static struct replay *find(const struct kvd_list *replays, const struct asker *asker) {
        for (struct kvd_list_node *node = replays->first; node; node = node->next) {
                struct replay *replay = container_of(node, struct replay, node);

                if (replay->asker.size == asker->size &&
                    memcmp(replay->asker.id, asker->id, asker->size) == 0)
                        return replay;
        }
        return NULL;
}

static struct replay *find_or_add(struct kvd_list *replays, const struct asker *asker) {
        struct replay *replay = find(replays, asker);

        if (replay)
                return replay;
        replay = calloc(1, sizeof *replay);
        if (!replay)
                return NULL;
        replay->asker = *asker;
        kvd_list_insert(replays, NULL, &replay->node);
        return replay;
}

bool replays_add(struct kvd_list *replays, const struct asker *asker, uint64_t seq) {
        struct replay *replay = find_or_add(replays, asker);

        if (!replay)
                return false;
        if (replay->n_asked == REPLAYS_UNREAD) {
                fprintf(stderr, "kvctl: a subscriber left %u replays unread; all are dropped\n",
                        REPLAYS_UNREAD);
                replay_free(replay);
                return true;
        }
        replay->asked[replay->n_asked++] = seq;
        if (replay->n_asked == 1)
                replay->next = seq;
        return true;
}

/* The oldest replay has been sent. 0: it was the only one. */
static int next_replay(struct replay *replay) {
        memmove(replay->asked, replay->asked + 1, --replay->n_asked * sizeof *replay->asked);
        replay->next = replay->asked[0];
        if (replay->n_asked)
                return 1;
        replay_free(replay);
        return 0;
}

/* 1: there may be more to send; 0: the connection has no room, has ended or has everything. */
static int send_one(struct replay *replay, struct publisher *publisher, replay_send send,
                    void *arg) {
        int r = publisher_answer_begin(publisher, &replay->asker);

        if (r < 0)
                replay_free(replay);
        if (r <= 0)
                return 0;
        r = send(arg, replay);
        if (r == 0)
                return 1;
        return r < 0 ? r : next_replay(replay);
}

int replays_send(struct kvd_list *replays, struct publisher *publisher, replay_send send,
                 void *arg) {
        struct kvd_list_node *next;
        int r = 0;

        for (struct kvd_list_node *node = replays->first; node && r == 0; node = next) {
                struct replay *replay = container_of(node, struct replay, node);

                next = node->next;
                do
                        r = send_one(replay, publisher, send, arg);
                while (r > 0);
        }
        return r;
}
