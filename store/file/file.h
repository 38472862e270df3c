/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_FILE_H
#define KVD_STORE_FILE_FILE_H

/*
 * The file tier of a store, and its state of a space. A request to a disk process is a struct
 * store_disk_question.
 */

#include "store/below/below.h"
#include "store/cache/cache.h"
#include "store/file/catalog.h"
#include "store/file/head.h"
#include "store/file/host.h"
#include "store/file_tier.h"

struct file_name { /* hashed into the id of a namespace */
        char domain[KVD_NAME_MAX + 1], space[KVD_NAME_MAX + 1];
        struct kvd_shape geometry;
        uint64_t kind; /* not hashed if it is causal */
};

#define ERASING 256u /* maximum number of spaces that are being erased */

struct file_erasing {
        bool wanted, begun;
        int number;      /* of the namespace in the catalog, once begun */
        uint64_t serial; /* of the first superblock without the namespace, once begun */
        struct file_name name;
};

struct file_count {
        uint64_t hits, misses, wrong, errors, read_bytes, written_bytes;
        uint64_t copies_written, copies_read, copies_lost;
        int last_error;   /* the last of errors; 0 if none */
        uint32_t failing; /* consecutive requests in which everything failed */
        char why[128];    /* why the file is off, or a note about it */
};

/* The file's process has one request at a time. */
struct file_disk {
        enum store_disk_state state; /* OPENING, SCANNING, ON or OFF */
        bool open;                   /* its process has it open */
        bool hangs;                  /* its process does not answer */
        uint64_t told, telling;      /* serial of the superblock written, being written; 0: none */
        uint32_t extent, slot;       /* position of the scan */
        bool asked;                  /* a request is outstanding, at its process or at a worker */
        bool ready;                  /* question is complete, and is sent to its process next */
        uint64_t asked_ns;           /* time of the request */
        struct store_disk_question question; /* the current request, unless that is SUPER */
        struct kvd_list wanted;              /* spaces with copies to read from it */
        bool copies_last;                    /* the last request was of copies: blocks are next */
        struct file_count count;
        uint64_t read_ns, write_ns; /* total time of its requests */
};

/* Requests of exact copies. disk.c calls cold_copies.c only through this table. */
struct file_copies {
        void (*next)(struct file *file, bool *later);
        void (*done)(struct file *file, const int32_t *errors, uint32_t n);
        void (*miss)(struct file *file); /* the disk is off, or hangs */
};

struct file { /* the file tier of a store */
        struct below below;
        struct store *store;
        struct store_disk_config config;

        struct head head;
        struct catalog catalog;
        struct file_disk disk;
        uint64_t sequence;               /* of the last record */
        struct store_disk_question tell; /* the SUPER request that is being sent */
        struct file_super super;         /* the superblock of that request */

        struct space *owners[FILE_NAMESPACES];     /* by number of the namespace; NULL: deleted */
        struct below_name names[KVD_WHOLE_BLOCKS]; /* scratch: of the fetch that begins */
        struct file_erasing erasing[ERASING];
        uint32_t n_erasing;
        uint32_t sweep;    /* next place to look at for dead records */
        struct host *host; /* owned; NULL if the pool is in host memory */
        const struct file_copies *copies;
        uint32_t copies_turn; /* number of the space to look at next for cold copies */
        uint64_t copies_go;   /* bytes of copies that are being written */
};

struct file_wanted {               /* queue of a space's copies to read */
        struct kvd_list_node node; /* in the disk's list, unless the queue is empty */
        struct space *space;
        uint64_t since_ns;    /* since when there is no memory for them; 0: unknown */
        uint32_t first, last; /* places */
};

struct file_space {
        struct below_space below; /* all: of kvctl evict --to file */
        struct kvd_key id;        /* of its namespace */
        int number;               /* of its namespace in the catalog; -1: not known */
        bool named;               /* id is set */
        bool refused;             /* the file takes no more namespaces */
        bool charged;             /* for its namespace: KVD_COST_file_names */
        bool all_done;            /* all blocks that were sealed at since_ns were demoted */
        uint64_t since_ns;  /* when kvctl asked for that; records used since are not evicted */
        uint64_t no_return; /* blocks that no fetch could bring back, so not demoted */
        struct file_wanted wanted;
        uint32_t told; /* catalog_tell_some's position; CATALOG_NOWHERE: done */
};

