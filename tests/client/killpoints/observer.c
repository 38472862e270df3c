/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The client that must not notice that others die: it holds a chain, finds theirs, and checks every
 * byte of both.
 */

#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "tests/client/killpoints/actor.h"
#include "tests/client/killpoints/chains.h"
#include "tests/client/killpoints/elsewhere.h"
#include "tests/lib/instance.h"

struct observer {
        struct stage *stage;
        struct kvd_space *causal, *whole;
        struct kvd_pin held; /* the observer's own chain */
        uint32_t held_tokens[OBSERVER_BLOCKS * BT], held_ids[OBSERVER_BLOCKS];
        uint32_t daemon; /* under which it was sealed */
};

static void check(struct observer *o, const struct kvd_pin *pin, const uint32_t *ids,
                  const uint32_t *tokens, bool whole) {
        o->stage->bytes_wrong += chain_wrong(pin, ids, tokens, whole);
        o->stage->bytes_checked += pin->n_blocks * pin->block_bytes;
}

/* ---- what it holds --------------------------------------------------------------------------- */

static int hold_again(struct observer *o) {
        int r;

        kvd_unpin(o->causal, &o->held);
        r = chain_publish(o->causal, &o->held, o->held_tokens, OBSERVER_BLOCKS * BT, false);
        if (r < 0)
                return r;
        kvd_unpin(o->causal, &o->held); /* for the ids */
        r = (int)kvd_lookup(o->causal, 0, o->held_tokens, OBSERVER_BLOCKS * BT, o->held_ids,
                            OBSERVER_BLOCKS, &o->held);
        return r == (int)(OBSERVER_BLOCKS * BT) ? 0 : -EAGAIN;
}

/* Calls that need the daemon are what attaches a space to a new one. */
static int attach_whole(struct observer *o) {
        int r = kvd_lease(o->whole, o->held_tokens, 1, 0);

        return r < 0 ? r : kvd_lease_end(o->whole, o->held_tokens, 1);
}

static void settle(struct observer *o) {
        uint32_t daemon = o->stage->daemon;

        if (daemon == o->daemon)
                return;
        for (int i = 0; hold_again(o) < 0 || attach_whole(o) < 0; i++)
                if (i == 100)
                        die("the observer cannot settle: %s", kvd_error());
        o->daemon = daemon;
        o->stage->settled = daemon;
}

/* ---- what others do -------------------------------------------------------------------------- */

static void look(struct observer *o, struct kvd_space *space, uint32_t chain, uint32_t n_tokens) {
        uint32_t tokens[CHAIN_TOKENS], ids[CHAIN_BLOCKS];
        struct kvd_pin pin = {0};

        chain_tokens(chain, n_tokens, tokens);
        kvd_catch_up(space);
        if (kvd_lookup(space, 0, tokens, n_tokens, ids, CHAIN_BLOCKS, &pin) > 0)
                check(o, &pin, ids, tokens, space == o->whole);
        kvd_unpin(space, &pin);
        o->stage->looks++;
}

static void watch(struct observer *o) {
        while (!o->stage->stop) {
                settle(o);
                check(o, &o->held, o->held_ids, o->held_tokens, false);
                look(o, o->causal, OPERATION_CHAIN, CHAIN_TOKENS);
                look(o, o->causal, OPERATION_CHAIN + 1, CHAIN_TOKENS);
                look(o, o->whole, WHOLE_CHAIN, WHOLE_TOKENS);
                usleep(200); /* the others need processors, too */
        }
}

pid_t observer_start(const char *socket, struct stage *stage) {
        struct observer o = {.stage = stage};
        pid_t pid = fork();

        if (pid)
                return pid;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        chain_tokens(OBSERVER_CHAIN, OBSERVER_BLOCKS * BT, o.held_tokens);
        open_spaces(socket, &o.causal, &o.whole);
        watch(&o);
        _exit(0);
}
