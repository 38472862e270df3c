/* SPDX-License-Identifier: Apache-2.0 */

/*
 * stat: every counter, and figures derived from them. Each figure says in words which counters it
 * was made of.
 */

#include <ctype.h>

#include "ipc/base/layout.h"
#include "tools/kvctl/kvctl.h"

static const struct column counter_columns[] = {
        {"domain", "DOMAIN", UNIT_NONE | COLUMN_QUIET},
        {"space", "SPACE", UNIT_NONE | COLUMN_QUIET},
        {"name", "COUNTER", UNIT_NONE},
        {"value", "VALUE", UNIT_COUNT},
        {"unit", "UNIT", UNIT_NONE},
        {"meaning", "MEANING", UNIT_NONE},
};

static const struct column figure_columns[] = {
        {"domain", "DOMAIN", UNIT_NONE | COLUMN_QUIET},
        {"space", "SPACE", UNIT_NONE | COLUMN_QUIET},
        {"name", "FIGURE", UNIT_NONE},
        {"value", "VALUE", UNIT_SHARE},
        {"formula", "FORMULA", UNIT_NONE},
};

const struct counter space_counters[KVD_N_SPACE_COUNTERS] = {
#define KVD_COUNTER(name, unit, text) [KVD_SPACE_##name] = {#name, unit, text},
#include "ipc/base/counters.def"
};

const struct counter client_counters[KVD_N_CLIENT_COUNTERS] = {
        [KVD_CLIENT_LOOKUPS] = {"LOOKUPS", "calls", "searches for a stored prefix"},
        [KVD_CLIENT_HITS] = {"LOOKUP_HITS", "calls", "searches that found one"},
        [KVD_CLIENT_TOKENS_ASKED] = {"TOKENS_ASKED", "tokens", "given to all searches"},
        [KVD_CLIENT_TOKENS_FOUND] = {"TOKENS_FOUND", "tokens", "of these, found in the cache"},
        [KVD_CLIENT_RETRIES] = {"RETRIES", "calls",
                                "searches that met an eviction in progress and looked again"},
};

struct tables {
        struct table *counters, *figures;
};

static void fill_space(struct table *t, const struct space_name *space) {
        table_string(t, space->domain);
        table_string(t, space->name);
}

static void fill_counter(struct table *t, const struct space_name *space,
                         const struct counter *counter, uint64_t value) {
        char name[32] = "";

        for (size_t i = 0; counter->name[i] && i < sizeof name - 1; i++)
                name[i] = (char)tolower((unsigned char)counter->name[i]);
        fill_space(t, space);
        table_string(t, name);
        table_number(t, value);
        table_string(t, counter->unit);
        table_string(t, counter->meaning);
}

static void fill_figure(struct table *t, const struct space_name *space, const char *name,
                        uint64_t part, uint64_t whole, const char *formula) {
        fill_space(t, space);
        table_string(t, name);
        table_share(t, (double)part, (double)whole);
        table_string(t, formula);
}

static void fill_figures(struct table *t, const struct space_name *space,
                         const struct kvd_msg_space_info_reply *info) {
        uint64_t of[KVD_N_SPACE_COUNTERS], by[KVD_N_CLIENT_COUNTERS];

        for (unsigned i = 0; i < KVD_N_SPACE_COUNTERS; i++)
                of[i] = counter_at(info->counters, i);
        for (unsigned i = 0; i < KVD_N_CLIENT_COUNTERS; i++)
                by[i] = counter_at(info->client_counters, i);
        fill_figure(t, space, "hit_rate", by[KVD_CLIENT_HITS], by[KVD_CLIENT_LOOKUPS],
                    "lookup_hits / lookups");
        fill_figure(t, space, "tokens_reused", by[KVD_CLIENT_TOKENS_FOUND],
                    by[KVD_CLIENT_TOKENS_ASKED], "tokens_found / tokens_asked");
        fill_figure(t, space, "full", info->sealed, info->total,
                    "blocks sealed now / blocks that have memory now");
        fill_figure(t, space, "duplicate_seals", of[KVD_SPACE_DUPLICATES],
                    of[KVD_SPACE_DUPLICATES] + of[KVD_SPACE_SEALED],
                    "duplicates / (duplicates + sealed)");
        fill_figure(t, space, "churn", of[KVD_SPACE_EVICTED], of[KVD_SPACE_SEALED],
                    "evicted / sealed");
        fill_figure(t, space, "changes_taken", of[KVD_SPACE_TAKEN], of[KVD_SPACE_PROPOSED],
                    "taken / proposed");
        fill_figure(
                t, space, "affected", of[KVD_SPACE_SHARED], of[KVD_SPACE_APPENDED],
                "shared / appended: sequences' own blocks that a similar one replaced (MemShare)");
        fill_figure(t, space, "left_the_pool", of[KVD_SPACE_SPILLED] + of[KVD_SPACE_DROPPED],
                    of[KVD_SPACE_APPENDED], "(spilled + dropped) / appended");
        fill_figure(t, space, "labels", info->label_bytes, info->total * info->block_bytes,
                    "bytes of the blocks' summaries / bytes of the blocks that have memory now");
        fill_figure(t, space, "copies", info->copy_bytes, info->total * info->block_bytes,
                    "bytes of exact copies / bytes of the blocks that have memory now (KVReviver)");
        fill_figure(t, space, "sketches", info->sketch_bytes, info->total * info->block_bytes,
                    "bytes of sketches / bytes of the blocks that have memory now (KVReviver)");
}

static void fill(struct tables *tables, const struct space_name *space,
                 const struct kvd_msg_space_info_reply *info) {
        for (unsigned i = 0; i < KVD_N_SPACE_COUNTERS; i++)
                fill_counter(tables->counters, space, &space_counters[i],
                             counter_at(info->counters, i));
        for (unsigned i = 0; i < KVD_N_CLIENT_COUNTERS; i++)
                fill_counter(tables->counters, space, &client_counters[i],
                             counter_at(info->client_counters, i));
        fill_figures(tables->figures, space, info);
}

static bool is_listed(const struct space_list *list, const struct space_name *space) {
        for (size_t i = 0; i < list->n; i++)
                if (space_name_equal(&list->spaces[i], space))
                        return true;
        return false;
}

int add_counters(struct kvctl *kvctl, struct answer *answer, const struct space_list *list) {
        struct tables tables = {ANSWER_ROWS(answer, "counters", counter_columns),
                                ANSWER_ROWS(answer, "figures", figure_columns)};
        struct kvd_msg_space_info_reply info;
        uint32_t cursor = 0;
        int r;

        if (!tables.counters || !tables.figures)
                return kvctl_out_of_memory(kvctl);
        while ((r = kvctl_next_space(kvctl, &cursor, &info)) == 1) {
                struct space_name space = space_name_of(&info);

                if (is_listed(list, &space))
                        fill(&tables, &space, &info);
        }
        return r;
}

int verb_stat(struct kvctl *kvctl, struct answer *answer) {
        _cleanup_(space_list_clear) struct space_list list = {0};
        int r = kvctl_spaces(kvctl, &list);

        if (r == 0 && list.n == 0)
                answer_say(answer, "No spaces yet, so nothing is counted.");
        return r < 0 ? r : add_counters(kvctl, answer, &list);
}
