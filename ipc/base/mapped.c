/* SPDX-License-Identifier: Apache-2.0 */

/* Maps single blocks that a process needs only once. A block need not begin on a page. */

#include "ipc/base/mapped.h"

#include <sys/mman.h>

#include "ipc/base/shared_file.h"
#include "ipc/base/sys.h"

void *mapped_begin(int fd, uint64_t offset, uint64_t bytes, struct mapped *ret) {
        uint64_t page = sys_page_bytes(), from = offset / page * page, end = offset + bytes;

        *ret = (struct mapped){0};
        if (end < bytes || !shared_file_holds(fd, end))
                return NULL;
        ret->bytes = end - from;
        ret->at = sys->mmap(NULL, ret->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)from);
        if (ret->at == MAP_FAILED)
                ret->at = NULL;
        return ret->at ? (uint8_t *)ret->at + (offset - from) : NULL;
}

void mapped_end(struct mapped *mapped, uint32_t n) {
        for (uint32_t i = 0; i < n; i++)
                if (mapped[i].at)
                        munmap(mapped[i].at, mapped[i].bytes);
}
