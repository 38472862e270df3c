/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Serves one message of a client in each turn, so that a client that sends many does not delay the
 * others (turns.c schedules turns). A request is read only when its reply is certain to fit into
 * the socket. So no replies are queued, and a client that does not read replies is not served. The
 * row of a message in the table of handlers names what its handler needs, which is found here.
 */

#include "daemon/serve/requests.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/base/log.h"
#include "daemon/handlers/handlers.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

/* ---- what a handler needs -------------------------------------------------------------------- */

static const void *field(const struct kvd_msg *request, size_t offset) {
        return (const uint8_t *)request + offset;
}

static int find_attachment(struct client *c, const struct handler *h, const struct kvd_msg *request,
                           struct call *call) {
        int r = client_find_space(c, *(const uint32_t *)field(request, h->space),
                                  &call->attachment);

        if (r < 0)
                return r;
        call->space = attachment_space(call->attachment);
        attachment_take_posts(call->attachment); /* they precede the request */
        return 0;
}

static int find_space(struct client *c, const struct handler *h, const struct kvd_msg *request,
                      struct call *call) {
        const struct kvd_slice *domain = field(request, h->domain),
                               *name = field(request, h->space);

        return client_find_named(c, *domain, *name, &call->space);
}

static int find_needs(struct client *c, const struct handler *h, const struct kvd_msg *request,
                      struct call *call) {
        int r = 0;

        if (c->state == CLIENT_HALF_OPEN && !h->before_attach)
                return client_refuse(c, -EPROTO,
                                     "the first message of a connection must be attach");
        if (h->needs == NEEDS_ATTACHMENT)
                r = find_attachment(c, h, request, call);
        else if (h->needs == NEEDS_SPACE)
                r = find_space(c, h, request, call);
        return r == 0 && h->worker_for ? client_needs_worker(c, h->worker_for) : r;
}

/*
 * Unless the request wants idle work, its changes must not schedule any in the space. Otherwise
 * that work would be done when another client wants idle work, and reveal when it does.
 */
static int handle(struct client *c, const struct handler *h, const struct kvd_msg *request,
                  struct call *call) {
        struct space *quiet = h->wants_idle ? NULL : call->space;
        int r;

        if (quiet)
                space_be_quiet(quiet, true);
        r = h->handle(c, request, call);
        if (quiet)
                space_be_quiet(quiet, false);
        return r;
}

static int call_handler(struct client *c, const struct kvd_msg *request, struct call *call) {
        const struct handler *h = &handlers[request->number];
        int r;

        if (!h->handle)
                return client_refuse(c, -ENOSYS, "message '%s' is not a request",
                                     kvd_msg_info(request->number)->name);
        r = find_needs(c, h, request, call);
        if (r < 0)
                return r;
        if (h->wants_idle)
                loop_want_idle(c->server->loop);
        if (h->wants_idle && call->space)
                space_wants_idle(call->space);
        call->reply.number = request->number + KVD_REPLY;
        return handle(c, h, request, call);
}

/* ---- messages -------------------------------------------------------------------------------- */

static void make_error(struct client *c, int error, struct call *call) {
        call->reply.number = KVD_MSG_error;
        call->reply.error.code = (uint32_t)-error;
        /* a text that was cut inside a character or quotes odd bytes must not break the reply */
        call->reply.error.text = kvd_slice_cut(kvd_make_plain(c->server->scratch->why.line),
                                               KVD_MOST_error_text);
        call->fds.n = 0;
}

/* The end of a list does not count as a failed request. */
static bool is_end_of_list(uint32_t number, int error) {
        return error == -ENOENT && (number == KVD_MSG_space_info || number == KVD_MSG_client_info ||
                                    number == KVD_MSG_domain_info || number == KVD_MSG_tier_info ||
                                    number == KVD_MSG_follow || number == KVD_MSG_chain_info ||
                                    number == KVD_MSG_session_info);
}

static int send_reply(struct client *c, const struct call *call) {
        ssize_t n = kvd_msg_encode(&call->reply, c->server->scratch->out, KVD_FRAME_MAX);

        if (n < 0) {
                log_error("a reply could not be encoded (message %u): %s", call->reply.number,
                          strerror((int)-n));
                return (int)n;
        }
        c->room -= 2 * n + 2048; /* more than the kernel charges for it */
        return kvd_frame_send(c->socket.fd, c->server->scratch->out, (size_t)n, &call->fds,
                              MSG_DONTWAIT);
}

/* size: bytes of the received frame, or the error of receiving it. */
static int read_request(struct client *c, ssize_t size, struct kvd_msg *ret) {
        struct kvd_decoder *decoder = c->server->decoder;
        int r = -EBADMSG;

        *ret = (struct kvd_msg){0};
        if (size < 0) {
                client_refuse(c, r, "the frame is larger than %u bytes", KVD_FRAME_MAX);
        } else {
                r = kvd_msg_decode(decoder, c->server->scratch->in, (size_t)size, ret);
                if (r >= 0)
                        return 0;
                client_refuse(c, r, "%s", kvd_decoder_why(decoder));
        }
        log_limited(LOG_WARNING, "process %d of user %u sent a bad frame: %s", c->peer.pid,
                    c->peer.uid, c->server->scratch->why.line);
        c->server->bad_frames++;
        c->closing = r == -EBADMSG; /* after other errors the client can go on */
        return r;
}

