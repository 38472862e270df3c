/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Leaf pins: one pin on the deepest block of a chain holds the whole chain.
 *
 * The client walks from the root, C1 and C2 for each block, then C3 to C5 once, on the deepest. Two rules of the
 * daemon make that enough: D1 never chooses a block that has a resident child, and D8 writes the parent link as
 * (id, generation). At C5 the deepest block is resident with the generation that the client saw. So its parent is
 * resident with the generation in the link, which the client compared with the word it had read for the parent, and
 * so on up to the root. None of them was reused between its C1 and now, and none will be while the pin exists.
 *
 * With -DRUNS the client finds the chain in a run instead: its ids and token ids in one place. The run's leaf word,
 * (id, generation) of its last block, is also its version word: it is 0 while the run is written, and the client reads
 * it before and after the rest. A run is written once per leaf, so what lies between two equal words belongs to that
 * leaf, and C5 shows whether the leaf is still resident. A run that outlives its leaf is harmless; D6 removes it to
 * reuse its place.
 *
 * A hash finds only a candidate, so any block may be offered at any place of the chain, and the second block's token
 * ids are the same under both roots. Steps are named in pins.pml, which also covers clients that die, and several
 * clients. Here there is one client, and a daemon that puts chains into any blocks in any order.
 *
 * Broken on purpose, each must fail: -DPARENT_FIRST -DLINK_NO_GEN -DNO_LINK -DNO_RECHECK -DNO_CFENCE -DNO_DFENCE
 * -DGO_ON -DNO_SCAN_ABOVE -DLATE_PARENT, and with -DRUNS: -DRUN_READ_ONCE -DRUN_WRITTEN_OPEN -DRUN_NO_GEN
 */
#ifndef DEPTH
#define DEPTH 2                         /* blocks in the longest chain */
#endif
#ifndef OPS
#define OPS 4                           /* blocks that the daemon fills or evicts before it evicts them all */
#endif
#ifndef LOOKUPS
#define LOOKUPS 1
#endif
#define NB 3                            /* blocks; some macros below spell them out */

#define FREE     0
#define SEALED   1
#define RETIRING 2
#define W(state, gen) ((state) + 4 * (gen))
#define STATE(w) ((w) & 3)
#define GEN(w)   ((w) >> 2)

#define ROOT 0                          /* the link of a block without a parent */
#ifndef LINK_NO_GEN
#define LINK(id, gen) (1 + (id) + NB * (gen))
#else
#define LINK(id, gen) (1 + (id))
#endif
#define ID(link)       (((link) - 1) % NB)
#define LINK_GEN(link) (((link) - 1) / NB)

/*
 * A block's content depends on all tokens before it: content r + 2d is depth d under root r (1 or
 * 2).
 */
#define TOK(content) ((content) <= 2 -> (content) : ((content) + 1) / 2 + 1)

/* the index, the bytes in the pool, the client's page */
byte word[NB], tok[NB], parent[NB];
byte run_leaf, run_tok, run_id[2];
byte data[NB];
byte pin[NB];

/* store buffers, as in pins.pml */
bool cb_full; byte cb_id, cb_val;
bool db_full; byte db_what, db_id, db_val;

#define WORD     0
#define TOKENS   1
#define PARENT   2
#define RUN_LEAF 3
#define RUN_TOK  4
#define RUN_ID   5

proctype drain_pin() {
end:    do
        :: atomic { cb_full -> pin[cb_id] = cb_val; cb_id = 0; cb_val = 0; cb_full = false }
        od
}

proctype drain_word() {
end:    do
        :: atomic {
                db_full ->
                if
                :: db_what == WORD -> word[db_id] = db_val
                :: db_what == TOKENS -> tok[db_id] = db_val
                :: db_what == PARENT -> parent[db_id] = db_val
#ifdef RUNS
                :: db_what == RUN_LEAF -> run_leaf = db_val
                :: db_what == RUN_TOK -> run_tok = db_val
                :: db_what == RUN_ID -> run_id[db_id] = db_val
#endif
                fi;
                db_what = 0; db_id = 0; db_val = 0; db_full = false
           }
        od
}

