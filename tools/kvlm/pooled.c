/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/pooled.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include "client/kvd_methods.h"
#include "ipc/base/util.h"
#include "kernels/attend.h"
#include "tools/kvlm/note.h"

enum {
        LONG_STEP = 3,      /* blocks: the step after one so long begins in a fresh block */
        MAX_TURNS = 256,    /* distinct deltas; blocks with others are left out */
        WAITS = 200,        /* for room in the pool, of WAIT_NS each */
        USE_EVERY = 4,      /* decode steps between reports of attention mass */
        REVIVE_EVERY = 32,  /* decode steps before the same block is asked for again */
        REVIVE_AT_ONCE = 8,
        MISS = 2,           /* selections of a missing block that are worth its revival */
};
#define WAIT_NS 2000000L

struct pooled {
        struct pooled_setup setup;
        struct sequence *s;
        kvd_sequence *table; /* NULL: random sharing only */
        uint32_t bt, half;
        uint32_t room;       /* blocks */

        uint32_t n, n_slots; /* tokens computed, and slots they take with the empty ones between them */
        uint32_t *slots;     /* [tokens] of each token */
        uint32_t *first;     /* [blocks + 1] token that a block begins with */
        bool gaps;           /* there are empty slots */

        uint32_t n_entries;  /* blocks that are in the pool's table */
        bool stuck;          /* a private block: no more can follow in the table */
        uint8_t **blocks;    /* what attention reads; NULL: missing */
        int32_t *deltas;
        uint32_t *turn;
        float *turns;
        bool turned;         /* some delta is not 0 */

        uint32_t step_first, last_step; /* token that the step at hand begins with, blocks of the one before */
        uint32_t decoded;
        float *mass;         /* [blocks] of the decode step at hand */
        uint32_t *hits;      /* [blocks] selections of the step at hand */
        bool selects;        /* somebody fills hits */
        uint32_t *asked;     /* [blocks] decode step at which a block was asked for, plus 1 */
        uint64_t random;
        struct pooled_stats stats;
};

static double now_ms(void) {
        struct timespec ts;

        clock_gettime(CLOCK_MONOTONIC, &ts);
        return (double)ts.tv_sec * 1e3 + (double)ts.tv_nsec / 1e6;
}

bool pooled_wanted(const struct pooled_options *o, struct cache *cache) {
        kvd_space *space = cache_space(cache);
        double memshare = 0, reviver = 0;

        if (o->random > 0)
                return true;
        if (o->use == POOLED_OFF || !space)
                return false;
        kvd_space_setting(space, "memshare", &memshare);
        kvd_space_setting(space, "kvreviver", &reviver);
        return o->use == POOLED_ON || memshare > 0 || reviver > 0;
}

uint32_t pooled_capacity(uint32_t n_tokens, uint32_t block_tokens) {
        return n_tokens + n_tokens / LONG_STEP + 2 * block_tokens;
}

/* ---- what attention reads ---------------------------------------------------------------------------------------- */

/* Blocks beyond what the turns can express are left out. */
static void make_turns(struct pooled *p) {
        uint32_t n_blocks = p->n_entries;

        p->turned = false;
        for (uint32_t i = 0; i < n_blocks; i++)
                p->turned |= p->deltas[i] != 0;
        if (!p->turned)
                return;
        memset(p->turn, 0, p->room * sizeof *p->turn);
        while (kvd_turns(p->deltas, n_blocks, p->setup.frequencies, p->half, p->turn, p->turns, MAX_TURNS) == UINT32_MAX)
                for (uint32_t i = n_blocks; i-- > 0;)
                        if (p->deltas[i]) {
                                p->blocks[i] = NULL;
                                p->deltas[i] = 0;
                                break;
                        }
}

static void take_over(struct pooled *p) {
        const struct kvd_entry *entries;
        uint32_t n;

        entries = kvd_sequence_entries(p->table, &n);
        for (uint32_t i = 0; i < MIN(n, p->n_entries); i++) {
                p->blocks[i] = entries[i].data;
                p->deltas[i] = entries[i].data ? entries[i].delta : 0;
        }
        make_turns(p);
        p->s->unpublished = true;
}

