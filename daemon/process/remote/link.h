/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_LINK_H
#define KVD_DAEMON_PROCESS_REMOTE_LINK_H

/*
 * A connection to one server, which replies to commands in their order. A server that is silent for
 * too long, or sends an invalid reply, is away, and costs nothing more until link_begin. With TLS,
 * the two sides verify each other before the link is up (shaking).
 *
 *      away ──link_begin──► resolving ──► connecting ──► shaking ──► up
 *        ▲                                 └── the next address ──┘  │
 *        └──────────── no other address, an error, an invalid reply, or silence
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/process/remote/resp.h"
#include "daemon/process/remote/server_address.h"
#include "daemon/process/remote/wire.h"
#include "ipc/base/why.h"

#define LINK_HOST 128u
#define LINK_REPLIES 1024u /* maximum number of awaited replies; a power of two */

struct lookup;

enum link_state { LINK_AWAY, LINK_RESOLVING, LINK_CONNECTING, LINK_SHAKING, LINK_UP };

struct link {
        char host[LINK_HOST]; /* "": this link is unused */
        uint16_t port;
        bool seed, mapped; /* listed in the configuration; has slots */
        enum link_state state;
        struct ssl_ctx_st *tls;     /* NULL: no TLS */
        struct lookup *lookup;      /* RESOLVING */
        bool slow_name;             /* its last lookup timed out: do not wait for the next one */
        struct addresses addresses; /* of host; tried in this order */
        uint32_t at;                /* index of the current address */
        struct wire wire;           /* unless AWAY; RESOLVING: without a socket */
        uint8_t *out, *in;          /* owned */
        size_t out_n, out_at, out_size, in_n, in_size;
        uint32_t awaited[LINK_REPLIES], first, n; /* ring: items whose replies are awaited */
        struct kvd_why why; /* it is away, or addresses did not answer; empty if UP */
};

/* Begins to connect. A name is looked up first. Does not block. tls: as for wire_begin. */
void link_begin(struct link *link, struct ssl_ctx_st *tls);
_printf_(2, 3) void link_end(struct link *link, const char *why, ...);
/* It was silent for ns: tries its next address if it was connecting or shaking, or is away. */
void link_late(struct link *link, uint64_t ns);
/* The address that it is connected or connecting to. */
const struct address *link_address(const struct link *link);
/* How long it may be silent now. timeout_ns is for connecting to all addresses together. */
uint64_t link_patience(const struct link *link, uint64_t timeout_ns);

/* Appends room for bytes of a command, which link_move sends. NULL: out of memory. */
uint8_t *link_room(struct link *link, size_t bytes);
/* Appends a command of n words. False: out of memory. */
bool link_say(struct link *link, uint32_t n, const char *const words[]);
/* Awaits the reply to the command appended last, for whose. False: too many are awaited. */
bool link_await(struct link *link, uint32_t whose);

/* Descriptor and events for poll. */
int link_fd(const struct link *link);
short link_wants(const struct link *link); /* POLLIN, POLLOUT; unless AWAY */
/*
 * Sends and receives without blocking. most: maximum bytes of a string in a reply. True: take the
 * replies and call it again without poll. Either more bytes have been received already, or the link
 * has just come up and has sent nothing yet.
 */
bool link_move(struct link *link, short revents, uint64_t most);
/* True: *ret is the next reply, for *whose. It is valid until link_taken. */
bool link_reply(struct link *link, uint64_t most, struct resp *ret, uint32_t *whose, size_t *used);
void link_taken(struct link *link, size_t used);

#endif
