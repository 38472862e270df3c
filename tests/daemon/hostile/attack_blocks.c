/* SPDX-License-Identifier: Apache-2.0 */

/* Well-formed requests that name other clients' objects, or impossible ones. */

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/layout.h"
#include "ipc/base/util.h"
#include "tests/daemon/hostile/hostile.h"
#include "tests/daemon/hostile/raw.h"

static struct kvd_msg seal_message(uint32_t space, const kvd_ref *refs, uint32_t n,
                                   const uint32_t *tokens) {
        return (struct kvd_msg){.number = KVD_MSG_seal,
                                .serial = 6,
                                .seal = {.space = space,
                                         .blocks = {refs, n * 8},
                                         .tokens = {tokens, n * VICTIM_BT * 4}}};
}

/* ---- other clients' objects ------------------------------------------------------------------ */

static void handles_of_others(const struct hostile *h) {
        struct kvd_msg m = {.number = KVD_MSG_allocate, .serial = 1, .allocate.count = 1};
        int mine = raw_attach(h->daemon.socket), other = raw_attach(h->daemon.socket);
        uint32_t handle = raw_open_space(other, "victim");

        for (uint32_t i = 0; i < 300; i++) {
                m.allocate.space = i < 260 ? i : i == 260 ? handle : UINT32_MAX - i;
                raw_expect_refusal(mine, &m, EBADF);
        }
        m = (struct kvd_msg){.number = KVD_MSG_detach, .serial = 1, .detach.space = handle};
        raw_expect_refusal(mine, &m, EBADF);
        m = (struct kvd_msg){.number = KVD_MSG_segments, .serial = 1, .segments.space = handle};
        raw_expect_refusal(mine, &m, EBADF);
}

/*
 * Every block of the victim's space, in every generation that it may have. The attacker must not be
 * able to release or seal any of them.
 */
static void blocks_of_others(const struct hostile *h) {
        int fd = raw_attach(h->daemon.socket);
        uint32_t space = raw_open_space(fd, "victim"), tokens[VICTIM_BT] = {1, 2, 3, 4};
        kvd_ref refs[512];

        for (uint32_t generation = 0; generation < 200; generation++) {
                for (uint32_t id = 0; id < ARRAY_SIZE(refs); id++)
                        refs[id] = kvd_ref_make(id, generation);
                if (raw_release(fd, space, refs, ARRAY_SIZE(refs)) != 0)
                        die("a block of the victim was released");
                for (uint32_t id = generation % 8; id < ARRAY_SIZE(refs); id += 61) {
                        struct kvd_msg m = seal_message(space, &refs[id], 1, tokens);

                        raw_expect_refusal(fd, &m, ESTALE);
                }
        }
        for (uint32_t i = 0; i < ARRAY_SIZE(refs); i++)
                refs[i] = UINT64_MAX - i * UINT64_C(0x100000001);
        if (raw_release(fd, space, refs, ARRAY_SIZE(refs)) != 0)
                die("a block that does not exist was released");
}

static void own_blocks_misused(const struct hostile *h) {
        int fd = raw_attach(h->daemon.socket), other = raw_attach(h->daemon.socket);
        uint32_t space = raw_open_space(fd, "misused"), second = raw_open_space(fd, "misused2");
        uint32_t other_space = raw_open_space(other, "misused"),
                 tokens[2 * VICTIM_BT] = {1, 2, 3, 4, 1, 2, 3, 4};
        kvd_ref refs[2], twice[2], wrong;
        struct kvd_msg m, reply;

        if (raw_allocate(fd, space, 2, refs) != 2)
                die("no blocks to misuse");
        twice[0] = twice[1] = refs[0];
        m = seal_message(space, twice, 2, tokens);
        raw_expect_refusal(fd, &m, ESTALE);
        m = seal_message(second, refs, 2, tokens); /* of another space of the same client */
        raw_expect_refusal(fd, &m, ESTALE);
        m = seal_message(other_space, refs, 2, tokens); /* by another client */
        raw_expect_refusal(other, &m, ESTALE);
        wrong = refs[0] + (UINT64_C(1) << 32);
        m = seal_message(space, &wrong, 1, tokens); /* of another generation */
        raw_expect_refusal(fd, &m, ESTALE);
        if (raw_release(fd, space, twice, 2) != 1 || raw_release(fd, space, &refs[1], 1) != 1)
                die("a block was released twice, or not at all");
        m = seal_message(space, refs, 2, tokens);
        raw_expect_refusal(fd, &m, ESTALE);
        if (raw_call(fd, &(struct kvd_msg){.number = KVD_MSG_daemon_info, .serial = 1}, &reply,
                     NULL) != 1)
                die("the connection has ended");
}

