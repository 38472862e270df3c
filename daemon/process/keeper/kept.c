/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Descriptors with consecutive numbers, and an array of their names. The numbers are consecutive
 * because a started program expects that: handing over moves them down to 3.
 *
 * A program gets the names in one string of its environment, which Linux limits to 128 KiB. So the
 * total size of the names is limited, too: with more, no program could be started.
 */

#include "daemon/process/keeper/kept.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define FIRST_HANDED 3 /* SD_LISTEN_FDS_START */
#define NAMES_MAX (120u << 10)
#define SPARE 2u /* one just received, and one to start a program with */

static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-";

int kept_init(struct kept *kept) {
        struct rlimit limit;

        *kept = (struct kept){0};
        if (close_range(KEPT_FIRST, ~0U, 0) < 0 || getrlimit(RLIMIT_NOFILE, &limit) < 0)
                return negative_errno();
        if (limit.rlim_cur < 2 * KEPT_FIRST)
                return -EMFILE;
        kept->max = (uint32_t)MIN(limit.rlim_cur - KEPT_FIRST - SPARE, NAMES_MAX / 2);
        kept->names = sys->calloc(kept->max, sizeof *kept->names);
        return kept->names ? 0 : -ENOMEM;
}

void kept_clear(struct kept *kept) {
        kept_cut(kept, 0);
        free(kept->names);
        *kept = (struct kept){0};
}

static int check(const struct kept *kept, const char *name) {
        size_t n = strlen(name);

        if (n == 0 || n > KEPT_NAME_MAX || strspn(name, letters) != n)
                return -EINVAL;
        return kept->n == kept->max || kept->bytes + n + 1 > NAMES_MAX ? -ENOSPC : 0;
}

int kept_add(struct kept *kept, const char *name, int fd) {
        int r = check(kept, name), to = -1;

        if (r == 0)
                to = fcntl(fd, F_DUPFD_CLOEXEC, KEPT_FIRST + (int)kept->n);
        if (r == 0 && to < 0)
                r = negative_errno();
        close(fd);
        if (r < 0)
                return r;
        strcpy(kept->names[kept->n++], name);
        kept->bytes += strlen(name) + 1;
        return 0;
}

/* The last one takes its place. */
static void remove_one(struct kept *kept, uint32_t i) {
        uint32_t last = --kept->n;

        kept->bytes -= strlen(kept->names[i]) + 1;
        if (i != last) {
                dup3(KEPT_FIRST + (int)last, KEPT_FIRST + (int)i, O_CLOEXEC);
                memcpy(kept->names[i], kept->names[last], sizeof kept->names[i]);
        }
        close(KEPT_FIRST + (int)last);
}

void kept_remove(struct kept *kept, const char *name) {
        for (uint32_t i = kept->n; i > 0; i--)
                if (strcmp(kept->names[i - 1], name) == 0)
                        remove_one(kept, i - 1);
}

void kept_cut(struct kept *kept, uint32_t n) {
        while (kept->n > n)
                remove_one(kept, kept->n - 1);
}

static int tell(const struct kept *kept) {
        char *names = malloc(kept->bytes + 1), *end = names, number[16];

        if (!names)
                return -ENOMEM;
        *names = 0;
        for (uint32_t i = 0; i < kept->n; i++)
                end += sprintf(end, "%s%s", i ? ":" : "", kept->names[i]);
        setenv("LISTEN_FDNAMES", names, 1);
        free(names);
        snprintf(number, sizeof number, "%u", kept->n);
        setenv("LISTEN_FDS", number, 1);
        snprintf(number, sizeof number, "%d", getpid());
        setenv("LISTEN_PID", number, 1);
        snprintf(number, sizeof number, "%u", kept->max);
        return setenv("FDSTORE", number, 1) < 0 ? negative_errno() : 0;
}

int kept_hand_over(const struct kept *kept) {
        int n = (int)kept->n;

        for (int i = 0; i < n; i++)
                if (dup2(KEPT_FIRST + i, FIRST_HANDED + i) < 0)
                        return negative_errno();
        close_range((unsigned)(FIRST_HANDED + n), ~0U, 0);
        return tell(kept);
}
