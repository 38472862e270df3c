/* SPDX-License-Identifier: Apache-2.0 */
/* Actions as clients of kvd: chains of blocks whose content follows from a seed */
#include "tests/gpu/act_pool.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "client/kvd_cuda.h"
#include "ipc/base/util.h"
#include "tests/gpu/checks_cu.h"

#define TRY(step) \
        do { \
                note->result = (step); \
                if (note->result) \
                        return; \
        } while (0)
#define PAGE 65536

struct member {
        kvd *daemon;
        kvd_space *space;
        struct kvd_place place;
        struct kvd_pin pin;
        uint32_t blocks[POOL_MOST_BLOCKS], n_blocks;
        uint64_t block_bytes;
        uint32_t *copy; /* one block, in host memory */
};

/* 256 KiB per block. */
static const struct kvd_geometry geometry = {.layers = 8,
                                             .kv_heads = 8,
                                             .head_dim = 64,
                                             .block_tokens = POOL_BLOCK_TOKENS,
                                             .dtype = KVD_BF16,
                                             .vocab = 1u << 30};

static int kvd_result(int64_t r, struct note *note) {
        if (r >= 0)
                return 0;
        snprintf(note->text, sizeof note->text, "%s", kvd_error());
        return POOL_ERRNO - (int)r;
}

int ask_join(struct actor *a, const char *socket) {
        struct note note = {.action = JOIN};

        snprintf(note.text, sizeof note.text, "%s", socket);
        return actor_ask(a, note);
}

/* ---- content --------------------------------------------------------------------------------- */

static uint32_t word_of(uint64_t seed, uint32_t block) {
        return (uint32_t)(seed * 2654435761u + block * 40503u + 1);
}

static void tokens_of(uint64_t seed, uint32_t n, uint32_t *to) {
        for (uint32_t i = 0; i < n; i++)
                to[i] = (uint32_t)((seed * 1000003u + i) % geometry.vocab);
}

static int fill(struct stage *s, const struct kvd_block *blocks, uint32_t n, uint64_t seed) {
        cu_result r = CU_OK;

        for (uint32_t i = 0; i < n && !r; i++)
                r = s->cuda->cuMemsetD32Async((cu_address)(uintptr_t)blocks[i].data,
                                              word_of(seed, i), s->member->block_bytes / 4,
                                              s->streams[1]);
        return r;
}

/* Copies the pinned chain out, block by block, on the waiting stream, and compares every word. */
static int compare(struct stage *s, uint64_t seed, uint64_t *wrong) {
        struct member *m = s->member;
        cu_result r = CU_OK;

        *wrong = 0;
        for (uint32_t i = 0; i < m->n_blocks && !r; i++) {
                r = s->cuda->cuMemcpyDtoHAsync(m->copy,
                                               (cu_address)(uintptr_t)kvd_pin_block(&m->pin,
                                                                                    m->blocks[i]),
                                               m->block_bytes, s->streams[0]);
                r = r ? r : s->cuda->cuStreamSynchronize(s->streams[0]);
                for (uint64_t w = 0; w < m->block_bytes / 4 && !r; w++)
                        *wrong += m->copy[w] != word_of(seed, i);
        }
        return r;
}

/* ---- actions --------------------------------------------------------------------------------- */

/* Starts a kernel that runs until the process ends, or for a long time. */
static int start_long_work(struct stage *s, uint64_t n) {
        cu_result r;

        if (!s->host) {
                s->host = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                               0);
                if (s->host == MAP_FAILED)
                        return CU_OUT_OF_MEMORY;
                r = s->cuda->cuMemHostRegister(s->host, PAGE,
                                               CU_REGISTER_PORTABLE | CU_REGISTER_MAPPED);
                r = r ? r : s->cuda->cuMemHostGetDevicePointer(&s->host_at, s->host, 0);
                if (r)
                        return r;
        }
        return stage_launch(s, "kvd_check_beat",
                            &(struct check_beat){s->host_at + 64, s->host_at + 72, s->host_at + 80,
                                                 n});
}

/*
 * The first use of a kernel, even of the driver's own one for memset, may load it and wait for all
 * work on the device. So this runs before there is a kernel that does not end.
 */
static int warm_up(struct stage *s) {
        struct kvd_block block;
        cu_result r;

        if (kvd_alloc(s->member->space, 1, &block) != 1)
                return CU_OUT_OF_MEMORY;
        r = fill(s, &block, 1, 0);
        if (!r)
                start_long_work(s, 1); /* works if there is an image for the device */
        r = r ? r : s->cuda->cuStreamSynchronize(s->streams[1]);
        kvd_free(s->member->space, 1, &block);
        return r;
}

