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
#define SEA_WORDS (UINT64_C(1) << 20)
#define READS 20000u
#define CALLS 2000u
#define FAST_NS 2500000 /* the time of a yard on a fast machine */
#define MEASURED 5

static uint64_t own_ns(void) {
        struct timespec t;

        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static uint64_t yard_ns(int fd, volatile uint64_t *sea) {
        uint64_t began = own_ns(), x = 1;

        for (int i = 0; i < 3; i++) {
                if (fallocate(fd, 0, 0, FILE_BYTES) < 0 || ftruncate(fd, 0) < 0)
                        abort();
        }
        for (uint32_t i = 0; i < READS; i++)
                x = x * 6364136223846793005u + sea[(x >> 33) % SEA_WORDS] + 1;
        for (uint32_t i = 0; i < CALLS; i++)
                x += (uint64_t)getppid();
        sea[0] = x & 1;
        return own_ns() - began;
}

double slowness(void) {
        static uint64_t least = UINT64_MAX;
        int fd = memfd_create("yard", MFD_CLOEXEC);
        uint64_t *sea = calloc(SEA_WORDS, sizeof *sea);

        if (fd < 0 || !sea)
                abort();
        for (uint64_t i = 0; i < SEA_WORDS; i += 512)
                sea[i] = i;
        for (int i = 0; i < MEASURED; i++)
                least = MIN(least, yard_ns(fd, sea));
        free(sea);
        close(fd);
        return SANITIZED ? 1 : MAX(1, (double)least / FAST_NS);
}
