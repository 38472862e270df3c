/* SPDX-License-Identifier: Apache-2.0 */
/* T4: slots that the stream of one process writes and that of another waits for */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ipc/base/semaphore.h"
#include "ipc/base/util.h"
#include "tests/gpu/check.h"

#define CHUNK (4 * MIB)
#define PAGE 65536
#define MOST_ROUNDS 400

/* Two processes with the same chunk and the same registered page of host memory. */
struct pair {
        struct actor writer, waiter;
        uint64_t *page; /* our mapping of the host page */
        int chunk, host;
        uint64_t next; /* the next unused value */
};

static void pair_stop(struct pair *p) {
        actor_stop(&p->writer);
        actor_stop(&p->waiter);
        closep(&p->chunk);
        closep(&p->host);
        if (p->page)
                munmap(p->page, PAGE);
}

static int join(struct actor *a, int host) {
        actor_lend(a, host);
        return ask(a, REGISTER, PAGE);
}

static int pair_start(struct pair *p) {
        int r;

        *p = (struct pair){.writer = actor_start(),
                           .waiter = actor_start(),
                           .chunk = -1,
                           .next = 1};
        p->host = host_page(PAGE, 0);
        p->page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, p->host, 0);
        if (p->page == MAP_FAILED)
                p->page = NULL;
        r = ask(&p->writer, OPEN);
        r = r ? r : ask(&p->writer, CREATE, CHUNK);
        p->chunk = STEAL_FD(p->writer.fd);
        r = r ? r : ask(&p->writer, MAP, CU_ACCESS_READ_WRITE);
        r = r ? r : ask(&p->writer, FILL, 0);
        r = r ? r : ask(&p->writer, SPOIL, BY_MEMSET, (CHUNK - 4096) / 4);
        r = r ? r : ask(&p->waiter, OPEN);
        actor_lend(&p->waiter, p->chunk);
        r = r ? r : ask(&p->waiter, IMPORT, CHUNK, CU_ACCESS_READ_WRITE);
        return r;
}

/* Sets the slots in the chunk to 0: FILL has overwritten them. */
static int clear_slots(struct pair *p) {
        for (uint64_t slot = 0; slot < 16; slot++) {
                int r = ask(&p->writer, WRITE, IN_DEVICE, slot, 0);

                if (r)
                        return r;
        }
        return ask(&p->writer, HEALTH);
}

static bool begin(struct pair *p, struct line *l) {
        int r = pair_start(p);

        r = r ? r : clear_slots(p);
        if (cannot_ask(l, r, "two processes with one chunk",
                       r == p->writer.note.result ? &p->writer : &p->waiter))
                return false;
        r = join(&p->writer, p->host);
        r = r ? r : join(&p->waiter, p->host);
        return !cannot_ask(l, r, "registering host memory", &p->waiter);
}

/* ---- who wakes a wait ------------------------------------------------------------------------ */

enum release { BY_STREAM, BY_STORE, BY_OUR_STORE, BY_MEMCPY };

struct variant {
        unsigned where;
        enum release release;
        const char *words;
};

static const struct variant variants[] = {
        {IN_HOST, BY_STREAM, "in registered host memory, released by another process' stream"},
        {IN_HOST, BY_STORE,
         "in registered host memory, released by a plain store of another client"},
        {IN_HOST, BY_OUR_STORE,
         "in registered host memory, released by a plain store of a process without a driver"},
        {IN_HOST, BY_MEMCPY,
         "in registered host memory, released by a driver's copy of another process"},
        {IN_DEVICE, BY_STREAM, "in the device's memory, released by another process' stream"},
        {IN_DEVICE, BY_MEMCPY,
         "in the device's memory, released by a driver's copy of another process"},
};

/* Returns the time of the release, or 0 if it failed. *r is the result. */
static uint64_t release(struct pair *p, const struct variant *v, uint64_t slot, uint64_t value,
                        int *r) {
        uint64_t when = now_ns();

        *r = 0;
        if (v->release == BY_OUR_STORE) {
                __atomic_store_n(p->page + slot, value, __ATOMIC_SEQ_CST);
                return when;
        }
        if (v->release == BY_STORE)
                *r = ask(&p->writer, STORE, slot, value);
        else
                *r = ask(&p->writer, v->release == BY_STREAM ? WRITE : COPY, v->where, slot, value);
        return *r ? 0 : p->writer.note.n[0];
}

