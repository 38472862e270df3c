/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/store/random_tiers.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/device.h"
#include "ipc/base/sys.h"
#include "store/below/bring.h"
#include "store/file/file.h"
#include "store/remote/inside.h"
#include "tests/lib/mark.h"

#define SLOT file_slot_bytes(BLOCK_BYTES, BT)
#define EXTENTS 8u /* at most */
#define EXTENT_BYTES ((uint64_t)DISK_SECTOR + 32 * SLOT)
#define NAMES (1u << 14) /* a power of two */
#define APART 2000u      /* tokens from one chain to the next */

struct record { /* on the disk */
        bool there;
        struct kvd_label label;
        uint64_t content;
        uint32_t tokens[BT];
};

struct named { /* on the servers */
        bool there;
        struct kvd_key name; /* zeros: unused */
        uint64_t content;
        uint32_t last; /* its last token */
};

static struct {
        enum tiers_kind kind;
        struct random *chance;
        bool calm;
        uint64_t now_ns;
        uint32_t lives[10]; /* deleted spaces, by the last digit of their names */
        const struct store_disk_question *disk;
        const struct store_remote_question *servers;
        bool disk_is_gone;
        struct file_super super;
        struct record records[EXTENTS * FILE_SLOTS];
        struct named named[NAMES];
} tiers;

static bool happens(uint32_t percent) {
        return !tiers.calm && random_below(tiers.chance, 100) < percent;
}

/* How many of n items an answer has: it may be short. */
static uint32_t answered_of(uint32_t n) {
        return happens(3) ? random_below(tiers.chance, n) : n;
}

bool tiers_are_files(void) {
        return tiers.kind != TIERS_SERVERS && tiers.kind != TIERS_SERVERS_GPU;
}

/* ---- contents -------------------------------------------------------------------------------- */

uint32_t tiers_token(bool whole, uint32_t chain, uint32_t nth) {
        return (1 + (!whole && nth < TIERS_SHARED * BT ? chain / 3 : chain)) * APART + nth;
}

uint32_t tiers_token_before(bool whole, uint32_t token) {
        uint32_t nth = token % APART;

        if (nth == TIERS_SHARED * BT)
                return tiers_token(whole, token / APART - 1, nth - 1);
        return nth ? token - 1 : 0;
}

static uint32_t number_of(const struct space *space) {
        const char *name = space_name(space);

        return (uint32_t)(name[strlen(name) - 1] - '0');
}

uint64_t tiers_content(const struct space *space, uint64_t root, const uint32_t *tokens,
                       uint32_t n_tokens) {
        uint64_t of = tiers_are_files() ? tiers.lives[number_of(space)] : 0;

        return oracle_seed(of << 40 | root << 8 | number_of(space), tokens, n_tokens);
}

void tiers_bury(const struct space *space) {
        tiers.lives[number_of(space)]++;
}

/* Do the bytes that a tier writes follow from the block's tokens? */
static void expect_bytes(int fd, uint64_t offset, uint64_t content) {
        uint8_t bytes[BLOCK_BYTES];

        ck_assert_int_eq(pread(fd, bytes, sizeof bytes, (off_t)offset), BLOCK_BYTES);
        ck_assert_msg(!oracle_wrong(bytes, sizeof bytes, content), "wrong bytes are written");
}

/* Returns their checksum, as the worker computes it. */
static uint64_t bring_bytes(int fd, uint64_t offset, uint64_t content) {
        uint8_t bytes[BLOCK_BYTES];

        oracle_fill(bytes, sizeof bytes, content);
        ck_assert_int_eq(pwrite(fd, bytes, sizeof bytes, (off_t)offset), BLOCK_BYTES);
        return worker_checksum(bytes);
}

/* ---- a disk ---------------------------------------------------------------------------------- */

static void look(void) {
        const struct file_super copies[FILE_COPIES] = {tiers.super, tiers.super};

        tiers.disk_is_gone = false;
        store_disk_looked(store, 0, copies, sizeof copies);
}

/* With zeros in the secret, XXH3 gives chains of different salts the same tag. */
static void make_secret(struct file_super *super) {
        struct random all = {1};

        for (size_t i = 0; i < sizeof super->secret; i++)
                super->secret[i] = (uint8_t)random_below(&all, 256);
        file_sector_seal(super->secret, FILE_SUPER, &super->mark);
}

