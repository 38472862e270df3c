/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_DISK_H
#define KVD_STORE_DISK_H

/*
 * The file tier, as the daemon sees it. The store knows what is at which place of the files, and
 * decides what goes there and what comes back; each file has a disk process (daemon/process/disk), which
 * reads and writes it. One question is out at each, and nobody waits for it but those who asked
 * for blocks. What is asked at once is spread over the files, and one that fails or hangs costs
 * what it has.
 *
 *      opening ──all were seen──► scanning ──all extents──► on ──a flush failed, no process──► off
 *                                                            └──no answer──► hanging, until told
 *
 * Below a pool on a GPU blocks go through memory of the host (file/host.c), where copies of some
 * may stay: those are there even if there is no file.
 *
 * Exact copies of a sequence's blocks go there when memory for them is short, and come back when
 * they are wanted (file/copies.c). They are nobody else's, and are nothing after a restart.
 *
 * Blocks are written ahead of need, so that eviction drops what is known to be in the file.
 * Which: those used a second time, and those deep in a chain; never before the block that they
 * are behind.
 */

#include "ipc/base/disk.h"
#include "store/store.h"

#define STORE_DISK_NAME 64u
/*
 * Memory of the host that questions of a tier need below a pool on a GPU, beside the copies that stay.
 */
#define STORE_CARRY_BYTES (UINT64_C(16) << 20)

struct store_disk_config {
        uint32_t n_files;        /* DISK_FILES at most; 0: there is no file tier */
        uint64_t bytes[DISK_FILES]; /* of each */
        char names[DISK_FILES][STORE_DISK_NAME]; /* for people */
        uint32_t depth;          /* tokens that end with a block which is written at first use */
        uint64_t host;           /* bytes of copies in memory of the host, below a pool on a GPU */
};

enum store_disk_ask {
        STORE_DISK_SUPER,        /* writes the superblock */
        STORE_DISK_SCAN,         /* slots of an extent from one on, KVD_DISK_FOUND at most */
        STORE_DISK_READ,
        STORE_DISK_WRITE,
};

struct store_disk_item {
        uint64_t place;
        uint32_t step;           /* READ: of its fetch */
        struct kvd_label label;
        kvd_ref block;           /* held until the answer */
        const uint32_t *tokens;
        bool copied;             /* memory of the host has it: the disk is not asked */
        uint32_t copy;           /* place of the exact copy, if the question is of these */
};

struct store_disk_question {
        enum store_disk_ask what;
        const void *super;       /* SUPER: what is to be there */
        uint32_t super_bytes;
        uint32_t extent, first;  /* SCAN */
        struct space *space;     /* READ, WRITE: the items' */
        bool copies;             /* ... of exact copies, not of blocks */
        bool checksums;          /* READ: the answer has some */
        uint32_t n, n_segments;  /* the items' blocks lie in so many */
        struct store_disk_item items[KVD_DISK_ITEMS];
};

/*
 * Before clients come. Without it there is no file tier, and nothing below does anything; nor if config has neither
 * files nor host. Without files it is on at once, and empty.
 */
int store_disk_begin(struct store *store, const struct store_disk_config *config);
/* Calls back when there is something to ask; soon: somebody waits for it. */
void store_on_disk(struct store *store, void (*called)(void *data, bool soon), void *data);

/*
 * A file's process has it open. copies: both superblocks, as they lie there; or an error: it is not
 * used. Nothing is asked before all files have been looked at.
 */
void store_disk_looked(struct store *store, uint32_t file, int error, const void *copies,
                       uint64_t bytes);
/* What there is to say of a file that is used; "": nothing. */
void store_disk_note(struct store *store, uint32_t file, const char *why);
/* For good, until the daemon is started again: a file, or all. */
void store_disk_file_off(struct store *store, uint32_t file, const char *why);
void store_disk_off(struct store *store, const char *why);

/*
 * Without files there is no disk process: this asks a worker for what is to be done. True: it wants to be called
 * again, in a while.
 */
bool store_host_next(struct store *store);

/* What to ask a file's process next; NULL: nothing. later: there may be something, in a while. */
const struct store_disk_question *store_disk_next(struct store *store, uint32_t file, bool *later);

