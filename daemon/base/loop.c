/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A turn: wait, call ready sources, fire due timers, then serve requests that wait for their turn
 * (work). Idle work follows if nothing happened, or if it has had less than its share.
 *
 * Readiness is level-triggered with both back ends: epoll is by default, and an io_uring poll,
 * which reports once, is armed again after its source was called. So a source may take one message
 * and return, and all others get a turn before it is called for the next.
 *
 * An event identifies its source by watch and generation. So a source is not called if it was
 * removed after its event was collected in this turn, or if its cancelled poll still reports.
 */

#include "daemon/base/loop.h"

#include <errno.h>
#include <poll.h>
#include <string.h>

#include "daemon/base/degraded.h"
#include "daemon/base/log.h"
#include "daemon/base/loop_backend.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define IDLE_SHARE 5u /* idle work gets at least 1 / IDLE_SHARE of the time */
#define IDLE_LEAST_NS UINT64_C(100000)
#define IDLE_MOST_NS UINT64_C(2000000) /* a piece that took longer lost the processor */
#define RECENT_SLOTS 7u                /* six past slots, and the one under way */
#define RECENT_NS UINT64_C(10000000000)

struct watch {
        struct loop_source *source; /* NULL: unused */
        uint32_t generation;
        uint32_t next_free;
        bool armed, held;
};

struct loop {
        const struct loop_backend *backend;
        void *waiter;                   /* state of the back end; owned */
        struct watch *watches;          /* owned */
        uint32_t n_watches, free_watch; /* free_watch: first unused watch, or n_watches */
        struct kvd_list timers;         /* by time, earliest first */
        bool (*work)(void *);
        void *work_data;
        bool (*idle)(void *);
        void *idle_data;
        bool has_work, wants_idle, quit, firing;
        /* cost of the last piece of idle work, and time spent on everything else since */
        uint64_t idle_ns, busy_ns;
        int failed; /* error of arming a source again, which ends loop_run; 0: none */
        uint64_t turn_begin_ns, turn_max_ns;
        uint64_t recent_ns[RECENT_SLOTS], recent_slot;
};

/* ---- life ------------------------------------------------------------------------------------ */

static int open_backend(struct loop *loop, enum loop_kind kind) {
        int r;

        loop->backend = kind == LOOP_EPOLL ? &loop_backend_epoll : &loop_backend_io_uring;
        r = loop->backend->open(loop->n_watches, &loop->waiter);
        if (r >= 0 || kind != LOOP_AUTO)
                return r;
        log_info("io_uring is not available here (%s): using epoll", strerror(-r));
        degraded_set(epoll, 1);
        loop->backend = &loop_backend_epoll;
        return loop->backend->open(loop->n_watches, &loop->waiter);
}

int loop_new(enum loop_kind kind, uint32_t max_sources, struct loop **ret) {
        _cleanup_(loop_freep) struct loop *loop = NULL;
        int r;

        loop = sys->calloc(1, sizeof *loop);
        if (!loop)
                return -ENOMEM;
        loop->watches = sys->calloc(max_sources, sizeof *loop->watches);
        if (!loop->watches)
                return -ENOMEM;
        loop->n_watches = max_sources;
        for (uint32_t i = 0; i < max_sources; i++)
                loop->watches[i] = (struct watch){.generation = 1, .next_free = i + 1};
        r = open_backend(loop, kind);
        if (r < 0)
                return r;
        *ret = STEAL(loop);
        return 0;
}

struct loop *loop_free(struct loop *loop) {
        if (!loop)
                return NULL;
        if (loop->waiter)
                loop->backend->close(loop->waiter);
        free(loop->watches);
        free(loop);
        return NULL;
}

void loop_freep(struct loop **loop) {
        *loop = loop_free(*loop);
}

const char *loop_name(const struct loop *loop) {
        return loop->backend->name;
}

/* ---- sources --------------------------------------------------------------------------------- */

static loop_token watch_token(const struct loop *loop, const struct watch *s) {
        return (uint64_t)s->generation << 32 | (uint64_t)(s - loop->watches);
}

static int watch_arm(struct loop *loop, struct watch *s) {
        int r;

        r = loop->backend->arm(loop->waiter, s->source->fd, s->source->events,
                               watch_token(loop, s));
        s->armed = r >= 0;
        return r;
}

static void watch_disarm(struct loop *loop, struct watch *s) {
        if (s->armed)
                loop->backend->disarm(loop->waiter, s->source->fd, watch_token(loop, s));
        s->armed = false;
        s->generation++;
}

static void watch_release(struct loop *loop, struct watch *s) {
        s->source->loop = NULL;
        s->source = NULL;
        s->next_free = loop->free_watch;
        loop->free_watch = (uint32_t)(s - loop->watches);
}

int loop_add(struct loop *loop, struct loop_source *source) {
        struct watch *s;
        int r;

        if (loop->free_watch == loop->n_watches)
                return -ENOSPC;
        s = &loop->watches[loop->free_watch];
        loop->free_watch = s->next_free;
        s->source = source;
        s->held = false;
        source->loop = loop;
        source->watch = (uint32_t)(s - loop->watches);
        r = watch_arm(loop, s);
        if (r < 0)
                watch_release(loop, s);
        return r;
}

int loop_change(struct loop_source *source, short events) {
        struct watch *s = &source->loop->watches[source->watch];

        source->events = events;
        if (!s->armed) /* called or held at present: armed with the new events afterwards */
                return 0;
        watch_disarm(source->loop, s);
        return watch_arm(source->loop, s);
}

