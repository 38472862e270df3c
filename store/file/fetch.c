/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Fetching chains from the file. When a fetch begins, it selects its records and keeps the tokens
 * that they must have. It reads them in the chain's order, and seals the blocks. It ends early at a
 * record that is wrong, cannot be read, or finds no room. Then blocks beyond that one are freed; of
 * a bidirectional prefix, all blocks. The eventfd tells the client that the fetch has ended; the
 * client then looks up what is there.
 */

#include <errno.h>
#include <string.h>

#include "store/cache/inside.h"
#include "store/file/file.h"

#define AT_WORK 64u /* fetches that have blocks to read into, at most; others wait */

/* ---- its end --------------------------------------------------------------------------------- */

static struct fetch *fetch_of(struct kvd_list_node *node) {
        return container_of(node, struct fetch, to.waiting);
}

static void fetch_end(struct fetch *f) {
        f->file->queue--;
        bring_end(&f->to);
}

/* Frees a step's block, which is not being read into. */
static void let_go(struct fetch *f, uint32_t i) {
        struct fetch_step *step = &f->steps[i];

        if (step->state == FETCH_ROOM)
                f->file->catalog.entries[step->place].busy--;
        bring_settle(&f->to, step->block, NULL, false);
        step->state = FETCH_WANTED;
}

/*
 * Shortens a fetch to end before that step; for a bidirectional prefix, where it is now. Blocks
 * beyond the end that are being read into are freed with the answer.
 */
static void cut(struct fetch *f, uint32_t end) {
        if (end < f->n && space_finds_whole(f->to.space))
                end = f->at;
        for (uint32_t i = end; i < f->taken; i++)
                if (f->steps[i].state == FETCH_ROOM || f->steps[i].state == FETCH_HERE)
                        let_go(f, i);
        f->n = MIN(f->n, end);
        f->taken = MIN(f->taken, f->n);
}

/* Tells the client at once, but keeps the fetch until its reads have ended. */
static void end_if_over(struct fetch *f) {
        if (f->at < f->n && f->to.attachment)
                return;
        cut(f, f->at);
        bring_tell(&f->to);
        if (!f->under_way)
                fetch_end(f);
}

static void forget(struct file *file, struct fetch *f) {
        if (file->disk.reading == f)
                file->disk.reading = NULL;
        f->under_way = 0;
}

void fetches_end(struct file *file, const struct space *space, const struct attachment *a) {
        struct kvd_list_node *next;

        for (struct kvd_list_node *node = file->fetches.first; node; node = next) {
                struct fetch *f = fetch_of(node);

                next = node->next;
                if ((space && f->to.space != space) || (a && f->to.attachment != a))
                        continue;
                if (space && !a)
                        forget(file, f);
                f->to.attachment = NULL;
                end_if_over(f);
        }
}

void fetches_miss(struct file *file, const struct fetch *but) {
        struct kvd_list_node *next;

        for (struct kvd_list_node *node = file->fetches.first; node; node = next) {
                struct fetch *f = fetch_of(node);

                next = node->next;
                if (f == but)
                        continue;
                cut(f, f->at);
                end_if_over(f);
        }
}

/* ---- its beginning --------------------------------------------------------------------------- */

/* The records that a client's request finds after the resident blocks; file->steps has them. */
struct found {
        struct chain_at at; /* the end of the resident blocks */
        uint32_t up, n;     /* at's record, or CATALOG_NOWHERE; n: records after it */
        uint64_t root;      /* of the records */
};

/* The next record, after up. Returns its place, or CATALOG_NOWHERE. */
static uint32_t find_step(struct file *file, struct kvd_label *label, uint32_t up,
                          const uint32_t *tokens, struct fetch_step *ret) {
        uint32_t place = file_record_behind(file, label, up, tokens);

        if (place == CATALOG_NOWHERE)
                return place;
        if (up != CATALOG_NOWHERE)
                catalog_link(&file->catalog, place, up);
        *ret = (struct fetch_step){.place = place,
                                   .sequence = file->catalog.entries[place].sequence};
        return place;
}

/* Finds the records after the resident blocks, one after the other. */
static void find_steps(struct file *file, struct space *space, const struct fetch_request *q,
                       struct found *found) {
        uint32_t bt = space_full_tokens(space, q->group), up = found->up;
        struct chain_at at = found->at;
        int number = file_space_number(file, space);
        const uint32_t *tokens = q->tokens + (size_t)(at.depth - bring_before(space, q)) * bt;
        struct kvd_label label = {.epoch = file->catalog.spaces[number].epoch, .group = q->group};

        label.root = found->root = file_root(space, found->at.root, q->tokens);
        while (found->n < KVD_FETCH_BLOCKS && bring_reaches(space, q, &at)) {
                label.n_tokens = tokens_at(space, at.group, at.root, at.depth);
                up = find_step(file, &label, up, tokens, &file->steps[found->n]);
                if (up == CATALOG_NOWHERE)
                        break;
                found->n++;
                at.depth++;
                tokens += bt;
        }
}

