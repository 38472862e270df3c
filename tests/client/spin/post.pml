/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Posts: what a client puts into its ring is taken, though mostly nobody says so. `posted` and `taken` count, `kicked` is
 * the client's word that the daemon knows, or looks by itself.
 *
 *   client (client/cache/post.c)                           daemon (store/cache/post.c, daemon/serve/rounds.c)
 *   R1  posted := posted + 1                         R3  exchange kicked for 0: a message came
 *   R2  exchange kicked for 1; it was 0: a message   R4  take all that is posted
 *                                                    R5  in the rounds: look at a ring that is told, and leave it so
 *                                                    R6  leave the rounds: kicked := 0       R7  and take what is there
 *
 * In the rounds a ring stays told only if there was something in it when its message came: what was posted may have been
 * taken before, with another request (R8), and then nobody would look at it.
 *
 * Broken on purpose: -DNO_R4 takes before it resets, -DNO_R7 leaves without looking, -DSTAY_TOLD keeps a ring told in
 * which nothing was, -DNO_R5 does not look: all of them leave a post behind.
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

        if                                                      /* others post, so that the rounds never end */
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
        :: other ->                                             /* R8: another request comes, or none does */
                other = false;
                if
                :: TAKE
                :: skip
                fi
        od
}

ltl all { <> (taken == POSTS) }
