/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/ipc/sample.h"

#include <string.h>

#include "ipc/base/util.h"

static uint8_t content[65536];

uint64_t sample_random(uint64_t *seed) {
        uint64_t z = *seed += 0x9e3779b97f4a7c15;

        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        return z ^ z >> 31;
}

static void make_content(void) {
        if (!content[0])
                for (size_t i = 0; i < sizeof content; i++)
                        content[i] = (uint8_t)('!' + i % 94);
}

static uint64_t pick(uint64_t limit, enum sample_kind kind, uint64_t *seed) {
        uint64_t n = sample_random(seed);

        if (kind != SAMPLE_RANDOM)
                return kind == SAMPLE_EMPTY ? 0 : limit;
        n >>= sample_random(seed) % 64; /* small numbers as often as large ones */
        return limit == UINT64_MAX ? n : n % (limit + 1);
}

void sample_fill(struct kvd_msg *msg, uint32_t number, enum sample_kind kind, uint64_t *seed) {
        make_content();
        *msg = (struct kvd_msg){.number = number, .serial = sample_random(seed)};
        for (const struct kvd_field *f = kvd_msg_info(number)->fields; f->name; f++) {
                void *to = (uint8_t *)msg + f->offset;
                uint64_t n = pick(f->limit, kind, seed);

                if (f->type == KVD_FIELD_u32)
                        *(uint32_t *)to = (uint32_t)n;
                else if (f->type == KVD_FIELD_u64)
                        *(uint64_t *)to = n;
                else
                        *(struct kvd_slice *)to = (struct kvd_slice){content, (uint32_t)n};
        }
}

static bool equal(const struct kvd_field *f, const void *a, const void *b) {
        const struct kvd_slice *x = a, *y = b;

        if (f->type == KVD_FIELD_u32)
                return *(const uint32_t *)a == *(const uint32_t *)b;
        if (f->type == KVD_FIELD_u64)
                return *(const uint64_t *)a == *(const uint64_t *)b;
        return x->size == y->size && (x->size == 0 || memcmp(x->data, y->data, x->size) == 0);
}

const char *sample_difference(const struct kvd_msg *a, const struct kvd_msg *b) {
        if (a->number != b->number)
                return "number";
        if (a->serial != b->serial)
                return "serial";
        for (const struct kvd_field *f = kvd_msg_info(a->number)->fields; f->name; f++)
                if (!equal(f, (const uint8_t *)a + f->offset, (const uint8_t *)b + f->offset))
                        return f->name;
        return NULL;
}
