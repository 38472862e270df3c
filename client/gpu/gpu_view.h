/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_GPU_GPU_VIEW_H
#define KVD_CLIENT_GPU_GPU_VIEW_H

/*
 * What a view of a pool on a GPU has in addition: the device, and this process's streams that read
 * and write the pool.
 *
 *      memory_device.c   segments
 *      semaphore.c       our row of the semaphore page
 *      deferred.c        pins and blocks to release when a stream has passed
 *      stream.c          the calls of kvd_cuda.h
 */

#include "client/internal.h"
#include "client/kvd_cuda.h"
#include "ipc/base/device.h"
#include "ipc/base/semaphore.h"

/* A promise: the semaphore gets this value after all work that is in the stream now. */
struct promise {
        uint32_t at; /* place in our row */
        uint64_t value;
};

/*
 * A pin or block to release when the semaphore has reached the value. until.at is SEMAPHORES if the
 * stream was being captured: it makes its promise after the capture.
 */
struct deferred {
        struct promise until;
        void *stream;
        kvd_ref ref;
        bool is_pin; /* false: a block that we filled */
};

/*
 * One semaphore of our row. A stream is identified by its id, which is never reused. Its handle may
 * be reused after cuStreamDestroy, and the handle of the per-thread default stream means another
 * stream in each thread.
 */
struct semaphore {
        uint64_t stream;
        uint64_t value;        /* last promised, by us or by an earlier client that had the row */
        bool used;             /* by a stream of ours */
        uint32_t writers;      /* threads about to write it: its stream keeps it until then */
        pthread_mutex_t order; /* held while a value is written, perhaps for long */
};

struct device {
        struct kvd_device gpu;
        _Atomic uint32_t drained; /* last drain_epoch that was served; changed under kvd.lock */
        bool draining;            /* a thread is giving segments back; under kvd.lock */
        /* segments that a thread is mapping or unmapping, without kvd.lock; changed under it */
        uint64_t busy[KVD_MAX_SEGMENTS / 64];
        uint32_t n_busy;

        pthread_mutex_t lock; /* protects what follows; never held during a driver call */
        bool streams;         /* stream memory operations work here */
        cu_stream own;        /* if they do: an empty stream, to check the context with */
        shm_u64 *page;        /* owned mapping: the semaphore page; NULL if none */
        uint64_t page_bytes;
        cu_address page_at; /* device address of the page */
        uint32_t row;       /* our row */
        uint32_t token;     /* names us in promises */
        struct semaphore semaphores[SEMAPHORES];
        struct deferred *deferred;     /* owned */
        uint32_t room;                 /* maximum number of deferred */
        _Atomic uint32_t n_deferred;   /* changed under lock */
        _Atomic uint32_t n_unpromised; /* number of those without a promise */
};

/* memory_device.c */
/*
 * Writes to a block that this process fills. The data is there when it returns, for the worker, too.
 */
int device_store(struct view *view, void *to, const void *from, size_t bytes);
bool device_drain_wanted(const struct view *view);
bool device_is_mapping(const struct view *view); /* a thread is mapping or unmapping */
/*
 * Called under kvd.lock, which it releases while the driver is at work: unmaps segments that the
 * daemon wants back, unless another thread is doing it.
 */
void device_drain(struct view *view);

/* semaphore.c */
/* With the device entered: -EBUSY: the stream is being captured. */
int device_refuses(const struct device *d, cu_stream stream);
int semaphore_open(struct view *view, int fd, uint32_t row, uint32_t token);
bool semaphore_is_quiet(const struct view *view); /* our streams have kept all promises */
/* waits until our streams have kept all promises; false: their context has failed */
bool semaphore_quiet(struct view *view);
void semaphore_close(struct view *view); /* waits likewise */
/*
 * Adds a write behind all work in the stream. -EOPNOTSUPP: that is not possible, and the call waited
 * for the stream instead. -EBUSY: the stream is being captured, and nothing was done.
 */
int semaphore_promise(struct view *view, void *stream, struct promise *ret);
/* waits for the stream, which is over if its context has failed. -EBUSY: it is being captured */
int semaphore_finish(struct view *view, void *stream);
int semaphore_wait(struct view *view, void *stream, uint32_t semaphore, uint64_t value);
/* value of a semaphore of any row, numbered as in descriptors */
uint64_t semaphore_reached(const struct view *view, uint32_t semaphore);
bool semaphore_passed(const struct view *view, struct promise until);

/* deferred.c */
/* releases a pin behind all work in the stream; never fails, never breaks a capture */
void deferred_unpin(struct view *view, kvd_ref ref, void *stream);
void deferred_add(struct view *view, struct promise until, kvd_ref ref, bool is_pin);
uint32_t deferred_settle(struct view *view); /* returns how many entries still wait */
/* semaphore_quiet; also false if an entry waits for a stream that is being captured */
bool deferred_quiet(struct view *view);

/* stream.c */
int index_only_refuses(const kvd_space *space); /* -EOPNOTSUPP with KVD_SPACE_INDEX_ONLY, or 0 */
int check_memory(const kvd_space *space);       /* the same, or -ECHILD, as space_check */
void layer_lay_out(const struct kvd_index *ix, uint8_t *base, uint32_t layer,
                   struct kvd_layer_view *ret);

struct promise_list {
        uint32_t n;
        struct kvd_promise at[KVD_SHARDS];
};
/* When the data is there: one of them. */
struct seal_until {
        const struct promise *own;          /* the caller's stream has written it */
        const struct promise_list *streams; /* they have; duplicates stay the caller's */
};
/* seal.c; ids: NULL, or as in kvd_seal_keep; until: NULL: the data is there */
int seal_blocks(kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
                const uint32_t *tokens, uint32_t n_tokens, uint32_t *ids,
                const struct seal_until *until);
/* of blocks with tokens; any: or with the words of a key */
int seal_check(const kvd_space *space, const struct kvd_pin *pin, uint32_t n,
               const struct kvd_block *blocks, uint32_t n_tokens);
int seal_check_any(const kvd_space *space, const struct kvd_pin *pin, uint32_t n,
                   const struct kvd_block *blocks, uint32_t n_tokens);
/* post.c: as kvd_post, after seal_check_any */
int post_blocks(kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
                const uint32_t *tokens, uint32_t n_tokens);

#endif
