/* SPDX-License-Identifier: Apache-2.0 */

/*
 * trace: lookups in a space, what they found, and blocks that come and go, one JSON object per
 * line. Lookups have the form of Mooncake's traces, so that whatif can read them: equal block
 * numbers mean equal prefixes. A number is 53 bits of a block's key, which every reader of JSON
 * reads exactly.
 */

#include <errno.h>
#include <inttypes.h>
#include <time.h>

#include "ipc/base/sys.h"
#include "tools/kvctl/follow.h"

struct trace {
        uint64_t began_ns;
        FILE *to;
};

static uint64_t number_of(uint64_t hash) {
        return hash >> 11;
}

static FILE *begin_line(struct trace *t, const char *event) {
        fprintf(t->to, "{\"timestamp\": %" PRIu64 ", \"event\": \"%s\"",
                (sys_now_ns() - t->began_ns) / 1000000, event);
        return t->to;
}

static void end_line(struct trace *t) {
        fputs("}\n", t->to);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

static void put_stored(void *arg, const struct kvd_stored *block) {
        FILE *to = begin_line(arg, "stored");

        fprintf(to, ", \"block\": %" PRIu64, number_of(block->hash));
        if (block->parent)
                fprintf(to, ", \"parent\": %" PRIu64, number_of(block->parent));
        fprintf(to, ", \"depth\": %u, \"tokens\": %u, \"group\": %u", block->depth, block->n_tokens,
                block->group);
        end_line(arg);
}

static void put_removed(void *arg, uint64_t hash) {
        fprintf(begin_line(arg, "removed"), ", \"block\": %" PRIu64, number_of(hash));
        end_line(arg);
}

static void put_cleared(void *arg) {
        begin_line(arg, "cleared");
        end_line(arg);
}

static void put_away(void *arg, int is) {
        begin_line(arg, is ? "away" : "back");
        end_line(arg);
}

static const struct kvd_follow_ops block_ops = {.stored = put_stored,
                                                .removed = put_removed,
                                                .cleared = put_cleared,
                                                .away = put_away};

/* ---- lookups --------------------------------------------------------------------------------- */

static void put_asked(void *arg, uint32_t client, const struct kvd_asked *note) {
        FILE *to = begin_line(arg, "asked");

        fprintf(to,
                ", \"client\": %u, \"group\": %u, \"input_length\": %u, \"found\": %u, \"hash_ids\": [",
                client, note->group, note->n_tokens, note->found);
        for (uint32_t i = 0; i < note->n_keys; i++)
                fprintf(to, "%s%" PRIu64, i ? ", " : "", number_of(note->keys[i]));
        fputc(']', to);
        end_line(arg);
}

static void put_missed(void *arg, uint32_t client) {
        fprintf(begin_line(arg, "missed"), ", \"client\": %u", client);
        end_line(arg);
}

static const struct asked_ops lookup_ops = {.asked = put_asked, .missed = put_missed};

/* ---- the verb -------------------------------------------------------------------------------- */

static void put_begin(void *arg, const struct space_name *space, const struct kvd_index *ix) {
        struct timespec now;

        clock_gettime(CLOCK_REALTIME, &now);
        fprintf(begin_line(arg, "begin"),
                ", \"time\": %lld.%03ld, \"domain\": \"%s\", \"space\": \"%s\", "
                "\"block_tokens\": %u, \"block_bytes\": %" PRIu64,
                (long long)now.tv_sec, now.tv_nsec / 1000000, space->domain, space->name,
                ix->geometry.block_tokens, ix->block_bytes);
        end_line(arg);
}

static int write_out(struct kvctl *kvctl, void *arg) {
        (void)arg;
        return kvctl_flush(kvctl);
}

static const struct watch_ops trace_ops = {.blocks = &block_ops,
                                           .lookups = &lookup_ops,
                                           .began = put_begin,
                                           .looked = write_out};

int verb_trace(struct kvctl *kvctl, struct answer *answer) {
        struct trace trace = {.began_ns = sys_now_ns(), .to = stdout};

        (void)answer;
        kvctl->streams = true;
        return watch_space(kvctl, &trace_ops, &trace);
}
