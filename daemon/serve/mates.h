/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_MATES_H
#define KVD_DAEMON_SERVE_MATES_H

/*
 * Teams: several processes that act as one client, such as an engine whose scheduler allocates,
 * pins and publishes blocks that its workers write and read. When a process ends, a teammate may
 * still use its blocks. So its pins and the blocks that it was filling are kept until no process of
 * its team is left.
 *
 * A team is all clients of one domain that joined with the same 16 bytes. It exists from its first
 * member to its last.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/serve/client.h"

/* Do these bytes name a team? */
bool mates_is_team(const uint8_t team[TEAM_BYTES]);

/* Is there another member whose process, or GPU work, may still use what this client holds? */
bool mates_alive(const struct client *client);

/* Is there another member whose process has ended, and whose GPU work may still write blocks? */
bool mates_may_write(const struct client *client);

/* Calls it for each other member. */
void mates_each(const struct client *client, void (*call)(struct client *mate));

/* Number of connections in the client's team, including its own; 0: it is in no team. */
unsigned mates_team_size(const struct client *client);

/*
 * Call after a client has ended. If no process of its team is left, returns a member that was kept
 * and must be ended, too, and removes it from the team, so that each is found once. NULL: none.
 */
struct client *mates_without_team(const struct client *ended);

#endif
