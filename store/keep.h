/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_KEEP_H
#define KVD_STORE_KEEP_H

/*
 * Descriptors that outlive the daemon. A keeper (systemd, or kvd --keep) gets the descriptors of
 * spaces as they are created, and passes them to the next daemon, whose store takes the spaces over
 * (store_adopt). SPACE is the id of the cache, instance[0] of its index, in 16 hex digits; LIFE is
 * the number of daemons that it has had.
 *
 *      SPACE.i.LIFE                the index
 *      SPACE.s.NUMBER.VERSION      memory of a segment; VERSION: see kvd_index_memory
 *      SPACE.s.NUMBER.VERSION.GPU  its memory on another GPU of the pool than the first
 *      SPACE.p.LIFE.SEAT.PROCESS   a client's pin page, and the number of its process
 *      SPACE.o.LIFE.SEAT           that process: a pidfd, or a lifeline (ipc/base/lifeline.h)
 *      SPACE.w.LIFE                on a GPU: the semaphores that streams write and wait for
 *
 * Names are unique. A descriptor is dropped by its name when it is no longer needed.
 */

#include <stddef.h>

struct domain;
struct store;
struct attachment;

#define KEEP_NAME_MAX 96 /* letters a-z, digits, '.', '-' */

struct keep_ops {
        /* fd stays the caller's and may be closed at once */
        void (*keep)(void *arg, const char *name, int fd);
        void (*drop)(void *arg, const char *name);
        void (*said)(void *arg, const char *line); /* a line for the log; may be NULL */
        /*
         * creates a domain that is not in the configuration, such as uid-1000; NULL: it cannot
         * exist
         */
        struct domain *(*domain)(void *arg, const char *name);
};

struct kept_file {
        char name[KEEP_NAME_MAX];
        int fd;
};

/*
 * Takes over the spaces of the previous daemon, except for their blocks (space_take_over). Call it
 * before there are clients, after all domains were created, and on a GPU before store_make_memory.
 * The store owns all descriptors from now on; those that cannot be verified are closed and dropped.
 * Memory behind legacy CUDA handles ends with the process that made it, and is not kept.
 */
void store_adopt(struct store *store, struct kept_file *files, size_t n);

/*
 * Comes before it. -ENOMEM: pages = huge, and fewer 2 MiB pages are free or in these files than the
 * pool needs; the files are as before.
 */
int store_check_pages(struct store *store, const struct kept_file *files, size_t n);

/*
 * Lets a new attachment outlive the daemon, until the process of this pidfd ends. -EDQUOT,
 * -ENOBUFS: the keeper has no room for it, and the client must not use the space.
 */
int attachment_keep(struct attachment *attachment, int pidfd);

#endif
