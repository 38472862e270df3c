/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LARGE_PAGES_H
#define KVD_TESTS_LARGE_PAGES_H

/*
 * A kernel with pages of 64 KiB, as on many ARM servers: from here on, the table of system calls
 * says so, and refuses what such a kernel refuses. Only for this process: what it starts has the
 * pages of the machine.
 */

#include <stdint.h>

#define LARGE_PAGE 65536u

void large_pages_begin(void);
/* Calls with an address or an offset within a page. A caller may have shrugged them off. */
uint32_t large_pages_refused(void);

#endif
