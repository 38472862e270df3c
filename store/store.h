/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_STORE_H
#define KVD_STORE_STORE_H

/*
 * The store: pool memory, spaces, blocks, and what is in them. One thread, no sockets, no messages,
 * no waiting.
 *
 *      store ── domain ── space ── segments, index, blocks, leases, exact copies, summaries
 *        │                  └───── attachment (one client's use of the space: pin page, blocks being filled)
 *        │                           └── sequence (its own table: private and borrowed blocks, steps, sketches)
 *        └───── jobs: what a worker does for all of it
 *
 * Results: 0 or a count; negative errno for refusals and trouble, with one line in words from
 * store_why(). Nothing allocates but what makes something: a space, an attachment, a sequence, a
 * sketch, a profile sample. Allocate, seal, append, sync, release, evict, lease, jobs and check
 * work on memory that was set aside before.
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

struct store_config {
        uint64_t pool_bytes;     /* most memory that all segments together may have */
        /* what store_resize may make of that: indexes have room for it; 0: pool_bytes */
        uint64_t pool_most;
        /* wanted size of a segment; rounded so that blocks and pages fit */
        uint64_t segment_bytes;
        /* huge: reserved 2 MiB pages or nothing; auto: them if there are enough */
        enum store_pages pages;
        uint32_t max_attachments; /* clients of one space */
        uint32_t backend;        /* enum kvd_backend */
        const struct kvd_cuda *cuda; /* not KVD_BACKEND_HOST: initialised, without a context */
        int device;              /* ordinal */
        uint8_t uuid[16];
        /* most memory of exact copies and sketches, of all spaces; 0: as much as the pool */
        uint64_t spill_bytes;
        /* most memory beside the pool, of all spaces; 0: half of the pool, 2 GiB or more */
        uint64_t overhead_bytes;
        uint64_t max_files;      /* descriptors of all spaces; 0: any number */
        /* GPU memory that is left free when the pool is made, for contexts */
        uint64_t reserve_bytes;
        /* that the GPU may need to stop what a process queued there, once that has ended */
        uint64_t quarantine_ns;
        const struct keep_ops *keep; /* what outlives the daemon (keep.h); NULL: nothing */
        void *keep_arg;
        /* the keeper's room: bytes of all names, and what each counts for at least; 0: no limit */
        uint64_t keep_bytes, keep_least;
};

/* On failure *ret may be a store that takes only store_why and store_free. */
int store_new(const struct store_config *config, struct store **ret);

/*
 * With somebody who keeps them, spaces stay as they are, for the next daemon: what clients have is
 * theirs still, though their connections are about to end.
 */
void store_hand_on(struct store *store);
struct store *store_free(struct store *store);

/* The reason of the last negative result, one line, without the function's name. */
const char *store_why(const struct store *store);

/*
 * A GPU's pool that somebody keeps is made here, behind store_adopt: as much of it as can be had that
 * is not there. Otherwise store_new has done so. Negative: nothing is there, and why.
 */
int store_make_memory(struct store *store);

/*
 * Who closes shared memory that is large: with its last descriptor the kernel frees all its pages,
 * and nobody should wait for that. Until somebody is named, the store closes it itself.
 */
void store_on_close(struct store *store, void (*called)(void *data, int fd), void *data);

/*
 * Another pool_bytes (a GPU's pool keeps its own), and another spill_bytes; and spaces are fitted to
 * these and to their domains' quotas. A smaller pool comes about piece by piece, in store_idle, as
 * blocks can be evicted. Returns how many spaces cannot grow into all that they may have, since
 * their indexes were made for less. -E2BIG: larger than pool_most; -ENOMEM: there are not as many
 * 2 MiB pages.
 */
int store_resize(struct store *store, uint64_t pool_bytes, uint64_t spill_bytes);

uint64_t store_pool_bytes(const struct store *store);
uint64_t store_pool_most(const struct store *store);
uint64_t store_pool_used(const struct store *store);
const char *store_pages_name(const struct store *store); /* kind of pages in use, in words */
/* Some large pages were there when the pool was made, but not enough, and small ones are used. */
bool store_wants_pages(const struct store *store);

/* account.c: how much is used, in percent, of that kind of cost of which least is left; of all
 * domains, and of those that never change hands */
