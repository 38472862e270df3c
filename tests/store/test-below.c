/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A tier below the pool is one struct below_ops: this one keeps blocks in this process. The sweep
 * and the fetches that serve the file and the servers serve it, too.
 */

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "store/below/bring.h"
#include "store/below/carry.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

#define N 16u       /* blocks of a chain */
#define AT_ONCE 3u  /* blocks of a request */
#define MOST 100u   /* requests, if they end at all */
#define RECORDS 64u /* blocks that the tier can have */

/* ---- the tier ------------------------------------------------------------------------------- */

struct record {
        uint32_t up; /* 1 + number of its parent's record; 0: the root */
        uint32_t tokens[BT];
        uint8_t bytes[BLOCK_BYTES];
};

static struct memory_tier {
        struct below below;
        struct below_space state;
        bool on;
        struct record records[RECORDS];
        uint32_t n_records, most;
        kvd_ref blocks[RECORDS];   /* the block that has the record; 0: none */
        uint32_t planned[AT_ONCE]; /* records that the request reads or writes */
        struct below_name names[N];
} tier;

static struct space *space;
static struct attachment *a;
static uint32_t tokens[N * BT];
static int32_t errors[AT_ONCE];

static struct below_space *state(const struct space *s) {
        return &tier.state;
}

static bool serves(const struct below *b, const struct space *s) {
        return tier.on && s == space;
}

static bool may_begin(struct below *b, struct space *s) {
        return true;
}

static bool is_full(const struct below *b) {
        return b->n_blocks == AT_ONCE;
}

/* 1 + number of the block's record, or 0. */
static uint32_t record_of(uint32_t id) {
        for (uint32_t i = 0; id != NONE && i < tier.n_records; i++)
                if (tier.blocks[i] == block_ref(space, id))
                        return i + 1;
        return 0;
}

static uint32_t record_behind(uint32_t up, const uint32_t *of) {
        for (uint32_t i = 0; i < tier.n_records; i++)
                if (tier.records[i].up == up && memcmp(tier.records[i].tokens, of, BT * 4) == 0)
                        return i + 1;
        return 0;
}

static bool find(struct below *b, struct space *s, const struct fetch_request *q,
                 const struct chain_at *at, struct below_found *ret) {
        uint32_t n = 0, up = at->leaf ? record_of(kvd_ref_id(at->leaf)) : 0;

        if (!serves(b, s) || (at->leaf && !up))
                return false;
        for (uint32_t i = at->depth; i < q->n_tokens / BT; i++, n++) {
                up = record_behind(up, q->tokens + i * BT);
                if (!up)
                        break;
                tier.names[n] = (struct below_name){{up}};
        }
        *ret = (struct below_found){.n = n, .n_tokens = n * BT, .names = tier.names};
        return n;
}

static void begin_read(struct below *b, struct space *s) {
        ck_assert_uint_eq(b->n_blocks, 0);
}

static bool may_read(struct below *b, const struct fetch *f, uint32_t i) {
        return true;
}

static void add_read(struct below *b, const struct fetch *f, uint32_t i, kvd_ref to) {
        tier.planned[b->n_blocks - 1] = (uint32_t)f->names[i + 1].word[0] - 1;
}

static void was_read(struct below *b, uint32_t i, int error) {
}

static int begin_write(struct below *b, struct space *s) {
        ck_assert_uint_eq(b->n_blocks, 0);
        if (tier.n_records + AT_ONCE > tier.most)
                tier.n_records = 0; /* everything is evicted */
        return 1;
}

static bool has(const struct below *b, const struct space *s, uint32_t id) {
        return record_of(id);
}

static int add_write(struct below *b, struct space *s, uint32_t id) {
        struct record *r = &tier.records[tier.n_records];

        if (tier.n_records == RECORDS)
                return -ENOSPC;
        r->up = record_of(block_of(s, id)->parent);
        memcpy(r->tokens, block_desc(s, id)->tokens, sizeof r->tokens);
        below_hold(b, s, block_ref(s, id));
        tier.planned[b->n_blocks - 1] = tier.n_records;
        tier.blocks[tier.n_records++] = block_ref(s, id);
        return 0;
}

