/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The daemons are stores in this process. A killed one is left as it is, with its descriptors. The
 * next one gets other descriptors of the same files, as a keeper would pass them on.
 */

#include "tests/lib/large_pages.h"
#include "tests/store/adopting.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ipc/base/device.h"
#include "ipc/base/key.h"
#include "ipc/base/sys.h"
#include "tests/lib/suite.h"

/* ---- who keeps ------------------------------------------------------------------------------- */

struct kept_file kept[MOST];
size_t n_kept;
unsigned long n_keeps, n_drops, n_unknown;
char last_said[512];

static void keep(void *arg, const char *name, int fd) {
        ck_assert_ptr_eq(arg, kept);
        ck_assert_uint_lt(strlen(name), KEEP_NAME_MAX);
        ck_assert_uint_eq(strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789.-"), strlen(name));
        for (size_t i = 0; i < n_kept; i++)
                ck_assert_str_ne(kept[i].name, name);
        ck_assert_uint_lt(n_kept, MOST);
        snprintf(kept[n_kept].name, KEEP_NAME_MAX, "%s", name);
        kept[n_kept].fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
        ck_assert_int_ge(kept[n_kept++].fd, 0);
        n_keeps++;
}

static void drop(void *arg, const char *name) {
        for (size_t i = 0; i < n_kept; i++) {
                if (strcmp(kept[i].name, name) != 0)
                        continue;
                close(kept[i].fd);
                kept[i] = kept[--n_kept];
                n_drops++;
                return;
        }
        n_unknown++;
}

static void said(void *arg, const char *line) {
        snprintf(last_said, sizeof last_said, "%s", line);
}

static const struct keep_ops ops = {.keep = keep, .drop = drop, .said = said};

static void keep_nothing(void *arg, const char *name, int fd) {
}

static void drop_nothing(void *arg, const char *name) {
}

const struct keep_ops no_ops = {.keep = keep_nothing, .drop = drop_nothing, .said = said};

int pidfd_of(pid_t pid) {
        int fd = sys->pidfd_open(pid);

        ck_assert_int_ge(fd, 0);
        return fd;
}

/* ---- daemons --------------------------------------------------------------------------------- */

bool arena, all_at_once = true;
uint64_t quota, pool = POOL, keep_bytes;
uint32_t attachments = 8;
uint8_t uuid[16] = "the earlier GPU.";
static struct store *killed[64]; /* left as they were when they were killed */
static uint32_t n_killed;

bool on_gpu(void) {
        return getenv("KVD_TEST_BACKEND") != NULL;
}

static const struct kvd_cuda *load(void) {
        const struct kvd_cuda *cuda;
        const char *why = NULL;
        char group[32];

        snprintf(group, sizeof group, "adopt%d", getpid());
        setenv("FAKECUDA_GROUP", group, 1); /* separate from other tests' memory */
        setenv("FAKECUDA_DEVICES", "2", 1);
        cuda = kvd_cuda_load(&why);
        ck_assert_msg(cuda != NULL, "%s", why);
        ck_assert_int_eq(cuda->cuInit(0), CU_OK);
        return cuda;
}

/* In segments of 2 MiB. One segment holds all blocks of a test. */
static void put_on_gpu(struct store_config *c) {
        c->backend = KVD_BACKEND_VMM;
        c->cuda = load();
        c->pool_bytes = GPU_SEGMENTS * (UINT64_C(2) << 20);
        c->spill_bytes = 1 << 20;
        c->n_gpus = 1;
        memcpy(c->gpus[0].uuid, uuid, sizeof c->gpus[0].uuid);
}

void open_daemon(void) {
        struct store_config c = {.pool_bytes = pool * BLOCK_BYTES,
                                 .segment_bytes = 16 * BLOCK_BYTES,
                                 .pages = STORE_PAGES_SMALL,
                                 .max_attachments = attachments,
                                 .overhead_bytes = UINT64_C(1) << 40,
                                 .keep = &ops,
                                 .keep_arg = kept,
                                 .keep_bytes = keep_bytes,
                                 .keep_least = 40};
        struct domain_config d = {.name = "d",
                                  .quota = quota,
                                  .client_quota = UINT64_MAX,
                                  .arena = arena};

        if (on_gpu())
                put_on_gpu(&c);
        ck_assert_msg(store_new(&c, &store) == 0, "%s", store_why(store));
        ck_assert_int_eq(store_domain(store, &d, &domain), 0);
}

/* Makes the pool's memory, and clears it as the worker would. */
void make_memory(void) {
        struct store_clear clear;

        ck_assert_msg(store_make_memory(store) == 0, "%s", store_why(store));
        while (store_next_clear(store, &clear))
                store_clear_done(store, true);
}

void take_all_over(void) {
        struct space *s = store_next_space(store, 0);

        for (; s; s = store_next_space(store, space_number(s) + 1))
                while (!space_take_over(s))
                        ;
}

/* Passes a copy of the table on, with new descriptors: the keeper keeps its own. */
void adopt(void) {
        struct kept_file *files = calloc(n_kept + 1, sizeof *files);
        size_t n = n_kept;

        memcpy(files, kept, n * sizeof *files);
        for (size_t i = 0; i < n; i++)
                files[i].fd = fcntl(kept[i].fd, F_DUPFD_CLOEXEC, 0);
        store_adopt(store, files, n);
        if (all_at_once)
                take_all_over();
        for (size_t i = 0; i < n; i++)
                ck_assert_int_eq(files[i].fd, -1);
        free(files);
}

void kill_daemon(void) {
        killed[n_killed++] = store;
        store = NULL;
}

void stop_daemon(void) {
        store = store_free(store);
}

void next_daemon(void) {
        open_daemon();
        adopt();
        make_memory();
        if (on_gpu())
                look(); /* the previous daemon's worker has ended */
}

struct space *space_again(const char *name) {
        return space_by_name(domain, name);
}

void set_up(void) {
        arena = false;
        all_at_once = true;
        quota = 0;
        pool = POOL;
        keep_bytes = 0;
        attachments = 8;
        if (getenv("KVD_TEST_LARGE_PAGES"))
                large_pages_begin();
        open_daemon();
        make_memory();
}

/* Closes all that is still kept, so that the next test begins with nothing. */
void tear_down(void) {
        store = store_free(store);
        while (n_kept)
                close(kept[--n_kept].fd);
        n_keeps = n_drops = n_unknown = 0;
        ck_assert_uint_eq(large_pages_refused(), 0);
}

/* ---- chains ---------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t h, uint64_t word) {
        h = (h ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        return h ^ h >> 29;
}

static uint64_t prefix_of(uint64_t before, const uint32_t *tokens, uint32_t n) {
        for (uint32_t i = 0; i < n; i++)
                before = mix(before, tokens[i]);
        return before;
}

static void bytes_of(uint64_t prefix, uint64_t ret[BLOCK_BYTES / 8]) {
        for (uint32_t i = 0; i < BLOCK_BYTES / 8; i++)
                ret[i] = mix(prefix, i);
}

/* Seals n blocks. The first `same` ones have the tokens of the chain made from seed_before. */
void make_chain(struct attachment *a, struct chain *c, uint32_t n, uint64_t salt, uint32_t seed,
                uint32_t same, uint32_t seed_before) {
        struct space *space = attachment_space(a);
        uint64_t prefix = mix(1, salt), bytes[BLOCK_BYTES / 8];
        struct seal_request q = {.root = salt, .n_blocks = n, .tokens = c->tokens};
        kvd_ref blocks[CHAIN];

        c->salt = salt;
        c->n = n;
        for (uint32_t i = 0; i < n * BT; i++)
                c->tokens[i] = ((i < same * BT ? seed_before : seed) * 7919 + i * 13) % 100000;
        for (uint32_t i = 0; i < n; i++) {
                ck_assert_int_eq(space_allocate(a, 1, &blocks[i]), 1);
                prefix = prefix_of(prefix, c->tokens + i * BT, BT);
                bytes_of(prefix, bytes);
                fixture_write(space, blocks[i], bytes);
        }
        q.blocks = blocks;
        q.n_tokens = n * BT;
        ck_assert_msg(space_seal(a, &q, c->refs) == 0, "%s", store_why(store));
        space_release(a, blocks, n); /* duplicates of existing blocks */
}

static uint64_t check_block(struct space *space, uint32_t id) {
        const struct kvd_desc *desc = kvd_index_desc(space->ix, id);
        uint32_t parent = space->blocks[id].parent;
        uint64_t prefix = parent == NONE ? mix(1, desc->root) : check_block(space, parent),
                 want[BLOCK_BYTES / 8];
        float have[BLOCK_BYTES / 4];

        prefix = prefix_of(prefix, desc->tokens, desc->n_tokens);
        bytes_of(prefix, want);
        block_floats(space, block_ref(space, id), have);
        ck_assert_msg(memcmp(have, want, sizeof want) == 0, "block %u has wrong bytes", id);
        return prefix;
}

/* Every sealed block has the bytes of its tokens. Returns how many there are. */
uint32_t check_all(struct space *space) {
        uint32_t n = 0;

        check_clean(space);
        for (uint32_t id = 0; id < space_ids(space); id++)
                if (space->blocks[id].state == KVD_SEALED) {
                        check_block(space, id);
                        n++;
                }
        return n;
}

/* How many blocks of the chain a lookup would find. Each must be in the same place as before. */
uint32_t found(struct space *space, const struct chain *c) {
        struct kvd_desc want = {.root = c->salt, .n_tokens = BT};
        struct kvd_key key = kvd_key_root(space->ix, 0, c->salt);

        for (uint32_t i = 0; i < c->n; i++) {
                uint32_t id;

                want.key = key = kvd_key_block(space->ix, key, c->tokens + i * BT, BT);
                id = index_find(space, &want, c->tokens + i * BT);
                if (id == NONE)
                        return i;
                ck_assert_uint_eq(block_ref(space, id), c->refs[i]);
                want.parent = c->refs[i];
                want.depth = i + 1;
        }
        return c->n;
}

struct kvd_pin_words *map_pins(struct attachment *a) {
        uint8_t *at = mmap(NULL, attachment_pin_bytes(a), PROT_READ | PROT_WRITE, MAP_SHARED,
                           attachment_pin_fd(a), 0);

        ck_assert_ptr_ne(at, MAP_FAILED);
        return (struct kvd_pin_words *)(at + KVD_PINS_OFF);
}

struct kvd_pinpage *page_of(struct kvd_pin_words *words) {
        return (struct kvd_pinpage *)((uint8_t *)words - KVD_PINS_OFF);
}

/* A client of process pid, kept for the next daemon. */
struct attachment *attach_kept(struct space *space, pid_t pid) {
        struct attachment *a = fixture_attach(space);
        int fd = pidfd_of(pid);

        ck_assert_msg(attachment_keep(a, fd) == 0, "%s", store_why(store));
        close(fd);
        return a;
}

void restart(int how) {
        if (how)
                stop_daemon();
        else
                kill_daemon();
        next_daemon();
}

/* Allocates all blocks that can be had, then releases them. */
void squeeze(struct space *space) {
        struct attachment *a = attach_kept(space, getpid());
        kvd_ref refs[POOL];
        uint32_t n = 0;
        int r;

        do {
                r = space_allocate(a, POOL - n, refs + n);
                n += r > 0 ? (uint32_t)r : 0;
        } while (r >= 0 && n < POOL);
        space_release(a, refs, n);
        attachment_free(a, false);
        idle();
}

void look(void) {
        for (int i = 0; i < 4; i++)
                store_look_at_pins(store);
        idle();
}

void forget(const char *what) {
        for (size_t i = 0; i < n_kept; i++)
                if (strstr(kept[i].name, what)) {
                        close(kept[i].fd);
                        kept[i] = kept[--n_kept];
                        return;
                }
        ck_abort_msg("nothing like %s is kept", what);
}
