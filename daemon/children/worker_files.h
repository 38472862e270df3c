/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_WORKER_FILES_H
#define KVD_DAEMON_CHILDREN_WORKER_FILES_H

/*
 * The files that the worker has mapped: of spaces, of their segments and of one sketch. It gets
 * their descriptors before the jobs that need them. Spaces are identified by number here, since a
 * space may be deleted while the worker still has it mapped.
 */

#include "daemon/children/child.h"
#include "store/store.h"

struct worker_files {
        struct known_space *known;     /* owned */
        uint32_t sketch_space, sketch; /* 0: none */
};

/* The worker has unmapped a space or the sketch, or is gone with everything that it had mapped. */
void worker_files_forget(struct worker_files *files, uint32_t space);
void worker_files_forget_all(struct worker_files *files);
void worker_files_forget_sketch(struct worker_files *files);

/* True: the worker still has a deleted space mapped; *ret is its number. */
bool worker_files_deleted(const struct worker_files *files, struct store *store, uint32_t *ret);

/* Records that the worker is asked to unmap a segment. False: it does not have the space. */
bool worker_files_unmap(struct worker_files *files, uint32_t space, uint32_t segment);

/*
 * Sends files that the worker lacks for a job of the space, one message per call. Returns 1 if it
 * sent a message, 0 if the worker lacks nothing. arguments: descriptor of the job arguments.
 */
int worker_files_send(struct worker_files *files, struct child *child, struct space *space,
                      uint32_t sketch, int arguments);

#endif
