/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A yard is a unit of work: allocating and freeing pages of a file, reads that depend on each
 * other, and system calls.
 */

#include "tests/lib/yard.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/lib/sanitized.h"

#define FILE_BYTES (1 << 20)
#define SEA_WORDS (UINT64_C(8) << 20) /* 64 MiB: more than a processor's cache */
#define READS 20000u
#define CALLS 2000u
#define FAST_NS 2500000 /* the time of a yard on a fast machine */
#define MEASURED 5

static uint64_t own_ns(void) {
        struct timespec t;

        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* Small pages: a read misses the TLB too, as it does in a daemon with many spaces. */
static const volatile uint64_t *sea(void) {
        static uint64_t *words;
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS;

        if (words)
                return words;
        words = mmap(NULL, SEA_WORDS * sizeof *words, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (words == MAP_FAILED)
                abort();
        madvise(words, SEA_WORDS * sizeof *words, MADV_NOHUGEPAGE);
        for (uint64_t i = 0; i < SEA_WORDS; i += 512)
                words[i] = i;
        return words;
}

static uint64_t yard_ns(int fd, const volatile uint64_t *words) {
        uint64_t began = own_ns(), x = 1;

        for (int i = 0; i < 3; i++) {
                if (fallocate(fd, 0, 0, FILE_BYTES) < 0 || ftruncate(fd, 0) < 0)
                        abort();
        }
        for (uint32_t i = 0; i < READS; i++)
                x = x * 6364136223846793005u + words[(x >> 33) % SEA_WORDS] + 1;
        for (uint32_t i = 0; i < CALLS; i++)
                x += (uint64_t)getppid();
        return own_ns() - began + (x == 0);
}

double slowness(void) {
        static uint64_t least = UINT64_MAX;
        int fd;

        if (SANITIZED)
                return 1;
        fd = memfd_create("yard", MFD_CLOEXEC);
        if (fd < 0)
                abort();
        for (int i = 0; i < MEASURED; i++)
                least = MIN(least, yard_ns(fd, sea()));
        close(fd);
        return MAX(1, (double)least / FAST_NS);
}
