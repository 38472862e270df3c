/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A connection that does not attach costs a seat and two descriptors, so their number is limited,
 * and each may last for a second. When there are too many, the oldest is closed: a client that
 * means to attach has done so long before 64 others have connected.
 */

#include "daemon/serve/seats.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "daemon/serve/client.h"
#include "ipc/base/sys.h"

/*
 * One more than the limits, for a connection that is accepted before another one is closed for it.
 */
uint32_t seats_needed(const struct config *config) {
        return config->max_clients + SEATS_ADMIN + SEATS_HALF_OPEN + 1;
}

int seats_init(struct seats *s, struct server *server, uint32_t n) {
        s->loop = server->loop;
        s->clients = sys->calloc(n, sizeof *s->clients);
        s->users = sys->calloc(n, sizeof *s->users);
        if (!s->clients || !s->users)
                return -ENOMEM;
        s->n = n;
        while (n-- > 0) {
                s->clients[n].server = server;
                seats_leave(s, &s->clients[n]);
        }
        return 0;
}

void seats_clear(struct seats *s) {
        loop_timer_stop(&s->deadline);
        free(s->clients);
        free(s->users);
        s->clients = NULL;
        s->users = NULL;
}

struct client *seats_take(struct seats *s) {
        struct client *client = s->unused;

        s->unused = client->next;
        return client;
}

void seats_leave(struct seats *s, struct client *client) {
        if (client->user)
                client->user->n_connections--;
        *client = (struct client){.server = client->server,
                                  .next = s->unused,
                                  .socket.fd = -1,
                                  .peer.pidfd = -1};
        s->unused = client;
}

/*
 * A new user replaces the user without connections that has the least cost, because a forgotten
 * user starts again without its cost.
 */
static struct user *find_user(struct seats *s, uint32_t uid) {
        struct user *best = NULL;

        for (struct user *u = s->users; u < s->users + s->n; u++) {
                if (u->uid == uid)
                        return u;
                if (!u->n_connections && (!best || u->turns.cost_ns < best->turns.cost_ns))
                        best = u;
        }
        assert(best); /* there are as many users as clients, and this client has none yet */
        *best = (struct user){.uid = uid};
        return best;
}

void seats_belong(struct seats *s, struct client *client) {
        client->user = find_user(s, client->peer.uid);
        client->user->n_connections++;
        client->place.user = &client->user->turns;
}

/* ---- half-open connections ------------------------------------------------------------------- */

static void watch_deadline(struct seats *s) {
        if (s->half_open)
                loop_timer_set(s->loop, &s->deadline, s->half_open->connected_ns + SEATS_ATTACH_NS);
        else
                loop_timer_stop(&s->deadline);
}

void seats_add_half_open(struct seats *s, struct client *client) {
        struct client **link = &s->half_open;

        while (*link)
                link = &(*link)->next;
        client->next = NULL;
        *link = client;
        s->n_half_open++;
        watch_deadline(s);
}

void seats_remove_half_open(struct seats *s, struct client *client) {
        struct client **link = &s->half_open;

        while (*link != client)
                link = &(*link)->next;
        *link = client->next;
        s->n_half_open--;
        watch_deadline(s);
}

struct client *seats_late(struct seats *s) {
        if (s->half_open && s->half_open->connected_ns + SEATS_ATTACH_NS <= sys_now_ns())
                return s->half_open;
        watch_deadline(s);
        return NULL;
}

struct client *seats_too_many(const struct seats *s, uint32_t uid) {
        struct client *oldest = NULL;
        uint32_t n = 0;

        for (struct client *c = s->half_open; c; c = c->next) {
                if (c->peer.uid != uid)
                        continue;
                oldest = oldest ?: c;
                n++;
        }
        if (n >= SEATS_USER_HALF_OPEN)
                return oldest;
        return s->n_half_open >= SEATS_HALF_OPEN ? s->half_open : NULL;
}
