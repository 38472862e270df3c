/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_MUTANTS_MUTANT_H
#define KVD_TESTS_MUTANTS_MUTANT_H

/*
 * Every mutated place asks here whether its mutant is on. The environment chooses the mutant, so
 * that all mutants are in one build. Reached places are recorded in a file that all processes of a
 * test share: a test need not run with a mutant that it does not reach, or whose value would have
 * been the same each time.
 *
 *      KVD_MUTANT        number of the mutant that is on
 *      KVD_MUTANTS_SEEN  file with a byte per number
 */

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>

#define KVD_MUTANTS 65536

__attribute__((weak)) int kvd_mutant = -1;
__attribute__((weak)) unsigned char *kvd_mutants_seen;

__attribute__((constructor)) static void mutant_choose(void) {
        const char *number = getenv("KVD_MUTANT"), *file = getenv("KVD_MUTANTS_SEEN");
        int fd = file && !kvd_mutants_seen ? open(file, O_RDWR | O_CLOEXEC) : -1;
        void *seen;

        if (number)
                kvd_mutant = atoi(number);
        if (fd < 0)
                return;
        seen = mmap(NULL, KVD_MUTANTS, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (seen != MAP_FAILED)
                kvd_mutants_seen = seen;
}

static inline int mutant_where(int n, int differs) {
        if (kvd_mutants_seen && differs)
                kvd_mutants_seen[n] = 1;
        return kvd_mutant == n;
}

static inline int mutant(int n) {
        return mutant_where(n, 1);
}

#define mutant_instead(n, value, other) \
        __extension__({ \
                __typeof__(0 ? (value) : (other)) kvd_value_ = (value), kvd_other_ = (other); \
                mutant_where(n, kvd_value_ != kvd_other_) ? kvd_other_ : kvd_value_; \
        })

#endif
