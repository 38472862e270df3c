/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Below a pool on a GPU there is no file but memory of the host: each record's payload is an exact
 * copy (store/tier), which a worker writes and reads as it does KVReviver's. What the file tier
 * asks of its disk is asked of the worker here, and answered; names of spaces need no disk, and
 * nothing outlives the daemon.
 */

#include "store/file/host.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "ipc/base/sys.h"
#include "store/file/file.h"
#include "store/job.h"
#include "store/tier/tier.h"

#define EXTENT_BYTES (UINT64_C(256) << 20)
#define LEAST_EXTENTS 16u

struct host_record {
        uint64_t checksum;
        uint32_t place;                 /* of the exact copy + 1; 0: there is none */
};

struct host {
        struct file *file;
        struct ticket ticket;           /* for the question that is out */
        uint64_t epoch;                 /* of the last namespace */
        struct space *spaces[FILE_NAMESPACES]; /* by their number; NULL: deleted */
        uint64_t n_records;
        struct host_record *records;    /* owned; by place of the catalog */
        int32_t errors[KVD_DISK_ITEMS];
};

/* ---- records --------------------------------------------------------------------------------- */

static void gone(void *data, uint32_t place) {
        struct host *h = data;
        struct host_record *r = &h->records[place];
        struct space *space = h->spaces[h->file->catalog.entries[place].space];

        if (r->place && space)
                place_erase(space, r->place - 1);
        r->place = 0;
}

