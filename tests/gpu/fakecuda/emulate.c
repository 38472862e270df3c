/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A block runs warp by warp: all lanes of a warp run until they wait, and again when they need no
 * longer wait. When no warp can continue, either all threads are at the same barrier, which then
 * opens, or all have ended. Anything else is misuse.
 */

#include "tests/gpu/fakecuda/emulate.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "ipc/base/util.h"
#include "tests/gpu/fakecuda/emulate_fiber.h"

struct emulate_index emulate_thread, emulate_block, emulate_threads, emulate_blocks;
void (*emulate_touch)(const void *at, size_t bytes, bool writes);
void (*emulate_between)(void);

enum state { RUNS, AT_EXCHANGE, AT_BARRIER, ENDED };
static const char *const state_names[] = {"runs", "waits in its warp", "waits at a barrier",
                                          "has ended"};

/* Asynchronous copies of a thread that are not done yet, oldest first. */
struct copy {
        void *to;
        const void *from;
        unsigned group;
};

struct thread {
        struct fiber *fiber;
        struct emulate_index index;
        unsigned number; /* in its block */
        enum state state;
        const char *what, *file; /* what it waits for, and where */
        int at;
        unsigned exchanges, barriers, warp_barriers; /* passed so far */
        struct copy *copies;                         /* kept from block to block */
        unsigned n_copies, most_copies, group;
};

struct warp {
        /* of this exchange and the previous one */
        uint8_t slots[2][EMULATE_WARP][EMULATE_SLOT] __attribute__((aligned(16)));
        unsigned waiting, blocked; /* lanes in an exchange; lanes at the barrier or ended */
};

static struct {
        pthread_mutex_t lock; /* held during a launch */
        struct thread threads[EMULATE_MOST_THREADS];
        struct warp warps[EMULATE_MOST_THREADS / EMULATE_WARP];
        struct thread *now;
        const char *kernel;
        void (*body)(const void *);
        const void *arguments;
        unsigned n_threads;
        struct emulate_votes votes[2];
        uint8_t *shared, *shared_end;
        uint64_t random; /* 0: ascending order */
        uint64_t launches;
        unsigned block; /* its number in the grid */
        bool seeded;
} engine = {.lock = PTHREAD_MUTEX_INITIALIZER};

static _Noreturn _printf_(1, 2) void misuse(const char *format, ...) {
        va_list args;

        fprintf(stderr, "emulate: %s: block (%u, %u, %u): ", engine.kernel, emulate_block.x,
                emulate_block.y, emulate_block.z);
        va_start(args, format);
        vfprintf(stderr, format, args);
        va_end(args);
        fprintf(stderr, "\n");
        abort();
}

/* ---- order ----------------------------------------------------------------------------------- */

void emulate_seed(uint64_t seed) {
        pthread_mutex_lock(&engine.lock);
        engine.random = seed ? seed * 0x9e3779b97f4a7c15u | 1 : 0;
        engine.seeded = true;
        pthread_mutex_unlock(&engine.lock);
}

static uint64_t next_random(void) {
        engine.random ^= engine.random << 13;
        engine.random ^= engine.random >> 7;
        engine.random ^= engine.random << 17;
        return engine.random >> 11;
}

/* The order of n items in this turn: ascending, or rotated and perhaps reversed at random. */
struct order {
        unsigned first, n;
        bool down;
};

static struct order order_of(unsigned n) {
        return engine.random ? (struct order){(unsigned)(next_random() % n), n, next_random() % 2} :
                               (struct order){.n = n};
}

static unsigned in_order(struct order o, unsigned i) {
        return (o.first + (o.down ? o.n - 1 - i : i)) % o.n;
}

/* ---- waiting --------------------------------------------------------------------------------- */

static struct warp *warp_of(const struct thread *t) {
        return &engine.warps[t->number / EMULATE_WARP];
}

static void pause_thread(struct thread *t, enum state state, const char *what, const char *file,
                         int at) {
        t->state = state;
        t->what = what;
        t->file = file;
        t->at = at;
        fiber_yield(t->fiber);
}

const uint8_t (*emulate_exchange(const void *mine, size_t bytes, const char *what,
                                 int at))[EMULATE_SLOT] {
        struct thread *t = engine.now;
        struct warp *w = warp_of(t);
        unsigned turn = t->exchanges++ % 2;

        memcpy(w->slots[turn][t->number % EMULATE_WARP], mine, bytes);
        w->waiting++;
        pause_thread(t, AT_EXCHANGE, what, "", at);
        return (const uint8_t(*)[EMULATE_SLOT])w->slots[turn];
}

struct emulate_votes emulate_barrier(int vote, const char *file, int at) {
        struct thread *t = engine.now;
        unsigned turn = t->barriers++ % 2;

        engine.votes[turn].some |= vote != 0;
        engine.votes[turn].count += vote != 0;
        warp_of(t)->blocked++;
        pause_thread(t, AT_BARRIER, "__syncthreads", file, at);
        return engine.votes[turn];
}

