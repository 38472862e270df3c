/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_MARK_H
#define KVD_TESTS_LIB_MARK_H

/*
 * Check, for tests with threads and processes. With each assertion that holds Check writes down
 * where the test is, has no lock for it, and gives up if it cannot read what was written. So while
 * one thread writes others do not, in all of a program, which is why the function is weak; and what
 * a test forks writes nothing, since it may be killed in the middle of it. Check makes each test's
 * process the leader of a group.
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
