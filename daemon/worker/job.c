/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/worker/job.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/sys.h"

static const struct {
        run_kind *run;
        const char *name;
        enum run_access access; /* to the blocks that its items name */
        run_kind *on_device;    /* by the GPU itself; NULL: by the processor, in any case */
} kinds[] = {
        [KVD_JOB_SUMMARISE] = {.run = run_summarise, .name = "summarise", .access = RUN_READ,
                               .on_device = run_summarise_on_device},
        [KVD_JOB_SCORE] = {.run = run_score, .name = "score", .access = RUN_READ, .on_device = run_score_on_device},
        [KVD_JOB_COMPACT] = {.run = run_compact, .name = "compact", .access = RUN_PACK},
        [KVD_JOB_CALIBRATE] = {.run = run_calibrate, .name = "calibrate", .access = RUN_READ},
        [KVD_JOB_COMPARE] = {.run = run_compare, .name = "compare", .access = RUN_NONE},
        [KVD_JOB_SPILL] = {.run = run_spill, .name = "spill", .access = RUN_READ},
        [KVD_JOB_REVIVE] = {.run = run_revive, .name = "revive", .access = RUN_WRITE},
        [KVD_JOB_FORGET] = {.run = run_forget, .name = "forget", .access = RUN_NONE},
        [KVD_JOB_REBUILD] = {.run = run_rebuild, .name = "rebuild", .access = RUN_NONE},
        [KVD_JOB_CONFIG] = {.run = run_config, .name = "config", .access = RUN_READ},
        [KVD_JOB_PROFILE] = {.run = run_profile, .name = "profile", .access = RUN_READ},
};

/* ---- for the families ------------------------------------------------------------------------------------------ */

int run_refuse(struct run *run, int error, const char *format, ...) {
        va_list args;

        va_start(args, format);
        vsnprintf(run->why, run->why_size, format, args);
        va_end(args);
        return error;
}

struct room {
        struct room *next;
        _Alignas(64) uint8_t bytes[];
};

void *run_room(struct run *run, size_t n, size_t size) {
        struct room *room;
        size_t bytes;

        if (__builtin_mul_overflow(n, size, &bytes) || bytes > SIZE_MAX / 2)
                return NULL;
        room = aligned_alloc(64, sizeof *room + ALIGN_UP(bytes, 64));
        if (!room)
                return NULL;
        room->next = run->rooms;
        run->rooms = room;
        return memset(room->bytes, 0, bytes);
}

static void leave_rooms(struct run *run) {
        while (run->rooms) {
                struct room *room = run->rooms;

                run->rooms = room->next;
                free(room);
        }
}

void *run_results(struct run *run, size_t n, size_t size) {
        if (n > RESULT_BYTES / size) {
                run_refuse(run, -E2BIG, "%zu results do not fit into an answer", n);
                return NULL;
        }
        run->result_size = (uint32_t)(n * size);
        return memset(run->result, 0, n * size);
}

int run_needs_numbers(struct run *run) {
        if (run->shape.type)
                return 0;
        return run_refuse(run, -EOPNOTSUPP, "numbers of 8 bits without a scale cannot be compared or summed; spilling "
                          "and reviving exactly is all that can be done with them");
}

uint8_t *run_spilled(const struct run *run, uint32_t slot) {
        const struct worker_space *w = run->space;

        return slot < kvd_places(w->ix) ? w->spill + slot * w->ix->block_bytes : NULL;
}

uint8_t *run_row(const struct run *run, uint32_t row) {
        const struct worker_space *w = run->space;

        if (row >= (uint64_t)w->ix->capacity + kvd_places(w->ix))
                return NULL;
        return kvd_summary_row(&w->summary, w->summaries, row);
}

const uint8_t *run_summary(const struct run *run, uint32_t row, uint32_t generation) {
        const uint8_t *at = run_row(run, row);

        if (!at || shm_load((const shm_u64 *)at) != ((uint64_t)generation << 32 | KVD_SUMMARY_MADE))
                return NULL;
        return at;
}

