/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/store/world.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/kvd_methods.h"
#include "ipc/base/enums.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/lib/instance.h"

static struct world *drawing; /* gives the store random numbers and the time */

/* ---- the system that the store sees ---------------------------------------------------------- */

/* Each domain has its own random numbers: draws of one do not affect the other. */
static ssize_t seeded_getrandom(void *to, size_t n, unsigned flags) {
        struct party *p = drawing->turn;
        uint64_t stream = (uint64_t)(p - drawing->parties) << 32;

        oracle_fill(to, ALIGN_UP(n, 8) == n ? n : n / 8 * 8, stream + ++p->drawn);
        return (ssize_t)n;
}

static int seeded_clock(uint64_t *ret) {
        *ret = drawing->turn->operations * 1000;
        return 0;
}

static void world_system(struct world *w) {
        static struct kvd_sys seeded;

        seeded = kvd_sys_real;
        seeded.getrandom = seeded_getrandom;
        seeded.clock_ns = seeded_clock;
        drawing = w;
        sys = &seeded;
}

/* ---- trace ----------------------------------------------------------------------------------- */

static void note(struct party *p, uint64_t value) {
        p->trace ^= value + UINT64_C(0x9e3779b97f4a7c15) + (p->trace << 6) + (p->trace >> 2);
        p->trace *= UINT64_C(0xff51afd7ed558ccd);
}

static void note_bytes(struct party *p, const void *from, size_t n) {
        for (size_t i = 0; i < n; i++)
                note(p, ((const uint8_t *)from)[i]);
}

static void note_result(struct world *w, int64_t r) {
        const char *why = store_why(w->store);

        note(w->turn, (uint64_t)r);
        if (r < 0)
                note_bytes(w->turn, why, strlen(why));
}

/* Everything that space_info would report. */
static void note_space(struct world *w, struct space *space) {
        struct space_usage usage;

        memset(&usage, 0, sizeof usage);
        space_get_usage(space, &usage);
        note_bytes(w->turn, &usage, sizeof usage);
        for (uint32_t i = 0; i < KVD_N_SPACE_COUNTERS; i++)
                note(w->turn, atomic_load(&space_index(space)->counters[i]));
}

/* ---- contents -------------------------------------------------------------------------------- */

static uint32_t below(struct world *w, uint32_t n) {
        return random_below(&w->turn->random, n);
}

/* Content is a function of domain and tokens. */
static uint64_t seed_of(struct world *w, const struct chain *c, uint32_t nth) {
        return oracle_seed((uint64_t)(w->turn - w->parties), c->tokens, (nth + 1) * WORLD_BT);
}

static int place_of(struct space *space, kvd_ref ref, off_t *at) {
        uint32_t id = kvd_ref_id(ref), per = space_index(space)->segment_blocks;

        *at = (off_t)(id % per) * WORLD_BYTES;
        return space_worker_segment_fd(space, id / per);
}

static void write_block(struct world *w, struct user *u, kvd_ref ref, const struct chain *c,
                        uint32_t nth) {
        uint8_t data[WORLD_BYTES];
        off_t at;
        int fd = place_of(attachment_space(u->attachment), ref, &at);

        oracle_fill(data, sizeof data, seed_of(w, c, nth));
        if (pwrite(fd, data, sizeof data, at) != sizeof data)
                die("a block that is being filled has no memory");
}

static void compare_block(struct world *w, struct user *u, kvd_ref ref, const struct chain *c,
                          uint32_t nth) {
        uint8_t data[WORLD_BYTES];
        off_t at;
        int fd = place_of(attachment_space(u->attachment), ref, &at);

        if (pread(fd, data, sizeof data, at) != sizeof data)
                die("a block that is held has no memory");
        w->turn->bytes_wrong += oracle_wrong(data, sizeof data, seed_of(w, c, nth));
        w->turn->blocks_compared++;
}

/* ---- pins, as a client sets them ------------------------------------------------------------- */

static bool is_sealed(const struct user *u, kvd_ref ref) {
        const struct kvd_index *ix = space_index(attachment_space(u->attachment));

        return shm_load(&kvd_index_desc(ix, kvd_ref_id(ref))->slot) ==
               kvd_slot_make(KVD_SEALED, kvd_ref_generation(ref));
}

