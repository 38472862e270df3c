/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_REQUESTS_H
#define KVD_DAEMON_REQUESTS_H

/*
 * A client's socket: reads one request, has it answered by its handler (handlers.h), and sends the
 * reply.
 */

#include "daemon/loop.h"

void request_came(struct loop_source *source, short revents); /* source: a client's socket */

#endif
