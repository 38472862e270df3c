/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Exact copies in the file. When memory for copies is short, cold ones are written to a slot each,
 * and are read back when they are wanted. A copy keeps its place (below/place.h); only its memory
 * is freed once the slot is written.
 *
 * The record in such a slot has the epoch FILE_NO_EPOCH, which no namespace has. So after a restart
 * the record does not count and its slot is free, in every version of kvd, and nothing needs to be
 * erased. Until then its sequence, which is never used again, identifies the copy.
 */

#include <errno.h>

#include "ipc/base/sys.h"
#include "store/below/place.h"
#include "store/file/cold_copies.h"
#include "store/file/file.h"
#include "store/sequence/sequence.h"

#define FREE_PART 4u /* memory is short if less than 1/4 of a domain's limit is free for copies */
#define SPACES 64u   /* spaces that one call looks at for cold copies */
#define LOOKS 4096u  /* entries that one call looks at for cold copies */
#define WAITING 4u   /* spaces whose copies one call reads */
#define ONCE_BYTES (UINT64_C(2) << 20) /* of a request, since its memory is freed all at once */
#define MISSES 256u                    /* waiting copies that one call reads or reports as missed */
#define TRIES 3u /* attempts to read a copy, if the disk process is lost each time */
#define PATIENCE_NS UINT64_C(1000000000) /* time to wait for memory to read into */

static const uint32_t no_tokens[1];

static struct kvd_label label_of(const struct file *file, uint32_t record) {
        return (struct kvd_label){.epoch = FILE_NO_EPOCH,
                                  .sequence = file->catalog.entries[record].sequence};
}

static uint64_t bytes_of(const struct file *file, uint32_t record) {
        return file->catalog.extents[record / FILE_SLOTS].slot_bytes;
}

static struct copy_owner owner_of(const struct space *space, uint32_t place) {
        const struct place *p = place_moved(space, place);

        return (struct copy_owner){.place = place, .sequence = p->sequence, .entry = p->entry};
}

static void add(struct file *file, uint32_t record, uint32_t place) {
        file_question_add(file, &(struct store_disk_item){.place = record,
                                                          .label = label_of(file, record),
                                                          .tokens = no_tokens,
                                                          .copy = place});
}

static struct store_disk_question *begin(struct file *file, enum store_disk_ask what,
                                         struct space *space) {
        file_begin_question(file, what, space);
        file->disk.question.copies = true;
        return &file->disk.question;
}

static void end(struct file *file) {
        if (!file->disk.question.n)
                return;
        file->disk.copies_last = true;
        file_question_ready(file);
}

static bool is_full(const struct file *file) {
        const struct store_disk_question *q = &file->disk.question;

        return q->n && ((q->n + 1) * space_block_bytes(q->space) > ONCE_BYTES ||
                        file_question_is_full(file));
}

/* ---- writing --------------------------------------------------------------------------------- */

/* Memory of copies that are being written counts as free. */
static bool is_short(const struct file *file, const struct space *space) {
        uint64_t part = MAX(domain_most(space_domain(space), KVD_COST_spill) / FREE_PART,
                            space_block_bytes(space));

        return !carry_spares(space, part - MIN(part, file->copies_go));
}

/* The number of the space's namespace, which need not be in the superblock. -1: too many. */
static int number_of(struct file *file, struct space *space) {
        int number = file_space_number(file, space);

        if (number < 0 && file_enter_space(file, space) >= 0)
                number = file_space_number(file, space);
        if (number >= 0)
                file->catalog.spaces[number].owner = space_domain(space);
        return number;
}

/* A slot, or CATALOG_NOWHERE. */
static uint32_t take_slot(struct file *file, struct space *space) {
        uint32_t slot_bytes = file_slot_bytes(space_block_bytes(space), 0);
        int number = number_of(file, space);

        if (number < 0)
                return CATALOG_NOWHERE;
        return catalog_take_copy(&file->catalog, slot_bytes, number, file_most(file, space),
                                 ++file->sequence);
}

