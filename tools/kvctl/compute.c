/* SPDX-License-Identifier: Apache-2.0 */
/* compute: one operation of the kernels, on arrays in .npy files, without a daemon */
#include "tools/kvctl/compute.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "tools/kvctl/compute_frame.h"
#include "tools/kvctl/kvctl.h"
#include "tools/kvctl/text.h"
#include "tools/kvctl/verbs.h"

/* Sorted by method. */
static const struct compute_row *const methods[] = {
        compute_attend,
        compute_bicache,
        compute_block,
        compute_hshare,
        compute_keydiff,
        compute_memshare,
        compute_sketch,
};

/* ---- what there is ---------------------------------------------------------------------------------------------- */

static const struct column listing_columns[] = {
        {"operation", "OPERATION", UNIT_NONE},
        {"text", "WHAT IT DOES", UNIT_NONE},
};

static int list(struct kvctl *kvctl, struct answer *answer) {
        struct table *t = ANSWER_ROWS(answer, "operations", listing_columns);

        if (!t)
                return kvctl_out_of_memory(kvctl);
        for (size_t i = 0; i < ARRAY_SIZE(methods); i++)
                for (const struct compute_row *row = methods[i]; row->name; row++) {
                        table_string(t, row->name);
                        table_string(t, row->text);
                }
        return 0;
}

/* What was probably meant is in *nearest if there is no such operation. */
static const struct compute_row *find(const char *name, const char **nearest) {
        unsigned least = (unsigned)strlen(name) / 3 + 2;

        *nearest = NULL;
        for (size_t i = 0; i < ARRAY_SIZE(methods); i++)
                for (const struct compute_row *row = methods[i]; row->name; row++) {
                        unsigned distance = text_distance(name, row->name);

                        if (distance == 0)
                                return row;
                        if (distance < least) {
                                *nearest = row->name;
                                least = distance;
                        }
                }
        return NULL;
}

static void put_types(unsigned types) {
        const char *gap = "";

        if ((types & ~COMPUTE_OPTIONAL) == COMPUTE_NUMBER) {
                printf("float32, float16 or bf16");
        } else if ((types & ~COMPUTE_OPTIONAL) == COMPUTE_ANY) {
                printf("any type");
        } else {
                for (int i = 0; i < NPY_TYPES; i++)
                        if (types & COMPUTE_IS(i)) {
                                printf("%s%s", gap, npy_type_name((enum npy_type)i));
                                gap = " or ";
                        }
        }
}

static void put_text(const char *text) {
        char line[1024];

        snprintf(line, sizeof line, "          %s", text);
        text_put_wrapped(stdout, line, 79, 10);
        putchar('\n');
}

static void put_param(const struct compute_row *row, unsigned i) {
        const char *choices = row->param[i].choices;

        printf("  %s=%s", row->param[i].name, !choices ? "NUMBER" : strcmp(choices, "whole") == 0 ? "N" : choices);
        if (row->param[i].value)
                printf(" (default: %s)", row->param[i].value);
        putchar('\n');
        put_text(row->param[i].text);
}

bool compute_help(const char *operation) {
        const char *nearest;
        const struct compute_row *row = find(operation, &nearest);

        if (!row)
                return false;
        printf("usage: kvctl compute %s", row->name);
        for (unsigned i = 0; i < compute_count_inputs(row, false); i++)
                printf(row->in[i].types & COMPUTE_OPTIONAL ? " [%s.npy]" : " %s.npy", row->in[i].name);
        for (unsigned i = 0; i < compute_count_outputs(row); i++)
                printf("%s%s.npy", i ? "," : " -o ", row->out[i].name);
        printf("\n\n%s: %s.\n\ninputs:\n", row->name, row->text);
        for (unsigned i = 0; i < compute_count_inputs(row, false); i++) {
                printf("  %s (%s), ", row->in[i].name, row->in[i].shape);
                put_types(row->in[i].types);
                puts(row->in[i].types & COMPUTE_OPTIONAL ? ", optional" : "");
                put_text(row->in[i].text);
        }
        puts(row->param[0].name ? "parameters:" : "parameters: none");
        for (unsigned i = 0; i < COMPUTE_PARAMS && row->param[i].name; i++)
                put_param(row, i);
        puts("outputs:");
        for (unsigned i = 0; i < compute_count_outputs(row); i++) {
                unsigned type = row->out[i].type;

                printf("  %s (%s), %s\n", row->out[i].name, row->out[i].shape,
                       type == COMPUTE_LIKE_NUMBER  ? "of the type of the numbers that go in"
                       : type == COMPUTE_LIKE_FIRST ? "of the type of the first input"
                                                    : npy_type_name((enum npy_type)type));
                put_text(row->out[i].text);
        }
        return true;
}

/* ---- files ------------------------------------------------------------------------------------------------------ */

static int take_type(struct kvctl *kvctl, bool *bf16) {
        const char *type = args_has(&kvctl->args, FLAG_TYPE) ? kvctl->args.text[FLAG_TYPE] : "";

        *bf16 = strcmp(type, "bf16") == 0;
        if (*type && !*bf16)
                return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL, "--type can only be bf16: other types are in the files");
        return 0;
}

