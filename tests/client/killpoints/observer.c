/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The client that must not notice that others die. It holds a chain, looks up theirs, and checks
 * every byte of both.
 */

#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <time.h>
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
        uint32_t daemon; /* number of the daemon under which the chain was sealed */
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
        kvd_unpin(o->causal, &o->held); /* to look it up again, for the ids */
        r = (int)kvd_lookup(o->causal, 0, o->held_tokens, OBSERVER_BLOCKS * BT, o->held_ids,
                            OBSERVER_BLOCKS, &o->held);
        return r == (int)(OBSERVER_BLOCKS * BT) ? 0 : -EAGAIN;
}

/* A space attaches to a new daemon only by calls that need the daemon. */
static int attach_whole(struct observer *o) {
        int r = kvd_lease(o->whole, o->held_tokens, 1, 0);

        return r < 0 ? r : kvd_lease_end(o->whole, o->held_tokens, 1);
}

static void settle(struct observer *o) {
        uint32_t daemon = o->stage->daemon;

        if (daemon == o->daemon)
                return;
        for (int tries = 0; hold_again(o) < 0 || attach_whole(o) < 0; tries++) {
                if (tries == PATIENCE_MS)
                        die("the observer cannot settle: %s", kvd_error());
                usleep(1000);
        }
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

/* Waits for the semaphore. Returns false if it was not posted within us microseconds. */
static bool wait_for(sem_t *semaphore, uint64_t us) {
        struct timespec until;
        uint64_t ns;
        int r;

        clock_gettime(CLOCK_MONOTONIC, &until);
        ns = (uint64_t)until.tv_nsec + us * 1000;
        until.tv_sec += (time_t)(ns / 1000000000u);
        until.tv_nsec = (long)(ns % 1000000000u);
        do
                r = sem_clockwait(semaphore, CLOCK_MONOTONIC, &until);
        while (r < 0 && errno == EINTR);
        return r == 0;
}

static void rest(struct stage *stage) {
        sem_post(&stage->rested);
        while (sem_wait(&stage->resumed) < 0)
                ;
}

static void watch(struct observer *o) {
        bool asked = false;

        while (!o->stage->stop) {
                settle(o);
                check(o, &o->held, o->held_ids, o->held_tokens, false);
                look(o, o->causal, OPERATION_CHAIN, CHAIN_TOKENS);
                look(o, o->causal, OPERATION_CHAIN + 1, CHAIN_TOKENS);
                look(o, o->whole, WHOLE_CHAIN, WHOLE_TOKENS);
                if (asked)
                        rest(o->stage);
                asked = wait_for(&o->stage->asked, 200); /* leave the processors to others */
        }
}

void observer_rest(struct stage *stage) {
        sem_post(&stage->asked);
        if (!wait_for(&stage->rested, PATIENCE_MS * UINT64_C(1000)))
                die("the observer does not respond");
}

void observer_resume(struct stage *stage) {
        sem_post(&stage->resumed);
}

pid_t observer_start(const char *socket, struct stage *stage) {
        struct observer o = {.stage = stage};
        pid_t pid;

        sem_init(&stage->asked, 1, 0);
        sem_init(&stage->rested, 1, 0);
        sem_init(&stage->resumed, 1, 0);
        pid = fork();
        if (pid)
                return pid;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        chain_tokens(OBSERVER_CHAIN, OBSERVER_BLOCKS * BT, o.held_tokens);
        open_spaces(socket, &o.causal, &o.whole);
        watch(&o);
        _exit(0);
}
