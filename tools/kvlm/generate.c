/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/generate.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"

struct run { /* of one request */
        const struct engine *engine;
        struct sequence *sequence;
        struct pooled *pooled; /* NULL: the pool has no table of this request */
        struct result *result;
        float *logits;
        FILE *dump; /* NULL, or where the logits of every token go as they come */
        double started;
        size_t room; /* of the text */
};

static void show_progress(const struct run *run, uint32_t done, uint32_t n) {
        if (run->engine->progress)
                fprintf(stderr, "\r\033[Kprompt: %u of %u tokens%s", done, n, done == n ? "\n" : "");
}

/* ---- computing ---- */

static int compute(const struct run *run, const struct step *step) {
        if (*run->engine->interrupted)
                return -EINTR;
        return run->engine->device ? device_forward_step(run->engine->device_forward, step)
                                   : forward_step(run->engine->pass, run->engine->model->config.layers, step);
}

static double attention_ms(const struct engine *e) {
        return e->pass ? pass_attention_ms(e->pass) : 0;
}

/* Is attention of generated tokens another than a prompt's? Then they are computed one by one, whenever it is. */
static bool decodes_otherwise(const struct engine *e) {
        return e->device && e->device->options.decode == DECODE_FAST;
}

/* Tokens of the prompt that are computed in chunks; what is behind them comes one by one. */
static uint32_t chunked(const struct run *run) {
        uint32_t prompt = run->result->prompt_tokens;

        return prompt - MIN(run->engine->decode_tail, prompt - 1);
}

static struct step next_step(const struct run *run, uint32_t first) {
        const struct sequence *s = run->sequence;
        uint32_t prompt = run->result->prompt_tokens;
        struct step step = {
                .view = {.blocks = s->blocks},
                .tokens = s->tokens + first,
                .first = first,
                .n = MIN(run->engine->chunk, s->n_tokens - first),
                .decoding = first >= prompt,
        };

        if (decodes_otherwise(run->engine))
                step.n = step.decoding ? 1 : MIN(step.n, prompt - first);
        return step;
}

static struct step next_new_step(const struct run *run) {
        struct step step = next_step(run, run->sequence->n_computed);
        uint32_t end = chunked(run);

        step.n = step.first >= end && step.first < run->result->prompt_tokens ? 1 : step.n;
        if (step.first < end)
                step.n = MIN(step.n, end - step.first);
        if (run->pooled)
                step.n = MIN(step.n, pooled_step_limit(run->pooled, step.first));
        return step;
}

static int write_logits(const struct run *run, const struct step *step) {
        size_t numbers = (size_t)step->n * run->engine->model->config.vocab;

        if (fwrite(run->logits, sizeof *run->logits, numbers, run->dump) != numbers)
                return refuse(-EIO, "cannot write the logits: %s", strerror(errno));
        return 0;
}

/* The step's tokens are in the blocks. */
static int settle(const struct run *run, uint32_t end) {
        if (!run->pooled || pooled_publishes(run->pooled, end))
                sequence_publish(run->sequence, end);
        return run->pooled ? pooled_settle(run->pooled, end) : 0;
}

/* Time in attention is told apart: of a prompt's chunks, and of what was decoded. */
static int compute_timed(const struct run *run, const struct step *step) {
        struct result *result = run->result;
        bool decoded = step->first >= chunked(run);
        double before = attention_ms(run->engine);
        int r = compute(run, step);

        *(decoded ? &result->attention_ms : &result->prompt_attention_ms) += attention_ms(run->engine) - before;
        result->decoded_tokens += decoded ? step->n : 0;
        return r;
}

/* All tokens of the sequence that are not computed yet, in chunks, and the logits of the last one. */
static int catch_up(const struct run *run) {
        struct sequence *s = run->sequence;

        while (s->n_computed < s->n_tokens) {
                struct step step;
                uint32_t end;
                int r;

                sequence_find(s);
                step = next_new_step(run);
                end = step.first + step.n;
                step.logits = end == s->n_tokens || run->dump ? run->logits : NULL;
                step.all_logits = run->dump;
                r = run->pooled ? pooled_prepare(run->pooled, &step) : sequence_extend(s, end);
                if (r > 0)
                        continue;
                if (r == 0)
                        r = compute_timed(run, &step);
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

                step.view.stored = s->n_tokens;
                step.logits = run->logits;
                step.all_logits = true;
                r = compute(run, &step);
                if (r == 0)
                        r = write_logits(run, &step);
                if (r < 0)
                        return r;
                first += step.n;
        }
        return sequence_check(run->sequence) ? 0 : refuse(-EIO, "what was read from the cache was never written");
}

