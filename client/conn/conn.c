/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The connection to the daemon: a request is sent, and its reply is received before the deadline.
 * A request that times out is remembered, so that the descriptors and blocks of a late reply are
 * given back and not leaked.
 */

#include "client/conn/conn.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>

#include "client/conn/deadline.h"
#include "client/conn/error.h"
#include "client/conn/lifeline.h"
#include "ipc/address.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define DEFAULT_PATH "/run/kvd-0.sock"
#define MAX_ABANDONED 16u
#define MAX_STRAY 64u /* if more late replies precede the expected one, the peer is not kvd */

struct abandoned {       /* a request that timed out */
        uint64_t serial; /* 0: unused */
        uint32_t space;
        uint32_t prefix_tokens; /* of a lease */
        uint8_t prefix_key[16];
        uint32_t prefix_key_size;
};

struct conn {
        int fd; /* owned; -1: closed */
        uint64_t serial;
        struct kvd_decoder *decoder; /* owned */
        struct kvd_msg_attach_reply peer;
        char path[128], version[64], domain[64];
        struct abandoned abandoned[MAX_ABANDONED];
        bool in_doubt; /* see conn_in_doubt */
        uint8_t out[KVD_FRAME_MAX];
        uint8_t in[KVD_FRAME_MAX];
};

/* ---- opening --------------------------------------------------------------------------------- */

const char *conn_choose_path(const char *path) {
        const char *env = secure_getenv("KVD_SOCKET");

        return path && *path ? path : env && *env ? env : DEFAULT_PATH;
}

static int connect_failed(const char *path, int error) {
        struct stat st;

        switch (error) {
        case ENOENT:
                return client_fail(-ENOENT,
                                   "no kvd at %s: start one, or set KVD_SOCKET to its socket",
                                   path);
        case ECONNREFUSED:
                if (stat(path, &st) == 0 && !S_ISSOCK(st.st_mode))
                        return client_fail(-ENOTSOCK, "%s is a %s, not the socket of a kvd", path,
                                           S_ISDIR(st.st_mode) ? "folder" : "file");
                return client_fail(-ECONNREFUSED, "%s: connection refused; is kvd running?", path);
        case EACCES:
                return client_fail(-EACCES, "not allowed to use %s: become a member of its group",
                                   path);
        case EAGAIN: /* its listen queue is full */
                return client_fail(-ETIMEDOUT, "the kvd at %s accepts no connections (stopped?)",
                                   path);
        case EPROTOTYPE:
                return client_fail(-EPROTO, "%s is not a kvd socket (it is of another type)", path);
        default: return client_fail(-error, "cannot connect to %s: %s", path, strerror(error));
        }
}

/*
 * Waits while the daemon's listen queue is full. A signal interrupts connect(), so the socket's
 * timeout is set to the remaining time before each attempt.
 */
static int connect_by(const struct conn *c, const struct kvd_address *to, uint64_t deadline_ns) {
        for (;;) {
                uint64_t now = sys_now_ns(),
                         us = now < deadline_ns ? (deadline_ns - now) / 1000 : 0;
                struct timeval left = {(time_t)(us / 1000000), (suseconds_t)(us % 1000000)};

                if (!us)
                        return -EAGAIN;
                if (sys->setsockopt(c->fd, SOL_SOCKET, SO_SNDTIMEO, &left, sizeof left) < 0)
                        return negative_errno();
                if (sys->connect(c->fd, kvd_address_of(to), to->size) == 0)
                        return 0;
                if (errno != EINTR)
                        return negative_errno();
        }
}

static int connect_socket(struct conn *c, uint64_t deadline_ns) {
        struct kvd_address address;
        int r = kvd_address_make(c->path, &address);

        if (r < 0)
                return client_fail(r, "'%s' cannot be a socket's path: %s", c->path, strerror(-r));
        c->fd = sys->socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        if (c->fd < 0)
                return client_fail(negative_errno(), "cannot make a socket: %s", strerror(errno));
        r = connect_by(c, &address, deadline_ns);
        return r < 0 ? connect_failed(c->path, -r) : 0;
}

