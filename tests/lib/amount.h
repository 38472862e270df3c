/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_AMOUNT_H
#define KVD_TESTS_LIB_AMOUNT_H

#include <stdlib.h>

/* How much a test does: all of it if $KVD_TEST_LONG is set (tools/test --night), else a sample. */
#define AMOUNT(all, sample) (getenv("KVD_TEST_LONG") ? (all) : (sample))

#endif
