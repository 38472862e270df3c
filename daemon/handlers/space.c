/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Spaces: a client opens one, maps its memory segment by segment, and detaches from it.
 * Administrators and clients of its domain may change its settings, and delete it.
 */

#include "daemon/handlers/handlers.h"

#include <errno.h>

#include "daemon/base/log.h"
#include "daemon/children/worker_jobs.h"
#include "daemon/handlers/arrays.h"
#include "ipc/base/device.h"
#include "ipc/base/util.h"

/* ---- opening --------------------------------------------------------------------------------- */

static void spec_of(const struct kvd_msg_space *m, struct space_spec *ret) {
        *ret = (struct space_spec){
                .geometry = {.layers = m->layers,
                             .kv_heads = m->kv_heads,
                             .head_dim = m->head_dim,
                             .block_tokens = m->block_tokens,
                             .layer_groups = m->layer_groups,
                             .dtype = m->dtype,
                             .order = m->order,
                             .rope = m->rope,
                             .state_width = m->state_width,
                             .vocab = m->vocab,
                             .fingerprint = {m->fingerprint0, m->fingerprint1},
                             .block_bytes = m->block_bytes},
                .options = {.kind = m->kind,
                            .keys = m->keys,
                            .policy = m->policy,
                            .max_blocks = m->max_blocks},
        };
        kvd_slice_copy(m->name, ret->name, sizeof ret->name);
        kvd_slice_copy(m->layout, ret->geometry.layout, sizeof ret->geometry.layout);
}

/* A space with that name from the previous daemon may not be complete yet. */
static int await_namesake(struct domain *domain, const char *name) {
        struct space *space = space_by_name(domain, name);

        return space ? client_await_space(space) : 0;
}

static int check_space_count(struct client *c, struct domain *domain, const char *name) {
        uint32_t limit = c->server->config->max_spaces, n = domain_spaces(domain);

        if (n >= limit && !space_by_name(domain, name) && domain_make_way(domain) < 0)
                return client_refuse(c, -EDQUOT,
                                     "domain '%s' has %u spaces, which is the limit; "
                                     "delete one, or raise max_spaces in kvd.conf",
                                     domain_config(domain)->name, limit);
        return 0;
}

static int make_space(struct client *c, const struct kvd_msg_space *m, struct space **ret,
                      bool *created) {
        struct space_spec spec;
        struct domain *domain;
        int r;

        r = client_find_domain(c, m->domain, &domain);
        if (r < 0)
                return r;
        spec_of(m, &spec);
        r = await_namesake(domain, spec.name);
        if (r == 0)
                r = check_space_count(c, domain, spec.name);
        if (r < 0)
                return r;
        r = space_open(domain, &spec, true, ret, created);
        if (r < 0)
                return client_make_way(c, domain, NULL, r);
        if (*created)
                log_limited(LOG_INFO, "space '%s' of domain %s was made", spec.name,
                            domain_config(domain)->name);
        return 0;
}

static int attach_space(struct client *c, struct space *space, uint32_t node, struct call *call) {
        struct kvd_msg_space_reply *m = &call->reply.space_reply;
        struct attachment *attachment = NULL;
        int r;

        r = client_add_space(c, space, &m->space);
        if (r == 0)
                r = client_find_space(c, m->space, &attachment);
        if (r < 0)
                return r;
        attachment_near(attachment, node);
        m->index_bytes = space_index(space)->size;
        m->pin_bytes = attachment_pin_bytes(attachment);
        call->fds.fd[0] = space_index_fd(space);
        call->fds.fd[1] = attachment_pin_fd(attachment);
        call->fds.n = 2;
        if (space_semaphore_fd(space) >= 0) {
                m->semaphore_row = attachment_semaphore_row(attachment);
                m->writer_token = attachment_writer_token(attachment);
                call->fds.fd[call->fds.n++] = space_semaphore_fd(space);
        }
        return 0;
}

int handle_space(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_space *m = &request->space;
        struct store *store = c->server->store;
        uint64_t collected = store_collected(store);
        struct space *space;
        bool created = false;
        int r;

        if (m->create == 0)
                r = client_find_named(c, m->domain, m->name, &space);
        else
                r = make_space(c, m, &space, &created);
        call->reply.space_reply.created = created;
        if (r == 0 && m->create != 2)
                r = attach_space(c, space, m->node, call);
        if (store_collected(store) != collected)
                log_limited(LOG_INFO, "%s", store_why(store));
        return r;
}

