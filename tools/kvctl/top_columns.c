/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The tables of top: rates, from the difference of two samples. The formulas of the columns are in
 * kvctl(1).
 */

#include "tools/kvctl/top.h"

const struct column top_columns_spaces[] = {
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

const struct column top_columns_clients[] = {
        {"client", "CLIENT", UNIT_NONE},
        {"pid", "PID", UNIT_NONE},
        {"name", "NAME", UNIT_NONE},
        {"stopped", "STOPPED", UNIT_NONE | COLUMN_QUIET},
        {"domain", "DOMAIN", UNIT_NONE | COLUMN_QUIET},
        {"requests_per_s", "REQUEST/s", UNIT_SHORT},
        {"lookups_per_s", "LOOKUP/s", UNIT_SHORT},
        {"tokens_reused", "REUSED", UNIT_SHARE},
        {"held_bytes", "HELD", UNIT_BYTES},
        {"pinned_blocks", "PINS", UNIT_COUNT},
        {"filling_blocks", "FILLS", UNIT_COUNT},
};

static void fill_space(struct table *t, const struct space_sample *a, const struct space_sample *b,
                       double seconds) {
        uint64_t of[KVD_N_SPACE_COUNTERS], by[KVD_N_CLIENT_COUNTERS], hits, found;

        for (unsigned i = 0; i < KVD_N_SPACE_COUNTERS; i++)
                of[i] = top_since(a->of[i], b->of[i]);
        for (unsigned i = 0; i < KVD_N_CLIENT_COUNTERS; i++)
                by[i] = top_since(a->by[i], b->by[i]);
        table_string(t, b->name.domain);
        table_string(t, b->name.name);
        table_share(t, (double)b->sealed, (double)b->total);
        table_real(t, (double)by[KVD_CLIENT_LOOKUPS] / seconds);
        hits = MIN(by[KVD_CLIENT_HITS], by[KVD_CLIENT_LOOKUPS]);
        found = MIN(by[KVD_CLIENT_TOKENS_FOUND], by[KVD_CLIENT_TOKENS_ASKED]);
        table_share(t, (double)hits, (double)by[KVD_CLIENT_LOOKUPS]);
        table_share(t, (double)found, (double)by[KVD_CLIENT_TOKENS_ASKED]);
        table_real(t, (double)found / seconds);
        table_real(t, (double)of[KVD_SPACE_ALLOCATED] / seconds);
        table_real(t, (double)of[KVD_SPACE_SEALED] / seconds);
        table_real(t, (double)of[KVD_SPACE_DUPLICATES] / seconds);
        table_real(t, (double)of[KVD_SPACE_EVICTED] / seconds);
        table_real(t, (double)(of[KVD_SPACE_REFUSED_QUOTA] + of[KVD_SPACE_REFUSED_FULL]) / seconds);
        table_number(t, b->clients);
}

static void fill_client(struct table *t, const struct client_sample *a,
                        const struct client_sample *b, double seconds) {
        uint64_t asked = top_since(a->by[KVD_CLIENT_TOKENS_ASKED], b->by[KVD_CLIENT_TOKENS_ASKED]);
        uint64_t found = top_since(a->by[KVD_CLIENT_TOKENS_FOUND], b->by[KVD_CLIENT_TOKENS_FOUND]);
        uint64_t lookups = top_since(a->by[KVD_CLIENT_LOOKUPS], b->by[KVD_CLIENT_LOOKUPS]);

        table_number(t, b->client);
        table_number(t, b->pid);
        table_string(t, b->name);
        table_flag(t, b->stopped);
        table_string(t, b->domain);
        table_real(t, (double)top_since(a->requests, b->requests) / seconds);
        table_real(t, (double)lookups / seconds);
        table_share(t, (double)MIN(found, asked), (double)asked);
        table_number(t, b->held_bytes);
        table_number(t, b->pinned);
        table_number(t, b->filling);
}

/* ---- both ------------------------------------------------------------------------------------ */

const size_t n_top_columns[N_TOP_TABLES] = {ARRAY_SIZE(top_columns_spaces),
                                            ARRAY_SIZE(top_columns_clients)};

const struct column *top_columns(enum top_table which) {
        return which == TOP_SPACES ? top_columns_spaces : top_columns_clients;
}

static void sort(struct table *t, const struct top *top, enum top_table which) {
        const struct top_sort *how = &top->sort[which];

        if (!how->column)
                return;
        table_sort(t, how->column - 1, how->ascending);
        if (top->focus == which)
                table_mark(t, how->column - 1);
}

int top_add_tables(struct kvctl *kvctl, struct answer *answer, const struct top *top,
                   double seconds) {
        struct table *spaces = ANSWER_ROWS(answer, "spaces", top_columns_spaces), *clients;
        const struct sample *a = top->before, *b = top->now;

        clients = spaces ? ANSWER_ROWS(answer, "clients", top_columns_clients) : NULL;
        if (!clients)
                return kvctl_out_of_memory(kvctl);
        for (size_t i = 0; i < b->n_spaces; i++)
                fill_space(spaces, sample_space(a, &b->spaces[i]), &b->spaces[i], seconds);
        for (size_t i = 0; i < b->n_clients; i++)
                fill_client(clients, sample_client(a, &b->clients[i]), &b->clients[i], seconds);
        sort(spaces, top, TOP_SPACES);
        sort(clients, top, TOP_CLIENTS);
        return 0;
}