static void keep_peer(struct conn *c, const struct kvd_msg_attach_reply *peer) {
        c->peer = *peer;
        c->peer.version = kvd_slice_of(
                kvd_slice_copy(peer->version, c->version, sizeof c->version));
        c->peer.domain = kvd_slice_of(kvd_slice_copy(peer->domain, c->domain, sizeof c->domain));
}

static int ask_for_lifeline(struct conn *c, uint64_t deadline_ns) {
        struct kvd_msg_lifeline request;
        struct kvd_fds fds = {0};
        int r = lifeline_process(&request.process);

        if (r == 0)
                r = conn_call_by(c, deadline_ns, KVD_MSG_lifeline, &request, NULL, &fds);
        if (r < 0)
                return r;
        if (fds.n != 1) {
                kvd_fds_close(&fds);
                return daemon_fail(-EPROTO, "a lifeline comes with one descriptor");
        }
        return lifeline_hold(fds.fd[0]);
}

static int greet(struct conn *c, const char *name, uint64_t deadline_ns) {
        struct kvd_msg_attach hello = {.protocol = KVD_PROTOCOL, .name = kvd_slice_of(name)};
        struct kvd_msg_attach_reply peer;
        int r = conn_call_by(c, deadline_ns, KVD_MSG_attach, &hello, &peer, NULL);

        if (r == -ESRCH) { /* the kernel does not tell the daemon which process we are */
                r = ask_for_lifeline(c, deadline_ns);
                if (r == 0)
                        r = conn_call_by(c, deadline_ns, KVD_MSG_attach, &hello, &peer, NULL);
        }
        if (r < 0)
                return r;
        if (peer.protocol != KVD_PROTOCOL)
                return client_fail(-EPROTO,
                                   "the kvd at %s speaks protocol %u, this library %u: "
                                   "use the same version",
                                   c->path, peer.protocol, KVD_PROTOCOL);
        keep_peer(c, &peer);
        return 0;
}

/* Checks the server's user first: an unexpected one is sent nothing. */
static int meet(struct conn *c, const struct server_user *user, const char *name,
                uint64_t deadline_ns) {
        int r = connect_socket(c, deadline_ns);

        if (r == 0)
                r = server_user_check(user, c->fd, c->path);
        return r < 0 ? r : greet(c, name, deadline_ns);
}

static void conn_closep(struct conn **c) {
        *c = conn_close(*c);
}

int conn_open_by(const char *path, const struct server_user *user, const char *name,
                 uint64_t deadline_ns, struct conn **ret) {
        _cleanup_(conn_closep) struct conn *c = sys->calloc(1, sizeof *c);
        int r;

        if (!c)
                return client_fail(-ENOMEM, "out of memory");
        c->fd = -1;
        snprintf(c->path, sizeof c->path, "%s", conn_choose_path(path));
        r = kvd_decoder_new(&c->decoder);
        if (r < 0)
                return client_fail(r, "out of memory");
        r = meet(c, user, name, deadline_ns);
        /* we were stopped for longer than the daemon waits for attach, or it was just replaced */
        if (r == -ECONNRESET)
                r = meet(c, user, name, deadline_ns);
        if (r < 0)
                return r;
        *ret = STEAL(c);
        return 0;
}

int conn_open(const char *path, const char *name, struct conn **ret) {
        struct server_user user;
        int r = server_user_find(NULL, &user);

        return r < 0 ? r : conn_open_by(path, &user, name, deadline_from_now(), ret);
}

struct conn *conn_close(struct conn *c) {
        if (!c)
                return NULL;
        closep(&c->fd);
        kvd_decoder_free(c->decoder);
        free(c);
        return NULL;
}

bool conn_is_open(const struct conn *c) {
        return c && c->fd >= 0;
}

bool conn_has_peer(const struct conn *c) {
        struct pollfd p = {.fd = conn_is_open(c) ? c->fd : -1};

        return p.fd >= 0 && sys->poll(&p, 1, 0) >= 0 && !(p.revents & (POLLHUP | POLLERR));
}

bool conn_in_doubt(const struct conn *c) {
        return c->in_doubt;
}

const char *conn_path(const struct conn *c) {
        return c->path;
}

