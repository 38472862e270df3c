/* SPDX-License-Identifier: Apache-2.0 */

/*
 * profile show, build, run, export, import and forget: how deep BiCache reuses a shared prefix. The
 * daemon collects samples, and the table follows from them.
 */

#include "tools/kvctl/profile.h"

#include <errno.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/settings.h"
#include "ipc/base/sys.h"
#include "tools/kvctl/kvctl.h"
#include "tools/kvctl/verbs.h"

extern char **environ;

enum { SHOW = 1, FORGET, BUILD, IMPORT };

/* ---- requests -------------------------------------------------------------------------------- */

/* The reply contains similarities only for ratios that have samples. */
static int take_similarity(struct kvctl *kvctl, struct profile *p, const struct kvd_slice *from) {
        size_t row = p->layers * sizeof(float), at = 0;

        p->similarity = calloc(PROFILE_RATIOS, MAX(row, 1));
        if (!p->similarity)
                return kvctl_out_of_memory(kvctl);
        for (unsigned r = 0; r < PROFILE_RATIOS && at + row <= from->size; r++)
                if (p->samples[r]) {
                        memcpy(p->similarity + r * p->layers, (const uint8_t *)from->data + at,
                               row);
                        at += row;
                }
        return 0;
}

static int take(struct kvctl *kvctl, struct profile *p, const struct kvd_msg_profile_reply *reply) {
        p->layers = MIN(reply->layers, 1024);
        p->def = reply->def;
        if (reply->depth.size == sizeof p->depth)
                memcpy(p->depth, reply->depth.data, sizeof p->depth);
        if (reply->samples.size == sizeof p->samples)
                memcpy(p->samples, reply->samples.data, sizeof p->samples);
        return take_similarity(kvctl, p, &reply->similarity);
}

static int ask(struct kvctl *kvctl, struct kvd_msg_profile *request,
               struct kvd_msg_profile_reply *reply) {
        struct space_name space;
        int r = kvctl_space(kvctl, &space);

        if (r < 0)
                return r;
        request->space = kvd_slice_of(space.name);
        request->domain = kvd_slice_of(space.domain);
        return kvctl_call(kvctl, KVD_MSG_profile, request, reply);
}

static void find_tau(struct kvctl *kvctl, struct profile *p) {
        struct kvd_msg_space_info_reply info;
        uint32_t cursor = 0;

        while (kvctl_next_space(kvctl, &cursor, &info) == 1)
                if (kvd_slice_is(info.name, p->space) &&
                    info.settings.size > KVD_bicache_tau * sizeof p->tau)
                        memcpy(&p->tau,
                               (const uint8_t *)info.settings.data +
                                       KVD_bicache_tau * sizeof p->tau,
                               sizeof p->tau);
}

/* The operand's space; op is SHOW or BUILD. */
static int get(struct kvctl *kvctl, uint32_t op, struct profile *p) {
        struct kvd_msg_profile request = {.op = op};
        struct kvd_msg_profile_reply reply;
        struct space_name space;
        int r = kvctl_space(kvctl, &space);

        if (r < 0)
                return r;
        memcpy(p->space, space.name, sizeof p->space);
        p->tau = kvd_setting_info(KVD_bicache_tau)->serve;
        find_tau(kvctl, p);
        r = ask(kvctl, &request, &reply);
        return r < 0 ? r : take(kvctl, p, &reply);
}

static void profile_clear(struct profile *p) {
        free(p->similarity);
}

/* ---- show ------------------------------------------------------------------------------------ */

static const struct column ratio_columns[] = {
        {"space", NULL, UNIT_NONE},
        {"ratio_percent", NULL, UNIT_COUNT},
        {"samples", NULL, UNIT_COUNT},
        {"depth", NULL, UNIT_COUNT},
};

static int write_svg(struct kvctl *kvctl, const struct profile *p, struct answer *answer) {
        const char *path = kvctl->args.text[FLAG_SVG];
        FILE *f = fopen(path, "w");
        bool failed;

        if (!f)
                return kvctl_fail(kvctl, KVCTL_NO, -errno, "%s: %s", path, strerror(errno));
        profile_svg(p, f);
        failed = ferror(f) != 0;
        if (fclose(f) != 0 || failed)
                return kvctl_fail(kvctl, KVCTL_NO, -EIO, "%s cannot be written", path);
        answer_say(answer, "The picture is in %s.", path);
        return 0;
}

static int show(struct kvctl *kvctl, struct answer *answer, const struct profile *p) {
        struct table *t = ANSWER_ROWS(answer, "profile", ratio_columns);
        uint64_t n = 0;

        if (!t)
                return kvctl_out_of_memory(kvctl);
        for (unsigned r = 0; r < PROFILE_RATIOS; r++) {
                n += p->samples[r];
                table_string(t, p->space);
                table_number(t, r);
                table_number(t, p->samples[r]);
                table_number(t, p->depth[r]);
        }
        if (n || p->def)
                answer_picture(answer, profile_picture(p));
        answer_say(answer, "%s: %llu samples, %s", p->space, (unsigned long long)n,
                   p->def == 0 ? "no table yet; \"kvctl profile build\" makes one from samples" :
                   p->def == 1 ? "table of ratios that include the generated region" :
                                 "table of ratios of the prompt alone");
        return args_has(&kvctl->args, FLAG_SVG) ? write_svg(kvctl, p, answer) : 0;
}

