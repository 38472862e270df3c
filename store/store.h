/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_STORE_H
#define KVD_STORE_STORE_H

/*
 * The store manages pool memory, spaces and blocks. It runs on one thread, without sockets,
 * messages or waiting.
 *
 *      store ── domain ── space ── segments, index, blocks, leases, exact copies, summaries
 *        │                  └───── attachment (one client's use of the space: pin page, blocks being filled)
 *        │                           └── sequence (a block table: private and borrowed blocks, steps, sketches)
 *        └───── jobs: work of a worker process for the store
 *
 * Results: 0 or a count; a negative errno for refusals and errors, with one line of text from
 * store_why(). Only calls that create something allocate memory: a space, an attachment, a
 * sequence, a sketch, a profile sample. Allocate, seal, append, sync, release, evict, lease, jobs
 * and check use preallocated memory.
 */

#include <stdbool.h>
#include <stdint.h>

#include "ipc/base/cost.h"
#include "ipc/base/layout.h"
#include "ipc/base/sequence.h"
#include "ipc/base/text.h"

struct keep_ops;
struct kvd_cuda;
struct store;
struct domain;
struct space;
struct attachment;

/* ---- store ----------------------------------------------------------------------------------- */

enum store_pages { STORE_PAGES_AUTO, STORE_PAGES_SMALL, STORE_PAGES_HUGE };

/* A GPU of the pool. */
struct store_gpu {
        int ordinal;
        uint8_t uuid[16];
};

struct store_config {
        uint64_t pool_bytes; /* maximum memory of all segments together */
        /* maximum of pool_bytes in store_resize: indexes have room for it; 0: pool_bytes */
        uint64_t pool_most;
        /* preferred size of a segment; rounded to whole blocks and pages */
        uint64_t segment_bytes;
        /* huge: reserved 2 MiB pages, or fail; auto: these if there are enough, or store_large's */
        enum store_pages pages;
        /* NUMA nodes on which the pool is, as a mask; 0: the kernel decides */
        uint64_t nodes;
        uint32_t max_attachments;    /* maximum number of clients of one space */
        uint32_t backend;            /* enum kvd_backend */
        const struct kvd_cuda *cuda; /* GPU backends: initialised, without a context */
        uint32_t n_gpus; /* GPU backends: their number; each has a shard of every block */
        struct store_gpu gpus[KVD_SHARDS];
        /* maximum memory of exact copies and sketches of all spaces; 0: as much as the pool */
        uint64_t spill_bytes;
        /* maximum memory outside of the pool, of all spaces; 0: half the pool, at least 2 GiB */
        uint64_t overhead_bytes;
        uint64_t max_files; /* maximum number of descriptors of all spaces; 0: no limit */
        /* GPU memory that is left free for contexts when the pool is made */
        uint64_t reserve_bytes;
        /* time that the GPU may take to stop the work of a process that has ended */
        uint64_t quarantine_ns;
        const struct keep_ops *keep; /* keeper of descriptors (keep.h); NULL: none */
        void *keep_arg;
        /*
         * the keeper's limit: bytes of all names, and the least that each one counts; 0: no limit
         */
        uint64_t keep_bytes, keep_least;
};

/* After an error, *ret may be a store that only store_why and store_free may be called on. */
int store_new(const struct store_config *config, struct store **ret);

/*
 * Leaves the spaces as they are for the next daemon, if there is a keeper: clients keep what they
 * have, although their connections are about to end.
 */
void store_hand_on(struct store *store);
struct store *store_free(struct store *store);

/* The reason for the last negative result, one line, without the function's name. */
const char *store_why(const struct store *store);

/*
 * With a keeper and a GPU, allocates the part of the pool that store_adopt did not take over, as
 * far as the driver has memory. Otherwise store_new has made the pool. Negative: there is no memory
 * at all.
 */
int store_make_memory(struct store *store);

/*
 * Sets a function that closes descriptors of large shared memory. Closing the last one makes the
 * kernel free all its pages, which takes long. Without this function the store closes them itself.
 */
void store_on_close(struct store *store, void (*called)(void *data, int fd), void *data);

/*
 * What gives shared memory pages of 2 MiB, outside of this thread. want: such pages are wanted for
 * that part of the file, whose bounds are multiples of 2 MiB; the descriptor is the store's. busy:
 * parts still wait. If it is not set, all pages are small ones, unless large ones are reserved.
 */
