/* SPDX-License-Identifier: Apache-2.0 */

/*
 * clients: who is connected, and what they hold. What a client's pins keep is found by walking the
 * map of each space (map.c).
 */

#include "ipc/base/layout.h"
#include "tools/kvctl/map.h"
#include "tools/kvctl/verbs.h"

static const struct column client_columns[] = {
        {"client", "CLIENT", UNIT_NONE},
        {"pid", "PID", UNIT_NONE},
        {"uid", "UID", UNIT_NONE},
        {"name", "NAME", UNIT_NONE},
        {"domain", "DOMAIN", UNIT_NONE | COLUMN_QUIET},
        {"connected", "CONNECTED", UNIT_NONE},
        {"quarantined", NULL, UNIT_NONE},
        {"spaces", "SPACES", UNIT_COUNT},
        {"filling_blocks", "FILLING", UNIT_COUNT},
        {"pinned_blocks", "PINNED", UNIT_COUNT},
        {"held_bytes", "HELD", UNIT_BYTES},
        {"requests", NULL, UNIT_COUNT},
        {"lookups", "LOOKUPS", UNIT_SHORT},
        {"lookup_hits", NULL, UNIT_COUNT},
        {"tokens_asked", NULL, UNIT_COUNT},
        {"tokens_found", NULL, UNIT_COUNT},
        {"tokens_reused", "REUSED", UNIT_SHARE},
        {"retries", NULL, UNIT_COUNT},
        {"age_ms", "AGE", UNIT_MS},
};

static void fill_client(struct table *t, const struct kvd_msg_client_info_reply *info,
                        uint64_t pinned_bytes) {
        uint64_t asked = counter_at(info->counters, KVD_CLIENT_TOKENS_ASKED);
        uint64_t found = counter_at(info->counters, KVD_CLIENT_TOKENS_FOUND);

        table_number(t, info->client);
        table_number(t, info->pid);
        table_number(t, info->uid);
        table_text(t, info->name.data, info->name.size);
        table_text(t, info->domain.data, info->domain.size);
        table_flag(t, info->connected);
        table_flag(t, info->quarantined);
        table_number(t, info->spaces);
        table_number(t, info->filling);
        table_number(t, info->pinned);
        table_number(t, info->filling_bytes + pinned_bytes);
        table_number(t, info->requests);
        table_number(t, counter_at(info->counters, KVD_CLIENT_LOOKUPS));
        table_number(t, counter_at(info->counters, KVD_CLIENT_HITS));
        table_number(t, asked);
        table_number(t, found);
        table_share(t, (double)found, (double)asked);
        table_number(t, counter_at(info->counters, KVD_CLIENT_RETRIES));
        table_number(t, info->age_ms);
}

/* ---- what their pins keep -------------------------------------------------------------------- */

struct holder {
        uint32_t client;
        char domain[64];
        uint64_t bytes;
};

struct holders {
        struct holder *holders;
        size_t n;
};

static void holders_clear(struct holders *holders) {
        free(holders->holders);
}

/* Those that pin something. */
static int list_holders(struct kvctl *kvctl, struct holders *holders) {
        struct kvd_msg_client_info_reply info;
        uint32_t cursor = 0;
        int r;

        while ((r = kvctl_next_client(kvctl, &cursor, &info)) == 1) {
                struct holder *grown;

                if (!info.pinned)
                        continue;
                grown = realloc(holders->holders, (holders->n + 1) * sizeof *grown);
                if (!grown)
                        return kvctl_out_of_memory(kvctl);
                holders->holders = grown;
                grown[holders->n] = (struct holder){.client = info.client};
                kvd_slice_copy(info.domain, grown[holders->n].domain, sizeof grown->domain);
                holders->n++;
        }
        return r;
}

static int find_held(struct kvctl *kvctl, struct holders *holders) {
        _cleanup_(maps_clear) struct maps maps = {0};
        int r = list_holders(kvctl, holders);

        if (r == 0 && holders->n)
                r = maps_read(kvctl, &maps);
        for (size_t i = 0; i < holders->n && r == 0; i++) {
                struct holder *h = &holders->holders[i];

                r = maps_held_by(kvctl, &maps, h->client, h->domain, &h->bytes);
        }
        return r;
}

static uint64_t held_by(const struct holders *holders,
                        const struct kvd_msg_client_info_reply *info) {
        for (size_t i = 0; i < holders->n; i++)
                if (holders->holders[i].client == info->client &&
                    kvd_slice_is(info->domain, holders->holders[i].domain))
                        return holders->holders[i].bytes;
        return 0;
}

/* ---- the table ------------------------------------------------------------------------------- */

int add_clients(struct kvctl *kvctl, struct answer *answer) {
        _cleanup_(holders_clear) struct holders holders = {0};
        struct kvd_msg_client_info_reply info;
        uint32_t cursor = 0;
        struct table *t;
        int r = find_held(kvctl, &holders);

        if (r < 0)
                return r;
        t = ANSWER_ROWS(answer, "clients", client_columns);
        if (!t)
                return kvctl_out_of_memory(kvctl);
        while ((r = kvctl_next_client(kvctl, &cursor, &info)) == 1)
                fill_client(t, &info, held_by(&holders, &info));
        return r;
}

int verb_clients(struct kvctl *kvctl, struct answer *answer) {
        return add_clients(kvctl, answer);
}
