/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The catalog is a table with an entry for each place of the volume. Only entries that were used
 * take memory. No function here reads a disk, and each takes a bounded number of steps.
 */

#include "store/file/catalog.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "ipc/base/sys.h"

#define BUCKET_BYTES (UINT64_C(256) << 10) /* bytes of the file for each bucket */
#define LOOKS 64u /* records that one search looks at, in a bucket or from the cold end */

/* ---- life ------------------------------------------------------------------------------------ */

static uint64_t n_entries(const struct catalog *c) {
        return (uint64_t)c->n_extents * FILE_SLOTS;
}

static void *table(uint64_t n, size_t size) {
        void *at = sys->mmap(NULL, n * size, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

        return at == MAP_FAILED ? NULL : at;
}

int catalog_open(struct catalog *c, uint64_t extent_bytes, uint32_t n_extents) {
        uint64_t bytes;

        *c = (struct catalog){.extent_bytes = extent_bytes,
                              .n_extents = MIN(n_extents, UINT32_MAX / FILE_SLOTS),
                              .coldest = CATALOG_NOWHERE,
                              .warmest = CATALOG_NOWHERE};
        bytes = c->n_extents * extent_bytes;
        c->most_copy_bytes = bytes / CATALOG_COPIES;
        c->n_buckets = (uint32_t)pow2_up(MIN(MAX(bytes / BUCKET_BYTES, 1024), UINT64_C(1) << 26));
        c->extents = table(c->n_extents, sizeof *c->extents);
        c->entries = table(n_entries(c), sizeof *c->entries);
        c->buckets = table(c->n_buckets, sizeof *c->buckets);
        if (!c->extents || !c->entries || !c->buckets)
                return -ENOMEM;
        for (uint32_t i = 0; i < c->n_extents; i++)
                kvd_list_insert(&c->empty, NULL, &c->extents[i].node);
        return 0;
}

void catalog_close(struct catalog *c) {
        if (c->extents)
                munmap(c->extents, c->n_extents * sizeof *c->extents);
        if (c->entries)
                munmap(c->entries, n_entries(c) * sizeof *c->entries);
        if (c->buckets)
                munmap(c->buckets, c->n_buckets * sizeof *c->buckets);
        *c = (struct catalog){0};
}

/* ---- namespaces ------------------------------------------------------------------------------ */

int catalog_space(struct catalog *c, struct kvd_key id, bool enter) {
        int unused = -1;

        for (uint32_t i = 0; i < FILE_NAMESPACES; i++) {
                if (!c->spaces[i].used)
                        unused = (int)i;
                else if (!c->spaces[i].dead && kvd_key_equal(c->spaces[i].id, id))
                        return (int)i;
        }
        if (!enter || unused < 0)
                return -1;
        c->spaces[unused] = (struct catalog_namespace){.id = id, .used = true};
        return unused;
}

int catalog_space_of_epoch(const struct catalog *c, uint64_t epoch) {
        for (uint32_t i = 0; i < FILE_NAMESPACES; i++)
                if (c->spaces[i].used && !c->spaces[i].dead && c->spaces[i].epoch == epoch)
                        return (int)i;
        return -1;
}

/* Bytes of all namespaces with the same owner. */
static struct catalog_namespace sum_of_owner(const struct catalog *c, int space) {
        struct catalog_namespace sum = {0};

        for (uint32_t i = 0; i < FILE_NAMESPACES; i++) {
                if (!c->spaces[i].used || c->spaces[i].owner != c->spaces[space].owner)
                        continue;
                sum.bytes += c->spaces[i].bytes;
                sum.copy_bytes += c->spaces[i].copy_bytes;
        }
        return sum;
}

/* ---- by key ---------------------------------------------------------------------------------- */

static uint32_t *bucket_of(const struct catalog *c, uint64_t tag) {
        return &c->buckets[(tag >> 32) & (c->n_buckets - 1)];
}

uint32_t catalog_find(const struct catalog *c, uint64_t tag) {
        uint32_t next = *bucket_of(c, tag);

        for (uint32_t i = 0; next && i < LOOKS; i++) {
                const struct catalog_entry *e = &c->entries[next - 1];

                if (e->tag == tag && !c->spaces[e->space].dead && !catalog_is_off(c))
                        return next - 1;
                next = e->same;
        }
        return CATALOG_NOWHERE;
}

static void hash_add(struct catalog *c, uint32_t place) {
        uint32_t *bucket = bucket_of(c, c->entries[place].tag);

        c->entries[place].same = *bucket;
        *bucket = place + 1;
}

static void hash_remove(struct catalog *c, uint32_t place) {
        uint32_t *link = bucket_of(c, c->entries[place].tag);

        while (*link && *link != place + 1)
                link = &c->entries[*link - 1].same;
        if (*link)
                *link = c->entries[place].same;
}

/* ---- in the order of use --------------------------------------------------------------------- */

/*
 * The LRU list contains only records without children: others cannot be evicted, however cold they
 * are, and would only slow down the search.
 */
static void use_remove(struct catalog *c, uint32_t place) {
        const struct catalog_entry *e = &c->entries[place];

        *(e->older == CATALOG_NOWHERE ? &c->coldest : &c->entries[e->older].newer) = e->newer;
        *(e->newer == CATALOG_NOWHERE ? &c->warmest : &c->entries[e->newer].older) = e->older;
}

/* newer: its neighbour in the list; CATALOG_NOWHERE: it becomes the warmest */
static void use_insert(struct catalog *c, uint32_t place, uint32_t newer) {
        struct catalog_entry *e = &c->entries[place];

        e->newer = newer;
        e->older = newer == CATALOG_NOWHERE ? c->warmest : c->entries[newer].older;
        *(e->older == CATALOG_NOWHERE ? &c->coldest : &c->entries[e->older].newer) = place;
        *(newer == CATALOG_NOWHERE ? &c->warmest : &c->entries[newer].older) = place;
}

/*
 * The record has no children any more. It is inserted by its last use if that is among the coldest
 * LOOKS records, and otherwise as the warmest.
 */
static void use_return(struct catalog *c, uint32_t place) {
        uint32_t newer = c->coldest;

        for (uint32_t i = 0;
             newer != CATALOG_NOWHERE && c->entries[newer].used_ns <= c->entries[place].used_ns;
             i++)
                newer = i < LOOKS ? c->entries[newer].newer : CATALOG_NOWHERE;
        use_insert(c, place, newer);
}

static void use_add(struct catalog *c, uint32_t place) {
        c->entries[place].used_ns = sys_now_ns();
        use_insert(c, place, CATALOG_NOWHERE);
}

void catalog_touch(struct catalog *c, uint32_t place) {
        if (c->entries[place].children) {
                c->entries[place].used_ns = sys_now_ns();
                return;
        }
        use_remove(c, place);
        use_add(c, place);
}

uint64_t catalog_age(const struct catalog *c) {
        return c->coldest == CATALOG_NOWHERE ? 0 : sys_now_ns() - c->entries[c->coldest].used_ns;
}

/* ---- slots ----------------------------------------------------------------------------------- */

static struct catalog_extent *extent_of(struct catalog *c, uint32_t place) {
        return &c->extents[place / FILE_SLOTS];
}

static uint32_t first_place(const struct catalog *c, const struct catalog_extent *e) {
        return (uint32_t)(e - c->extents) * FILE_SLOTS;
}

/* NULL: there are too many sizes. */
static struct catalog_class *class_of(struct catalog *c, uint32_t slot_bytes) {
        struct catalog_class *unused = NULL;

        for (uint32_t i = 0; i < CATALOG_CLASSES; i++) {
                if (c->classes[i].extents && c->classes[i].slot_bytes == slot_bytes)
                        return &c->classes[i];
                if (!unused && !c->classes[i].extents)
                        unused = &c->classes[i];
        }
        if (unused)
                unused->slot_bytes = slot_bytes;
        return unused;
}

static bool extent_has_room(const struct catalog_extent *e) {
        return e->used < e->slots;
}

static void extent_begin(struct catalog *c, struct catalog_extent *e, struct catalog_class *class) {
        kvd_list_remove(&e->node);
        class->extents++;
        e->slot_bytes = class->slot_bytes;
        e->slots = file_slots(c->extent_bytes, class->slot_bytes);
        e->used = e->fresh = 0;
        e->free = CATALOG_NOWHERE;
        kvd_list_insert(&class->roomy, NULL, &e->node);
}

/* The extent has no records any more: makes it available for any slot size. */
static void extent_end(struct catalog *c, struct catalog_extent *e) {
        class_of(c, e->slot_bytes)->extents--;
        kvd_list_remove(&e->node);
        e->slot_bytes = 0;
        kvd_list_insert(&c->empty, c->empty.first, &e->node);
}

static uint32_t slot_take(struct catalog *c, struct catalog_extent *e) {
        uint32_t place = e->free;

        if (place == CATALOG_NOWHERE)
                place = first_place(c, e) + e->fresh++;
        else
                e->free = c->entries[place].older;
        e->used++;
        if (!extent_has_room(e))
                kvd_list_remove(&e->node);
        return place;
}

static void slot_give(struct catalog *c, uint32_t place) {
        struct catalog_extent *e = extent_of(c, place);

        c->entries[place] = (struct catalog_entry){.older = e->free};
        e->free = place;
        if (!extent_has_room(e))
                kvd_list_insert(&class_of(c, e->slot_bytes)->roomy, NULL, &e->node);
        e->used--;
        if (!e->used)
                extent_end(c, e);
}

/* ---- hints for clients ----------------------------------------------------------------------- */

/* The slot with a record's hint; with value 0: the first free slot for one. NULL if none. */
static shm_u64 *hint_find(const struct kvd_index *ix, uint64_t hint, uint64_t value) {
        for (uint32_t i = 0; i < KVD_BUCKETS * KVD_BUCKET_SLOTS; i++) {
                shm_u64 *slot = kvd_index_hint(ix, hint, i);

                if (atomic_load_explicit(slot, memory_order_relaxed) == value)
                        return slot;
        }
        return NULL;
}

static void hint_set(const struct catalog *c, const struct catalog_entry *e, bool there) {
        const struct kvd_index *ix = c->spaces[e->space].told;
        uint64_t value = kvd_hint_slot(e->hint, file_handle(e->sequence));
        shm_u64 *slot;

        if (!ix)
                return;
        slot = hint_find(ix, e->hint, value);
        if (there && !slot)
                slot = hint_find(ix, e->hint, 0);
        if (slot)
                atomic_store_explicit(slot, there ? value : 0, memory_order_relaxed);
}

void catalog_tell(struct catalog *c, int space, struct kvd_index *ix) {
        c->spaces[space].told = ix && ix->hint_slots ? ix : NULL;
}

#define TOLD_AT_ONCE 1024u

uint32_t catalog_tell_some(struct catalog *c, int space, uint32_t from) {
        uint32_t all = c->n_extents * FILE_SLOTS;

        for (uint32_t n = 0; from < all && n < TOLD_AT_ONCE; n++, from++) {
                const struct catalog_entry *e = &c->entries[from];

                if (!c->extents[from / FILE_SLOTS].slot_bytes)
                        from |= FILE_SLOTS - 1;
                else if (e->state == CATALOG_THERE && e->space == space)
                        hint_set(c, e, true);
        }
        return from < all ? from : CATALOG_NOWHERE;
}

/* ---- records --------------------------------------------------------------------------------- */

static void parent_changes(struct catalog *c, uint32_t place, int by) {
        uint32_t up = c->entries[place].up;
        struct catalog_entry *parent = &c->entries[up];

        if (up == CATALOG_NOWHERE || !catalog_has(c, up, c->entries[place].parent))
                return;
        if (!parent->children)
                use_remove(c, up);
        parent->children += (uint32_t)by;
        if (!parent->children)
                use_return(c, up);
}

static void count(struct catalog *c, uint32_t place, int by) {
        struct catalog_namespace *of = &c->spaces[c->entries[place].space];
        uint64_t bytes = (uint64_t)by * extent_of(c, place)->slot_bytes;

        of->bytes += bytes;
        of->records += (uint64_t)by;
        c->bytes += bytes;
        c->records += (uint64_t)by;
}

void catalog_enter(struct catalog *c, uint32_t place, struct kvd_record_key key,
                   const struct kvd_label *label, uint32_t up, int space) {
        c->entries[place] = (struct catalog_entry){.tag = key.tag,
                                                   .hint = key.hint,
                                                   .sequence = label->sequence,
                                                   .parent = label->parent,
                                                   .up = up,
                                                   .state = CATALOG_WRITING,
                                                   .space = (uint8_t)space};
        hash_add(c, place);
        use_add(c, place);
        parent_changes(c, place, 1);
        count(c, place, 1);
}

void catalog_written(struct catalog *c, uint32_t place) {
        c->entries[place].state = CATALOG_THERE;
        hint_set(c, &c->entries[place], true);
}

static void count_copy(struct catalog *c, uint32_t place, int by) {
        uint64_t bytes = (uint64_t)by * extent_of(c, place)->slot_bytes;

        c->spaces[c->entries[place].space].bytes += bytes;
        c->spaces[c->entries[place].space].copy_bytes += bytes;
        c->copies += (uint64_t)by;
        c->bytes += bytes;
        c->copy_bytes += bytes;
}

static void record_leaves(struct catalog *c, uint32_t place) {
        if (c->gone)
                c->gone(c->data, place);
        hint_set(c, &c->entries[place], false);
        count(c, place, -1);
        parent_changes(c, place, -1);
        if (!c->entries[place].children)
                use_remove(c, place);
        hash_remove(c, place);
}

static void leave(struct catalog *c, uint32_t place) {
        struct catalog_namespace *of = &c->spaces[c->entries[place].space];

        if (c->entries[place].state == CATALOG_COPY)
                count_copy(c, place, -1);
        else
                record_leaves(c, place);
        if (of->dead && !of->records && !of->copy_bytes)
                *of = (struct catalog_namespace){0};
}

void catalog_drop(struct catalog *c, uint32_t place) {
        leave(c, place);
        slot_give(c, place);
}

void catalog_spoil(struct catalog *c, uint32_t place) {
        struct catalog_extent *e = extent_of(c, place);

        leave(c, place);
        if (extent_has_room(e))
                kvd_list_remove(&e->node);
        c->n_bad += !e->bad;
        e->bad = true;
        e->used = e->fresh = e->slots;
        e->free = CATALOG_NOWHERE;
        c->entries[place] = (struct catalog_entry){.state = CATALOG_BAD};
}

/* ---- room ------------------------------------------------------------------------------------ */

static bool may_go(const struct catalog_entry *e, uint64_t since_ns) {
        return e->state == CATALOG_THERE && !e->busy && !e->children && e->used_ns < since_ns;
}

/* The coldest record that may be evicted, of that owner (NULL: any). */
static uint32_t coldest(const struct catalog *c, const void *owner, uint32_t slot_bytes,
                        uint64_t since_ns) {
        uint32_t place = !catalog_is_off(c) ? c->coldest : CATALOG_NOWHERE;

        for (uint32_t i = 0; place != CATALOG_NOWHERE && i < LOOKS; i++) {
                const struct catalog_entry *e = &c->entries[place];
                bool his = !owner || c->spaces[e->space].owner == owner;

                if (may_go(e, since_ns) && his &&
                    (!slot_bytes || c->extents[place / FILE_SLOTS].slot_bytes == slot_bytes))
                        return place;
                place = e->newer;
        }
        return CATALOG_NOWHERE;
}

/* Evicts all records of an extent, even those with children. False: some of them are in use. */
static bool extent_clear(struct catalog *c, struct catalog_extent *e, uint64_t since_ns) {
        uint32_t first = first_place(c, e), n = e->fresh;

        for (uint32_t i = first; i < first + n; i++)
                if (c->entries[i].state == CATALOG_WRITING || c->entries[i].state == CATALOG_COPY ||
                    c->entries[i].busy || c->entries[i].used_ns >= since_ns)
                        return false;
        for (uint32_t i = first; i < first + n; i++) {
                if (c->entries[i].state != CATALOG_THERE)
                        continue;
                c->evicted++;
                catalog_drop(c, i);
        }
        return true;
}

static uint32_t take_free(struct catalog *c, uint32_t slot_bytes) {
        struct catalog_class *class = class_of(c, slot_bytes);
        struct catalog_extent *e;

        if (!class || !!catalog_is_off(c) || slot_bytes >= c->extent_bytes)
                return CATALOG_NOWHERE;
        e = kvd_list_first(&class->roomy, struct catalog_extent, node);
        if (!e) {
                e = kvd_list_first(&c->empty, struct catalog_extent, node);
                if (!e)
                        return CATALOG_NOWHERE;
                extent_begin(c, e, class);
        }
        return slot_take(c, e);
}

static bool drop_coldest(struct catalog *c, const void *owner, uint32_t slot_bytes,
                         uint64_t since_ns) {
        uint32_t place = coldest(c, owner, slot_bytes, since_ns);

        if (place == CATALOG_NOWHERE)
                return false;
        c->evicted++;
        catalog_drop(c, place);
        return true;
}

uint32_t catalog_take(struct catalog *c, uint32_t slot_bytes, int space, uint64_t most,
                      uint64_t since_ns) {
        uint32_t place, cold;

        if (sum_of_owner(c, space).bytes + slot_bytes > most &&
            !drop_coldest(c, c->spaces[space].owner, slot_bytes, since_ns))
                return CATALOG_NOWHERE;
        place = take_free(c, slot_bytes);
        if (place == CATALOG_NOWHERE && drop_coldest(c, NULL, slot_bytes, since_ns))
                place = take_free(c, slot_bytes);
        if (place != CATALOG_NOWHERE)
                return place;
        cold = coldest(c, NULL, 0, since_ns);
        if (cold == CATALOG_NOWHERE || !extent_clear(c, extent_of(c, cold), since_ns))
                return CATALOG_NOWHERE;
        return take_free(c, slot_bytes);
}

uint32_t catalog_take_copy(struct catalog *c, uint32_t slot_bytes, int space, uint64_t most,
                           uint64_t sequence) {
        uint32_t place;

        if (sum_of_owner(c, space).copy_bytes + slot_bytes > most / CATALOG_COPIES ||
            c->copy_bytes + slot_bytes > c->most_copy_bytes)
                return CATALOG_NOWHERE;
        place = catalog_take(c, slot_bytes, space, most, UINT64_MAX);
        if (place == CATALOG_NOWHERE)
                return place;
        c->entries[place] = (struct catalog_entry){.sequence = sequence,
                                                   .up = CATALOG_NOWHERE,
                                                   .state = CATALOG_COPY,
                                                   .space = (uint8_t)space};
        count_copy(c, place, 1);
        return place;
}

/* ---- records that the scan found ------------------------------------------------------------- */

/*
 * The first record that is found in an extent begins it. Records are found in the order of their
 * slots, so those that were passed over are free.
 */
static bool slot_found(struct catalog *c, uint32_t slot_bytes, uint32_t place) {
        struct catalog_extent *e = extent_of(c, place);
        struct catalog_class *class = class_of(c, slot_bytes);

        if (!class || (e->slot_bytes && e->slot_bytes != slot_bytes))
                return false;
        if (!e->slot_bytes)
                extent_begin(c, e, class);
        if (place % FILE_SLOTS >= e->slots || place % FILE_SLOTS < e->fresh)
                return false;
        while (e->fresh < place % FILE_SLOTS) {
                uint32_t before = first_place(c, e) + e->fresh++;

                c->entries[before] = (struct catalog_entry){.older = e->free};
                e->free = before;
        }
        e->fresh++;
        e->used++;
        if (!extent_has_room(e))
                kvd_list_remove(&e->node);
        return true;
}

void catalog_found(struct catalog *c, uint32_t slot_bytes, const struct kvd_disk_found *found) {
        int space = catalog_space_of_epoch(c, found->label.epoch);
        uint32_t place = (uint32_t)found->place, other = catalog_find(c, found->key.tag);

        if (space < 0 || found->place / FILE_SLOTS >= c->n_extents ||
            c->entries[place].state != CATALOG_FREE)
                return;
        if (other != CATALOG_NOWHERE && c->entries[other].sequence >= found->label.sequence)
                return;
        if (!slot_found(c, slot_bytes, place))
                return;
        catalog_enter(c, place, found->key, &found->label, CATALOG_NOWHERE, space);
        catalog_written(c, place);
        if (other != CATALOG_NOWHERE)
                catalog_drop(c, other);
}

void catalog_link(struct catalog *c, uint32_t place, uint32_t up) {
        if (c->entries[place].state == CATALOG_FREE || c->entries[place].up != CATALOG_NOWHERE ||
            !catalog_has(c, up, c->entries[place].parent))
                return;
        c->entries[place].up = up;
        parent_changes(c, place, 1);
}
