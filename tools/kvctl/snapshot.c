/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Asks the daemon for everything that metrics shows. A space, a domain or a client that comes or
 * goes meanwhile may be missing.
 */

#include "tools/kvctl/snapshot.h"

#include <string.h>

void snapshot_clear(struct snapshot *s) {
        free(s->spaces);
        free(s->domains);
        free(s->tiers);
        *s = (struct snapshot){0};
}

/* Appends a zeroed element; NULL: out of memory. */
static void *one_more(void **list, size_t *n, size_t size) {
        uint8_t *grown = realloc(*list, (*n + 1) * size);

        if (!grown)
                return NULL;
        *list = grown;
        return memset(grown + (*n)++ * size, 0, size);
}

static void take_words(uint64_t *to, unsigned n, struct kvd_slice from) {
        for (unsigned i = 0; i < n; i++)
                to[i] = counter_at(from, i);
}

static int take_daemon(struct kvctl *kvctl, struct snapshot *s) {
        struct kvd_msg_daemon_info request = {};
        struct kvd_msg_daemon_info_reply info;
        int r = kvctl_call(kvctl, KVD_MSG_daemon_info, &request, &info);

        if (r < 0)
                return r;
        s->told = conn_peer(kvctl->conn)->admin;
        kvd_slice_copy(info.version, s->version, sizeof s->version);
        kvd_slice_copy(info.backend, s->backend, sizeof s->backend);
        kvd_slice_copy(info.loop, s->loop, sizeof s->loop);
        degraded_of_daemon(&info, s->degraded);
#define DAEMON(type, name, unit, factor, member, help) s->value[SNAPSHOT_##member] = info.member;
#define WORK DAEMON
#include "tools/kvctl/metrics.def"
#undef DAEMON
#undef WORK
        return 0;
}

static void fill_space(struct snapshot_space *s, const struct kvd_msg_space_info_reply *info,
                       const struct maps *maps) {
        s->name = space_name_of(info);
        s->free = info->free;
        s->filling = info->filling;
        s->limbo = info->limbo;
        s->sums = maps_sum(maps, info);
        take_words(s->of, KVD_N_SPACE_COUNTERS, info->counters);
        take_words(s->by, KVD_CLIENT_WORDS, info->client_counters);
        degraded_of_space(info, s->degraded);
#define SPACE(type, name, unit, factor, member, help) \
        s->value[SNAPSHOT_SPACE_##member] = info->member;
#define BLOCKS(kind, member) s->value[SNAPSHOT_SPACE_##member] = info->member;
#include "tools/kvctl/metrics.def"
#undef SPACE
#undef BLOCKS
}

static int take_spaces(struct kvctl *kvctl, struct snapshot *s) {
        _cleanup_(maps_clear) struct maps maps = {0};
        struct kvd_msg_space_info_reply info;
        struct snapshot_space *space;
        uint32_t cursor = 0;
        int r = maps_read(kvctl, false, &maps);

        if (r < 0)
                return r;
        s->bytes = maps_bytes(&maps);
        while ((r = kvctl_next_space(kvctl, &cursor, &info)) == 1) {
                space = one_more((void **)&s->spaces, &s->n_spaces, sizeof *space);
                if (!space)
                        return kvctl_out_of_memory(kvctl);
                fill_space(space, &info, &maps);
        }
        return r;
}

static int take_domains(struct kvctl *kvctl, struct snapshot *s) {
        struct kvd_msg_domain_info_reply info;
        struct snapshot_domain *domain;
        uint32_t cursor = 0;
        int r;

        while ((r = kvctl_next_domain(kvctl, &cursor, &info)) == 1) {
                domain = one_more((void **)&s->domains, &s->n_domains, sizeof *domain);
                if (!domain)
                        return kvctl_out_of_memory(kvctl);
                kvd_slice_copy(info.name, domain->name, sizeof domain->name);
                take_words(domain->used, KVD_N_COSTS, info.used);
                take_words(domain->guaranteed, KVD_N_COSTS, info.guaranteed);
                take_words(domain->most, KVD_N_COSTS, info.most);
                for (uint32_t i = 0; i < KVD_N_COSTS; i++)
                        domain->near_limit[i] = degraded_near_limit(&info, i);
        }
        return r;
}

/* Clients come and go with processes, so they are summed by domain. */
static void add_client(struct snapshot *s, const struct kvd_msg_client_info_reply *info) {
        for (size_t i = 0; i < s->n_domains; i++) {
                struct snapshot_domain *domain = &s->domains[i];

                if (!kvd_slice_is(info->domain, domain->name))
                        continue;
                domain->clients += info->connected;
                domain->disconnected += !info->connected;
                domain->filling_bytes += info->filling_bytes;
                domain->pinned += info->pinned;
        }
}

static int take_clients(struct kvctl *kvctl, struct snapshot *s) {
        struct kvd_msg_client_info_reply info;
        uint32_t cursor = 0;
        int r;

        while ((r = kvctl_next_client(kvctl, &cursor, &info)) == 1)
                add_client(s, &info);
        return r;
}

static int take_tiers(struct kvctl *kvctl, struct snapshot *s) {
        struct kvd_msg_tier_info request = {0};
        struct kvd_msg_tier_info_reply info;
        struct snapshot_tier *tier;
        int r;

        for (; (r = kvctl_next(kvctl, KVD_MSG_tier_info, &request, &info)) == 1; request.tier++) {
                tier = one_more((void **)&s->tiers, &s->n_tiers, sizeof *tier);
                if (!tier)
                        return kvctl_out_of_memory(kvctl);
                kvd_slice_copy(info.name, tier->name, sizeof tier->name);
                kvd_slice_copy(info.state, tier->state, sizeof tier->state);
#define TIER(type, name, unit, factor, member, help) \
        tier->value[SNAPSHOT_TIER_##member] = info.member;
#include "tools/kvctl/metrics.def"
#undef TIER
        }
        return r;
}

int snapshot_take(struct kvctl *kvctl, struct snapshot *ret) {
        static int (*const parts[])(struct kvctl *, struct snapshot *) = {take_daemon, take_spaces,
                                                                          take_domains,
                                                                          take_clients, take_tiers};
        int r = 0;

        *ret = (struct snapshot){0};
        for (size_t i = 0; i < ARRAY_SIZE(parts) && r == 0; i++)
                r = parts[i](kvctl, ret);
        if (r < 0)
                snapshot_clear(ret);
        return r;
}
