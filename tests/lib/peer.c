/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/peer.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "ipc/address.h"

/* ---- anything -------------------------------------------------------------------------------- */

int raw_connect(const char *path) {
        struct kvd_address address;
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

        if (fd < 0 || kvd_address_make(path, &address) < 0 ||
            connect(fd, kvd_address_of(&address), address.size) < 0)
                die("connect %s: %s", path, strerror(errno));
        return fd;
}

/*
 * The daemon drops a connection that does not attach within a second. On a busy machine this
 * process may be stopped for longer: it connects again then, as libkvd does.
 */
#define CONNECTIONS 100

int raw_hello(const char *path, struct kvd_msg *reply) {
        static const struct kvd_msg hello = {.number = KVD_MSG_attach,
                                             .serial = 1,
                                             .attach.protocol = KVD_PROTOCOL};
        int fd;

        for (int i = 0; i < CONNECTIONS; i++) {
                fd = raw_connect(path);
                if (raw_call(fd, &hello, reply, NULL) == 1)
                        return fd;
                close(fd);
        }
        die("connections end instead of an answer");
}

int raw_attach(const char *path) {
        struct kvd_msg reply;
        int fd = raw_hello(path, &reply);

        if (reply.number != KVD_MSG_attach_reply)
                die("an honest client cannot attach");
        return fd;
}

static struct kvd_decoder *new_decoder(void) {
        struct kvd_decoder *decoder;

        if (kvd_decoder_new(&decoder) < 0)
                die("out of memory");
        return decoder;
}

static int receive(int fd, struct kvd_decoder *decoder, uint8_t *frame, struct kvd_msg *reply,
                   struct kvd_fds *fds) {
        struct pollfd readable = {fd, POLLIN, 0};
        ssize_t n;

        if (poll(&readable, 1, PATIENCE_MS) != 1)
                die("the daemon neither answered nor ended the connection");
        n = kvd_frame_receive(fd, frame, fds, 0);
        if (n <= 0)
                return 0;
        if (kvd_msg_decode(decoder, frame, (size_t)n, reply) < 0)
                die("the daemon sent nonsense: %s", kvd_decoder_why(decoder));
        return 1;
}

int raw_receive(int fd, struct kvd_msg *reply, struct kvd_fds *fds) {
        static struct kvd_decoder *decoder;
        static uint8_t in[KVD_FRAME_MAX];

        decoder = decoder ?: new_decoder();
        return receive(fd, decoder, in, reply, fds);
}

int raw_exchange(int fd, const void *frame, size_t n, struct kvd_msg *reply) {
        if (send(fd, frame, n, MSG_NOSIGNAL) < 0)
                return 0;
        return raw_receive(fd, reply, NULL);
}

int raw_call(int fd, const struct kvd_msg *request, struct kvd_msg *reply, struct kvd_fds *fds) {
        static uint8_t out[KVD_FRAME_MAX];
        ssize_t n = kvd_msg_encode(request, out, sizeof out);

        if (n < 0)
                die("message %u cannot be encoded", request->number);
        if (send(fd, out, (size_t)n, MSG_NOSIGNAL) < 0)
                return 0;
        return raw_receive(fd, reply, fds);
}

/* ---- requests and their answers -------------------------------------------------------------- */

struct peer_end *peer_connect(const char *path) {
        struct peer_end *p = calloc(1, sizeof *p);

        if (!p)
                die("out of memory");
        p->fd = raw_connect(path);
        snprintf(p->path, sizeof p->path, "%s", path);
        p->decoder = new_decoder();
        return p;
}

struct peer_end *peer_attach(const char *path) {
        struct peer_end *p = peer_connect(path);

        peer_ok(p, (struct kvd_msg){.number = KVD_MSG_attach,
                                    .attach = {KVD_PROTOCOL, kvd_slice_of("test")}});
        return p;
}

struct peer_end *peer_close(struct peer_end *p) {
        kvd_fds_close(&p->fds);
        kvd_decoder_free(p->decoder);
        close(p->fd);
        free(p);
        return NULL;
}

static bool try_send(struct peer_end *p, const struct kvd_msg *request) {
        struct kvd_msg msg = *request;
        ssize_t n;

        msg.serial = ++p->serial;
        n = kvd_msg_encode(&msg, p->frame, sizeof p->frame);
        if (n <= 0)
                die("message %u cannot be encoded", msg.number);
        return kvd_frame_send(p->fd, p->frame, (size_t)n, NULL, 0) >= 0;
}

void peer_send(struct peer_end *p, const struct kvd_msg *request) {
        if (!try_send(p, request))
                die("message %u cannot be sent", request->number);
}

bool peer_receive(struct peer_end *p, struct kvd_msg *ret) {
        kvd_fds_close(&p->fds);
        return receive(p->fd, p->decoder, p->frame, ret, &p->fds);
}

static bool try_call(struct peer_end *p, const struct kvd_msg *request, struct kvd_msg *ret) {
        return try_send(p, request) && peer_receive(p, ret);
}

struct kvd_msg peer_call(struct peer_end *p, struct kvd_msg request) {
        struct kvd_msg reply;
        bool answered = try_call(p, &request, &reply);

        for (int i = 1; !answered && request.number == KVD_MSG_attach && i < CONNECTIONS; i++) {
                close(p->fd);
                p->fd = raw_connect(p->path);
                answered = try_call(p, &request, &reply);
        }
        if (!answered)
                die("the daemon closed the connection at message %u", request.number);
        if (reply.serial != p->serial ||
            (reply.number != KVD_MSG_error && reply.number != request.number + KVD_REPLY))
                die("message %u is answered with %u", request.number, reply.number);
        return reply;
}

struct kvd_msg peer_ok(struct peer_end *p, struct kvd_msg request) {
        struct kvd_msg reply = peer_call(p, request);

        if (reply.number == KVD_MSG_error)
                die("%s: %.*s", kvd_msg_info(request.number)->name, (int)reply.error.text.size,
                    (const char *)reply.error.text.data);
        return reply;
}

void peer_refused(struct peer_end *p, struct kvd_msg request, int error) {
        struct kvd_msg reply = peer_call(p, request);

        if (reply.number != KVD_MSG_error)
                die("message %u was accepted", request.number);
        if (-(int)reply.error.code != error || !reply.error.text.size)
                die("message %u: '%s' instead of '%s'", request.number,
                    strerror((int)reply.error.code), strerror(-error));
}

struct kvd_msg peer_space_message(const char *name) {
        return (struct kvd_msg){.number = KVD_MSG_space,
                                .space = {.name = kvd_slice_of(name),
                                          .create = 1,
                                          .layers = 1,
                                          .kv_heads = 1,
                                          .head_dim = 8,
                                          .block_tokens = 4,
                                          .dtype = 2,
                                          .vocab = 1000}};
}

uint32_t peer_open_space(struct peer_end *p, const char *name) {
        struct kvd_msg reply = peer_ok(p, peer_space_message(name));

        if (p->fds.n != (instance_on_gpu() ? 3 : 2))
                die("a space comes with %u descriptors", p->fds.n);
        return reply.space_reply.space;
}

struct kvd_msg peer_client(struct peer_end *p, pid_t pid) {
        struct kvd_msg reply = {0};

        do {
                reply = peer_call(p,
                                  (struct kvd_msg){.number = KVD_MSG_client_info,
                                                   .client_info = {reply.client_info_reply.next}});
                if (reply.number == KVD_MSG_error)
                        return (struct kvd_msg){0};
        } while (reply.client_info_reply.pid != (uint32_t)pid);
        return reply;
}