/* Number of the chain's tokens that are resident or will be. */
static int64_t tokens_of(const struct space *space, const struct found *found,
                         const struct fetch_request *q) {
        uint64_t n = (uint64_t)(found->at.depth + found->n) * space_full_tokens(space, q->group);

        return (int64_t)MIN(n, bring_end_of(space, q));
}

/* Finds all of a bidirectional prefix or nothing. */
static void find(struct file *file, struct space *space, const struct fetch_request *q,
                 struct found *ret) {
        *ret = (struct found){.at = bring_walk(space, q), .up = CATALOG_NOWHERE};
        if (!file || file_space_number(file, space) < 0)
                return;
        if (ret->at.leaf)
                ret->up = file_record_of(file, space, kvd_ref_id(ret->at.leaf));
        if (ret->at.leaf && ret->up == CATALOG_NOWHERE)
                return;
        find_steps(file, space, q, ret);
        if (space_finds_whole(space) && tokens_of(space, ret, q) != q->n_tokens)
                ret->n = 0;
}

/* From the end to the beginning, so that parents are warmer than their children. */
static void warm_up(struct fetch *f) {
        for (uint32_t i = f->n; i-- > 0;)
                catalog_touch(&f->file->catalog, f->steps[i].place);
}

static int begin(struct file *file, struct attachment *a, const struct fetch_request *q,
                 const struct found *found, int *fd) {
        uint32_t bt = space_full_tokens(a->space, q->group);
        uint64_t first = (uint64_t)found->at.depth * bt;
        uint32_t before = bring_before(a->space, q);
        size_t steps = found->n * sizeof(struct fetch_step);
        size_t tokens = (size_t)((uint64_t)tokens_of(a->space, found, q) - first) *
                        sizeof(uint32_t);
        struct bringing *to;
        struct fetch *f;
        int r = bring_begin(&file->fetches, sizeof *f + steps + tokens, a, q, &found->at, &to);

        if (r < 0)
                return r;
        f = container_of(to, struct fetch, to);
        f->file = file;
        f->record = found->up == CATALOG_NOWHERE ? 0 : file->catalog.entries[found->up].sequence;
        f->root = found->root;
        f->first_depth = found->at.depth;
        f->n = found->n;
        f->steps = memcpy(f + 1, file->steps, steps);
        f->tokens = memcpy(f->steps + f->n, q->tokens + (size_t)(found->at.depth - before) * bt,
                           tokens);
        *fd = to->fd;
        file->n_fetches++;
        file->queue++;
        warm_up(f);
        file_want(file, true);
        return 0;
}

int64_t space_fetch(struct attachment *a, const struct fetch_request *q, int *fd) {
        struct space *space = a->space;
        struct file *file = file_for(space);
        struct found found;
        int r = 0;

        *fd = -1;
        if (!kvd_has_group(space->ix, q->group))
                return store_refuse(space_store(space), -EINVAL, "there is no such layer group");
        if (q->salt && space_finds_whole(space))
                return store_refuse(space_store(space), -EINVAL, "salts are for causal spaces");
        r = bring_check(space, q);
        if (r < 0)
                return r;
        find(file, space, q, &found);
        if (found.n)
                r = begin(file, a, q, &found, fd);
        return r < 0 ? r : tokens_of(space, &found, q);
}

/* ---- requests -------------------------------------------------------------------------------- */

static struct kvd_label label_of(const struct fetch *f, uint32_t i) {
        const struct catalog *c = &f->file->catalog;
        int number = file_space_number(f->file, f->to.space);

        return (struct kvd_label){.sequence = f->steps[i].sequence,
                                  .parent = i ? f->steps[i - 1].sequence : f->record,
                                  .epoch = c->spaces[number].epoch,
                                  .root = f->root,
                                  .group = f->to.chain.group,
                                  .depth = f->first_depth + i,
                                  .n_tokens = tokens_at(f->to.space, f->to.chain.group,
                                                        f->to.chain.root, f->first_depth + i)};
}

/*
 * Takes a block for the next step. Steps get blocks in the chain's order, so that none takes room
 * that a step before it needs. False: the record has been evicted, or there is no room.
 */
static bool take_room(struct fetch *f, uint32_t *reads) {
        struct fetch_step *step = &f->steps[f->taken];
        bool there = catalog_has(&f->file->catalog, step->place, step->sequence);

        step->block = there ? room_take(f->to.space, f->to.attachment->arena, reads) : 0;
        if (!step->block) {
                if (!there || *reads)
                        cut(f, f->taken);
                return false;
        }
        block_hold(f->to.space, kvd_ref_id(step->block));
        f->file->catalog.entries[step->place].busy++;
        step->state = FETCH_ROOM;
        f->taken++;
        return true;
}

