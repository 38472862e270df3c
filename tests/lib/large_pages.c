/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/large_pages.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

static _Atomic uint32_t n_refused;
static struct kvd_sys table;

static bool is_whole(uint64_t n) {
        return n % LARGE_PAGE == 0;
}

static int refuse(const char *call, uint64_t at) {
        fprintf(stderr, "%s: %#llx is within a page\n", call, (unsigned long long)at);
        atomic_fetch_add(&n_refused, 1);
        errno = EINVAL;
        return -1;
}

static long large_sysconf(int name) {
        return name == _SC_PAGESIZE ? LARGE_PAGE : sysconf(name);
}

/* An aligned range of whole pages. Its margins stay mapped: nothing else uses them. */
static void *find_place(size_t bytes) {
        uint8_t *at = mmap(NULL, bytes + LARGE_PAGE, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

        return at == MAP_FAILED ? at : (void *)ALIGN_UP((uintptr_t)at, LARGE_PAGE);
}

static void *large_mmap(void *at, size_t n, int prot, int flags, int fd, off_t off) {
        if (!is_whole((uint64_t)off))
                return refuse("mmap", (uint64_t)off) < 0 ? MAP_FAILED : NULL;
        if (flags & MAP_FIXED && !is_whole((uintptr_t)at))
                return refuse("mmap", (uintptr_t)at) < 0 ? MAP_FAILED : NULL;
        if (!(flags & MAP_FIXED))
                at = find_place(ALIGN_UP(n, LARGE_PAGE));
        return at == MAP_FAILED ?
                       at :
                       mmap(at, ALIGN_UP(n, LARGE_PAGE), prot, flags | MAP_FIXED, fd, off);
}

/* Acts on whole pages, including the part of the last page beyond the end. */
static int large_madvise(void *at, size_t n, int advice) {
        if (!is_whole((uintptr_t)at))
                return refuse("madvise", (uintptr_t)at);
        return madvise(at, ALIGN_UP(n, LARGE_PAGE), advice);
}

void large_pages_begin(void) {
        table = *sys;
        table.sysconf = large_sysconf;
        table.mmap = large_mmap;
        table.madvise = large_madvise;
        sys = &table;
}

uint32_t large_pages_refused(void) {
        return atomic_load(&n_refused);
}
