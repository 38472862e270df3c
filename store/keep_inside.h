/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_KEEP_INSIDE_H
#define KVD_STORE_KEEP_INSIDE_H

/*
 * keep.c, for the rest of the store. keep: after a descriptor was made; drop: before it is closed.
 */

#include <stdbool.h>
#include <stdint.h>

#include "store/keep.h"

struct space;
struct segment;

void keep_index(const struct space *space);
void drop_index(const struct space *space, uint32_t life);
/* if the domain has room for one more; a descriptor for each shard */
void keep_segment(struct space *space, struct segment *segment, const int *fds);
void keep_adopted(struct space *space, struct segment *segment); /* it is kept already */
void drop_segment(struct space *space, struct segment *segment);
void drop_attachment(struct attachment *attachment);
void keep_semaphores(const struct space *space, int fd);
void drop_semaphores(const struct space *space, uint32_t life);
/* KVD_COST_kept of the space itself, and of a client that is kept. */
uint64_t space_kept_bytes(const struct space *space);
uint64_t attachment_kept_bytes(const struct attachment *attachment);
/* Does the space outlive the daemon? */
bool space_outlives(const struct space *space);

#endif
