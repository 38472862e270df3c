/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The daemon, while a system call fails as it starts its worker, sends it memory, and serves
 * sequences. A client lets blocks leave and come back. Its requests may be refused, but must not
 * wait forever, and exact blocks must be exact. Once calls succeed again, the worker must come back
 * and serve, and nothing may be left over.
 *
 *      test-worker-faults         $KVD is the worker's program
 */

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "client/kvd_methods.h"
#include "ipc/base/util.h"
#include "tests/lib/daemon_process.h"
#include "tests/lib/fault.h"
#include "tests/lib/oracle.h"

#define BLOCKS 4u
#define BT 4u
#define BLOCK_BYTES 16384u
#define WORKER_FDS 3u /* its socket, its pidfd, and memory for jobs */

static const struct kvd_geometry geometry = {.layers = 1,
                                             .kv_heads = 4,
                                             .head_dim = 128,
                                             .block_tokens = BT,
                                             .dtype = KVD_F32,
                                             .vocab = 1000};

/* Other calls fail here just as they do in test-daemon-faults. */
static bool is_of_interest(enum fault_call call) {
        static const enum fault_call calls[] = {FAULT_calloc,       FAULT_mmap,
                                                FAULT_memfd_create, FAULT_ftruncate,
                                                FAULT_fallocate,    FAULT_fchmod,
                                                FAULT_add_seals,    FAULT_open,
                                                FAULT_getrandom,    FAULT_socketpair,
                                                FAULT_pidfd_open,   FAULT_spawn,
                                                FAULT_sendmsg,      FAULT_recvmsg,
                                                FAULT_epoll_ctl};

        for (uint32_t i = 0; i < ARRAY_SIZE(calls); i++)
                if (calls[i] == call)
                        return true;
        return false;
}

/* ---- a client -------------------------------------------------------------------------------- */

struct user {
        kvd *kvd;
        kvd_space *space;
        kvd_sequence *sequence;
};

static _Noreturn void wrong(const char *what) {
        fprintf(stderr, "client: %s (%s)\n", what, kvd_error());
        _exit(9);
}

static void set(const char *socket, const char *key, const char *value) {
        struct kvd_msg_space_set m = {.space = kvd_slice_of("one"),
                                      .key = kvd_slice_of(key),
                                      .value = kvd_slice_of(value)};
        struct conn *conn;

        if (conn_open(socket, "sets", &conn) < 0)
                return;
        conn_call(conn, KVD_MSG_space_set, &m, NULL);
        conn_close(conn);
}

static bool user_open(struct user *u, const char *socket) {
        *u = (struct user){0};
        if (kvd_open(socket, &u->kvd) < 0 ||
            kvd_space_open(u->kvd, "one", &geometry, NULL, &u->space) < 0)
                return false;
        set(socket, "kvreviver", "on");
        set(socket, "hshare", "on");
        set(socket, "keydiff", "on");
        set(socket, "kvreviver.budget", "1");
        return kvd_sequence_open(u->space, 2 * BLOCKS, &u->sequence) == 0;
}

static void user_close(struct user *u) {
        if (u->sequence)
                kvd_sequence_close(u->sequence);
        if (u->space)
                kvd_space_close(u->space);
        if (u->kvd)
                kvd_close(u->kvd);
}

static uint64_t seed_of(uint32_t slot) {
        return oracle_seed(1, &slot, 1);
}

static bool append(struct user *u) {
        struct kvd_block blocks[BLOCKS];
        uint32_t tokens[BLOCKS * BT] = {0}, got = 0;

        while (got < BLOCKS) {
                int r = kvd_alloc(u->space, BLOCKS - got, blocks + got);

                if (r <= 0)
                        break;
                got += (uint32_t)r;
        }
        for (uint32_t i = 0; i < got; i++)
                oracle_fill(blocks[i].data, BLOCK_BYTES, seed_of(i));
        if (got == BLOCKS && kvd_sequence_append(u->sequence, got, blocks, tokens, got * BT) >= 0)
                return true;
        kvd_free(u->space, got, blocks);
        return false;
}

/* Number of resident entries. Exact ones must have their original contents. */
static uint32_t resident(struct user *u) {
        const struct kvd_entry *entries;
        uint32_t n, found = 0;

        entries = kvd_sequence_entries(u->sequence, &n);
        for (uint32_t i = 0; i < n; i++) {
                if (!entries[i].data)
                        continue;
                found++;
                if (!(entries[i].flags & KVD_ENTRY_APPROX) &&
                    oracle_wrong(entries[i].data, BLOCK_BYTES, seed_of(i)) != 0)
                        wrong("wrong bytes");
        }
        return found;
}

