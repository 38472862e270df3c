/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BENCH_TEMPORARY_H
#define KVD_BENCH_TEMPORARY_H

/*
 * Calls run with a temporary directory, in memory if there is such a file system, and then removes
 * it with everything in it. Returns what run returned, or -1.
 */
int with_temporary(int (*run)(char **argv, const char *dir), char **argv);

#endif
