/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_MAPPED_H
#define KVD_BASE_MAPPED_H

/* Maps a block of another process's segment while it is copied. */

#include <stddef.h>
#include <stdint.h>

struct mapped { /* zeroed: not mapped */
        void *at;
        size_t bytes;
};

/* NULL: the file is shorter, or mmap failed. */
void *mapped_begin(int fd, uint64_t offset, uint64_t bytes, struct mapped *ret);
void mapped_end(struct mapped *mapped, uint32_t n);

#endif
