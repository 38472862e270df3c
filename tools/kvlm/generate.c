/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Runs one request: its prompt in chunks, then one token at a time. With --verify it is computed
 * again without the pool, and both must be equal to the last bit.
 */

#include "tools/kvlm/generate.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"

struct generation { /* of one request */
        const struct engine *engine;
        struct sequence *sequence;
        struct pooled *pooled; /* NULL if the pool has no table of this request */
        struct result *result;
        float *logits;
        FILE *dump; /* NULL, or receives the logits of every token as they are computed */
        double started;
        size_t room; /* room for the text */
};

static void show_progress(const struct generation *g, uint32_t done, uint32_t n) {
        if (g->engine->progress)
                fprintf(stderr, "\rprompt: %u of %u tokens%s", done, n, done == n ? "\n" : "");
}

/* ---- computing ---- */

static int compute(const struct generation *g, const struct step *step) {
        if (*g->engine->interrupted)
                return -EINTR;
        return g->engine->device ?
                       device_forward_step(g->engine->device_forward, step) :
                       forward_step(g->engine->pass, g->engine->model->config.layers, step);
}

static double attention_ms(const struct engine *e) {
        return e->pass ? pass_attention_ms(e->pass) : 0;
}

/*
 * Whether attention of generated tokens differs from that of a prompt. If so, they are always
 * computed one by one.
 */
static bool decodes_otherwise(const struct engine *e) {
        return e->device && e->device->options.decode == DECODE_FAST;
}

/* Number of tokens of the prompt that are computed in chunks; the rest is computed one by one. */
static uint32_t chunked(const struct generation *g) {
        uint32_t prompt = g->result->prompt_tokens;

        return prompt - MIN(g->engine->decode_tail, prompt - 1);
}

static struct step next_step(const struct generation *g, uint32_t first) {
        const struct sequence *s = g->sequence;
        uint32_t prompt = g->result->prompt_tokens;
        struct step step = {
                .view = {.blocks = s->blocks},
                .tokens = s->tokens + first,
                .first = first,
                .n = MIN(g->engine->chunk, s->n_tokens - first),
                .decoding = first >= prompt,
        };

        if (decodes_otherwise(g->engine))
                step.n = step.decoding ? 1 : MIN(step.n, prompt - first);
        return step;
}

static struct step next_new_step(const struct generation *g) {
        struct step step = next_step(g, g->sequence->n_computed);
        uint32_t end = chunked(g);

        step.n = step.first >= end && step.first < g->result->prompt_tokens ? 1 : step.n;
        if (step.first < end)
                step.n = MIN(step.n, end - step.first);
        if (g->pooled)
                step.n = MIN(step.n, pooled_step_limit(g->pooled, step.first));
        return step;
}

static int write_logits(const struct generation *g, const struct step *step) {
        size_t numbers = (size_t)step->n * g->engine->model->config.vocab;

        if (fwrite(g->logits, sizeof *g->logits, numbers, g->dump) != numbers)
                return refuse(-EIO, "cannot write the logits: %s", strerror(errno));
        return 0;
}

/* Called when the step's tokens are in the blocks. */
static int settle(const struct generation *g, uint32_t end) {
        if (!g->pooled || pooled_publishes(g->pooled, end))
                sequence_publish(g->sequence, end);
        return g->pooled ? pooled_settle(g->pooled, end) : 0;
}

/* Records attention time separately for the prompt's chunks and for decoded tokens. */
static int compute_timed(const struct generation *g, const struct step *step) {
        struct result *result = g->result;
        bool decoded = step->first >= chunked(g);
        double before = attention_ms(g->engine);
        int r = compute(g, step);

        *(decoded ? &result->attention_ms :
                    &result->prompt_attention_ms) += attention_ms(g->engine) - before;
        result->decoded_tokens += decoded ? step->n : 0;
        return r;
}

/*
 * Computes all tokens of the sequence that are not computed yet, in chunks, and the logits of the
 * last one.
 */
static int catch_up(const struct generation *g) {
        struct sequence *s = g->sequence;

        while (s->n_computed < s->n_tokens) {
                struct step step;
                uint32_t end;
                int r;

                sequence_find(s);
                step = next_new_step(g);
                end = step.first + step.n;
                step.logits = end == s->n_tokens || g->dump ? g->logits : NULL;
                step.all_logits = g->dump;
                r = g->pooled ? pooled_prepare(g->pooled, &step) : sequence_extend(s, end);
                if (r > 0)
                        continue;
                if (r == 0)
                        r = compute_timed(g, &step);
                if (r == 0 && step.logits && !sequence_check(s))
                        continue;
                if (r == 0 && g->dump)
                        r = write_logits(g, &step);
                if (r == 0)
                        r = settle(g, end);
                if (r < 0)
                        return r;
                if (end <= g->result->prompt_tokens)
                        show_progress(g, end, g->result->prompt_tokens);
        }
        return 0;
}

