/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_EXPORTER_H
#define KVD_DAEMON_EXPORTER_H

/*
 * The owner's side of the exporter: a process of the same program (kvd --exporter) with a CUDA context that makes the
 * pool's memory and keeps it, where the driver exports nothing but legacy CUDA IPC handles, which only a context can
 * make and which end with their process. When it dies, every space is deleted, and clients begin anew with the next
 * one's memory.
 */

#include <stdint.h>

#include "daemon/config.h"
#include "daemon/loop.h"

struct exporter;
struct work;

#define EXPORTER_SOURCES 2u /* descriptors that the loop watches for it */

/* work: whose worker has to let go of a space's memory before it is given up. */
int exporter_new(const struct config *config, struct loop *loop, struct store *store, const struct work *work,
             struct exporter **ret);
struct exporter *exporter_free(struct exporter *exporter);

/* Looks soon whether memory should be made. */
void exporter_look(struct exporter *exporter);

/* Attempts that failed since the last that worked, and what was said. */
uint32_t exporter_failures(const struct exporter *exporter);
const char *exporter_why(const struct exporter *exporter);

/* Does an exporter get handles from the driver? Starts one, and waits for it, at most ten seconds. 0, or why. */
int exporter_probe(const char *program, const uint8_t uuid[16], char *why, size_t size);

#endif
