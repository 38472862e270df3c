/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_SERVERS_H
#define KVD_DAEMON_PROCESS_REMOTE_SERVERS_H

/*
 * All servers of the remote tier: one, several over which names are spread, or a Cluster. A Cluster
 * lists which server has which slots, and redirects requests to the wrong server (MOVED, ASK).
 *
 * The password is sent only to configured servers (seed). Another server that a Cluster lists gets
 * it only if it is one of them under another name. Without TLS, it must have the address of one
 * that is up. With TLS, its certificate must also be valid for the name of one.
 *
 * Only servers_open connects. A server that fails is away until the next servers_open: requests to
 * it fail at once.
 */

#include "daemon/process/remote/dialect.h"
#include "daemon/process/remote/link.h"

#define SERVERS 64u
#define SLOTS 16384u
#define TALK_ITEMS 1024u

struct servers {
        struct link links[SERVERS];
        char user[REMOTE_PASSWORD], password[REMOTE_PASSWORD]; /* "": none */
        uint8_t slots[SLOTS];   /* 1 + index of the link that has the slot; 0 if none */
        struct ssl_ctx_st *tls; /* owned, for all links; NULL: no TLS */
        uint64_t timeout_ns;
        bool wants_tls; /* configured as rediss:// */
        bool cluster;
        bool stale;             /* slots have moved, or a server is unknown: read the slots */
        struct kvd_why why;     /* servers_why */
        struct kvd_why refusal; /* talk_refused */
};

/* One request to many servers at once. Each item is asked for, and answered once. */
struct talk {
        struct servers *servers;
        uint64_t most; /* maximum bytes of a string in a reply */
        /* appends the item's command; false: out of memory */
        bool (*ask)(struct talk *talk, uint32_t item, struct link *link);
        /* reply: NULL if none came */
        void (*answer)(struct talk *talk, uint32_t item, const struct resp *reply);
        const struct link *from;     /* link whose replies are being handled */
        uint8_t sent_on[TALK_ITEMS]; /* number of redirections of each item */
};

/*
 * "redis://host[:port][,host[:port]...]", or rediss://; an IPv6 address is in brackets. The caller
 * has checked the scheme.
 */
int servers_parse(struct servers *s, const char *text, struct kvd_why *why);
/* "password", "user:password", or ":password" if the password contains colons; "": none */
void servers_password(struct servers *s, const char *text);

/* Connects to servers that are away, and asks which server has which slots. */
void servers_open(struct servers *s);
uint32_t servers_away(const struct servers *s, uint32_t *n); /* *n: number of servers */
const char *servers_why(struct servers *s);                  /* error of a server that is away */

uint32_t servers_slot(const char *key);

/* Asks the server that has the slot for the item. */
void talk_ask(struct talk *talk, uint32_t item, uint32_t slot);
/* Runs until all items are answered. A server that is silent for the timeout is away. */
void talk_run(struct talk *talk);
/* Keeps a server's error reply to an item in refusal, as printable text. */
void talk_refused(struct talk *talk, const struct resp *reply);

#endif
