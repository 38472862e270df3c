/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Shared files: their size cannot change, files with one writer are read-only to others, and a file
 * that could not be created completely leaves nothing open. Each system call fails once.
 */

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ipc/base/numa.h"
#include "ipc/base/shared_file.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/lib/suite.h"

#define BYTES 8192u

/* ---- what is made ---------------------------------------------------------------------------- */

START_TEST(size_and_seals_stay) {
        struct shared_file f;

        ck_assert_int_eq(shared_file_new("test", BYTES, SHARED_MAPPED, &f), 0);
        ck_assert_int_lt(ftruncate(f.fd, BYTES / 2), 0);
        ck_assert_int_lt(ftruncate(f.fd, BYTES * 2), 0);
        ck_assert_int_lt(fcntl(f.fd, F_ADD_SEALS, F_SEAL_WRITE), 0);
        ck_assert_int_eq(f.fd_ro, -1);
        ck_assert_uint_eq(*(uint64_t *)f.at, 0);
        shared_file_close(&f);
        ck_assert(f.fd == -1 && f.at == NULL);
}
END_TEST

/* Only so can one entry of a page table map 2 MiB of it. */
START_TEST(large_mappings_are_aligned) {
        const uint64_t bytes = 2 * SHARED_LARGE + BYTES;
        struct shared_file f;
        void *at;

        for (int i = 0; i < 4; i++) {
                ck_assert_int_eq(shared_file_new("test", bytes, SHARED_MAPPED, &f), 0);
                ck_assert_int_eq(shared_file_map(f.fd, bytes, PROT_READ, &at), 0);
                ck_assert_uint_eq((uintptr_t)f.at % SHARED_LARGE, 0);
                ck_assert_uint_eq((uintptr_t)at % SHARED_LARGE, 0);
                ((uint8_t *)f.at)[bytes - 1] = 1;
                ck_assert_uint_eq(((uint8_t *)at)[bytes - 1], 1);
                munmap(at, bytes);
                shared_file_close(&f);
        }
}
END_TEST

/* The kernel tells the policy of a mapping. */
static bool is_on_node(const void *at, unsigned node) {
        FILE *maps = fopen("/proc/self/numa_maps", "re");
        char line[512], begin[64], wanted[32];
        bool found = false;

        ck_assert_ptr_nonnull(maps);
        snprintf(begin, sizeof begin, "%012lx ", (unsigned long)at);
        snprintf(wanted, sizeof wanted, " prefer:%u ", node);
        while (!found && fgets(line, sizeof line, maps))
                found = strstr(line, begin) && strstr(line, wanted);
        fclose(maps);
        return found;
}

START_TEST(a_file_stays_on_its_node) {
        struct shared_file f;
        void *at;

        if (access("/proc/self/numa_maps", R_OK) < 0 ||
            syscall(SYS_get_mempolicy, NULL, NULL, 0, NULL, 0) < 0)
                return; /* qemu does not have it */
        ck_assert_int_eq(shared_file_new("test", BYTES, 0, &f), 0);
        ck_assert_int_eq(numa_node_of(f.fd), -1);
        if (numa_place(f.fd, 0, BYTES, 0) == -EPERM)
                return; /* in a container */
        ck_assert_int_eq(numa_node_of(f.fd), 0);
        ck_assert_int_eq(shared_file_map(f.fd, BYTES, PROT_READ, &at), 0);
        ck_assert(is_on_node(at, 0));
        munmap(at, BYTES);
        shared_file_close(&f);
}
END_TEST

START_TEST(a_thread_on_one_processor_is_on_its_node) {
        unsigned cpu, node;
        cpu_set_t one;

        if (access("/sys/devices/system/node/node0", R_OK) < 0)
                return;
        ck_assert_int_eq(getcpu(&cpu, NULL), 0);
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        ck_assert_int_eq(sched_setaffinity(0, sizeof one, &one), 0);
        ck_assert_int_eq(getcpu(NULL, &node), 0);
        ck_assert_int_eq(numa_here(), (int)node);
}
END_TEST

/* A kernel before 6.3 does not know MFD_NOEXEC_SEAL. */
static int old_memfd_create(const char *name, unsigned flags) {
        errno = EINVAL;
        return flags & 8 ? -1 : kvd_sys_real.memfd_create(name, flags);
}

static bool can_be_a_program(const struct shared_file *f) {
        return fchmod(f->fd, 0700) == 0;
}

/* A program may have closed its standard input, so descriptor 0 is valid. */
START_TEST(descriptor_0_will_do) {
        int input = dup(0), next;
        struct shared_file f;

        close(0);
        errno = EINVAL; /* left by an earlier call */
        ck_assert_int_eq(shared_file_new("test", BYTES, 0, &f), 0);
        ck_assert_int_eq(f.fd, 0);
        next = dup(0);
        ck_assert_int_eq(next, input + 1); /* nothing else was opened */
        close(next);
        shared_file_close(&f);
        ck_assert_int_eq(dup2(input, 0), 0);
        close(input);
}
END_TEST

