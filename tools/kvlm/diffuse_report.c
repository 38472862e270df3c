/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/diffuse_report.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "tools/kvlm/json.h"
#include "tools/kvlm/note.h"

static const char *const modes[] = {"space", "off", "naive", "on"};

static int finish(void) {
        if (fflush(stdout) != 0 || ferror(stdout))
                return note(-EIO, "cannot write to standard output: %s", strerror(errno));
        return 0;
}

/* Of the whole region, however much of it is text; all the request's time counts. */
static double tokens_per_second(const struct diffuse_result *r) {
        return r->total_ms > 0.0 ? r->length / r->total_ms * 1e3 : 0.0;
}

static void write_tokens(const struct diffuse_result *r) {
        fputs(", \"tokens\": [", stdout);
        for (uint32_t i = 0; i < r->length; i++)
                printf(i ? ", %u" : "%u", r->tokens[i]);
        putchar(']');
}

int diffuse_report_json(const struct diffuse_result *r, const struct diffuser *d) {
        fputs("{\"text\": ", stdout);
        json_write_string(stdout, r->text, r->text_size);
        write_tokens(r);
        printf(", \"prompt_tokens\": %u, \"prefix_tokens\": %u, \"reused_tokens\": %u, \"generated_tokens\": %u",
               r->prompt_tokens, r->prefix_tokens, r->reused_tokens, r->length);
        printf(", \"bicache\": \"%s\", \"r\": %u, \"b\": %u, \"layers\": %u, \"steps\": %u, \"refreshes\": %u",
               modes[r->mode], r->ratio, r->depth, d->model->config.layers, r->steps, r->refreshes);
        printf(", \"found_layers\": %u, \"made_layers\": %u, \"shared_bytes\": %" PRIu64 ", \"private_bytes\": %" PRIu64
               ", \"deep_bytes\": %" PRIu64 ", \"refused\": %d",
               r->found, r->made, r->shared_bytes, r->private_bytes, r->deep_bytes, r->refused);
        printf(", \"entry_ms\": %.3f, \"total_ms\": %.3f, \"tokens_per_s\": %.1f", r->entry_ms, r->total_ms,
               tokens_per_second(r));
        if (d->verify)
                printf(", \"verified_bytes\": %" PRIu64 ", \"wrong_bytes\": %" PRIu64, r->verified_bytes,
                       r->wrong_bytes);
        puts("}");
        return finish();
}

int diffuse_report_text(const struct diffuse_result *r, const struct diffuser *d) {
        fwrite(r->text, 1, r->text_size, stdout);
        printf("\n  [%u tokens, %u of them the document; %u generated in %u steps at %.0f/s; all after %.1f ms",
               r->prompt_tokens, r->prefix_tokens, r->length, r->steps, tokens_per_second(r), r->total_ms);
        if (r->depth > 0)
                printf("; the document's share is %u %%: %u of %u layers reused (%u were there, %.1f KiB shared), "
                       "%u refreshes",
                       r->ratio, r->depth, d->model->config.layers, r->found, (double)r->shared_bytes / 1024,
                       r->refreshes);
        if (r->refused)
                fputs("; refused", stdout);
        if (d->verify)
                printf("; %" PRIu64 " bytes verified, %" PRIu64 " wrong", r->verified_bytes, r->wrong_bytes);
        puts("]");
        return finish();
}
