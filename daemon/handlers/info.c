/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Figures of the daemon, spaces, clients, domains and tiers. Only administrators learn anything
 * about other domains. For other clients, a cursor counts entries of their own domain, and sums
 * cover only that domain.
 */

#include "daemon/children/keeper_link.h"
#include "daemon/handlers/handlers.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/degraded.h"
#include "daemon/children/backend.h"
#include "daemon/children/tier_errors.h"
#include "daemon/children/worker_jobs.h"
#include "daemon/serve/large_pages.h"
#include "ipc/base/sys.h"
#include "store/file_tier.h"

static uint64_t ms_since(uint64_t ns) {
        return (sys_now_ns() - ns) / 1000000;
}

/* ---- daemon ---------------------------------------------------------------------------------- */

static void count_visible(const struct client *c, struct kvd_msg_daemon_info_reply *m) {
        const struct seats *seats = &c->server->seats;

        m->spaces = c->admin ? store_spaces(c->server->store) : domain_spaces(c->domain);
        m->pool_used = domain_used(c->domain, KVD_COST_pool);
        for (uint32_t i = 0; i < seats->n; i++)
                m->clients += seats->clients[i].state >= CLIENT_ATTACHED &&
                              client_sees(c, seats->clients[i].domain);
}

/* Sets the degraded states that are only computed on request, and returns all of them. */
static struct kvd_slice put_degraded(const struct server *server, uint64_t *to) {
        uint64_t turn_us = loop_turn_recent_ns(server->loop) / 1000,
                 percent = store_most_used(server->store);

        degraded_set(slow_turns, turn_us > KVD_SLOW_TURN_US ? turn_us : 0);
        degraded_set(little_left, percent >= KVD_NEARLY_ALL ? percent : 0);
        degraded_set(small_pages, store_wants_pages(server->store));
        degraded_get(to);
        return (struct kvd_slice){to, KVD_N_DEGRADED * sizeof *to};
}

static void add_work_of_all(const struct server *server, struct kvd_msg_daemon_info_reply *m) {
        m->pool_used = store_pool_used(server->store);
        m->requests = server->requests;
        m->request_errors = server->request_errors;
        m->bad_frames = server->bad_frames;
        m->turn_max_us = loop_turn_max_ns(server->loop) / 1000;
        m->turn_recent_us = loop_turn_recent_ns(server->loop) / 1000;
        m->worker = (uint32_t)worker_child(server->worker)->pid;
        m->worker_starts = worker_child(server->worker)->starts;
        m->jobs = worker_jobs_done(server->worker);
        m->jobs_waiting = store_jobs_waiting(server->store);
        m->degraded = put_degraded(server, server->scratch->degraded);
        m->kept = server->keep ? keep_count(server->keep) : 0;
        m->large_pages = large_pages_count(server->large).made;
        m->large_pages_failed = large_pages_count(server->large).failed;
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
        memcpy(scratch->client_counters, usage.client_counters, sizeof scratch->client_counters);
        m->client_counters = (struct kvd_slice){scratch->client_counters,
                                                sizeof scratch->client_counters};
}

int handle_space_info(struct client *c, const struct kvd_msg *request, struct call *call) {
        struct kvd_msg_space_info_reply *m = &call->reply.space_info_reply;
        struct scratch *scratch = c->server->scratch;
        uint32_t cursor = request->space_info.cursor;
        struct space *space = c->admin ? store_next_space(c->server->store, cursor) :
                                         domain_next_space(c->domain, cursor);

        if (!space)
                return client_refuse(c, -ENOENT, "there are no more spaces");
        m->next = 1 + (c->admin ? space_number(space) : space_place(space));
        m->name = kvd_slice_of(space_name(space));
        m->domain = kvd_slice_of(domain_config(space_domain(space))->name);
        put_shape(space_index(space), m);
        put_usage(space, scratch, m);
        m->counters = space_counters(space_index(space), scratch->counters);
        m->settings = space_settings(space_index(space), scratch->settings);
        return 0;
}

/* ---- clients --------------------------------------------------------------------------------- */

/* Seat numbers reveal other domains' activity, so only administrators get the order of seats. */
static uint32_t place_of(const struct client *c, const struct client *other) {
        return c->admin ? (uint32_t)(other - c->server->seats.clients) : other->number - 1;
}

