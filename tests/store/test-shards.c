/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A pool on several GPUs of the stand-in driver: the shards of a segment are made, cleared and
 * handed out together, and a block waits for the streams of all of them. This process plays the
 * worker, and writes the semaphores as streams would.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/device.h"
#include "ipc/base/semaphore.h"
#include "ipc/base/util.h"
#include "store/device/chunk.h"
#include "store/store.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

#define MIB (UINT64_C(1) << 20)
#define CHUNKS 16u

/* Keeps the memory of other tests out of this one's devices. */
static void alone(void) {
        char group[32];

        snprintf(group, sizeof group, "shards%d", getpid());
        setenv("FAKECUDA_GROUP", group, 1);
        setenv("FAKECUDA_DEVICES", "4", 1);
}

static void teardown(void) {
        store = store_free(store);
}

static const struct kvd_cuda *load(void) {
        const char *why = NULL;
        const struct kvd_cuda *cuda = kvd_cuda_load(&why);

        ck_assert_msg(cuda != NULL, "%s", why);
        ck_assert_int_eq(cuda->cuInit(0), CU_OK);
        return cuda;
}

static struct space_spec divided(uint64_t block_bytes) {
        return (struct space_spec){.name = "s",
                                   .geometry = {.block_bytes = block_bytes,
                                                .layout = "test",
                                                .block_tokens = 16}};
}

static int open_space(const struct space_spec *spec, struct space **ret) {
        bool created;

        return space_open(domain, spec, true, ret, &created);
}

/* Opens a pool of CHUNKS segments. 2 MiB on each GPU is the least that a segment has. */
static void open_on(uint32_t gpus) {
        const struct domain_config d = {.name = "d", .client_quota = UINT64_MAX};
        struct store_config c = {.pool_bytes = CHUNKS * gpus * 2 * MIB,
                                 .segment_bytes = gpus * 2 * MIB,
                                 .max_attachments = 8,
                                 .backend = KVD_BACKEND_VMM,
                                 .cuda = load(),
                                 .n_gpus = gpus,
                                 .spill_bytes = MIB};

        for (uint32_t i = 0; i < gpus; i++)
                c.gpus[i] = (struct store_gpu){(int)i, {(uint8_t)(i + 1)}};
        ck_assert_msg(store_new(&c, &store) == 0, "%s", store ? store_why(store) : "");
        ck_assert_int_eq(store_domain(store, &d, &domain), 0);
}

static uint32_t clear_all(void) {
        struct store_clear clear;
        uint32_t n = 0;

        for (; store_next_clear(store, &clear); n += clear.n)
                store_clear_done(store, true);
        return n;
}

static uint32_t n_clean(void) {
        return pool_of(store)->count[CLEAN];
}

START_TEST(a_segment_has_a_shard_on_each_gpu) {
        uint32_t gpus = 1u << _i;
        struct space_spec spec = divided(gpus * MIB);
        uint64_t inodes[4];
        struct attachment *a;
        struct space *space;
        const struct kvd_index *ix;
        kvd_ref block;
        bool writable;

        open_on(gpus);
        clear_all();
        ck_assert_msg(open_space(&spec, &space) == 0, "%s", store_why(store));
        ix = space_index(space);
        ck_assert_uint_eq(ix->n_shards, gpus);
        ck_assert_uint_eq(ix->shard_bytes, MIB);
        ck_assert_uint_eq(ix->devices[gpus - 1][0], gpus);
        ck_assert_int_eq(kvd_index_validate(ix, ix->size), 0);
        a = fixture_attach(space);
        ck_assert_int_eq(space_allocate(a, 1, &block), 1);
        for (uint32_t i = 0; i < gpus; i++) {
                struct stat st;

                ck_assert_int_eq(fstat(space_segment_fd(a, 0, i, &writable), &st), 0);
                ck_assert_uint_eq((uint64_t)st.st_size, kvd_shard_segment(ix));
                inodes[i] = st.st_ino;
                for (uint32_t k = 0; k < i; k++)
                        ck_assert_uint_ne(inodes[k], inodes[i]);
        }
        ck_assert_int_eq(space_segment_fd(a, 0, gpus, &writable), -ENOENT);
        check_clean(space);
}
END_TEST

