/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/client/killpoints/reclaim.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "client/kvd.h"
#include "ipc/base/util.h"
#include "tests/client/killpoints/actor.h"
#include "tests/lib/instance.h"

uint64_t now_ns(void) {
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint32_t fds_beside_segments(const struct instance *d) {
        char path[300], link[256];
        struct dirent *e;
        uint32_t n = 0;
        ssize_t size;
        DIR *dir;

        snprintf(path, sizeof path, "/proc/%d/fd", d->pid);
        dir = opendir(path);
        while (dir && (e = readdir(dir))) {
                snprintf(path, sizeof path, "/proc/%d/fd/%s", d->pid, e->d_name);
                size = readlink(path, link, sizeof link - 1);
                link[MAX(size, 0)] = 0;
                n += size > 0 && !strstr(link, "kvd-pool");
        }
        if (dir)
                closedir(dir);
        return n;
}

static void evict(struct conn *conn, const char *space) {
        struct kvd_msg_evict request = {.space = kvd_slice_of(space)};
        struct kvd_msg_evict_reply reply;

        do
                if (conn_call(conn, KVD_MSG_evict, &request, &reply) < 0)
                        die("evict: %s", kvd_error());
        while (reply.more);
}

void evict_all(struct conn *conn) {
        evict(conn, CAUSAL_SPACE);
        evict(conn, WHOLE_SPACE);
}

static bool at_rest(struct conn *conn) {
        struct kvd_msg_space_info_reply info;

        evict_all(conn);
        for (uint32_t i = 0; i < 2; i++) {
                space_facts(conn, i, &info);
                if (info.filling || info.limbo || info.leases || info.clients != 1 ||
                    info.sealed != (info.kind == KVD_CAUSAL ? OBSERVER_BLOCKS : 0))
                        return false;
        }
        return true;
}

static _Noreturn void complain(struct conn *conn) {
        struct kvd_msg_space_info_reply info;

        for (uint32_t i = 0; i < 2; i++) {
                space_facts(conn, i, &info);
                fprintf(stderr,
                        "%.*s: %llu filling, %llu limbo, %llu sealed, %llu leases, %u clients\n",
                        (int)info.name.size, (const char *)info.name.data,
                        (unsigned long long)info.filling, (unsigned long long)info.limbo,
                        (unsigned long long)info.sealed, (unsigned long long)info.leases,
                        info.clients);
        }
        die("a dead process still holds something after %d looks", RECLAIM_LOOKS);
}

uint64_t wait_reclaimed(struct conn *conn, struct stage *stage, uint64_t since_ns) {
        uint64_t now;

        observer_rest(stage);
        for (int looks = 1; !at_rest(conn); looks++) {
                if (looks == RECLAIM_LOOKS)
                        complain(conn);
                usleep(100);
        }
        now = now_ns();
        observer_resume(stage);
        return now - since_ns;
}
