/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_KEEPER_KEEPER_H
#define KVD_DAEMON_PROCESS_KEEPER_KEEPER_H

/*
 * kvd --keep: starts a kvd, keeps what it is to find again, the socket first, and starts another one
 * when it dies. Has signals blocked: SIGTERM, SIGINT and SIGHUP are passed on, SIGUSR2 restarts.
 */

/*
 * program: its path, looked up at each start. arguments: with its name in front. listen_fd: kept
 * under that name; the caller's stays open. ready_fd: written to and closed when a kvd is ready for
 * the first time; -1: none. Returns the exit status of the last kvd, with 128 + N for signal N.
 */
int keeper_run(const char *program, char **arguments, int listen_fd, int ready_fd);

#endif
