/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Processes that share one GPU cache through kvd, and die: scripts for actors (act_pool.c) and a
 * daemon. JSON lines (line.h). $KVD is the daemon's binary, KVD_GPU the device.
 *
 *      gpu-share [--only NAME[,NAME...]] [-- SECTION.KEY=VALUE...]
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/gpu/act_pool.h"
#include "tests/gpu/check.h"
#include "tests/gpu/driver.h"
#include "tests/lib/instance.h"

#define BLOCKS 64u
#define CLIENTS 4

static struct driver driver;
static char **more; /* additional settings of kvd */

/* ---- a daemon on the device ------------------------------------------------------------------ */

static const char *const *settings(void) {
        static const char *list[16] = {"daemon.backend=cuda"};
        static char device[64];
        size_t n = 1;

        snprintf(device, sizeof device, "daemon.device=%s",
                 getenv("KVD_GPU") ? getenv("KVD_GPU") : "0");
        list[n++] = device;
        list[n++] = driver.stand_in ? "daemon.pool=64M" : "daemon.pool=2G";
        list[n++] = driver.stand_in ? "daemon.segment=4M" : "daemon.segment=64M";
        for (char **m = more; m && *m && n < ARRAY_SIZE(list) - 1; m++)
                list[n++] = *m;
        list[n] = NULL;
        return list;
}

struct scene {
        struct instance daemon;
        struct actor clients[CLIENTS];
        unsigned n;
        int r;
        uint64_t wrong;
};

static void scene_start(struct scene *s, unsigned clients) {
        *s = (struct scene){.n = clients};
        instance_start(&s->daemon, settings());
        for (unsigned i = 0; i < clients; i++)
                s->clients[i] = actor_start();
        for (unsigned i = 0; i < clients && !s->r; i++)
                s->r = ask_join(&s->clients[i], s->daemon.socket);
}

static void scene_stop(struct scene *s) {
        for (unsigned i = 0; i < s->n; i++)
                actor_stop(&s->clients[i]);
        if (s->daemon.pid)
                instance_stop(&s->daemon);
        instance_sweep(&s->daemon);
}

/* The result of libkvd or of the driver as text. */
static const char *word(const struct actor *a, int r) {
        static char text[300];

        if (r < POOL_ERRNO)
                return actor_word(r);
        snprintf(text, sizeof text, "%s (%s)", strerror(r - POOL_ERRNO), a ? a->note.text : "");
        return text;
}

static bool cannot_join(struct scene *s, struct line *l) {
        struct actor *a = &s->clients[0];

        for (unsigned i = 0; i < s->n && s->r; i++)
                if (s->clients[i].note.result == s->r)
                        a = &s->clients[i];
        if (s->r)
                line_answer(l, NO, "a client cannot use the pool: %s", word(a, s->r));
        return s->r;
}

static unsigned reading_ms(void) {
        return check_ms(15000, CHECK_PATIENCE_MS);
}

/* FIND, READ if the stream still waits, DROP. Counts wrong words. Returns the blocks found. */
static uint64_t find_all(struct scene *s, struct actor *a, uint64_t seed) {
        int r = ask(a, FIND, seed, BLOCKS);
        uint64_t tokens = a->note.n[0];

        if (!r)
                s->wrong += a->note.n[4];
        if (r == CU_NOT_READY) {
                r = ask(a, READ, seed, reading_ms());
                s->wrong += r ? 0 : a->note.n[0];
        }
        if (!r && tokens)
                r = ask(a, DROP);
        s->r = s->r ? s->r : r;
        return tokens / POOL_BLOCK_TOKENS;
}

/* ---- scripts --------------------------------------------------------------------------------- */

/*
 * Client 1 fills a chain with a stream and seals it at once. Client 2 finds it and reads it in
 * place.
 */
