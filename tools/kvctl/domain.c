/* SPDX-License-Identifier: Apache-2.0 */

/*
 * domain: what domains cost, and what they may cost. Each kind of cost (ipc/base/costs.def) is a
 * row, in its own unit.
 */

#include "ipc/base/cost.h"
#include "tools/kvctl/kvctl.h"

static const struct column cost_columns[] = {
        {"domain", "DOMAIN", UNIT_NONE | COLUMN_QUIET},
        {"cost", "COST", UNIT_NONE},
        {"used", "USED", UNIT_COUNT},
        {"guaranteed", "GUARANTEED", UNIT_COUNT},
        {"most", "MOST", UNIT_COUNT},
        {"unit", "UNIT", UNIT_NONE},
        {"meaning", "MEANING", UNIT_NONE},
};

static const struct cost {
        const char *name, *unit, *meaning;
} costs[KVD_N_COSTS] = {
#define KVD_COST(name, unit, text) [KVD_COST_##name] = {#name, unit, text},
#include "ipc/base/costs.def"
#undef KVD_COST
};

static void fill_domain(struct table *t, const struct kvd_msg_domain_info_reply *info) {
        for (uint32_t i = 0; i < KVD_N_COSTS; i++) {
                table_text(t, info->name.data, info->name.size);
                table_string(t, costs[i].name);
                table_number(t, counter_at(info->used, i));
                table_number(t, counter_at(info->guaranteed, i));
                table_number(t, counter_at(info->most, i));
                table_string(t, costs[i].unit);
                table_string(t, costs[i].meaning);
        }
}

int verb_domain(struct kvctl *kvctl, struct answer *answer) {
        struct table *t = ANSWER_ROWS(answer, "costs", cost_columns);
        struct kvd_msg_domain_info_reply info;
        uint32_t cursor = 0;
        int r;

        if (!t)
                return kvctl_out_of_memory(kvctl);
        while ((r = kvctl_next_domain(kvctl, &cursor, &info)) == 1)
                fill_domain(t, &info);
        return r;
}
