/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_MOONCAKE_H
#define KVD_TESTS_LIB_MOONCAKE_H

/*
 * A store of the stand-in for Mooncake's library (tests/daemon/fakemooncake): a folder that all
 * daemons which are started from now on share. A failure ends the test.
 */

#include <stddef.h>
#include <stdint.h>

void mooncake_start(void);
void mooncake_stop(void);

/* "hang", "dead", ...: how it fails from now on; "": it does not. */
void mooncake_fails(const char *how);
void mooncake_forget(void); /* all objects */
uint32_t mooncake_change(size_t (*change)(uint8_t *value, size_t n)); /* all of them; how many */
uint32_t mooncake_calls(const char *what); /* "setup"; "put", "get": objects so far */
const char *mooncake_setup(void);          /* what the last one was told; until the next call */

#endif
