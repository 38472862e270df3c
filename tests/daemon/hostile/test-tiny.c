/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A client asks for a space of the smallest blocks that there can be in a large pool: tens of
 * millions of them. What the daemon keeps for each block costs memory only with the block: the
 * request is answered as soon as any other, and neither it nor a handful of blocks makes the daemon
 * grow.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/daemon/hostile/raw.h"
#include "tests/lib/sanitized.h"
#include "tests/lib/instance.h"

#define MOST_KIB 4096u
#define MOST_MS 250u

/*
 * Of processor time, as the scheduler counts it: the daemon's own, whatever else the machine does.
 */
static uint64_t spent_ms(const struct instance *d) {
        unsigned long long ns = 0;
        char path[64];
        FILE *f;

        snprintf(path, sizeof path, "/proc/%d/schedstat", d->pid);
        f = fopen(path, "re");
        if (!f || fscanf(f, "%llu", &ns) != 1)
                die("%s cannot be read", path);
        fclose(f);
        return ns / 1000000;
}

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
        uint64_t kib = instance_rss_kib(d), began = spent_ms(d), ms;
        struct kvd_fds fds;

        if (raw_call(fd, &m, &reply, &fds) != 1 || reply.number != KVD_MSG_space_reply)
                die("a space of tiny blocks cannot be opened");
        kvd_fds_close(&fds);
        ms = spent_ms(d) - began;
        printf("tiny: index of %llu MiB, %llu ms, %llu KiB\n",
               (unsigned long long)reply.space_reply.index_bytes >> 20, (unsigned long long)ms,
               (unsigned long long)(instance_rss_kib(d) - kib));
        if (ms > MOST_MS && !SANITIZED)
                die("it kept the daemon busy for %llu ms", (unsigned long long)ms);
        if (instance_rss_kib(d) - kib > MOST_KIB && !SANITIZED)
                die("it made the daemon grow by %llu KiB",
                    (unsigned long long)(instance_rss_kib(d) - kib));
        return reply.space_reply.space;
}

static void allocate_some(const struct instance *d, int fd, uint32_t space) {
        struct kvd_msg m = {.number = KVD_MSG_allocate, .serial = 3, .allocate = {space, 100}},
                       reply;
        uint64_t kib = instance_rss_kib(d);

        if (raw_call(fd, &m, &reply, NULL) != 1 || reply.number != KVD_MSG_allocate_reply)
                die("no blocks of a space of tiny blocks");
        usleep(100000); /* what it does ahead of need */
        printf("tiny: %llu KiB more with the first blocks\n",
               (unsigned long long)(instance_rss_kib(d) - kib));
}

int main(void) {
        struct instance d;
        int fd;

        unsetenv("MALLOC_PERTURB_"); /* makes glibc write all of what is asked for */
        instance_start(&d, SETTINGS("daemon.pool=3G", "daemon.segment=0", "daemon.log=error",
                                    "daemon.pages=small"));
        fd = raw_attach(d.socket);
        allocate_some(&d, fd, open_tiny(&d, fd));
        close(fd);
        instance_stop(&d);
        instance_sweep(&d);
        return 0;
}
