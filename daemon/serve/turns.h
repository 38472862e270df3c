/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_TURNS_H
#define KVD_DAEMON_SERVE_TURNS_H

/*
 * Schedules clients: serves the user with the least cost so far, and of its connections the one
 * that has waited longest. Needs no memory but the structs of users and connections.
 */

#include <stdbool.h>
#include <stdint.h>

#include "ipc/base/list.h"

#define TURNS_SLICE_NS UINT64_C(100000) /* of work before the loop polls its sockets again */
/* Maximum cost of one piece of work: longer times include time not spent working (test-budget). */
#define TURNS_MOST_NS UINT64_C(3000000)

struct turns_user {
        uint64_t cost_ns;          /* on the virtual clock of all users, see turns.c */
        struct kvd_list waiting;   /* its connections that wait */
        struct kvd_list_node node; /* in turns.users, while one of its connections waits */
};

struct turns_place {
        struct turns_user *user;
        struct kvd_list_node node; /* in the user's waiting list */
};

struct turns {
        struct kvd_list users; /* with waiting connections; lowest cost first */
        uint64_t now_ns;       /* virtual time: cost_ns of the user served last */
        uint64_t cpu_ns;       /* CPU time of this thread, approximately; 0: not measured */
        /* Serves one request. True: the place waits for another turn. */
        bool (*serve)(struct turns_place *place);
};

void turns_add(struct turns *turns, struct turns_place *place); /* may wait already */
void turns_remove(struct turns *turns, struct turns_place *place);

/* Charges the user for work outside of turns_run; counts at most TURNS_MOST_NS. */
void turns_charge(struct turns *turns, struct turns_user *user, uint64_t ns);

/* Serves for a slice of time. True: clients still wait. */
bool turns_run(struct turns *turns);
bool turns_wanted(const struct turns *turns); /* does any client wait? */

#endif
