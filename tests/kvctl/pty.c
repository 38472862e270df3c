/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a command on a terminal of ROWS x COLUMNS, types Ctrl-C after MS milliseconds (0: never), and prints what the
 * command wrote to the terminal. Exit status: the command's; 99 if a signal ended it, or if it went on after Ctrl-C.
 *
 *      pty ROWS COLUMNS MS COMMAND...
 */
#include <errno.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define GRACE_MS 5000

static long now_ms(void) {
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Copies until the command closes the terminal. False: it did not, GRACE_MS after Ctrl-C. */
static int copy(int fd, long interrupt_at) {
        int typed = !interrupt_at;

        for (;;) {
                struct pollfd p = {.fd = fd, .events = POLLIN};
                char buffer[4096];
                ssize_t n;

                if (!typed && now_ms() >= interrupt_at)
                        typed = write(fd, "\003", 1) == 1;
                if (interrupt_at && now_ms() >= interrupt_at + GRACE_MS)
                        return 0;
                if (poll(&p, 1, 20) <= 0)
                        continue;
                n = read(fd, buffer, sizeof buffer);
                if (n <= 0)
                        return 1; /* EIO: the other side is closed */
                fwrite(buffer, 1, (size_t)n, stdout);
        }
}

int main(int argc, char **argv) {
        struct winsize size = {0};
        long after;
        int fd, status = 0;
        pid_t pid;

        if (argc < 5)
                return 98;
        size.ws_row = (unsigned short)atoi(argv[1]);
        size.ws_col = (unsigned short)atoi(argv[2]);
        after = atol(argv[3]);
        pid = forkpty(&fd, NULL, NULL, &size);
        if (pid < 0)
                return 98;
        if (pid == 0) {
                execv(argv[4], argv + 4);
                _exit(97);
        }
        if (!copy(fd, after ? now_ms() + after : 0))
                kill(pid, SIGKILL);
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
                continue;
        return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
}
