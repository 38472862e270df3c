/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A table of the descriptors that the keeper has, by name, and of the messages that it has yet to
 * get about each. So a full queue never makes the daemon wait, no message is lost, and a descriptor
 * that is dropped before there was room to send it is never sent.
 *
 * The number of names and their total size are limited, because the next daemon gets all of them in
 * one string of its environment. The store divides that room among the domains (store/keep.c). A
 * name that the keeper has yet to be told to close does not count: messages keep their order, so
 * the keeper closes it before it gets a later one.
 */

#include "daemon/children/keeper_link.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/base/log.h"
#include "daemon/base/notify.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "ipc/frame.h"

#define MOST_ENTRIES 16384u
#define MOST_BYTES (100u << 10) /* of Linux's 128 KiB; the socket and a unit's files need some */
#define SPARE_BYTES 1024u       /* part of these, for indexes that exist twice during adoption */
#define A_TIME 64u              /* messages before returning to the loop */

#define ENTRIES(k) (2 * (k)->max) /* to be kept, and as many to be closed by the keeper */

struct keep_entry {
        char name[KEEP_NAME_MAX];
        bool wanted; /* it is to be kept, and is counted */
        bool there;  /* the keeper has a descriptor of this name */
        bool remove; /* the keeper must be told to close it */
        int fd;      /* owned; to be sent to the keeper; -1: none */
        struct kvd_list_node node;
};

/* ---- table ----------------------------------------------------------------------------------- */

static uint32_t hash_of(const char *name) {
        uint32_t hash = 2166136261u;

        while (*name)
                hash = (hash ^ (uint8_t)*name++) * 16777619u;
        return hash | 1;
}

static struct keep_entry *find(const struct keep *k, const char *name) {
        uint32_t hash = hash_of(name);

        for (uint32_t i = 0; i < k->used; i++)
                if (k->hashes[i] == hash && strcmp(k->entries[i].name, name) == 0)
                        return &k->entries[i];
        return NULL;
}

/* False: there is no room for another name. */
static bool want(struct keep *k, struct keep_entry *e) {
        size_t n = strlen(e->name) + 1;

        if (k->n == k->max || k->bytes + n > MOST_BYTES) {
                log_rarely(LOG_WARNING,
                           "no more than %u descriptors can be kept: the others are "
                           "lost if kvd dies; raise FileDescriptorStoreMax and "
                           "FDSTORE, or segment",
                           k->n);
                return false;
        }
        k->n++;
        k->bytes += n;
        return e->wanted = true;
}

static void unwant(struct keep *k, struct keep_entry *e) {
        if (!e->wanted)
                return;
        k->n--;
        k->bytes -= strlen(e->name) + 1;
        e->wanted = false;
}

static struct keep_entry *add(struct keep *k, const char *name) {
        uint32_t i = 0;

        while (i < ENTRIES(k) && k->hashes[i])
                i++;
        if (i == ENTRIES(k) || strlen(name) >= KEEP_NAME_MAX)
                return NULL;
        k->entries[i] = (struct keep_entry){.fd = -1};
        strcpy(k->entries[i].name, name);
        if (!want(k, &k->entries[i]))
                return NULL;
        k->used = MAX(k->used, i + 1);
        k->hashes[i] = hash_of(name);
        return &k->entries[i];
}

static void forget(struct keep *k, struct keep_entry *e) {
        kvd_list_remove(&e->node);
        closep(&e->fd);
        unwant(k, e);
        k->hashes[e - k->entries] = 0;
}

/* ---- messages -------------------------------------------------------------------------------- */

static int tell(const struct keep *k, const char *what, const struct keep_entry *e, int fd) {
        struct kvd_fds fds = {{fd}, fd >= 0};
        char text[160];

        snprintf(text, sizeof text, "%s=1\nFDNAME=%s%s", what, e->name,
                 fd >= 0 ? "\nFDPOLL=0" : "");
        return kvd_frame_send(k->notify->fd, text, strlen(text), &fds, MSG_DONTWAIT);
}

/* Removes first, so that the keeper never has two descriptors of one name. */
static int tell_of(struct keep *k, struct keep_entry *e) {
        int r = 0;

        if (e->remove)
                r = tell(k, "FDSTOREREMOVE", e, -1);
        if (r < 0)
                return r;
        e->there &= !e->remove;
        e->remove = false;
        if (e->fd < 0)
                return 0;
        r = tell(k, "FDSTORE", e, e->fd);
        e->there |= r == 0;
        return r;
}

