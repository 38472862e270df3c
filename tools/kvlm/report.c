/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prints the result of a request, for people or as one line of JSON. Both come from the same struct
 * result, so that they cannot differ.
 */

#include "tools/kvlm/report.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/json.h"
#include "tools/kvlm/refuse.h"

static int finish(void) {
        if (fflush(stdout) != 0 || ferror(stdout))
                return refuse(-EIO, "cannot write to standard output: %s", strerror(errno));
        return 0;
}

/* Writes one line and frees the object, which is NULL if memory ran out. */
static int write_line(json_t *object) {
        int r = object ? json_dumpf(object, stdout, JSON_REAL_PRECISION(9)) : -ENOMEM;

        json_decref(object);
        if (r == -ENOMEM)
                return refuse(r, "out of memory for a report");
        putchar('\n');
        return finish();
}

/* The decoding rate: the first token's time counts for the prompt. */
static double tokens_per_second(const struct result *r) {
        double ms = r->total_ms - r->ttft_ms;

        return r->generated_tokens > 1 && ms > 0.0 ? (r->generated_tokens - 1) / ms * 1e3 : 0.0;
}

#define WHOLE(value) ((json_int_t)(value))

/* Attention time excludes the selection and waiting for missing blocks. */
static json_t *times_json(const struct result *r) {
        const struct kvd_reader_stats *p = &r->pooled.reader;
        double select_ms = (double)p->select_ns / 1e6, fetch_ms = (double)p->fetch_ns / 1e6;

        return json_pack("{sI sf sf sf sI}", "decoded_tokens", WHOLE(r->decoded_tokens),
                         "prompt_attention_ms", r->prompt_attention_ms, "attention_ms",
                         r->attention_ms - select_ms - fetch_ms, "selection_ms", select_ms,
                         "selections", WHOLE(p->selections));
}

static json_t *sequence_json(const struct pooled_stats *p) {
        const struct kvd_sequence_stats *t = &p->table;
        const struct {
                const char *name;
                uint64_t value;
        } numbers[] = {
                {"blocks", t->blocks},
                {"own", t->own},
                {"borrowed", t->borrowed},
                {"resident", t->resident},
                {"most_resident", p->reader.most_resident},
                {"tokens", t->tokens},
                {"shared", t->shared},
                {"shared_tokens", t->shared_tokens},
                {"bytes_saved", t->bytes_saved},
                {"spilled", t->spilled},
                {"vague", t->vague},
                {"approximate", t->approximate},
                {"dropped", t->dropped},
                {"revived_exact", t->revived_exact},
                {"revived_approx", t->revived_approx},
                {"steps", p->steps},
                {"changes", p->changes},
                {"evictions", p->evictions},
                {"misses", p->reader.misses},
                {"late", p->late + p->reader.late},
                {"waits", p->waits},
                {"empty_slots", p->empty_slots},
                {"compacted", t->compacted},
                {"resident_bytes", t->resident_bytes},
                {"label_bytes", t->label_bytes},
                {"copy_bytes", t->copy_bytes},
                {"sketch_bytes", t->sketch_bytes},
        };
        json_t *object = json_pack("{sf}", "wait_ms", p->wait_ms);

        for (size_t i = 0; i < ARRAY_SIZE(numbers); i++)
                json_object_set_new(object, numbers[i].name, json_integer(WHOLE(numbers[i].value)));
        return object;
}

static json_t *verified_json(uint64_t verified, uint64_t wrong) {
        return json_pack("{sI sI}", "verified_bytes", WHOLE(verified), "wrong_bytes", WHOLE(wrong));
}

int report_json(const struct result *r, bool verified) {
        json_t *object = json_pack("{so sI sI sI sI sf sf sI sI sI sf}", "text",
                                   json_bytes(r->text, r->text_size), "prompt_tokens",
                                   WHOLE(r->prompt_tokens), "reused_tokens",
                                   WHOLE(r->reused_tokens), "computed_tokens",
                                   WHOLE(r->prompt_tokens - r->reused_tokens), "generated_tokens",
                                   WHOLE(r->generated_tokens), "ttft_ms", r->ttft_ms, "total_ms",
                                   r->total_ms, "shared_blocks", WHOLE(r->shared_blocks),
                                   "private_blocks", WHOLE(r->private_blocks), "refused",
                                   WHOLE(r->refused), "tokens_per_s", tokens_per_second(r));

        json_object_update_new(object, times_json(r));
        if (r->pooled.used)
                json_object_set_new(object, "sequence", sequence_json(&r->pooled));
        if (verified)
                json_object_update_new(object, verified_json(r->verified_bytes, r->wrong_bytes));
        return write_line(object);
}

