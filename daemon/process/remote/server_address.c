/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A copy of what getaddrinfo returns, so that a link can try a name's addresses one after the other
 * until one of them answers.
 */

#include "daemon/process/remote/server_address.h"

#include <netdb.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"

bool address_equal(const struct address *a, const struct address *b) {
        if (a->any.sa_family != b->any.sa_family)
                return false;
        if (a->any.sa_family == AF_INET)
                return a->v4.sin_port == b->v4.sin_port &&
                       a->v4.sin_addr.s_addr == b->v4.sin_addr.s_addr;
        return a->v6.sin6_port == b->v6.sin6_port && a->v6.sin6_scope_id == b->v6.sin6_scope_id &&
               memcmp(&a->v6.sin6_addr, &b->v6.sin6_addr, sizeof a->v6.sin6_addr) == 0;
}

static bool is_among(const struct addresses *some, const struct address *one) {
        for (uint32_t i = 0; i < some->n; i++)
                if (address_equal(&some->all[i], one))
                        return true;
        return false;
}

void addresses_take(const struct addrinfo *list, struct addresses *ret) {
        ret->n = 0;
        for (const struct addrinfo *from = list; from && ret->n < ADDRESSES; from = from->ai_next) {
                struct address *to = &ret->all[ret->n];

                if ((from->ai_family != AF_INET && from->ai_family != AF_INET6) ||
                    from->ai_addrlen > sizeof to->v6)
                        continue;
                *to = (struct address){.size = from->ai_addrlen};
                memcpy(&to->any, from->ai_addr, from->ai_addrlen);
                ret->n += !is_among(ret, to);
        }
}

bool addresses_parse(const char *host, uint16_t port, struct addresses *ret) {
        struct addrinfo hints = {.ai_socktype = SOCK_STREAM,
                                 .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV};
        struct addrinfo *list;
        char text[8];

        snprintf(text, sizeof text, "%u", port);
        if (getaddrinfo(host, text, &hints, &list))
                return false;
        addresses_take(list, ret);
        freeaddrinfo(list);
        return true;
}

void address_text(const struct address *a, char ret[static ADDRESS_TEXT]) {
        if (getnameinfo(&a->any, a->size, ret, ADDRESS_TEXT, NULL, 0, NI_NUMERICHOST))
                ret[0] = 0;
}
