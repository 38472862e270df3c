/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_KEEP_H
#define KVD_STORE_KEEP_H

/*
 * What outlives the daemon. Whoever keeps descriptors for it (systemd, or kvd --keep) gets those of
 * spaces as they are made, and gives them to the next daemon, whose store takes the spaces over
 * (store_adopt). SPACE is the number of the cache, instance[0] of its index, in 16 hex digits; LIFE
 * counts the daemons that it has had.
 *
 *      SPACE.i.LIFE                the index
 *      SPACE.s.NUMBER.VERSION      memory of a segment; VERSION: which one, as the index says
 *      SPACE.p.LIFE.SEAT.PROCESS   a client's pin page, and the number of its process
 *      SPACE.o.LIFE.SEAT           that process: a pidfd, or a lifeline (ipc/base/lifeline.h)
 *      SPACE.w.LIFE                on a GPU: the semaphores that streams write and wait for
 *
 * Names are unique. What is kept is dropped by the same name when it goes.
 */

#include <stddef.h>

struct domain;
struct store;
struct attachment;

#define KEEP_NAME_MAX 96 /* letters a-z, digits, '.', '-' */

struct keep_ops {
        /* fd stays the caller's, and may be closed right afterwards */
        void (*keep)(void *arg, const char *name, int fd);
        void (*drop)(void *arg, const char *name);
        void (*said)(void *arg, const char *line); /* for the log; NULL: nobody wants it */
        /* of users who have none in the configuration; NULL: it is not there any more */
        struct domain *(*domain)(void *arg, const char *name);
};

struct kept_file {
        char name[KEEP_NAME_MAX];
        int fd;
};

/*
 * Takes over what the daemon before had, but for spaces' blocks (space_take_over): before there are
 * clients, when all domains are there, and on a GPU before there is memory (store_make_memory). All
 * descriptors are the store's from now on; what cannot be verified is closed, and dropped. Memory
 * behind legacy CUDA handles ends with the process that made it, and is not kept.
 */
void store_adopt(struct store *store, struct kept_file *files, size_t n);

/*
 * A new attachment outlives the daemon, until the process of this pidfd ends. -EDQUOT, -ENOBUFS:
 * the keeper has no room for it, and the client must not use the space.
 */
int attachment_keep(struct attachment *attachment, int pidfd);

#endif
