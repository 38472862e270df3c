/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_PLAYS_H
#define KVD_TESTS_LIB_PLAYS_H

/*
 * A play is a test of several processes and a GPU. Each play runs in a process of its own, and on a
 * GPU of its own with the stand-in driver, so that the other plays still run after one has failed.
 */

#include <stddef.h>

struct play {
        const char *name;
        void (*run)(void);
};

/*
 * Runs the named plays, or all plays if names is empty (it ends with NULL). Prints a line for each.
 * Returns the exit status for main(): 0, 1 if a play failed, 2 if a name is unknown.
 */
int plays_run(const struct play *plays, size_t n_plays, char *const *names);

#endif
