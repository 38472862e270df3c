/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The services of a task: memory that lasts until its end, its result, and the rows of summaries
 * that it reads and writes. They do not depend on the kind of job.
 */

#include "daemon/process/worker/task.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

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

void task_leave(struct task *task) {
        sketch_drop(task->sketch);
        task->sketch = NULL;
        while (task->rooms) {
                struct room *room = task->rooms;

                task->rooms = room->next;
                free(room);
        }
}

void *task_results(struct task *task, size_t n, size_t size) {
        if (n > RESULT_BYTES / size) {
                task_refuse(task, -E2BIG, "%zu results do not fit into a reply", n);
                return NULL;
        }
        task->result_size = (uint32_t)(n * size);
        return memset(task->result, 0, n * size);
}

int task_needs_numbers(struct task *task) {
        if (task->shape.type)
                return 0;
        return task_refuse(task, -EOPNOTSUPP,
                           "numbers of 8 bits without a scale cannot be compared or summed; "
                           "such blocks can only be spilled and revived exactly");
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

void task_copy_summary(const struct task *task, const uint8_t *from, uint8_t *to,
                       uint32_t generation) {
        shm_write_begin((shm_u64 *)to, 0);
        memcpy(to + 8, from + 8, task->space->summary.row_bytes - 8);
        shm_write_end((shm_u64 *)to, (uint64_t)generation << 32 | KVD_SUMMARY_MADE);
}

double task_setting(const struct task *task, enum kvd_setting which) {
        return kvd_setting_get(task->space->ix->settings, which);
}
