/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BENCH_TEMPORARY_H
#define KVD_BENCH_TEMPORARY_H

/* A directory of one's own, in memory where there is a file system for that. */

#include <stddef.h>

int temporary_make(char *ret, size_t room);
void temporary_remove(const char *dir); /* with everything in it */

#endif
