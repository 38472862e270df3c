/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KILLPOINTS_HOOK_H
#define KVD_TESTS_KILLPOINTS_HOOK_H

/*
 * The places in libkvd that another process can tell apart: each access to shared memory (index,
 * pin page, pool) and each system call. Dying anywhere between two of them is dying at the second
 * one, so "killed at any instruction" is a finite list, and it can be walked.
 *
 * The library's sources are compiled with -fsanitize=thread, so that the compiler announces each
 * access, but linked with the functions in tsan.c instead of a sanitizer's runtime. What libc would
 * do in shared memory (memcpy, memcmp) goes through libc.c, in pieces, and the table of system
 * calls (ipc/base/sys.h) through hook.c. One thread only.
 */

#include <stddef.h>
#include <stdint.h>

/* Before the first kvd_open: learns from now on where shared memory is mapped. */
void hook_install(void);

/* From here on, and until hook_stop, points are counted. What else happens there is said before: */
/* SIGKILL or SIGSTOP at the nth point; 0: never. Deadlines do not advance during a stop. */
void hook_signal_at(uint64_t nth, int signal);
void hook_shake(uint64_t seed);                /* short pauses at some points */
void hook_start(void);
uint64_t hook_stop(void); /* number of points since hook_start; forgets what was said */

/* A signal for oneself, which has had its effect when this returns. */
void hook_signal(int signal);

/* For tsan.c and libc.c. */
void hook_point(void);
void hook_access(const volatile void *at);
int hook_is_shared(const volatile void *at);
void hook_forget(const void *at, size_t n); /* is not mapped any more */

#endif