#define SALT UINT64_C(0x123456789abcdef)

static struct kvd_msg_seal salted(struct kvd_msg_seal seal, const kvd_ref *block) {
        seal.parent = KVD_ROOT;
        seal.root = SALT;
        seal.blocks = (struct kvd_slice){block, sizeof *block};
        return seal;
}

static void wrong_parents(const struct hostile *h) {
        int fd = raw_attach(h->daemon.socket);
        uint32_t space = raw_open_space(fd, "parent"), second = raw_open_space(fd, "parent2"),
                 tokens[] = {1, 2, 3, 4};
        kvd_ref refs[2], in_second;
        struct kvd_msg m, reply;

        if (raw_allocate(fd, space, 2, refs) != 2 || raw_allocate(fd, second, 1, &in_second) != 1)
                die("no blocks");
        m = seal_message(second, &in_second, 1, tokens);
        if (raw_call(fd, &m, &reply, NULL) != 1 || reply.number != KVD_MSG_seal_reply)
                die("seal");
        m = seal_message(space, refs, 1, tokens);
        /* blocks of another space, future blocks, nonexistent blocks, and the block itself */
        for (uint32_t i = 0; i < 40; i++) {
                m.seal.parent = i == 0 ? in_second :
                                i == 1 ? refs[0] :
                                i == 2 ? refs[1] :
                                i < 20 ? kvd_ref_make(i, i) :
                                         kvd_ref_make(UINT32_MAX - i, 1);
                raw_expect_refusal(fd, &m, ESTALE);
        }
        if (raw_call(fd,
                     &(struct kvd_msg){.number = KVD_MSG_seal,
                                       .serial = 1,
                                       .seal = salted(m.seal, refs)},
                     &reply, NULL) != 1 ||
            reply.number != KVD_MSG_seal_reply)
                die("seal under a salt");
        m = seal_message(space, refs + 1, 1, tokens);
        m.seal.parent = refs[0];
        for (uint32_t i = 0; i < 64; i++) { /* a chain continues only under its own salt */
                m.seal.root = (UINT64_C(1) << i) ^ SALT;
                raw_expect_refusal(fd, &m, EINVAL);
        }
}

/* ---- impossible values ----------------------------------------------------------------------- */

static void odd_counts(const struct hostile *h) {
        int fd = raw_attach(h->daemon.socket);
        uint32_t space = raw_open_space(fd, "odd"), tokens[16] = {0};
        kvd_ref refs[2];
        struct kvd_msg m;

        if (raw_allocate(fd, space, 2, refs) != 2)
                die("no blocks");
        tokens[2] = victim_geometry.vocab;
        m = seal_message(space, refs, 2, tokens);
        raw_expect_refusal(fd, &m, EINVAL); /* beyond the vocabulary */
        tokens[2] = 0;
        for (uint32_t n_tokens = 0; n_tokens <= 12; n_tokens++) {
                m.seal.tokens.size = n_tokens * 4;
                if (n_tokens <= VICTIM_BT || n_tokens > 2 * VICTIM_BT)
                        raw_expect_refusal(fd, &m, EINVAL);
        }
        for (uint32_t bytes = 1; bytes < 16; bytes++) {
                m = seal_message(space, refs, 2, tokens);
                m.seal.blocks.size = bytes;
                raw_expect_refusal(fd, &m, EINVAL);
        }
        m = seal_message(space, refs, 2, tokens);
        m.seal.group = 1;
        raw_expect_refusal(fd, &m, EINVAL);
        m = (struct kvd_msg){.number = KVD_MSG_allocate, .serial = 1, .allocate = {space, 0}};
        raw_expect_refusal(fd, &m, EINVAL);
}

struct change {
        const char *field; /* must be in the refusal */
        uint32_t offset;   /* in struct kvd_msg_space */
        uint32_t value;
};

