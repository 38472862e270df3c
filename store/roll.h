/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_ROLL_H
#define KVD_STORE_ROLL_H

/* Spaces in order of creation, each with a number that is never used again. */

#include <stdint.h>

struct space;

struct roll { /* zeroed: empty */
        struct roll_entry {
                uint32_t number;
                struct space *space;
        } * at; /* owned; numbers ascend */
        uint32_t n, room, next_number;
};

int roll_make_room(struct roll *roll);                       /* for one more entry; 0 or -ENOMEM */
uint32_t roll_enter(struct roll *roll, struct space *space); /* returns its number */
void roll_leave(struct roll *roll, uint32_t number);
void roll_free(struct roll *roll);

/* The first whose number is at least that, or NULL. */
struct space *roll_from(const struct roll *roll, uint32_t number);

#endif
