/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_METHODS_BATCH_H
#define KVD_CLIENT_METHODS_BATCH_H

/*
 * A batch: attention of many requests on a GPU. Each request is one row of the kernels' table of
 * block ids: first what its sequence has, then the blocks of its own table.
 *
 *      batch.c         life, and a step: copies, launches, masses
 *      batch_look.c    what queries need
 *      batch_rows.c    what the rows see, as arrays
 *      batch_memory.c  memory on the GPU, and its copy in host memory
 */

#include "client/gpu/gpu_view.h"
#include "client/kvd_attend.h"
#include "client/methods/attend.h"
#include "client/reader.h"
#include "kernels/cuda/attend.h"

/* ---- batch_memory.c -------------------------------------------------------------------------- */

/* Memory on the GPU, and as much in host memory, which copies go through. Owned. */
struct twin {
        uint8_t *host;
        cu_address device;
        size_t bytes;
        enum { TWIN_BOTH, TWIN_DEVICE, TWIN_HOST } kind; /* which of them there are */
};

/* The device is entered in these calls. */
int twin_grow(struct gpu *gpu, struct twin *t, size_t bytes, cu_stream stream); /* -ENOMEM */
void twin_free(struct gpu *gpu, struct twin *t);
int twin_send(struct gpu *gpu, const struct twin *t, size_t bytes, cu_stream stream);
/* Return the error, if there is one, whose words are then kvd_error's. */
int batch_checked(const struct gpu *gpu, int error); /* words: gpu->why */
int batch_driver(struct gpu *gpu, cu_result error, const char *what);

/* ---- batch_rows.c ---------------------------------------------------------------------------- */

struct row {
        struct kvd_table table;
        struct kvd_sequence *sequence;
        kvd_reader *reader;
        float *mass;          /* [entries] the caller's, or the reader's */
        struct kvd_seen seen; /* of the layer; sequence NULL: not known, all that is resident */
        const struct kvd_entry *entries;
        uint32_t n_entries;
        /*
         * Entries in the row: with a reader all, since it names them by number; else those that are
         * resident.
         */
        uint32_t n_seen;
        uint32_t n_slots; /* of these and the table's, up to the last new token */
        uint32_t token;   /* number of its first new token in the step */
};

/* Addresses in twin.host, or offsets from its start. */
struct tables {
        uint32_t *ids;      /* [rows][ld] */
        uint32_t *lengths;  /* [rows] */
        uint32_t *starts;   /* [rows + 1] */
        uint32_t *rotation; /* [rows][ld] */
        float *rotations;   /* [n_turned][head_dim] */
        size_t bytes;
};

struct rows {
        struct row *at; /* owned */
        uint32_t n, room;
        uint32_t n_single; /* rows before the first one with more than one new token */
        uint32_t ld;       /* blocks of the longest row */
        uint32_t longest;  /* slots of the longest row */
        uint32_t most;     /* new tokens of the row that has most */
        uint32_t n_turned; /* entries with a delta */
        bool gaps;         /* a slot of a resident entry holds no token */
        bool looks;        /* a reader looks at queries */
        /* what was sent of the entries: three numbers for each block of a row, owned */
        uint32_t *cells;
        size_t cells_room;
        struct view *view; /* of all rows */
};

int rows_take(struct rows *rows, struct kvd_space *space, uint32_t n,
              const struct kvd_request *requests); /* -EINVAL, -ESTALE, -ENOMEM */
void rows_free(struct rows *rows);
/* Takes the entries as they are now: a reader may have changed them. -EINVAL, -ENOMEM */
int rows_refresh(struct rows *rows, const struct kvd_shape *g, const float *frequencies);
struct tables rows_lay_out(const struct rows *rows, const struct kvd_shape *g, uint8_t *base);
void rows_write(const struct rows *rows, const struct kvd_shape *g, const float *frequencies,
                struct tables *to);
/* Slots that are listed of a row and KV head at most. */
uint32_t rows_most_listed(const struct rows *rows, const struct kvd_shape *g);
/* Whether the entries of a row with a reader are others than those that were sent. */
bool rows_have_moved(const struct rows *rows, const struct tables *sent);
/* Adds to the masses of row i. from: [kv_heads][ld], of the row's blocks */
void rows_add_mass(const struct rows *rows, const struct kvd_shape *g, uint32_t i,
                   const float *from);
/* Lists them: to[(row * kv_heads + head) * ld], and their numbers likewise in n[]. */
void rows_list(const struct rows *rows, const struct kvd_shape *g, uint32_t ld, uint32_t *n,
               uint32_t *to);

/* ---- batch.c --------------------------------------------------------------------------------- */

struct kvd_batch {
        struct kvd_space *space;
        struct kvd_batch_options options;
        float *frequencies; /* [head_dim / 2], owned; NULL: unknown */
        struct gpu gpu;
        struct kvd_device device; /* the same, for what drivers refuse while a stream is captured */
        bool opened;
        struct twin tables, lists, masses, workspace;
        struct twin queries;
        float *floats; /* queries of a row, owned */
        size_t n_floats;
        cu_event attended; /* passes when what was launched last is done */
        /* when it has passed, the host memory of tables and lists may be written */
        cu_event copied;

        /* of the step */
        struct rows rows;
        bool sent;         /* the GPU has what the rows see; if not, the next layer sends it */
        bool measures;     /* a row has masses */
        uint32_t ld;       /* of the masses; 0: the step has not begun */
        uint32_t ld_lists; /* 0: nothing is listed */
};

static inline size_t batch_number_bytes(const struct kvd_batch *b) {
        return b->options.dtype == KVD_F32 ? 4 : 2;
}

/* ---- batch_look.c ---------------------------------------------------------------------------- */

/* Queries as the caller has them on the GPU. */
struct batch_queries {
        cu_address at;
        size_t ld; /* numbers */
};

/* Lets the readers look, which may fetch blocks, and takes what the layer's queries see. */
int batch_look(struct kvd_batch *b, uint32_t layer, struct batch_queries q, cu_stream stream);
bool batch_selects(const struct kvd_batch *b); /* a row sees chosen slots only */

#endif
