/* SPDX-License-Identifier: Apache-2.0 */

/* kvlm: a small inference engine over libkvd. This file sets up the parts and tears them down. */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "ipc/base/format.h"
#include "ipc/base/text.h"
#include "ipc/base/util.h"
#include "tools/kvlm/cache.h"
#include "tools/kvlm/device_place.h"
#include "tools/kvlm/diffuse_main.h"
#include "tools/kvlm/refuse.h"
#include "tools/kvlm/file.h"
#include "tools/kvlm/generate.h"
#include "tools/kvlm/options.h"
#include "tools/kvlm/prompts.h"
#include "tools/kvlm/report.h"

enum { BLOCK_TOKENS = 16 };

/*
 * To be incremented when the bits of keys and values change without a change of the model; part of
 * the fingerprint.
 */
static const char arithmetic[] = "kvlm arithmetic 1";

_Static_assert((int)KVD_NUMBER_F32 == KVD_F32 && (int)KVD_NUMBER_F16 == KVD_F16 &&
                       (int)KVD_NUMBER_BF16 == KVD_BF16 && (int)KVD_NUMBER_Q8 == KVD_Q8 &&
                       (int)KVD_NUMBER_Q4 == KVD_Q4 && (int)KVD_NUMBER_E4M3 == KVD_E4M3 &&
                       (int)KVD_NUMBER_E5M2 == KVD_E5M2,
               "the kernels' types are the public ones");

struct parts {
        struct options options;
        const struct kvd_ops *ops;
        struct tokenizer *tokenizer;
        struct model *model;
        struct pass *pass; /* NULL if a device computes; its parts follow */
        struct device *device;
        struct device_model *device_model;
        struct device_forward *device_forward;
        struct cache *cache;
        struct sampler *sampler;
        struct prompts *prompts;
        struct engine engine;
        FILE *logits;
        bool failed; /* some prompt failed */
};

static volatile sig_atomic_t interrupted;

static void interrupt(int signal) {
        interrupted = 1;
}

/* The first Ctrl-C exits after the step in progress, the second one at once. */
static void catch_signals(void) {
        struct sigaction catch = {.sa_handler = interrupt, .sa_flags = (int)SA_RESETHAND};
        struct sigaction ignore = {.sa_handler = SIG_IGN};

        sigaction(SIGINT, &catch, NULL);
        sigaction(SIGTERM, &catch, NULL);
        sigaction(SIGPIPE, &ignore, NULL);
}

static void geometry_fingerprint(const struct parts *p, uint64_t ret[2]) {
        const uint8_t *vocab;
        XXH3_state_t state;
        XXH128_hash_t hash;
        size_t size;

        tokenizer_file(p->tokenizer, &vocab, &size);
        XXH3_128bits_reset(&state);
        if (p->device)
                XXH3_128bits_update(&state, p->device->arithmetic, strlen(p->device->arithmetic));
        else
                XXH3_128bits_update(&state, arithmetic, sizeof arithmetic);
        XXH3_128bits_update(&state, p->model->fingerprint, sizeof p->model->fingerprint);
        XXH3_128bits_update(&state, vocab, size);
        hash = XXH3_128bits_digest(&state);
        ret[0] = hash.low64;
        ret[1] = hash.high64;
}

static int open_cache(struct parts *p, const struct block_shape *shape) {
        const struct config *c = &p->model->config;
        struct cache_options options = {
                .space = p->options.share ? p->options.space : NULL,
                .socket = p->options.socket,
                .shape = *shape,
                .device = p->device,
                .rope_theta = c->rope_theta,
                .geometry =
                        {
                                .layers = c->layers,
                                .kv_heads = c->kv_heads,
                                .head_dim = c->head_dim,
                                .block_tokens = BLOCK_TOKENS,
                                .layer_groups = 1,
                                .dtype = shape->type,
                                .order = KVD_HND,
                                .rope = KVD_ROPE_POST,
                                .vocab = c->vocab,
                        },
        };

        geometry_fingerprint(p, options.geometry.fingerprint);
        return cache_new(&options, &p->cache);
}

