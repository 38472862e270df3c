/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_RAW_H
#define KVD_TESTS_RAW_H

/* A peer that may say anything. Silence of the daemon ends the test: a reply or the end of the connection must come. */

#include <stddef.h>
#include <stdint.h>

#include "ipc/frame.h"
#include "ipc/msg.h"

int raw_connect(const char *socket);
int raw_attach(const char *socket); /* connected, and attached as an honest client */

/* 1: *reply is the answer; 0: the daemon ended the connection. fds may be NULL. */
int raw_receive(int fd, struct kvd_msg *reply, struct kvd_fds *fds);
int raw_exchange(int fd, const void *frame, size_t n, struct kvd_msg *reply);
int raw_call(int fd, const struct kvd_msg *request, struct kvd_msg *reply, struct kvd_fds *fds);

/* It must be refused with this error; the words live until the next call. */
const char *raw_expect_refusal(int fd, const struct kvd_msg *request, int error);

#endif
