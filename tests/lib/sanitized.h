/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_SANITIZED_H
#define KVD_TESTS_SANITIZED_H

/*
 * Under a sanitizer, memory and time say nothing about the daemon, and processes take long to start
 * and end.
 */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
        __has_feature(memory_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

#endif
