/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_FAKECUDA_DRIVER_H
#define KVD_TESTS_FAKECUDA_DRIVER_H

/*
 * A CUDA driver without a GPU: libcuda.so.1 on host memory, for tests. It has every function of
 * ipc/base/cuda.h, by cuGetProcAddress or by the name that cuda.h's macros give it. A device
 * address is an address of the process.
 *
 *      driver.c     start, devices, contexts, errors         stream.c   queues, a thread each; default streams
 *      faults.c     settings, injected faults, log           work.c     copies, writes and waits, host functions
 *      range.c      valid addresses                          event.c    events
 *      vmm.c        handles, reservations, mappings          launch.c   libraries, kernels
 *      cublas.c     libcublas.so.13, on top of run.h     capture.c  streams that are captured into graphs
 *      memory.c     cuMemAlloc, legacy handles, host memory  usage.c    memory in use, over all processes
 *      turns.c      turns of processes on a device
 *
 * Errors that the CUDA header promises are returned. Where the header leaves the behaviour open,
 * the strict choice applies:
 *
 *  - Fresh memory is full of 0xa5.
 *  - A copy with an address that belongs to no memory is CU_INVALID_VALUE at the call. A copy that,
 *    when it runs, exceeds the mapped memory or its access, and a kernel that faults, give error
 *    700. It is sticky: all work of the context is dropped, and every later call that needs a
 *    context returns it.
 *  - cuMemUnmap does not wait for work that still uses the memory (but FAKECUDA_WAITS). cuMemFree does.
 *  - Copies from and to host memory that is not registered wait until they are done.
 *  - One cuIpcCloseMemHandle undoes all opens of that memory in the process (observed on drivers,
 *    against the header).
 *  - Work for a stream that is being captured becomes a node of its graph, and is not done. A call
 *    that waits for such a stream or its context, or queries it, returns 900, and invalidates the
 *    capture. So do calls that map, unmap, register, allocate or free memory, or query an event, in
 *    a thread for which the capture's mode forbids this (cuThreadExchangeStreamCaptureMode), and
 *    use of the legacy default stream while a blocking stream is captured (906). Graphs are only
 *    numbers of nodes, and are never launched.
 *  - In a host function every call is CU_NOT_PERMITTED; in a child that was forked after cuInit,
 *    CU_NOT_INITIALIZED.
 *
 * Settings, from the environment, read at the first call:
 *
 *      FAKECUDA_DEVICES=n        1. 0: cuInit finds no device. CUDA_VISIBLE_DEVICES selects, by ordinal or GPU-UUID
 *      FAKECUDA_MEMORY=n[KMG]    of each device, together for all processes of the group: what is open or mapped in
 *                                any of them counts. Default 16G, counted for each process alone
 *      FAKECUDA_GROUP=[a-z0-9]+  all. Processes of different groups share nothing: neither memory nor handles
 *      FAKECUDA_VERSION=n        13000. cuGetProcAddress refuses newer versions with CU_NOT_FOUND, and functions that
 *                                came later
 *      FAKECUDA_VMM=0            no POSIX descriptors: cuMemCreate that asks for them is CU_NOT_SUPPORTED
 *      FAKECUDA_LEGACY=0         cuIpcGetMemHandle is CU_NOT_SUPPORTED
 *      FAKECUDA_STREAM_ORDER=0   cuStreamWriteValue64 and -Wait- are CU_NOT_SUPPORTED
 *      FAKECUDA_WAKE=write       a waiting stream continues after a cuStreamWriteValue64 to that word, by any process,
 *                                but does not notice a plain store. Default: it notices both
 *      FAKECUDA_STRICT=1         the processor cannot access device memory, except while a stream works on some (then
 *                                accesses are not noticed)
 *      FAKECUDA_REUSE=1          a new stream gets the handle of a destroyed one, as on drivers. Default: never
 *      FAKECUDA_FAIL=f:n=e,...   the n-th call of f in this process returns e and does nothing else; 700 and 719 stay.
 *                                f may be "execute": the n-th piece of work on a stream fails when its turn comes
 *      FAKECUDA_SLOW=w:ms,...    w (copy, set, kernel, host, write, context: making one) takes ms longer
 *      FAKECUDA_MIG=1            devices are MIG instances: by name, and CUDA_VISIBLE_DEVICES has MIG-UUIDs
 *      FAKECUDA_CONTEXT=n[KMG]   device memory that a process' primary context takes. Default: none
 *      FAKECUDA_OUTLIVES=1       work that a process had queued when it forked is done even if the process is killed,
 *                                as long as the child lives: it has the descriptors that keep the context. Default:
 *                                work of a killed process is never done
 *      FAKECUDA_SLICE=ms         a device does the kernels and sets of one process at a time, as a GPU without MPS does
 *                                (with slices of about 2 ms): in turns, each at most this long if another process needs
 *                                the device. Copies are not affected. Default: all processes at once
 *      FAKECUDA_SHARED=n[KMG]    the most shared memory that a block may have, the kernel's own included. Default: 227K
 *      FAKECUDA_DEPTH=n          a call that queues work on a stream waits while n pieces are queued there, as on a GPU
 *                                (about 1,024). Default: no limit
 *      FAKECUDA_FREE=alone       cuMemFree of memory that another process has open ends the calling process: the header
 *                                calls this undefined. Default: the other process keeps the memory
 *      FAKECUDA_WAITS=f,...      these functions wait until the context has no work left, as drivers may do to map or
 *                                unmap addresses (cuMemMap, cuMemSetAccess, cuMemUnmap). Default: none
 *      FAKECUDA_LOG=path         a line for each call: "pid function", and " = error" if it was injected
 */

