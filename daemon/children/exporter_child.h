/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_EXPORTER_CHILD_H
#define KVD_DAEMON_CHILDREN_EXPORTER_CHILD_H

/*
 * The owner's side of the exporter: a process of the same program (kvd --exporter) with a CUDA
 * context that makes the pool's memory and keeps it, where the driver exports nothing but legacy
 * CUDA IPC handles. Only a context can make these, and they end with their process: when it dies,
 * every space is deleted, and clients begin anew with the next one's memory.
 */

#include <stddef.h>

#include "daemon/base/config.h"
#include "daemon/children/child.h"
#include "store/store.h"

struct exporter;
struct worker;

/* worker: has to let go of a space's memory before it is given up. */
int exporter_new(const struct config *config, struct loop *loop, struct store *store,
                 const struct worker *worker, struct exporter **ret);
struct exporter *exporter_free(struct exporter *exporter);

/* Its process: child_look makes it look for memory that should be made. */
struct child *exporter_child(struct exporter *exporter);

/*
 * Does an exporter get handles from the driver? Starts one, and waits for it, at most ten seconds.
 * 0, or why.
 */
int exporter_probe(const char *program, const uint8_t uuid[16], char *why, size_t size);

#endif
