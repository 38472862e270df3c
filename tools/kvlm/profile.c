/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The request is computed once as a whole, without a prefix. No slot is then left out, and position
 * i is in the same slot as in any prefix. In addition, each prefix is computed alone.
 */

#include "tools/kvlm/profile.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/kvd_methods.h"
#include "ipc/base/util.h"
#include "kernels/bicache.h"
#include "tools/kvlm/refuse.h"

struct whole { /* a request and its keys and values */
        struct profile *profile;
        const struct diffuser *diffuser;
        const struct diffuse_request *request;
        struct entry_maker maker;
        kvd_space *space;
        struct context context;
        uint32_t *tokens; /* including the masks */
        uint8_t *memory;
};

struct alike { /* products of one layer, per token */
        struct kvd_products *keys, *values;
};

int profile_open(const char *path, struct profile *ret) {
        FILE *out = fopen(path, "ae");

        if (!out)
                return refuse(negative_errno(), "cannot write %s: %s", path, strerror(errno));
        *ret = (struct profile){.out = out};
        return 0;
}

int profile_close(struct profile *p) {
        bool good = !p->out || fclose(p->out) == 0;

        p->out = NULL;
        return good ? 0 : refuse(-EIO, "cannot write the profile: %s", strerror(errno));
}

/* ---- the whole request ---- */

static int compute_whole(struct whole *w) {
        const struct diffuser *d = w->diffuser;
        uint32_t layers = d->model->config.layers, n = w->context.n_tokens;
        const struct view view = context_view(&w->context, false);
        int r = pass_rows(d->pass, 0, n);

        for (size_t i = 0; i < (size_t)layers * w->context.n_blocks; i++)
                w->context.blocks[i] = w->memory + i * d->shape.plain_bytes;
        if (r < 0)
                return r;
        pass_embed(d->pass, w->tokens, 0, n);
        return pass_run(d->pass, &view, 0, layers, 0, n);
}

static int open_whole(struct whole *w) {
        const struct diffuser *d = w->diffuser;
        uint32_t length = d->options.length, n = w->request->n_tokens + length;
        size_t bytes;
        int r = context_new(&d->model->config, &d->shape, 0, n, &w->context);

        if (r < 0)
                return r;
        w->tokens = calloc(n, sizeof *w->tokens);
        bytes = d->model->config.layers * w->context.n_blocks * d->shape.plain_bytes;
        w->memory = aligned_alloc(64, ALIGN_UP(bytes, 64));
        if (!w->tokens || !w->memory)
                return refuse(-ENOMEM, "out of memory for a request of %u tokens", n);
        memcpy(w->tokens, w->request->tokens, w->request->n_tokens * sizeof *w->tokens);
        for (uint32_t i = w->request->n_tokens; i < n; i++)
                w->tokens[i] = d->model->config.mask_token;
        return compute_whole(w);
}

static void close_whole(struct whole *w) {
        context_release(&w->context);
        free(w->tokens);
        free(w->memory);
}

static const uint8_t *whole_block(const struct whole *w, uint32_t layer, uint32_t i) {
        return w->context.blocks[(size_t)layer * w->context.n_blocks + i];
}

/* ---- similarities ---- */

static void add_block(const struct whole *w, const struct alike *to, const uint8_t *alone,
                      const uint8_t *whole, uint32_t first, uint32_t n) {
        const struct block_shape *s = &w->diffuser->shape;
        const struct kvd_bicache_ops *ops = w->diffuser->ops->bicache;
        uint32_t dim = w->diffuser->model->config.head_dim;

        for (uint32_t h = 0; h < w->diffuser->model->config.kv_heads; h++) {
                size_t k = h * s->head_bytes, v = k + s->plane_bytes;

                ops->products(to->keys + first, alone + k, s->row_bytes, whole + k, s->row_bytes,
                              s->type, n, dim);
                ops->products(to->values + first, alone + v, s->row_bytes, whole + v, s->row_bytes,
                              s->type, n, dim);
        }
}

static void compare_layer(const struct whole *w, const struct entry *alone, uint32_t layer,
                          const struct alike *to) {
        uint32_t n = alone->context.n_tokens, bt = w->diffuser->shape.tokens;

        memset(to->keys, 0, n * sizeof *to->keys);
        memset(to->values, 0, n * sizeof *to->values);
        for (uint32_t i = 0; i < alone->context.n_blocks; i++)
                add_block(w, to, entry_block(alone, layer, i), whole_block(w, layer, i), i * bt,
                          MIN(bt, n - i * bt));
}

static void write_list(FILE *out, const char *name, const double *values, uint32_t n) {
        fprintf(out, ", \"%s\": [", name);
        for (uint32_t i = 0; i < n; i++)
                fprintf(out, i ? ", %.9g" : "%.9g", values[i]);
        fputc(']', out);
}

