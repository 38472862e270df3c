/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/report.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "tools/kvlm/note.h"
#include "tools/kvlm/json.h"

static int finish(void) {
        if (fflush(stdout) != 0 || ferror(stdout))
                return note(-EIO, "cannot write to standard output: %s", strerror(errno));
        return 0;
}

/* Of decoding: the first token's time is the prompt's. */
static double tokens_per_second(const struct result *r) {
        double ms = r->total_ms - r->ttft_ms;

        return r->generated_tokens > 1 && ms > 0.0 ? (r->generated_tokens - 1) / ms * 1e3 : 0.0;
}

static void report_methods(const struct result *r, const struct methods *m) {
        const struct relief_stats *s = &r->relief;

        printf(", \"method\": \"%s%s\", \"profile\": \"%s\"", m->hshare.on && m->evict ? "hshare+" : "",
               m->hshare.on && !m->evict ? "hshare" : evict_name(m->evict), m->paper ? "paper" : "serve");
        printf(", \"budget_tokens\": %u, \"kept_tokens\": %u, \"evicted_tokens\": %" PRIu64 ", \"evictions\": %" PRIu64,
               r->budget, r->kept, s->evicted, s->evictions);
        printf(", \"kv_bytes_peak\": %" PRIu64 ", \"kv_bytes\": %" PRIu64 ", \"label_bytes\": %" PRIu64
               ", \"spill_bytes\": %" PRIu64, s->kv_bytes_peak, s->kv_bytes, s->label_bytes, s->spill_bytes);
        printf(", \"prompt_attention_ms\": %.3f, \"attention_ms\": %.3f, \"selection_ms\": %.3f, \"selections\": %"
               PRIu64, r->prompt_attention_ms, r->attention_ms - s->selection_ms, s->selection_ms, s->selections);
        printf(", \"revived_exact\": %" PRIu64 ", \"revived_approximate\": %" PRIu64 ", \"swapped_exact\": %" PRIu64
               ", \"swapped_approximate\": %" PRIu64 ", \"revive_refused\": %" PRIu64 ", \"sketch_load\": %.3f",
               s->revived_exact, s->revived_approximate, s->swapped_exact, s->swapped_approximate, s->refused,
               s->load);
}

static void report_pooled(const struct pooled_stats *p) {
        const struct kvd_sequence_stats *t = &p->table;

        printf(", \"sequence\": {\"blocks\": %" PRIu64 ", \"own\": %" PRIu64 ", \"borrowed\": %" PRIu64 ", \"resident\": %"
               PRIu64, t->blocks, t->own, t->borrowed, t->resident);
        printf(", \"tokens\": %" PRIu64 ", \"shared\": %" PRIu64 ", \"shared_tokens\": %" PRIu64 ", \"bytes_saved\": %"
               PRIu64, t->tokens, t->shared, t->shared_tokens, t->bytes_saved);
        printf(", \"spilled\": %" PRIu64 ", \"vague\": %" PRIu64 ", \"approximate\": %" PRIu64 ", \"dropped\": %" PRIu64
               ", \"revived_exact\": %" PRIu64 ", \"revived_approximate\": %" PRIu64, t->spilled, t->vague,
               t->approximate, t->dropped, t->revived_exact, t->revived_approx);
        printf(", \"steps\": %u, \"changes\": %u, \"empty_slots\": %u, \"random_shared\": %u, \"waits\": %u, \"misses\": %u, "
               "\"sync_ms\": %.3f}", p->steps, p->changes, p->empty_slots, p->random_shared, p->waits, p->misses, p->sync_ms);
}

int report_json(const struct result *r, const struct methods *m, bool verified) {
        fputs("{\"text\": ", stdout);
        json_write_string(stdout, r->text, r->text_size);
        printf(", \"prompt_tokens\": %u, \"reused_tokens\": %u, \"computed_tokens\": %u, \"generated_tokens\": %u",
               r->prompt_tokens, r->reused_tokens, r->prompt_tokens - r->reused_tokens, r->generated_tokens);
        printf(", \"ttft_ms\": %.3f, \"total_ms\": %.3f, \"shared_blocks\": %u, \"private_blocks\": %u", r->ttft_ms,
               r->total_ms, r->shared_blocks, r->private_blocks);
        printf(", \"refused\": %u, \"tokens_per_s\": %.1f", r->refused, tokens_per_second(r));
        report_methods(r, m);
        if (r->pooled.used)
                report_pooled(&r->pooled);
        if (verified)
                printf(", \"verified_bytes\": %" PRIu64 ", \"wrong_bytes\": %" PRIu64, r->verified_bytes,
                       r->wrong_bytes);
        puts("}");
        return finish();
}

int report_text(const struct result *r, bool verified) {
        fwrite(r->text, 1, r->text_size, stdout);
        printf("\n  [%u tokens: %u reused, %u computed; %u generated at %.0f/s; first after %.1f ms, "
               "all after %.1f ms; %u shared blocks, %u private",
               r->prompt_tokens, r->reused_tokens, r->prompt_tokens - r->reused_tokens, r->generated_tokens,
               tokens_per_second(r), r->ttft_ms, r->total_ms, r->shared_blocks, r->private_blocks);
        if (r->refused)
                printf(", %u refusals", r->refused);
        if (verified)
                printf("; %" PRIu64 " bytes verified, %" PRIu64 " wrong", r->verified_bytes, r->wrong_bytes);
        puts("]");
        return finish();
}

int report_failure(const char *line) {
        fputs("{\"error\": ", stdout);
        json_write_string(stdout, line, strlen(line));
        puts("}");
        return finish();
}