/*
 * Recomputes the logits of every token, from the first: keys and values are only read, wherever
 * they are.
 */
static int dump_logits(const struct generation *g) {
        const struct sequence *s = g->sequence;

        for (uint32_t first = 0; first < s->n_tokens;) {
                struct step step = next_step(g, first);
                int r;

                step.view.stored = s->n_tokens;
                step.logits = g->logits;
                step.all_logits = true;
                r = compute(g, &step);
                if (r == 0)
                        r = write_logits(g, &step);
                if (r < 0)
                        return r;
                first += step.n;
        }
        return sequence_check(g->sequence) ?
                       0 :
                       refuse(-EIO, "what was read from the cache was never written");
}

/* ---- text ---- */

static int append_text(struct generation *g, const char *bytes, size_t size) {
        struct result *result = g->result;

        if (result->text_size + size + 1 > g->room) {
                size_t room = 2 * (result->text_size + size + 1);
                char *text = realloc(result->text, room);

                if (!text)
                        return refuse(-ENOMEM, "out of memory for the answer");
                result->text = text;
                g->room = room;
        }
        memcpy(result->text + result->text_size, bytes, size);
        result->text_size += size;
        result->text[result->text_size] = '\0';
        return 0;
}

/* Cuts the text at the stop string, looking only where the last bytes may have completed it. */
static bool stopped(const struct generation *g, size_t last) {
        struct result *result = g->result;
        size_t length = strlen(g->engine->stop),
               from = result->text_size - MIN(result->text_size, last + length);
        char *found = NULL;

        if (length > 0)
                found = memmem(result->text + from, result->text_size - from, g->engine->stop,
                               length);
        if (!found)
                return false;
        result->text_size = (size_t)(found - result->text);
        *found = '\0';
        return true;
}

static int decode(struct generation *g) {
        const struct engine *e = g->engine;

        while (g->result->generated_tokens < e->max_tokens) {
                uint32_t id = sampler_pick(e->sampler, g->logits);
                size_t size;
                const char *bytes = tokenizer_decode(e->tokenizer, id, &size);
                int r;

                if (g->result->generated_tokens++ == 0)
                        g->result->ttft_ms = sys_now_ms() - g->started;
                if (id == TOKEN_EOS)
                        return 0;
                r = append_text(g, bytes, size);
                if (r < 0)
                        return r;
                if (stopped(g, size) || g->result->generated_tokens == e->max_tokens ||
                    g->sequence->n_tokens == g->sequence->capacity)
                        return 0;
                g->sequence->tokens[g->sequence->n_tokens++] = id;
                r = catch_up(g);
                if (r < 0)
                        return r;
        }
        /* no tokens were requested: the time until the end of the prompt */
        g->result->ttft_ms = sys_now_ms() - g->started;
        return 0;
}

/* ---- proof ---- */

static int compare(const struct generation *g, const uint8_t *a, const uint8_t *b) {
        const struct engine *e = g->engine;
        uint64_t differ = 0;
        int r = 0;

        if (e->device)
                r = device_compare(e->device, (uintptr_t)a, (uintptr_t)b, e->shape.block_bytes,
                                   &differ);
        for (size_t i = 0; !e->device && i < e->shape.block_bytes; i++)
                differ += a[i] != b[i];
        g->result->wrong_bytes += differ;
        return r;
}

/*
 * Recomputes the reused part of the prompt in private memory, and compares it with what was reused,
 * byte by byte.
 */
static int verify(const struct generation *g) {
        const struct engine *e = g->engine;
        const struct sequence *s = g->sequence;
        struct generation again = {.engine = g->engine, .result = g->result};
        size_t bytes = e->shape.block_bytes;
        uint32_t n = 0;
        int r;

        for (uint32_t i = 0; i < MIN(s->n_blocks, g->result->prompt_tokens / e->shape.tokens); i++)
                n = s->kinds[i] == BLOCK_REUSED ? i + 1 : n;
        if (n == 0)
                return 0;
        r = sequence_new_private(e->cache, s->tokens, n * e->shape.tokens, &again.sequence);
        if (r < 0)
                return r;
        r = catch_up(&again);
        for (uint32_t i = 0; r == 0 && i < n; i++) {
                if (s->kinds[i] != BLOCK_REUSED)
                        continue;
                g->result->verified_bytes += bytes;
                r = compare(g, s->blocks[i], again.sequence->blocks[i]);
        }
        sequence_free(again.sequence);
        return r;
}

