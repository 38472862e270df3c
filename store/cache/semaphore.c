/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks on a GPU may be sealed before their data is there (ipc/base/semaphore.h). This file
 * detects when the data has arrived, and handles producers that die before that. A pending block is
 * in the index like any other, but it is not evicted, and no worker reads it, until the daemon has
 * seen its semaphore reach the block's value.
 *
 * The steps, as named in tests/client/spin/semaphore.pml. P is the producer and its stream, R a
 * reader and its stream, O the owner, which is this file:
 *
 *      P1  the stream writes the data              O1  at the seal: semaphore words, n_pending, then the slot word
 *      P2  the stream writes the semaphore         O2  sees the value: the block's semaphore := 0
 *      P3  the seal message names both             O3  sees that the producer's GPU work is over (quarantine)
 *                                                  O4  reads the semaphore: reached? then as O2
 *      R1  pins the block                          O5  if not: marks the block poisoned
 *      R2  reads its semaphore; 0: goes on         O6  takes it, and all blocks behind it, out of the index
 *      R3  its stream waits for the value          O7  stores the highest value promised into the semaphore
 *      R4  its stream reads the data               O8  gives the row to another client
 *      R5  after that: is the block poisoned?
 *
 * Why R4 reads the data that P1 wrote, or R5 detects that it did not:
 *
 *  - The semaphore words of a block are stored before the slot word that makes it visible (O1), so
 *    a reader that pins the block sees them. Only O2 resets them, after the value was seen, and P2
 *    comes after P1 on the same stream.
 *  - The semaphore reaches the value by P2 or by O7. In the second case O5 comes first, both with
 *    release order, so a reader that sees the value also sees the flag. R5 reads the flag after R4,
 *    and R4 comes after the value, so R5 cannot miss the flag.
 *  - Between O4 and O7 nothing writes the semaphore: the producer's GPU work is over (O3 waits for
 *    a time, since no call can tell), and its row is not given to another client before O8. So "not
 *    reached" stays true, and the value never decreases.
 *  - Every reader that waits in R3 is released, by P2 or, once the producer is gone, by O7. Only
 *    the producer itself can wait for a value that was never promised in a seal.
 *
 * A poisoned block that is pinned stays, with all blocks behind it, until it is unpinned. It cannot
 * be found, and nothing can be sealed behind it.
 *
 * The driver does not document whether a plain store wakes a waiting stream. So a worker also
 * writes the same value by a stream (store_next_wake), and the row is not reused before that.
 *
 * With shards on several GPUs, a block names a promise of each stream that writes one. It is in a
 * list of the client that has sealed it (joint), so that it delays no other client's blocks; it
 * arrives when all promises are kept (O2). R2 to R5 apply to each of them. When one of the streams
 * is over, O4 to O6 apply to all blocks that name it (poison_others), and come before its O7. The
 * other streams go on, so a block may be poisoned although its descriptor's own semaphore reaches
 * the value later: R5 reads the flag. What is over stays over: no block that names it is sealed
 * after O3 (ended), nor one that names a stream of another client, or of another daemon's, which had
 * the same row (token). When the client that has sealed it ends, with its team, no stream writes the
 * block any more, and O5 and O6 apply to it. tests/client/spin/shards.pml models this.
 *
 * Clients of a previous daemon write and wait in that daemon's page, which is kept until the last
 * of them is gone, and which has no new clients. Blocks whose data had not arrived when they were
 * taken over are not in the new index (cache/before.c). When such a client ends, the old index
 * cannot be written any more, so the page itself tells which values were reached (O5 and O7 in one
 * store, SEMAPHORE_ENDED): tests/client/spin/outlive.pml.
 */

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "ipc/base/sys.h"
#include "ipc/base/semaphore.h"
#include "store/account.h"
#include "store/cache/inside.h"
#include "store/hooks.h"
#include "store/job.h"
#include "store/keep_inside.h"
#include "store/summaries.h"

/*
 * One attachment's promises: for each semaphore, a list of blocks in the order of their seals.
 * Their values ascend, except if threads of a client seal at the same time. Then a block whose data
 * is there may wait for the block before it in the list, which is harmless. Only this attachment's
 * own seals append to its lists. The values of blocks in `joint` do not ascend.
 */
