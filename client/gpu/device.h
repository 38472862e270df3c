/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_GPU_DEVICE_H
#define KVD_CLIENT_GPU_DEVICE_H

/*
 * What a view of a pool on a GPU has besides: the device, and the streams of this process that
 * write and read there.
 *
 *      memory_device.c   segments
 *      semaphore.c       our row of the semaphore page
 *      deferred.c        what is let go of when a stream has passed
 *      stream.c          the calls of kvd_cuda.h
 */

#include "client/internal.h"
#include "client/kvd_cuda.h"
#include "ipc/base/device.h"
#include "ipc/base/semaphore.h"

/* What a semaphore promises: its value after everything that was put into the stream until now. */
struct promise {
        uint32_t at;    /* which one of our row */
        uint64_t value;
};

/*
 * Something that is let go of when the semaphore has reached the value. Without a promise (until.at
 * is SEMAPHORES): the stream was being captured, and makes one when it is not any more.
 */
struct deferred {
        struct promise until;
        void *stream;
        kvd_ref ref;
        bool is_pin;    /* false: a block that we filled */
};

/*
 * One semaphore of our row. A stream is known by its id, which no other ever has: a handle is
 * another stream's after cuStreamDestroy, and the per-thread default stream is another one in each
 * thread.
 */
struct semaphore {
        uint64_t stream;
        uint64_t value; /* promised last, by us or by whoever had the row before */
        bool used;      /* by a stream of ours */
        uint32_t writers;      /* threads that are about to write it: until then it is that stream's */
        pthread_mutex_t order; /* writes come in the order of their values; may be held for long */
};

struct device {
        struct kvd_device gpu;
        _Atomic uint32_t drained;  /* drain_epoch that was followed; changed under kvd.lock */
        bool draining;             /* a thread unmaps what is wanted; under kvd.lock */
        /* segments that a thread has in the driver's hands, without kvd.lock; under it */
        uint64_t busy[KVD_MAX_SEGMENTS / 64];
        uint32_t n_busy;

        pthread_mutex_t lock;      /* of what follows; never held over a call of the driver */
        bool streams;              /* stream memory operations work here */
        cu_stream own;             /* then: of ours, with nothing in it, to ask about the context */
        shm_u64 *page;             /* owned mapping: the semaphore page; NULL: none came */
        uint64_t page_bytes;
        cu_address page_at;        /* for the device */
        uint32_t row;              /* ours */
        struct semaphore semaphores[SEMAPHORES];
        struct deferred *deferred; /* owned */
        uint32_t room;
        _Atomic uint32_t n_deferred; /* changed under lock */
        _Atomic uint32_t n_unpromised; /* of these */
};

/* memory_device.c */
bool device_drain_wanted(const struct view *view);
bool device_is_mapping(const struct view *view); /* a thread has segments in the driver's hands */
/*
 * Under kvd.lock, which it lets go of while the driver is at work: unmaps what the daemon wants
 * back, if no other thread is about to.
 */
void device_drain(struct view *view);

/* semaphore.c */
int semaphore_open(struct view *view, int fd, uint32_t row);
bool semaphore_is_quiet(const struct view *view); /* our streams promise nothing more */
/* waits for what our streams still promise; false: the driver fails */
bool semaphore_quiet(struct view *view);
void semaphore_close(struct view *view); /* waits likewise */
/*
 * Puts a write behind everything in the stream. -ENOTSUP: it cannot, and the stream was waited for
 * instead. -EBUSY: the stream is being captured, and nothing was done.
 */
int semaphore_promise(struct view *view, void *stream, struct promise *ret);
/* waits for it; if its context has failed, it is over, too. -EBUSY: it is being captured */
int semaphore_finish(struct view *view, void *stream);
int semaphore_wait(struct view *view, void *stream, uint32_t semaphore, uint64_t value);
/* of any row, as in descriptors */
uint64_t semaphore_reached(const struct view *view, uint32_t semaphore);
bool semaphore_passed(const struct view *view, struct promise until);

/* deferred.c */
/* a pin that is not needed behind what the stream has got; never fails, never breaks a capture */
void deferred_unpin(struct view *view, kvd_ref ref, void *stream);
void deferred_add(struct view *view, struct promise until, kvd_ref ref, bool is_pin);
uint32_t deferred_settle(struct view *view); /* lets go of what can be; how much still waits */
/* semaphore_quiet; false also: something waits for a stream that is being captured */
bool deferred_quiet(struct view *view);

/* stream.c */
void layer_lay_out(const struct kvd_index *ix, uint8_t *base, uint32_t layer,
                   struct kvd_layer_view *ret);

/*
 * seal.c; ids: NULL, or kvd_seal_keep's; until: NULL, or the promise that tells when the data is
 * there
 */
int seal_blocks(kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
                const uint32_t *tokens, uint32_t n_tokens, uint32_t *ids,
                const struct promise *until);
int seal_check(const kvd_space *space, const struct kvd_pin *pin, uint32_t n,
               const struct kvd_block *blocks, uint32_t n_tokens);

#endif