/* ---- request ---- */

static void account(const struct generation *g) {
        const struct sequence *s = g->sequence;
        struct result *result = g->result;

        result->total_ms = sys_now_ms() - g->started;
        result->reused_tokens = s->n_reused;
        result->shared_blocks = sequence_shared_blocks(s);
        result->private_blocks = s->n_blocks - result->shared_blocks;
        result->refused = s->n_refused;
        if (g->pooled)
                result->pooled = pooled_stats(g->pooled);
}

static int serve(struct generation *g, const struct request *request) {
        const struct engine *e = g->engine;
        int r;

        sampler_restart(e->sampler);
        r = append_text(g, "", 0);
        g->dump = g->pooled ? request->logits : NULL;
        if (r == 0)
                r = catch_up(g);
        g->dump = request->logits;
        if (r == 0 && !request->logits)
                r = decode(g);
        else if (r == 0 && !g->pooled)
                r = dump_logits(g);
        account(g);
        return r == 0 && e->verify ? verify(g) : r;
}

/* There may be more slots than tokens. */
static int prepare_pooled(struct generation *g, const struct request *request, uint32_t capacity) {
        const struct engine *e = g->engine;
        const struct config *c = &e->model->config;
        const struct pooled_setup setup = {
                .options = e->pooled,
                .tokenizer = e->tokenizer,
                .ops = e->ops,
                .frequencies = pass_frequencies(e->pass),
                .layers = c->layers,
                .kv_heads = c->kv_heads,
                .group = c->heads / c->kv_heads,
                .prompt = request->n_tokens,
                .tail = request->n_tokens - chunked(g),
        };
        uint32_t slots = pooled_capacity(capacity, e->shape.tokens);
        int r = sequence_new(e->cache, request->tokens, request->n_tokens, slots, &g->sequence);

        if (r < 0)
                return r;
        g->sequence->capacity = capacity;
        g->sequence->not_found = pooled_not_found(e->pooled, e->cache, setup.tail);
        return pooled_new(&setup, g->sequence, slots, &g->pooled);
}

static int prepare(struct generation *g, const struct request *request, uint32_t capacity) {
        const struct engine *e = g->engine;
        bool pooled = pooled_wanted(e->pooled, e->cache);
        int r;

        if (e->device && pooled)
                return refuse(
                        -ENOTSUP,
                        "methods run on the CPU only: use --device cpu, or turn off the space's methods");
        if (pooled)
                return prepare_pooled(g, request, capacity);
        r = sequence_new(e->cache, request->tokens, request->n_tokens, capacity, &g->sequence);
        if (r == 0 && decodes_otherwise(e))
                g->sequence->n_public = request->n_tokens;
        return r;
}

int generate(const struct engine *e, const struct request *request, struct result *ret) {
        const struct config *c = &e->model->config;
        size_t rows = request->logits ? e->chunk : 1;
        uint32_t capacity = (uint32_t)MIN((uint64_t)request->n_tokens + e->max_tokens,
                                          c->max_positions);
        struct result result = {.prompt_tokens = request->n_tokens};
        struct generation g = {.engine = e, .result = &result, .started = sys_now_ms()};
        int r;

        if (request->n_tokens == 0)
                return refuse(-EINVAL, "the prompt has no tokens");
        if (request->n_tokens > c->max_positions)
                return refuse(-E2BIG, "the prompt has %u tokens, but the model takes only %u",
                              request->n_tokens, c->max_positions);
        g.logits = malloc(rows * c->vocab * sizeof *g.logits);
        if (!g.logits)
                return refuse(-ENOMEM, "out of memory for logits");
        r = prepare(&g, request, capacity);
        if (r == 0)
                r = serve(&g, request);
        pooled_free(g.pooled);
        sequence_free(g.sequence);
        free(g.logits);
        if (r < 0)
                result_release(&result);
        else
                *ret = result;
        return r;
}

void result_release(struct result *result) {
        free(result->text);
        *result = (struct result){0};
}