static void unpin(struct user *u, struct chain *c) {
        if (c->pinned)
                u->words[kvd_ref_id(c->leaf)].pins--;
        c->pinned = false;
}

static void let_go(struct user *u, struct chain *c) {
        unpin(u, c);
        *c = (struct chain){0};
}

static void pin(struct world *w, struct user *u, struct chain *c) {
        if (!c->leaf || c->pinned)
                return;
        c->pinned = true;
        kvd_group_use(u->groups, kvd_ref_id(c->leaf));
        u->words[kvd_ref_id(c->leaf)].pins++;
        note(w->turn, is_sealed(u, c->leaf));
        if (!is_sealed(u, c->leaf))
                let_go(u, c);
        else
                compare_block(w, u, c->leaf, c, c->n_blocks - 1);
}

/* ---- coming and going ------------------------------------------------------------------------ */

static void forget(struct user *u) {
        if (u->words)
                munmap((uint8_t *)u->words - KVD_PINS_OFF, u->pin_bytes);
        *u = (struct user){0};
}

/* The attachment's space was deleted. */
static void gone(struct attachment *a) {
        forget(attachment_owner(a));
}

static void attach(struct world *w, struct user *u, struct space *space) {
        uint8_t *page;
        int r = attachment_new(space, u, (uintptr_t)u, gone, &u->attachment);

        note_result(w, r);
        if (r < 0) {
                u->attachment = NULL;
                return;
        }
        u->pin_bytes = attachment_pin_bytes(u->attachment);
        page = mmap(NULL, u->pin_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                    attachment_pin_fd(u->attachment), 0);
        if (page == MAP_FAILED)
                die("mmap: %s", strerror(errno));
        u->words = (struct kvd_pin_words *)(page + KVD_PINS_OFF);
        u->groups = (shm_u64 *)(page + kvd_groups_off(space_index(space)->capacity));
}

int world_space(struct world *w, uint32_t number, struct space **ret) {
        static const struct kvd_shape shape = {.layers = 2,
                                               .kv_heads = 1,
                                               .head_dim = 8,
                                               .block_tokens = WORLD_BT,
                                               .dtype = KVD_dtype_f32,
                                               .vocab = 1000};
        struct space_spec spec = {.geometry = shape};
        bool created;

        snprintf(spec.name, sizeof spec.name, "s%u", number);
        spec.options.policy = number % 2 ? KVD_policy_fifo : KVD_policy_lru;
        return space_open(w->turn->domain, &spec, true, ret, &created);
}

static void come(struct world *w, struct user *u) {
        struct space *space;
        int r = world_space(w, below(w, 2), &space);

        note_result(w, r);
        if (r == 0)
                attach(w, u, space);
}

static void go(struct world *w, struct user *u) {
        uint32_t how = below(w, 3);

        if (how == 0)
                attachment_orphan(u->attachment);
        attachment_free(u->attachment, how > 0);
        forget(u);
}

/* ---- what clients ask for -------------------------------------------------------------------- */

static void allocate(struct world *w, struct user *u) {
        uint32_t wanted = 1 + below(w, 8), n = MIN(wanted, WORLD_FILLING - u->n_filling);
        kvd_ref *to = u->filling + u->n_filling;
        int r = n ? space_allocate(u->attachment, n, to) : 0;

        note_result(w, r);
        if (r <= 0)
                return;
        note_bytes(w->turn, to, (size_t)r * sizeof *to);
        u->n_filling += (uint32_t)r;
}

static void release(struct world *w, struct user *u) {
        uint32_t n = below(w, u->n_filling + 1);

        note(w->turn, space_release(u->attachment, u->filling + u->n_filling - n, n));
        u->n_filling -= n;
}

/* Uses few different tokens, so that several clients seal the same chains again and again. */
static void extend(struct world *w, struct chain *c, uint32_t n) {
        for (uint32_t i = 0; i < n * WORLD_BT; i++)
                c->tokens[c->n_blocks * WORLD_BT + i] = i % WORLD_BT ? 7 : below(w, 4);
        c->n_blocks += n;
}

