/* SPDX-License-Identifier: Apache-2.0 */

/*
 * evict: takes blocks out of the cache. The daemon does a bounded piece of work per request, so the
 * request is repeated until all is done.
 */

#include <ctype.h>
#include <errno.h>
#include <string.h>

#include "ipc/base/layout.h"
#include "ipc/base/sys.h"
#include "tools/kvctl/map.h"

#define PROGRESS_NS UINT64_C(200000000)

static const struct column evict_columns[] = {
        {"domain", NULL, UNIT_NONE},
        {"space", NULL, UNIT_NONE},
        {"evicted_blocks", NULL, UNIT_COUNT},
        {"asked_blocks", NULL, UNIT_COUNT}, /* null with --all or --chain */
        {"held_blocks", NULL, UNIT_COUNT},  /* in use; null without --all */
};

/* "ID:GEN", as prefixes shows it. */
static bool parse_chain(const char *text, uint64_t *ret) {
        unsigned long id, generation = 0;
        char *end;

        id = strtoul(text, &end, 10);
        if (isdigit((unsigned char)*text) && *end == ':' && isdigit((unsigned char)end[1]))
                generation = strtoul(end + 1, &end, 10);
        *ret = kvd_ref_make((uint32_t)id, (uint32_t)generation);
        return generation && !*end && id <= UINT32_MAX && generation <= UINT32_MAX;
}

static int parse(struct kvctl *kvctl, struct kvd_msg_evict *request) {
        const struct args *args = &kvctl->args;

        if (args_has(args, FLAG_BLOCKS) + args_has(args, FLAG_ALL) + args_has(args, FLAG_CHAIN) !=
            1)
                return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL,
                                  "\"evict\" wants one of --blocks N, --all, --chain ID:GEN");
        if (args_has(args, FLAG_BLOCKS) &&
            (!args->number[FLAG_BLOCKS] || args->number[FLAG_BLOCKS] > UINT32_MAX))
                return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL, "--blocks takes 1 to %u",
                                  UINT32_MAX);
        if (args_has(args, FLAG_CHAIN) && !parse_chain(args->text[FLAG_CHAIN], &request->chain))
                return kvctl_fail(
                        kvctl, KVCTL_USAGE, -EINVAL,
                        "--chain takes a block and its generation, as in 12:3, not \"%s\"; "
                        "\"kvctl prefixes\" shows them",
                        args->text[FLAG_CHAIN]);
        if (args_has(args, FLAG_TO) && strcmp(args->text[FLAG_TO], "file") != 0)
                return kvctl_fail(
                        kvctl, KVCTL_USAGE, -EINVAL,
                        "--to takes file, not \"%s\"; kvd writes blocks to servers by itself",
                        args->text[FLAG_TO]);
        request->blocks = args->number[FLAG_BLOCKS];
        return 0;
}

#define PROGRESS_WIDTH 40

/* A line on a terminal that is rewritten during a long eviction. */
struct progress {
        uint64_t next_ns;
        bool shown;
};

static void progress_show(struct progress *progress, uint64_t evicted) {
        uint64_t now = sys_now_ns();

        if (now < progress->next_ns || !isatty(STDERR_FILENO))
                return;
        fprintf(stderr, "\r%llu blocks evicted", (unsigned long long)evicted);
        *progress = (struct progress){now + PROGRESS_NS, true};
}

/* One request. If the daemon stops early, so that others need not wait, *more is true. */
static int evict_some(struct kvctl *kvctl, const struct kvd_msg_evict *request, uint64_t *evicted,
                      bool *more) {
        struct kvd_msg_evict_reply reply;
        int r = kvctl_call(kvctl, KVD_MSG_evict, request, &reply);

        *more = r == 0 && reply.more;
        if (r == 0)
                *evicted += reply.evicted;
        return r == -ENOENT && *evicted ? 0 : r; /* the rest disappeared between two requests */
}

static int evict(struct kvctl *kvctl, struct kvd_msg_evict *request, uint64_t *evicted) {
        struct progress progress = {.next_ns = sys_now_ns() + PROGRESS_NS};
        uint64_t wanted = request->blocks;
        bool more;
        int r;

        do {
                r = evict_some(kvctl, request, evicted, &more);
                request->blocks = wanted - MIN(*evicted, wanted);
                progress_show(&progress, *evicted);
        } while (more && (!wanted || request->blocks));
        if (progress.shown)
                fprintf(stderr, "\r%*s\r", PROGRESS_WIDTH, "");
        return r;
}

