/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_DAEMON_CHILDREN_FETCHED_H
#define KVD_TESTS_DAEMON_CHILDREN_FETCHED_H

#include <poll.h>
#include <unistd.h>

#include "client/kvd.h"
#include "tests/lib/instance.h"
#include "tests/lib/mark.h"

/* Waits until a fetch has ended, of which kvd_fetch returned n and fd. False: nothing was fetched. */
static inline bool fetch_ended(int64_t n, int fd) {
        struct pollfd p = {.fd = fd, .events = POLLIN};

        ck_assert_msg(n >= 0, "%s", kvd_error());
        if (fd < 0)
                return false;
        ck_assert_int_eq(poll(&p, 1, PATIENCE_MS), 1);
        close(fd);
        return true;
}

#endif
