/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What only a GPU's pool takes over: chunks of device memory, and blocks whose data a stream may
 * not have written yet when the daemon ended. This process plays the streams: it writes the
 * semaphores.
 */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/device.h"
#include "ipc/base/semaphore.h"
#include "ipc/base/sys.h"
#include "store/device/chunk.h"
#include "tests/lib/suite.h"
#include "tests/store/adopting.h"

static struct kept_file *kept_named(const char *what) {
        for (size_t i = 0; i < n_kept; i++)
                if (strstr(kept[i].name, what))
                        return &kept[i];
        return NULL;
}

static uint64_t inode_of(int fd) {
        struct stat st;

        ck_assert_int_eq(fstat(fd, &st), 0);
        return st.st_ino;
}

/* A chain whose last n_late blocks wait until the client's semaphore 0 has the value. */
static void make_late_chain(struct attachment *a, struct chain *c, uint32_t n, uint32_t n_late,
                            uint64_t value) {
        struct seal_request q = {.n_blocks = n_late,
                                 .n_tokens = n_late * BT,
                                 .semaphore = 1,
                                 .semaphore_value = value};
        kvd_ref blocks[CHAIN];

        make_chain(a, c, n - n_late, 0, 1, 0, 0);
        for (uint32_t i = c->n * BT; i < n * BT; i++)
                c->tokens[i] = (7919 + i * 13) % 100000;
        ck_assert_int_eq(space_allocate(a, n_late, blocks), (int)n_late);
        q.blocks = blocks;
        q.parent = c->refs[c->n - 1];
        q.tokens = c->tokens + c->n * BT;
        ck_assert_msg(space_seal(a, &q, c->refs + c->n) == 0, "%s", store_why(store));
        c->n = n;
}

static shm_u64 *semaphore_words(const struct space *s) {
        return s->parts.semaphores->page.at;
}

static shm_u64 *words_of(struct attachment *a) {
        return semaphore_words(attachment_space(a)) + attachment_semaphore_row(a) * SEMAPHORES;
}

/* How many of a chain the next daemon finds. */
static uint32_t found_next(const struct chain *c) {
        struct space *space;

        if (store)
                kill_daemon();
        next_daemon();
        space = space_again("s");
        ck_assert_msg(space != NULL, "%s", last_said);
        check_clean(space);
        return found(space, c);
}

static struct attachment *old_client(struct space *space) {
        for (uint32_t i = 0; i < space->n_attachments; i++)
                if (space->attachments[i] && space->attachments[i]->kept.is)
                        return space->attachments[i];
        ck_abort_msg("nobody");
}

/* ---- data that comes late -------------------------------------------------------------------- */

static const struct {
        bool before, after; /* does the stream write while the daemon lives, or after? */
        bool seen;          /* did the daemon see the write? */
        uint32_t found;
} arrivals[] = {{true, false, true, 20},
                {true, false, false, 20},
                {false, true, false, 20},
                {false, false, false, 12}};

START_TEST(a_block_is_taken_over_if_its_data_is_there) {
        struct space *space = fixture_space("s", POOL);
        struct attachment *a = attach_kept(space, getpid());
        static struct chain chain;

        make_late_chain(a, &chain, 20, 8, 5);
        atomic_store(&words_of(a)[0], arrivals[_i].before ? 5 : 4);
        if (arrivals[_i].seen)
                store_look_at_semaphores(store);
        ck_assert_uint_eq(atomic_load(&space->ix->n_pending), arrivals[_i].seen ? 0 : 8);
        kill_daemon();
        if (arrivals[_i].after)
                atomic_store(&words_of(a)[0], 5);
        ck_assert_uint_eq(found_next(&chain), arrivals[_i].found);
        space = space_again("s");
        ck_assert_uint_eq(atomic_load(&space->ix->n_pending), 0);
        ck_assert_uint_eq(usage_of(space).limbo, 20 - arrivals[_i].found);
        ck_assert_uint_eq(found_next(&chain), arrivals[_i].found); /* the next one, too */
}
END_TEST

