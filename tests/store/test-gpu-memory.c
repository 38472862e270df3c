/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The store's GPU memory, on the stand-in driver: chunks, the clients that have mapped them, and
 * the spaces that get them next. This process plays the worker (it reports cleared memory) and the
 * clients (it reports what they unmapped). The inode of its descriptor identifies a chunk.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/device.h"
#include "ipc/base/util.h"
#include "store/store.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

#define MIB (UINT64_C(1) << 20)
#define CHUNKS 16u
#define MANY 68u /* chunks: more than the bits of a word */

static struct domain *domains[2];
static const struct kvd_cuda *cuda;
static uint64_t reserve_bytes;
static uint32_t n_chunks = CHUNKS;

static const struct kvd_cuda *load(void) {
        const char *why = NULL;

        cuda = kvd_cuda_load(&why);
        ck_assert_msg(cuda != NULL, "%s", why);
        ck_assert_int_eq(cuda->cuInit(0), CU_OK);
        return cuda;
}

/* Opens a pool with segments of 4 MiB. */
static int open_pool(void) {
        struct store_config c = {.pool_bytes = n_chunks * 4 * MIB,
                                 .segment_bytes = 4 * MIB,
                                 .max_attachments = 8,
                                 .backend = KVD_BACKEND_VMM,
                                 .cuda = load(),
                                 .n_gpus = 1,
                                 .nodes = 5, /* of the host's memory: no matter here */
                                 .reserve_bytes = reserve_bytes,
                                 .spill_bytes = MIB};
        int r = store_new(&c, &store);

        for (int i = 0; r == 0 && i < 2; i++) {
                struct domain_config d = {.client_quota = UINT64_MAX};

                snprintf(d.name, sizeof d.name, "d%d", i);
                ck_assert_int_eq(store_domain(store, &d, &domains[i]), 0);
        }
        return r;
}

static uint32_t clear_all(void) {
        struct store_clear clear;
        uint32_t all = 0;

        while (store_next_clear(store, &clear)) {
                ck_assert_uint_eq(clear.bytes, 4 * MIB);
                store_clear_done(store, true);
                all += clear.n;
        }
        return all;
}

/* Keeps the memory of other tests out of this one's device. */
static void alone(void) {
        char group[32];

        snprintf(group, sizeof group, "store%d", getpid());
        setenv("FAKECUDA_GROUP", group, 1);
}

static void setup(void) {
        alone();
        ck_assert_msg(open_pool() == 0, "%s", store ? store_why(store) : "");
        ck_assert_uint_eq(clear_all(), n_chunks);
}

static void setup_many(void) {
        n_chunks = MANY;
        setup();
}

static void teardown(void) {
        store = store_free(store);
}

static struct space *make(struct domain *owner, const char *name, uint32_t layers) {
        struct space_spec spec = {.geometry = {.layers = layers,
                                               .kv_heads = 4,
                                               .head_dim = 128,
                                               .block_tokens = 16,
                                               .dtype = KVD_dtype_f16,
                                               .vocab = 1000}};
        struct space *space;
        bool created;

        snprintf(spec.name, sizeof spec.name, "%s", name);
        ck_assert_msg(space_open(owner, &spec, true, &space, &created) == 0, "%s",
                      store_why(store));
        return space;
}

#define A_MIB 32u /* number of layers that makes blocks of 1 MiB */

static uint64_t chunk_of(struct attachment *a, uint32_t segment) {
        struct stat st;
        bool writable;
        int fd = space_segment_fd(a, segment, 0, &writable);

        ck_assert_msg(fd >= 0, "%s", store_why(store));
        ck_assert_int_eq(fstat(fd, &st), 0);
        return st.st_ino;
}

static int fd_of(struct attachment *a, uint32_t segment) {
        bool writable;

        return space_segment_fd(a, segment, 0, &writable);
}

static uint32_t take(struct attachment *a, uint32_t n, kvd_ref *refs) {
        uint32_t got = 0;
        int r = 1;

        while (got < n && r > 0) {
                r = space_allocate(a, n - got, refs + got);
                got += r > 0 ? (uint32_t)r : 0;
        }
        return got;
}