const struct kvd_msg_attach_reply *conn_peer(const struct conn *c) {
        return &c->peer;
}

/* ---- sending --------------------------------------------------------------------------------- */

static int lost(struct conn *c) {
        closep(&c->fd);
        c->fd = -1;
        memset(c->abandoned, 0, sizeof c->abandoned);
        return client_fail(-ECONNRESET, "the kvd at %s ended the connection", c->path);
}

static int send_request(struct conn *c, uint32_t number, const void *request,
                        uint64_t deadline_ns) {
        struct kvd_msg msg = {.number = number, .serial = ++c->serial};
        ssize_t n;
        int r;

        if (request)
                memcpy(&msg.attach, request, kvd_msg_info(number)->size);
        n = kvd_msg_encode(&msg, c->out, sizeof c->out);
        if (n < 0)
                return client_fail(
                        (int)n, "request %u is larger than a frame, or has a value over its limit",
                        number);
        while ((r = kvd_frame_send(c->fd, c->out, (size_t)n, NULL, MSG_DONTWAIT)) == -EAGAIN) {
                r = deadline_poll(c->fd, POLLOUT, deadline_ns);
                if (r < 0)
                        return client_fail(r, "the kvd at %s accepts no requests", c->path);
        }
        return r < 0 ? lost(c) : 0;
}

/* ---- late replies ---------------------------------------------------------------------------- */

/* Keeps what is needed to undo the request later. */
static struct abandoned remember(const struct conn *c, uint32_t number, const void *request) {
        const struct kvd_msg_allocate *allocate = request;
        const struct kvd_msg_seal *seal = request;
        const struct kvd_msg_lease *lease = request;
        struct abandoned a = {.serial = c->serial};

        if (number == KVD_MSG_allocate)
                a.space = allocate->space;
        if (number == KVD_MSG_seal)
                a.space = seal->space;
        if (number == KVD_MSG_lease && lease->op == 1 &&
            lease->prefix_key.size <= sizeof a.prefix_key) {
                a.space = lease->space;
                a.prefix_tokens = lease->prefix_tokens;
                a.prefix_key_size = lease->prefix_key.size;
                memcpy(a.prefix_key, lease->prefix_key.data, lease->prefix_key.size);
        }
        return a;
}

static void abandon(struct conn *c, uint32_t number, const void *request) {
        for (uint32_t i = 0; i < MAX_ABANDONED; i++)
                if (!c->abandoned[i].serial) {
                        c->abandoned[i] = remember(c, number, request);
                        return;
                }
        lost(c); /* too many unanswered requests: the connection is useless */
}

static void send_and_forget(struct conn *c, struct kvd_msg *msg) {
        ssize_t n;

        msg->serial = ++c->serial;
        n = kvd_msg_encode(msg, c->out, sizeof c->out);
        if (n > 0)
                kvd_frame_send(c->fd, c->out, (size_t)n, NULL, MSG_DONTWAIT);
}

/* The request that gives back what a late reply brought; number 0 if it brought nothing. */
static struct kvd_msg opposite(const struct abandoned *a, const struct kvd_msg *late) {
        switch (late->number) {
        case KVD_MSG_allocate_reply:
                return (struct kvd_msg){.number = KVD_MSG_release,
                                        .release = {a->space, late->allocate_reply.blocks}};
        case KVD_MSG_seal_reply:
                if (!late->seal_reply.fresh.size)
                        break;
                return (struct kvd_msg){.number = KVD_MSG_release,
                                        .release = {a->space, late->seal_reply.fresh}};
        case KVD_MSG_space_reply:
                return (struct kvd_msg){.number = KVD_MSG_detach,
                                        .detach = {late->space_reply.space}};
        case KVD_MSG_lease_reply:
                if (!a->prefix_tokens || !late->lease_reply.granted)
                        break;
                return (struct kvd_msg){.number = KVD_MSG_lease,
                                        .lease = {.space = a->space,
                                                  .op = 2,
                                                  .prefix_tokens = a->prefix_tokens,
                                                  .prefix_key = {a->prefix_key,
                                                                 a->prefix_key_size}}};
        default: break;
        }
        return (struct kvd_msg){.number = 0};
}

