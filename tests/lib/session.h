/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_SESSION_H
#define KVD_TESTS_SESSION_H

/*
 * A scripted session of libkvd that uses everything once: two clients and a third that dies, two
 * spaces that take memory from each other, a lease, eviction, settings, queries, deletion. Every
 * step may be refused. Ends the process if it sees a wrong byte, a call that waits until its
 * deadline, or an error without a message.
 */

#include <stdbool.h>

/* The daemon has a pool of 4 MiB. */
void session_run(const char *socket);

/* Everything must work and every byte be right. */
void session_expect_service(const char *socket);

#endif
