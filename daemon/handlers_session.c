/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A connection says who it is. The kernel and the configuration say which domain it is of: nothing
 * in a message has a say in that.
 */

#include "daemon/handlers.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/log.h"
#include "daemon/mates.h"

/* ---- attach ---------------------------------------------------------------------------------- */

static int check_limits(struct client *c) {
        const struct config *config = c->server->config;
        uint32_t per_user = config->user_clients ?: config->max_clients - config->max_clients / 16;

        if (c->server->seats.n_attached >= config->max_clients)
                return client_refuse(c, -EUSERS,
                                     "all %u connections are in use; close some, or raise "
                                     "max_clients "
                                     "in kvd.conf",
                                     config->max_clients);
        if (seats_of_user(&c->server->seats, c->peer.uid) >= per_user)
                return client_refuse(c, -EUSERS,
                                     "user %u has %u connections, which is the limit; close some, "
                                     "or raise "
                                     "user_clients or max_clients in kvd.conf",
                                     c->peer.uid, per_user);
        return 0;
}

/* The kernel's word about the peer and the configuration decide; nothing in a message has a say. */
static int choose_domain(struct client *c, struct domain **ret) {
        const struct config *config = c->server->config;
        const struct config_domain *listed;
        struct domain_config domain = {0};
        int r;

        listed = config_find_domain(config, c->peer.uid, c->peer.groups, c->peer.n_groups);
        if (!listed && config->unlisted == CONFIG_REFUSE)
                return client_refuse(c, -EACCES,
                                     "user %u belongs to no domain; add it to users of a [domain] "
                                     "in "
                                     "kvd.conf",
                                     c->peer.uid);
        if (listed)
                config_domain_to_store(listed, &domain);
        else
                snprintf(domain.name, sizeof domain.name, "uid-%u", c->peer.uid);
        r = store_domain(c->server->store, &domain, ret);
        return r < 0 ? client_store_failed(c, r) : 0;
}

/*
 * The smallest that no client of the domain has: a count over all domains would tell how busy the
 * others are.
 */
static uint32_t choose_number(const struct client *c) {
        const struct seats *seats = &c->server->seats;
        uint32_t number = 1;
        bool taken;

        do {
                taken = false;
                for (uint32_t i = 0; i < seats->n && !taken; i++)
                        taken = seats->clients[i].domain == c->domain &&
                                seats->clients[i].number == number;
                number += taken;
        } while (taken);
        return number;
}

static void begin_session(struct client *c, struct domain *domain, struct kvd_slice name) {
        const struct config *config = c->server->config;

        seats_remove_half_open(&c->server->seats, c);
        c->state = CLIENT_ATTACHED;
        c->server->seats.n_attached++;
        c->domain = domain;
        c->number = choose_number(c);
        c->admin = c->peer.uid == 0 || c->peer.uid == getuid() ||
                   id_list_has(&config->admins, c->peer.uid);
        kvd_slice_copy(name.size ? name : kvd_slice_of("unnamed"), c->name, sizeof c->name);
        log_debug("client %u (%s, process %d, user %u) of domain %s attached", c->number, c->name,
                  c->peer.pid, c->peer.uid, domain_config(domain)->name);
}

static int admit(struct client *c, const struct kvd_msg *request, struct domain **ret) {
        int r;

        if (request->attach.protocol != KVD_PROTOCOL)
                return client_refuse(c, -EPROTO,
                                     "kvd %s speaks protocol %u and the client %u; update the "
                                     "older one",
                                     KVD_PROJECT_VERSION, KVD_PROTOCOL, request->attach.protocol);
        r = check_limits(c);
        return r < 0 ? r : choose_domain(c, ret);
}

int handle_attach(struct client *c, const struct kvd_msg *request, struct call *call) {
        struct domain *domain;
        int r;

        if (c->state != CLIENT_HALF_OPEN)
                return client_refuse(c, -EISCONN, "this connection is attached already");
        r = admit(c, request, &domain);
        if (r < 0) {
                c->closing = true;
                return r;
        }
        begin_session(c, domain, request->attach.name);
        call->reply.attach_reply = (struct kvd_msg_attach_reply){
                .protocol = KVD_PROTOCOL,
                .client = c->number,
                .admin = c->admin,
                .instance = c->server->instance,
                .version = kvd_slice_of(KVD_PROJECT_VERSION),
                .domain = kvd_slice_of(domain_config(domain)->name),
        };
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
