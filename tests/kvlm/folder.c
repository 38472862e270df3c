/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kvlm/folder.h"

#include <fcntl.h>
#include <ftw.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "ipc/base/util.h"
#include "tests/lib/mark.h"

const char *kvlm_program;
static char folder[64];

/* The memory of a test is freed all at once. */
static struct piece {
        struct piece *next;
        _Alignas(16) char data[];
} * pieces;

void *folder_memory(size_t bytes) {
        struct piece *piece = calloc(1, sizeof *piece + bytes);

        ck_assert_ptr_nonnull(piece);
        piece->next = pieces;
        pieces = piece;
        return piece->data;
}

char *print_to(char *at, const char *format, ...) {
        va_list args;
        int n;

        va_start(args, format);
        n = vsprintf(at, format, args);
        va_end(args);
        return at + n;
}

void folder_make(void) {
        strcpy(folder, "/tmp/kvlm-test-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(folder));
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
        return remove(path);
}

void folder_remove(void) {
        nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
        while (pieces) {
                struct piece *piece = pieces;

                pieces = piece->next;
                free(piece);
        }
}

const char *folder_path(const char *name) {
        size_t size = strlen(folder) + strlen(name) + 2;
        char *path = folder_memory(size);

        snprintf(path, size, "%s/%s", folder, name);
        return path;
}

const char *folder_write(const char *name, const void *data, size_t size) {
        const char *path = folder_path(name);
        FILE *f = fopen(path, "we");

        ck_assert_ptr_nonnull(f);
        ck_assert_uint_eq(fwrite(data, 1, size, f), size);
        ck_assert_int_eq(fclose(f), 0);
        return path;
}

const char *folder_write_text(const char *name, const char *text) {
        return folder_write(name, text, strlen(text));
}

void *folder_read(const char *name, size_t *size) {
        FILE *f = fopen(folder_path(name), "re");
        struct stat st;
        char *data;

        ck_assert_ptr_nonnull(f);
        ck_assert_int_eq(fstat(fileno(f), &st), 0);
        data = folder_memory((size_t)st.st_size + 1);
        *size = fread(data, 1, (size_t)st.st_size, f);
        fclose(f);
        return data;
}

/* ---- runs ---- */

static char *drain(int fd) {
        struct stat st;
        char *text;

        ck_assert_int_eq(fstat(fd, &st), 0);
        text = folder_memory((size_t)st.st_size + 1);
        ck_assert_int_eq(pread(fd, text, (size_t)st.st_size, 0), st.st_size);
        close(fd);
        return text;
}

static int temporary(void) {
        int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);

        ck_assert_int_ge(fd, 0);
        return fd;
}

struct output kvlm(const char *first, ...) {
        const char *argv[32] = {kvlm_program, first};
        int out = temporary(), err = temporary(), status, n = 2;
        pid_t pid;
        va_list args;

        va_start(args, first);
        while (argv[n - 1] && n < (int)ARRAY_SIZE(argv))
                argv[n++] = va_arg(args, const char *);
        va_end(args);
        pid = fork();
        ck_assert_int_ge(pid, 0);
        if (pid == 0) {
                dup2(out, STDOUT_FILENO);
                dup2(err, STDERR_FILENO);
                execv(kvlm_program, (char **)argv);
                _exit(127);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        return (struct output){WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status),
                               drain(out), drain(err)};
}
