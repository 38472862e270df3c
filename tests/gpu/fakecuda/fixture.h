/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_FAKECUDA_FIXTURE_H
#define KVD_TESTS_FAKECUDA_FIXTURE_H

/* For tests that run with the stand-in driver: a device with a context, and other processes. */

#include <sys/types.h>

#include "ipc/base/cuda.h"
#include "tests/lib/mark.h"

#define SEGMENT ((size_t)2 << 20)

extern const struct kvd_cuda *cuda;

#define OK(call) ck_assert_int_eq(cuda->call, CU_OK)
#define FAILS(error, call) ck_assert_int_eq(cuda->call, error)

void load(void);                /* the driver's functions; initialises nothing */
/* and initialises it, with device 0's primary context current here */
void start(void);

extern const struct cu_allocation shareable; /* on device 0, by descriptor */

cu_memory create(size_t bytes);
int export(cu_memory memory);   /* a descriptor, the caller's */
cu_memory import(int fd);
/* in a reservation of its own; the handle stays */
cu_address map(cu_memory memory, size_t bytes, int access);
/* the descriptor is closed, the handle released */
cu_address map_fd(int fd, size_t bytes, int access);
cu_stream new_stream(void);     /* one that does not care for the default stream */

/*
 * Another process. It runs work(socket) with its end of a socket and ends with success when that
 * returns; what check asserts there ends it with a failure. Start it before this process
 * initialises the driver.
 */
struct peer {
        pid_t pid;
        int fd; /* this end of the socket */
};
struct peer peer_start(void (*work)(int fd));
void peer_end(struct peer *peer);   /* it must have succeeded */
void peer_kill(struct peer *peer);  /* SIGKILL; until it is gone */

/* Between two: up to 64 bytes, and a descriptor if it is not -1. Both sides give the same size. */
void tell(int fd, const void *data, size_t bytes, int descriptor);
int hear(int fd, void *data, size_t bytes); /* returns the descriptor, or -1 */
void meet(int fd);                          /* until the other side is here, too */

#endif
