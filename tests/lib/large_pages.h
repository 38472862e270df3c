/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LARGE_PAGES_H
#define KVD_TESTS_LARGE_PAGES_H

/*
 * A kernel with pages of 64 KiB, as on many ARM servers: from here on, the table of system calls
 * reports that size and refuses what such a kernel refuses. This holds only for this process:
 * programs that it starts see the machine's own page size.
 */

#include <stdint.h>

#define LARGE_PAGE 65536u

void large_pages_begin(void);
/* How many calls were refused for an address or offset within a page. Callers may ignore errors. */
uint32_t large_pages_refused(void);

#endif
