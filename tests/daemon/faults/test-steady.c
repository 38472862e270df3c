/* SPDX-License-Identifier: Apache-2.0 */

/*
 * After a warm-up, 10,000 operations of every kind must not make the daemon or the library ask the
 * system for memory, and the daemon's thread must not call malloc. (malloc is replaced below, so
 * that calls by libraries count.) On a busy machine the warm-up may miss something, so a round that
 * allocates is repeated once.
 */

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/conn/conn.h"
#include "client/kvd.h"
#include "tests/lib/fault.h"
#include "tests/lib/inproc.h"
#include "tests/lib/sanitized.h"
#include "tests/lib/oracle.h"

#define BT 4u
#define MAX_BLOCKS 20u
#define OPERATIONS 10000u

static struct inproc daemon_thread;
static _Atomic bool watching;
static _Atomic uint64_t daemon_mallocs;

#if !SANITIZED
void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t n);

static void note(void) {
        if (watching && pthread_equal(pthread_self(), daemon_thread.thread))
                daemon_mallocs++;
}

__attribute__((visibility("default"))) void *malloc(size_t n) {
        note();
        return __libc_malloc(n);
}

__attribute__((visibility("default"))) void *calloc(size_t n, size_t size) {
        note();
        return __libc_calloc(n, size);
}

__attribute__((visibility("default"))) void *realloc(void *p, size_t n) {
        note();
        return __libc_realloc(p, n);
}
#endif

/* ---- operations ------------------------------------------------------------------------------ */

static const struct kvd_geometry geometry = {.layers = 1,
                                             .kv_heads = 2,
                                             .head_dim = 64,
                                             .block_tokens = BT,
                                             .dtype = KVD_F32,
                                             .vocab = 100000};

struct user {
        struct kvd_space *space, *whole;
        struct conn *conn;
        struct random random;
};

static void make_tokens(uint32_t chain, uint32_t *ret) {
        for (uint32_t i = 0; i < MAX_BLOCKS * BT; i++)
                ret[i] = chain * 100 + i;
}

static void look_up_and_extend(struct user *u) {
        uint32_t tokens[MAX_BLOCKS * BT], ids[MAX_BLOCKS],
                want = 1 + random_below(&u->random, MAX_BLOCKS), n;
        struct kvd_block blocks[MAX_BLOCKS];
        struct kvd_pin pin = {0};
        int r;

        make_tokens(random_below(&u->random, 200), tokens);
        if (kvd_lookup(u->space, 0, tokens, want * BT, ids, MAX_BLOCKS, &pin) < 0)
                die("kvd_lookup: %s", kvd_error());
        if (pin.n_blocks < want) {
                r = kvd_alloc(u->space, want - pin.n_blocks, blocks);
                if (r < 0)
                        die("kvd_alloc: %s", kvd_error());
                n = (uint32_t)r;
                if (random_below(&u->random, 10) == 0)
                        kvd_free(u->space, n, blocks);
                else if (kvd_seal(u->space, &pin, n, blocks, tokens + pin.n_tokens, n * BT) < 0)
                        die("kvd_seal: %s", kvd_error());
        }
        kvd_unpin(u->space, &pin);
}

static void call(struct user *u, uint32_t number, const void *request) {
        if (conn_call(u->conn, number, request, NULL) < 0)
                die("request %u: %s", number, kvd_error());
}

static void ask(struct user *u) {
        struct kvd_slice name = kvd_slice_of("steady");

        call(u, KVD_MSG_daemon_info, NULL);
        call(u, KVD_MSG_space_info, &(struct kvd_msg_space_info){0});
        call(u, KVD_MSG_client_info, &(struct kvd_msg_client_info){0});
        call(u, KVD_MSG_block_map, &(struct kvd_msg_block_map){.space = name});
        call(u, KVD_MSG_check, &(struct kvd_msg_check){.space = name});
        call(u, KVD_MSG_evict, &(struct kvd_msg_evict){.space = name, .blocks = 3});
}

static void single_flight(struct user *u) {
        uint32_t tokens[MAX_BLOCKS * BT];

        make_tokens(random_below(&u->random, 50), tokens);
        if (kvd_lease(u->whole, tokens, 9, 0) != 1 || kvd_lease_end(u->whole, tokens, 9) < 0)
                die("lease: %s", kvd_error());
}

static void operation(struct user *u) {
        uint32_t dice = random_below(&u->random, 20);

        if (dice == 0)
                ask(u);
        else if (dice == 1)
                single_flight(u);
        else
                look_up_and_extend(u);
}

/* ---- main ------------------------------------------------------------------------------------ */

static void open_all(struct user *u, struct kvd **handle) {
        struct kvd_space_options whole = {.kind = KVD_BIDIRECTIONAL, .max_blocks = 64};

        if (kvd_open(daemon_thread.in.socket, handle) < 0 ||
            kvd_space_open(*handle, "steady", &geometry, NULL, &u->space) < 0 ||
            kvd_space_open(*handle, "whole", &geometry, &whole, &u->whole) < 0 ||
            conn_open(daemon_thread.in.socket, "asks", &u->conn) < 0)
                die("%s", kvd_error());
}

/* Prints the number of calls of each kind. Returns true if there were none. */
static bool say_calls(const struct fault_state *s) {
        static const char *const names[] = {"calloc",    "mmap",      "memfd_create",
                                            "ftruncate", "fallocate", "open"};
        static const enum fault_call calls[] = {FAULT_calloc,       FAULT_mmap,
                                                FAULT_memfd_create, FAULT_ftruncate,
                                                FAULT_fallocate,    FAULT_open};
        bool none = daemon_mallocs == 0;

        for (uint32_t i = 0; i < sizeof calls / sizeof *calls; i++) {
                none &= s->calls[calls[i]] == 0;
                if (s->calls[calls[i]])
                        printf("%llu calls of %s in steady state\n",
                               (unsigned long long)s->calls[calls[i]], names[i]);
        }
        if (daemon_mallocs)
                printf("the daemon called malloc %llu times in steady state\n",
                       (unsigned long long)daemon_mallocs);
        return none;
}

static bool is_steady(struct fault_state *s, struct user *u) {
        for (uint32_t i = 0; i < N_FAULT_CALLS; i++)
                s->calls[i] = 0;
        daemon_mallocs = 0;
        watching = s->on = true;
        for (uint32_t i = 0; i < OPERATIONS; i++)
                operation(u);
        watching = s->on = false;
        return say_calls(s);
}

int main(void) {
        struct fault_state *s = fault_state_new();
        struct user u = {.random = {1}};
        struct kvd *handle;

        fault_set(s, &(struct fault){.call = N_FAULT_CALLS});
        fault_install(s);
        inproc_start(&daemon_thread, NULL);
        open_all(&u, &handle);
        for (uint32_t i = 0; i < OPERATIONS; i++)
                operation(&u);
        if (!is_steady(s, &u) && !is_steady(s, &u))
                die("the repeated round allocates, too");
        conn_close(u.conn);
        kvd_space_close(u.space);
        kvd_space_close(u.whole);
        kvd_close(handle);
        instance_expect_clean(&daemon_thread.in);
        inproc_stop(&daemon_thread);
        printf("%u operations: %llu messages, 0 allocations\n", OPERATIONS,
               (unsigned long long)s->calls[FAULT_sendmsg]);
        return 0;
}
