/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_FOLLOW_H
#define KVCTL_FOLLOW_H

/*
 * Reports what happens in a space, as it happens. There are no notifications: a follower polls the
 * index and the clients' pages. The only cost for others is that clients note what they look up.
 */

#include "client/follow.h"
#include "tools/kvctl/kvctl.h"

struct follow;

/*
 * whole: skip part-filled blocks, and objects that are found by key. quiet: do not report the blocks that are there at the beginning.
 * ops and arg must outlive the follower. 0, or a negative errno, noted with kvctl_fail().
 */
int follow_begin(struct kvctl *kvctl, const struct space_name *space, bool whole, bool quiet,
                 const struct kvd_follow_ops *ops, void *arg, struct follow **ret);
struct follow *follow_end(struct follow *follow);
void follow_endp(struct follow **follow);

/* Reports what has happened since the last call. That the daemon or space is away is no error. */
int follow_step(struct follow *follow);

/* Reports all blocks to other ops, parents first; follow_step() goes on as if it had not. */
int follow_tell_all(struct follow *follow, const struct kvd_follow_ops *ops, void *arg);

const struct kvd_index *follow_index(
        const struct follow *follow); /* NULL while the space has none */

/* ---- what clients look up: asked.c ----------------------------------------------------------- */

struct asked_ops {
        void (*asked)(void *arg, uint32_t client, const struct kvd_asked *note);
        /* lookups were overwritten unread, or not noted because two threads looked up at once */
        void (*missed)(void *arg, uint32_t client);
};

struct pages;
struct pages *pages_new(struct kvctl *kvctl, const struct space_name *space);
struct pages *pages_free(struct pages *pages);
void pages_freep(struct pages **pages);

/* Updates the list of clients' pages. ix: NULL while the space has none. */
int pages_find(struct pages *pages, const struct kvd_index *ix);
void pages_read(struct pages *pages, const struct asked_ops *ops, void *arg);

/* ---- both, until Ctrl-C or the end of --for: watch.c ----------------------------------------- */

struct watch_ops {
        const struct kvd_follow_ops *blocks;
        const struct asked_ops *lookups;
        void (*began)(void *arg, const struct space_name *space, const struct kvd_index *ix);
        int (*looked)(struct kvctl *kvctl, void *arg); /* after each round; not 0: end the watch */
};

/* Watches the space of the first operand. Blocks that are there already are not reported. */
int watch_space(struct kvctl *kvctl, const struct watch_ops *ops, void *arg);

#endif