/* Waits 40 ms at most: the request may have failed, or there may be no worker. */
static void wait_a_little(struct user *u) {
        kvd_sequence_wait(u->sequence, 40000000);
        resident(u);
}

static void work(struct user *u) {
        const uint32_t slots[BLOCKS] = {0, 1, 2, 3};

        for (uint32_t how = KVD_COOL_SPILL; how <= KVD_COOL_VAGUE; how++) {
                kvd_sequence_cool(u->sequence, BLOCKS, slots, how);
                wait_a_little(u);
                kvd_sequence_revive(u->sequence, BLOCKS, slots,
                                    how == KVD_COOL_SPILL ? KVD_REVIVE_EXACT : KVD_REVIVE_BOTH);
                wait_a_little(u);
        }
}

/* First by KeyDiff, then by scores. */
static void pack(struct user *u) {
        struct kvd_block block = {0};
        const struct kvd_scores scores = {&block, 1};

        if (kvd_alloc(u->space, 1, &block) != 1)
                return;
        memset(block.data, 0x11, BLOCK_BYTES);
        for (uint32_t keep = 2 * BT; keep > 0; keep -= BT) {
                kvd_sequence_compact(u->sequence, 0, keep == BT ? 2 : BLOCKS, keep,
                                     keep == BT ? &scores : NULL);
                kvd_sequence_wait(u->sequence, 40000000);
        }
        kvd_free(u->space, 1, &block);
}

/* Requests a sharing configuration for heads that all select the same blocks. */
static void configure(struct user *u) {
        struct kvd_block block;
        uint8_t layer[1], head[4];

        if (kvd_alloc(u->space, 1, &block) != 1)
                return;
        memset(block.data, 0x11, 64);
        if (kvd_sequence_critical(u->sequence, 1, &block, 1, 1, 8) == 0)
                for (int i = 0; i < 20 && kvd_sequence_sharing(u->sequence, layer, head) == 0; i++)
                        usleep(1000);
        kvd_free(u->space, 1, &block);
}

static void session(struct fault_state *s, void *socket) {
        struct user u;

        if (user_open(&u, socket) && append(&u)) {
                work(&u);
                configure(&u);
                pack(&u);
        }
        user_close(&u);
}

/* ---- afterwards ------------------------------------------------------------------------------ */

static void delete_space(const char *socket) {
        struct kvd_msg_space_delete m = {.space = kvd_slice_of("one"), .force = 1};
        struct conn *conn;

        if (conn_open(socket, "deletes", &conn) < 0)
                wrong("no connection afterwards");
        conn_call(conn, KVD_MSG_space_delete, &m, NULL);
        conn_close(conn);
}

#define ASK_AGAIN 100

/* The worker may have to be restarted first, after a pause. Abandoned requests are repeated. */
static void wait_resident(struct user *u, uint32_t wanted) {
        const uint32_t slots[BLOCKS] = {0, 1, 2, 3};

        for (int i = 0; resident(u) != wanted; i++) {
                if (i == PATIENCE_MS)
                        wrong("blocks do not leave and come back afterwards");
                if (i % ASK_AGAIN == 0 && wanted)
                        kvd_sequence_revive(u->sequence, BLOCKS, slots, KVD_REVIVE_EXACT);
                else if (i % ASK_AGAIN == 0)
                        kvd_sequence_cool(u->sequence, BLOCKS, slots, KVD_COOL_SPILL);
                usleep(1000);
                kvd_sequence_sync(u->sequence);
        }
}

static void service(struct fault_state *s, void *socket) {
        struct user u;

        delete_space(socket);
        if (!user_open(&u, socket) || !append(&u))
                wrong("no service afterwards");
        wait_resident(&u, 0);
        wait_resident(&u, BLOCKS);
        user_close(&u);
        delete_space(socket);
}

static void run(struct fault_state *s, void *arg) {
        struct daemon_process d = {.worker = arg, .later = true};
        uint32_t fds;

        if (!is_of_interest(s->fault.call))
                return;
        if (!daemon_process_start(&d, s))
                die("the daemon did not start");
        fds = instance_fds(&d.in);
        s->on = true;
        fault_fork(s, session, d.in.socket, 300);
        s->on = false;
        instance_expect_clean(&d.in);
        fault_fork(s, service, d.in.socket, 300);
        WAIT_UNTIL(instance_fds(&d.in) == fds + WORKER_FDS);
        daemon_process_stop(&d);
}

int main(void) {
        struct fault_state *s = fault_state_new();
        const char *worker = getenv("KVD");

        signal(SIGPIPE, SIG_IGN);
        if (!worker) {
                fputs("set KVD to the kvd program that runs as the worker\n", stderr);
                return 1;
        }
        fault_sweep(s, "worker", 5, run, (void *)worker);
        return 0;
}
