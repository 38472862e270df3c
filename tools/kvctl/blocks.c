/* SPDX-License-Identifier: Apache-2.0 */

/*
 * blocks: the map of a space. A cell stands for one or more blocks and shows the state that most
 * of them are in.
 */

#include "ipc/base/degraded.h"
#include "ipc/base/layout.h"
#include "tools/kvctl/holders.h"

enum shade {
        SHADE_LIMBO,
        SHADE_RETIRING,
        SHADE_FILLING,
        SHADE_PINNED,
        SHADE_HELD,
        SHADE_SEALED,
        SHADE_FREE,
        SHADE_ABSENT,
        N_SHADES
};

static const struct {
        char letter[2];
        const char *name, *colour, *meaning;
} shades[N_SHADES] = {
        [SHADE_LIMBO] = {"L", "limbo", "97;41", "client disconnected; its process may still write"},
        [SHADE_RETIRING] = {"r", "retiring", "30;46", "about to be evicted, if nobody uses it"},
        [SHADE_FILLING] = {"f", "filling", "30;43", "being written by the client that took it"},
        [SHADE_PINNED] = {"P", "pinned", "97;45", "cached, and in use by at least one client"},
        [SHADE_HELD] = {"h", "held", "30;45", "cached, and in use: a block behind it is pinned"},
        [SHADE_SEALED] = {"s", "sealed", "30;42", "cached, and used by nobody: may be evicted"},
        [SHADE_FREE] = {".", "free", "90", "may be taken at once"},
        [SHADE_ABSENT] = {"-", "absent", "90", "has no memory at the moment"},
};

static enum shade shade_of_sealed(uint8_t state) {
        if (state & MAP_PINNED)
                return SHADE_PINNED;
        return state & MAP_HELD ? SHADE_HELD : SHADE_SEALED;
}

static enum shade shade_of(const struct map *map, uint32_t id) {
        switch (map_state(map, id)) {
        case KVD_FILLING: return SHADE_FILLING;
        case KVD_SEALED: return shade_of_sealed(map->states[id]);
        case KVD_RETIRING: return SHADE_RETIRING;
        case KVD_LIMBO: return SHADE_LIMBO;
        case KVD_FREE: return SHADE_FREE;
        default: return SHADE_ABSENT;
        }
}

/* ---- for programs: neighbouring blocks of one state as one row ------------------------------- */

static const struct column state_columns[] = {
        {"domain", NULL, UNIT_NONE},  {"space", NULL, UNIT_NONE}, {"first", NULL, UNIT_COUNT},
        {"blocks", NULL, UNIT_COUNT}, {"state", NULL, UNIT_NONE}, {"pinned", NULL, UNIT_NONE},
        {"held", NULL, UNIT_NONE},    {"leaf", NULL, UNIT_NONE},
};

static const char *const state_names[] = {
        [KVD_FREE] = "free",         [KVD_FILLING] = "filling", [KVD_SEALED] = "sealed",
        [KVD_RETIRING] = "retiring", [KVD_LIMBO] = "limbo",     [KVD_ABSENT] = "absent",
};

static void fill_states(struct table *t, const struct space_name *space, const struct map *map) {
        for (uint32_t i = 0, n; i < map->n; i += n) {
                enum kvd_state state = map_state(map, i);

                for (n = 1; i + n < map->n && map->states[i + n] == map->states[i];)
                        n++;
                table_string(t, space->domain);
                table_string(t, space->name);
                table_number(t, i);
                table_number(t, n);
                table_string(t, state < ARRAY_SIZE(state_names) ? state_names[state] : "?");
                table_flag(t, map->states[i] & MAP_PINNED);
                table_flag(t, map->states[i] & MAP_HELD);
                table_flag(t, map->states[i] & MAP_LEAF);
        }
}

int add_states(struct kvctl *kvctl, struct answer *answer, const struct space_list *list) {
        struct table *t = ANSWER_ROWS(answer, "states", state_columns);

        if (!t)
                return kvctl_out_of_memory(kvctl);
        for (size_t i = 0; i < list->n; i++) {
                _cleanup_(map_clear) struct map map = {0};
                int r = map_read(kvctl, &list->spaces[i], false, &map);

                if (r < 0)
                        return r;
                fill_states(t, &list->spaces[i], &map);
        }
        return 0;
}

/* ---- for people: the picture ----------------------------------------------------------------- */

#define ROWS 24u
/* the legend, header, gaps, heading of --watch, sentence about a full pool, and a prompt */
#define LEGEND_ROWS 15u

struct picture {
        unsigned cells;  /* per row */
        unsigned label;  /* width of the block id before each row */
        uint32_t blocks; /* per cell */
};

static unsigned rows_wanted(const struct kvctl *kvctl) {
        unsigned height = kvctl->screen.height;

        if (args_has(&kvctl->args, FLAG_ROWS))
                return (unsigned)MIN(MAX(kvctl->args.number[FLAG_ROWS], 1u), 10000u);
        return MIN(ROWS, MAX(height, LEGEND_ROWS + 4) - LEGEND_ROWS);
}

static unsigned digits(uint32_t n) {
        unsigned count = 1;

        for (; n >= 10; n /= 10)
                count++;
        return count;
}