static void drop(struct space *space, uint32_t record) {
        if (space_store(space)->file)
                catalog_drop(&space_store(space)->file->catalog, record);
}

/* Adds a cold copy. 1: added; 0: no copy is cold; -ENOSPC: no room for one; -EAGAIN: out of looks. */
static int write_one(struct file *file, struct space *space, uint32_t *looks) {
        struct copy_owner owner;
        int r = copies_cold(space, looks, &owner);
        uint32_t record;

        if (r <= 0)
                return r;
        record = take_slot(file, space);
        if (record == CATALOG_NOWHERE)
                return -ENOSPC;
        if (place_goes(space, owner.place, record, drop) < 0) {
                catalog_drop(&file->catalog, record);
                return -ENOSPC;
        }
        place_moved(space, owner.place)->sequence = owner.sequence;
        place_moved(space, owner.place)->entry = owner.entry;
        file->copies_go += bytes_of(file, record);
        add(file, record, owner.place);
        return 1;
}

/* True: there is a request. */
static bool write_some(struct file *file, struct space *space, uint32_t *looks, bool *later) {
        const struct store_disk_question *q = begin(file, STORE_DISK_WRITE, space);
        int r = 1;

        while (r == 1 && is_short(file, space) && !is_full(file))
                r = write_one(file, space, looks);
        if (r == -EAGAIN)
                file_want(file, true);
        *later |= r == -ENOSPC;
        end(file);
        return q->n > 0;
}

/* If no copy is cold, copy_made says when one is; of many spaces, some are looked at later. */
static void write_next(struct file *file, bool *later) {
        uint32_t n = MIN(store_spaces(file->store), SPACES), looks = LOOKS;

        for (uint32_t i = 0; i < n; i++) {
                struct space *space = store_space_in_turn(file->store, &file->copies_turn);

                if (file_for(space) != file || !is_short(file, space) ||
                    places_used(space) == places_of(space)->n_below)
                        continue;
                *later |= n < store_spaces(file->store);
                if (write_some(file, space, &looks, later))
                        return;
        }
}

void copy_made(struct space *space) {
        struct file *file = file_for(space);

        if (file && !host_is_all(file) && is_short(file, space))
                file_want(file, true);
}

/* If the write failed, or the copy was used meanwhile, it stays in memory. */
static void written(struct file *file, struct space *space, const struct store_disk_item *item,
                    int error, bool answered) {
        struct file_count *count = &file->disk.count;
        uint32_t record = (uint32_t)item->place;
        struct copy_owner owner;

        file_count_error(count, error);
        if (!error)
                count->written_bytes += bytes_of(file, record);
        owner = space ? owner_of(space, item->copy) : (struct copy_owner){0};
        if (space && !error && copies_are_cold(space, &owner)) {
                count->copies_written++;
                place_ends(space, item->copy, PLACE_BELOW);
                return;
        }
        if (space)
                place_ends(space, item->copy, PLACE_HERE);
        (error && answered ? catalog_spoil : catalog_drop)(&file->catalog, record);
}

/* ---- reading --------------------------------------------------------------------------------- */

/* 0, or why it cannot be read. */
static int readable(const struct file *file) {
        return file->catalog.off ? -EIO : file->catalog.hangs ? -ETIMEDOUT : 0;
}

static void push(struct file *file, struct space *space, uint32_t place) {
        struct place *p = place_moved(space, place);
        struct file_wanted *w = &file_space_of(space)->wanted;

        if (w->first == KVD_NOWHERE)
                kvd_list_insert(&file->disk.wanted, NULL, &w->node);
        *(w->first == KVD_NOWHERE ? &w->first : &place_moved(space, w->last)->next) = place;
        w->last = place;
        p->next = KVD_NOWHERE;
        p->state = PLACE_WANTED;
}

