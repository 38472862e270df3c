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
void keep_segment(const struct space *space, const struct segment *segment, int fd);
void drop_segment(const struct space *space, const struct segment *segment);
void drop_attachment(struct attachment *attachment);
void keep_semaphores(const struct space *space, int fd);
void drop_semaphores(const struct space *space, uint32_t life);
/* Does it outlive the daemon, if somebody keeps it? */
bool space_outlives(const struct space *space);

#endif