struct promises {
        const struct shared_file *page; /* page with its row; NULL: the page was not kept */
        shm_u64 *row;
        bool over;                    /* values that are not reached yet never will be */
        uint64_t busy;                /* bit i: semaphore i has pending blocks */
        uint64_t wakes;               /* bit i: a stream must write semaphore i, too */
        bool asked;                   /* a worker was asked to write them */
        uint64_t highest[SEMAPHORES]; /* highest value promised */
        struct block_list blocks[SEMAPHORES];
        struct block_list joint; /* sealed with promises of several streams */
        uint32_t n;              /* number of blocks in all lists */
        uint32_t token;          /* random: names this attachment, unlike its seat */
        bool named;              /* blocks in joint lists may wait for these semaphores, too */
        bool ended;              /* its streams are over: no further block may wait for them */
        uint32_t looked; /* while over: blocks below this id were checked, see poison_others */
};

static struct semaphores *semaphores_of(const struct space *space) {
        return space->parts.semaphores;
}

static uint64_t page_bytes(const struct space *space) {
        return semaphore_page_bytes(space_index(space)->semaphore_rows);
}

static shm_u64 *semaphore_word(const struct attachment *a, uint32_t at) {
        return a->promises->row + at;
}

static bool is_of_before(const struct attachment *a) {
        return a->promises->page != &semaphores_of(a->space)->page;
}

/* ---- life ------------------------------------------------------------------------------------ */

int semaphores_new(struct space *space) {
        struct semaphores *all;
        int r;

        if (!space_index(space)->semaphore_rows)
                return 0;
        r = account_charge(space, KVD_COST_overhead, page_bytes(space));
        if (r < 0)
                return r;
        all = space->parts.semaphores = sys->calloc(1, sizeof *all);
        if (!all)
                return -ENOMEM;
        r = shared_file_new("kvd-semaphores", page_bytes(space), SHARED_MAPPED, &all->page);
        if (r == 0)
                keep_semaphores(space, all->page.fd);
        return r;
}

static void close_before(struct space *space, struct semaphore_page **link) {
        struct semaphore_page *page = *link;

        *link = page->next;
        drop_semaphores(space, page->life);
        account_discharge(space, KVD_COST_overhead, page->file.bytes);
        account_discharge(space, KVD_COST_files, 1);
        shared_file_close(&page->file);
        free(page);
}

static void end_space(struct space *space) {
        struct semaphores *all = semaphores_of(space);

        if (!all)
                return;
        while (all->before)
                close_before(space, &all->before);
        drop_semaphores(space, space_index(space)->life);
        shared_file_close(&all->page);
        free(all);
}

static const struct semaphore_page *page_before(const struct space *space, uint32_t life) {
        const struct semaphore_page *page = semaphores_of(space)->before;

        while (page && page->life != life)
                page = page->next;
        return page;
}

/* A client of a previous daemon keeps its old row. */
static void find_row(struct attachment *a) {
        const struct shared_file *page = &semaphores_of(a->space)->page;
        uint32_t row = a->seat;

        if (a->state == ORPHANED) { /* only inherited attachments begin in this state */
                const struct semaphore_page *old = page_before(a->space, a->kept.life);

                page = a->kept.is && old ? &old->file : NULL;
                row = a->kept.seat;
        }
        if (!page || row >= page->bytes / SEMAPHORE_ROW_BYTES)
                return;
        a->promises->page = page;
        a->promises->row = (shm_u64 *)page->at + (uint64_t)row * SEMAPHORES;
}

static int enter(struct attachment *a) {
        struct promises *p;

        if (!semaphores_of(a->space))
                return 0;
        p = a->promises = sys->calloc(1, sizeof *p);
        if (!p)
                return -ENOMEM;
        if (sys->getrandom(&p->token, sizeof p->token, 0) != (ssize_t)sizeof p->token)
                return -EIO;
        find_row(a);
        return 0;
}

static bool in_use(const struct space *space, const struct semaphore_page *page) {
        for (struct attachment *a = NULL; (a = space_next_attachment(space, a));)
                if (a->promises && a->promises->page == &page->file)
                        return true;
        return false;
}

