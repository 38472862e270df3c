/* SPDX-License-Identifier: Apache-2.0 */
/* The bandwidths of the device's memory */
#include <stdlib.h>

#include "ipc/base/util.h"
#include "tests/gpu/actor.h"
#include "tests/gpu/bench.h"
#include "tests/gpu/checks_cu.h"

struct copies {
        uint64_t bytes;
        cu_address from[TURNS], to[TURNS];
        void *host;
};

static int copy_inside(struct bench *b, const void *state, unsigned turn) {
        const struct copies *c = state;

        return gpu_check(&b->gpu,
                         b->gpu.cuda->cuMemcpyDtoDAsync(c->to[turn], c->from[turn], c->bytes,
                                                        b->stream),
                         "cuMemcpyDtoDAsync");
}

static int copy_out(struct bench *b, const void *state, unsigned turn) {
        const struct copies *c = state;

        return gpu_check(&b->gpu,
                         b->gpu.cuda->cuMemcpyDtoHAsync(c->host, c->from[turn], c->bytes,
                                                        b->stream),
                         "cuMemcpyDtoHAsync");
}

static int copy_in(struct bench *b, const void *state, unsigned turn) {
        const struct copies *c = state;

        return gpu_check(&b->gpu,
                         b->gpu.cuda->cuMemcpyHtoDAsync(c->to[turn], c->host, c->bytes, b->stream),
                         "cuMemcpyHtoDAsync");
}

/* ---- reading: a kernel of its own (checks.cu), which sums what it reads ---------------------- */

struct reading {
        struct stage *stage;
        struct check_read a[TURNS];
        unsigned blocks;
};

static int read_all(struct bench *b, const void *state, unsigned turn) {
        const struct reading *r = state;

        return gpu_check(&b->gpu,
                         stage_launch_on(r->stage, "kvd_check_read", r->blocks, b->stream,
                                         &r->a[turn]),
                         "kvd_check_read");
}

/* Tries several numbers of thread blocks per multiprocessor. The best rate is the bandwidth. */
static void reading(struct bench *b, const cu_address *from, uint64_t bytes) {
        struct stage stage = {.cuda = b->gpu.cuda,
                              .device = b->gpu.ordinal,
                              .context = b->gpu.context};
        struct reading r = {.stage = &stage};
        cu_address sink = bench_room(b, 4096);
        double best = 0;

        for (unsigned i = 0; i < TURNS; i++)
                r.a[i] = (struct check_read){from[i], bytes / 16, sink};
        for (unsigned each = 4; each <= 32; each *= 2) {
                double us;

                r.blocks = b->gpu.multiprocessors * each;
                us = bench_time(b, read_all, &r);
                if (us > 0)
                        best = MAX(best, (double)bytes / us / 1e3);
        }
        b->gb_s[OF_READ] = best;
}

static void say(struct bench *b, enum bandwidth of, const char *name) {
        struct line l;

        line_begin(&l, "bench", "%s", name);
        if (!b->tiny)
                line_number(&l, "gb_s", b->gb_s[of]);
        if (b->tiny && b->gb_s[of] > 0)
                line_answer(&l, OPEN_QUESTION, TINY);
        else if (b->gb_s[of] > 0)
                line_answer(&l, OPEN_QUESTION, "%.0f GB/s", b->gb_s[of]);
        else
                line_answer(&l, NO, "not run: %s", b->gpu.why);
}

void bench_memory(struct bench *b) {
        struct copies c = {.bytes = bench_size(b, GIB, 64 * KIB)}, small;
        double us;

        for (unsigned i = 0; i < TURNS; i++) {
                c.from[i] = bench_random(b, c.bytes);
                c.to[i] = bench_room(b, c.bytes);
        }
        us = bench_time(b, copy_inside, &c);
        b->gb_s[OF_COPY] = us > 0 ? 2 * (double)c.bytes / us / 1e3 : 0;
        say(b, OF_COPY, "device copy, bytes read and written");
        reading(b, c.from, c.bytes);
        say(b, OF_READ, "reading");
        small = c;
        small.bytes = bench_size(b, 256 * MIB, 64 * KIB);
        small.host = bench_pinned(b, small.bytes);
        us = bench_time(b, copy_out, &small);
        b->gb_s[OF_HOST] = us > 0 ? (double)small.bytes / us / 1e3 : 0;
        say(b, OF_HOST, "device to pinned memory");
        us = bench_time(b, copy_in, &small);
        b->gb_s[OF_HOST] = us > 0 ? (double)small.bytes / us / 1e3 : 0;
        say(b, OF_HOST, "pinned memory to device");
}