static uint32_t pop(struct file_wanted *w) {
        uint32_t place = w->first;

        w->first = place_moved(w->space, place)->next;
        if (w->first == KVD_NOWHERE)
                kvd_list_remove(&w->node);
        return place;
}

/* Counts the copy as lost if the error says so. Returns the error. */
static int said(struct file *file, uint32_t record, int error) {
        file->disk.count.copies_lost += error == -EIO || error == -EBADMSG;
        return error;
}

/* A copy whose read was given up (miss_question) but has not ended cannot be read again yet. */
int copy_wanted(struct space *space, const struct copy_owner *owner) {
        struct file *file = space_store(space)->file;
        struct place *p = place_moved(space, owner->place);
        int r = readable(file);

        if (r == 0 && p->state != PLACE_BELOW)
                r = -ETIMEDOUT;
        if (r < 0)
                return said(file, p->record, r);
        p->sequence = owner->sequence;
        p->entry = owner->entry;
        p->tries = 0;
        push(file, space, owner->place);
        file_want(file, true);
        return 0;
}

/* The copy was not read: it has no memory, and its owner is told why. */
static void not_come(struct file *file, struct space *space, uint32_t place, int error) {
        uint32_t record = place_moved(space, place)->record;
        struct copy_owner owner = owner_of(space, place);

        if (place_ends(space, place, PLACE_BELOW) && owner.sequence)
                copy_came(space, &owner, said(file, record, error));
}

/* Reports up to MISSES waiting copies as missed. Their owners may ask again. */
static void miss_some(struct file *file, struct file_wanted *w, int error) {
        for (uint32_t i = 0; i < MISSES && w->first != KVD_NOWHERE; i++)
                not_come(file, w->space, pop(w), error);
}

/* Takes memory for a copy, if necessary by freeing copies that are also resident in the pool. */
static bool find_memory(struct space *space, uint32_t place) {
        if (place_comes(space, place))
                return true;
        copies_have_room(space);
        return place_comes(space, place);
}

/* Copies that have waited PATIENCE_NS for memory are reported as missed. */
static void wait_for_memory(struct file *file, struct file_wanted *w) {
        uint64_t now = sys_now_ns();

        w->since_ns = w->since_ns ?: now;
        if (now - w->since_ns < PATIENCE_NS)
                return;
        miss_some(file, w, -ENOSPC);
        w->since_ns = 0;
}

/* Requests the space's waiting copies, as far as there is memory for them. */
static void read_some(struct file *file, struct file_wanted *w) {
        const struct store_disk_question *q = begin(file, STORE_DISK_READ, w->space);
        uint32_t looks = 0;
        bool room = true;

        for (; looks < MISSES && w->first != KVD_NOWHERE; looks++) {
                uint32_t place = w->first;

                if (is_full(file))
                        break;
                if (place_moved(w->space, place)->erased) {
                        not_come(file, w->space, pop(w), 0);
                        continue;
                }
                room = find_memory(w->space, place);
                if (!room)
                        break;
                add(file, place_moved(w->space, place)->record, pop(w));
        }
        if (w->first != KVD_NOWHERE && kvd_list_remove(&w->node)) /* others are next */
                kvd_list_insert(&file->disk.wanted, NULL, &w->node);
        if (q->n || room)
                w->since_ns = 0;
        else
                wait_for_memory(file, w);
        end(file);
}

/* The copy is back in memory, so its record is dropped. */
static void came(struct file *file, struct space *space, const struct store_disk_item *item) {
        struct copy_owner owner = owner_of(space, item->copy);
        bool there = place_ends(space, item->copy, PLACE_HERE);

        catalog_drop(&file->catalog, (uint32_t)item->place);
        if (there && owner.sequence)
                copy_came(space, &owner, 0);
}

