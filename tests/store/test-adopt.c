/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A daemon is killed or stops, and the next one takes over what was kept for it: here a table of
 * descriptors. The bytes of a block follow from all tokens up to its end, so that a block in the
 * wrong place is noticed. An old index is also damaged in many ways: that may lose blocks, but no
 * block may be wrong.
 */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/key.h"
#include "ipc/base/sys.h"
#include "tests/lib/amount.h"
#include "tests/lib/suite.h"
#include "tests/store/adopting.h"

/* Files kept for a space: its index and, on a GPU, its semaphores. */
#define OF_SPACE (on_gpu() ? 2u : 1u)
/* On a GPU also the old semaphore page, which an old client may still write and wait in. */
#define OF_BEFORE (on_gpu() ? 1u : 0u)
/* A space of POOL blocks has several segments. */
#define SMALL_PAGES (sysconf(_SC_PAGESIZE) == 4096 && !getenv("KVD_TEST_LARGE_PAGES"))

/* ---- the seam -------------------------------------------------------------------------------- */

START_TEST(what_is_kept_is_dropped_when_it_goes) {
        struct space *space = fixture_space("s", POOL);
        struct attachment *a;
        kvd_ref refs[64];

        ck_assert_uint_eq(n_keeps, OF_SPACE);
        a = attach_kept(space, getpid());
        ck_assert_uint_eq(n_keeps, OF_SPACE + 2);
        ck_assert_int_eq(space_allocate(a, 16, refs), 16);
        ck_assert_uint_eq(n_keeps, OF_SPACE + 3);
        ck_assert_uint_eq(n_drops, 0);
        attachment_free(a, false);
        idle();
        ck_assert_uint_eq(n_drops, 2);
        ck_assert_int_eq(space_delete(space, true), 0);
        idle();
        ck_assert_uint_eq(n_keeps, n_drops);
        ck_assert_uint_eq(n_kept, 0);
        ck_assert_uint_eq(n_unknown, 0);
}
END_TEST

/* ---- restarts -------------------------------------------------------------------------------- */

START_TEST(sealed_chains_come_back) {
        struct space *space = fixture_space("s", POOL);
        struct attachment *a = attach_kept(space, getpid());
        static struct chain one, two, three;

        make_chain(a, &one, CHAIN, 0, 1, 0, 0);
        make_chain(a, &two, CHAIN, 0, 2, 20, 1);
        make_chain(a, &three, 3, 77, 3, 0, 0);
        for (int i = 0; i < 3; i++) {
                uint32_t clock = atomic_load(&space_index(space)->clock);

                ck_assert_uint_gt(clock, 1);
                restart(_i);
                space = space_again("s");
                ck_assert_msg(space != NULL, "%s", last_said);
                ck_assert_uint_ge(atomic_load(&space_index(space)->clock), clock);
                ck_assert_uint_eq(check_all(space), CHAIN + CHAIN - 20 + 3);
                ck_assert_uint_eq(found(space, &one), CHAIN);
                ck_assert_uint_eq(found(space, &two), CHAIN);
                ck_assert_uint_eq(found(space, &three), 3);
                ck_assert_uint_eq(space_index(space)->life, 2 + (uint32_t)i);
                ck_assert_uint_eq(n_kept,
                                  OF_BEFORE + OF_SPACE + 2 + space_index(space)->n_segments);
        }
}
END_TEST

/* Large pages were reserved in the meantime, and pages = auto would use them. */
START_TEST(large_pages_that_are_free_by_now_are_left_alone) {
        struct space *space = fixture_space("s", POOL);
        struct attachment *a = attach_kept(space, getpid());
        static struct chain chain;

        make_chain(a, &chain, CHAIN, 0, 1, 0, 0);
        kill_daemon();
        open_daemon();
        store->config.pages = STORE_PAGES_AUTO;
        store->pages.huge = true;
        store->pages.bytes = UINT64_C(2) << 20;
        adopt();
        ck_assert(!store->pages.huge);
        ck_assert_uint_eq(store->pages.bytes, sys_page_bytes());
        space = space_again("s");
        ck_assert_ptr_nonnull(space);
        ck_assert_uint_eq(found(space, &chain), CHAIN);
}
END_TEST

