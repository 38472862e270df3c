/* SPDX-License-Identifier: Apache-2.0 */

/*
 * There is no list of a team's members: all clients are compared when it matters, since teams are
 * small and changes are rare.
 */

#include "daemon/serve/mates.h"

#include <poll.h>
#include <string.h>

#include "daemon/serve/client.h"
#include "ipc/base/sys.h"

static const uint8_t no_team[TEAM_BYTES];

bool mates_is_team(const uint8_t team[TEAM_BYTES]) {
        return memcmp(team, no_team, sizeof no_team) != 0;
}

static bool is_mate(const struct client *a, const struct client *b) {
        return b != a && b->state >= CLIENT_ATTACHED && a->domain == b->domain &&
               mates_is_team(a->team) && memcmp(a->team, b->team, sizeof a->team) == 0;
}

static struct client *find_mate(const struct client *c, bool (*is)(const struct client *mate)) {
        const struct seats *seats = &c->server->seats;

        for (uint32_t i = 0; i < seats->n; i++)
                if (is_mate(c, &seats->clients[i]) && is(&seats->clients[i]))
                        return &seats->clients[i];
        return NULL;
}

static bool is_in_quarantine(const struct client *c) {
        return c->gone && loop_timer_is_set(&c->quarantine);
}

static bool is_alive(const struct client *c) {
        return !c->gone || is_in_quarantine(c);
}

static bool is_over(const struct client *c) {
        return !is_alive(c);
}

bool mates_alive(const struct client *c) {
        return find_mate(c, is_alive) != NULL;
}

#define POLLED 64u

static bool any_ended(struct pollfd *processes, uint32_t n) {
        return n && sys->poll(processes, n, 0) > 0;
}

/* The end of a process may be known before the loop has told it. */
bool mates_may_write(const struct client *c) {
        const struct seats *seats = &c->server->seats;
        struct pollfd processes[POLLED];
        bool found = false;
        uint32_t n = 0;

        for (uint32_t i = 0; mates_is_team(c->team) && !found && i < seats->n; i++) {
                const struct client *mate = &seats->clients[i];

                if (!is_mate(c, mate))
                        continue;
                found = is_in_quarantine(mate);
                if (!mate->gone)
                        processes[n++] = (struct pollfd){mate->peer.pidfd, POLLIN, 0};
                if (n == POLLED) {
                        found |= any_ended(processes, n);
                        n = 0;
                }
        }
        return found || any_ended(processes, n);
}

void mates_each(const struct client *c, void (*call)(struct client *mate)) {
        struct seats *seats = &c->server->seats;

        for (uint32_t i = 0; i < seats->n; i++)
                if (is_mate(c, &seats->clients[i]))
                        call(&seats->clients[i]);
}

unsigned mates_team_size(const struct client *c) {
        const struct seats *seats = &c->server->seats;
        unsigned n = mates_is_team(c->team);

        for (uint32_t i = 0; i < seats->n; i++)
                n += is_mate(c, &seats->clients[i]);
        return n;
}

struct client *mates_without_team(const struct client *ended) {
        struct client *mate = mates_alive(ended) ? NULL : find_mate(ended, is_over);

        if (mate)
                memset(mate->team, 0, sizeof mate->team);
        return mate;
}
