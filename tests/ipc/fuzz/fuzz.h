/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_FUZZ_FUZZ_H
#define KVD_TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>

/* libFuzzer's entry; replay.c calls it for files, so that the corpus runs with every compiler. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Stops where an invariant is broken, also with NDEBUG. */
#define MUST(condition) \
        do { \
                if (!(condition)) \
                        __builtin_trap(); \
        } while (0)

#endif