static uint64_t after_ms(unsigned ms) {
        return now_ns() + ms * UINT64_C(1000000);
}

static void until_it_waits(struct pair *p, uint64_t value) {
        uint64_t until = after_ms(check_ms(500, CHECK_PATIENCE_MS));

        while (__atomic_load_n(p->page + WAITING_SLOT, __ATOMIC_SEQ_CST) != value &&
               now_ns() < until)
                ;
        sleep_ms(check_ms(1, 20));
}

/*
 * The timeout of a wait. It is short if the wait must time out, which is on a stand-in where only a
 * stream's write wakes a wait, and the release is something else.
 */
static unsigned wake_ms(const struct variant *v) {
        bool comes = v->release == BY_STREAM || !getenv("FAKECUDA_WAKE");

        return check_ms(1000, comes ? CHECK_PATIENCE_MS : 200);
}

/* Releases one pending wait. Returns microseconds until it is over, or -1. */
static double wake(struct pair *p, const struct variant *v, uint64_t slot, int *r) {
        uint64_t value = p->next++, when;

        tell(&p->waiter, AWAIT, v->where, slot, value, wake_ms(v));
        until_it_waits(p, value);
        when = release(p, v, slot, value, r);
        if (*r)
                return -1;
        *r = actor_hear(&p->waiter, (int)check_ms(5000, 2 * CHECK_PATIENCE_MS));
        return *r ? -1 : us_of(p->waiter.note.n[0] - when);
}

/* If a wait was not woken, does a stream's write wake it? */
static void rescue(struct pair *p, const struct variant *v, uint64_t slot, struct line *l,
                   bool never) {
        const struct variant by_stream = {v->where, BY_STREAM, ""};
        int r, after;

        release(p, &by_stream, slot, p->next++, &r);
        after = ask(&p->waiter, REST, check_ms(2000, CHECK_PATIENCE_MS));
        line_answer(l, v->release == BY_MEMCPY && v->where == IN_DEVICE ? OPEN_QUESTION : NO,
                    "not %swoken within %u ms; after a stream's write (%s): %s",
                    never ? "" : "every wait was ", wake_ms(v), actor_word(r), actor_word(after));
}

static void wait_variant(const struct variant *v) {
        double times[MOST_ROUNDS];
        unsigned n = 0, rounds = check_rounds(MOST_ROUNDS);
        struct pair p;
        struct line l;
        int r = 0;

        line_begin(&l, "T4", "a slot %s: does a pending wait of a stream see it, and when?",
                   v->words);
        if (!begin(&p, &l)) {
                pair_stop(&p);
                return;
        }
        for (; n < rounds && !r; n += !r)
                times[n] = wake(&p, v, 2, &r);
        line_number(&l, "rounds", n);
        if (n) {
                line_number(&l, "wake_us_median", median(times, n));
                line_number(&l, "wake_us_most", times[n - 1]);
        }
        if (r == CU_NOT_READY)
                rescue(&p, v, 2, &l, n == 0);
        else
                line_answer(&l, r ? NO : YES, "%s, seen %.1f us after its release", actor_word(r),
                            n ? times[n / 2] : 0);
        pair_stop(&p);
}

/* ---- what else the design stands on ---------------------------------------------------------- */

/* Writes data, then a slot: does a stream that sees the slot see the data? */
static void data_behind(unsigned where) {
        unsigned rounds = check_rounds(MOST_ROUNDS), ms = check_ms(5000, CHECK_PATIENCE_MS);
        uint64_t wrong = 0;
        struct pair p;
        struct line l;
        int r = 0;

        line_begin(&l, "T4",
                   "data, then a slot in %s, by one stream: does who waits for the slot see the "
                   "data?",
                   where == IN_HOST ? "host memory" : "the device's memory");
        if (begin(&p, &l)) {
                for (unsigned i = 0; i < rounds && !r; i++) {
                        uint64_t value = p.next++;

                        tell(&p.waiter, CONSUME, where, 3, value, value * 7, ms);
                        r = ask(&p.writer, PUBLISH, where, 3, value, value * 7);
                        r = r ? r : actor_hear(&p.waiter, 2 * (int)ms);
                        wrong += p.waiter.note.n[0];
                }
                line_number(&l, "rounds", rounds);
                line_number(&l, "words_wrong", (double)wrong);
                line_answer(&l, r || wrong ? NO : YES, "%s, %llu words wrong", actor_word(r),
                            (unsigned long long)wrong);
        }
        pair_stop(&p);
}

