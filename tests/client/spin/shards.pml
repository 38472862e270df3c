/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Shards: two streams, of two processes, each write one shard of a block and keep a promise of their own. A reader of
 * either shard reads what was written there, or is told that some of the block was never written. The steps are those
 * of semaphore.pml, in store/cache/semaphore.c.
 *
 * Process 0 seals, at any time while it lives, with both promises. Either process may be killed at any time; its queued
 * GPU work then continues for a while, and stops anywhere. The other one lives on, and its stream as well.
 *
 * Broken on purpose, each must fail: -DWAIT_FOR_ONE -DARRIVE_EARLY -DNO_POISON -DRELEASE_FIRST -DNO_CHECK; and
 * -DNO_RELEASE and -DSEAL_ENDED leave a process waiting. (What is never used again needs no quarantine: semaphore.pml.)
 */
bool data[2], slot[2];                  /* by stream */
bool dead[2], over[2];                  /* by process, and its stream */
bool ended[2];                          /* the daemon has resolved its promises */
bool sealed, found, pending, poisoned;  /* pending: the descriptor names a semaphore */
bool settled;
byte read_all;

proctype stream(byte i) {
        if
        :: data[i] = true                                       /* P1 */
        :: dead[i] -> goto done
        fi;
        if
        :: slot[i] = true                                       /* P2 */
        :: dead[i]
        fi;
done:   over[i] = true
}

proctype killer(byte i) {
        if
        :: dead[i] = true
        :: skip
        fi
}

#define OVER(i) (dead[i] && over[i])                            /* O3 */

#ifdef ARRIVE_EARLY
#define KEPT (slot[0])
#else
#define KEPT (slot[0] && slot[1])
#endif

#ifdef NO_RELEASE
#define O7(i) skip
#else
#define O7(i) slot[i] = sealed || slot[i]
#endif

#ifdef NO_POISON
#define O5 skip
#else
#define O5 poisoned = true
#endif

#ifdef RELEASE_FIRST
#define LOSE(i) O7(i); O5; found = false
#else
#define LOSE(i) O5; found = false; O7(i)                        /* O5 to O7 */
#endif

#define END(i) \
        OVER(i) && !ended[i] -> ended[i] = true; \
                if \
                :: sealed && pending && !slot[i] -> LOSE(i)     /* O4 */ \
                :: else -> skip \
                fi

#ifdef SEAL_ENDED
#define MAY_SEAL (!sealed)
#else
#define MAY_SEAL (!sealed && !ended[0] && !ended[1])
#endif

proctype daemon() {
        do
        :: MAY_SEAL && !dead[0] -> pending = true; sealed = true; found = true          /* O1 */
        :: END(0)
        :: END(1)
        :: sealed && pending && KEPT -> pending = poisoned      /* O2 */;
                break
        :: !sealed && (ended[0] || ended[1]) && !MAY_SEAL -> break
        od;
        settled = true
}

proctype reader(byte i) {
        bool waits, got, bad;

        if
        :: sealed && found ->                                   /* R1 */
                waits = pending;                                /* R2 */
#ifdef WAIT_FOR_ONE
                !waits || slot[0];
#else
                !waits || (slot[0] && slot[1]);                 /* R3 */
#endif
                got = data[i];                                  /* R4 */
#ifndef NO_CHECK
                bad = poisoned;                                 /* R5 */
#endif
                assert(bad || got)
        :: settled
        fi;
        read_all++
}

init {
        atomic {
                run daemon();
                run killer(0);
                run killer(1);
                run stream(0);
                run stream(1);
                run reader(0);
                run reader(1)
        }
}

/* Whichever process dies, the readers and the daemon continue. */
ltl goes_on { <> (settled && read_all == 2) }
