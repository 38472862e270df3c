/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_DEVICE_DEVICE_H
#define KVD_STORE_DEVICE_DEVICE_H

/* Interface of spaces on a GPU for the rest of the store, in addition to their hooks. */

#include "store/cache/cache.h"
#include "store/cache/memory.h"

extern const struct memory_ops memory_device; /* memory.c */

/* chunk.c */
int device_open(struct store *store);
void chunks_lost(struct store *store); /* legacy handles: the exporter is gone */

#endif
