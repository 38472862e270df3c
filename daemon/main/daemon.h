/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_MAIN_DAEMON_H
#define KVD_DAEMON_MAIN_DAEMON_H

/* The daemon as a whole: what main runs, and tests run in a thread. */

#include <stddef.h>

#include "daemon/base/config.h"

struct activation;
struct daemon;
struct identity;
struct options;

/* Creates everything but the socket. Takes over *config. On failure, why has the reason. */
int daemon_new(struct config *config, struct daemon **ret, struct kvd_why *why);
struct daemon *daemon_free(struct daemon *daemon);
void daemon_freep(struct daemon **daemon);

/*
 * Opens the configured socket, unless one was handed over, and becomes the user of identity. Then
 * takes over the spaces of the previous daemon, and accepts clients.
 */
int daemon_listen(struct daemon *daemon, struct activation *handed, const struct identity *identity,
                  struct kvd_why *why);

/*
 * SIGTERM and SIGINT end daemon_run, SIGHUP loads the configuration again. The caller must have
 * blocked them. options: the command line; NULL: defaults.
 */
int daemon_handle_signals(struct daemon *daemon, const struct options *options);

/*
 * Tells the service manager that we are ready, and runs until daemon_stop or a signal. Every
 * connection and the socket are closed when it returns. Negative errno: waiting for events failed.
 */
int daemon_run(struct daemon *daemon);
/* May be called from another thread. */
void daemon_stop(struct daemon *daemon);

/* For logs: "io_uring" or "epoll". */
const char *daemon_loop_name(const struct daemon *daemon);

#endif