/* False: the disk's request takes no more. */
static bool add_read(struct fetch *f, uint32_t i) {
        uint32_t bt = space_full_tokens(f->to.space, f->to.chain.group);
        struct fetch_step *step = &f->steps[i];

        if (!host_takes(f->file, step->place)) {
                if (!f->file->disk.question.n)
                        cut(f, i);
                return false;
        }
        file_question_add(f->file, &(struct store_disk_item){.place = step->place,
                                                             .step = i,
                                                             .label = label_of(f, i),
                                                             .block = step->block,
                                                             .tokens = f->tokens + i * bt});
        step->state = FETCH_ASKED;
        return !file_question_is_full(f->file);
}

/* False: the disk takes no request now. One that will soon is kept for fetches. */
static bool begin_question(struct fetch *f) {
        bool may = file_is_idle(f->file) && host_may_begin(f->file, f->to.space);

        f->file->disk.awaited |= file_is_idle(f->file) && !may;
        if (may)
                file_begin_question(f->file, STORE_DISK_READ, f->to.space);
        return may;
}

static void end_question(struct fetch *f) {
        struct file_disk *d = &f->file->disk;

        if (!d->question.n)
                return;
        d->reading = f;
        d->reads_in_a_row++;
        f->under_way++;
        file_question_ready(f->file);
}

static void plan(struct fetch *f, uint32_t *reads) {
        bool open = begin_question(f);

        if (!open)
                return;
        for (uint32_t i = f->at; i < f->n && open; i++) {
                if (i == f->taken && !take_room(f, reads))
                        break;
                if (f->steps[i].state == FETCH_ROOM)
                        open = add_read(f, i);
        }
        end_question(f);
}

/* The whole prefix became resident before the fetch began. */
static bool is_needless(const struct fetch *f) {
        return !f->taken && bring_is_needless(&f->to, f->tokens);
}

bool fetch_next(struct file *file, bool *later) {
        uint32_t reads = KVD_PIN_READS;
        struct kvd_list_node *next = file->fetches.first;

        file->disk.awaited = false;
        for (uint32_t i = 0; i < AT_WORK && next && file_is_idle(file); i++) {
                struct fetch *f = fetch_of(next);

                next = next->next;
                if (is_needless(f))
                        cut(f, 0);
                else
                        plan(f, &reads);
                if (!reads) {
                        *later = true; /* the search for room has not ended */
                        return false;
                }
                end_if_over(f);
        }
        return true;
}

/* ---- answers --------------------------------------------------------------------------------- */

static void record_read(struct file *file, const struct store_disk_item *item, int error) {
        struct catalog *c = &file->catalog;
        uint32_t place = (uint32_t)item->place;
        struct file_count *count = host_count(file, item);

        c->entries[place].busy--;
        count->hits += !error;
        count->misses += error != 0;
        count->wrong += error == -EBADMSG;
        file_count_error(count, error == -EBADMSG ? 0 : error);
        if (!error)
                count->read_bytes += c->extents[place / FILE_SLOTS].slot_bytes;
        else if (error != -ECANCELED && !c->entries[place].busy)
                catalog_drop(c, place);
}

/* If the fetch has been cut before that step, the block is freed. */
static void step_read(struct fetch *f, const struct store_disk_item *item, int error) {
        uint32_t i = item->step;

        f->steps[i].state = FETCH_HERE;
        if (i >= f->n)
                let_go(f, i);
        else if (error)
                cut(f, i);
}

/* Seals the next steps of the chain, as far as they have been read without a gap. */
static void go_on(struct file *file, struct fetch *f) {
        uint32_t bt = space_full_tokens(f->to.space, f->to.chain.group);

        while (f->at < f->taken && f->steps[f->at].state == FETCH_HERE) {
                struct fetch_step *step = &f->steps[f->at];
                kvd_ref there = bring_settle(&f->to, step->block, f->tokens + f->at * bt, true);

                step->state = FETCH_WANTED;
                if (!there) {
                        cut(f, f->at);
                        return;
                }
                f->at++;
                file_note_record(f->to.space, kvd_ref_id(there), step->place, step->sequence);
        }
}

void fetch_done(struct file *file, const int32_t *errors, uint32_t n) {
        struct store_disk_question *q = &file->disk.question;
        struct fetch *f = STEAL(file->disk.reading);

        for (uint32_t i = 0; i < q->n; i++) {
                int error = i < n ? errors[i] : -ECANCELED;

                if (f)
                        step_read(f, &q->items[i], error);
                record_read(file, &q->items[i], error);
        }
        if (!f)
                return;
        f->under_way--;
        go_on(file, f);
        end_if_over(f);
}
