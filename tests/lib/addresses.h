/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_ADDRESSES_H
#define KVD_TESTS_LIB_ADDRESSES_H

/*
 * The number of pages that this process has mapped. It shows a mapping that is never unmapped, even
 * if nothing was written to it, and even if the kernel merged it with its neighbour.
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