/*
 * Its answer, of the kind of the question. Errors are 0 or negative; one of SUPER is the file's
 * end, but -EAGAIN: it is asked again.
 */
void store_disk_told(struct store *store, uint32_t file, int error);
void store_disk_scanned(struct store *store, uint32_t file, int error, uint32_t slot_bytes,
                        const struct kvd_disk_found *found, uint32_t n);
/* checksums: XXH3-64 of what was read; NULL if they were not asked for. */
void store_disk_moved(struct store *store, uint32_t file, const int32_t *errors,
                      const uint64_t *checksums, uint32_t n);
/* No answer has come for a while: fetches miss what it has until one comes. What is being read goes on. */
void store_disk_slow(struct store *store, uint32_t file);
/* No answer comes, but its process is not gone: nothing is waited for until it is (lost). */
void store_disk_hangs(struct store *store, uint32_t file);
/* The process is gone, and with it the question; the next one looks at the file. */
void store_disk_lost(struct store *store, uint32_t file);

/* Where a question's place is in its file. */
uint64_t store_disk_place(const struct store *store, uint64_t place);
/* Where a question's block is for the disk: a descriptor, and where in there; or a negative errno. */
int store_disk_memory(struct store *store, uint32_t file, uint32_t item, uint64_t *offset);

#define STORE_DISK_SPACES 158u /* of which the files can have blocks */

/* Has a space of that name been deleted, whose records the file may still have? */
bool store_disk_erasing(const struct store *store, const char *domain, const char *space);
/* -EBUSY: too many spaces of the domain, or of all, are still to be forgotten. */
int store_disk_may_erase(struct store *store, const char *domain);

enum store_disk_state {
        STORE_DISK_NONE,
        STORE_DISK_OPENING,
        STORE_DISK_SCANNING,
        STORE_DISK_ON,
        STORE_DISK_HANGS,        /* nothing is heard of it */
        STORE_DISK_OFF,
};

struct store_disk_info { /* of a file; fetches and queue are of all of them */
        enum store_disk_state state;
        char name[STORE_DISK_NAME];
        uint64_t bytes, used, records, scanned, extents;
        uint64_t fetches, queue; /* queue: of them */
        uint64_t hits, misses;   /* blocks that were fetched, or not found right */
        uint64_t wrong;          /* ... that were there, and were not what they should be */
        uint64_t read_bytes, written_bytes, errors, evicted;
        uint64_t read_ns, write_ns; /* that it was asked for them, and given them */
        uint64_t copies;         /* exact copies that are there: bytes of them are in used, too */
        uint64_t copies_written, copies_read;
        uint64_t copies_lost;    /* that were there, and could not be read as they were */
        const char *last_error;  /* of errors */
        uint64_t age_ns;         /* of what goes first: since it was used, or was found at the start */
        char why[128];           /* it is off, or what else there is to say */
};
uint32_t store_disk_n_files(const struct store *store);
/* How many of them are off, or hang. */
uint32_t store_disk_files_off(const struct store *store);
/* state: STORE_DISK_NONE: there are not so many. */
void store_disk_get_info(const struct store *store, uint32_t file, struct store_disk_info *ret);
/* The same of the copies beside files. Returns 1, or 0: there are none. */
uint32_t store_host_get_info(const struct store *store, struct store_disk_info *ret);

struct fetch_request {
        uint32_t group, n_tokens;
        uint64_t salt;
        const uint32_t *tokens;
};

/*
 * Brings what the file has of a chain behind what is resident of it. Returns the tokens that will
 * be resident (those that are, if nothing is to come), and *fd: a descriptor that becomes readable
 * when it has ended, well or not; the store's, until then; -1: there is nothing to wait for. -EBUSY: too
 * many are under way.
 */
int64_t space_fetch(struct attachment *attachment, const struct fetch_request *q, int *fd);

/*
 * Writes what the file does not have of a space, be it admitted or not: space_demote begins it,
 * space_demoted says how it goes. 1: it is under way; 0: all is there that was sealed when it
 * began, but for blocks that no fetch could bring back (no_return); -ENOSPC: some of it did not go;
 * -EOPNOTSUPP: there is no file, or none any more.
 */
int space_demote(struct space *space);
int space_demoted(struct space *space, uint64_t *no_return);

#endif
