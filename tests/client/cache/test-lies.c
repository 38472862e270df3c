/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A daemon whose replies have the right form but make no sense. libkvd must believe none of them:
 * the call's error says what is wrong, nothing that was received stays mapped or open, and the same
 * call works as soon as the daemon tells the truth. The replies are a real daemon's, changed in
 * transit.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client/kvd.h"
#include "client/kvd_cuda.h"
#include "client/kvd_methods.h"
#include "ipc/base/layout.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "ipc/frame.h"
#include "ipc/msg.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"

#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})

/* OTHERS: leaves so few of 128 blocks that a seal asks for more */
enum { TOKENS = 4, BLOCKS = 2, OTHERS = 100, ALL = KVD_FRAME_FDS + 1 };

static struct instance server;
static struct kvd_decoder *decoder;

/* ---- lies ------------------------------------------------------------------------------------ */

/*
 * A message that is changed. n_fds: number of descriptors that come with it, the first ones or
 * copies.
 */
struct lie {
        uint32_t number;
        void (*tell)(struct kvd_msg *m);
        uint32_t n_fds;
        bool swapped; /* the first two descriptors */
        const char *words;
};

static const struct lie *lie; /* NULL: the truth */
static uint32_t n_told;

static void no_header(struct kvd_msg *m) {
        m->space_reply.index_bytes = 64;
}

static void a_large_index(struct kvd_msg *m) {
        m->space_reply.index_bytes *= 1000;
}

static void pins_for_an_index(struct kvd_msg *m) {
        m->space_reply.index_bytes = m->space_reply.pin_bytes;
}

static void another_vocabulary(struct kvd_msg *m) {
        m->space.vocab--;
}

static void no_segments(struct kvd_msg *m) {
        m->segments_reply.count = 0;
}

static void segments_without_memory(struct kvd_msg *m) {
        m->segments_reply.absent = UINT64_MAX >> (64 - m->segments_reply.count);
}

static void blocks_that_do_not_exist(struct kvd_msg *m) {
        static kvd_ref refs[BLOCKS];

        for (uint32_t i = 0; i < BLOCKS; i++)
                refs[i] = kvd_ref_make(UINT32_MAX / 2 + i, 1);
        m->allocate_reply.blocks = (struct kvd_slice){refs, sizeof refs};
}

static void more_blocks_than_there_were(struct kvd_msg *m) {
        static kvd_ref refs[BLOCKS + 1];

        m->seal_reply.blocks = (struct kvd_slice){refs, sizeof refs};
}

static bool said_fresh; /* since blocks were last requested */

static void fresh_blocks_that_do_not_exist(struct kvd_msg *m) {
        static kvd_ref refs[BLOCKS];

        for (uint32_t i = 0; i < BLOCKS; i++)
                refs[i] = kvd_ref_make(UINT32_MAX / 2 + i, 1);
        said_fresh = m->seal_reply.fresh.size;
        m->seal_reply.fresh = (struct kvd_slice){refs, sizeof refs};
}

static const struct lie lies[] = {
        {KVD_MSG_space + KVD_REPLY, NULL, 1, false, "two descriptors"},
        {KVD_MSG_space + KVD_REPLY, NULL, 3, false, "two descriptors"},
        {KVD_MSG_space + KVD_REPLY, no_header, ALL, false, "without a header"},
        {KVD_MSG_space + KVD_REPLY, a_large_index, ALL, false, "shorter than announced"},
        {KVD_MSG_space + KVD_REPLY, pins_for_an_index, ALL, true, "another version or broken"},
        {KVD_MSG_space, another_vocabulary, ALL, false, "another geometry"},
        {KVD_MSG_segments + KVD_REPLY, NULL, 0, false, "without descriptors"},
        {KVD_MSG_segments + KVD_REPLY, no_segments, 0, false, "does not exist"},
        {KVD_MSG_segments + KVD_REPLY, segments_without_memory, 0, false, "without memory"},
        {KVD_MSG_allocate + KVD_REPLY, blocks_that_do_not_exist, ALL, false, "does not exist"},
        {KVD_MSG_seal + KVD_REPLY, more_blocks_than_there_were, ALL, false, "number of blocks"},
};

