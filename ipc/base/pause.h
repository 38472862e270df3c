/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_PAUSE_H
#define KVD_BASE_PAUSE_H

/* Lets the processor rest for some ten nanoseconds, in a loop that waits for memory to change. */
static inline void pause_briefly(void) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("isb"); /* yield takes no time on most processors */
#endif
}

#endif