START_TEST(a_segment_is_on_all_gpus_or_on_none) {
        setenv("FAKECUDA_FAIL", "cuMemCreate:4=2", 1); /* the second segment, on the second GPU */
        open_on(2);
        ck_assert_uint_eq(pool_of(store)->count[DIRTY], 1);
        ck_assert(pool_of(store)->chunks[1].state == MISSING);
        ck_assert_uint_eq(pool_of(store)->chunks[1].shards[0].memory, 0);
        ck_assert_uint_eq(store_make_missing(store), 0);
        ck_assert_uint_eq(clear_all(), 2 * pool_of(store)->n);
        ck_assert_uint_eq(n_clean(), pool_of(store)->n);
}
END_TEST

START_TEST(a_segment_is_clean_once_it_is_on_all_gpus) {
        struct store_clear clear;
        uint32_t n = 0;

        open_on(2);
        for (; store_next_clear(store, &clear) && clear.device[0] == 1; n += clear.n)
                store_clear_done(store, true);
        ck_assert_uint_eq(n, pool_of(store)->n);
        ck_assert_uint_eq(n_clean(), 0);
        ck_assert_uint_eq(clear.device[0], 2);
        store_clear_failed(store);
        ck_assert_uint_eq(n_clean(), 0);
        store_make_missing(store);
        ck_assert_uint_eq(clear_all(), pool_of(store)->n);
        ck_assert_uint_eq(n_clean(), pool_of(store)->n);
}
END_TEST

START_TEST(what_cannot_be_divided_is_refused) {
        struct space_spec odd = divided(3 * 64), planes = divided(0);
        struct space *space;

        planes.geometry = (struct kvd_shape){.layers = 2,
                                             .kv_heads = 2,
                                             .head_dim = 64,
                                             .block_tokens = 16,
                                             .dtype = KVD_dtype_f16,
                                             .vocab = 1000};
        open_on(2);
        ck_assert_int_eq(open_space(&odd, &space), -EINVAL);
        ck_assert_int_eq(open_space(&planes, &space), -EOPNOTSUPP);
        ck_assert_ptr_nonnull(strstr(store_why(store), "only opaque blocks"));
}
END_TEST

/* ---- blocks that several streams write ------------------------------------------------------- */

static struct space *space;
static struct attachment *a, *b;
static uint32_t next_token;

static void open_both(void) {
        struct space_spec spec = divided(2 * MIB);

        alone();
        open_on(2);
        clear_all();
        ck_assert_msg(open_space(&spec, &space) == 0, "%s", store_why(store));
        a = fixture_attach(space);
        b = fixture_attach(space);
}

static void close_both(void) {
        while (store_idle(store))
                ;
        check_clean(space);
        teardown();
}

static shm_u64 *word_of(const struct attachment *of) {
        return (shm_u64 *)space->parts.semaphores->page.at + of->seat * SEMAPHORES;
}

static struct kvd_promise by(const struct attachment *of, uint64_t value) {
        return (struct kvd_promise){value, semaphore_at(of->seat, 0), attachment_writer_token(of)};
}

static int seal_by(struct kvd_promise first, struct kvd_promise second, kvd_ref *ret) {
        const struct kvd_promise both[] = {first, second};
        uint32_t tokens[16];
        kvd_ref block;
        struct seal_request q = {.n_blocks = 1,
                                 .blocks = &block,
                                 .n_tokens = 16,
                                 .tokens = tokens,
                                 .promises = both,
                                 .n_promises = 2};

        ck_assert_int_eq(space_allocate(a, 1, &block), 1);
        for (uint32_t i = 0; i < 16; i++)
                tokens[i] = next_token++;
        return space_seal(a, &q, ret);
}

static kvd_ref seal(uint64_t of_a, uint64_t of_b) {
        kvd_ref ref = 0;

        ck_assert_msg(seal_by(by(a, of_a), by(b, of_b), &ref) == 0, "%s", store_why(store));
        return ref;
}

static const struct kvd_desc *desc_of(kvd_ref ref) {
        return kvd_index_desc(space->ix, kvd_ref_id(ref));
}

static bool waits(kvd_ref ref) {
        store_look_at_semaphores(store);
        return desc_of(ref)->semaphore;
}