static struct picture picture_for(const struct kvctl *kvctl, uint32_t n) {
        struct picture p = {.label = digits(n)};
        unsigned width = kvctl->screen.width ? kvctl->screen.width : 80;

        p.cells = width > p.label + 10 ? (width - p.label - 2) / 8 * 8 : 8;
        p.blocks = (uint32_t)pow2_up(DIV_UP((uint64_t)n, (uint64_t)p.cells * rows_wanted(kvctl)));
        return p;
}

/* The shade of most of the cell's blocks; of equally frequent ones, the first in enum shade. */
static enum shade shade_of_cell(const struct map *map, uint64_t first, uint32_t blocks) {
        uint32_t n[N_SHADES] = {0};
        enum shade most = 0;

        for (uint64_t i = first; i < MIN(first + blocks, (uint64_t)map->n); i++)
                n[shade_of(map, (uint32_t)i)]++;
        for (unsigned i = 0; i < N_SHADES; i++)
                most = n[i] > n[most] ? (enum shade)i : most;
        return most;
}

static void draw_row(FILE *to, const struct map *map, const struct picture *p, uint64_t first,
                     bool colour) {
        enum shade last = N_SHADES;

        fprintf(to, "%*llu  ", (int)p->label, (unsigned long long)first);
        for (unsigned i = 0; i < p->cells && first < map->n; i++, first += p->blocks) {
                enum shade shade = shade_of_cell(map, first, p->blocks);

                if (colour && shade != last)
                        fprintf(to, "\033[0;%sm", shades[shade].colour);
                fputs(shades[shade].letter, to);
                last = shade;
        }
        fputs(colour ? "\033[0m\n" : "\n", to);
}

static char *draw(const struct map *map, const struct picture *p, bool colour) {
        char *text = NULL;
        size_t size;
        FILE *to = open_memstream(&text, &size);

        if (!to)
                return NULL;
        for (uint64_t first = 0; first < map->n; first += (uint64_t)p->cells * p->blocks)
                draw_row(to, map, p, first, colour);
        if (fclose(to) != 0) {
                free(text);
                return NULL;
        }
        return text;
}

/* ---- legend ---------------------------------------------------------------------------------- */

static const struct column count_columns[] = {
        {"letter", "", UNIT_NONE},         {"state", "STATE", UNIT_NONE},
        {"blocks", "BLOCKS", UNIT_COUNT},  {"share", "SHARE", UNIT_SHARE},
        {"meaning", "MEANING", UNIT_NONE},
};

static int add_legend(struct kvctl *kvctl, struct answer *answer, const struct map *map) {
        struct table *t = ANSWER_ROWS(answer, "counts", count_columns);
        uint32_t count[N_SHADES] = {0};

        if (!t)
                return kvctl_out_of_memory(kvctl);
        for (uint32_t i = 0; i < map->n; i++)
                count[shade_of(map, i)]++;
        for (unsigned i = 0; i < N_SHADES; i++) {
                table_string(t, shades[i].letter);
                table_colour(t, shades[i].colour);
                table_string(t, shades[i].name);
                table_number(t, count[i]);
                table_share(t, count[i], map->n);
                table_string(t, shades[i].meaning);
        }
        return 0;
}

static void add_picture(struct kvctl *kvctl, struct answer *answer, const struct map *map,
                        const char *space) {
        struct picture p = picture_for(kvctl, map->n);

        if (map->n == 0)
                answer_say(answer, "%s: no memory yet; the first allocation brings some", space);
        else if (p.blocks == 1)
                answer_say(answer, "%s: %u blocks", space, map->n);
        else
                answer_say(answer,
                           "%s: %u blocks, %u to a cell, which shows the state of most of them",
                           space, map->n, p.blocks);
        if (map->n)
                answer_picture(answer, draw(map, &p, kvctl->screen.colour));
}

/* Names the holders if the pool is full, because this space then gets no more blocks either. */
static int say_full(struct kvctl *kvctl, struct answer *answer) {
        _cleanup_(maps_clear) struct maps maps = {0};
        struct kvd_msg_daemon_info request = {};
        struct kvd_msg_daemon_info_reply info;
        int r = kvctl_call(kvctl, KVD_MSG_daemon_info, &request, &info);

        if (r < 0 || info.pool_used < info.pool_bytes / 100 * KVD_NEARLY_ALL)
                return r;
        r = maps_read(kvctl, false, &maps);
        return r < 0 ? r : holders_say_full(kvctl, answer, &maps, info.pool_bytes);
}

int verb_blocks(struct kvctl *kvctl, struct answer *answer) {
        _cleanup_(map_clear) struct map map = {0};
        struct space_name space;
        struct table *t;
        int r = kvctl_space(kvctl, &space);

        if (r == 0)
                r = map_read(kvctl, &space, false, &map);
        if (r < 0)
                return r;
        add_picture(kvctl, answer, &map, space.name);
        t = ANSWER_ROWS(answer, "states", state_columns);
        if (!t)
                return kvctl_out_of_memory(kvctl);
        fill_states(t, &space, &map);
        r = add_legend(kvctl, answer, &map);
        return r < 0 ? r : say_full(kvctl, answer);
}