/* Closes pages without clients. */
static void tidy(struct space *space) {
        struct semaphore_page **link = &semaphores_of(space)->before;

        while (semaphores_of(space)->settled && *link) {
                if (in_use(space, *link))
                        link = &(*link)->next;
                else
                        close_before(space, link);
        }
}

static void bury(struct attachment *a) {
        if (!a->promises)
                return;
        kvd_list_remove(&a->waking);
        free(a->promises);
        a->promises = NULL;
        tidy(a->space);
}

/* ---- pages of previous daemons --------------------------------------------------------------- */

int semaphores_inherit(struct space *space, uint32_t life, int *fd) {
        struct semaphore_page *page = semaphores_of(space) ? sys->calloc(1, sizeof *page) : NULL;
        struct stat st;
        int r = page && fstat(*fd, &st) == 0 && st.st_size > 0 ? 0 : -EPROTO;

        if (r == 0)
                r = shared_file_adopt(fd, (uint64_t)st.st_size, SHARED_MAPPED, &page->file);
        if (r < 0) {
                free(page);
                return r;
        }
        account_add(space, KVD_COST_overhead, page->file.bytes);
        account_add(space, KVD_COST_files, 1);
        page->life = life;
        page->next = semaphores_of(space)->before;
        semaphores_of(space)->before = page;
        return 0;
}

bool semaphores_reached(const struct space *space, uint32_t life, uint32_t semaphore,
                        uint64_t value) {
        const struct semaphore_page *page = page_before(space, life);
        const shm_u64 *words = page ? page->file.at : NULL;

        return words && semaphore && semaphore <= page->file.bytes / sizeof *words &&
               semaphore_was_reached(shm_load(&words[semaphore - 1]), value);
}

void semaphores_settle(struct space *space) {
        if (!semaphores_of(space))
                return;
        semaphores_of(space)->settled = true;
        tidy(space);
}

uint32_t semaphores_before(const struct space *space) {
        const struct semaphores *all = semaphores_of(space);
        uint32_t n = 0;

        for (const struct semaphore_page *page = all ? all->before : NULL; page; page = page->next)
                n++;
        return n;
}

uint64_t semaphores_bytes(const struct space *space) {
        const struct semaphores *all = semaphores_of(space);
        uint64_t bytes = all ? all->page.bytes : 0;

        for (const struct semaphore_page *page = all ? all->before : NULL; page; page = page->next)
                bytes += page->file.bytes;
        return bytes;
}

/* ---- lists ----------------------------------------------------------------------------------- */

#define JOINT SEMAPHORES /* in place of a semaphore: the list of blocks with several promises */

static struct block_list *list_of(struct promises *p, uint32_t at) {
        return at == JOINT ? &p->joint : &p->blocks[at];
}

/* One of its lists has become longer or shorter by 1. */
static void count_listed(struct promises *p, uint32_t at, uint32_t by) {
        uint64_t bit = at == JOINT ? 0 : UINT64_C(1) << at;

        p->n += by;
        p->busy = list_of(p, at)->n ? p->busy | bit : p->busy & ~bit;
}

static void push(struct attachment *a, uint32_t at, uint32_t id) {
        block_awaits(a->space, list_of(a->promises, at), id);
        count_listed(a->promises, at, 1);
}

static uint32_t first_of(const struct attachment *a, uint32_t at) {
        return list_of(a->promises, at)->first;
}

static uint32_t pop(struct attachment *a, uint32_t at) {
        struct promises *p = a->promises;
        uint32_t id = first_of(a, at);

        block_awaits_no_more(a->space, list_of(p, at), id);
        count_listed(p, at, -1u);
        return id;
}

/* ---- the seal (O1) --------------------------------------------------------------------------- */

int semaphores_promise(struct attachment *a, const struct seal_request *q, struct kvd_desc *fields,
                       const char **why) {
        uint32_t at = q->semaphore;
        uint64_t value = q->semaphore_value;
        struct promises *p = a->promises;

        *why = !p                                        ? "only spaces on a GPU have semaphores" :
               at > SEMAPHORES                           ? "there is no such semaphore" :
               value == 0 || value > SEMAPHORE_VALUE_MAX ? "semaphore_value is out of range" :
                                                           NULL;
        if (*why)
                return -EINVAL;
        p->highest[at - 1] = MAX(p->highest[at - 1], value);
        if (shm_load(semaphore_word(a, at - 1)) >= value)
                return 0;
        fields->semaphore = semaphore_at(a->seat, at - 1);
        fields->semaphore_value = value;
        return 0;
}

