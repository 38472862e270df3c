/* SPDX-License-Identifier: Apache-2.0 */

/*
 * doctor: what this machine can do, and what kvd will therefore do. Findings come first, and the
 * advice that follows from them comes last.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvctl/doctor.h"
#include "tools/kvctl/kvctl.h"

static const struct column finding_columns[] = {
        {"part", "PART", UNIT_NONE},
        {"tried", "TRIED", UNIT_NONE},
        {"state", "STATE", UNIT_NONE},
        {"found", "FOUND", UNIT_NONE},
};

static const struct column verdict_columns[] = {
        {"can_run", NULL, UNIT_NONE},
        {"backend", "backend", UNIT_NONE},
        {"handles", "GPU memory", UNIT_NONE},
        {"order", "seals and reads", UNIT_NONE},
        {"isolation", "isolation = arena", UNIT_NONE},
        {"kernels", "methods' kernels", UNIT_NONE},
        {"loop", "loop", UNIT_NONE},
};

enum needs { ALWAYS, A_DRIVER, A_DEVICE, A_CHUNK }; /* prerequisite of a probe */

struct row {
        const char *part, *tried;
        probe_fn *function;
        enum needs needs;
        unsigned seconds;
};

enum {
        DRIVER,
        DEVICE,
        VMM,
        READONLY,
        LEGACY,
        ORDER_DEVICE,
        ORDER_HOST,
        ORDER_STORE,
        KERNELS,
        CUBLAS,
        MPS,
        MEMFD,
        PIDFD,
        URING,
        HUGE,
        FDS,
        MEMLOCK,
        AROUND,
        N_ROWS
};

static const struct row rows[N_ROWS] = {
        [DRIVER] = {"GPU", "driver", probe_driver, ALWAYS, 20},
        [DEVICE] = {"GPU", "device", probe_device, A_DRIVER, 20},
        [VMM] = {"GPU", "chunks by descriptors", probe_vmm, A_DEVICE, 20},
        [READONLY] = {"GPU", "read-only mapping", probe_readonly, A_CHUNK, 20},
        [LEGACY] = {"GPU", "legacy handles", probe_legacy, A_DEVICE, 20},
        [ORDER_DEVICE] = {"GPU", "stream order, GPU memory", probe_order_device, A_DEVICE, 20},
        [ORDER_HOST] = {"GPU", "stream order, host memory", probe_order_host, A_DEVICE, 20},
        [ORDER_STORE] = {"GPU", "streams see plain stores", probe_order_store, A_DEVICE, 20},
        [KERNELS] = {"GPU", "our kernels", probe_kernels, A_DEVICE, 60},
        [CUBLAS] = {"GPU", "cuBLAS", probe_cublas, A_DEVICE, 60},
        [MPS] = {"GPU", "MPS", probe_mps, A_DEVICE, 5},
        [MEMFD] = {"system", "shared memory", probe_memfd, ALWAYS, 5},
        [PIDFD] = {"system", "pidfds", probe_pidfd, ALWAYS, 5},
        [URING] = {"system", "io_uring", probe_uring, ALWAYS, 5},
        [HUGE] = {"system", "huge pages", probe_huge, ALWAYS, 5},
        [FDS] = {"system", "open files", probe_limits, ALWAYS, 5},
        [MEMLOCK] = {"system", "locked memory", probe_memlock, ALWAYS, 5},
        [AROUND] = {"system", "surroundings", probe_around, ALWAYS, 5},
};

static bool has(const struct finding *findings, unsigned row) {
        return findings[row].text[0] && findings[row].health == HEALTH_OK;
}

static bool can_be_tried(const struct finding *findings, unsigned row) {
        switch (rows[row].needs) {
        case A_DRIVER: return has(findings, DRIVER);
        case A_DEVICE: return has(findings, DEVICE);
        case A_CHUNK: return has(findings, VMM);
        default: return true;
        }
}

static void examine(struct finding *findings, uint32_t device) {
        for (unsigned i = 0; i < N_ROWS; i++)
                if (can_be_tried(findings, i))
                        probe(rows[i].function, device, rows[i].seconds, &findings[i]);
}

/* ---- findings -------------------------------------------------------------------------------- */