static void done(struct keep *k, struct keep_entry *e) {
        kvd_list_remove(&e->node);
        closep(&e->fd);
        e->fd = -1;
        e->remove = false;
        if (!e->there)
                forget(k, e);
}

static void keeper_is_gone(struct keep *k) {
        log_warning("the keeper of kvd's descriptors is gone: if kvd dies, the cache is lost");
        for (uint32_t i = 0; i < k->used; i++)
                if (k->hashes[i])
                        forget(k, &k->entries[i]);
        k->max = 0;
}

static bool is_gone(int error) {
        return error == -ECONNREFUSED || error == -ENOTCONN || error == -ECONNRESET ||
               error == -EPIPE;
}

static void await_room(struct keep *k) {
        if (k->loop && !k->queue.loop && loop_add(k->loop, &k->queue) < 0)
                log_rarely(LOG_WARNING, "kept descriptors are not up to date: out of memory");
}

static void send_waiting(struct keep *k) {
        struct keep_entry *e;

        for (uint32_t i = 0; (e = kvd_list_first(&k->waiting, struct keep_entry, node)); i++) {
                int r = i < A_TIME ? tell_of(k, e) : -EAGAIN;

                if (r == -EAGAIN) {
                        await_room(k);
                        return;
                }
                if (is_gone(r)) {
                        keeper_is_gone(k);
                        return;
                }
                if (r < 0)
                        log_rarely(LOG_WARNING, "'%s' is not kept: %s", e->name, strerror(-r));
                done(k, e);
        }
}

static void room(struct loop_source *source, short revents) {
        struct keep *k = container_of(source, struct keep, queue);

        loop_remove(source);
        send_waiting(k);
}

static void wait_turn(struct keep *k, struct keep_entry *e) {
        if (!e->node.in)
                kvd_list_insert(&k->waiting, NULL, &e->node);
        if (!k->queue.loop)
                send_waiting(k);
}

/* ---- calls of the store ---------------------------------------------------------------------- */

static void keep_one(void *arg, const char *name, int fd) {
        struct keep *k = arg;
        struct keep_entry *e = k->max ? find(k, name) : NULL;

        if (k->max && !e)
                e = add(k, name);
        if (!e || (!e->wanted && !want(k, e)))
                return;
        closep(&e->fd);
        e->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
        e->remove = e->there;
        wait_turn(k, e);
}

static void drop_one(void *arg, const char *name) {
        struct keep *k = arg;
        struct keep_entry *e = find(k, name);

        if (!e)
                return;
        unwant(k, e);
        closep(&e->fd);
        e->fd = -1;
        e->remove = e->there;
        wait_turn(k, e);
}

static void say(void *arg, const char *line) {
        log_info("%s", line);
}

static struct domain *domain(void *arg, const char *name) {
        struct keep *k = arg;

        return k->domain(k, name);
}

static const struct keep_ops ops = {keep_one, drop_one, say, domain};

/* ---- life ------------------------------------------------------------------------------------ */

int keep_init(struct keep *k, const struct notify *notify) {
        const char *most = getenv("FDSTORE");
        long n = most ? strtol(most, NULL, 10) : 0;

        *k = (struct keep){.notify = notify,
                           .queue = {.fd = notify->fd, .events = POLLOUT, .ready = room}};
        unsetenv("FDSTORE");
        if (n <= 0 || notify->fd < 0)
                return 0;
        k->max = (uint32_t)MIN(n, MOST_ENTRIES);
        k->entries = sys->calloc(ENTRIES(k), sizeof *k->entries);
        k->hashes = sys->calloc(ENTRIES(k), sizeof *k->hashes);
        return k->entries && k->hashes ? 0 : -ENOMEM;
}

void keep_clear(struct keep *k) {
        loop_remove(&k->queue);
        for (uint32_t i = 0; i < k->used; i++)
                if (k->hashes[i])
                        forget(k, &k->entries[i]);
        free(k->entries);
        free(k->hashes);
        *k = (struct keep){0};
}

void keep_start(struct keep *k, struct loop *loop) {
        k->loop = loop;
        send_waiting(k);
}

const struct keep_ops *keep_ops(const struct keep *k) {
        return k->entries ? &ops : NULL;
}

void keep_known(struct keep *k, const char *name) {
        struct keep_entry *e = k->max && !find(k, name) ? add(k, name) : NULL;

        if (e)
                e->there = true;
}

void keep_room(const struct keep *k, uint64_t *bytes, uint64_t *least) {
        *bytes = MOST_BYTES - SPARE_BYTES;
        *least = k->max ? (MOST_BYTES + k->max - 1) / k->max : 0;
}

uint32_t keep_count(const struct keep *k) {
        return k->n;
}
