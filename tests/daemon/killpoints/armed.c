/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Linked into a kvd whose accesses and calls are announced. The test sends it a signal with a
 * number. N > 0: it kills itself at the Nth point from now on. 0: it continues normally, and writes
 * the number of points since the last signal to the file $KVD_POINTS.
 */

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/client/killpoints/hook.h"
#include "tests/daemon/killpoints/armed.h"

static void tell(uint64_t n) {
        int fd = open(getenv("KVD_POINTS") ?: "", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

        if (fd < 0)
                return;
        if (write(fd, &n, sizeof n) != sizeof n)
                unlink(getenv("KVD_POINTS"));
        close(fd);
}

static void told(int signal, siginfo_t *info, void *context) {
        (void)signal, (void)context;
        if (info->si_value.sival_int) {
                hook_signal_at((uint64_t)info->si_value.sival_int, SIGKILL);
                hook_start();
        } else {
                tell(hook_stop());
        }
}

__attribute__((constructor)) static void install(void) {
        struct sigaction action = {.sa_sigaction = told, .sa_flags = SA_SIGINFO | SA_RESTART};

        hook_install();
        sigaction(ARMED_SIGNAL, &action, NULL);
}
