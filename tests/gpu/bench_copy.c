/* SPDX-License-Identifier: Apache-2.0 */
/* Scattered blocks: by the kernel, by the driver's copies, in the device and over the bus */
#include "kernels/cuda/copy.h"

#include <stdio.h>
#include <stdlib.h>

#include "ipc/base/util.h"
#include "tests/gpu/bench.h"

struct state {
        struct gpu_gather a[TURNS];
        uint32_t *ids[TURNS];
};

static int by_kernel(struct bench *b, const void *state, unsigned turn) {
        return gpu_gather(&b->gpu, b->stream, &((const struct state *)state)->a[turn]);
}

static int by_copies(struct bench *b, const void *state, unsigned turn) {
        const struct state *s = state;

        return gpu_gather_copies(&b->gpu, b->stream, &s->a[turn], s->ids[turn]);
}

static void make_ids(struct bench *b, struct state *s, uint32_t n, uint32_t of) {
        for (unsigned i = 0; i < TURNS; i++) {
                s->ids[i] = malloc(n * sizeof(uint32_t));
                if (!s->ids[i])
                        abort();
                s->a[i].blocks.ids = bench_ids(b, n, of, s->ids[i]);
        }
}

static void free_ids(struct state *s) {
        for (unsigned i = 0; i < TURNS; i++)
                free(s->ids[i]);
}

/* The aim: 4,096 blocks of 2 MiB, device to device. */
static void inside(struct bench *b) {
        uint64_t bytes = bench_size(b, 2 * MIB, 16 * KIB);
        uint32_t n = (uint32_t)bench_size(b, 4096, 8);
        struct state s = {0}, least;
        cu_address pool, packed;
        double kernel, copies;
        char name[120];

        while (n > 1 && 2 * n * bytes > b->free / 2)
                n /= 2;
        pool = bench_random(b, n * bytes);
        packed = bench_room(b, n * bytes);
        snprintf(name, sizeof name, "gather of %u scattered blocks of %llu KiB, by the kernel", n,
                 (unsigned long long)(bytes / KIB));
        for (unsigned i = 0; i < TURNS; i++)
                s.a[i] = (struct gpu_gather){.blocks = {pool, bytes, 0}, .n = n, .bytes = bytes, .packed = packed};
        make_ids(b, &s, n, n);
        least = s;
        for (unsigned i = 0; i < TURNS; i++)
                least.a[i].n = 1, least.a[i].bytes = 16;
        kernel = bench_op(b, &(struct op){name, by_kernel, &s, &least, 2 * n * bytes, OF_COPY, 0.85});
        copies = bench_op(b, &(struct op){"the same by the driver's copies", by_copies, &s, &least, 2 * n * bytes,
                                          OF_COPY, 0});
        bench_ratio(b, "gather in the device: copies' time over the kernel's", copies, kernel, 0);
        for (unsigned i = 0; i < TURNS; i++)
                s.a[i].to_blocks = 1;
        bench_op(b, &(struct op){"scatter of the same blocks, by the kernel", by_kernel, &s, &least,
                                 2 * n * bytes, OF_COPY, 0});
        free_ids(&s);
}

/* 256 MiB in blocks of a size, to pinned memory or from it, by both. */
static void over_bus(struct bench *b, cu_address pool, cu_address host, uint64_t bytes, bool in) {
        uint64_t total = bench_size(b, 256 * MIB, 64 * KIB), size = bench_size(b, bytes, 4 * KIB);
        uint32_t of = (uint32_t)MAX(total / size, 1u), n = MAX(of / 2, 1u); /* of the blocks half: with gaps */
        struct state s = {0};
        char name[120];
        double kernel, copies;

        for (unsigned i = 0; i < TURNS; i++)
                s.a[i] = (struct gpu_gather){.blocks = {pool, size, 0}, .n = n, .to_blocks = in, .bytes = size,
                                             .packed = host};
        make_ids(b, &s, n, of);
        snprintf(name, sizeof name, "%s pinned memory, blocks of %llu KiB, by the kernel", in ? "from" : "to",
                 (unsigned long long)(bytes / KIB));
        kernel = bench_op(b, &(struct op){name, by_kernel, &s, NULL, n * size, OF_HOST, 0});
        snprintf(name, sizeof name, "%s pinned memory, blocks of %llu KiB, by copies", in ? "from" : "to",
                 (unsigned long long)(bytes / KIB));
        copies = bench_op(b, &(struct op){name, by_copies, &s, NULL, n * size, OF_HOST, 0});
        snprintf(name, sizeof name, "%s pinned memory, blocks of %llu KiB: copies' time over the kernel's",
                 in ? "from" : "to", (unsigned long long)(bytes / KIB));
        bench_ratio(b, name, copies, kernel, 0);
        free_ids(&s);
}

void bench_copy(struct bench *b) {
        static const uint64_t sizes[] = {16 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB};
        uint64_t total = bench_size(b, 256 * MIB, 64 * KIB);
        cu_address pool, host = 0;
        void *pinned;

        inside(b);
        pool = bench_random(b, total);
        pinned = bench_pinned(b, total);
        if (gpu_check(&b->gpu, b->gpu.cuda->cuMemHostGetDevicePointer(&host, pinned, 0), "a pinned address") < 0)
                return;
        for (size_t i = 0; i < ARRAY_SIZE(sizes); i++)
                for (int in = 0; in < 2; in++)
                        over_bus(b, pool, host, sizes[i], in);
}