static struct store_clears clears(void) {
        struct store_clears c;

        store_clears(store, &c);
        return c;
}

/* ---- start ----------------------------------------------------------------------------------- */

START_TEST(nobody_gets_what_is_not_clear) {
        struct attachment *a;
        kvd_ref ref;

        ck_assert_int_eq(open_pool(), 0);
        a = fixture_attach(make(domains[0], "s", A_MIB));
        ck_assert_uint_eq(clears().dirty, CHUNKS);
        ck_assert_int_eq(space_allocate(a, 1, &ref), -ENOBUFS);
        ck_assert_uint_eq(clear_all(), CHUNKS);
        ck_assert_int_eq(space_allocate(a, 1, &ref), 1);
        ck_assert_uint_eq(clears().clean, CHUNKS - 1);
        check_clean(attachment_space(a));
}
END_TEST

START_TEST(a_worker_that_dies_has_cleared_nothing) {
        struct store_clear clear;

        ck_assert_int_eq(open_pool(), 0);
        ck_assert(store_next_clear(store, &clear) && clear.n == STORE_CLEARS);
        store_worker_gone(store);
        ck_assert_uint_eq(clears().clean, 0);
        ck_assert_uint_eq(clears().dirty, CHUNKS);
        ck_assert(store_next_clear(store, &clear) && clear.n == STORE_CLEARS);
        store_clear_failed(store);
        ck_assert(!store_wants_clearing(store));
        store_make_missing(store);
        ck_assert(store_wants_clearing(store));
}
END_TEST

static const char *const failures[] = {"cuMemCreate:1=2", "cuMemCreate:3=2", "cuMemCreate:16=999"};

START_TEST(what_the_driver_does_not_give_comes_later) {
        setenv("FAKECUDA_FAIL", failures[_i], 1);
        ck_assert_int_eq(open_pool(), 0);
        ck_assert_uint_ge(clears().missing, 1);
        ck_assert_uint_eq(store_make_missing(store), 0);
        ck_assert_uint_eq(clear_all(), CHUNKS);
}
END_TEST

START_TEST(a_driver_that_gives_nothing_is_refused) {
        setenv("FAKECUDA_FAIL", "cuMemCreate:1=999", 1);
        ck_assert_int_lt(open_pool(), 0);
        ck_assert_ptr_nonnull(strstr(store_why(store), "4 MiB cannot be allocated"));
}
END_TEST

START_TEST(no_descriptor_is_an_error_and_no_loss) {
        struct attachment *a;
        struct space *space;
        kvd_ref ref;

        setenv("FAKECUDA_FAIL", "cuMemExportToShareableHandle:1=999", 1);
        ck_assert_int_eq(open_pool(), 0);
        ck_assert_uint_eq(clear_all(), CHUNKS); /* one chunk is cleared in a second round */
        space = make(domains[0], "s", A_MIB);
        a = fixture_attach(space);
        ck_assert_int_eq(space_allocate(a, 1, &ref), 1);
        ck_assert_int_ge(fd_of(a, 0), 0);
        ck_assert_int_eq(fd_of(a, 1), -ENOENT);
}
END_TEST

/* ---- blocks ---------------------------------------------------------------------------------- */

/* 25 or 26 blocks of 160 KiB lie in 4 MiB. A block that would span two segments is not used. */
START_TEST(no_block_lies_across_two_segments) {
        struct space *space = make(domains[0], "s", 5);
        const struct kvd_index *ix = space_index(space);
        struct attachment *a = fixture_attach(space);
        kvd_ref refs[500];
        uint32_t n = take(a, ARRAY_SIZE(refs), refs), most = CHUNKS * 25;

        ck_assert_uint_eq(ix->segment_blocks, 25);
        ck_assert_uint_ge(n, most - CHUNKS);
        ck_assert_uint_le(n, most);
        for (uint32_t i = 0; i < n; i++) {
                uint64_t at = kvd_ref_id(refs[i]) * ix->block_bytes;

                ck_assert_uint_eq(at / ix->segment_bytes,
                                  (at + ix->block_bytes - 1) / ix->segment_bytes);
        }
        check_clean(space);
        ck_assert_uint_eq(space_release(a, refs, n), n);
        check_clean(space);
}
END_TEST

