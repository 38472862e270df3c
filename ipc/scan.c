/* SPDX-License-Identifier: Apache-2.0 */

/*
 * msgpack-c trusts the counts in a frame: five bytes (dd 1f 00 00 00) make it reserve 12 GB, since
 * it allocates an array's elements before it looks for them. So this file checks each frame before
 * msgpack-c sees it.
 *
 * The walk keeps one struct level per open array or map, and one stack with the keys of all open
 * maps. Keys of an inner map lie above those of the outer map, and are popped when the inner map
 * ends.
 */

#include "ipc/scan.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "ipc/base/util.h"

enum kind { BAD, NUMBER, STR, BIN, ARRAY, MAP };

struct head {
        uint8_t kind;
        uint8_t width; /* bytes of the number, or of the length or count, after the first byte */
};

/* For first bytes 0xc0 to 0xdf. Other first bytes contain their value, length or count. */
static const struct head heads[32] = {
        [0x00] = {NUMBER, 0}, /* nil */
        [0x02] = {NUMBER, 0}, /* false */
        [0x03] = {NUMBER, 0}, /* true */
        [0x04] = {BIN, 1},
        [0x05] = {BIN, 2},
        [0x06] = {BIN, 4},
        /* unsigned */
        [0x0c] = {NUMBER, 1},
        [0x0d] = {NUMBER, 2},
        [0x0e] = {NUMBER, 4},
        [0x0f] = {NUMBER, 8},
        /* signed */
        [0x10] = {NUMBER, 1},
        [0x11] = {NUMBER, 2},
        [0x12] = {NUMBER, 4},
        [0x13] = {NUMBER, 8},
        [0x19] = {STR, 1},
        [0x1a] = {STR, 2},
        [0x1b] = {STR, 4},
        [0x1c] = {ARRAY, 2},
        [0x1d] = {ARRAY, 4},
        [0x1e] = {MAP, 2},
        [0x1f] = {MAP, 4},
};

struct key {
        const uint8_t *data;
        uint32_t size;
};

struct level {
        uint32_t left;      /* number of values still to come */
        uint32_t first_key; /* index of this map's first key in the stack of keys */
        bool is_map;
};

struct walk {
        const uint8_t *at, *end;
        uint32_t depth, objects, n_keys;
        struct level levels[KVD_SCAN_MAX_DEPTH];
        struct key keys[KVD_SCAN_MAX_OBJECTS / 2];
};

struct value {
        enum kind kind;
        uint32_t n; /* bytes of content, or elements */
};

static uint32_t big_endian(const uint8_t *p, uint32_t width) {
        uint32_t n = 0;

        for (uint32_t i = 0; i < width; i++)
                n = n << 8 | p[i];
        return n;
}

static void short_head(uint8_t first, struct value *ret) {
        if (first < 0x80 || first >= 0xe0)
                *ret = (struct value){NUMBER, 0};
        else if (first < 0x90)
                *ret = (struct value){MAP, first & 0x0f};
        else if (first < 0xa0)
                *ret = (struct value){ARRAY, first & 0x0f};
        else
                *ret = (struct value){STR, first & 0x1f};
}

static enum kvd_scan_result long_head(struct walk *w, uint8_t first, struct value *ret) {
        struct head head = heads[first - 0xc0];

        if (head.kind == BAD)
                return KVD_SCAN_TYPE;
        ret->kind = head.kind;
        if (head.kind == NUMBER) {
                ret->n = head.width;
                return KVD_SCAN_OK;
        }
        if (w->end - w->at < head.width)
                return KVD_SCAN_TRUNCATED;
        ret->n = big_endian(w->at, head.width);
        w->at += head.width;
        return KVD_SCAN_OK;
}

static enum kvd_scan_result read_head(struct walk *w, struct value *ret) {
        uint8_t first;

        if (w->at == w->end)
                return KVD_SCAN_TRUNCATED;
        first = *w->at++;
        if (first >= 0xc0 && first < 0xe0)
                return long_head(w, first, ret);
        short_head(first, ret);
        return KVD_SCAN_OK;
}

static enum kvd_scan_result skip_content(struct walk *w, const struct value *v) {
        if ((size_t)(w->end - w->at) < v->n)
                return v->kind == NUMBER ? KVD_SCAN_TRUNCATED : KVD_SCAN_LENGTH;
        w->at += v->n;
        return KVD_SCAN_OK;
}

/*
 * Every element has at least one byte, so a count larger than the number of bytes left is wrong. 2
 * * n cannot overflow 64 bits.
 */
static enum kvd_scan_result open_level(struct walk *w, const struct value *v) {
        uint64_t values = v->kind == MAP ? 2 * (uint64_t)v->n : v->n;

        if (values > (uint64_t)(w->end - w->at))
                return KVD_SCAN_COUNT;
        if (values > KVD_SCAN_MAX_OBJECTS - w->objects)
                return KVD_SCAN_OBJECTS;
        if (w->depth == KVD_SCAN_MAX_DEPTH)
                return KVD_SCAN_DEPTH;
        w->objects += (uint32_t)values;
        w->levels[w->depth++] = (struct level){(uint32_t)values, w->n_keys, v->kind == MAP};
        return KVD_SCAN_OK;
}

static enum kvd_scan_result push_key(struct walk *w, const struct level *map,
                                     const struct value *v) {
        struct key key = {w->at - v->n, v->n};

        for (uint32_t i = map->first_key; i < w->n_keys; i++)
                if (w->keys[i].size == key.size && memcmp(w->keys[i].data, key.data, key.size) == 0)
                        return KVD_SCAN_DUPLICATE;
        w->keys[w->n_keys++] = key;
        return KVD_SCAN_OK;
}

/* One value. It is a key if the innermost level is a map with an even number of values left. */
static enum kvd_scan_result step(struct walk *w) {
        struct level *inside = w->depth ? &w->levels[w->depth - 1] : NULL;
        bool is_key = inside && inside->is_map && inside->left % 2 == 0;
        enum kvd_scan_result r;
        struct value v;

        r = read_head(w, &v);
        if (r)
                return r;
        if (is_key && v.kind != STR)
                return KVD_SCAN_KEY;
        if (inside)
                inside->left--;
        if (v.kind == ARRAY || v.kind == MAP)
                return open_level(w, &v);
        r = skip_content(w, &v);
        if (r || !is_key)
                return r;
        return push_key(w, inside, &v);
}

static void close_levels(struct walk *w) {
        while (w->depth && w->levels[w->depth - 1].left == 0)
                w->n_keys = w->levels[--w->depth].first_key;
}

enum kvd_scan_result kvd_scan(const void *frame, size_t size) {
        struct walk w;
        enum kvd_scan_result r;

        if (size == 0)
                return KVD_SCAN_EMPTY;
        w.at = frame;
        w.end = w.at + size;
        w.depth = w.n_keys = 0;
        w.objects = 1;
        do {
                r = step(&w);
                if (r)
                        return r;
                close_levels(&w);
        } while (w.depth);
        return w.at == w.end ? KVD_SCAN_OK : KVD_SCAN_TRAILING;
}

const char *kvd_scan_text(enum kvd_scan_result result) {
        static const char *const texts[] = {
#define KVD_SCAN_TEXT(name, text) [KVD_SCAN_##name] = text,
                KVD_SCAN_RESULTS(KVD_SCAN_TEXT)
#undef KVD_SCAN_TEXT
        };

        return (size_t)result < ARRAY_SIZE(texts) ? texts[result] : "unknown";
}