#define DSTORE(what, id, v) atomic { !db_full -> db_what = what; db_id = id; db_val = v; db_full = true }
#define PIN(id, v)          atomic { !cb_full -> cb_id = id; cb_val = v; cb_full = true }

#define MISS_IF(x) if :: x -> goto miss :: else fi

/* Both store the deepest block in b, its word in w, and the chain in id[]. */
inline walk() {
        do
        :: i < length ->
                atomic { select (b : 0 .. NB - 1) }
                w = word[b];                                    /* C1 */
                MISS_IF(STATE(w) == FREE);                      /* RETIRING is accepted: C5 waits for its outcome */
                w = W(SEALED, GEN(w));
                MISS_IF(tok[b] != TOK(root + 2 * i));           /* C2 */
#ifndef NO_LINK
                MISS_IF(parent[b] != above);
#endif
                d_step { above = LINK(b, GEN(w)); id[i] = b; i++ }
        :: else -> break
        od
}

inline find_run() {
        above = run_leaf;                                       /* C1, for the run */
        MISS_IF(above == 0 || length < 2);
        MISS_IF(run_tok != root);                               /* C2: the token ids of the whole run */
        id[0] = run_id[0];
        id[1] = run_id[1];
#ifndef RUN_READ_ONCE
        MISS_IF(run_leaf != above);
#endif
        b = ID(above);
#ifndef RUN_NO_GEN
        w = W(SEALED, LINK_GEN(above))
#else
        w = word[b];
        MISS_IF(STATE(w) != SEALED)
#endif
}

proctype client() {
        byte n, i, b, root, length, w, above;
        byte id[DEPTH];
        bool waited;

        do
        :: n < LOOKUPS ->
                n++;
                atomic { select (root : 1 .. 2); select (length : 1 .. DEPTH) }
#ifndef RUNS
                walk();
#else
                find_run();
#endif
                PIN(b, 1);                                      /* C3 */
#ifndef NO_CFENCE
                !cb_full;                                       /* C4 */
#endif
again:          if
#ifndef NO_RECHECK
                :: !waited && word[b] == W(RETIRING, GEN(w)) -> /* wait for the outcome: C5 once more */
                        waited = true;
                        goto again
                :: word[b] != w                                 /* C5 */
#endif
                :: else ->
                        atomic {                                /* C6: all of it, at any time until C7 */
                                for (i : 0 .. length - 1) {
                                        assert(data[id[i]] == root + 2 * i)
                                }
                        }
                fi;
                PIN(b, 0);                                      /* C7, C8 */
miss:           skip;
                d_step {                                        /* clear these, so that equal states compare equal */
                        for (i : 0 .. DEPTH - 1) {
                                id[i] = 0
                        }
                        i = 0; b = 0; root = 0; length = 0; w = 0; above = 0; waited = false
                }
        :: else -> break
        od
}

/* the daemon's own records */
bool resident[NB];
byte gen[NB], up[NB];                   /* up: LINK() of the parent, here always with its generation */
bool emptied;

#define UP(b)          (1 + (b) + NB * gen[b])
#define CHILD_OF(c, b) (resident[c] && up[c] == UP(b))
#ifndef PARENT_FIRST
#define VICTIM(b)      (resident[b] && !CHILD_OF(0, b) && !CHILD_OF(1, b) && !CHILD_OF(2, b))
#else
#define VICTIM(b)      (resident[b])
#endif
#define OTHER_CHILD(c) (c != b && resident[c] && up[c] == up[b])
#define ONLY_CHILD(b)  (up[b] != ROOT && !OTHER_CHILD(0) && !OTHER_CHILD(1) && !OTHER_CHILD(2))
#define EXTENDABLE(b)  (resident[b] && data[b] <= 2 * (DEPTH - 1))
#define EMPTY          (!resident[0] && !resident[1] && !resident[2])
#define FULL           (resident[0] && resident[1] && resident[2])

inline take_out(it) {
        d_step { resident[it] = false; gen[it]++; up[it] = ROOT }
        DSTORE(WORD, it, W(FREE, gen[it]))                      /* D6 */
}

inline evict_parent() {
#ifdef LATE_PARENT
        DSTORE(WORD, p, W(RETIRING, gen[p]));
#endif
        if
#ifndef NO_SCAN_ABOVE
        :: pin[p] > 0 ->                                        /* D4 */
                DSTORE(WORD, p, W(SEALED, gen[p]))              /* D5 */
#endif
        :: else -> take_out(p)
        fi
}

