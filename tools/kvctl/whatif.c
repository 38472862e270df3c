/* SPDX-License-Identifier: Apache-2.0 */

/*
 * whatif: how many requested blocks a pool of another size would have held. A pool of n blocks that
 * evicts the least recently used one holds the first n of a list of all blocks, latest use first.
 * The list is the same for every n, so one pass that finds each block's place in it answers for all
 * sizes (Mattson et al., Evaluation techniques for storage hierarchies, 1970).
 *
 * The first block of a request counts as used last, because pools evict the end of a chain first. A
 * block is of use only if all blocks before it are there, so its place is never before theirs.
 */

#include <errno.h>
#include <stdlib.h>

#include "tools/kvctl/whatif.h"

struct whatif {
        struct requests requests; /* owned */
        uint32_t *before;         /* owned; by use: time of the block's previous use plus 1, or 0 */
        uint32_t *uses;           /* owned; a tree that counts last uses */
        uint64_t *found_at;       /* owned; number of uses that found their block at that place */
        size_t different, longest;
        uint64_t n_missed; /* number of times that lookups were lost */
};

static void whatif_clear(struct whatif *w) {
        requests_clear(&w->requests);
        free(w->before);
        free(w->uses);
        free(w->found_at);
}

/* ---- uses, by time --------------------------------------------------------------------------- */

/* A request's uses are numbered from its end, so that of its first block is the latest. */
static size_t time_of(size_t begin, size_t end, size_t at) {
        return begin + (end - 1 - at);
}

struct use {
        uint64_t block;
        uint32_t time;
};

static int compare_uses(const void *a, const void *b) {
        const struct use *x = a, *y = b;

        if (x->block != y->block)
                return x->block < y->block ? -1 : 1;
        return x->time < y->time ? -1 : x->time > y->time;
}

static void list_uses(const struct requests *q, struct use *ret) {
        for (size_t i = 0, begin = 0; i < q->n; begin = q->ends[i++])
                for (size_t at = begin; at < q->ends[i]; at++)
                        ret[at] = (struct use){q->blocks[at],
                                               (uint32_t)time_of(begin, q->ends[i], at)};
}

/* Sorts uses by block and time, which puts a block's previous use next to each use. */
static bool find_uses_before(struct whatif *w) {
        size_t n = w->requests.n_blocks;
        struct use *uses = calloc(n, sizeof *uses);

        if (!uses)
                return false;
        list_uses(&w->requests, uses);
        qsort(uses, n, sizeof *uses, compare_uses);
        for (size_t i = 0; i < n; i++) {
                bool again = i && uses[i - 1].block == uses[i].block;

                w->before[uses[i].time] = again ? uses[i - 1].time + 1 : 0;
                w->different += !again;
        }
        free(uses);
        return true;
}

/* ---- the list, as a tree of counts (Fenwick) ------------------------------------------------- */

static void count_use(struct whatif *w, size_t time, int32_t sign) {
        for (size_t i = time + 1; i <= w->requests.n_blocks; i += i & -i)
                w->uses[i] += (uint32_t)sign;
}

/* Number of last uses before that time. */
static size_t uses_before(const struct whatif *w, size_t time) {
        size_t n = 0;

        for (size_t i = time; i > 0; i -= i & -i)
                n += w->uses[i];
        return n;
}

/* Counts the places of a request's blocks in the list, before the request uses them. */
static void look_up(struct whatif *w, size_t begin, size_t end, size_t listed) {
        size_t place = 0;

        for (size_t time = end; time-- > begin && w->before[time] && w->before[time] <= begin;) {
                place = MAX(place, listed - uses_before(w, w->before[time] - 1));
                w->found_at[place]++;
        }
}

static size_t use(struct whatif *w, size_t begin, size_t end) {
        size_t fresh = 0;

        for (size_t time = begin; time < end; time++) {
                if (w->before[time])
                        count_use(w, w->before[time] - 1, -1);
                else
                        fresh++;
                count_use(w, time, 1);
        }
        return fresh;
}

static void go_through(struct whatif *w) {
        const struct requests *q = &w->requests;
        size_t listed = 0;

        for (size_t i = 0, begin = 0; i < q->n; begin = q->ends[i++]) {
                look_up(w, begin, q->ends[i], listed);
                listed += use(w, begin, q->ends[i]);
                w->longest = MAX(w->longest, q->ends[i] - begin);
        }
}

static int compute(struct kvctl *kvctl, struct whatif *w) {
        size_t n = w->requests.n_blocks;

        w->before = calloc(n, sizeof *w->before);
        w->uses = calloc(n + 1, sizeof *w->uses);
        w->found_at = calloc(n + 1, sizeof *w->found_at);
        if (!w->before || !w->uses || !w->found_at || !find_uses_before(w))
                return kvctl_out_of_memory(kvctl);
        go_through(w);
        return 0;
}

static uint64_t found_in(const struct whatif *w, uint64_t size) {
        uint64_t found = 0;

        for (size_t i = 0; i <= MIN(size, w->requests.n_blocks); i++)
                found += w->found_at[i];
        return found;
}

/* ---- the answer ------------------------------------------------------------------------------ */

#define MOST_SIZES 64u

struct sizes {
        uint64_t at[MOST_SIZES];
        unsigned n;
};

