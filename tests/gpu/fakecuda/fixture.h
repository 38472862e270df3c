/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_FAKECUDA_FIXTURE_H
#define KVD_TESTS_FAKECUDA_FIXTURE_H

/* For tests of the stand-in driver: a device with a context, and other processes. */

#include <sys/types.h>

#include "ipc/base/cuda.h"
#include "tests/lib/mark.h"

#define SEGMENT ((size_t)2 << 20)

extern const struct kvd_cuda *cuda;

#define OK(call) ck_assert_int_eq(cuda->call, CU_OK)
#define FAILS(error, call) ck_assert_int_eq(cuda->call, error)

void load(void); /* loads the driver's functions; initialises nothing */
/* also initialises it, and makes device 0's primary context current */
void start(void);

extern const struct cu_allocation shareable; /* on device 0, by descriptor */

cu_memory create(size_t bytes);
int export(cu_memory memory); /* a descriptor, the caller's */
cu_memory import(int fd);
/* maps it in a reservation of its own; the handle stays */
cu_address map(cu_memory memory, size_t bytes, int access);
/* also closes the descriptor, and releases the handle */
cu_address map_fd(int fd, size_t bytes, int access);
cu_stream new_stream(void); /* does not synchronise with the default stream */

/*
 * Another process. It runs work(socket) with its end of a socket, and ends with success when that
 * returns. A failed assertion there ends it with failure. Start it before this process initialises
 * the driver.
 */
struct peer {
        pid_t pid;
        int fd; /* this end of the socket */
};
struct peer peer_start(void (*work)(int fd));
void peer_end(struct peer *peer);  /* waits for its end, which must be a success */
void peer_kill(struct peer *peer); /* SIGKILL, and waits for its end */

/* Messages of up to 64 bytes, with a descriptor unless it is -1. Both sides give the same size. */
void tell(int fd, const void *data, size_t bytes, int descriptor);
int hear(int fd, void *data, size_t bytes); /* returns the descriptor, or -1 */
void meet(int fd);                          /* waits until the other side is here, too */

#endif
