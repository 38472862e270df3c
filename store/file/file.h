/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_FILE_H
#define KVD_STORE_FILE_FILE_H

/*
 * The file tier of a store, and its state of a space. A request to a disk process is a struct
 * store_disk_question.
 */

#include "store/cache/cache.h"
#include "store/file/bring.h"
#include "store/file/catalog.h"
#include "store/file/head.h"
#include "store/file/host.h"
#include "store/file_tier.h"

/* ROOM: has a block, not requested yet; ASKED: requested; HERE: read into the block */
enum fetch_step_state { FETCH_WANTED, FETCH_ROOM, FETCH_ASKED, FETCH_HERE };

struct fetch_step {
        uint64_t sequence;
        kvd_ref block; /* held, unless WANTED */
        uint32_t place;
        enum fetch_step_state state;
};

struct fetch {
        struct bringing to; /* in file->fetches */
        struct file *file;
        uint64_t record;             /* sequence of the first step's parent record; 0: none */
        uint64_t root;               /* of its records */
        uint32_t n, at, first_depth; /* n: steps; at: steps done; first_depth: of step 0 */
        uint32_t taken;              /* steps that have been given a block, including those done */
        uint32_t under_way;          /* requests */
        struct fetch_step *steps;    /* follow this struct */
        uint32_t *tokens;            /* follow the steps; block_tokens for each */
};

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
        struct fetch *reading;               /* READ: the fetch; or NULL */
        bool awaited;                        /* the next request is a fetch's (host_may_begin) */
        struct kvd_list wanted;              /* spaces with copies to read from it */
        bool copies_last;                    /* the last request was of copies: blocks are next */
        uint32_t reads_in_a_row;             /* requests for fetches since writes last had a turn */
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
        struct store *store;
        struct store_disk_config config;
        void (*wanted)(void *data, bool soon);
        void *data;

        struct head head;
        struct catalog catalog;
        struct file_disk disk;
        uint64_t sequence;               /* of the last record */
        struct store_disk_question tell; /* the SUPER request that is being sent */
        struct file_super super;         /* the superblock of that request */

        struct space *owners[FILE_NAMESPACES];     /* by number of the namespace; NULL: deleted */
        struct kvd_list fetches;                   /* owned; a queue */
        struct fetch_step steps[KVD_FETCH_BLOCKS]; /* scratch: of the fetch that begins */
        uint32_t turn;                             /* number of the space to sweep next */
        uint32_t prefix[KVD_FETCH_TOKENS];         /* scratch: tokens of a bidirectional prefix */
        struct file_erasing erasing[ERASING];
        uint32_t n_erasing;
        uint32_t sweep;            /* next place to look at for dead records */
        uint64_t n_fetches, queue; /* number of fetches; number of them under way */
        struct host *host;         /* owned; NULL if the pool is in host memory */
        const struct file_copies *copies;
        uint32_t copies_turn; /* number of the space to look at next for cold copies */
        uint64_t copies_go;   /* bytes of copies that are being written */
};

/* kvctl evict --to file: demotes all blocks that are sealed when it begins */
enum file_all { ALL_NOT, ALL_UNDER_WAY, ALL_DONE };

struct file_wanted {               /* queue of a space's copies to read */
        struct kvd_list_node node; /* in the disk's list, unless the queue is empty */
        struct space *space;
        uint64_t since_ns;    /* since when there is no memory for them; 0: unknown */
        uint32_t first, last; /* places */
};

struct file_space {
        struct kvd_key id;  /* of its namespace */
        int number;         /* of its namespace in the catalog; -1: not known */
        bool named;         /* id is set */
        bool refused;       /* the file takes no more namespaces */
        bool charged;       /* for its namespace: KVD_COST_file_names */
        bool unswept;       /* something has changed since the last full round */
        enum file_all all;  /* UNDER_WAY: blocks are demoted even if not admitted */
        uint64_t since_ns;  /* start of that; records used since then are not evicted */
        uint64_t left;      /* blocks that could not be demoted */
        uint64_t no_return; /* blocks that no fetch could bring back, so not demoted */
        uint32_t hand;      /* block to look at next */
        uint32_t looked;    /* blocks looked at in this round */
        uint64_t changes;   /* carry_changes when unswept was last set */
        struct file_wanted wanted;
        uint32_t told; /* catalog_tell_some's position; CATALOG_NOWHERE: done */
};

static inline void file_count_error(struct file_count *count, int error) {
        count->errors += error != 0;
        count->last_error = error ?: count->last_error;
}
/* The last error in words; "" if there was none. */
const char *file_last_error(const struct file_count *count);
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
/* Clears a reference to a record that is gone, whose mark would be taken for that of a use. */
void file_forget_stale(const struct file *file, struct space *space, uint32_t id);
void file_note_record(struct space *space, uint32_t id, uint32_t place, uint64_t sequence);

/* demote.c: makes a write request. */
void demote_next(struct file *file, bool *later);
void demote_done(struct file *file, const int32_t *errors, uint32_t n);

/* Maximum bytes of the domain's records and copies. */
uint64_t demote_most(const struct file *file, const struct space *space);

/* cold_copies.c: makes requests to write and read exact copies. */
extern const struct file_copies file_copies;
/* Reports some copies as missed that wait for a file that is off or hangs. True: there are more. */
bool copies_miss_some(struct file *file, struct space *space);
void copies_space_leaves(struct space *space);

/* fetch.c: makes read requests. False: out of pin reads, so call again before anything else. */
bool fetch_next(struct file *file, bool *later);
void fetch_done(struct file *file, const int32_t *errors, uint32_t n);
/* Ends a client's fetches; a is NULL: those of a deleted space; both are NULL: all. */
void fetches_end(struct file *file, const struct space *space, const struct attachment *a);
/* Ends all fetches, which need the disk, except but, which may be NULL. */
void fetches_miss(struct file *file, const struct fetch *but);

#endif
