/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What the queries of a batch need, as their readers say. Readers look on the processor: they copy
 * the queries from the GPU, and wait for them.
 */

#include <errno.h>

#include "client/methods/batch.h"
#include "ipc/base/sys.h"

static size_t width(const struct kvd_batch *b) {
        return (size_t)b->options.heads * b->space->geometry.head_dim;
}

static bool looks(const struct row *row) {
        return row->reader && reader_looks(row->reader);
}

/* Copies the queries of all rows whose readers look, one token behind the other, and waits. */
static int fetch_queries(struct kvd_batch *b, struct batch_queries q, cu_stream stream) {
        size_t token = width(b) * batch_number_bytes(b), ld = q.ld * batch_number_bytes(b), at = 0;
        int r = 0;

        for (uint32_t i = 0; r == 0 && i < b->rows.n; i++) {
                const struct row *row = b->rows.at + i;

                for (uint32_t t = 0; r == 0 && looks(row) && t < row->table.n; t++, at += token)
                        r = batch_driver(&b->gpu,
                                         b->gpu.cuda->cuMemcpyDtoHAsync(b->queries.host + at,
                                                                        q.at + (row->token + t) *
                                                                                        ld,
                                                                        token, stream),
                                         "cuMemcpyDtoHAsync");
        }
        return r < 0 ? r :
                       batch_driver(&b->gpu, b->gpu.cuda->cuStreamSynchronize(stream),
                                    "cuStreamSynchronize");
}

static size_t count_looking(const struct kvd_batch *b) {
        size_t n = 0;

        for (uint32_t i = 0; i < b->rows.n; i++)
                n += looks(b->rows.at + i) ? b->rows.at[i].table.n : 0;
        return n;
}

static int make_floats(struct kvd_batch *b, size_t n) {
        if (n <= b->n_floats)
                return 0;
        free(b->floats);
        b->floats = sys->calloc(n, sizeof *b->floats);
        b->n_floats = b->floats ? n : 0;
        return b->floats ? 0 : client_fail(-ENOMEM, "no memory for queries");
}

/* Lets the readers look, and takes what their queries need. */
static int look_all(struct kvd_batch *b, uint32_t layer) {
        size_t at = 0;
        int r = 0;

        for (uint32_t i = 0; r == 0 && i < b->rows.n; i++) {
                struct row *row = b->rows.at + i;
                size_t n = looks(row) ? row->table.n * width(b) : 0;

                for (size_t k = 0; k < n; k += b->space->geometry.head_dim)
                        client_ops()->read_row(b->floats + k,
                                               b->queries.host + at + k * batch_number_bytes(b),
                                               b->space->geometry.head_dim,
                                               (enum kvd_number)b->options.dtype);
                at += n * batch_number_bytes(b);
                if (n)
                        r = kvd_reader_look(row->reader, layer, b->floats, width(b));
                if (n && r == 0)
                        reader_seen(row->reader, layer, &row->seen);
        }
        return r;
}

int batch_look(struct kvd_batch *b, uint32_t layer, struct batch_queries q, cu_stream stream) {
        size_t n = count_looking(b);
        int r = twin_grow(&b->gpu, &b->queries, n * width(b) * batch_number_bytes(b), stream);

        if (r == 0)
                r = make_floats(b, b->rows.most * width(b));
        if (r == 0)
                r = fetch_queries(b, q, stream);
        return r < 0 ? r : look_all(b, layer);
}

bool batch_selects(const struct kvd_batch *b) {
        for (uint32_t i = 0; i < b->rows.n; i++)
                if (b->rows.at[i].seen.chosen)
                        return true;
        return false;
}
