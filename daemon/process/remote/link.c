/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Exchanges bytes with a server without blocking. The buffer of commands grows as needed. That of
 * replies has room for one reply and LITTLE more. That connect() begins proves nothing about an
 * address, so a name's addresses are tried in order until a handshake is complete.
 */

#include "daemon/process/remote/link.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/process/remote/name_lookup.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define LITTLE (UINT64_C(64) << 10)

/* ---- connecting ------------------------------------------------------------------------------ */

/* Adds a reason to why, with the address, unless the host is written as that address. */
static void note(struct link *link, const char *reason) {
        char *line = link->why.line, address[ADDRESS_TEXT] = "";
        size_t n = strlen(line);

        if (link->at < link->addresses.n)
                address_text(&link->addresses.all[link->at], address);
        if (strcmp(address, link->host) == 0)
                address[0] = 0;
        snprintf(line + n, sizeof link->why.line - n, "%s%s%s%s", n ? "; " : "", address,
                 address[0] ? ": " : "", reason);
}

static void go_away(struct link *link) {
        if (link->lookup)
                lookup_leave(link->lookup);
        link->lookup = NULL;
        if (link->state != LINK_AWAY)
                wire_end(&link->wire);
        link->state = LINK_AWAY;
        free(link->out);
        free(link->in);
        link->out = link->in = NULL;
        link->out_n = link->out_at = link->out_size = link->in_n = link->in_size = 0;
}

