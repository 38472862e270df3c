/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_LINK_H
#define KVD_DAEMON_PROCESS_REMOTE_LINK_H

/*
 * A connection to one server: commands go in, and their replies come out in the same order. A
 * server that is silent for too long, or sends nonsense, is away, and costs nothing more until
 * link_begin. With TLS, the two sides verify each other before the link is up (shaking).
 *
 *      away ──link_begin──► resolving ──► connecting ──► shaking ──► up
 *        ▲                                 └── the next address ──┘  │
 *        └──────────── no other address, an error, nonsense, or silence
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/process/remote/address.h"
#include "daemon/process/remote/resp.h"
#include "daemon/process/remote/wire.h"
#include "ipc/base/why.h"

#define LINK_HOST 128u
#define LINK_REPLIES 1024u /* that may be awaited at once; a power of two */

struct lookup;

enum link_state { LINK_AWAY, LINK_RESOLVING, LINK_CONNECTING, LINK_SHAKING, LINK_UP };

struct link {
        char host[LINK_HOST]; /* "": it is unused */
        uint16_t port;
        bool seed, mapped;    /* it was configured; it has slots */
        enum link_state state;
        struct ssl_ctx_st *tls;     /* NULL: without */
        struct lookup *lookup;      /* RESOLVING */
        bool slow_name;             /* its lookup was late: it is not waited for until one was not */
        struct addresses addresses; /* of host; they are tried in this order */
        uint32_t at;                /* ... which one is now */
        struct wire wire;     /* only if it is not away; RESOLVING: it has no socket yet */
        uint8_t *out, *in;    /* owned */
        size_t out_n, out_at, out_size, in_n, in_size;
        uint32_t awaited[LINK_REPLIES], first, n; /* whose replies come next */
        struct kvd_why why;   /* it is away, or some of its addresses did not answer */
};

/* Connects, without waiting, after the host was looked up, if it is a name. tls: NULL, or as wire_begin. */
void link_begin(struct link *link, struct ssl_ctx_st *tls);
_printf_(2, 3) void link_end(struct link *link, const char *why, ...);
/* It was silent for so long: one that is not up yet goes on to its next address, if there is any. */
void link_late(struct link *link, uint64_t ns);
/* The address that it is connected to, or connects to. */
const struct address *link_address(const struct link *link);
/* How long it may be silent now. All addresses together have timeout_ns to connect. */
uint64_t link_patience(const struct link *link, uint64_t timeout_ns);

/* Appends bytes that link_flush will send. NULL: out of memory. */
uint8_t *link_room(struct link *link, size_t bytes);
/* A command of words. */
bool link_say(struct link *link, uint32_t n, const char *const words[]);
/* Whose the reply to what was appended last is. False: too many are awaited. */
bool link_await(struct link *link, uint32_t whose);

/* What poll waits for. */
int link_fd(const struct link *link);
short link_wants(const struct link *link);            /* POLLIN, POLLOUT, of one that is not away */
/*
 * Sends and receives what can be. most: bytes of a string in a reply. True: it is to be called again
 * without poll: there is more once the replies were taken, or the link has just come up, and nothing
 * was sent yet.
 */
bool link_move(struct link *link, short revents, uint64_t most);
/* The next reply: true, and whose it is; it lives until link_taken. */
bool link_reply(struct link *link, uint64_t most, struct resp *ret, uint32_t *whose, size_t *used);
void link_taken(struct link *link, size_t used);

#endif