/*
 * The time from a stream's write, through another stream that waits and answers, to our plain load.
 * No call synchronises.
 */
static void round_trip(void) {
        double times[MOST_ROUNDS];
        unsigned rounds = check_rounds(MOST_ROUNDS), n = 0;
        struct pair p;
        struct line l;
        int r = 0;

        line_begin(&l, "T4",
                   "stream writes slot A, another process' stream waits for A and writes B, a "
                   "processor that "
                   "has no driver reads B with plain loads: how long?");
        if (begin(&p, &l)) {
                while (n < rounds && !r) {
                        uint64_t value = p.next++, until;

                        r = ask(&p.waiter, ECHO, IN_HOST, 4, value, 5, value);
                        r = r ? r : ask(&p.writer, WRITE, IN_HOST, 4, value);
                        until = after_ms(check_ms(1000, CHECK_PATIENCE_MS));
                        while (__atomic_load_n(p.page + 5, __ATOMIC_SEQ_CST) != value &&
                               now_ns() < until)
                                ;
                        times[n++] = us_of(now_ns() - p.writer.note.n[0]);
                        r = r                                                      ? r :
                            __atomic_load_n(p.page + 5, __ATOMIC_SEQ_CST) != value ? CU_NOT_READY :
                                                                                     0;
                }
                line_number(&l, "us_median", median(times, n));
                line_answer(&l, r ? NO : YES, "%s, %.1f us", actor_word(r), times[n / 2]);
        }
        pair_stop(&p);
}

static void passed_wait(void) {
        double times[MOST_ROUNDS];
        unsigned rounds = check_rounds(MOST_ROUNDS), ms = check_ms(1000, CHECK_PATIENCE_MS), n = 0;
        struct pair p;
        struct line l;
        int r = 0;

        line_begin(&l, "T4",
                   "a wait for a slot in host memory that has its value already: what does it "
                   "cost?");
        if (begin(&p, &l)) {
                for (; n < rounds && !r; n++) {
                        r = ask(&p.waiter, AWAIT, IN_HOST, 6, 0, ms);
                        times[n] = us_of(p.waiter.note.n[1]);
                }
                line_number(&l, "us_median", median(times, n));
                line_answer(&l, r ? NO : YES, "%s, %.1f us from the call to the stream being empty",
                            actor_word(r), times[n / 2]);
        }
        pair_stop(&p);
}

/* The value that wakes all waits, and the comparison with values after it. */
static void poison(void) {
        const struct variant by_us = {IN_HOST, BY_OUR_STORE, ""};
        unsigned ms = wake_ms(&by_us);
        struct pair p;
        struct line l;
        int r, high, beyond;

        line_begin(&l, "T4",
                   "a slot gets INT64_MAX: do waits for less pass, and is the comparison cyclic "
                   "behind it?");
        if (begin(&p, &l)) {
                tell(&p.waiter, AWAIT, IN_HOST, 7, 12345, 2 * ms);
                sleep_ms(2);
                release(&p, &by_us, 7, INT64_MAX, &r);
                r = actor_hear(&p.waiter, 5 * (int)ms);
                high = ask(&p.waiter, AWAIT, IN_HOST, 7, SEMAPHORE_VALUE_MAX, ms);
                beyond = ask(&p.waiter, AWAIT, IN_HOST, 7, (uint64_t)INT64_MAX + 5,
                             check_ms(500, 100));
                line_answer(&l, !r && !high ? YES : NO,
                            "a pending wait for 12345: %s; for SEMAPHORE_VALUE_MAX: %s; for "
                            "INT64_MAX + 5: %s",
                            actor_word(r), actor_word(high), actor_word(beyond));
        }
        pair_stop(&p);
}

void check_order(void) {
        for (size_t i = 0; i < ARRAY_SIZE(variants); i++)
                wait_variant(&variants[i]);
        data_behind(IN_HOST);
        data_behind(IN_DEVICE);
        round_trip();
        passed_wait();
        poison();
}
