/* SPDX-License-Identifier: Apache-2.0 */

/* Detects that a process was forked: the kernel zeroes a MADV_WIPEONFORK page in the child. */

#include "client/conn/forked.h"

#include <sys/mman.h>

#include "ipc/base/sys.h"

void *forked_page_new(void) {
        size_t bytes = sys_page_bytes();
        void *page = sys->mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                               0);

        if (page == MAP_FAILED)
                return NULL;
        if (sys->madvise(page, bytes, MADV_WIPEONFORK) < 0) {
                munmap(page, bytes);
                return NULL;
        }
        return page;
}

void forked_page_free(void *page) {
        if (page)
                munmap(page, sys_page_bytes());
}
