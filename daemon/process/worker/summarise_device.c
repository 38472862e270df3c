/* SPDX-License-Identifier: Apache-2.0 */

/*
 * SUMMARISE for blocks on a GPU, with the same bits as job_summarise.c. One launch computes all
 * rows. The processor gets only these, copies them into the summaries, and sets the stamps. Only
 * the first job of a space stages its blocks, to choose channels. -ENOSYS: the GPU cannot do it (no
 * kernels in this build or for this device, a shape that they do not support, out of memory), and
 * no row was touched.
 */

#include <errno.h>
#include <string.h>

#include "daemon/process/worker/summarise.h"
#include "kernels/cuda/summarise.h"

struct device_rows {
        struct task *task;
        uint32_t n;       /* items */
        uint32_t *ids;    /* [n]; GPU_NO_BLOCK if there is no such block, or no such row */
        uint32_t *tokens; /* [n] */
        uint8_t *rows;    /* [n]: pinned */
        uint64_t bytes;   /* of a row, from its norms to the end of its labels */
        cu_address next, d_ids, d_tokens, d_channels, d_rows;
};

static uint64_t channels_bytes(const struct task *task) {
        return (uint64_t)task->shape.layers * task->shape.heads * task->space->summary.channels *
               sizeof(uint16_t);
}

static uint64_t labels_bytes(const struct task *task) {
        const struct shape *s = &task->shape;

        return (uint64_t)s->layers * s->heads * s->tokens * task->space->summary.label_bytes;
}

static int choose_channels(struct task *task) {
        int r;

        if (summary_has_channels(task))
                return 0;
        r = task_stage(task, TASK_READ);
        if (r == 0)
                r = summary_choose_channels(task);
        task->staged = NULL; /* the rows will use that memory */
        return r;
}

static int find_blocks(struct device_rows *d) {
        struct task *task = d->task;
        const struct kvd_summary *layout = &task->space->summary;

        d->n = task->job->n_items;
        d->bytes = layout->labels_off + labels_bytes(task) - layout->norms_off;
        d->ids = task_room(task, d->n, sizeof *d->ids);
        d->tokens = task_room(task, d->n, sizeof *d->tokens);
        if (!d->ids || !d->tokens)
                return -ENOMEM;
        for (uint32_t i = 0; i < d->n; i++) {
                const struct kvd_job_item *item = &task->items[i];

                d->ids[i] = task_address(task, i) && task_row(task, item->row) ?
                                    kvd_ref_id(item->ref) :
                                    GPU_NO_BLOCK;
                d->tokens[i] = MIN(item->n_tokens, task->shape.tokens);
        }
        return 0;
}

/* ---- on the GPU ------------------------------------------------------------------------------ */

static void lay_out(struct device_rows *d, cu_address from) {
        d->next = from;
        d->d_ids = device_part(&d->next, d->n * sizeof *d->ids);
        d->d_tokens = device_part(&d->next, d->n * sizeof *d->tokens);
        d->d_channels = device_part(&d->next, channels_bytes(d->task));
        d->d_rows = device_part(&d->next, d->n * d->task->space->summary.row_bytes);
}

static int make_room(struct device_rows *d) {
        cu_address room;

        lay_out(d, 0);
        room = device_room(d->task->device, d->next);
        d->rows = device_staging(d->task->device, d->n * d->task->space->summary.row_bytes);
        if (!room || !d->rows)
                return -ENOSYS;
        lay_out(d, room);
        return 0;
}

static int upload(struct device_rows *d) {
        struct worker_device *device = d->task->device;
        int r = device_write(device, d->d_ids, d->ids, d->n * sizeof *d->ids);

        if (r == 0)
                r = device_write(device, d->d_tokens, d->tokens, d->n * sizeof *d->tokens);
        return r == 0 ? device_write(device, d->d_channels, d->task->space->summaries,
                                     channels_bytes(d->task)) :
                        r;
}

static int launch(struct device_rows *d, struct gpu *gpu) {
        const struct worker_space *w = d->task->space;
        const struct shape *s = &d->task->shape;
        const struct gpu_summarise a = {.blocks = {w->device_base, s->block_bytes, d->d_ids},
                                        .n = d->n,
                                        .shape = {s->layers, s->heads, s->tokens, s->dim,
                                                  w->ix->geometry.order, s->type},
                                        .n_channels = w->summary.channels,
                                        .tokens = d->d_tokens,
                                        .channels = d->d_channels,
                                        .rows = d->d_rows,
                                        .row_bytes = w->summary.row_bytes,
                                        .norms_off = w->summary.norms_off,
                                        .anchors_off = w->summary.anchors_off,
                                        .labels_off = w->summary.labels_off};

        return gpu_summarise(gpu, d->task->device->stream, &a);
}

/* Rows without a block are read, too, and ignored. */
static int make_rows(struct device_rows *d, struct gpu *gpu) {
        struct worker_device *device = d->task->device;
        int r = make_room(d);

        if (r == 0)
                r = upload(d);
        if (r == 0)
                r = launch(d, gpu);
        if (device_finish(device) < 0)
                return task_refuse(d->task, -EIO, "%s", device->why.line);
        if (r < 0)
                return -ENOSYS; /* whatever the error, the processor can do it */
        r = device_read(device, d->rows, d->d_rows, d->n * d->task->space->summary.row_bytes);
        if (r < 0 || device_finish(device) < 0)
                return task_refuse(d->task, -EIO, "%s", device->why.line);
        return 0;
}

/* ---- the job --------------------------------------------------------------------------------- */

static void put_row(void *data, uint32_t i, uint32_t thread) {
        const struct device_rows *d = data;
        const struct kvd_job_item *item = &d->task->items[i];
        const struct kvd_summary *layout = &d->task->space->summary;
        uint8_t *row = task_row(d->task, item->row);

        if (d->ids[i] == GPU_NO_BLOCK)
                return;
        shm_write_begin((shm_u64 *)row, 0);
        memcpy(row + layout->norms_off, d->rows + i * layout->row_bytes + layout->norms_off,
               d->bytes);
        shm_write_end((shm_u64 *)row,
                      (uint64_t)kvd_ref_generation(item->ref) << 32 | KVD_SUMMARY_MADE);
}

int summarise_on_device(struct task *task) {
        struct device_rows d = {.task = task};
        struct gpu *gpu = device_kernels(task->device);
        int r = gpu ? task_needs_numbers(task) : -ENOSYS;

        if (r == 0)
                r = choose_channels(task);
        if (r == 0)
                r = find_blocks(&d);
        if (r == 0 && d.n)
                r = make_rows(&d, gpu);
        if (r == 0)
                threads_share(task->threads, d.n, put_row, &d);
        return r;
}
