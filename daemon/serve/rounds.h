/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_ROUNDS_H
#define KVD_DAEMON_SERVE_ROUNDS_H

/*
 * A client's first post after the daemon has looked at its ring sends a message, which wakes the
 * daemon. If messages would wake it more often than every ROUND_NS, it polls the rings at that
 * interval instead (rounds). A ring is `told` while it is polled and its client posts without
 * messages. Rounds end when they find too little. If clients post often, but little each time, they
 * wait for each post; then no rounds begin for a while, and each such pause is twice as long as the
 * last one.
 */

#include "daemon/base/loop.h"
#include "daemon/serve/turns.h"

#define ROUND_NS UINT64_C(2000000)

struct client;

struct rounds {
        struct loop *loop;
        struct turns *turns;
        struct loop_timer timer;    /* of the next round; set while there are clients */
        struct kvd_list clients;    /* clients whose rings are polled */
        uint64_t since_ns;          /* start of the interval in which kicks are counted */
        uint32_t kicks;             /* messages about posts */
        uint32_t n, found, posts;   /* since end_some: rounds, clients found with posts, posts */
        uint64_t rest_ns, again_ns; /* length of the pause without rounds, and its end */
};

void rounds_init(struct rounds *rounds, struct loop *loop, struct turns *turns);
void rounds_stop(struct rounds *rounds);

/* The client has sent a message about posts. */
void rounds_kicked(struct rounds *rounds, struct client *client);
/* Ends the polling of its rings: make them send messages again, unless the client cannot post. */
void rounds_leave(struct client *client);

#endif
