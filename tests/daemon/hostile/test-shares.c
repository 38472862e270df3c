/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks that a client once had, or leaves behind, must not harm other clients. Each test is named
 * after an attack that once succeeded. An attacker keeps memory that it claimed to have given up,
 * and a victim compares every byte or counts what the daemon still has.
 */

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/kvd.h"
#include "ipc/base/layout.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/daemon/hostile/victim.h"
#include "tests/lib/oracle.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"

enum { BT = VICTIM_BT, PIECE = 16 };

static struct instance server;

static void start(const char *isolation) {
        static char users[64], isolated[64];

        snprintf(users, sizeof users, "domain all.users=%u", getuid());
        snprintf(isolated, sizeof isolated, "domain all.isolation=%s", isolation);
        instance_start(&server,
                       SETTINGS("daemon.pool=16M", "daemon.segment=256K", users, isolated));
}

static void start_arena(void) {
        start("arena");
}

static void start_shared(void) {
        start("shared");
}

static void stop(void) {
        instance_end_clean(&server);
}

/* ---- good clients ---------------------------------------------------------------------------- */

struct client {
        kvd *handle;
        kvd_space *space;
};

static struct client open_client(uint64_t max_blocks) {
        const struct kvd_space_options options = {.max_blocks = max_blocks};
        struct client c;

        ck_assert_msg(kvd_open(server.socket, &c.handle) == 0, "%s", kvd_error());
        ck_assert_msg(kvd_space_open(c.handle, "space", &victim_geometry, &options, &c.space) == 0,
                      "%s", kvd_error());
        return c;
}

static void close_client(struct client *c) {
        kvd_space_close(c->space);
        kvd_close(c->handle);
}

/* Tokens of chain `number`. No two chains have a block in common. */
static void make_tokens(uint32_t number, uint32_t tokens[PIECE * BT]) {
        for (uint32_t i = 0; i < PIECE * BT; i++)
                tokens[i] = i < BT ? number : i;
}

/* Seals a chain of PIECE blocks. Returns false if it was refused the blocks. */
static bool publish(struct client *c, uint32_t number) {
        struct kvd_block blocks[PIECE];
        uint32_t tokens[PIECE * BT];
        struct kvd_pin pin = {0};
        int n;

        make_tokens(number, tokens);
        n = kvd_alloc(c->space, PIECE, blocks);
        if (n < PIECE) {
                kvd_free(c->space, (uint32_t)MAX(n, 0), blocks);
                return false;
        }
        for (uint32_t i = 0; i < PIECE; i++)
                oracle_fill(blocks[i].data, kvd_block_bytes(&victim_geometry),
                            oracle_seed(1, tokens, (i + 1) * BT));
        n = kvd_seal(c->space, &pin, PIECE, blocks, tokens, PIECE * BT);
        ck_assert_msg(n == PIECE, "%s", kvd_error());
        kvd_unpin(c->space, &pin);
        return true;
}

/* Number of blocks of the chain that are found; every byte must be right. */
static uint32_t found(struct client *c, uint32_t number) {
        uint32_t tokens[PIECE * BT], ids[PIECE];
        struct kvd_pin pin = {0};
        uint32_t n;

        make_tokens(number, tokens);
        ck_assert_int_eq(kvd_catch_up(c->space), 0);
        ck_assert_int_ge(kvd_lookup(c->space, 0, tokens, PIECE * BT, ids, PIECE, &pin), 0);
        n = pin.n_blocks;
        for (uint32_t i = 0; i < n; i++)
                ck_assert_uint_eq(oracle_wrong(kvd_pin_block(&pin, ids[i]),
                                               kvd_block_bytes(&victim_geometry),
                                               oracle_seed(1, tokens, (i + 1) * BT)),
                                  0);
        kvd_unpin(c->space, &pin);
        return n;
}

/* As found(), but the blocks stay pinned. */
static bool found_and_kept(struct client *c, uint32_t number) {
        uint32_t tokens[PIECE * BT], ids[PIECE];
        struct kvd_pin pin = {0};

        make_tokens(number, tokens);
        return kvd_lookup(c->space, 0, tokens, PIECE * BT, ids, PIECE, &pin) == PIECE * BT;
}

