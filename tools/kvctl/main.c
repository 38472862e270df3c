/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvctl shows and changes the state of a kvd daemon. A verb builds an answer, and this file prints
 * it once or, with --watch, repeatedly.
 */

#include <errno.h>
#include <string.h>
#include <time.h>

#include "client/kvd.h"
#include "ipc/base/text.h"
#include "tools/kvctl/kvctl.h"
#include "tools/kvctl/text.h"
#include "tools/kvctl/top.h"

static void complain(const char *why) {
        fputs("kvctl: ", stderr);
        text_put(stderr, why, strlen(why));
        fputc('\n', stderr);
}

static bool wants_json(const struct kvctl *kvctl) {
        return args_has(&kvctl->args, FLAG_JSON) || kvctl->args.verb->run == verb_dump;
}

/* ---- once ------------------------------------------------------------------------------------ */

/* What cannot be written is found at the end of the output. */
static int print_json(struct kvctl *kvctl, const struct answer *answer, const char *before,
                      const char *after) {
        json_t *json = answer_json(answer);
        int r;

        fputs(before, stdout);
        r = json ? json_dumpf(json, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) : -1;
        fputs(after, stdout);
        json_decref(json);
        return r < 0 && !ferror(stdout) ? kvctl_out_of_memory(kvctl) : 0;
}

static int show(struct kvctl *kvctl, const struct answer *answer) {
        if (wants_json(kvctl) && !kvctl->streams)
                return print_json(kvctl, answer, "", "\n");
        if (!kvctl->streams && answer_print(answer, &kvctl->screen) < 0)
                return kvctl_out_of_memory(kvctl);
        return 0;
}

static int run_once(struct kvctl *kvctl) {
        _cleanup_(answer_freep) struct answer *answer = answer_new();
        int r, shown;

        if (!answer)
                return kvctl_out_of_memory(kvctl);
        r = kvctl->args.verb->run(kvctl, answer);
        if (r < 0)
                return r;
        shown = show(kvctl, answer);
        return shown < 0 ? shown : r;
}

/* ---- repeatedly ------------------------------------------------------------------------------ */

#define HEADING 2u /* lines */

struct watch {
        double seconds;
        uint64_t count; /* 0: no limit */
        bool paint;     /* on the alternate screen, each picture over the previous one */
        bool json;      /* one document: {"samples": [...]} */
};

static struct watch watch_for(struct kvctl *kvctl) {
        const struct args *args = &kvctl->args;
        bool json = wants_json(kvctl);

        return (struct watch){.seconds = top_seconds(kvctl),
                              .count = args->number[FLAG_COUNT],
                              .paint = kvctl->screen.escapes && !json &&
                                       !args_has(args, FLAG_BATCH),
                              .json = json};
}

static bool repeats(const struct args *args) {
        return args_has(args, FLAG_WATCH) || args->verb->run == verb_top;
}

static void put_heading(const struct kvctl *kvctl, const struct watch *watch, FILE *to) {
        time_t now = time(NULL);
        const char *hint = "";
        struct tm local;
        char text[32] = "";

        if (localtime_r(&now, &local))
                strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &local);
        if (kvctl->screen.terminal && !args_has(&kvctl->args, FLAG_BATCH))
                hint = screen_has_keys() ? "  (q ends, ? helps)" : "  (Ctrl-C ends)";
        fprintf(to, "kvctl %s, every %g s: %s%s%s\n\n", kvctl->args.verb->name, watch->seconds,
                text, hint, kvctl->top && kvctl->top->paused ? "  PAUSED" : "");
}

/* The text after that many lines. */
static const char *behind(const char *text, unsigned lines) {
        while (lines-- && *text) {
                text = strchrnul(text, '\n');
                text += *text == '\n';
        }
        return text;
}

static unsigned count_lines(const char *text) {
        unsigned n = 0;

        for (; *text; text = behind(text, 1))
                n++;
        return n;
}

/* The last line of a screen that is too small. */
static void put_left_out(const struct kvctl *kvctl, unsigned lines) {
        char text[160];
        int n = snprintf(text, sizeof text, "%u more lines", lines);

        if (kvctl->top)
                n += snprintf(text + n, sizeof text - (size_t)n, " (of %zu spaces and %zu clients)",
                              kvctl->top->now->n_spaces, kvctl->top->now->n_clients);
        snprintf(text + n, sizeof text - (size_t)n,
                 screen_has_keys() ? ": scroll down, or enlarge the terminal" :
                                     ": enlarge the terminal");
        text_put_cut(stdout, text, strlen(text), kvctl->screen.width);
}