START_TEST(under_arenas_too) {
        static struct chain one, two;
        struct space *space;
        struct attachment *a;

        tear_down();
        arena = true;
        open_daemon();
        make_memory();
        space = fixture_space("s", on_gpu() ? 0 : POOL); /* each writer has segments of its own */
        make_chain(attach_kept(space, getpid()), &one, CHAIN, 0, 1, 0, 0);
        make_chain(attach_kept(space, getpid()), &two, CHAIN, 0, 2, 20, 1);
        restart(_i);
        space = space_again("s");
        ck_assert_msg(space != NULL, "%s", last_said);
        ck_assert_uint_eq(check_all(space), CHAIN + CHAIN - 20);
        ck_assert_uint_eq(found(space, &one), CHAIN);
        ck_assert_uint_eq(found(space, &two), CHAIN);
        a = attach_kept(space, getpid());
        make_chain(a, &two, 4, 5, 4, 0, 0);
        ck_assert_uint_eq(check_all(space), CHAIN + CHAIN - 20 + 4);
        restart(_i);
        ck_assert_uint_eq(check_all(space_again("s")), CHAIN + CHAIN - 20 + 4);
}
END_TEST

START_TEST(pins_of_old_clients_hold) {
        struct space *space = fixture_space("s", POOL);
        struct attachment *a = attach_kept(space, getpid());
        uint64_t bytes = attachment_pin_bytes(a);
        struct kvd_pin_words *pins = map_pins(a);
        static struct chain one, two;

        make_chain(a, &one, CHAIN, 0, 1, 0, 0);
        make_chain(a, &two, CHAIN, 0, 2, 0, 0);
        atomic_store(&pins[kvd_ref_id(one.refs[9])].pins, 1);
        ck_assert_uint_eq(atomic_load(&page_of(pins)->epoch), 1);
        for (int i = 0; i < 2; i++) {
                restart(_i);
                ck_assert_uint_eq(atomic_load(&page_of(pins)->epoch), 2 + (uint32_t)i);
                space = space_again("s");
                squeeze(space);
                ck_assert_uint_eq(found(space, &one), 10);
                ck_assert_uint_eq(found(space, &two), 0);
                ck_assert_uint_eq(check_all(space), 10);
        }
        atomic_store(&page_of(pins)->left, 1);
        look();
        squeeze(space);
        ck_assert_uint_eq(check_all(space), 0);
        ck_assert_uint_eq(usage_of(space).attachments, 0);
        munmap(page_of(pins), bytes);
}
END_TEST

/* The block of a client that may still write to it is not reused until the client dies. */
START_TEST(blocks_that_may_be_written_are_left_alone) {
        struct space *space = fixture_space("s", POOL);
        pid_t child = fork();
        kvd_ref refs[8];

        if (child == 0) {
                pause();
                _exit(0);
        }
        ck_assert_int_eq(space_allocate(attach_kept(space, child), 8, refs), 8);
        attach_kept(space, getpid());
        restart(_i);
        space = space_again("s");
        ck_assert_uint_eq(usage_of(space).limbo, 8);
        ck_assert_uint_eq(check_all(space), 0);
        kill(child, SIGKILL);
        ck_assert_int_eq(waitid(P_PID, (id_t)child, &(siginfo_t){0}, WEXITED | WNOWAIT), 0);
        look();
        ck_assert_uint_eq(usage_of(space).attachments, 1);
        ck_assert_uint_eq(usage_of(space).limbo, 8);
        for (uint32_t i = 0; i < space->n_attachments; i++)
                if (space->attachments[i])
                        atomic_store(&space->attachments[i]->page->left, 1);
        ck_assert_int_ne(store_look_at_pins(store), STORE_DONE); /* it has blocks to free */
        idle();
        ck_assert_uint_eq(usage_of(space).limbo, 0);
        ck_assert_uint_eq(n_kept, OF_SPACE + space_index(space)->n_segments);
        check_clean(space);
        waitpid(child, NULL, 0);
}
END_TEST

static uint32_t n_polls;

static int counted_poll(struct pollfd *fds, nfds_t n, int timeout) {
        n_polls++;
        return kvd_sys_real.poll(fds, n, timeout);
}

