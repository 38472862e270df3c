/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Order across a restart: a block on a GPU was sealed before its data was there, and the daemon is killed. Its
 * successor cannot write the old index, which says that the block is pending, but it can write the page of
 * semaphores. So a reader that waits by the old index continues, and is told if the data never came.
 *
 * The steps P1 to R5 and O1 to O8 are those of semaphore.pml. The successor adopts the block if the old page says
 * that the value was reached. Otherwise it leaves the block's memory alone until A and the reader have unmapped
 * theirs. When A's work on the GPU is over, it marks A's semaphores as ended, without changing the value reached (O5
 * and O7 in one).
 *
 * The reader looks before or after the restart. Pinning is a single step here; restart.pml covers it, and why a pin
 * by the old index is not valid once there is a new one.
 *
 * Broken on purpose, each must fail: -DTAKE_ALL -DPLAIN_RELEASE -DEND_EARLY -DNO_LIMBO -DNO_MARK; and -DNO_END leaves
 * a process waiting.
 */
byte data;                              /* owner of the bytes: 1 A, 2 B */
byte slot;                              /* A's semaphore in the old page */
bool ended;                             /* ... and its mark */
byte life;                              /* number of the serving daemon */
byte word[2], value[2];                 /* per index: the block's sealer, and the value it waits for; 0: the data is there */
byte pins[2];

bool a_dead, a_over, sealed, b_runs, b_wrote, read_all, reader_left;

proctype stream_a() {
        if
        :: data = 1                                             /* P1 */
        :: a_dead -> goto over
        fi;
        if
        :: slot = 1                                             /* P2 */
        :: a_dead -> goto over
        fi;
over:   a_over = true
}

/* May be killed at any time after the seal. */
proctype client_a() {
        sealed;
        if
        :: a_dead = true
        :: skip
        fi
}

proctype stream_b() {
        b_runs;
        data = 2;
        b_wrote = true
}

#ifdef END_EARLY
#define OVER a_dead
#else
#define OVER (a_dead && a_over)                                 /* O3 */
#endif

proctype daemon() {
        bool taken;

        atomic { value[0] = 1; word[0] = 1 };                   /* O1 */
        sealed = true;
        if
        :: slot >= 1 -> value[0] = 0                            /* O2 */
        :: skip
        fi;
        /*
         * killed, and the next daemon takes over: from here on no daemon writes what belongs to
         * life 0
         */
#ifdef TAKE_ALL
        taken = true;
#else
        taken = (value[0] == 0 || slot >= 1);
#endif
        atomic { word[1] = (taken -> 1 : 0); value[1] = 0; life = 1 };
        if
        :: taken
        :: !taken ->
                if
                :: OVER ->
#ifdef PLAIN_RELEASE
                        slot = 1
#elif !defined(NO_END)
                        ended = true
#endif
                :: slot >= 1 && a_over                          /* the value was reached, and A left by itself */
                fi
        fi;
        /* the block's memory is reused */
#ifdef NO_LIMBO
        atomic { pins[1] == 0 -> word[1] = 0 };
#else
        if
        :: taken -> atomic { pins[0] == 0 && pins[1] == 0 -> word[1] = 0 }
        :: !taken -> reader_left
        fi;
#endif
        b_runs = true;
        b_wrote;
        atomic { value[1] = 0; word[1] = 2 }
}

proctype reader() {
        byte n, who, wanted, got, x;
        bool bad;

        do
        :: n < 2 ->
                n++;
                if
                :: atomic { word[life] != 0 -> x = life; who = word[life]; pins[x]++ }; /* R1 */
                        wanted = value[x];                      /* R2 */
                        wanted == 0 || slot >= wanted || ended; /* R3 */
                        got = data;                             /* R4 */
#ifdef NO_MARK
                        bad = false;
#else
                        bad = (wanted != 0 && ended && slot < wanted);          /* R5 */
#endif
                        assert(bad || got == who);
                        pins[x]--
                :: skip
                fi;
                d_step { who = 0; wanted = 0; got = 0; bad = false; x = 0 }
        :: else -> break
        od;
        read_all = true;
        life == 1;
        reader_left = true
}

init {
        atomic { run daemon(); run client_a(); run stream_a(); run stream_b(); run reader() }
}

/* Whichever process dies, the reader continues, and the block comes back. */
ltl goes_on { <> (read_all && word[1] == 2) }
