/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_SCREEN_H
#define KVCTL_SCREEN_H

/*
 * The terminal: how large, whether it shows colours, and a screen of its own for --watch that is
 * always given back.
 */

#include <poll.h>
#include <stdbool.h>
#include <stdio.h>

struct screen {
        FILE *to;
        bool terminal;   /* to is one */
        bool escapes;    /* a terminal, and TERM neither unset nor dumb */
        bool colour;     /* and NO_COLOR is not set */
        bool utf8;       /* the language's characters */
        unsigned width;  /* columns; 0: no limit (not a terminal) */
        unsigned height; /* rows; 24 where nobody says */
};

void screen_measure(struct screen *screen, FILE *to);

/*
 * A repeated answer: from begin to end, signals that would end the process are taken in
 * screen_wait() only.
 */
/* keys: they come one by one and are not shown, if there is a keyboard */
void screen_watch_begin(struct screen *screen, bool paint, bool keys);
void screen_watch_end(struct screen *screen);
void screen_watch_clear(struct screen *screen); /* before the next picture */

bool screen_has_keys(void); /* on standard input */

/* Waits. False: the user wants to stop. */
bool screen_wait(struct screen *screen, double seconds);

/*
 * Waits for descriptors, too. Positive: some of them have something; 0: the time is over, or the
 * screen has another size; negative: the user wants to stop.
 */
int screen_poll(struct screen *screen, struct pollfd *fds, size_t n, double seconds);

#endif
