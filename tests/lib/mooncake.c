/* SPDX-License-Identifier: Apache-2.0 */

/* The folder of the stand-in store. Each object is a file; so are its faults and call counts. */

#include "tests/lib/mooncake.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/lib/mark.h"

#define MOST (1u << 20)

static char folder[64];

static void path_of(char ret[static 512], const char *below, const char *name) {
        snprintf(ret, 512, "%s/%s%s", folder, below, name);
}

static size_t read_all(const char *path, void *to, size_t most) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t n = fd < 0 ? 0 : read(fd, to, most);

        ck_assert_int_ge(n, 0);
        if (fd >= 0)
                close(fd);
        return (size_t)n;
}

static void write_all(const char *path, const void *from, size_t n) {
        char made[560];
        int fd;

        snprintf(made, sizeof made, "%s.new", path);
        fd = open(made, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        ck_assert_int_eq(write(fd, from, n), n);
        close(fd);
        ck_assert_int_eq(rename(made, path), 0);
}

void mooncake_start(void) {
        char path[512];

        strcpy(folder, "/tmp/kvd-mooncake-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(folder));
        path_of(path, "objects", "");
        ck_assert_int_eq(mkdir(path, 0700), 0);
        setenv("FAKE_MOONCAKE", folder, 1);
}

void mooncake_stop(void) {
        char command[96];

        snprintf(command, sizeof command, "rm -rf %s", folder);
        ck_assert_int_eq(system(command), 0);
}

void mooncake_fails(const char *how) {
        char path[512];

        path_of(path, "", "fault");
        write_all(path, how, strlen(how));
}

/* Calls back with each object's path. Returns how many there are. */
static uint32_t each(void (*with)(const char *path, void *data), void *data) {
        char path[512];
        struct dirent *entry;
        uint32_t n = 0;
        DIR *dir;

        path_of(path, "objects", "");
        dir = opendir(path);
        ck_assert_ptr_nonnull(dir);
        while ((entry = readdir(dir))) {
                if (strchr(entry->d_name, '.')) /* also skips objects that are being written */
                        continue;
                path_of(path, "objects/", entry->d_name);
                with(path, data);
                n++;
        }
        closedir(dir);
        return n;
}

static void forget(const char *path, void *data) {
        ck_assert_int_eq(unlink(path), 0);
}

void mooncake_forget(void) {
        each(forget, NULL);
}

static void change_one(const char *path, void *data) {
        size_t (**change)(uint8_t *, size_t) = data;
        static uint8_t value[MOST];
        size_t n = (*change)(value, read_all(path, value, sizeof value - 1));
        int fd = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC);

        ck_assert_int_eq(write(fd, value, n), n);
        close(fd);
}

uint32_t mooncake_change(size_t (*change)(uint8_t *value, size_t n)) {
        return each(change_one, &change);
}

static const char *text_of(const char *what) {
        static char text[MOST];
        char path[512];

        path_of(path, "", what);
        text[read_all(path, text, sizeof text - 1)] = 0;
        return text;
}

uint32_t mooncake_calls(const char *what) {
        uint32_t n = 0;

        for (const char *at = text_of(what); (at = strchr(at, '\n')); at++)
                n++;
        return n;
}

const char *mooncake_setup(void) {
        char *text = (char *)text_of("setup"), *end = strrchr(text, '\n'), *line;

        ck_assert_ptr_nonnull(end);
        *end = 0;
        line = strrchr(text, '\n');
        return line ? line + 1 : text;
}