/* Often less than the pool, but never more than the memory for copies. */
static void open_file(void) {
        uint64_t host = tiers.kind == TIERS_HOST     ? 20 + random_below(tiers.chance, 400) :
                        tiers.kind == TIERS_FILE_GPU ? random_below(tiers.chance, 100) :
                                                       0;
        uint32_t extents = 2 + random_below(tiers.chance, EXTENTS - 1);
        struct store_disk_config config = {.there = tiers.kind != TIERS_HOST,
                                           .bytes = FILE_HEAD + extents * EXTENT_BYTES,
                                           .host = host * SLOT};

        fixture_super(&tiers.super, extents, EXTENT_BYTES);
        make_secret(&tiers.super);
        ck_assert_int_eq(store_disk_begin(store, &config), 0);
        if (config.there)
                look();
}

static int32_t disk_error(bool writes) {
        if (writes)
                return random_below(tiers.chance, 1000) || tiers.calm ? 0 : -EIO;
        return happens(2) ? -EBADMSG : happens(1) ? -EIO : 0;
}

static void write_record(const struct store_disk_question *q, uint32_t i) {
        const struct store_disk_item *item = &q->items[i];
        const struct kvd_desc *desc = block_desc(q->space, kvd_ref_id(item->block));
        struct record *r = &tiers.records[item->place];
        uint64_t offset;
        int fd = store_disk_memory(store, i, &offset);

        ck_assert_int_eq(memcmp(item->tokens, desc->tokens, desc->n_tokens * 4), 0);
        *r = (struct record){.there = true,
                             .label = item->label,
                             .content = tiers_content(q->space, desc->root, item->tokens,
                                                      desc->n_tokens)};
        memcpy(r->tokens, item->tokens, desc->n_tokens * 4);
        expect_bytes(fd, offset, r->content);
}

static uint64_t read_record(const struct store_disk_question *q, uint32_t i) {
        const struct store_disk_item *item = &q->items[i];
        const struct record *r = &tiers.records[item->place];
        uint64_t offset;
        int fd = store_disk_memory(store, i, &offset);

        ck_assert_msg(r->there, "nothing was written at place %llu",
                      (unsigned long long)item->place);
        ck_assert_int_eq(memcmp(&r->label, &item->label, sizeof r->label), 0);
        ck_assert_int_eq(memcmp(r->tokens, item->tokens, r->label.n_tokens * 4), 0);
        return bring_bytes(fd, offset, r->content);
}

/* Of a deleted space, nothing is known any more but places. */
static int32_t move_block(const struct store_disk_question *q, uint32_t i, bool answered,
                          uint64_t *checksum) {
        bool writes = q->what == STORE_DISK_WRITE;
        int32_t error = disk_error(writes);

        if (writes)
                tiers.records[q->items[i].place].there = false;
        if (!q->space || error || !answered)
                return error;
        if (writes)
                write_record(q, i);
        else
                *checksum = read_record(q, i);
        return 0;
}

static void move_blocks(const struct store_disk_question *q) {
        static int32_t errors[KVD_DISK_ITEMS];
        static uint64_t checksums[KVD_DISK_ITEMS];
        uint32_t n = answered_of(q->n);

        for (uint32_t i = 0; i < q->n; i++)
                errors[i] = move_block(q, i, i < n, &checksums[i]);
        store_disk_moved(store, errors, checksums, n);
}

static void answer_disk(const struct store_disk_question *q) {
        if (q->what == STORE_DISK_SCAN) {
                store_disk_scanned(store, 0, 0, NULL, 0);
        } else if (q->what != STORE_DISK_SUPER) {
                move_blocks(q);
        } else if (happens(10)) {
                store_disk_told(store, -EAGAIN);
        } else {
                memcpy(&tiers.super, q->super, sizeof tiers.super);
                store_disk_told(store, 0);
        }
}

static void lose_disk(void) {
        tiers.disk = NULL;
        tiers.disk_is_gone = true;
        store_disk_lost(store);
}

/* Only a disk that owes an answer is slow or hangs. */
static bool disk_trouble(void) {
        uint32_t what = random_below(tiers.chance, 4);

        if (tiers.kind == TIERS_HOST || tiers.disk_is_gone)
                return false;
        if (what == 0)
                lose_disk();
        else if (tiers.disk && what == 1)
                store_disk_hangs(store);
        else if (tiers.disk)
                store_disk_slow(store);
        return tiers.disk && what == 1;
}

/* ---- servers --------------------------------------------------------------------------------- */

