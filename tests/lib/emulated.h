/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_EMULATED_H
#define KVD_TESTS_LIB_EMULATED_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

/* Whether qemu executes the test (tests/lib/emulate.py). If so, prints why a part of it is left out. */
static inline bool emulated(const char *why) {
        bool is = getenv("KVD_TEST_EMULATED");

        if (is)
                fprintf(stderr, "left out in qemu: %s\n", why);
        return is;
}

#endif