/* Each check is a system call, and the daemon also has requests to answer. */
START_TEST(many_old_clients_are_looked_at_a_few_at_a_time) {
        struct kvd_sys counting = kvd_sys_real;
        struct space *space;

        stop_daemon();
        attachments = 40;
        open_daemon();
        space = fixture_space("s", POOL);
        for (uint32_t i = 0; i < 40; i++)
                attach_kept(space, getpid());
        restart(0);
        ck_assert_uint_eq(usage_of(space_again("s")).attachments, 40);
        counting.poll = counted_poll;
        sys = &counting;
        store_look_at_pins(store);
        sys = &kvd_sys_real;
        ck_assert_uint_eq(n_polls, 16);
}
END_TEST

/* ---- what cannot be taken over --------------------------------------------------------------- */

START_TEST(what_nobody_wants_is_closed) {
        int next;

        kept[n_kept++] = (struct kept_file){.name = "1.z.2.3.4",
                                            .fd = memfd_create("unknown", MFD_CLOEXEC)};
        next = dup(0);
        close(next);
        adopt();
        ck_assert_uint_eq(n_kept, 0);
        ck_assert_int_lt(fcntl(next, F_GETFD), 0); /* the descriptor that adopt() was given */
}
END_TEST

START_TEST(without_a_page_the_space_begins_empty) {
        static const char *const what[] = {".p.", ".o."};
        struct space *space = fixture_space("s", POOL);
        static struct chain one;

        make_chain(attach_kept(space, getpid()), &one, CHAIN, 0, 1, 0, 0);
        attach_kept(space, getpid());
        kill_daemon();
        forget(what[_i]);
        next_daemon();
        idle();
        ck_assert_ptr_null(space_again("s"));
        ck_assert_ptr_nonnull(strstr(last_said, "begins empty"));
        ck_assert_uint_eq(n_kept, 0);
        ck_assert_uint_eq(store_pool_used(store), 0);
}
END_TEST

START_TEST(without_a_segment_its_blocks_are_lost) {
        struct space *space = fixture_space("s", POOL);
        static struct chain one;

        make_chain(attach_kept(space, getpid()), &one, CHAIN, 0, 1, 0, 0);
        kill_daemon();
        forget(".s.1.");
        next_daemon();
        space = space_again("s");
        ck_assert_uint_eq(found(space, &one), 16);
        ck_assert_uint_eq(check_all(space), 16);
        squeeze(space);
        check_clean(space);
}
END_TEST

/* Attaches clients until the keeper has no room for another of this domain. Returns how many. */
static uint32_t crowd_in(struct space *space, int *error) {
        int fd = pidfd_of(getpid());
        uint32_t n = 0;

        for (*error = 0; n < 390; n++) {
                struct attachment *a = fixture_attach(space);

                *error = attachment_keep(a, fd);
                if (*error == 0)
                        continue;
                attachment_free(a, false);
                break;
        }
        close(fd);
        return n;
}

/* One domain has as many clients as it can, and the other domain's cache still comes back. */
START_TEST(names_at_the_keeper_have_shares) {
        struct domain_config other = {.name = "other", .client_quota = UINT64_MAX};
        struct space *space, *victim;
        static struct chain chain;
        struct domain *d;
        int error;

        tear_down();
        keep_bytes = 32768; /* at least 40 bytes each */
        attachments = 400;
        open_daemon();
        make_memory();
        d = domain;
        ck_assert_int_eq(store_domain(store, &other, &domain), 0);
        victim = fixture_space("v", POOL);
        make_chain(attach_kept(victim, getpid()), &chain, CHAIN / 2, 0, 1, 0, 0);
        domain = d;
        space = fixture_space("s", POOL);
        ck_assert_uint_gt(crowd_in(space, &error), 60);
        ck_assert_int_eq(error, -ENOBUFS);
        ck_assert_ptr_nonnull(strstr(store_why(store), "kept for the next daemon"));
        attach_kept(victim, getpid()); /* the other domain left room for it */
        check_clean(space);
        check_clean(victim);
        kill_daemon();
        open_daemon();
        d = domain;
        ck_assert_int_eq(store_domain(store, &other, &domain), 0);
        adopt();
        make_memory();
        victim = space_again("v");
        ck_assert_msg(victim != NULL, "%s", last_said);
        ck_assert_uint_eq(found(victim, &chain), CHAIN / 2);
        check_clean(victim);
        ck_assert_ptr_nonnull(space_by_name(d, "s"));
        check_clean(space_by_name(d, "s"));
}
END_TEST

