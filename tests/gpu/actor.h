/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_GPU_ACTOR_H
#define KVD_TESTS_GPU_ACTOR_H

/*
 * Processes that use the driver and do what the script of a check tells them, one action after the
 * other. The script itself never initialises the driver, so a CUDA error, a hang, or a kill affects
 * only the actor.
 *
 *      struct actor a = actor_start(), b = actor_start();
 *
 *      ask(&a, OPEN);
 *      ask(&a, CREATE, bytes);                 the note that comes back holds a descriptor
 *      ask(&b, IMPORT, bytes, CU_ACCESS_READ);   the descriptor of the last note goes along
 *
 * ask() returns the driver's result of what was done, or one of the numbers below zero. tell() only
 * sends; hear() takes the reply of an earlier tell().
 */

#include <stdint.h>
#include <sys/types.h>

#include "ipc/base/cuda.h"

enum { ACTOR_GONE = -1, ACTOR_LATE = -2 }; /* died; did not answer in time */

/* ACTION(name, arguments -> answers: numbers in order, and text if named) */
#define ACTIONS(ACTION) \
        ACTION(INIT, "-> ; cuInit, no context; text: name, path of the library") \
        ACTION(OPEN, "-> driver version, memory, capability; a context, two streams; text: the " \
                     "device's name") \
        ACTION(SEE_FREE, "-> free, total: bytes") \
        ACTION(CREATE, "bytes -> ns to create, to export; a descriptor") \
        ACTION(IMPORT, "bytes, access; a descriptor -> ns to import, reserve, map, set access") \
        ACTION(MAP, "access -> what it created, mapped") \
        ACTION(ACCESS, "access -> ; the same mapping, with another access") \
        ACTION(UNMAP, "-> ns to unmap, to release") \
        ACTION(ALLOC, "bytes -> ; cuMemAlloc; text: a legacy handle") \
        ACTION(LEGACY, "bytes; text: a legacy handle -> ns to open") \
        ACTION(UNLEGACY, "-> ns to close") \
        ACTION(FILL, "seed -> ; the whole mapping") \
        ACTION(CHECK, "seed -> words that differ, the first that does") \
        ACTION(SPOIL, "how, word -> result of the call, of waiting, of the call after; one store") \
        ACTION(HEALTH, "-> ; waits for the context") \
        ACTION(REGISTER, \
               "bytes, huge pages please; a descriptor of host memory -> ns to map, to register") \
        ACTION(UNREGISTER, "-> ns") \
        ACTION(WRITE, "where, slot, value -> when it was called; a stream's write") \
        ACTION(STORE, "slot, value -> when; a plain store to host memory") \
        ACTION(COPY, "where, slot, value -> when; a copy from the host") \
        ACTION(LOAD, "slot -> value; a plain load of host memory") \
        ACTION(AWAIT, "where, slot, value, ms -> when it was seen, ns from call to seen; " \
                      "CU_NOT_READY: still waits") \
        ACTION(REST, "ms -> when; what AWAIT left waiting") \
        ACTION(ECHO, "where, slot, value, slot, value -> ; on the stream: wait for the first, " \
                     "write the second") \
        ACTION(PUBLISH, "where, slot, value, seed -> ; the mapping is filled, then the slot " \
                        "written, by one stream") \
        ACTION(CONSUME, "where, slot, value, seed, ms -> words that differ; waits for the slot, " \
                        "then copies out") \
        ACTION(BEAT, "n -> ; starts the kernel that counts in host memory and in the mapping") \
        ACTION(SETS, "n -> ; queues n fillings of the mapping, the i-th with i") \
        ACTION(FORK, "-> process id of a child that does nothing") \
        ACTION(PEEK, "-> the mapping's first word") \
        ACTION(SPREAD, "most, ms -> mappings of one handle, ns of the last; until it fails") \
        ACTION(IMAGE, \
               "which -> ns to load, words wrong; text: what failed; 0 default, 1 compressed") \
        ACTION(BATCH, \
               "version, n, bytes -> ns, wrong, address of the function; text: what failed") \
        ACTION(RATE, "bytes, to the device -> bytes a second between registered host memory and " \
                     "the mapping") \
        ACTION(JOIN, "text: a daemon's socket -> memory, legacy, streams order; opens a space " \
                     "there, and its device") \
        ACTION(PUT, "seed, blocks, work before it -> blocks sealed, ns of the seal; a stream " \
                    "fills and seals them") \
        ACTION(FIND, "seed, blocks -> tokens found, ns to look up, to wait, to the end of the " \
                     "first use, words wrong") \
        ACTION(READ, "seed, ms -> words that differ in what FIND holds; CU_NOT_READY after ms") \
        ACTION(JUDGE, "-> what kvd_check_pin says of it, as errno") \
        ACTION(DROP, "-> still held; lets go")

