/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One client that uses every method at random on its own sequences, and checks all that it may read
 * after every change. A block's contents depend on its step of reasoning and, slightly, on its
 * sequence:
 *
 *      value = step(step, place) + small(sequence, slot, place)
 *
 * so that equal steps are similar but never equal, and the right bytes of every exact entry are
 * known. An entry that is not exact must be marked: KVD_ENTRY_SHARED may hold another sequence's
 * small part, KVD_ENTRY_APPROX anything.
 */

#include "tests/daemon/soak/methods_worker.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/lib/oracle.h"

#define BT 4u
#define STEPS 6u /* kinds of steps */
#define STEP_BLOCKS 4u
#define SEQUENCES 8u
#define MAX_BLOCKS 96u
#define SMALL 0.01f
#define SHARED_WITHIN (3 * SMALL)
#define PREFIX_BLOCKS 8u

const struct kvd_geometry methods_geometry = {.layers = 2,
                                              .kv_heads = 2,
                                              .head_dim = 32,
                                              .block_tokens = BT,
                                              .dtype = KVD_F32,
                                              .vocab = 5000};
const struct kvd_geometry methods_whole_geometry = {.layers = 2,
                                                    .layer_groups = 2,
                                                    .kv_heads = 2,
                                                    .head_dim = 32,
                                                    .block_tokens = BT,
                                                    .state_width = 16,
                                                    .dtype = KVD_F32,
                                                    .vocab = 5000};

#define DIM 32u
#define PLANE (2 * BT * DIM) /* floats of a layer's keys, or values */
#define BLOCK_FLOATS (2u * 2 * PLANE)

struct line { /* one sequence */
        kvd_sequence *sequence;
        uint64_t name; /* seeds its small part */
        /* per entry: kind of step, or STEPS + chain if it is borrowed */
        uint32_t step[MAX_BLOCKS];
        uint32_t place[MAX_BLOCKS];
        uint32_t n;
        struct kvd_pin pin;
        bool asked; /* whether a sharing configuration has been requested */
        struct kvd_block bits;
};

struct worker {
        const struct methods_options *o;
        struct random random;
        kvd *kvd;
        kvd_space *space, *whole;
        struct line lines[SEQUENCES];
        uint64_t named;
        bool failed;
};

