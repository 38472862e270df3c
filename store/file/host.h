/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_HOST_H
#define KVD_STORE_FILE_HOST_H

/*
 * What is between a pool on a GPU and its file, or there instead of a file: memory of the host. A question's blocks
 * are carried there by a worker before the disk writes them, and from there after it has read them; where there is
 * room, copies stay, and are read without the disk. Below a pool in memory of the host there is none of this
 * (file->host is NULL), and nothing here does anything.
 */

#include "store/disk.h"
#include "store/tier/carry.h"

struct file;
struct file_count;
struct host;

/* With the file; config.host: bytes of copies that stay. */
int host_begin(struct file *file);
int host_opened(struct file *file); /* its catalog is there */
struct host *host_free(struct host *host);

void host_space_leaves(struct file *file, const struct space *space);

/*
 * May a disk's question of that space's blocks be made? If not, nothing is asked, and it may soon:
 * what was used for another's is given back first (host_shrinks).
 */
bool host_may_begin(struct file *file, uint32_t disk, struct space *space);
/*
 * Is there a place for the copy of one more block of a space on the way to a disk, also where
 * cold copies must go for it? There is a host.
 */
bool host_has_room(struct file *file, uint32_t disk, const struct space *space);
/* A place for who carries blocks elsewhere: a cold copy goes for it. file: may be NULL. False: none does. */
bool host_gives_way(struct file *file, const struct space *space);
/*
 * May the record be read by the disk's question? Those with a copy here, and those without, do
 * not go together.
 */
bool host_takes(struct file *file, uint32_t disk, uint32_t record);
void host_add(struct file *file, uint32_t disk, struct store_disk_item *item);

/* True: the worker has the question now, before or behind the disk. */
bool host_asks_first(struct file *file, uint32_t disk);
bool host_asks_then(struct file *file, uint32_t disk, const int32_t *errors,
                    const uint64_t *checksums, uint32_t n);
bool host_has_question(const struct file *file, uint32_t disk);
/* Nothing is to be asked: gives back a piece of what was used on the way. True: there is more. */
bool host_shrinks(struct file *file, uint32_t disk);

/* Is there no file? Then what is asked is not written anywhere. */
bool host_is_all(const struct file *file);

/* Of the record at that place, if it is the space's: of the exact copy; or KVD_NOWHERE. */
uint32_t host_copy(const struct file *file, const struct space *space, uint32_t record);
/* Who has answered for it: these copies, if there is a disk beside them, or its file. */
struct file_count *host_count(struct file *file, uint32_t disk,
                              const struct store_disk_item *item);
/* NULL: there is none. */
const struct carry *host_carry(const struct file *file, uint32_t disk);

#endif