void loop_remove(struct loop_source *source) {
        struct loop *loop = source->loop;

        if (!loop)
                return;
        watch_disarm(loop, &loop->watches[source->watch]);
        watch_release(loop, &loop->watches[source->watch]);
}

void loop_ready(struct loop *loop, loop_token token, short revents) {
        struct watch *s = &loop->watches[(uint32_t)token];
        int r;

        if ((uint32_t)token >= loop->n_watches || watch_token(loop, s) != token || !s->source)
                return;
        if (s->held) { /* still ready: do not report it in every turn */
                watch_disarm(loop, s);
                return;
        }
        s->armed = !loop->backend->one_shot;
        s->source->ready(s->source, revents);
        if (s->armed || watch_token(loop, s) != token || s->held)
                return;
        r = watch_arm(loop, s);
        if (r < 0)
                loop->failed = r;
}

void loop_hold(struct loop_source *source) {
        source->loop->watches[source->watch].held = true;
}

int loop_release(struct loop_source *source) {
        struct watch *s = &source->loop->watches[source->watch];

        s->held = false;
        return s->armed ? 0 : watch_arm(source->loop, s);
}

/* ---- timers ---------------------------------------------------------------------------------- */

static struct loop_timer *first_timer(const struct loop *loop) {
        return kvd_list_first(&loop->timers, struct loop_timer, node);
}

void loop_timer_set(struct loop *loop, struct loop_timer *timer, uint64_t at_ns) {
        struct kvd_list_node *before;

        kvd_list_remove(&timer->node);
        if (loop->firing) /* not in this turn any more: sockets first */
                at_ns = MAX(at_ns, loop->turn_begin_ns + 1);
        before = loop->timers.first;
        while (before && container_of(before, struct loop_timer, node)->at_ns <= at_ns)
                before = before->next;
        timer->at_ns = at_ns;
        kvd_list_insert(&loop->timers, before, &timer->node);
}

void loop_timer_stop(struct loop_timer *timer) {
        kvd_list_remove(&timer->node);
}

static void fire_timers(struct loop *loop) {
        loop->firing = true;
        for (struct loop_timer *timer;
             (timer = first_timer(loop)) && timer->at_ns <= loop->turn_begin_ns;) {
                loop_timer_stop(timer);
                timer->fire(timer);
        }
        loop->firing = false;
}

/* ---- turns ----------------------------------------------------------------------------------- */

void loop_set_work(struct loop *loop, bool (*work)(void *data), void *data) {
        loop->work = work;
        loop->work_data = data;
}

void loop_set_idle(struct loop *loop, bool (*idle)(void *data), void *data) {
        loop->idle = idle;
        loop->idle_data = data;
}

void loop_want_idle(struct loop *loop) {
        loop->wants_idle = loop->idle != NULL;
}

static int64_t wait_ns(const struct loop *loop, uint64_t now) {
        const struct loop_timer *next = first_timer(loop);

        if (loop->wants_idle || loop->has_work)
                return 0;
        if (!next)
                return -1;
        return next->at_ns > now ? (int64_t)(next->at_ns - now) : 0;
}

static void note_turn(struct loop *loop, uint64_t now) {
        uint64_t ns = now - loop->turn_begin_ns, slot = now / RECENT_NS;
        uint64_t *recent = &loop->recent_ns[slot % RECENT_SLOTS];

        for (; loop->recent_slot < slot; loop->recent_slot++)
                loop->recent_ns[(loop->recent_slot + 1) % RECENT_SLOTS] = 0;
        loop->turn_max_ns = MAX(loop->turn_max_ns, ns);
        *recent = MAX(*recent, ns);
        loop->busy_ns += ns;
}

/* quiet: nothing else happened in this turn. */
static void be_idle(struct loop *loop, bool quiet) {
        uint64_t began;

        if (!quiet && loop->busy_ns < MAX(loop->idle_ns, IDLE_LEAST_NS) * (IDLE_SHARE - 1))
                return;
        began = sys_now_ns();
        loop->wants_idle = loop->idle(loop->idle_data);
        loop->idle_ns = MIN(sys_now_ns() - began, IDLE_MOST_NS);
        loop->busy_ns = 0;
}

/* A turn's time begins when waiting ends (loop_woke); events are handled inside wait. */
static int turn(struct loop *loop) {
        uint64_t now = sys_now_ns();
        int n;

        note_turn(loop, now);
        n = loop->backend->wait(loop->waiter, loop, wait_ns(loop, now));
        if (n < 0)
                return n;
        if (n == 0)
                loop->turn_begin_ns = sys_now_ns();
        fire_timers(loop);
        n += loop->has_work;
        loop->has_work = loop->work && loop->work(loop->work_data);
        if (loop->wants_idle)
                be_idle(loop, n == 0);
        return loop->failed;
}

void loop_woke(struct loop *loop) {
        loop->turn_begin_ns = sys_now_ns();
}

int loop_run(struct loop *loop) {
        int r = 0;

        loop->quit = false;
        loop->turn_begin_ns = sys_now_ns();
        loop->recent_slot = loop->turn_begin_ns / RECENT_NS;
        while (!loop->quit && r >= 0)
                r = turn(loop);
        return r;
}

void loop_quit(struct loop *loop) {
        loop->quit = true;
}

uint64_t loop_turn_max_ns(const struct loop *loop) {
        return loop->turn_max_ns;
}

uint64_t loop_turn_recent_ns(const struct loop *loop) {
        uint64_t longest = 0;

        for (uint32_t i = 0; i < RECENT_SLOTS; i++)
                longest = MAX(longest, loop->recent_ns[i]);
        return longest;
}