uint64_t store_most_used(const struct store *store);

/*
 * What can wait: a bounded piece, of one space. True: call again when there is nothing else to do.
 */
bool store_idle(struct store *store);
uint64_t store_buried(const struct store *store); /* deleted spaces that it has freed so far */

/*
 * The space may have such work: somebody asked something of it, or changed it. As long as it is to
 * be quiet, changes alone do not give it some before the next look at pins.
 */
void space_wants_idle(struct space *space);
void space_be_quiet(struct space *space, bool quiet);

/* What timers ask for is done in pieces, too. */
enum store_again { STORE_DONE, STORE_LATER, STORE_SOON }; /* SOON: the round is not over */

/*
 * Tells clients how many blocks they could have (kvd_available); what pins hold is counted by
 * store_idle afterwards. STORE_DONE: there are no clients.
 */
enum store_again store_look_at_pins(struct store *store);

/* ---- domain ---------------------------------------------------------------------------------- */

struct domain_config {
        char name[KVD_NAME_MAX + 1];
        /* most pool bytes, and that share of everything else (costs.def); 0: all of it */
        uint64_t quota;
        uint64_t guarantee;    /* pool bytes that are kept for it, and that share of the rest */
        /* most bytes that one process may be filling in one space; 0: half of the space */
        uint64_t client_quota;
        bool arena;            /* isolation: only the writer's own segments are mapped writable */
        /* of its blocks' names on the servers of the remote tier; "": its own name */
        char remote_prefix[KVD_NAME_MAX + 1];
};

/* Finds the domain of that name, or makes it. */
int store_domain(struct store *store, const struct domain_config *config, struct domain **ret);
struct domain *store_domain_by_name(struct store *store, const char *name);
const struct domain_config *domain_config(const struct domain *domain);

/* In the order they were made: from NULL on, the first one; NULL: there are no more. */
struct domain *store_next_domain(struct store *store, struct domain *domain);

/* account.c: of one kind of cost, in bytes or numbers */
uint64_t domain_used(const struct domain *domain, enum kvd_cost cost);
uint64_t domain_most(const struct domain *domain, enum kvd_cost cost);
uint64_t domain_guaranteed(const struct domain *domain, enum kvd_cost cost);

/* ---- space ----------------------------------------------------------------------------------- */

struct space_options {
        /* KVD_kind_*, KVD_keys_*, KVD_policy_* (ipc/base/enums.h); 0: the first */
        uint32_t kind, keys, policy;
        uint64_t max_blocks;         /* 0: what the domain's quota allows */
};

struct space_spec {
        char name[KVD_NAME_MAX + 1];
        struct kvd_shape geometry;
        struct space_options options;
};

/*
 * -EEXIST: there is one, and it differs in the field that store_why() names; -ENOENT: create is
 * false; -EINVAL; -EDQUOT, -ENOBUFS, -ENOMEM.
 */
int space_open(struct domain *domain, const struct space_spec *spec, bool create,
               struct space **ret, bool *created);
struct space *space_by_name(struct domain *domain, const char *name);

/*
 * collect.c: space_open or attachment_new was refused to the domain with that error. If deleting spaces
 * without clients, other than `except`, will help, the one that was not used for longest goes, and
 * what it had comes free in pieces: -EINPROGRESS; call again. Else the error.
 */
int store_make_way(struct domain *domain, const struct space *except, int error);
/* The same for the number of its spaces: -EDQUOT: all have clients; 0: one has gone. */
int domain_make_way(struct domain *domain);
uint64_t store_collected(const struct store *store); /* spaces that were removed to make room so far */

/*
 * Takes over a piece of what the previous daemon had in the space. True: the space is complete. An
 * incomplete space must not be attached to, changed or deleted.
 */
bool space_take_over(struct space *space);

/*
 * Every space of every domain, in the order they were made: the one whose number is at least
 * cursor, or NULL.
 */
struct space *store_next_space(struct store *store, uint32_t cursor);

/*
 * The same of one domain, by their places in it, which tell nothing of other domains: a space keeps
 * its place while it lives, and nobody gets it after that.
 */
struct space *domain_next_space(struct domain *domain, uint32_t cursor);
uint32_t space_place(const struct space *space);

uint32_t store_spaces(const struct store *store); /* how many there are */
uint32_t domain_spaces(const struct domain *domain);

