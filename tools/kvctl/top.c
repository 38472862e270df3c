/* SPDX-License-Identifier: Apache-2.0 */

/*
 * top: rates, from the difference of two samples. The formulas of the columns are in kvctl(1).
 */

#include "tools/kvctl/top.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/layout.h"
#include "ipc/base/sys.h"
#include "tools/kvctl/kvctl.h"
#include "tools/kvctl/verbs.h"

#define SECONDS_DEFAULT 1.0

struct space_sample {
        struct space_name name;
        uint64_t total, sealed, clients;
        uint64_t of[KVD_N_SPACE_COUNTERS];
        uint64_t by[KVD_N_CLIENT_COUNTERS];
};

struct client_sample {
        char name[64], domain[64];
        uint32_t client, pid;
        uint64_t requests, filling, pinned;
        uint64_t by[KVD_N_CLIENT_COUNTERS];
};

struct sample {
        bool told; /* about the work of all domains: administrators only */
        uint64_t at_ns, requests, pool_bytes, pool_used, turn_recent_us;
        struct space_sample *spaces;
        struct client_sample *clients;
        size_t n_spaces, n_clients;
};

struct sample *sample_free(struct sample *sample) {
        if (!sample)
                return NULL;
        free(sample->spaces);
        free(sample->clients);
        free(sample);
        return NULL;
}

static void sample_freep(struct sample **sample) {
        sample_free(*sample);
}

double top_seconds(const struct kvctl *kvctl) {
        return args_has(&kvctl->args, FLAG_WATCH) ? kvctl->args.seconds[FLAG_WATCH] :
                                                    SECONDS_DEFAULT;
}

