/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_RAW_H
#define KVD_TESTS_RAW_H

/* A peer that may say anything. Silence of the daemon ends the test: a reply or the end of the connection must come. */

#include <stddef.h>
#include <stdint.h>

#include "ipc/base/layout.h"
#include "ipc/frame.h"
#include "ipc/msg.h"

int raw_connect(const char *socket);
int raw_attach(const char *socket); /* connected, and attached as an honest client */

/* 1: *reply is the answer; 0: the daemon ended the connection. fds may be NULL. */
int raw_receive(int fd, struct kvd_msg *reply, struct kvd_fds *fds);
int raw_exchange(int fd, const void *frame, size_t n, struct kvd_msg *reply);
int raw_call(int fd, const struct kvd_msg *request, struct kvd_msg *reply, struct kvd_fds *fds);

/* Spaces like the victim's, and blocks in them. */
uint32_t raw_open_space(int fd, const char *name);
uint32_t raw_allocate(int fd, uint32_t space, uint32_t n, kvd_ref *ret); /* how many there were */
uint32_t raw_release(int fd, uint32_t space, const kvd_ref *refs, uint32_t n);

/* It must be refused with this error; the words live until the next call. */
const char *raw_expect_refusal(int fd, const struct kvd_msg *request, int error);

#endif
