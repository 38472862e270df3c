/* SPDX-License-Identifier: Apache-2.0 */

/*
 * There is no list of a team's members: all clients are compared when it matters, since teams are
 * small and changes are rare.
 */

#include "daemon/serve/mates.h"

#include <string.h>

#include "daemon/serve/client.h"

static const uint8_t no_team[TEAM_BYTES];

bool mates_is_team(const uint8_t team[TEAM_BYTES]) {
        return memcmp(team, no_team, sizeof no_team) != 0;
}

static bool is_mate(const struct client *a, const struct client *b) {
        return b != a && b->state >= CLIENT_ATTACHED && a->domain == b->domain &&
               mates_is_team(a->team) && memcmp(a->team, b->team, sizeof a->team) == 0;
}

static struct client *find_mate(const struct client *c, bool gone) {
        const struct seats *seats = &c->server->seats;

        for (uint32_t i = 0; i < seats->n; i++)
                if (is_mate(c, &seats->clients[i]) && seats->clients[i].gone == gone)
                        return &seats->clients[i];
        return NULL;
}

bool mates_alive(const struct client *c) {
        return find_mate(c, false) != NULL;
}

unsigned mates_team_size(const struct client *c) {
        const struct seats *seats = &c->server->seats;
        unsigned n = mates_is_team(c->team);

        for (uint32_t i = 0; i < seats->n; i++)
                n += is_mate(c, &seats->clients[i]);
        return n;
}

struct client *mates_without_team(const struct client *ended) {
        struct client *mate = find_mate(ended, false) ? NULL : find_mate(ended, true);

        if (mate)
                memset(mate->team, 0, sizeof mate->team);
        return mate;
}