/* A missing segment loses its own blocks; a missing client page loses the whole space. */
START_TEST(segments_leave_room_for_clients) {
        struct space *space;
        struct attachment *a;
        uint32_t n = 0;
        kvd_ref refs[POOL];
        int error;

        tear_down();
        keep_bytes = 600;
        open_daemon();
        make_memory();
        space = fixture_space("s", POOL);
        a = attach_kept(space, getpid());
        while (n < POOL && space_allocate(a, 1, &refs[n]) == 1)
                n++;
        ck_assert_uint_eq(n, POOL);
        check_clean(space);
        for (uint32_t i = 0; i < space_index(space)->n_segments; i++)
                n -= space->memory.segments[i].kept ? 1 : 0;
        ck_assert_uint_lt(n, POOL);      /* some segments are kept */
        ck_assert_uint_gt(n, POOL - 16); /* and some are not */
        ck_assert_uint_ge(crowd_in(space, &error), 1);
        restart(0);
        ck_assert_ptr_nonnull(space_again("s"));
        check_clean(space_again("s"));
}
END_TEST

START_TEST(a_smaller_quota_keeps_what_fits) {
        struct space *space = fixture_space("s", POOL);
        static struct chain one;

        make_chain(attach_kept(space, getpid()), &one, CHAIN, 0, 1, 0, 0);
        kill_daemon();
        quota = 32 * BLOCK_BYTES;
        next_daemon();
        ck_assert_uint_eq(check_all(space_again("s")), 32);
        ck_assert_uint_eq(store_pool_used(store), 32 * BLOCK_BYTES);
}
END_TEST

START_TEST(another_isolation_begins_empty) {
        fixture_space("s", POOL);
        kill_daemon();
        arena = true;
        next_daemon();
        ck_assert_ptr_null(space_again("s"));
        ck_assert_uint_eq(n_kept, 0);
}
END_TEST

/* ---- changed indexes ------------------------------------------------------------------------- */

static uint64_t seed;

static uint64_t draw(uint64_t below) {
        seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        return (seed >> 33) % below;
}

static struct kvd_index *image; /* a copy of the old index, to be damaged */
static uint64_t image_bytes;

static void flip_bit(uint64_t from, uint64_t bytes) {
        uint8_t *at = (uint8_t *)image + from + draw(bytes);

        *at = (uint8_t)(*at ^ 1u << draw(8));
}

static struct kvd_desc *any_desc(const struct kvd_index *sound) {
        uint32_t id = (uint32_t)draw(kvd_segments_ids(sound, sound->n_segments));

        return (struct kvd_desc *)((uint8_t *)image + sound->desc_off +
                                   (uint64_t)id * sound->desc_stride);
}

static void change_field(const struct kvd_index *sound) {
        struct kvd_desc *desc = any_desc(sound), *other = any_desc(sound);

        switch (draw(8)) {
        case 0: desc->parent = other->parent; break;
        case 1: desc->key = other->key; break;
        case 2: desc->depth = (uint32_t)draw(50); break;
        case 3: desc->n_tokens = (uint16_t)draw(6); break;
        case 4: desc->group = (uint16_t)draw(2); break;
        case 5: desc->root = other->root; break;
        case 6: desc->tokens[draw(BT)] = other->tokens[draw(BT)]; break;
        default: desc->flags = (uint32_t)draw(16); break;
        }
}

static void change(const struct kvd_index *sound) {
        struct kvd_desc *desc = any_desc(sound), *other = any_desc(sound);

        switch (draw(sound->proof_off ? 11 : 10)) {
        case 10: flip_bit(sound->proof_off, sound->capacity * UINT64_C(8)); break;
        case 0: flip_bit(0, 1024); break;
        case 1: flip_bit(sound->table_off, sound->desc_off - sound->table_off); break;
        case 2: flip_bit((uint64_t)((uint8_t *)desc - (uint8_t *)image), sound->desc_stride); break;
        case 3: flip_bit((uint64_t)((uint8_t *)desc - (uint8_t *)image), 8); break;
        case 4: desc->slot = kvd_slot_make(KVD_SEALED, kvd_slot_generation(desc->slot)); break;
        case 5: memcpy(desc, other, sound->desc_stride); break;
        case 6: memset(desc, (int)draw(256), sound->desc_stride); break;
        case 7: desc->slot = other->slot; break;
        case 8: flip_bit(sound->memory_off, 64); break;
        default: change_field(sound); break;
        }
}

