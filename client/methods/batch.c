/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention of a step's requests on a GPU. What they see is copied to the GPU when the step begins,
 * and for each layer the lists of what readers have selected. Requests of one token are one launch,
 * and the others another.
 */

#include "client/methods/batch.h"

#include <errno.h>
#include <string.h>

#include "client/methods/reader.h"
#include "ipc/base/sys.h"

/* What kernels/cuda/attend.h takes. */
enum { MOST_DIM = 256, MOST_GROUP = 128, MOST_HEADS = 65535 };

static const struct kvd_shape *shape(const struct kvd_batch *b) {
        return &b->space->geometry;
}

static int enter_device(struct kvd_batch *b) {
        int r = kvd_device_enter(&b->device);

        return r < 0 ? client_fail(r, "%s", b->device.why) : 0;
}

/*
 * Encloses the work of a call, with kvd_device_leave. -EBUSY: the stream is being captured. The
 * captures of other streams are not disturbed.
 */
static int enter(struct kvd_batch *b, cu_stream stream) {
        int r = space_check(b->space) < 0 ? -ECHILD : enter_device(b);

        if (r < 0)
                return r;
        r = device_refuses(b->rows.view->device, stream);
        if (r < 0)
                kvd_device_leave(&b->device);
        return r;
}

/* ---- what the step sees ---------------------------------------------------------------------- */

static int send_tables(struct kvd_batch *b, cu_stream stream) {
        struct tables t = rows_lay_out(&b->rows, shape(b), NULL);
        int r = twin_grow(&b->gpu, &b->tables, t.bytes, stream);

        if (r < 0)
                return r;
        t = rows_lay_out(&b->rows, shape(b), b->tables.host);
        rows_write(&b->rows, shape(b), b->frequencies, &t);
        return twin_send(&b->gpu, &b->tables, t.bytes, stream);
}

static int record_copy(struct kvd_batch *b, cu_stream stream) {
        return batch_driver(&b->gpu, b->gpu.cuda->cuEventRecord(b->copied, stream),
                            "cuEventRecord");
}

static int send_lists(struct kvd_batch *b, cu_stream stream) {
        size_t rows = (size_t)b->rows.n * shape(b)->kv_heads;
        uint32_t ld = rows_most_listed(&b->rows, shape(b));
        size_t numbers = ALIGN_UP(rows * sizeof(uint32_t), ATTEND_LINE),
               bytes = numbers + rows * ld * sizeof(uint32_t);
        int r;

        b->ld_lists = 0;
        r = twin_grow(&b->gpu, &b->lists, bytes, stream);
        if (r < 0)
                return r;
        rows_list(&b->rows, shape(b), ld, (uint32_t *)b->lists.host,
                  (uint32_t *)(b->lists.host + numbers));
        b->ld_lists = ld;
        r = twin_send(&b->gpu, &b->lists, bytes, stream);
        return r < 0 ? r : record_copy(b, stream);
}

static size_t mass_bytes(const struct kvd_batch *b) {
        return (size_t)b->rows.n * shape(b)->kv_heads * b->rows.ld * sizeof(float);
}

static int clear_masses(struct kvd_batch *b, cu_stream stream) {
        int r;

        b->measures = false;
        for (uint32_t i = 0; i < b->rows.n; i++)
                b->measures |= b->rows.at[i].mass != NULL;
        if (!b->measures)
                return 0;
        r = twin_grow(&b->gpu, &b->masses, mass_bytes(b), stream);
        return r < 0 ? r :
                       batch_driver(&b->gpu,
                                    b->gpu.cuda->cuMemsetD8Async(b->masses.device, 0, mass_bytes(b),
                                                                 stream),
                                    "cuMemsetD8Async");
}

/* The host memory of earlier copies may be written again only after the stream has passed them. */
static int send_all(struct kvd_batch *b, cu_stream stream) {
        int r;

        b->sent = false;
        b->ld_lists = 0;
        r = rows_refresh(&b->rows, shape(b), b->frequencies);
        if (r == 0 && b->ld && b->ld != b->rows.ld) {
                b->rows.n = 0; /* the masses so far are those of other entries */
                r = client_fail(-EINVAL, "a sequence without a reader has changed during a step");
        }
        if (r == 0)
                r = batch_driver(&b->gpu, b->gpu.cuda->cuEventSynchronize(b->copied),
                                 "cuEventSynchronize");
        if (r == 0)
                r = send_tables(b, stream);
        if (r == 0)
                r = record_copy(b, stream);
        b->sent = r == 0;
        return r;
}

