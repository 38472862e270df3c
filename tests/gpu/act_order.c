/* SPDX-License-Identifier: Apache-2.0 */
/* Actions with streams and slots. Slots are u64, in the mapping or in registered host memory. */
#include <string.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/gpu/actor.h"
#include "tests/gpu/checks_cu.h"

#define TRY(step) \
        do { \
                note->result = (step); \
                if (note->result) \
                        return; \
        } while (0)

/* Slots in the mapping are in its last 4 KiB. FILL overwrites them. */
cu_address stage_slot(const struct stage *s, uint64_t where, uint64_t slot) {
        return where == IN_HOST ? s->host_at + slot * 8 : s->at + s->bytes - 4096 + slot * 8;
}

static void act_write(struct stage *s, struct note *note) {
        uint64_t when = now_ns();

        TRY(s->cuda->cuStreamWriteValue64(s->streams[1], stage_slot(s, note->n[0], note->n[1]),
                                          note->n[2], CU_WRITE_DEFAULT));
        s->cuda->cuStreamQuery(s->streams[1]); /* submits the work to the device */
        note->n[0] = when;
}

static void act_store(struct stage *s, struct note *note) {
        uint64_t when = now_ns();

        __atomic_store_n(s->host + note->n[0], note->n[1], __ATOMIC_SEQ_CST);
        note->n[0] = when;
}

static void act_load(struct stage *s, struct note *note) {
        note->n[0] = __atomic_load_n(s->host + note->n[0], __ATOMIC_SEQ_CST);
}

static void act_copy(struct stage *s, struct note *note) {
        static uint64_t value;
        uint64_t when = now_ns();

        value = note->n[2];
        TRY(s->cuda->cuMemcpyHtoDAsync(stage_slot(s, note->n[0], note->n[1]), &value, sizeof value,
                                       s->streams[1]));
        TRY(s->cuda->cuStreamSynchronize(s->streams[1]));
        note->n[0] = when;
}

/* ---- waiting --------------------------------------------------------------------------------- */

static cu_result spin(struct stage *s, uint64_t ms) {
        uint64_t until = now_ns() + ms * 1000000u;
        cu_result r;

        do {
                r = s->cuda->cuStreamQuery(s->streams[0]);
        } while (r == CU_NOT_READY && now_ns() < until);
        return r;
}

static void act_await(struct stage *s, struct note *note) {
        uint64_t begin = now_ns();

        TRY(s->cuda->cuStreamWaitValue64(s->streams[0], stage_slot(s, note->n[0], note->n[1]),
                                         note->n[2], CU_WAIT_GEQ));
        if (s->cuda->cuStreamQuery(s->streams[0]) == CU_NOT_READY && s->host)
                __atomic_store_n(s->host + WAITING_SLOT, note->n[2], __ATOMIC_SEQ_CST);
        note->result = spin(s, note->n[3]);
        note->n[0] = now_ns();
        note->n[1] = note->n[0] - begin;
}

static void act_rest(struct stage *s, struct note *note) {
        note->result = spin(s, note->n[0]);
        note->n[0] = now_ns();
}

static void act_echo(struct stage *s, struct note *note) {
        TRY(s->cuda->cuStreamWaitValue64(s->streams[0], stage_slot(s, note->n[0], note->n[1]),
                                         note->n[2], CU_WAIT_GEQ));
        TRY(s->cuda->cuStreamWriteValue64(s->streams[0], stage_slot(s, note->n[0], note->n[3]),
                                          note->n[4], CU_WRITE_DEFAULT));
        s->cuda->cuStreamQuery(s->streams[0]);
}

/* ---- data behind a slot ---------------------------------------------------------------------- */

static uint64_t data_words(const struct stage *s) {
        return (s->bytes - 4096) / 4;
}

static void act_publish(struct stage *s, struct note *note) {
        TRY(s->cuda->cuMemsetD32Async(s->at, (unsigned)note->n[3], data_words(s), s->streams[1]));
        TRY(s->cuda->cuStreamWriteValue64(s->streams[1], stage_slot(s, note->n[0], note->n[1]),
                                          note->n[2], CU_WRITE_DEFAULT));
        s->cuda->cuStreamQuery(s->streams[1]);
}

/* Checks the last words of the data, which are probably written last. */
static void act_consume(struct stage *s, struct note *note) {
        static uint32_t words[4096];
        uint64_t n = MIN(data_words(s), (uint64_t)ARRAY_SIZE(words));

        memset(words, 0xff, sizeof words);
        TRY(s->cuda->cuStreamWaitValue64(s->streams[0], stage_slot(s, note->n[0], note->n[1]),
                                         note->n[2], CU_WAIT_GEQ));
        TRY(s->cuda->cuMemcpyDtoHAsync(words, s->at + (data_words(s) - n) * 4, n * 4,
                                       s->streams[0]));
        TRY(spin(s, note->n[4]));
        note->n[0] = 0;
        for (uint64_t i = 0; i < n; i++)
                note->n[0] += words[i] != (uint32_t)note->n[3];
}

/* ---- work to be killed in -------------------------------------------------------------------- */

static void act_beat(struct stage *s, struct note *note) {
        TRY(stage_launch(s, "kvd_check_beat",
                         &(struct check_beat){s->host_at + HEART_SLOT * 8, s->at,
                                              s->host_at + STOP_SLOT * 8, note->n[0]}));
        s->cuda->cuStreamQuery(s->streams[1]);
}

static void act_sets(struct stage *s, struct note *note) {
        for (uint64_t i = 1; i <= note->n[0]; i++) {
                TRY(s->cuda->cuMemsetD32Async(s->at, (unsigned)i, data_words(s), s->streams[1]));
                TRY(s->cuda->cuStreamWriteValue64(s->streams[1], stage_slot(s, IN_HOST, HEART_SLOT),
                                                  i, CU_WRITE_DEFAULT));
                __atomic_store_n(s->host + QUEUED_SLOT, i, __ATOMIC_SEQ_CST);
        }
}

/* Like a data loader's workers, the child inherits all descriptors, also those of the device. */
static void act_fork(struct stage *s, struct note *note) {
        pid_t child = fork();

        if (child == 0)
                for (;;)
                        pause();
        note->n[0] = (uint64_t)child;
        note->result = child < 0 ? CU_OUT_OF_MEMORY : CU_OK;
}

action_function *const actions_of_order[N_ACTIONS] = {
        [WRITE] = act_write,     [STORE] = act_store, [COPY] = act_copy, [LOAD] = act_load,
        [AWAIT] = act_await,     [REST] = act_rest,   [ECHO] = act_echo, [PUBLISH] = act_publish,
        [CONSUME] = act_consume, [BEAT] = act_beat,   [SETS] = act_sets, [FORK] = act_fork,
};
