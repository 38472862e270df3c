/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The keys of top. A key changes how the samples are shown, and they are shown again at once. The
 * time of the next sample does not change.
 */

#include <errno.h>

#include "ipc/base/sys.h"
#include "tools/kvctl/keys.h"
#include "tools/kvctl/top.h"

#define PAGE 10u

const char *top_help(void) {
        return "keys: q quits, left and right choose the column to sort by, s takes the next one, "
               "r reverses the order, Tab goes to the other table, up and down scroll, space pauses and resumes";
}

/* ---- what a key means ------------------------------------------------------------------------ */

static bool can_sort_by(enum top_table which, size_t column) {
        return top_columns(which)[column].title != NULL;
}

/* Sorts by the next visible column, in either direction; past the last one: no order. */
static void move(struct top *top, size_t step) {
        size_t n = n_top_columns[top->focus], *column = &top->sort[top->focus].column;

        do
                *column = (*column + step) % (n + 1);
        while (*column && !can_sort_by(top->focus, *column - 1));
        top->sort[top->focus].ascending = false;
}

static void scroll(struct top *top, unsigned down, unsigned up) {
        top->scroll = top->scroll + down - MIN(top->scroll + down, up);
}

void top_take_key(struct top *top, int key) {
        struct top_sort *sort = &top->sort[top->focus];

        switch (key) {
        case 's':
        case KEY_RIGHT: move(top, 1); break;
        case KEY_LEFT: move(top, n_top_columns[top->focus]); break;
        case 'r': sort->ascending = !sort->ascending; break;
        case '\t': top->focus = top->focus == TOP_SPACES ? TOP_CLIENTS : TOP_SPACES; break;
        case ' ': top->paused = !top->paused; break;
        case '?':
        case 'h': top->help = !top->help; break;
        case KEY_DOWN:
        case KEY_UP: scroll(top, key == KEY_DOWN, key == KEY_UP); break;
        case KEY_PAGE_DOWN:
        case KEY_PAGE_UP:
                scroll(top, key == KEY_PAGE_DOWN ? PAGE : 0, key == KEY_PAGE_UP ? PAGE : 0);
                break;
        }
}

/* ---- waiting --------------------------------------------------------------------------------- */

/* False: the user pressed q, or there is no more input. */
static bool take_keys(struct top *top) {
        char bytes[64];
        ssize_t n = read(STDIN_FILENO, bytes, sizeof bytes);
        size_t used;

        for (size_t at = 0; n > 0 && at < (size_t)n; at += used) {
                int key = key_read(bytes + at, (size_t)n - at, &used);

                if (key == 'q')
                        return false;
                top_take_key(top, key);
        }
        return n > 0;
}

static double until_next(const struct top *top) {
        uint64_t now = sys_now_ns();

        if (top->paused)
                return 86400;
        return top->next_ns > now ? (double)(top->next_ns - now) / 1e9 : 0;
}

bool top_wait(struct kvctl *kvctl, double seconds) {
        struct pollfd keyboard = {.fd = STDIN_FILENO, .events = POLLIN};
        struct top *top = kvctl->top;
        int r;

        if (!top || !top->before || !screen_has_keys())
                return screen_wait(&kvctl->screen, seconds);
        r = screen_poll(&kvctl->screen, &keyboard, 1, until_next(top));
        if (r > 0 && !take_keys(top))
                return false;
        top->again = r > 0 || until_next(top) > 0;
        return r >= 0;
}