static bool end_write(struct below *b) {
        return b->n_blocks;
}

static void note(struct below *b, struct space *s, uint32_t id, struct below_name name) {
        tier.blocks[name.word[0] - 1] = block_ref(s, id);
}

static const struct below_ops ops = {.evicts = true,
                                     .state = state,
                                     .serves = serves,
                                     .may_begin = may_begin,
                                     .is_full = is_full,
                                     .find = find,
                                     .begin_read = begin_read,
                                     .may_read = may_read,
                                     .add_read = add_read,
                                     .was_read = was_read,
                                     .begin_write = begin_write,
                                     .has = has,
                                     .add_write = add_write,
                                     .add_prefix = sweep_add_path,
                                     .end_write = end_write,
                                     .note = note};

/* ---- its requests ---------------------------------------------------------------------------- */

static int memory_of(kvd_ref block, uint64_t *offset) {
        int fd = carry_memory(NULL, 0, space, block, offset);

        ck_assert_int_ge(fd, 0);
        return fd;
}

static void move(bool read) {
        for (uint32_t i = 0; i < tier.below.n_blocks; i++) {
                uint8_t *bytes = tier.records[tier.planned[i]].bytes;
                uint64_t offset;
                int fd = memory_of(tier.below.blocks[i], &offset);
                ssize_t n = read ? pwrite(fd, bytes, BLOCK_BYTES, (off_t)offset) :
                                   pread(fd, bytes, BLOCK_BYTES, (off_t)offset);

                ck_assert_int_eq(n, BLOCK_BYTES);
        }
}

static void answer(void) {
        bool read = tier.below.reading;

        move(read);
        if (read)
                bring_done(&tier.below, errors, tier.below.n_blocks);
        else
                below_let_go(&tier.below);
}

static bool ask(void) {
        bool later;

        return below_next(&tier.below, &later);
}

/* Answers requests until there are no more. Returns how many there were. */
static uint32_t serve(void) {
        uint32_t n = 0;

        for (uint32_t quiet = 0; quiet < 4; quiet++) {
                idle();
                for (; n < MOST && ask(); n++, quiet = 0)
                        answer();
        }
        ck_assert_uint_lt(n, MOST);
        return n;
}

/* ---- a chain --------------------------------------------------------------------------------- */

static void fill(kvd_ref block, uint8_t with) {
        uint8_t bytes[BLOCK_BYTES];
        uint64_t offset;
        int fd = memory_of(block, &offset);

        memset(bytes, with, sizeof bytes);
        ck_assert_int_eq(pwrite(fd, bytes, sizeof bytes, (off_t)offset), BLOCK_BYTES);
}

static bool is_filled(kvd_ref block, uint8_t with) {
        uint8_t bytes[BLOCK_BYTES];
        uint64_t offset;
        int fd = memory_of(block, &offset);

        ck_assert_int_eq(pread(fd, bytes, sizeof bytes, (off_t)offset), BLOCK_BYTES);
        return bytes[0] == with && memcmp(bytes, bytes + 1, sizeof bytes - 1) == 0;
}

static void make_chain(void) {
        kvd_ref refs[N];
        struct seal_request q = {.n_blocks = N,
                                 .blocks = refs,
                                 .n_tokens = N * BT,
                                 .tokens = tokens};

        for (uint32_t i = 0; i < N * BT; i++)
                tokens[i] = i + 1;
        ck_assert_int_eq(space_allocate(a, N, refs), N);
        for (uint32_t i = 0; i < N; i++)
                fill(refs[i], (uint8_t)(i + 1));
        ck_assert_int_eq(space_seal(a, &q, refs), 0);
}

static void evict(void) {
        bool more = true;

        while (more)
                space_evict(space, N, KVD_ROOT, &more);
        ck_assert_uint_eq(usage_of(space).sealed, 0);
}

/* Compares all blocks of the chain that are resident. Returns their number. */
static uint32_t right(void) {
        struct fetch_request q = {.n_tokens = N * BT, .tokens = tokens};

        for (uint32_t n = 1; n <= N; n++) {
                struct chain_at at;

                q.n_tokens = n * BT;
                at = bring_walk(space, &q);
                if (at.depth < n)
                        return n - 1;
                ck_assert(is_filled(at.leaf, (uint8_t)n));
        }
        return N;
}

