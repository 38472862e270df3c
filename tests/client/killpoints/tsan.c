/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The functions that compilers call from code compiled with -fsanitize=thread, as gcc 12 and clang
 * 14 name them. Each announces the access to hook.c and then performs it with the requested order.
 * A store that is relaxed in production stays relaxed, so that the test's machine code orders no
 * more than the real code.
 */
#include <stdbool.h>
#include <string.h>

#include "tests/client/killpoints/hook.h"

#define FUNCTION(type, name, parameters) \
        type name parameters; \
        type name parameters

FUNCTION(void, __tsan_init, (void)) {
}

FUNCTION(void, __tsan_func_entry, (void *caller)) {
        (void)caller;
}

FUNCTION(void, __tsan_func_exit, (void)) {
}

/* ---- plain accesses: the compiler does them after the call ----------------------------------- */

#define PLAIN(name) \
        FUNCTION(void, __tsan_##name, (void *at)) { \
                hook_access(at); \
        }
#define PLAIN_SIZES(kind) \
        PLAIN(kind##1) PLAIN(kind##2) PLAIN(kind##4) PLAIN(kind##8) PLAIN(kind##16)

PLAIN_SIZES(read)
PLAIN_SIZES(write)
PLAIN_SIZES(read_write)
PLAIN_SIZES(unaligned_read)
PLAIN_SIZES(unaligned_write)
PLAIN_SIZES(unaligned_read_write)
PLAIN_SIZES(volatile_read)
PLAIN_SIZES(volatile_write)
PLAIN_SIZES(unaligned_volatile_read)
PLAIN_SIZES(unaligned_volatile_write)
PLAIN(vptr_read)

FUNCTION(void, __tsan_vptr_update, (void *at, void *value)) {
        (void)value;
        hook_access(at);
}

FUNCTION(void, __tsan_read_range, (void *at, unsigned long n)) {
        (void)n;
        hook_access(at);
}

FUNCTION(void, __tsan_write_range, (void *at, unsigned long n)) {
        (void)n;
        hook_access(at);
}

/* clang calls these for copies that it generates. */
FUNCTION(void *, __tsan_memcpy, (void *to, const void *from, unsigned long n)) {
        hook_access(from);
        hook_access(to);
        return memcpy(to, from, n);
}

FUNCTION(void *, __tsan_memmove, (void *to, const void *from, unsigned long n)) {
        hook_access(from);
        hook_access(to);
        return memmove(to, from, n);
}

FUNCTION(void *, __tsan_memset, (void *to, int byte, unsigned long n)) {
        hook_access(to);
        return memset(to, byte, n);
}

/* ---- atomics --------------------------------------------------------------------------------- */

#define LOAD(bits, word) \
        FUNCTION(word, __tsan_atomic##bits##_load, (const volatile void *at, int order)) { \
                const volatile word *p = at; \
                hook_access(at); \
                return order == __ATOMIC_RELAXED ? __atomic_load_n(p, __ATOMIC_RELAXED) : \
                       order == __ATOMIC_SEQ_CST ? __atomic_load_n(p, __ATOMIC_SEQ_CST) : \
                                                   __atomic_load_n(p, __ATOMIC_ACQUIRE); \
        }

#define STORE(bits, word) \
        FUNCTION(void, __tsan_atomic##bits##_store, (volatile void *at, word v, int order)) { \
                volatile word *p = at; \
                hook_access(at); \
                if (order == __ATOMIC_RELAXED) \
                        __atomic_store_n(p, v, __ATOMIC_RELAXED); \
                else if (order == __ATOMIC_RELEASE) \
                        __atomic_store_n(p, v, __ATOMIC_RELEASE); \
                else \
                        __atomic_store_n(p, v, __ATOMIC_SEQ_CST); \
        }

/* Read-modify-write: one locked instruction on x86, whatever the order. */
#define CHANGE(bits, word, name, builtin) \
        FUNCTION(word, __tsan_atomic##bits##_##name, (volatile void *at, word v, int order)) { \
                (void)order; \
                hook_access(at); \
                return builtin((volatile word *)at, v, __ATOMIC_SEQ_CST); \
        }

#define COMPARE(bits, word, name, weak) \
        FUNCTION(bool, __tsan_atomic##bits##_compare_exchange_##name, \
                 (volatile void *at, void *expected, word v, int order, int failed)) { \
                (void)order, (void)failed; \
                hook_access(at); \
                return __atomic_compare_exchange_n((volatile word *)at, (word *)expected, v, weak, \
                                                   __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
        }

#define COMPARE_VALUE(bits, word) \
        FUNCTION(word, __tsan_atomic##bits##_compare_exchange_val, \
                 (volatile void *at, word expected, word v, int order, int failed)) { \
                (void)order, (void)failed; \
                hook_access(at); \
                __atomic_compare_exchange_n((volatile word *)at, &expected, v, false, \
                                            __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
                return expected; \
        }

#define ATOMICS(bits, word) \
        LOAD(bits, word) \
        STORE(bits, word) \
        CHANGE(bits, word, exchange, __atomic_exchange_n) \
        CHANGE(bits, word, fetch_add, __atomic_fetch_add) \
        CHANGE(bits, word, fetch_sub, __atomic_fetch_sub) \
        CHANGE(bits, word, fetch_and, __atomic_fetch_and) \
        CHANGE(bits, word, fetch_or, __atomic_fetch_or) \
        CHANGE(bits, word, fetch_xor, __atomic_fetch_xor) \
        CHANGE(bits, word, fetch_nand, __atomic_fetch_nand) \
        COMPARE(bits, word, strong, false) \
        COMPARE(bits, word, weak, true) \
        COMPARE_VALUE(bits, word)

ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)

FUNCTION(void, __tsan_atomic_thread_fence, (int order)) {
        if (order == __ATOMIC_SEQ_CST)
                __atomic_thread_fence(__ATOMIC_SEQ_CST);
        else if (order != __ATOMIC_RELAXED)
                __atomic_thread_fence(__ATOMIC_ACQ_REL);
}

FUNCTION(void, __tsan_atomic_signal_fence, (int order)) {
        (void)order;
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
}
