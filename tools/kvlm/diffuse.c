/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A step computes all rows or, with BiCache, only those of the prompt and the region: the prefix
 * already has its keys and values. Those of its first b layers are the entry's, computed without
 * the rest of the request. Those of the other layers are the request's own, recomputed every few
 * steps from the entry's hidden state after layer b.
 */

#include "tools/kvlm/diffuse.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "client/kvd_methods.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tools/kvlm/diffuse_pick.h"
#include "tools/kvlm/refuse.h"

enum { DEFAULT_REFRESH = 16 };

struct diffusion { /* of one request */
        const struct diffuser *diffuser;
        const struct diffuse_request *request;
        struct diffuse_result *result;
        kvd_space *space; /* NULL if none */
        struct entry_maker maker;
        uint32_t entry_depth; /* number of layers that an entry gets if we make it */
        struct entry *entry;  /* NULL if nothing is reused */
        struct context context;
        uint8_t *memory;     /* keys and values that are not in the entry */
        uint32_t *tokens;    /* all tokens of the request, masks last */
        uint32_t *positions; /* positions of the masks */
        struct guess *guesses;
        float *logits;
        uint32_t n_masks;
        double started;
};

/* ---- the prefix ---- */

static bool space_says(kvd_space *space, const char *setting) {
        double value;

        return space && kvd_space_setting(space, setting, &value) == 0 && value != 0.0;
}

static enum reuse choose_mode(const struct diffusion *run) {
        enum reuse mode = run->diffuser->options.reuse;

        if (mode == REUSE_SPACE)
                mode = space_says(run->space, "bicache") ? REUSE_ON : REUSE_OFF;
        return run->request->n_prefix > 0 ? mode : REUSE_OFF;
}

enum kvd_ratio diffuse_ratio(const struct diffuser *d, kvd_space *space) {
        if (d->table)
                return d->table->ratio;
        return space_says(space, "bicache.r_def") ? KVD_RATIO_PROMPT_ONLY : KVD_RATIO_INCLUDE_GEN;
}

/* The prefix ratio r, in percent. */
static uint32_t ratio(const struct diffusion *run) {
        bool prompt_only = diffuse_ratio(run->diffuser, run->space) == KVD_RATIO_PROMPT_ONLY;

        return kvd_ratio_percent(run->request->n_prefix,
                                 run->request->n_tokens + (prompt_only ? 0 : run->result->length));
}

/* Looks up the space's table; 0 if it has none. */
static uint32_t space_depth(const struct diffusion *run, uint32_t prefix, uint32_t prompt,
                            uint32_t generated) {
        int depth = run->space ? kvd_prefix_depth(run->space, prefix, prompt, generated) : 0;

        return depth > 0 ? (uint32_t)depth : 0;
}

/* b: layers of the prefix that are used as they were stored. */
static uint32_t depth(const struct diffusion *run) {
        const struct diffuser *d = run->diffuser;
        const struct diffuse_request *q = run->request;

        if (d->options.depth)
                return d->options.depth;
        if (d->table)
                return (uint32_t)kvd_btable_lookup(d->table, d->table->ratio, run->result->ratio);
        return MAX(1,
                   space_depth(run, q->n_prefix, q->n_tokens - q->n_prefix, run->result->length));
}

/*
 * Number of layers that an entry gets: the most that any ratio may need (that of a prefix alone),
 * or all of them.
 */
static uint32_t entry_depth(const struct diffusion *run) {
        const struct diffuser *d = run->diffuser;
        const struct kvd_btable *t = d->table;
        uint32_t deepest = d->options.depth;

        if (deepest == 0)
                deepest = !t ? space_depth(run, 1, 0, 0) : t->n > 0 ? t->steps[t->n - 1].b : 1;
        return deepest ? deepest : d->model->config.layers;
}

static void choose(struct diffusion *run) {
        uint32_t layers = run->diffuser->model->config.layers;

        run->space = cache_space(run->diffuser->cache);
        run->result->mode = choose_mode(run);
        run->result->ratio = ratio(run);
        if (run->result->mode == REUSE_NAIVE)
                run->result->depth = run->entry_depth = layers;
        if (run->result->mode != REUSE_ON)
                return;
        run->result->depth = MIN(depth(run), layers);
        run->entry_depth = MIN(entry_depth(run), layers);
}

static int open_entry(struct diffusion *run) {
        struct diffuse_result *result = run->result;
        int r;

        if (result->depth == 0)
                return 0;
        r = entry_open(&run->maker, run->request->tokens, run->request->n_prefix, result->depth,
                       run->entry_depth, &run->entry);
        if (r < 0)
                return r;
        assert(run->entry);
        result->found = MIN(run->entry->n_found, result->depth);
        result->made = run->entry->n_made;
        result->reused_tokens = result->found == result->depth ? run->request->n_prefix : 0;
        result->refused = run->entry->refused;
        result->shared_bytes = entry_bytes(run->entry, result->depth, true);
        result->private_bytes = entry_bytes(run->entry, result->depth, false);
        return 0;
}

/* ---- memory ---- */