/* Compares existing blocks with the same content, and releases ours. */
static void sealed(struct world *w, struct user *u, const struct chain *c, const kvd_ref *ret,
                   uint32_t n) {
        const kvd_ref *given = u->filling + u->n_filling;

        for (uint32_t i = 0; i < n; i++) {
                compare_block(w, u, ret[i], c, c->n_blocks - n + i);
                if (ret[i] != given[i])
                        note(w->turn, space_release(u->attachment, &given[i], 1));
        }
        note_bytes(w->turn, ret, n * sizeof *ret);
}

static void seal(struct world *w, struct user *u, struct chain *from) {
        struct chain c = *from, *to = &u->chains[below(w, WORLD_CHAINS)];
        uint32_t wanted = 1 + below(w, 3), n = MIN(wanted, u->n_filling), first = c.n_blocks;
        kvd_ref ret[WORLD_DEPTH], *own;
        int r;

        if (!n || first + n > WORLD_DEPTH)
                return;
        extend(w, &c, n);
        u->n_filling -= n;
        own = u->filling + u->n_filling;
        for (uint32_t i = 0; i < n; i++)
                write_block(w, u, own[i], &c, first + i);
        r = space_seal(u->attachment,
                       &(struct seal_request){.parent = c.leaf,
                                              .n_blocks = n,
                                              .blocks = own,
                                              .n_tokens = n * WORLD_BT,
                                              .tokens = c.tokens + first * WORLD_BT},
                       ret);
        note_result(w, r);
        if (r < 0) {
                note(w->turn, space_release(u->attachment, own, n));
                return;
        }
        sealed(w, u, &c, ret, n);
        let_go(u, to);
        *to = (struct chain){.leaf = ret[n - 1], .n_blocks = c.n_blocks};
        memcpy(to->tokens, c.tokens, sizeof c.tokens);
        if (below(w, 2))
                pin(w, u, to);
}

static void evict(struct world *w, struct user *u) {
        struct space *space = attachment_space(u->attachment);
        kvd_ref chain = below(w, 2) ? u->chains[below(w, WORLD_CHAINS)].leaf : 0;
        bool more;

        note_result(w, space_evict(space, chain ? 0 : 1 + below(w, 20), chain, &more));
        note(w->turn, more);
}

static void change(struct world *w, struct user *u) {
        static const char *const policies[] = {"lru", "fifo", "priority"};
        struct space *space = attachment_space(u->attachment);

        if (below(w, 8))
                note_result(w, space_set(space, "policy", policies[below(w, 3)]));
        else
                note_result(w, space_delete(space, below(w, 2)));
}

static void lease(struct world *w, struct user *u) {
        struct kvd_key prefix = {below(w, 5), 0};

        if (below(w, 2))
                note_result(w, space_lease(u->attachment, prefix, WORLD_BT));
        else
                space_lease_end(u->attachment, prefix, WORLD_BT);
}

static void session(struct world *w, struct user *u) {
        const kvd_ref ends[] = {u->chains[below(w, WORLD_CHAINS)].leaf,
                                u->chains[below(w, WORLD_CHAINS)].leaf};
        const char name[] = {(char)('a' + below(w, 4)), 0};
        struct session_request q = {.name = name,
                                    .user = below(w, 2),
                                    .keep = 1 + below(w, KVD_keep_max),
                                    .ttl_s = 1 + below(w, 9),
                                    .n_blocks = 1 + below(w, 2),
                                    .blocks = ends};
        struct session_info info = {0};
        uint32_t cursor = 0;

        if (below(w, 4))
                note_result(w, space_session(u->attachment, &q));
        else
                note_result(w, space_session_end(attachment_space(u->attachment), q.user, name));
        while (space_next_session(attachment_space(u->attachment), &q.user, &cursor, &info))
                note(w->turn, info.blocks);
}

