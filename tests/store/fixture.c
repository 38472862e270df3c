/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/store/fixture.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ipc/base/sys.h"
#include "tests/lib/mark.h"
#include "tests/lib/oracle.h"
#include "tests/lib/pins.h"

struct store *store;
struct domain *domain;

static const struct kvd_shape geometry = {.layers = 2,
                                          .kv_heads = 1,
                                          .head_dim = 8,
                                          .block_tokens = BT,
                                          .dtype = KVD_F32,
                                          .vocab = 100000};

/*
 * Keys depend on random secrets. With one in some hundreds of them, a block of a nearly full table
 * is not found, because its two buckets are full. Tests are not left to that chance.
 */
static ssize_t same_getrandom(void *to, size_t n, unsigned flags) {
        static uint64_t drawn;
        uint8_t bytes[256];

        ck_assert_uint_le(n, sizeof bytes);
        oracle_fill(bytes, sizeof bytes, ++drawn);
        memcpy(to, bytes, n);
        return (ssize_t)n;
}

static void fix_chance(void) {
        static struct kvd_sys fixed;

        fixed = *sys;
        fixed.getrandom = same_getrandom;
        sys = &fixed;
}

void fixture_open(uint64_t pool_blocks, uint64_t spill_blocks) {
        struct store_config c = {.pool_bytes = pool_blocks * BLOCK_BYTES,
                                 .segment_bytes = 16 * BLOCK_BYTES,
                                 .pages = STORE_PAGES_SMALL,
                                 .max_attachments = 8,
                                 .spill_bytes = spill_blocks * BLOCK_BYTES};

        fix_chance();
        ck_assert_int_eq(store_new(&c, &store), 0);
        ck_assert_int_eq(store_domain(store,
                                      &(struct domain_config){.name = "d",
                                                              .client_quota = UINT64_MAX},
                                      &domain),
                         0);
}

void fixture_close(void) {
        store = store_free(store);
}

static struct space *space_with(const char *name, struct space_options options) {
        struct space_spec spec = {.geometry = geometry, .options = options};
        struct space *space;
        bool created;

        snprintf(spec.name, sizeof spec.name, "%s", name);
        ck_assert_msg(space_open(domain, &spec, true, &space, &created) == 0, "%s",
                      store_why(store));
        return space;
}

struct space *fixture_space(const char *name, uint64_t max_blocks) {
        return space_with(name, (struct space_options){.max_blocks = max_blocks});
}

struct space *fixture_whole_space(const char *name) {
        return space_with(name, (struct space_options){.kind = KVD_kind_bidirectional});
}

struct attachment *fixture_attach_as(struct space *space, uint64_t process) {
        struct attachment *a;

        ck_assert_msg(attachment_new(space, NULL, process, NULL, &a) == 0, "%s", store_why(store));
        pins_everywhere(a->page);
        return a;
}

struct attachment *fixture_attach(struct space *space) {
        static uint64_t processes = 1000;

        return fixture_attach_as(space, processes++);
}

void fixture_super(struct file_super *super, uint32_t extents, uint64_t extent_bytes) {
        *super = (struct file_super){.serial = 1,
                                     .bytes = FILE_HEAD + extents * extent_bytes,
                                     .extent_bytes = extent_bytes,
                                     .opening = 1,
                                     .next_epoch = 1,
                                     .secret = "not much of a secret",
                                     .set = 1};
        file_sector_seal(super->secret, FILE_SUPER, &super->mark);
}

void set(struct space *space, const char *key, const char *value) {
        ck_assert_msg(space_set(space, key, value) == 0, "%s", store_why(store));
}

void check_clean(struct space *space) {
        struct check_report report;
        uint64_t cursor = 0;

        do {
                space_check(space, &cursor, &report);
                ck_assert_msg(report.broken == 0, "%s", report.first);
        } while (cursor);
}

/* Does all idle work, as after a request that concerned every space. */
void idle(void) {
        for (struct space *s = store_next_space(store, 0); s;
             s = store_next_space(store, space_number(s) + 1))
                space_wants_idle(s);
        for (int i = 0; i < 10000 && store_idle(store); i++)
                ;
}

uint64_t counter(struct space *space, enum kvd_space_counter which) {
        return atomic_load(&space_index(space)->counters[which]);
}

struct space_usage usage_of(struct space *space) {
        struct space_usage usage;

        space_get_usage(space, &usage);
        return usage;
}

/* ---- contents -------------------------------------------------------------------------------- */

