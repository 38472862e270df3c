/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_SHARED_FILE_H
#define KVD_BASE_SHARED_FILE_H

/* Creates shared memory, and maps shared memory that another process has created. */

#include <stdbool.h>
#include <stdint.h>

struct shared_file {
        int fd;    /* owned; -1: none */
        int fd_ro; /* owned; second descriptor, can only be mapped read-only; -1: none */
        void *at;  /* owned read-write mapping; NULL: not mapped */
        uint64_t bytes;
};

#define SHARED_LARGE (UINT64_C(2) << 20) /* a large page */

#define SHARED_FILE_NONE ((struct shared_file){.fd = -1, .fd_ro = -1})

enum shared_file_flags {
        SHARED_MAPPED = 1, /* map it: at */
        SHARED_TWIN = 2,   /* open the second descriptor: fd_ro */
        /* forbid further writable mappings, even through fd */
        SHARED_ONE_WRITER = 4,
        SHARED_HUGE = 8, /* use reserved pages of 2 MiB */
};

/* The file reads as zeros. After an error *ret is SHARED_FILE_NONE. -ENOSYS: /proc is missing. */
int shared_file_new(const char *name, uint64_t bytes, unsigned flags, struct shared_file *ret);
/*
 * Makes a shared_file from *fd, and takes *fd over on success. -EPROTO: its size or kind differs,
 * or its size is not sealed. Flags: SHARED_MAPPED, _TWIN, _HUGE.
 */
int shared_file_adopt(int *fd, uint64_t bytes, unsigned flags, struct shared_file *ret);
void shared_file_close(struct shared_file *file); /* sets *file to SHARED_FILE_NONE */

/* Another descriptor of the file, the caller's, which can only be mapped read-only; or -errno. */
int shared_file_for_reading(int fd);

/*
 * Makes one large page of the SHARED_LARGE bytes at that offset, a multiple of it, of which a small
 * page exists already; other processes may use them meanwhile. The kernel needs a mapping: it is at
 * `window`, as much of the caller's address space, aligned to it, and can be neither read nor
 * written. Needs Linux 6.1 and pages of 4 KiB. -ENOMEM: the kernel finds no memory for it.
 */
int shared_file_enlarge(int fd, uint64_t at, void *window);

/*
 * For a descriptor from another process: does the file have so many bytes? Access to a mapping
 * beyond the end of the file raises SIGBUS.
 */
bool shared_file_holds(int fd, uint64_t bytes);
/* Address space for mappings, aligned so that they can have large pages. To be unmapped. */
int shared_reserve(uint64_t bytes, void **ret);
/* Aligned in the same way. -EPROTO: the file is shorter, or bytes is 0 */
int shared_file_map(int fd, uint64_t bytes, int prot, void **ret);

#endif