/* The disk process was lost, but not the copy. True: it is requested again. */
static bool again(struct file *file, struct space *space, uint32_t place) {
        struct place *p = place_moved(space, place);
        struct copy_owner owner = owner_of(space, place);
        uint8_t tries = (uint8_t)(p->tries + 1);

        if (p->erased || !owner.sequence || tries == TRIES || readable(file) < 0)
                return false;
        place_ends(space, place, PLACE_BELOW);
        copy_wanted(space, &owner);
        p->tries = tries;
        return true;
}

/* The error for a copy's owner. Only -ENOMEM, no memory to read into, means that it is not lost. */
static int judged(int error) {
        return error == -EBADMSG || error == -ENOMEM ? error : -EIO;
}

static void has_read(struct file *file, struct space *space, const struct store_disk_item *item,
                     int error, bool answered) {
        struct file_count *count = &file->disk.count;
        int off = readable(file);

        count->copies_read += !error;
        count->wrong += error == -EBADMSG;
        file_count_error(count, error == -EBADMSG ? 0 : error);
        if (!error)
                count->read_bytes += bytes_of(file, (uint32_t)item->place);
        if (!space)
                catalog_drop(&file->catalog, (uint32_t)item->place);
        else if (!error)
                came(file, space, item);
        else if (answered || !again(file, space, item->copy))
                not_come(file, space, item->copy, answered ? judged(error) : off ?: error);
}

/* ---- requests -------------------------------------------------------------------------------- */

/* Reads come first, since clients wait for them. If they lack memory, writes make some. */
static void next(struct file *file, bool *later) {
        const struct kvd_list *wanted = &file->disk.wanted;
        const struct kvd_list_node *last = wanted->last, *node = NULL;

        if (host_is_all(file))
                return;
        for (uint32_t i = 0; i < WAITING && node != last && file_is_idle(file); i++) {
                node = wanted->first;
                if (node)
                        read_some(file, container_of(node, struct file_wanted, node));
        }
        if (file_is_idle(file))
                write_next(file, later);
        *later |= wanted->first != NULL;
}

static void done(struct file *file, const int32_t *errors, uint32_t n) {
        struct store_disk_question *q = &file->disk.question;
        bool writes = q->what == STORE_DISK_WRITE;

        for (uint32_t i = 0; i < q->n; i++) {
                int error = i < n ? errors[i] : -ECANCELED;

                file->copies_go -= writes ? bytes_of(file, (uint32_t)q->items[i].place) : 0;
                (writes ? written : has_read)(file, q->space, &q->items[i], error, i < n);
        }
        if (writes && q->space)
                copies_room_again(q->space);
}

/* Tells the owners of copies that are being read that they miss. The reads themselves go on. */
static void miss_question(struct file *file) {
        const struct store_disk_question *q = &file->disk.question;
        bool reads = q->copies && q->space && q->what == STORE_DISK_READ;

        for (uint32_t i = 0; reads && i < q->n; i++) {
                struct place *p = place_moved(q->space, q->items[i].copy);
                struct copy_owner owner = owner_of(q->space, q->items[i].copy);

                p->sequence = 0;
                if (owner.sequence && !p->erased)
                        copy_came(q->space, &owner, said(file, p->record, readable(file)));
        }
}

/* Owners of waiting copies are told a piece at a time (copies_miss_some). */
static void miss(struct file *file) {
        struct kvd_list_node *node = file->disk.wanted.first;

        miss_question(file);
        for (; node; node = node->next)
                space_is_busy(container_of(node, struct file_wanted, node)->space);
}

const struct file_copies file_copies = {.next = next, .done = done, .miss = miss};

bool copies_miss_some(struct file *file, struct space *space) {
        struct file_wanted *w = &file_space_of(space)->wanted;

        if (!catalog_is_off(&file->catalog))
                return false;
        miss_some(file, w, readable(file));
        return w->first != KVD_NOWHERE;
}

/* ---- spaces ---------------------------------------------------------------------------------- */

/* The slots of the space's copies are freed with their places (below/place.c). */
void copies_space_leaves(struct space *space) {
        kvd_list_remove(&file_space_of(space)->wanted.node);
}
