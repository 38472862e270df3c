/* SPDX-License-Identifier: Apache-2.0 */

/*
 * top: what happens, picture by picture. A picture compares two samples. Keys can show the same two
 * samples again in another order.
 */

#include "tools/kvctl/top.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/sys.h"

#define SECONDS_DEFAULT 1.0

double top_seconds(const struct kvctl *kvctl) {
        return args_has(&kvctl->args, FLAG_WATCH) ? kvctl->args.seconds[FLAG_WATCH] :
                                                    SECONDS_DEFAULT;
}

struct top *top_free(struct top *top) {
        if (!top)
                return NULL;
        sample_free(top->before);
        sample_free(top->now);
        free(top);
        return NULL;
}

/* ---- the pool -------------------------------------------------------------------------------- */

static const struct column head_columns[] = {
        {"interval_s", NULL, UNIT_NONE},       {"pool_bytes", NULL, UNIT_BYTES},
        {"pool_used_bytes", NULL, UNIT_BYTES}, {"requests_per_s", NULL, UNIT_SHORT},
        {"turn_recent_us", NULL, UNIT_US},
};

static void fill_work(struct table *t, bool told, double rate, uint64_t turn_recent_us) {
        if (!told) {
                table_none(t);
                table_none(t);
                return;
        }
        table_real(t, rate);
        table_number(t, turn_recent_us);
}

static void say_work(struct answer *answer, double rate, uint64_t turn_recent_us) {
        char requests[UNIT_TEXT_MAX], turn[UNIT_TEXT_MAX];

        unit_format(UNIT_SHORT, rate, requests);
        unit_format_u64(UNIT_US, turn_recent_us, turn);
        answer_say(answer, "requests/s: %s, longest turn in the last minute: %s", requests, turn);
}

static void fill_head(struct table *t, struct answer *answer, const struct sample *a,
                      const struct sample *b, double seconds) {
        double rate = (double)top_since(a->requests, b->requests) / seconds;
        char used[UNIT_TEXT_MAX], pool[UNIT_TEXT_MAX];

        table_real(t, seconds);
        table_number(t, b->pool_bytes);
        table_number(t, b->pool_used);
        fill_work(t, b->told, rate, b->turn_recent_us);
        unit_format_u64(UNIT_BYTES, b->pool_used, used);
        unit_format_u64(UNIT_BYTES, b->pool_bytes, pool);
        answer_say(answer, "pool: %s of %s, spaces: %zu, clients: %zu", used, pool, b->n_spaces,
                   b->n_clients);
        if (b->told)
                say_work(answer, rate, b->turn_recent_us);
}

static double seconds_of(const struct top *top) {
        return (double)(top->now->at_ns - top->before->at_ns + 1) / 1e9;
}

static void say_full(struct answer *answer, const struct sample *s) {
        holders_say(answer, &s->holders, s->bytes.held + s->bytes.filling, s->pool_bytes);
}

static int add_picture(struct kvctl *kvctl, struct answer *answer, const struct top *top) {
        struct table *head = ANSWER_RECORD(answer, "daemon", head_columns);
        double seconds = seconds_of(top);

        if (!head)
                return kvctl_out_of_memory(kvctl);
        answer_picture(answer, top_graphs(kvctl, top));
        fill_head(head, answer, top->before, top->now, seconds);
        say_full(answer, top->now);
        if (top->help)
                answer_say(answer, "%s", top_help());
        return top_add_tables(kvctl, answer, top, seconds);
}

/* ---- samples --------------------------------------------------------------------------------- */

/* Takes the first sample, and waits: a picture needs two. */
static int take_first(struct kvctl *kvctl) {
        int r;

        kvctl->top = calloc(1, sizeof *kvctl->top);
        if (!kvctl->top)
                return kvctl_out_of_memory(kvctl);
        kvctl->top->focus = TOP_CLIENTS;
        kvctl->top->sort[TOP_CLIENTS].column = 1 + TOP_CLIENTS_HELD;
        r = sample_take(kvctl, &kvctl->top->now);
        if (r == 0 && !screen_wait(&kvctl->screen, top_seconds(kvctl)))
                r = -EINTR;
        return r;
}

/* Share of tokens that were found, in all spaces, between the picture's two samples; or -1. */
static double reused_of(const struct top *top) {
        uint64_t asked = 0, found = 0;

        for (size_t i = 0; i < top->now->n_spaces; i++) {
                const struct space_sample *b = &top->now->spaces[i],
                                          *a = sample_space(top->before, b);

                asked += top_since(a->by[KVD_CLIENT_TOKENS_ASKED], b->by[KVD_CLIENT_TOKENS_ASKED]);
                found += top_since(a->by[KVD_CLIENT_TOKENS_FOUND], b->by[KVD_CLIENT_TOKENS_FOUND]);
        }
        return asked ? (double)MIN(found, asked) / (double)asked : -1;
}

static void remember(struct top *top) {
        if (top->n_reused == TOP_HISTORY)
                memmove(top->reused, top->reused + 1, (--top->n_reused) * sizeof *top->reused);
        top->reused[top->n_reused++] = reused_of(top);
}

static int take_next(struct kvctl *kvctl) {
        struct top *top = kvctl->top;
        struct sample *sample;
        int r;

        top->next_ns = sys_now_ns() + (uint64_t)(top_seconds(kvctl) * 1e9);
        r = sample_take(kvctl, &sample);
        if (r < 0)
                return r;
        sample_free(top->before);
        top->before = top->now;
        top->now = sample;
        remember(top);
        return 0;
}

int verb_top(struct kvctl *kvctl, struct answer *answer) {
        int r = kvctl->top ? 0 : take_first(kvctl);

        if (r == 0 && !(kvctl->top->again && kvctl->top->before))
                r = take_next(kvctl);
        return r < 0 ? r : add_picture(kvctl, answer, kvctl->top);
}
