/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Each space has a clock of its own, and blocks are stamped with it. To find the coldest blocks of
 * several spaces, this file compares stamps of different clocks. Every tick of any space also moves
 * the store's clock, and a space remembers the store's clock for some values of its own. Only the
 * order of ticks counts, so a domain without rivals cannot observe the ticks of others.
 */

#include <string.h>

#include "store/cache/inside.h"

/* Counts the oldest entries that describe only evicted blocks. */
static uint32_t outlived(const struct space *space) {
        const struct ages *ages = &space->leaves.ages;
        uint32_t n = 0;

        while (n + 1 < ages->n && ages->at[n + 1].clock <= ages->coldest)
                n++;
        return n;
}

/* Makes room for one more: drops outlived entries or, if there are none, every other entry. */
static void make_room(struct space *space) {
        struct ages *ages = &space->leaves.ages;
        uint32_t n = outlived(space);

        if (n) {
                ages->n -= n;
                memmove(ages->at, ages->at + n, ages->n * sizeof *ages->at);
                if (ages->n < AGES / 4 && ages->step > 1)
                        ages->step /= 2;
                return;
        }
        for (ages->n /= 2; n < ages->n; n++)
                ages->at[n] = ages->at[2 * n];
        ages->step *= 2;
}

/*
 * Uses between two ticks have the same age. Allocations tick, but do not separate one request of an
 * engine from the next, since most are served from the client's magazine. Seals tick too: every
 * request that stores anything seals it.
 */
void space_tick(struct space *space) {
        struct ages *ages = &space->leaves.ages;

        space->clock++;
        atomic_store_explicit(&space->ix->clock, (uint32_t)space->clock, memory_order_relaxed);
        ages->last = ++space_store(space)->spaces.clock;
        if (ages->n && space->clock < ages->at[ages->n - 1].clock + ages->step)
                return;
        if (ages->n == AGES)
                make_room(space);
        ages->step = MAX(ages->step, 1);
        ages->at[ages->n++] = (struct age){space->clock, ages->last};
}

/*
 * Called at intervals, so that the clock of a space that is only read moves as well. True: the
 * space was used since the last call.
 */
bool space_age(struct space *space, uint64_t pins) {
        struct ages *ages = &space->leaves.ages;

        if (ages->looked == space->clock && ages->pins == pins)
                return false;
        space_tick(space);
        ages->looked = space->clock;
        ages->pins = pins;
        return true;
}

uint64_t clock_when(const struct space *space, uint64_t clock) {
        const struct ages *ages = &space->leaves.ages;
        uint32_t i = ages->n;

        while (i > 0 && ages->at[i - 1].clock > clock)
                i--;
        return i ? ages->at[i - 1].when : 1;
}

uint64_t clock_before(const struct space *space, uint64_t when, bool used) {
        const struct ages *ages = &space->leaves.ages;
        uint32_t i = ages->n;

        if (ages->last < when)
                return used ? space->clock : ANY_CLOCK;
        while (i > 0 && ages->at[i - 1].when > when)
                i--;
        return i ? ages->at[i - 1].clock : 0;
}
