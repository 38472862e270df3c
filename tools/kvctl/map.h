/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_MAP_H
#define KVCTL_MAP_H

/*
 * The state of every block of a space, and whether it is held. Eviction starts at the ends of
 * chains, so a pin keeps the whole chain before it: held blocks are found by walking from the pins
 * towards the beginnings. The daemon sends its tables in pieces; kvctl does the walk.
 */

#include "ipc/base/layout.h"
#include "tools/kvctl/kvctl.h"

#define MAP_PINNED 16u /* as in message block_map */
#define MAP_LEAF 32u
#define MAP_KEPT 64u
#define MAP_HELD 128u /* set by kvctl: sealed, and eviction cannot take it */

struct map {
        uint8_t *states;
        uint32_t *parents, *stamps; /* stamps: number of the last walk that visited the block */
        uint8_t *ages; /* bit length of the ticks since the last use; 255: not cached; or NULL */
        uint32_t n, walks;
};

/* Reads the map of a space, with ages or without, and finds its held blocks. */
int map_read(struct kvctl *kvctl, const struct space_name *space, bool ages, struct map *ret);
void map_clear(struct map *map);

static inline enum kvd_state map_state(const struct map *map, uint32_t id) {
        return (enum kvd_state)(map->states[id] & (MAP_PINNED - 1));
}

struct map_sums {
        uint64_t held, evictable; /* sealed, and in use or not */
        uint64_t filling;         /* or in limbo */
};
struct map_sums map_sum(const struct map *map);

/* ---- all spaces that --domain selects -------------------------------------------------------- */

struct space_map {
        struct space_name name;
        uint64_t block_bytes;
        struct map map;
};

struct maps {
        struct space_map *spaces;
        size_t n;
};

int maps_read(struct kvctl *kvctl, bool ages, struct maps *ret);
void maps_clear(struct maps *maps);
/* blocks of one space */
struct map_sums maps_sum(const struct maps *maps, const struct kvd_msg_space_info_reply *of);
struct map_sums maps_bytes(const struct maps *maps); /* bytes of all spaces */

/* Bytes of cached blocks by age; the last element includes all older blocks. */
#define MAP_AGES 24u
void maps_ages(const struct maps *maps, uint64_t bytes[MAP_AGES]);

/* Bytes of sealed blocks that a client's pins keep, each counted once. */
int maps_held_by(struct kvctl *kvctl, struct maps *maps, uint32_t client, const char *domain,
                 uint64_t *bytes);

#endif
