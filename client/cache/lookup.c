/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tokens in, pinned chain out, in shared memory only: no system call, no lock, no request.
 *
 * The search follows the chain: runs of 16 blocks first (one probe, one line of ids, tokens side by
 * side), then single blocks for the rest. It works in stages over a window, so that cache misses
 * overlap: hash all keys and prefetch their table slots; find candidates and prefetch the runs or
 * blocks that they name; compare in order. Everything may be rewritten while we read it. A run or
 * block counts only if its version word (a run's leaf, a block's slot) is the same before and after
 * reading, and only as the child of the one before it: the link holds id and generation.
 *
 * Steps of pinning, named as in tests/client/spin/pins.pml and leaf.pml; the daemon's half is in
 * store/cache/evict.c:
 *
 *      C1  read the slot word of the deepest block: SEALED or RETIRING, generation g
 *      C2  compare links and tokens along the chain
 *      C2b its group's bit is set, or set now, in one step
 *      C3  pins[leaf] += 1     C4  full fence (one add does both)       partner: D2 to D4
 *      C5  slot word still SEALED, generation g? then C6: use it in place, and at the end
 *          C7: pins[leaf] -= 1
 *      C8  if not: pins[leaf] -= 1, and search again
 *
 * If the leaf is still the same incarnation, so is the whole chain: parents outlive their children,
 * and every link was checked with its generation. So one pin and one second look at a slot word
 * hold any number of blocks.
 */

#include <errno.h>
#include <string.h>

#include "client/internal.h"
#include "ipc/base/key.h"
#include "ipc/base/pack.h"
#include "ipc/base/pause.h"

/* runs or blocks per stage: all runs of a prompt of 4,096 tokens, all blocks behind the last run */
#define WINDOW 16u
/* room for their packed tokens: 16 runs at 16 tokens per block, one run at 256 */
#define WINDOW_WORDS KVD_PACKED_MOST
/* runs hashed before the first one's table slot is read, which gives the prefetch time */
#define RUN_LAG 3u
#define BLOCK_LAG 4u
#define TRIES 4u /* attempts that evictions may spoil before the lookup is a miss */
#define NO_CANDIDATE UINT32_MAX

/* How far the search has come. */
struct search {
        const struct kvd_index *ix;
        const struct kvd_pin_words *words; /* for prefetching; NULL if nothing will be pinned */
        const uint32_t *tokens;
        uint32_t n_tokens;
        uint32_t group;
        uint32_t bt;      /* tokens of a full block */
        uint64_t root;    /* of the chain: its salt, or the size of a bidirectional prefix */
        uint32_t *blocks; /* NULL: only count */
        uint32_t max_blocks;

        uint32_t n_found;   /* number of blocks found */
        uint32_t n_covered; /* number of their tokens */
        kvd_ref leaf;
        /* of the previous run while runs are searched, then of the previous block */
        struct kvd_key key;
};

/* ---- probing --------------------------------------------------------------------------------- */

/* A key, its two buckets (layout.h), and the candidate found there. */
struct probe {
        struct kvd_key key;
        const shm_u64 *bucket[KVD_BUCKETS];
        uint32_t n_looked;      /* number of slots examined */
        uint32_t id;            /* of the candidate, or NO_CANDIDATE */
        const uint32_t *packed; /* tokens of a run, in the format of its entry */
};

/* Computes the buckets and prefetches their lines. */
static void probe_begin(struct probe *p, const shm_u64 *table, uint32_t slots) {
        for (uint32_t i = 0; i < KVD_BUCKETS; i++) {
                p->bucket[i] = table + kvd_bucket(slots, p->key, i);
                __builtin_prefetch(p->bucket[i]);
        }
        p->n_looked = 0;
}

/* Moves on to the next id that the key may refer to. */
static uint32_t probe_next(struct probe *p) {
        while (p->n_looked < KVD_BUCKETS * KVD_BUCKET_SLOTS) {
                uint32_t i = p->n_looked++;
                uint64_t slot = shm_load(
                        &p->bucket[i / KVD_BUCKET_SLOTS][kvd_bucket_slot(p->key, i)]);

                p->id = (uint32_t)slot - 1;
                if (slot && slot == kvd_table_slot(p->key, p->id))
                        return p->id;
        }
        return p->id = NO_CANDIDATE;
}