/* ---- in transit ------------------------------------------------------------------------------ */

/* Returns the length of the changed frame; 0 if this is not the message to change. */
static size_t change(const void *frame, size_t size, uint8_t to[static KVD_FRAME_MAX]) {
        struct kvd_msg m;
        ssize_t n;

        if (!lie || kvd_msg_decode(decoder, frame, size, &m) < 0 || m.number != lie->number)
                return 0;
        if (lie->tell)
                lie->tell(&m);
        n_told++;
        n = kvd_msg_encode(&m, to, KVD_FRAME_MAX);
        ck_assert_int_gt(n, 0);
        return (size_t)n;
}

static void change_fds(struct msghdr *msg) {
        struct cmsghdr *c = CMSG_FIRSTHDR(msg);
        uint32_t n = c ? (uint32_t)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int)) : 0;
        int *fds = c ? (int *)(void *)CMSG_DATA(c) : NULL;

        if (!n || lie->n_fds == ALL)
                return;
        for (; n > lie->n_fds; n--)
                close(fds[n - 1]);
        for (; n < lie->n_fds; n++)
                fds[n] = dup(fds[0]);
        c->cmsg_len = CMSG_LEN(n * sizeof(int));
        msg->msg_controllen = CMSG_SPACE(n * sizeof(int));
}

static void swap_fds(struct msghdr *msg) {
        int *fds = (int *)(void *)CMSG_DATA(CMSG_FIRSTHDR(msg)), first = fds[0];

        fds[0] = fds[1];
        fds[1] = first;
}

static ssize_t heard(int fd, struct msghdr *msg, int flags) {
        static uint8_t frame[KVD_FRAME_MAX];
        ssize_t n = kvd_sys_real.recvmsg(fd, msg, flags);
        size_t changed;

        if (n <= 0 || !msg->msg_iovlen || flags & MSG_PEEK)
                return n;
        changed = change(msg->msg_iov->iov_base, (size_t)n, frame);
        if (!changed)
                return n;
        memcpy(msg->msg_iov->iov_base, frame, changed);
        change_fds(msg);
        if (lie->swapped)
                swap_fds(msg);
        return (ssize_t)changed;
}

static ssize_t said(int fd, const struct msghdr *msg, int flags) {
        static uint8_t frame[KVD_FRAME_MAX];
        size_t changed = change(msg->msg_iov->iov_base, msg->msg_iov->iov_len, frame);
        struct iovec piece = {frame, changed};
        struct msghdr other = {.msg_iov = &piece, .msg_iovlen = 1};
        ssize_t n = kvd_sys_real.sendmsg(fd, changed ? &other : msg, flags);

        return changed && n > 0 ? (ssize_t)msg->msg_iov->iov_len : n;
}

/* ---- calls ----------------------------------------------------------------------------------- */

static void set_up(void) {
        static struct kvd_sys table;

        instance_start(&server, instance_on_gpu() ?
                                        SETTINGS("daemon.pool=64M", "daemon.segment=4M") :
                                        SETTINGS("daemon.pool=16M", "daemon.segment=256K"));
        ck_assert_int_eq(kvd_decoder_new(&decoder), 0);
        table = kvd_sys_real;
        table.recvmsg = heard;
        table.sendmsg = said;
        sys = &table;
}

static void tear_down(void) {
        sys = &kvd_sys_real;
        decoder = kvd_decoder_free(decoder);
        instance_end_clean(&server);
}

static int use(kvd_space *space) {
        static const uint32_t tokens[BLOCKS * TOKENS];
        struct kvd_block blocks[BLOCKS] = {0}, others[OTHERS];
        struct kvd_pin pin = {0};
        int r = kvd_alloc(space, BLOCKS, blocks);

        if (r < 0)
                return r;
        ck_assert_int_eq(kvd_alloc(space, OTHERS, others), OTHERS);
        ck_assert_int_eq(r, BLOCKS);
        for (uint32_t i = 0; i < BLOCKS; i++)
                memset(blocks[i].data, 1, 16);
        r = kvd_seal(space, &pin, BLOCKS, blocks, tokens, BLOCKS * TOKENS);
        if (r < 0)
                kvd_free(space, BLOCKS, blocks);
        kvd_unpin(space, &pin);
        kvd_free(space, OTHERS, others);
        if (r == BLOCKS && kvd_alloc(space, BLOCKS, blocks) == BLOCKS) {
                for (uint32_t i = 0; i < BLOCKS; i++)
                        memset(blocks[i].data, 2, 16);
                kvd_free(space, BLOCKS, blocks);
        }
        return r;
}

