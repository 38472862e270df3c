/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_ROUNDS_H
#define KVD_DAEMON_SERVE_ROUNDS_H

/*
 * A client that posts says so once, and the daemon wakes. Where so many do that it would wake more
 * often than every ROUND_NS, it leaves them told, and looks at their rings by itself that often:
 * they post without a message, and it sleeps meanwhile. When little is posted, it is woken again,
 * and for longer each time that it is so: whoever posts little but often waits for what he posts.
 */

#include "daemon/base/loop.h"
#include "daemon/serve/turns.h"

#define ROUND_NS UINT64_C(2000000)

struct client;

struct rounds {
        struct loop *loop;
        struct turns *turns;
        struct loop_timer timer;     /* of the next round; set while there are any */
        struct kvd_list clients;     /* whose rings are looked at */
        uint64_t since_ns;           /* clients said that they posted, since then: */
        uint32_t kicks;
        uint32_t n, found, posts;    /* rounds since clients last left, rings with something, and how much */
        uint64_t rest_ns, again_ns;  /* how long none began after such rounds, and until when */
};

void rounds_init(struct rounds *rounds, struct loop *loop, struct turns *turns);
void rounds_stop(struct rounds *rounds);

/* It has said that it posted something. */
void rounds_kicked(struct rounds *rounds, struct client *client);
/* Nobody looks any more: it has to be told so, or there is nobody who could post. */
void rounds_leave(struct client *client);

#endif