/* The first client at this place or after it. */
static const struct client *visible_client(const struct client *c, uint32_t cursor) {
        const struct seats *seats = &c->server->seats;
        const struct client *found = NULL;

        for (uint32_t i = 0; i < seats->n; i++) {
                const struct client *other = &seats->clients[i];

                if (other->state >= CLIENT_ATTACHED && client_sees(c, other->domain) &&
                    place_of(c, other) >= cursor &&
                    (!found || place_of(c, other) < place_of(c, found)))
                        found = other;
        }
        return found;
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
                attachment_counters(a, KVD_N_CLIENT_COUNTERS, counters);
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
        m->next = place_of(c, other) + 1;
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

/* ---- domains --------------------------------------------------------------------------------- */

static struct domain *visible_domain(const struct client *c, uint32_t cursor) {
        struct domain *d = store_next_domain(c->server->store, NULL);

        for (; d; d = store_next_domain(c->server->store, d))
                if (client_sees(c, d) && cursor-- == 0)
                        return d;
        return NULL;
}

static struct kvd_slice put_costs(const struct domain *d, uint64_t *to,
                                  uint64_t (*of)(const struct domain *, enum kvd_cost)) {
        for (uint32_t i = 0; i < KVD_N_COSTS; i++)
                to[i] = of(d, (enum kvd_cost)i);
        return (struct kvd_slice){to, KVD_N_COSTS * sizeof *to};
}

int handle_domain_info(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct domain *d = visible_domain(c, request->domain_info.cursor);
        struct kvd_msg_domain_info_reply *m = &call->reply.domain_info_reply;
        struct scratch *s = c->server->scratch;

        if (!d)
                return client_refuse(c, -ENOENT, "there are no more domains");
        m->next = request->domain_info.cursor + 1;
        m->name = kvd_slice_of(domain_config(d)->name);
        m->used = put_costs(d, s->costs[0], domain_used);
        m->guaranteed = put_costs(d, s->costs[1], domain_guaranteed);
        m->most = put_costs(d, s->costs[2], domain_most);
        return 0;
}

/* ---- tiers ----------------------------------------------------------------------------------- */

/* These figures cover all domains, and are for administrators only. */
static void tell_disk_work(const struct store_disk_info *info, struct kvd_msg_tier_info_reply *m) {
        m->hits = info->hits;
        m->misses = info->misses;
        m->wrong = info->wrong;
        m->fetches = info->fetches;
        m->queue = info->queue;
        m->used = info->used;
        m->records = info->records;
        m->read_bytes = info->read_bytes;
        m->written_bytes = info->written_bytes;
        m->read_ns = info->read_ns;
        m->write_ns = info->write_ns;
        m->age_ms = info->age_ns / 1000000;
        m->evicted = info->evicted;
        m->copies = info->copies;
        m->copies_written = info->copies_written;
        m->copies_read = info->copies_read;
        m->copies_lost = info->copies_lost;
}

static void tell_disk(const struct store_disk_info *info, bool all, char *why,
                      struct kvd_msg_tier_info_reply *m) {
        static const char *const states[] = {[STORE_DISK_OPENING] = "opening",
                                             [STORE_DISK_SCANNING] = "scanning",
                                             [STORE_DISK_ON] = "on",
                                             [STORE_DISK_HANGS] = "hanging",
                                             [STORE_DISK_OFF] = "off"};

        m->name = kvd_slice_of(info->name);
        m->state = kvd_slice_of(states[info->state]);
        m->why = kvd_slice_of(tier_errors_why(why, KVD_MOST_tier_info_reply_why + 1, info->why,
                                              info->errors, info->last_error));
        m->bytes = info->bytes;
        m->extents = info->extents;
        m->scanned = info->scanned;
        m->errors = info->errors;
        if (all)
                tell_disk_work(info, m);
}

static void tell_remote(const struct store_remote_info *info, bool all, char *why,
                        struct kvd_msg_tier_info_reply *m) {
        static const char *const states[] = {[STORE_REMOTE_CONNECTING] = "connecting",
                                             [STORE_REMOTE_ON] = "on",
                                             [STORE_REMOTE_PARTLY] = "partly",
                                             [STORE_REMOTE_AWAY] = "away"};

        m->name = kvd_slice_of("remote");
        m->state = kvd_slice_of(states[info->state]);
        m->why = kvd_slice_of(tier_errors_why(why, KVD_MOST_tier_info_reply_why + 1, info->why,
                                              info->errors, info->last_error));
        m->servers = info->servers;
        m->away = info->away;
        m->errors = info->errors;
        if (!all)
                return;
        m->hits = info->hits;
        m->misses = info->misses;
        m->wrong = info->wrong;
        m->fetches = info->fetches;
        m->queue = info->queue;
        m->read_bytes = info->read_bytes;
        m->written_bytes = info->written_bytes;
        m->read_ns = info->read_ns;
        m->write_ns = info->write_ns;
}

int handle_tier_info(struct client *c, const struct kvd_msg *request, struct call *call) {
        struct store_disk_info *disk = &c->server->scratch->disk;
        struct store_remote_info *remote = &c->server->scratch->remote;
        char *why = c->server->scratch->tier_why;
        uint32_t above = store_host_get_info(c->server->store, disk);
        uint32_t tier = request->tier_info.tier;

        if (tier >= above) {
                store_disk_get_info(c->server->store, disk);
                above += disk->state != STORE_DISK_NONE;
        }
        store_remote_get_info(c->server->store, remote);
        if (tier < above)
                tell_disk(disk, c->admin, why, &call->reply.tier_info_reply);
        else if (tier == above && remote->state != STORE_REMOTE_NONE)
                tell_remote(remote, c->admin, why, &call->reply.tier_info_reply);
        else
                return client_refuse(c, -ENOENT, "there are no more tiers");
        return 0;
}
