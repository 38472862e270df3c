/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chains that come back from the file. A fetch knows at its beginning which records it wants, and
 * the tokens they must have; it goes on a piece at a time, each behind what the last one brought,
 * and ends early where a record is not what it was, or where there is no room. Whoever asked is
 * told by a descriptor, and looks up what there is.
 */

#include <errno.h>
#include <string.h>

#include "store/cache/inside.h"
#include "store/file/file.h"

/* ---- its end --------------------------------------------------------------------------------- */

static void fetch_end(struct fetch *f) {
        bring_end(&f->to);
        f->file->info.queue--;
}

void fetches_end(struct file *file, const struct space *space, const struct attachment *a) {
        for (uint32_t i = 0; i < FETCHES; i++) {
                struct fetch *f = &file->all_fetches[i];

                if (!f->to.space || f->to.space != space || (a && f->to.attachment != a))
                        continue;
                if (a && f == file->reading) {
                        f->to.attachment = NULL; /* it ends with its answer */
                        continue;
                }
                if (f == file->reading)
                        file->reading = NULL;
                fetch_end(f);
        }
}

void fetches_end_all(struct file *file, bool wait) {
        for (uint32_t i = 0; i < FETCHES; i++) {
                struct fetch *f = &file->all_fetches[i];

                if (!f->to.space)
                        continue;
                f->to.attachment = NULL;
                if (wait && f == file->reading)
                        bring_tell(&f->to);
                else
                        fetch_end(f);
        }
}

#define WALK 4096u /* resident blocks of a chain that one request goes along */

/* ---- its beginning --------------------------------------------------------------------------- */

static struct fetch *unused_fetch(struct file *file) {
        for (uint32_t i = 0; i < FETCHES; i++)
                if (!file->all_fetches[i].to.space)
                        return &file->all_fetches[i];
        return NULL;
}

/* The records behind what is resident, one after the other. */
static void find_steps(struct fetch *f, struct space *space, const struct fetch_request *q,
                       const struct chain_at *at, uint32_t up) {
        uint32_t bt = space->ix->geometry.block_tokens, place = up;
        int number = file_space_number(f->file, space);
        struct catalog *c = &f->file->catalog;
        struct kvd_label label = {.epoch = c->spaces[number].epoch,
                                  .root = q->salt,
                                  .group = q->group,
                                  .n_tokens = bt};

        f->n = 0;
        f->record = up == CATALOG_NOWHERE ? 0 : c->entries[up].sequence;
        for (uint32_t depth = at->depth;
             (uint64_t)(depth + 1) * bt <= q->n_tokens && f->n < FETCH_BLOCKS &&
             (f->n + 1) * bt <= FETCH_TOKENS;
             depth++) {
                const uint32_t *tokens = q->tokens + depth * bt;

                label.parent = place == CATALOG_NOWHERE ? 0 : c->entries[place].sequence;
                up = place;
                place = catalog_find(c, file_tag(f->file->secret, &label, tokens));
                if (place == CATALOG_NOWHERE || c->entries[place].state != CATALOG_THERE)
                        break;
                if (up != CATALOG_NOWHERE)
                        catalog_link(c, place, up);
                memcpy(f->tokens + f->n * bt, tokens, bt * sizeof *tokens);
                f->steps[f->n++] = (struct fetch_step){place, c->entries[place].sequence};
        }
        f->first_depth = at->depth;
}

/* From its end on, so that what others are behind is the warmest. */
static void warm_up(struct fetch *f) {
        for (uint32_t i = f->n; i-- > 0;)
                catalog_touch(&f->file->catalog, f->steps[i].place);
}

static int begin(struct fetch *f, struct attachment *a, const struct chain_at *at, int *fd) {
        int r = bring_begin(&f->to, &f->file->fetches, a, at, fd);

        if (r < 0)
                return r;
        f->at = 0;
        f->file->info.fetches++;
        f->file->info.queue++;
        warm_up(f);
        file_want(f->file, true);
        return 0;
}