static void act_join(struct stage *s, struct note *note) {
        struct member *m = s->member = calloc(1, sizeof *m);
        const char *why;
        char socket[sizeof note->text];

        memcpy(socket, note->text, sizeof socket);
        if (!m)
                abort();
        TRY(kvd_result(kvd_open(socket, &m->daemon), note));
        TRY(kvd_result(kvd_space_open(m->daemon, "gpu-share", &geometry, NULL, &m->space), note));
        TRY(kvd_result(kvd_space_place(m->space, &m->place), note));
        m->block_bytes = kvd_block_bytes(&geometry);
        m->copy = malloc(m->block_bytes);
        note->n[0] = m->place.memory;
        note->n[1] = m->place.legacy;
        note->n[2] = m->place.stream_order;
        s->cuda = kvd_cuda_load(&why);
        if (m->place.memory != KVD_MEMORY_CUDA || !s->cuda || !m->copy) {
                snprintf(note->text, sizeof note->text, "the space is in host memory");
                note->result = CU_NOT_SUPPORTED;
                return;
        }
        s->device = m->place.device;
        TRY(stage_open(s));
        TRY(warm_up(s));
}

static void act_put(struct stage *s, struct note *note) {
        struct kvd_block blocks[POOL_MOST_BLOCKS];
        uint32_t tokens[POOL_MOST_BLOCKS * POOL_BLOCK_TOKENS];
        uint32_t n = (uint32_t)MIN(note->n[1], POOL_MOST_BLOCKS);
        uint64_t seed = note->n[0], work = note->n[2], begin;
        struct kvd_pin pin = {0};
        int got = 0;

        while ((uint32_t)got < n) {
                int r = kvd_alloc(s->member->space, n - (uint32_t)got, blocks + got);

                TRY(kvd_result(r, note));
                got += r;
        }
        if (work)
                TRY(start_long_work(s, work));
        TRY(fill(s, blocks, n, seed));
        tokens_of(seed, n * POOL_BLOCK_TOKENS, tokens);
        begin = now_ns();
        got = kvd_seal_on(s->member->space, &pin, n, blocks, tokens, n * POOL_BLOCK_TOKENS,
                          s->streams[1]);
        note->n[1] = now_ns() - begin;
        note->result = kvd_result(got, note);
        if (note->result) { /* the daemon is gone */
                s->cuda->cuStreamSynchronize(s->streams[1]);
                kvd_free(s->member->space, n, blocks);
                return;
        }
        note->n[0] = (uint64_t)got;
        kvd_unpin_on(s->member->space, &pin, s->streams[1]);
}

static void act_find(struct stage *s, struct note *note) {
        struct member *m = s->member;
        uint32_t tokens[POOL_MOST_BLOCKS * POOL_BLOCK_TOKENS];
        uint32_t n = (uint32_t)MIN(note->n[1], POOL_MOST_BLOCKS) * POOL_BLOCK_TOKENS, word = 0;
        uint64_t seed = note->n[0], t[4];
        int64_t found;

        tokens_of(seed, n, tokens);
        TRY(kvd_result(kvd_catch_up(m->space), note));
        t[0] = now_ns();
        found = kvd_lookup(m->space, 0, tokens, n, m->blocks, POOL_MOST_BLOCKS, &m->pin);
        t[1] = now_ns();
        TRY(kvd_result(found, note));
        m->n_blocks = (uint32_t)found / POOL_BLOCK_TOKENS;
        memset(note->n, 0, sizeof note->n);
        note->n[0] = (uint64_t)found;
        if (!found)
                return;
        TRY(kvd_result(kvd_wait_on(m->space, &m->pin, s->streams[0]), note));
        t[2] = now_ns();
        note->n[1] = t[1] - t[0];
        note->n[2] = t[2] - t[1];
        note->result = s->cuda->cuStreamQuery(s->streams[0]);
        if (note->result) /* the stream waits: READ checks later */
                return;
        TRY(s->cuda->cuMemcpyDtoHAsync(&word,
                                       (cu_address)(uintptr_t)kvd_pin_block(&m->pin, m->blocks[0]),
                                       sizeof word, s->streams[0]));
        TRY(s->cuda->cuStreamSynchronize(s->streams[0]));
        t[3] = now_ns();
        note->n[3] = t[3] - t[0];
        TRY(compare(s, seed, &note->n[4]));
}

static void act_read(struct stage *s, struct note *note) {
        uint64_t until = now_ns() + note->n[1] * 1000000u;
        cu_result r;

        while ((r = s->cuda->cuStreamQuery(s->streams[0])) == CU_NOT_READY && now_ns() < until)
                sleep_ms(1);
        TRY(r);
        note->n[1] = now_ns();
        TRY(compare(s, note->n[0], &note->n[0]));
}

static void act_judge(struct stage *s, struct note *note) {
        note->n[0] = (uint64_t)(int64_t)kvd_check_pin(s->member->space, &s->member->pin);
}

static void act_drop(struct stage *s, struct note *note) {
        kvd_unpin_on(s->member->space, &s->member->pin, s->streams[0]);
        s->cuda->cuStreamSynchronize(s->streams[0]);
        note->n[0] = (uint64_t)kvd_settle(s->member->space);
}

action_function *const actions_of_pool[N_ACTIONS] = {
        [JOIN] = act_join, [PUT] = act_put,     [FIND] = act_find,
        [READ] = act_read, [JUDGE] = act_judge, [DROP] = act_drop,
};
