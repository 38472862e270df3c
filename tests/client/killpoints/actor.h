/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KILLPOINTS_ACTOR_H
#define KVD_TESTS_KILLPOINTS_ACTOR_H

/*
 * Who dies, or is stopped: one operation of libkvd in a process of its own, after the preparations
 * that it needs. The list is operations[] in actor.c.
 */

#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Shared by the test, its actors and its observer. */
struct stage {
        _Atomic uint64_t points;    /* of the operation, as counted */
        _Atomic uint64_t survived;  /* operations that had fewer points this time */
        _Atomic bool prepared;      /* the operation begins now */
        _Atomic uint32_t daemon;    /* which daemon it is: 1, 2, ... */
        /* the daemon with which the observer has its chain in the cache */
        _Atomic uint32_t settled;
        _Atomic uint64_t looks, bytes_checked; /* the observer's */
        _Atomic uint64_t bytes_wrong;          /* anybody's */
        _Atomic bool stop;
        sem_t asked, rested, resumed;          /* for observer_rest, observer_resume */
};

#define CAUSAL_SPACE "causal"
#define WHOLE_SPACE "whole" /* bidirectional */
#define OPERATION_CHAIN 0u  /* what operations look up and publish: this chain and its family */
#define WHOLE_CHAIN 8u
#define OBSERVER_CHAIN 40u
/* as many as the library takes at once: none are left over in its stock */
#define OBSERVER_BLOCKS 32u
#define WHOLE_TOKENS 80u
#define CAUSAL_BLOCKS 1024u /* four segments: in arenas each client here has one */

struct actor;

struct operation {
        const char *name;
        int (*prepare)(struct actor *);
        int (*run)(struct actor *);    /* negative: failed, as kvd.h says */
        /* bytes that it holds afterwards and that are not what they must be */
        size_t (*wrong)(struct actor *);
        /* another process; writes a byte when ready */
        void (*partner)(const char *socket, struct stage *, int ready);
        bool restart;                  /* a new daemon between prepare and run */
};

extern const struct operation operations[]; /* ends with a name of NULL */

/*
 * Starts a process that prepares, runs the operation, gets the signal at its nth point, and is dead
 * at the end of it at the latest. nth = 0 counts into stage->points. turn: -1, or a socket on which
 * a byte goes out when all is prepared, and one comes back to go on. shake: 0, or a seed for pauses
 * at random points.
 */
pid_t actor_start(const struct operation *op, const char *socket, struct stage *stage, uint64_t nth,
                  int signal, int turn, uint64_t shake);

/* Watches as another client of the same spaces, until stage->stop. */
pid_t observer_start(const char *socket, struct stage *stage);

/*
 * Makes the observer check everything once more, then pause until observer_resume. While it is
 * paused it pins only its own chain, however long it has to wait for a processor.
 */
void observer_rest(struct stage *stage);
void observer_resume(struct stage *stage);

#endif
