/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a command on a terminal of ROWS x COLUMNS, types Ctrl-C MS milliseconds after its first
 * output (0: never) or at SIGUSR1, and prints what the command wrote to the terminal. Exit status:
 * the command's; 99 if a signal ended it, or if it went on after Ctrl-C.
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
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define GRACE_MS 5000

static long now_ms(void) {
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static volatile sig_atomic_t asked;

static void on_signal(int number) {
        asked = number;
}

/* Copies what there is. False: the other side is closed. */
static int copy_some(int fd) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        char buffer[4096];
        ssize_t n;

        if (poll(&p, 1, 20) <= 0)
                return 1;
        n = read(fd, buffer, sizeof buffer);
        if (n <= 0)
                return 0;
        fwrite(buffer, 1, (size_t)n, stdout);
        return fflush(stdout) == 0;
}

/*
 * A terminal throws away what is on its way to the screen when Ctrl-C is typed; here it must all
 * arrive.
 */
static void keep_output_on_interrupt(void) {
        struct termios t;

        if (tcgetattr(STDOUT_FILENO, &t) < 0)
                return;
        t.c_lflag |= NOFLSH;
        tcsetattr(STDOUT_FILENO, TCSANOW, &t);
}

static int wait_for_output(int fd) {
        struct pollfd p = {.fd = fd, .events = POLLIN};

        return poll(&p, 1, 60000) == 1;
}

/* False: the command went on for GRACE_MS after Ctrl-C. */
static int attend(int fd, long after) {
        long typed_at = 0, type_at = wait_for_output(fd) && after ? now_ms() + after : 0;

        while (copy_some(fd)) {
                if (!typed_at && (asked || (type_at && now_ms() >= type_at)))
                        typed_at = write(fd, "\003", 1) == 1 ? now_ms() : 0;
                if (typed_at && now_ms() >= typed_at + GRACE_MS)
                        return 0;
        }
        return 1;
}

int main(int argc, char **argv) {
        struct winsize size = {0};
        int fd, status = 0;
        pid_t pid;

        if (argc < 5)
                return 98;
        size.ws_row = (unsigned short)atoi(argv[1]);
        size.ws_col = (unsigned short)atoi(argv[2]);
        signal(SIGUSR1, on_signal);
        pid = forkpty(&fd, NULL, NULL, &size);
        if (pid < 0)
                return 98;
        if (pid == 0) {
                keep_output_on_interrupt();
                execv(argv[4], argv + 4);
                _exit(97);
        }
        if (!attend(fd, atol(argv[3])))
                kill(pid, SIGKILL);
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
                continue;
        return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
}
