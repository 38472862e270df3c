/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_KEPT_H
#define KVD_STORE_KEPT_H

/* keep.c, for the rest of the store: each where the descriptor is made, or before it goes. */

#include <stdbool.h>
#include <stdint.h>

#include "store/keep.h"

struct space;
struct segment;

void keep_index(const struct space *space);
void drop_index(const struct space *space, uint32_t life);
/* if there is room for one more of its domain's */
void keep_segment(struct space *space, struct segment *segment, int fd);
void keep_adopted(struct space *space, struct segment *segment); /* it is kept already */
void drop_segment(struct space *space, struct segment *segment);
void drop_attachment(struct attachment *attachment);
void keep_semaphores(const struct space *space, int fd);
void drop_semaphores(const struct space *space, uint32_t life);
/* Of KVD_COST_kept, for the space's own, and for a client that is kept. */
uint64_t space_kept_bytes(const struct space *space);
uint64_t attachment_kept_bytes(const struct attachment *attachment);
/* Does it outlive the daemon, if somebody keeps it? */
bool space_outlives(const struct space *space);

#endif