/* ---- attackers ------------------------------------------------------------------------------- */

enum { SEGMENT = 256 << 10, MOST_SEGMENTS = 64 };

struct attacker {
        struct peer_end *peer;
        uint32_t space;
        uint8_t *at[MOST_SEGMENTS]; /* segments that it may write */
        uint32_t n;
        kvd_ref blocks[4096];
        uint32_t n_blocks;
};

static uint32_t open_space(struct peer_end *peer, const char *name) {
        struct kvd_msg open = victim_space_message();

        open.space.name = kvd_slice_of(name);
        return peer_ok(peer, open).space_reply.space;
}

static struct attacker attack(void) {
        struct attacker a = {.peer = peer_attach(server.socket)};

        a.space = open_space(a.peer, "space");
        return a;
}

static uint32_t allocate(struct attacker *a, uint32_t n, kvd_ref *ret) {
        struct kvd_msg m = {.number = KVD_MSG_allocate, .allocate = {a->space, n}}, reply;

        do { /* the daemon looks for blocks in pieces */
                reply = peer_call(a->peer, m);
                if (reply.number == KVD_MSG_error)
                        return 0;
        } while (reply.allocate_reply.more);
        memcpy(ret, reply.allocate_reply.blocks.data, reply.allocate_reply.blocks.size);
        return reply.allocate_reply.blocks.size / (uint32_t)sizeof *ret;
}

/* Takes all blocks that the daemon gives it. */
static void take_all(struct attacker *a) {
        uint32_t got;

        do {
                got = allocate(a, 512, a->blocks + a->n_blocks);
                a->n_blocks += got;
        } while (got);
}

static void release_all(struct attacker *a) {
        struct kvd_slice blocks = {a->blocks, a->n_blocks * (uint32_t)sizeof *a->blocks};

        peer_ok(a->peer,
                (struct kvd_msg){.number = KVD_MSG_release, .release = {a->space, blocks}});
        a->n_blocks = 0;
}

/* Maps all segments that it may write. */
static void map_all(struct attacker *a) {
        struct kvd_msg reply;
        uint32_t first = 0, fd;

        do {
                reply = peer_ok(a->peer, (struct kvd_msg){.number = KVD_MSG_segments,
                                                          .segments = {a->space, first}});
                fd = 0;
                for (uint32_t i = 0; i < reply.segments_reply.count; i++) {
                        if (reply.segments_reply.absent >> i & 1)
                                continue;
                        if (reply.segments_reply.writable >> i & 1) {
                                a->at[a->n] = mmap(NULL, SEGMENT, PROT_READ | PROT_WRITE,
                                                   MAP_SHARED, a->peer->fds.fd[fd], 0);
                                ck_assert(a->at[a->n++] != MAP_FAILED);
                        }
                        fd++;
                }
                first += reply.segments_reply.count;
        } while (reply.segments_reply.count == KVD_FRAME_FDS);
}

static void fill(const struct attacker *a) {
        for (uint32_t i = 0; i < a->n; i++)
                memset(a->at[i], 0xee, SEGMENT);
}

static void leave(struct attacker *a) {
        for (uint32_t i = 0; i < a->n; i++)
                munmap(a->at[i], SEGMENT);
        peer_close(a->peer);
}

/* ---- isolation = arena, and a writer that detaches and keeps its mapping --------------------- */

START_TEST(memory_that_one_writer_keeps_mapped_serves_no_other) {
        struct attacker a = attack();
        struct client victim, reader;

        take_all(&a);
        map_all(&a);
        ck_assert_uint_gt(a.n, 0);
        release_all(&a);
        peer_ok(a.peer, (struct kvd_msg){.number = KVD_MSG_detach, .detach = {a.space}});

        victim = open_client(0);
        reader = open_client(0);
        for (uint32_t i = 0; i < 110; i++) /* needs half of what the attacker had */
                ck_assert_msg(publish(&victim, i), "%s", kvd_error());
        fill(&a);
        for (uint32_t i = 0; i < 110; i++) {
                ck_assert_uint_eq(found(&reader, i), PIECE);
                ck_assert_uint_eq(found(&victim, i), PIECE);
        }
        leave(&a);
        close_client(&victim);
        close_client(&reader);
}

