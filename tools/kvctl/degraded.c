/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Degraded states, for status and doctor. The daemon sends its own as numbers; those of a space or
 * a domain follow from its other figures. Only states that apply are shown.
 */

#include "tools/kvctl/degraded.h"

#include <stdio.h>
#include <string.h>

#include "ipc/base/cost.h"
#include "ipc/base/layout.h"
#include "tools/kvctl/kvctl.h"

static const struct column columns[] = {
        {"state", NULL, UNIT_NONE}, {"domain", NULL, UNIT_NONE}, {"space", NULL, UNIT_NONE},
        {"cost", NULL, UNIT_NONE},  {"number", NULL, UNIT_NONE}, {"unit", NULL, UNIT_NONE},
        {"what", NULL, UNIT_NONE},  {"to_do", NULL, UNIT_NONE},
};

static const struct {
        const char *name, *unit, *what, *to_do;
} states[KVD_N_DEGRADED] = {
#define KVD_DEGRADED(whose, name, unit, text, remedy) \
        [KVD_DEGRADED_##name] = {#name, unit, text, remedy},
#include "ipc/base/degraded.def"
#undef KVD_DEGRADED
};

static const char *const costs[KVD_N_COSTS] = {
#define KVD_COST(name, unit, text) [KVD_COST_##name] = #name,
#include "ipc/base/costs.def"
#undef KVD_COST
};

/* ---- which states apply ---------------------------------------------------------------------- */

void degraded_of_daemon(const struct kvd_msg_daemon_info_reply *info,
                        uint64_t ret[KVD_N_DEGRADED]) {
        for (unsigned i = 0; i < KVD_N_DEGRADED; i++)
                ret[i] = counter_at(info->degraded, i);
}

void degraded_of_space(const struct kvd_msg_space_info_reply *info, uint64_t ret[KVD_N_DEGRADED]) {
        memset(ret, 0, KVD_N_DEGRADED * sizeof *ret);
        ret[KVD_DEGRADED_limbo] = info->limbo;
        ret[KVD_DEGRADED_poisoned] = info->poisoned;
        ret[KVD_DEGRADED_copies_broken] = counter_at(info->counters, KVD_SPACE_REVIVE_BROKEN);
        ret[KVD_DEGRADED_index_full] = counter_at(info->counters, KVD_SPACE_UNINDEXED);
        ret[KVD_DEGRADED_runs_refused] = counter_at(info->counters, KVD_SPACE_RUNS_REFUSED);
        ret[KVD_DEGRADED_worn_out] = counter_at(info->counters, KVD_SPACE_WORN_OUT);
}

/* The pool and exact copies may be full: both make room when needed. */
uint64_t degraded_near_limit(const struct kvd_msg_domain_info_reply *info, uint32_t cost) {
        double used = (double)counter_at(info->used, cost),
               most = (double)counter_at(info->most, cost);
        uint64_t percent = most > 0 ? (uint64_t)(used * 100 / most) : 0;

        if (cost == KVD_COST_pool || cost == KVD_COST_spill || percent < KVD_NEARLY_ALL)
                return 0;
        return percent;
}

/* ---- showing them ---------------------------------------------------------------------------- */

struct place { /* all NULL: the daemon */
        const char *domain, *space, *cost;
};

static void say(struct answer *answer, enum kvd_degraded which, const struct place *place,
                uint64_t n) {
        const char *unit = states[which].unit;
        char where[160] = "", number[64] = "";

        if (place->space)
                snprintf(where, sizeof where, " (space %s of domain %s)", place->space,
                         place->domain);
        else if (place->cost)
                snprintf(where, sizeof where, " (domain %s, %s)", place->domain, place->cost);
        if (*unit)
                snprintf(number, sizeof number, ", %llu %s", (unsigned long long)n, unit);
        answer_say(answer, "degraded: %s%s%s: %s; to do: %s", states[which].name, number, where,
                   states[which].what, states[which].to_do);
}

static void add(struct answer *answer, struct table *t, enum kvd_degraded which,
                const struct place *place, uint64_t n) {
        if (!n)
                return;
        table_string(t, states[which].name);
        table_string(t, place->domain);
        table_string(t, place->space);
        table_string(t, place->cost);
        table_number(t, n);
        table_string(t, *states[which].unit ? states[which].unit : NULL);
        table_string(t, states[which].what);
        table_string(t, states[which].to_do);
        say(answer, which, place, n);
}

static void add_all(struct answer *answer, struct table *t, const struct place *place,
                    const uint64_t n[KVD_N_DEGRADED]) {
        for (unsigned i = 0; i < KVD_N_DEGRADED; i++)
                add(answer, t, (enum kvd_degraded)i, place, n[i]);
}

static int add_of_daemon(struct kvctl *kvctl, struct answer *answer, struct table *t) {
        struct kvd_msg_daemon_info request = {};
        struct kvd_msg_daemon_info_reply info;
        uint64_t n[KVD_N_DEGRADED];
        int r = kvctl_call(kvctl, KVD_MSG_daemon_info, &request, &info);

        if (r < 0)
                return r;
        degraded_of_daemon(&info, n);
        add_all(answer, t, &(struct place){0}, n);
        return 0;
}

static int add_of_spaces(struct kvctl *kvctl, struct answer *answer, struct table *t) {
        struct kvd_msg_space_info_reply info;
        uint64_t n[KVD_N_DEGRADED];
        uint32_t cursor = 0;
        int r;

        while ((r = kvctl_next_space(kvctl, &cursor, &info)) == 1) {
                struct space_name name = space_name_of(&info);

                degraded_of_space(&info, n);
                add_all(answer, t, &(struct place){name.domain, name.name, NULL}, n);
        }
        return r;
}

static int add_of_domains(struct kvctl *kvctl, struct answer *answer, struct table *t) {
        struct kvd_msg_domain_info_reply info;
        uint32_t cursor = 0;
        char name[64];
        int r;

        while ((r = kvctl_next_domain(kvctl, &cursor, &info)) == 1) {
                kvd_slice_copy(info.name, name, sizeof name);
                for (uint32_t i = 0; i < KVD_N_COSTS; i++)
                        add(answer, t, KVD_DEGRADED_near_limit,
                            &(struct place){name, NULL, costs[i]}, degraded_near_limit(&info, i));
        }
        return r;
}

int add_degraded(struct kvctl *kvctl, struct answer *answer) {
        struct table *t = ANSWER_ROWS(answer, "degraded", columns);
        int r = t ? add_of_daemon(kvctl, answer, t) : kvctl_out_of_memory(kvctl);

        if (r == 0)
                r = add_of_spaces(kvctl, answer, t);
        return r < 0 ? r : add_of_domains(kvctl, answer, t);
}