static void in_place(void) {
        double hit[200], lookup[200], wait[200];
        unsigned rounds = check_rounds(200);
        struct scene s;
        struct line l;
        bool late;

        line_begin(&l, "share",
                   "a prefix of %u blocks of 256 KiB that another process computed: what does its "
                   "first "
                   "use add?",
                   BLOCKS);
        scene_start(&s, 2);
        if (cannot_join(&s, &l))
                goto out;
        struct actor *a = &s.clients[0], *b = &s.clients[1];

        s.r = ask(a, PUT, 1, BLOCKS);
        line_number(&l, "seal_us", us_of(a->note.n[1]));
        for (unsigned i = 0; i < rounds && !s.r; i++) {
                s.r = ask(b, FIND, 1, BLOCKS);
                if (s.r == CU_NOT_READY)
                        s.r = ask(b, READ, 1, reading_ms());
                hit[i] = us_of(b->note.n[3]);
                lookup[i] = us_of(b->note.n[1]);
                wait[i] = us_of(b->note.n[2]);
                s.wrong += b->note.n[4];
                s.r = s.r ? s.r : ask(b, DROP);
        }
        line_number(&l, "lookup_and_pin_us", median(lookup, rounds));
        line_number(&l, "wait_on_us", median(wait, rounds));
        line_number(&l, "to_end_of_first_use_us", median(hit, rounds));
        line_number(&l, "wrong_words", (double)s.wrong);
        late = !driver.stand_in && lookup[rounds / 2] + wait[rounds / 2] > 100;
        line_answer(&l, s.r || s.wrong || late ? NO : YES,
                    "%s; look up and pin %.1f us, wait %.1f us, with a copy of 4 bytes to the host "
                    "%.1f us; %llu words "
                    "wrong",
                    word(b, s.r), lookup[rounds / 2], wait[rounds / 2], hit[rounds / 2],
                    (unsigned long long)s.wrong);
out:
        scene_stop(&s);
}

/* Each client puts its own chains, and looks for those of the next client. */
static void together(void) {
        unsigned rounds = driver.stand_in ? 3 : 40;
        uint64_t found = 0, asked = 0;
        struct scene s;
        struct line l;

        line_begin(&l, "share",
                   "%d processes fill, find and read chains of %u blocks at once: does anybody see "
                   "a "
                   "wrong byte?",
                   CLIENTS, BLOCKS / 8);
        scene_start(&s, CLIENTS);
        if (cannot_join(&s, &l))
                goto out;
        for (unsigned round = 0; round < rounds && !s.r; round++) {
                for (unsigned i = 0; i < CLIENTS; i++)
                        tell(&s.clients[i], PUT, 100 + round * CLIENTS + i, BLOCKS / 8);
                for (unsigned i = 0; i < CLIENTS; i++)
                        s.r = s.r ? s.r : actor_hear(&s.clients[i], (int)check_ms(20000, 60000));
                for (unsigned i = 0; i < CLIENTS && !s.r; i++, asked += BLOCKS / 8)
                        found += find_all(&s, &s.clients[i],
                                          100 + round * CLIENTS + (i + 1) % CLIENTS);
        }
        line_number(&l, "blocks_asked", (double)asked);
        line_number(&l, "blocks_found", (double)found);
        line_number(&l, "wrong_words", (double)s.wrong);
        line_answer(&l, s.r || s.wrong || !found ? NO : YES,
                    "%s; %llu of %llu blocks found, %llu words wrong", word(&s.clients[0], s.r),
                    (unsigned long long)found, (unsigned long long)asked,
                    (unsigned long long)s.wrong);
out:
        scene_stop(&s);
}

/*
 * Client 1 starts a kernel that does not end, fills a chain after it, and seals the chain. Client 2
 * finds it and waits on its stream. Client 1 is killed. Client 2 continues, learns that the data
 * was never written, and no longer finds the chain. Client 3's blocks are unchanged.
 */