const char *space_name(const struct space *space);
struct domain *space_domain(const struct space *space);
uint32_t space_number(const struct space *space);
const struct kvd_index *space_index(const struct space *space); /* header, geometry, counters */
/* read-only descriptor for clients */
int space_index_fd(const struct space *space);

struct space_usage {
        uint64_t total, free, filling, sealed, limbo; /* blocks; total is the sum of the others */
        uint64_t leaves, runs, leases;
        uint64_t max_blocks;
        uint32_t segments, attachments;
        uint64_t client_counters[KVD_CLIENT_WORDS]; /* attached now and in the past */
        /* as in space_info_reply */
        uint64_t sequences, private, shared, spilled, vague, spill_slots;
        uint64_t pending, poisoned;
        uint64_t label_bytes, copy_bytes, sketch_bytes;
};
void space_get_usage(struct space *space, struct space_usage *ret);

/*
 * key: "policy" (a word of enums.h), "max_blocks" (at most the capacity of the index, or 0), or one of
 * settings.def.
 */
int space_set(struct space *space, const char *key, const char *value);
/* Whether that can be done: what it refuses does not depend on other settings. */
int space_check_setting(struct space *space, const char *key, const char *value);

/*
 * -EBUSY while it has attachments, unless force: those then end (their mappings stay valid for
 * their owners). The space is gone at once; its memory is given back to the pool by store_idle.
 */
int space_delete(struct space *space, bool force);

/*
 * Segments: descriptor to hand out, writable for the attachment or read-only. -ENOENT: no such
 * segment; -ENODATA: it has no memory at present.
 */
int space_segment_fd(struct attachment *attachment, uint32_t segment, bool *writable);

/*
 * GPU memory: the attachment has unmapped these; those that it should unmap next are written to
 * wanted. Returns how many. (In host spaces there is nothing to unmap.)
 */
uint32_t attachment_drain(struct attachment *attachment, const uint32_t *unmapped, uint32_t n,
                          uint32_t *wanted, uint32_t n_wanted);

/* ---- attachment ------------------------------------------------------------------------------ */

/*
 * process: whose it is; what one process may have is counted over all of its attachments. gone is
 * called when the space is deleted under the attachment, which is freed right after. May be NULL.
 */
int attachment_new(struct space *space, void *owner, uint64_t process,
                   void (*gone)(struct attachment *), struct attachment **ret);

/*
 * Ends it: pins count no longer, blocks being filled are discarded, leases end. Only when the
 * process cannot touch the memory any more: it said so, or the kernel says that it is gone. died
 * counts it as reaped. Returns NULL.
 */
struct attachment *attachment_free(struct attachment *attachment, bool died);

/*
 * Its connection is lost but its process may still run: pins count on, blocks being filled go to
 * limbo until attachment_free, leases end.
 */
void attachment_orphan(struct attachment *attachment);

void *attachment_owner(const struct attachment *attachment);
struct space *attachment_space(const struct attachment *attachment);
int attachment_pin_fd(const struct attachment *attachment);
uint64_t attachment_pin_bytes(const struct attachment *attachment);
uint64_t attachment_filling(const struct attachment *attachment);
/* blocks that it fills, and those that its pins hold, as it says itself */
uint64_t attachment_holds(const struct attachment *attachment);
/* blocks pinned directly, when pins were last looked at, which is when their client says so */
uint64_t attachment_pinned(const struct attachment *attachment);

/* Somebody begins to read what is looked up, or ends: clients note it meanwhile. */
void space_follow(struct space *space, bool begins);

/*
 * Blocks at or after *cursor that it pins directly, up to n; looks at so many, moves the cursor; 0:
 * that was all.
 */
uint32_t attachment_pins(const struct attachment *attachment, uint32_t *cursor, uint32_t *ret,
                         uint32_t n);
/* the first n words that it counts in, cut to what can be true */
void attachment_counters(const struct attachment *attachment, uint32_t n, uint64_t *ret);

/* ---- blocks ---------------------------------------------------------------------------------- */

/*
 * Gives 1 to n blocks to fill; -EDQUOT, -ENOBUFS as in kvd_alloc. 0: it stopped after a bounded
 * amount of work; there may be one, so ask again.
 */