/* The GPU's memory is on no NUMA node, so one segment is as near as another. */
START_TEST(a_client_near_a_node_fills_one_segment_after_the_other) {
        struct space *space = make(domains[0], "s", 5);
        struct attachment *a = fixture_attach(space);
        kvd_ref refs[12];

        attachment_near(a, 1);
        for (int i = 0; i < 3; i++)
                ck_assert_uint_eq(take(a, 4, refs + 4 * i), 4);
        ck_assert_uint_eq(space_index(space)->n_segments, 1);
}
END_TEST

START_TEST(blocks_that_do_not_fit_are_refused) {
        struct space_spec spec = {.name = "s",
                                  .geometry = {.layers = 5 * A_MIB,
                                               .kv_heads = 4,
                                               .head_dim = 128,
                                               .dtype = KVD_dtype_f16,
                                               .vocab = 1000}};
        struct space *space;
        bool created;

        ck_assert_int_eq(space_open(domains[0], &spec, true, &space, &created), -E2BIG);
        ck_assert_ptr_nonnull(strstr(store_why(store), "set segment"));
}
END_TEST

/* ---- giving back ----------------------------------------------------------------------------- */

/*
 * A space with segments of 4 blocks, which are all free again, and two clients that have mapped
 * them.
 */
struct drained {
        struct space *space;
        struct attachment *a, *b;
        uint64_t chunk[MANY];
        kvd_ref refs[MANY * 4];
};

static void fill_and_free(struct drained *d, struct domain *owner, uint32_t n) {
        d->space = make(owner, "s", A_MIB);
        d->a = fixture_attach(d->space);
        d->b = fixture_attach(d->space);
        ck_assert_uint_eq(take(d->a, n * 4, d->refs), n * 4);
        for (uint32_t i = 0; i < n; i++) {
                d->chunk[i] = chunk_of(d->a, i);
                ck_assert_uint_eq(chunk_of(d->b, i), d->chunk[i]);
        }
        ck_assert_uint_eq(space_release(d->a, d->refs, n * 4), n * 4);
}

static void shrink(struct drained *d, const char *to) {
        ck_assert_int_eq(space_set(d->space, "max_blocks", to), 0);
        idle();
}

START_TEST(a_segment_is_free_when_all_have_unmapped_it) {
        struct drained d;
        uint32_t wanted[CHUNKS], epoch, n;

        fill_and_free(&d, domains[0], 2);
        epoch = space_index(d.space)->drain_epoch;
        ck_assert_uint_eq(attachment_drain(d.a, NULL, 0, wanted, CHUNKS), 0);
        shrink(&d, "4");
        ck_assert_uint_eq(space_index(d.space)->drain_epoch, epoch + 1);
        n = attachment_drain(d.a, NULL, 0, wanted, CHUNKS);
        ck_assert_uint_eq(n, 1);
        ck_assert_int_eq(fd_of(d.a, wanted[0]), -ENODATA);
        ck_assert_uint_eq(attachment_drain(d.b, NULL, 0, wanted, CHUNKS), 1);
        ck_assert_uint_eq(attachment_drain(d.a, wanted, 1, wanted + 1, 1), 0);
        idle();
        ck_assert_uint_eq(clears().dirty, 0);
        check_clean(d.space);
        ck_assert_uint_eq(attachment_drain(d.b, wanted, 1, wanted + 1, 1), 0);
        idle();
        ck_assert_uint_eq(clears().dirty, 1); /* not cleared yet */
        ck_assert_uint_eq(clear_all(), 1);
        check_clean(d.space);
}
END_TEST

