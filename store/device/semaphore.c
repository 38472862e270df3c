/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks of a GPU may be sealed before their data is there (ipc/base/semaphore.h). This file finds
 * out when it is, and what becomes of them if their producer dies first. A pending block is in the
 * index like any other, but it is not evicted, and no worker reads it, until the daemon has seen
 * its semaphore reach the value that the block waits for.
 *
 * The steps, as named in tests/client/spin/semaphore.pml. P is the producer and its stream, R a
 * reader and its stream, O the owner, which is this file:
 *
 *      P1  the stream writes the data              O1  at the seal: semaphore words, n_pending, then the slot word
 *      P2  the stream writes the semaphore         O2  sees the value: the block's semaphore := 0
 *      P3  the seal message names both             O3  sees that the producer's GPU work is over (quarantine)
 *                                                  O4  reads the semaphore: reached? then as O2
 *      R1  pins the block                          O5  if not: marks the block poisoned
 *      R2  reads its semaphore; 0: goes on         O6  takes it, and what hangs on it, out of the index
 *      R3  its stream waits for the value          O7  stores the highest value promised into the semaphore
 *      R4  its stream reads the data               O8  gives the row to another client
 *      R5  after that: is the block poisoned?
 *
 * Why R4 reads what P1 wrote, or R5 says that it did not:
 *
 *  - The semaphore words of a block are stored before the slot word that makes it visible (O1), so
 *    whoever pins it sees them. Only O2 takes them back, after the value was seen, and P2 comes
 *    behind P1 on one stream.
 *  - The semaphore reaches the value by P2 or by O7. In the second case O5 comes first, a release
 *    before a release, so that whoever sees the value sees the flag. R5 reads the flag after R4,
 *    and R4 comes after the value: it cannot miss it.
 *  - Between O4 and O7 nobody writes the semaphore: the producer's GPU work is over (O3, by time,
 *    since no call tells), and its row is nobody else's before O8. So "not reached" stays true, and
 *    the value never moves back.
 *  - Whoever waits in R3 is released: by P2 or, once the producer is gone, by O7. A value that was
 *    never promised in a seal is waited for by the producer alone.
 *
 * A poisoned block may be pinned. It stays, with everything that hangs on it, until it is not;
 * nobody finds it, and nothing can be sealed behind it.
 *
 * Whether a plain store wakes a stream that waits is the driver's secret. So the store also asks
 * for a stream write of the same value (store_next_wake) by a worker, and the row waits for that,
 * too.
 */

#include <errno.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "ipc/base/semaphore.h"
#include "store/account.h"
#include "store/cache/cache.h"
#include "store/device/device.h"
#include "store/hooks.h"
#include "store/job.h"

/*
 * One attachment's promises: a list of blocks for each semaphore, in the order in which they were
 * sealed. Values grow along it, except where threads of a client seal at once; then a block whose
 * data is there waits here for the one before it, which hurts nobody.
 */
struct promises {
        struct attachment *of;
        struct kvd_list_node waking;  /* in the store's, while there are wakes */
        bool over;                    /* what has not been reached will never be */
        uint64_t busy;                /* bit i: semaphore i has blocks that wait */
        uint64_t wakes;               /* bit i: semaphore i is to be written by a stream, too */
        bool asked;                   /* ... and somebody is at it */
        uint64_t highest[SEMAPHORES]; /* value promised */
        struct block_list blocks[SEMAPHORES];
        uint32_t n;                   /* blocks */
};

static uint64_t page_bytes(const struct space *space) {
        return semaphore_page_bytes(space->ix->semaphore_rows);
}

static shm_u64 *semaphore_word(const struct attachment *a, uint32_t at) {
        return semaphore_words(a->space) + a->seat * SEMAPHORES + at;
}

/* ---- life ------------------------------------------------------------------------------------ */

int semaphores_new(struct space *space) {
        struct semaphores *all;
        int r;

        if (!space->ix->semaphore_rows)
                return 0;
        r = account_charge(space, KVD_COST_overhead, page_bytes(space));
        if (r < 0)
                return r;
        all = space->parts.semaphores = sys->calloc(1, sizeof *all);
        if (!all)
                return -ENOMEM;
        return shared_file_new("kvd-semaphores", page_bytes(space), SHARED_MAPPED, &all->page);
}

static void end_space(struct space *space) {
        if (!space->parts.semaphores)
                return;
        shared_file_close(&space->parts.semaphores->page);
        free(space->parts.semaphores);
}

static int enter(struct attachment *a) {
        if (!a->space->parts.semaphores)
                return 0;
        a->promises = sys->calloc(1, sizeof *a->promises);
        if (!a->promises)
                return -ENOMEM;
        a->promises->of = a;
        return 0;
}

static void bury(struct attachment *a) {
        if (a->promises)
                kvd_list_remove(&a->promises->waking);
        free(a->promises);
}

/* ---- lists ----------------------------------------------------------------------------------- */

static void set_pending(struct space *space, uint64_t n) {
        space->unready.n_pending = n;
        atomic_store_explicit(&space->ix->n_pending, (uint32_t)MIN(n, UINT32_MAX),
                              memory_order_release);
}

