/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/mates.h"

#include <errno.h>
#include <string.h>

#include "daemon/client.h"
#include "daemon/handlers.h"

static const uint8_t no_team[TEAM_BYTES];

static bool is_mate(const struct client *a, const struct client *b) {
        return b != a && b->state >= CLIENT_ATTACHED && a->domain == b->domain &&
               memcmp(a->team, no_team, sizeof no_team) != 0 && memcmp(a->team, b->team, sizeof a->team) == 0;
}

static struct client *find_mate(struct server *server, const struct client *c, bool gone) {
        for (uint32_t i = 0; i < server->n_seats; i++)
                if (is_mate(c, &server->clients[i]) && server->clients[i].gone == gone)
                        return &server->clients[i];
        return NULL;
}

bool mates_alive(const struct client *c) {
        return find_mate(c->server, c, false) != NULL;
}

unsigned mates_team_size(const struct client *c) {
        unsigned n = memcmp(c->team, no_team, sizeof no_team) != 0;

        for (uint32_t i = 0; i < c->server->n_seats; i++)
                n += is_mate(c, &c->server->clients[i]);
        return n;
}

/* A member that is ended here has no team any more: nothing is released twice. */
void mates_release(struct server *server, const struct client *ended) {
        struct client *mate;

        if (find_mate(server, ended, false))
                return;
        while ((mate = find_mate(server, ended, true))) {
                memset(mate->team, 0, sizeof mate->team);
                client_end(mate, true);
        }
}

int handle_join(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_slice team = request->join.team;

        if (team.size != sizeof c->team || memcmp(team.data, no_team, sizeof no_team) == 0)
                return client_refuse(c, -EINVAL, "join: a team is named by %u bytes that are not all zero", TEAM_BYTES);
        if (mates_team_size(c) && memcmp(c->team, team.data, sizeof c->team) != 0)
                return client_refuse(c, -EBUSY, "this connection is in another team already");
        memcpy(c->team, team.data, sizeof c->team);
        reply->msg.join_reply.members = mates_team_size(c);
        return 0;
}
