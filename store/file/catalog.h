/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_CATALOG_H
#define KVD_STORE_FILE_CATALOG_H

/*
 * The daemon's directory of its volume, in memory: which record is at which place. A record is
 * found by its key, and refers to its parent (the record before it in the chain) by place and
 * sequence. A record stays as long as it has children. The catalog also decides which record is
 * evicted for a new one: the coldest one without children or, where all extents have slots of
 * another size, all records of that one's extent. A place is extent x FILE_SLOTS + slot.
 */

#include "ipc/base/list.h"
#include "store/file/volume.h"

#define CATALOG_NOWHERE UINT32_MAX
#define CATALOG_CLASSES FILE_NAMESPACES /* slot sizes: each space has one */

struct catalog_namespace {
        struct kvd_key id;
        uint64_t epoch;         /* 0: not known yet */
        const void *owner;      /* a domain; NULL: not opened since the daemon started */
        struct kvd_index *told; /* index in which clients find hints of its records; or NULL */
        uint64_t bytes, records;
        uint64_t copy_bytes; /* part of bytes: exact copies, which are not counted in records */
        bool used, dead;     /* dead: it is being erased */
};

/*
 * BAD: a write failed; the slot is not used again before a restart. COPY: an exact copy
 * (cold_copies.c), which is never found by a key and never evicted.
 */
enum catalog_state { CATALOG_FREE, CATALOG_WRITING, CATALOG_THERE, CATALOG_BAD, CATALOG_COPY };

struct catalog_entry {
        uint64_t tag, hint, sequence, parent;
        uint64_t used_ns; /* time of its last use, or when it was entered */
        uint32_t same;    /* next in its hash bucket: place + 1; 0: none */
        uint32_t up;      /* place of its parent */
        uint32_t children;
        /* links in the LRU list, unless it has children; FREE: older: next free slot */
        uint32_t older, newer;
        uint8_t state, space; /* space: number of its namespace */
        uint16_t busy;        /* number of reads under way; not evicted unless 0 */
};

struct catalog_extent {
        struct kvd_list_node node; /* in its class's list while it has free slots; or in empty */
        uint32_t slot_bytes;       /* 0: unused */
        uint32_t slots, used;
        uint32_t fresh; /* first slot that was never used */
        uint32_t free;  /* place of the first free slot below fresh */
        bool bad;       /* a write failed there */
};

struct catalog_class {
        uint32_t slot_bytes, extents;
        struct kvd_list roomy; /* extents with free slots */
};

struct catalog {
        uint64_t extent_bytes;
        uint32_t n_extents, n_buckets;
        uint32_t n_bad;                 /* extents in which a write failed */
        struct kvd_list empty;          /* unused extents */
        uint32_t coldest, warmest;      /* ends of the LRU list of records */
        bool off;                       /* takes no records, and lookups miss those that it has */
        bool hangs;                     /* the same, until the disk answers */
        struct catalog_extent *extents; /* owned, as is all below */
        struct catalog_entry *entries;  /* by place */
        uint32_t *buckets;              /* place + 1; 0: empty */
        struct catalog_class classes[CATALOG_CLASSES];
        struct catalog_namespace spaces[FILE_NAMESPACES];
        uint64_t records, bytes, evicted;
        uint64_t copies, copy_bytes, most_copy_bytes; /* exact copies; copy_bytes: part of bytes */
        void (*gone)(void *data, uint32_t place); /* called before a record is removed; or NULL */
        void *data;
};

int catalog_open(struct catalog *c, uint64_t extent_bytes, uint32_t n_extents);
void catalog_close(struct catalog *c);

/* The number of a namespace, which is entered if it is new and enter is true; or -1. */
int catalog_space(struct catalog *c, struct kvd_key id, bool enter);
int catalog_space_of_epoch(const struct catalog *c, uint64_t epoch);

/* The place of the record with that tag; CATALOG_NOWHERE if none. */
uint32_t catalog_find(const struct catalog *c, uint64_t tag);

/*
 * A free place for a record of a namespace. May evict records for it, but none that was used at or
 * after since_ns. most: limit of the namespace's domain, in bytes. CATALOG_NOWHERE: no room.
 */
uint32_t catalog_take(struct catalog *c, uint32_t slot_bytes, int space, uint64_t most,
                      uint64_t since_ns);

/*
 * The same for an exact copy with that sequence, which stays until it is dropped. The copies of a
 * domain may use 1/CATALOG_COPIES of its limit, and all copies 1/CATALOG_COPIES of all bytes.
 */
#define CATALOG_COPIES 2u
uint32_t catalog_take_copy(struct catalog *c, uint32_t slot_bytes, int space, uint64_t most,
                           uint64_t sequence);

/* Enters a record that is about to be written there. up: its parent's place, or CATALOG_NOWHERE. */
void catalog_enter(struct catalog *c, uint32_t place, struct kvd_record_key key,
                   const struct kvd_label *label, uint32_t up, int space);
void catalog_written(struct catalog *c, uint32_t place);
void catalog_drop(struct catalog *c, uint32_t place);
/* The write failed: removes the record. Its slot and the extent's free slots are not used again. */
void catalog_spoil(struct catalog *c, uint32_t place);
void catalog_touch(struct catalog *c, uint32_t place); /* marks the record as used now */
/* Nanoseconds since the last use of the coldest record; 0 without records. */
uint64_t catalog_age(const struct catalog *c);

/*
 * From now on, hints of the namespace's new records are written to that index, where clients find
 * them (NULL: no longer). catalog_tell_some writes hints of the records that exist already.
 */
void catalog_tell(struct catalog *c, int space, struct kvd_index *ix);
/*
 * Looks at a bounded number of places, starting at from. Returns where to continue, or
 * CATALOG_NOWHERE if all are done.
 */
uint32_t catalog_tell_some(struct catalog *c, int space, uint32_t from);

/*
 * Enters a record that the scan found. Its parent may be found later, so the link to it is made on
 * demand (catalog_link).
 */
void catalog_found(struct catalog *c, uint32_t slot_bytes, const struct kvd_disk_found *found);
void catalog_link(struct catalog *c, uint32_t place, uint32_t up);

/* Are the records out of reach? */
static inline bool catalog_is_off(const struct catalog *c) {
        return c->off || c->hangs;
}

/* Is the record with that sequence there (or being written), and can it be read? */
static inline bool catalog_has(const struct catalog *c, uint32_t place, uint64_t sequence) {
        return place / FILE_SLOTS < c->n_extents && c->entries[place].state != CATALOG_FREE &&
               c->entries[place].sequence == sequence && !catalog_is_off(c);
}

#endif