/* Small whole numbers: their sums are exact in any order. */
void token_floats(uint32_t token, uint32_t at, float ret[BLOCK_BYTES / 4]) {
        for (uint32_t plane = 0; plane < 4; plane++)
                for (uint32_t i = 0; i < 8; i++) {
                        uint32_t h = (token * 2654435761u) ^ ((plane * 8 + i) * 40503u);

                        h = (h ^ h >> 15) * 2246822519u;
                        ret[(plane * BT + at) * 8 + i] = (float)((int)(h >> 20) % 17 - 8);
                }
}

static void tokens_floats(const uint32_t *tokens, uint32_t n, float ret[BLOCK_BYTES / 4]) {
        memset(ret, 0, BLOCK_BYTES);
        for (uint32_t i = 0; i < n; i++)
                token_floats(tokens[i], i, ret);
}

static off_t block_at(struct space *space, kvd_ref ref, int *fd) {
        uint32_t id = kvd_ref_id(ref), per = space_index(space)->segment_blocks;

        *fd = space_worker_segment_fd(space, id / per);
        ck_assert_int_ge(*fd, 0);
        return (off_t)(id % per) * BLOCK_BYTES;
}

void block_floats(struct space *space, kvd_ref ref, float ret[BLOCK_BYTES / 4]) {
        int fd;
        off_t at = block_at(space, ref, &fd);

        ck_assert_int_eq(pread(fd, ret, BLOCK_BYTES, at), BLOCK_BYTES);
}

void fixture_write(struct space *space, kvd_ref ref, const void *from) {
        int fd;
        off_t at = block_at(space, ref, &fd);

        ck_assert_int_eq(pwrite(fd, from, BLOCK_BYTES, at), BLOCK_BYTES);
}

/* ---- client ---------------------------------------------------------------------------------- */

static void pin(struct table *t, kvd_ref ref, int by) {
        if (t->words && ref)
                atomic_fetch_add(&t->words[kvd_ref_id(ref)].pins, (uint32_t)by);
}

void table_open(struct table *t, struct attachment *a, uint32_t max_blocks, bool pins) {
        memset(t, 0, sizeof *t);
        t->a = a;
        if (pins) {
                uint8_t *page = mmap(NULL, attachment_pin_bytes(a), PROT_READ | PROT_WRITE,
                                     MAP_SHARED, attachment_pin_fd(a), 0);

                ck_assert_ptr_ne(page, MAP_FAILED);
                t->words = (struct kvd_pin_words *)(page + KVD_PINS_OFF);
        }
        ck_assert_msg(sequence_open(a, max_blocks, &t->number) == 0, "%s", store_why(store));
}

struct kvd_use *table_use(const struct table *t, kvd_ref ref) {
        uint8_t *page = (uint8_t *)t->words - KVD_PINS_OFF;
        uint32_t capacity = space_index(attachment_space(t->a))->capacity;

        return (struct kvd_use *)(page + kvd_use_off(capacity)) + kvd_ref_id(ref);
}

static int fill(struct table *t, const uint32_t *tokens, uint32_t n, kvd_ref *ret) {
        float floats[BLOCK_BYTES / 4];
        int r = space_allocate(t->a, 1, ret);

        if (r < 0)
                return r;
        tokens_floats(tokens, n, floats);
        fixture_write(attachment_space(t->a), *ret, floats);
        return 0;
}

int table_append(struct table *t, uint32_t n_tokens, uint32_t first_token) {
        uint32_t n = DIV_UP(n_tokens, BT), first, *tokens = t->tokens + t->n_tokens;
        kvd_ref blocks[TABLE_MAX];
        struct append_request req = {.own = true,
                                     .n_blocks = n,
                                     .blocks = blocks,
                                     .n_tokens = n_tokens,
                                     .tokens = tokens};
        int r = 0;

        for (uint32_t i = 0; i < n_tokens; i++)
                tokens[i] = first_token + i;
        for (uint32_t i = 0; i < n; i++) {
                r = fill(t, tokens + i * BT, MIN(BT, n_tokens - i * BT), &blocks[i]);
                if (r < 0) {
                        space_release(t->a, blocks, i);
                        return r;
                }
        }
        r = sequence_append(t->a, t->number, &req, &first);
        if (r < 0) {
                space_release(t->a, blocks, n);
                return r;
        }
        ck_assert_uint_eq(first, t->n);
        for (uint32_t i = 0; i < n; i++, t->n++) {
                t->slots[t->n] = (struct slot){blocks[i], KVD_ENTRY_OWN, t->n_tokens,
                                               MIN(BT, n_tokens - i * BT), 0};
                t->n_tokens += t->slots[t->n].n_tokens;
                pin(t, blocks[i], 1);
        }
        return 0;
}

