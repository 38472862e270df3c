/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Figures. A peer that is no administrator learns nothing about other domains: not from lists,
 * where a cursor counts only what the peer may see, and not from sums.
 */

#include "daemon/handlers.h"

#include <errno.h>
#include <unistd.h>

#include "daemon/backend.h"
#include "daemon/worker_jobs.h"
#include "ipc/base/sys.h"

static uint64_t ms_since(uint64_t ns) {
        return (sys_now_ns() - ns) / 1000000;
}

static struct space *next_visible(const struct client *c, uint32_t cursor) {
        struct space *s = store_next_space(c->server->store, cursor);

        while (s && !client_sees(c, space_domain(s)))
                s = store_next_space(c->server->store, space_number(s) + 1);
        return s;
}

/* ---- daemon ---------------------------------------------------------------------------------- */

static void count_visible(const struct client *c, struct kvd_msg_daemon_info_reply *m) {
        const struct seats *seats = &c->server->seats;

        for (struct space *s = next_visible(c, 0); s; s = next_visible(c, space_number(s) + 1)) {
                struct space_usage usage;

                space_get_usage(s, &usage);
                m->spaces++;
                m->pool_used += usage.segments * space_index(s)->segment_bytes;
        }
        for (uint32_t i = 0; i < seats->n; i++)
                m->clients += seats->clients[i].state >= CLIENT_ATTACHED &&
                              client_sees(c, seats->clients[i].domain);
}

static void add_work_of_all(const struct server *server, struct kvd_msg_daemon_info_reply *m) {
        m->pool_used = store_pool_used(server->store);
        m->requests = server->requests;
        m->request_errors = server->request_errors;
        m->bad_frames = server->bad_frames;
        m->turn_max_us = loop_turn_max_ns(server->loop) / 1000;
        m->worker = (uint32_t)worker_child(server->worker)->pid;
        m->worker_starts = worker_child(server->worker)->starts;
        m->jobs = worker_jobs_done(server->worker);
        m->jobs_waiting = store_jobs_waiting(server->store);
}

int handle_daemon_info(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct server *server = c->server;
        struct kvd_msg_daemon_info_reply *m = &call->reply.daemon_info_reply;

        m->version = kvd_slice_of(KVD_PROJECT_VERSION);
        m->backend = kvd_slice_of(
                backend_name(server->backend ? server->backend->backend : KVD_BACKEND_HOST));
        if (server->backend) {
                m->device = kvd_slice_of(server->backend->device);
                m->backend_why = kvd_slice_cut(server->backend->why.line,
                                               KVD_MOST_daemon_info_reply_backend_why);
        }
        m->loop = kvd_slice_of(loop_name(server->loop));
        m->pages = kvd_slice_of(store_pages_name(server->store));
        m->pid = (uint32_t)getpid();
        m->uptime_ms = ms_since(server->started_ns);
        m->pool_bytes = store_pool_bytes(server->store);
        count_visible(c, m);
        if (c->admin)
                add_work_of_all(server, m);
        return 0;
}

/* ---- spaces ---------------------------------------------------------------------------------- */

static struct kvd_slice space_counters(const struct kvd_index *ix, uint64_t *scratch) {
        for (uint32_t i = 0; i < KVD_N_SPACE_COUNTERS; i++)
                scratch[i] = shm_load(&ix->counters[i]);
        return (struct kvd_slice){scratch, KVD_N_SPACE_COUNTERS * sizeof *scratch};
}

static struct kvd_slice space_settings(const struct kvd_index *ix, double *scratch) {
        for (uint32_t i = 0; i < KVD_N_SETTINGS; i++)
                scratch[i] = kvd_setting_get(ix->settings, i);
        return (struct kvd_slice){scratch, KVD_N_SETTINGS * sizeof *scratch};
}

static void put_shape(const struct kvd_index *ix, struct kvd_msg_space_info_reply *m) {
        m->geometry = (struct kvd_slice){&ix->geometry, sizeof ix->geometry};
        m->kind = ix->kind;
        m->keys = ix->keys;
        m->policy = ix->policy;
        m->arena = ix->arena;
        m->block_bytes = ix->block_bytes;
        m->capacity = ix->capacity;
        m->index_bytes = ix->size;
        m->segment_bytes = ix->segment_bytes;
}

