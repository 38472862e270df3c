/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The main loop for a bidirectional model: answers one prompt after the other. With --profile-out,
 * prompts are samples for the table of depths instead.
 */

#include "tools/kvlm/diffuse_main.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvctl/profile.h"
#include "tools/kvlm/diffuse.h"
#include "tools/kvlm/profile.h"
#include "tools/kvlm/refuse.h"
#include "tools/kvlm/report.h"

struct session {
        const struct diffuse_parts *parts;
        struct kvd_btable table;
        struct diffuser diffuser;
        struct profile profile; /* out is NULL if requests are answered, not profiled */
        bool failed;            /* some prompt failed */
};

/*
 * Each layer is a layer group, since the number of layers that a request shares depends on the
 * request.
 */
static int open_cache(struct session *s) {
        const struct options *o = s->parts->options;
        const struct config *c = &s->parts->model->config;
        struct cache_options options = {
                .space = o->share && (o->diffuse.reuse != REUSE_OFF || o->profile_out) ? o->space :
                                                                                         NULL,
                .socket = o->socket,
                .geometry =
                        {
                                .layers = c->layers,
                                .kv_heads = c->kv_heads,
                                .head_dim = c->head_dim,
                                .block_tokens = DIFFUSE_BLOCK_TOKENS,
                                .layer_groups = c->layers,
                                .dtype = o->kv_type,
                                .order = KVD_HND,
                                .rope = KVD_ROPE_POST,
                                .state_width = c->hidden,
                                .vocab = c->vocab,
                                .fingerprint = {s->parts->fingerprint[0], s->parts->fingerprint[1]},
                        },
                .space_options = {.kind = KVD_BIDIRECTIONAL},
        };

        return cache_new(&options, &s->diffuser.cache);
}

/* Makes the kernels' table of steps from a table file, which gives the depth at each percentage. */
static int read_table(const char *path, uint32_t layers, struct kvd_btable *ret) {
        uint8_t depth[PROFILE_RATIOS], last = 1;
        uint32_t def;
        int r = profile_read(path, depth, &def, &kvlm_why);

        if (r < 0)
                return r;
        if (depth[PROFILE_RATIOS - 1] > layers)
                return refuse(-EINVAL, "table %s reuses %u layers; the model has %u", path,
                              depth[PROFILE_RATIOS - 1], layers);
        *ret = (struct kvd_btable){.ratio = (enum kvd_ratio)def};
        for (unsigned percent = 0; percent < PROFILE_RATIOS; percent++) {
                if (depth[percent] != last)
                        ret->steps[ret->n++] = (struct kvd_bstep){(uint8_t)percent, depth[percent]};
                last = depth[percent];
        }
        return 0;
}

static int open_session(struct session *s) {
        const struct diffuse_parts *p = s->parts;
        const struct options *o = p->options;
        struct diffuser *d = &s->diffuser;
        int r = 0;

        *d = (struct diffuser){
                .model = p->model,
                .tokenizer = p->tokenizer,
                .ops = p->ops,
                .shape = block_shape_of_layer(&p->model->config, DIFFUSE_BLOCK_TOKENS, o->kv_type),
                .options = o->diffuse,
                .stop = o->stop,
                .interrupted = p->interrupted,
                .verify = o->verify,
        };
        if (o->table) {
                r = read_table(o->table, p->model->config.layers, &s->table);
                d->table = &s->table;
        }
        if (r == 0 && o->profile_out)
                r = profile_open(o->profile_out, &s->profile);
        if (r == 0)
                r = pass_new(p->model, p->ops, &d->shape, o->threads, &d->pass);
        return r < 0 ? r : open_cache(s);
}

static int failed(struct session *s) {
        s->failed = true;
        fprintf(stderr, "kvlm: %s\n", refusal());
        return s->parts->options->json ? report_failure(refusal()) : 0;
}

static int answer(struct session *s, const struct diffuse_request *request) {
        const struct options *o = s->parts->options;
        struct diffuse_result result;
        int r = diffuse(&s->diffuser, request, &result);

        if (r < 0)
                return r == -EINTR ? r : failed(s);
        r = o->json ? report_diffused_json(&result, &s->diffuser) :
                      report_diffused_text(&result, &s->diffuser);
        if (result.wrong_bytes > 0)
                s->failed = true;
        diffuse_result_release(&result);
        return r;
}

static int profile(struct session *s, const struct diffuse_request *request) {
        int r = profile_request(&s->profile, &s->diffuser, request);

        return r == -EINVAL || r == -E2BIG ? failed(s) : r;
}

static uint32_t prefix_of(const struct session *s, uint32_t n) {
        const struct options *o = s->parts->options;

        return o->tokens ? MIN(o->prefix, n) : prompts_prefix(s->parts->prompts);
}

static int answer_all(struct session *s) {
        const struct diffuse_parts *p = s->parts;

        for (;;) {
                uint32_t *ids = NULL, n;
                int r = *p->interrupted ? -EINTR : prompts_next(p->prompts, &ids, &n);

                if (r == 0)
                        return p->logits && fflush(p->logits) != 0 ?
                                       refuse(-EIO, "cannot write the logits") :
                                       0;
                if (r > 0) {
                        struct diffuse_request request = {ids, n, prefix_of(s, n), p->logits};

                        s->diffuser.options = p->options->diffuse;
                        prompts_region(p->prompts, &s->diffuser.options.length,
                                       &s->diffuser.options.steps);
                        r = s->profile.out ? profile(s, &request) : answer(s, &request);
                } else if (r == -EINVAL) {
                        r = failed(s);
                }
                free(ids);
                if (r < 0)
                        return r;
        }
}

int diffuse_all(const struct diffuse_parts *parts) {
        struct session s = {.parts = parts};
        int r = open_session(&s), closed;

        prompts_split(parts->prompts);
        if (r == 0)
                r = answer_all(&s);
        closed = profile_close(&s.profile);
        r = r < 0 ? r : closed;
        cache_free(s.diffuser.cache);
        pass_free(s.diffuser.pass);
        return r < 0 ? r : s.failed;
}
