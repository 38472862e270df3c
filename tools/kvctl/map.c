/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Which blocks of a space are held. The daemon sends pins and parents; the blocks that a pin keeps
 * are found here, by walking towards the beginnings of chains.
 */

#include "tools/kvctl/map.h"

#include <errno.h>
#include <string.h>

void map_clear(struct map *map) {
        free(map->states);
        free(map->parents);
        free(map->stamps);
        free(map->ages);
        *map = (struct map){0};
}

/* ---- from the daemon ------------------------------------------------------------------------- */

static int make_room(struct kvctl *kvctl, struct map *map, uint32_t n, bool ages) {
        if (map->states)
                return 0;
        map->states = calloc(n, sizeof *map->states);
        map->parents = calloc(n, sizeof *map->parents);
        map->stamps = calloc(n, sizeof *map->stamps);
        map->ages = ages ? calloc(n, sizeof *map->ages) : NULL;
        return map->states && map->parents && map->stamps && (map->ages || !ages) ?
                       0 :
                       kvctl_out_of_memory(kvctl);
}

/* total: from the first piece. Blocks that are added meanwhile are in the next map. */
static int append(struct kvctl *kvctl, struct map *map, uint32_t total, bool ages,
                  const struct kvd_msg_block_map_reply *piece) {
        uint32_t n = MIN(piece->states.size, total - map->n);

        if (piece->parents.size != piece->states.size * sizeof *map->parents ||
            (ages && piece->ages.size != piece->states.size))
                return kvctl_fail(kvctl, KVCTL_NO, -EPROTO,
                                  "kvd sent a map without parents; is it older than kvctl?");
        if (make_room(kvctl, map, total, ages) < 0)
                return -ENOMEM;
        memcpy(map->states + map->n, piece->states.data, n);
        memcpy(map->parents + map->n, piece->parents.data, n * sizeof *map->parents);
        if (ages)
                memcpy(map->ages + map->n, piece->ages.data, n);
        map->n += n;
        return 0;
}

static int read_pieces(struct kvctl *kvctl, const struct space_name *space, bool ages,
                       struct map *map) {
        struct kvd_msg_block_map_reply reply;
        uint32_t total = 0;
        int r;

        do {
                struct kvd_msg_block_map request = {.space = kvd_slice_of(space->name),
                                                    .parents = 1,
                                                    .ages = ages,
                                                    .domain = kvd_slice_of(space->domain),
                                                    .first = map->n};

                r = kvctl_call(kvctl, KVD_MSG_block_map, &request, &reply);
                if (r < 0 || reply.states.size == 0)
                        return r;
                total = total ? total : reply.total;
                r = append(kvctl, map, total, ages, &reply);
        } while (r == 0 && map->n < total);
        return r;
}

/* ---- walks ----------------------------------------------------------------------------------- */

/* Number of blocks from id to the beginning of its chain that this walk has not seen yet. */
static uint64_t walk(struct map *map, uint32_t id) {
        uint64_t n = 0;

        while (id < map->n && map->stamps[id] != map->walks && map_state(map, id) == KVD_SEALED) {
                map->stamps[id] = map->walks;
                id = map->parents[id];
                n++;
        }
        return n;
}

static void hold(struct map *map) {
        map->walks++;
        for (uint32_t id = 0; id < map->n; id++)
                if (map->states[id] & (MAP_PINNED | MAP_KEPT))
                        walk(map, id);
        for (uint32_t id = 0; id < map->n; id++)
                if (map->stamps[id] == map->walks)
                        map->states[id] |= MAP_HELD;
}

/* A block is as young as the youngest chain through it. */
static void spread_ages(struct map *map) {
        for (uint32_t leaf = 0; leaf < map->n; leaf++) {
                uint8_t age = map->ages[leaf];

                if (!(map->states[leaf] & MAP_LEAF))
                        continue;
                for (uint32_t id = map->parents[leaf]; id < map->n && map->ages[id] > age;
                     id = map->parents[id])
                        map->ages[id] = age;
        }
}

int map_read(struct kvctl *kvctl, const struct space_name *space, bool ages, struct map *ret) {
        int r = read_pieces(kvctl, space, ages, ret);

        if (r == 0)
                hold(ret);
        if (r == 0 && ret->ages)
                spread_ages(ret);
        return r;
}

struct map_sums map_sum(const struct map *map) {
        struct map_sums sums = {0};