struct store_large {
        void (*want)(void *data, int fd, uint64_t from, uint64_t bytes);
        bool (*busy)(void *data);
        void *data;
};
void store_on_large(struct store *store, const struct store_large *large);

/*
 * Sets pool_bytes (a GPU's pool keeps its size) and spill_bytes, and adapts the spaces' limits to
 * these and to their domains' quotas. A pool shrinks piece by piece, in store_idle, as blocks can
 * be evicted. Returns the number of spaces whose index is too small for all the blocks that they
 * may now have. -E2BIG: larger than pool_most; -ENOMEM: there are too few 2 MiB pages.
 */
int store_resize(struct store *store, uint64_t pool_bytes, uint64_t spill_bytes);

uint64_t store_pool_bytes(const struct store *store);
uint64_t store_pool_most(const struct store *store);
uint64_t store_pool_used(const struct store *store);
const char *store_pages_name(const struct store *store); /* kind of pages in use, in words */
/* True: small pages are used, since there were too few 2 MiB pages (but some) at the start. */
bool store_wants_pages(const struct store *store);

/*
 * account.c: use in percent of the kind of cost that is closest to its limit, over all domains.
 * Only kinds that cannot be taken from one domain for another count.
 */
uint64_t store_most_used(const struct store *store);

/* Does a bounded piece of deferred work. True: call again when the caller is idle. */
bool store_idle(struct store *store);
uint64_t store_buried(const struct store *store); /* number of deleted spaces freed so far */

/*
 * space_wants_idle: the space may have deferred work, since it got a request or changed. While a
 * space is quiet, changes alone do not schedule it before the next look at pins.
 */
void space_wants_idle(struct space *space);
void space_be_quiet(struct space *space, bool quiet);

/* Work of timers is done in pieces, too. STORE_SOON: the round is not complete. */
enum store_again { STORE_DONE, STORE_LATER, STORE_SOON };

/*
 * Tells clients how many blocks they could allocate (kvd_available), and makes store_idle count
 * what their pins hold. STORE_DONE: there are no clients.
 */
enum store_again store_look_at_pins(struct store *store);

/* ---- domain ---------------------------------------------------------------------------------- */

struct domain_config {
        char name[KVD_NAME_MAX + 1];
        /* maximum pool bytes; also limits its share of all other costs (costs.def); 0: no limit */
        uint64_t quota;
        uint64_t guarantee; /* pool bytes reserved for it, and the same share of other costs */
        /* maximum bytes that one process may be filling in one space; 0: half of the space */
        uint64_t client_quota;
        bool arena; /* isolation = arena: clients map only their own segments writable */
        /* prefix of its blocks' names on the servers of the remote tier; "": the domain's name */
        char remote_prefix[KVD_NAME_MAX + 1];
};

/* Finds the domain with that name, or creates it. */
int store_domain(struct store *store, const struct domain_config *config, struct domain **ret);
struct domain *store_domain_by_name(struct store *store, const char *name);
const struct domain_config *domain_config(const struct domain *domain);

/* The next domain in order of creation; after NULL, the first one. NULL: there are no more. */
struct domain *store_next_domain(struct store *store, struct domain *domain);

/* account.c: for one kind of cost, in its unit: use, limit, and reserved amount */
uint64_t domain_used(const struct domain *domain, enum kvd_cost cost);
uint64_t domain_most(const struct domain *domain, enum kvd_cost cost);
uint64_t domain_guaranteed(const struct domain *domain, enum kvd_cost cost);

/* ---- space ----------------------------------------------------------------------------------- */

struct space_options {
        /* KVD_kind_*, KVD_keys_*, KVD_policy_* (ipc/base/enums.h); 0: the first one */
        uint32_t kind, keys, policy;
        uint64_t max_blocks; /* 0: as many as the domain's quota allows */
};

struct space_spec {
        char name[KVD_NAME_MAX + 1];
        struct kvd_shape geometry;
        struct space_options options;
};

/*
 * Finds the space with that name, or creates it. -EEXIST: it exists and differs in the field that
 * store_why() names; -ENOENT: it does not exist and create is false; -EINVAL; -EDQUOT, -ENOBUFS,
 * -ENOMEM.
 */
int space_open(struct domain *domain, const struct space_spec *spec, bool create,
               struct space **ret, bool *created);
struct space *space_by_name(struct domain *domain, const char *name);