static bool is_whole(const struct space *space) {
        return space_index(space)->kind == KVD_kind_bidirectional;
}

/* The block's entry, or the unused one where it would be. */
static struct named *entry_of(struct kvd_key name) {
        uint32_t at = (uint32_t)name.lo % NAMES;

        for (uint32_t i = 0; i < NAMES; i++, at = (at + 1) % NAMES) {
                struct named *e = &tiers.named[at];

                if ((!e->name.lo && !e->name.hi) || memcmp(&e->name, &name, sizeof name) == 0)
                        return e;
        }
        ck_abort_msg("the servers are full");
}

static struct kvd_key name_behind(struct kvd_key up, const struct space *space, uint64_t root,
                                  const uint32_t *tokens, uint32_t n) {
        uint32_t all[4 + TIERS_LONGEST * BT] = {(uint32_t)up.lo, (uint32_t)(up.lo >> 32),
                                                number_of(space), (uint32_t)root};
        uint64_t h;

        ck_assert_uint_le(n, TIERS_LONGEST * BT);
        memcpy(all + 4, tokens, n * 4);
        h = oracle_seed(1, all, 4 + n);
        return (struct kvd_key){h, ~h};
}

/* The tokens must be those behind the block of that name; zeros: those of a chain's beginning. */
static void expect_behind(const struct space *space, struct kvd_key up, const uint32_t *tokens) {
        const struct named *e = entry_of(up);
        uint32_t before = tiers_token_before(is_whole(space), tokens[0]);

        if (!is_whole(space) || before)
                ck_assert_msg(e->last == before, "token %u behind token %u", tokens[0], e->last);
}

/* names: of the block before the first one looked for, then of all blocks behind it. */
static uint32_t name_all(const struct store_remote_question *q, struct kvd_key *names) {
        bool whole = is_whole(q->space);
        uint32_t end = whole ? q->n_tokens : q->n_tokens / BT * BT, n = 0;

        names[0] = q->behind;
        if (whole)
                names[0] = name_behind((struct kvd_key){0}, q->space, q->root, q->tokens, end);
        for (uint32_t at = 0; at < end && n < KVD_REMOTE_FOUND; at += BT) {
                struct kvd_key up = names[n];

                n += at / BT >= q->first;
                names[n] = name_behind(up, q->space, q->root, q->tokens + at, MIN(BT, end - at));
        }
        return n;
}

static void find_blocks(const struct store_remote_question *q) {
        static struct kvd_key names[KVD_REMOTE_FOUND + 1];
        uint32_t n = 0, all;

        expect_behind(q->space, q->behind, q->tokens);
        all = name_all(q, names);
        while (n < all && entry_of(names[n + 1])->there)
                n++;
        store_remote_found(store, names, 1 + n);
}

static uint64_t get_block(const struct store_remote_question *q, uint32_t i, int32_t *error) {
        const struct store_remote_item *it = &q->items[i];
        struct kvd_key name = name_behind(it->item.parent, q->space, it->item.root, it->tokens,
                                          it->item.n_tokens);
        const struct named *e = entry_of(name);
        uint64_t offset;
        int fd = store_remote_memory(store, i, &offset);

        ck_assert_int_eq(memcmp(&name, &it->item.name, sizeof name), 0);
        ck_assert_msg(e->name.lo, "block %u of a GET was never written", i);
        if (!e->there)
                *error = -ENOENT;
        return *error ? 0 : bring_bytes(fd, offset, e->content);
}

static void put_block(const struct store_remote_question *q, uint32_t i, struct kvd_key *names,
                      bool fails) {
        const struct store_remote_item *it = &q->items[i];
        struct kvd_key up = it->item.behind ? names[it->item.behind - 1] : it->item.parent;
        struct named *e;
        uint64_t offset,
                content = tiers_content(q->space, it->item.root, it->tokens, it->item.n_tokens);
        int fd = store_remote_memory(store, i, &offset);

        expect_bytes(fd, offset, content);
        expect_behind(q->space, up, it->tokens);
        names[i] = name_behind(up, q->space, it->item.root, it->tokens, it->item.n_tokens);
        e = entry_of(names[i]);
        *e = (struct named){.there = e->there || !fails,
                            .name = names[i],
                            .content = content,
                            .last = it->tokens[it->item.n_tokens - 1]};
}

static int32_t servers_error(void) {
        return happens(3) ? -EREMOTEIO : 0;
}

