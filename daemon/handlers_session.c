/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/handlers.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/log.h"
#include "ipc/base/device.h"
#include "ipc/base/util.h"

/* ---- attach ---------------------------------------------------------------------------------------------------- */

static int check_limits(struct client *c) {
        const struct config *config = c->server->config;
        uint32_t per_user = config->user_clients ?: config->max_clients - config->max_clients / 16;

        if (c->server->n_attached >= config->max_clients)
                return client_refuse(c, -EUSERS, "all %u connections are in use; close some, or raise max_clients "
                                     "in kvd.conf", config->max_clients);
        if (server_user_clients(c->server, c->peer.uid) >= per_user)
                return client_refuse(c, -EUSERS, "user %u has %u connections, which is the limit; close some, or raise "
                                     "user_clients or max_clients in kvd.conf", c->peer.uid, per_user);
        return 0;
}

/* From the kernel's word about the peer and the configuration; nothing in a message has a say. */
static int choose_domain(struct client *c, struct domain **ret) {
        const struct config *config = c->server->config;
        const struct config_domain *listed;
        struct domain_config domain = {0};
        int r;

        listed = config_find_domain(config, c->peer.uid, c->peer.groups, c->peer.n_groups);
        if (!listed && config->unlisted == CONFIG_REFUSE)
                return client_refuse(c, -EACCES, "user %u belongs to no domain; add it to users of a [domain] in "
                                     "kvd.conf", c->peer.uid);
        if (listed)
                config_domain_to_store(listed, &domain);
        else
                snprintf(domain.name, sizeof domain.name, "uid-%u", c->peer.uid);
        r = store_domain(c->server->store, &domain, ret);
        return r < 0 ? client_store_failed(c, r) : 0;
}

/* The smallest that no client of the domain has: a count over all domains would tell how busy the others are. */
static uint32_t choose_number(const struct client *c) {
        const struct server *server = c->server;
        uint32_t number = 1;
        bool taken;

        do {
                taken = false;
                for (uint32_t i = 0; i < server->n_seats && !taken; i++)
                        taken = server->clients[i].domain == c->domain && server->clients[i].number == number;
                number += taken;
        } while (taken);
        return number;
}

static void begin_session(struct client *c, struct domain *domain, struct kvd_slice name) {
        const struct config *config = c->server->config;

        server_half_open_remove(c->server, c);
        c->state = CLIENT_ATTACHED;
        c->server->n_attached++;
        c->domain = domain;
        c->number = choose_number(c);
        c->admin = c->peer.uid == 0 || c->peer.uid == getuid() || id_list_has(&config->admins, c->peer.uid);
        kvd_slice_copy(name.size ? name : kvd_slice_of("unnamed"), c->name, sizeof c->name);
        log_debug("client %u (%s, process %d, user %u) of domain %s attached", c->number, c->name, c->peer.pid,
                  c->peer.uid, domain_config(domain)->name);
}

static int admit(struct client *c, const struct kvd_msg *request, struct domain **ret) {
        int r;

        if (request->attach.protocol != KVD_PROTOCOL)
                return client_refuse(c, -EPROTO, "kvd %s speaks protocol %u and the client %u; update the older one",
                                     KVD_PROJECT_VERSION, KVD_PROTOCOL, request->attach.protocol);
        r = check_limits(c);
        return r < 0 ? r : choose_domain(c, ret);
}

int handle_attach(struct client *c, const struct kvd_msg *request, struct reply *reply) {
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
        reply->msg.attach_reply = (struct kvd_msg_attach_reply){
                .protocol = KVD_PROTOCOL,
                .client = c->number,
                .admin = c->admin,
                .instance = c->server->instance,
                .version = kvd_slice_of(KVD_PROJECT_VERSION),
                .domain = kvd_slice_of(domain_config(domain)->name),
        };
        return 0;
}

/* ---- space ----------------------------------------------------------------------------------------------------- */

static void spec_of(const struct kvd_msg_space *m, struct space_spec *ret) {
        *ret = (struct space_spec){
                .geometry = {.layers = m->layers, .kv_heads = m->kv_heads, .head_dim = m->head_dim,
                             .block_tokens = m->block_tokens, .layer_groups = m->layer_groups, .dtype = m->dtype,
                             .order = m->order, .rope = m->rope, .state_width = m->state_width, .vocab = m->vocab,
                             .fingerprint = {m->fingerprint0, m->fingerprint1}, .block_bytes = m->block_bytes},
                .options = {.kind = m->kind, .keys = m->keys, .policy = m->policy, .max_blocks = m->max_blocks},
        };
        kvd_slice_copy(m->name, ret->name, sizeof ret->name);
        kvd_slice_copy(m->layout, ret->geometry.layout, sizeof ret->geometry.layout);
}

