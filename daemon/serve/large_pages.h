/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_LARGE_PAGES_H
#define KVD_DAEMON_SERVE_LARGE_PAGES_H

/*
 * Makes pages of 2 MiB of the small ones of shared memory, in a thread of its own, since the kernel
 * may take long to find or to make room for one. Until it has done so, and if it has none, the
 * memory has small pages: slower on first use in each process, but otherwise the same.
 */

#include <stdbool.h>
#include <stdint.h>

struct large_pages;

#define LARGE_PAGES_WAITING 64u /* parts, each with a descriptor; others stay as they are */

int large_pages_new(struct large_pages **ret);
struct large_pages *large_pages_free(struct large_pages *large); /* forgets what waits */
void large_pages_freep(struct large_pages **large);

/*
 * Asks for large pages for that part of the file, of which both bounds are multiples of 2 MiB. Each
 * 2 MiB of it need one small page. The thread has a descriptor of its own.
 */
void large_pages_want(struct large_pages *large, int fd, uint64_t from, uint64_t bytes);
bool large_pages_busy(struct large_pages *large);

/* How many large pages were made, and how many could not be or were not tried, since the start. */
struct large_pages_count {
        uint64_t made, failed;
};
struct large_pages_count large_pages_count(const struct large_pages *large);

#endif