int space_allocate(struct attachment *attachment, uint32_t n, kvd_ref *ret);

/* Frees those that this attachment is filling; returns how many. Others are ignored. */
uint32_t space_release(struct attachment *attachment, const kvd_ref *blocks, uint32_t n);

struct seal_request {
        uint32_t group;
        kvd_ref parent;          /* KVD_ROOT: start of a chain */
        uint64_t root;           /* causal: the salt; bidirectional: tokens of the whole prefix */
        struct kvd_key prefix_key;
        uint32_t n_blocks;
        const kvd_ref *blocks;
        uint32_t n_tokens;
        const uint32_t *tokens;
        uint32_t semaphore;     /* as in message seal */
        uint64_t semaphore_value;
};

/*
 * Publishes all blocks or none. ret[i] is the block that holds the content now: the one given, or
 * one that was sealed before with the same content (then the given one is still being filled by the
 * caller, who releases it). -ESTALE: a block or the parent is not what the caller thinks; -EINVAL:
 * counts, tokens.
 */
int space_seal(struct attachment *attachment, const struct seal_request *request, kvd_ref *ret);

/*
 * Seals what the client has posted; it said that it had, or something else. See cache/post.c. False:
 * it had posted nothing.
 */
bool attachment_was_kicked(struct attachment *attachment);
bool attachment_take_posts(struct attachment *attachment);
/* that were not taken yet; not more than blocks that it is filling */
uint32_t attachment_posts(const struct attachment *attachment);

/* ---- semaphores of spaces on a GPU, see device/semaphore.c ----------------------------------- */

int space_semaphore_fd(const struct space *space); /* their page; -1 in host memory */
uint32_t attachment_semaphore_row(const struct attachment *attachment);

/* Blocks that it sealed and whose data is not known to be there. */
uint64_t attachment_pending(const struct attachment *attachment);

/*
 * Finds out whose data has come, and frees what is poisoned and no longer pinned. STORE_DONE: no
 * data is still to come.
 */
enum store_again store_look_at_semaphores(struct store *store);

/*
 * Semaphores whose waiters are to be woken by a stream's write of words[2 * i + 1] to semaphore
 * words[2 * i] of the page, after a client died. Only if somebody does that: store_set_wakes. One
 * at a time; done: false, it will be asked again.
 */
struct store_wake {
        int fd;          /* the space's */
        uint64_t bytes;
        uint8_t device[16];
        uint32_t n;
        uint64_t words[128];
};
void store_set_wakes(struct store *store, bool wakes);
/* store_on_job's function was called when the first one came */
bool store_wants_wake(struct store *store);
bool store_next_wake(struct store *store, struct store_wake *ret);
void store_wake_done(struct store *store, bool done);

/* ---- leases on prefixes being computed (single flight) --------------------------------------- */

/*
 * 1: granted (again, if the caller has it); 0: somebody else holds it; -ENOBUFS: too many leases at
 * once.
 */
int space_lease(struct attachment *attachment, struct kvd_key prefix, uint32_t prefix_tokens);
void space_lease_end(struct attachment *attachment, struct kvd_key prefix, uint32_t prefix_tokens);

/* ---- sequences: a client's own tables, see ipc/base/sequence.h ------------------------------- */

/*
 * -EUSERS, -EDQUOT, -ENOMEM. Numbers are the space's; a sequence takes requests of its own
 * attachment only.
 */
int sequence_open(struct attachment *attachment, uint32_t max_blocks, uint32_t *ret);
int sequence_close(struct attachment *attachment, uint32_t number);

struct append_request {
        bool own;                /* false: sealed blocks that the caller pins */
        uint32_t n_blocks;
        const kvd_ref *blocks;
        uint32_t n_tokens;
        const uint32_t *tokens;
};

/*
 * All blocks or none; *first is the entry of the first one. -ESTALE, -EINVAL, -ENOSPC: the table is
 * full.
 */
int sequence_append(struct attachment *attachment, uint32_t number,
                    const struct append_request *request, uint32_t *first);

/* MemShare. 1: the step will be compared; 0: memshare is off, or the step too short. */
int sequence_share(struct attachment *attachment, uint32_t number, uint32_t first,
                   uint32_t n_tokens);

