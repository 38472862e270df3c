/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A table of lookups, each with a thread from its first use on. A lookup that was left is reused
 * for another name only after its call has returned, so slow names cannot create threads without
 * bound.
 */

#include "daemon/process/remote/name_lookup.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "daemon/process/remote/caller.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define LOOKUPS 64u
#define HOST 128u

static struct lookup {
        bool used;                /* a link waits for it */
        struct caller *caller;    /* NULL: no thread yet */
        int ended;                /* an eventfd */
        char host[HOST], port[8]; /* "": no call under way, and no result */

        /* Owned by the thread while a call is under way. */
        int r;
        struct addresses addresses;
} lookups[LOOKUPS]; /* live as long as the process */

static void look_up(void *data) {
        struct lookup *l = data;
        struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
        struct addrinfo *list = NULL;

        l->r = getaddrinfo(l->host, l->port, &hints, &list);
        if (l->r == 0) {
                addresses_take(list, &l->addresses);
                freeaddrinfo(list);
                l->r = l->addresses.n ? 0 : EAI_NONAME;
        }
        eventfd_write(l->ended, 1);
}

static bool has_returned(const struct lookup *l) {
        return !l->caller || caller_wait(l->caller, 0);
}

static struct lookup *find(const char *host, const char *port) {
        struct lookup *unused = NULL; /* preferably one without a result */

        for (uint32_t i = 0; i < LOOKUPS; i++) {
                struct lookup *l = &lookups[i];

                if (l->used)
                        continue;
                if (strcmp(l->host, host) == 0 && strcmp(l->port, port) == 0)
                        return l;
                if (has_returned(l) && (!unused || !l->host[0]))
                        unused = l;
        }
        return unused;
}

static int prepare(struct lookup *l) {
        if (l->caller)
                return 0;
        l->ended = sys->eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (l->ended < 0)
                return negative_errno();
        if (caller_new(&l->caller) == 0)
                return 0;
        close(l->ended);
        return -ENOMEM;
}

static void forget_result(struct lookup *l) {
        eventfd_t n;

        eventfd_read(l->ended, &n);
        l->host[0] = l->port[0] = 0;
}

struct lookup *lookup_begin(const char *host, uint16_t port, struct kvd_why *why) {
        char text[sizeof lookups->port];
        struct lookup *l;
        int r;

        snprintf(text, sizeof text, "%u", port);
        l = find(host, text);
        r = l ? prepare(l) : -EAGAIN;
        if (r < 0) {
                kvd_refuse(why, r, "its name cannot be looked up: %s",
                           l ? strerror(-r) : "too many names are being looked up");
                return NULL;
        }
        l->used = true;
        if (strcmp(l->host, host) == 0 && strcmp(l->port, text) == 0)
                return l; /* its call is still under way, or it has a result */
        forget_result(l);
        snprintf(l->host, sizeof l->host, "%s", host);
        strcpy(l->port, text);
        caller_begin(l->caller, look_up, l);
        return l;
}

void lookup_leave(struct lookup *l) {
        l->used = false;
}

int lookup_fd(const struct lookup *l) {
        return l->ended;
}

int lookup_take(struct lookup *l, struct addresses *ret, struct kvd_why *why) {
        if (!has_returned(l))
                return 0;
        *ret = l->addresses;
        lookup_leave(l);
        forget_result(l);
        return l->r ? kvd_refuse(why, -ENOENT, "%s", gai_strerror(l->r)) : 1;
}
