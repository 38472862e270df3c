/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KILLPOINTS_ACTOR_H
#define KVD_TESTS_KILLPOINTS_ACTOR_H

/*
 * The process that is killed or stopped: one operation of libkvd in its own process, after its
 * preparations. The operations are listed in actor.c.
 */

#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Shared by the test, its actors and its observer. */
struct stage {
        _Atomic uint64_t points;   /* of the operation, counted in a run without a signal */
        _Atomic uint64_t survived; /* operations that had fewer points this time */
        _Atomic bool prepared;     /* the operation begins */
        _Atomic uint32_t daemon;   /* number of the daemon: 1, 2, ... */
        /* number of the daemon under which the observer has its chain in the cache */
        _Atomic uint32_t settled;
        _Atomic uint64_t looks, bytes_checked; /* the observer's */
        _Atomic uint64_t bytes_wrong;          /* of all processes */
        _Atomic bool stop;
        sem_t asked, rested, resumed; /* for observer_rest, observer_resume */
};

#define CAUSAL_SPACE "causal"
#define WHOLE_SPACE "whole" /* bidirectional */
#define OPERATION_CHAIN 0u  /* operations look up and publish this chain and its relatives */
#define WHOLE_CHAIN 8u
#define OBSERVER_CHAIN 40u
/* as many as the library requests at once, so that none are left in its stock */
#define OBSERVER_BLOCKS 32u
#define WHOLE_TOKENS 80u
#define CAUSAL_BLOCKS 1024u /* four segments; with arenas, each client here has one */

struct actor;

struct operation {
        const char *name;
        int (*prepare)(struct actor *);
        int (*run)(struct actor *); /* negative: failed, see kvd.h */
        /* number of wrong bytes that it holds afterwards */
        size_t (*wrong)(struct actor *);
        /* another process; writes a byte when ready */
        void (*partner)(const char *socket, struct stage *, int ready);
        bool restart; /* whether the daemon is replaced between prepare and run */
};

extern const struct operation operations[]; /* the last name is NULL */

/*
 * Starts a process that prepares and runs the operation, gets the signal at the nth point, and is
 * dead at the end of the operation at the latest. nth = 0: counts the points into stage->points.
 * turn: -1, or a socket on which the process sends a byte when it is prepared, and waits for one
 * before it continues. shake: 0, or a seed for pauses at random points.
 */
pid_t actor_start(const struct operation *op, const char *socket, struct stage *stage, uint64_t nth,
                  int signal, int turn, uint64_t shake);

/* Starts another client of the same spaces, which checks blocks until stage->stop. */
pid_t observer_start(const char *socket, struct stage *stage);

/*
 * Makes the observer check everything once more, then pause until observer_resume. While it is
 * paused it pins only its own chain, however long it has to wait for a processor.
 */
void observer_rest(struct stage *stage);
void observer_resume(struct stage *stage);

#endif
