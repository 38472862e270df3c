/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The terminal. While an answer is repeated, signals are handled in one place, so that the screen
 * is always restored.
 */

#include "tools/kvctl/screen.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define ENTER "\033[?1049h\033[?25l" /* alternate screen, no cursor */
#define LEAVE "\033[?25h\033[?1049l"
#define CLEAR "\033[H\033[2J"

static const int ending[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};

static volatile sig_atomic_t stop_asked, suspend_asked, resized;
static sigset_t mask_before;
static bool painting;
static struct termios before; /* settings to restore if reading_keys */
static bool reading_keys;

static void on_signal(int number) {
        if (number == SIGTSTP)
                suspend_asked = 1;
        else if (number == SIGWINCH)
                resized = 1;
        else
                stop_asked = 1;
}

static unsigned from_environment(const char *name, unsigned otherwise) {
        const char *text = getenv(name);
        long n = text ? strtol(text, NULL, 10) : 0;

        return n > 0 && n < 10000 ? (unsigned)n : otherwise;
}

static bool speaks_utf8(void) {
        static const char *const names[] = {"LC_ALL", "LC_CTYPE", "LANG"};

        for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
                const char *text = getenv(names[i]);

                if (text && *text)
                        return strcasestr(text, "utf-8") || strcasestr(text, "utf8");
        }
        return false;
}

/* A terminal without a name, or named "dumb", shows escape sequences instead of obeying them. */
static bool obeys_escapes(void) {
        const char *term = getenv("TERM");

        return term && *term && strcmp(term, "dumb") != 0;
}

void screen_measure(struct screen *screen, FILE *to) {
        struct winsize size = {0};
        const char *no_color = getenv("NO_COLOR");

        *screen = (struct screen){.to = to,
                                  .terminal = isatty(fileno(to)),
                                  .height = 24,
                                  .utf8 = speaks_utf8()};
        if (!screen->terminal)
                return;
        if (ioctl(fileno(to), TIOCGWINSZ, &size) < 0 || !size.ws_col || !size.ws_row)
                size = (struct winsize){.ws_col = 80, .ws_row = 24};
        screen->width = from_environment("COLUMNS", size.ws_col);
        screen->height = from_environment("LINES", size.ws_row);
        screen->escapes = obeys_escapes();
        screen->colour = screen->escapes && !(no_color && *no_color);
}

static void say(struct screen *screen, const char *sequence) {
        if (painting) {
                fputs(sequence, screen->to);
                fflush(screen->to);
        }
}

/* Keys are read one by one, without echo. Ctrl-C and the like still send signals. */
static void begin_keys(void) {
        struct termios now = before;

        now.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
        now.c_cc[VMIN] = 1;
        now.c_cc[VTIME] = 0;
        tcsetattr(STDIN_FILENO, TCSANOW, &now);
}

static void end_keys(void) {
        if (reading_keys)
                tcsetattr(STDIN_FILENO, TCSANOW, &before);
}

void screen_watch_begin(struct screen *screen, bool paint, bool keys) {
        struct sigaction action = {.sa_handler = on_signal};
        sigset_t mask;

        painting = paint;
        sigemptyset(&mask);
        for (size_t i = 0; i < ARRAY_SIZE(ending); i++) {
                sigaction(ending[i], &action, NULL);
                sigaddset(&mask, ending[i]);
        }
        if (paint) {
                sigaction(SIGTSTP, &action, NULL);
                sigaction(SIGWINCH, &action, NULL);
                sigaddset(&mask, SIGTSTP);
                sigaddset(&mask, SIGWINCH);
        }
        sigprocmask(SIG_BLOCK, &mask, &mask_before);
        say(screen, ENTER);
        reading_keys = paint && keys && tcgetattr(STDIN_FILENO, &before) == 0;
        if (reading_keys)
                begin_keys();
}

void screen_watch_end(struct screen *screen) {
        say(screen, LEAVE);
        end_keys();
        reading_keys = false;
        painting = false;
        sigprocmask(SIG_SETMASK, &mask_before, NULL);
}

void screen_watch_clear(struct screen *screen) {
        say(screen, CLEAR);
}

/* Ctrl-Z: gives the shell its screen back, and takes ours again when the process is resumed. */
static void suspend(struct screen *screen) {
        suspend_asked = 0;
        say(screen, LEAVE);
        end_keys();
        raise(SIGSTOP);
        say(screen, ENTER);
        if (reading_keys)
                begin_keys();
}

int screen_poll(struct screen *screen, struct pollfd *fds, size_t n, double seconds) {
        uint64_t until = sys_now_ns() + (uint64_t)(seconds * 1e9);

        while (!stop_asked) {
                uint64_t now = sys_now_ns(), left = now < until ? until - now : 0;
                struct timespec timeout = {.tv_sec = (time_t)(left / 1000000000),
                                           .tv_nsec = (long)(left % 1000000000)};

                int r = ppoll(fds, n, &timeout, &mask_before);

                if (r >= 0)
                        return r;
                if (errno != EINTR)
                        return negative_errno();
                if (suspend_asked)
                        suspend(screen);
                if (resized) {
                        resized = 0;
                        screen_measure(screen, screen->to);
                        return 0;
                }
        }
        return -EINTR;
}

bool screen_has_keys(void) {
        return reading_keys;
}

bool screen_wait(struct screen *screen, double seconds) {
        return screen_poll(screen, NULL, 0, seconds) >= 0;
}
