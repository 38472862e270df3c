/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What fetches (store/below/bring.h) ask the file: which records continue a chain, and the bytes of
 * these. The names of a fetch's blocks are those of records (struct below_name).
 */

#include <errno.h>

#include "store/below/bring.h"
#include "store/cache/inside.h"
#include "store/file/file.h"

/* ---- records that a chain has ---------------------------------------------------------------- */

/* Names the record. */
static struct below_name name_of(const struct file *file, uint32_t place) {
        return (struct below_name){{file->catalog.entries[place].sequence, place}};
}

/* Finds the records after the resident blocks, the last of which has the one at up. */
static uint32_t find_records(struct file *file, struct space *space, const struct fetch_request *q,
                             struct chain_at at, uint32_t up, uint64_t root) {
        uint32_t bt = space_full_tokens(space, q->group), n = 0, place;
        const uint32_t *tokens = q->tokens + (size_t)(at.depth - bring_before(space, q)) * bt;
        int number = file_space_number(file, space);
        struct kvd_label label = {.epoch = file->catalog.spaces[number].epoch,
                                  .group = q->group,
                                  .root = root};

        uint32_t most = space_finds_whole(space) ? KVD_WHOLE_BLOCKS : KVD_FETCH_BLOCKS;

        for (; n < most && bring_reaches(space, q, &at); at.depth++, tokens += bt) {
                label.n_tokens = tokens_at(space, at.group, at.root, at.depth);
                place = file_record_behind(file, &label, up, tokens);
                if (place == CATALOG_NOWHERE)
                        break;
                if (up != CATALOG_NOWHERE)
                        catalog_link(&file->catalog, place, up);
                file->names[n++] = name_of(file, place);
                up = place;
        }
        return n;
}

/* From the end to the beginning, so that parents are warmer than their children. */
static void warm_up(struct file *file, uint32_t n) {
        while (n--)
                catalog_touch(&file->catalog, (uint32_t)file->names[n].word[1]);
}

/* Finds all of a bidirectional prefix or nothing. */
bool file_find(struct below *b, struct space *space, const struct fetch_request *q,
               const struct chain_at *at, struct below_found *ret) {
        uint64_t begin = (uint64_t)at->depth * space_full_tokens(space, q->group), end, root;
        struct file *file = file_of(b);
        uint32_t up = CATALOG_NOWHERE, n;

        if (!file_for(space) || file_space_number(file, space) < 0)
                return false;
        if (at->leaf)
                up = file_record_of(file, space, kvd_ref_id(at->leaf));
        if (at->leaf && up == CATALOG_NOWHERE)
                return false;
        root = file_root(space, at->root, q->tokens);
        n = find_records(file, space, q, *at, up, root);
        end = MIN(begin + (uint64_t)n * space_full_tokens(space, q->group), bring_end_of(space, q));
        if (!n || (space_finds_whole(space) && end != q->n_tokens))
                return false;
        warm_up(file, n);
        *ret = (struct below_found){.n = n,
                                    .n_tokens = (uint32_t)(end - begin),
                                    .before = {{at->leaf ? file->catalog.entries[up].sequence : 0,
                                                root}},
                                    .names = file->names};
        return true;
}

/* ---- requests -------------------------------------------------------------------------------- */

static uint32_t place_of(const struct fetch *f, uint32_t i) {
        return (uint32_t)f->names[i + 1].word[1];
}

static struct kvd_label label_of(struct file *file, const struct fetch *f, uint32_t i) {
        int number = file_space_number(file, f->space);

        return (struct kvd_label){.sequence = f->names[i + 1].word[0],
                                  .parent = f->names[i].word[0],
                                  .epoch = file->catalog.spaces[number].epoch,
                                  .root = f->names[0].word[1],
                                  .group = f->chain.group,
                                  .depth = f->depth + i,
                                  .n_tokens = fetch_n_tokens(f, i)};
}

bool file_may_begin(struct below *b, struct space *space) {
        return file_is_idle(file_of(b)) && host_may_begin(file_of(b), space);
}

void file_begin_read(struct below *b, struct space *space) {
        file_begin_question(file_of(b), STORE_DISK_READ, space);
}

bool file_may_read(struct below *b, const struct fetch *f, uint32_t i) {
        struct file *file = file_of(b);

        return catalog_has(&file->catalog, place_of(f, i), f->names[i + 1].word[0]) &&
               host_takes(file, place_of(f, i));
}

void file_add_read(struct below *b, const struct fetch *f, uint32_t i, kvd_ref to) {
        struct file *file = file_of(b);

        file->catalog.entries[place_of(f, i)].busy++;
        file_question_add(file, &(struct store_disk_item){.place = place_of(f, i),
                                                          .label = label_of(file, f, i),
                                                          .block = to,
                                                          .tokens = fetch_tokens(f, i)});
}

void file_end_read(struct below *b) {
        file_question_ready(file_of(b));
}

/* ---- answers --------------------------------------------------------------------------------- */

void file_was_read(struct below *b, uint32_t i, int error) {
        struct file *file = file_of(b);
        const struct store_disk_item *item = &file->disk.question.items[i];
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

void file_note_name(struct below *b, struct space *space, uint32_t id, struct below_name name) {
        file_note_record(space, id, (uint32_t)name.word[1], name.word[0]);
}