/*
 * taken[i] says whether the client took change i of the last answer; they are settled in order,
 * missing ones are proposed again. Then writes up to KVD_SYNC_CHANGES new ones. Returns how many.
 */
int sequence_sync(struct attachment *attachment, uint32_t number, const uint32_t *taken,
                  uint32_t n_taken, struct kvd_change *ret);

/* A client is told this of its sequence beside the changes. */
struct sequence_report {
        /* something that it asked for, or that follows from it, is still under way */
        bool pending;
        uint64_t copy_bytes;     /* of its exact copies */
        uint64_t sketch_bytes;
};
void sequence_report(struct attachment *attachment, uint32_t number, struct sequence_report *ret);

/* how: enum kvd_cool. Returns how many entries will leave. */
int sequence_cool(struct attachment *attachment, uint32_t number, uint32_t how,
                  const uint32_t *entries, uint32_t n);

/*
 * how: enum kvd_revive. -ENODATA: approximately was all that was asked for, and it cannot be had.
 */
int sequence_revive(struct attachment *attachment, uint32_t number, uint32_t how,
                    const uint32_t *entries, uint32_t n, uint32_t *exact, uint32_t *approx);

/*
 * KeyDiff: packs what each layer and head keeps of the range's tokens into fewer blocks. Returns
 * how many entries will change. -ENOBUFS, -EBUSY, -EOPNOTSUPP.
 */
int sequence_compact(struct attachment *attachment, uint32_t number, uint32_t first, uint32_t n,
                     uint32_t keep);

struct critical_request {
        /* that the caller is filling, and leaves alone until the configuration is there */
        uint32_t n_blocks;
        const kvd_ref *blocks;
        uint32_t queries, words, selected;
};
int sequence_critical(struct attachment *attachment, uint32_t number,
                      const struct critical_request *request);

/*
 * 1: layers[layers] and heads[layers * kv_heads] are written; 0: not made yet; -ENODATA: nobody
 * asked for it.
 */
int sequence_sharing(struct attachment *attachment, uint32_t number, uint8_t *layers,
                     uint8_t *heads);

/* ---- BiCache's profile ----------------------------------------------------------------------- */

/*
 * One sample at r percent: blocks [layer group][prefix alone, whole input][n / groups / 2] that the
 * caller fills.
 */
int space_sample(struct attachment *attachment, uint32_t r, uint32_t n_tokens,
                 const kvd_ref *blocks, uint32_t n_blocks, uint64_t *ticket);
int space_sample_done(struct attachment *attachment, uint64_t ticket); /* 1: yes */

struct profile_report {
        uint32_t layers, def;    /* def: 0 there is no table */
        uint8_t depth[101];
        uint32_t samples[101];
        /* floats in similarity: layers for each percent that has samples, ascending */
        uint32_t n_similarity;
        float similarity[15360]; /* means by the space's bicache.sim */
};
void space_profile(struct space *space, struct profile_report *ret);
void space_profile_forget(struct space *space);
int space_profile_build(struct space *space); /* -ENODATA: there are no samples */
int space_profile_import(struct space *space, const uint8_t depth[101], uint32_t def);

/* ---- jobs: what a worker does for the store -------------------------------------------------- */

struct store_job {
        uint64_t id;
        struct space *space;
        uint32_t sketch;         /* number; 0: none */
        uint64_t bytes;          /* of its arguments */
};

uint64_t store_jobs_waiting(const struct store *store);

/*
 * Takes the next job and writes its arguments (ipc/base/job.h). False: there is none, or its space
 * is gone.
 */
bool store_next_job(struct store *store, void *arguments, struct store_job *ret);

/* The worker's answer; it is not trusted: sizes and numbers are compared with what was asked. */
void store_job_done(struct store *store, uint64_t id, int error, const void *result, size_t bytes);

/* It has done a piece of the job, and rests. */
void store_job_rests(struct store *store, uint64_t id);

/*
 * The worker is gone, as the kernel says: the job that it was at (0: none) is done again, once, and
 * those that rest are done again.
 */
void store_job_lost(struct store *store, uint64_t id);

/*
 * Called from inside requests and idle work when the first job begins to wait; not from inside
 * store_next_job, store_job_done and store_job_lost: who calls these asks for the next job
 * afterwards.
 */
void store_on_job(struct store *store, void (*called)(void *data), void *data);