/* The semaphore page tells waiting readers: no process can write the previous index. */
START_TEST(waiters_for_a_client_that_died_before_are_told) {
        struct space *space = fixture_space("s", POOL);
        pid_t child = fork();
        struct attachment *a;
        static struct chain chain;
        struct store_wake wake;
        shm_u64 *words;
        kvd_ref ref;

        if (child == 0) {
                pause();
                _exit(0);
        }
        a = attach_kept(space, child);
        make_late_chain(a, &chain, 20, 8, 5);
        words = words_of(a);
        atomic_store(&words[0], 4);
        kill_daemon();
        ck_assert_uint_eq(found_next(&chain), 12);
        space = space_again("s");
        store_set_wakes(store, true);
        look();
        ck_assert_uint_eq(atomic_load(&words[0]), 4);
        squeeze(space);
        ck_assert_uint_eq(usage_of(space).limbo, 8);

        store->config.quarantine_ns = UINT64_C(1) << 62;
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        look();
        ck_assert_uint_eq(atomic_load(&words[0]), 4); /* its last work may still run */
        ck_assert_uint_eq(usage_of(space).limbo, 8);
        store->config.quarantine_ns = 0;
        look();
        ck_assert_uint_eq(atomic_load(&words[0]), SEMAPHORE_ENDED + 4);
        ck_assert(semaphore_was_reached(atomic_load(&words[0]), 4));
        ck_assert(!semaphore_was_reached(atomic_load(&words[0]), 5));
        ck_assert_uint_eq(usage_of(space).limbo, 0);
        ck_assert_int_eq(space_allocate(fixture_attach(space), 1, &ref), 1);

        ck_assert(store_next_wake(store, &wake)); /* in the previous daemon's page */
        ck_assert_uint_eq(wake.n, SEMAPHORES);
        ck_assert_uint_eq(wake.words[1], SEMAPHORE_ENDED + 4);
        ck_assert_uint_eq(inode_of(wake.fd), inode_of(kept_named(".w.1")->fd));
        store_wake_done(store, true);
        idle();
        ck_assert_ptr_null(kept_named(".w.1"));
        check_clean(space);
}
END_TEST

/* A client's old semaphore page is kept as long as the client lives, over all restarts. */
START_TEST(a_client_keeps_its_page_over_many_daemons) {
        struct space *space = fixture_space("s", POOL);
        struct attachment *a = attach_kept(space, getpid());
        shm_u64 *words = words_of(a);
        static struct chain chain;
        struct kvd_pin_words *pins = map_pins(a);

        make_late_chain(a, &chain, 20, 8, 5);
        for (uint32_t i = 0; i < 3; i++) {
                restart((int)i % 2);
                space = space_again("s");
                ck_assert_msg(space != NULL, "%s", last_said);
                ck_assert_uint_eq(found(space, &chain), 12);
                ck_assert_uint_eq(semaphores_before(space), 1);
                ck_assert_ptr_nonnull(kept_named(".w.1"));
                ck_assert_uint_eq(atomic_load(&words[0]), 0);
        }
        atomic_store(&page_of(pins)->left, 1);
        look();
        ck_assert_uint_eq(atomic_load(&words[0]), SEMAPHORE_ENDED);
        ck_assert_uint_eq(semaphores_before(space), 0);
        ck_assert_ptr_null(kept_named(".w.1"));
        ck_assert_uint_eq(n_kept, 2 + space_index(space)->n_segments);
        check_clean(space);
}
END_TEST

static int no_page(void) {
        return -1;
}

static int short_page(void) {
        struct shared_file file;

        ck_assert_int_eq(shared_file_new("short", 64, 0, &file), 0);
        return file.fd;
}

static int unsealed_page(void) {
        int fd = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);

        ck_assert_int_eq(ftruncate(fd, 4096), 0);
        return fd;
}

static int no_memory_at_all(void) {
        return open("/dev/null", O_RDWR | O_CLOEXEC);
}

static int (*const damaged[])(void) = {no_page, short_page, unsealed_page, no_memory_at_all};

/* A damaged page is ignored: blocks that wait for it are lost, all others come back. */
START_TEST(without_semaphores_only_what_waits_is_lost) {
        struct space *space = fixture_space("s", POOL);
        struct attachment *a = attach_kept(space, getpid());
        static struct chain chain;
        int fd = damaged[_i]();

        make_late_chain(a, &chain, 20, 8, 5);
        atomic_store(&words_of(a)[0], 5);
        kill_daemon();
        if (fd < 0)
                forget(".w.");
        else
                ck_assert_int_ge(dup3(fd, kept_named(".w.")->fd, O_CLOEXEC), 0);
        if (fd >= 0)
                close(fd);
        ck_assert_uint_eq(found_next(&chain), 12);
        space = space_again("s");
        atomic_store(&old_client(space)->page->left, 1);
        look();
        ck_assert_uint_eq(usage_of(space).limbo, 0);
        ck_assert_uint_eq(n_kept, 2 + space_index(space)->n_segments);
        check_clean(space);
}
END_TEST

