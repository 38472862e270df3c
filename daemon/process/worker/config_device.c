/* SPDX-License-Identifier: Apache-2.0 */

/*
 * CONFIG for blocks on a GPU. The GPU counts bits, and the processor gets one number for each row
 * of a pair. Launches are short (task_launch_bytes), so that other jobs get their turns in between.
 */

#include <errno.h>

#include "daemon/process/worker/config.h"

static uint64_t row_bytes(const struct config *c) {
        return 2 * sizeof(uint64_t) * c->words;
}

/* Compares rows first to end - 1 of the n pairs that are in d_pairs. */
static int launch(const struct config *c, uint32_t n, uint32_t first, uint32_t end, uint32_t *to) {
        const struct task *task = c->task;
        struct worker_device *device = task->device;
        const struct gpu_overlap a = {.blocks = {task->space->device_base, task->shape.block_bytes,
                                                 c->d_ids},
                                      .pairs = c->d_pairs,
                                      .to = c->d_both,
                                      .n = n,
                                      .first = first,
                                      .end = end,
                                      .words = c->words};
        int r = gpu_overlap(c->gpu, device->stream, &a);

        if (r == 0)
                r = device_read(device, to, c->d_both, (uint64_t)n * (end - first) * sizeof *to);
        if (device_finish(device) < 0)
                return task_refuse(c->task, -EIO, "%s", device->why.line);
        return r < 0 ? task_refuse(c->task, r, "%s", c->gpu->why) : 0;
}

/* Each launch compares several whole pairs, or some rows of one pair. */
static int compare(const struct config *c, const struct gpu_overlap_pair *pairs, uint32_t n,
                   uint32_t rows, uint32_t *to) {
        uint32_t most = (uint32_t)MIN(MAX(task_launch_bytes(c->task) / row_bytes(c), 1), c->room);
        uint32_t together = MIN(MAX(most / rows, 1), GPU_OVERLAP_PAIRS);
        int r = 0;

        for (uint32_t i = 0, k; r == 0 && i < n; i += k) {
                k = MIN(together, n - i);
                r = device_write(c->task->device, c->d_pairs, pairs + i, k * sizeof *pairs);
                for (uint32_t first = 0, end; r == 0 && first < rows; first = end) {
                        end = MIN(rows, first + most);
                        r = launch(c, k, first, end, to + (size_t)i * rows + first);
                        task_spend(c->task, row_bytes(c) * k * (end - first));
                }
        }
        return r;
}

static void lay_out(struct config *c, cu_address from) {
        uint64_t n = c->task->job->n_items;

        c->d_ids = device_part(&from, n * sizeof(uint32_t));
        c->d_pairs = device_part(&from, MAX(c->room / c->queries, c->layers) * sizeof *c->pairs);
        c->d_both = device_part(&from, c->room * sizeof *c->both);
}

int config_on_device(struct config *c) {
        struct worker_device *device = c->task->device;
        cu_address room;

        c->gpu = device_kernels(device);
        if (!c->gpu || c->task->shape.block_bytes % sizeof(uint64_t))
                return -ENOSYS;
        lay_out(c, 0);
        room = device_room(device, c->d_both + c->room * sizeof *c->both);
        if (!room)
                return -ENOSYS;
        lay_out(c, room);
        c->compare = compare;
        return task_send_ids(c->task, c->d_ids, "bits");
}
