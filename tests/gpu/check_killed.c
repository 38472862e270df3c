/* SPDX-License-Identifier: Apache-2.0 */
/* T6: when does the GPU work of a killed process stop? */
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/gpu/check.h"

#define PAGE 65536
#define ROUNDS 5

struct how {
        unsigned action;
        uint64_t n;
        uint64_t bytes; /* bytes of memory that the work writes */
        bool forks;     /* the process has a child, which outlives it */
        const char *words;
};

struct scene {
        struct actor victim, onlooker;
        volatile uint64_t *page;
        int chunk, host, pidfd;
        pid_t child; /* the victim's child; 0 if none */
};

static int scene_start(struct scene *s, const struct how *how) {
        uint64_t bytes = check_bytes(how->bytes);
        int r;

        *s = (struct scene){.victim = actor_start(),
                            .onlooker = actor_start(),
                            .chunk = -1,
                            .pidfd = -1};
        s->host = host_page(PAGE, 0);
        s->page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, s->host, 0);
        r = s->page == MAP_FAILED ? CU_OUT_OF_MEMORY : ask(&s->onlooker, OPEN);
        r = r ? r : ask(&s->onlooker, CREATE, bytes);
        s->chunk = STEAL_FD(s->onlooker.fd);
        r = r ? r : ask(&s->onlooker, MAP, CU_ACCESS_READ_WRITE);
        r = r ? r : ask(&s->victim, OPEN);
        actor_lend(&s->victim, s->chunk);
        r = r ? r : ask(&s->victim, IMPORT, bytes, CU_ACCESS_READ_WRITE);
        actor_lend(&s->victim, s->host);
        r = r ? r : ask(&s->victim, REGISTER, PAGE);
        s->pidfd = (int)syscall(SYS_pidfd_open, s->victim.pid, 0);
        if (!r && how->forks) {
                r = ask(&s->victim, FORK);
                s->child = (pid_t)s->victim.note.n[0];
        }
        return r;
}

static void scene_stop(struct scene *s) {
        if (s->page != MAP_FAILED)
                s->page[STOP_SLOT] = 1;
        actor_stop(&s->victim);
        if (s->child > 0)
                kill(s->child, SIGKILL);
        actor_stop(&s->onlooker);
        closep(&s->chunk);
        closep(&s->host);
        closep(&s->pidfd);
        if (s->page != MAP_FAILED)
                munmap((void *)s->page, PAGE);
}

struct death {
        double readable_ms; /* from the signal until the pidfd is readable */
        /* from then to the last change seen in host memory; negative: before it */
        double last_ms;
        /* from then to the last change seen in device memory; resolution: device_step_ms */
        double device_ms;
        double device_step_ms;
        uint64_t queued; /* SETS: number of queued writes when it was killed */
        uint64_t beats;
};

/*
 * Watches a GPU for 1.2 s. Watches a stand-in until 0.1 s after the process has ended, and at least
 * three times.
 */
static bool is_watched(uint64_t now, uint64_t killed, uint64_t readable, uint64_t looks) {
        bool seen = readable && looks > 2 && now > readable + 100000000u;

        return now < killed + check_ms(1200, CHECK_PATIENCE_MS) * UINT64_C(1000000) &&
               !(seen && check_on_stand_in());
}

/* Polls host memory continuously, and device memory at most once a millisecond. */
static void watch(struct scene *s, uint64_t killed, struct death *d) {
        uint64_t readable = 0, last = killed, device = killed, heart = s->page[HEART_SLOT],
                 word = 0, looked = killed, looks = 0;
        struct pollfd p = {s->pidfd, POLLIN, 0};

        for (uint64_t now = killed; is_watched(now, killed, readable, looks); now = now_ns()) {
                if (!readable && poll(&p, 1, 0) == 1)
                        readable = now_ns();
                if (s->page[HEART_SLOT] != heart) {
                        heart = s->page[HEART_SLOT];
                        last = now;
                }
                /* reading device memory is slow: only after the pidfd is readable */
                if (!readable || now < looked + 1000000u)
                        continue;
                looked = now;
                ask(&s->onlooker, PEEK);
                if (looks++ && s->onlooker.note.n[0] != word)
                        device = now_ns();
                word = s->onlooker.note.n[0];
        }
        readable = readable ? readable : now_ns();
        d->readable_ms = ms_of(readable - killed);
        d->last_ms = ms_of(last) - ms_of(readable);
        d->device_ms = ms_of(device) - ms_of(readable);
        d->device_step_ms = looks ? ms_of(now_ns() - killed) / (double)looks : 0;
        d->beats = heart;
}