/* The daemon's proposals; attention does not run now. */
static void take_proposals(struct pooled *p) {
        double started = now_ms();
        int r = p->table ? kvd_sequence_sync(p->table) : 0;

        if (r > 0) {
                p->stats.changes += (uint32_t)r;
                take_over(p);
        }
        p->stats.sync_ms += now_ms() - started;
}

/* The pool is full: what others let go of, and what the daemon relieves us of, makes room. */
static bool wait_for_room(void *data, uint32_t tries) {
        const struct timespec pause = {0, WAIT_NS};
        struct pooled *p = data;

        if (!p->table || tries >= WAITS)
                return false;
        p->stats.waits++;
        nanosleep(&pause, NULL);
        take_proposals(p);
        return true;
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

struct pooled *pooled_free(struct pooled *p) {
        if (!p)
                return NULL;
        p->s->on_full = NULL;
        kvd_sequence_close(p->table);
        free(p->asked);
        free(p->hits);
        free(p->mass);
        free(p->turns);
        free(p->turn);
        free(p->deltas);
        free(p->blocks);
        free(p->first);
        free(p->slots);
        free(p);
        return NULL;
}

static int allocate(struct pooled *p, uint32_t capacity, uint32_t head_dim) {
        p->room = DIV_UP(capacity, p->bt) + 1;
        p->slots = calloc(capacity, sizeof *p->slots);
        p->first = calloc(p->room + 1, sizeof *p->first);
        p->blocks = calloc(p->room, sizeof *p->blocks);
        p->deltas = calloc(p->room, sizeof *p->deltas);
        p->turn = calloc(p->room, sizeof *p->turn);
        p->turns = calloc((size_t)MAX_TURNS * head_dim, sizeof *p->turns);
        p->mass = calloc(p->room, sizeof *p->mass);
        p->hits = calloc(p->room, sizeof *p->hits);
        p->asked = calloc(p->room, sizeof *p->asked);
        if (!p->hits || !p->asked || !p->slots || !p->first || !p->blocks || !p->deltas || !p->turn || !p->turns ||
            !p->mass)
                return note(-ENOMEM, "out of memory for a sequence of %u tokens", capacity);
        return 0;
}

int pooled_new(const struct pooled_setup *setup, struct sequence *s, uint32_t capacity, struct pooled **ret) {
        const struct cache_options *o = cache_options(s->cache);
        struct pooled *p = calloc(1, sizeof *p);
        int r;

        if (!p)
                return note(-ENOMEM, "out of memory");
        *p = (struct pooled){.setup = *setup, .s = s, .bt = o->shape.tokens, .half = o->shape.head_dim / 2,
                             .random = setup->options->seed, .stats = {.used = true}};
        r = allocate(p, capacity, o->shape.head_dim);
        if (r < 0) {
                pooled_free(p);
                return r;
        }
        if (!s->alone && setup->options->random == 0 && cache_space(s->cache) &&
            kvd_sequence_open(cache_space(s->cache), p->room, &p->table) < 0)
                p->table = NULL; /* goes on without */
        s->on_full = wait_for_room;
        s->on_full_data = p;
        *ret = p;
        return 0;
}

/* ---- steps of reasoning ------------------------------------------------------------------------------------------ */

static bool ends_step(const struct pooled *p, uint32_t token) {
        size_t size;
        const char *text = tokenizer_decode(p->setup.tokenizer, token, &size);

        return size >= 2 && memcmp(text + size - 2, "\n\n", 2) == 0;
}

static bool in_own_part(const struct pooled *p, uint32_t token) {
        return p->setup.options->own_prompt || token >= p->setup.prompt;
}

uint32_t pooled_step_limit(const struct pooled *p, uint32_t first) {
        uint32_t n = 1;

        if (!in_own_part(p, first))
                return p->setup.prompt - first;
        while (first + n < p->s->n_tokens && !ends_step(p, p->s->tokens[first + n - 1]))
                n++;
        return n;
}

/* The next token begins in a fresh block. */
static void close_block(struct pooled *p) {
        uint32_t empty = ALIGN_UP(p->n_slots, p->bt) - p->n_slots;

        if (empty == 0)
                return;
        p->n_slots += empty;
        p->first[p->n_slots / p->bt] = p->n;
        p->stats.empty_slots += empty;
        p->gaps = true;
}

static uint32_t next_random(struct pooled *p, uint32_t n) {
        p->random = p->random * 6364136223846793005u + 1442695040888963407u;
        return (uint32_t)((p->random >> 33) % n);
}

/* What MemShare is compared with: blocks of the step give way to any older ones, full like themselves. */
static void share_at_random(struct pooled *p, uint32_t from, uint32_t to) {
        for (uint32_t i = MAX(from, 1); i < to; i++) {
                uint32_t j = next_random(p, i), n = p->first[i + 1] - p->first[i];

                if ((float)next_random(p, 1 << 20) >= p->setup.options->random * (1 << 20) || p->deltas[i] ||
                    p->deltas[j] || p->first[j + 1] - p->first[j] != n)
                        continue;
                p->blocks[i] = p->blocks[j];
                p->deltas[i] = (int32_t)(p->first[i] - p->first[j]);
                p->stats.random_shared++;
        }
        make_turns(p);
        p->s->unpublished = true;
}

/* So that what is shared does not depend on who is faster, the worker or we. */
static void wait_for_proposals(struct pooled *p) {
        const struct timespec pause = {0, 1000000};

        for (uint32_t ms = 0; p->table && ms < p->setup.options->wait_ms; ms++) {
                nanosleep(&pause, NULL);
                take_proposals(p);
        }
}

static void end_step(struct pooled *p) {
        uint32_t first_block = DIV_UP(p->slots[p->step_first], p->bt), n = p->n - p->step_first;

        if (p->table && n > 0 && p->first[p->n_entries] > p->step_first)
                kvd_sequence_step(p->table, p->step_first, MIN(p->first[p->n_entries], p->n) - p->step_first);
        if (p->setup.options->random > 0)
                share_at_random(p, first_block, p->n_entries);
        wait_for_proposals(p);
        p->stats.steps++;
        p->step_first = p->n;
        p->last_step = n / p->bt;
}

/* ---- the pool's table -------------------------------------------------------------------------------------------- */

static uint32_t id_of(const struct pooled *p, uint32_t i) {
        return (uint32_t)((uint64_t)(p->s->blocks[i] - p->s->pin.base) / p->s->pin.block_bytes);
}

/* The next block, if it is complete, becomes an entry. False: it cannot. */
static bool enter(struct pooled *p) {
        uint32_t i = p->n_entries, n = p->first[i + 1] - p->first[i], id;
        const uint32_t *tokens = p->s->tokens + p->first[i];
        int r = 0;

        if (p->s->kinds[i] == BLOCK_PRIVATE)
                return false;
        if (p->s->kinds[i] == BLOCK_FILLING) {
                r = kvd_sequence_append(p->table, 1, p->s->pool + i, tokens, n);
                p->s->kinds[i] = r == 1 ? BLOCK_OWN : p->s->kinds[i];
        } else {
                id = id_of(p, i);
                r = kvd_sequence_borrow(p->table, &p->s->pin, 1, &id, tokens);
        }
        return r >= 0;
}

static void enter_all(struct pooled *p) {
        while (p->n_entries < p->n_slots / p->bt) {
                if (p->table && !p->stuck && !enter(p))
                        p->stuck = true;
                p->n_entries++;
        }
}

/* ---- a step of computing ----------------------------------------------------------------------------------------- */

int pooled_prepare(struct pooled *p, struct step *step) {
        int r;

        if (step->first > p->n) { /* stored tokens were found in the meantime: nothing of ours is there yet */
                for (; p->n < step->first; p->n++, p->n_slots++)
                        p->slots[p->n] = p->n_slots;
                for (uint32_t i = 0; i <= p->n_slots / p->bt; i++)
                        p->first[i] = i * p->bt;
        }
        for (uint32_t i = 0; i < step->n; i++)
                p->slots[step->first + i] = p->n_slots + i;
        r = sequence_extend(p->s, p->n_slots + step->n);
        for (uint32_t i = p->n_entries; i < p->s->n_blocks; i++)
                p->blocks[i] = p->s->blocks[i];
        step->blocks = p->blocks;
        step->gone = step->first - p->n_slots;
        step->turn = p->turned ? p->turn : NULL;
        step->turns = p->turns;
        step->chosen = p->gaps ? p->slots : NULL;
        step->n_chosen = step->first + step->n;
        step->block_mass = p->table && step->n == 1 && p->decoded % USE_EVERY == 0 ? p->mass : NULL;
        if (step->block_mass)
                memset(p->mass, 0, p->room * sizeof *p->mass);
        return r;
}

uint32_t *pooled_hits(struct pooled *p) {
        p->selects = true;
        return memset(p->hits, 0, p->room * sizeof *p->hits);
}

bool pooled_publishes(const struct pooled *p, uint32_t n_computed) {
        return !p->setup.options->own_prompt && n_computed <= p->setup.prompt;
}

static void fill_first(struct pooled *p, uint32_t n_computed) {
        for (; p->n < n_computed; p->n++) {
                if (p->n_slots % p->bt == 0)
                        p->first[p->n_slots / p->bt] = p->n;
                p->n_slots++;
        }
        p->first[DIV_UP(p->n_slots, p->bt)] = p->n;
}

/* Each entry's share of the attention, per token, 1 for the average. */
static void report_use(struct pooled *p) {
        float total = 0;

        for (uint32_t i = 0; i < p->n_entries; i++)
                total += p->mass[i];
        for (uint32_t i = 0; i < p->n_entries && total > 0 && !p->stuck; i++)
                kvd_sequence_use(p->table, i,
                                 p->mass[i] / total * (float)p->n / (float)MAX(p->first[i + 1] - p->first[i], 1),
                                 (float)p->hits[i] / (float)p->bt);
}

/* With HShare, what is selected and not there; without, whatever is missing, now and then. */
static bool is_missed(const struct pooled *p, uint32_t i) {
        if (p->blocks[i] || (p->asked[i] && p->decoded + 1 - p->asked[i] < REVIVE_EVERY))
                return false;
        return p->selects ? p->hits[i] >= MISS : p->decoded % REVIVE_EVERY == 0;
}

static void ask_for_missing(struct pooled *p) {
        uint32_t slots[REVIVE_AT_ONCE], n = 0;

        for (uint32_t i = p->n_entries; i-- > 0 && n < REVIVE_AT_ONCE;)
                if (is_missed(p, i)) {
                        slots[n++] = i;
                        p->asked[i] = p->decoded + 1;
                }
        p->stats.misses += n;
        if (n && kvd_sequence_revive(p->table, n, slots, KVD_REVIVE_BOTH) > 0)
                wait_for_proposals(p);
}

int pooled_settle(struct pooled *p, uint32_t n_computed) {
        bool used = p->table && n_computed == p->n + 1 && p->decoded % USE_EVERY == 0;

        fill_first(p, n_computed);
        p->s->n_computed = n_computed;
        if (!in_own_part(p, n_computed - 1)) {
                p->step_first = n_computed;
                enter_all(p);
                return 0;
        }
        if (ends_step(p, p->s->tokens[n_computed - 1])) {
                if (p->setup.align && (n_computed - p->step_first) / p->bt >= LONG_STEP)
                        close_block(p);
                enter_all(p);
                end_step(p);
        }
        enter_all(p);
        if (used)
                report_use(p);
        if (p->table && (n_computed > p->setup.prompt || p->selects)) {
                p->decoded++;
                ask_for_missing(p);
        }
        take_proposals(p);
        return 0;
}

struct pooled_stats pooled_stats(const struct pooled *p) {
        struct pooled_stats stats = p->stats;

        if (p->table)
                kvd_sequence_stats(p->table, &stats.table);
        return stats;
}