/* Uses the entry's blocks where there are some, and our own memory elsewhere. */
static int lay_out(struct diffusion *run) {
        const struct diffuser *d = run->diffuser;
        const struct config *c = &d->model->config;
        struct context *x = &run->context;
        uint32_t prefix_blocks = DIV_UP(x->n_prefix, d->shape.tokens);
        size_t n_private = (size_t)c->layers * x->n_blocks -
                           (size_t)run->result->depth * prefix_blocks;
        uint8_t *next;

        run->memory = aligned_alloc(64, ALIGN_UP(n_private * d->shape.plain_bytes, 64));
        if (!run->memory)
                return refuse(-ENOMEM, "out of memory for keys and values");
        next = run->memory;
        for (uint32_t layer = 0; layer < c->layers; layer++)
                for (uint32_t i = 0; i < x->n_blocks; i++) {
                        bool shared = layer < run->result->depth && i < prefix_blocks;

                        x->blocks[(size_t)layer * x->n_blocks + i] =
                                shared ? entry_block(run->entry, layer, i) : next;
                        next += shared ? 0 : d->shape.plain_bytes;
                }
        run->result->deep_bytes = (uint64_t)(c->layers - run->result->depth) * prefix_blocks *
                                  d->shape.plain_bytes;
        return 0;
}

static int prepare(struct diffusion *run) {
        const struct diffuse_request *q = run->request;
        const struct config *c = &run->diffuser->model->config;
        uint32_t length = run->result->length, n = q->n_tokens + length;
        int r = context_new(c, &run->diffuser->shape, q->n_prefix, n, &run->context);

        if (r < 0)
                return r;
        run->tokens = calloc(n, sizeof *run->tokens);
        run->positions = calloc(length, sizeof *run->positions);
        run->guesses = calloc(length, sizeof *run->guesses);
        run->logits = malloc((size_t)length * c->vocab * sizeof *run->logits);
        if (!run->tokens || !run->positions || !run->guesses || !run->logits)
                return refuse(-ENOMEM, "out of memory for a request of %u tokens", n);
        memcpy(run->tokens, q->tokens, q->n_tokens * sizeof *run->tokens);
        for (uint32_t i = q->n_tokens; i < n; i++)
                run->tokens[i] = c->mask_token;
        run->n_masks = length;
        r = lay_out(run);
        return r < 0 ? r : pass_rows(run->diffuser->pass, 0, n);
}

static void clean_up(struct diffusion *run) {
        entry_close(run->entry);
        context_release(&run->context);
        free(run->memory);
        free(run->tokens);
        free(run->positions);
        free(run->guesses);
        free(run->logits);
}

/* ---- one step ---- */

static int pass(const struct diffusion *run, uint32_t layer, uint32_t end_layer, uint32_t from) {
        const struct view view = context_view(&run->context, false);

        return pass_run(run->diffuser->pass, &view, layer, end_layer, from, run->context.n_tokens);
}

/* t counts from 1, as in the paper. */
static bool is_refreshed(const struct diffusion *run, uint32_t t) {
        uint32_t every = run->diffuser->options.refresh;
        int answer = every == 0 && run->space ? kvd_prefix_refresh(run->space, t) : -ENOENT;

        return answer < 0 ? kvd_refresh_due(t, every ? every : DEFAULT_REFRESH) : answer > 0;
}

static int compute(const struct diffusion *run, uint32_t t) {
        struct pass *p = run->diffuser->pass;
        uint32_t layers = run->diffuser->model->config.layers, b = run->result->depth;
        uint32_t from = b > 0 ? run->context.n_prefix : 0;
        const struct view view = context_view(&run->context, false);
        int r;

        pass_embed(p, run->tokens + from, from, run->context.n_tokens);
        if (b == 0 || b == layers || !is_refreshed(run, t))
                return pass(run, 0, layers, from);
        run->result->refreshes++;
        r = pass(run, 0, b, from);
        if (r < 0)
                return r;
        pass_restore(p, &view, b - 1, run->context.n_prefix);
        return pass(run, b, layers, 0);
}

static void list_masks(struct diffusion *run) {
        uint32_t first = run->request->n_tokens, n = 0;

        for (uint32_t i = 0; i < run->result->length; i++)
                if (run->tokens[first + i] == run->diffuser->model->config.mask_token)
                        run->positions[n++] = first + i;
        run->n_masks = n;
}

/* Replaces the step's share of the masks by tokens. */
static void fix_tokens(struct diffusion *run, uint32_t t) {
        const struct config *c = &run->diffuser->model->config;
        uint32_t n = pick_count(run->result->length, run->result->steps, t);

        list_masks(run);
        pass_logits_at(run->diffuser->pass, run->positions, run->n_masks, run->logits);
        for (uint32_t i = 0; i < run->n_masks; i++)
                run->guesses[i] = guess_token(run->logits + (size_t)i * c->vocab, c->vocab,
                                              c->mask_token, run->positions[i]);
        guesses_sort(run->guesses, run->n_masks);
        for (uint32_t i = 0; i < n; i++)
                run->tokens[run->guesses[i].position] = run->guesses[i].token;
}