static int load(struct kvctl *kvctl, struct compute *c) {
        unsigned n = kvctl->args.n_operands - 1;
        bool bf16;
        int r = take_type(kvctl, &bf16);

        if (r == 0 && (n < compute_count_inputs(c->row, true) || n > compute_count_inputs(c->row, false)))
                r = kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL, "%s takes %u to %u arrays, not %u; see \"kvctl compute %s "
                               "--help\"", c->row->name, compute_count_inputs(c->row, true),
                               compute_count_inputs(c->row, false), n, c->row->name);
        for (unsigned i = 0; i < n && r == 0; i++) {
                bool number = (c->row->in[i].types & ~COMPUTE_OPTIONAL) == COMPUTE_NUMBER;

                if (c->row->in[i].types & COMPUTE_OPTIONAL && strcmp(kvctl->args.operand[i + 1], "-") == 0)
                        continue;
                r = npy_load(kvctl->args.operand[i + 1], &c->in[i], c->private->why, sizeof c->private->why);
                if (r < 0)
                        return kvctl_fail(kvctl, KVCTL_NO, r, "%s", c->private->why);
                if (bf16 && number && c->in[i].type == NPY_U16)
                        c->in[i].type = NPY_BF16;
        }
        return r;
}

static const struct column file_columns[] = {
        {"output", "OUTPUT", UNIT_NONE},
        {"type", "TYPE", UNIT_NONE},
        {"shape", "SHAPE", UNIT_NONE},
        {"file", "FILE", UNIT_NONE},
};

/* The i-th name of "a.npy,b.npy"; NULL: there are fewer, or it is empty. */
static char *nth_file(const char *files, unsigned i) {
        for (; files && i; i--) {
                files = strchr(files, ',');
                files += files ? 1 : 0;
        }
        return files && *files && *files != ',' ? strndup(files, strcspn(files, ",")) : NULL;
}

static int save(struct kvctl *kvctl, struct compute *c, struct answer *answer) {
        struct table *t = ANSWER_ROWS(answer, "outputs", file_columns);
        const char *files = args_has(&kvctl->args, FLAG_OUTPUT) ? kvctl->args.text[FLAG_OUTPUT] : NULL;
        char shape[NPY_SHAPE_TEXT];

        if (!t)
                return kvctl_out_of_memory(kvctl);
        for (unsigned i = 0; i < compute_count_outputs(c->row); i++) {
                _cleanup_(freep) char *file = nth_file(files, i);
                int r = file && c->out[i].data ? npy_save(file, &c->out[i], c->private->why, sizeof c->private->why)
                                               : 0;

                if (r < 0)
                        return kvctl_fail(kvctl, KVCTL_NO, r, "%s", c->private->why);
                table_string(t, c->row->out[i].name);
                table_string(t, c->out[i].data ? npy_type_name(c->out[i].type) : NULL);
                table_string(t, c->out[i].data ? npy_shape_text(&c->out[i], shape) : NULL);
                table_string(t, file);
        }
        return 0;
}

/* ---- one operation ---------------------------------------------------------------------------------------------- */

static int prepare(struct kvctl *kvctl, struct compute *c) {
        const char *name = kvctl->args.operand[0], *nearest;
        const char *variant = args_has(&kvctl->args, FLAG_VARIANT) ? kvctl->args.text[FLAG_VARIANT] : NULL;

        c->row = find(name, &nearest);
        if (!c->row && nearest)
                return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL, "no operation \"%s\"; did you mean \"%s\"?", name,
                                  nearest);
        if (!c->row)
                return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL, "no operation \"%s\"; \"kvctl compute\" lists them",
                                  name);
        c->ops = kvd_ops_pick(variant);
        if (!c->ops)
                return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL, "no variant \"%s\" on this processor; there are scalar, "
                                  "avx2, avx512", variant);
        return load(kvctl, c);
}

static double run_timed(struct compute *c, int *ret) {
        struct timespec before, after;

        clock_gettime(CLOCK_MONOTONIC, &before);
        *ret = c->row->run(c);
        clock_gettime(CLOCK_MONOTONIC, &after);
        return (double)(after.tv_sec - before.tv_sec) * 1e3 + (double)(after.tv_nsec - before.tv_nsec) * 1e-6;
}

static int compute(struct kvctl *kvctl, struct compute *c, struct answer *answer) {
        const char *given = args_has(&kvctl->args, FLAG_PARAM) ? kvctl->args.text[FLAG_PARAM] : NULL;
        int r = prepare(kvctl, c);
        double took = 0;

        if (r < 0)
                return r;
        r = compute_bind_inputs(c);
        if (r == 0)
                r = compute_bind_params(c, given);
        if (r == 0)
                r = compute_bind_outputs(c);
        if (r == 0)
                took = run_timed(c, &r);
        if (r < 0)
                return kvctl_fail(kvctl, KVCTL_USAGE, r, "%s", c->private->why);
        r = save(kvctl, c, answer);
        if (r == 0)
                answer_say(answer, "%s: %.3f ms (%s)", c->row->name, took, c->ops->name);
        return r;
}

int verb_compute(struct kvctl *kvctl, struct answer *answer) {
        struct compute_private private = {0};
        struct compute c = {.private = &private};
        int r;

        if (kvctl->args.n_operands == 0)
                return list(kvctl, answer);
        r = compute(kvctl, &c, answer);
        compute_clear(&c);
        return r;
}
