/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_SERVER_ADDRESS_H
#define KVD_DAEMON_PROCESS_REMOTE_SERVER_ADDRESS_H

/* The addresses of a server's name: one of them may answer where another does not. */

#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>

#define ADDRESSES 8u     /* maximum number of a name's addresses; the others are not tried */
#define ADDRESS_TEXT 64u /* bytes of an address as text, with its terminator */

struct addrinfo;

struct address {
        union {
                struct sockaddr any;
                struct sockaddr_in v4;
                struct sockaddr_in6 v6;
        };
        socklen_t size;
};

struct addresses {
        uint32_t n;
        struct address all[ADDRESSES];
};

/* False: the host is a name rather than an address. No name server is queried. */
bool addresses_parse(const char *host, uint16_t port, struct addresses *ret);
/* Copies the IPv4 and IPv6 addresses of the list, in its order, without duplicates. */
void addresses_take(const struct addrinfo *list, struct addresses *ret);
bool address_equal(const struct address *a, const struct address *b); /* including the port */
/* Without the port. */
void address_text(const struct address *a, char ret[static ADDRESS_TEXT]);

#endif
