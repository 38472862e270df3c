/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_HANDLERS_HANDLERS_H
#define KVD_DAEMON_HANDLERS_HANDLERS_H

/*
 * One function per request of msg.def: it checks what the store does not, calls the store, and
 * fills in the reply. handlers.def is the list of them.
 */

#include "daemon/serve/client.h"

/* What a handler gets in addition to the message, and what it fills in. */
struct call {
        struct attachment *attachment; /* NEEDS_ATTACHMENT */
        struct space *space;           /* NEEDS_ATTACHMENT, NEEDS_SPACE */
        struct kvd_msg reply;          /* number and serial are set before the call */
        struct kvd_fds fds;            /* borrowed; sent with the reply */
        int own_fd;                    /* the one of fds that is closed after the reply; -1: none */
        bool quiet;                    /* no reply is sent */
};

/* 0, or a negative errno after client_refuse or client_store_failed said why. */
typedef int client_handler(struct client *client, const struct kvd_msg *request, struct call *call);

struct handler {
        client_handler *handle; /* NULL: there is no such request */
        enum { NEEDS_NOTHING, NEEDS_ATTACHMENT, NEEDS_SPACE } needs;
        size_t space, domain; /* offsets of these fields in struct kvd_msg */
        bool before_attach, wants_idle;
        const char *worker_for; /* feature that needs a worker, in words; NULL: none */
};
extern const struct handler handlers[256];

#define KVD_HANDLER(message, needs, flags, worker_for) client_handler handle_##message;
#include "daemon/handlers/handlers.def"
#undef KVD_HANDLER

#endif
