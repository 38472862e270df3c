/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pins: while a client holds a block, the block's bytes are the ones it looked up.
 *
 * The C code names these steps. They are the same in all models of this directory.
 *
 *   client: look up and use                        daemon: evict, reuse, reap
 *   C1  read the slot word: SEALED? keep it        D1  choose a victim: SEALED, no resident child, no pin seen
 *   C2  compare the token ids (and, in a chain,    D2  slot word := RETIRING, same generation
 *       the parent link: id and generation)        D3  full fence
 *   C2b set the bit of the block's group, if it    D4  scan the pin page of every client not reaped whose
 *       is not set, by a locked instruction             bit is set
 *   C3  pins[b] += 1, in its own page
 *   C4  full fence                                 D5  a pin: slot word := SEALED, same generation
 *   C5  read the slot word again: the same? and    D6  none: unlink; slot word := FREE, generation + 1
 *       the page's epoch: still my index?          D7  hand the block out; its new owner fills it
 *   C6  use the bytes in place                     D8  parent still resident? write token ids, parent link
 *   C7  pins[b] -= 1                               D9  slot word := SEALED
 *   C8  C5 said no: pins[b] -= 1, a miss           D10 reap: the kernel says the process is gone and its
 *                                                      GPU work is over, so its page and blocks are free
 *                                                  D11 after a restart, before the first D2: store the new
 *                                                      index's number as the epoch of every page
 *
 * The argument is Dekker's: the client writes its pin, then reads the word; the daemon writes the word, then
 * reads the pins. With a full fence between write and read on both sides, at least one sees the other.
 *
 * Memory is x86-TSO: a store sits in a buffer of its processor until drain_...() moves it out. The buffers hold one
 * store. Longer ones would add only more late stores, and each fence waits for all of them. A client may be SIGKILLed
 * between any two shared accesses, its socket may close long before it stops reading, and its queued GPU work keeps
 * reading after its death. With -DTHREADS the clients are threads of one process, with one page.
 *
 * Broken on purpose, each must fail: -DNO_CFENCE -DNO_DFENCE -DNO_RECHECK -DNO_GEN -DNO_SCAN -DREAP_AT_EOF
 * -DTOKENS_FIRST -DGROUP_LATE; with -DTHREADS: -DPIN_IS_FLAG -DPIN_NOT_ATOMIC; and -DNEVER_REAP never gets the block back.
 */
#ifndef LOOKUPS
#define LOOKUPS 2                       /* by each client */
#endif
#ifndef LASTGEN
#define LASTGEN 3                       /* the daemon reuses the block LASTGEN - 1 times */
#endif
#define NC 2                            /* clients */

#define FREE     0                      /* or FILLING: the same to a reader, since neither is SEALED */
#define SEALED   1
#define RETIRING 2
#ifndef NO_GEN
#define W(state, gen) ((state) + 4 * (gen))
#else
#define W(state, gen) (state)
#endif
#define STATE(w) ((w) & 3)

/* one block: its slot word and token ids in the index, its bytes in the pool; bytes that match no token ids: 0 */
byte word = W(SEALED, 1), tok = 1, data = 1;

byte pin[NC];                           /* this block's counter in each client's page */
bool used[NC];                          /* the bit of its group there */
bool eof[NC], gone[NC];                 /* socket closed; pidfd readable and GPU work over */

/* The daemon's store buffer. It is one queue for word and tok, as on the processor. */
bool db_full, db_is_tok; byte db_val;

proctype drain_word() {
end:    do
        :: atomic { db_full && db_is_tok -> tok = db_val; db_full = false }
        :: atomic { db_full && !db_is_tok -> word = db_val; db_full = false }
        od
}

#define DSTORE(is_tok, v) atomic { !db_full -> db_is_tok = is_tok; db_val = v; db_full = true }

#ifndef THREADS

/* The clients' store buffers. One process drains one: weak fairness then empties each of them. */
bool cb_full[NC]; byte cb_val[NC];

proctype drain_pin(byte c) {
end:    do
        :: atomic { cb_full[c] -> pin[c] = cb_val[c]; cb_val[c] = 0; cb_full[c] = false }
        od
}