static int get_and_show(struct kvctl *kvctl, struct answer *answer, uint32_t op) {
        _cleanup_(profile_clear) struct profile profile = {0};
        int r = get(kvctl, op, &profile);

        return r < 0 ? r : show(kvctl, answer, &profile);
}

int verb_profile_show(struct kvctl *kvctl, struct answer *answer) {
        return get_and_show(kvctl, answer, SHOW);
}

int verb_profile_build(struct kvctl *kvctl, struct answer *answer) {
        return get_and_show(kvctl, answer, BUILD);
}

int verb_profile_forget(struct kvctl *kvctl, struct answer *answer) {
        struct kvd_msg_profile request = {.op = FORGET};
        struct kvd_msg_profile_reply reply;
        int r = ask(kvctl, &request, &reply);

        if (r == 0)
                answer_say(answer,
                           "Samples and table are forgotten; prefixes are reused one layer deep.");
        return r;
}

/* ---- export, import -------------------------------------------------------------------------- */

int verb_profile_export(struct kvctl *kvctl, struct answer *answer) {
        _cleanup_(profile_clear) struct profile profile = {0};
        char *text = NULL;
        size_t size = 0;
        FILE *to;
        int r = get(kvctl, SHOW, &profile);

        if (r < 0)
                return r;
        if (!profile.def)
                return kvctl_fail(kvctl, KVCTL_NO, -ENODATA,
                                  "space \"%s\" has no table; \"kvctl profile build %s\" makes one from samples",
                                  profile.space, profile.space);
        to = open_memstream(&text, &size);
        if (!to)
                return kvctl_out_of_memory(kvctl);
        profile_write(&profile, to);
        if (fclose(to) != 0)
                return kvctl_out_of_memory(kvctl);
        text[strcspn(text, "\n")] = '\0';
        answer_say(answer, "%s", text);
        free(text);
        return 0;
}

static int read_table(struct kvctl *kvctl, const char *path, uint8_t depth[PROFILE_RATIOS],
                      uint32_t *def) {
        char text[8192];
        FILE *f = fopen(path, "r");
        size_t n;

        if (!f)
                return kvctl_fail(kvctl, KVCTL_USAGE, -errno, "%s: %s", path, strerror(errno));
        n = fread(text, 1, sizeof text - 1, f);
        fclose(f);
        text[n] = '\0';
        if (profile_read(text, depth, def) == 0)
                return 0;
        return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL,
                          "%s is not a table such as {\"def\": \"INCLUDE_GEN\", \"entries\": "
                          "[[0, 1], [60, 3]]} with ratios and depths that rise",
                          path);
}

int verb_profile_import(struct kvctl *kvctl, struct answer *answer) {
        uint8_t depth[PROFILE_RATIOS];
        struct kvd_msg_profile request = {.op = IMPORT, .depth = {depth, sizeof depth}};
        struct kvd_msg_profile_reply reply;
        int r = read_table(kvctl, kvctl->args.operand[1], depth, &request.def);

        if (r == 0)
                r = ask(kvctl, &request, &reply);
        return r < 0 ? r : get_and_show(kvctl, answer, SHOW);
}

/* ---- run ------------------------------------------------------------------------------------- */

static uint64_t count_samples(struct kvctl *kvctl) {
        _cleanup_(profile_clear) struct profile profile = {0};
        uint64_t n = 0;

        if (get(kvctl, SHOW, &profile) < 0)
                return 0;
        for (unsigned r = 0; r < PROFILE_RATIOS; r++)
                n += profile.samples[r];
        return n;
}

/* Shows the number of samples so far. Ctrl-C reaches the command, too, so we wait for its end. */
static int wait_for(struct kvctl *kvctl, pid_t pid, int *status) {
        const struct timespec pause = {0, 250000000};
        bool shows = isatty(STDERR_FILENO);
        pid_t r;

        while ((r = waitpid(pid, status, WNOHANG)) == 0) {
                if (shows)
                        fprintf(stderr, "\r%llu samples",
                                (unsigned long long)count_samples(kvctl));
                nanosleep(&pause, NULL);
        }
        if (shows)
                fprintf(stderr, "\r%*s\r", 40, "");
        return r == pid ? 0 :
                          kvctl_fail(kvctl, KVCTL_NO, -errno, "cannot wait for the command: %s",
                                     strerror(errno));
}

/* The command's stdout goes to our stderr, because our stdout is for the table. */
static int run_command(struct kvctl *kvctl) {
        const struct args *args = &kvctl->args;
        char *argv[ARGS_OPERANDS_MAX] = {NULL};
        posix_spawn_file_actions_t actions;
        pid_t pid;
        int status = 0, r;

        for (unsigned i = 1; i < args->n_operands; i++)
                argv[i - 1] = (char *)args->operand[i];
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
        r = posix_spawnp(&pid, argv[0], &actions, NULL, argv, environ);
        posix_spawn_file_actions_destroy(&actions);
        if (r != 0)
                return kvctl_fail(kvctl, KVCTL_USAGE, -r, "cannot run \"%s\": %s", argv[0],
                                  strerror(r));
        r = wait_for(kvctl, pid, &status);
        if (r == 0 && status != 0)
                r = kvctl_fail(kvctl, KVCTL_NO, -ECHILD,
                               "\"%s\" failed (status %d); the table is as before", argv[0],
                               WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
        return r;
}

int verb_profile_run(struct kvctl *kvctl, struct answer *answer) {
        int r = run_command(kvctl);

        return r < 0 ? r : get_and_show(kvctl, answer, BUILD);
}
