/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The protocol of sd_notify: one datagram for each change. A manager that does not listen costs a
 * bounded time and has no other effect.
 */

#include "daemon/base/notify.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/address.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "ipc/frame.h"

static uint64_t watchdog_from_environment(void) {
        const char *usec = getenv("WATCHDOG_USEC"), *pid = getenv("WATCHDOG_PID");

        if (!usec || (pid && strtol(pid, NULL, 10) != getpid()))
                return 0;
        return strtoull(usec, NULL, 10) * 1000;
}

static int connect_to(const char *path, int *ret) {
        _cleanup_(closep) int fd = -1;
        struct kvd_address address;
        int r;

        r = kvd_address_make(path, &address);
        if (r < 0)
                return r;
        fd = sys->socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0 || sys->connect(fd, kvd_address_of(&address), address.size) < 0)
                return negative_errno();
        *ret = STEAL_FD(fd);
        return 0;
}

int notify_open(struct notify *notify) {
        const char *path = getenv("NOTIFY_SOCKET");
        int r = 0;

        *notify = (struct notify){.fd = -1};
        if (path && path[0])
                r = connect_to(path, &notify->fd);
        if (notify->fd >= 0)
                notify->watchdog_ns = watchdog_from_environment();
        unsetenv("NOTIFY_SOCKET");
        unsetenv("WATCHDOG_USEC");
        unsetenv("WATCHDOG_PID");
        return r;
}

void notify_close(struct notify *notify) {
        closep(&notify->fd);
        notify->fd = -1;
}

void notify_send(const struct notify *notify, const char *state, int wait_ms) {
        struct pollfd p = {notify->fd, POLLOUT, 0};

        if (notify->fd < 0)
                return;
        if (kvd_frame_send(notify->fd, state, strlen(state), NULL, MSG_DONTWAIT) == -EAGAIN &&
            wait_ms && sys->poll(&p, 1, wait_ms) == 1)
                kvd_frame_send(notify->fd, state, strlen(state), NULL, MSG_DONTWAIT);
}