static uint64_t *proof_in(const struct kvd_index *sound, struct kvd_desc *desc, uint32_t id) {
        return sound->proof_off ? (uint64_t *)((uint8_t *)image + sound->proof_off) + id :
                                  &desc->semaphore_value;
}

/* Changes links and depths to form rings and rows, with proofs as a daemon would write them. */
static void change_links(const struct kvd_index *sound) {
        uint32_t ids = kvd_segments_ids(sound, sound->n_segments), n = 1 + (uint32_t)draw(8);

        while (n--) {
                struct kvd_desc *desc = any_desc(sound), *other = any_desc(sound);
                uint64_t at = (uint64_t)((uint8_t *)desc - (uint8_t *)image) - sound->desc_off,
                         to = (uint64_t)((uint8_t *)other - (uint8_t *)image) - sound->desc_off;
                kvd_ref ref = kvd_ref_make((uint32_t)(at / sound->desc_stride),
                                           kvd_slot_generation(desc->slot)),
                        parent = kvd_ref_make((uint32_t)(to / sound->desc_stride),
                                              kvd_slot_generation(other->slot));

                if (kvd_slot_state(desc->slot) != KVD_SEALED)
                        continue;
                desc->parent = draw(4) ? parent : draw(ids);
                desc->depth = draw(2) ? other->depth + 1 : (uint32_t)draw(ids);
                if (draw(2))
                        desc->key = other->key;
                *proof_in(sound, desc, kvd_ref_id(ref)) = block_proof(sound, ref, desc);
        }
}

/* The image gets a file of its own: killed daemons of this process have the old one mapped. */
static int file_of_image(uint64_t bytes) {
        struct shared_file file;
        int fd;

        ck_assert_int_eq(shared_file_new("changed", bytes, 0, &file), 0);
        fd = file.fd;
        ck_assert_int_eq(pwrite(fd, image, bytes, 0), (ssize_t)bytes);
        return fd;
}

static size_t kept_index(void) {
        size_t i = 0;

        while (!strstr(kept[i].name, ".i."))
                i++;
        return i;
}

/* Makes blocks that are sealed, evicted, retiring, filling, and filling after they were sealed. */
static void make_history(void) {
        struct space *space = fixture_space("s", POOL);
        struct attachment *a = fixture_attach(space), *b = fixture_attach(space);
        uint64_t junk[BLOCK_BYTES / 8] = {0};
        static struct chain chains[8];
        kvd_ref refs[100];
        int n;

        for (uint32_t i = 0; i < 4; i++)
                make_chain(a, &chains[i], CHAIN, i / 2, i, i % 2 ? 17 : 0, 0);
        n = space_allocate(b, 100, refs);
        for (int i = 0; i < n; i++)
                fixture_write(space, refs[i], junk);
        for (uint32_t i = 4; i < 8; i++)
                make_chain(a, &chains[i], CHAIN, i / 2, i, i % 2 ? 17 : 0, 4);
        n = space_allocate(b, 50, refs);
        for (int i = 0; i < n; i++)
                fixture_write(space, refs[i], junk);
        ck_assert_uint_gt(counter(space, KVD_SPACE_EVICTED), 0);
        index_set_state(space, kvd_ref_id(chains[7].refs[CHAIN - 1]), KVD_RETIRING,
                        block_generation(space, kvd_ref_id(chains[7].refs[CHAIN - 1])));
}

static uint32_t sealed_in(const struct kvd_index *ix) {
        uint32_t n = 0;

        for (uint32_t id = 0; id < kvd_segments_ids(ix, ix->n_segments); id++) {
                enum kvd_state state = kvd_slot_state(kvd_index_desc(ix, id)->slot);

                n += state == KVD_SEALED || state == KVD_RETIRING;
        }
        return n;
}

/*
 * A new daemon adopts the kept files, but with the image as index. Returns how many blocks came
 * back.
 */