static void count(_Atomic uint64_t *counter, uint64_t n) {
        atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

static uint32_t below(struct worker *w, uint32_t n) {
        return random_below(&w->random, n);
}

static void maybe_die(struct worker *w) {
        if (!w->o->threads && below(w, 600) == 0) {
                count(&w->o->tally->deaths, 1);
                kill(getpid(), SIGKILL);
        }
}

/*
 * Refusals are allowed. So are errors of a daemon that died, or of a new one whose methods are not
 * on yet. Every other error is a failure.
 */
static bool fine(struct worker *w, const char *what, int r) {
        if (r >= 0)
                return true;
        if (r == -ENOBUFS || r == -EDQUOT || r == -ENODATA || r == -EUSERS || r == -ENOSPC ||
            r == -EBUSY) {
                count(&w->o->tally->refusals, 1);
                return false;
        }
        if (w->o->daemon_may_die && (r == -ESTALE || r == -ECONNRESET || r == -ECONNREFUSED ||
                                     r == -ENOENT || r == -ENOTCONN || r == -EOPNOTSUPP)) {
                count(&w->o->tally->lost, 1);
                return false;
        }
        fprintf(stderr, "worker %d: %s: %s (%d)\n", getpid(), what, kvd_error(), r);
        w->failed = true;
        return false;
}

/* ---- contents -------------------------------------------------------------------------------- */

/* A value in (-1, 1). */
static float value_at(uint64_t seed, uint32_t i) {
        uint64_t x = (seed + 1) * 0x9e3779b97f4a7c15u + i * 0xbf58476d1ce4e5b9u;

        x ^= x >> 29;
        x *= 0x94d049bb133111ebu;
        return (float)(int32_t)(x >> 32) / 2147483648.0f;
}

static void expected(const struct line *l, uint32_t slot, float *ret) {
        bool borrowed = l->step[slot] >= STEPS;
        uint64_t large = ((uint64_t)l->step[slot] << 8 | l->place[slot]) + 1000,
                 small = l->name * 977 + slot;

        for (uint32_t i = 0; i < BLOCK_FLOATS; i++)
                ret[i] = value_at(large, i) + (borrowed ? 0 : SMALL * value_at(small, i));
}

static uint32_t token_of(uint32_t step, uint32_t place, uint32_t i) {
        return (step * 131 + place * 17 + i * 3) % 5000;
}

static void tokens_of(const struct line *l, uint32_t slot, uint32_t n, uint32_t *ret) {
        for (uint32_t i = 0; i < n * BT; i++)
                ret[i] = token_of(l->step[slot + i / BT], l->place[slot + i / BT], i % BT);
}

static void check_entry(struct worker *w, const struct line *l, uint32_t slot,
                        const struct kvd_entry *e) {
        const float *data = (const float *)e->data;
        float want[BLOCK_FLOATS];
        uint64_t wrong = 0;

        expected(l, slot, want);
        for (uint32_t i = 0; i < BLOCK_FLOATS; i++)
                wrong += e->flags & KVD_ENTRY_SHARED ?
                                 !(fabsf(data[i] - want[i]) <= SHARED_WITHIN) :
                                 memcmp(&data[i], &want[i], sizeof want[i]) != 0;
        count(&w->o->tally->bytes_checked, sizeof want);
        if (!wrong)
                return;
        count(&w->o->tally->bytes_wrong, wrong * sizeof(float));
        count(&w->o->tally->unmarked, !(e->flags & KVD_ENTRY_SHARED));
        fprintf(stderr,
                "worker %d: entry %u (flags %u, block %u:%u): %llu of %u numbers are wrong\n",
                getpid(), slot, e->flags, e->block, e->generation, (unsigned long long)wrong,
                BLOCK_FLOATS);
        w->failed = true;
}

/* Keys and values of a head's slot must be those of one token of the sequence, no matter which. */
static bool is_a_token(const struct line *l, const float *keys, const float *values, uint32_t row) {
        float want[BLOCK_FLOATS];

        for (uint32_t slot = 0; slot < l->n; slot++) {
                expected(l, slot, want);
                for (uint32_t t = 0; t < BT; t++) {
                        const float *k = want + row + t * DIM;

                        if (memcmp(keys, k, DIM * sizeof *k) == 0 &&
                            memcmp(values, k + PLANE, DIM * sizeof *k) == 0)
                                return true;
                }
        }
        return false;
}

static void check_packed(struct worker *w, const struct line *l, uint32_t slot,
                         const struct kvd_entry *e) {
        uint32_t head = below(w, 4), row = head / 2 * 2 * PLANE + head % 2 * BT * DIM,
                 at = below(w, e->n_tokens);
        const float *keys = (const float *)e->data + row + at * DIM;

        count(&w->o->tally->packed_seen, 1);
        count(&w->o->tally->bytes_checked, 2 * DIM * sizeof *keys);
        if (is_a_token(l, keys, keys + PLANE, row))
                return;
        count(&w->o->tally->bytes_wrong, 2 * DIM * sizeof *keys);
        fprintf(stderr,
                "worker %d: entry %u (packed): slot %u of head %u is no token of the sequence\n",
                getpid(), slot, at, head);
        w->failed = true;
}

static void check_line(struct worker *w, const struct line *l) {
        struct methods_tally *t = w->o->tally;
        const struct kvd_entry *entries;
        uint32_t n;

        entries = kvd_sequence_entries(l->sequence, &n);
        if (n != l->n) {
                fprintf(stderr, "worker %d: %u entries instead of %u\n", getpid(), n, l->n);
                w->failed = true;
                return;
        }
        for (uint32_t i = 0; i < n; i++) {
                count(&t->shared_seen, (entries[i].flags & KVD_ENTRY_SHARED) != 0);
                count(&t->approx_seen, (entries[i].flags & KVD_ENTRY_APPROX) != 0);
                count(&t->absent_seen, !entries[i].data);
                if (!entries[i].data || (entries[i].flags & KVD_ENTRY_APPROX))
                        continue;
                if (!(entries[i].flags & KVD_ENTRY_COMPACT))
                        check_entry(w, l, i, &entries[i]);
                else if (below(w, 8) == 0)
                        check_packed(w, l, i, &entries[i]);
        }
}

/* ---- sequences ------------------------------------------------------------------------------- */

static void close_line(struct worker *w, struct line *l) {
        if (!l->sequence)
                return;
        check_line(w, l);
        kvd_sequence_close(l->sequence);
        if (l->bits.view)
                kvd_free(w->space, 1, &l->bits);
        kvd_unpin(w->space, &l->pin);
        *l = (struct line){0};
}

/* Gets a chain that all workers share: finds it, or fills and publishes it. */
static bool get_prefix(struct worker *w, struct line *l, uint32_t *ids, uint32_t *tokens) {
        struct kvd_block blocks[PREFIX_BLOCKS];
        float data[BLOCK_FLOATS];
        uint32_t n = 0;
        int r = 0;

        for (uint32_t i = 0; i < PREFIX_BLOCKS; i++) {
                l->step[i] = STEPS + (uint32_t)(l->name % 3);
                l->place[i] = i;
        }
        tokens_of(l, 0, PREFIX_BLOCKS, tokens);
        if (kvd_lookup(w->space, 0, tokens, PREFIX_BLOCKS * BT, ids, PREFIX_BLOCKS, &l->pin) ==
            PREFIX_BLOCKS * BT)
                return true;
        kvd_unpin(w->space, &l->pin);
        while (n < PREFIX_BLOCKS && (r = kvd_alloc(w->space, PREFIX_BLOCKS - n, blocks + n)) > 0)
                n += (uint32_t)r;
        for (uint32_t i = 0; i < n; i++) {
                expected(l, i, data);
                memcpy(blocks[i].data, data, sizeof data);
        }
        if (n == PREFIX_BLOCKS)
                r = kvd_seal(w->space, &l->pin, n, blocks, tokens, n * BT);
        if (r < 0 || n < PREFIX_BLOCKS) {
                fine(w, "prefix", r);
                kvd_free(w->space, n, blocks);
                return false;
        }
        for (uint32_t i = 0; i < n; i++)
                ids[i] = blocks[i].id;
        return true;
}

static void open_line(struct worker *w, struct line *l) {
        uint32_t ids[PREFIX_BLOCKS], tokens[PREFIX_BLOCKS * BT];

        *l = (struct line){.name = ++w->named * 4096 +
                                   (w->o->threads ? w->o->seed : (uint64_t)getpid())};
        if (!fine(w, "open", kvd_sequence_open(w->space, MAX_BLOCKS, &l->sequence))) {
                l->sequence = NULL;
                return;
        }
        if (below(w, 2) == 0 || !get_prefix(w, l, ids, tokens))
                return;
        if (fine(w, "borrow",
                 kvd_sequence_borrow(l->sequence, &l->pin, PREFIX_BLOCKS, ids, tokens)))
                l->n = PREFIX_BLOCKS;
}

static uint32_t fill_step(struct worker *w, struct line *l, struct kvd_block *blocks) {
        uint32_t kind = below(w, STEPS), n = 0;
        float data[BLOCK_FLOATS];
        int r = 0;

        while (n < STEP_BLOCKS && (r = kvd_alloc(w->space, STEP_BLOCKS - n, blocks + n)) > 0)
                n += (uint32_t)r;
        if (r < 0)
                fine(w, "alloc", r);
        for (uint32_t i = 0; i < n; i++) {
                l->step[l->n + i] = kind;
                l->place[l->n + i] = i;
                expected(l, l->n + i, data);
                memcpy(blocks[i].data, data, sizeof data);
        }
        return n;
}

static void grow(struct worker *w, struct line *l) {
        struct kvd_block blocks[STEP_BLOCKS];
        uint32_t tokens[STEP_BLOCKS * BT], n;
        int r;

        if (l->n + STEP_BLOCKS > MAX_BLOCKS) {
                close_line(w, l);
                return;
        }
        n = fill_step(w, l, blocks);
        if (n == 0)
                return;
        tokens_of(l, l->n, n, tokens);
        maybe_die(w);
        r = kvd_sequence_append(l->sequence, n, blocks, tokens, n * BT);
        if (!fine(w, "append", r)) {
                kvd_free(w->space, n, blocks);
                return;
        }
        count(&w->o->tally->appended, n);
        l->n += n;
        fine(w, "step", kvd_sequence_step(l->sequence, (l->n - n) * BT, n * BT));
}

static void sync_line(struct worker *w, struct line *l) {
        int r = kvd_sequence_sync(l->sequence);

        if (fine(w, "sync", r)) {
                count(&w->o->tally->changes, (uint64_t)r);
                check_line(w, l);
        } else if (r == -ESTALE) {
                close_line(w, l);
        }
}

/* ---- methods --------------------------------------------------------------------------------- */

static uint32_t some_slots(struct worker *w, const struct line *l, bool resident, uint32_t *slots) {
        const struct kvd_entry *entries;
        uint32_t n, found = 0;

        entries = kvd_sequence_entries(l->sequence, &n);
        for (uint32_t i = 0; i < n && found < 8; i++)
                if (!(entries[i].flags & KVD_ENTRY_BORROWED) && !entries[i].data == !resident &&
                    below(w, 3) == 0)
                        slots[found++] = i;
        return found;
}

static void cool(struct worker *w, struct line *l) {
        uint32_t slots[8], n = some_slots(w, l, true, slots);
        int r = n ? kvd_sequence_cool(l->sequence, n, slots,
                                      below(w, 2) ? KVD_COOL_VAGUE : KVD_COOL_SPILL) :
                    0;

        if (fine(w, "cool", r))
                count(&w->o->tally->cooled, (uint64_t)r);
}

static void revive(struct worker *w, struct line *l) {
        uint32_t slots[8], n = some_slots(w, l, false, slots);
        int r = n ? kvd_sequence_revive(l->sequence, n, slots, (enum kvd_revive)(1 + below(w, 3))) :
                    0;

        if (fine(w, "revive", r))
                count(&w->o->tally->revived, (uint64_t)r);
}

/*
 * By KeyDiff or by scores. These may be freed before a worker has read them, and some entries
 * cannot be scored.
 */
static int pack_some(struct worker *w, struct line *l, uint32_t first, uint32_t n) {
        struct kvd_block block;
        const struct kvd_scores scores = {&block, 1};
        uint32_t keep = 1 + below(w, n * BT);
        int r;

        if (below(w, 2) || kvd_alloc(w->space, 1, &block) != 1)
                return kvd_sequence_compact(l->sequence, first, n, keep, NULL);
        for (uint32_t i = 0; i < BLOCK_FLOATS; i++)
                ((float *)block.data)[i] = (float)below(w, 1000);
        r = kvd_sequence_compact(l->sequence, first, n, keep, &scores);
        if (below(w, 2))
                kvd_sequence_wait(l->sequence, 50000000);
        kvd_free(w->space, 1, &block);
        return r == -EINVAL ? -EBUSY : r;
}

static void pack(struct worker *w, struct line *l) {
        uint32_t first = l->n ? below(w, l->n) : 0,
                 n = l->n ? 1 + below(w, MIN(l->n - first, 16)) : 0;
        int r;

        if (!n || !fine(w, "compact", pack_some(w, l, first, n)))
                return;
        r = kvd_sequence_wait(l->sequence, below(w, 2) * 50000000);
        if (r == -ETIMEDOUT || fine(w, "wait", r))
                check_line(w, l);
}

static void attend(struct worker *w, struct line *l) {
        struct kvd_label_shape shape;
        const uint8_t *labels;
        uint32_t n;

        kvd_sequence_entries(l->sequence, &n);
        for (uint32_t i = 0; i < n; i++) {
                kvd_sequence_use(l->sequence, i, (float)below(w, 100) / 50,
                                 (float)below(w, 100) / 100);
                labels = kvd_sequence_labels(l->sequence, i, &shape);
                count(&w->o->tally->labels,
                      labels && shape.channels == 32 && shape.label_bytes == 20);
        }
}

static void critical(struct worker *w, struct line *l) {
        uint8_t layer[2], head[4];
        int r;

        if (!l->asked) {
                if (kvd_alloc(w->space, 1, &l->bits) != 1)
                        return;
                memset(l->bits.data, 0x5a, BLOCK_FLOATS * sizeof(float));
                l->asked = fine(w, "critical",
                                kvd_sequence_critical(l->sequence, 1, &l->bits, 4, 2, 64));
                if (!l->asked)
                        kvd_free(w->space, 1, &l->bits);
                return;
        }
        r = kvd_sequence_sharing(l->sequence, layer, head);
        if (!fine(w, "sharing", r) || r == 0)
                return;
        if (layer[0] != 0 || layer[1] > 1 || head[0] != 0 || head[1] > 1 || head[2] != 0 ||
            head[3] > 1) {
                fprintf(stderr, "worker %d: an impossible sharing configuration\n", getpid());
                w->failed = true;
        }
        count(&w->o->tally->sharings, 1);
        kvd_free(w->space, 1, &l->bits);
        l->asked = false;
}

static void sample(struct worker *w) {
        struct kvd_block blocks[4];
        uint32_t n = 0;
        int r = 0;

        while (n < ARRAY_SIZE(blocks) &&
               (r = kvd_alloc(w->whole, ARRAY_SIZE(blocks) - n, blocks + n)) > 0)
                n += (uint32_t)r;
        for (uint32_t i = 0; i < n; i++)
                for (uint32_t k = 0; k < BLOCK_FLOATS / 2; k++)
                        ((float *)blocks[i].data)[k] = value_at(i / 2, k) +
                                                       (i % 2 ? SMALL * value_at(99, k) : 0);
        if (n == ARRAY_SIZE(blocks))
                r = kvd_prefix_sample(w->whole, below(w, 100), 1, blocks, BT);
        if (fine(w, "sample", r))
                count(&w->o->tally->samples, n == ARRAY_SIZE(blocks));
        kvd_free(w->whole, n, blocks);
}

/* ---- life ------------------------------------------------------------------------------------ */

static void act(struct worker *w) {
        struct line *l = &w->lines[below(w, SEQUENCES)];
        uint32_t what = below(w, 100);

        count(&w->o->tally->operations, 1);
        maybe_die(w);
        if (!l->sequence) {
                open_line(w, l);
                return;
        }
        if (what < 38)
                grow(w, l);
        else if (what < 40)
                pack(w, l);
        else if (what < 70)
                sync_line(w, l);
        else if (what < 78)
                cool(w, l);
        else if (what < 88)
                revive(w, l);
        else if (what < 93)
                attend(w, l);
        else if (what < 97)
                critical(w, l);
        else if (what < 98)
                sample(w);
        else
                close_line(w, l);
}

static bool begin(struct worker *w) {
        const struct kvd_space_options whole = {.kind = KVD_BIDIRECTIONAL};
        int r = -1;

        for (int i = 0; i < 500 && r < 0; i++) { /* the daemon may be away for a moment */
                r = w->kvd ? 0 : kvd_open(w->o->socket, &w->kvd);
                if (r == 0 && !w->space)
                        r = kvd_space_open(w->kvd, "methods", &methods_geometry, NULL, &w->space);
                if (r == 0 && !w->whole)
                        r = kvd_space_open(w->kvd, "whole", &methods_whole_geometry, &whole,
                                           &w->whole);
                if (r < 0)
                        usleep(10000);
        }
        return r == 0 || fine(w, "begin", r);
}

int methods_worker_run(const struct methods_options *options) {
        struct worker w = {.o = options, .random = {options->seed}};

        if (begin(&w))
                while (!options->tally->stop && !w.failed)
                        act(&w);
        for (uint32_t i = 0; i < SEQUENCES; i++)
                close_line(&w, &w.lines[i]);
        kvd_space_close(w.space);
        kvd_space_close(w.whole);
        kvd_close(w.kvd);
        return w.failed;
}
