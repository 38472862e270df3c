/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Lease: the first client that misses a bidirectional prefix computes it, the others wait, and none waits forever.
 *
 * This lease saves work but protects no bytes. So unlike a pin it may end early: when its holder seals the prefix or
 * gives up, or when the holder's socket closes or its process is gone. A waiter also stops waiting at its deadline,
 * because a holder may be stopped (SIGSTOP), neither finished nor dead.
 *
 *   client: ask                                    daemon
 *   L1  ask for the prefix                         G1  stored: answer HIT
 *   L2  HIT: use it. COMPUTE: I hold the lease.    G2  no client holds the lease: answer COMPUTE
 *       ALONE: compute for myself                  G3  a client holds it: no answer yet, a waiter
 *   L3  compute, then seal or give up              G4  sealed: HIT to every waiter
 *                                                  G5  given up, or the holder is lost: COMPUTE to one waiter
 *                                                  G6  a waiter's deadline: ALONE
 *
 * Broken on purpose: -DLEASE_OUTLIVES_HOLDER -DNO_DEADLINE -DNO_WAKE leave a waiter waiting;
 * -DNO_WAIT gives two live clients the lease.
 */
#define NC 3
#define NOBODY NC

mtype = { ASK, SEALED, GAVE_UP, HIT, COMPUTE, ALONE };

chan request = [NC] of { mtype, byte };
chan answer[NC] = [1] of { mtype };

bool lost[NC];                          /* socket closed or process gone, which are the same for a lease */
bool stopped[NC];
bool done[NC];
bool computing[NC];                     /* under the lease */

/*
 * A process, not a choice of the client: a client that waits in vain would be forced to choose
 * death, which would hide the error.
 */
bool kill[NC];
proctype fate(byte c) {
        if
        :: kill[c] = true
        :: skip
        fi
}

#define STEP(x) if :: x :: kill[me] -> goto killed fi

proctype client(byte me) {
        mtype a;

        STEP(request ! ASK(me));                                /* L1 */
        STEP(answer[me] ? a);                                   /* L2 */
        if
        :: a == COMPUTE ->
                computing[me] = true;
                assert(computing[0] + computing[1] + computing[2] == 1);
                if                                              /* L3 */
                :: skip
                :: stopped[me] = true; goto end
                :: kill[me] -> goto killed
                fi;
                computing[me] = false;
                if
                :: STEP(request ! SEALED(me))
                :: STEP(request ! GAVE_UP(me))
                fi
        :: else
        fi;
        done[me] = true;
        goto end;

killed: atomic { computing[me] = false; lost[me] = true };
end:    skip
}

byte holder = NOBODY;
bool waiting[NC], stored;

inline say(c, what) {
        waiting[c] = false;
        if
        :: !lost[c] -> answer[c] ! what
        :: else
        fi
}

inline pass_on() {
        holder = NOBODY;
        if
        :: waiting[0] -> holder = 0; say(0, COMPUTE)
        :: waiting[1] -> holder = 1; say(1, COMPUTE)
        :: waiting[2] -> holder = 2; say(2, COMPUTE)
        :: else
        fi
}

#ifdef LEASE_OUTLIVES_HOLDER
#define LOST(c) false
#else
#define LOST(c) (c != NOBODY && lost[c])
#endif
#ifdef NO_DEADLINE
#define LATE(c) false
#else                                   /* longer than computing takes, so only a stopped holder exceeds it */
#define LATE(c) (waiting[c] && holder != NOBODY && stopped[holder])
#endif

active proctype daemon() {
        byte c;

end:    do
        :: atomic {
                request ? ASK(c) ->
                if
                :: stored -> say(c, HIT)                        /* G1 */
#ifdef NO_WAIT
                :: !stored -> holder = c; say(c, COMPUTE)
#else
                :: !stored && holder == NOBODY -> holder = c; say(c, COMPUTE)   /* G2 */
                :: !stored && holder != NOBODY -> waiting[c] = true             /* G3 */
#endif
                fi
           }
        :: atomic {
                request ? SEALED(c) ->                          /* G4 */
                stored = true;
                holder = NOBODY;
#ifndef NO_WAKE
                for (c : 0 .. NC - 1) {
                        if
                        :: waiting[c] -> say(c, HIT)
                        :: else
                        fi
                }
#endif
           }
        :: atomic { request ? GAVE_UP(c) -> pass_on() }         /* G5 */
        :: atomic { LOST(holder) -> pass_on() }                 /* G5, D10 */
        :: atomic { LATE(0) -> say(0, ALONE) }                  /* G6 */
        :: atomic { LATE(1) -> say(1, ALONE) }
        :: atomic { LATE(2) -> say(2, ALONE) }
        od
}

init {
        byte c;

        atomic {
                for (c : 0 .. NC - 1) {
                        run client(c);
                        run fate(c)
                }
        }
}

#define OVER(c) (done[c] || lost[c] || stopped[c])
ltl answered { <> (OVER(0) && OVER(1) && OVER(2)) }
