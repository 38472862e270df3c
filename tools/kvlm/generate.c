/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/generate.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include "ipc/base/util.h"
#include "tools/kvlm/note.h"

struct run { /* of one request */
        const struct engine *engine;
        struct sequence *sequence;
        struct relief *relief; /* NULL: nothing is given up */
        struct pooled *pooled; /* NULL: the pool has no table of this request */
        struct result *result;
        float *logits;
        FILE *dump; /* NULL, or where the logits of every token go as they come */
        double started;
        size_t room; /* of the text */
};

static double now_ms(void) {
        struct timespec ts;

        clock_gettime(CLOCK_MONOTONIC, &ts);
        return (double)ts.tv_sec * 1e3 + (double)ts.tv_nsec / 1e6;
}

static void show_progress(const struct run *run, uint32_t done, uint32_t n) {
        if (run->engine->progress)
                fprintf(stderr, "\r\033[Kprompt: %u of %u tokens%s", done, n, done == n ? "\n" : "");
}

/* ---- computing ---- */

static int compute(const struct run *run, const struct step *step) {
        if (*run->engine->interrupted)
                return -EINTR;
        return run->engine->device ? device_forward_step(run->engine->device_forward, step)
                                   : forward_step(run->engine->forward, step);
}

static double attention_ms(const struct engine *e) {
        return e->forward ? forward_attention_ms(e->forward) : 0;
}

/* Is attention of generated tokens another than a prompt's? Then they are computed one by one, whenever it is. */
static bool decodes_otherwise(const struct engine *e) {
        return e->device && !e->device->options.exact_decode;
}

static struct step next_step(const struct run *run, uint32_t first) {
        const struct sequence *s = run->sequence;
        uint32_t prompt = run->result->prompt_tokens;
        struct step step = {
                .blocks = s->blocks,
                .tokens = s->tokens + first,
                .first = first,
                .n = MIN(run->engine->chunk, s->n_tokens - first),
                .decoding = first >= prompt,
        };

        if (decodes_otherwise(run->engine))
                step.n = step.decoding ? 1 : MIN(step.n, prompt - first);
        return step;
}

/* With relief: no further than to where something may be given up, over the slots that are left. */
static struct step next_relieved_step(const struct run *run) {
        struct step step = next_step(run, run->sequence->n_computed);

        if (run->pooled)
                step.n = MIN(step.n, pooled_step_limit(run->pooled, step.first));
        if (!run->relief)
                return step;
        step.n = MIN(step.n, relief_step_limit(run->relief, step.first));
        step.gone = step.first - run->relief->n_slots;
        step.relief = run->relief;
        return step;
}

static int write_logits(const struct run *run, const struct step *step) {
        size_t numbers = (size_t)step->n * run->engine->model->config.vocab;

        if (fwrite(run->logits, sizeof *run->logits, numbers, run->dump) != numbers)
                return note(-EIO, "cannot write the logits: %s", strerror(errno));
        return 0;
}

static int verify(const struct run *run);

/* The step's tokens are in the blocks. What was reused is proven right before it may be lost. */
static int settle(const struct run *run, uint32_t end) {
        int r = 0;

        if (run->pooled) {
                if (pooled_publishes(run->pooled, end))
                        sequence_publish(run->sequence, end);
                if (run->relief)
                        relief_hits(run->relief, run->engine->shape.tokens, pooled_hits(run->pooled));
                r = pooled_settle(run->pooled, end);
                return r < 0 || !run->relief ? r : relief_settle(run->relief, run->sequence, end);
        }
        if (!run->relief) {
                sequence_publish(run->sequence, end);
                return 0;
        }
        if (!run->relief->lossy)
                sequence_publish(run->sequence, end);
        else
                run->sequence->n_computed = end;
        if (run->engine->verify && relief_loses(run->relief, end))
                r = verify(run);
        return r < 0 ? r : relief_settle(run->relief, run->sequence, end);
}

/* All tokens of the sequence that are not computed yet, in chunks, and the logits of the last one. */
static int catch_up(const struct run *run) {
        struct sequence *s = run->sequence;

        while (s->n_computed < s->n_tokens) {
                struct step step;
                uint32_t end;
                int r;

                sequence_find(s);
                if (run->relief)
                        relief_found(run->relief, s->n_computed);
                step = next_relieved_step(run);
                end = step.first + step.n;
                step.logits = end == s->n_tokens || run->dump ? run->logits : NULL;
                step.all_logits = run->dump;
                r = run->pooled ? pooled_prepare(run->pooled, &step) : sequence_extend(s, end - step.gone);
                if (r > 0)
                        continue;
                if (r == 0)
                        r = compute(run, &step);
                if (r == 0 && step.logits && !sequence_check(s))
                        continue;
                if (r == 0 && run->dump)
                        r = write_logits(run, &step);
                if (r == 0)
                        r = settle(run, end);
                if (r < 0)
                        return r;
                if (end <= run->result->prompt_tokens)
                        show_progress(run, end, run->result->prompt_tokens);
        }
        return 0;
}

