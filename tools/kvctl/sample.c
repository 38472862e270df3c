/* SPDX-License-Identifier: Apache-2.0 */

/* Takes a sample of all counters. top.c decides which samples to compare. */

#include "tools/kvctl/sample.h"

#include <string.h>

#include "ipc/base/sys.h"
#include "tools/kvctl/process.h"

struct sample *sample_free(struct sample *sample) {
        if (!sample)
                return NULL;
        holders_clear(&sample->holders);
        free(sample->spaces);
        free(sample->clients);
        free(sample);
        return NULL;
}

static void sample_freep(struct sample **sample) {
        sample_free(*sample);
}

static void take_counters(uint64_t *to, unsigned n, struct kvd_slice from) {
        for (unsigned i = 0; i < n; i++)
                to[i] = counter_at(from, i);
}

static int take_space(struct kvctl *kvctl, struct sample *sample,
                      const struct kvd_msg_space_info_reply *info) {
        struct space_sample *grown = realloc(sample->spaces,
                                             (sample->n_spaces + 1) * sizeof *grown),
                            *s;

        if (!grown)
                return kvctl_out_of_memory(kvctl);
        sample->spaces = grown;
        s = &grown[sample->n_spaces++];
        *s = (struct space_sample){.name = space_name_of(info),
                                   .total = info->total,
                                   .sealed = info->sealed,
                                   .clients = info->clients};
        take_counters(s->of, KVD_N_SPACE_COUNTERS, info->counters);
        take_counters(s->by, KVD_N_CLIENT_COUNTERS, info->client_counters);
        return 0;
}

static int take_client(struct kvctl *kvctl, struct sample *sample,
                       const struct kvd_msg_client_info_reply *info) {
        struct client_sample *grown = realloc(sample->clients,
                                              (sample->n_clients + 1) * sizeof *grown),
                             *c;

        if (!grown)
                return kvctl_out_of_memory(kvctl);
        sample->clients = grown;
        c = &grown[sample->n_clients++];
        *c = (struct client_sample){.client = info->client,
                                    .pid = info->pid,
                                    .requests = info->requests,
                                    .filling = info->filling,
                                    .pinned = info->pinned,
                                    .stopped = info->connected &&
                                               process_is_stopped(info->pid, info->uid),
                                    .held_bytes = holders_bytes(&sample->holders, info)};
        kvd_slice_copy(info->name, c->name, sizeof c->name);
        kvd_slice_copy(info->domain, c->domain, sizeof c->domain);
        take_counters(c->by, KVD_N_CLIENT_COUNTERS, info->counters);
        return 0;
}

static int take_spaces(struct kvctl *kvctl, struct sample *sample) {
        struct kvd_msg_space_info_reply info;
        uint32_t cursor = 0;
        int r;

        while ((r = kvctl_next_space(kvctl, &cursor, &info)) == 1) {
                r = take_space(kvctl, sample, &info);
                if (r < 0)
                        return r;
        }
        return r;
}

static int take_clients(struct kvctl *kvctl, struct sample *sample) {
        struct kvd_msg_client_info_reply info;
        uint32_t cursor = 0;
        int r;

        while ((r = kvctl_next_client(kvctl, &cursor, &info)) == 1) {
                r = take_client(kvctl, sample, &info);
                if (r < 0)
                        return r;
        }
        return r;
}

static int take_held(struct kvctl *kvctl, struct sample *sample) {
        _cleanup_(maps_clear) struct maps maps = {0};
        int r = maps_read(kvctl, true, &maps);

        if (r == 0)
                r = holders_read(kvctl, &maps, &sample->holders);
        sample->bytes = maps_bytes(&maps);
        maps_ages(&maps, sample->ages);
        return r;
}

int sample_take(struct kvctl *kvctl, struct sample **ret) {
        _cleanup_(sample_freep) struct sample *sample = calloc(1, sizeof *sample);
        struct kvd_msg_daemon_info request = {};
        struct kvd_msg_daemon_info_reply info;
        int r;

        if (!sample)
                return kvctl_out_of_memory(kvctl);
        r = kvctl_call(kvctl, KVD_MSG_daemon_info, &request, &info);
        if (r < 0)
                return r;
        sample->at_ns = sys_now_ns();
        sample->told = conn_peer(kvctl->conn)->admin;
        sample->requests = info.requests;
        sample->pool_bytes = info.pool_bytes;
        sample->pool_used = info.pool_used;
        sample->turn_recent_us = info.turn_recent_us;
        r = take_held(kvctl, sample);
        if (r == 0)
                r = take_spaces(kvctl, sample);
        if (r == 0)
                r = take_clients(kvctl, sample);
        if (r == 0)
                *ret = STEAL(sample);
        return r;
}

const struct space_sample *sample_space(const struct sample *sample,
                                        const struct space_sample *as) {
        static const struct space_sample none;

        for (size_t i = 0; i < sample->n_spaces; i++)
                if (space_name_equal(&sample->spaces[i].name, &as->name))
                        return &sample->spaces[i];
        return &none;
}

const struct client_sample *sample_client(const struct sample *sample,
                                          const struct client_sample *as) {
        static const struct client_sample none;

        for (size_t i = 0; i < sample->n_clients; i++)
                if (sample->clients[i].client == as->client && sample->clients[i].pid == as->pid)
                        return &sample->clients[i];
        return &none;
}
