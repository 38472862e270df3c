/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_MAPPED_H
#define KVD_BASE_MAPPED_H

/* A block of somebody's segment, mapped for as long as it is moved. */

#include <stddef.h>
#include <stdint.h>

struct mapped { /* zeroed: nothing */
        void *at;
        size_t bytes;
};

/* NULL: the file has no such bytes, or there is no room for them. */
void *mapped_begin(int fd, uint64_t offset, uint64_t bytes, struct mapped *ret);
void mapped_end(struct mapped *mapped, uint32_t n);

#endif
