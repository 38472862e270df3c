/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Makes HShare's sharing configuration of a sequence. The client writes the selections of its last
 * prompt queries into blocks that it is filling. A worker reads them and computes whose selection
 * each layer and head uses. A sequence has one such request at a time; a new one replaces the last
 * result.
 */

#include <errno.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "store/hooks.h"
#include "store/methods/methods.h"

struct critical {
        struct ticket ticket;
        bool wanted, ready;
        uint32_t queries, words, selected;
        uint32_t n_blocks;
        kvd_ref blocks[KVD_JOB_ITEMS];
        uint8_t answer[]; /* [layers], then [layers][kv_heads] */
};

static size_t answer_bytes(const struct kvd_shape *g) {
        return (size_t)g->layers * (1 + g->kv_heads);
}

static int refuse(struct attachment *a, int error, const char *what) {
        return store_refuse(space_store(a->space), error, "sharing configuration in space '%s': %s",
                            space_name(a->space), what);
}

/* ---- the job --------------------------------------------------------------------------------- */

/* A client that releases its blocks too early gets no configuration. */
static bool write_config(struct ticket *t, struct job *job) {
        struct sequence *q = t->owner;
        struct critical *c = q->critical;
        const struct kvd_shape *g = space_geometry(q->space);
        const uint32_t params[] = {g->layers, g->kv_heads, c->queries, c->words, c->selected};

        if (!c->wanted || !blocks_filled_by(q->attachment, c->blocks, c->n_blocks)) {
                c->wanted = false;
                sync_news(q->space);
                return false;
        }
        for (uint32_t i = 0; i < c->n_blocks; i++)
                job_add(job, c->blocks[i], i);
        for (uint32_t i = 0; i < ARRAY_SIZE(params); i++)
                job_param(job, i, params[i]);
        job_results(job, (uint32_t)answer_bytes(g));
        return true;
}

/* The source of an element is itself, or an earlier element that is its own source. */
static bool sources_are_sound(const uint8_t *source, uint32_t n) {
        for (uint32_t i = 0; i < n; i++)
                if (source[i] > i || source[source[i]] != source[i])
                        return false;
        return true;
}

static bool answer_is_sound(const struct kvd_shape *g, const uint8_t *answer) {
        bool sound = sources_are_sound(answer, g->layers);

        for (uint32_t l = 0; sound && l < g->layers; l++)
                sound = sources_are_sound(answer + g->layers + (size_t)l * g->kv_heads,
                                          g->kv_heads);
        return sound;
}

static void settle_config(struct job *job, enum job_end end, const void *results, uint32_t n) {
        struct sequence *q = job->ticket ? job->ticket->owner : NULL;
        struct critical *c = q ? q->critical : NULL;

        if (!c || end == JOB_AGAIN)
                return;
        c->wanted = false;
        c->ready = end == JOB_DONE && answer_is_sound(space_geometry(q->space), results);
        if (c->ready)
                memcpy(c->answer, results, n);
        sync_news(q->space);
}

static const struct job_kind job_config = {.number = KVD_JOB_CONFIG,
                                           .rests = true,
                                           .result_bytes = 1,
                                           .urgent = true,
                                           .write = write_config,
                                           .settle = settle_config};

/* ---- asking ---------------------------------------------------------------------------------- */

static void end(struct sequence *q) {
        if (!q->critical)
                return;
        job_withdraw(&q->critical->ticket);
        free(q->critical);
        q->critical = NULL;
}

static bool pending(struct sequence *q) {
        return q->critical && q->critical->wanted;
}

static struct critical *critical_of(struct sequence *q) {
        if (q->critical)
                return q->critical;
        q->critical = sys->calloc(1, sizeof *q->critical + answer_bytes(space_geometry(q->space)));
        if (q->critical)
                ticket_init(&q->critical->ticket, &job_config, q->space, q);
        return q->critical;
}

static int check(struct attachment *a, const struct critical_request *req) {
        const struct kvd_index *ix = space_index(a->space);
        const struct kvd_shape *g = &ix->geometry;
        uint64_t bits = (uint64_t)g->layers * g->kv_heads * req->queries * req->words *
                        sizeof(uint64_t);

        if (g->layers > 256 || g->kv_heads > 256)
                return refuse(a, -E2BIG, "only for models of at most 256 layers and KV heads");
        if (!req->queries || req->queries > 4096 || !req->words || req->words > 65536 ||
            !req->selected)
                return refuse(
                        a, -EINVAL,
                        "there must be 1 to 4096 queries of 1 to 65536 words, and at least one token selected");
        if ((uint64_t)g->layers * g->kv_heads * req->queries > KVD_CONFIG_ROWS)
                return refuse(a, -E2BIG,
                              "layers, KV heads and queries make more than 1048576 rows of bits");
        if (!req->n_blocks || req->n_blocks > KVD_JOB_ITEMS ||
            bits > req->n_blocks * ix->block_bytes)
                return refuse(a, -EINVAL, "the bits do not fit into the blocks");
        if (!blocks_filled_by(a, req->blocks, req->n_blocks))
                return refuse(a, -ESTALE,
                              "a block is not (or no longer) one that this client is filling");
        return MIN(space_summary_fd(a->space, true),
                   0); /* workers need it, also if hshare is off */
}

int sequence_critical(struct attachment *a, uint32_t number, const struct critical_request *req) {
        struct sequence *q = sequence_find(a, number);
        struct critical *c;
        int r = q ? check(a, req) : -ENOENT;

        if (r < 0)
                return r;
        c = critical_of(q);
        if (!c)
                return refuse(a, -ENOMEM, "out of memory");
        if (c->wanted)
                return refuse(a, -EALREADY, "the previous one is not ready yet");
        c->wanted = true;
        c->ready = false;
        c->queries = req->queries;
        c->words = req->words;
        c->selected = req->selected;
        c->n_blocks = req->n_blocks;
        memcpy(c->blocks, req->blocks, req->n_blocks * sizeof *c->blocks);
        job_ask(&c->ticket);
        return 0;
}

int sequence_sharing(struct attachment *a, uint32_t number, uint8_t *layers, uint8_t *heads) {
        const struct kvd_shape *g = space_geometry(a->space);
        struct sequence *q = sequence_find(a, number);
        const struct critical *c = q ? q->critical : NULL;

        if (!q)
                return -ENOENT;
        if (!c || (!c->wanted && !c->ready))
                return refuse(a, -ENODATA, "none was requested, or it could not be made");
        if (!c->ready)
                return 0;
        memcpy(layers, c->answer, g->layers);
        memcpy(heads, c->answer + g->layers, (size_t)g->layers * g->kv_heads);
        return 1;
}

const struct hooks hshare_hooks = {.sequence_pending = pending, .sequence_ends = end};
