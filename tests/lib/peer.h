/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_PEER_H
#define KVD_TESTS_LIB_PEER_H

/*
 * Clients that talk to the daemon in frames, without libkvd. raw_ functions may send anything. A
 * peer_end numbers its requests and insists on the right answer. If the daemon neither answers nor
 * ends the connection, the test fails.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/un.h>

#include "ipc/frame.h"
#include "ipc/msg.h"
#include "tests/lib/instance.h"

/* ---- anything -------------------------------------------------------------------------------- */

int raw_connect(const char *socket);
int raw_attach(const char *socket); /* connected, and attached as an honest client */
int raw_hello(const char *socket, struct kvd_msg *reply); /* connected; the answer to attach */

/*
 * 1: *reply is the answer, whose slices are valid until the next one; 0: the daemon ended the
 * connection. fds may be NULL.
 */
int raw_receive(int fd, struct kvd_msg *reply, struct kvd_fds *fds);
int raw_exchange(int fd, const void *frame, size_t n, struct kvd_msg *reply);
int raw_call(int fd, const struct kvd_msg *request, struct kvd_msg *reply, struct kvd_fds *fds);

/* ---- requests and their answers -------------------------------------------------------------- */

struct peer_end {
        int fd;
        char path[sizeof(struct sockaddr_un)]; /* of the daemon's socket */
        uint64_t serial;
        struct kvd_decoder *decoder;
        struct kvd_fds fds; /* of the last reply */
        uint8_t frame[KVD_FRAME_MAX];
};

struct peer_end *peer_connect(const char *socket); /* not attached */
struct peer_end *peer_attach(const char *socket);
/* closes the socket and the descriptors of the last reply */
struct peer_end *peer_close(struct peer_end *p);

void peer_send(struct peer_end *p, const struct kvd_msg *request); /* the serial is chosen */
/* false: the daemon closed the connection */
bool peer_receive(struct peer_end *p, struct kvd_msg *ret);
/*
 * Sends and receives; the reply must be the one for this request, or `error`. If attach finds the
 * connection closed, it makes another one.
 */
struct kvd_msg peer_call(struct peer_end *p, struct kvd_msg request);
/* The same. peer_ok: the reply must not be an error. peer_refused: it must be this error. */
struct kvd_msg peer_ok(struct peer_end *p, struct kvd_msg request);
void peer_refused(struct peer_end *p, struct kvd_msg request, int error);

struct kvd_msg peer_space_message(const char *name); /* opens a small space, or creates it */
uint32_t peer_open_space(struct peer_end *p, const char *name); /* its handle */
/* client_info of a process; number 0: not listed */
struct kvd_msg peer_client(struct peer_end *p, pid_t pid);

#endif
