/* SPDX-License-Identifier: Apache-2.0 */

/* The file has no name, and is read from its beginning each time. */

#include "tests/lib/log_lines.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/lib/mark.h"

static int error_before;
static char text[65536];

void log_catch(void) {
        char path[] = "/tmp/kvd-test-log-XXXXXX";
        int fd = mkstemp(path);

        ck_assert_int_ge(fd, 0);
        unlink(path);
        error_before = dup(STDERR_FILENO);
        ck_assert_int_ge(fcntl(fd, F_SETFL, O_APPEND), 0);
        ck_assert_int_ge(dup2(fd, STDERR_FILENO), 0);
        close(fd);
        unsetenv("JOURNAL_STREAM");
}

void log_let_go(void) {
        dup2(error_before, STDERR_FILENO);
        close(error_before);
}

const char *log_lines(void) {
        ssize_t n = pread(STDERR_FILENO, text, sizeof text - 1, 0);

        text[n < 0 ? 0 : n] = '\0';
        return text;
}

uint32_t log_count(const char *what) {
        uint32_t n = 0;

        for (const char *at = log_lines(); (at = strstr(at, what)); at++)
                n++;
        return n;
}