/* ---- runs ------------------------------------------------------------------------------------ */

static void take_run(struct search *s, const uint32_t *ids, kvd_ref leaf) {
        if (s->blocks)
                memcpy(s->blocks + s->n_found, ids, KVD_RUN_BLOCKS * sizeof *ids);
        s->n_found += KVD_RUN_BLOCKS;
        s->n_covered += KVD_RUN_BLOCKS * s->bt;
        s->leaf = leaf;
}

/* Appends the run if it continues the chain; its leaf word proves that it did not change. */
static bool try_run(struct search *s, uint32_t id, const uint32_t *packed) {
        const struct kvd_run *run;
        uint32_t ids[KVD_RUN_BLOCKS];
        kvd_ref leaf;

        if (id >= s->ix->run_capacity)
                return false;
        run = kvd_index_run(s->ix, id);
        leaf = shm_load(&run->leaf);
        if (!leaf || shm_get64(&run->parent) != s->leaf || shm_get32(&run->group) != s->group ||
            shm_get64(&run->root) != s->root ||
            !shm_equal_words(run->tokens, packed, s->ix->run_words))
                return false;
        shm_read_words(ids, run->ids, KVD_RUN_BLOCKS);
        if (!shm_recheck(&run->leaf, leaf))
                return false;
        take_run(s, ids, leaf);
        return true;
}

/* Tries the candidate that seek_run found, then the others. */
static bool find_run(struct search *s, struct probe *p) {
        for (; p->id != NO_CANDIDATE; probe_next(p))
                if (try_run(s, p->id, p->packed))
                        return true;
        return false;
}

static void prefetch_lines(const void *from, uint32_t bytes) {
        for (uint32_t i = 0; i < bytes; i += 64)
                __builtin_prefetch((const uint8_t *)from + i);
}

/* Finds the first candidate and prefetches its lines. */
static bool seek_run(const struct search *s, struct probe *p) {
        if (probe_next(p) >= s->ix->run_capacity)
                return false;
        prefetch_lines(kvd_index_run(s->ix, p->id), s->ix->run_stride);
        return true;
}

/* Prefetches the deepest block's slot word and pin: they are needed last, after all comparisons. */
static void prefetch_leaf(const struct search *s, uint32_t run) {
        uint32_t id;

        if (!s->words || run == NO_CANDIDATE)
                return;
        id = shm_get32(&kvd_index_run(s->ix, run)->ids[KVD_RUN_BLOCKS - 1]);
        if (id >= s->ix->capacity)
                return;
        __builtin_prefetch(kvd_index_desc(s->ix, id));
        __builtin_prefetch(&s->words[id], 1);
}

static uint32_t run_tokens(const struct search *s) {
        return KVD_RUN_BLOCKS * s->bt;
}

static uint32_t runs_left(const struct search *s) {
        uint32_t by_tokens = (s->n_tokens - s->n_covered) / run_tokens(s);

        return MIN(by_tokens, (s->max_blocks - s->n_found) / KVD_RUN_BLOCKS);
}

/* Number of runs in a window. Tokens that are not packed need no room, so one always fits. */
static uint32_t run_window(const struct search *s) {
        return MAX(1, MIN(WINDOW, WINDOW_WORDS / s->ix->run_words));
}

/* Begins to probe for the i-th run from here; false: one of its tokens is beyond the vocabulary. */
static bool begin_run(const struct search *s, uint32_t i, struct kvd_key before, uint32_t *room,
                      struct probe *p) {
        const uint32_t *tokens = s->tokens + s->n_covered + i * run_tokens(s);

        p->packed = kvd_pack(&s->ix->geometry, tokens, run_tokens(s), room + i * s->ix->run_words);
        if (!p->packed)
                return false;
        p->key = kvd_key_run(s->ix, before, tokens, run_tokens(s), p->packed);
        probe_begin(p, kvd_index_run_table(s->ix), s->ix->run_table_slots);
        return true;
}