START_TEST(each_of_many_segments_is_asked_for) {
        struct drained d;
        uint32_t wanted[MANY], more;
        struct attachment *of_one;

        fill_and_free(&d, domains[0], MANY);
        of_one = fixture_attach(d.space);
        chunk_of(of_one, MANY - 2);
        shrink(&d, "4");
        ck_assert_uint_eq(attachment_drain(of_one, NULL, 0, wanted, MANY), 1);
        ck_assert_uint_eq(wanted[0], MANY - 2);
        ck_assert_uint_eq(attachment_drain(of_one, wanted, 1, &more, 1), 0);
        ck_assert_uint_eq(attachment_drain(d.a, NULL, 0, wanted, MANY), MANY - 1);
        ck_assert_uint_eq(attachment_drain(d.b, NULL, 0, wanted, MANY), MANY - 1);
        ck_assert_uint_eq(attachment_drain(d.a, wanted, MANY - 1, &more, 1), 0);
        idle();
        ck_assert_uint_eq(clears().dirty, 0);
        ck_assert_uint_eq(attachment_drain(d.b, wanted, MANY - 1, &more, 1), 0);
        idle();
        ck_assert_uint_eq(clears().dirty, MANY - 1);
        check_clean(d.space);
}
END_TEST

START_TEST(what_nobody_was_asked_about_comes_back_as_it_is) {
        struct drained d;
        kvd_ref refs[8];
        uint32_t segment;

        fill_and_free(&d, domains[0], 2);
        shrink(&d, "4");
        ck_assert_int_eq(space_set(d.space, "max_blocks", "60"), 0);
        ck_assert_uint_eq(take(d.a, 8, refs), 8);
        for (uint32_t i = 0; i < 8; i++) {
                segment = kvd_segment_of(space_index(d.space), kvd_ref_id(refs[i]));
                ck_assert_uint_lt(segment, 2);
                ck_assert_uint_eq(chunk_of(d.a, segment), d.chunk[segment]);
        }
        check_clean(d.space);
}
END_TEST

START_TEST(what_somebody_is_about_to_unmap_gets_no_block) {
        struct drained d;
        uint32_t wanted;
        kvd_ref refs[8];

        fill_and_free(&d, domains[0], 2);
        shrink(&d, "4");
        ck_assert_uint_eq(attachment_drain(d.a, NULL, 0, &wanted, 1), 1);
        ck_assert_int_eq(space_set(d.space, "max_blocks", "60"), 0);
        ck_assert_uint_eq(take(d.a, 8, refs), 8);
        for (uint32_t i = 0; i < 8; i++)
                ck_assert_uint_ne(kvd_segment_of(space_index(d.space), kvd_ref_id(refs[i])),
                                  wanted);
        check_clean(d.space);
        /*
         * The client that was asked has unmapped the segment. The other one was not asked and still
         * has it mapped, so the segment may have blocks again.
         */
        ck_assert_uint_eq(attachment_drain(d.a, &wanted, 1, NULL, 0), 0);
        ck_assert_uint_eq(take(d.a, 4, refs), 4);
        ck_assert_uint_eq(kvd_segment_of(space_index(d.space), kvd_ref_id(refs[0])), wanted);
        ck_assert_uint_eq(chunk_of(d.b, wanted), d.chunk[wanted]);
        check_clean(d.space);
}
END_TEST

START_TEST(the_dead_have_nothing_mapped) {
        struct drained d;

        fill_and_free(&d, domains[0], 2);
        shrink(&d, "4");
        attachment_orphan(d.a); /* its process may still run */
        attachment_free(d.b, true);
        idle();
        ck_assert_uint_eq(clears().dirty, 0);
        attachment_free(d.a, true);
        idle();
        ck_assert_uint_eq(clears().dirty, 1);
        check_clean(d.space);
}
END_TEST