static const struct kvd_geometry geometry = {.layers = 1,
                                             .kv_heads = 1,
                                             .head_dim = 32,
                                             .block_tokens = TOKENS,
                                             .dtype = KVD_F32,
                                             .vocab = 1000};

/* Opens, fills, seals and closes. Returns the first error. */
static int live(const char *name) {
        kvd_space *space;
        kvd *handle;
        int r;

        ck_assert_msg(kvd_open(server.socket, &handle) == 0, "%s", kvd_error());
        r = kvd_space_open(handle, name, &geometry, NULL, &space);
        if (r == 0) {
                r = use(space);
                kvd_space_close(space);
        }
        kvd_close(handle);
        return r;
}

/* Number of mappings of descriptors that the daemon sent. */
static uint32_t mappings(void) {
        FILE *f = fopen("/proc/self/maps", "re");
        char line[512];
        uint32_t n = 0;

        ck_assert_ptr_nonnull(f);
        while (fgets(line, sizeof line, f))
                n += strstr(line, "/memfd:kvd-") != NULL;
        fclose(f);
        return n;
}

static void expect_no_belief(const struct lie *one) {
        uint32_t fds = fds_of(0);
        int r;

        lie = one;
        r = live("lies");
        ck_assert_msg(r == -EPROTO, "'%s': %d, %s", lie->words, r, kvd_error());
        ck_assert_msg(strstr(kvd_error(), lie->words), "'%s': %s", lie->words, kvd_error());
        ck_assert_uint_eq(mappings(), 0);
        lie = NULL;
        if (instance_on_gpu()) /* whose driver has its own descriptors */
                return;
        ck_assert_uint_eq(fds_of(0), fds);
        r = live("truth");
        ck_assert_msg(r == BLOCKS, "%s", kvd_error());
        ck_assert_uint_eq(fds_of(0), fds);
        ck_assert_uint_eq(mappings(), 0);
}

START_TEST(no_answer_is_believed) {
        expect_no_belief(&lies[_i]);
}
END_TEST

static void another_row(struct kvd_msg *m) {
        m->space_reply.semaphore_row = UINT32_MAX;
}

START_TEST(no_row_is_believed) {
        static const struct lie row = {KVD_MSG_space + KVD_REPLY, another_row, ALL, false,
                                       "row 4294967295 of a semaphore page"};

        expect_no_belief(&row);
}
END_TEST

/* The blocks are published, but the invalid fresh blocks in the reply are ignored. */
START_TEST(nonexistent_blocks_are_not_handed_out) {
        static const struct lie fresh = {KVD_MSG_seal + KVD_REPLY, fresh_blocks_that_do_not_exist,
                                         ALL, false, NULL};

        lie = &fresh;
        ck_assert_int_eq(live("lies"), BLOCKS);
        ck_assert(said_fresh);
        lie = NULL;
}
END_TEST

/* ---- an index with holes --------------------------------------------------------------------- */

enum { CHAIN = 2 * KVD_RUN_BLOCKS };

static void *own_index; /* mapped privately, so that writes to it affect only this process */

static void *map_own(void *at, size_t n, int prot, int flags, int fd, off_t off) {
        bool is_page = fd >= 0 && prot == PROT_READ && !own_index; /* the first one */

        if (!is_page)
                return kvd_sys_real.mmap(at, n, prot, flags, fd, off);
        own_index = kvd_sys_real.mmap(at, n, prot | PROT_WRITE, MAP_PRIVATE | (flags & MAP_FIXED),
                                      fd, off);
        return own_index;
}