/*
 * Computes the keys of the next n runs, and prefetches candidates while later runs are hashed.
 * Returns the number of runs that have a candidate, up to the first that has none.
 */
static uint32_t seek_runs(const struct search *s, struct probe *probes, uint32_t n,
                          uint32_t *room) {
        uint32_t last = NO_CANDIDATE, seeked = 0;
        struct kvd_key key = s->key;

        for (uint32_t i = 0; i < n + RUN_LAG; i++) {
                if (i < n && !begin_run(s, i, key, room, &probes[i]))
                        n = i;
                if (i < n)
                        key = probes[i].key;
                if (i < RUN_LAG)
                        continue;
                if (!seek_run(s, &probes[seeked]))
                        break;
                last = probes[seeked++].id;
        }
        prefetch_leaf(s, last);
        return seeked;
}

/* Searches one window of runs; false when the chain of runs has ended. */
static bool search_runs(struct search *s) {
        struct probe probes[WINDOW];
        uint32_t room[WINDOW_WORDS], window = run_window(s);
        uint32_t n = seek_runs(s, probes, MIN(runs_left(s), window), room);

        for (uint32_t i = 0; i < n; i++) {
                if (!find_run(s, &probes[i]))
                        return false;
                s->key = probes[i].key;
        }
        return n == window;
}

/* ---- single blocks --------------------------------------------------------------------------- */

static bool matches(const struct search *s, const struct kvd_desc *desc, uint32_t n) {
        return shm_get64(&desc->parent) == s->leaf &&
               __atomic_load_n(&desc->n_tokens, __ATOMIC_RELAXED) == n &&
               __atomic_load_n(&desc->group, __ATOMIC_RELAXED) == s->group &&
               shm_get64(&desc->root) == s->root &&
               shm_equal_words(desc->tokens, s->tokens + s->n_covered, n);
}

/* Does the block continue the chain? Its slot may become RETIRING and SEALED again meanwhile. */
static bool read_block(const struct search *s, const struct kvd_desc *desc, uint32_t n,
                       uint64_t *ret) {
        for (uint32_t i = 0; i < TRIES; i++) {
                *ret = shm_load(&desc->slot); /* C1 */
                if (!slot_stands(*ret) || !matches(s, desc, n))
                        return false;
                if (shm_recheck(&desc->slot, *ret)) /* C2 */
                        return true;
        }
        return false;
}

static bool try_block(struct search *s, uint32_t id, uint32_t n) {
        uint64_t slot;

        if (id >= s->ix->capacity || !read_block(s, kvd_index_desc(s->ix, id), n, &slot))
                return false;
        if (s->blocks)
                s->blocks[s->n_found] = id;
        s->n_found++;
        s->n_covered += n;
        s->leaf = kvd_ref_make(id, kvd_slot_generation(slot));
        return true;
}

static bool find_block(struct search *s, struct probe *p, uint32_t n) {
        for (; p->id != NO_CANDIDATE; probe_next(p))
                if (try_block(s, p->id, n))
                        return true;
        return false;
}

static bool seek_block(const struct search *s, struct probe *p) {
        if (probe_next(p) >= s->ix->capacity)
                return false;
        prefetch_lines(kvd_index_desc(s->ix, p->id), s->ix->desc_stride);
        if (s->words)
                __builtin_prefetch(&s->words[p->id], 1);
        return true;
}

static uint32_t blocks_left(const struct search *s) {
        uint32_t by_tokens = DIV_UP(s->n_tokens - s->n_covered, s->bt);

        return MIN(by_tokens, s->max_blocks - s->n_found);
}

/*
 * As seek_runs, for blocks. Hashing stops early if the first ones are missing, because most prompts
 * end in something new.
 */
static uint32_t seek_blocks(const struct search *s, struct probe *probes, uint32_t n) {
        uint32_t bt = s->bt, left = s->n_tokens - s->n_covered, seeked = 0;
        const shm_u64 *table = kvd_index_table(s->ix);
        struct kvd_key key = s->key;

        for (uint32_t i = 0; i < n + BLOCK_LAG; i++) {
                if (i < n) {
                        key = kvd_key_block(s->ix, key, s->tokens + s->n_covered + i * bt,
                                            MIN(bt, left - i * bt));
                        probes[i].key = key;
                        probe_begin(&probes[i], table, s->ix->table_slots);
                }
                if (i < BLOCK_LAG)
                        continue;
                if (!seek_block(s, &probes[seeked]))
                        break;
                seeked++;
        }
        return seeked;
}

