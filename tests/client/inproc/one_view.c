/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/client/inproc/one_view.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/sys.h"

#define MAX_MAPPINGS 512u
#define MAX_FDS 4096u
#define MAX_CONNECTIONS 65536u

static struct kvd_sys table;

/* ---- mappings -------------------------------------------------------------------------------- */

struct mapping {
        ino_t inode; /* 0: unused */
        void *at;
        size_t bytes;
        unsigned users;
};

static struct mapping mappings[MAX_MAPPINGS];
static pthread_mutex_t mappings_lock = PTHREAD_MUTEX_INITIALIZER;

int __real_munmap(void *at, size_t bytes);
int __wrap_munmap(void *at, size_t bytes);

/*
 * True for index and pin pages. Clients choose the addresses of pool segments, so those are
 * excluded.
 */
static bool is_shared_page(int fd, int flags, struct stat *st) {
        return fd >= 0 && (flags & MAP_SHARED) && !(flags & MAP_FIXED) && fstat(fd, st) == 0;
}

static struct mapping *find_inode(ino_t inode) {
        for (uint32_t i = 0; i < MAX_MAPPINGS; i++)
                if (mappings[i].inode == inode)
                        return &mappings[i];
        abort();
}

static bool is_mapped(ino_t inode) {
        for (uint32_t i = 0; i < MAX_MAPPINGS; i++)
                if (mappings[i].inode == inode)
                        return true;
        return false;
}

static void *map_once(ino_t inode, size_t n, int prot, int flags, int fd) {
        struct mapping *m = find_inode(is_mapped(inode) ? inode : 0);

        if (m->inode == 0) {
                void *at = mmap(NULL, n, prot, flags, fd, 0);

                if (at == MAP_FAILED)
                        return at;
                *m = (struct mapping){inode, at, n, 0};
        }
        m->users++;
        return m->at;
}

static void *mmap_one_view(void *at, size_t n, int prot, int flags, int fd, off_t off) {
        struct stat st;
        void *r;

        if (!is_shared_page(fd, flags, &st))
                return mmap(at, n, prot, flags, fd, off);
        pthread_mutex_lock(&mappings_lock);
        r = map_once(st.st_ino, n, prot, flags, fd);
        pthread_mutex_unlock(&mappings_lock);
        return r;
}

/* Only the last user's munmap is a real one. */
static bool still_used(void *at) {
        for (uint32_t i = 0; i < MAX_MAPPINGS; i++) {
                struct mapping *m = &mappings[i];

                if (m->inode == 0 || m->at != at)
                        continue;
                if (--m->users > 0)
                        return true;
                m->inode = 0;
                return false;
        }
        return false;
}

int __wrap_munmap(void *at, size_t bytes) {
        bool used;
        int r = 0;

        pthread_mutex_lock(&mappings_lock);
        used = still_used(at);
        if (!used)
                r = __real_munmap(at, bytes);
        pthread_mutex_unlock(&mappings_lock);
        return r;
}

/* ---- messages -------------------------------------------------------------------------------- */

struct order {
        _Atomic uint32_t to_daemon, to_client;
};

static struct order orders[MAX_CONNECTIONS];
static _Atomic uint32_t connection_of[MAX_FDS]; /* number * 2, + 1 at the daemon's end; 0 if none */
static uint32_t n_connected, n_accepted;        /* the backlog is first in, first out */
static pthread_mutex_t connect_lock = PTHREAD_MUTEX_INITIALIZER;

static int connect_in_order(int fd, const struct sockaddr *to, unsigned n) {
        int r;

        pthread_mutex_lock(&connect_lock);
        r = kvd_sys_real.connect(fd, to, n);
        if (r == 0)
                connection_of[fd] = (++n_connected % MAX_CONNECTIONS) * 2;
        pthread_mutex_unlock(&connect_lock);
        return r;
}

static int accept_in_order(int fd, int flags) {
        int r = kvd_sys_real.accept(fd, flags);

        pthread_mutex_lock(&connect_lock);
        if (r >= 0)
                connection_of[r] = (++n_accepted % MAX_CONNECTIONS) * 2 + 1;
        pthread_mutex_unlock(&connect_lock);
        return r;
}

static ssize_t sendmsg_in_order(int fd, const struct msghdr *msg, int flags) {
        uint32_t c = connection_of[fd];
        struct order *o = &orders[c / 2];

        atomic_fetch_add_explicit(c % 2 ? &o->to_client : &o->to_daemon, 1, memory_order_release);
        return kvd_sys_real.sendmsg(fd, msg, flags);
}

static ssize_t recvmsg_in_order(int fd, struct msghdr *msg, int flags) {
        ssize_t n = kvd_sys_real.recvmsg(fd, msg, flags);
        uint32_t c = connection_of[fd];
        struct order *o = &orders[c / 2];

        atomic_load_explicit(c % 2 ? &o->to_daemon : &o->to_client, memory_order_acquire);
        return n;
}

void one_view_install(void) {
        table = kvd_sys_real;
        table.mmap = mmap_one_view;
        table.connect = connect_in_order;
        table.accept = accept_in_order;
        table.sendmsg = sendmsg_in_order;
        table.recvmsg = recvmsg_in_order;
        sys = &table;
}
