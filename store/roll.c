/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A roll is an array of spaces with ascending numbers, for binary search by number. A new space
 * gets the highest number, so it is always the last one.
 */

#include "store/roll.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

int roll_make_room(struct roll *roll) {
        uint32_t room = MAX(2 * roll->room, 16u);
        struct roll_entry *at;

        if (roll->n < roll->room)
                return 0;
        at = sys->calloc(room, sizeof *at);
        if (!at)
                return -ENOMEM;
        if (roll->n)
                memcpy(at, roll->at, roll->n * sizeof *at);
        free(roll->at);
        roll->at = at;
        roll->room = room;
        return 0;
}

uint32_t roll_enter(struct roll *roll, struct space *space) {
        uint32_t number = roll->next_number++;

        roll->at[roll->n++] = (struct roll_entry){number, space};
        return number;
}

static uint32_t place_from(const struct roll *roll, uint32_t number) {
        uint32_t low = 0, high = roll->n;

        while (low < high) {
                uint32_t middle = (low + high) / 2;

                if (roll->at[middle].number < number)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low;
}

struct space *roll_from(const struct roll *roll, uint32_t number) {
        uint32_t place = place_from(roll, number);

        return place < roll->n ? roll->at[place].space : NULL;
}

void roll_leave(struct roll *roll, uint32_t number) {
        uint32_t place = place_from(roll, number);
        struct roll_entry *at = roll->at + place;

        memmove(at, at + 1, (--roll->n - place) * sizeof *at);
}

void roll_free(struct roll *roll) {
        free(roll->at);
        *roll = (struct roll){0};
}