#define DEMOTE_PAUSE_US 5000u

/* First writes to the file all blocks that could be fetched back; the pool keeps them. */
static int demote(struct kvctl *kvctl, const struct kvd_msg_evict *which, uint64_t *no_return) {
        struct kvd_msg_evict request = {.space = which->space, .domain = which->domain, .to = 1};
        struct kvd_msg_evict_reply reply = {0};
        int r;

        while ((r = kvctl_call(kvctl, KVD_MSG_evict, &request, &reply)) == 0 && reply.more) {
                request.to = 2;
                usleep(DEMOTE_PAUSE_US);
        }
        *no_return = reply.no_return;
        return r;
}

static int count_held(struct kvctl *kvctl, const struct space_name *space, uint64_t *ret) {
        _cleanup_(map_clear) struct map map = {0};
        int r = map_read(kvctl, space, false, &map);

        if (r == 0)
                *ret = map_sum(&map).held;
        return r;
}

/* held: with --all, blocks that stay because they are in use. */
static int add_result(struct kvctl *kvctl, struct answer *answer, const struct space_name *space,
                      uint64_t evicted, uint64_t held) {
        struct table *t = ANSWER_RECORD(answer, "evict", evict_columns);
        uint64_t asked = kvctl->args.number[FLAG_BLOCKS];

        if (!t)
                return kvctl_out_of_memory(kvctl);
        table_string(t, space->domain);
        table_string(t, space->name);
        table_number(t, evicted);
        if (asked)
                table_number(t, asked);
        else
                table_none(t);
        if (args_has(&kvctl->args, FLAG_ALL))
                table_number(t, held);
        else
                table_none(t);
        if (args_has(&kvctl->args, FLAG_CHAIN) && !evicted)
                answer_say(answer, "Nothing evicted from %s: the chain is in use.", space->name);
        else if (!evicted && held)
                answer_say(answer,
                           "Nothing evicted from %s: all %llu blocks that are cached are in use; "
                           "\"kvctl clients\" shows by whom.",
                           space->name, (unsigned long long)held);
        else if (held)
                answer_say(answer, "%llu blocks evicted from %s; %llu are in use and stay.",
                           (unsigned long long)evicted, space->name, (unsigned long long)held);
        else if (evicted < asked)
                answer_say(
                        answer,
                        "%llu of %llu blocks evicted from %s; the others are in use, or there are no more.",
                        (unsigned long long)evicted, (unsigned long long)asked, space->name);
        else
                answer_say(answer, "%llu blocks evicted from %s.", (unsigned long long)evicted,
                           space->name);
        return evicted < MAX(asked, (uint64_t)(args_has(&kvctl->args, FLAG_CHAIN) || held));
}

int verb_evict(struct kvctl *kvctl, struct answer *answer) {
        struct kvd_msg_evict request = {0};
        uint64_t evicted = 0, held = 0, no_return = 0;
        struct space_name space;
        int r = parse(kvctl, &request);

        if (r == 0)
                r = kvctl_space(kvctl, &space);
        if (r < 0)
                return r;
        request.space = kvd_slice_of(space.name);
        request.domain = kvd_slice_of(space.domain);
        r = args_has(&kvctl->args, FLAG_TO) ? demote(kvctl, &request, &no_return) : 0;
        if (r == 0)
                r = evict(kvctl, &request, &evicted);
        if (r == 0 && args_has(&kvctl->args, FLAG_ALL))
                r = count_held(kvctl, &space, &held);
        if (r < 0)
                return r;
        r = add_result(kvctl, answer, &space, evicted, held);
        if (no_return)
                answer_say(
                        answer,
                        "Not written to the file, because fetches cannot bring them back: %llu "
                        "blocks. Only full blocks return, and bidirectional prefixes of at most %u tokens "
                        "and %u blocks.",
                        (unsigned long long)no_return, KVD_WHOLE_TOKENS, KVD_WHOLE_BLOCKS);
        return r;
}
