/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/daemon/hostile/raw.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "ipc/address.h"
#include "tests/daemon/hostile/victim.h"
#include "tests/lib/daemon.h"

#define ANSWER_MS 10000

int raw_connect(const char *path) {
        struct kvd_address address;
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

        if (fd < 0 || kvd_address_make(path, &address) < 0 ||
            connect(fd, kvd_address_of(&address), address.size) < 0)
                die("connect %s: %s", path, strerror(errno));
        return fd;
}

int raw_attach(const char *path) {
        struct kvd_msg hello = {.number = KVD_MSG_attach, .serial = 1, .attach.protocol = KVD_PROTOCOL}, reply;
        int fd = raw_connect(path);

        if (raw_call(fd, &hello, &reply, NULL) != 1 || reply.number != KVD_MSG_attach_reply)
                die("an honest client cannot attach");
        return fd;
}

int raw_receive(int fd, struct kvd_msg *reply, struct kvd_fds *fds) {
        static struct kvd_decoder *decoder;
        static uint8_t in[KVD_FRAME_MAX];
        struct pollfd p = {.fd = fd, .events = POLLIN};
        ssize_t n;

        if (poll(&p, 1, ANSWER_MS) != 1)
                die("the daemon neither answered nor ended the connection");
        n = kvd_frame_receive(fd, in, fds, 0);
        if (n <= 0)
                return 0;
        if (!decoder && kvd_decoder_new(&decoder) < 0)
                die("out of memory");
        if (kvd_msg_decode(decoder, in, (size_t)n, reply) < 0)
                die("the daemon sent nonsense: %s", kvd_decoder_why(decoder));
        return 1;
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

const char *raw_expect_refusal(int fd, const struct kvd_msg *request, int error) {
        static char text[256];
        struct kvd_msg reply;

        if (raw_call(fd, request, &reply, NULL) != 1)
                die("message %u ended the connection", request->number);
        if (reply.number != KVD_MSG_error)
                die("message %u was accepted", request->number);
        kvd_slice_copy(reply.error.text, text, sizeof text);
        if ((int)reply.error.code != error)
                die("message %u: '%s' instead of '%s': %s", request->number, strerror((int)reply.error.code),
                    strerror(error), text);
        return text;
}

uint32_t raw_open_space(int fd, const char *name) {
        struct kvd_msg request = victim_space_message(), reply;
        struct kvd_fds fds;

        request.space.name = kvd_slice_of(name);
        if (raw_call(fd, &request, &reply, &fds) != 1 || reply.number != KVD_MSG_space_reply)
                die("space %s cannot be opened", name);
        kvd_fds_close(&fds);
        return reply.space_reply.space;
}

uint32_t raw_allocate(int fd, uint32_t space, uint32_t n, kvd_ref *ret) {
        struct kvd_msg m = {.number = KVD_MSG_allocate, .serial = 4, .allocate = {space, n}}, reply;

        if (raw_call(fd, &m, &reply, NULL) != 1 || reply.number != KVD_MSG_allocate_reply)
                return 0;
        memcpy(ret, reply.allocate_reply.blocks.data, reply.allocate_reply.blocks.size);
        return reply.allocate_reply.blocks.size / (uint32_t)sizeof *ret;
}

uint32_t raw_release(int fd, uint32_t space, const kvd_ref *refs, uint32_t n) {
        struct kvd_msg m = {.number = KVD_MSG_release, .serial = 5, .release = {space, {refs, n * 8}}}, reply;

        if (raw_call(fd, &m, &reply, NULL) != 1 || reply.number != KVD_MSG_release_reply)
                die("a release was refused");
        return reply.release_reply.released;
}