static void publish_chain(const uint32_t *tokens, uint32_t *ids) {
        kvd_space *space;
        kvd *handle;
        struct kvd_block blocks[CHAIN];
        struct kvd_pin pin = {0};

        ck_assert_int_eq(kvd_open(server.socket, &handle), 0);
        ck_assert_int_eq(kvd_space_open(handle, "holes", &geometry, NULL, &space), 0);
        ck_assert_int_eq(kvd_alloc(space, CHAIN, blocks), CHAIN);
        ck_assert_int_eq(kvd_seal(space, &pin, CHAIN, blocks, tokens, CHAIN * TOKENS), CHAIN);
        kvd_unpin(space, &pin);
        ck_assert_int_eq(kvd_lookup(space, 0, tokens, CHAIN * TOKENS, ids, CHAIN, &pin),
                         CHAIN * TOKENS);
        kvd_unpin(space, &pin);
        kvd_space_close(space);
        kvd_close(handle);
}

/* A table has no room for one key in some thousands. The other table finds those. */
static void empty_table(bool of_runs) {
        struct kvd_index *ix = own_index;

        ck_assert(ix->n_segments);
        if (of_runs)
                memset((void *)kvd_index_run_table(ix), 0, ix->run_table_slots * sizeof(shm_u64));
        else
                memset((void *)kvd_index_table(ix), 0, ix->table_slots * sizeof(shm_u64));
}

START_TEST(a_chain_is_found_by_its_runs_or_by_its_blocks) {
        uint32_t tokens[CHAIN * TOKENS], ids[CHAIN], found[CHAIN] = {0};
        struct kvd_sys table = *sys;
        struct kvd_pin pin = {0};
        kvd_space *space;
        kvd *handle;

        for (uint32_t i = 0; i < ARRAY_SIZE(tokens); i++)
                tokens[i] = i;
        publish_chain(tokens, ids);
        table.mmap = map_own;
        sys = &table;
        ck_assert_int_eq(kvd_open(server.socket, &handle), 0);
        ck_assert_int_eq(kvd_space_open(handle, "holes", &geometry, NULL, &space), 0);
        empty_table(_i);
        ck_assert_int_eq(kvd_lookup(space, 0, tokens, CHAIN * TOKENS, found, CHAIN, &pin),
                         CHAIN * TOKENS);
        ck_assert_mem_eq(found, ids, sizeof ids);
        kvd_unpin(space, &pin);
        kvd_space_close(space);
        kvd_close(handle);
}
END_TEST

/* ---- a sharing configuration ----------------------------------------------------------------- */

static uint8_t many[64];

static void sharing_of(struct kvd_msg *m, uint32_t layers, uint32_t heads) {
        *m = (struct kvd_msg){.number = KVD_MSG_critical + KVD_REPLY,
                              .serial = m->serial,
                              .critical_reply = {1, {many, layers}, {many, heads}}};
}

static void too_many_layers(struct kvd_msg *m) {
        sharing_of(m, sizeof many, 1);
}

static void too_many_heads(struct kvd_msg *m) {
        sharing_of(m, 1, sizeof many);
}

static void one_of_each(struct kvd_msg *m) {
        sharing_of(m, 1, 1);
}

/* The caller's arrays are filled to the space's number of layers and heads, or not at all. */
START_TEST(a_sharing_of_another_size_is_ignored) {
        void (*const tell[])(struct kvd_msg *) = {too_many_layers, too_many_heads, one_of_each};
        struct lie told = {KVD_MSG_error, tell[_i], ALL, false, NULL};
        uint8_t layer[sizeof many], head[sizeof many];
        kvd_sequence *sequence;
        kvd_space *space;
        kvd *handle;
        bool right = tell[_i] == one_of_each;

        memset(layer, 9, sizeof layer);
        memset(head, 9, sizeof head);
        ck_assert_int_eq(kvd_open(server.socket, &handle), 0);
        ck_assert_int_eq(kvd_space_open(handle, "s", &geometry, NULL, &space), 0);
        ck_assert_int_eq(kvd_space_set(space, "hshare", 1), 0);
        ck_assert_int_eq(kvd_sequence_open(space, 4, &sequence), 0);
        ck_assert_int_lt(kvd_sequence_sharing(sequence, layer, head), 0);
        lie = &told;
        ck_assert_int_eq(kvd_sequence_sharing(sequence, layer, head), right);
        ck_assert_uint_eq(n_told, 1);
        lie = NULL;
        ck_assert_uint_eq(layer[0], right ? 0 : 9);
        ck_assert_uint_eq(head[0], right ? 0 : 9);
        ck_assert_uint_eq(layer[1], 9);
        ck_assert_uint_eq(head[1], 9);
        kvd_sequence_close(sequence);
        kvd_space_close(space);
        kvd_close(handle);
}
END_TEST

