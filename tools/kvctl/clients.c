/* SPDX-License-Identifier: Apache-2.0 */

/*
 * clients: the connected clients, and what they hold. The blocks that a client's pins keep are
 * found by walking the map of each space (map.c).
 */

#include "ipc/base/layout.h"
#include "tools/kvctl/holders.h"
#include "tools/kvctl/process.h"

static const struct column client_columns[] = {
        {"client", "CLIENT", UNIT_NONE},
        {"pid", "PID", UNIT_NONE},
        {"uid", "UID", UNIT_NONE},
        {"name", "NAME", UNIT_NONE},
        {"domain", "DOMAIN", UNIT_NONE | COLUMN_QUIET},
        {"connected", "CONNECTED", UNIT_NONE},
        {"stopped", "STOPPED", UNIT_NONE | COLUMN_QUIET},
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
                        uint64_t held_bytes) {
        uint64_t asked = counter_at(info->counters, KVD_CLIENT_TOKENS_ASKED);
        uint64_t found = counter_at(info->counters, KVD_CLIENT_TOKENS_FOUND);

        table_fields(t, 6, KVD_MSG_client_info_reply, info);
        table_flag(t, info->connected && process_is_stopped(info->pid, info->uid));
        table_fields(t, 2, KVD_MSG_client_info_reply, info);
        table_number(t, info->filling);
        table_number(t, info->pinned);
        table_number(t, held_bytes);
        table_number(t, info->requests);
        table_number(t, counter_at(info->counters, KVD_CLIENT_LOOKUPS));
        table_number(t, counter_at(info->counters, KVD_CLIENT_HITS));
        table_number(t, asked);
        table_number(t, found);
        table_share(t, (double)found, (double)asked);
        table_number(t, counter_at(info->counters, KVD_CLIENT_RETRIES));
        table_number(t, info->age_ms);
}

/* ---- the table ------------------------------------------------------------------------------- */

int add_clients(struct kvctl *kvctl, struct answer *answer) {
        _cleanup_(holders_clear) struct holders holders = {0};
        _cleanup_(maps_clear) struct maps maps = {0};
        struct kvd_msg_client_info_reply info;
        uint32_t cursor = 0;
        struct table *t;
        int r = maps_read(kvctl, false, &maps);

        if (r == 0)
                r = holders_read(kvctl, &maps, &holders);
        if (r < 0)
                return r;
        t = ANSWER_ROWS(answer, "clients", client_columns);
        if (!t)
                return kvctl_out_of_memory(kvctl);
        while ((r = kvctl_next_client(kvctl, &cursor, &info)) == 1)
                fill_client(t, &info, holders_bytes(&holders, &info));
        return r;
}

int verb_clients(struct kvctl *kvctl, struct answer *answer) {
        return add_clients(kvctl, answer);
}