/* SETS: the number of writes that are queued and not done yet. */
static uint64_t queued(const struct scene *s) {
        uint64_t done = s->page[HEART_SLOT], put = s->page[QUEUED_SLOT];

        return put - MIN(put, done);
}

/*
 * A GPU's queue is full after 0.2 s. A stand-in may begin later, so its queue is polled. Returns
 * the number of queued writes.
 */
static uint64_t let_it_run(const struct scene *s, const struct how *how) {
        uint64_t until = now_ns() + check_ms(200, CHECK_PATIENCE_MS) * UINT64_C(1000000), n;
        bool runs;

        do {
                sleep_ms(1);
                n = queued(s);
                runs = s->page[HEART_SLOT] && (how->action != SETS || n > 100);
        } while (now_ns() < until && !(runs && check_on_stand_in()));
        return n;
}

/*
 * Kills a process while its work runs. A stream has room for about a thousand writes, so queuing
 * more takes as long as doing them. The script does not wait for that, so the queue is full at the
 * kill.
 */
static int one_death(const struct how *how, struct death *d) {
        struct scene s;
        uint64_t killed;
        int r = scene_start(&s, how);

        if (!r) {
                tell(&s.victim, how->action, how->n);
                d->queued = let_it_run(&s, how);
                killed = now_ns();
                kill(s.victim.pid, SIGKILL);
                watch(&s, killed, d);
                r = d->beats ? 0 : CU_NOT_READY;
        }
        scene_stop(&s);
        return r;
}

/* A GPU may work for a second after the process has ended, a stand-in not at all. */
static enum verdict judge(const struct how *how, const struct death *d, double last_ms,
                          double device_ms) {
        unsigned most = check_ms(1000, 0);

        if (how->forks || (how->action == SETS && !d->queued))
                return OPEN_QUESTION;
        return last_ms <= most && device_ms <= most ? YES : NO;
}

static void deaths(const struct how *how) {
        double readable[ROUNDS], last[ROUNDS], device[ROUNDS];
        unsigned rounds = MIN(ROUNDS, check_rounds(ROUNDS)), i = 0;
        struct death d = {0};
        struct line l;
        int r = 0;

        line_begin(&l, "T6",
                   "a process is killed %s: when is its last write seen, counted from its pidfd?",
                   how->words);
        for (; i < rounds; i++) {
                r = one_death(how, &d);
                if (r)
                        break;
                readable[i] = d.readable_ms;
                last[i] = d.last_ms;
                device[i] = d.device_ms;
        }
        if (r && cannot_ask(&l, r, "the work", NULL))
                return;
        line_number(&l, "rounds", i);
        line_number(&l, "signal_to_pidfd_ms_median", median(readable, i));
        line_number(&l, "signal_to_pidfd_ms_most", readable[i - 1]);
        line_number(&l, "pidfd_to_last_host_write_ms_median", median(last, i));
        line_number(&l, "pidfd_to_last_host_write_ms_most", last[i - 1]);
        line_number(&l, "pidfd_to_last_device_write_ms_median", median(device, i));
        line_number(&l, "pidfd_to_last_device_write_ms_most", device[i - 1]);
        line_number(&l, "device_looks_every_ms", d.device_step_ms);
        line_number(&l, "queued_when_it_was_killed", (double)d.queued);
        line_number(&l, "writes_of_the_last_round", (double)d.beats);
        line_answer(&l, judge(how, &d, last[i - 1], device[i - 1]),
                    "the pidfd comes %.2f ms after the signal; the last write at most %.2f ms "
                    "after that in host memory, %.2f ms in the device's; %llu more were queued",
                    median(readable, i), last[i - 1], device[i - 1], (unsigned long long)d.queued);
}

/* Filling 2 GiB takes a GPU almost a millisecond, so a full queue is work for most of a second. */
static const struct how ways[] = {
        {BEAT, 1ull << 32, 4 * MIB, false, "while its kernel writes"},
        {SETS, 1ull << 32, 2048 * MIB, false, "with many writes queued on its stream"},
        {SETS, 1ull << 32, 2048 * MIB, true,
         "with many writes queued on its stream, and a child that it forked lives on"},
};

void check_killed(void) {
        for (size_t i = 0; i < ARRAY_SIZE(ways); i++)
                deaths(&ways[i]);
}