static void killed_client(void) {
        struct scene s;
        struct line l;
        uint64_t killed, again;
        int waits, went, judged;

        line_begin(&l, "share",
                   "a process is killed while a long kernel of it runs, with sealed blocks behind "
                   "that "
                   "kernel that another one waits for: what do the others see?");
        scene_start(&s, 3);
        if (cannot_join(&s, &l))
                goto out;
        struct actor *a = &s.clients[0], *b = &s.clients[1], *c = &s.clients[2];

        s.r = ask(c, PUT, 3, BLOCKS);
        s.r = s.r ? s.r : ask(a, PUT, 4, BLOCKS / 8, 1ull << 40);
        if (s.r) {
                line_answer(&l, OPEN_QUESTION, "not asked: %s",
                            word(s.r == a->note.result ? a : c, s.r));
                goto out;
        }
        waits = ask(b, FIND, 4, BLOCKS / 8);
        line_number(&l, "tokens_found_before", (double)b->note.n[0]);
        killed = now_ns();
        actor_stop(a);
        tell(b, READ, 4, reading_ms());
        went = actor_hear(b, (int)reading_ms() + 3000);
        line_number(&l, "kill_to_going_on_ms", ms_of(b->note.n[1] - killed));
        double ms = ms_of(b->note.n[1] - killed);

        ask(b, JUDGE);
        judged = (int)(int64_t)b->note.n[0];
        ask(b, DROP);
        ask(b, FIND, 4, BLOCKS / 8);
        again = b->note.n[0];
        line_number(&l, "tokens_found_after", (double)again);
        find_all(&s, b, 3);
        line_number(&l, "wrong_words_of_others", (double)s.wrong);
        line_answer(&l,
                    waits == CU_NOT_READY && !went && judged == -EIO && !again && !s.wrong && !s.r ?
                            YES :
                            NO,
                    "before: %s; after the kill its reader's stream goes on in %.0f ms (%s), "
                    "kvd_check_pin says "
                    "\"%s\", the chain is %sfound again, others' blocks: %llu words wrong",
                    actor_word(waits), ms, actor_word(went), judged ? strerror(-judged) : "well",
                    again ? "" : "not ", (unsigned long long)s.wrong);
out:
        scene_stop(&s);
}

/* Retries until the new daemon answers: calls that need the daemon reconnect. */
static int put_at_last(struct actor *a, uint64_t seed) {
        uint64_t until = now_ns() + check_ms(20000, CHECK_PATIENCE_MS) * UINT64_C(1000000);
        int r;

        while ((r = ask(a, PUT, seed, BLOCKS)) != 0 && now_ns() < until)
                sleep_ms(100);
        return r;
}

/*
 * The daemon is killed while clients hold blocks, and they continue to read. They use the next
 * daemon once it has started.
 */
static void killed_owner(void) {
        struct scene s;
        struct line l;
        uint64_t held = 0;

        line_begin(&l, "share",
                   "the owner is killed while clients hold blocks: are they what they were, and "
                   "does the "
                   "next owner serve them?");
        scene_start(&s, 2);
        if (cannot_join(&s, &l))
                goto out;
        struct actor *a = &s.clients[0], *b = &s.clients[1];

        s.r = ask(a, PUT, 5, BLOCKS);
        s.r = s.r ? s.r : ask(b, FIND, 5, BLOCKS);
        if (s.r == CU_NOT_READY)
                s.r = 0;
        instance_kill(&s.daemon);
        for (unsigned i = 0; i < check_rounds(20) && !s.r; i++) {
                s.r = ask(b, READ, 5, reading_ms());
                held += b->note.n[0];
                sleep_ms(20);
        }
        line_number(&l, "wrong_words_while_it_was_away", (double)held);
        ask(b, DROP);
        instance_again(&s.daemon, settings());
        s.r = s.r ? s.r : put_at_last(a, 6);
        s.r = s.r ? s.r : put_at_last(b, 7);
        uint64_t found = s.r ? 0 : find_all(&s, b, 6);

        line_number(&l, "blocks_found_at_the_next", (double)found);
        line_number(&l, "wrong_words_at_the_next", (double)s.wrong);
        line_answer(&l, s.r || held || s.wrong || !found ? NO : YES,
                    "%s; while it was away: %llu words wrong; the next one: %llu of %u blocks "
                    "found, %llu words wrong",
                    word(a, s.r), (unsigned long long)held, (unsigned long long)found, BLOCKS,
                    (unsigned long long)s.wrong);
out:
        scene_stop(&s);
}

/* ---- main ------------------------------------------------------------------------------------ */

static const struct check scripts[] = {
        {"in-place", "a prefix that another process computed", in_place, 40},
        {"together", "processes that share one cache", together, 40},
        {"killed-client", "a client is killed during a long kernel", killed_client, 60},
        {"killed-owner", "the owner is killed", killed_owner, 60},
};

int main(int argc, char **argv) {
        const char *only = argc > 2 && strcmp(argv[1], "--only") == 0 ? argv[2] : NULL;
        bool well = true;

        for (int i = 1; i < argc; i++)
                if (strcmp(argv[i], "--") == 0)
                        more = argv + i + 1;
        actor_more(actions_of_pool);
        if (!driver_say(&driver))
                return 77;
        check_driver(&driver);
        for (size_t i = 0; i < ARRAY_SIZE(scripts); i++)
                if (check_is_wanted(only, scripts[i].name))
                        well = check_run(&scripts[i], 0) && well;
        return !well;
}