static bool is_poisoned(kvd_ref ref) {
        return desc_of(ref)->flags & KVD_DESC_POISONED;
}

START_TEST(a_block_arrives_when_all_have_written) {
        kvd_ref one = seal(1, 1), two = seal(2, 2), three;
        const struct kvd_promise *rest = kvd_index_promises(space->ix, kvd_ref_id(one));

        ck_assert_uint_eq(desc_of(one)->semaphore, by(a, 1).semaphore);
        ck_assert_uint_eq(rest->semaphore, by(b, 1).semaphore);
        ck_assert_uint_eq(rest->value, 1);
        *word_of(a) = 2;
        ck_assert(waits(one) && waits(two));
        *word_of(b) = 1;
        ck_assert(!waits(one) && waits(two));
        three = seal(2, 3);
        ck_assert_uint_eq(desc_of(three)->semaphore, by(b, 3).semaphore);
        ck_assert_uint_eq(kvd_index_promises(space->ix, kvd_ref_id(three))->semaphore, 0);
        *word_of(b) = 3;
        ck_assert(!waits(two) && !waits(three));
        ck_assert_uint_eq(desc_of(seal(2, 3))->semaphore, 0);
        ck_assert_uint_eq(space->ix->n_pending, 0);
}
END_TEST

/* 0: the process and its team are gone; 1: only the process is. */
START_TEST(a_block_is_poisoned_if_one_stream_ends_first) {
        kvd_ref kept = seal(1, 1), lost = seal(2, 2), ret;
        struct kvd_promise next = by(b, 3);
        shm_u64 *word = word_of(b);

        *word = 1;
        if (_i == 0)
                attachment_free(b, true);
        else
                attachment_streams_end(b);
        while (store_idle(store))
                ;
        ck_assert(!is_poisoned(kept) && is_poisoned(lost));
        ck_assert_uint_eq(*word, 2); /* waiting streams go on */
        ck_assert_uint_eq(space->ix->n_pending, 2);
        *word_of(a) = 2;
        ck_assert(!waits(kept));
        ck_assert(is_poisoned(lost));
        ck_assert_uint_eq(space->ix->n_pending, 0);
        ck_assert_int_eq(seal_by(by(a, 3), next, &ret), -EINVAL);
}
END_TEST

START_TEST(a_stream_that_ends_after_its_write_loses_nothing) {
        kvd_ref ref = seal(1, 1);

        ck_assert_uint_eq(desc_of(ref)->semaphore, by(a, 1).semaphore);
        *word_of(a) = 1;
        attachment_streams_end(a);
        while (store_idle(store))
                ;
        ck_assert(waits(ref) && !is_poisoned(ref));
        check_clean(space);
        *word_of(b) = 1;
        ck_assert(!waits(ref));
}
END_TEST

START_TEST(promises_that_nobody_made_are_refused) {
        struct kvd_promise other = by(b, 1);
        kvd_ref ret;

        other.semaphore += SEMAPHORES;
        ck_assert_int_eq(seal_by(by(a, 1), other, &ret), -EINVAL);
        ck_assert_int_eq(seal_by(by(a, 1), by(b, 0), &ret), -EINVAL);
        ck_assert_int_eq(seal_by(by(a, 1), by(b, SEMAPHORE_ENDED), &ret), -EINVAL);
        ck_assert_int_eq(seal_by(by(a, 1), by(b, UINT64_C(1) << 33), &ret), -EINVAL);
        ck_assert_uint_eq(space->ix->n_pending, 0);
}
END_TEST

/* A record of a process that has ended, whose seat another one has. */
START_TEST(a_promise_of_an_earlier_client_is_refused) {
        struct kvd_promise old = by(b, 1);
        uint32_t seat = b->seat;
        kvd_ref ret;

        *word_of(b) = 1;
        ck_assert_int_eq(seal_by(by(a, 1), old, &ret), 0);
        attachment_free(b, false);
        while (store_idle(store))
                ;
        b = fixture_attach(space);
        ck_assert_uint_eq(b->seat, seat);
        ck_assert_int_eq(seal_by(by(a, 1), old, &ret), -EINVAL);
        ck_assert_int_eq(seal_by(by(a, 1), by(b, 2), &ret), 0);
        *word_of(a) = 1;
        *word_of(b) = 2;
        ck_assert(!waits(ret));
}
END_TEST

