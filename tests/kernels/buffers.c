/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kernels/buffers.h"

#include <string.h>
#include <sys/mman.h>

#include "ipc/base/util.h"
#include "tests/lib/mark.h"

static struct mapping {
        uint8_t *at;
        size_t size; /* between the guard pages */
        bool taken;
} mappings[16384];
static uint32_t state = 1;
void (*buffers_prepare)(void *at, size_t bytes);

static void map(struct mapping *m, size_t size, size_t page) {
        m->size = size;
        m->at = mmap(NULL, size + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        ck_assert_ptr_ne(m->at, MAP_FAILED);
        ck_assert_int_eq(mprotect(m->at + page, size, PROT_READ | PROT_WRITE), 0);
        if (buffers_prepare)
                buffers_prepare(m->at + page, size);
}

/* Mappings are kept for the next buffer of their size: tests take hundreds of thousands. */
void *buffer(size_t bytes) {
        size_t page = (size_t)sysconf(_SC_PAGESIZE), size = ALIGN_UP(MAX(bytes, 1), page);
        struct mapping *m = mappings;

        while (m->at && (m->taken || m->size != size))
                m++;
        if (m == mappings + ARRAY_SIZE(mappings) - 1)
                ck_abort_msg("too many buffers at once");
        if (!m->at)
                map(m, size, page);
        m->taken = true;
        memset(m->at + page, 0, size);
        return m->at + page + size - bytes;
}

void buffers_free(void) {
        for (struct mapping *m = mappings; m->at; m++)
                m->taken = false;
}

bool buffer_is_taken(size_t i) {
        return i < ARRAY_SIZE(mappings) && mappings[i].taken;
}

void random_seed(uint32_t seed) {
        state = seed * 2654435761u + 1;
}

uint32_t random_u32(void) {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        return state;
}

float *random_floats(size_t n) {
        float *f = buffer(n * sizeof *f);

        for (size_t i = 0; i < n; i++)
                f[i] = (float)((double)random_u32() / 2147483648.0 - 1.0);
        return f;
}

float *copy_floats(const float *from, size_t n) {
        float *f = buffer(n * sizeof *f);

        memcpy(f, from, n * sizeof *f);
        return f;
}

void assert_same_bits(const float *a, const float *b, size_t n, const char *what) {
        /* ck_assert makes a system call even if it holds, which is too slow here */
        if (memcmp(a, b, n * sizeof *a) == 0)
                return;
        for (size_t i = 0; i < n; i++)
                if (memcmp(a + i, b + i, sizeof *a) != 0)
                        ck_abort_msg("%s: element %zu of %zu is %a, expected %a", what, i, n,
                                     (double)b[i], (double)a[i]);
}