static void unmap(struct table *t) {
        if (t->words)
                munmap((uint8_t *)t->words - KVD_PINS_OFF, attachment_pin_bytes(t->a));
        t->words = NULL;
}

void table_forget(struct table *t) {
        unmap(t);
        t->a = NULL;
}

void table_close(struct table *t) {
        ck_assert_int_eq(sequence_close(t->a, t->number), 0);
        for (uint32_t i = 0; i < t->n; i++)
                if (!(t->slots[i].flags & KVD_ENTRY_BORROWED))
                        pin(t, t->slots[i].ref, -1);
        table_forget(t);
}

static void apply(struct table *t, const struct kvd_change *c) {
        struct slot *s = &t->slots[c->slot];

        ck_assert_uint_lt(c->slot, t->n);
        if (c->kind == KVD_CHANGE_REMAP || c->kind == KVD_CHANGE_ARRIVE)
                ck_assert_uint_ne(c->ref, 0);
        pin(t, c->kind == KVD_CHANGE_LEAVE ? 0 : c->ref, 1);
        pin(t, s->ref, -1);
        s->ref = c->kind == KVD_CHANGE_LEAVE ? 0 : c->ref;
        s->flags = c->flags;
        s->delta = c->kind == KVD_CHANGE_COMPACT ? 0 : c->delta;
        if (c->kind == KVD_CHANGE_COMPACT && c->ref)
                s->n_tokens = c->n_tokens;
}

uint32_t table_peek(struct table *t, struct kvd_change *ret) {
        int n = sequence_sync(t->a, t->number, NULL, 0, ret);

        ck_assert_int_ge(n, 0);
        return (uint32_t)n;
}

bool takes_nothing(const struct kvd_change *change) {
        return false;
}

uint32_t table_sync(struct table *t, bool (*takes)(const struct kvd_change *)) {
        struct kvd_change changes[KVD_SYNC_CHANGES];
        uint32_t taken[KVD_SYNC_CHANGES], applied = 0;
        int n = sequence_sync(t->a, t->number, NULL, 0, changes);

        while (n > 0) {
                for (int i = 0; i < n; i++) {
                        taken[i] = !takes || takes(&changes[i]);
                        if (taken[i])
                                apply(t, &changes[i]);
                        applied += taken[i];
                }
                n = sequence_sync(t->a, t->number, taken, (uint32_t)n, changes);
                ck_assert_int_ge(n, 0);
        }
        return applied;
}

static void check_contents(const struct table *t, uint32_t slot) {
        const struct slot *s = &t->slots[slot];
        float have[BLOCK_BYTES / 4], want[BLOCK_BYTES / 4];

        if (!s->ref || (s->flags & (KVD_ENTRY_APPROX | KVD_ENTRY_SHARED | KVD_ENTRY_COMPACT)))
                return;
        tokens_floats(t->tokens + s->position, s->n_tokens, want);
        block_floats(attachment_space(t->a), s->ref, have);
        ck_assert_msg(memcmp(have, want, sizeof want) == 0, "entry %u has wrong bytes", slot);
}

void table_check(const struct table *t) {
        struct sequence *q = sequence_find(t->a, t->number);
        uint32_t gone = KVD_ENTRY_SPILLED | KVD_ENTRY_VAGUE | KVD_ENTRY_DROPPED;

        ck_assert_ptr_nonnull(q);
        ck_assert_uint_eq(q->n_entries, t->n);
        for (uint32_t i = 0; i < t->n; i++) {
                const struct slot *s = &t->slots[i];

                ck_assert_uint_eq(q->entries[i].ref, s->ref);
                ck_assert_int_eq(!s->ref, !!(s->flags & gone));
                ck_assert_int_eq(!(s->flags & KVD_ENTRY_DROPPED),
                                 s->ref || (s->flags & (KVD_ENTRY_SPILLED | KVD_ENTRY_VAGUE)));
                /* an entry with a change under way differs */
                if (!q->entries[i].untold && !(q->entries[i].busy == OFFERED && !q->entries[i].ref))
                        ck_assert_uint_eq(q->entries[i].flags, s->flags);
                check_contents(t, i);
        }
}