#include <pthread.h>
#include <stdbool.h>
#include <sys/types.h>

#include "ipc/base/cuda.h"

#define DECLARE(name, version, parameters) \
        __attribute__((visibility("default"))) cu_result name parameters;
KVD_CUDA_CALLS(DECLARE)
#undef DECLARE

/* The symbol names of these functions. */
#define RENAME(name) extern __typeof__(name) name __asm__(#name "_v2");
RENAME(cuDeviceGetUuid)
RENAME(cuDeviceTotalMem)
RENAME(cuDevicePrimaryCtxRelease)
RENAME(cuCtxPushCurrent)
RENAME(cuCtxPopCurrent)
RENAME(cuMemGetInfo)
RENAME(cuMemAlloc)
RENAME(cuMemFree)
RENAME(cuMemHostRegister)
RENAME(cuMemHostGetDevicePointer)
RENAME(cuMemcpyHtoDAsync)
RENAME(cuMemcpyDtoHAsync)
RENAME(cuMemcpyDtoDAsync)
RENAME(cuIpcOpenMemHandle)
RENAME(cuStreamDestroy)
RENAME(cuStreamWriteValue64)
RENAME(cuStreamWaitValue64)
RENAME(cuEventDestroy)
#undef RENAME

/* Functions for graphs, which programs that use libkvd call, and kvd does not. */
cu_result cuStreamBeginCapture(cu_stream, int mode) __asm__("cuStreamBeginCapture_v2")
        __attribute__((visibility("default")));
cu_result cuStreamEndCapture(cu_stream, void **ret) __attribute__((visibility("default")));
cu_result cuGraphGetNodes(void *graph, void **nodes, size_t *n)
        __attribute__((visibility("default")));
cu_result cuGraphDestroy(void *graph) __attribute__((visibility("default")));

enum {
        CU_ILLEGAL_STATE = 401,
        CU_CAPTURE_UNMATCHED = 903,
        CU_CAPTURE_WRONG_THREAD = 908,
        CU_LAUNCH_OUT_OF_RESOURCES = 701,
        CU_CONTEXT_IS_DESTROYED = 709,
        CU_LAUNCH_FAILED = 719,
};

#define FAKE_DEVICES 8
#define FAKE_GRANULARITY ((size_t)2 << 20)
#define FAKE_PAGE ((size_t)4096)
#define FAKE_FRESH 0xa5

/* ---- the process ----------------------------------------------------------------------------- */

struct stream;

struct device {
        int number; /* among all devices, visible or not */
        struct cu_uuid uuid;
        unsigned retained;        /* references to its primary context by this process */
        _Atomic cu_result broken; /* sticky error of that context */
        struct stream *legacy;    /* default stream; NULL: not used yet */
        uint64_t used;            /* bytes, by this process */
        int context;              /* owned: the context's memory; 0: none */
};