/* A shared file cannot become executable, except on an old kernel; all else is the same there. */
START_TEST(it_is_no_program) {
        struct kvd_sys old = kvd_sys_real;
        int probe = memfd_create("probe", MFD_CLOEXEC | 8);
        struct shared_file f;

        ck_assert_int_eq(shared_file_new("test", BYTES, 0, &f), 0);
        ck_assert_int_eq(can_be_a_program(&f), probe < 0);
        shared_file_close(&f);
        old.memfd_create = old_memfd_create;
        sys = &old;
        ck_assert_int_eq(shared_file_new("test", BYTES, SHARED_MAPPED, &f), 0);
        sys = &kvd_sys_real;
        ck_assert(can_be_a_program(&f));
        ck_assert_int_lt(ftruncate(f.fd, BYTES * 2), 0);
        shared_file_close(&f);
        close(probe);
}
END_TEST

START_TEST(one_writer_stays_one) {
        struct shared_file f;
        void *at;

        ck_assert_int_eq(shared_file_new("test", BYTES,
                                         SHARED_MAPPED | SHARED_TWIN | SHARED_ONE_WRITER, &f),
                         0);
        *(uint64_t *)f.at = 7;
        ck_assert_int_eq(shared_file_map(f.fd_ro, BYTES, PROT_READ, &at), 0);
        ck_assert_uint_eq(*(uint64_t *)at, 7);
        munmap(at, BYTES);
        ck_assert_int_eq(shared_file_map(f.fd_ro, BYTES, PROT_READ | PROT_WRITE, &at), -EACCES);
        ck_assert_int_eq(shared_file_map(f.fd, BYTES, PROT_READ | PROT_WRITE, &at), -EPERM);
        shared_file_close(&f);
}
END_TEST

START_TEST(a_short_one_is_refused) {
        struct shared_file f;
        void *at;

        ck_assert_int_eq(shared_file_new("test", BYTES, 0, &f), 0);
        ck_assert_int_eq(shared_file_map(f.fd, BYTES + 1, PROT_READ, &at), -EPROTO);
        ck_assert_int_eq(shared_file_map(f.fd, 0, PROT_READ, &at), -EPROTO);
        ck_assert_int_eq(shared_file_map(-1, BYTES, PROT_READ, &at), -EPROTO);
        ck_assert(shared_file_holds(f.fd, BYTES) && !shared_file_holds(f.fd, BYTES + 1));
        shared_file_close(&f);
}
END_TEST

/* ---- what fails ------------------------------------------------------------------------------ */

static unsigned calls_left;

static bool fails(void) {
        return calls_left-- == 0;
}

#define FAILING(name, type, failed, parameters, arguments) \
        static type fail_##name parameters { \
                errno = ENOSPC; \
                return fails() ? failed : kvd_sys_real.name arguments; \
        }

FAILING(memfd_create, int, -1, (const char *name, unsigned flags), (name, flags))
FAILING(fchmod, int, -1, (int fd, mode_t mode), (fd, mode))
FAILING(ftruncate, int, -1, (int fd, off_t size), (fd, size))
FAILING(add_seals, int, -1, (int fd, int seals), (fd, seals))
FAILING(open, int, -1, (const char *path, int flags), (path, flags))
FAILING(mmap, void *, MAP_FAILED, (void *at, size_t n, int prot, int flags, int fd, off_t off),
        (at, n, prot, flags, fd, off))

static int next_descriptor(void) {
        int fd = dup(0);

        close(fd);
        return fd;
}

START_TEST(each_failure_leaves_nothing) {
        struct kvd_sys failing = kvd_sys_real;
        int before = next_descriptor();
        struct shared_file f;

        failing.memfd_create = fail_memfd_create;
        failing.fchmod = fail_fchmod;
        failing.ftruncate = fail_ftruncate;
        failing.add_seals = fail_add_seals;
        failing.open = fail_open;
        failing.mmap = fail_mmap;
        for (unsigned n = 0; n < 6; n++) {
                calls_left = n;
                sys = &failing;
                ck_assert_int_eq(shared_file_new("test", BYTES, SHARED_MAPPED | SHARED_TWIN, &f),
                                 -ENOSPC);
                sys = &kvd_sys_real;
                ck_assert(f.fd == -1 && f.fd_ro == -1 && f.at == NULL);
                ck_assert_int_eq(next_descriptor(), before);
        }
}
END_TEST

SUITE("file",
      TESTS(size_and_seals_stay, large_mappings_are_aligned, a_file_stays_on_its_node,
            a_thread_on_one_processor_is_on_its_node, descriptor_0_will_do, it_is_no_program,
            one_writer_stays_one, a_short_one_is_refused, each_failure_leaves_nothing))