int64_t space_fetch(struct attachment *a, const struct fetch_request *q, int *fd) {
        struct space *space = a->space;
        struct file *file = file_for(space);
        struct chain_at at = chain_begin(space, q->group, q->salt);
        uint32_t bt = space->ix->geometry.block_tokens, up = CATALOG_NOWHERE;
        struct fetch *f;
        int r;

        *fd = -1;
        if (q->group >= space->ix->geometry.layer_groups)
                return store_refuse(space_store(space), -EINVAL, "there is no such layer group");
        while (at.depth < WALK && (uint64_t)(at.depth + 1) * bt <= q->n_tokens &&
               chain_step(space, &at, q->tokens + at.depth * bt))
                ;
        if (!file || file_space_number(file, space) < 0)
                return (int64_t)at.depth * bt;
        if (at.leaf)
                up = file_record_of(file, space, kvd_ref_id(at.leaf));
        if (at.leaf && up == CATALOG_NOWHERE)
                return (int64_t)at.depth * bt;
        f = unused_fetch(file);
        if (!f)
                return store_refuse(space_store(space), -EBUSY,
                                    "%u fetches are under way already; ask again later", FETCHES);
        find_steps(f, space, q, &at, up);
        r = f->n ? begin(f, a, &at, fd) : 0;
        return r < 0 ? r : (int64_t)(at.depth + f->n) * bt;
}

/* ---- a piece --------------------------------------------------------------------------------- */

static struct kvd_label label_of(const struct fetch *f, uint32_t i) {
        const struct catalog *c = &f->file->catalog;
        int number = file_space_number(f->file, f->to.space);

        return (struct kvd_label){.sequence = f->steps[i].sequence,
                                  .parent = i ? f->steps[i - 1].sequence : f->record,
                                  .epoch = c->spaces[number].epoch,
                                  .root = f->to.root,
                                  .group = f->to.group,
                                  .depth = f->first_depth + i,
                                  .n_tokens = f->to.space->ix->geometry.block_tokens};
}

/* False: the record went meanwhile, or there is no room for the block. */
static bool add_read(struct fetch *f, uint32_t i, uint32_t *reads) {
        struct catalog *c = &f->file->catalog;
        kvd_ref to;

        if (!catalog_has(c, f->steps[i].place, f->steps[i].sequence) ||
            !host_takes(f->file, f->steps[i].place))
                return false;
        to = room_take(f->to.space, f->to.attachment->arena, reads);
        if (!to)
                return false;
        block_hold(f->to.space, kvd_ref_id(to));
        c->entries[f->steps[i].place].busy++;
        file_question_add(f->file, &(struct store_disk_item){
                                           .place = f->steps[i].place,
                                           .label = label_of(f, i),
                                           .block = to,
                                           .tokens = f->tokens +
                                                     i * f->to.space->ix->geometry.block_tokens});
        return true;
}

static bool write_piece(struct fetch *f, uint32_t *reads) {
        const struct store_disk_question *q = &f->file->question;

        file_begin_question(f->file, STORE_DISK_READ, f->to.space);
        while (f->at + q->n < f->n && !file_question_is_full(f->file) &&
               add_read(f, f->at + q->n, reads))
                ;
        return q->n > 0;
}

bool fetch_next(struct file *file, bool *later) {
        uint32_t reads = KVD_PIN_READS;
        struct fetch *f;

        while ((f = kvd_list_first(&file->fetches, struct fetch, to.waiting)) && reads) {
                if (write_piece(f, &reads)) {
                        file->reading = f;
                        return true;
                }
                if (!reads) {
                        *later = true; /* room was not looked for to the end */
                        return false;
                }
                fetch_end(f);
        }
        return false;
}

static void record_read(struct file *file, const struct store_disk_item *item, int error) {
        struct catalog *c = &file->catalog;
        uint32_t place = (uint32_t)item->place;
        struct file_count *count = host_count(file, item);

        c->entries[place].busy--;
        count->hits += !error;
        count->misses += error != 0;
        count->wrong += error == -EBADMSG;
        count->errors += error && error != -EBADMSG;
        if (!error)
                count->read_bytes += c->extents[place / FILE_SLOTS].slot_bytes;
        else if (error != -ECANCELED && !c->entries[place].busy)
                catalog_drop(c, place);
}

/* Notes what came of an item. False: what is behind it cannot come. */
static bool settle(struct file *file, struct fetch *f, const struct store_disk_item *item,
                   bool filled) {
        kvd_ref there = bring_settle(&f->to, item->block, item->tokens, filled);

        if (!there)
                return false;
        f->at++;
        file_note_record(f->to.space, kvd_ref_id(there), (uint32_t)item->place,
                         item->label.sequence);
        return true;
}

void fetch_done(struct file *file, const int32_t *errors, uint32_t n) {
        struct store_disk_question *q = &file->question;
        struct fetch *f = file->reading;
        bool goes_on = true;

        file->reading = NULL;
        for (uint32_t i = 0; i < q->n; i++) {
                int error = i < n ? errors[i] : -ECANCELED;

                if (f)
                        goes_on = settle(file, f, &q->items[i], goes_on && !error);
                record_read(file, &q->items[i], error);
        }
        if (f && (!goes_on || f->at == f->n || !f->to.attachment))
                fetch_end(f);
}