/* The logits of every token, once more from the first: keys and values are only read, from wherever they are. */
static int dump_logits(const struct run *run) {
        const struct sequence *s = run->sequence;

        for (uint32_t first = 0; first < s->n_tokens;) {
                struct step step = next_step(run, first);
                int r;

                step.stored = s->n_tokens;
                step.logits = run->logits;
                step.all_logits = true;
                r = compute(run, &step);
                if (r == 0)
                        r = write_logits(run, &step);
                if (r < 0)
                        return r;
                first += step.n;
        }
        return sequence_check(run->sequence) ? 0 : note(-EIO, "what was read from the cache was never written");
}

/* ---- text ---- */

static int append_text(struct run *run, const char *bytes, size_t size) {
        struct result *result = run->result;

        if (result->text_size + size + 1 > run->room) {
                size_t room = 2 * (result->text_size + size + 1);
                char *text = realloc(result->text, room);

                if (!text)
                        return note(-ENOMEM, "out of memory for the answer");
                result->text = text;
                run->room = room;
        }
        memcpy(result->text + result->text_size, bytes, size);
        result->text_size += size;
        result->text[result->text_size] = '\0';
        return 0;
}

/* Cuts the text at the stop string, looking only where the last bytes may have completed it. */
static bool stopped(const struct run *run, size_t last) {
        struct result *result = run->result;
        size_t length = strlen(run->engine->stop), from = result->text_size - MIN(result->text_size, last + length);
        char *found = NULL;

        if (length > 0)
                found = memmem(result->text + from, result->text_size - from, run->engine->stop, length);
        if (!found)
                return false;
        result->text_size = (size_t)(found - result->text);
        *found = '\0';
        return true;
}

static int decode(struct run *run) {
        const struct engine *e = run->engine;

        while (run->result->generated_tokens < e->max_tokens) {
                uint32_t id = sampler_pick(e->sampler, run->logits);
                size_t size;
                const char *bytes = tokenizer_decode(e->tokenizer, id, &size);
                int r;

                if (run->result->generated_tokens++ == 0)
                        run->result->ttft_ms = now_ms() - run->started;
                if (id == TOKEN_EOS)
                        return 0;
                r = append_text(run, bytes, size);
                if (r < 0)
                        return r;
                if (stopped(run, size) || run->result->generated_tokens == e->max_tokens ||
                    run->sequence->n_tokens == run->sequence->capacity)
                        return 0;
                run->sequence->tokens[run->sequence->n_tokens++] = id;
                r = catch_up(run);
                if (r < 0)
                        return r;
        }
        run->result->ttft_ms = now_ms() - run->started; /* nothing was asked for: the prompt's end */
        return 0;
}

/* ---- proof ---- */

static int compare(const struct run *run, const uint8_t *a, const uint8_t *b) {
        const struct engine *e = run->engine;
        uint64_t differ = 0;
        int r = 0;

        if (e->device)
                r = device_compare(e->device, (uintptr_t)a, (uintptr_t)b, e->shape.block_bytes, &differ);
        for (size_t i = 0; !e->device && i < e->shape.block_bytes; i++)
                differ += a[i] != b[i];
        run->result->wrong_bytes += differ;
        return r;
}

/* The prompt's reused part computed anew in private memory, and compared with what was reused, byte by byte. */
static int verify(const struct run *run) {
        const struct engine *e = run->engine;
        const struct sequence *s = run->sequence;
        struct run again = {.engine = run->engine, .result = run->result};
        size_t bytes = e->shape.block_bytes;
        uint32_t n = 0;
        int r;

        for (uint32_t i = 0; i < MIN(s->n_blocks, run->result->prompt_tokens / e->shape.tokens); i++)
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
                run->result->verified_bytes += bytes;
                r = compare(run, s->blocks[i], again.sequence->blocks[i]);
        }
        sequence_free(again.sequence);
        return r;
}

/* ---- request ---- */