void emulate_warp_barrier(int at) {
        static const char name[] = "__syncwarp";

        emulate_exchange("", 0, name, at);
        engine.now->warp_barriers++;
}

bool emulate_where(struct emulate_where *to) {
        const struct thread *t = engine.now;

        if (t)
                *to = (struct emulate_where){engine.launches, engine.block, t->number, t->barriers,
                                             t->warp_barriers};
        return t;
}

const char *emulate_kernel(void) {
        return engine.kernel;
}

/* ---- memory ---------------------------------------------------------------------------------- */

void *emulate_shared(void) {
        return engine.shared;
}

bool emulate_is_shared(const void *at) {
        return (const uint8_t *)at >= engine.shared && (const uint8_t *)at < engine.shared_end;
}

void emulate_aligned(const void *at, size_t to, const char *what) {
        if ((uintptr_t)at % to)
                misuse("thread %u: %s at %p, which is no multiple of %zu", engine.now->number, what,
                       at, to);
}

void emulate_copy(void *to, const void *from) {
        struct thread *t = engine.now;

        emulate_aligned(to, 16, "copy_16 to shared memory");
        emulate_aligned(from, 16, "copy_16 from memory");
        if (t->n_copies == t->most_copies) {
                t->most_copies = MAX(64, 2 * t->most_copies);
                t->copies = realloc(t->copies, t->most_copies * sizeof *t->copies);
                if (!t->copies)
                        misuse("no memory for copies");
        }
        if (emulate_touch)
                emulate_touch(to, 16, true);
        memset(to, 0xee, 16);
        t->copies[t->n_copies++] = (struct copy){to, from, t->group};
}

void emulate_commit(void) {
        engine.now->group++;
}

void emulate_wait(unsigned pending) {
        struct thread *t = engine.now;
        unsigned n = 0;

        for (; n < t->n_copies && t->copies[n].group + pending < t->group; n++) {
                if (emulate_touch) {
                        emulate_touch(t->copies[n].from, 16, false);
                        emulate_touch(t->copies[n].to, 16, true);
                }
                memcpy(t->copies[n].to, t->copies[n].from, 16);
        }
        t->n_copies -= n;
        if (n)
                memmove(t->copies, t->copies + n, t->n_copies * sizeof *t->copies);
}