/*
 * collect.c: call after space_open or attachment_new has failed for the domain with that error. If
 * deleting spaces without clients, other than `except`, can help, deletes the least recently used
 * one, whose resources are then freed in pieces, and returns -EINPROGRESS: call again. Else returns
 * error.
 */
int store_make_way(struct domain *domain, const struct space *except, int error);
/* The same for the limit of spaces of a domain. 0: one was deleted; -EDQUOT: all have clients. */
int domain_make_way(struct domain *domain);
uint64_t store_collected(const struct store *store); /* number of spaces deleted so to make room */

/*
 * Takes over a piece of a space from the previous daemon. True: the space is complete. An
 * incomplete space must not be attached to, changed or deleted.
 */
bool space_take_over(struct space *space);

/*
 * The first space of all domains, in order of creation, whose number is at least cursor, or NULL.
 */
struct space *store_next_space(struct store *store, uint32_t cursor);
/* NULL: it was deleted */
struct space *store_space_by_number(struct store *store, uint32_t number);

/*
 * The same for one domain, by place. Places count the spaces of the domain only, so they reveal
 * nothing about other domains. A place is never used again.
 */
struct space *domain_next_space(struct domain *domain, uint32_t cursor);
uint32_t space_place(const struct space *space);

uint32_t store_spaces(const struct store *store); /* number of spaces */
uint32_t domain_spaces(const struct domain *domain);

const char *space_name(const struct space *space);
struct domain *space_domain(const struct space *space);
uint32_t space_number(const struct space *space);
const struct kvd_index *space_index(const struct space *space); /* header, geometry, counters */
/* read-only descriptor for clients and workers */
int space_index_fd(const struct space *space);

struct space_usage {
        uint64_t total, free, filling, sealed, limbo; /* blocks; total is the sum of the others */
        uint64_t leaves, runs, leases;
        uint64_t max_blocks;
        uint32_t segments, attachments;
        uint64_t client_counters[KVD_CLIENT_WORDS]; /* sums of present and past clients */
        /* as in space_info_reply */
        uint64_t sequences, private, shared, spilled, vague, spill_slots;
        uint64_t pending, poisoned;
        uint64_t label_bytes, copy_bytes, sketch_bytes;
};
void space_get_usage(struct space *space, struct space_usage *ret);

/*
 * key: "policy" (value: a word of enums.h), "max_blocks" (at most the capacity of the index, or 0),
 * or a name of methods.def.
 */
int space_set(struct space *space, const char *key, const char *value);
/* Checks whether space_set would succeed; that does not depend on other settings. */
int space_check_setting(struct space *space, const char *key, const char *value);

/*
 * -EBUSY if it has attachments, unless force: then they end (mappings in client processes stay
 * valid). The space is gone at once; store_idle returns its memory to the pool.
 */
int space_delete(struct space *space, bool force);

/*
 * The descriptor of a segment to send to a client; *writable: the client may map it writable.
 * -ENOENT: no such segment; -ENODATA: it has no memory at present.
 */
int space_segment_fd(struct attachment *attachment, uint32_t segment, uint32_t shard,
                     bool *writable);

/*
 * GPU memory: the attachment has unmapped these segments. Writes the segments that it should unmap
 * next to wanted, and returns their number. (Host spaces have nothing to unmap.)
 */
uint32_t attachment_drain(struct attachment *attachment, const uint32_t *unmapped, uint32_t n,
                          uint32_t *wanted, uint32_t n_wanted);

/* ---- attachment ------------------------------------------------------------------------------ */

/*
 * process: identifies the client process; its limits apply to all of its attachments together.
 * gone, which may be NULL, is called when the space is deleted; the attachment is freed right after
 * that.
 */
int attachment_new(struct space *space, void *owner, uint64_t process,
                   void (*gone)(struct attachment *), struct attachment **ret);

/* It gets memory of that NUMA node first; 1 + the node, or 0: any. */
void attachment_near(struct attachment *attachment, uint32_t node);

/*
 * Ends an attachment: drops its pins, discards the blocks that it is filling, ends its leases. Only
 * when the process cannot touch the memory any more, because it has detached or the kernel says
 * that it is gone. died: count it as reaped. Returns NULL.
 */
struct attachment *attachment_free(struct attachment *attachment, bool died);

/*
 * The connection is lost but the process may still run: pins stay, blocks being filled go to limbo
 * until attachment_free, leases end.
 */
void attachment_orphan(struct attachment *attachment);

