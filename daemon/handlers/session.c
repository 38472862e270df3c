/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attaching, joining a team, and ending clients. A connection's user comes from the kernel, and its
 * domain from that and the configuration: no message can influence either.
 */

#include "daemon/handlers/handlers.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/serve/mates.h"

#define NUMBERS 4352u /* more than the number of seats can be */

/* ---- attach ---------------------------------------------------------------------------------- */

static bool is_admin(const struct client *c) {
        return c->peer.uid == 0 || c->peer.uid == getuid() ||
               id_list_has(&c->server->config->admins, c->peer.uid);
}

/*
 * Without user_clients, a user may have as many connections as are still free: one user alone gets
 * half, and later users find some. A daemon for one user only does not reserve any for others.
 */
static uint32_t user_limit(const struct config *config, uint32_t n_attached) {
        if (config->user_clients || config->own_user_only)
                return config->user_clients ?: config->max_clients;
        return config->max_clients - MIN(n_attached, config->max_clients);
}

/* Root and admins may have some more, so that an administrator can always connect. */
static int check_limits(struct client *c) {
        const struct config *config = c->server->config;
        const struct seats *seats = &c->server->seats;
        uint32_t more = is_admin(c) ? SEATS_ADMIN : 0;

        if (seats->n_attached >= config->max_clients + more)
                return client_refuse(c, -EUSERS,
                                     "all %u connections are in use; close some, "
                                     "or raise max_clients in kvd.conf",
                                     config->max_clients);
        if (c->user->n_attached >= user_limit(config, seats->n_attached) + more)
                return client_refuse(
                        c, -EUSERS,
                        "user %u has %u connections, and the rest is reserved for other users; "
                        "close some, or raise user_clients or max_clients in kvd.conf",
                        c->peer.uid, c->user->n_attached);
        return 0;
}

/*
 * All users that no domain lists share one limit, so that a person with many (subordinate) uids
 * does not take the connections that are left for domains.
 */
static bool shares_limit(const struct client *a, const struct client *b) {
        return a->domain == b->domain || (!a->listed && !b->listed);
}

/* A domain may have three times as many connections as are free: alone, three quarters of all. */
static int check_domain(struct client *c, const struct domain *domain, uint32_t n) {
        const struct config *config = c->server->config;
        uint32_t free = config->max_clients - MIN(c->server->seats.n_attached, config->max_clients);

        if (!config->domains || is_admin(c) || n < 3 * free)
                return 0;
        return client_refuse(c, -EUSERS,
                             "users of domain '%s'%s have %u connections, and the rest is reserved "
                             "for other domains; close some, or raise max_clients in kvd.conf",
                             domain_config(domain)->name,
                             c->listed ? "" : " and others that no domain lists", n);
}

static int choose_domain(struct client *c, struct domain **ret) {
        const struct config *config = c->server->config;
        const struct config_domain *listed;
        struct domain_config domain = {0};
        int r;

        listed = config_find_domain(config, c->peer.uid, c->peer.groups, c->peer.n_groups);
        if (c->peer.uid == c->server->overflow_uid)
                return client_refuse(c, -EACCES,
                                     "uid %u stands for all users that are not mapped in kvd's "
                                     "user namespace; run kvd outside of it, or map them",
                                     c->peer.uid);
        if (!listed && config->unlisted == CONFIG_REFUSE && !is_admin(c))
                return client_refuse(c, -EACCES,
                                     "user %u belongs to no domain; "
                                     "add it to users of a [domain] in kvd.conf",
                                     c->peer.uid);
        if (listed)
                config_domain_to_store(listed, &domain);
        else
                snprintf(domain.name, sizeof domain.name, "uid-%u", c->peer.uid);
        c->listed = listed;
        r = store_domain(c->server->store, &domain, ret);
        return r < 0 ? client_store_failed(c, r) : 0;
}

/*
 * Chooses the smallest number that no client of the domain has: a count over all domains would
 * reveal how busy the others are. Negative: the domain has too many connections.
 */
static int choose_number(struct client *c) {
        uint64_t taken[NUMBERS / 64] = {0};
        const struct seats *seats = &c->server->seats;
        uint32_t number = 0, n = 0;
        int r;

        for (uint32_t i = 0; i < seats->n; i++) {
                const struct client *other = &seats->clients[i];

                if (other->state < CLIENT_ATTACHED)
                        continue;
                n += shares_limit(c, other);
                if (other->domain == c->domain)
                        taken[other->number / 64] |= UINT64_C(1) << other->number % 64;
        }
        r = check_domain(c, c->domain, n);
        taken[0] |= 1; /* numbers begin with 1 */
        while (~taken[number / 64] == 0)
                number += 64;
        c->number = number + (uint32_t)__builtin_ctzll(~taken[number / 64]);
        return r;
}

/* Control characters, non-ASCII bytes and quotes could forge lines of a log or a table. */
static void choose_name(struct client *c, struct kvd_slice name) {
        kvd_slice_copy(name.size ? name : kvd_slice_of("unnamed"), c->name, sizeof c->name);
        for (char *p = c->name; *p; p++)
                if (*p < 0x20 || *p > 0x7e || strchr("'\"\\`", *p))
                        *p = '?';
}

