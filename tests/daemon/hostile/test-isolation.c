/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Two domains, two users. The first test checks that the same tokens hit in their own domain and
 * miss in the other, so that a cache that never finds anything does not pass. The second checks
 * that the daemon tells one domain exactly the same whether or not another domain works, fills the
 * cache and stays attached.
 *
 * Needs root, to change users.
 */

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "client/kvd_methods.h"
#include "tests/lib/inproc.h"
#include "tests/lib/oracle.h"

#define USER_A 65534u
#define USER_B 65533u
#define BT 4u
#define BLOCKS 20u
#define TRANSCRIPT 32768u

static const struct kvd_geometry geometry = {.layers = 1,
                                             .kv_heads = 1,
                                             .head_dim = 128,
                                             .block_tokens = BT,
                                             .dtype = KVD_F32,
                                             .vocab = 1000};

/* ---- becoming another user ------------------------------------------------------------------- */

#define LIMIT_SECONDS 240u

static struct conn *administrator; /* opened as root, before the process changed its user */

static void as_user(uid_t user, void (*run)(const char *socket, char *transcript),
                    const char *socket, char *transcript) {
        pid_t pid = fork();
        int status;

        if (pid == 0) {
                alarm(LIMIT_SECONDS);
                if (conn_open(socket, "root", &administrator) < 0)
                        die("%s", kvd_error());
                become_user(user);
                run(socket, transcript);
                _exit(0);
        }
        waitpid(pid, &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
                die("a process of user %u ended with status %#x", user, status);
}

/* ---- what users do --------------------------------------------------------------------------- */

static void make_tokens(uint32_t *ret) {
        for (uint32_t i = 0; i < BLOCKS * BT; i++)
                ret[i] = i * 7 % 1000;
}

static struct kvd_space *open_space(const char *socket) {
        struct kvd_space *space;
        struct kvd *handle;

        if (kvd_open(socket, &handle) < 0 ||
            kvd_space_open(handle, "llama", &geometry, NULL, &space) < 0)
                die("%s", kvd_error());
        return space;
}

static uint32_t find(struct kvd_space *space) {
        uint32_t tokens[BLOCKS * BT], ids[BLOCKS], n;
        struct kvd_pin pin = {0};

        make_tokens(tokens);
        if (kvd_lookup(space, 0, tokens, BLOCKS * BT, ids, BLOCKS, &pin) < 0)
                die("%s", kvd_error());
        n = pin.n_blocks;
        for (uint32_t i = 0; i < n; i++)
                if (oracle_wrong(kvd_pin_block(&pin, ids[i]), pin.block_bytes, i))
                        die("wrong bytes");
        kvd_unpin(space, &pin);
        return n;
}

static void publish(struct kvd_space *space) {
        uint32_t tokens[BLOCKS * BT], got = 0;
        struct kvd_block blocks[BLOCKS];
        struct kvd_pin pin = {0};
        int r;

        make_tokens(tokens);
        for (; got < BLOCKS; got += (uint32_t)r) {
                r = kvd_alloc(space, BLOCKS - got, blocks + got);
                if (r < 0)
                        die("%s", kvd_error());
        }
        for (uint32_t i = 0; i < BLOCKS; i++)
                oracle_fill(blocks[i].data, kvd_block_bytes(&geometry), i);
        if (kvd_seal(space, &pin, BLOCKS, blocks, tokens, BLOCKS * BT) < 0)
                die("%s", kvd_error());
}

static void publish_and_go(const char *socket, char *transcript) {
        struct kvd_space *space = open_space(socket);

        if (find(space) != 0)
                die("found before anything was published");
        publish(space);
}

static void expect_hit(const char *socket, char *transcript) {
        if (find(open_space(socket)) != BLOCKS)
                die("another process of the same domain does not find the published chain");
}

static void expect_miss(const char *socket, char *transcript) {
        struct kvd_space *space = open_space(socket);
        uint32_t tokens[BLOCKS * BT];

        make_tokens(tokens);
        if (find(space) != 0 || kvd_match(space, 0, tokens, BLOCKS * BT) != 0)
                die("a process of another domain finds the published chain");
}

/* ---- what a domain is told ------------------------------------------------------------------- */

static __attribute__((format(printf, 2, 3))) void note(char *transcript, const char *format, ...) {
        size_t n = strlen(transcript);
        va_list args;

        va_start(args, format);
        vsnprintf(transcript + n, TRANSCRIPT - n, format, args);
        va_end(args);
}

static void note_spaces(struct conn *conn, char *t) {
        struct kvd_msg_space_info_reply s = {0};
        char name[64], domain[64];

        while (conn_call(conn, KVD_MSG_space_info, &(struct kvd_msg_space_info){s.next}, &s) == 0)
                note(t,
                     "space %s of %s: next %u total %llu free %llu filling %llu sealed %llu "
                     "clients %u segments %u "
                     "capacity %llu max %llu sequences %llu private %llu\n",
                     kvd_slice_copy(s.name, name, 64), kvd_slice_copy(s.domain, domain, 64), s.next,
                     (unsigned long long)s.total, (unsigned long long)s.free,
                     (unsigned long long)s.filling, (unsigned long long)s.sealed, s.clients,
                     s.segments, (unsigned long long)s.capacity, (unsigned long long)s.max_blocks,
                     (unsigned long long)s.sequences, (unsigned long long)s.private);
        note(t, "%s\n", kvd_error());
}

static void note_clients(struct conn *conn, char *t) {
        struct kvd_msg_client_info_reply c = {0};
        char name[64], domain[64];

        while (conn_call(conn, KVD_MSG_client_info, &(struct kvd_msg_client_info){c.next}, &c) == 0)
                note(t,
                     "client %u %s of %s user %u: next %u spaces %u filling %llu requests %llu\n",
                     c.client, kvd_slice_copy(c.name, name, 64),
                     kvd_slice_copy(c.domain, domain, 64), c.uid, c.next, c.spaces,
                     (unsigned long long)c.filling, (unsigned long long)c.requests);
        note(t, "%s\n", kvd_error());
}

static void note_daemon(struct conn *conn, char *t) {
        struct kvd_msg_daemon_info_reply d;

        if (conn_call(conn, KVD_MSG_daemon_info, NULL, &d) < 0)
                die("%s", kvd_error());
        note(t, "worker %u starts %llu jobs %llu waiting %llu\n", d.worker,
             (unsigned long long)d.worker_starts, (unsigned long long)d.jobs,
             (unsigned long long)d.jobs_waiting);
        note(t,
             "daemon: pool %llu used %llu spaces %u clients %u requests %llu errors %llu bad %llu "
             "turn %llu\n",
             (unsigned long long)d.pool_bytes, (unsigned long long)d.pool_used, d.spaces, d.clients,
             (unsigned long long)d.requests, (unsigned long long)d.request_errors,
             (unsigned long long)d.bad_frames, (unsigned long long)d.turn_max_us);
}

/* Requests that name the other's domain or space get the same reply whether these exist or not. */
static void note_refusals(struct conn *conn, char *t) {
        struct kvd_slice a = kvd_slice_of("a"), llama = kvd_slice_of("llama"),
                         own = kvd_slice_of("");
        union {
                struct kvd_msg m;
                uint8_t room[4096];
        } reply;

        for (int i = 0; i < 2; i++, own = a) {
                conn_call(conn, KVD_MSG_evict,
                          &(struct kvd_msg_evict){.space = llama, .domain = own}, &reply);
                note(t, "evict: %s\n", kvd_error());
                conn_call(conn, KVD_MSG_check,
                          &(struct kvd_msg_check){.space = llama, .domain = own}, &reply);
                note(t, "check: %s\n", kvd_error());
                conn_call(conn, KVD_MSG_block_map,
                          &(struct kvd_msg_block_map){.space = llama, .domain = own}, &reply);
                note(t, "block_map: %s\n", kvd_error());
                conn_call(conn, KVD_MSG_chain_info,
                          &(struct kvd_msg_chain_info){.space = llama, .domain = own}, &reply);
                note(t, "chain_info: %s\n", kvd_error());
                conn_call(conn, KVD_MSG_space_delete, &(struct kvd_msg_space_delete){llama, own, 1},
                          &reply);
                note(t, "space_delete: %s\n", kvd_error());
                conn_call(conn, KVD_MSG_space_set,
                          &(struct kvd_msg_space_set){llama, own, kvd_slice_of("policy"),
                                                      kvd_slice_of("fifo"), 0},
                          &reply);
                note(t, "space_set: %s\n", kvd_error());
                conn_call(conn, KVD_MSG_space_set,
                          &(struct kvd_msg_space_set){llama, own, kvd_slice_of("memshare"),
                                                      kvd_slice_of("on"), 0},
                          &reply);
                note(t, "a method's setting: %s\n", kvd_error());
                for (uint32_t op = 1; op <= 4; op++) {
                        conn_call(conn, KVD_MSG_profile,
                                  &(struct kvd_msg_profile){.space = llama,
                                                            .domain = own,
                                                            .op = op},
                                  &reply);
                        note(t, "profile %u: %s\n", op, kvd_error());
                }
                conn_call(conn, KVD_MSG_space,
                          &(struct kvd_msg_space){.name = llama, .domain = own}, &reply);
                note(t, "space: %s\n", kvd_error());
        }
}

/* A checksum of the memory and blocks of all domains. */
static uint64_t what_there_is(void) {
        struct kvd_msg_space_info_reply s = {0};
        struct kvd_msg_daemon_info_reply d;
        uint64_t sum;

        if (conn_call(administrator, KVD_MSG_daemon_info, NULL, &d) < 0)
                die("%s", kvd_error());
        sum = d.pool_used;
        while (conn_call(administrator, KVD_MSG_space_info, &(struct kvd_msg_space_info){s.next},
                         &s) == 0)
                sum = sum * 31 + s.total * 7 + s.free * 5 + s.filling * 3 + s.segments;
        return sum;
}

/* Waits until the checksum is stable: an idle daemon prepares memory ahead of need. */
static void wait_for_rest(void) {
        uint64_t before = 0, now;

        for (int same = 0; same < 20; before = now) {
                usleep(1000);
                now = what_there_is();
                same = now == before ? same + 1 : 0;
        }
}

static void look_around(const char *socket, char *t) {
        struct kvd_space *space;
        struct conn *conn;

        if (conn_open(socket, "b", &conn) < 0)
                die("%s", kvd_error());
        note(t, "client %u admin %u\n", conn_peer(conn)->client, conn_peer(conn)->admin);
        note_refusals(conn, t);
        note_daemon(conn, t);
        note_spaces(conn, t);
        space = open_space(socket);
        publish(space);
        note(t, "found %u\n", find(space));
        wait_for_rest();
        note_daemon(conn, t);
        note_spaces(conn, t);
        note_clients(conn, t);
        note_refusals(conn, t);
}

/* ---- main ------------------------------------------------------------------------------------ */

static const char *const settings[] = {"daemon.socket_mode=0666", "domain a.users=65534",
                                       "domain b.users=65533", NULL};

static void start(struct inproc *d) {
        inproc_start(d, settings);
        if (chmod(d->in.dir, 0755) < 0)
                die("chmod: %s", strerror(errno));
}

/* Makes tables, fills blocks, and never takes the changes. */
static void hold_sequences(struct kvd_space *space) {
        uint32_t tokens[BLOCKS * BT], slots[4] = {0, 1, 2, 3};

        make_tokens(tokens);
        for (uint32_t i = 0; i < 20; i++) {
                struct kvd_sequence *sequence;
                struct kvd_block blocks[4];

                if (kvd_sequence_open(space, 8, &sequence) < 0 ||
                    kvd_alloc(space, 4, blocks) != 4 ||
                    kvd_sequence_append(sequence, 4, blocks, tokens, 4 * BT) != 4 ||
                    kvd_sequence_cool(sequence, 4, slots, KVD_COOL_DROP) != 4)
                        die("%s", kvd_error());
        }
}

static _Noreturn void work_and_hold(const char *socket, int ready) {
        struct kvd_space *space;

        alarm(LIMIT_SECONDS);
        become_user(USER_A);
        space = open_space(socket);
        publish(space);
        hold_sequences(space);
        if (write(ready, "r", 1) != 1)
                die("pipe: %s", strerror(errno));
        for (;;)
                find(space);
}

/* A process of A that keeps working and holding blocks. */
static pid_t busy_neighbour(const char *socket) {
        int ready[2];
        char byte;
        pid_t pid;

        if (pipe(ready) < 0)
                die("pipe: %s", strerror(errno));
        pid = fork();
        if (pid == 0)
                work_and_hold(socket, ready[1]);
        close(ready[1]);
        if (read(ready[0], &byte, 1) != 1)
                die("A does not work");
        close(ready[0]);
        return pid;
}

static void tell_apart(char *alone, char *beside) {
        struct inproc d;
        pid_t neighbour;

        start(&d);
        as_user(USER_B, look_around, d.in.socket, alone);
        inproc_stop(&d);
        start(&d);
        neighbour = busy_neighbour(d.in.socket);
        as_user(USER_B, look_around, d.in.socket, beside);
        kill(neighbour, SIGKILL);
        waitpid(neighbour, NULL, 0);
        inproc_stop(&d);
        if (strcmp(alone, beside) != 0)
                die("alone, B is told:\n%s\nand next to A:\n%s", alone, beside);
        printf("isolation: B is told the same %zu bytes with and without A\n", strlen(alone));
}

int main(void) {
        char *transcripts = mmap(NULL, 2 * TRANSCRIPT, PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        struct inproc d;

        if (getuid() != 0)
                return 77;
        start(&d);
        as_user(USER_A, publish_and_go, d.in.socket, NULL);
        as_user(USER_A, expect_hit, d.in.socket, NULL);
        as_user(USER_B, expect_miss, d.in.socket, NULL);
        as_user(USER_B, publish_and_go, d.in.socket, NULL);
        as_user(USER_B, expect_hit, d.in.socket, NULL);
        inproc_stop(&d);
        printf("isolation: hit in its own domain, miss in the other\n");
        fflush(stdout);
        tell_apart(transcripts, transcripts + TRANSCRIPT);
        return 0;
}