/*
 * D1 has looked at the pins before; by now they may have changed. A leaf that is the only child is evicted alone or
 * together with its parent, p.
 */
inline evict() {
        if
        :: ONLY_CHILD(b) -> p = ID(up[b]); both = true
        :: true
        fi;
        DSTORE(WORD, b, W(RETIRING, gen[b]));                   /* D2 */
        if
#ifndef LATE_PARENT
        :: both -> DSTORE(WORD, p, W(RETIRING, gen[p]))
#endif
        :: else
        fi;
#ifndef NO_DFENCE
        !db_full;                                               /* D3 */
#endif
        if
        :: pin[b] > 0 ->                                        /* D4 */
                DSTORE(WORD, b, W(SEALED, gen[b]));             /* D5 */
                if
#ifndef GO_ON
                :: both -> DSTORE(WORD, p, W(SEALED, gen[p]))
#else
                :: both -> evict_parent()
#endif
                :: else
                fi
        :: else ->
                take_out(b);
                if
                :: both -> evict_parent()
                :: else
                fi
        fi
}

inline fill() {
        !db_full;                                               /* the reply passes through the kernel */
        atomic {                                                /* D7 */
                if
                :: data[b] = 1; up[b] = ROOT
                :: data[b] = 2; up[b] = ROOT
                :: EXTENDABLE(0) -> p = 0; data[b] = data[p] + 2; up[b] = UP(p)
                :: EXTENDABLE(1) -> p = 1; data[b] = data[p] + 2; up[b] = UP(p)
                :: EXTENDABLE(2) -> p = 2; data[b] = data[p] + 2; up[b] = UP(p)
                fi
        }
        DSTORE(TOKENS, b, TOK(data[b]));                        /* D8 */
        DSTORE(PARENT, b, (up[b] == ROOT -> ROOT : LINK(p, gen[p])));
        DSTORE(WORD, b, W(SEALED, gen[b]));                     /* D9 */
        resident[b] = true;
#ifdef RUNS
        if
        :: up[b] != ROOT ->
#ifndef RUN_WRITTEN_OPEN
                DSTORE(RUN_LEAF, 0, 0);
#endif
                DSTORE(RUN_TOK, 0, data[p]);
                DSTORE(RUN_ID, 0, p);
                DSTORE(RUN_ID, 1, b);
#ifndef RUN_NO_GEN
                DSTORE(RUN_LEAF, 0, LINK(b, gen[b]))
#else
                DSTORE(RUN_LEAF, 0, LINK(b, 0))
#endif
        :: else
        fi
#endif
}

proctype daemon() {
        byte ops, b, p;
        bool both;

        do
        :: atomic {                                             /* D1 */
                if
                :: VICTIM(0) -> b = 0
                :: VICTIM(1) -> b = 1
                :: VICTIM(2) -> b = 2
                fi;
                ops = (ops < OPS -> ops + 1 : OPS)
           }
           evict();
           d_step { b = 0; p = 0; both = false }
        :: atomic {
                ops < OPS && !FULL ->
                if
                :: !resident[0] -> b = 0
                :: !resident[1] -> b = 1
                :: !resident[2] -> b = 2
                fi;
                ops++
           }
           fill();
           d_step { b = 0; p = 0 }
        :: ops == OPS && EMPTY -> break
        od;
        emptied = true
}

init {
        atomic {                        /* root 1 in block 0, its child in block 1 */
                data[0] = 1; tok[0] = TOK(1); word[0] = W(SEALED, 0); resident[0] = true;
                data[1] = 3; tok[1] = TOK(3); word[1] = W(SEALED, 0); resident[1] = true;
                parent[1] = LINK(0, 0); up[1] = UP(0);
#ifdef RUNS
                run_leaf = LINK(1, 0); run_tok = 1; run_id[1] = 1;
#endif
                run daemon(); run drain_word(); run client(); run drain_pin()
        }
}

/* Evicting leaves first never gets stuck: blocks filled in any order can all be evicted. */
ltl reclaim { <> emptied }
