/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_CATALOG_H
#define KVD_STORE_FILE_CATALOG_H

/*
 * What the daemon knows of its volumes, one in each file, as one: which record is at which place,
 * in memory. A record is found by its key, and knows the one before it by place and sequence; one
 * that others are behind is kept for as long as they are. Which goes for a new one is decided
 * here: the coldest that nothing is behind, and where all extents have slots of another size, all
 * that shares an extent with it.
 *
 * New ones go to the files in turn, as long as these have room: so the blocks of one chain are in
 * all of them, and each gets the same share of what is read or written at once. When all are
 * full, what goes says which file is next, and that was spread in this way before. A file that
 * takes nothing for a while (closed) is passed over. A place is extent x FILE_SLOTS + slot;
 * extents are numbered from the first file on.
 */

#include "ipc/base/list.h"
#include "store/file/volume.h"

#define CATALOG_NOWHERE UINT32_MAX
#define CATALOG_CLASSES FILE_NAMESPACES /* sizes of slots: a space has one */

struct catalog_namespace {
        struct kvd_key id;
        uint64_t epoch;         /* 0: not known yet */
        const void *owner;      /* a domain; NULL: nobody has opened it since the start */
        struct kvd_index *told; /* whose clients are told what is there; NULL: nobody's */
        uint64_t bytes, records;
        uint64_t copy_bytes;    /* ... of them of exact copies, which are no records */
        uint64_t serial;        /* of the first superblock that names it */
        bool used, dead;        /* dead: it is being erased */
};

/*
 * bad: the disk did not take it; it is tried again after a restart. copy: an exact copy's
 * (copies.c): it is found by nobody, and goes for nobody.
 */
enum catalog_state { CATALOG_FREE, CATALOG_WRITING, CATALOG_THERE, CATALOG_BAD, CATALOG_COPY };

struct catalog_entry {
        uint64_t tag, hint, sequence, parent;
        uint64_t used_ns;       /* when it was entered, or used last */
        uint32_t same;          /* next with that hash */
        uint32_t up;            /* place of the record before it */
        uint32_t children;
        /* in the order of use, unless there are children; free: older is the next free slot */
        uint32_t older, newer;
        uint8_t state, space;   /* space: its namespace */
        uint16_t busy;          /* it is being read: it stays */
};

struct catalog_extent {
        struct kvd_list_node node; /* in its class's list, while it has free slots; or in empty */
        uint32_t slot_bytes;       /* 0: it is nobody's */
        uint32_t slots, used;
        uint32_t file;
        uint32_t fresh;            /* slots from here on were never used */
        uint32_t free;             /* first free slot below that: a place */
        bool bad;                  /* the disk did not take something there */
};

struct catalog_class {
        uint32_t slot_bytes, extents;
        struct kvd_list roomy[DISK_FILES]; /* in each file */
};

struct catalog_file {
        uint64_t extent_bytes;
        uint32_t first, n_extents, n_bad;
        struct kvd_list empty;     /* extents */
        uint32_t coldest, warmest; /* of its records */
        uint64_t records, bytes, evicted;
        uint64_t copies;           /* exact ones, whose bytes are in bytes, too */
        bool off;                  /* nothing goes there, and what is there is not found */
        bool hangs;                /* ... for now */
        bool closed;               /* nothing goes there for now; what is there is found */
};

struct catalog_size { /* of a file */
        uint64_t extent_bytes;
        uint32_t n_extents;
};

struct catalog {
        uint32_t n_extents, n_buckets, n_files;
        struct catalog_file files[DISK_FILES];
        uint32_t turn;                  /* file that the next record goes to */
        struct catalog_extent *extents; /* owned, as is all below */
        struct catalog_entry *entries;  /* by place */
        uint32_t *buckets;              /* place + 1 */
        struct catalog_class classes[CATALOG_CLASSES];
        struct catalog_namespace spaces[FILE_NAMESPACES];
        uint64_t records, bytes, copy_bytes, most_copy_bytes;
        void (*gone)(void *data, uint32_t place); /* a record leaves; or NULL */
        void *data;
};

int catalog_open(struct catalog *c, const struct catalog_size *sizes, uint32_t n_files);
void catalog_close(struct catalog *c);

/* The number of a namespace, entered if it is new and enter is true; -1: there is none. */
int catalog_space(struct catalog *c, struct kvd_key id, bool enter);
int catalog_space_of_epoch(const struct catalog *c, uint64_t epoch);

/* CATALOG_NOWHERE: there is no such record. */
uint32_t catalog_find(const struct catalog *c, uint64_t tag);

/*
 * A free place for a record of a namespace; others may have gone for it, but none that was used
 * since then. most: what its domain may have, in bytes. CATALOG_NOWHERE: none.
 */
uint32_t catalog_take(struct catalog *c, uint32_t slot_bytes, int space, uint64_t most,
                      uint64_t since_ns);

/*
 * The same for an exact copy, which has that sequence and is there until it is dropped. Copies of a
 * domain, and of all, have at most a part of what they share with records (CATALOG_COPIES).
 */
#define CATALOG_COPIES 2u
uint32_t catalog_take_copy(struct catalog *c, uint32_t slot_bytes, int space, uint64_t most,
                           uint64_t sequence);

/* What is written there from now on. up: place of the record before it, or CATALOG_NOWHERE. */
void catalog_enter(struct catalog *c, uint32_t place, struct kvd_record_key key,
                   const struct kvd_label *label, uint32_t up, int space);
void catalog_written(struct catalog *c, uint32_t place);
void catalog_drop(struct catalog *c, uint32_t place);
/* The disk did not take it: nothing goes there any more, nor where its extent is free. */
void catalog_spoil(struct catalog *c, uint32_t place);
void catalog_touch(struct catalog *c, uint32_t place); /* it was used */
/* Nanoseconds since the coldest of a file was; there is one. */
uint64_t catalog_age(const struct catalog *c, uint32_t file);

/*
 * Clients of an index are told of a namespace's records: of those to come as they come, of others
 * by going round. NULL: nobody is any more.
 */
void catalog_tell(struct catalog *c, int space, struct kvd_index *ix);
/*
 * A piece of the round, from a place on. Returns where it goes on; CATALOG_NOWHERE: it has ended.
 */
uint32_t catalog_tell_some(struct catalog *c, int space, uint32_t from);

/* A record that was there at the start; its parent is looked for when all of them are known. */
void catalog_found(struct catalog *c, uint32_t slot_bytes, const struct kvd_disk_found *found);
void catalog_link(struct catalog *c, uint32_t place, uint32_t up);

/* The file of a place, of which there is one: its number, and what is known of it. */
static inline uint32_t catalog_file_of(const struct catalog *c, uint64_t place) {
        return c->extents[place / FILE_SLOTS].file;
}
static inline struct catalog_file *catalog_file(struct catalog *c, uint64_t place) {
        return &c->files[catalog_file_of(c, place)];
}

/* Is it in a file that is not used, or not now? */
static inline bool catalog_is_off(const struct catalog *c, uint32_t place) {
        const struct catalog_file *f = &c->files[catalog_file_of(c, place)];

        return f->off || f->hangs;
}

/* Is the record with that sequence there (or being written)? */
static inline bool catalog_has(const struct catalog *c, uint32_t place, uint64_t sequence) {
        return place / FILE_SLOTS < c->n_extents && c->entries[place].state != CATALOG_FREE &&
               c->entries[place].sequence == sequence && !catalog_is_off(c, place);
}

#endif
