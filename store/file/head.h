/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_HEAD_H
#define KVD_STORE_FILE_HEAD_H

/*
 * The superblock of the file: what was found, and what is written next. The file's process reads
 * and writes its copies (volume_look, volume_tell); this file decides their contents.
 *
 *      head_begin ──► head_see ──► head_judge ──► head_name, head_forget
 *                          head_tell: the next superblock ◄──┘
 *
 * Each change of the superblock increments its serial. The file gets records of a namespace only
 * once its superblock names the namespace, and an erasure is complete only when its superblock does
 * not. So an epoch belongs to one namespace only.
 */

#include "ipc/base/why.h"
#include "store/file/record.h"

struct head {
        int error; /* 0, or why the file is not used */
        bool seen; /* head_see was called */
        bool told; /* the file has a superblock of this opening (set by the caller) */
        uint64_t bytes, extent_bytes;
        bool whole, ours;        /* had an intact superblock, or else a broken one of kvd */
        struct file_super found; /* the newest of its intact superblocks */
        struct file_super super; /* the current one; serial: of the last change */
        struct kvd_why why;
};

void head_begin(struct head *head, uint64_t bytes);
/* The superblocks of the file, from volume_look, or the error for which it is not used. */
void head_see(struct head *head, int error, const void *copies);
/* The same by a new process. -ESTALE: this is not the file that was judged. */
int head_see_again(struct head *head, const void *copies);
/*
 * Called when the file has been seen. A file that is empty, or whose superblocks are both broken,
 * starts empty. Others are not touched: -EMEDIUMTYPE: something else, or another version; -ERANGE:
 * made with another size. extent_bytes: of a file that starts empty; 0: chosen by its size.
 */
int head_judge(struct head *head, uint64_t extent_bytes);
/* Makes the first superblock, without a file. */
int head_alone(struct head *head);
/* Why the file is not used, in words. */
const char *head_why(int error);

/* The epoch of a namespace, which is entered if it is new. -ENOSPC: there are too many. */
int head_name(struct head *head, struct kvd_key id, uint64_t *epoch);
/* Removes a namespace. Its records do not count any more once the superblock is written. */
void head_forget(struct head *head, struct kvd_key id);

/* The superblock to write. */
void head_tell(const struct head *head, struct file_super *ret);

#endif
