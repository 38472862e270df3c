/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_SET_H
#define KVD_STORE_FILE_SET_H

/*
 * The set of files that hold one cache: which files belong together, which of their records count,
 * and the superblock that all of them share. Each file's process reads and writes its own copies of
 * it (volume_look, volume_tell); this file decides their contents.
 *
 *      set_begin ──► set_see, of each file ──► set_judge ──► set_name, set_forget
 *                              set_tell: a file's next superblock ◄──┘
 *
 * Each change of the superblock increments its serial. A file gets records of a namespace only once
 * its superblock names the namespace, and an erasure is complete only when no file in use has a
 * superblock that does. So whichever files are present at the next start, an epoch belongs to one
 * namespace only.
 */

#include "ipc/base/why.h"
#include "store/file/record.h"

/* NEW: empty; LOST: no superblock is intact; LEFT: was used without the others, does not count */
enum set_state { SET_FOUND, SET_NEW, SET_LOST, SET_LEFT };

struct set_file {
        int error;            /* 0, or why the file is not used */
        bool seen;            /* set_see was called */
        bool told;            /* has a superblock of this opening (set by the caller) */
        enum set_state state; /* as it was found */
        uint64_t bytes, extent_bytes, life;
        bool whole, ours;         /* has an intact superblock, or else a broken one of kvd */
        struct file_super newest; /* the newest of its intact superblocks */
};

struct set {
        uint32_t n_files;
        struct set_file files[DISK_FILES];
        struct file_super super; /* the current one; serial: of the last change */
        struct kvd_why why;
};

void set_begin(struct set *set, uint32_t n_files, const uint64_t *bytes);
/* The superblocks of a file, from volume_look, or the error for which it is not used. */
void set_see(struct set *set, uint32_t file, int error, const void *copies);
/* The same by a new process. -ESTALE: this is not the file that was judged. */
int set_see_again(struct set *set, uint32_t file, const void *copies);
bool set_is_seen(const struct set *set);
/*
 * Called when all files have been seen. Empty files, and those whose superblocks are both broken
 * (SET_LOST), start empty. Others are not touched and get an error: -EMEDIUMTYPE: something else, or
 * another version; -ERANGE: made with another size. Fails with -EXDEV if the files have different
 * secrets. extent_bytes: of files that start empty; 0: chosen by their size.
 */
int set_judge(struct set *set, uint64_t extent_bytes);
/* Why a file is not used, in words. */
const char *set_why(int error);

/* The epoch of a namespace, which is entered if it is new. -ENOSPC: there are too many. */
int set_name(struct set *set, struct kvd_key id, uint64_t *epoch);
/* Removes a namespace. Its records do not count any more once the superblock is written. */
void set_forget(struct set *set, struct kvd_key id);

/* The superblock to write to a file. */
void set_tell(const struct set *set, uint32_t file, struct file_super *ret);

#endif
