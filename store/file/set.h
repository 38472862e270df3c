/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_SET_H
#define KVD_STORE_FILE_SET_H

/*
 * The set of files that have one cache: which of them belong together, what is believed of each,
 * and what the superblock says that all of them have. Each file's process reads and writes its
 * own copies (volume_look, volume_tell); what is in them is decided here.
 *
 *      set_begin ──► set_see, of each file ──► set_judge ──► set_name, set_forget
 *                                                 set_tell: what a file is to have ◄──┘
 *
 * What changes the superblock counts its serial up. A file gets records of a namespace only when
 * it has a superblock that names it, and nothing is erased before each file in use has one that
 * does not: so whichever of them is there at the next start, alone or not, an epoch means one
 * namespace.
 */

#include "ipc/base/why.h"
#include "store/file/record.h"

/* LEFT: it was used without the others of these files: what it had is not believed. */
enum set_state { SET_FOUND, SET_NEW, SET_LOST, SET_LEFT };

struct set_file {
        int error;                /* why it is not used; 0: it is */
        bool seen;                /* it has said what it is, or there is an error */
        bool told;                /* it has a superblock of this opening, its caller says */
        enum set_state state;     /* as it was found */
        uint64_t bytes, extent_bytes, life;
        bool whole, ours;         /* a copy is whole; or one that is not was of a kvd */
        struct file_super newest; /* of those that are whole */
};

struct set {
        uint32_t n_files;
        struct set_file files[DISK_FILES];
        struct file_super super;  /* what counts; serial: of the last change */
        struct kvd_why why;
};

void set_begin(struct set *set, uint32_t n_files, const uint64_t *bytes);
/* What lies in a file (volume_look), or why that is not known: then it is not used. */
void set_see(struct set *set, uint32_t file, int error, const void *copies);
/* -ESTALE: what is there now is not the file that was judged. */
int set_see_again(struct set *set, uint32_t file, const void *copies);
bool set_is_seen(const struct set *set);
/*
 * When all were seen. Files of zeros, and those whose copies are all broken (SET_LOST), begin anew;
 * others are left as they are, with an error: -EMEDIUMTYPE: it is something else, or of another
 * version; -ERANGE: it was made with another size. -EXDEV, of all: they have records of different
 * volumes. extent_bytes: of those that begin anew; 0: by their size.
 */
int set_judge(struct set *set, uint64_t extent_bytes);
/* Why a file is not used, in words. */
const char *set_why(int error);

/* The epoch of a namespace, which is entered if it is new. -ENOSPC: there are too many. */
int set_name(struct set *set, struct kvd_key id, uint64_t *epoch);
/* Nothing that it has counts behind the next superblock. */
void set_forget(struct set *set, struct kvd_key id);

/* The superblock that a file is to have. */
void set_tell(const struct set *set, uint32_t file, struct file_super *ret);

#endif
