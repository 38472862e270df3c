/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_TOP_H
#define KVCTL_TOP_H

/* top: its state between two pictures, and the choices of its user. */

#include "tools/kvctl/sample.h"

#define TOP_HISTORY 120u

enum top_table { TOP_SPACES, TOP_CLIENTS, N_TOP_TABLES };

struct top_sort {
        size_t column; /* plus 1; 0: in the daemon's order */
        bool ascending;
};

struct top {
        struct sample *before, *now; /* owned */
        double reused[TOP_HISTORY];  /* share, per picture; negative: no lookups */
        size_t n_reused;
        uint64_t next_ns; /* when the next sample is due */

        /* by keys */
        enum top_table focus;
        struct top_sort sort[N_TOP_TABLES];
        unsigned scroll; /* lines */
        bool paused, help;
        bool again; /* a key asks for the same samples again */
};

struct top *top_free(struct top *top);         /* NULL is fine; returns NULL */
double top_seconds(const struct kvctl *kvctl); /* between two pictures */

/* top_columns.c */
extern const struct column top_columns_spaces[], top_columns_clients[];
extern const size_t n_top_columns[N_TOP_TABLES];
#define TOP_CLIENTS_HELD 8u /* column of held_bytes */
const struct column *top_columns(enum top_table which);
int top_add_tables(struct kvctl *kvctl, struct answer *answer, const struct top *top,
                   double seconds);
/* A counter that has fallen was reset: by a new daemon, or in a new space of the old name. */
static inline uint64_t top_since(uint64_t before, uint64_t now) {
        return now >= before ? now - before : now;
}

/* top_keys.c: waits until the next picture. False: the user wants to stop. */
bool top_wait(struct kvctl *kvctl, double seconds);
void top_take_key(struct top *top, int key);
const char *top_help(void);

/* top_graphs.c: lines above the tables; owned, NULL: out of memory */
char *top_graphs(const struct kvctl *kvctl, const struct top *top);

#endif