static uint32_t try_image(uint64_t bytes) {
        struct kept_file files[64];
        struct space *space;
        size_t n = n_kept;
        uint32_t back = 0;

        ck_assert_uint_lt(n, 64);
        for (size_t i = 0; i < n; i++) {
                files[i] = kept[i];
                files[i].fd = i == kept_index() ? file_of_image(bytes) :
                                                  fcntl(kept[i].fd, F_DUPFD_CLOEXEC, 0);
        }
        open_daemon();
        store->config.keep = &no_ops;
        store_adopt(store, files, n);
        take_all_over();
        space = store_next_space(store, 0);
        if (space)
                back = check_all(space);
        stop_daemon();
        return back;
}

#define CHANGES AMOUNT(1000u, 150u)

START_TEST(a_changed_index_loses_blocks_and_gives_no_wrong_one) {
        struct kvd_index *sound;
        uint64_t lost = 0, all;

        make_history();
        image_bytes = space_index(space_again("s"))->size;
        sound = mmap(NULL, image_bytes, PROT_READ, MAP_SHARED, kept[kept_index()].fd, 0);
        ck_assert_ptr_ne(sound, MAP_FAILED);
        image = malloc(image_bytes);
        kill_daemon();
        memcpy(image, sound, image_bytes);
        all = sealed_in(sound);
        ck_assert_uint_eq(try_image(image_bytes), all);
        for (seed = 1; seed <= CHANGES; seed++) {
                uint64_t was = seed, n = 1 + draw(6);

                memcpy(image, sound, image_bytes);
                for (uint64_t i = 0; i < n; i++)
                        change(sound);
                if (draw(2)) {
                        memcpy(image, sound, image_bytes);
                        change_links(sound);
                }
                lost += all -
                        MIN(try_image(draw(50) ? image_bytes : 4096 + draw(image_bytes - 4096)),
                            all);
                seed = was;
        }
        printf("%u changed indexes: %.2f of %llu blocks lost by one\n", CHANGES,
               (double)lost / CHANGES, (unsigned long long)all);
        ck_assert_uint_gt(lost, CHANGES);
        free(image);
        munmap(sound, image_bytes);
}
END_TEST

/* ---- many blocks ----------------------------------------------------------------------------- */

static void space_of_many(uint32_t many) {
        static uint32_t tokens[256];
        static kvd_ref refs[64], sealed[64];
        struct attachment *a;
        struct space *space;

        tear_down();
        pool = many + many / 100 + 1024;
        open_daemon();
        space = fixture_space("s", 0);
        a = fixture_attach(space);
        for (uint32_t n = 0; n < many; n += 64) {
                struct seal_request q = {.root = n,
                                         .n_blocks = 64,
                                         .blocks = refs,
                                         .n_tokens = 256,
                                         .tokens = tokens};
                uint32_t got = 0;

                while (got < 64) {
                        int r = space_allocate(a, 64 - got, refs + got);

                        ck_assert_int_ge(r, 0);
                        got += (uint32_t)r;
                }
                for (uint32_t i = 0; i < 256; i++)
                        tokens[i] = (n * 31 + i) % 100000;
                ck_assert_int_eq(space_seal(a, &q, sealed), 0);
        }
}