int report_text(const struct result *r, bool verified) {
        fwrite(r->text, 1, r->text_size, stdout);
        printf("\n  [%u tokens: %u reused, %u computed; %u generated at %.0f/s; "
               "first after %.1f ms, all after %.1f ms; %u shared blocks, %u private",
               r->prompt_tokens, r->reused_tokens, r->prompt_tokens - r->reused_tokens,
               r->generated_tokens, tokens_per_second(r), r->ttft_ms, r->total_ms, r->shared_blocks,
               r->private_blocks);
        if (r->refused)
                printf(", %u refusals", r->refused);
        if (verified)
                printf("; %" PRIu64 " bytes verified, %" PRIu64 " wrong", r->verified_bytes,
                       r->wrong_bytes);
        puts("]");
        return finish();
}

int report_failure(const char *line) {
        return write_line(json_pack("{so}", "error", json_bytes(line, strlen(line))));
}

/* ---- diffusion ------------------------------------------------------------------------------- */

/* The rate over the whole region, however much of it is text, and over the request's total time. */
static double diffused_per_second(const struct diffuse_result *r) {
        return r->total_ms > 0.0 ? r->length / r->total_ms * 1e3 : 0.0;
}

static json_t *tokens_json(const struct diffuse_result *r) {
        json_t *tokens = json_array();

        for (uint32_t i = 0; i < r->length; i++)
                json_array_append_new(tokens, json_integer(r->tokens[i]));
        return tokens;
}

int report_diffused_json(const struct diffuse_result *r, const struct diffuser *d) {
        static const char *const modes[] = {"space", "off", "naive", "on"};
        json_t *object =
                json_pack("{so so sI sI sI sI ss sI sI sI sI sI sI sI sI sI sI sI sf sf sf}",
                          "text", json_bytes(r->text, r->text_size), "tokens", tokens_json(r),
                          "prompt_tokens", WHOLE(r->prompt_tokens), "prefix_tokens",
                          WHOLE(r->prefix_tokens), "reused_tokens", WHOLE(r->reused_tokens),
                          "generated_tokens", WHOLE(r->length), "bicache", modes[r->mode], "r",
                          WHOLE(r->ratio), "b", WHOLE(r->depth), "layers",
                          WHOLE(d->model->config.layers), "steps", WHOLE(r->steps), "refreshes",
                          WHOLE(r->refreshes), "found_layers", WHOLE(r->found), "made_layers",
                          WHOLE(r->made), "shared_bytes", WHOLE(r->shared_bytes), "private_bytes",
                          WHOLE(r->private_bytes), "deep_bytes", WHOLE(r->deep_bytes), "refused",
                          WHOLE(r->refused), "entry_ms", r->entry_ms, "total_ms", r->total_ms,
                          "tokens_per_s", diffused_per_second(r));

        if (d->verify)
                json_object_update_new(object, verified_json(r->verified_bytes, r->wrong_bytes));
        return write_line(object);
}

int report_diffused_text(const struct diffuse_result *r, const struct diffuser *d) {
        fwrite(r->text, 1, r->text_size, stdout);
        printf("\n  [%u tokens, %u of them the document; %u generated in %u steps at %.0f/s; all after %.1f ms",
               r->prompt_tokens, r->prefix_tokens, r->length, r->steps, diffused_per_second(r),
               r->total_ms);
        if (r->depth > 0)
                printf("; the document's share is %u %%: %u of %u layers reused "
                       "(%u were found, %.1f KiB shared), %u refreshes",
                       r->ratio, r->depth, d->model->config.layers, r->found,
                       (double)r->shared_bytes / 1024, r->refreshes);
        if (r->refused)
                fputs("; refused", stdout);
        if (d->verify)
                printf("; %" PRIu64 " bytes verified, %" PRIu64 " wrong", r->verified_bytes,
                       r->wrong_bytes);
        puts("]");
        return finish();
}