static int check_rows(const struct kvd_batch *b) {
        const struct device *device = b->rows.view->device;
        uint32_t group = b->options.heads / shape(b)->kv_heads;

        for (uint32_t i = 0; i < b->rows.n; i++)
                if (b->rows.at[i].reader && b->rows.at[i].reader->group != group)
                        return client_fail(-EINVAL, "the batch and a reader differ in query heads");
        if ((uint64_t)b->rows.n * shape(b)->kv_heads > MOST_HEADS)
                return client_fail(-EINVAL, "%u requests at a time, of %u KV heads", b->rows.n,
                                   shape(b)->kv_heads);
        return device && device->gpu.ordinal == b->gpu.ordinal ?
                       0 :
                       client_fail(-ESTALE, "the next daemon's pool is not on this GPU");
}

int kvd_batch_begin(struct kvd_batch *b, uint32_t n, const struct kvd_request *requests,
                    void *stream) {
        int r = attend_check_space(b->space, 0);

        b->rows.n = 0;
        if (r == 0 && n == 0)
                r = client_fail(-EINVAL, "a step of no requests");
        if (r == 0)
                r = rows_take(&b->rows, b->space, n, requests);
        if (r == 0)
                r = check_rows(b);
        if (r == 0)
                r = enter(b, stream);
        if (r == 0) {
                b->ld = 0;
                r = send_all(b, stream);
                if (r == 0 && b->rows.gaps)
                        r = send_lists(b, stream);
                if (r == 0)
                        r = clear_masses(b, stream);
                b->ld = b->rows.ld;
                kvd_device_leave(&b->device);
        }
        if (r < 0)
                b->rows.n = 0;
        return r;
}

/* ---- attention ------------------------------------------------------------------------------- */

/* Rows [first, first + n): of one new token each, or of more. */
struct part {
        uint32_t first, n;
        bool single;
};

static void add_lists(const struct kvd_batch *b, uint32_t first, struct gpu_attend *a) {
        size_t rows = (size_t)b->rows.n * a->kv_heads, at = (size_t)first * a->kv_heads;

        if (!b->ld_lists)
                return;
        a->n_chosen = b->lists.device + at * sizeof(uint32_t);
        a->chosen = b->lists.device + ALIGN_UP(rows * sizeof(uint32_t), ATTEND_LINE) +
                    at * b->ld_lists * sizeof(uint32_t);
        a->ld_chosen = a->max_chosen = b->ld_lists;
}

static void add_masses(const struct kvd_batch *b, uint32_t first, struct gpu_attend *a) {
        if (!b->measures)
                return;
        a->block_mass = b->masses.device + (size_t)first * a->kv_heads * b->rows.ld * sizeof(float);
        a->ld_block_mass = b->rows.ld;
}

static void add_tables(const struct kvd_batch *b, const struct part *p, struct gpu_attend *a) {
        const struct tables t = rows_lay_out(&b->rows, shape(b), NULL);
        cu_address base = b->tables.device;
        size_t blocks = (size_t)p->first * b->rows.ld * sizeof(uint32_t);

        a->blocks.ids = base + (uintptr_t)t.ids + blocks;
        a->ld_blocks = b->rows.ld;
        a->lengths = base + (uintptr_t)(t.lengths + p->first);
        a->starts = p->single ? 0 : base + (uintptr_t)(t.starts + p->first);
        if (!b->rows.n_turned)
                return;
        a->rotation = base + (uintptr_t)t.rotation + blocks;
        a->rotations = base + (uintptr_t)t.rotations;
}

static struct gpu_attend describe(const struct kvd_batch *b, uint32_t layer, const struct part *p) {
        const struct kvd_shape *g = shape(b);
        const struct view *view = b->rows.view;
        struct kvd_layer_view at;
        struct gpu_attend a;

        layer_lay_out(view->ix, view->base, layer, &at);
        a = (struct gpu_attend){
                .blocks = {.base = (cu_address)(uintptr_t)view->base,
                           .block_bytes = view->ix->block_bytes},
                .k_offset = (uint64_t)(at.keys - view->base),
                .v_offset = (uint64_t)(at.values - view->base),
                .head_stride = at.head_stride,
                .token_stride = at.token_stride,
                .number = g->dtype,
                .block_tokens = g->block_tokens,
                .dim = g->head_dim,
                .kv_heads = g->kv_heads,
                .group = b->options.heads / g->kv_heads,
                .n_sequences = p->n,
                .max_length = b->rows.longest,
                .max_tokens = b->rows.most,
                .q_number = b->options.dtype,
                .out_number = b->options.dtype,
                .scale = b->options.scale,
                .q_head = g->head_dim,
                .out_head = g->head_dim,
        };
        add_tables(b, p, &a);
        add_lists(b, p->first, &a);
        add_masses(b, p->first, &a);
        return a;
}

