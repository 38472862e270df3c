/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_MATES_H
#define KVD_DAEMON_SERVE_MATES_H

/*
 * Several processes as one client: an engine whose scheduler takes blocks, pins and publishes them,
 * and whose workers write and read them. A process that the kernel says is gone may have left work
 * to a teammate that still runs; so what a member held (pins, blocks being filled) is kept until no
 * process of its team is left.
 *
 * A team is the clients of one domain that named the same 16 bytes. It begins with the first and
 * ends with the last.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/serve/client.h"

/* Do these bytes name a team? */
bool mates_is_team(const uint8_t team[TEAM_BYTES]);

/* Is there another member whose process may still use what this client holds? */
bool mates_alive(const struct client *client);

/* Connections in the client's team, itself included; 0: it is in none. */
unsigned mates_team_size(const struct client *client);

/*
 * A client of the team was ended: if no process of it is left, a member that was kept and is to be
 * ended, too. It is in no team any more, so that each is found once. NULL: there is none.
 */
struct client *mates_without_team(const struct client *ended);

#endif