void *attachment_owner(const struct attachment *attachment);
struct space *attachment_space(const struct attachment *attachment);
int attachment_pin_fd(const struct attachment *attachment);
uint64_t attachment_pin_bytes(const struct attachment *attachment);
uint64_t attachment_filling(const struct attachment *attachment);
/* number of blocks that it fills, plus blocks that its pins hold, as the client reports */
uint64_t attachment_holds(const struct attachment *attachment);
/* number of blocks pinned directly at the last look at pins */
uint64_t attachment_pinned(const struct attachment *attachment);

/* A follower of the space begins or ends. While there is one, clients note their lookups. */
void space_follow(struct space *space, bool begins);

/*
 * Writes up to n ids of blocks at or after *cursor that it pins directly, and returns their number.
 * Looks at a bounded number of blocks and moves *cursor; 0: that was all.
 */
uint32_t attachment_pins(const struct attachment *attachment, uint32_t *cursor, uint32_t *ret,
                         uint32_t n);
/* the first n words of its page's counters, limited to plausible values */
void attachment_counters(const struct attachment *attachment, uint32_t n, uint64_t *ret);

/* ---- blocks ---------------------------------------------------------------------------------- */

/*
 * Allocates 1 to n blocks to fill and returns their number; -EDQUOT, -ENOBUFS as in kvd_alloc. 0:
 * stopped after a bounded amount of work without finding one; call again.
 */
int space_allocate(struct attachment *attachment, uint32_t n, kvd_ref *ret);

/*
 * While on, blocks that space_release takes from the attachment stay in limbo: GPU work of a dead
 * process may write them. Afterwards idle work frees them.
 */
void attachment_withhold(struct attachment *attachment, bool on);
/* Frees the blocks that this attachment is filling and ignores others. Returns the number freed. */
uint32_t space_release(struct attachment *attachment, const kvd_ref *blocks, uint32_t n);

struct seal_request {
        uint32_t group;
        kvd_ref parent; /* KVD_ROOT: start of a chain */
        uint64_t root;  /* causal: the salt; bidirectional: tokens of the whole prefix */
        struct kvd_key prefix_key;
        uint32_t n_blocks;
        const kvd_ref *blocks;
        uint32_t n_tokens;
        const uint32_t *tokens;
        uint32_t semaphore; /* as in message seal */
        uint64_t semaphore_value;
        const struct kvd_promise *promises; /* as in message seal */
        uint32_t n_promises;
};

/*
 * Publishes all blocks or none. ret[i] is the block that holds the content now: the one given, or
 * one that was sealed earlier with the same content. In that case the given block is still being
 * filled by the caller, which should release it. -ESTALE: a block is not being filled by the
 * caller, or the parent is gone; -EINVAL: wrong counts or tokens.
 */
int space_seal(struct attachment *attachment, const struct seal_request *request, kvd_ref *ret);

/*
 * Both seal the blocks that the client has posted (cache/post.c), the first after a message of the
 * client. False: there were none.
 */
bool attachment_was_kicked(struct attachment *attachment);
bool attachment_take_posts(struct attachment *attachment);
/* number of posts that were not taken yet, limited to the number of blocks that it is filling */
uint32_t attachment_posts(const struct attachment *attachment);

/* ---- semaphores of spaces on a GPU, see cache/semaphore.c ------------------------------------ */

int space_semaphore_fd(const struct space *space); /* the semaphore page; -1 in host spaces */
uint32_t attachment_semaphore_row(const struct attachment *attachment);
/* what promises of its streams name it by (struct kvd_promise) */
uint32_t attachment_writer_token(const struct attachment *attachment);

/* Number of blocks that wait for its streams first, and whose data is not known to be there yet. */
uint64_t attachment_pending(const struct attachment *attachment);

/*
 * The process is gone, and its GPU work is over, but the attachment stays, since others of its team
 * may use its blocks. Blocks that its streams have not written will never be complete.
 */
void attachment_streams_end(struct attachment *attachment);

/*
 * Finds blocks whose data has arrived, and frees poisoned blocks that are no longer pinned.
 * STORE_DONE: no block waits for data.
 */
enum store_again store_look_at_semaphores(struct store *store);

/*
 * Semaphores of a dead client whose waiters must be woken: a stream is to write words[2 * i + 1] to
 * semaphore words[2 * i] of the page. Only after store_set_wakes(true). One request at a time; if
 * it is done with false, store_next_wake returns it again.
 */
