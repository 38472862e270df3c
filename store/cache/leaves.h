/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_CACHE_LEAVES_H
#define KVD_STORE_CACHE_LEAVES_H

/* The order of eviction, for evict.c: stamps and heaps of leaves. A lower stamp is evicted first. */

#include "store/cache/inside.h"

#define CLOCK ((UINT64_C(1) << 48) - 1) /* the clock's part of a stamp */

/* A sealed block's current stamp; that in struct block may be older, as clients report no uses. */
uint64_t leaf_stamp(const struct space *space, uint32_t id);
/* The parent's stamp after its last child, whose stamp is `child`, has been evicted. */
uint64_t leaf_stamp_after(struct space *space, uint32_t parent, uint64_t child);
/* Moves a leaf up or down in its heap after its stamp has changed. */
void leaf_sift(struct space *space, uint32_t id);
/* The stamp of the leaf after the coldest one; UINT64_MAX: there is one leaf. */
uint64_t leaves_second_coldest(const struct space *space, const struct arena *arena);
/* What leaf_stamp costs beyond the words of pins, in reads (see evict.c). */
uint32_t worth_reads(const struct space *space, uint32_t id);

/* From the heap to the shelf, and back. */
void leaf_shelve(struct arena *arena, uint32_t id);
void leaf_unshelve(struct arena *arena, uint32_t id);
uint32_t leaf_on_shelf(const struct arena *arena, uint32_t i);

/* Takes a leaf out of its chain. Its parent takes its place in the heap, if that is a leaf now. */
void block_unlink(struct space *space, uint32_t id);

#endif