/* ---- taking a sample ------------------------------------------------------------------------- */

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
        *s = (struct space_sample){.name = space_name_of(info), .total = info->total, .sealed = info->sealed,
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
        *c = (struct client_sample){.client = info->client, .pid = info->pid, .requests = info->requests,
                                    .filling = info->filling, .pinned = info->pinned};
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

static int take(struct kvctl *kvctl, struct sample **ret) {
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
        r = take_spaces(kvctl, sample);
        if (r == 0)
                r = take_clients(kvctl, sample);
        if (r == 0)
                *ret = STEAL(sample);
        return r;
}

/* ---- the difference of two ------------------------------------------------------------------- */

/*
 * Something that counts less than before started anew: a new daemon, or a new space of the old
 * name.
 */
static uint64_t since(uint64_t before, uint64_t now) {
        return now >= before ? now - before : now;
}

static const struct space_sample *same_space(const struct sample *sample,
                                             const struct space_sample *as) {
        static const struct space_sample none;

        for (size_t i = 0; i < sample->n_spaces; i++)
                if (space_name_equal(&sample->spaces[i].name, &as->name))
                        return &sample->spaces[i];
        return &none;
}

static const struct client_sample *same_client(const struct sample *sample,
                                               const struct client_sample *as) {
        static const struct client_sample none;

        for (size_t i = 0; i < sample->n_clients; i++)
                if (sample->clients[i].client == as->client && sample->clients[i].pid == as->pid)
                        return &sample->clients[i];
        return &none;
}

static const struct column head_columns[] = {
        {"interval_s", NULL, UNIT_NONE},
        {"pool_bytes", NULL, UNIT_BYTES},
        {"pool_used_bytes", NULL, UNIT_BYTES},
        {"requests_per_s", NULL, UNIT_SHORT},
        {"turn_recent_us", NULL, UNIT_US},
};

static const struct column space_columns[] = {
        {"domain", "DOMAIN", UNIT_NONE | COLUMN_QUIET},
        {"name", "SPACE", UNIT_NONE},
        {"full", "FULL", UNIT_SHARE},
        {"lookups_per_s", "LOOKUP/s", UNIT_SHORT},
        {"hit_rate", NULL, UNIT_SHARE},
        {"tokens_reused", "REUSED", UNIT_SHARE},
        {"tokens_found_per_s", NULL, UNIT_SHORT},
        {"allocated_per_s", "ALLOC/s", UNIT_SHORT},
        {"sealed_per_s", "SEAL/s", UNIT_SHORT},
        {"duplicates_per_s", "DUP/s", UNIT_SHORT},
        {"evicted_per_s", "EVICT/s", UNIT_SHORT},
        {"refused_per_s", "REFUSE/s", UNIT_SHORT},
        {"clients", NULL, UNIT_COUNT},
};

static const struct column client_columns[] = {
        {"client", "CLIENT", UNIT_NONE},
        {"pid", "PID", UNIT_NONE},
        {"name", "NAME", UNIT_NONE},
        {"domain", "DOMAIN", UNIT_NONE | COLUMN_QUIET},
        {"requests_per_s", "REQUEST/s", UNIT_SHORT},
        {"lookups_per_s", "LOOKUP/s", UNIT_SHORT},
        {"tokens_reused", "REUSED", UNIT_SHARE},
        {"filling_blocks", "FILLING", UNIT_COUNT},
        {"pinned_blocks", "PINNED", UNIT_COUNT},
};

static void fill_space(struct table *t, const struct space_sample *a, const struct space_sample *b,
                       double seconds) {
        uint64_t of[KVD_N_SPACE_COUNTERS], by[KVD_N_CLIENT_COUNTERS];

        for (unsigned i = 0; i < KVD_N_SPACE_COUNTERS; i++)
                of[i] = since(a->of[i], b->of[i]);
        for (unsigned i = 0; i < KVD_N_CLIENT_COUNTERS; i++)
                by[i] = since(a->by[i], b->by[i]);
        table_string(t, b->name.domain);
        table_string(t, b->name.name);
        table_share(t, (double)b->sealed, (double)b->total);
        table_real(t, (double)by[KVD_CLIENT_LOOKUPS] / seconds);
        table_share(t, (double)by[KVD_CLIENT_HITS], (double)by[KVD_CLIENT_LOOKUPS]);
        table_share(t, (double)by[KVD_CLIENT_TOKENS_FOUND], (double)by[KVD_CLIENT_TOKENS_ASKED]);
        table_real(t, (double)by[KVD_CLIENT_TOKENS_FOUND] / seconds);
        table_real(t, (double)of[KVD_SPACE_ALLOCATED] / seconds);
        table_real(t, (double)of[KVD_SPACE_SEALED] / seconds);
        table_real(t, (double)of[KVD_SPACE_DUPLICATES] / seconds);
        table_real(t, (double)of[KVD_SPACE_EVICTED] / seconds);
        table_real(t, (double)(of[KVD_SPACE_REFUSED_QUOTA] + of[KVD_SPACE_REFUSED_FULL]) / seconds);
        table_number(t, b->clients);
}

static void fill_client(struct table *t, const struct client_sample *a,
                        const struct client_sample *b, double seconds) {
        uint64_t asked = since(a->by[KVD_CLIENT_TOKENS_ASKED], b->by[KVD_CLIENT_TOKENS_ASKED]);
        uint64_t found = since(a->by[KVD_CLIENT_TOKENS_FOUND], b->by[KVD_CLIENT_TOKENS_FOUND]);

        table_number(t, b->client);
        table_number(t, b->pid);
        table_string(t, b->name);
        table_string(t, b->domain);
        table_real(t, (double)since(a->requests, b->requests) / seconds);
        table_real(t,
                   (double)since(a->by[KVD_CLIENT_LOOKUPS], b->by[KVD_CLIENT_LOOKUPS]) / seconds);
        table_share(t, (double)found, (double)asked);
        table_number(t, b->filling);
        table_number(t, b->pinned);
}

static void fill_work(struct table *t, bool told, double rate, uint64_t turn_recent_us) {
        if (!told) {
                table_none(t);
                table_none(t);
                return;
        }
        table_real(t, rate);
        table_number(t, turn_recent_us);
}

static void say_work(struct answer *answer, double rate, uint64_t turn_recent_us) {
        char requests[UNIT_TEXT_MAX], turn[UNIT_TEXT_MAX];

        unit_format(UNIT_SHORT, rate, requests);
        unit_format_u64(UNIT_US, turn_recent_us, turn);
        answer_say(answer, "requests/s: %s, longest turn in the last minute: %s", requests, turn);
}

static void fill_head(struct table *t, struct answer *answer, const struct sample *a,
                      const struct sample *b, double seconds) {
        double rate = (double)since(a->requests, b->requests) / seconds;
        char used[UNIT_TEXT_MAX], pool[UNIT_TEXT_MAX];

        table_real(t, seconds);
        table_number(t, b->pool_bytes);
        table_number(t, b->pool_used);
        fill_work(t, b->told, rate, b->turn_recent_us);
        unit_format_u64(UNIT_BYTES, b->pool_used, used);
        unit_format_u64(UNIT_BYTES, b->pool_bytes, pool);
        answer_say(answer, "pool: %s of %s, spaces: %zu, clients: %zu", used, pool, b->n_spaces,
                   b->n_clients);
        if (b->told)
                say_work(answer, rate, b->turn_recent_us);
}

static int add_rates(struct kvctl *kvctl, struct answer *answer, const struct sample *a,
                     const struct sample *b) {
        double seconds = (double)(b->at_ns - a->at_ns + 1) / 1e9;
        struct table *head = ANSWER_RECORD(answer, "daemon", head_columns), *spaces, *clients;

        if (!head)
                return kvctl_out_of_memory(kvctl);
        fill_head(head, answer, a, b, seconds);
        spaces = ANSWER_ROWS(answer, "spaces", space_columns);
        clients = spaces ? ANSWER_ROWS(answer, "clients", client_columns) : NULL;
        if (!clients)
                return kvctl_out_of_memory(kvctl);
        for (size_t i = 0; i < b->n_spaces; i++)
                fill_space(spaces, same_space(a, &b->spaces[i]), &b->spaces[i], seconds);
        for (size_t i = 0; i < b->n_clients; i++)
                fill_client(clients, same_client(a, &b->clients[i]), &b->clients[i], seconds);
        return 0;
}

/* The first time, there is nothing to compare with yet. */
static int take_first(struct kvctl *kvctl) {
        int r = take(kvctl, &kvctl->before);

        if (r == 0 && !screen_wait(&kvctl->screen, top_seconds(kvctl)))
                r = -EINTR;
        return r;
}

int verb_top(struct kvctl *kvctl, struct answer *answer) {
        _cleanup_(sample_freep) struct sample *now = NULL;
        int r = kvctl->before ? 0 : take_first(kvctl);

        if (r == 0)
                r = take(kvctl, &now);
        if (r == 0)
                r = add_rates(kvctl, answer, kvctl->before, now);
        if (r < 0)
                return r;
        sample_free(kvctl->before);
        kvctl->before = STEAL(now);
        return 0;
}