static void get_blocks(const struct store_remote_question *q) {
        static int32_t errors[KVD_REMOTE_ITEMS];
        static uint64_t checksums[KVD_REMOTE_ITEMS];

        for (uint32_t i = 0; i < q->n; i++) {
                errors[i] = servers_error();
                checksums[i] = get_block(q, i, &errors[i]);
        }
        store_remote_got(store, errors, checksums, answered_of(q->n));
}

static void put_blocks(const struct store_remote_question *q) {
        static int32_t errors[KVD_REMOTE_ITEMS];
        static struct kvd_key names[KVD_REMOTE_ITEMS];

        for (uint32_t i = 0; i < q->n; i++) {
                errors[i] = servers_error();
                put_block(q, i, names, errors[i]);
        }
        store_remote_put(store, names, errors, answered_of(q->n));
}

static void answer_servers(const struct store_remote_question *q) {
        if (!q->space || happens(2))
                store_remote_lost(store);
        else if (q->what == STORE_REMOTE_FIND)
                find_blocks(q);
        else if (q->what == STORE_REMOTE_GET)
                get_blocks(q);
        else
                put_blocks(q);
}

static void forget_blocks(void) {
        for (uint32_t i = 0; i < NAMES; i++)
                tiers.named[i].there = false;
}

static bool servers_trouble(void) {
        uint32_t away = random_below(tiers.chance, 3);

        if (happens(10))
                forget_blocks();
        store_remote_servers(store, 2, away, "away");
        return away == 2;
}

/* ---- both ------------------------------------------------------------------------------------ */

static int same_clock(uint64_t *ret) {
        *ret = tiers.now_ns += 1000;
        return 0;
}

static void fix_clock(void) {
        static struct kvd_sys fixed;

        fixed = *sys;
        fixed.clock_ns = same_clock;
        sys = &fixed;
}

void tiers_open(enum tiers_kind kind, uint32_t blocks, struct random *chance) {
        memset(&tiers, 0, sizeof tiers);
        tiers.kind = kind;
        tiers.chance = chance;
        fixture_open(blocks, blocks);
        fix_clock();
        store->config.backend = kind < TIERS_FILE_GPU ? KVD_BACKEND_HOST : KVD_BACKEND_VMM;
        if (tiers_are_files())
                open_file();
        else
                ck_assert_int_eq(store_remote_begin(store, &(struct store_remote_config){0}), 0);
        store->config.backend = KVD_BACKEND_HOST; /* the tests' worker carries, in host memory */
        if (!tiers_are_files())
                store_remote_servers(store, 1, 0, "");
}

void tiers_pass_time(uint64_t ns) {
        tiers.now_ns += ns;
}

bool tiers_ask(bool *later) {
        *later = false;
        if (tiers.kind == TIERS_HOST) {
                *later = store_host_next(store);
                return false;
        }
        if (tiers.disk_is_gone && !happens(75))
                look();
        if (tiers_are_files() && !tiers.disk)
                tiers.disk = store_disk_next(store, later);
        if (!tiers_are_files() && !tiers.servers)
                tiers.servers = store_remote_next(store, later);
        return tiers.disk || tiers.servers;
}

void tiers_answer(void) {
        const struct store_disk_question *disk = STEAL(tiers.disk);
        const struct store_remote_question *servers = STEAL(tiers.servers);

        if (disk)
                answer_disk(disk);
        if (servers)
                answer_servers(servers);
}

bool tiers_trouble(void) {
        return tiers_are_files() ? disk_trouble() : servers_trouble();
}

void tiers_calm(void) {
        tiers.calm = true;
        if (!tiers_are_files())
                store_remote_servers(store, 2, 0, "");
}

bool tiers_are_off(void) {
        return tiers_are_files() && store->file->disk.state == STORE_DISK_OFF;
}

/* Or has it left? */
static bool is_there(const struct space *space) {
        for (struct space *s = NULL; (s = store_space_after(store, s));)
                if (s == space)
                        return true;
        return false;
}

void tiers_check(void) {
        const struct below *b = store->below;
        bool asked = tiers_are_files() ? store->file->disk.asked || store->file->disk.ready :
                                         store->remote->asked || store->remote->ready;
        uint64_t n = 0;

        for (const struct kvd_list_node *node = b->fetches.first; node; node = node->next)
                n++;
        ck_assert_uint_eq(n, b->queue);
        if (!b->reading && !asked)
                ck_assert_uint_eq(b->n_blocks, 0);
        ck_assert(!b->space || is_there(b->space));
}