/* The attachment whose stream has made the promise, and may still keep it; NULL: none. */
static struct attachment *writer_of(const struct space *space, const struct kvd_promise *promise) {
        uint32_t seat = (promise->semaphore - 1) / SEMAPHORES;
        struct attachment *a = promise->semaphore && seat < space->n_attachments ?
                                       space->attachments[seat] :
                                       NULL;

        return a && a->promises && a->promises->token == promise->writer && !a->promises->ended &&
                               !is_of_before(a) ?
                       a :
                       NULL;
}

#define AHEAD_MOST (UINT64_C(1) << 32) /* promises that a stream may not have kept yet */

/* Raises what is written for a stream that ends. -EINVAL: the stream cannot have promised it. */
static int note_promise(struct space *space, const struct kvd_promise *promise, bool *kept) {
        uint32_t at = (promise->semaphore - 1) % SEMAPHORES;
        struct attachment *writer = writer_of(space, promise);
        uint64_t has = writer ? shm_load(semaphore_word(writer, at)) : 0;

        if (!writer || !promise->value || promise->value > SEMAPHORE_VALUE_MAX ||
            (promise->value > has && promise->value - has > AHEAD_MOST))
                return -EINVAL;
        writer->promises->highest[at] = MAX(writer->promises->highest[at], promise->value);
        writer->promises->named = true;
        *kept = has >= promise->value;
        return 0;
}

int semaphores_promise_all(struct attachment *a, const struct seal_request *q,
                           struct kvd_desc *fields, struct kvd_promise rest[static KVD_SHARDS - 1],
                           const char **why) {
        struct space *space = a->space;
        uint32_t n = 0;
        bool kept;

        *why = !a->promises                        ? "only spaces on a GPU have semaphores" :
               q->semaphore                        ? "it has semaphore and promises" :
               q->n_promises > space->ix->n_shards ? "there are more promises than shards" :
                                                     NULL;
        for (uint32_t i = 0; !*why && i < q->n_promises; i++) {
                if (note_promise(space, &q->promises[i], &kept) < 0)
                        *why = "no client of the space has promised that, or it has ended";
                else if (!kept && !fields->semaphore) {
                        fields->semaphore = q->promises[i].semaphore;
                        fields->semaphore_value = q->promises[i].value;
                } else if (!kept) {
                        rest[n++] = (struct kvd_promise){q->promises[i].value,
                                                         q->promises[i].semaphore, 0};
                }
        }
        return *why ? -EINVAL : 0;
}

void semaphores_promised(struct attachment *a, uint32_t id, const struct kvd_desc *fields,
                         bool joint) {
        push(a, joint ? JOINT : (fields->semaphore - 1) % SEMAPHORES, id);
        space_count(a->space, KVD_SPACE_ORDERED, 1);
}

/* ---- the data is there (O2) ------------------------------------------------------------------ */

static uint64_t word_of(const struct space *space, uint32_t semaphore) {
        const shm_u64 *words = semaphores_of(space)->page.at;

        return shm_load(&words[semaphore - 1]);
}

static bool is_kept(const struct space *space, struct kvd_promise promise) {
        return !promise.semaphore || word_of(space, promise.semaphore) >= promise.value;
}

/* One of the n_shards promises of a pending block; the first is in its descriptor. */
static struct kvd_promise promise_of(const struct space *space, uint32_t id, uint32_t i) {
        const struct kvd_desc *desc = block_desc(space, id);

        return i ? kvd_index_promises(space->ix, id)[i - 1] :
                   (struct kvd_promise){desc->semaphore_value, desc->semaphore, 0};
}

/* Has the first block of the list all of its data? */
static bool reached(const struct attachment *a, uint32_t at) {
        bool all = true;

        for (uint32_t i = 0; all && i < a->space->ix->n_shards; i++)
                all = is_kept(a->space, promise_of(a->space, first_of(a, at), i));
        return all;
}

