/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_SCREEN_H
#define KVCTL_SCREEN_H

/*
 * The terminal: its size, whether it shows colours, and an alternate screen for --watch that is
 * always left again.
 */

#include <poll.h>
#include <stdbool.h>
#include <stdio.h>

struct screen {
        FILE *to;
        bool terminal;   /* to is a terminal */
        bool escapes;    /* a terminal, and TERM neither unset nor dumb */
        bool colour;     /* escapes, and NO_COLOR is not set */
        bool utf8;       /* the locale's encoding is UTF-8 */
        unsigned width;  /* columns; 0: no limit (not a terminal) */
        unsigned height; /* rows; 24 if unknown */
};

void screen_measure(struct screen *screen, FILE *to);

/*
 * A repeated answer. From begin to end, signals that would end the process are handled only in
 * screen_wait() and screen_poll(). keys: read keys one by one without echo, if stdin is a terminal.
 */
void screen_watch_begin(struct screen *screen, bool paint, bool keys);
void screen_watch_end(struct screen *screen);
void screen_watch_clear(struct screen *screen); /* before the next picture */

bool screen_has_keys(void); /* keys are read one by one from standard input */

/* Waits. False: the user wants to stop. */
bool screen_wait(struct screen *screen, double seconds);

/*
 * Waits for descriptors, too. Positive: some of them are ready; 0: the time is over, or the screen
 * was resized; negative: the user wants to stop, or an error.
 */
int screen_poll(struct screen *screen, struct pollfd *fds, size_t n, double seconds);

#endif