static int write_sample(const struct whole *w, const struct entry *alone, uint32_t r) {
        uint32_t layers = w->diffuser->model->config.layers, n = alone->context.n_tokens;
        bool prompt_only = diffuse_ratio(w->diffuser, w->space) == KVD_RATIO_PROMPT_ONLY;
        _cleanup_(freep) struct kvd_products *keys = calloc(n, sizeof *keys),
                                             *values = calloc(n, sizeof *values);
        _cleanup_(freep) double *mean = calloc(layers, sizeof *mean),
                                *flat = calloc(layers, sizeof *flat);
        const struct alike alike = {keys, values};
        FILE *out = w->profile->out;

        if (!keys || !values || !mean || !flat)
                return refuse(-ENOMEM, "out of memory for a profile");
        for (uint32_t layer = 0; layer < layers; layer++) {
                compare_layer(w, alone, layer, &alike);
                mean[layer] = kvd_similarity_token_mean(keys, values, n);
                flat[layer] = kvd_similarity_flat(keys, values, n);
        }
        fprintf(out, "{\"r\": %u, \"def\": \"%s\", \"prefix_tokens\": %u, \"tokens\": %u", r,
                prompt_only ? "PROMPT_ONLY" : "INCLUDE_GEN", n, w->context.n_tokens);
        write_list(out, "sim", mean, layers);
        write_list(out, "sim_flat", flat, layers);
        fputs("}\n", out);
        return fflush(out) != 0 || ferror(out) ?
                       refuse(-EIO, "cannot write the profile: %s", strerror(errno)) :
                       0;
}

/* ---- samples for the space ---- */

/* Allocates n blocks. On an error, none. */
static int take_blocks(kvd_space *space, uint32_t n, struct kvd_block *blocks) {
        for (uint32_t got = 0; got < n;) {
                int more = kvd_alloc(space, n - got, blocks + got);

                if (more < 0) {
                        kvd_free(space, got, blocks);
                        return more;
                }
                got += (uint32_t)more;
        }
        return 0;
}

/* Fills blocks [layer][alone, whole][n], the order that kvd_prefix_sample() expects. */
static void fill_blocks(const struct whole *w, const struct entry *alone,
                        const struct kvd_block *blocks) {
        uint32_t n = alone->context.n_blocks;

        for (uint32_t layer = 0; layer < w->diffuser->model->config.layers;
             layer++, blocks += 2 * n)
                for (uint32_t i = 0; i < n; i++) {
                        memcpy(blocks[i].data, entry_block(alone, layer, i),
                               w->diffuser->shape.plain_bytes);
                        memcpy(blocks[n + i].data, whole_block(w, layer, i),
                               w->diffuser->shape.plain_bytes);
                }
}

static int send_sample(const struct whole *w, const struct entry *alone, uint32_t r) {
        uint32_t n = alone->context.n_blocks, all = 2 * n * w->diffuser->model->config.layers;
        _cleanup_(freep) struct kvd_block *blocks = calloc(all, sizeof *blocks);
        int result = blocks ? take_blocks(w->space, all, blocks) : -ENOMEM;

        if (result < 0)
                return result;
        fill_blocks(w, alone, blocks);
        result = kvd_prefix_sample(w->space, r, n, blocks, alone->context.n_tokens);
        kvd_free(w->space, all, blocks);
        return result;
}

static void offer_sample(const struct whole *w, const struct entry *alone, uint32_t r) {
        if (!w->space || w->profile->given_up || send_sample(w, alone, r) == 0)
                return;
        w->profile->given_up = true;
        fprintf(stderr, "kvlm: the space gets no samples: %s\n", kvd_error());
}

/* ---- a request ---- */

static int take_sample(const struct whole *w, uint32_t n_prefix) {
        bool prompt_only = diffuse_ratio(w->diffuser, w->space) == KVD_RATIO_PROMPT_ONLY;
        uint32_t r = kvd_ratio_percent(n_prefix,
                                       prompt_only ? w->request->n_tokens : w->context.n_tokens);
        struct entry *alone = NULL;
        int result;

        if (*w->diffuser->interrupted)
                return -EINTR;
        result = entry_open_private(&w->maker, w->tokens, n_prefix,
                                    w->diffuser->model->config.layers, &alone);
        if (result < 0)
                return result;
        result = write_sample(w, alone, r);
        if (result == 0)
                offer_sample(w, alone, r);
        entry_close(alone);
        return result;
}

/*
 * Samples prefixes of step, 2 step, 3 step, ... percent of the request, up to the prompt's length.
 */
static int take_samples(const struct whole *w) {
        uint32_t step = w->diffuser->options.profile_step;
        bool prompt_only = diffuse_ratio(w->diffuser, w->space) == KVD_RATIO_PROMPT_ONLY;
        uint64_t all = prompt_only ? w->request->n_tokens : w->context.n_tokens;
        int r = 0;

        if (step == 0)
                return w->request->n_prefix > 0 ?
                               take_sample(w, w->request->n_prefix) :
                               refuse(-EINVAL,
                                      "a prompt without a document has no prefix to profile");
        for (uint32_t percent = step; r == 0 && percent <= 100; percent += step) {
                uint32_t n = (uint32_t)((percent * all + 50) / 100);

                if (n > 0 && n <= w->request->n_tokens)
                        r = take_sample(w, n);
        }
        return r;
}

int profile_request(struct profile *p, const struct diffuser *d, const struct diffuse_request *q) {
        struct whole w = {
                .profile = p,
                .diffuser = d,
                .request = q,
                .maker = {&d->model->config, &d->shape, d->pass, d->cache},
                .space = cache_space(d->cache),
        };
        int r = diffuse_check(d, q);

        if (r == 0)
                r = open_whole(&w);
        if (r == 0)
                r = take_samples(&w);
        close_whole(&w);
        return r;
}