/*
 * The other side of that fix: a client that has a segment mapped notices that the segment has a new
 * memfd, as a reader and as the writer that gets it back.
 */
START_TEST(clients_with_old_memory_mapped_map_the_new) {
        struct client reader = open_client(128), writer;
        uint32_t remapped = 0;

        for (uint32_t round = 0; round < 12; round++) {
                uint32_t first = round * 100, n = 0;

                writer = open_client(128);
                while (n < 40) /* more than fit, so that it evicts its own chains, too */
                        ck_assert_msg(publish(&writer, first + n++), "round %u: %s", round,
                                      kvd_error());
                for (uint32_t i = 0; i < n; i++)
                        remapped += found(&reader, first + i) + found(&writer, first + i) > 0;
                ck_assert_uint_eq(found(&reader, first + n - 1), PIECE);
                close_client(&writer);
        }
        ck_assert_uint_ge(remapped, 12);
        close_client(&reader);
}

/*
 * B seals blocks that A has just sealed, in a segment that B has not mapped. Between the daemon's
 * answer, which names A's blocks, and B's mapping of them, they are evicted and the segment loses
 * its memory. B retries, and its own blocks are sealed.
 */
static struct {
        struct kvd_sys table;
        uint32_t seals;
} between;

static uint32_t segments_now(struct peer_end *peer) {
        struct kvd_msg m = {.number = KVD_MSG_space_info};

        return peer_ok(peer, m).space_info_reply.segments;
}

static void shrink(struct peer_end *peer, const char *space);

static ssize_t publish_and_send(int fd, const struct msghdr *msg, int flags) {
        const uint8_t *frame = msg->msg_iov[0].iov_base;
        struct client a;

        if (frame[1] == KVD_MSG_seal && between.seals++ == 0) {
                sys = &kvd_sys_real;
                a = open_client(0);
                ck_assert(publish(&a, 7));
                close_client(&a);
                sys = &between.table;
        }
        return kvd_sys_real.sendmsg(fd, msg, flags);
}

static ssize_t receive_and_evict(int fd, struct msghdr *msg, int flags) {
        ssize_t n = kvd_sys_real.recvmsg(fd, msg, flags);
        struct peer_end *peer;

        if (n <= 0 || between.seals != 1)
                return n;
        sys = &kvd_sys_real;
        peer = peer_attach(server.socket);
        ck_assert_uint_eq(segments_now(peer), 2);
        shrink(peer, "space");
        WAIT_UNTIL(segments_now(peer) == 1);
        peer_close(peer);
        sys = &between.table;
        between.seals++;
        return n;
}

START_TEST(a_seal_is_repeated_if_its_duplicate_is_evicted) {
        uint32_t tokens[PIECE * BT], bytes = kvd_block_bytes(&victim_geometry);
        struct client b = open_client(0);
        struct kvd_block blocks[PIECE];
        struct kvd_pin pin = {0};

        make_tokens(7, tokens);
        ck_assert_int_eq(kvd_alloc(b.space, PIECE, blocks), PIECE);
        for (uint32_t i = 0; i < PIECE; i++)
                oracle_fill(blocks[i].data, bytes, oracle_seed(1, tokens, (i + 1) * BT));
        between.table = kvd_sys_real;
        between.table.sendmsg = publish_and_send;
        between.table.recvmsg = receive_and_evict;
        sys = &between.table;
        ck_assert_msg(kvd_seal(b.space, &pin, PIECE, blocks, tokens, PIECE * BT) == PIECE, "%s",
                      kvd_error());
        sys = &kvd_sys_real;
        ck_assert_uint_eq(between.seals, 3);
        kvd_unpin(b.space, &pin);
        close_client(&b);
}

/* ---- holes of segments whose memory moved elsewhere, filled ---------------------------------- */