static void arrived(struct attachment *a, uint32_t at) {
        uint32_t id = pop(a, at);

        if (block_of(a->space, id)->poisoned) /* because a block before it was */
                return;
        index_arrived(a->space, id);
        summary_want(a->space, id);
}

/* Moves the first block, which has to wait, behind those that may not have to. */
static void rotate(struct attachment *a) {
        uint32_t id = first_of(a, JOINT);

        block_list_remove(a->space, &a->promises->joint, id);
        block_list_append(a->space, &a->promises->joint, id);
}

#define MISSES 16u /* blocks of one client's joint list that have to wait, in one call */

/* Blocks that wait are not in *budget: that is for all clients. */
static void look_at_joint(struct attachment *a, uint32_t *budget) {
        uint32_t misses = MIN(a->promises->joint.n, MISSES);

        while (*budget && misses && a->promises->joint.n) {
                if (reached(a, JOINT)) {
                        arrived(a, JOINT);
                        (*budget)--;
                } else {
                        rotate(a);
                        misses--;
                }
        }
}

static void look(struct attachment *a, uint32_t *budget) {
        for (uint64_t left = a->promises->busy; left; left &= left - 1) {
                uint32_t at = (uint32_t)__builtin_ctzll(left);

                while (*budget && (a->promises->busy >> at & 1) && reached(a, at)) {
                        arrived(a, at);
                        (*budget)--;
                }
        }
        look_at_joint(a, budget);
}

#define LOOKS 4096u /* blocks in one call */

bool semaphores_look(struct space *space) {
        uint32_t budget = LOOKS;

        for (struct attachment *a = NULL;
             space_awaits_data(space) && budget && (a = space_next_attachment(space, a));)
                if (a->promises)
                        look(a, &budget);
        return poisoned_sweep(space) || space_awaits_data(space);
}

/* ---- the data will never be there (O4 to O7; O5 and O6: cache/unready.c) --------------------- */

/* Step O7. */
static void release(struct attachment *a, uint32_t at) {
        struct store *store = space_store(a->space);
        struct promises *p = a->promises;
        shm_u64 *word = semaphore_word(a, at);

        if (is_of_before(a) ? atomic_fetch_or(word, SEMAPHORE_ENDED) & SEMAPHORE_ENDED :
                              shm_load(word) >= p->highest[at])
                return;
        if (!is_of_before(a))
                atomic_store_explicit(word, p->highest[at], memory_order_seq_cst);
        if (!store->wakes.on)
                return;
        p->wakes |= UINT64_C(1) << at;
        if (!a->waking.in)
                kvd_list_insert(&store->wakes.waiting, NULL, &a->waking);
        jobs_want_worker(store);
}

/* Is the block pending, and will never get what this attachment's streams have promised? */
static bool is_lost(const struct attachment *a, uint32_t id) {
        const struct space *space = a->space;
        const struct block *b = block_of(space, id);
        bool lost = false;

        for (uint32_t i = 0; b->pending && !b->poisoned && i < space->ix->n_shards; i++) {
                struct kvd_promise promise = promise_of(space, id, i);

                lost |= !is_kept(space, promise) && (promise.semaphore - 1) / SEMAPHORES == a->seat;
        }
        return lost;
}

/*
 * Resolves the first block of a list. It stays pending until all blocks behind it are
 * poisoned.
 */
static void resolve_one(struct attachment *a, uint32_t at, uint32_t *budget) {
        struct space *space = a->space;
        uint32_t id = first_of(a, at);

        --*budget;
        if (reached(a, at)) {
                arrived(a, at);
                return;
        }
        /* poisoned already, with all blocks behind it, if a block before it was */
        if (block_of(space, id)->poisoned || block_poison(space, id, budget))
                pop(a, at);
}

#define SCANS 16u /* blocks looked at by poison_others, for one that is poisoned */

/*
 * Poisons the blocks in joint lists of which this attachment's streams have not written their
 * shards. False: there are more. The other streams go on, and the blocks stay in their lists until
 * then.
 */