/* Searches one window of blocks; false when the chain has ended. */
static bool search_blocks(struct search *s) {
        uint32_t n = MIN(blocks_left(s), WINDOW);
        struct probe probes[WINDOW];

        n = seek_blocks(s, probes, n);
        for (uint32_t i = 0; i < n; i++) {
                if (!find_block(s, &probes[i], MIN(s->bt, s->n_tokens - s->n_covered)))
                        return false;
                s->key = probes[i].key;
        }
        return n == WINDOW;
}

/*
 * After the runs, the search continues from the key of their last block. If that block is
 * replaced meanwhile, the key may be torn, and nothing matches.
 */
static void continue_from_leaf(struct search *s) {
        const struct kvd_desc *desc;

        if (s->leaf == KVD_ROOT || kvd_ref_id(s->leaf) >= s->ix->capacity ||
            s->n_covered == s->n_tokens)
                return;
        desc = kvd_index_desc(s->ix, kvd_ref_id(s->leaf));
        s->key = (struct kvd_key){shm_get64(&desc->key.lo), shm_get64(&desc->key.hi)};
}

/* ---- the whole search ------------------------------------------------------------------------ */

static bool bidirectional(const struct search *s) {
        return s->ix->kind == KVD_BIDIRECTIONAL;
}

/* Is all of it found or nothing: a bidirectional prefix, or an object by key? */
static bool whole(const struct search *s) {
        return bidirectional(s) || s->group == KVD_GROUP_KEYED;
}

static void begin(struct search *s) {
        s->n_found = s->n_covered = 0;
        s->leaf = KVD_ROOT;
        s->key = bidirectional(s) ?
                         kvd_key_prefix_root(s->ix, kvd_key_prefix(s->ix, s->tokens, s->n_tokens),
                                             s->group) :
                         kvd_key_root(s->ix, s->group, s->root);
}

static void search(struct search *s) {
        begin(s);
        while (kvd_has_runs(&s->ix->geometry, s->group) && search_runs(s))
                ;
        continue_from_leaf(s);
        while (search_blocks(s))
                ;
        if (whole(s) && s->n_covered != s->n_tokens) {
                s->n_found = s->n_covered = 0;
                s->leaf = KVD_ROOT;
        }
}

/* ---- pins ------------------------------------------------------------------------------------ */

#define SETTLE_LOOKS 16384u /* number of polls of a RETIRING word: about a millisecond */

/* Repeats C5 until the daemon has decided. */
static bool settles(const shm_u64 *slot, uint64_t sealed) {
        uint64_t retiring = kvd_slot_make(KVD_RETIRING, kvd_slot_generation(sealed)),
                 word = retiring;

        for (uint32_t i = 0; i < SETTLE_LOOKS && word == retiring; i++) {
                pause_briefly();
                word = atomic_load_explicit(slot, memory_order_seq_cst);
        }
        return word == sealed;
}

/*
 * If this process already had a pin on the block, RETIRING most likely means that the daemon has
 * not seen that pin yet: before it writes RETIRING, it looks at the pins of the clients that it
 * knows to use the group. So the first pin came after that look, or was our first one in the group.
 * This is not certain, because another thread may be about to take its pin back (C8).
 * So the word decides here, too: SEALED in the same generation, read after our own pin, satisfies
 * C5 whenever it is read.
 */
bool pin_block(struct view *view, kvd_ref ref) {
        uint32_t id = kvd_ref_id(ref), pins = 0;
        uint64_t sealed = kvd_slot_make(KVD_SEALED, kvd_ref_generation(ref));
        const shm_u64 *slot;

        if (id >= view->ix->capacity)
                return false;
        slot = &kvd_index_desc(view->ix, id)->slot;
        pins = count_pin(view, id);            /* C2b, C3, C4 */
        if (unlikely(!view_is_served(view))) { /* C5 */
                unpin_block(view, id);
                return false;
        }
        if (atomic_load_explicit(slot, memory_order_seq_cst) == sealed) /* C5 */
                return true;
        if (pins && settles(slot, sealed))
                return true;
        unpin_block(view, id); /* C8 */
        if (!pins)
                settles(slot, sealed); /* a search before that would find the same block again */
        return false;
}