/* Gives back what the late reply to an abandoned request brought. */
static void undo(struct conn *c, const struct kvd_msg *late, struct kvd_fds *fds) {
        kvd_fds_close(fds);
        for (uint32_t i = 0; i < MAX_ABANDONED; i++) {
                struct kvd_msg msg;

                if (!late->serial || c->abandoned[i].serial != late->serial)
                        continue;
                msg = opposite(&c->abandoned[i], late);
                c->abandoned[i].serial = 0;
                if (msg.number)
                        send_and_forget(c, &msg);
                return;
        }
}

/* ---- receiving ------------------------------------------------------------------------------- */

static int receive(struct conn *c, struct kvd_msg *ret, struct kvd_fds *fds, uint64_t deadline_ns) {
        ssize_t n;
        int r;

        fds->n = 0;
        do {
                r = deadline_poll(c->fd, POLLIN, deadline_ns);
                if (r == -ETIMEDOUT)
                        return client_fail(r, "the kvd at %s does not answer (stopped?)", c->path);
                n = r < 0 ? r : kvd_frame_receive(c->fd, c->in, fds, MSG_DONTWAIT);
        } while (n == -EAGAIN);
        if (n <= 0)
                return lost(c);
        r = kvd_msg_decode(c->decoder, c->in, (size_t)n, ret);
        if (r < 0) {
                kvd_fds_close(fds);
                closep(&c->fd);
                c->fd = -1;
                return client_fail(-EPROTO, "the kvd at %s sent nonsense: %s", c->path,
                                   kvd_decoder_why(c->decoder));
        }
        return 0;
}

static int refused(const struct kvd_msg_error *error) {
        char text[256];

        kvd_slice_copy(error->text, text, sizeof text);
        return client_fail(-(int)MAX(error->code, 1), "%s", text);
}

static int take_reply(struct conn *c, uint32_t number, const struct kvd_msg *msg, void *reply) {
        if (msg->number == KVD_MSG_error)
                return refused(&msg->error);
        if (msg->number != number + KVD_REPLY)
                return client_fail(-EPROTO, "the kvd at %s answered request %u with message %u",
                                   c->path, number, msg->number);
        if (reply)
                memcpy(reply, &msg->attach, kvd_msg_info(msg->number)->size);
        return 0;
}

static int exchange(struct conn *c, uint64_t deadline_ns, uint32_t number, const void *request,
                    void *reply, struct kvd_fds *fds) {
        struct kvd_msg msg;
        uint64_t serial;
        int r = send_request(c, number, request, deadline_ns);

        if (r < 0)
                return r;
        serial = c->serial;
        c->in_doubt = true;
        for (uint32_t stray = 0;; stray++) {
                r = stray < MAX_STRAY ? receive(c, &msg, fds, deadline_ns) : lost(c);
                if (r < 0 && c->fd >= 0)
                        abandon(c, number, request);
                if (r < 0)
                        return r;
                if (msg.serial == serial || (msg.serial == 0 && msg.number == KVD_MSG_error))
                        break;
                undo(c, &msg, fds);
        }
        c->in_doubt = msg.number != KVD_MSG_error && msg.number != number + KVD_REPLY;
        return take_reply(c, number, &msg, reply);
}

int conn_call_by(struct conn *c, uint64_t deadline_ns, uint32_t number, const void *request,
                 void *reply, struct kvd_fds *fds) {
        struct kvd_fds unwanted = {.n = 0}, *to = fds ? fds : &unwanted;
        int r;

        to->n = 0;
        c->in_doubt = false;
        if (c->fd < 0)
                return client_fail(-ENOTCONN, "not connected to the kvd at %s", c->path);
        r = exchange(c, deadline_ns, number, request, reply, to);
        if (r < 0 || !fds)
                kvd_fds_close(to);
        return r;
}

void conn_tell(struct conn *c, uint32_t number) {
        struct kvd_msg msg = {.number = number};

        send_and_forget(c, &msg);
}

int conn_call(struct conn *c, uint32_t number, const void *request, void *reply) {
        return conn_call_by(c, deadline_from_now(), number, request, reply, NULL);
}
