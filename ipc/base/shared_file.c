/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Memory that processes share is a memfd of mode 0600 with a sealed size, so that no other user can
 * cause SIGBUS in a process that maps it. A file with one writer is sealed against further writable
 * mappings after it was mapped here; in addition, its readers get a descriptor opened read-only.
 */

#include "ipc/base/shared_file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <linux/memfd.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u /* Linux 6.3 */
#endif

/* A memfd that cannot be executed. Kernels without this flag refuse it. */
static int open_memory(const char *name, unsigned flags) {
        int fd = sys->memfd_create(name, flags | MFD_NOEXEC_SEAL);

        return fd < 0 && errno == EINVAL ? sys->memfd_create(name, flags) : fd;
}

/* Not -ENOENT: callers pass that on to clients, for which it means that there is no such space. */
int shared_file_for_reading(int fd) {
        char path[64];
        int twin;

        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        twin = sys->open(path, O_RDONLY | O_CLOEXEC);
        if (twin >= 0)
                return twin;
        return errno == ENOENT || errno == ENOTDIR ? -ENOSYS : negative_errno();
}

int shared_reserve(uint64_t bytes, void **ret) {
        uint64_t whole = ALIGN_UP(bytes, sys_page_bytes());
        uint8_t *at = sys->mmap(NULL, whole + SHARED_LARGE, PROT_NONE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        uint8_t *aligned;

        if (at == MAP_FAILED)
                return negative_errno();
        aligned = (uint8_t *)ALIGN_UP((uintptr_t)at, SHARED_LARGE);
        munmap(at, (size_t)(aligned - at)); /* does nothing for 0 bytes */
        munmap(aligned + whole, (size_t)(at + SHARED_LARGE - aligned));
        *ret = aligned;
        return 0;
}

static int map(int fd, uint64_t bytes, int prot, void **ret) {
        void *at = NULL;
        int r = bytes < SHARED_LARGE ? 0 : shared_reserve(bytes, &at);

        if (r < 0)
                return r;
        *ret = sys->mmap(at, bytes, prot, at ? MAP_SHARED | MAP_FIXED : MAP_SHARED, fd, 0);
        if (*ret != MAP_FAILED)
                return 0;
        r = negative_errno();
        *ret = NULL;
        if (at)
                munmap(at, bytes);
        return r;
}

/* After an error, *f owns what was created before it. */
static int make(struct shared_file *f, const char *name, unsigned flags) {
        unsigned huge = flags & SHARED_HUGE ? MFD_HUGETLB | MFD_HUGE_2MB : 0;
        int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

        f->fd = open_memory(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | huge);
        if (f->fd < 0 || sys->fchmod(f->fd, 0600) < 0 || sys->ftruncate(f->fd, (off_t)f->bytes) < 0)
                return negative_errno();
        if (flags & SHARED_MAPPED) {
                int r = map(f->fd, f->bytes, PROT_READ | PROT_WRITE, &f->at);

                if (r < 0)
                        return r;
        }
        if (sys->add_seals(f->fd, flags & SHARED_ONE_WRITER ? seals | F_SEAL_FUTURE_WRITE : seals) <
            0)
                return negative_errno();
        if (flags & SHARED_TWIN)
                f->fd_ro = shared_file_for_reading(f->fd);
        return flags & SHARED_TWIN ? MIN(f->fd_ro, 0) : 0;
}

int shared_file_new(const char *name, uint64_t bytes, unsigned flags, struct shared_file *ret) {
        struct shared_file file = SHARED_FILE_NONE;
        int r;

        file.bytes = bytes;
        r = make(&file, name, flags);
        if (r < 0)
                shared_file_close(&file);
        *ret = file;
        return r;
}

static bool is_ours(int fd, uint64_t bytes, unsigned flags) {
        int seals = F_SEAL_SHRINK | F_SEAL_GROW;
        struct statfs fs;
        struct stat st;

        return fstat(fd, &st) == 0 && (uint64_t)st.st_size == bytes && fstatfs(fd, &fs) == 0 &&
               (fs.f_type == HUGETLBFS_MAGIC) == !!(flags & SHARED_HUGE) &&
               (fcntl(fd, F_GET_SEALS) & seals) == seals && fcntl(fd, F_GET_SEALS) >= 0;
}

int shared_file_adopt(int *fd, uint64_t bytes, unsigned flags, struct shared_file *ret) {
        struct shared_file file = SHARED_FILE_NONE;
        int r = is_ours(*fd, bytes, flags) ? 0 : -EPROTO;

        *ret = SHARED_FILE_NONE;
        file.bytes = bytes;
        if (r == 0 && flags & SHARED_TWIN) {
                file.fd_ro = shared_file_for_reading(*fd);
                r = MIN(file.fd_ro, 0);
        }
        if (r == 0 && flags & SHARED_MAPPED)
                r = shared_file_map(*fd, bytes, PROT_READ | PROT_WRITE, &file.at);
        if (r < 0) {
                shared_file_close(&file);
                return r;
        }
        file.fd = *fd;
        *fd = -1;
        *ret = file;
        return 0;
}

void shared_file_close(struct shared_file *f) {
        if (f->at)
                munmap(f->at, f->bytes);
        closep(&f->fd);
        closep(&f->fd_ro);
        *f = SHARED_FILE_NONE;
}

/* Does so at once, and with all values of shmem_enabled but `deny`. */
int shared_file_enlarge(int fd, uint64_t at, void *window) {
        if (sys_page_bytes() != 4096)
                return -EOPNOTSUPP;
        if (sys->mmap(window, SHARED_LARGE, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, (off_t)at) ==
                    MAP_FAILED ||
            sys->madvise(window, SHARED_LARGE, MADV_COLLAPSE) < 0)
                return negative_errno();
        return 0;
}

bool shared_file_holds(int fd, uint64_t bytes) {
        struct stat st;

        return fstat(fd, &st) == 0 && (uint64_t)st.st_size >= bytes;
}

int shared_file_map(int fd, uint64_t bytes, int prot, void **ret) {
        if (bytes == 0 || !shared_file_holds(fd, bytes))
                return -EPROTO;
        return map(fd, bytes, prot, ret);
}