static int attend(struct kvd_batch *b, uint32_t layer, const struct part *p, struct batch_queries q,
                  cu_address out, size_t ldo, cu_stream stream) {
        struct gpu_attend a = describe(b, layer, p);
        size_t token = b->rows.at[p->first].token;
        int r;

        a.q = q.at + token * q.ld * batch_number_bytes(b);
        a.q_token = q.ld;
        a.out = out + token * ldo * batch_number_bytes(b);
        a.out_token = ldo;
        r = twin_grow(&b->gpu, &b->workspace, gpu_attend_workspace(&b->gpu, &a), stream);
        if (r < 0)
                return r;
        a.workspace = b->workspace.device;
        a.workspace_bytes = b->workspace.bytes;
        return batch_checked(&b->gpu, p->single ? gpu_attend_decode(&b->gpu, stream, &a) :
                                                  gpu_attend_prefill(&b->gpu, stream, &a));
}

static int attend_all(struct kvd_batch *b, uint32_t layer, struct batch_queries q, cu_address out,
                      size_t ldo, cu_stream stream) {
        const struct part parts[] = {
                {0, b->rows.n_single, true},
                {b->rows.n_single, b->rows.n - b->rows.n_single, false},
        };
        int r = 0;

        for (size_t i = 0; r == 0 && i < ARRAY_SIZE(parts); i++)
                if (parts[i].n)
                        r = attend(b, layer, &parts[i], q, out, ldo, stream);
        b->gpu.cuda->cuEventRecord(b->attended, stream);
        return r;
}

/* What the layer's queries see, if readers look at them. */
static int see_again(struct kvd_batch *b, uint32_t layer, struct batch_queries q,
                     cu_stream stream) {
        struct tables sent;
        int r = batch_look(b, layer, q, stream);

        if (r < 0)
                return r;
        sent = rows_lay_out(&b->rows, shape(b), b->tables.host);
        if (!b->sent || rows_have_moved(&b->rows, &sent))
                r = send_all(b, stream);
        if (r == 0 && (b->rows.gaps || batch_selects(b)))
                return send_lists(b, stream);
        b->ld_lists = 0;
        return r;
}

int kvd_batch_attention(struct kvd_batch *b, uint32_t layer, const void *q, size_t ldq, void *out,
                        size_t ldo, void *stream) {
        const struct batch_queries queries = {(cu_address)(uintptr_t)q, ldq};
        int r = attend_check_space(b->space, layer);

        if (r == 0 && b->rows.n == 0)
                r = client_fail(-EINVAL, "no step has begun");
        if (r == 0)
                r = enter(b, stream);
        if (r < 0)
                return r;
        if (b->rows.looks)
                r = see_again(b, layer, queries, stream);
        if (r == 0)
                r = attend_all(b, layer, queries, (cu_address)(uintptr_t)out, ldo, stream);
        kvd_device_leave(&b->device);
        return r;
}

/* ---- the end of a step ----------------------------------------------------------------------- */

static int take_masses(struct kvd_batch *b, cu_stream stream) {
        int r = batch_driver(&b->gpu,
                             b->gpu.cuda->cuMemcpyDtoHAsync(b->masses.host, b->masses.device,
                                                            mass_bytes(b), stream),
                             "cuMemcpyDtoHAsync");

        if (r == 0)
                r = batch_driver(&b->gpu, b->gpu.cuda->cuStreamSynchronize(stream),
                                 "cuStreamSynchronize");
        for (uint32_t i = 0; r == 0 && i < b->rows.n; i++)
                if (b->rows.at[i].mass)
                        rows_add_mass(&b->rows, shape(b), i,
                                      (const float *)b->masses.host +
                                              (size_t)i * shape(b)->kv_heads * b->rows.ld);
        return r;
}

int kvd_batch_end(struct kvd_batch *b, void *stream) {
        int r = 0;

        if (b->rows.n && b->measures) {
                r = enter(b, stream);
                if (r == 0) {
                        r = take_masses(b, stream);
                        kvd_device_leave(&b->device);
                }
        }
        b->rows.n = 0;
        return r;
}

/* ---- life ------------------------------------------------------------------------------------ */