/* The next daemon's page begins with zeros, and gives the same seats. */
START_TEST(a_promise_of_another_life_is_refused) {
        struct kvd_promise old = by(b, 1);
        kvd_ref ret;

        *word_of(a) = *word_of(b) = 1;
        teardown();
        open_both();
        ck_assert_uint_eq(by(b, 1).semaphore, old.semaphore);
        ck_assert_int_eq(seal_by(by(a, 1), old, &ret), -EINVAL);
        *word_of(b) = 1;
        ck_assert_int_eq(seal_by(by(a, 1), old, &ret), -EINVAL);
        ck_assert_uint_eq(space->ix->n_pending, 0);
}
END_TEST

static kvd_ref seal_alone(struct attachment *by, uint64_t value) {
        uint32_t tokens[16] = {next_token++};
        kvd_ref block, ref;
        struct seal_request q = {.n_blocks = 1,
                                 .blocks = &block,
                                 .n_tokens = 16,
                                 .tokens = tokens,
                                 .semaphore = 1,
                                 .semaphore_value = value};

        ck_assert_int_eq(space_allocate(by, 1, &block), 1);
        ck_assert_msg(space_seal(by, &q, &ref) == 0, "%s", store_why(store));
        return ref;
}

/* 0: the other client has ended; 1: it lives, and has sealed many such blocks. */
START_TEST(a_client_cannot_delay_blocks_of_another) {
        uint32_t n = _i == 0 ? 1 : 9;
        kvd_ref far[9], ref;

        for (uint32_t i = 0; i < n; i++)
                far[i] = seal(1, (UINT64_C(1) << 32) - i);
        if (_i == 0)
                attachment_free(a, true);
        while (store_idle(store))
                ;
        ref = seal_alone(b, 1);
        ck_assert(waits(ref));
        *word_of(b) = 1;
        ck_assert(!waits(ref));
        for (uint32_t i = 0; _i == 1 && i < n; i++)
                ck_assert(waits(far[i]));
        ck_assert_uint_eq(counter(space, KVD_SPACE_POISONED), _i == 0 ? n : 0);
        ck_assert_uint_eq(space->ix->n_pending, _i == 0 ? 0 : n);
        if (_i == 1)
                *word_of(a) = 1;
        if (_i == 1)
                *word_of(b) = UINT64_C(1) << 32;
        while (store_idle(store))
                ;
        store_look_at_semaphores(store);
}
END_TEST

/* Among blocks that have to wait, more than one look examines. */
START_TEST(a_block_arrives_though_earlier_ones_wait) {
        kvd_ref early[20], late;

        for (uint32_t i = 0; i < ARRAY_SIZE(early); i++)
                early[i] = seal(1, 100 - i);
        late = seal(1, 1);
        *word_of(a) = *word_of(b) = 1;
        waits(late);
        ck_assert(!waits(late));
        for (uint32_t i = 0; i < ARRAY_SIZE(early); i++)
                ck_assert(waits(early[i]));
        *word_of(b) = 100;
        waits(early[0]);
        ck_assert(!waits(early[0]));
        ck_assert_uint_eq(space->ix->n_pending, 0);
}
END_TEST

SUITE("shards", FIXTURE(alone, teardown), LOOPS(3, a_segment_has_a_shard_on_each_gpu),
      TESTS(a_segment_is_on_all_gpus_or_on_none, a_segment_is_clean_once_it_is_on_all_gpus,
            what_cannot_be_divided_is_refused),
      CASE("promises"), FIXTURE(open_both, close_both),
      TESTS(a_block_arrives_when_all_have_written, a_stream_that_ends_after_its_write_loses_nothing,
            promises_that_nobody_made_are_refused, a_promise_of_an_earlier_client_is_refused,
            a_promise_of_another_life_is_refused, a_block_arrives_though_earlier_ones_wait),
      LOOPS(2, a_client_cannot_delay_blocks_of_another),
      LOOPS(2, a_block_is_poisoned_if_one_stream_ends_first))
