/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Finds races in kernels: their source is compiled with -fsanitize=thread, whose calls are handled
 * here by CUDA's rules instead of a CPU's. Two accesses to the same bytes, of which one is a write
 * and not both are atomic, are in order if
 *
 *      one thread did both, or
 *      their threads are in one block, with a __syncthreads() between, or
 *      in one warp, with a __syncwarp() between (shuffles order nothing), or
 *      their threads are in two blocks, with any __threadfence() between, whatever its purpose.
 *
 * Anything else ends the process with one line. Only races that show in the order of this run are
 * found: for each four bytes, one write and one read are remembered. Blocks do not share shared
 * memory, although it has the same address for all of them.
 */

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "ipc/base/util.h"
#include "tests/gpu/fakecuda/emulate.h"

enum { CELLS = 1 << 21, TRIES = 16, OWN_STACK = 64 << 10 };

struct access {
        struct emulate_where where;
        uint64_t fences;
        const void *code;
        uint8_t mask; /* accessed bytes of the cell; 0 if none */
        bool atomic;
};

struct cell {
        uintptr_t key;   /* address / 4 */
        uint64_t launch; /* cells of older launches are free */
        struct access write, read;
};

extern char __data_start, _end; /* static shared memory is between these */

static struct cell *cells;
static uint64_t fences;

/* NULL: there is no room, and the cell is not watched. */
static struct cell *find(uintptr_t key, uint64_t launch) {
        size_t at = key * 0x9e3779b97f4a7c15u >> (64 - 21);

        for (size_t i = 0; i < TRIES; i++) {
                struct cell *cell = &cells[(at + i) % CELLS];

                if (cell->launch != launch)
                        *cell = (struct cell){.key = key, .launch = launch};
                if (cell->key == key)
                        return cell;
        }
        return NULL;
}

static bool is_shared(const void *at) {
        return ((const char *)at >= &__data_start && (const char *)at < &_end) ||
               emulate_is_shared(at);
}

static bool in_order(const struct access *before, const struct access *now, const void *at) {
        const struct emulate_where *a = &before->where, *b = &now->where;

        if (!(before->mask & now->mask) || (before->atomic && now->atomic))
                return true;
        if (a->block != b->block)
                return is_shared(at) || before->fences < now->fences;
        return a->thread == b->thread || a->barriers < b->barriers ||
               (a->thread / EMULATE_WARP == b->thread / EMULATE_WARP &&
                a->warp_barriers < b->warp_barriers);
}

static void print(const struct access *a, const char *what) {
        Dl_info info;

        fprintf(stderr, " thread %u of block %u %s", a->where.thread, a->where.block, what);
        if (dladdr(a->code, &info))
                fprintf(stderr, " (addr2line -e %s 0x%zx)", info.dli_fname,
                        (size_t)((const char *)a->code - (const char *)info.dli_fbase) - 1);
}

static _Noreturn void race(const struct access *before, bool wrote, const struct access *now,
                           bool writes, const void *at) {
        fprintf(stderr, "emulate: %s: race at %p (%s memory):", emulate_kernel(), at,
                is_shared(at) ? "shared" : "global");
        print(before, wrote ? "wrote" : "read");
        fprintf(stderr, ",");
        print(now, writes ? "writes" : "reads");
        fprintf(stderr, "\n");
        abort();
}

static void touch_cell(uintptr_t key, const struct access *now, bool writes, const void *at) {
        struct cell *cell = find(key, now->where.launch);

        if (!cell)
                return;
        if (!in_order(&cell->write, now, at))
                race(&cell->write, true, now, writes, at);
        if (writes && !in_order(&cell->read, now, at))
                race(&cell->read, false, now, writes, at);
        *(writes ? &cell->write : &cell->read) = *now;
}

