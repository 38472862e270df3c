/* SPDX-License-Identifier: Apache-2.0 */

/*
 * An existing space is not opened with another shape. Every field that changes the meaning of bytes
 * is changed alone, to many values, for spaces of several shapes. The refusal names the field, and
 * the space stays as it was. Prints the number of attempts.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/enums.h"
#include "ipc/base/util.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

#define PAIRS 500u /* minimum number of attempts refused as another shape */

static const struct kvd_shape bases[] = {
        {.layers = 2,
         .kv_heads = 1,
         .head_dim = 8,
         .block_tokens = 4,
         .dtype = KVD_dtype_f32,
         .vocab = 1000},
        {.layers = 32,
         .kv_heads = 8,
         .head_dim = 128,
         .block_tokens = 16,
         .layer_groups = 4,
         .dtype = KVD_dtype_f16,
         .order = KVD_order_max,
         .rope = KVD_rope_max,
         .state_width = 64,
         .vocab = 128256,
         .fingerprint = {3, 4}},
        {.layers = 6,
         .kv_heads = 3,
         .head_dim = 64,
         .block_tokens = 1,
         .layer_groups = 2,
         .dtype = KVD_dtype_i8,
         .vocab = 10},
        {.block_tokens = 8, .block_bytes = 4096, .layout = "one", .fingerprint = {9, 9}},
};

static const uint64_t values[] = {0,   1,    2,     3,      4,     5,          6,         7,  8,
                                  12,  16,   24,    31,     32,    33,         48,        64, 128,
                                  256, 1000, 10000, 128256, 65535, UINT32_MAX, 1ull << 40};

#define FIELD(field) \
        { #field, offsetof(struct kvd_shape, field), sizeof((struct kvd_shape){0}.field) }
static const struct {
        const char *name;
        size_t at, size;
} fields[] = {
        FIELD(layers),
        FIELD(kv_heads),
        FIELD(head_dim),
        FIELD(block_tokens),
        FIELD(layer_groups),
        FIELD(dtype),
        FIELD(order),
        FIELD(rope),
        FIELD(state_width),
        FIELD(vocab),
        FIELD(block_bytes),
        {"fingerprint", offsetof(struct kvd_shape, fingerprint[0]), 8},
        {"fingerprint", offsetof(struct kvd_shape, fingerprint[1]), 8},
};

static int open_as(const struct kvd_shape *shape, struct space_options options,
                   struct space **ret) {
        struct space_spec spec = {.name = "s", .geometry = *shape, .options = options};
        bool created;

        return space_open(domain, &spec, true, ret, &created);
}

/* Does the shape differ from the space's, once defaults are filled in? */
static bool differs(const struct kvd_shape *shape, const struct space *space, const char **field) {
        struct kvd_shape copy = *shape;
        const char *why;

        if (kvd_shape_normalise(&copy, &why) < 0)
                return false;
        *field = kvd_shape_difference(&space_index(space)->geometry, &copy);
        return *field != NULL;
}

/* Returns 1 if refused as another shape, 0 if the shape is invalid or the same by default. */
static uint32_t expect_refused(const struct kvd_shape *shape, const char *name,
                               struct space *space) {
        const char *field = NULL;
        struct space *ret = NULL;
        bool other = differs(shape, space, &field);
        int r = open_as(shape, (struct space_options){0}, &ret);

        if (!other) {
                ck_assert_msg(r == -EINVAL || (r == 0 && ret == space && !field), "%s: %d", name,
                              r);
                return 0;
        }
        ck_assert_str_eq(field, name);
        ck_assert_msg(r == -EEXIST && strstr(store_why(store), name), "%s: %d, %s", name, r,
                      store_why(store));
        return 1;
}

static uint32_t change_every_field(const struct kvd_shape *base, struct space *space) {
        uint32_t n = 0;

        for (size_t f = 0; f < ARRAY_SIZE(fields); f++)
                for (size_t v = 0; v < ARRAY_SIZE(values); v++) {
                        struct kvd_shape shape = *base;
                        void *at = (uint8_t *)&shape + fields[f].at;

                        if (memcmp(at, &values[v], fields[f].size) == 0)
                                continue;
                        memcpy(at, &values[v], fields[f].size);
                        n += expect_refused(&shape, fields[f].name, space);
                }
        return n;
}

START_TEST(what_does_not_match_is_refused_by_name) {
        uint32_t n = 0;

        for (size_t i = 0; i < ARRAY_SIZE(bases); i++) {
                struct space *space;

                ck_assert_msg(open_as(&bases[i], (struct space_options){.max_blocks = 4}, &space) ==
                                      0,
                              "%s", store_why(store));
                n += change_every_field(&bases[i], space);
                ck_assert_int_eq(space_delete(space, false), 0);
                idle();
        }
        printf("%u pairs of shapes that differ in one field\n", n);
        ck_assert_uint_ge(n, PAIRS);
}
END_TEST

START_TEST(an_opaque_layout_is_compared_to_its_last_letter) {
        struct kvd_shape shape = bases[3];
        struct space *space, *again;

        ck_assert_int_eq(open_as(&shape, (struct space_options){0}, &space), 0);
        memcpy(shape.layout, "onf", 4);
        ck_assert_uint_eq(expect_refused(&shape, "layout", space), 1);
        memcpy(shape.layout, "one1", 5);
        ck_assert_uint_eq(expect_refused(&shape, "layout", space), 1);
        memcpy(shape.layout, "one", 4);
        ck_assert_int_eq(open_as(&shape, (struct space_options){0}, &again), 0);
        ck_assert_ptr_eq(again, space);
}
END_TEST

START_TEST(so_are_kind_keys_and_policy) {
        static const struct {
                struct space_options options;
                const char *name;
        } others[] = {{{.kind = KVD_kind_bidirectional}, "kind"},
                      {{.keys = KVD_keys_max}, "keys"},
                      {{.policy = KVD_policy_fifo}, "policy"}};
        struct space *space, *again;

        ck_assert_int_eq(open_as(&bases[0], (struct space_options){0}, &space), 0);
        for (size_t i = 0; i < ARRAY_SIZE(others); i++) {
                ck_assert_int_eq(open_as(&bases[0], others[i].options, &again), -EEXIST);
                ck_assert_ptr_nonnull(strstr(store_why(store), others[i].name));
        }
        ck_assert_int_eq(open_as(&bases[0], (struct space_options){0}, &again), 0);
}
END_TEST

START_TEST(a_space_is_made_if_asked_and_once) {
        struct space_spec spec = {.name = "s", .geometry = bases[0]};
        struct space *space, *again;
        bool created = true;

        ck_assert_int_eq(space_open(domain, &spec, false, &space, &created), -ENOENT);
        created = false;
        ck_assert_int_eq(space_open(domain, &spec, true, &space, &created), 0);
        ck_assert(created);
        ck_assert_int_eq(space_open(domain, &spec, true, &again, &created), 0);
        ck_assert(!created);
        created = true;
        ck_assert_int_eq(space_open(domain, &spec, false, &again, &created), 0);
        ck_assert(!created);
        ck_assert_ptr_eq(again, space);
}
END_TEST

static void before(void) {
        fixture_open(1 << 16, 16);
}

SUITE("mismatch", FIXTURE(before, fixture_close),
      TESTS(what_does_not_match_is_refused_by_name, an_opaque_layout_is_compared_to_its_last_letter,
            so_are_kind_keys_and_policy, a_space_is_made_if_asked_and_once))
