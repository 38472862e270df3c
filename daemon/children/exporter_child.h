/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_EXPORTER_CHILD_H
#define KVD_DAEMON_CHILDREN_EXPORTER_CHILD_H

/*
 * The owner's side of the exporter: a process of the same program (kvd --exporter) with a CUDA
 * context, which allocates and holds the pool's memory if the driver exports only legacy CUDA IPC
 * handles. These need a context, and end with their process. If the exporter dies, every space is
 * deleted, and clients start again in memory of the next exporter.
 */

#include <stddef.h>

#include "daemon/base/config.h"
#include "daemon/children/child.h"
#include "store/store.h"

struct exporter;
struct worker;

/* worker: must unmap a deleted space before its memory is freed. */
int exporter_new(const struct config *config, struct loop *loop, struct store *store,
                 const struct worker *worker, struct exporter **ret);
struct exporter *exporter_free(struct exporter *exporter);

/* Its process; child_look makes it check for memory to allocate. */
struct child *exporter_child(struct exporter *exporter);

/*
 * Starts an exporter to find out whether it gets handles from the driver. Waits until it replies,
 * or is silent for ten seconds. Returns 0, or a negative errno and why.
 */
int exporter_probe(const char *program, const uint8_t uuid[16], char *why, size_t size);

#endif