static int open_model(struct parts *p) {
        const struct options *o = &p->options;
        int r;

        p->ops = kvd_ops_pick(o->variant);
        if (!p->ops)
                return refuse(-EINVAL, "--variant %s is unknown, or does not run on this processor",
                              o->variant);
        r = model_load(o->model, p->ops, &p->model);
        if (r < 0)
                return r;
        if (tokenizer_size(p->tokenizer) > p->model->config.vocab)
                return refuse(-EINVAL,
                              "vocab.txt has %u tokens, but config.json says vocab_size %u",
                              tokenizer_size(p->tokenizer), p->model->config.vocab);
        return 0;
}

/* A GPU can compute causal models without methods. */
static bool fit_for_device(const struct parts *p) {
        return !p->model->config.bidirectional && p->options.pooled.use != POOLED_ON;
}

/* With --device auto, computes where the pool is, if that is possible. */
static int device_by_itself(struct parts *p, struct device_options *options) {
        int r = p->options.share && fit_for_device(p) ?
                        device_of_pool(p->options.socket, &options->ordinal) :
                        0;

        if (r > 0)
                r = device_new(options, &p->device);
        if (r < 0)
                fprintf(stderr, "kvlm: computing on the CPU: %s\n", refusal());
        return 0;
}

static int open_device(struct parts *p) {
        struct device_options options = p->options.device;
        int r = 0;

        if (p->options.use_device == DEVICE_NONE)
                return 0;
        if (p->options.use_device == DEVICE_AUTO)
                return device_by_itself(p, &options);
        if (!fit_for_device(p))
                return refuse(-ENOTSUP,
                              "masked diffusion and methods run on the CPU only: use --device cpu");
        if (options.ordinal < 0 && p->options.share)
                r = device_of_pool(p->options.socket, &options.ordinal);
        if (r < 0)
                return r;
        options.ordinal = MAX(options.ordinal, 0);
        return device_new(&options, &p->device);
}

static int open_forward(struct parts *p, const struct block_shape *shape) {
        const struct options *o = &p->options;
        int r;

        if (!p->device)
                return pass_new(p->model, p->ops, shape, o->threads, &p->pass);
        r = device_model_new(p->device, p->model, &p->device_model);
        if (r < 0)
                return r;
        model_drop_weights(p->model);
        return device_forward_new(p->device, p->device_model, shape, o->chunk, &p->device_forward);
}

static int open_engine(struct parts *p) {
        const struct options *o = &p->options;
        const struct block_shape shape = block_shape(&p->model->config, BLOCK_TOKENS, o->kv_type);
        int r = open_forward(p, &shape);

        if (r < 0)
                return r;
        r = sampler_new(&o->sampling, p->model->config.vocab, &p->sampler);
        if (r < 0)
                return r;
        r = open_cache(p, &shape);
        if (r < 0)
                return r;
        p->engine = (struct engine){
                .model = p->model,
                .ops = p->ops,
                .tokenizer = p->tokenizer,
                .pass = p->pass,
                .device = p->device,
                .device_forward = p->device_forward,
                .cache = p->cache,
                .sampler = p->sampler,
                .shape = shape,
                .interrupted = &interrupted,
                .chunk = o->chunk,
                .max_tokens = o->max_tokens,
                .stop = o->stop,
                .verify = o->verify,
                .progress = o->progress,
                .decode_tail = o->decode_tail,
                .pooled = &p->options.pooled,
        };
        return 0;
}

static int open_input_output(struct parts *p) {
        const struct options *o = &p->options;

        if (o->logits) {
                p->logits = fopen(o->logits, "we");
                if (!p->logits)
                        return refuse(negative_errno(), "cannot write %s: %s", o->logits,
                                      strerror(errno));
        }
        return prompts_open(o, p->tokenizer, p->model->config.vocab, &p->prompts);
}

/* Reports a prompt that failed; the run continues with the next one. */
static int failed(struct parts *p) {
        p->failed = true;
        fprintf(stderr, "kvlm: %s\n", refusal());
        return p->options.json ? report_failure(refusal()) : 0;
}