static void begin_session(struct client *c, struct kvd_slice name) {
        seats_remove_half_open(&c->server->seats, c);
        c->state = CLIENT_ATTACHED;
        c->server->seats.n_attached++;
        c->user->n_attached++;
        c->admin = is_admin(c);
        choose_name(c, name);
        log_debug("client %u ('%s', process %d, user %u) of domain %s attached", c->number, c->name,
                  c->peer.pid, c->peer.uid, domain_config(c->domain)->name);
}

static int admit(struct client *c, const struct kvd_msg *request) {
        int r;

        if (request->attach.protocol != KVD_PROTOCOL)
                return client_refuse(c, -EPROTO,
                                     "kvd %s speaks protocol %u and the client %u; "
                                     "update the older one",
                                     KVD_PROJECT_VERSION, KVD_PROTOCOL, request->attach.protocol);
        r = check_limits(c);
        if (r == 0)
                r = choose_domain(c, &c->domain);
        return r < 0 ? r : choose_number(c);
}

/* libkvd then requests a lifeline and attaches again; older versions show the text. */
static int refuse_unknown(struct client *c) {
        return client_refuse(c, -ESRCH,
                             "kvd does not see this process: it is in another pid namespace, and "
                             "Linux before 6.5 does not report its end; "
                             "update libkvd, or share kvd's pid namespace");
}

int handle_attach(struct client *c, const struct kvd_msg *request, struct call *call) {
        int r;

        if (c->state != CLIENT_HALF_OPEN)
                return client_refuse(c, -EISCONN, "this connection is attached already");
        if (c->peer.pidfd < 0)
                return refuse_unknown(c);
        r = admit(c, request);
        if (r < 0) {
                c->closing = true;
                return r;
        }
        begin_session(c, request->attach.name);
        call->reply.attach_reply = (struct kvd_msg_attach_reply){
                .protocol = KVD_PROTOCOL,
                .client = c->number,
                .admin = c->admin,
                .instance = c->server->instance,
                .version = kvd_slice_of(KVD_PROJECT_VERSION),
                .domain = kvd_slice_of(domain_config(c->domain)->name),
        };
        return 0;
}

int handle_lifeline(struct client *c, const struct kvd_msg *request, struct call *call) {
        int r;

        if (c->peer.pidfd >= 0)
                return client_refuse(c, -EALREADY, "kvd already watches this process");
        r = client_make_lifeline(c, request->lifeline.process, &call->own_fd);
        if (r < 0)
                return client_refuse(c, r, "cannot make a lifeline: %s", strerror(-r));
        call->fds.fd[call->fds.n++] = call->own_fd;
        return 0;
}

/* ---- teams ----------------------------------------------------------------------------------- */

int handle_join(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_slice team = request->join.team;

        if (team.size != sizeof c->team || !mates_is_team(team.data))
                return client_refuse(c, -EINVAL,
                                     "join: a team is named by %u bytes that are not all zero",
                                     TEAM_BYTES);
        if (mates_team_size(c) && memcmp(c->team, team.data, sizeof c->team) != 0)
                return client_refuse(c, -EBUSY, "this connection is in another team already");
        memcpy(c->team, team.data, sizeof c->team);
        call->reply.join_reply.members = mates_team_size(c);
        return 0;
}

/* ---- ending ---------------------------------------------------------------------------------- */

static int find_client(struct client *c, const struct kvd_msg_client_end *m, struct client **ret) {
        struct domain *domain;
        int r = client_find_domain(c, m->domain, &domain);

        if (r < 0)
                return r;
        *ret = client_by_number(&c->server->seats, domain, m->client);
        if (!*ret)
                return client_refuse(c, -ENOENT, "there is no client %u in domain '%s'", m->client,
                                     domain_config(domain)->name);
        if (!c->admin && (*ret)->peer.uid != c->peer.uid)
                return client_refuse(c, -EPERM,
                                     "client %u belongs to user %u; only that user and "
                                     "administrators may end it",
                                     m->client, (*ret)->peer.uid);
        return 0;
}

static void put_kept(const struct client *c, struct kvd_msg_client_end_reply *m) {
        m->pid = (uint32_t)c->peer.pid;
        m->gone = c->gone || loop_timer_is_set(&c->quarantine);
        m->spaces = c->n_spaces;
        for (uint32_t i = 0; i < CLIENT_SPACES; i++)
                if (c->spaces[i].attachment)
                        m->filling += attachment_filling(c->spaces[i].attachment);
}

/* If the client has lost its connection already, only reports what is kept for it. */
int handle_client_end(struct client *c, const struct kvd_msg *request, struct call *call) {
        struct client *other;
        int r = find_client(c, &request->client_end, &other);

        if (r < 0)
                return r;
        put_kept(other, &call->reply.client_end_reply);
        if (other->state == CLIENT_ORPHANED)
                return 0;
        log_limited(LOG_INFO, "client %u of domain %s ended client %u ('%s', process %d) of %s",
                    c->number, domain_config(c->domain)->name, other->number, other->name,
                    other->peer.pid, domain_config(other->domain)->name);
        if (other == c)
                c->closing = true;
        else
                client_disconnect(other);
        return 0;
}