struct store_wake {
        int fd; /* the page's; owned by the space */
        uint64_t bytes;
        uint8_t device[16];
        uint32_t n;
        uint64_t words[128];
};
void store_set_wakes(struct store *store, bool wakes);
/* the function set by store_on_job is called when the first one is queued */
bool store_wants_wake(struct store *store);
bool store_next_wake(struct store *store, struct store_wake *ret);
void store_wake_done(struct store *store, bool done);

/* ---- leases on prefixes being computed (single flight) --------------------------------------- */

/*
 * 1: the caller has the lease (again); 0: another attachment holds it; -ENOBUFS: too many leases.
 */
int space_lease(struct attachment *attachment, struct kvd_key prefix, uint32_t prefix_tokens);
void space_lease_end(struct attachment *attachment, struct kvd_key prefix, uint32_t prefix_tokens);

/* ---- sessions of agents, see cache/session.c ------------------------------------------------- */

#define STORE_SESSION_TTL_S 604800u /* a week */

struct session_request {
        const char *name; /* 1 to KVD_NAME_MAX printable characters */
        uint32_t user;    /* sessions of different users are different, even with the same name */
        uint32_t keep;    /* enum of enums.h */
        uint32_t ttl_s;   /* 1 to STORE_SESSION_TTL_S */
        uint32_t n_blocks;
        const kvd_ref *blocks; /* the deepest block of each of its chains */
};

/*
 * Begins a session, or replaces what a session of that name names, says and is charged for. All or
 * nothing: -EINVAL; -ESTALE: a block is not cached; -EDQUOT: it would pin more than space or domain
 * may; -ENOBUFS: there are too many sessions or chains.
 */
int space_session(struct attachment *attachment, const struct session_request *request);
/* -ENOENT: the user has no such session. */
int space_session_end(struct space *space, uint32_t user, const char *name);

struct session_info {
        char name[KVD_NAME_MAX + 1];
        uint32_t user, keep;
        uint64_t blocks; /* of all of its chains, as far as they are left */
        uint64_t left_ms;
};
/* The first session at or after *cursor, of that user or of all of them; false: no more. */
bool space_next_session(const struct space *space, const uint32_t *user, uint32_t *cursor,
                        struct session_info *ret);

/* ---- sequences: block tables of requests, see ipc/base/sequence.h ---------------------------- */

/*
 * -EUSERS, -EDQUOT, -ENOMEM. Sequence numbers are unique in a space. The other calls accept only
 * sequences of the same attachment.
 */
int sequence_open(struct attachment *attachment, uint32_t max_blocks, uint32_t *ret);
int sequence_close(struct attachment *attachment, uint32_t number);

struct append_request {
        bool own; /* blocks that the caller fills; false: sealed ones that it pins */
        uint32_t n_blocks;
        const kvd_ref *blocks;
        uint32_t n_tokens;
        const uint32_t *tokens;
};

/*
 * Appends all blocks or none; *first is the entry number of the first one. -ESTALE, -EINVAL;
 * -ENOSPC: the table is full.
 */
int sequence_append(struct attachment *attachment, uint32_t number,
                    const struct append_request *request, uint32_t *first);

/* 1: the step will be compared; 0: nothing compares steps, or the step is too short. */
int sequence_share(struct attachment *attachment, uint32_t number, uint32_t first,
                   uint32_t n_tokens);

/*
 * taken[i]: the client took change i of the last reply. Changes beyond n_taken are proposed again.
 * Then writes up to KVD_SYNC_CHANGES changes to ret, and returns their number.
 */
int sequence_sync(struct attachment *attachment, uint32_t number, const uint32_t *taken,
                  uint32_t n_taken, struct kvd_change *ret);

/* State of a sequence, which its client gets with the changes. */
struct sequence_report {
        bool pending;          /* work that the client requested is not complete */
        uint64_t copy_bytes;   /* bytes of its exact copies */
        uint64_t sketch_bytes; /* bytes of its sketches */
};
void sequence_report(struct attachment *attachment, uint32_t number, struct sequence_report *ret);

/*
 * how: enum kvd_cool. Returns the number of entries that will leave. -EDQUOT, -ENOBUFS: none, since
 * the memory for copies is used up.
 */
int sequence_cool(struct attachment *attachment, uint32_t number, uint32_t how,
                  const uint32_t *entries, uint32_t n);