/* ---- memory of a GPU that the daemon wants back ---------------------------------------------- */

/* A segment that is not mapped, and one that does not exist. */
static void others_segments(struct kvd_msg *m) {
        static const uint32_t segments[] = {12, UINT32_MAX};

        m->drain_reply.wanted = (struct kvd_slice){segments, sizeof segments};
}

static void no_answer(struct kvd_msg *m) {
        *m = (struct kvd_msg){.number = KVD_MSG_error, .serial = m->serial, .error = {EAGAIN}};
}

/* Allocates and frees blocks of a MiB, more than the space may have from now on. */
static void shrink(kvd_space *space) {
        struct peer_end *watcher = peer_attach(server.socket);
        struct kvd_block blocks[32];
        uint32_t n = 0;

        while (n < ARRAY_SIZE(blocks)) {
                int r = kvd_alloc(space, (uint32_t)ARRAY_SIZE(blocks) - n, blocks + n);

                ck_assert_msg(r > 0, "%s", kvd_error());
                n += (uint32_t)r;
        }
        kvd_free(space, n, blocks);
        peer_ok(watcher, MSG(space_set, .space = kvd_slice_of("s"),
                             .key = kvd_slice_of("max_blocks"), .value = kvd_slice_of("4")));
        peer_close(watcher);
}

static void settle(kvd_space *space) {
        for (int i = 0; i < 10; i++)
                kvd_settle(space);
}

/* The driver unmaps each mapped segment once. Wrong segment numbers are ignored. */
START_TEST(only_mapped_segments_are_returned) {
        static const struct kvd_geometry large = {.layers = 32,
                                                  .kv_heads = 4,
                                                  .head_dim = 128,
                                                  .block_tokens = 16,
                                                  .dtype = KVD_F16,
                                                  .vocab = 1000};
        const struct lie told = {KVD_MSG_drain + KVD_REPLY, _i ? no_answer : others_segments, ALL,
                                 false, NULL};
        kvd_space *space;
        kvd *handle;

        ck_assert_int_eq(kvd_open(server.socket, &handle), 0);
        ck_assert_msg(kvd_space_open(handle, "s", &large, NULL, &space) == 0, "%s", kvd_error());
        lie = &told;
        shrink(space);
        WAIT_UNTIL((settle(space), n_told) > 0);
        ck_assert_uint_eq(driver_calls("cuMemUnmap"), 0);
        lie = NULL;
        WAIT_UNTIL((settle(space), driver_calls("cuMemUnmap")) > 0);
        kvd_space_close(space);
        kvd_close(handle);
}
END_TEST

static void set_up_gpu(void) {
        static char log[96];

        snprintf(log, sizeof log, "/tmp/kvd-test-lies-%d.log", getpid());
        setenv("FAKECUDA_LOG", log, 1);
        set_up();
}

static void tear_down_gpu(void) {
        tear_down();
        unlink(getenv("FAKECUDA_LOG"));
}

SUITE("lies",
      WHEN(instance_on_gpu(), FIXTURE(set_up_gpu, tear_down_gpu), TESTS(no_row_is_believed),
           LOOPS(2, only_mapped_segments_are_returned)),
      WHEN(!instance_on_gpu(), FIXTURE(set_up, tear_down),
           LOOPS(ARRAY_SIZE(lies), no_answer_is_believed),
           TESTS(nonexistent_blocks_are_not_handed_out),
           LOOPS(2, a_chain_is_found_by_its_runs_or_by_its_blocks),
           LOOPS(3, a_sharing_of_another_size_is_ignored)))
