/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Polls rings at an interval, as network drivers do under load, so that the number of wake-ups does
 * not grow with the number of posts. A client with posts waits for its turn, as for a request
 * (turns.c). tests/client/spin/post.pml models the protocol of one ring: R1 to R7.
 */

#include "daemon/serve/rounds.h"

#include "daemon/serve/client.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define MANY 4u /* messages within ROUND_NS that make rounds begin */
/*
 * After every ROUNDS rounds: polling goes on if it has found clients with posts ROUNDS times, and
 * MANY posts each time on average.
 */
#define ROUNDS 16u
#define REST_FIRST_NS UINT64_C(32000000) /* as long as ROUNDS rounds */
#define REST_MOST_NS UINT64_C(1024000000)

static struct client *client_of(struct kvd_list_node *node) {
        return node ? container_of(node, struct client, round) : NULL;
}

static void set_timer(struct rounds *r) {
        if (r->clients.first)
                loop_timer_set(r->loop, &r->timer, sys_now_ns() + ROUND_NS);
}

/* R5. Returns the number of posts, and marks the rings that have some. */
static uint32_t posts_of(struct client *c) {
        uint32_t posts = 0;

        for (uint64_t left = c->told; left; left &= left - 1) {
                uint32_t n = attachment_posts(c->spaces[__builtin_ctzll(left)].attachment);

                c->rings |= n ? left & -left : 0;
                posts += n;
        }
        return posts;
}

static void look_at(struct rounds *r, struct client *c) {
        uint32_t posts = posts_of(c);

        if (!posts)
                return;
        c->posted = true;
        r->found++;
        r->posts += posts;
        turns_add(r->turns, &c->place);
}

void rounds_leave(struct client *c) {
        kvd_list_remove(&c->round);
        c->told = 0;
}

/* R6, R7. In its turn, all its rings are looked at once more, after they send messages again. */
static void send_away(struct rounds *r, struct client *c) {
        rounds_leave(c);
        c->rings = c->used;
        turns_add(r->turns, &c->place);
}

/* Clients wait for each post, and would post more without rounds: begins none for a while. */
static void rest(struct rounds *r) {
        r->rest_ns = MIN(MAX(2 * r->rest_ns, REST_FIRST_NS), REST_MOST_NS);
        r->again_ns = sys_now_ns() + r->rest_ns;
}

/* True: messages would cost no more than the rounds, or clients wait for their posts. */
static bool are_too_few(struct rounds *r) {
        if (r->found < ROUNDS)
                return true;
        if (r->posts < MANY * ROUNDS)
                rest(r);
        else
                r->rest_ns = 0;
        return r->rest_ns > 0;
}

/* Stops polling clients that have posted nothing since the last call, or all clients. */
static void end_some(struct rounds *r) {
        bool all = are_too_few(r);

        for (struct client *c = client_of(r->clients.first), *next; c; c = next) {
                next = client_of(c->round.next);
                if (all || !c->posted)
                        send_away(r, c);
                c->posted = false;
        }
        r->n = r->found = r->posts = 0;
}

static void begin_round(struct loop_timer *timer) {
        struct rounds *r = container_of(timer, struct rounds, timer);

        for (struct client *c = client_of(r->clients.first); c; c = client_of(c->round.next))
                look_at(r, c);
        if (++r->n == ROUNDS)
                end_some(r);
        set_timer(r);
}

void rounds_kicked(struct rounds *r, struct client *c) {
        uint64_t now = sys_now_ns();

        if (now - r->since_ns > ROUND_NS) {
                r->since_ns = now;
                r->kicks = 0;
        }
        if (c->round.in || (!r->clients.first && (++r->kicks < MANY || now < r->again_ns)))
                return;
        c->posted = true;
        kvd_list_insert(&r->clients, NULL, &c->round);
        if (!loop_timer_is_set(&r->timer))
                set_timer(r);
}

void rounds_init(struct rounds *r, struct loop *loop, struct turns *turns) {
        *r = (struct rounds){.loop = loop, .turns = turns, .timer.fire = begin_round};
}

void rounds_stop(struct rounds *r) {
        loop_timer_stop(&r->timer);
}