static int fetch(int64_t promised) {
        struct fetch_request q = {.n_tokens = N * BT, .tokens = tokens};
        int fd;

        ck_assert_int_eq(space_fetch(a, &q, &fd), promised);
        return fd;
}

static bool has_ended(int fd) {
        struct pollfd p = {.fd = fd, .events = POLLIN};

        return poll(&p, 1, 0) == 1;
}

static void begin(void) {
        memset(&tier, 0, sizeof tier);
        memset(errors, 0, sizeof errors);
        tier.on = true;
        tier.most = RECORDS;
        fixture_open(4 * N, 0);
        below_begin(&tier.below, store, &ops);
        space = fixture_space("s", 0);
        a = fixture_attach(space);
        make_chain();
}

static void end(void) {
        if (space)
                check_clean(space);
        fixture_close();
}

/* ---- tests ----------------------------------------------------------------------------------- */

START_TEST(what_is_written_comes_back) {
        int fd;

        ck_assert_uint_eq(serve(), (N + AT_ONCE - 1) / AT_ONCE);
        ck_assert_uint_eq(tier.n_records, N);
        check_clean(space);
        evict();
        fd = fetch(N * BT);
        ck_assert(!has_ended(fd));
        ck_assert_uint_eq(serve(), (N + AT_ONCE - 1) / AT_ONCE);
        ck_assert(has_ended(fd));
        close(fd);
        ck_assert_uint_eq(right(), N);
        ck_assert_uint_eq(tier.n_records, N); /* nothing is written again */
        ck_assert_int_eq(fetch(N * BT), -1);
}
END_TEST

/* A path was once written from its beginning for ever, if the tier evicted its first blocks. */
START_TEST(a_path_that_does_not_fit_is_given_up) {
        tier.below.depth = N * BT; /* only the last block is admitted */
        tier.most = N / 2;
        ck_assert_uint_gt(serve(), 1);
        tier.most = RECORDS;
        below_changes(&tier.below);
        ck_assert_uint_eq(serve(), 0); /* until it is used again */
}
END_TEST

START_TEST(a_fetch_ends_at_a_block_that_is_broken) {
        int fd;

        serve();
        evict();
        fd = fetch(N * BT);
        ck_assert(ask());
        answer();
        ck_assert(ask());
        errors[1] = -EBADMSG;
        answer();
        ck_assert(has_ended(fd));
        close(fd);
        ck_assert_uint_eq(right(), AT_ONCE + 1);
        ck_assert(!ask() || !tier.below.reading);
}
END_TEST

/* A client that is killed, or a space that is deleted, in the middle of a request. */
START_TEST(what_leaves_does_not_wait_for_a_request) {
        int fd;

        serve();
        evict();
        fd = fetch(N * BT);
        ck_assert(ask());
        if (_i == 0) {
                attachment_free(a, true);
                check_clean(space);
                answer();
                ck_assert_uint_eq(right(), AT_ONCE);
        } else {
                ck_assert_int_eq(space_delete(space, true), 0);
                ck_assert_ptr_null(tier.below.space);
                bring_done(&tier.below, NULL, 0);
                space = NULL;
        }
        ck_assert(has_ended(fd));
        ck_assert_ptr_null(tier.below.fetches.first);
        close(fd);
}
END_TEST

START_TEST(a_tier_that_is_off_is_not_asked) {
        serve();
        evict();
        tier.on = false;
        ck_assert_int_eq(fetch(0), -1);
        make_chain();
        ck_assert_uint_eq(serve(), 0);
        tier.on = true;
        below_changes(&tier.below); /* it may have lost everything meanwhile */
        tier.n_records = 0;
        ck_assert_uint_gt(serve(), 0);
        ck_assert_uint_eq(tier.n_records, N);
}
END_TEST

SUITE("below", FIXTURE(begin, end), LOOPS(2, what_leaves_does_not_wait_for_a_request),
      TESTS(what_is_written_comes_back, a_path_that_does_not_fit_is_given_up,
            a_fetch_ends_at_a_block_that_is_broken, a_tier_that_is_off_is_not_asked))
