/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The processor's access to blocks. Host memory is mapped, and its blocks are used in place. For
 * GPU memory, the blocks that a job reads are copied to pinned memory before it runs, and those
 * that it writes are copied back before the reply. Jobs done by GPU kernels need neither
 * (task_address).
 */

#include <errno.h>
#include <string.h>

#include "daemon/process/worker/task.h"

/* pinned memory for one job; most kinds read 64 MiB at most */
#define STAGED_MOST (UINT64_C(1) << 30)

/* Offset from the first block; -1 if there is no such block, or it has another generation. */
static int64_t place(const struct task *task, kvd_ref ref) {
        const struct worker_space *w = task->space;
        uint32_t id = kvd_ref_id(ref), segment;

        if (id >= w->ix->capacity ||
            kvd_slot_generation(shm_load(&kvd_index_desc(w->ix, id)->slot)) !=
                    kvd_ref_generation(ref))
                return -1;
        segment = kvd_segment_of(w->ix, id);
        if (!space_has_segment(w, segment) || id < kvd_segment_first(w->ix, segment) ||
            id >= kvd_segment_end(w->ix, segment))
                return -1;
        return (int64_t)(id * w->ix->block_bytes);
}

bool task_on_device(const struct task *task) {
        return task->space->ix->backend != KVD_BACKEND_HOST;
}

cu_address task_address(const struct task *task, uint32_t item) {
        int64_t at = place(task, task->items[item].ref);

        return at < 0 ? 0 : task->space->device_base + (uint64_t)at;
}

uint32_t *task_ids(struct task *task) {
        uint32_t *ids = task_room(task, task->job->n_items, sizeof *ids);

        for (uint32_t i = 0; ids && i < task->job->n_items; i++)
                ids[i] = task_address(task, i) ? kvd_ref_id(task->items[i].ref) : GPU_NO_BLOCK;
        return ids;
}

int task_send_ids(struct task *task, cu_address to, const char *what) {
        uint32_t *ids = task_ids(task), n = task->job->n_items;

        for (uint32_t i = 0; ids && i < n; i++)
                if (ids[i] == GPU_NO_BLOCK)
                        return task_refuse(task, -ESTALE, "a block of %s is gone", what);
        return ids ? device_write(task->device, to, ids, n * sizeof *ids) : -ENOMEM;
}

uint8_t *task_block(const struct task *task, uint32_t item) {
        int64_t at;

        if (task_on_device(task))
                return task->staged ? task->staged[item] : NULL;
        at = place(task, task->items[item].ref);
        return at < 0 ? NULL : task->space->base + at;
}

static int device_refused(struct task *task, int error) {
        return task_refuse(task, error, "%s", task->device->why.line);
}

/* TASK_PACK: a block that only adds to the anchor is not read if it has a summary. */
static enum task_access access_to(const struct task *task, enum task_access access, uint32_t i) {
        const struct kvd_job_item *item = &task->items[i];

        if (access != TASK_PACK)
                return access;
        if (item->flags == KVD_JOB_DEST)
                return TASK_WRITE;
        return item->flags || !task_summary(task, item->row, kvd_ref_generation(item->ref)) ?
                       TASK_READ :
                       TASK_NONE;
}

static int find_room(struct task *task, enum task_access access, uint8_t **at) {
        uint64_t bytes = 0;

        for (uint32_t i = 0; i < task->job->n_items; i++)
                bytes += access_to(task, access, i) == TASK_NONE ? 0 : task->shape.block_bytes;

        if (bytes > STAGED_MOST)
                return task_refuse(task, -ENOMEM,
                                   "a job of %llu MiB of GPU memory; %llu MiB can be staged",
                                   (unsigned long long)(bytes >> 20),
                                   (unsigned long long)(STAGED_MOST >> 20));
        task->staged = task_room(task, task->job->n_items, sizeof *task->staged);
        *at = task->staged ? device_staging(task->device, bytes) : NULL;
        return *at ? 0 : device_refused(task, -ENOMEM);
}

/*
 * Staging for a block that will be written is zeroed: it may contain bytes of an earlier job,
 * perhaps of another domain.
 */
int task_stage(struct task *task, enum task_access access) {
        uint64_t bytes = task->shape.block_bytes;
        uint8_t *at;
        int r;

        task->staged = NULL;
        if (!task_on_device(task) || access == TASK_NONE || !task->job->n_items)
                return 0;
        device_without_kernels(task->device);
        r = find_room(task, access, &at);
        for (uint32_t i = 0; r == 0 && i < task->job->n_items; i++) {
                enum task_access how = access_to(task, access, i);
                cu_address from = task_address(task, i);

                if (!from || how == TASK_NONE)
                        continue;
                task->staged[i] = at;
                if (how == TASK_READ)
                        r = device_read(task->device, at, from, bytes);
                else
                        memset(at, 0, bytes);
                at += bytes;
        }
        if (task->device->broken || r < 0)
                return r ?: -EIO;
        return access != TASK_WRITE && device_finish(task->device) < 0 ?
                       device_refused(task, -EIO) :
                       0;
}

int task_unstage(struct task *task, enum task_access access) {
        int r = 0;

        if (!task->staged || access == TASK_READ)
                return 0;
        for (uint32_t i = 0; r == 0 && i < task->job->n_items; i++)
                if (task->staged[i] && access_to(task, access, i) == TASK_WRITE)
                        r = device_write(task->device, task_address(task, i), task->staged[i],
                                         task->shape.block_bytes);
        if (device_finish(task->device) < 0 || r < 0)
                return device_refused(task, -EIO);
        return 0;
}