#define STEP(x)   if :: x :: goto killed fi
#define PIN(by)   atomic { !cb_full[me] -> mine = mine + by; cb_val[me] = mine; cb_full[me] = true }
#define FENCE     !cb_full[me]
#define USE       atomic { !cb_full[me] -> used[me] = true }
#define USED(i)   used[i]
#define PINNED(i) pin[i]

#else                                   /* a locked instruction; only the other variant has kills */

#define STEP(x)   x
#define FENCE     true
#define USE       if :: used[0] :: else -> used[0] = true fi
#define USED(i)   used[0]
#define PINNED(i) pin[0]
#if defined(PIN_IS_FLAG)
#define PIN(by)   pin[0] = ((by) > 0)
#elif defined(PIN_NOT_ATOMIC)
#define PIN(by)   mine = pin[0]; pin[0] = mine + by
#else
#define PIN(by)   pin[0] = pin[0] + by
#endif

#endif

proctype client(byte me) {
        byte n, w, again, want;
        byte mine;                      /* its own copy of its counter, which no other process writes */
        bool holds;

        do
        :: n < LOOKUPS ->
                n++;
#ifdef TOKENS_FIRST
                STEP(want = tok);
#endif
                STEP(w = word);                                 /* C1 */
                if
                :: STATE(w) != SEALED
                :: else ->
#ifndef TOKENS_FIRST
                        STEP(want = tok);                       /* C2: any content may be the one wanted */
#endif
#ifndef GROUP_LATE
                        STEP(USE);                              /* C2b */
#endif
                        STEP(PIN(1));                           /* C3 */
#ifndef NO_CFENCE
                        STEP(FENCE);                            /* C4 */
#endif
#ifndef NO_RECHECK
                        STEP(again = word);                     /* C5 */
#else
                        again = w;
#endif
#ifdef GROUP_LATE
                        STEP(USE);
#endif
                        if
                        :: again == w ->
                                holds = true;
                                STEP(assert(data == want));     /* C6 */
#ifndef THREADS
                                if
                                :: eof[me] = true               /* a closed socket is not a dead reader */
                                :: skip
                                fi;
#endif
                                STEP(assert(data == want));
                                holds = false;
                                STEP(PIN(-1))                   /* C7 */
                        :: else ->
                                STEP(PIN(-1))                   /* C8 */
                        fi
                fi;
                d_step { w = 0; again = 0; want = 0 }
        :: else -> break
        od;
#ifndef THREADS
        goto out;

killed: eof[me] = true;
        if
        :: holds -> assert(data == want)                        /* the GPU keeps reading */
        :: else
        fi;
        atomic { !cb_full[me] -> gone[me] = true };
out:    skip
#endif
}

#if defined(REAP_AT_EOF)
#define REAPED(i) eof[i]
#elif defined(NEVER_REAP)
#define REAPED(i) false
#else
#define REAPED(i) gone[i]
#endif

proctype daemon() {
        byte gen = 1, i, next;
        bool pinned;

        do
        :: gen < LASTGEN ->                                     /* D1: there is only one block */
                DSTORE(false, W(RETIRING, gen));                /* D2 */
#ifndef NO_DFENCE
                !db_full;                                       /* D3 */
#endif
#ifndef NO_SCAN
                do                                              /* D4 */
                :: i < NC ->
                        if
                        :: USED(i) -> pinned = pinned || (!REAPED(i) && PINNED(i))      /* D10 */
                        :: else
                        fi;
                        i++
                :: else -> break
                od;
#endif
                if
                :: pinned ->
                        DSTORE(false, W(SEALED, gen))           /* D5 */
                :: else ->
                        gen++;
                        DSTORE(false, W(FREE, gen));            /* D6 */
                        !db_full;                               /* the reply passes through the kernel */
                        data = 0;                               /* D7 */
                        if
                        :: next = 1
                        :: next = 2
                        fi;
                        data = next;
                        DSTORE(true, next);                     /* D8 */
                        DSTORE(false, W(SEALED, gen))           /* D9 */
                fi;
                d_step { pinned = false; i = 0; next = 0 }
        :: else -> break
        od
}

init {
        byte c;

        atomic {
                run daemon();
                run drain_word();
                for (c : 0 .. NC - 1) {
                        run client(c);
#ifndef THREADS
                        run drain_pin(c)
#endif
                }
        }
}

/* No death, and no reader that ends eventually, keeps the daemon from reusing the block. */
ltl reclaim { <> (word == W(SEALED, LASTGEN)) }
