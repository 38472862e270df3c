/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Fill: a slot word is SEALED only while the block's bytes are complete and no process writes them.
 *
 * Two clients fill one block in turn, in any order and repeatedly. Either may be killed between any two steps, its
 * socket may close while it still writes, and its queued GPU work keeps writing after its death. So the daemon gives
 * a lost client's block to no other client before the kernel reports that the process is gone (D10). A seal message
 * counts only if it comes from the block's owner and names the generation that was handed out, because a message may
 * still be queued when the block has found another owner.
 *
 * A client's steps: F1 write the bytes; F2 send the seal. The daemon's, D6 to D10, are named in pins.pml. Memory
 * order needs no model here: owner and daemon take turns, and each turn passes through the kernel.
 *
 * Broken on purpose, each must fail: -DFREE_AT_EOF -DSEAL_ANY -DSEAL_EARLY; -DNEVER_DISCARD never gets the block back.
 */
#define NC 2
#define LASTGEN 3

#define FREE    0
#define FILLING 1
#define SEALED  2

byte state, tok, data;                  /* 0: bytes that match no token ids */
bool eof[NC], gone[NC];
bool finished;

chan grant[NC] = [LASTGEN] of { byte }; /* generation; there is only one block */
chan seal = [LASTGEN] of { byte, byte };      /* sender, generation */

#define STEP(x) if :: x :: goto killed fi
#define SEND(g) atomic { if :: !eof[me] -> seal ! me, g :: else fi }

proctype client(byte me) {
        byte gen;
        bool writing;

end:    do
        :: STEP(grant[me] ? gen);
           writing = true;
#ifdef SEAL_EARLY
           SEND(gen);
#endif
           STEP(data = 0);                                      /* F1 */
           if
           :: eof[me] = true                                    /* the socket closes, the process continues */
           :: skip
           fi;
           STEP(data = me + 1);
           writing = false;
#ifndef SEAL_EARLY
           STEP(SEND(gen))                                      /* F2 */
#endif
        :: eof[me] -> break                                     /* a process that is cut off ends eventually */
        od;

killed: eof[me] = true;
        if
        :: writing -> data = 0                                  /* the GPU keeps writing */
        :: else
        fi;
        gone[me] = true
}

#if defined(FREE_AT_EOF)
#define LOST(c) eof[c]
#elif defined(NEVER_DISCARD)
#define LOST(c) false
#else
#define LOST(c) gone[c]
#endif

proctype daemon() {
        byte gen = 1, owner, from, g;

        do
        :: gen <= LASTGEN ->
                if                                              /* D7 */
                :: !eof[0] -> owner = 0
                :: !eof[1] -> owner = 1
                :: eof[0] && eof[1] -> break
                fi;
                state = FILLING;
                grant[owner] ! gen;
                do
                :: seal ? from, g ->
                        if
#ifndef SEAL_ANY
                        :: from != owner || g != gen
#endif
                        :: else ->
                                tok = from + 1;                 /* D8 */
                                state = SEALED;                 /* D9 */
                                break
                        fi
                :: LOST(owner) -> break                         /* D10: the block was never SEALED: discard it */
                od;
                skip;
                d_step { state = FREE; gen++; from = 0; g = 0 } /* D6: no client holds a pin, see pins.pml */
        :: else -> break
        od;
        finished = true
}

/* what a reader may see at any time */
proctype reader() {
end:    do
        :: atomic { state == SEALED -> assert(data == tok) }
        od
}

init {
        atomic { run daemon(); run reader(); run client(0); run client(1) }
}

/* The block comes back even if a client dies while it holds the block. */
ltl reclaim { <> finished }
