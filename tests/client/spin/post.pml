/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Posts: whatever a client puts into its ring is taken, mostly without a message. `posted` and `taken` are counters.
 * `kicked` is 1 if the client has told the daemon of the ring, or the daemon polls it.
 *
 *   client (client/cache/post.c)                           daemon (store/cache/post.c, daemon/serve/rounds.c)
 *   R1  posted := posted + 1                         R3  exchange kicked for 0: a message came
 *   R2  exchange kicked for 1; it was 0: a message   R4  take all that is posted
 *                                                    R5  in the rounds: poll a ring whose kicked is 1, and leave it 1
 *                                                    R6  leave the rounds: kicked := 0       R7  and take what is there
 *
 * In the rounds, a ring is polled only if it was not empty when its message came. Its posts may have been taken
 * earlier, with another request (R8), and then the daemon would not look at it again.
 *
 * Broken on purpose: -DNO_R4 takes before it resets, -DNO_R7 leaves without looking, -DSTAY_TOLD keeps `kicked` at 1
 * for a ring that was empty, -DNO_R5 does not poll. Each of them leaves a post behind.
 */
#define POSTS 4

byte posted, taken;
bit kicked;
chan bell = [POSTS] of { bit };         /* messages */

active proctype client() {
        byte n;
        bit before;

        do
        :: n < POSTS ->
                posted++;                                       /* R1 */
                atomic { before = kicked; kicked = 1 };         /* R2 */
                if
                :: before == 0 -> bell ! 1
                :: else
                fi;
                n++
        :: n == POSTS -> break
        od
}

#define TAKE taken = posted

active proctype daemon() {
        bool rounds, told, had, other = true, busy;

        if                                                      /* other clients post, so that the rounds never end */
        :: busy = true
        :: skip
        fi;

end:    do
        :: bell ? _ ->
                if
                :: rounds = true
                :: skip
                fi;
                had = (taken != posted);
                if
                :: rounds && had -> TAKE; told = true
                :: rounds && !had && told -> skip
#ifdef STAY_TOLD
                :: rounds && !had && !told -> skip
#else
                :: rounds && !had && !told -> kicked = 0; TAKE  /* R3, R4 */
#endif
#ifdef NO_R4
                :: !rounds -> TAKE; kicked = 0
#else
                :: !rounds -> kicked = 0; TAKE                  /* R3, R4 */
#endif
                fi
#ifndef NO_R5
        :: rounds && told && taken != posted -> TAKE            /* R5 */
#endif
        :: rounds && !busy ->
                rounds = false;
                told = false;
                kicked = 0;                                     /* R6 */
#ifndef NO_R7
                TAKE                                            /* R7 */
#endif
        :: other ->                                             /* R8: another request comes, or none */
                other = false;
                if
                :: TAKE
                :: skip
                fi
        od
}

ltl all { <> (taken == POSTS) }