void run_copy_summary(const struct run *run, const uint8_t *from, uint8_t *to, uint32_t generation) {
        shm_write_begin((shm_u64 *)to, 0);
        memcpy(to + 8, from + 8, run->space->summary.row_bytes - 8);
        shm_write_end((shm_u64 *)to, (uint64_t)generation << 32 | KVD_SUMMARY_MADE);
}

double run_setting(const struct run *run, enum kvd_setting which) {
        return kvd_setting_get(run->space->ix->settings, which);
}

/* ---- a job ------------------------------------------------------------------------------------------------------ */

static struct shape shape_of(const struct kvd_index *ix) {
        static const enum kvd_number types[] = {
                [KVD_F32] = KVD_NUMBER_F32, [KVD_F16] = KVD_NUMBER_F16, [KVD_BF16] = KVD_NUMBER_BF16, [KVD_I8] = 0};
        const struct kvd_geometry *g = &ix->geometry;
        bool hnd = g->order == KVD_HND;

        return (struct shape){
                .layers = g->layers / g->layer_groups,
                .heads = g->kv_heads,
                .tokens = g->block_tokens,
                .dim = g->head_dim,
                .element = kvd_dtype_bytes(g->dtype),
                .type = types[g->dtype],
                .head_stride = hnd ? (size_t)g->block_tokens * g->head_dim : g->head_dim,
                .token_stride = hnd ? g->head_dim : (size_t)g->kv_heads * g->head_dim,
                .plane = (size_t)g->kv_heads * g->block_tokens * g->head_dim * kvd_dtype_bytes(g->dtype),
                .block_bytes = ix->block_bytes,
        };
}

static int find_arguments(struct run *run, const struct spaces *spaces, uint64_t bytes) {
        const struct kvd_job *job = spaces->arguments;
        uint64_t need;

        if (!job || bytes < sizeof *job || bytes > KVD_JOB_BYTES)
                return run_refuse(run, -EPROTO, "a job of %llu bytes", (unsigned long long)bytes);
        need = sizeof *job + job->n_items * sizeof *run->items + job->n_steps * sizeof *run->steps +
               job->n_tokens * sizeof *run->tokens;
        if (need > bytes || job->kind >= ARRAY_SIZE(kinds) || !kinds[job->kind].run)
                return run_refuse(run, -EPROTO, "a job of kind %u that needs %llu bytes, not %llu", job->kind,
                                  (unsigned long long)need, (unsigned long long)bytes);
        run->job = job;
        run->items = (const void *)(job + 1);
        run->steps = (const void *)(run->items + job->n_items);
        run->tokens = (const void *)(run->steps + job->n_steps);
        return 0;
}

static int find_memory(struct run *run, struct spaces *spaces) {
        const struct kvd_job *job = run->job;

        run->space = spaces_find(spaces, job->space);
        if (!run->space)
                return run_refuse(run, -EPROTO, "a job of a space that was not sent");
        run->device = &spaces->device;
        run->shape = shape_of(run->space->ix);
        run->sketch = NULL;
        if (!job->sketch)
                return 0;
        if (spaces->sketch.number != job->sketch || spaces->sketch.space != job->space)
                return run_refuse(run, -EPROTO, "a job of a sketch that was not sent");
        run->sketch = &spaces->sketch;
        return 0;
}

/* On the GPU if that can be, or by the processor. */
static int run_somewhere(struct run *run, run_kind *on_device) {
        enum run_access access = kinds[run->job->kind].access;
        int r = on_device && run_on_device(run) ? on_device(run) : -ENOSYS;

        if (r != -ENOSYS)
                return r;
        r = run_stage(run, access);
        if (r == 0)
                r = kinds[run->job->kind].run(run);
        return r == 0 ? run_unstage(run, access) : r;
}

int run_job(struct run *run, struct spaces *spaces, uint64_t bytes) {
        int r;

        run->result_size = 0;
        r = find_arguments(run, spaces, bytes);
        if (r == 0)
                r = find_memory(run, spaces);
        if (r == 0) {
                run->why[0] = 0;
                r = run_somewhere(run, kinds[run->job->kind].on_device);
                if (r < 0 && !run->why[0])
                        run_refuse(run, r, "%s: %s", kinds[run->job->kind].name, strerror(-r));
        }
        leave_rooms(run);
        run->staged = NULL;
        return r;
}
