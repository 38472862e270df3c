/* SPDX-License-Identifier: Apache-2.0 */

/*
 * libc functions of libkvd that other processes can notice. The library under test is compiled with
 * -Dmemcpy=hook_memcpy and so on (meson.build), so its headers declare these functions. Copies and
 * comparisons of shared memory are done in pieces of a vector's size, each of them a point, as they
 * tear in production.
 */
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/client/killpoints/hook.h"

#define PIECE 16u

void *hook_memcpy(void *to, const void *from, size_t n);
int hook_memcmp(const void *a, const void *b, size_t n);
int hook_munmap(void *at, size_t n);
int hook_close(int fd);
long hook_syscall(long number, ...);

static size_t piece(size_t left) {
        return left < PIECE ? left : PIECE;
}

void *hook_memcpy(void *to, const void *from, size_t n) {
        if (!hook_is_shared(to) && !hook_is_shared(from))
                return memcpy(to, from, n);
        for (size_t i = 0; i < n; i += PIECE) {
                hook_point();
                memcpy((char *)to + i, (const char *)from + i, piece(n - i));
        }
        return to;
}

int hook_memcmp(const void *a, const void *b, size_t n) {
        int r = 0;

        if (!hook_is_shared(a) && !hook_is_shared(b))
                return memcmp(a, b, n);
        for (size_t i = 0; i < n && r == 0; i += PIECE) {
                hook_point();
                r = memcmp((const char *)a + i, (const char *)b + i, piece(n - i));
        }
        return r;
}

int hook_munmap(void *at, size_t n) {
        hook_point();
        hook_forget(at, n);
        return munmap(at, n);
}

int hook_close(int fd) {
        hook_point();
        return close(fd);
}

long hook_syscall(long number, ...) {
        va_list args;
        long a[6];

        va_start(args, number);
        for (int i = 0; i < 6; i++)
                a[i] = va_arg(args, long);
        va_end(args);
        hook_point();
        return syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