static int answer(struct parts *p, const uint32_t *ids, uint32_t n) {
        const struct options *o = &p->options;
        struct request request = {.tokens = ids, .n_tokens = n, .logits = p->logits};
        struct result result;
        int r = generate(&p->engine, &request, &result);

        if (r < 0)
                return r == -EINTR ? r : failed(p);
        r = o->json ? report_json(&result, o->verify) : report_text(&result, o->verify);
        if (result.wrong_bytes > 0)
                p->failed = true;
        result_release(&result);
        return r;
}

static int answer_all(struct parts *p) {
        for (;;) {
                uint32_t *ids = NULL, n;
                int r = interrupted ? -EINTR : prompts_next(p->prompts, &ids, &n);

                if (r == 0)
                        return p->logits && fflush(p->logits) != 0 ?
                                       refuse(-EIO, "cannot write the logits") :
                                       0;
                if (r > 0)
                        r = answer(p, ids, n);
                else if (r == -EINVAL)
                        r = failed(p);
                free(ids);
                if (r < 0)
                        return r;
        }
}

/* Hidden states beside keys and values have no quantised form. */
static int refuse_states(const struct parts *p) {
        return refuse(-ENOTSUP,
                      "masked diffusion stores hidden states, which cannot be quantised: use "
                      "--kv-type f32, f16 or bf16, not %s",
                      p->options.kv_word);
}

/* Bidirectional models have their own loop. */
static int diffuse_prompts(struct parts *p) {
        struct diffuse_parts parts = {
                .options = &p->options,
                .ops = p->ops,
                .model = p->model,
                .tokenizer = p->tokenizer,
                .prompts = p->prompts,
                .logits = p->logits,
                .interrupted = &interrupted,
        };
        int r;

        geometry_fingerprint(p, parts.fingerprint);
        r = diffuse_all(&parts);
        p->failed |= r > 0;
        return MIN(r, 0);
}

static int print_tokens(const struct parts *p) {
        _cleanup_(freep) uint32_t *ids = NULL;
        _cleanup_(freep) char *text = NULL;
        size_t size;
        uint32_t n = 0;
        int r = read_file(p->options.tokenize, &text, &size);

        if (r == 0)
                r = tokenizer_encode(p->tokenizer, text, size, false, &ids, &n);
        if (r < 0)
                return r;
        for (uint32_t i = 0; i < n; i++)
                printf(i ? " %u" : "%u", ids[i]);
        putchar('\n');
        return fflush(stdout) != 0 ?
                       refuse(-EIO, "cannot write to standard output: %s", strerror(errno)) :
                       0;
}

static int run(struct parts *p) {
        int r = tokenizer_new(p->options.model, &p->tokenizer);

        if (r < 0)
                return r;
        if (p->options.tokenize)
                return print_tokens(p);
        r = open_model(p);
        if (r < 0)
                return r;
        r = open_input_output(p);
        if (r == 0)
                r = open_device(p);
        if (r < 0)
                return r;
        if (p->model->config.bidirectional)
                return kvd_is_narrow(p->options.kv_type) ? refuse_states(p) : diffuse_prompts(p);
        r = open_engine(p);
        return r < 0 ? r : answer_all(p);
}

static void take_apart(struct parts *p) {
        prompts_close(p->prompts);
        sampler_free(p->sampler);
        cache_free(p->cache);
        pass_free(p->pass);
        device_forward_free(p->device_forward);
        device_model_free(p->device, p->device_model);
        device_free(p->device);
        model_free(p->model);
        tokenizer_free(p->tokenizer);
        if (p->logits)
                fclose(p->logits);
        options_release(&p->options);
}

int main(int argc, char **argv) {
        struct parts p = {0};
        int r = options_parse(argc, argv, &p.options);

        if (r <= 0) {
                int printed = r == 0 ? kvd_end_output(stdout) : 0;

                if (r < 0)
                        fprintf(stderr, "kvlm: %s\n", refusal());
                else if (printed < 0)
                        fprintf(stderr, "kvlm: cannot write: %s\n", strerror(-printed));
                return r < 0 ? 2 : printed < 0;
        }
        catch_signals();
        r = run(&p);
        if (r < 0 && r != -EINTR)
                fprintf(stderr, "kvlm: %s\n", refusal());
        take_apart(&p);
        return r == -EINTR ? 130 : r < 0 || p.failed;
}