static int check_space_count(struct client *c, struct domain *domain, const char *name) {
        uint32_t n = 0, limit = c->server->config->max_spaces;

        if (space_by_name(domain, name))
                return 0;
        for (struct space *s = store_next_space(c->server->store, 0); s;
             s = store_next_space(c->server->store, space_number(s) + 1))
                n += space_domain(s) == domain;
        if (n >= limit)
                return client_refuse(c, -EDQUOT, "domain '%s' has %u spaces, which is the limit; delete one, or raise "
                                     "max_spaces in kvd.conf", domain_config(domain)->name, limit);
        return 0;
}

static int make_space(struct client *c, const struct kvd_msg_space *m, struct space **ret, bool *created) {
        struct space_spec spec;
        struct domain *domain;
        int r;

        r = client_find_domain(c, m->domain, &domain);
        if (r < 0)
                return r;
        spec_of(m, &spec);
        r = check_space_count(c, domain, spec.name);
        if (r < 0)
                return r;
        r = space_open(domain, &spec, true, ret, created);
        if (r < 0)
                return client_store_failed(c, r);
        if (*created)
                log_info("space '%s' of domain %s was made", spec.name, domain_config(domain)->name);
        return 0;
}

static int attach_space(struct client *c, struct space *space, struct reply *reply) {
        struct kvd_msg_space_reply *m = &reply->msg.space_reply;
        struct attachment *attachment;
        int r;

        r = client_add_space(c, space, &m->space);
        if (r < 0)
                return r;
        r = client_find_space(c, m->space, &attachment);
        if (r < 0)
                return r;
        m->index_bytes = space_index(space)->size;
        m->pin_bytes = attachment_pin_bytes(attachment);
        reply->fds.fd[0] = space_index_fd(space);
        reply->fds.fd[1] = attachment_pin_fd(attachment);
        reply->fds.n = 2;
        if (space_order_fd(space) >= 0) {
                m->semaphore_row = attachment_order_row(attachment);
                reply->fds.fd[reply->fds.n++] = space_order_fd(space);
        }
        return 0;
}

int handle_space(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_msg_space *m = &request->space;
        struct space *space;
        bool created = false;
        int r;

        if (m->create == 0)
                r = client_find_named(c, m->domain, m->name, &space);
        else
                r = make_space(c, m, &space, &created);
        if (r < 0)
                return r;
        reply->msg.space_reply.created = created;
        return m->create == 2 ? 0 : attach_space(c, space, reply);
}

int handle_detach(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        return client_remove_space(c, request->detach.space);
}

/* ---- segments -------------------------------------------------------------------------------------------------- */

/* The space's one segment. */
static int put_handle(struct attachment *attachment, struct kvd_msg_segments_reply *m) {
        const uint8_t *handle = space_segment_handle(attachment_space(attachment), 0);

        if (m->first || !atomic_load(&space_index(attachment_space(attachment))->n_segments))
                return 0;
        m->count = m->writable = 1;
        m->absent = !handle;
        if (handle)
                m->handles = (struct kvd_slice){handle, CU_IPC_HANDLE_BYTES};
        return 0;
}

int handle_segments(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        struct kvd_msg_segments_reply *m = &reply->msg.segments_reply;
        struct attachment *attachment;
        bool writable;
        int r;

        r = client_find_space(c, request->segments.space, &attachment);
        if (r < 0)
                return r;
        m->first = request->segments.first;
        if (space_index(attachment_space(attachment))->backend == KVD_BACKEND_LEGACY)
                return put_handle(attachment, m);
        for (m->count = 0; m->count < KVD_FRAME_FDS; m->count++) {
                r = space_segment_fd(attachment, m->first + m->count, &writable);
                if (r < 0 && r != -ENODATA)
                        break;
                if (r < 0)
                        m->absent |= UINT64_C(1) << m->count;
                else
                        reply->fds.fd[reply->fds.n++] = r;
                m->writable |= (uint64_t)writable << m->count;
        }
        return r < 0 && r != -ENOENT && r != -ENODATA && m->count == 0 ? client_store_failed(c, r) : 0;
}

/* Numbers from and to clients are copied, for the sake of alignment. */
int handle_drain(struct client *c, const struct kvd_msg *request, struct reply *reply) {
        const struct kvd_slice unmapped = request->drain.unmapped;
        struct scratch *scratch = c->server->scratch;
        struct attachment *attachment;
        uint32_t n;
        int r;

        if (unmapped.size % sizeof(uint32_t))
                return client_refuse(c, -EINVAL, "drain: unmapped is no list of u32");
        r = client_find_space(c, request->drain.space, &attachment);
        if (r < 0)
                return r;
        if (unmapped.size)
                memcpy(scratch->numbers, unmapped.data, unmapped.size);
        n = attachment_drain(attachment, scratch->numbers, unmapped.size / sizeof(uint32_t), scratch->numbers,
                             ARRAY_SIZE(scratch->numbers));
        reply->msg.drain_reply.wanted = (struct kvd_slice){scratch->numbers, n * (uint32_t)sizeof(uint32_t)};
        return 0;
}
