/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks as the processor sees them. Host memory is mapped: a block is where it is. A GPU's is not: what a job reads is
 * copied to pinned memory before it runs, and what it writes is copied back before it is answered. A family that has a
 * kernel for its work asks for neither (run_address).
 */

#include <errno.h>
#include <string.h>

#include "daemon/worker/job.h"

#define STAGED_MOST (UINT64_C(1) << 30) /* pinned memory for one job; most kinds read 64 MiB at most */

/* Offset from the first block; -1: no such block, or in another incarnation. */
static int64_t place(const struct run *run, kvd_ref ref) {
        const struct worker_space *w = run->space;
        uint32_t id = kvd_ref_id(ref), segment;

        if (id >= w->ix->capacity ||
            kvd_slot_generation(shm_load(&kvd_index_desc(w->ix, id)->slot)) != kvd_ref_generation(ref))
                return -1;
        segment = kvd_segment_of(w->ix, id);
        if (!space_has_segment(w, segment) || id < kvd_segment_first(w->ix, segment) ||
            id >= kvd_segment_end(w->ix, segment))
                return -1;
        return (int64_t)(id * w->ix->block_bytes);
}

bool run_on_device(const struct run *run) {
        return run->space->ix->backend != KVD_BACKEND_HOST;
}

cu_address run_address(const struct run *run, uint32_t item) {
        int64_t at = place(run, run->items[item].ref);

        return at < 0 ? 0 : run->space->device_base + (uint64_t)at;
}

uint8_t *run_block(const struct run *run, uint32_t item) {
        int64_t at;

        if (run_on_device(run))
                return run->staged ? run->staged[item] : NULL;
        at = place(run, run->items[item].ref);
        return at < 0 ? NULL : run->space->base + at;
}

static int device_refused(struct run *run, int error) {
        return run_refuse(run, error, "%s", run->device->why);
}

/* What is only summed up, and has a summary, is not read. */
static enum run_access access_to(const struct run *run, enum run_access access, uint32_t i) {
        const struct kvd_job_item *item = &run->items[i];

        if (access != RUN_PACK)
                return access;
        if (item->flags == KVD_JOB_DEST)
                return RUN_WRITE;
        return item->flags || !run_summary(run, item->row, kvd_ref_generation(item->ref)) ? RUN_READ : RUN_NONE;
}

static int find_room(struct run *run, enum run_access access, uint8_t **at) {
        uint64_t bytes = 0;

        for (uint32_t i = 0; i < run->job->n_items; i++)
                bytes += access_to(run, access, i) == RUN_NONE ? 0 : run->shape.block_bytes;

        if (bytes > STAGED_MOST)
                return run_refuse(run, -ENOMEM, "a job of %llu MiB of GPU memory; %llu can be staged",
                                  (unsigned long long)(bytes >> 20), (unsigned long long)(STAGED_MOST >> 20));
        run->staged = run_room(run, run->job->n_items, sizeof *run->staged);
        *at = run->staged ? device_staging(run->device, bytes) : NULL;
        return *at ? 0 : device_refused(run, -ENOMEM);
}

/* What is written is zeros until somebody writes it: staging holds what an earlier job left, of whatever domain. */
int run_stage(struct run *run, enum run_access access) {
        uint64_t bytes = run->shape.block_bytes;
        uint8_t *at;
        int r;

        run->staged = NULL;
        if (!run_on_device(run) || access == RUN_NONE || !run->job->n_items)
                return 0;
        r = find_room(run, access, &at);
        for (uint32_t i = 0; r == 0 && i < run->job->n_items; i++) {
                enum run_access how = access_to(run, access, i);
                cu_address from = run_address(run, i);

                if (!from || how == RUN_NONE)
                        continue;
                run->staged[i] = at;
                if (how == RUN_READ)
                        r = device_read(run->device, at, from, bytes);
                else
                        memset(at, 0, bytes);
                at += bytes;
        }
        if (run->device->broken || r < 0)
                return r ?: -EIO;
        return access != RUN_WRITE && device_finish(run->device) < 0 ? device_refused(run, -EIO) : 0;
}

int run_unstage(struct run *run, enum run_access access) {
        int r = 0;

        if (!run->staged || access == RUN_READ)
                return 0;
        for (uint32_t i = 0; r == 0 && i < run->job->n_items; i++)
                if (run->staged[i] && access_to(run, access, i) == RUN_WRITE)
                        r = device_write(run->device, run_address(run, i), run->staged[i], run->shape.block_bytes);
        if (device_finish(run->device) < 0 || r < 0)
                return device_refused(run, -EIO);
        return 0;
}
