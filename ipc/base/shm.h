/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_SHM_H
#define KVD_BASE_SHM_H

/*
 * Access to memory that another process may be writing.
 *
 * The daemon writes index pages while clients read them. Readers read plain data speculatively and
 * then check the version word again (a slot word or a run's leaf word); they discard data that may
 * have changed meanwhile. C11 requires atomic accesses to such data, and the ThreadSanitizer build
 * uses them, word by word. Other builds use memcpy and memcmp, which compilers may vectorise: on
 * all supported machines this can only yield stale or torn data, which the version word reveals.
 *
 * tests/client/orders lists the memory orders that both sides rely on, with their partners.
 *
 * Order of a write:  version = invalid; fence; data; fence; version = valid       shm_write_begin, shm_write_end
 * Order of a read:   version (acquire); data; fence; version again (relaxed)      shm_load, shm_recheck
 */

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__SANITIZE_THREAD__)
#define KVD_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define KVD_TSAN 1
#endif
#endif
#ifndef KVD_TSAN
#define KVD_TSAN 0
#endif

typedef _Atomic uint64_t shm_u64;
typedef _Atomic uint32_t shm_u32;

static inline uint64_t shm_load(const shm_u64 *word) {
        return atomic_load_explicit((shm_u64 *)word, memory_order_acquire);
}

/* Loads a version word again, after all data that was read since the first load. */
static inline uint64_t shm_load_again(const shm_u64 *word) {
#if KVD_TSAN
        return atomic_load_explicit((shm_u64 *)word, memory_order_seq_cst);
#else
        atomic_thread_fence(memory_order_acquire);
        return atomic_load_explicit((shm_u64 *)word, memory_order_relaxed);
#endif
}

static inline bool shm_recheck(const shm_u64 *word, uint64_t seen) {
        return shm_load_again(word) == seen;
}

/* Marks the data of a version word as invalid before rewriting it; partner of shm_recheck. */
static inline void shm_write_begin(shm_u64 *word, uint64_t invalid) {
#if KVD_TSAN
        atomic_exchange_explicit(word, invalid, memory_order_seq_cst);
#else
        atomic_store_explicit(word, invalid, memory_order_relaxed);
        atomic_thread_fence(memory_order_release);
#endif
}

/* Publishes the data of a version word; partner of shm_load. */
static inline void shm_write_end(shm_u64 *word, uint64_t valid) {
        atomic_store_explicit(word, valid, memory_order_release);
}

static inline uint32_t shm_get32(const uint32_t *p) {
        return __atomic_load_n(p, __ATOMIC_RELAXED);
}

static inline uint64_t shm_get64(const uint64_t *p) {
        return __atomic_load_n(p, __ATOMIC_RELAXED);
}

static inline void shm_set32(uint32_t *p, uint32_t v) {
        __atomic_store_n(p, v, __ATOMIC_RELAXED);
}

static inline void shm_set64(uint64_t *p, uint64_t v) {
        __atomic_store_n(p, v, __ATOMIC_RELAXED);
}

static inline void shm_write_words(uint32_t *to, const uint32_t *from, size_t n) {
#if KVD_TSAN
        for (size_t i = 0; i < n; i++)
                shm_set32(to + i, from[i]);
#else
        memcpy(to, from, n * sizeof *to);
#endif
}

static inline void shm_read_words(uint32_t *to, const uint32_t *from, size_t n) {
#if KVD_TSAN
        for (size_t i = 0; i < n; i++)
                to[i] = shm_get32(from + i);
#else
        memcpy(to, from, n * sizeof *to);
#endif
}

static inline bool shm_equal_words(const uint32_t *shared, const uint32_t *own, size_t n) {
#if KVD_TSAN
        for (size_t i = 0; i < n; i++)
                if (shm_get32(shared + i) != own[i])
                        return false;
        return true;
#else
        return memcmp(shared, own, n * sizeof *own) == 0;
#endif
}

#endif