static double own_seconds(void) {
        struct timespec t;

        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
        return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Quick by default; ADOPT_BLOCKS=1000000 measures the number of blocks that has an aim. */
START_TEST(many_blocks) {
        const char *wanted = getenv("ADOPT_BLOCKS");
        uint32_t many = wanted ? (uint32_t)strtoul(wanted, NULL, 10) / 64 * 64 : 64000;
        double began;

        space_of_many(many);
        stop_daemon();
        open_daemon();
        began = own_seconds();
        adopt();
        printf("%u blocks are taken over in %.2f s of the processor\n", many,
               own_seconds() - began);
        ck_assert_uint_eq(space_again("s")->count[KVD_SEALED], many);
}
END_TEST

/* ---- while the daemon serves ----------------------------------------------------------------- */

#define A_PIECE 1024u /* maximum number of blocks sealed in one piece */

/* The first allocation of another space is answered before any work that is done per block. */
START_TEST(taking_over_delays_no_allocation) {
        const uint32_t many = 64000;
        uint32_t before = 0, pieces = 0;
        struct space *space, *other;
        kvd_ref ref;

        space_of_many(many);
        kill_daemon();
        all_at_once = false;
        next_daemon();
        space = space_again("s");
        other = fixture_space("other", 64);
        ck_assert_int_eq(space_allocate(fixture_attach(other), 1, &ref), 1);
        ck_assert_uint_eq(space->count[KVD_ABSENT], space_index(space)->capacity);
        for (bool done = false; !done; pieces++) {
                done = space_take_over(space);
                ck_assert_uint_le(space->count[KVD_SEALED] - before, A_PIECE);
                before = (uint32_t)space->count[KVD_SEALED];
        }
        ck_assert_uint_eq(before, many);
        ck_assert_uint_ge(pieces, many / A_PIECE);
        check_clean(space);
}
END_TEST

/* The daemon is killed or stopped after each piece. The next one finds everything that it found. */
START_TEST(a_daemon_that_ends_while_taking_over_loses_nothing) {
        struct space *space = fixture_space("s", POOL);
        struct attachment *a = attach_kept(space, getpid());
        uint64_t bytes = attachment_pin_bytes(a);
        struct kvd_pin_words *pins = map_pins(a);
        static struct chain one, two;

        make_chain(a, &one, CHAIN, 0, 1, 0, 0);
        make_chain(a, &two, CHAIN, 0, 2, 20, 1);
        all_at_once = false;
        for (uint32_t pieces = 0; pieces < 6; pieces++) {
                restart(_i);
                if (pieces == 3)
                        atomic_store(&page_of(pins)->left, 1); /* noticed later */
                space = space_again("s");
                ck_assert_msg(space != NULL, "%s", last_said);
                for (uint32_t i = 0; i < pieces; i++) {
                        space_take_over(space);
                        store_look_at_pins(store);
                }
        }
        restart(_i);
        space = space_again("s");
        idle();
        ck_assert_uint_eq(check_all(space), CHAIN + CHAIN - 20);
        ck_assert_uint_eq(found(space, &one), CHAIN);
        ck_assert_uint_eq(found(space, &two), CHAIN);
        look();
        check_clean(space);
        munmap(page_of(pins), bytes);
}
END_TEST

/*
 * All memory belongs to a space that is still being taken over. An allocation is not refused for
 * that, nor does it get any of that memory yet.
 */
START_TEST(an_allocation_waits_for_memory_being_taken_over) {
        struct space *space = fixture_space("s", POOL), *other;
        struct attachment *a = attach_kept(space, getpid());
        static struct chain chains[POOL / 32];
        kvd_ref ref;
        int r;

        for (uint32_t i = 0; i < POOL / 32; i++)
                make_chain(a, &chains[i], 32, i, i, 0, 0);
        atomic_store(&a->page->left, 1);
        kill_daemon();
        all_at_once = false;
        next_daemon();
        space = space_again("s");
        other = fixture_space("other", 64);
        a = fixture_attach(other);
        ck_assert_int_eq(space_allocate(a, 1, &ref), 0);
        while (!space_take_over(space)) {
                check_clean(other);
                ck_assert_int_eq(space_allocate(a, 1, &ref), 0);
        }
        while ((r = space_allocate(a, 1, &ref)) == 0)
                look();
        ck_assert_int_eq(r, 1);
        ck_assert_uint_gt(check_all(space), POOL / 2);
}
END_TEST

SUITE("adopt", FIXTURE(set_up, tear_down),
      TESTS(what_is_kept_is_dropped_when_it_goes, what_nobody_wants_is_closed),
      LOOPS(2, sealed_chains_come_back, pins_of_old_clients_hold,
            blocks_that_may_be_written_are_left_alone, without_a_page_the_space_begins_empty,
            a_daemon_that_ends_while_taking_over_loses_nothing),
      WHEN(SMALL_PAGES, LOOPS(2, under_arenas_too)), TESTS(another_isolation_begins_empty),
      /* one key of 8 bits in 256 equals that of a child of another parent */
      WHEN(KVD_HASH_BITS == 128, TESTS(a_changed_index_loses_blocks_and_gives_no_wrong_one)),
      WHEN(!on_gpu(), TESTS(large_pages_that_are_free_by_now_are_left_alone,
                            many_old_clients_are_looked_at_a_few_at_a_time, many_blocks)),
      WHEN(!on_gpu() && SMALL_PAGES,
           TESTS(without_a_segment_its_blocks_are_lost, names_at_the_keeper_have_shares,
                 segments_leave_room_for_clients, a_smaller_quota_keeps_what_fits,
                 taking_over_delays_no_allocation,
                 an_allocation_waits_for_memory_being_taken_over)))