/* Number of files and bytes behind the daemon's descriptors of the pool. */
static void pool_files(uint32_t *files, uint64_t *bytes) {
        char dir[64], path[400], target[256];
        struct dirent *entry;
        struct stat st;
        DIR *fds;

        snprintf(dir, sizeof dir, "/proc/%d/fd", server.pid);
        fds = opendir(dir);
        *files = 0;
        *bytes = 0;
        while (fds && (entry = readdir(fds))) {
                ssize_t n;

                snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
                n = readlink(path, target, sizeof target - 1);
                target[MAX(n, 0)] = 0;
                if (!strstr(target, "memfd:kvd-pool") || stat(path, &st) < 0)
                        continue;
                *files += 1;
                *bytes += (uint64_t)st.st_blocks * 512;
        }
        closedir(fds);
}

static uint32_t pool_descriptors(void) {
        uint64_t bytes;
        uint32_t files;

        pool_files(&files, &bytes);
        return files;
}

static uint64_t pool_bytes(void) {
        uint64_t bytes;
        uint32_t files;

        pool_files(&files, &bytes);
        return bytes;
}

static void shrink(struct peer_end *peer, const char *space) {
        peer_ok(peer, (struct kvd_msg){.number = KVD_MSG_space_set,
                                       .space_set = {.space = kvd_slice_of(space),
                                                     .key = kvd_slice_of("max_blocks"),
                                                     .value = kvd_slice_of("1")}});
}

/* With a colleague (_i), the space stays in use, and its addresses must not change. */
START_TEST(filled_holes_are_freed_with_their_writer) {
        struct peer_end *colleague = _i ? peer_attach(server.socket) : NULL;
        uint32_t handle = colleague ? open_space(colleague, "space") : 0;
        pid_t pid;

        pid = fork();
        if (pid == 0) {
                struct attacker a = attack();

                take_all(&a);
                map_all(&a);
                if (a.n < 16)
                        die("only %u segments", a.n);
                release_all(&a);
                shrink(a.peer, "space");
                WAIT_UNTIL(pool_bytes() <= 2 * SEGMENT);
                fill(&a);
                _exit(0);
        }
        ck_assert_int_eq(wait_status(pid), 0);
        WAIT_UNTIL(pool_bytes() <= 2 * SEGMENT);
        if (colleague) {
                peer_ok(colleague, (struct kvd_msg){.number = KVD_MSG_detach, .detach = {handle}});
                peer_close(colleague);
        }
        WAIT_UNTIL(pool_descriptors() <= 2);
}

/* ---- descriptors of segments that spaces once had -------------------------------------------- */

START_TEST(spaces_that_shrank_keep_no_descriptors) {
        pid_t pid = fork();

        for (uint32_t i = 0; pid == 0 && i < 8; i++) {
                struct attacker a = {.peer = peer_attach(server.socket)};
                char name[16];

                snprintf(name, sizeof name, "grown-%u", i);
                a.space = open_space(a.peer, name);
                take_all(&a);
                if (a.n_blocks < 256)
                        die("only %u blocks", a.n_blocks);
                release_all(&a);
                shrink(a.peer, name);
        }
        if (pid == 0)
                _exit(0);
        ck_assert_int_eq(wait_status(pid), 0);
        WAIT_UNTIL(pool_descriptors() <= 2 * 8);
}

/* ---- two domains ----------------------------------------------------------------------------- */

enum { OTHER = 1001, FILES = 4096, NEWCOMERS = 60, GUARANTEED = 60 };

/* Our domain is root's, the other one another user's: only root can become another user. */
static void start_domains(const char *guarantee) {
        static char ours[64];
        const struct rlimit files = {FILES, FILES};

        if (getuid() != 0)
                return;
        snprintf(ours, sizeof ours, "domain ours.guarantee=%s", guarantee);
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &files), 0);
        instance_start_public(&server,
                              SETTINGS("daemon.pool=16M", "daemon.segment=256K",
                                       "domain ours.users=0", "domain theirs.users=1001", ours));
}

static void start_without_guarantee(void) {
        start_domains("0");
}

static void start_with_guarantee(void) {
        start_domains("8M");
}

static void stop_domains(void) {
        if (getuid() == 0)
                stop();
}