static const struct {
        const char *word, *colour;
} healths[] = {
        [HEALTH_OK] = {"ok", "32"},
        [HEALTH_MISSING] = {"missing", "31"},
        [HEALTH_NOTE] = {"note", "33"},
};

static const char *const needs[] = {
        [ALWAYS] = "",
        [A_DRIVER] = "needs a driver",
        [A_DEVICE] = "needs a device",
        [A_CHUNK] = "needs chunks by descriptors",
};

static void fill_finding(struct table *t, const struct row *row, const struct finding *f) {
        bool tried = *f->text;

        table_string(t, row->part);
        table_string(t, row->tried);
        table_string(t, tried ? healths[f->health].word : "not tried");
        if (tried)
                table_colour(t, healths[f->health].colour);
        table_string(t, tried ? f->text : needs[row->needs]);
}

/* ---- verdict --------------------------------------------------------------------------------- */

static void say_memory(struct table *t, const struct finding *f) {
        bool vmm = has(f, VMM), legacy = has(f, LEGACY);

        table_string(t, vmm || legacy ? "CUDA" : "host memory");
        table_string(t, vmm    ? "chunks, shared by descriptors" :
                        legacy ? "legacy handles, made by an exporter process" :
                                 "none");
}

static void say_order(struct table *t, const struct finding *f) {
        if (!has(f, VMM) && !has(f, LEGACY))
                table_string(t, "by the processor: a seal says that the data is there");
        else if (!has(f, ORDER_HOST))
                table_string(
                        t,
                        "calls wait for their streams: no stream memory operations on host memory");
        else if (!has(f, ORDER_STORE))
                table_string(
                        t,
                        "by streams; a stream's write wakes the readers of a producer that died");
        else
                table_string(t, "by streams: no processor waits");
}

static void say_isolation(struct table *t, const struct finding *f) {
        if (!has(f, VMM) && !has(f, LEGACY))
                table_string(t, "others' segments are mapped read-only");
        else if (has(f, READONLY))
                table_string(
                        t,
                        "others' chunks are mapped read-only: a stray store kills its own process");
        else
                table_string(t, "not on this GPU: nothing can be mapped read-only");
}

static void fill_verdict(struct table *t, const struct finding *f) {
        bool gpu = has(f, VMM) || has(f, LEGACY);

        table_flag(t, has(f, MEMFD) && has(f, PIDFD));
        say_memory(t, f);
        say_order(t, f);
        say_isolation(t, f);
        table_string(t, gpu && has(f, KERNELS) ? "on the GPU" :
                        gpu                    ? "none: GPU memory is only shared" :
                                                 "on processors");
        table_string(t, has(f, URING) ? "io_uring" : "epoll");
}

/* ---- the verb -------------------------------------------------------------------------------- */

static int read_device(struct kvctl *kvctl, uint32_t *ret) {
        const char *text = kvctl->args.n_operands ? kvctl->args.operand[0] : "0";
        char *end;
        unsigned long n = strtoul(text, &end, 10);

        if (*end || end == text || n > 1023)
                return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL,
                                  "\"%s\" is not the number of a device", text);
        *ret = (uint32_t)n;
        return 0;
}

int verb_doctor(struct kvctl *kvctl, struct answer *answer) {
        struct table *t = ANSWER_ROWS(answer, "findings", finding_columns);
        struct table *verdict = ANSWER_RECORD(answer, "kvd", verdict_columns);
        struct finding findings[N_ROWS] = {0};
        uint32_t device = 0;
        int r = read_device(kvctl, &device);

        if (r < 0)
                return r;
        if (!t || !verdict)
                return kvctl_out_of_memory(kvctl);
        examine(findings, device);
        for (unsigned i = 0; i < N_ROWS; i++)
                fill_finding(t, &rows[i], &findings[i]);
        fill_verdict(verdict, findings);
        if (add_degraded(kvctl, answer) < 0)
                answer_say(answer, "No daemon was asked: %s.", kvctl->why.line);
        if (has(findings, MEMFD) && has(findings, PIDFD))
                return 0;
        answer_say(answer, "kvd cannot run here: see what is missing under \"system\".");
        return 1;
}