START_TEST(a_worker_unmaps_last) {
        struct drained d;
        struct space *space = NULL;
        uint32_t segment, wanted;

        fill_and_free(&d, domains[0], 2);
        for (uint32_t i = 0; i < 2; i++)
                ck_assert_int_ge(space_worker_segment_fd(d.space, i), 0);
        attachment_free(d.b, false);
        shrink(&d, "4");
        ck_assert(!store_next_unmap(store, &space, &segment));
        ck_assert_uint_eq(attachment_drain(d.a, NULL, 0, &wanted, 1), 1);
        ck_assert_uint_eq(attachment_drain(d.a, &wanted, 1, NULL, 0), 0);
        ck_assert(store_next_unmap(store, &space, &segment));
        ck_assert_ptr_eq(space, d.space);
        ck_assert_uint_eq(segment, wanted);
        ck_assert_uint_eq(space_memory_version(space, segment), 0);
        idle();
        ck_assert_uint_eq(clears().dirty, 0);
        if (_i == 0)
                space_worker_unmapped(space, segment);
        else
                store_worker_gone(store);
        idle();
        ck_assert_uint_eq(clears().dirty, 1);
        check_clean(d.space);
}
END_TEST

/* ---- domains --------------------------------------------------------------------------------- */

/* One domain takes all that it can get from another one, whose clients unmap when asked. */
START_TEST(a_chunk_never_changes_domains) {
        struct drained d;
        struct attachment *other = fixture_attach(make(domains[1], "t", A_MIB));
        uint32_t wanted[CHUNKS], n, got = 0;
        kvd_ref refs[CHUNKS * 4];

        fill_and_free(&d, domains[0], CHUNKS);
        for (int round = 0; round < 100; round++) {
                got += take(other, ARRAY_SIZE(refs) - got, refs + got);
                n = attachment_drain(d.a, NULL, 0, wanted, CHUNKS);
                attachment_drain(d.a, wanted, n, NULL, 0);
                attachment_drain(d.b, wanted, n, NULL, 0);
                idle();
                clear_all();
        }
        ck_assert_uint_ge(got, 4 * (CHUNKS / 2 - 1));
        for (uint32_t i = 0; i < got / 4; i++)
                for (uint32_t k = 0; k < CHUNKS; k++)
                        ck_assert_uint_ne(chunk_of(other, i), d.chunk[k]);
        check_clean(d.space);
        check_clean(attachment_space(other));
}
END_TEST

/*
 * The pool is all of the device's memory. Memory that a client still holds of a deleted space is
 * missing until the client closes it.
 */
START_TEST(memory_that_is_held_is_missing) {
        struct drained d;
        int held;

        setenv("FAKECUDA_MEMORY", "64M", 1);
        setup();
        fill_and_free(&d, domains[0], 2);
        held = dup(fd_of(d.a, 0));
        ck_assert_int_eq(space_delete(d.space, true), 0);
        idle();
        ck_assert_uint_eq(clears().missing, 1);
        ck_assert_uint_eq(store_make_missing(store), 1);
        ck_assert_ptr_nonnull(strstr(store_why(store), "OUT_OF_MEMORY"));
        close(held);
        ck_assert_uint_eq(store_make_missing(store), 0);
        ck_assert_uint_eq(clear_all(), 2);
        ck_assert_uint_eq(clears().clean, CHUNKS);
}
END_TEST

static cu_result create(uint64_t bytes, cu_memory *ret) {
        const struct cu_allocation what = {.type = CU_ALLOCATION_PINNED,
                                           .handle_types = CU_HANDLE_POSIX_FD,
                                           .location = {CU_LOCATION_DEVICE, 0}};

        return cuda->cuMemCreate(ret, bytes, &what, 0);
}

/*
 * Contexts are created after the pool, so a reserve of device memory stays free, both when the pool
 * is created and when missing memory is made later.
 */
START_TEST(a_reserve_is_left_for_contexts) {
        cu_memory rest[2];

        setenv("FAKECUDA_MEMORY", "64M", 1);
        reserve_bytes = 8 * MIB;
        ck_assert_int_eq(open_pool(), 0);
        ck_assert_uint_eq(clears().missing, 2);
        ck_assert_uint_eq(store_make_missing(store), 2);
        ck_assert_int_eq(create(8 * MIB, &rest[0]), CU_OK);
        ck_assert_int_ne(create(4 * MIB, &rest[1]), CU_OK);
        ck_assert_uint_eq(store_make_missing(store), 2);
        ck_assert_ptr_nonnull(strstr(store_why(store), "to keep free (reserve)"));
        ck_assert_uint_eq(clear_all(), CHUNKS - 2);
        ck_assert_int_eq(cuda->cuMemRelease(rest[0]), CU_OK);
}
END_TEST