/* After pin_block failed: has the daemon not decided, as when it was killed? */
static bool is_undecided(const struct view *view, kvd_ref ref) {
        uint64_t retiring = kvd_slot_make(KVD_RETIRING, kvd_ref_generation(ref));
        uint32_t id = kvd_ref_id(ref);

        return id < view->ix->capacity &&
               atomic_load(&kvd_index_desc(view->ix, id)->slot) == retiring;
}

static void touch(struct view *view, uint32_t id) {
        uint32_t now = atomic_load_explicit(&view->ix->clock, memory_order_relaxed);

        atomic_store_explicit(&view->words[id].touch, now, memory_order_relaxed);
}

/* ---- the calls ------------------------------------------------------------------------------- */

/* Statistics only: concurrent threads may lose a count, but five locked adds would cost more. */
static uint64_t count_lookup(struct view *view, enum kvd_client_counter which, uint64_t n) {
        shm_u64 *counter = &view->page->counters[which];
        uint64_t now = atomic_load_explicit(counter, memory_order_relaxed) + n;

        atomic_store_explicit(counter, now, memory_order_relaxed);
        return now;
}

/* Start time of a sampled lookup, or else 0: reading the clock can cost as much as a lookup. */
static inline uint64_t begin_timing(uint64_t lookups) {
        return unlikely(lookups % KVD_LATENCY_SAMPLED == 1) ? latency_begin() : 0;
}

static inline void end_timing(struct view *view, uint64_t begun_ns) {
        if (unlikely(begun_ns))
                latency_count(view, KVD_LATENCY_LOOKUP, begun_ns);
}

static uint32_t segment_of(const struct view *view, uint32_t id) {
        return kvd_segment_of(view->ix, id);
}

/* Number of found blocks, from the first on, that are mapped in this process. */
static uint32_t mapped_blocks(const struct view *view, const struct search *s) {
        uint32_t n = 0;

        while (n < s->n_found && view_has(view, segment_of(view, s->blocks[n])))
                n++;
        return n;
}

/*
 * Are all found blocks mapped? Some are not if the pool has grown or a segment has new memory. Then
 * the next search ends before them: they are a miss until a call that may wait has mapped them.
 */
static bool can_be_read(struct view *view, struct search *s) {
        uint32_t mapped = atomic_load_explicit(&view->n_mapped, memory_order_acquire), n;

        if (likely(view_is_fresh(view) &&
                   mapped >= atomic_load_explicit(&view->ix->n_segments, memory_order_acquire)))
                return true;
        n = mapped_blocks(view, s);
        if (n == s->n_found)
                return true;
        atomic_store_explicit(&view->wanted, true, memory_order_relaxed);
        s->max_blocks = whole(s) ? 0 : n;
        return false;
}

/*
 * Searches and pins. False: nothing was found, or it was evicted on each attempt, or it is not
 * mapped here.
 */
static bool search_and_pin(struct view *view, struct search *s) {
        for (uint32_t i = 0; i < TRIES; i++) {
                search(s);
                if (s->leaf == KVD_ROOT)
                        return false;
                if (pin_block(view, s->leaf)) {
                        if (can_be_read(view, s))
                                return true;
                        unpin_block(view, kvd_ref_id(s->leaf));
                        continue;
                }
                count_lookup(view, KVD_CLIENT_RETRIES, 1);
                if (is_undecided(view, s->leaf))
                        return false;
        }
        return false;
}

static void fill_pin(struct kvd_pin *pin, struct view *view, const struct search *s) {
        pin->view = view;
        pin->base = view->sealed;
        pin->block_bytes = view->ix->shard_bytes;
        pin->leaf = kvd_ref_id(s->leaf);
        pin->generation = kvd_ref_generation(s->leaf);
        pin->n_blocks = s->n_found;
        pin->n_tokens = s->n_covered;
        atomic_fetch_add_explicit(&view->page->held, s->n_found, memory_order_relaxed);
}

