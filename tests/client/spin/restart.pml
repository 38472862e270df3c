/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Restart: the daemon is killed at any point, and its successor reuses a block without harm to clients of the old one.
 *
 * The old index is sealed, so the new daemon cannot write it. Its words say SEALED forever to a client that still
 * maps it, whatever happens to the blocks. But the new daemon can write the pin pages. Each has an epoch, the number
 * of the index that its pins refer to. C5 reads the epoch together with the slot word, and the new daemon stores the
 * new number into every page (D11) before its first D2. This is Dekker's argument once more: pin, then read the
 * epoch; write the epoch, then scan the pins. D3 is the fence between the last two.
 *
 * The new daemon adopts the blocks that the old words call SEALED or RETIRING; no others were complete. RETIRING
 * counts, because a block may be pinned until a scan has shown that it is not.
 *
 * Steps are named in pins.pml, which covers the death of clients; here there is one client and one restart.
 *
 * Broken on purpose, each must fail: -DNO_EPOCH -DLATE_EPOCH -DFORGET_PAGES -DTAKE_UNSEALED -DDROP_RETIRING
 */
#define LOOKUPS 2
#define LASTGEN 3

#define FREE     0
#define SEALED   1
#define RETIRING 2
#define W(state, gen) ((state) + 4 * (gen))
#define STATE(w) ((w) & 3)
#define GEN(w)   ((w) >> 2)

/* index 0 is the first daemon's, index 1 its successor's; the pool and the client's page outlive both */
byte word[2], tok[2];
byte data = 1;
byte pin, epoch;
bool ready;                             /* the successor answers */

/* store buffers, as in pins.pml */
bool cb_full; byte cb_val;
bool db_full; byte db_what, db_val;

#define WORD   0                        /* + number of the index */
#define TOKENS 2
#define EPOCH  4

proctype drain_pin() {
end:    do
        :: atomic { cb_full -> pin = cb_val; cb_val = 0; cb_full = false }
        od
}

proctype drain_word() {
end:    do
        :: atomic {
                db_full ->
                if
                :: db_what < TOKENS -> word[db_what - WORD] = db_val
                :: db_what >= TOKENS && db_what < EPOCH -> tok[db_what - TOKENS] = db_val
                :: db_what == EPOCH -> epoch = db_val
                fi;
                db_what = 0; db_val = 0; db_full = false
           }
        od
}

#define DSTORE(what, v) atomic { !db_full -> db_what = what; db_val = v; db_full = true }
#define PIN(v)          atomic { !cb_full -> cb_val = v; cb_full = true }

proctype client() {
        byte n, x, w, want;             /* x: the index that it has mapped */
        bool same;

        do
        :: n < LOOKUPS ->
                n++;
                w = word[x];                                    /* C1 */
                if
                :: STATE(w) != SEALED
                :: else ->
                        want = tok[x];                          /* C2 */
                        PIN(1);                                 /* C3 */
                        !cb_full;                               /* C4 */
                        same = (word[x] == w);                  /* C5 */
#ifndef NO_EPOCH
                        same = same && epoch == x;
#endif
                        if
                        :: same ->
                                assert(data == want);           /* C6, across a restart too */
                                assert(data == want)
                        :: else
                        fi;
                        PIN(0);                                 /* C7, C8 */
                        d_step { want = 0; same = false }
                fi;
                w = 0;
                if
                :: x == 0 && ready -> x = 1                     /* attach again */
                :: skip                                         /* or not know about the new daemon yet */
                fi
        :: else -> break
        od
}

#define STEP(x) if :: x :: life == 0 -> goto killed fi

proctype daemon() {
        byte life, gen = 1, old, next;
        bool pinned;

evict:  do
        :: gen < LASTGEN ->
                STEP(DSTORE(WORD + life, W(RETIRING, gen)));    /* D2 */
                STEP(!db_full);                                 /* D3 */
                STEP(pinned = pin > 0);                         /* D4 */
#ifdef FORGET_PAGES
                pinned = pinned && life == 0;
#endif
                if
                :: pinned ->
                        STEP(DSTORE(WORD + life, W(SEALED, gen)))       /* D5 */
                :: else ->
                        gen++;
                        STEP(DSTORE(WORD + life, W(FREE, gen)));        /* D6 */
fill:                   STEP(!db_full);
                        data = 0;                               /* D7 */
                        if
                        :: next = 1
                        :: next = 2
                        fi;
                        STEP(data = next);
                        STEP(DSTORE(TOKENS + life, next));      /* D8 */
                        STEP(DSTORE(WORD + life, W(SEALED, gen)))       /* D9 */
                fi;
#ifdef LATE_EPOCH
                if
                :: life == 1 -> DSTORE(EPOCH, 1)
                :: else
                fi;
#endif
                d_step { pinned = false; next = 0 }
        :: gen == LASTGEN && life == 0 -> goto killed
        :: gen == LASTGEN && life == 1 -> break
        od;
        goto out;

killed: !db_full;                       /* the processor completes retired stores */
        d_step { life = 1; pinned = false; next = 0; old = word[0]; gen = GEN(old) }
#if !defined(NO_EPOCH) && !defined(LATE_EPOCH)
        DSTORE(EPOCH, 1);                                       /* D11 */
#endif
#ifdef TAKE_UNSEALED
        if
        :: true ->
#elif defined(DROP_RETIRING)
        if
        :: STATE(old) == SEALED ->
#else
        if
        :: STATE(old) == SEALED || STATE(old) == RETIRING ->
#endif
                DSTORE(TOKENS + 1, tok[0]);
                DSTORE(WORD + 1, W(SEALED, gen));
                !db_full;
                ready = true;
                goto evict
        :: else ->
                ready = true;
                goto fill
        fi;
out:    skip
}

init {
        atomic {
                word[0] = W(SEALED, 1); tok[0] = 1;
                run daemon(); run drain_word(); run client(); run drain_pin()
        }
}

ltl reclaim { <> (word[1] == W(SEALED, LASTGEN)) }