/*
 * how: enum kvd_revive. -ENODATA: only approximate contents were requested, and no sketch has them.
 */
int sequence_revive(struct attachment *attachment, uint32_t number, uint32_t how,
                    const uint32_t *entries, uint32_t n, uint32_t *exact, uint32_t *approx);

struct compact_request {
        uint32_t first, n; /* range of entries */
        uint32_t keep;     /* tokens */
        /*
         * blocks that the caller fills, and does not write until the compaction is complete: floats
         * [layer][head][token of the range]. None: the worker scores
         */
        uint32_t n_scores;
        const kvd_ref *scores;
};
/*
 * Packs the tokens of the range that each layer and head keeps, those of highest score, into fewer
 * blocks. Returns the number of entries that will change. -ENOBUFS, -EBUSY, -EOPNOTSUPP, -E2BIG,
 * -ESTALE.
 */
int sequence_compact(struct attachment *attachment, uint32_t number,
                     const struct compact_request *request);

struct critical_request {
        /* blocks that the caller fills, and does not write until the configuration is ready */
        uint32_t n_blocks;
        const kvd_ref *blocks;
        uint32_t queries, words, selected;
};
int sequence_critical(struct attachment *attachment, uint32_t number,
                      const struct critical_request *request);

/*
 * 1: layers[layers] and heads[layers * kv_heads] are written; 0: not ready yet; -ENODATA: it was
 * not requested.
 */
int sequence_sharing(struct attachment *attachment, uint32_t number, uint8_t *layers,
                     uint8_t *heads);

/* ---- profile of prefixes ---------------------------------------------------------------------- */

/*
 * One sample at r percent: blocks [layer group][prefix alone, whole input][n / groups / 2] that the
 * caller fills.
 */
int space_sample(struct attachment *attachment, uint32_t r, uint32_t n_tokens,
                 const kvd_ref *blocks, uint32_t n_blocks, uint64_t *ticket);
int space_sample_done(struct attachment *attachment, uint64_t ticket); /* 1: yes */

struct profile_report {
        uint32_t layers, def; /* def: 0 if there is no table, else as in message profile */
        uint8_t depth[101];
        uint32_t samples[101];
        /* number of floats in similarity: `layers` for each percent that has samples, ascending */
        uint32_t n_similarity;
        float similarity[15360]; /* mean similarities, by the space's setting sim */
};
void space_profile(struct space *space, struct profile_report *ret);
void space_profile_forget(struct space *space);
int space_profile_build(struct space *space); /* -ENODATA: there are no samples */
int space_profile_import(struct space *space, const uint8_t depth[101], uint32_t def);

/* ---- jobs: work of a worker process for the store -------------------------------------------- */

struct store_job {
        uint64_t id;
        struct space *space;
        uint32_t sketch; /* number of the sketch that it uses; 0: none */
        uint64_t bytes;  /* size of its arguments */
};

uint64_t store_jobs_waiting(const struct store *store);

/* Takes the next job and writes its arguments (ipc/base/job.h). False if none. */
bool store_next_job(struct store *store, void *arguments, struct store_job *ret);

/* The worker's reply. It is not trusted: sizes and numbers are checked against the request. */
void store_job_done(struct store *store, uint64_t id, int error, const void *result, size_t bytes);

/* The worker has done a piece of the job and paused it. */
void store_job_rests(struct store *store, uint64_t id);

/*
 * The worker is gone, according to the kernel. The job that it was running (0: none) is run again,
 * but only once; paused jobs are run again.
 */
void store_job_lost(struct store *store, uint64_t id);

/*
 * Sets a function that is called when the first job begins to wait, from inside requests and idle
 * work, but not from inside store_next_job, store_job_done and store_job_lost: their caller asks
 * for the next job afterwards.
 */
void store_on_job(struct store *store, void (*called)(void *data), void *data);

/* Descriptors that a worker needs; created at first use. */
int space_summary_fd(struct space *space, bool writable);
int space_copies_fd(struct space *space, uint64_t *bytes);
int space_sketch_fd(struct space *space, uint32_t sketch, uint64_t *bytes);
/* writable; -ENOENT, -ENODATA */
int space_worker_segment_fd(struct space *space, uint32_t segment);
/* version of the segment's memory, see kvd_index_memory; 0: it has none */
uint32_t space_memory_version(const struct space *space, uint32_t segment);

/* ---- GPU memory: clearing, legacy handles, unmapping ----------------------------------------- */

