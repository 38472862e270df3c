/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a command on a terminal of ROWS x COLUMNS, and prints the command's output. Types Ctrl-C
 * when TEXT has appeared three times (never if TEXT is empty), or at SIGUSR1. Exit status: the
 * command's, or 99 if a signal ended the command or it went on after Ctrl-C.
 *
 *      pty ROWS COLUMNS TEXT COMMAND...
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

#define TIMES 3
#define PATIENCE_MS 60000 /* for TEXT to appear, and to end after Ctrl-C */

static long now_ms(void) {
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static volatile sig_atomic_t asked;

static void on_signal(int number) {
        asked = number;
}

/* The text to look for, how much of it has matched so far, and how often all of it came. */
struct wanted {
        const char *text;
        size_t n;
        int times;
};

static void look_for(struct wanted *w, const char *at, ssize_t n) {
        for (ssize_t i = 0; i < n && w->text[0]; i++) {
                w->n = at[i] == w->text[w->n] ? w->n + 1 : at[i] == w->text[0];
                if (!w->text[w->n]) {
                        w->times++;
                        w->n = 0;
                }
        }
}

/* Copies available output. False: the other side is closed. */
static int copy_some(int fd, struct wanted *w) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        char buffer[4096];
        ssize_t n;

        if (poll(&p, 1, 20) <= 0)
                return 1;
        n = read(fd, buffer, sizeof buffer);
        if (n <= 0)
                return 0;
        look_for(w, buffer, n);
        fwrite(buffer, 1, (size_t)n, stdout);
        return fflush(stdout) == 0;
}

/* On Ctrl-C, a terminal discards output that is on its way to the screen. Here all must arrive. */
static void keep_output_on_interrupt(void) {
        struct termios t;

        if (tcgetattr(STDOUT_FILENO, &t) < 0)
                return;
        t.c_lflag |= NOFLSH;
        tcsetattr(STDOUT_FILENO, TCSANOW, &t);
}

/* Returns 0 if the command went on for PATIENCE_MS after Ctrl-C. */
static int attend(int fd, const char *text) {
        long typed_at = 0, late = now_ms() + PATIENCE_MS;
        struct wanted w = {.text = text};

        while (copy_some(fd, &w)) {
                if (!typed_at && (asked || w.times >= TIMES || (text[0] && now_ms() > late)))
                        typed_at = write(fd, "\003", 1) == 1 ? now_ms() : 0;
                if (typed_at && now_ms() >= typed_at + PATIENCE_MS)
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
        if (!attend(fd, argv[3]))
                kill(pid, SIGKILL);
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
                continue;
        return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
}