static int connect_to(struct link *link, const struct address *to) {
        int fd = sys->socket(to->any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        int r, one = 1;

        if (fd < 0)
                return negative_errno();
        sys->setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        r = sys->connect(fd, &to->any, to->size) < 0 && errno != EINPROGRESS ? negative_errno() : 0;
        if (r < 0) {
                close(fd);
                return r;
        }
        r = wire_begin(&link->wire, fd, link->tls, link->host);
        if (r < 0)
                wire_end(&link->wire);
        else
                link->state = LINK_CONNECTING;
        return r;
}

/* Begins to connect to the first address, from this index on, that does not fail at once. */
static bool connect_from(struct link *link, uint32_t at) {
        for (link->at = at; link->at < link->addresses.n; link->at++) {
                int r = connect_to(link, &link->addresses.all[link->at]);

                if (r == 0)
                        return true;
                note(link, strerror(-r));
        }
        return false;
}

/* Keeps the commands: none of them is sent before the link is up. */
static bool connect_to_next(struct link *link) {
        if (link->state != LINK_CONNECTING && link->state != LINK_SHAKING)
                return false;
        wire_end(&link->wire);
        link->state = LINK_AWAY;
        return connect_from(link, link->at + 1);
}

static void stop(struct link *link, bool for_good, const char *why, va_list words) {
        struct kvd_why reason;

        vsnprintf(reason.line, sizeof reason.line, why, words);
        note(link, reason.line);
        if (for_good || !connect_to_next(link))
                go_away(link);
}

void link_end(struct link *link, const char *why, ...) {
        va_list words;

        va_start(words, why);
        stop(link, true, why, words);
        va_end(words);
}

/* The same, but a link that is connecting or shaking tries its next address. */
_printf_(2, 3) static void fail(struct link *link, const char *why, ...) {
        va_list words;

        va_start(words, why);
        stop(link, false, why, words);
        va_end(words);
}

void link_late(struct link *link, uint64_t ns) {
        static const char *const texts[] = {[LINK_RESOLVING] = "its name was not looked up",
                                            [LINK_CONNECTING] = "it did not answer",
                                            [LINK_SHAKING] =
                                                    "it did not continue the TLS handshake",
                                            [LINK_UP] = "it did not answer"};

        link->slow_name |= link->state == LINK_RESOLVING;
        fail(link, "%s within %llu ms", texts[link->state], (unsigned long long)(ns / 1000000));
}

const struct address *link_address(const struct link *link) {
        return &link->addresses.all[link->at];
}

uint64_t link_patience(const struct link *link, uint64_t timeout_ns) {
        return link->state == LINK_CONNECTING ? timeout_ns / link->addresses.n : timeout_ns;
}

/* ---- name lookup ----------------------------------------------------------------------------- */

static void connect_to_first(struct link *link) {
        link->state = LINK_AWAY; /* until connect() has begun */
        if (!connect_from(link, 0))
                go_away(link);
}

/* Connects if the lookup has ended. */
static void resolve(struct link *link) {
        struct kvd_why why;
        int r = lookup_take(link->lookup, &link->addresses, &why);

        if (r == 0)
                return;
        link->lookup = NULL;
        if (r < 0) {
                link_end(link, "%s", why.line);
                return;
        }
        link->slow_name = false;
        connect_to_first(link);
}

static void begin_lookup(struct link *link) {
        struct kvd_why why;

        link->lookup = lookup_begin(link->host, link->port, &why);
        if (!link->lookup) {
                link_end(link, "%s", why.line);
                return;
        }
        link->state = LINK_RESOLVING;
        link->wire = (struct wire){.fd = -1, .since_ns = sys_now_ns()};
        resolve(link);
        if (link->state == LINK_RESOLVING && link->slow_name)
                link_end(link,
                         "its name is still being looked up: a name server is slow or silent");
}

void link_begin(struct link *link, struct ssl_ctx_st *tls) {
        link->n = 0;
        link->tls = tls;
        link->addresses.n = 0;
        link->why.line[0] = 0;
        if (addresses_parse(link->host, link->port, &link->addresses))
                connect_to_first(link);
        else
                begin_lookup(link);
}

/* ---- sending --------------------------------------------------------------------------------- */

uint8_t *link_room(struct link *link, size_t bytes) {
        uint8_t *at;

        if (link->out_n + bytes > link->out_size) {
                size_t size = MAX(link->out_size * 2, link->out_n + bytes + LITTLE);
                uint8_t *out = realloc(link->out, size);

                if (!out)
                        return NULL;
                link->out = out;
                link->out_size = size;
        }
        at = link->out + link->out_n;
        link->out_n += bytes;
        return at;
}

static bool append(struct link *link, const void *data, size_t n) {
        uint8_t *to = link_room(link, n);

        if (to)
                memcpy(to, data, n);
        return to;
}

bool link_say(struct link *link, uint32_t n, const char *const words[]) {
        uint8_t head[RESP_HEAD];
        bool said = append(link, head, resp_put_head(head, '*', n));

        for (uint32_t i = 0; said && i < n; i++)
                said = append(link, head, resp_put_head(head, '$', strlen(words[i]))) &&
                       append(link, words[i], strlen(words[i])) && append(link, "\r\n", 2);
        return said;
}

bool link_await(struct link *link, uint32_t whose) {
        if (link->n == LINK_REPLIES)
                return false;
        link->awaited[(link->first + link->n++) % LINK_REPLIES] = whose;
        return true;
}

/* Frees a large buffer. */
static void all_sent(struct link *link) {
        link->out_n = link->out_at = 0;
        if (link->out_size <= LITTLE * 2)
                return;
        free(link->out);
        link->out = NULL;
        link->out_size = 0;
}

/* False: sending failed, and why has the error. */
static bool send_some(struct link *link, struct kvd_why *why) {
        ssize_t n;

        if (link->out_at == link->out_n)
                return true;
        n = wire_send(&link->wire, link->out + link->out_at, link->out_n - link->out_at, why);
        if (n < 0)
                return false;
        link->out_at += (size_t)n;
        if (link->out_at == link->out_n)
                all_sent(link);
        return true;
}

/* ---- receiving ------------------------------------------------------------------------------- */

static bool in_has_room(struct link *link, uint64_t most) {
        uint64_t wanted = most + LITTLE;
        uint8_t *in;

        if (link->in_size >= wanted && link->in_size <= wanted + 2 * LITTLE)
                return true;
        wanted = MAX(wanted, link->in_n);
        in = realloc(link->in, wanted);
        if (!in)
                return false;
        link->in = in;
        link->in_size = wanted;
        return true;
}

static void receive_some(struct link *link, uint64_t most) {
        struct kvd_why why;
        ssize_t n;

        if (!in_has_room(link, most)) {
                link_end(link, "out of memory for its replies");
                return;
        }
        n = wire_receive(&link->wire, link->in + link->in_n, link->in_size - link->in_n, &why);
        if (n < 0)
                link_end(link, "%s", why.line);
        else
                link->in_n += (size_t)n;
}

static void connected(struct link *link) {
        unsigned size = sizeof(int);
        int error;

        if (sys->getsockopt(link->wire.fd, SOL_SOCKET, SO_ERROR, &error, &size) < 0)
                error = errno;
        if (error) {
                fail(link, "%s", strerror(error));
                return;
        }
        link->state = LINK_SHAKING;
        link->wire.since_ns = sys_now_ns();
}

static void shake(struct link *link) {
        struct kvd_why why;
        int r = wire_shake(&link->wire, &why);

        if (r < 0)
                fail(link, "%s", why.line);
        if (r != 1)
                return;
        link->state = LINK_UP;
        link->why.line[0] = 0; /* errors of previous addresses */
}

int link_fd(const struct link *link) {
        return link->state == LINK_RESOLVING ? lookup_fd(link->lookup) : link->wire.fd;
}

short link_wants(const struct link *link) {
        if (link->state == LINK_RESOLVING)
                return POLLIN;
        if (link->state == LINK_CONNECTING)
                return POLLOUT;
        if (link->state == LINK_SHAKING || link->out_at == link->out_n)
                return link->wire.receiving;
        return (short)(link->wire.receiving | link->wire.sending);
}

/* Receives even if sending failed: a server that closed the connection may have sent an error. */
static void send_and_receive(struct link *link, short revents, uint64_t most) {
        size_t had = link->in_n;
        struct kvd_why why;
        bool sends = send_some(link, &why);

        if (!sends || revents & (link->wire.receiving | POLLHUP | POLLERR))
                receive_some(link, most);
        if (link->state == LINK_UP && !sends && link->in_n == had)
                link_end(link, "%s", why.line);
}

bool link_move(struct link *link, short revents, uint64_t most) {
        if (link->state == LINK_RESOLVING) {
                if (revents)
                        resolve(link);
                return false;
        }
        if (link->state == LINK_CONNECTING && revents)
                connected(link);
        if (link->state == LINK_SHAKING && revents) {
                shake(link);
                return link->state == LINK_UP;
        }
        if (link->state == LINK_UP)
                send_and_receive(link, revents, most);
        return link->state == LINK_UP && wire_holds(&link->wire);
}

bool link_reply(struct link *link, uint64_t most, struct resp *ret, uint32_t *whose, size_t *used) {
        int r = link->state == LINK_UP ? resp_take_whole(link->in, link->in_n, most, ret, used) : 0;

        if (r < 0 || (r == 1 && !link->n) || (r == 0 && link->in && link->in_n == link->in_size))
                link_end(link, "it sent an invalid reply");
        if (r != 1 || link->state != LINK_UP)
                return false;
        *whose = link->awaited[link->first];
        return true;
}

void link_taken(struct link *link, size_t used) {
        if (link->state != LINK_UP)
                return;
        link->in_n -= used;
        memmove(link->in, link->in + used, link->in_n);
        link->first = (link->first + 1) % LINK_REPLIES;
        link->n--;
}