#define STORE_CLEARS 16u

struct store_clears {
        uint32_t dirty, clean; /* number of chunks not cleared yet, and of chunks ready to use */
        uint32_t missing;      /* number of chunks that the driver could not allocate */
};
void store_clears(const struct store *store, struct store_clears *ret);
bool store_has_device(const struct store *store);
bool store_wants_clearing(const struct store *store);

/* Memory to be filled with zeros, all on one GPU. The descriptors stay the store's. */
struct store_clear {
        int fds[STORE_CLEARS];
        uint32_t n;
        uint64_t bytes;        /* of each */
        const uint8_t *device; /* UUID of the GPU */
};
/* Returns whether there is some. Only one set at a time is handed out. */
bool store_next_clear(struct store *store, struct store_clear *ret);
void store_clear_done(struct store *store, bool cleared);
void store_clear_failed(struct store *store); /* do not try again before store_make_missing */

/*
 * KVD_BACKEND_LEGACY: an exporter process allocates, clears and keeps the memory, one numbered
 * piece for each space and GPU. If a number is requested again, its old memory is unused, and is
 * freed first.
 */
struct store_export {
        uint32_t number;
        uint64_t bytes;
        const uint8_t *device; /* UUID of the GPU */
};
bool store_has_exporter(const struct store *store);
bool store_next_export(struct store *store, struct store_export *ret);
void store_export_done(struct store *store, uint32_t number, const uint8_t handle[64]);
void store_exporter_gone(struct store *store); /* deletes every space */
/* a legacy handle of 64 bytes; NULL: the segment has none */
const uint8_t *space_segment_handle(const struct space *space, uint32_t segment, uint32_t shard);

/* A segment that the worker should unmap; false: none. */
bool store_next_unmap(struct store *store, struct space **space, uint32_t *segment);
void space_worker_unmapped(struct space *space, uint32_t segment);
/* the worker has no memory mapped and clears none any more */
void store_worker_gone(struct store *store);

/*
 * Tries again to allocate missing chunks and to get chunks cleared. Returns the number of chunks
 * that are still missing.
 */
uint32_t store_make_missing(struct store *store);

/* ---- eviction and inspection ----------------------------------------------------------------- */

/*
 * Evicts up to n unpinned blocks, coldest leaves first (n = 0: all), or the block chain and all
 * blocks behind it. Returns the number evicted. *more: stopped after a bounded amount of work; call
 * again.
 */
int64_t space_evict(struct space *space, uint64_t n, kvd_ref chain, bool *more);

#define STORE_MAP_PINNED 16u
#define STORE_MAP_LEAF 32u
/* used by a sequence or a job, or its data is still to come: not evicted */
#define STORE_MAP_KEPT 64u

/*
 * Writes the states of up to n blocks from first on: enum kvd_state, plus the flags above. Returns
 * the number of blocks, which is lower if there are many clients whose pins must be read; 0: no
 * more.
 */
struct map_room {
        uint8_t *states;
        uint32_t *parents; /* NULL, or ids of the parents; UINT32_MAX: none */
        uint8_t *ages;     /* NULL, or as in message block_map */
};
#define MAP_AGE_UNKNOWN 255u
uint32_t space_map(struct space *space, uint32_t first, uint32_t n, const struct map_room *to);

struct chain_info {
        kvd_ref leaf;
        uint32_t group, blocks, shared_blocks, pins, idle_ticks;
        uint64_t tokens;
        uint32_t head[32]; /* the first tokens */
        uint32_t n_head;
};
/*
 * Describes the chain of the first leaf at or after block *cursor, and moves *cursor behind the
 * leaf. -ENOENT: no such block. A call looks at a bounded number of blocks: if ret->leaf is 0, call
 * again with *cursor and *above as they are. *above must be 0 in the first call.
 */
int space_next_chain(struct space *space, uint32_t *cursor, uint32_t *above,
                     struct chain_info *ret);

struct check_report {
        uint32_t checked, broken; /* number of blocks checked; number of broken invariants */
        /* in the last piece: the space changed meanwhile, so sums over it were not compared */
        bool partial;
        char first[200]; /* the first broken invariant, in words */
};
/*
 * Checks a piece of the space from *cursor on (0 at the start) and moves *cursor, to 0 after the
 * last piece.
 */
void space_check(struct space *space, uint64_t *cursor, struct check_report *report);

#endif
