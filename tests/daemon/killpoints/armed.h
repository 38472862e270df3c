/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_DAEMON_KILLPOINTS_ARMED_H
#define KVD_TESTS_DAEMON_KILLPOINTS_ARMED_H

/* See armed.c. */
#define ARMED_SIGNAL (SIGRTMIN + 3)

#endif
