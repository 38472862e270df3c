/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_HOST_H
#define KVD_STORE_FILE_HOST_H

/*
 * Host memory between a pool on a GPU and its file, or instead of one. A worker copies a
 * request's blocks there before the disk writes them, and from there after the disk has read them.
 * As far as there is room, copies stay, and are read without the disk. A pool in host memory needs
 * none of this: file->host is NULL, and the functions here do nothing.
 */

#include "store/below/carry.h"
#include "store/file_tier.h"

struct file;
struct file_count;
struct host;

/* Called when the tier begins. config.host: maximum bytes of copies that stay. */
int host_begin(struct file *file);
int host_opened(struct file *file); /* called when the catalog has been opened */
struct host *host_free(struct host *host);

void host_space_leaves(struct file *file, const struct space *space);

/*
 * Can a request of that space's blocks be made now? If not, try again soon: spare places of another
 * space are given back first (host_shrinks).
 */
bool host_may_begin(struct file *file, struct space *space);
/*
 * Is there a place for one more block of a space on its way to the disk? Evicts cold copies for it.
 * file->host must not be NULL.
 */
bool host_has_room(struct file *file, const struct space *space);
/*
 * Evicts a cold copy to make a place for blocks on their way to another tier. file: may be NULL.
 * False: none was evicted.
 */
bool host_gives_way(struct file *file, const struct space *space);
/*
 * Can the record be added to the disk's read request? In a request either all records have a copy
 * here, or none has.
 */
bool host_takes(struct file *file, uint32_t record);
/* Room for the item's copy has been found: host_has_room, host_takes. */
void host_add(struct file *file, struct store_disk_item *item);

/* Gives the request to a worker, before or after the disk. True: the worker has it now. */
bool host_asks_first(struct file *file);
bool host_asks_then(struct file *file, const int32_t *errors, const uint64_t *checksums,
                    uint32_t n);
bool host_has_question(const struct file *file);
/* Called when there is nothing to do: gives back some spare places. True: there are more. */
bool host_shrinks(struct file *file);

/* Is there host memory but no file? */
bool host_is_all(const struct file *file);

/* The place of the record's copy, if it belongs to the space; or KVD_NOWHERE. */
uint32_t host_copy(const struct file *file, const struct space *space, uint32_t record);
/* The counters for an item: of the copies if one was used and there is a disk; else the file's. */
struct file_count *host_count(struct file *file, const struct store_disk_item *item);

#endif