static int dump_logits(struct diffusion *run) {
        size_t n = (size_t)run->result->length * run->diffuser->model->config.vocab;

        for (uint32_t i = 0; i < run->result->length; i++)
                run->positions[i] = run->request->n_tokens + i;
        pass_logits_at(run->diffuser->pass, run->positions, run->result->length, run->logits);
        if (fwrite(run->logits, sizeof *run->logits, n, run->request->logits) != n)
                return refuse(-EIO, "cannot write the logits: %s", strerror(errno));
        return 0;
}

static int denoise(struct diffusion *run) {
        for (uint32_t t = 1; t <= run->result->steps; t++) {
                int r = *run->diffuser->interrupted ? -EINTR : compute(run, t);

                if (r == 0 && run->request->logits)
                        r = dump_logits(run);
                if (r < 0)
                        return r;
                fix_tokens(run, t);
        }
        return 0;
}

/* ---- proof and text ---- */

/* Recomputes the layers that were found in private memory, and compares them byte by byte. */
static int verify(struct diffusion *run) {
        struct entry *again;
        int r;

        if (run->result->found == 0)
                return 0;
        r = entry_open_private(&run->maker, run->request->tokens, run->request->n_prefix,
                               run->result->found, &again);
        if (r < 0)
                return r;
        for (uint32_t layer = 0; layer < run->result->found; layer++)
                for (uint32_t i = 0; i < again->context.n_blocks; i++) {
                        const uint8_t *mine = entry_block(again, layer, i),
                                      *theirs = entry_block(run->entry, layer, i);

                        for (size_t b = 0; b < run->maker.shape->block_bytes; b++)
                                run->result->wrong_bytes += mine[b] != theirs[b];
                        run->result->verified_bytes += run->maker.shape->block_bytes;
                }
        entry_close(again);
        return 0;
}

/* Writes the text before the first end-of-text token. */
static int write_text(struct diffusion *run) {
        struct diffuse_result *result = run->result;
        const uint32_t *region = run->tokens + run->request->n_tokens;
        const char *stop = run->diffuser->stop;
        char *found = NULL;
        FILE *f = open_memstream(&result->text, &result->text_size);

        if (!f)
                return refuse(-ENOMEM, "out of memory for the answer");
        for (uint32_t i = 0; i < result->length && region[i] != TOKEN_EOS; i++) {
                size_t size;
                const char *bytes = tokenizer_decode(run->diffuser->tokenizer, region[i], &size);

                fwrite(bytes, 1, size, f);
        }
        if (fclose(f) != 0)
                return refuse(-ENOMEM, "out of memory for the answer");
        if (*stop)
                found = memmem(result->text, result->text_size, stop, strlen(stop));
        if (found)
                result->text_size = (size_t)(found - result->text);
        result->text[result->text_size] = '\0';
        result->tokens = malloc(result->length * sizeof *result->tokens);
        if (!result->tokens)
                return refuse(-ENOMEM, "out of memory for the answer");
        memcpy(result->tokens, region, result->length * sizeof *region);
        return 0;
}

/* ---- request ---- */

static int serve(struct diffusion *run) {
        int r = open_entry(run);

        run->result->entry_ms = sys_now_ms() - run->started;
        if (r == 0)
                r = prepare(run);
        if (r == 0)
                r = denoise(run);
        run->result->total_ms = sys_now_ms() - run->started;
        if (r == 0)
                r = write_text(run);
        return r == 0 && run->diffuser->verify ? verify(run) : r;
}

int diffuse_check(const struct diffuser *d, const struct diffuse_request *q) {
        uint64_t n = (uint64_t)q->n_tokens + d->options.length;

        if (q->n_tokens == 0)
                return refuse(-EINVAL, "the prompt has no tokens");
        if (n > d->model->config.max_positions)
                return refuse(-E2BIG,
                              "prompt and answer have %ju tokens, but the model takes only %u",
                              (uintmax_t)n, d->model->config.max_positions);
        if (d->options.steps > d->options.length)
                return refuse(-EINVAL,
                              "%u steps for %u tokens: there must not be more steps than tokens",
                              d->options.steps, d->options.length);
        return 0;
}

int diffuse(const struct diffuser *d, const struct diffuse_request *q, struct diffuse_result *ret) {
        struct diffuse_result result = {
                .prompt_tokens = q->n_tokens,
                .prefix_tokens = q->n_prefix,
                .length = d->options.length,
                .steps = d->options.steps ? d->options.steps : d->options.length,
        };
        struct diffusion run = {
                .diffuser = d,
                .request = q,
                .result = &result,
                .maker = {&d->model->config, &d->shape, d->pass, d->cache},
                .started = sys_now_ms(),
        };
        int r = diffuse_check(d, q);

        if (r < 0)
                return r;
        choose(&run);
        r = serve(&run);
        clean_up(&run);
        if (r < 0)
                diffuse_result_release(&result);
        else
                *ret = result;
        return r;
}

void diffuse_result_release(struct diffuse_result *result) {
        free(result->text);
        free(result->tokens);
        *result = (struct diffuse_result){0};
}
