/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_UTIL_H
#define KVD_BASE_UTIL_H

/* The few macros that every file may use. */

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

/* Each argument is evaluated once: it may read a clock, or memory that another process writes. */
#define MIN(a, b) PICK(a, <, b, __COUNTER__)
#define MAX(a, b) PICK(a, >, b, __COUNTER__)
#define PICK(a, is, b, n) PICK_(a, is, b, PASTE(a_, n), PASTE(b_, n))
#define PICK_(a, is, b, a_, b_) \
        ({ \
                __typeof__(1 ? (a) : (b)) a_ = (a), b_ = (b); \
                a_ is b_ ? a_ : b_; \
        })

#define ALIGN_UP(n, to) (((n) + (to)-1) / (to) * (to))
#define DIV_UP(n, by) (((n) + (by)-1) / (by))
#define container_of(p, type, member) ((type *)((char *)(p)-offsetof(type, member)))
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

/* Moves ownership out of a variable that has a _cleanup_ destructor. */
#define STEAL(p) \
        ({ \
                __typeof__(p) stolen_ = (p); \
                (p) = NULL; \
                stolen_; \
        })
#define STEAL_FD(fd) \
        ({ \
                int stolen_ = (fd); \
                (fd) = -1; \
                stolen_; \
        })

#define _cleanup_(f) __attribute__((cleanup(f)))
#define _printf_(fmt, args) __attribute__((format(printf, fmt, args)))

static inline void closep(int *fd) {
        if (*fd >= 0)
                close(*fd);
}

static inline void freep(void *p) {
        free(*(void **)p);
}

/* -errno after a call failed. Compilers and analyzers see that it is less than 0. */
static inline int negative_errno(void) {
        return errno > 0 ? -errno : -EIO;
}

/* Smallest power of two that is at least n; n up to 2^63. */
static inline uint64_t pow2_up(uint64_t n) {
        return n <= 1 ? 1 : UINT64_C(1) << (64 - __builtin_clzll(n - 1));
}

#endif