static inline void file_count_error(struct file_count *count, int error) {
        count->errors += error != 0;
        count->last_error = error ?: count->last_error;
}
/* The last error in words; "" if there was none. */
const char *file_last_error(const struct file_count *count);
static inline struct file *file_of(const struct below *b) {
        return container_of(b, struct file, below);
}
static inline struct file_space *file_space_of(const struct space *space) {
        return space->parts.file;
}

/* NULL if there is no file tier, it is not on, or the space cannot use it. */
struct file *file_for(const struct space *space);
/* The number of the space's namespace; -1 if the catalog has none yet. */
int file_space_number(struct file *file, struct space *space);
/* The same, but enters one; -1: the catalog is full, or the domain's share is used. */
int file_enter_space(struct file *file, struct space *space);
void file_want(struct file *file, bool soon);
/* Sets the flags in the index by which clients know whether to fetch from the file. */
void file_tell_below(struct space *space);
/* Blocks can only be used by a space with the same names, geometry and kind. */
void file_name_of(const struct space *space, struct file_name *ret);
/* The file came or went: updates the flags for clients, and has all spaces looked at again. */
void file_changes(struct file *file);
/* Continues erasing. An erasure ends when the file does not have the namespace any more. */
void file_erase(struct file *file);
/* Drops dead records, a bounded number. True: there may be more. */
bool file_sweep_dead(struct file *file);

/* Can a request be made? It is begun, has items added, and is made ready. */
bool file_is_idle(const struct file *file);
void file_begin_question(struct file *file, enum store_disk_ask what, struct space *space);
/* Is there no room for one more block in the request? */
bool file_question_is_full(const struct file *file);
void file_question_add(struct file *file, const struct store_disk_item *item);
void file_question_ready(struct file *file);
/* A worker has finished its part of the request, which is sent to the disk process next. */
void file_is_ready(struct file *file);
/* Ends the request. errors has n entries; items beyond these count as -ECANCELED. */
void file_settle(struct file *file, const int32_t *errors, uint32_t n);

/* The root of a chain's records. tokens: used if bidirectional: of the whole prefix. */
uint64_t file_root(const struct space *space, uint64_t root, const uint32_t *tokens);
/*
 * The place of the record with these tokens after the one at up (CATALOG_NOWHERE: at the beginning
 * of its chain), or CATALOG_NOWHERE. Sets label->parent; the caller has set the rest of label.
 */
uint32_t file_record_behind(const struct file *file, struct kvd_label *label, uint32_t up,
                            const uint32_t *tokens);
/* The place of a resident block's record, or CATALOG_NOWHERE. */
uint32_t file_record_of(const struct file *file, const struct space *space, uint32_t id);
/*
 * Clears a reference to a record that was evicted: a file that is too small for all blocks would be
 * written for ever, so the block is written again only after its next use.
 */
void file_forget_stale(const struct file *file, struct space *space, uint32_t id);
void file_note_record(struct space *space, uint32_t id, uint32_t place, uint64_t sequence);

/* Maximum bytes of the domain's records and copies. */
uint64_t file_most(const struct file *file, const struct space *space);

extern const struct below_ops file_below; /* life.c; reads.c and writes.c have its members */
bool file_find(struct below *b, struct space *space, const struct fetch_request *q,
               const struct chain_at *at, struct below_found *ret);
bool file_may_begin(struct below *b, struct space *space);
void file_begin_read(struct below *b, struct space *space);
bool file_may_read(struct below *b, const struct fetch *f, uint32_t i);
void file_add_read(struct below *b, const struct fetch *f, uint32_t i, kvd_ref to);
void file_end_read(struct below *b);
void file_was_read(struct below *b, uint32_t i, int error);
void file_note_name(struct below *b, struct space *space, uint32_t id, struct below_name name);
int file_begin_write(struct below *b, struct space *space);
void file_passes(struct below *b, struct space *space, uint32_t id);
int file_add_write(struct below *b, struct space *space, uint32_t id);
int file_add_prefix(struct below *b, struct space *space);
bool file_end_write(struct below *b);
void file_end_round(struct below *b, struct space *space, bool all);
void file_written(struct file *file, const int32_t *errors, uint32_t n);

/* cold_copies.c: makes requests to write and read exact copies. */
extern const struct file_copies file_copies;
/* Reports some copies as missed that wait for a file that is off or hangs. True: there are more. */
bool copies_miss_some(struct file *file, struct space *space);
void copies_space_leaves(struct space *space);

#endif