struct fake {
        /* never changed after cuInit */
        pid_t pid; /* process that called cuInit; 0 if none */
        int n_devices;
        struct device devices[FAKE_DEVICES];

        /*
         * protects all other state of the process. changed: a stream progressed, or a context broke
         */
        pthread_mutex_t lock;
        pthread_cond_t changed;
};
extern struct fake fake;

/* device of the calling thread's context; NULL: none is current */
struct device *fake_current(void);
struct device *fake_device(cu_device it); /* NULL: no such */

/* Breaks a context, and wakes all that wait for it. lock is held. */
void fake_break(struct device *device, cu_result error);

/* ---- entry: every function of the driver begins with ENTER ----------------------------------- */

struct fake_entry {
        const char *name;
        _Atomic unsigned calls;
};

enum fake_needs { NEEDS_NOTHING, NEEDS_INIT, NEEDS_CONTEXT };

cu_result fake_enter(struct fake_entry *entry, enum fake_needs needs);

#define ENTER(function, needs) \
        do { \
                static struct fake_entry entry_ = {.name = #function}; \
                cu_result error_ = fake_enter(&entry_, needs); \
                if (error_) \
                        return error_; \
        } while (0)

/* The error for the n-th use of this name, or 0. */
cu_result fake_fault(const char *name, unsigned n);

struct fake_settings {
        int devices, version;
        uint64_t memory, depth, context, slice, shared;
        char group[17];
        bool shared_memory; /* counted over all processes */
        bool vmm, legacy, stream_order, only_writes_wake, strict, reuse_handles, free_alone,
                outlives, mig;
};
extern struct fake_settings fake_settings;
void fake_read_settings(void); /* once */

enum fake_work {
        WORK_COPY,
        WORK_SET,
        WORK_KERNEL,
        WORK_HOST,
        WORK_WRITE,
        WORK_CONTEXT,
        WORK_OTHER,
        N_WORK
};
void fake_delay(enum fake_work work);

/* ---- addresses: under lock ------------------------------------------------------------------- */

enum range_kind {
        RANGE_RESERVED = 1,
        RANGE_MAPPED = 2,    /* inside a reservation */
        RANGE_ALLOCATED = 4, /* cuMemAlloc */
        RANGE_OPENED = 8,    /* legacy handle */
        RANGE_HOST = 16,     /* cuMemHostAlloc */
        RANGE_REGISTERED = 32,
};
#define RANGE_OF_DEVICE (RANGE_MAPPED | RANGE_ALLOCATED | RANGE_OPENED)
#define RANGE_OF_HOST (RANGE_HOST | RANGE_REGISTERED)

struct memory;

struct range {
        struct range *next;
        enum range_kind kind;
        cu_address at;
        size_t bytes;
        int access; /* CU_ACCESS_... */
        struct device *device;
        struct memory *memory; /* RANGE_MAPPED: holds a reference */
        int fd;                /* RANGE_ALLOCATED, RANGE_OPENED: the memory; owned */
};

struct range *range_add(enum range_kind kind, cu_address at, size_t bytes, struct device *device);
void range_drop(struct range *range); /* removes it from the list; unmaps and closes nothing */
struct range *range_at(unsigned kinds, cu_address at);      /* that begins there */
struct range *range_holding(unsigned kinds, cu_address at); /* with this address in it */
struct range *range_first(unsigned kinds, const struct device *device);
struct range *range_of_file(unsigned kinds, int fd); /* with that file as memory */
struct range *range_overlapping(unsigned kinds, cu_address at, size_t bytes);

/* Whether the device may do this (CU_ACCESS_READ, CU_ACCESS_READ_WRITE) with every byte. */
bool range_allows(cu_address at, size_t bytes, int access);

/* Sets the processor's access: as set for the device, or none if strict and no stream works. */
void range_protect(struct range *range);
void ranges_in_use(bool begin); /* a stream begins or ends work on device memory */

/*
 * Calls each for the mappings that together are exactly [at, at + bytes). Returns false, without a
 * call, if there are none.
 */
bool range_each_mapped(cu_address at, size_t bytes, void (*each)(struct range *range, int data),
                       int data);

void memory_free_all(struct device *device); /* of a context: not that of handles */

/* ---- memory: under lock ---------------------------------------------------------------------- */

/* its name lets usage_bytes and imports find it */
int usage_memfd(const struct device *device, const char *kind);
bool usage_is_ours(int fd, const char *kind, int *device);
bool usage_fits(const struct device *device, uint64_t more);
uint64_t usage_bytes(const struct device *device);
/* does another process have this memory? */
bool usage_is_elsewhere(const struct device *device, int fd);

/* ---- streams --------------------------------------------------------------------------------- */

struct work {
        struct work *next;
        enum fake_work kind;
        /* on the stream's thread, without lock */
        cu_result (*run)(struct work *work, struct stream *stream);
        void (*done)(struct work *work); /* with lock; may be NULL */
        struct wait *waits;
        uint64_t number; /* position in its stream */
        union {
                struct {
                        cu_address to, from;
                        size_t bytes;
                        /* the side that need not be accessible to the device */
                        bool to_host, from_host;
                } copy;
                struct {
                        cu_address to;
                        size_t n;
                        unsigned value, size;
                } set;
                struct {
                        void (*called)(void *);
                        void *data;
                } host;
                struct {
                        cu_result (*run)(void *);
                        void *data; /* owned */
                } own;
                struct {
                        cu_address at;
                        uint64_t value;
                        unsigned flags;
                } word;
                struct {
                        struct event *event;
                } event;
                struct {
                        const struct fake_kernel *kernel;
                        unsigned grid[3], block[3];
                        size_t shared;
                        void *arguments; /* owned */
                } launch;
        };
};

struct stream {
        struct stream *next;
        struct device *device;
        bool blocking; /* synchronises with the legacy default stream */
        bool alive;    /* false: destroyed */
        /* its own address, or that of a destroyed stream; NULL: another stream has it now */
        cu_stream handle;
        uint64_t id; /* no other stream ever has it */
        bool started;
        struct work *first, *last;
        uint64_t submitted, done;
        _Atomic uint64_t *begun; /* FAKECUDA_OUTLIVES: pieces begun; shared with children */
        struct capture *capture; /* owned; NULL: not captured */
};

void streams_watch_forks(void); /* FAKECUDA_OUTLIVES */

/* The stream of a handle, in the current context; NULL if it was destroyed or never existed. */
struct stream *stream_find(cu_stream handle);

/*
 * Queues a copy of work. with: the work first waits until that stream has done `number` pieces; may
 * be NULL. If stream is NULL, returns an error.
 */
cu_result stream_append(struct stream *stream, const struct work *work, const struct stream *with,
                        uint64_t number); /* lock is held */
cu_result stream_submit(cu_stream handle, const struct work *work, const struct stream *with,
                        uint64_t number);
cu_result stream_submit_and_wait(cu_stream handle, const struct work *work);

/* lock is held; returns the context's error, if there is one. */
cu_result stream_wait(const struct stream *stream, uint64_t number);
cu_result stream_wait_all(struct device *device);
void stream_destroy_all(struct device *device);

/* ---- turns.c: without lock, around a piece of work of a stream's thread ----------------------- */

void turn_begin(const struct device *device);
void turn_look(void);     /* called during work: gives the turn up if the slice has ended */
void turn_end(bool more); /* more: another piece follows at once */
void turn_drop(const struct device *device); /* the piece announced with `more` does not come */

/* ---- capture.c: lock is held ----------------------------------------------------------------- */

/* *ret: the work is now a node and must not be done. An error: it may not be queued. */
cu_result capture_add(struct stream *stream, bool *ret);
cu_result capture_allows_waiting(const struct stream *stream);
cu_result capture_allows_waiting_for_all(const struct device *device);
/* Does the capture's mode let this thread make calls that may synchronise? lock is not held. */
cu_result capture_allows_unsafe(void);
struct stream *stream_next(const struct stream *after); /* of all; NULL: the first */

/* An unsafe call begins with this one instead of ENTER. */
#define ENTER_UNSAFE(function, needs) \
        do { \
                cu_result unsafe_; \
                ENTER(function, needs); \
                unsafe_ = capture_allows_unsafe(); \
                if (unsafe_) \
                        return unsafe_; \
        } while (0)

/* Does this thread run a stream's work, with calls forbidden? */
extern __thread bool fake_in_host_function;

#endif
