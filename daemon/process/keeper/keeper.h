/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_KEEPER_KEEPER_H
#define KVD_DAEMON_PROCESS_KEEPER_KEEPER_H

/*
 * kvd --keep: starts a kvd, keeps the descriptors that the next one needs, the socket first, and
 * starts another kvd when it dies. Signals are blocked: SIGTERM, SIGINT and SIGHUP are passed on,
 * SIGUSR2 restarts kvd.
 */

/*
 * program: path of kvd, looked up at each start. arguments: its argv. listen_fd: the socket; the
 * caller's descriptor stays open. ready_fd: written to and closed when a kvd is ready for the first
 * time; -1: none. Returns the exit status of the last kvd, or 128 + N if signal N ended it.
 */
int keeper_run(const char *program, char **arguments, int listen_fd, int ready_fd);

#endif
