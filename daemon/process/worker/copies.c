/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The memfd of a space's copies is mapped, so a copy's address follows from its place, and all
 * threads write and read copies in parallel. Checksums are computed at the destination, so that
 * they cover the copying, too. A place that does not exist is refused, because a job's places are
 * not trusted to fit the space as it is mapped.
 */

#include "daemon/process/worker/copies.h"

#include <errno.h>
#include <string.h>
#include <xxhash.h>

#include "daemon/process/worker/task.h"

struct batch {
        const struct task *task;
        struct copy *copies;
        void (*move)(const struct task *task, struct copy *copy, uint8_t *at);
};

static void move_one(void *data, uint32_t i, uint32_t thread) {
        const struct batch *batch = data;
        const struct worker_space *w = batch->task->space;
        struct copy *copy = &batch->copies[i];

        if (copy->place == KVD_NOWHERE)
                return;
        if (copy->place < kvd_places(w->ix))
                batch->move(batch->task, copy, w->copies + copy->place * w->ix->block_bytes);
        else
                copy->error = ENODATA;
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

void copies_put(struct task *task, struct copy *copies, uint32_t n) {
        struct batch batch = {task, copies, put_one};

        task_share(task, n, task->shape.block_bytes, move_one, &batch);
}

void copies_get(struct task *task, struct copy *copies, uint32_t n) {
        struct batch batch = {task, copies, get_one};

        task_share(task, n, task->shape.block_bytes, move_one, &batch);
}

void copies_read(struct task *task, struct copy *copies, uint32_t n) {
        struct batch batch = {task, copies, read_one};

        task_share(task, n, task->shape.block_bytes, move_one, &batch);
}
