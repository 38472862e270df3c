/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_FOLLOW_H
#define KVCTL_FOLLOW_H

/*
 * What happens in a space, for programs that want to know as it happens. Nobody tells them: they
 * look, at the index and at its clients' pages, and no reader costs the daemon or a client anything
 * but that clients note what they look up.
 */

#include "ipc/base/layout.h"
#include "tools/kvctl/kvctl.h"

/* A block that came into the cache. */
struct stored {
        uint64_t hash;         /* low half of its chain key; never 0 */
        uint64_t parent;       /* ... of the block before it; 0: it begins a chain */
        uint32_t depth, group;
        uint64_t root;
        const uint32_t *tokens;
        uint32_t n_tokens;
};

struct follow_ops {
        void (*stored)(void *arg, const struct stored *block);
        void (*removed)(void *arg, uint64_t hash);
        void (*cleared)(void *arg);          /* all of them: the space was deleted */
        void (*away)(void *arg, bool is);    /* the daemon is, or is back; NULL: of no interest */
};

struct follow;

/*
 * whole: part-filled blocks are passed over. quiet: what is there at the beginning is not told of.
 * ops and arg live as long. A negative errno was noted with kvctl_fail.
 */
int follow_begin(struct kvctl *kvctl, const struct space_name *space, bool whole, bool quiet,
                 const struct follow_ops *ops, void *arg, struct follow **ret);
struct follow *follow_end(struct follow *follow);
void follow_endp(struct follow **follow);

/* Tells what has happened since the last call. It waits out daemons and spaces that are away. */
int follow_step(struct follow *follow);

/* Tells other ops of all that is there, parents first, and changes nothing else. */
int follow_tell_all(struct follow *follow, const struct follow_ops *ops, void *arg);

const struct kvd_index *follow_index(const struct follow *follow); /* NULL: it is away */

/* ---- what clients look up: asked.c ----------------------------------------------------------- */

struct asked_ops {
        void (*asked)(void *arg, uint32_t client, const struct kvd_asked *note);
        /* more than were looked at in time, or two threads' at once */
        void (*missed)(void *arg, uint32_t client);
};

struct pages;
struct pages *pages_new(struct kvctl *kvctl, const struct space_name *space);
struct pages *pages_free(struct pages *pages);
void pages_freep(struct pages **pages);

/* Which clients there are by now. capacity: of the index; 0 if that is away. */
int pages_find(struct pages *pages, uint32_t capacity);
void pages_read(struct pages *pages, const struct asked_ops *ops, void *arg);

/* ---- both, until Ctrl-C or the end of --for: watch.c ------------------------------------------ */

struct watch_ops {
        const struct follow_ops *blocks;
        const struct asked_ops *lookups;
        void (*began)(void *arg, const struct space_name *space, const struct kvd_index *ix);
        int (*looked)(struct kvctl *kvctl, void *arg); /* a round is over; not 0: so is the watch */
};

/* Of the space that the first operand names. What is there already is not told of. */
int watch_space(struct kvctl *kvctl, const struct watch_ops *ops, void *arg);

#endif