static void append(struct world *w, struct user *u) {
        struct chain c = {0};
        uint32_t n = MIN(2, u->n_filling), at;
        int r;

        if (!u->sequence && sequence_open(u->attachment, 64, &u->sequence) < 0)
                u->sequence = 0;
        if (!u->sequence || !n)
                return;
        extend(w, &c, n);
        r = sequence_append(u->attachment, u->sequence,
                            &(struct append_request){.own = true,
                                                     .n_blocks = n,
                                                     .blocks = u->filling + u->n_filling - n,
                                                     .n_tokens = n * WORLD_BT,
                                                     .tokens = c.tokens},
                            &at);
        note_result(w, r);
        if (r == 0)
                u->n_filling -= n;
}

static void work_on_sequence(struct world *w, struct user *u) {
        struct kvd_change changes[KVD_SYNC_CHANGES];
        uint32_t entry = below(w, 8), how = below(w, 4);

        if (how < 2 || !u->sequence) {
                append(w, u);
        } else if (how == 2) {
                note_result(w, sequence_cool(u->attachment, u->sequence, KVD_COOL_DROP, &entry, 1));
                note_result(w, sequence_sync(u->attachment, u->sequence, NULL, 0, changes));
        } else {
                note_result(w, sequence_close(u->attachment, u->sequence));
                u->sequence = 0;
        }
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void act(struct world *w, struct user *u) {
        struct chain *c = &u->chains[below(w, WORLD_CHAINS)];
        uint32_t op = below(w, 42);

        if (op < 10)
                allocate(w, u);
        else if (op < 22)
                seal(w, u, below(w, 3) ? c : &(struct chain){0});
        else if (op < 27)
                pin(w, u, c);
        else if (op < 31)
                unpin(u, c);
        else if (op < 33)
                release(w, u);
        else if (op < 35)
                evict(w, u);
        else if (op < 36)
                lease(w, u);
        else if (op < 38)
                work_on_sequence(w, u);
        else if (op < 39)
                change(w, u);
        else if (op < 41)
                session(w, u);
        else if (below(w, 4) == 0)
                go(w, u);
}

void world_step(struct world *w, uint32_t party) {
        struct user *u;

        w->turn = &w->parties[party];
        w->turn->operations++;
        u = &w->turn->users[below(w, ARRAY_SIZE(w->turn->users))];
        if (!u->attachment)
                come(w, u);
        else
                act(w, u);
        for (int i = 0; i < 64 && store_idle(w->store); i++)
                ;
        if (u->attachment)
                note_space(w, attachment_space(u->attachment));
}

/* ---- the whole ------------------------------------------------------------------------------- */

void world_open(struct world *w, uint64_t seed, uint64_t pool_blocks) {
        struct store_config config = {.pool_bytes = pool_blocks * WORLD_BYTES,
                                      .segment_bytes = 16 * WORLD_BYTES,
                                      .pages = STORE_PAGES_SMALL,
                                      .max_attachments = 8};

        *w = (struct world){.turn = w->parties};
        world_system(w);
        if (store_new(&config, &w->store) < 0)
                die("%s", store_why(w->store));
        for (uint32_t i = 0; i < ARRAY_SIZE(w->parties); i++) {
                struct party *p = &w->parties[i];
                struct domain_config d = {.quota = config.pool_bytes / 2,
                                          .guarantee = config.pool_bytes / 2};

                snprintf(d.name, sizeof d.name, "%c", 'a' + (char)i);
                p->random.state = seed * 2 + i;
                if (store_domain(w->store, &d, &p->domain) < 0)
                        die("%s", store_why(w->store));
        }
}

void world_check(struct world *w) {
        struct space *space = NULL;

        while ((space = store_next_space(w->store, space ? space_number(space) + 1 : 0))) {
                struct check_report report = {0};
                uint64_t cursor = 0;

                do {
                        space_check(space, &cursor, &report);
                        if (report.broken)
                                die("%s", report.first);
                } while (cursor);
        }
}

void world_close(struct world *w) {
        for (uint32_t i = 0; i < ARRAY_SIZE(w->parties); i++)
                for (uint32_t k = 0; k < ARRAY_SIZE(w->parties[i].users); k++) {
                        struct user *u = &w->parties[i].users[k];

                        if (!u->attachment)
                                continue;
                        attachment_free(u->attachment, false);
                        forget(u);
                }
        w->store = store_free(w->store);
        sys = &kvd_sys_real;
}
