/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/worker/job.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/sys.h"

static const struct {
        task_kind *task;
        const char *name;
        enum task_access access; /* to the blocks that its items name */
        task_kind *on_device;    /* by the GPU itself; NULL: by the processor, in any case */
} kinds[] = {
        [KVD_JOB_SUMMARISE] = {.task = task_summarise, .name = "summarise", .access = TASK_READ,
                               .on_device = task_summarise_on_device},
        [KVD_JOB_SCORE] = {.task = task_score, .name = "score", .access = TASK_READ, .on_device = task_score_on_device},
        [KVD_JOB_COMPACT] = {.task = task_compact, .name = "compact", .access = TASK_PACK},
        [KVD_JOB_CALIBRATE] = {.task = task_calibrate, .name = "calibrate", .access = TASK_READ},
        [KVD_JOB_COMPARE] = {.task = task_compare, .name = "compare", .access = TASK_NONE},
        [KVD_JOB_SPILL] = {.task = task_spill, .name = "spill", .access = TASK_READ},
        [KVD_JOB_REVIVE] = {.task = task_revive, .name = "revive", .access = TASK_WRITE},
        [KVD_JOB_FORGET] = {.task = task_forget, .name = "forget", .access = TASK_NONE},
        [KVD_JOB_REBUILD] = {.task = task_rebuild, .name = "rebuild", .access = TASK_NONE},
        [KVD_JOB_CONFIG] = {.task = task_config, .name = "config", .access = TASK_READ},
        [KVD_JOB_PROFILE] = {.task = task_profile, .name = "profile", .access = TASK_READ},
};

/* ---- for the families ------------------------------------------------------------------------------------------ */

int task_refuse(struct task *task, int error, const char *format, ...) {
        va_list args;

        va_start(args, format);
        vsnprintf(task->why, task->why_size, format, args);
        va_end(args);
        return error;
}

struct room {
        struct room *next;
        _Alignas(64) uint8_t bytes[];
};

void *task_room(struct task *task, size_t n, size_t size) {
        struct room *room;
        size_t bytes;

        if (__builtin_mul_overflow(n, size, &bytes) || bytes > SIZE_MAX / 2)
                return NULL;
        room = aligned_alloc(64, sizeof *room + ALIGN_UP(bytes, 64));
        if (!room)
                return NULL;
        room->next = task->rooms;
        task->rooms = room;
        return memset(room->bytes, 0, bytes);
}

static void leave_rooms(struct task *task) {
        while (task->rooms) {
                struct room *room = task->rooms;

                task->rooms = room->next;
                free(room);
        }
}

void *task_results(struct task *task, size_t n, size_t size) {
        if (n > RESULT_BYTES / size) {
                task_refuse(task, -E2BIG, "%zu results do not fit into an answer", n);
                return NULL;
        }
        task->result_size = (uint32_t)(n * size);
        return memset(task->result, 0, n * size);
}

int task_needs_numbers(struct task *task) {
        if (task->shape.type)
                return 0;
        return task_refuse(task, -EOPNOTSUPP, "numbers of 8 bits without a scale cannot be compared or summed; spilling "
                          "and reviving exactly is all that can be done with them");
}

uint8_t *task_row(const struct task *task, uint32_t row) {
        const struct worker_space *w = task->space;

        if (row >= (uint64_t)w->ix->capacity + kvd_places(w->ix))
                return NULL;
        return kvd_summary_row(&w->summary, w->summaries, row);
}

const uint8_t *task_summary(const struct task *task, uint32_t row, uint32_t generation) {
        const uint8_t *at = task_row(task, row);

        if (!at || shm_load((const shm_u64 *)at) != ((uint64_t)generation << 32 | KVD_SUMMARY_MADE))
                return NULL;
        return at;
}

void task_copy_summary(const struct task *task, const uint8_t *from, uint8_t *to, uint32_t generation) {
        shm_write_begin((shm_u64 *)to, 0);
        memcpy(to + 8, from + 8, task->space->summary.row_bytes - 8);
        shm_write_end((shm_u64 *)to, (uint64_t)generation << 32 | KVD_SUMMARY_MADE);
}

double task_setting(const struct task *task, enum kvd_setting which) {
        return kvd_setting_get(task->space->ix->settings, which);
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

static int find_arguments(struct task *task, const struct spaces *spaces, uint64_t bytes) {
        const struct kvd_job *job = spaces->arguments;
        uint64_t need;

        if (!job || bytes < sizeof *job || bytes > KVD_JOB_BYTES)
                return task_refuse(task, -EPROTO, "a job of %llu bytes", (unsigned long long)bytes);
        need = sizeof *job + job->n_items * sizeof *task->items + job->n_steps * sizeof *task->steps +
               job->n_tokens * sizeof *task->tokens;
        if (need > bytes || job->kind >= ARRAY_SIZE(kinds) || !kinds[job->kind].task)
                return task_refuse(task, -EPROTO, "a job of kind %u that needs %llu bytes, not %llu", job->kind,
                                  (unsigned long long)need, (unsigned long long)bytes);
        task->job = job;
        task->items = (const void *)(job + 1);
        task->steps = (const void *)(task->items + job->n_items);
        task->tokens = (const void *)(task->steps + job->n_steps);
        return 0;
}

static int find_memory(struct task *task, struct spaces *spaces) {
        const struct kvd_job *job = task->job;

        task->space = spaces_find(spaces, job->space);
        if (!task->space)
                return task_refuse(task, -EPROTO, "a job of a space that was not sent");
        task->device = &spaces->device;
        task->shape = shape_of(task->space->ix);
        task->sketch = NULL;
        if (!job->sketch)
                return 0;
        if (spaces->sketch.number != job->sketch || spaces->sketch.space != job->space)
                return task_refuse(task, -EPROTO, "a job of a sketch that was not sent");
        task->sketch = &spaces->sketch;
        return 0;
}

/* On the GPU if that can be, or by the processor. */
static int run_somewhere(struct task *task, task_kind *on_device) {
        enum task_access access = kinds[task->job->kind].access;
        int r = on_device && task_on_device(task) ? on_device(task) : -ENOSYS;

        if (r != -ENOSYS)
                return r;
        r = task_stage(task, access);
        if (r == 0)
                r = kinds[task->job->kind].task(task);
        return r == 0 ? task_unstage(task, access) : r;
}

int task_job(struct task *task, struct spaces *spaces, uint64_t bytes) {
        int r;

        task->result_size = 0;
        r = find_arguments(task, spaces, bytes);
        if (r == 0)
                r = find_memory(task, spaces);
        if (r == 0) {
                task->why[0] = 0;
                r = run_somewhere(task, kinds[task->job->kind].on_device);
                if (r < 0 && !task->why[0])
                        task_refuse(task, r, "%s: %s", kinds[task->job->kind].name, strerror(-r));
        }
        leave_rooms(task);
        task->staged = NULL;
        return r;
}