        for (uint32_t id = 0; id < map->n; id++) {
                enum kvd_state state = map_state(map, id);
                bool held = map->states[id] & MAP_HELD;

                sums.held += state == KVD_SEALED && held;
                sums.evictable += state == KVD_SEALED && !held;
                sums.filling += state == KVD_FILLING || state == KVD_LIMBO;
        }
        return sums;
}

/* ---- all spaces ------------------------------------------------------------------------------ */

void maps_clear(struct maps *maps) {
        for (size_t i = 0; i < maps->n; i++)
                map_clear(&maps->spaces[i].map);
        free(maps->spaces);
        *maps = (struct maps){0};
}

static int list_spaces(struct kvctl *kvctl, struct maps *maps) {
        struct kvd_msg_space_info_reply info;
        uint32_t cursor = 0;
        int r;

        while ((r = kvctl_next_space(kvctl, &cursor, &info)) == 1) {
                struct space_map *grown = realloc(maps->spaces, (maps->n + 1) * sizeof *grown);

                if (!grown)
                        return kvctl_out_of_memory(kvctl);
                maps->spaces = grown;
                maps->spaces[maps->n++] =
                        (struct space_map){space_name_of(&info), info.block_bytes, {0}};
        }
        return r;
}

/* A space that was deleted meanwhile has no blocks. */
int maps_read(struct kvctl *kvctl, bool ages, struct maps *ret) {
        int r = list_spaces(kvctl, ret);

        for (size_t i = 0; i < ret->n && r == 0; i++) {
                r = map_read(kvctl, &ret->spaces[i].name, ages, &ret->spaces[i].map);
                if (r == -ENOENT && kvctl->exit != KVCTL_NO_DAEMON)
                        r = 0;
        }
        return r;
}

struct map_sums maps_sum(const struct maps *maps, const struct kvd_msg_space_info_reply *of) {
        struct space_name name = space_name_of(of);

        for (size_t i = 0; i < maps->n; i++)
                if (space_name_equal(&maps->spaces[i].name, &name))
                        return map_sum(&maps->spaces[i].map);
        return (struct map_sums){0};
}

struct map_sums maps_bytes(const struct maps *maps) {
        struct map_sums all = {0};

        for (size_t i = 0; i < maps->n; i++) {
                struct map_sums sums = map_sum(&maps->spaces[i].map);

                all.held += sums.held * maps->spaces[i].block_bytes;
                all.evictable += sums.evictable * maps->spaces[i].block_bytes;
                all.filling += sums.filling * maps->spaces[i].block_bytes;
        }
        return all;
}

void maps_ages(const struct maps *maps, uint64_t bytes[MAP_AGES]) {
        memset(bytes, 0, MAP_AGES * sizeof *bytes);
        for (size_t i = 0; i < maps->n; i++) {
                const struct map *map = &maps->spaces[i].map;

                for (uint32_t id = 0; map->ages && id < map->n; id++)
                        if (map_state(map, id) == KVD_SEALED && map->ages[id] != UINT8_MAX)
                                bytes[MIN(map->ages[id], MAP_AGES - 1)] +=
                                        maps->spaces[i].block_bytes;
        }
}

/* Adds the blocks of one space that the client's pins keep. */
static int walk_pins(struct kvctl *kvctl, struct space_map *space, struct kvd_msg_pins request,
                     uint64_t *blocks) {
        struct kvd_msg_pins_reply reply;
        int r;

        request.space = kvd_slice_of(space->name.name);
        request.domain = kvd_slice_of(space->name.domain);
        space->map.walks++;
        do {
                r = kvctl_next(kvctl, KVD_MSG_pins, &request, &reply);
                if (r != 1)
                        return r;
                for (uint32_t i = 0, id; i < reply.ids.size / sizeof id; i++) {
                        memcpy(&id, (const uint8_t *)reply.ids.data + i * sizeof id, sizeof id);
                        *blocks += walk(&space->map, id);
                }
                request.first = reply.next;
        } while (request.first);
        return 0;
}

int maps_held_by(struct kvctl *kvctl, struct maps *maps, uint32_t client, const char *domain,
                 uint64_t *bytes) {
        struct kvd_msg_pins request = {.client = client, .client_domain = kvd_slice_of(domain)};

        *bytes = 0;
        for (size_t i = 0; i < maps->n; i++) {
                uint64_t blocks = 0;
                int r = walk_pins(kvctl, &maps->spaces[i], request, &blocks);

                if (r < 0)
                        return r;
                *bytes += blocks * maps->spaces[i].block_bytes;
        }
        return 0;
}