/* ---- at random ------------------------------------------------------------------------------- */

struct client {
        struct attachment *a;
        kvd_ref refs[64];
        uint32_t n;
        bool mapped[64];
};

static void client_step(struct client *c, uint32_t what) {
        uint32_t wanted[64], n;
        kvd_ref ref;

        if (what < 40 && c->n < 64 && space_allocate(c->a, 1, &ref) == 1) {
                uint32_t segment = kvd_segment_of(space_index(attachment_space(c->a)),
                                                  kvd_ref_id(ref));

                c->refs[c->n++] = ref;
                ck_assert_int_ge(fd_of(c->a, segment), 0);
                c->mapped[segment] = true;
        } else if (what < 80 && c->n) {
                n = what % c->n;
                ck_assert_uint_eq(space_release(c->a, &c->refs[n], 1), 1);
                c->refs[n] = c->refs[--c->n];
        } else if (what < 90) {
                n = attachment_drain(c->a, NULL, 0, wanted, 64);
                for (uint32_t i = 0; i < n; i++) {
                        ck_assert(c->mapped[wanted[i]]);
                        for (uint32_t k = 0; k < c->n; k++)
                                ck_assert_uint_ne(kvd_segment_of(space_index(
                                                                         attachment_space(c->a)),
                                                                 kvd_ref_id(c->refs[k])),
                                                  wanted[i]);
                        c->mapped[wanted[i]] = false;
                }
                attachment_drain(c->a, wanted, n, NULL, 0);
        } else if (what < 92) {
                struct space *space = attachment_space(c->a);

                attachment_free(c->a, true);
                *c = (struct client){.a = fixture_attach(space)};
        }
}

START_TEST(at_random) {
        struct space *spaces[3] = {make(domains[0], "s", A_MIB), make(domains[0], "t", 5),
                                   make(domains[1], "s", 24)};
        struct client clients[6] = {0};

        srand(1 + (unsigned)_i);
        for (int i = 0; i < 6; i++)
                clients[i].a = fixture_attach(spaces[i / 2]);
        for (int i = 0; i < 20000; i++) {
                client_step(&clients[rand() % 6], (uint32_t)rand() % 100);
                if (rand() % 4 == 0)
                        store_idle(store);
                if (rand() % 8 == 0)
                        clear_all();
                if (i % 50 == 0)
                        for (int k = 0; k < 3; k++)
                                check_clean(spaces[k]);
        }
        for (int i = 0; i < 6; i++)
                attachment_free(clients[i].a, false);
        for (int k = 0; k < 3; k++)
                ck_assert_int_eq(space_delete(spaces[k], false), 0);
        idle();
        clear_all();
        ck_assert_uint_eq(clears().clean, CHUNKS);
}
END_TEST

SUITE("device", FIXTURE(alone, teardown),
      TESTS(nobody_gets_what_is_not_clear, a_worker_that_dies_has_cleared_nothing),
      LOOPS(3, what_the_driver_does_not_give_comes_later),
      TESTS(a_driver_that_gives_nothing_is_refused, no_descriptor_is_an_error_and_no_loss,
            memory_that_is_held_is_missing, a_reserve_is_left_for_contexts),
      CASE("pool"), FIXTURE(setup, teardown),
      TESTS(no_block_lies_across_two_segments,
            a_client_near_a_node_fills_one_segment_after_the_other,
            blocks_that_do_not_fit_are_refused, a_segment_is_free_when_all_have_unmapped_it,
            what_nobody_was_asked_about_comes_back_as_it_is,
            what_somebody_is_about_to_unmap_gets_no_block, the_dead_have_nothing_mapped),
      LOOPS(2, a_worker_unmaps_last), TESTS(a_chunk_never_changes_domains), LOOPS(3, at_random),
      CASE("many"), FIXTURE(setup_many, teardown), TESTS(each_of_many_segments_is_asked_for))
