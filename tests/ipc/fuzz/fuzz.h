/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_FUZZ_FUZZ_H
#define KVD_TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>

/* libFuzzer's entry point. replay.c calls it for files, so that every compiler runs the corpus. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Aborts if the condition is false, even with NDEBUG. */
#define MUST(condition) \
        do { \
                if (!(condition)) \
                        __builtin_trap(); \
        } while (0)

#endif