/* A process of the other user. It has taken what it wants when this returns. */
static pid_t start_other(void (*take)(void)) {
        int ready[2];
        pid_t pid;
        char c;

        ck_assert_int_eq(pipe(ready), 0);
        pid = fork();
        if (pid == 0) {
                if (setgid(OTHER) < 0 || setuid(OTHER) < 0)
                        die("cannot become another user");
                take();
                if (write(ready[1], "r", 1) != 1)
                        die("the test does not wait");
                for (;;)
                        pause();
        }
        close(ready[1]);
        ck_assert_int_eq(read(ready[0], &c, 1), 1);
        close(ready[0]);
        return pid;
}

static void end_other(pid_t pid) {
        kill(pid, SIGKILL);
        ck_assert_int_eq(wait_status(pid), 128 + SIGKILL);
}

/* Takes as many connections as it may have, each with as many spaces as it may have. */
static void take_descriptors(void) {
        struct kvd_msg hello = {.number = KVD_MSG_attach,
                                .attach = {KVD_PROTOCOL, kvd_slice_of("hog")}};
        struct kvd_msg open = victim_space_message();
        uint32_t attachments = 0;

        for (;;) {
                struct peer_end *p = peer_connect(server.socket);

                if (peer_call(p, hello).number == KVD_MSG_error)
                        break;
                for (uint32_t i = 0; i < 64; i++) {
                        char name[16];

                        snprintf(name, sizeof name, "s%u", i);
                        open.space.name = kvd_slice_of(name);
                        attachments += peer_call(p, open).number != KVD_MSG_error;
                }
        }
        if (attachments < FILES / 4)
                die("only %u attachments", attachments);
}

START_TEST(a_hog_leaves_descriptors_to_another_domain) {
        pid_t hog;

        if (getuid() != 0)
                return;
        hog = start_other(take_descriptors);
        for (uint32_t i = 0; i < NEWCOMERS; i++) {
                struct attacker good = attack();

                ck_assert_uint_eq(allocate(&good, 1, good.blocks), 1);
                peer_ok(good.peer,
                        (struct kvd_msg){.number = KVD_MSG_detach, .detach = {good.space}});
                leave(&good);
        }
        end_other(hog);
}

/* Takes all blocks, with two handles: some are being filled, others sealed and held. */
static void take_pool(void) {
        struct client c[2] = {open_client(0), open_client(0)};
        struct kvd_block blocks[PIECE];
        uint32_t n = 0;

        while (publish(&c[0], n) && found_and_kept(&c[0], n) && n < 48)
                n++;
        for (uint32_t i = 0; i < 2; i++)
                while (kvd_alloc(c[i].space, PIECE, blocks) > 0)
                        ;
}

/*
 * The other domain has all the rest. The guarantee must be available to the last piece, even while
 * the process that had the rest is killed, and the blocks must be right.
 */
START_TEST(a_guarantee_holds_for_real_clients) {
        struct client ours;
        pid_t hog;

        if (getuid() != 0)
                return;
        hog = start_other(take_pool);
        ours = open_client(0);
        for (uint32_t i = 0; i < GUARANTEED; i++) {
                ck_assert_msg(publish(&ours, i), "chain %u of %u: %s", i, GUARANTEED, kvd_error());
                if (i == GUARANTEED / 2)
                        end_other(hog);
        }
        for (uint32_t i = 0; i < GUARANTEED; i++)
                ck_assert_uint_eq(found(&ours, i), PIECE);
        close_client(&ours);
}

SUITE("shares", CASE("arena"), FIXTURE(start_arena, stop),
      TESTS(memory_that_one_writer_keeps_mapped_serves_no_other,
            clients_with_old_memory_mapped_map_the_new,
            a_seal_is_repeated_if_its_duplicate_is_evicted),
      CASE("shared"), FIXTURE(start_shared, stop),
      LOOPS(2, filled_holes_are_freed_with_their_writer),
      TESTS(spaces_that_shrank_keep_no_descriptors), CASE("domains"),
      FIXTURE(start_without_guarantee, stop_domains),
      TESTS(a_hog_leaves_descriptors_to_another_domain), CASE("guarantee"),
      FIXTURE(start_with_guarantee, stop_domains), TESTS(a_guarantee_holds_for_real_clients))