int handle_detach(struct client *c, const struct kvd_msg *request, struct call *call) {
        return client_remove_space(c, request->detach.space);
}

/* ---- segments -------------------------------------------------------------------------------- */

/* With legacy CUDA handles, a space has one segment, and its handle is in the message. */
static int put_handle(struct space *space, uint32_t shard, struct kvd_msg_segments_reply *m) {
        const uint8_t *handle = space_segment_handle(space, 0, shard);

        if (m->first || !atomic_load(&space_index(space)->n_segments))
                return 0;
        m->count = m->writable = 1;
        m->absent = !handle;
        if (handle)
                m->handles = (struct kvd_slice){handle, CU_IPC_HANDLE_BYTES};
        return 0;
}

int handle_segments(struct client *c, const struct kvd_msg *request, struct call *call) {
        struct kvd_msg_segments_reply *m = &call->reply.segments_reply;
        uint32_t shard = request->segments.shard;
        bool writable;
        int r = 0;

        if (shard >= space_index(call->space)->n_shards)
                return client_refuse(c, -EINVAL, "the pool has no GPU number %u", shard);
        m->first = request->segments.first;
        if (space_index(call->space)->backend == KVD_BACKEND_LEGACY)
                return put_handle(call->space, shard, m);
        for (m->count = 0; m->count < KVD_FRAME_FDS; m->count++) {
                r = space_segment_fd(call->attachment, m->first + m->count, shard, &writable);
                if (r < 0 && r != -ENODATA)
                        break;
                if (r < 0)
                        m->absent |= UINT64_C(1) << m->count;
                else
                        call->fds.fd[call->fds.n++] = r;
                m->writable |= (uint64_t)writable << m->count;
        }
        return r < 0 && r != -ENOENT && r != -ENODATA && m->count == 0 ? client_store_failed(c, r) :
                                                                         0;
}

/*
 * The request has the segments that the client has unmapped; the reply, those that it should unmap.
 */
int handle_drain(struct client *c, const struct kvd_msg *request, struct call *call) {
        uint32_t *segments = c->server->scratch->numbers, wanted;
        int64_t n = array_of_numbers(c, request->drain.unmapped, "unmapped");

        if (n < 0)
                return (int)n;
        wanted = attachment_drain(call->attachment, segments, (uint32_t)n, segments,
                                  ARRAY_SIZE(c->server->scratch->numbers));
        call->reply.drain_reply.wanted = (struct kvd_slice){segments,
                                                            wanted * (uint32_t)sizeof *segments};
        return 0;
}

/* ---- changing -------------------------------------------------------------------------------- */

int handle_space_set(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_space_set *m = &request->space_set;
        char key[64], value[256];
        int r;

        kvd_slice_copy(m->key, key, sizeof key);
        kvd_slice_copy(m->value, value, sizeof value);
        r = m->check ? space_check_setting(call->space, key, value) :
                       space_set(call->space, key, value);
        if (r < 0)
                return client_store_failed(c, r);
        if (m->check)
                return 0;
        log_limited(LOG_INFO, "client %u of domain %s set %s = %s of space '%s'", c->number,
                    domain_config(c->domain)->name, key, value, space_name(call->space));
        return 0;
}

/* After the space is gone, clients repeat the request until its records in files are erased. */
int handle_space_delete(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct kvd_msg_space_delete *m = &request->space_delete;
        char name[KVD_NAME_MAX + 1];
        struct domain *domain;
        struct space *space;
        const char *of;
        int r = client_find_domain(c, m->domain, &domain);

        if (r < 0)
                return r;
        of = domain_config(domain)->name;
        kvd_slice_copy(m->space, name, sizeof name);
        call->reply.space_delete_reply.erasing = store_disk_erasing(c->server->store, of, name);
        if (call->reply.space_delete_reply.erasing && !space_by_name(domain, name))
                return 0;
        r = client_find_named(c, m->domain, m->space, &space);
        if (r < 0)
                return r;
        r = store_disk_may_erase(c->server->store, of);
        if (r == 0)
                r = space_delete(space, m->force);
        if (r < 0)
                return client_store_failed(c, r);
        worker_look(c->server->worker); /* the worker has the space's memory mapped */
        log_limited(LOG_INFO, "client %u of domain %s deleted space '%s' of domain %s", c->number,
                    domain_config(c->domain)->name, name, of);
        call->reply.space_delete_reply.erasing = store_disk_erasing(c->server->store, of, name);
        return 0;
}