/* Descriptors that a worker needs; made at first use. */
int space_index_fd_for_worker(struct space *space); /* read-only */
int space_summary_fd(struct space *space, bool writable);
int space_tier_fd(struct space *space, uint32_t tier, uint64_t *bytes); /* of enum kvd_tier */
int space_sketch_fd(struct space *space, uint32_t sketch, uint64_t *bytes);
/* writable; -ENOENT, -ENODATA */
int space_worker_segment_fd(struct space *space, uint32_t segment);
/* moves with its memory; 0: it has none */
uint32_t space_memory_version(const struct space *space, uint32_t segment);

/* ---- GPU memory: what a worker does for it, and what takes time ------------------------------ */

#define STORE_CLEARS 16u

struct store_clears {
        uint32_t dirty, clean;   /* chunks: not cleared yet, ready */
        uint32_t missing;        /* that the driver did not give */
};
void store_clears(const struct store *store, struct store_clears *ret);
bool store_has_device(const struct store *store);
const uint8_t *store_device(const struct store *store);  /* its UUID: 16 bytes */
bool store_wants_clearing(const struct store *store);

/*
 * Descriptors of chunks to be filled with zeros, the store's own; how many. One such set at a time
 * is on its way.
 */
uint32_t store_next_clear(struct store *store, int fds[STORE_CLEARS], uint64_t *bytes);
void store_clear_done(struct store *store, bool cleared);
void store_clear_failed(struct store *store); /* it cannot be done: not before store_make_missing */

/*
 * KVD_BACKEND_LEGACY: memory is made, cleared and kept by an exporter, one piece of that number for
 * each space. A number that comes again names memory that nobody uses any more: that is given up
 * first.
 */
bool store_has_exporter(const struct store *store);
bool store_next_export(struct store *store, uint32_t *number, uint64_t *bytes);
void store_export_done(struct store *store, uint32_t number, const uint8_t handle[64]);
void store_exporter_gone(struct store *store); /* deletes every space */
/* 64 bytes; NULL: it has none */
const uint8_t *space_segment_handle(const struct space *space, uint32_t segment);

/* A segment that the worker should unmap; false: none. */
bool store_next_unmap(struct store *store, struct space **space, uint32_t *segment);
void space_worker_unmapped(struct space *space, uint32_t segment);
/* it has nothing mapped, and clears nothing, any more */
void store_worker_gone(struct store *store);

/*
 * Tries once more to have what the driver did not give, and to have it cleared. Returns how many
 * are missing still.
 */
uint32_t store_make_missing(struct store *store);

/* ---- eviction and looking inside ------------------------------------------------------------- */

/*
 * Evicts up to n unpinned blocks, coldest leaves first (n 0: all), or chain and everything behind
 * it. Stops early after a bounded amount of work: *more is true then. Returns how many.
 */
int64_t space_evict(struct space *space, uint64_t n, kvd_ref chain, bool *more);

#define STORE_MAP_PINNED 16u
#define STORE_MAP_LEAF 32u
/* a sequence's, held by a job, or its data is still to come: eviction passes it over */
#define STORE_MAP_KEPT 64u

/*
 * States of n blocks from first: enum kvd_state, plus the flags above. Returns how many, up to n:
 * fewer where there are many clients to be asked for pins; 0: there are none from there on.
 */
struct map_room {
        uint8_t *states;
        uint32_t *parents; /* NULL, or ids of the blocks before them; UINT32_MAX: none */
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
 * The first sealed block without children at or after block *cursor; moves *cursor behind it.
 * -ENOENT: none. A call looks at a bounded number of blocks: if ret->leaf is 0, ask again with
 * *cursor and *above (0 at first) as they are now.
 */
int space_next_chain(struct space *space, uint32_t *cursor, uint32_t *above,
                     struct chain_info *ret);

struct check_report {
        uint32_t checked, broken; /* blocks looked at; invariants */
        /* at the end: something changed on the way, so sums over the space were not compared */
        bool partial;
        char first[200]; /* the first broken invariant, in words */
};
/*
 * Checks a piece of the space from *cursor on, which is 0 at first, and moves it; it is 0 again
 * when all was checked.
 */
void space_check(struct space *space, uint64_t *cursor, struct check_report *report);

#endif