/* With the device entered. */
static void free_memory(struct kvd_batch *b) {
        struct twin *twins[] = {&b->tables, &b->lists, &b->masses, &b->queries, &b->workspace};

        if (b->copied)
                b->gpu.cuda->cuEventSynchronize(b->copied);
        if (b->attended)
                b->gpu.cuda->cuEventSynchronize(b->attended);
        for (size_t i = 0; i < ARRAY_SIZE(twins); i++)
                twin_free(&b->gpu, twins[i]);
        if (b->copied)
                b->gpu.cuda->cuEventDestroy(b->copied);
        if (b->attended)
                b->gpu.cuda->cuEventDestroy(b->attended);
}

/* A child of fork cannot use the driver. */
struct kvd_batch *kvd_batch_free(struct kvd_batch *b) {
        if (!b)
                return NULL;
        if (b->opened && !forked(b->space->handle) && enter_device(b) == 0) {
                free_memory(b);
                if (gpu_enter(&b->gpu) == 0)
                        gpu_close(&b->gpu);
                kvd_device_leave(&b->device);
        }
        rows_free(&b->rows);
        free(b->floats);
        free(b->frequencies);
        free(b);
        return NULL;
}

static int check_options(struct kvd_space *space, const struct kvd_batch_options *o) {
        const struct kvd_heads heads = {.heads = o->heads, .scale = o->scale};
        int r = attend_check_space(space, 0);

        if (r < 0)
                return r;
        if (space->geometry.layer_groups > 1)
                return client_fail(-EINVAL, "a batch in a space of several layer groups");
        if (o->dtype != KVD_F32 && o->dtype != KVD_F16 && o->dtype != KVD_BF16)
                return client_fail(-EINVAL, "queries must be f32, f16 or bf16");
        r = attend_check_heads(&space->geometry, &heads);
        if (r == 0 && (space->geometry.head_dim > MOST_DIM ||
                       o->heads / space->geometry.kv_heads > MOST_GROUP))
                r = client_fail(-EINVAL, "heads of %u numbers, %u of them with one KV head",
                                space->geometry.head_dim, o->heads / space->geometry.kv_heads);
        return r;
}

static int copy_frequencies(struct kvd_batch *b, const float *frequencies) {
        uint32_t half = shape(b)->head_dim / 2;

        if (!frequencies)
                return 0;
        b->frequencies = sys->calloc(half, sizeof *frequencies);
        if (!b->frequencies)
                return client_fail(-ENOMEM, "out of memory");
        memcpy(b->frequencies, frequencies, half * sizeof *frequencies);
        return 0;
}

static int make_events(struct kvd_batch *b) {
        const struct kvd_cuda *cuda = b->gpu.cuda;
        int r = batch_driver(&b->gpu, cuda->cuEventCreate(&b->copied, CU_EVENT_DISABLE_TIMING),
                             "cuEventCreate");

        return r < 0 ? r :
                       batch_driver(&b->gpu,
                                    cuda->cuEventCreate(&b->attended, CU_EVENT_DISABLE_TIMING),
                                    "cuEventCreate");
}

static int open_gpu(struct kvd_batch *b) {
        struct view *view = atomic_load(&b->space->view);
        int r;

        if (!view || !view->device)
                return client_fail(-EINVAL, "the space is not on a GPU");
        b->device = view->device->gpu;
        r = enter_device(b);
        if (r < 0)
                return r;
        r = batch_checked(&b->gpu, gpu_open(&b->gpu, b->device.ordinal));
        b->opened = r == 0;
        if (r == 0) {
                r = batch_checked(&b->gpu, gpu_has_kernels(&b->gpu));
                if (r == 0)
                        r = make_events(b);
                gpu_leave(&b->gpu);
        }
        kvd_device_leave(&b->device);
        return r;
}

int kvd_batch_new(struct kvd_space *space, const struct kvd_batch_options *options,
                  struct kvd_batch **ret) {
        struct kvd_batch *b;
        int r = check_options(space, options);

        if (r < 0)
                return r;
        b = sys->calloc(1, sizeof *b);
        if (!b)
                return client_fail(-ENOMEM, "out of memory");
        *b = (struct kvd_batch){.space = space,
                                .options = *options,
                                .workspace = {.kind = TWIN_DEVICE},
                                .queries = {.kind = TWIN_HOST}};
        b->options.frequencies = NULL;
        r = copy_frequencies(b, options->frequencies);
        if (r == 0)
                r = open_gpu(b);
        if (r < 0) {
                kvd_batch_free(b);
                return r;
        }
        *ret = b;
        return 0;
}
