/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/daemon/hostile/raw.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "ipc/address.h"
#include "tests/daemon/hostile/victim.h"
#include "tests/lib/instance.h"

const char *raw_expect_refusal(int fd, const struct kvd_msg *request, int error) {
        static char text[256];
        struct kvd_msg reply;

        if (raw_call(fd, request, &reply, NULL) != 1)
                die("message %u ended the connection", request->number);
        if (reply.number != KVD_MSG_error)
                die("message %u was accepted", request->number);
        kvd_slice_copy(reply.error.text, text, sizeof text);
        if ((int)reply.error.code != error)
                die("message %u: '%s' instead of '%s': %s", request->number,
                    strerror((int)reply.error.code), strerror(error), text);
        return text;
}

uint32_t raw_fill_backlog(const char *path, uint32_t most, int *fds) {
        struct kvd_address address;

        if (kvd_address_make(path, &address) < 0)
                die("%s is no path of a socket", path);
        for (uint32_t n = 0; n < most; n++) {
                fds[n] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
                if (fds[n] < 0)
                        die("socket: %s", strerror(errno));
                if (connect(fds[n], kvd_address_of(&address), address.size) == 0)
                        continue;
                if (errno != EAGAIN)
                        die("connect: %s", strerror(errno));
                close(fds[n]);
                return n;
        }
        die("the backlog takes more than %u connections", most);
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

/* Sends one request, which may return fewer blocks. Returns false if it was refused. */
static bool allocate_some(int fd, uint32_t space, uint32_t n, kvd_ref *ret, uint32_t *got) {
        struct kvd_msg m = {.number = KVD_MSG_allocate, .serial = 4, .allocate = {space, n}}, reply;

        if (raw_call(fd, &m, &reply, NULL) != 1 || reply.number != KVD_MSG_allocate_reply)
                return false;
        memcpy(ret, reply.allocate_reply.blocks.data, reply.allocate_reply.blocks.size);
        *got += reply.allocate_reply.blocks.size / (uint32_t)sizeof *ret;
        return true;
}

/* Repeats the request for the missing blocks, as libkvd does. */
uint32_t raw_allocate(int fd, uint32_t space, uint32_t n, kvd_ref *ret) {
        uint32_t got = 0;

        for (int i = 0; got < n && i < 1000; i++)
                if (!allocate_some(fd, space, n - got, ret + got, &got))
                        break;
        return got;
}

uint32_t raw_release(int fd, uint32_t space, const kvd_ref *refs, uint32_t n) {
        struct kvd_msg m = {.number = KVD_MSG_release,
                            .serial = 5,
                            .release = {space, {refs, n * 8}}},
                       reply;

        if (raw_call(fd, &m, &reply, NULL) != 1 || reply.number != KVD_MSG_release_reply)
                die("a release was refused");
        return reply.release_reply.released;
}
