/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BENCH_TEMPORARY_H
#define KVD_BENCH_TEMPORARY_H

/* A temporary directory, in memory if there is such a file system. */

#include <stddef.h>

int temporary_make(char *ret, size_t room);
void temporary_remove(const char *dir); /* with everything in it */

#endif
