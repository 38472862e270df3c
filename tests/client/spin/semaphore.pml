/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Order: blocks on a GPU are sealed before their data is there. A reader reads a block's data, or is told that the
 * data never came. The steps P1 to P3, R1 to R5 and O1 to O8 are named in store/cache/semaphore.c; they are the same
 * here.
 *
 * One block is filled twice. Client A seals it, at any time before or after its stream has written data and slot, and
 * may be killed at any time. Its queued GPU work then continues for a while, and stops anywhere. Client B fills the
 * block again, with A's row of the semaphore page if A is dead. A reader looks twice, and waits only in its stream.
 *
 * Pinning is a single step here; pins.pml covers it. Memory order needs no model beyond the order of the steps: the
 * daemon's stores are releases, and a stream's writes become visible in its order (system scope).
 *
 * Broken on purpose, each must fail: -DSEAL_FIRST -DCLEAR_EARLY -DNO_QUARANTINE -DNO_POISON -DRELEASE_FIRST -DNO_WAIT
 * -DNO_CHECK -DCHECK_FIRST -DEVICT_PENDING -DUNPIN_EARLY; and -DNO_RELEASE and -DROW_EARLY leave a process waiting.
 */
#define NONE 0

byte data;                              /* owner of the bytes: 1 A, 2 B */
byte slot[2];                           /* of the semaphore page: A's row and another */
byte word;                              /* slot word: 0 if FREE or FILLING, the sealer's number if SEALED */
bool found;                             /* whether the block is in the index */
byte order_row, order_value;            /* of the descriptor; value 0: the data is there */
bool poisoned;
byte pins;

bool a_dead, a_over, b_runs, finished, read_all;
byte b_row, b_value;
chan seal = [2] of { byte };

proctype stream_a() {
        if
        :: data = 1                                             /* P1 */
        :: a_dead -> goto over
        fi;
        if
        :: slot[0] = 1                                          /* P2 */
        :: a_dead -> goto over
        fi;
over:   a_over = true
}

proctype client_a() {
        if
        :: seal ! 1                                             /* P3 */
        :: skip
        fi;
        if
        :: a_dead = true
        :: len(seal) == 0 && word != 0 -> skip                  /* it lives on, and has sealed */
        fi
}

proctype stream_b() {
        b_runs;
        data = 2;
        slot[b_row] = b_value
}

#ifdef SEAL_FIRST
#define O1(by, row, value) word = by; found = true; order_row = row; order_value = value
#else
#define O1(by, row, value) order_row = row; order_value = value; word = by; found = true
#endif

#ifdef NO_QUARANTINE
#define OVER (a_dead)
#else
#define OVER (a_dead && a_over)                                 /* O3 */
#endif

#define GIVE_ROW atomic { b_row = (a_dead -> 0 : 1); b_value = (a_dead -> 2 : 1); b_runs = true } /* O8 */

proctype daemon() {
        if
        :: seal ? 1 ->
                O1(1, 0, 1);
#ifdef CLEAR_EARLY
                order_value = 0;
#endif
                if
                :: slot[0] >= 1 -> order_value = 0              /* O2 */
#ifdef EVICT_PENDING
                :: skip
#endif
                :: OVER && len(seal) == 0 ->
                        if
                        :: slot[0] >= 1 -> order_value = 0      /* O4 */
                        :: slot[0] < 1 ->
#ifdef RELEASE_FIRST
                                slot[0] = 1;
#endif
#ifndef NO_POISON
                                poisoned = true;                /* O5 */
#endif
                                found = false;                  /* O6 */
#ifdef ROW_EARLY
                                atomic { pins == 0 -> word = 0; poisoned = false };
                                GIVE_ROW;
#endif
#if !defined(NO_RELEASE) && !defined(RELEASE_FIRST)
                                slot[0] = 1;                    /* O7 */
#endif
#ifdef ROW_EARLY
                                goto filled
#endif
                        fi
                fi
        :: OVER && len(seal) == 0                               /* never sealed, so discarded, see fill.pml */
        fi;
        atomic { pins == 0 -> word = 0; found = false; poisoned = false; order_value = 0 };     /* evicted */
        GIVE_ROW;
#ifdef ROW_EARLY
filled:
#endif
        O1(2, b_row, b_value);
        slot[b_row] >= b_value;
        order_value = 0;
        finished = true
}

proctype reader() {
        byte n, who, row, value, got;
        bool bad;

        do
        :: n < 2 ->
                n++;
                if
                :: atomic { word != 0 && found -> who = word; pins++ };         /* R1 */
                        value = order_value;                                    /* R2 */
                        row = order_row;
#ifdef CHECK_FIRST
                        bad = poisoned;
#endif
#ifdef UNPIN_EARLY
                        pins--;
#endif
#ifndef NO_WAIT
                        value == 0 || slot[row] >= value;                       /* R3 */
#endif
                        got = data;                                             /* R4 */
#if !defined(CHECK_FIRST) && !defined(NO_CHECK)
                        bad = poisoned;                                         /* R5 */
#endif
                        assert(bad || got == who);
#ifndef UNPIN_EARLY
                        pins--
#endif
                :: skip
                fi;
                d_step { who = 0; row = 0; value = 0; got = 0; bad = false }
        :: else -> break
        od;
        read_all = true
}

init {
        atomic { run daemon(); run client_a(); run stream_a(); run stream_b(); run reader() }
}

/* Whichever process dies, the readers continue, and the block comes back. */
ltl goes_on { <> (finished && read_all) }