/* ---- text ---- */

static int append_text(struct run *run, const char *bytes, size_t size) {
        struct result *result = run->result;

        if (result->text_size + size + 1 > run->room) {
                size_t room = 2 * (result->text_size + size + 1);
                char *text = realloc(result->text, room);

                if (!text)
                        return refuse(-ENOMEM, "out of memory for the answer");
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
                        run->result->ttft_ms = sys_now_ms() - run->started;
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
        run->result->ttft_ms = sys_now_ms() - run->started; /* nothing was asked for: the prompt's end */
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

        result->total_ms = sys_now_ms() - run->started;
        result->reused_tokens = s->n_reused;
        result->shared_blocks = sequence_shared_blocks(s);
        result->private_blocks = s->n_blocks - result->shared_blocks;
        result->refused = s->n_refused;
        if (run->pooled)
                result->pooled = pooled_stats(run->pooled);
}

static int serve(struct run *run, const struct request *request) {
        const struct engine *e = run->engine;
        int r;

        sampler_restart(e->sampler);
        r = append_text(run, "", 0);
        run->dump = run->pooled ? request->logits : NULL;
        if (r == 0)
                r = catch_up(run);
        run->dump = request->logits;
        if (r == 0 && !request->logits)
                r = decode(run);
        else if (r == 0 && !run->pooled)
                r = dump_logits(run);
        account(run);
        return r == 0 && e->verify ? verify(run) : r;
}

/* Slots may be more than tokens. */
static int prepare_pooled(struct run *run, const struct request *request, uint32_t capacity) {
        const struct engine *e = run->engine;
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
                .tail = request->n_tokens - chunked(run),
        };
        uint32_t slots = pooled_capacity(capacity, e->shape.tokens);
        int r = sequence_new(e->cache, request->tokens, request->n_tokens, slots, &run->sequence);

        if (r < 0)
                return r;
        run->sequence->capacity = capacity;
        run->sequence->not_found = pooled_not_found(e->pooled, e->cache, setup.tail);
        return pooled_new(&setup, run->sequence, slots, &run->pooled);
}

static int prepare(struct run *run, const struct request *request, uint32_t capacity) {
        const struct engine *e = run->engine;
        bool pooled = pooled_wanted(e->pooled, e->cache);
        int r;

        if (e->device && pooled)
                return refuse(-ENOTSUP, "methods run on the processor: --device cpu, or turn the space's off");
        if (pooled)
                return prepare_pooled(run, request, capacity);
        r = sequence_new(e->cache, request->tokens, request->n_tokens, capacity, &run->sequence);
        if (r == 0 && decodes_otherwise(e))
                run->sequence->n_public = request->n_tokens;
        return r;
}

int generate(const struct engine *e, const struct request *request, struct result *ret) {
        const struct config *c = &e->model->config;
        size_t rows = request->logits ? e->chunk : 1;
        uint32_t capacity = (uint32_t)MIN((uint64_t)request->n_tokens + e->max_tokens, c->max_positions);
        struct result result = {.prompt_tokens = request->n_tokens};
        struct run run = {.engine = e, .result = &result, .started = sys_now_ms()};
        int r;

        if (request->n_tokens == 0)
                return refuse(-EINVAL, "the prompt has no tokens");
        if (request->n_tokens > c->max_positions)
                return refuse(-E2BIG, "the prompt has %u tokens, the model takes %u", request->n_tokens,
                              c->max_positions);
        run.logits = malloc(rows * c->vocab * sizeof *run.logits);
        if (!run.logits)
                return refuse(-ENOMEM, "out of memory for logits");
        r = prepare(&run, request, capacity);
        if (r == 0)
                r = serve(&run, request);
        pooled_free(run.pooled);
        sequence_free(run.sequence);
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