static bool poison_others(struct attachment *a, uint32_t *budget) {
        struct promises *p = a->promises;
        uint32_t ids = p->named ? space_ids(a->space) : 0;

        while (*budget && p->looked < ids) {
                for (uint32_t n = SCANS; n && p->looked < ids && !is_lost(a, p->looked); n--)
                        p->looked++;
                --*budget;
                if (p->looked < ids && is_lost(a, p->looked) &&
                    !block_poison(a->space, p->looked, budget))
                        return false;
        }
        return p->looked >= ids;
}

#define RESOLVES 2048u /* blocks of one call */

/*
 * A list whose blocks will get no more data; JOINT + 1: none. While the team of a dead client lives
 * on, its other streams may still write the blocks in `joint`.
 */
static uint32_t to_resolve(const struct attachment *a) {
        const struct promises *p = a->promises;

        return p->busy                           ? (uint32_t)__builtin_ctzll(p->busy) :
               p->joint.n && a->state == FOLDING ? JOINT :
                                                   JOINT + 1;
}

/* Does a piece of the work after an attachment's end. True: there is more. */
static bool resolve(struct attachment *a) {
        struct promises *p = a->promises;
        uint32_t budget = RESOLVES;

        if (!p || !p->over)
                return false;
        while (poison_goes_on(a->space, &budget) && to_resolve(a) <= JOINT && budget)
                resolve_one(a, to_resolve(a), &budget);
        if (to_resolve(a) <= JOINT || !budget || !poison_others(a, &budget))
                return true;
        for (uint32_t at = 0; p->page && at < SEMAPHORES; at++)
                release(a, at);
        poisoned_sweep(a->space);
        p->over = false;
        p->looked = 0;
        return false;
}

/*
 * The client's GPU work is over, or its space is: values that are not reached by now never will be.
 * If the space is left to the next daemon, that daemon resolves them.
 */
static void leave(struct attachment *a) {
        if (a->promises && !space_is_left(a->space))
                a->promises->over = a->promises->ended = true;
}

void attachment_streams_end(struct attachment *a) {
        if (!a->promises)
                return;
        leave(a);
        a->stopping = true;
        space_is_busy(a->space);
}

/* ---- waking streams -------------------------------------------------------------------------- */

void store_set_wakes(struct store *store, bool wakes) {
        store->wakes.on = wakes;
}

static struct attachment *first_waking(const struct store *store) {
        return kvd_list_first(&store->wakes.waiting, struct attachment, waking);
}

bool store_wants_wake(struct store *store) {
        return store->wakes.on && first_waking(store);
}

bool store_next_wake(struct store *store, struct store_wake *ret) {
        struct attachment *a = store->wakes.on ? first_waking(store) : NULL;
        struct promises *first = a ? a->promises : NULL;

        if (!first || first->asked)
                return false;
        first->asked = true;
        *ret = (struct store_wake){.fd = first->page->fd, .bytes = first->page->bytes};
        memcpy(ret->device, space_index(a->space)->devices[0], sizeof ret->device);
        for (uint64_t left = a->promises->wakes; left; left &= left - 1) {
                uint32_t at = (uint32_t)__builtin_ctzll(left);

                ret->words[2 * ret->n] = (uint64_t)(first->row - (shm_u64 *)first->page->at) + at;
                ret->words[2 * ret->n++ + 1] = shm_load(semaphore_word(a, at));
        }
        return true;
}

void store_wake_done(struct store *store, bool done) {
        struct attachment *a = first_waking(store);

        if (!a || !a->promises->asked)
                return;
        a->promises->asked = false;
        if (!done)
                return;
        a->promises->wakes = 0;
        kvd_list_remove(&a->waking);
}

/* ---- queries --------------------------------------------------------------------------------- */

int space_semaphore_fd(const struct space *space) {
        return semaphores_of(space) ? semaphores_of(space)->page.fd : -1;
}

uint32_t attachment_semaphore_row(const struct attachment *a) {
        return a->seat;
}

uint32_t attachment_writer_token(const struct attachment *a) {
        return a->promises ? a->promises->token : 0;
}

uint64_t attachment_pending(const struct attachment *a) {
        return a->promises ? a->promises->n : 0;
}

const struct hooks semaphore_hooks = {.space_begins = semaphores_new,
                                      .space_ends = end_space,
                                      .attachment_begins = enter,
                                      .attachment_ends = leave,
                                      .attachment_stops = resolve,
                                      .attachment_buried = bury};
