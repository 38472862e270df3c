/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_SERVERS_H
#define KVD_DAEMON_PROCESS_REMOTE_SERVERS_H

/*
 * All servers of the remote tier: one, several over which names are spread, or a Cluster, which
 * says itself who has which slots, and sends on who asks the wrong one (MOVED, ASK).
 *
 * The password is for the servers of the configuration alone (seed). A server that a Cluster tells
 * of gets it if it is one of them by another name: without TLS, if it is where one of them answers;
 * with TLS, if its certificate is also for one of their names.
 *
 * Servers are connected to by servers_open alone. One that fails is away until then: whoever asks
 * it meanwhile is told at once.
 */

#include "daemon/process/remote/dialect.h"
#include "daemon/process/remote/link.h"

#define SERVERS 64u
#define SLOTS 16384u
#define TALK_ITEMS 1024u

struct servers {
        struct link links[SERVERS];
        char user[REMOTE_PASSWORD], password[REMOTE_PASSWORD]; /* for those that get it; "": none */
        uint8_t slots[SLOTS];  /* link's number plus 1; 0: nobody's */
        struct ssl_ctx_st *tls; /* owned, of all of them; NULL: they are spoken to without */
        uint64_t timeout_ns;
        bool wants_tls;        /* they were written so */
        bool cluster;
        bool stale;            /* slots have moved to whom we do not know */
        struct kvd_why why;
        struct kvd_why refusal; /* talk_refused */
};

/* One question to many servers at once: items are asked for, and each is answered once. */
struct talk {
        struct servers *servers;
        uint64_t most;                 /* bytes of a string in a reply */
        /* appends the item's command; false: out of memory */
        bool (*ask)(struct talk *talk, uint32_t item, struct link *link);
        /* NULL: there is no answer */
        void (*answer)(struct talk *talk, uint32_t item, const struct resp *reply);
        const struct link *from;       /* whose replies are being answered */
        uint8_t sent_on[TALK_ITEMS];   /* how often an item was */
};

/* "redis://host[:port][,host[:port]...]", or rediss://; which of them has been looked at */
int servers_parse(struct servers *s, const char *text, struct kvd_why *why);
/* "password", "user:password", or ":password" if that has colons; "": none is asked for */
void servers_password(struct servers *s, const char *text);

/* Connects to those that are away, and asks who has which slots. */
void servers_open(struct servers *s);
uint32_t servers_away(const struct servers *s, uint32_t *n); /* n: how many there are */
const char *servers_why(struct servers *s); /* one of them is */

uint32_t servers_slot(const char *key);

/* Asks for an item at the server that has the slot. */
void talk_ask(struct talk *talk, uint32_t item, uint32_t slot);
/* Until all are answered. A server that says nothing for the timeout is away. */
void talk_run(struct talk *talk);
/* Notes what a server said to an item that it refused, in words that can be shown. */
void talk_refused(struct talk *talk, const struct resp *reply);

#endif
