/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What a block is worth to policies that go by worth: attention mass and selections, which clients
 * report in their pin pages, and KeyDiff's score. Blocks of chains are not ranked, since many
 * sequences use them. A client that reports wrong values only affects the order of eviction.
 */

#include <string.h>

#include "ipc/base/settings.h"
#include "store/cache/inside.h"

struct kvd_use block_use(const struct attachment *a, uint32_t id) {
        uint32_t word = atomic_load_explicit(&a->use[id], memory_order_relaxed);
        struct kvd_use use;

        memcpy(&use, &word, sizeof use);
        return use;
}

/* Maps a signal to 0 to 1; the average, 256, becomes 0.5. */
static double squash(uint32_t v) {
        return (double)v / (v + 256);
}

/* The weight of a signal; 0 if it has no value. */
static double weight_of(const struct space *space, enum kvd_setting which, uint32_t value) {
        return value ? kvd_setting_get(space->ix->settings, which) : 0;
}

double block_worth(const struct space *space, uint32_t id) {
        uint32_t score = space->blocks[id].score;
        struct kvd_use most = {0};
        double mass, hits, keydiff;

        for (struct attachment *a = NULL; (a = users_next(space, id, a));) {
                struct kvd_use use = {0};

                if (a->state != FOLDING)
                        use = block_use(a, id);
                most.mass = MAX(most.mass, use.mass);
                most.hits = MAX(most.hits, use.hits);
        }
        mass = weight_of(space, KVD_pressure_mass, most.mass);
        hits = weight_of(space, KVD_pressure_hits, most.hits);
        keydiff = weight_of(space, KVD_pressure_keydiff, score);
        if (mass + hits + keydiff <= 0)
                return 0.5;
        return (mass * squash(most.mass) + hits * squash(most.hits) +
                keydiff * score / UINT16_MAX) /
               (mass + hits + keydiff);
}