static void touch(const void *at, size_t bytes, bool writes, bool atomic, const void *code) {
        struct access now = {.fences = fences, .code = code, .atomic = atomic};
        uintptr_t from = (uintptr_t)at, to = from + bytes;

        if (from - (uintptr_t)__builtin_frame_address(0) + OWN_STACK < 2 * OWN_STACK ||
            !emulate_where(&now.where))
                return;
        if (!cells) {
                cells = mmap(NULL, CELLS * sizeof *cells, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
                if (cells == MAP_FAILED)
                        abort();
        }
        for (uintptr_t i = from; i < to; i = (i / 4 + 1) * 4) {
                uintptr_t end = MIN(to, (i / 4 + 1) * 4);

                now.mask = (uint8_t)(((1u << (end - i)) - 1) << i % 4);
                touch_cell(i / 4, &now, writes, (const void *)i);
        }
}

static void touch_copy(const void *at, size_t bytes, bool writes) {
        touch(at, bytes, writes, false, __builtin_return_address(0));
}

static __attribute__((constructor)) void watch_copies(void) {
        emulate_touch = touch_copy;
}

/* ---- what the compiler calls ----------------------------------------------------------------- */

#define CALLED __attribute__((visibility("default")))
#define CODE __builtin_return_address(0)

void __tsan_init(void);
void __tsan_func_entry(void *code);
void __tsan_func_exit(void);
void __tsan_vptr_update(void **at, void *value);
void __tsan_read_range(void *at, size_t bytes);
void __tsan_write_range(void *at, size_t bytes);
void __tsan_atomic_thread_fence(int order);

CALLED void __tsan_init(void) {
}

CALLED void __tsan_func_entry(void *code) {
}

CALLED void __tsan_func_exit(void) {
}

CALLED void __tsan_vptr_update(void **at, void *value) {
}

CALLED void __tsan_read_range(void *at, size_t bytes) {
        touch(at, bytes, false, false, CODE);
}

CALLED void __tsan_write_range(void *at, size_t bytes) {
        touch(at, bytes, true, false, CODE);
}

CALLED void __tsan_atomic_thread_fence(int order) {
        fences++;
}

#define PLAIN(name, bytes, writes) \
        void __tsan_##name(void *at); \
        CALLED void __tsan_##name(void *at) { \
                touch(at, bytes, writes, false, CODE); \
        }
#define PLAIN_SIZE(bytes) PLAIN(read##bytes, bytes, false) PLAIN(write##bytes, bytes, true)
#define UNALIGNED_SIZE(bytes) \
        PLAIN(unaligned_read##bytes, bytes, false) PLAIN(unaligned_write##bytes, bytes, true)

PLAIN_SIZE(1)
PLAIN_SIZE(2)
PLAIN_SIZE(4)
PLAIN_SIZE(8)
PLAIN_SIZE(16)
UNALIGNED_SIZE(2)
UNALIGNED_SIZE(4)
UNALIGNED_SIZE(8)
UNALIGNED_SIZE(16)

/* The calls to which emulate_cuda.h's atomic operations compile. */
#define ATOMIC_SIZE(bits) \
        uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t *at, int order); \
        void __tsan_atomic##bits##_store(volatile uint##bits##_t *at, uint##bits##_t x, \
                                         int order); \
        bool __tsan_atomic##bits##_compare_exchange_strong(volatile uint##bits##_t *at, \
                                                           uint##bits##_t *old, uint##bits##_t x, \
                                                           int order, int failed); \
        uint##bits##_t __tsan_atomic##bits##_compare_exchange_val(volatile uint##bits##_t *at, \
                                                                  uint##bits##_t old, \
                                                                  uint##bits##_t x, int order, \
                                                                  int failed); \
        CALLED uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t *at, \
                                                         int order) { \
                touch((const void *)at, sizeof *at, false, true, CODE); \
                return __atomic_load_n(at, __ATOMIC_SEQ_CST); \
        } \
        CALLED void __tsan_atomic##bits##_store(volatile uint##bits##_t *at, uint##bits##_t x, \
                                                int order) { \
                touch((const void *)at, sizeof *at, true, true, CODE); \
                __atomic_store_n(at, x, __ATOMIC_SEQ_CST); \
        } \
        CALLED bool __tsan_atomic##bits##_compare_exchange_strong(volatile uint##bits##_t *at, \
                                                                  uint##bits##_t *old, \
                                                                  uint##bits##_t x, int order, \
                                                                  int failed) { \
                touch((const void *)at, sizeof *at, true, true, CODE); \
                return __atomic_compare_exchange_n(at, old, x, false, __ATOMIC_SEQ_CST, \
                                                   __ATOMIC_SEQ_CST); \
        } \
        CALLED uint##bits##_t \
                __tsan_atomic##bits##_compare_exchange_val(volatile uint##bits##_t *at, \
                                                           uint##bits##_t old, uint##bits##_t x, \
                                                           int order, int failed) { \
                __tsan_atomic##bits##_compare_exchange_strong(at, &old, x, order, failed); \
                return old; \
        }

ATOMIC_SIZE(32)
ATOMIC_SIZE(64)
