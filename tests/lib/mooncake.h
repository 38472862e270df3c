/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_MOONCAKE_H
#define KVD_TESTS_LIB_MOONCAKE_H

/*
 * A store of the stand-in for Mooncake's library (tests/daemon/fakemooncake): a folder that all
 * daemons started from now on share. A failure ends the test.
 */

#include <stddef.h>
#include <stdint.h>

void mooncake_start(void);
void mooncake_stop(void);

/* How the store fails from now on: "hang", "dead", ...; "": it does not fail. */
void mooncake_fails(const char *how);
void mooncake_forget(void);                                           /* all objects */
uint32_t mooncake_change(size_t (*change)(uint8_t *value, size_t n)); /* of all objects; how many */
uint32_t mooncake_calls(const char *what); /* calls of "setup" so far; objects of "put" and "get" */
const char *mooncake_setup(void);          /* the last setup's arguments; until the next call */

#endif