static void push(struct attachment *a, uint32_t at, uint32_t id) {
        a->space->blocks[id].pending = true;
        block_list_append(a->space, &a->promises->blocks[at], id);
        a->promises->n++;
        set_pending(a->space, a->space->unready.n_pending + 1);
        a->promises->busy |= UINT64_C(1) << at;
}

static uint32_t pop(struct attachment *a, uint32_t at) {
        struct promises *p = a->promises;
        uint32_t id = p->blocks[at].first;

        block_list_remove(a->space, &p->blocks[at], id);
        if (!p->blocks[at].n)
                p->busy &= ~(UINT64_C(1) << at);
        p->n--;
        a->space->blocks[id].pending = false;
        set_pending(a->space, a->space->unready.n_pending - 1);
        return id;
}

/* ---- the seal (O1) --------------------------------------------------------------------------- */

/*
 * -EINVAL, with a word for it. Fills in the semaphore words of the blocks of a request: zeros if
 * their data is there.
 */
static int promise(struct attachment *a, const struct seal_request *q, struct kvd_desc *fields,
                   const char **why) {
        uint32_t at = q->semaphore;
        uint64_t value = q->semaphore_value;
        struct promises *p = a->promises;

        *why = !p                               ? "semaphore belongs to spaces on a GPU" :
               at > SEMAPHORES               ? "there is no such semaphore" :
               value == 0 || value > SEMAPHORE_VALUE_MAX ? "no semaphore ever has this value" :
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

static void promised(struct attachment *a, uint32_t id, const struct kvd_desc *fields) {
        push(a, (fields->semaphore - 1) % SEMAPHORES, id);
        space_count(a->space, KVD_SPACE_ORDERED, 1);
}

/* ---- the data is there (O2) ------------------------------------------------------------------ */

static bool reached(const struct attachment *a, uint32_t at) {
        uint32_t id = a->promises->blocks[at].first;

        return shm_load(semaphore_word(a, at)) >= kvd_index_desc(a->space->ix, id)->semaphore_value;
}

static void arrived(struct attachment *a, uint32_t at) {
        uint32_t id = pop(a, at);

        if (a->space->blocks[id].poisoned) { /* by another, whose block is before it */
                block_list_push(a->space, &a->space->unready.poisoned, id);
                return;
        }
        __atomic_store_n(&kvd_index_desc(a->space->ix, id)->semaphore, 0, __ATOMIC_RELEASE);
        hooks_readable(a->space, id);
}

static void look(struct attachment *a, uint32_t *budget) {
        for (uint64_t left = a->promises->busy; left; left &= left - 1) {
                uint32_t at = (uint32_t)__builtin_ctzll(left);

                while (*budget && (a->promises->busy >> at & 1) && reached(a, at)) {
                        arrived(a, at);
                        (*budget)--;
                }
        }
}

#define LOOKS 4096u   /* blocks in one call */
#define RETRIES 1024u /* poisoned blocks, to see whether they are pinned still */

/* A poisoned block goes as soon as nobody holds it. Those that stay come last the next time. */
static void sweep_poisoned(struct space *space) {
        struct block_list *poisoned = &space->unready.poisoned;
        uint32_t reads = KVD_PIN_READS;

        for (uint32_t n = MIN(poisoned->n, RETRIES); reads && n; n--) {
                uint32_t id = poisoned->first;

                if (space->blocks[id].child == NONE && evict_leaf(space, id, &reads))
                        continue;
                block_list_remove(space, poisoned, id);
                block_list_append(space, poisoned, id);
        }
}

static void look_at(struct space *space) {
        uint32_t budget = LOOKS;

        for (uint32_t i = 0; space->unready.n_pending && budget && i < space->n_attachments; i++)
                if (space->attachments[i] && space->attachments[i]->promises)
                        look(space->attachments[i], &budget);
        if (space->unready.poisoned.n)
                sweep_poisoned(space);
}

bool semaphores_look(struct space *space) {
        look_at(space);
        return space->unready.n_pending || space->unready.poisoned.n;
}

/* ---- the data will never be there (O4 to O7) ------------------------------------------------- */

/*
 * Steps O5 and O6. Children follow in any order, since none of them is found once the block before
 * it is not.
 */
static void poison_one(struct space *space, uint32_t id) {
        struct kvd_desc *desc = kvd_index_desc(space->ix, id);
        struct block *b = &space->blocks[id];

        if (b->poisoned)
                return;
        __atomic_store_n(&desc->flags, desc->flags | KVD_DESC_POISONED, __ATOMIC_RELEASE);
        index_leave(space, id);
        b->poisoned = true;
        block_condemn(space, id);
        if (!b->pending)
                block_list_push(space, &space->unready.poisoned, id);
        space_count(space, KVD_SPACE_POISONED, 1);
}

static void go_to(struct space *space, uint32_t id) {
        space->unready.poisoning.at = id;
        space->unready.poisoning.up = false;
        poison_one(space, id);
}

static void poison_next(struct space *space) {
        struct poisoning *p = &space->unready.poisoning;
        const struct block *b = &space->blocks[p->at];

        if (!p->up && b->child != NONE) {
                go_to(space, b->child);
        } else if (p->at == p->top) {
                p->under_way = false;
        } else if (b->sib_next != NONE) {
                go_to(space, b->sib_next);
        } else {
                p->at = b->parent;
                p->up = true;
        }
}

/* A piece of poisoning a block and everything behind it, which began some time. True: it is done. */
static bool poison_on(struct space *space, uint32_t *budget) {
        for (; *budget && space->unready.poisoning.under_way; --*budget)
                poison_next(space);
        return !space->unready.poisoning.under_way;
}

static bool poison(struct space *space, uint32_t top, uint32_t *budget) {
        space->unready.poisoning = (struct poisoning){.under_way = true, .top = top};
        go_to(space, top);
        return poison_on(space, budget);
}

/* Step O7. */
static void release(struct attachment *a, uint32_t at) {
        struct store *store = space_store(a->space);
        struct promises *p = a->promises;
        shm_u64 *word = semaphore_word(a, at);

        if (shm_load(word) >= p->highest[at])
                return;
        atomic_store_explicit(word, p->highest[at], memory_order_seq_cst);
        if (!store->wakes.on)
                return;
        p->wakes |= UINT64_C(1) << at;
        if (!p->waking.in)
                kvd_list_insert(&store->wakes.waiting, NULL, &p->waking);
        jobs_want_worker(store);
}

/* The first block of a semaphore's. It is pending until all behind it is poisoned. */
static void resolve_one(struct attachment *a, uint32_t at, uint32_t *budget) {
        struct space *space = a->space;
        uint32_t id = a->promises->blocks[at].first;

        --*budget;
        if (reached(a, at)) {
                arrived(a, at);
                return;
        }
        /* it was, with all behind it, if another's is before it */
        if (!space->blocks[id].poisoned && !poison(space, id, budget))
                return;
        pop(a, at);
        block_list_push(space, &space->unready.poisoned, id);
}

#define RESOLVES 2048u /* blocks of one call */

/* A piece of what follows when an attachment is over. True: there is more. */
static bool resolve(struct attachment *a) {
        struct promises *p = a->promises;
        uint32_t budget = RESOLVES;

        if (!p || !p->over)
                return false;
        while (poison_on(a->space, &budget) && p->busy && budget)
                resolve_one(a, (uint32_t)__builtin_ctzll(p->busy), &budget);
        if (p->busy || !budget)
                return true;
        for (uint32_t at = 0; at < SEMAPHORES; at++)
                release(a, at);
        sweep_poisoned(a->space);
        p->over = false;
        return false;
}

/*
 * The client's GPU work is over, or its space is: a value that has not been reached by now never
 * will be.
 */
static void leave(struct attachment *a) {
        if (a->promises)
                a->promises->over = true;
}

/* ---- waking streams -------------------------------------------------------------------------- */

void store_set_wakes(struct store *store, bool wakes) {
        store->wakes.on = wakes;
}

/* Step O8 comes only after a stream has written the semaphores. */
static bool waking(const struct attachment *a) {
        return a->promises && a->promises->wakes != 0 && space_store(a->space)->wakes.on;
}

static struct promises *first_waking(const struct store *store) {
        return kvd_list_first(&store->wakes.waiting, struct promises, waking);
}

bool store_wants_wake(struct store *store) {
        return store->wakes.on && first_waking(store);
}

bool store_next_wake(struct store *store, struct store_wake *ret) {
        struct promises *first = store->wakes.on ? first_waking(store) : NULL;
        struct attachment *a;

        if (!first || first->asked)
                return false;
        a = first->of;
        first->asked = true;
        *ret = (struct store_wake){.fd = space_semaphore_fd(a->space), .bytes = page_bytes(a->space)};
        memcpy(ret->device, a->space->ix->device, sizeof ret->device);
        for (uint64_t left = a->promises->wakes; left; left &= left - 1) {
                uint32_t at = (uint32_t)__builtin_ctzll(left);

                ret->words[2 * ret->n] = a->seat * SEMAPHORES + at;
                ret->words[2 * ret->n++ + 1] = a->promises->highest[at];
        }
        return true;
}

void store_wake_done(struct store *store, bool done) {
        struct promises *first = first_waking(store);

        if (!first || !first->asked)
                return;
        first->asked = false;
        if (!done)
                return;
        first->wakes = 0;
        kvd_list_remove(&first->waking);
}

/* ---- questions ------------------------------------------------------------------------------- */

int space_semaphore_fd(const struct space *space) {
        return space->parts.semaphores ? space->parts.semaphores->page.fd : -1;
}

uint32_t attachment_semaphore_row(const struct attachment *a) {
        return a->seat;
}

uint64_t attachment_pending(const struct attachment *a) {
        return a->promises ? a->promises->n : 0;
}

const struct hooks semaphore_hooks = {
        .space_begins = semaphores_new, .space_ends = end_space, .look = look_at,
        .attachment_begins = enter, .attachment_ends = leave, .attachment_stops = resolve,
        .attachment_lingers = waking,
        .attachment_buried = bury, .promise = promise, .promised = promised};