static int make_catalog(struct host *h, uint64_t bytes) {
        uint64_t extent = MAX(MIN(EXTENT_BYTES, bytes / LEAST_EXTENTS), 2 * DISK_SECTOR);
        struct kvd_disk_file all = {
                .extent_bytes = extent,
                .extents = (uint32_t)MIN(bytes / extent, UINT32_MAX / FILE_SLOTS)};
        struct catalog *c = &h->file->catalog;
        int r = catalog_open(c, &all, 1);

        if (r < 0)
                return r;
        c->gone = gone;
        c->data = h;
        h->n_records = (uint64_t)all.extents * FILE_SLOTS;
        h->records = sys->mmap(NULL, h->n_records * sizeof *h->records, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (h->records != MAP_FAILED)
                return 0;
        h->records = NULL;
        return -ENOMEM;
}

static uint64_t changes(const struct space *space) {
        return atomic_load(&space->ix->counters[KVD_SPACE_ALLOCATED]) +
               atomic_load(&space->ix->counters[KVD_SPACE_SEALED]);
}

static void owns(struct file *file, int number, struct space *space) {
        file->host->spaces[number] = space;
}

/* ---- a question's blocks --------------------------------------------------------------------- */

static void answer(struct host *h, uint32_t n) {
        store_disk_moved(h->file->store, h->errors, n);
        file_want(h->file, true);
}

/* After a loss it is written again, and what that had taken was given back. */
static bool write_put(struct ticket *t, struct job *job) {
        struct host *h = t->owner;
        const struct store_disk_question *q = &h->file->question;

        for (uint32_t i = 0; i < q->n; i++) {
                struct kvd_job_item *item = job_add(job, q->items[i].block, i);

                item->place = job->items[i].place = place_take(job->space);
        }
        return q->n;
}

/* It was the worker's fault, not theirs. */
static void look_again(const struct space *space) {
        file_space_of(space)->unswept = true;
        file_space_of(space)->looked = 0;
}

static int32_t error_of(const struct kvd_spilled *copy, uint32_t place) {
        return place == KVD_NOWHERE ? -ENOSPC : copy ? -(int32_t)copy->error : -EIO;
}

static void settle_put(struct job *job, enum job_end end, const void *results, uint32_t n) {
        const struct kvd_spilled *copies = results;
        struct host *h = job->ticket ? job->ticket->owner : NULL;

        for (uint32_t i = 0; i < job->n_items; i++) {
                uint32_t place = job->items[i].place;
                int32_t error = error_of(end == JOB_DONE ? &copies[i] : NULL, place);

                if (h)
                        h->errors[i] = error;
                if (h && !error)
                        h->records[h->file->question.items[i].place] =
                                (struct host_record){copies[i].checksum, place + 1};
                else if (place != KVD_NOWHERE)
                        place_erase(job->space, place);
        }
        if (h && end == JOB_FAILED)
                look_again(job->space);
        if (h && end != JOB_AGAIN)
                answer(h, job->n_items);
}

static bool write_bring(struct ticket *t, struct job *job) {
        struct host *h = t->owner;
        const struct store_disk_question *q = &h->file->question;

        for (uint32_t i = 0; i < q->n; i++) {
                struct kvd_job_item *item = job_add(job, q->items[i].block, i);
                const struct host_record *r = &h->records[q->items[i].place];

                item->place = r->place ? r->place - 1 : KVD_NOWHERE;
                item->checksum = r->checksum;
        }
        return q->n;
}

static void settle_bring(struct job *job, enum job_end end, const void *results, uint32_t n) {
        struct host *h = job->ticket ? job->ticket->owner : NULL;
        const uint32_t *errors = results;

        if (!h || end == JOB_AGAIN)
                return;
        for (uint32_t i = 0; i < job->n_items; i++)
                h->errors[i] = end == JOB_DONE ? -(int32_t)errors[i] : -EIO;
        answer(h, job->n_items);
}

static const struct job_kind job_put = {.number = KVD_JOB_SPILL,
                                        .result_bytes = sizeof(struct kvd_spilled),
                                        .write = write_put,
                                        .settle = settle_put};

static const struct job_kind job_bring = {.number = KVD_JOB_REVIVE,
                                          .result_bytes = sizeof(uint32_t),
                                          .urgent = true,
                                          .write = write_bring,
                                          .settle = settle_bring};

/* ---- questions ------------------------------------------------------------------------------- */

static void ask(struct host *h, const struct store_disk_question *q) {
        ticket_init(&h->ticket, q->what == STORE_DISK_READ ? &job_bring : &job_put, q->space, h);
        job_ask(&h->ticket);
}

bool store_host_next(struct store *store) {
        struct host *h = store->file->host;
        const struct store_disk_question *q;
        bool later = false;

        while ((q = store_disk_next(store, &later))) {
                if (q->what == STORE_DISK_NAMESPACE)
                        store_disk_named(store, 0, ++h->epoch);
                else if (q->what == STORE_DISK_FORGET)
                        store_disk_forgotten(store, 0);
                else
                        ask(h, q);
        }
        return later;
}

uint32_t host_copy(const struct file *file, const struct space *space, uint32_t record) {
        const struct host *h = file->host;
        uint32_t place = h->records[record].place;

        return place && h->spaces[file->catalog.entries[record].space] == space ? place - 1 :
                                                                                  KVD_NOWHERE;
}

/* ---- life ------------------------------------------------------------------------------------ */

/* What a worker has of it is nobody's. */
static void leaves(struct file *file, const struct space *space, int number) {
        struct host *h = file->host;

        if (number >= 0)
                h->spaces[number] = NULL;
        if (!file->asked || h->ticket.space != space)
                return;
        job_withdraw(&h->ticket);
        h->ticket.space = NULL;
        answer(h, 0);
}

static void end(struct file *file) {
        struct host *h = file->host;

        if (!h)
                return;
        job_withdraw(&h->ticket);
        if (h->records)
                munmap(h->records, h->n_records * sizeof *h->records);
        free(h);
        file->host = NULL;
}

static const struct file_ops ops = {
        .changes = changes, .owns = owns, .leaves = leaves, .end = end};

int store_host_begin(struct store *store, const struct store_disk_config *config) {
        struct file *file;
        int r = store_disk_begin(store, config);

        if (r < 0)
                return r;
        file = store->file;
        file->ops = &ops;
        file->host = sys->calloc(1, sizeof *file->host);
        if (!file->host)
                return store_refuse(store, -ENOMEM, "out of memory for what is below the pool");
        file->host->file = file;
        r = make_catalog(file->host, config->bytes[0]);
        if (r == 0 && sys->getrandom(file->secret, sizeof file->secret, 0) !=
                              (ssize_t)sizeof file->secret)
                r = -EIO;
        if (r < 0)
                return store_refuse(store, r, "what is below the pool cannot be made: %s",
                                    strerror(-r));
        file->scan.extent = file->catalog.n_extents;
        file->state = STORE_DISK_ON;
        return 0;
}
