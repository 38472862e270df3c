/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_MARK_H
#define KVD_TESTS_LIB_MARK_H

/*
 * Makes Check usable in tests with threads and processes. For each assertion that holds, Check
 * writes the test's position to a file, without a lock, and gives up if it cannot parse the file.
 * So only one thread of a program writes at a time; the function is weak so that the program has a
 * single lock. Processes that a test forks write nothing, since they may be killed while they
 * write. Check makes each test's process the leader of a process group, which tells the two apart.
 */

#include <check.h>
#include <pthread.h>
#include <unistd.h>

void suite_mark_point(const char *source, int line);

__attribute__((weak)) void suite_mark_point(const char *source, int line) {
        static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

        if (getpid() != getpgrp() || pthread_mutex_trylock(&lock) != 0)
                return;
        _mark_point(source, line);
        pthread_mutex_unlock(&lock);
}
#define _mark_point suite_mark_point

#endif
