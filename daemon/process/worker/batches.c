/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Double buffering: the copy engine works in one half of the pinned memory while the processor
 * works in the other. Adjacent blocks on the GPU are one copy.
 */

#include <errno.h>
#include <string.h>

#include "daemon/process/worker/task.h"

#define HALF_BYTES (UINT64_C(16) << 20)

struct batches {
        struct task *task;
        enum task_access access; /* TASK_READ, or TASK_WRITE, for which batches are zeroed first */
        uint32_t first, n;       /* items of the current batch; n: 0 if there are no more */
        uint32_t each, half;     /* blocks that a half holds; half of the current batch */
        uint8_t *staging;
};

static uint8_t *half_of(const struct batches *b, uint32_t half) {
        return b->staging + half * b->each * b->task->shape.block_bytes;
}

static uint32_t count(const struct batches *b, uint32_t first) {
        return MIN(b->each, b->task->job->n_items - MIN(first, b->task->job->n_items));
}

/* Number of adjacent blocks from item i on. */
static uint32_t run_of(const struct task *task, uint32_t i, uint32_t end) {
        cu_address at = task_address(task, i);
        uint32_t n = 1;

        while (i + n < end && task_address(task, i + n) == at + n * task->shape.block_bytes)
                n++;
        return n;
}

static int refused(const struct batches *b) {
        return task_refuse(b->task, -EIO, "%s", b->task->device->why.line);
}

/* Begins to copy the batch from item first on: item first + i is at place i of the half. */
static int copy(const struct batches *b, uint32_t first, uint32_t half) {
        struct task *task = b->task;
        uint64_t bytes = task->shape.block_bytes;
        uint32_t end = first + count(b, first);
        int r = 0;

        for (uint32_t i = first, n; r == 0 && i < end; i += n) {
                uint8_t *at = half_of(b, half) + (i - first) * bytes;
                cu_address block = task_address(task, i);

                n = block ? run_of(task, i, end) : 1;
                if (block)
                        r = b->access == TASK_READ ?
                                    device_read(task->device, at, block, n * bytes) :
                                    device_write(task->device, block, at, n * bytes);
        }
        if (r == 0)
                r = device_mark(task->device, half);
        return r < 0 ? refused(b) : 0;
}

/* Makes the batch that starts at item first the current one, and waits until its half is ready. */
static int take(struct batches *b, uint32_t first, uint32_t half) {
        struct task *task = b->task;
        uint64_t bytes = task->shape.block_bytes;

        for (uint32_t i = 0; i < b->n; i++)
                task->staged[b->first + i] = NULL;
        b->first = first;
        b->n = count(b, first);
        b->half = half;
        for (uint32_t i = 0; i < b->n; i++)
                task->staged[first + i] = task_address(task, first + i) ?
                                                  half_of(b, half) + i * bytes :
                                                  NULL;
        if (device_reached(task->device, half) < 0)
                return refused(b);
        if (b->access == TASK_WRITE && b->n) /* another domain's bytes may be there */
                memset(half_of(b, half), 0, b->n * bytes);
        return 0;
}

static int begin(struct batches *b) {
        struct task *task = b->task;
        uint64_t bytes = task->shape.block_bytes;
        int r = 0;

        b->each = (uint32_t)MIN(MAX(HALF_BYTES / bytes, 1), task->job->n_items);
        task->staged = task_room(task, task->job->n_items, sizeof *task->staged);
        b->staging = device_staging(task->device, 2 * b->each * bytes);
        if (!task->staged || !b->staging)
                return task_refuse(task, -ENOMEM, "%s", task->device->why.line);
        for (uint32_t half = 0; r == 0 && b->access == TASK_READ && half < 2; half++)
                r = copy(b, half * b->each, half);
        return r < 0 ? r : take(b, 0, 0);
}

/*
 * The half of the current batch is free for reading the batch after the next one (TASK_READ), or is
 * written to the GPU (TASK_WRITE).
 */
static int next(struct batches *b) {
        int r = copy(b, b->access == TASK_READ ? b->first + 2 * b->each : b->first, b->half);

        return r < 0 ? r : take(b, b->first + b->n, 1 - b->half);
}

int task_batches(struct task *task, enum task_access access, batch_fn *some, void *data) {
        struct batches b = {.task = task, .access = access};
        int r;

        if (!task->job->n_items || !task_on_device(task))
                return some(data, 0, task->job->n_items);
        r = begin(&b);
        while (r == 0 && b.n) {
                r = some(data, b.first, b.n);
                if (r == 0)
                        r = next(&b);
        }
        return device_finish(task->device) < 0 ? refused(&b) : r;
}