/* A daemon that ended while taking over has kept its semaphore page, but not yet its index. */
START_TEST(a_page_of_a_daemon_that_did_not_get_far_is_replaced) {
        struct space *space = fixture_space("s", POOL);
        static struct chain chain;
        char name[KEEP_NAME_MAX];
        uint64_t inode;

        make_chain(attach_kept(space, getpid()), &chain, 20, 0, 1, 0, 0);
        snprintf(name, sizeof name, "%s", kept_named(".w.1")->name);
        name[strlen(name) - 1] = '2';
        memcpy(kept[n_kept].name, name, sizeof name);
        kept[n_kept].fd = unsealed_page();
        inode = inode_of(kept[n_kept++].fd);
        kill_daemon();
        ck_assert_uint_eq(found_next(&chain), 20);
        ck_assert_uint_ne(inode_of(kept_named(".w.2")->fd), inode);
        ck_assert_uint_eq(found_next(&chain), 20);
}
END_TEST

/* ---- chunks ---------------------------------------------------------------------------------- */

/* A chunk of another size, or on another device. */
static int other_chunk(int device, uint64_t bytes) {
        const struct kvd_cuda *cuda = store->config.cuda;
        struct cu_allocation what = {.type = CU_ALLOCATION_PINNED,
                                     .handle_types = CU_HANDLE_POSIX_FD,
                                     .location = {CU_LOCATION_DEVICE, device}};
        cu_memory memory;
        int fd;

        ck_assert_int_eq(cuda->cuMemCreate(&memory, bytes, &what, 0), CU_OK);
        ck_assert_int_eq(cuda->cuMemExportToShareableHandle(&fd, memory, CU_HANDLE_POSIX_FD, 0),
                         CU_OK);
        cuda->cuMemRelease(memory);
        return fd;
}

static int larger_chunk(void) {
        return other_chunk(0, UINT64_C(4) << 20);
}

static int chunk_of_another_gpu(void) {
        return other_chunk(1, UINT64_C(2) << 20);
}

static int (*const wrong_chunks[])(void) = {unsealed_page, no_memory_at_all, larger_chunk,
                                            chunk_of_another_gpu};

START_TEST(a_wrong_chunk_is_given_up_with_its_blocks) {
        struct space *space = fixture_space("s", POOL);
        static struct chain chain;
        int fd;

        make_chain(attach_kept(space, getpid()), &chain, CHAIN, 0, 1, 0, 0);
        fd = wrong_chunks[_i]();
        kill_daemon();
        ck_assert_int_ge(dup3(fd, kept_named(".s.")->fd, O_CLOEXEC), 0);
        close(fd);
        ck_assert_uint_eq(found_next(&chain), 0);
        space = space_again("s");
        ck_assert_ptr_null(kept_named(".s."));
        ck_assert_uint_eq(pool_of(store)->count[CLEAN], GPU_SEGMENTS);
        make_chain(attach_kept(space, getpid()), &chain, CHAIN, 0, 2, 0, 0);
        ck_assert_uint_eq(check_all(space), CHAIN);
        ck_assert_uint_eq(found_next(&chain), CHAIN);
}
END_TEST

START_TEST(the_pool_is_made_around_what_is_there) {
        struct space *space = fixture_space("s", POOL);
        static struct chain chain;
        uint64_t inode;

        make_chain(attach_kept(space, getpid()), &chain, CHAIN, 0, 1, 0, 0);
        inode = inode_of(kept_named(".s.")->fd);
        ck_assert_uint_eq(found_next(&chain), CHAIN);
        space = space_again("s");
        ck_assert_uint_eq(inode_of(space->memory.segments[0].chunk->shards[0].fd), inode);
        ck_assert_uint_eq(pool_of(store)->count[USED], 1);
        ck_assert_uint_eq(pool_of(store)->count[CLEAN], GPU_SEGMENTS - 1);
        ck_assert_uint_eq(store_pool_used(store), space->ix->segment_bytes);
        ck_assert_uint_eq(check_all(space), CHAIN);
}
END_TEST

