/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_ADDRESSES_H
#define KVD_TESTS_LIB_ADDRESSES_H

/*
 * How many pages of addresses this process has in use. What is never unmapped shows there even if
 * nothing was written to it, and if the kernel made one mapping of it and its neighbour.
 */

#include <stdio.h>

#include "tests/lib/mark.h"

static inline long address_space_pages(void) {
        FILE *f = fopen("/proc/self/statm", "re");
        long pages = 0;

        ck_assert_ptr_nonnull(f);
        ck_assert_int_eq(fscanf(f, "%ld", &pages), 1);
        fclose(f);
        return pages;
}

#endif