/* Handles the request again in the client's next turn; later requests wait in the socket. */
static int put_off(struct client *c, size_t size) {
        if (c->late)
                return CLIENT_LATER;
        c->late = sys->calloc(1, size);
        if (!c->late)
                return client_refuse(c, -ENOMEM, "out of memory for a request that has to wait");
        memcpy(c->late, c->server->scratch->in, size);
        c->late_bytes = size;
        return CLIENT_LATER;
}

static ssize_t take_late(struct client *c) {
        memcpy(c->server->scratch->in, c->late, c->late_bytes);
        return (ssize_t)c->late_bytes;
}

static void not_late(struct client *c) {
        free(c->late);
        c->late = NULL;
}

/* False: no answer was sent, since the request gets none or was put off. */
static bool answer(struct client *c, ssize_t size) {
        struct kvd_msg request;
        struct call call = {.own_fd = -1};
        int r;

        r = read_request(c, size, &request);
        call.reply.serial = request.serial;
        if (r >= 0)
                r = call_handler(c, &request, &call);
        if (r == CLIENT_LATER)
                r = put_off(c, (size_t)size);
        if (r == CLIENT_LATER)
                return false;
        not_late(c);
        if (r < 0)
                make_error(c, r, &call);
        c->server->request_errors += r < 0 && !is_end_of_list(request.number, r);
        c->server->requests++;
        c->requests++;
        r = call.quiet ? 0 : send_reply(c, &call);
        closep(&call.own_fd);
        if (r < 0 || c->closing)
                client_disconnect(c);
        return !call.quiet;
}

/* ---- socket ---------------------------------------------------------------------------------- */

/*
 * poll reports a Unix socket as writable while at most a quarter of its buffer is in use, but the
 * kernel accepts data until the buffer is full. So after one poll, half of the buffer can be filled
 * without another. 1: there is room; 0: not now.
 */
static int has_room(struct client *c) {
        struct pollfd p = {c->socket.fd, POLLOUT, 0};
        unsigned n = sizeof(int);
        int buffer, r;

        if (c->room > 0)
                return 1;
        r = sys->poll(&p, 1, 0);
        if (r < 0)
                return errno == EINTR ? 0 : negative_errno();
        if (!(p.revents & POLLOUT))
                return 0;
        if (sys->getsockopt(c->socket.fd, SOL_SOCKET, SO_SNDBUF, &buffer, &n) < 0)
                return negative_errno();
        c->room = buffer / 2;
        return 1;
}

/* The frame is not read; the descriptors are closed with the socket (closer.h). */
static int refuse_fds(struct client *c) {
        log_limited(LOG_WARNING, "process %d of user %u sent descriptors: dropped", c->peer.pid,
                    c->peer.uid);
        c->server->bad_frames++;
        return -ECONNRESET;
}

/* 1: a request was answered; 0: there was none, or it got no answer. */
static int read_and_answer(struct client *c) {
        ssize_t n;

        if (c->late)
                return answer(c, take_late(c));
        if (c->may_bring_fds && kvd_frame_has_fds(c->socket.fd))
                return refuse_fds(c);
        n = kvd_frame_receive(c->socket.fd, c->server->scratch->in, NULL, MSG_DONTWAIT);
        if (n == -EAGAIN)
                return 0;
        if (n == 0 || (n < 0 && n != -EMSGSIZE))
                return -ECONNRESET;
        return answer(c, n);
}

static int read_if_room(struct client *c) {
        int r = has_room(c);

        return r > 0 ? read_and_answer(c) : r < 0 ? r : loop_change(&c->socket, POLLOUT);
}

/* Posts are taken before the requests that follow them. */
static int go_on(struct client *c) {
        if (!c->rings)
                return read_if_room(c);
        client_take_ring(c);
        return 0;
}

/*
 * While others wait, a client that got an answer waits for its next turn at once, whether or not
 * its next request has come. That takes fewer system calls, and a client that has many requests
 * ready loses no turn. After a post, the socket is polled instead: the client goes on computing,
 * and sends nothing yet.
 */
bool request_serve(struct turns_place *place) {
        struct client *c = container_of(place, struct client, place);
        int r;

        if (client_ends(c))
                return false;
        r = go_on(c);
        if (c->socket.loop && (c->rings || c->late || (r > 0 && turns_wanted(&c->server->turns))))
                return true;
        if (r >= 0 && c->socket.loop)
                r = loop_release(&c->socket);
        if (r < 0)
                client_disconnect(c);
        return false;
}

void request_came(struct loop_source *source, short revents) {
        struct client *c = container_of(source, struct client, socket);

        if (source->events == POLLIN) {
                loop_hold(source);
                turns_add(&c->server->turns, &c->place);
        } else if (loop_change(source, POLLIN) < 0) {
                client_disconnect(c);
        }
}