static void another_gpu(void) {
        memcpy(uuid, "the GPU of now!", sizeof uuid);
}

/* Segments of another size than the kept chunks. */
static void another_size(void) {
        store->config.segment_bytes *= 2;
}

/* If a space is not taken over, its memory is not reused, by its own domain or another. */
START_TEST(elsewhere_the_space_begins_empty) {
        struct space *space = fixture_space("s", POOL);
        static struct chain chain;
        uint64_t inode;

        make_chain(attach_kept(space, getpid()), &chain, CHAIN, 0, 1, 0, 0);
        inode = inode_of(kept_named(".s.")->fd);
        kill_daemon();
        if (_i == 0)
                another_gpu();
        open_daemon();
        if (_i == 1)
                another_size();
        else if (_i == 2)
                strcpy(domain->config.name, "e");
        adopt();
        ck_assert_ptr_null(space_again("s"));
        ck_assert_ptr_nonnull(strstr(last_said, "begins empty"));
        ck_assert_uint_eq(n_kept, 0);
        make_memory();
        for (uint32_t i = 0; i < pool_of(store)->n; i++)
                ck_assert_uint_ne(inode_of(pool_of(store)->chunks[i].shards[0].fd), inode);
        memcpy(uuid, "the earlier GPU.", sizeof uuid);
}
END_TEST

/* A chunk that an old client may have mapped is not reused before that client has ended. */
START_TEST(a_chunk_is_not_passed_on_while_clients_of_before_may_have_it) {
        struct space *space = fixture_space("s", POOL);
        static struct chain chain;

        make_chain(attach_kept(space, getpid()), &chain, CHAIN, 0, 1, 0, 0);
        restart(_i);
        space = space_again("s");
        ck_assert(drain_mapped(space, 0));
        atomic_store(&old_client(space)->page->left, 1);
        look();
        ck_assert(!drain_mapped(space, 0));
}
END_TEST

static void take_and_release(struct attachment *a, uint32_t n) {
        kvd_ref *refs = calloc(n, sizeof *refs);
        uint32_t got = 0;

        while (got < n) {
                int r = space_allocate(a, MIN(n - got, 512), refs + got);

                ck_assert_int_gt(r, 0);
                got += (uint32_t)r;
        }
        ck_assert_uint_eq(space_release(a, refs, n), n);
        free(refs);
}

/* The number in a kept name identifies the chunk: a new chunk of a segment has another name. */
START_TEST(each_chunk_of_a_segment_has_a_name_of_its_own) {
        struct space *space = fixture_space("s", 0);
        uint32_t n = space->ix->segment_blocks + 1;
        struct attachment *a = attach_kept(space, getpid());
        static struct chain chain;

        take_and_release(a, n);
        ck_assert_ptr_nonnull(kept_named(".s.0.1"));
        ck_assert_ptr_nonnull(kept_named(".s.1.1"));
        set(space, "max_blocks", "1");
        idle();
        ck_assert(!kept_named(".s.0.1") || !kept_named(".s.1.1"));
        make_memory();
        set(space, "max_blocks", "0");
        take_and_release(a, n);
        ck_assert(kept_named(".s.0.2") || kept_named(".s.1.2"));
        make_chain(a, &chain, CHAIN, 0, 1, 0, 0);
        ck_assert_uint_eq(found_next(&chain), CHAIN);
        ck_assert(kept_named(".s.0.2") || kept_named(".s.1.2"));
}
END_TEST

SUITE("adopt on a GPU", FIXTURE(set_up, tear_down),
      LOOPS(ARRAY_SIZE(arrivals), a_block_is_taken_over_if_its_data_is_there),
      TESTS(waiters_for_a_client_that_died_before_are_told,
            a_client_keeps_its_page_over_many_daemons),
      LOOPS(ARRAY_SIZE(damaged), without_semaphores_only_what_waits_is_lost),
      TESTS(a_page_of_a_daemon_that_did_not_get_far_is_replaced),
      LOOPS(ARRAY_SIZE(wrong_chunks), a_wrong_chunk_is_given_up_with_its_blocks),
      TESTS(the_pool_is_made_around_what_is_there), LOOPS(3, elsewhere_the_space_begins_empty),
      LOOPS(2, a_chunk_is_not_passed_on_while_clients_of_before_may_have_it),
      TESTS(each_chunk_of_a_segment_has_a_name_of_its_own))