static int refuse_arguments(const struct kvd_space *space, uint32_t group,
                            const struct kvd_pin *pin) {
        if (space_check(space) < 0)
                return -ECHILD;
        if (group >= space->geometry.layer_groups)
                return client_fail(-EINVAL, "layer group %u of %u", group,
                                   space->geometry.layer_groups);
        if (pin && pin->view)
                return client_fail(-EINVAL, "the pin holds something already; kvd_unpin it first");
        return client_fail(-EINVAL,
                           "salts are for causal spaces: a bidirectional prefix is found by "
                           "all of its tokens");
}

/* Every lookup calls this, so it only detects errors; refuse_arguments determines the cause. */
static inline int check_arguments(const struct kvd_space *space, uint32_t group, uint64_t salt,
                                  const struct kvd_pin *pin) {
        bool good = !forked(space->handle) && group < space->geometry.layer_groups &&
                    !(pin && pin->view) && !(salt && space->options.kind == KVD_BIDIRECTIONAL);

        return likely(good) ? 0 : refuse_arguments(space, group, pin);
}

static inline uint64_t root_of(const struct view *view, uint64_t salt, uint32_t n_tokens) {
        return view->ix->kind == KVD_BIDIRECTIONAL ? n_tokens : salt;
}

/* The blocks of the whole prefix exceed max_blocks. */
static bool is_cut(const struct search *s) {
        return s->max_blocks < DIV_UP(s->n_tokens, s->bt);
}

/*
 * Tokens below the pool behind the found chain, unless max_blocks cut it. Without tiers this costs
 * one load of a line that every lookup reads anyway.
 */
static inline uint32_t below(const struct search *s) {
        if (likely(!atomic_load_explicit(&s->ix->below, memory_order_relaxed)) ||
            s->n_found >= s->max_blocks || (bidirectional(s) && is_cut(s)))
                return 0;
        return lookup_below(s->ix, &(struct lookup_end){.leaf = s->leaf,
                                                        .root = s->root,
                                                        .group = s->group,
                                                        .depth = s->n_found,
                                                        .n_tokens = s->n_tokens - s->n_covered,
                                                        .tokens = s->tokens + s->n_covered});
}

/* Without followers this costs one load of a line that every lookup reads anyway. */
static inline void note(struct view *view, const struct search *s, uint64_t salt, uint32_t found) {
        if (unlikely(atomic_load_explicit(&view->ix->n_followers, memory_order_relaxed)))
                lookup_noted(view, &(struct lookup_note){.tokens = s->tokens,
                                                         .n_tokens = s->n_tokens,
                                                         .group = s->group,
                                                         .found = found,
                                                         .salt = salt});
}

static inline int64_t find(struct kvd_space *space, uint32_t group, const uint32_t *tokens,
                           uint32_t n_tokens, uint32_t *blocks, uint32_t max_blocks,
                           struct kvd_pin *pin) {
        struct view *view = view_get(space);
        struct search s = {.ix = view->ix,
                           .words = view->words,
                           .tokens = tokens,
                           .n_tokens = n_tokens,
                           .group = group,
                           .bt = kvd_full_tokens(&view->ix->geometry, group),
                           .root = root_of(view, pin->salt, n_tokens),
                           .blocks = blocks,
                           .max_blocks = max_blocks};
        uint64_t begun_ns;
        bool found;

        pin->group = group;
        begun_ns = begin_timing(count_lookup(view, KVD_CLIENT_LOOKUPS, 1));
        count_lookup(view, KVD_CLIENT_TOKENS_ASKED, n_tokens);
        found = search_and_pin(view, &s);
        pin->n_below = below(&s);
        if (!found) {
                end_timing(view, begun_ns);
                note(view, &s, pin->salt, 0);
                view_leave(view);
                return 0;
        }
        count_lookup(view, KVD_CLIENT_HITS, 1);
        count_lookup(view, KVD_CLIENT_TOKENS_FOUND, s.n_covered);
        fill_pin(pin, view, &s);
        end_timing(view, begun_ns);
        note(view, &s, pin->salt, s.n_covered);
        return s.n_covered;
}

