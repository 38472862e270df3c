/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_FILE_H
#define KVD_BASE_FILE_H

/* Shared memory that has a descriptor: making it, and mapping what somebody else has made. */

#include <stdbool.h>
#include <stdint.h>

struct shared_file {
        int fd;         /* owned; -1: there is none */
        /* owned; a second descriptor, which can be mapped for reading only; -1: there is none */
        int fd_ro;
        void *at;       /* owned mapping, for reading and writing; NULL: not mapped */
        uint64_t bytes;
};

#define SHARED_FILE_NONE ((struct shared_file){.fd = -1, .fd_ro = -1})

enum shared_file_flags {
        SHARED_MAPPED = 1,     /* map it: at */
        SHARED_TWIN = 2,       /* open the second descriptor: fd_ro */
        /* mapped, and nobody maps it for writing any more, not even through fd */
        SHARED_ONE_WRITER = 4,
        SHARED_HUGE = 8,       /* of pages of 2 MiB */
};

/* 0 or -errno; then *ret is SHARED_FILE_NONE. The file reads as zeros. -ENOSYS: /proc is missing. */
int shared_file_new(const char *name, uint64_t bytes, unsigned flags, struct shared_file *ret);
/*
 * As if made here, from *fd, which is taken if that works; -EPROTO: it is of another size or kind, or not sealed
 * against changes of its size. Flags: SHARED_MAPPED, _TWIN, _HUGE.
 */
int shared_file_adopt(int *fd, uint64_t bytes, unsigned flags, struct shared_file *ret);
void shared_file_close(struct shared_file *file); /* it is SHARED_FILE_NONE afterwards */

/* Another descriptor of it, which can be mapped for reading only: the caller's; or -errno, as above. */
int shared_file_for_reading(int fd);

/*
 * A descriptor that somebody sent: is the file as long as he says? Beyond its end, a mapping is
 * SIGBUS.
 */
bool shared_file_holds(int fd, uint64_t bytes);
/* -EPROTO: it is shorter, or bytes is 0 */
int shared_file_map(int fd, uint64_t bytes, int prot, void **ret);

#endif
