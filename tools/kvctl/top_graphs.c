/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The graphs above top's tables: the use of the pool, the share of reused tokens over time, and the
 * ages of cached blocks.
 */

#include <stdio.h>

#include "tools/kvctl/graph.h"
#include "tools/kvctl/top.h"

#define LABEL 9u
#define WIDTH 80u

static unsigned width_of(const struct screen *screen) {
        unsigned width = screen->width ? screen->width : WIDTH;

        return MAX(width, LABEL + 12) - LABEL - 2;
}

static void put_pool(FILE *to, const struct screen *screen, const struct sample *s) {
        double all = s->pool_bytes ? (double)s->pool_bytes : 1;
        uint64_t held = s->bytes.held + s->bytes.filling;
        const struct share shares[] = {{(double)held / all, "35"},
                                       {(double)s->bytes.evictable / all, "32"}};
        char in_use[UNIT_TEXT_MAX], cached[UNIT_TEXT_MAX], left[UNIT_TEXT_MAX];

        unit_format_u64(UNIT_BYTES, held, in_use);
        unit_format_u64(UNIT_BYTES, s->bytes.evictable, cached);
        unit_format_u64(UNIT_BYTES, top_since(held + s->bytes.evictable, s->pool_bytes), left);
        fprintf(to, "%-*s", (int)LABEL, "pool");
        graph_bar(to, screen, width_of(screen), shares, ARRAY_SIZE(shares));
        fprintf(to, "\n%*sheld by clients %s, evictable %s, free %s\n", (int)LABEL, "", in_use,
                cached, left);
}

static void put_history(FILE *to, const struct screen *screen, const struct top *top) {
        unsigned room = width_of(screen) - 7;
        size_t n = MIN(top->n_reused, room);
        double last = n ? top->reused[top->n_reused - 1] : -1;
        char share[UNIT_TEXT_MAX] = "-";

        if (last >= 0)
                unit_format(UNIT_SHARE, last, share);
        fprintf(to, "%-*s", (int)LABEL, "reused");
        graph_history(to, screen, top->reused + top->n_reused - n, n);
        fprintf(to, " %s\n", share);
}

/* From used just now to longest ago; each column is for twice the age of the previous one. */
static void put_ages(FILE *to, const struct screen *screen, const struct sample *s) {
        double shares[MAP_AGES];
        uint64_t most = 1;
        size_t n = 0;

        for (size_t i = 0; i < MAP_AGES; i++) {
                most = MAX(most, s->ages[i]);
                n = s->ages[i] ? i + 1 : n;
        }
        for (size_t i = 0; i < n; i++)
                shares[i] = (double)s->ages[i] / (double)most;
        fprintf(to, "%-*s", (int)LABEL, "age");
        fputs("now ", to);
        graph_heat(to, screen, shares, n);
        fprintf(to, n > 1 ? " %llu ticks ago\n" : "\n", 1ull << (n ? n - 1 : 0));
}

char *top_graphs(const struct kvctl *kvctl, const struct top *top) {
        char *text = NULL;
        size_t size;
        FILE *to = open_memstream(&text, &size);

        if (!to)
                return NULL;
        put_pool(to, &kvctl->screen, top->now);
        put_history(to, &kvctl->screen, top);
        put_ages(to, &kvctl->screen, top->now);
        if (fclose(to) != 0) {
                free(text);
                return NULL;
        }
        return text;
}