/* The heading, and as much of the rest as fits, from the scrolled line on. */
static void paint(struct kvctl *kvctl, const char *text) {
        const char *body = behind(text, HEADING), *end = body + strlen(body);
        const struct screen *screen = &kvctl->screen;
        unsigned room = MAX(screen->height, HEADING + 3) - HEADING - 1, n;

        text_put_cut(stdout, text, (size_t)(body - text), screen->width);
        if (kvctl->top) {
                while (kvctl->top->scroll && behind(body, kvctl->top->scroll) == end)
                        kvctl->top->scroll--;
                body = behind(body, kvctl->top->scroll);
        }
        n = count_lines(body);
        text_put_cut(stdout, body, (size_t)(behind(body, room) - body), screen->width);
        if (n > room)
                put_left_out(kvctl, n - room);
}

static int render(struct kvctl *kvctl, const struct watch *watch, const struct answer *answer,
                  char **ret) {
        struct screen screen = kvctl->screen;
        size_t size;
        int r = 0;

        screen.to = open_memstream(ret, &size);
        if (!screen.to)
                return -ENOMEM;
        put_heading(kvctl, watch, screen.to);
        if (answer)
                r = answer_print(answer, &screen);
        else
                fprintf(screen.to, "%s\nwaiting for it\n", kvctl->why.line);
        return fclose(screen.to) != 0 ? -ENOMEM : r;
}

/* answer NULL: the daemon is away. */
static int show_picture(struct kvctl *kvctl, struct watch *watch, const struct answer *answer) {
        _cleanup_(freep) char *text = NULL;

        if (watch->json)
                return print_json(kvctl, answer, kvctl->pictures ? ",\n" : "", "");
        if (render(kvctl, watch, answer, &text) < 0)
                return kvctl_out_of_memory(kvctl);
        if (watch->paint)
                screen_watch_clear(&kvctl->screen);
        else if (kvctl->pictures)
                fputc('\n', stdout);
        if (watch->paint)
                paint(kvctl, text);
        else
                fputs(text, stdout);
        return 0;
}

static int next_picture(struct kvctl *kvctl, struct watch *watch) {
        _cleanup_(answer_freep) struct answer *answer = answer_new();
        int r = answer ? kvctl->args.verb->run(kvctl, answer) : kvctl_out_of_memory(kvctl);

        if (r >= 0)
                r = show_picture(kvctl, watch, answer);
        else if (r != -EINTR && watch->paint && kvctl->pictures && kvctl->exit == KVCTL_NO_DAEMON)
                r = show_picture(kvctl, watch, NULL);
        if (r == 0)
                r = kvctl_flush(kvctl);
        kvctl->pictures += !(kvctl->top && kvctl->top->again);
        return r;
}

static int run_watch(struct kvctl *kvctl) {
        struct watch watch = watch_for(kvctl);
        int r;

        screen_watch_begin(&kvctl->screen, watch.paint, kvctl->args.verb->run == verb_top);
        fputs(watch.json ? "{\"samples\": [\n" : "", stdout);
        do {
                r = next_picture(kvctl, &watch);
        } while (r == 0 && kvctl->pictures != watch.count && top_wait(kvctl, watch.seconds));
        fputs(watch.json ? "\n]}\n" : "", stdout);
        screen_watch_end(&kvctl->screen);
        return r == -EINTR ? 0 : r;
}

/* ---- from command line to exit status -------------------------------------------------------- */

static int end_output(struct kvctl *kvctl) {
        int r = kvd_end_output(stdout);

        return r < 0 ? kvctl_fail(kvctl, KVCTL_NO, r, "cannot write: %s", strerror(-r)) : 0;
}

static int finish(struct kvctl *kvctl, int r) {
        kvctl_hang_up(kvctl);
        kvctl->top = top_free(kvctl->top);
        if (r >= 0)
                r = end_output(kvctl) ?: r;
        if (r < 0)
                complain(kvctl->why.line);
        return r < 0 ? (int)kvctl->exit : r;
}

static bool is_about_self(const struct args *args) {
        return !args->verb || args_has(args, FLAG_HELP) || args_has(args, FLAG_VERSION);
}

static int answer_about_self(struct kvctl *kvctl) {
        const struct args *args = &kvctl->args;
        bool asked = args_has(args, FLAG_HELP);

        if (args_has(args, FLAG_VERSION))
                printf("kvctl %s\n", kvd_version());
        else if (args->verb)
                help_verb(stdout, args->verb);
        else if (args->group)
                help_group(stdout, args->group);
        else
                help_all(asked ? stdout : stderr);
        return finish(kvctl,
                      args->verb || asked || args_has(args, FLAG_VERSION) ? KVCTL_OK : KVCTL_USAGE);
}

int main(int argc, char **argv) {
        struct kvctl kvctl = {0};
        int r = args_parse(&kvctl.args, argc, argv, &kvctl.why);

        if (r < 0) {
                complain(kvctl.why.line);
                return KVCTL_USAGE;
        }
        if (is_about_self(&kvctl.args))
                return answer_about_self(&kvctl);
        screen_measure(&kvctl.screen, stdout);
        r = repeats(&kvctl.args) ? run_watch(&kvctl) : run_once(&kvctl);
        return finish(&kvctl, r);
}
