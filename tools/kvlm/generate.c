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
        struct result *result;
        float *logits;
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
        return forward_step(run->engine->forward, step);
}

static struct step next_step(const struct run *run, uint32_t first) {
        const struct sequence *s = run->sequence;

        return (struct step){
                .blocks = s->blocks,
                .tokens = s->tokens + first,
                .first = first,
                .n = MIN(run->engine->chunk, s->n_tokens - first),
        };
}

/* All tokens of the sequence that are not computed yet, in chunks, and the logits of the last one. */
static int catch_up(const struct run *run) {
        struct sequence *s = run->sequence;

        while (s->n_computed < s->n_tokens) {
                struct step step;
                uint32_t end;
                int r;

                sequence_find(s);
                step = next_step(run, s->n_computed);
                end = step.first + step.n;
                step.logits = end == s->n_tokens ? run->logits : NULL;
                r = sequence_extend(s, end);
                if (r == 0)
                        r = compute(run, &step);
                if (r < 0)
                        return r;
                sequence_publish(s, end);
                if (end <= run->result->prompt_tokens)
                        show_progress(run, end, run->result->prompt_tokens);
        }
        return 0;
}

/* The logits of every token, once more from the first: keys and values are only read, from wherever they are. */
static int dump_logits(const struct run *run, FILE *f) {
        const struct sequence *s = run->sequence;
        uint32_t vocab = run->engine->model->config.vocab;

        for (uint32_t first = 0; first < s->n_tokens;) {
                struct step step = next_step(run, first);
                size_t numbers = (size_t)step.n * vocab;
                int r;

                step.stored = s->n_tokens;
                step.logits = run->logits;
                step.all_logits = true;
                r = compute(run, &step);
                if (r < 0)
                        return r;
                if (fwrite(run->logits, sizeof *run->logits, numbers, f) != numbers)
                        return note(-EIO, "cannot write the logits: %s", strerror(errno));
                first += step.n;
        }
        return 0;
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

/* The prompt's reused part computed anew in private memory, and compared with what was reused, byte by byte. */
static int verify(const struct run *run) {
        const struct engine *e = run->engine;
        const struct sequence *s = run->sequence;
        struct run again = *run;
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
                for (size_t b = 0; b < bytes; b++)
                        run->result->wrong_bytes += s->blocks[i][b] != again.sequence->blocks[i][b];
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
}

static int serve(struct run *run, const struct request *request) {
        const struct engine *e = run->engine;
        int r;

        sampler_restart(e->sampler);
        r = append_text(run, "", 0);
        if (r == 0)
                r = catch_up(run);
        if (r == 0)
                r = request->logits ? dump_logits(run, request->logits) : decode(run);
        account(run);
        return r == 0 && e->verify ? verify(run) : r;
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
        r = sequence_new(e->cache, request->tokens, request->n_tokens, capacity, &run.sequence);
        if (r == 0)
                r = serve(&run, request);
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