enum action {
#define ACTION(name, text) name,
        ACTIONS(ACTION)
#undef ACTION
                N_ACTIONS
};

/* How SPOIL stores. */
enum { BY_MEMSET, BY_COPY, BY_KERNEL };

/* Where a slot is. */
enum { IN_DEVICE, IN_HOST };

/* Slots of the registered host memory that report progress. */
#define HEART_SLOT 8    /* BEAT, SETS: number of writes done */
#define STOP_SLOT 9     /* BEAT: ends when this is not 0 */
#define QUEUED_SLOT 10  /* SETS: number of writes queued, including those done */
#define WAITING_SLOT 15 /* AWAIT: the value that it waits for */

struct note {
        uint32_t action;
        int32_t result;
        uint64_t n[8];
        char text[200];
};

struct actor {
        pid_t pid;
        int socket;
        int fd;           /* of the last note that had one; owned; sent with the next note */
        struct note note; /* the last one heard */
};

struct actor actor_start(void);
void actor_stop(struct actor *a); /* kills and reaps it */

/* The user id of actors that are started afterwards. 0: ours. */
void actor_user(uid_t uid);

#define tell(a, ...) actor_tell(a, (struct note){TOLD(__VA_ARGS__, 0, 0, 0, 0, 0, 0)})
#define ask(a, ...) actor_ask(a, (struct note){TOLD(__VA_ARGS__, 0, 0, 0, 0, 0, 0)})
#define TOLD(action, a, b, c, d, e, ...) (action), 0, {(a), (b), (c), (d), (e)}, ""

void actor_tell(struct actor *a, struct note note);
int actor_hear(struct actor *a, int ms);
int actor_ask(struct actor *a, struct note note); /* times out after 70 s by default */
void actor_patience(int ms);                      /* sets another time limit */
/* sends a duplicate of fd with the next note */
void actor_lend(struct actor *to, int fd);

/* The result as text: "CUDA_ERROR_INVALID_VALUE", "the process is gone". Static memory. */
const char *actor_word(int result);

/* CLOCK_MONOTONIC, which is the same for all actors. */
uint64_t now_ns(void);
void sleep_ms(unsigned ms);

/* ---- between the actors' files --------------------------------------------------------------- */

struct stage { /* state of an actor; see ACTIONS */
        const struct kvd_cuda *cuda;
        cu_device device;
        cu_context context;
        cu_stream streams[2]; /* 0: for waits, 1: for everything else */
        cu_memory memory;     /* created or imported */
        cu_address at;        /* address of the mapping */
        uint64_t bytes, reserved;
        bool legacy, imported;
        uint64_t *host; /* registered host memory */
        uint64_t host_bytes;
        cu_address host_at; /* its address for the device */
        cu_library library;
        struct member *member; /* of a daemon's space; act_pool.c */
        int fd;                /* came with the note, or is sent with the reply */
};

typedef void action_function(struct stage *s, struct note *note);
extern action_function *const actions_of_memory[N_ACTIONS],
        *const actions_of_order[N_ACTIONS], *const actions_of_images[N_ACTIONS];

/* Adds actions for actors that are started afterwards. */
void actor_more(action_function *const *more);

int stage_open(struct stage *s);
cu_address stage_slot(const struct stage *s, uint64_t where, uint64_t slot);
/* launches one block of 256 threads */
int stage_launch(struct stage *s, const char *kernel, const void *arguments);
int stage_launch_on(struct stage *s, const char *kernel, unsigned blocks, cu_stream stream,
                    const void *arguments);

#endif
