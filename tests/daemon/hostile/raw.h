/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_RAW_H
#define KVD_TESTS_RAW_H

/* Attackers' requests: those that the daemon may serve, and those that it must refuse. */

#include <stddef.h>
#include <stdint.h>

#include "ipc/base/layout.h"
#include "tests/lib/peer.h"

/* Spaces like the victim's, and blocks in them. */
uint32_t raw_open_space(int fd, const char *name);
uint32_t raw_allocate(int fd, uint32_t space, uint32_t n, kvd_ref *ret); /* returns the number */
uint32_t raw_release(int fd, uint32_t space, const kvd_ref *refs, uint32_t n);

/* Connects to a stopped daemon until its backlog is full. Returns the number of connections. */
uint32_t raw_fill_backlog(const char *socket, uint32_t most, int *fds);

/*
 * The request must be refused with this error. Returns the error text, valid until the next call.
 */
const char *raw_expect_refusal(int fd, const struct kvd_msg *request, int error);

#endif
