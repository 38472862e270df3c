/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_DAEMON_KILLPOINTS_ARMED_H
#define KVD_TESTS_DAEMON_KILLPOINTS_ARMED_H

/* armed.c says what it means. */
#define ARMED_SIGNAL (SIGRTMIN + 3)

#endif