/* 1, 2, 5, 10 and so on, from the first that every request fits in to one that holds all blocks. */
static void usual_sizes(const struct whatif *w, struct sizes *ret) {
        static const unsigned steps[] = {1, 2, 5};
        uint64_t ten = 1, size;

        for (unsigned i = 0; ret->n < MOST_SIZES - 1; i++) {
                if (i && i % 3 == 0)
                        ten *= 10;
                size = steps[i % 3] * ten;
                if (size >= w->different)
                        break;
                if (size >= w->longest)
                        ret->at[ret->n++] = size;
        }
        ret->at[ret->n++] = w->different;
}

static int take_sizes(struct kvctl *kvctl, const struct whatif *w, struct sizes *ret) {
        const struct args *args = &kvctl->args;

        for (unsigned i = 1; i < args->n_operands; i++) {
                char *end;
                unsigned long long size = strtoull(args->operand[i], &end, 10);

                if (end == args->operand[i] || *end)
                        return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL,
                                          "BLOCKS is a number of blocks, not \"%s\"",
                                          args->operand[i]);
                if (size < w->longest)
                        return kvctl_fail(
                                kvctl, KVCTL_NO, -EINVAL,
                                "the longest request has %zu blocks: no pool of %s holds it",
                                w->longest, args->operand[i]);
                ret->at[ret->n++] = size;
        }
        if (!ret->n)
                usual_sizes(w, ret);
        return 0;
}

static const struct column trace_columns[] = {
        {"requests", NULL, UNIT_COUNT},  {"blocks", NULL, UNIT_COUNT},
        {"different", NULL, UNIT_COUNT}, {"longest", NULL, UNIT_COUNT},
        {"missed", NULL, UNIT_COUNT},
};

static const struct column pool_columns[] = {
        {"blocks", NULL, UNIT_COUNT},
        {"found", NULL, UNIT_COUNT},
        {"hit_rate", NULL, UNIT_SHARE},
};

#define BAR 50u /* characters, for a pool that finds all that any pool could */

static void draw(FILE *to, const struct whatif *w, uint64_t size) {
        uint64_t found = found_in(w, size), most = MAX(found_in(w, UINT64_MAX), 1);
        char rate[UNIT_TEXT_MAX];

        unit_format(UNIT_SHARE, (double)found / (double)w->requests.n_blocks, rate);
        fprintf(to, "%12llu %9s |", (unsigned long long)size, rate);
        for (uint64_t i = 0; i < (found * BAR + most / 2) / most; i++)
                fputc('#', to);
        fputc('\n', to);
}

static char *picture(const struct whatif *w, const struct sizes *sizes) {
        char *lines = NULL;
        size_t size = 0;
        FILE *to = open_memstream(&lines, &size);

        if (!to)
                return NULL;
        fprintf(to, "%12s %9s\n", "BLOCKS", "HIT RATE");
        for (unsigned i = 0; i < sizes->n; i++)
                draw(to, w, sizes->at[i]);
        return fclose(to) == 0 ? lines : NULL;
}

static int add_trace(struct answer *answer, const struct whatif *w) {
        struct table *t = ANSWER_RECORD(answer, "trace", trace_columns);

        if (!t)
                return -ENOMEM;
        table_number(t, w->requests.n);
        table_number(t, w->requests.n_blocks);
        table_number(t, w->different);
        table_number(t, w->longest);
        table_number(t, w->n_missed);
        answer_say(answer, "%zu requests of %zu blocks, %zu different ones; the longest has %zu.",
                   w->requests.n, w->requests.n_blocks, w->different, w->longest);
        if (w->n_missed)
                answer_say(
                        answer,
                        "Lookups came faster than they were read, %llu times: some are missing here.",
                        (unsigned long long)w->n_missed);
        return 0;
}

static int add_rates(struct answer *answer, const struct whatif *w, const struct sizes *sizes) {
        struct table *t = ANSWER_ROWS(answer, "pools", pool_columns);

        if (!t)
                return -ENOMEM;
        for (unsigned i = 0; i < sizes->n; i++) {
                uint64_t found = found_in(w, sizes->at[i]);

                table_number(t, sizes->at[i]);
                table_number(t, found);
                table_share(t, (double)found, (double)w->requests.n_blocks);
        }
        answer_picture(answer, picture(w, sizes));
        return 0;
}

static int take_requests(struct kvctl *kvctl, struct whatif *w) {
        int r;

        if (args_has(&kvctl->args, FLAG_LIVE))
                return whatif_follow(kvctl, &w->requests, &w->n_missed);
        r = requests_read(kvctl->args.operand[0], &w->requests, &kvctl->why);
        if (r < 0)
                kvctl->exit = KVCTL_NO;
        return r;
}

static int answer_whatif(struct kvctl *kvctl, struct answer *answer, struct whatif *w) {
        struct sizes sizes = {.n = 0};
        int r = take_requests(kvctl, w);

        if (r == 0)
                r = compute(kvctl, w);
        if (r == 0)
                r = take_sizes(kvctl, w, &sizes);
        if (r < 0)
                return r;
        r = add_trace(answer, w);
        if (r == 0)
                r = add_rates(answer, w, &sizes);
        return r < 0 ? kvctl_out_of_memory(kvctl) : 0;
}

int verb_whatif(struct kvctl *kvctl, struct answer *answer) {
        struct whatif w = {.requests = REQUESTS_NONE};
        int r = answer_whatif(kvctl, answer, &w);

        whatif_clear(&w);
        return r;
}
