/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_RAW_H
#define KVD_TESTS_RAW_H

/* Requests of attackers that the daemon may well serve, and those that it must refuse. */

#include <stddef.h>
#include <stdint.h>

#include "ipc/base/layout.h"
#include "tests/lib/peer.h"

/* Spaces like the victim's, and blocks in them. */
uint32_t raw_open_space(int fd, const char *name);
uint32_t raw_allocate(int fd, uint32_t space, uint32_t n, kvd_ref *ret); /* how many there were */
uint32_t raw_release(int fd, uint32_t space, const kvd_ref *refs, uint32_t n);

/* Connects to a stopped daemon until its backlog is full. Returns the number of connections. */
uint32_t raw_fill_backlog(const char *socket, uint32_t most, int *fds);

/* It must be refused with this error; the words live until the next call. */
const char *raw_expect_refusal(int fd, const struct kvd_msg *request, int error);

#endif