/* Places shared memory so that its end, rounded up to 16, is before an inaccessible page. */
static void prepare_shared(size_t bytes) {
        enum { GUARD = 64 << 10, ROOM = 256 << 10 };

        if (!engine.shared_end) {
                uint8_t *at = mmap(NULL, ROOM + GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                                   0);

                if (at == MAP_FAILED || mprotect(at, ROOM, PROT_READ | PROT_WRITE) < 0)
                        misuse("no memory for shared memory");
                engine.shared_end = at + ROOM;
        }
        engine.shared = engine.shared_end - ALIGN_UP(bytes, 16);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

static void run_thread(void *data) {
        struct thread *t = data;

        engine.body(engine.arguments);
        t->state = ENDED;
        warp_of(t)->blocked++;
}

static void begin_block(void) {
        memset(engine.votes, 0, sizeof engine.votes);
        memset(engine.shared, 0xff, (size_t)(engine.shared_end - engine.shared));
        for (unsigned i = 0; i < engine.n_threads; i++) {
                struct thread *t = &engine.threads[i];

                t->number = i;
                t->index = (struct emulate_index){i % emulate_threads.x,
                                                  i / emulate_threads.x % emulate_threads.y,
                                                  i / emulate_threads.x / emulate_threads.y};
                t->state = RUNS;
                t->exchanges = t->barriers = t->warp_barriers = t->n_copies = t->group = 0;
                if (!t->fiber)
                        t->fiber = fiber_new(run_thread, t);
        }
        for (unsigned i = 0; i < engine.n_threads / EMULATE_WARP; i++)
                engine.warps[i].waiting = engine.warps[i].blocked = 0;
}

/* All lanes are in an exchange, which must be the same one. */
static void finish_exchange(struct warp *w, struct thread *lanes) {
        for (unsigned i = 0; i < EMULATE_WARP; i++) {
                if (lanes[i].what != lanes[0].what || lanes[i].at != lanes[0].at)
                        misuse("thread %u is in %s (line %d), thread %u of the same warp in %s "
                               "(line %d)",
                               lanes[0].number, lanes[0].what, lanes[0].at, lanes[i].number,
                               lanes[i].what, lanes[i].at);
                lanes[i].state = RUNS;
        }
        w->waiting = 0;
}

static _Noreturn void lane_is_missing(const struct thread *lanes) {
        const struct thread *in = NULL, *out = NULL;

        for (unsigned i = 0; i < EMULATE_WARP; i++)
                if (lanes[i].state == AT_EXCHANGE)
                        in = &lanes[i];
                else
                        out = &lanes[i];
        misuse("thread %u is in %s (line %d), but thread %u of the same warp %s (line %d)",
               in->number, in->what, in->at, out->number, state_names[out->state], out->at);
}

/* Runs a warp until all its lanes are at a barrier or have ended. */
static void run_warp(unsigned number) {
        struct warp *w = &engine.warps[number];
        struct thread *lanes = &engine.threads[number * EMULATE_WARP];

        while (w->blocked < EMULATE_WARP) {
                struct order order = order_of(EMULATE_WARP);

                for (unsigned i = 0; i < EMULATE_WARP; i++) {
                        struct thread *t = &lanes[in_order(order, i)];

                        if (t->state != RUNS)
                                continue;
                        engine.now = t;
                        emulate_thread = t->index;
                        fiber_resume(t->fiber);
                        engine.now = NULL;
                }
                if (w->waiting == EMULATE_WARP)
                        finish_exchange(w, lanes);
                else if (w->waiting)
                        lane_is_missing(lanes);
        }
}

/*
 * Every thread is at a barrier or has ended. All must be at the same barrier, or all have ended.
 * Returns true if there is more to run.
 */
static bool open_barrier(void) {
        const struct thread *first = &engine.threads[0];

        for (unsigned i = 1; i < engine.n_threads; i++) {
                const struct thread *t = &engine.threads[i];

                if (t->state != first->state || (t->state == AT_BARRIER && t->at != first->at))
                        misuse("thread %u %s (line %d), but thread %u %s (line %d of %s)",
                               first->number, state_names[first->state], first->at, t->number,
                               state_names[t->state], t->at,
                               t->state == AT_BARRIER ? t->file : first->file);
        }
        if (first->state == ENDED)
                return false;
        engine.votes[first->barriers % 2] = (struct emulate_votes){0};
        for (unsigned i = 0; i < engine.n_threads; i++)
                engine.threads[i].state = RUNS;
        for (unsigned i = 0; i < engine.n_threads / EMULATE_WARP; i++)
                engine.warps[i].blocked = 0;
        return true;
}

static void run_block(void) {
        unsigned n_warps = engine.n_threads / EMULATE_WARP;

        begin_block();
        do {
                struct order order = order_of(n_warps);

                for (unsigned i = 0; i < n_warps; i++)
                        run_warp(in_order(order, i));
        } while (open_barrier());
}

/* ---- launches -------------------------------------------------------------------------------- */

static void check_launch(const struct fake_launch *l, unsigned most) {
        if (engine.n_threads == 0 || engine.n_threads > most || engine.n_threads % EMULATE_WARP)
                misuse("%u threads; this kernel takes multiples of 32 up to %u", engine.n_threads,
                       most);
        if (l->shared > EMULATE_MOST_SHARED)
                misuse("%zu bytes of shared memory, and no block may have more than %d", l->shared,
                       EMULATE_MOST_SHARED);
        if (l->grid[0] == 0 || l->grid[1] == 0 || l->grid[2] == 0 || l->grid[1] > 65535 ||
            l->grid[2] > 65535)
                misuse("a grid of %u x %u x %u blocks", l->grid[0], l->grid[1], l->grid[2]);
}

static void read_seed(void) {
        const char *seed = getenv("EMULATE_SEED");

        if (seed && !engine.seeded)
                engine.random = strtoull(seed, NULL, 10) * 0x9e3779b97f4a7c15u;
        engine.seeded = true;
}

static void run_blocks(const struct fake_launch *l) {
        struct order x = order_of(l->grid[0]), y = order_of(l->grid[1]), z = order_of(l->grid[2]);

        for (unsigned k = 0; k < l->grid[2]; k++)
                for (unsigned j = 0; j < l->grid[1]; j++)
                        for (unsigned i = 0; i < l->grid[0]; i++) {
                                emulate_block = (struct emulate_index){in_order(x, i),
                                                                       in_order(y, j),
                                                                       in_order(z, k)};
                                engine.block = (emulate_block.z * l->grid[1] + emulate_block.y) *
                                                       l->grid[0] +
                                               emulate_block.x;
                                run_block();
                                if (emulate_between)
                                        emulate_between();
                        }
}

void emulate_run(const char *kernel, unsigned most, const struct fake_launch *l,
                 void (*body)(const void *), const void *arguments) {
        pthread_mutex_lock(&engine.lock);
        read_seed();
        engine.launches++;
        engine.kernel = kernel;
        engine.body = body;
        engine.arguments = arguments;
        engine.n_threads = l->block[0] * l->block[1] * l->block[2];
        emulate_threads = (struct emulate_index){l->block[0], l->block[1], l->block[2]};
        emulate_blocks = (struct emulate_index){l->grid[0], l->grid[1], l->grid[2]};
        check_launch(l, MIN(most, EMULATE_MOST_THREADS));
        prepare_shared(l->shared);
        run_blocks(l);
        pthread_mutex_unlock(&engine.lock);
}
