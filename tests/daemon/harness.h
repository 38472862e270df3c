/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_DAEMON_HARNESS_H
#define KVD_TESTS_DAEMON_HARNESS_H

/* Starts the kvd named by $KVD_BIN in a folder of its own, and speaks to it in frames. Every failure fails the test. */

#include <stdbool.h>
#include <sys/types.h>

#include "ipc/frame.h"
#include "ipc/msg.h"

/* ---- the daemon ------------------------------------------------------------------------------------------------ */

struct instance {
        char dir[64], socket[80];
        pid_t pid;
};

/* settings: "daemon.pool=64M" and so on, NULL behind the last. --private, and waits until it serves. */
void instance_start(struct instance *in, const char *const settings[]);
bool instance_on_gpu(void); /* KVD_TEST_BACKEND names another backend than host memory: daemons start with that one */
/* Runs kvd with exactly these arguments behind the program's name, and waits for readiness only if ready is set. */
void instance_run(struct instance *in, const char *const arguments[], bool ready);
void instance_make_dir(struct instance *in);
/* SIGTERM; must end with 0 and leave no socket. Removes the folder. */
void instance_stop(struct instance *in);
void instance_remove_dir(struct instance *in);
int wait_status(pid_t pid); /* exit status; 128 + signal */

unsigned instance_fds(const struct instance *in);      /* open in the daemon */
unsigned instance_free_fd(const struct instance *in);  /* the number that it would open next */
double instance_cpu(const struct instance *in);        /* seconds used by the daemon */

/* ---- a connection ---------------------------------------------------------------------------------------------- */

struct peer_end {
        int fd;
        uint64_t serial;
        struct kvd_decoder *decoder;
        struct kvd_fds fds; /* of the last reply */
        uint8_t frame[KVD_FRAME_MAX];
};

struct peer_end *peer_connect(const char *socket);          /* not attached */
struct peer_end *peer_attach(const char *socket);
struct peer_end *peer_close(struct peer_end *p);            /* closes the socket, and the last descriptors */

void peer_send(struct peer_end *p, const struct kvd_msg *request); /* the serial is chosen */
/* 0 bytes: the daemon closed the connection: false. Waits up to ten seconds. */
bool peer_receive(struct peer_end *p, struct kvd_msg *ret);
/* Sends and receives; the reply must be the one for this request, or `error`. */
struct kvd_msg peer_call(struct peer_end *p, struct kvd_msg request);
/* The same, and the reply must not be, or must be, an error of this code. */
struct kvd_msg peer_ok(struct peer_end *p, struct kvd_msg request);
void peer_refused(struct peer_end *p, struct kvd_msg request, int error);

uint32_t peer_open_space(struct peer_end *p, const char *name); /* a small one; handle */
struct kvd_msg peer_client(struct peer_end *p, pid_t pid);      /* client_info of a process; number 0: not listed */

/* Calls once a millisecond until true, up to ten seconds. */
#define WAIT_UNTIL(condition) \
        do { \
                for (int tries_ = 0; !(condition); tries_++) { \
                        ck_assert_msg(tries_ < 10000, "still not: %s", #condition); \
                        usleep(1000); \
                } \
        } while (0)

#endif
