/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KILLPOINTS_HOOK_H
#define KVD_TESTS_KILLPOINTS_HOOK_H

/*
 * The points in libkvd that another process can tell apart: each access to shared memory (index,
 * pin page, pool) and each system call. A death between two of them has the same effect as a death
 * at the second one. So "killed at any instruction" is a finite list of points, and a test can try
 * all of them. The library's sources are compiled with -fsanitize=thread, so that the compiler
 * announces each access, but they are linked with the functions in tsan.c instead of a sanitizer's
 * runtime. libc's accesses to shared memory (memcpy, memcmp) go through libc.c, in pieces, and
 * system calls (ipc/base/sys.h) through hook.c. For one thread only.
 */

#include <stddef.h>
#include <stdint.h>

/* Call before the first kvd_open. From then on, tracks where shared memory is mapped. */
void hook_install(void);

/* Points are counted from hook_start to hook_stop. What else happens at points is set before: */
/* SIGKILL or SIGSTOP at the nth point; 0: never. Deadlines do not advance during a stop. */
void hook_signal_at(uint64_t nth, int signal);
void hook_shake(uint64_t seed); /* short pauses at some points */
void hook_start(void);
uint64_t hook_stop(void); /* number of points since hook_start; resets the settings */

/* Sends a signal to this process, which has taken effect on return. */
void hook_signal(int signal);

/* For tsan.c and libc.c. */
void hook_point(void);
void hook_access(const volatile void *at);
int hook_is_shared(const volatile void *at);
void hook_forget(const void *at, size_t n); /* it is no longer mapped */

#endif