int64_t kvd_lookup(struct kvd_space *space, uint32_t group, const uint32_t *tokens,
                   uint32_t n_tokens, uint32_t *blocks, uint32_t max_blocks, struct kvd_pin *pin) {
        int r = check_arguments(space, group, pin->salt, pin);

        return r < 0 ? r : find(space, group, tokens, n_tokens, blocks, max_blocks, pin);
}

void lookup_ahead(struct kvd_space *space, const uint32_t *words, const struct kvd_pin *pins,
                  uint32_t n) {
        struct view *view = view_get(space);
        const shm_u64 *table = kvd_index_table(view->ix);
        struct search s = {.ix = view->ix, .words = view->words};
        uint32_t bt = kvd_full_tokens(&s.ix->geometry, KVD_GROUP_KEYED);
        struct probe probes[LOOKUP_AHEAD];

        for (uint32_t i = 0; i < n; i++) {
                struct kvd_key root = kvd_key_root(s.ix, KVD_GROUP_KEYED, pins[i].salt);

                probes[i].key = kvd_key_block(s.ix, root, words + i * bt, bt);
                probe_begin(&probes[i], table, s.ix->table_slots);
        }
        for (uint32_t i = 0; i < n; i++)
                seek_block(&s, &probes[i]);
        view_leave(view);
}

int64_t lookup_object(struct kvd_space *space, const uint32_t *words, uint32_t n_words,
                      uint32_t *blocks, struct kvd_pin *pin) {
        return find(space, KVD_GROUP_KEYED, words, n_words, blocks, UINT32_MAX, pin);
}

bool lookup_hold(struct kvd_space *space, const uint32_t *tokens, uint32_t n_tokens,
                 struct kvd_pin *pin) {
        struct view *view = view_get(space);
        struct search s = {.ix = view->ix,
                           .tokens = tokens,
                           .n_tokens = n_tokens,
                           .group = pin->group,
                           .bt = view->ix->geometry.block_tokens,
                           .root = root_of(view, pin->salt, n_tokens),
                           .max_blocks = UINT32_MAX};

        for (uint32_t i = 0; i < TRIES; i++) {
                search(&s);
                if (s.n_covered % s.bt) {
                        s.n_tokens = s.n_covered / s.bt * s.bt;
                } else if (s.leaf != KVD_ROOT && pin_block(view, s.leaf)) {
                        fill_pin(pin, view, &s);
                        return true;
                } else if (s.leaf == KVD_ROOT || is_undecided(view, s.leaf)) {
                        break;
                }
        }
        view_leave(view);
        return false;
}

int64_t kvd_match_salted(struct kvd_space *space, uint32_t group, uint64_t salt,
                         const uint32_t *tokens, uint32_t n_tokens) {
        int r = check_arguments(space, group, salt, NULL);
        struct view *view;
        struct search s;

        if (r < 0)
                return r;
        view = view_get(space);
        s = (struct search){.ix = view->ix,
                            .tokens = tokens,
                            .n_tokens = n_tokens,
                            .group = group,
                            .bt = view->ix->geometry.block_tokens,
                            .root = root_of(view, salt, n_tokens),
                            .max_blocks = UINT32_MAX};
        search(&s);
        view_leave(view);
        return s.n_covered;
}

int64_t kvd_match(struct kvd_space *space, uint32_t group, const uint32_t *tokens,
                  uint32_t n_tokens) {
        return kvd_match_salted(space, group, 0, tokens, n_tokens);
}

void kvd_unpin(struct kvd_space *space, struct kvd_pin *pin) {
        if (pin->view && !forked(space->handle))
                touch(pin->view, pin->leaf);
        unpin_unused(space, pin);
}

void unpin_unused(struct kvd_space *space, struct kvd_pin *pin) {
        struct view *view = pin->view;

        pin->n_posted = 0;
        if (!view || forked(space->handle))
                return;
        unpin_block(view, pin->leaf);
        atomic_fetch_sub_explicit(&view->page->held, pin->n_blocks, memory_order_relaxed);
        *pin = (struct kvd_pin){0};
        view_put(view);
}
