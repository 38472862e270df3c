/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Exact copies in host memory. The memfd is mapped, so a copy's address follows from its place, and
 * all threads write and read copies in parallel. Checksums are computed at the destination, so that
 * they cover the copying, too.
 */

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <xxhash.h>

#include "daemon/process/worker/copies.h"
#include "daemon/process/worker/task.h"
#include "ipc/base/shared_file.h"

struct batch {
        const struct task *task;
        uint32_t tier;
        struct copy *copies;
        void (*move)(const struct task *task, struct copy *copy, uint8_t *at);
};

static int map(struct worker_copies *w, int fd, uint64_t bytes) {
        void *at = NULL;
        /* a tier may have no places */
        int r = bytes ? shared_file_map(fd, bytes, PROT_READ | PROT_WRITE, &at) : 0;

        if (r < 0)
                return r;
        *w = (struct worker_copies){.at = at, .bytes = bytes};
        return 0;
}

static void unmap(struct worker_copies *w) {
        if (w->at)
                munmap(w->at, w->bytes);
        w->at = NULL;
}

static void move_one(void *data, uint32_t i, uint32_t thread) {
        const struct batch *batch = data;
        const struct worker_space *w = batch->task->space;
        struct copy *copy = &batch->copies[i];
        uint32_t first = kvd_tier_first(w->ix, batch->tier);

        if (copy->place != KVD_NOWHERE && kvd_place_tier(w->ix, copy->place) == batch->tier)
                batch->move(batch->task, copy,
                            w->copies[batch->tier].at + (copy->place - first) * w->ix->block_bytes);
}

static uint64_t checksum(const struct task *task, const uint8_t *block) {
        return XXH3_64bits(block, task->shape.block_bytes);
}

static void put_one(const struct task *task, struct copy *copy, uint8_t *at) {
        memcpy(at, copy->block, task->shape.block_bytes);
        copy->checksum = checksum(task, at);
}

static void get_one(const struct task *task, struct copy *copy, uint8_t *at) {
        memcpy(copy->block, at, task->shape.block_bytes);
        copy->error = checksum(task, copy->block) == copy->checksum ? 0 : EBADMSG;
}

static void read_one(const struct task *task, struct copy *copy, uint8_t *at) {
        copy->block = at;
        copy->error = checksum(task, at) == copy->checksum ? 0 : EBADMSG;
}

static void put(struct task *task, uint32_t self, struct copy *copies, uint32_t n) {
        struct batch batch = {task, self, copies, put_one};

        task_share(task, n, task->shape.block_bytes, move_one, &batch);
}

static void get(struct task *task, uint32_t self, struct copy *copies, uint32_t n) {
        struct batch batch = {task, self, copies, get_one};

        task_share(task, n, task->shape.block_bytes, move_one, &batch);
}

static void read_in_place(struct task *task, uint32_t self, struct copy *copies, uint32_t n) {
        struct batch batch = {task, self, copies, read_one};

        task_share(task, n, task->shape.block_bytes, move_one, &batch);
}

const struct worker_tier worker_tier_memory = {.map = map,
                                               .unmap = unmap,
                                               .put = put,
                                               .get = get,
                                               .read = read_in_place};
