/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_TURNS_H
#define KVD_DAEMON_SERVE_TURNS_H

/*
 * Who is served next: the user who has cost least so far, and of his connections the one that has
 * waited longest. All memory is in the structs of those who wait.
 */

#include <stdbool.h>
#include <stdint.h>

#include "ipc/base/list.h"

#define TURNS_SLICE_NS UINT64_C(100000) /* of work, before the loop looks at its sockets again */
#define TURNS_MOST_NS UINT64_C(3000000) /* what took longer was not working all the time: test-budget */

struct turns_user {
        uint64_t cost_ns;          /* on the clock of all users, see turns.c */
        struct kvd_list waiting;   /* his connections */
        struct kvd_list_node node; /* among the users, while one of his waits */
};

struct turns_place {
        struct turns_user *user;
        struct kvd_list_node node; /* in the user's */
};

struct turns {
        struct kvd_list users;     /* the cheapest first */
        uint64_t now_ns;           /* what those who are served have cost */
        uint64_t cpu_ns;           /* our processor time by now, about; 0: it was not read */
        /* Serves one request. May it have another one? Then it waits for its next turn. */
        bool (*serve)(struct turns_place *place);
};

void turns_add(struct turns *turns, struct turns_place *place); /* it may wait already */
void turns_remove(struct turns *turns, struct turns_place *place);

/* Work for the user that was no request; at most TURNS_MOST_NS count. */
void turns_charge(struct turns *turns, struct turns_user *user, uint64_t ns);

/* Serves for a slice of time; does anybody wait yet? */
bool turns_run(struct turns *turns);
bool turns_wanted(const struct turns *turns); /* does anybody wait? */

#endif
