/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A client opens a space of the smallest possible blocks in a large pool: tens of millions of them.
 * The daemon must spend memory for a block only when the block is used. The request is answered as
 * fast as any other, and the daemon does not grow by the request, by a few blocks, by a check of
 * them, or by a look at who pins them.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/daemon/hostile/raw.h"
#include "tests/lib/sanitized.h"
#include "tests/lib/yard.h"
#include "tests/lib/instance.h"

#define MOST_KIB 4096u
#define MOST_MS 250u

static uint32_t open_tiny(const struct instance *d, int fd) {
        struct kvd_msg m = {.number = KVD_MSG_space,
                            .serial = 2,
                            .space = {.name = kvd_slice_of("tiny"),
                                      .create = 1,
                                      .layers = 1,
                                      .kv_heads = 1,
                                      .head_dim = 1,
                                      .block_tokens = 1,
                                      .dtype = 4,
                                      .vocab = 9}},
                       reply;
        uint64_t kib = instance_rss_kib(d), began = instance_cpu_ns(d), ms;
        struct kvd_fds fds;

        if (raw_call(fd, &m, &reply, &fds) != 1 || reply.number != KVD_MSG_space_reply)
                die("a space of tiny blocks cannot be opened");
        kvd_fds_close(&fds);
        ms = (instance_cpu_ns(d) - began) / 1000000;
        printf("tiny: index of %llu MiB, %llu ms, %llu KiB\n",
               (unsigned long long)reply.space_reply.index_bytes >> 20, (unsigned long long)ms,
               (unsigned long long)(instance_rss_kib(d) - kib));
        if (ms > MOST_MS && !SANITIZED && (double)ms > MOST_MS * slowness())
                die("opening it kept the daemon busy for %llu ms", (unsigned long long)ms);
        if (instance_rss_kib(d) - kib > MOST_KIB && !SANITIZED)
                die("opening it made the daemon grow by %llu KiB",
                    (unsigned long long)(instance_rss_kib(d) - kib));
        return reply.space_reply.space;
}

static void allocate_some(const struct instance *d, int fd, uint32_t space) {
        struct kvd_msg m = {.number = KVD_MSG_allocate, .serial = 3, .allocate = {space, 100}},
                       reply;
        uint64_t kib = instance_rss_kib(d);

        if (raw_call(fd, &m, &reply, NULL) != 1 || reply.number != KVD_MSG_allocate_reply)
                die("no blocks of a space of tiny blocks");
        instance_rest(d);
        printf("tiny: %llu KiB more with the first blocks\n",
               (unsigned long long)(instance_rss_kib(d) - kib));
}

/* of one request, which walks a piece */
#define CHECK_NS (SANITIZED ? 100000000u : 3000000u)
#define REQUESTS 1000u
#define WALKS 3 /* the shortest counts, since the daemon may have done other work */
#define MOST_WALKS 12
#define MOST_SHARED_KIB 1024u

/* The longest of n requests, where ns has the shortest time of each. */
static uint64_t longest(const uint64_t *ns, uint32_t n) {
        uint64_t most = 0;

        for (uint32_t i = 0; i < n; i++)
                most = MAX(most, ns[i]);
        return most;
}

/* Returns how many requests it took; ns: the shortest time of each so far. */
static uint32_t walk(const struct instance *d, int fd, uint64_t ns[REQUESTS]) {
        struct kvd_msg m = {.number = KVD_MSG_check,
                            .serial = 4,
                            .check.space = kvd_slice_of("tiny")},
                       reply;
        uint32_t n = 0;

        do {
                uint64_t began = instance_cpu_ns(d);

                if (raw_call(fd, &m, &reply, NULL) != 1 || reply.number != KVD_MSG_check_reply)
                        die("the space cannot be checked");
                if (reply.check_reply.broken || n == REQUESTS)
                        die("an invariant of the space is broken, or it takes too many requests");
                ns[n] = MIN(ns[n], instance_cpu_ns(d) - began);
                m.check.cursor = reply.check_reply.next;
                n++;
        } while (m.check.cursor);
        return n;
}

/*
 * A check of an almost empty space once walked tens of millions of blocks and table entries in one
 * request, and read the holes of its index into memory.
 */
static void check_an_empty_space(const struct instance *d, int fd) {
        static uint64_t ns[REQUESTS];
        uint64_t shared, most = UINT64_MAX;
        uint32_t n = 0;

        memset(ns, 0xff, sizeof ns);
        instance_rest(d);
        shared = instance_shared_kib(d);
        for (int i = 0; i < WALKS || (i < MOST_WALKS && most > CHECK_NS); i++) {
                n = walk(d, fd, ns);
                most = longest(ns, n);
        }
        shared = instance_shared_kib(d) - MIN(shared, instance_shared_kib(d));
        printf("tiny: checked by %u requests of at most %llu us, %llu KiB more\n", n,
               (unsigned long long)most / 1000, (unsigned long long)shared);
        if (most > CHECK_NS && (double)most > CHECK_NS * slowness())
                die("checking it takes too long");
        if (shared > MOST_SHARED_KIB)
                die("checking it allocated memory for its index or a page of pins");
}

int main(void) {
        struct instance d;
        int fd;

        unsetenv("MALLOC_PERTURB_"); /* it makes glibc write all memory that is requested */
        instance_start(&d, SETTINGS("daemon.pool=3G", "daemon.segment=0", "daemon.log=error",
                                    "daemon.pages=small", "daemon.overhead=64G"));
        fd = raw_attach(d.socket);
        allocate_some(&d, fd, open_tiny(&d, fd));
        check_an_empty_space(&d, fd);
        close(fd);
        instance_stop(&d);
        instance_sweep(&d);
        return 0;
}