#define CHANGE(name, value) \
        { #name, offsetof(struct kvd_msg_space, name), value }

static void other_geometry(const struct hostile *h) {
        static const struct change changes[] = {CHANGE(layers, 2),      CHANGE(kv_heads, 3),
                                                CHANGE(head_dim, 64),   CHANGE(block_tokens, 8),
                                                CHANGE(dtype, 2),       CHANGE(order, 2),
                                                CHANGE(rope, 2),        CHANGE(rope, 3),
                                                CHANGE(state_width, 5), CHANGE(vocab, 49999),
                                                CHANGE(kind, 2),        CHANGE(keys, 2),
                                                CHANGE(policy, 2),      CHANGE(dtype, 4)};
        int fd = raw_attach(h->daemon.socket);
        struct kvd_msg m;

        for (uint32_t i = 0; i < ARRAY_SIZE(changes); i++) {
                m = victim_space_message();
                *(uint32_t *)((uint8_t *)&m.space + changes[i].offset) = changes[i].value;
                if (!strstr(raw_expect_refusal(fd, &m, EEXIST), changes[i].field))
                        die("the refusal does not name %s", changes[i].field);
        }
        for (int i = 0; i < 2; i++) {
                m = victim_space_message();
                *(i ? &m.space.fingerprint1 : &m.space.fingerprint0) ^= UINT64_C(1) << 63;
                if (!strstr(raw_expect_refusal(fd, &m, EEXIST), "fingerprint"))
                        die("the refusal does not name the fingerprint");
        }
        m = (struct kvd_msg){.number = KVD_MSG_space,
                             .serial = 1,
                             .space = {.name = victim_space_message().space.name,
                                       .create = 1,
                                       .block_bytes = 4096,
                                       .layout = kvd_slice_of("opaque")}};
        if (!strstr(raw_expect_refusal(fd, &m, EEXIST), "block_bytes"))
                die("the refusal does not name block_bytes");
        m = victim_space_message();
        m.space.layers = 2;
        m.space.layer_groups = 2;
        if (!strstr(raw_expect_refusal(fd, &m, EEXIST), "layer"))
                die("the refusal does not name the layers");
}

static void impossible_opaque(int fd) {
        static const struct kvd_msg_space good = {.create = 1,
                                                  .block_bytes = 4096,
                                                  .block_tokens = 8};
        static const struct {
                uint64_t bytes;
                uint32_t layers;
                struct kvd_slice layout;
        } bad[] = {{4097, 0, {"x", 1}},
                   {32, 0, {"x", 1}},
                   {UINT64_MAX - 63, 0, {"x", 1}},
                   {UINT64_C(1) << 35, 0, {"x", 1}},
                   {4096, 0, {"", 0}},
                   {4096, 0, {"a b", 3}},
                   {4096, 0, {"\xff", 1}},
                   {4096, 1, {"x", 1}},
                   {4096, 0, {"012345678901234567890123456789/", 31}},
                   {4096, 0, {"\0x", 2}},
                   {0, 0, {"x", 1}}};
        struct kvd_msg m = {.number = KVD_MSG_space, .serial = 1, .space = good};

        m.space.name = kvd_slice_of("impossible");
        for (uint32_t i = 0; i < ARRAY_SIZE(bad); i++) {
                m.space.block_bytes = bad[i].bytes;
                m.space.layers = bad[i].layers;
                m.space.layout = bad[i].layout;
                raw_expect_refusal(fd, &m, EINVAL);
        }
}

static void impossible_geometry(const struct hostile *h) {
        static const struct change changes[] = {CHANGE(layers, 0),   CHANGE(kv_heads, 0),
                                                CHANGE(head_dim, 0), CHANGE(dtype, 0),
                                                CHANGE(vocab, 0),    CHANGE(layer_groups, 65535)};
        int fd = raw_attach(h->daemon.socket);
        struct kvd_msg m, reply;

        for (uint32_t i = 0; i < ARRAY_SIZE(changes); i++) {
                m = victim_space_message();
                m.space.name = kvd_slice_of("impossible");
                *(uint32_t *)((uint8_t *)&m.space + changes[i].offset) = changes[i].value;
                raw_expect_refusal(fd, &m, EINVAL);
        }
        m = victim_space_message();
        m.space.name = kvd_slice_of("huge");
        m.space.layers = m.space.kv_heads = m.space.head_dim = 65535;
        raw_expect_refusal(fd, &m, EINVAL);
        m.space.name = kvd_slice_of("a/b");
        raw_expect_refusal(fd, &m, EINVAL);
        impossible_opaque(fd);
        if (raw_call(fd, &(struct kvd_msg){.number = KVD_MSG_daemon_info, .serial = 1}, &reply,
                     NULL) != 1)
                die("the connection has ended");
}

/* ---- sessions -------------------------------------------------------------------------------- */

/* 0, or the errno of the refusal. */
static uint32_t begin_session(int fd, uint32_t space, uint32_t number, uint32_t keep,
                              const kvd_ref *ends, uint32_t n) {
        char name[16];
        struct kvd_msg m = {.number = KVD_MSG_session, .serial = 7}, reply;

        snprintf(name, sizeof name, "%u", number);
        m.session = (struct kvd_msg_session){.space = space,
                                             .name = kvd_slice_of(name),
                                             .keep = keep,
                                             .seconds = 604800,
                                             .blocks = {ends, n * (uint32_t)sizeof *ends}};
        if (raw_call(fd, &m, &reply, NULL) != 1)
                die("the connection has ended");
        return reply.number == KVD_MSG_error ? reply.error.code : 0;
}

/* A chain of one block, in whichever segment there is one. False: there are no more blocks. */
static bool seal_alone(int fd, uint32_t space, uint32_t number, kvd_ref *ret) {
        const uint32_t tokens[VICTIM_BT] = {number, 9, 9, 9};
        struct kvd_msg m, reply;

        if (raw_allocate(fd, space, 1, ret) != 1)
                return false;
        m = seal_message(space, ret, 1, tokens);
        return raw_call(fd, &m, &reply, NULL) == 1 && reply.number != KVD_MSG_error;
}

/* Pins one block after the other, all over the pool, and does not end the sessions. */
static void sessions_that_pin(const struct hostile *h) {
        int fd = raw_attach(h->daemon.socket);
        uint32_t space = raw_open_space(fd, "misused"), error = 0, n = 0;
        kvd_ref end;

        while (!error && seal_alone(fd, space, n, &end))
                error = begin_session(fd, space, n++, 2, &end, 1);
        if (error && error != EDQUOT && error != ENOBUFS)
                die("a session is refused with error %u", error);
        for (uint32_t i = 0; i < 2000; i++)
                begin_session(fd, space, i, i % 3, &end, 1);
        for (uint32_t id = 0; id < 512; id++) {
                end = kvd_ref_make(id, id % 40);
                begin_session(fd, space, 0, 2, &end, 1);
        }
}

/* As many chains as a message names, of blocks that leave again and again. */
static void sessions_of_many_chains(const struct hostile *h) {
        struct kvd_msg evict = {.number = KVD_MSG_evict, .serial = 8}, reply;
        int fd = raw_attach(h->daemon.socket);
        uint32_t space = raw_open_space(fd, "misused");
        kvd_ref ends[512], end;

        for (uint32_t round = 0; round < 20; round++) {
                if (!seal_alone(fd, space, round, &end))
                        continue;
                for (uint32_t i = 0; i < ARRAY_SIZE(ends); i++)
                        ends[i] = end;
                for (uint32_t i = 0; i < 33; i++)
                        begin_session(fd, space, i, 1 + (i + round) % 2, ends, ARRAY_SIZE(ends));
                evict.evict.space = kvd_slice_of("misused");
                raw_call(fd, &evict, &reply, NULL);
        }
}

const struct attack_row block_attacks[] =
        {{"handles of other clients", handles_of_others, 2},
         {"blocks and generations of other clients", blocks_of_others, 1},
         {"own blocks: twice, elsewhere, later", own_blocks_misused, 2},
         {"wrong parents", wrong_parents, 1},
         {"impossible counts and tokens", odd_counts, 1},
         {"each field of the geometry changed", other_geometry, 1},
         {"impossible geometry", impossible_geometry, 1},
         {"sessions that pin all they can", sessions_that_pin, 1},
         {"sessions of many chains", sessions_of_many_chains, 1},
         {0}};