static void put_usage(struct space *space, struct scratch *scratch,
                      struct kvd_msg_space_info_reply *m) {
        struct space_usage usage;

        space_get_usage(space, &usage);
        m->max_blocks = usage.max_blocks;
        m->segments = usage.segments;
        m->clients = usage.attachments;
        m->total = usage.total;
        m->free = usage.free;
        m->filling = usage.filling;
        m->sealed = usage.sealed;
        m->limbo = usage.limbo;
        m->leaves = usage.leaves;
        m->runs = usage.runs;
        m->leases = usage.leases;
        m->sequences = usage.sequences;
        m->private = usage.private;
        m->shared = usage.shared;
        m->spilled = usage.spilled;
        m->vague = usage.vague;
        m->pending = usage.pending;
        m->poisoned = usage.poisoned;
        m->spill_slots = usage.spill_slots;
        m->label_bytes = usage.label_bytes;
        m->copy_bytes = usage.copy_bytes;
        m->sketch_bytes = usage.sketch_bytes;
        for (uint32_t i = 0; i < KVD_N_CLIENT_COUNTERS; i++)
                scratch->client_counters[i] = usage.client_counters[i];
        m->client_counters = (struct kvd_slice){scratch->client_counters,
                                                sizeof scratch->client_counters};
}

int handle_space_info(struct client *c, const struct kvd_msg *request, struct call *call) {
        struct kvd_msg_space_info_reply *m = &call->reply.space_info_reply;
        struct scratch *scratch = c->server->scratch;
        struct space *space = next_visible(c, 0);

        for (uint32_t i = 0; space && i < request->space_info.cursor; i++)
                space = next_visible(c, space_number(space) + 1);
        if (!space)
                return client_refuse(c, -ENOENT, "there are no more spaces");
        m->next = request->space_info.cursor + 1;
        m->name = kvd_slice_of(space_name(space));
        m->domain = kvd_slice_of(domain_config(space_domain(space))->name);
        put_shape(space_index(space), m);
        put_usage(space, scratch, m);
        m->counters = space_counters(space_index(space), scratch->counters);
        m->settings = space_settings(space_index(space), scratch->settings);
        return 0;
}

/* ---- clients --------------------------------------------------------------------------------- */

static const struct client *visible_client(const struct client *c, uint32_t cursor) {
        const struct seats *seats = &c->server->seats;

        for (uint32_t i = 0; i < seats->n; i++) {
                const struct client *other = &seats->clients[i];

                if (other->state >= CLIENT_ATTACHED && client_sees(c, other->domain) &&
                    cursor-- == 0)
                        return other;
        }
        return NULL;
}

static void put_spaces(const struct client *of, uint64_t *sums,
                       struct kvd_msg_client_info_reply *m) {
        for (uint32_t k = 0; k < KVD_N_CLIENT_COUNTERS; k++)
                sums[k] = 0;
        for (uint32_t i = 0; i < CLIENT_SPACES; i++) {
                const struct attachment *a = of->spaces[i].attachment;
                uint64_t counters[KVD_N_CLIENT_COUNTERS];

                if (!a)
                        continue;
                attachment_counters(a, counters);
                for (uint32_t k = 0; k < KVD_N_CLIENT_COUNTERS; k++)
                        sums[k] += counters[k];
                m->filling += attachment_filling(a);
                m->filling_bytes += attachment_filling(a) *
                                    space_index(attachment_space(a))->block_bytes;
                m->pinned += attachment_pinned(a);
        }
        m->spaces = of->n_spaces;
        m->counters = (struct kvd_slice){sums, KVD_N_CLIENT_COUNTERS * sizeof *sums};
}

int handle_client_info(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct client *other = visible_client(c, request->client_info.cursor);
        struct kvd_msg_client_info_reply *m = &call->reply.client_info_reply;

        if (!other)
                return client_refuse(c, -ENOENT, "there are no more clients");
        m->next = request->client_info.cursor + 1;
        m->client = other->number;
        m->pid = (uint32_t)other->peer.pid;
        m->uid = other->peer.uid;
        m->name = kvd_slice_of(other->name);
        m->domain = kvd_slice_of(domain_config(other->domain)->name);
        m->connected = other->state == CLIENT_ATTACHED;
        m->quarantined = loop_timer_is_set(&other->quarantine);
        m->requests = other->requests;
        m->age_ms = ms_since(other->connected_ns);
        put_spaces(other, c->server->scratch->client_counters, m);
        return 0;
}