static void account(const struct run *run) {
        const struct sequence *s = run->sequence;
        struct result *result = run->result;

        result->total_ms = now_ms() - run->started;
        result->reused_tokens = s->n_reused;
        result->shared_blocks = sequence_shared_blocks(s);
        result->private_blocks = s->n_blocks - result->shared_blocks;
        result->refused = s->n_refused;
        result->budget = run->relief ? run->relief->budget : 0;
        result->kept = run->relief ? run->relief->n_slots : s->n_computed;
        result->relief.kv_bytes = result->relief.kv_bytes_peak = (uint64_t)s->n_blocks * run->engine->shape.block_bytes;
        if (run->relief)
                result->relief = relief_stats(run->relief, s);
        if (run->pooled)
                result->pooled = pooled_stats(run->pooled);
}

static int serve(struct run *run, const struct request *request) {
        const struct engine *e = run->engine;
        double attention;
        int r;

        sampler_restart(e->sampler);
        r = append_text(run, "", 0);
        run->dump = request->logits && (run->relief || run->pooled) ? request->logits : NULL;
        attention = attention_ms(e);
        if (r == 0)
                r = catch_up(run);
        run->result->prompt_attention_ms = attention_ms(e) - attention;
        attention = attention_ms(e);
        run->dump = request->logits;
        if (r == 0 && !request->logits)
                r = decode(run);
        else if (r == 0 && !run->relief && !run->pooled)
                r = dump_logits(run);
        run->result->attention_ms = attention_ms(e) - attention;
        account(run);
        return r == 0 && e->verify && !(run->relief && run->relief->lossy) ? verify(run) : r;
}

/* Slots may be more than tokens. What has relief needs slots that are positions. */
static int prepare_pooled(struct run *run, const struct request *request, uint32_t capacity) {
        const struct engine *e = run->engine;
        uint32_t slots = pooled_capacity(capacity, e->shape.tokens);
        const struct pooled_setup setup = {e->pooled, e->tokenizer, forward_frequencies(e->forward),
                                           e->pooled->align && !run->relief, request->n_tokens};
        int r = sequence_new(e->cache, request->tokens, request->n_tokens, slots, &run->sequence);

        if (r < 0)
                return r;
        run->sequence->capacity = capacity;
        run->sequence->not_found = run->relief ? relief_not_found(run->relief) : 1;
        if (e->pooled->own_prompt)
                run->sequence->not_found = UINT32_MAX;
        return pooled_new(&setup, run->sequence, slots, &run->pooled);
}

/* Logits are those of this process alone: with relief each is computed once, as it comes. */
static int prepare(struct run *run, const struct request *request, uint32_t capacity) {
        const struct engine *e = run->engine;
        const struct config *c = &e->model->config;
        const struct relief_setup setup = {e->methods, e->ops, e->shape, c->layers, c->heads / c->kv_heads,
                                           request->n_tokens, capacity};
        int r = methods_active(e->methods) ? relief_new(&setup, &run->relief) : 0;

        if (r < 0)
                return r;
        if (e->device && (run->relief || pooled_wanted(e->pooled, e->cache)))
                return note(-ENOTSUP, "methods run on the processor: --device cpu, or turn the space's off");
        if (run->relief && request->logits)
                return sequence_new_private(e->cache, request->tokens, request->n_tokens, &run->sequence);
        if (pooled_wanted(e->pooled, e->cache) && !e->methods->evict)
                return prepare_pooled(run, request, capacity);
        r = sequence_new(e->cache, request->tokens, request->n_tokens, capacity, &run->sequence);
        if (r == 0 && decodes_otherwise(e))
                run->sequence->n_public = request->n_tokens;
        if (r == 0 && run->relief)
                run->sequence->not_found = relief_not_found(run->relief);
        return r;
}

int generate(const struct engine *e, const struct request *request, struct result *ret) {
        const struct config *c = &e->model->config;
        size_t rows = request->logits ? e->chunk : 1;
        uint32_t capacity = (uint32_t)MIN((uint64_t)request->n_tokens + e->max_tokens, c->max_positions);
        struct result result = {.prompt_tokens = request->n_tokens};
        struct run run = {.engine = e, .result = &result, .started = now_ms()};
        int r;

        if (request->n_tokens == 0)
                return note(-EINVAL, "the prompt has no tokens");
        if (request->n_tokens > c->max_positions)
                return note(-E2BIG, "the prompt has %u tokens, the model takes %u", request->n_tokens,
                            c->max_positions);
        run.logits = malloc(rows * c->vocab * sizeof *run.logits);
        if (!run.logits)
                return note(-ENOMEM, "out of memory for logits");
        r = prepare(&run, request, capacity);
        if (r == 0)
                r = serve(&run, request);
        pooled_free(run.pooled);
        sequence_free(run.sequence);
        relief_free(run.relief);
        free(run.logits);
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
