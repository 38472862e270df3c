/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_REQUESTS_H
#define KVD_DAEMON_SERVE_REQUESTS_H

/*
 * When a client's socket is ready, the client waits for its turn (turns.h). In the turn one request
 * is read, its handler (handlers.h) is called, and the reply is sent.
 */

#include "daemon/base/loop.h"
#include "daemon/serve/turns.h"

void request_came(struct loop_source *source, short revents); /* source: a client's socket */
bool request_serve(struct turns_place *place);                /* place: a client's */

#endif
