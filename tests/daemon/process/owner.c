/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/daemon/process/owner.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/format.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "ipc/frame.h"
#include "kernels/ops.h"
#include "tests/lib/instance.h"
#include "tests/lib/mark.h"

#define GENERATION 7u

/* ---- memory ---------------------------------------------------------------------------------- */

static void *make_memory(int *fd, uint64_t bytes) {
        void *at;

        *fd = memfd_create("test-owner", MFD_CLOEXEC);
        ck_assert_int_ge(*fd, 0);
        ck_assert_int_eq(ftruncate(*fd, (off_t)bytes), 0);
        at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
        ck_assert(at != MAP_FAILED);
        return at;
}

/* ---- GPU memory, if KVD_TEST_BACKEND is set: the stand-in's, at addresses of this process ---- */

static bool on_gpu(void) {
        return getenv("KVD_TEST_BACKEND") != NULL;
}

static void open_device(struct owner *o, struct cu_uuid *uuid) {
        const char *why = NULL;
        const struct kvd_cuda *cuda = kvd_cuda_load(&why);

        ck_assert_msg(cuda != NULL, "%s", why);
        ck_assert_int_eq(cuda->cuInit(0), CU_OK);
        ck_assert_int_eq(cuda->cuDeviceGetUuid(uuid, 0), CU_OK);
        ck_assert_msg(kvd_device_open(&o->device, uuid) == 0, "%s", o->device.why);
}

static void *make_device_memory(struct owner *o, int *fd, uint64_t bytes) {
        const struct cu_allocation what = {.type = CU_ALLOCATION_PINNED,
                                           .handle_types = CU_HANDLE_POSIX_FD,
                                           .location = {CU_LOCATION_DEVICE, o->device.ordinal}};
        const struct kvd_cuda *cuda = o->device.cuda;
        cu_memory memory;
        cu_address at;

        ck_assert_int_eq(cuda->cuMemCreate(&memory, bytes, &what, 0), CU_OK);
        ck_assert_int_eq(cuda->cuMemExportToShareableHandle(fd, memory, CU_HANDLE_POSIX_FD, 0),
                         CU_OK);
        ck_assert_int_eq(kvd_device_reserve(&o->device, bytes, &at), 0);
        ck_assert_int_eq(kvd_device_map(&o->device, at, bytes, *fd, true), 0);
        cuda->cuMemRelease(memory);
        return (void *)(uintptr_t)at;
}

/* The device determines the segment's size. */
static void put_on_device(struct owner *o, struct kvd_index *ix) {
        struct cu_uuid uuid;

        open_device(o, &uuid);
        memcpy(ix->devices[0], &uuid, sizeof ix->devices[0]);
        ix->backend = KVD_BACKEND_VMM;
        ix->segment_bytes = ALIGN_UP(ix->segment_bytes, o->device.granularity);
        ix->segment_blocks = (uint32_t)(ix->segment_bytes / ix->block_bytes);
        ix->capacity = ix->segment_blocks;
}

static void make_index(struct owner *o, uint32_t n_blocks) {
        const char *why;
        struct kvd_index ix = {.magic = KVD_INDEX_MAGIC,
                               .version = KVD_LAYOUT_VERSION,
                               .kind = KVD_CAUSAL,
                               .keys = KVD_KEYS_SERVE,
                               .policy = KVD_LRU,
                               .run_capacity = 1,
                               .max_segments = 1};

        ck_assert_int_eq(kvd_shape_normalise(&o->g, &why), 0);
        ix.geometry = o->g;
        ix.n_shards = 1;
        ix.block_bytes = ix.shard_bytes = kvd_shape_bytes(&o->g);
        ix.segment_blocks = ALIGN_UP(n_blocks, 64);
        ix.segment_bytes = ix.segment_blocks * ix.block_bytes;
        ix.capacity = ix.segment_blocks;
        if (on_gpu())
                put_on_device(o, &ix);
        ix.n_places = OWNER_SPILLS;
        ix.label_channels = MIN(32, o->g.head_dim);
        kvd_index_lay_out(&ix);
        kvd_settings_init(ix.settings);
        atomic_store(&ix.n_segments, 1);
        o->ix = make_memory(&o->fds[0], ix.size);
        memcpy(o->ix, &ix, sizeof ix);
        for (uint32_t i = 0; i < n_blocks; i++)
                atomic_store(&kvd_index_desc(o->ix, i)->slot,
                             kvd_slot_make(KVD_SEALED, GENERATION));
}

static void make_all(struct owner *o, uint32_t n_blocks) {
        make_index(o, n_blocks);
        o->n_blocks = n_blocks;
        o->layout = kvd_summary_of(o->ix);
        o->summaries = make_memory(&o->fds[1], o->layout.size);
        o->spill = make_memory(&o->fds[3], OWNER_SPILLS * o->ix->block_bytes);
        o->arguments = make_memory(&o->fds[2], KVD_JOB_BYTES);
        o->pool = on_gpu() ? make_device_memory(o, &o->fds[4], o->ix->segment_bytes) :
                             make_memory(&o->fds[4], o->ix->segment_bytes);
}

/* ---- the worker ------------------------------------------------------------------------------ */

static void spawn(struct owner *o) {
        char *const arguments[] = {"kvd", "--worker", "2", NULL};
        int ends[2];

        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
        o->pid = sys->spawn(getenv("KVD"), arguments, ends[1]);
        ck_assert_int_gt(o->pid, 0);
        close(ends[1]);
        o->socket = ends[0];
}

void owner_start(struct owner *o, const struct kvd_shape *g, uint32_t n_blocks) {
        struct kvd_msg segments = {.number = KVD_MSG_work_segments,
                                   .work_segments = {.space = 5, .count = 1}};
        struct kvd_msg space = {.number = KVD_MSG_work_space};

        memset(o, 0, sizeof *o);
        o->g = *g;
        o->fds[5] = -1;
        ck_assert_int_eq(kvd_decoder_new(&o->decoder), 0);
        make_all(o, n_blocks);
        space.work_space = (struct kvd_msg_work_space){5, o->ix->size, o->layout.size,
                                                       OWNER_SPILLS * o->ix->block_bytes};
        spawn(o);
        ck_assert_uint_eq(owner_ask(o, space, o->fds, 4), 0);
        ck_assert_uint_eq(owner_ask(o, segments, &o->fds[4], 1), 0);
}

void owner_stop(struct owner *o) {
        int status;

        close(o->socket);
        ck_assert_int_eq(waitpid(o->pid, &status, 0), o->pid);
        ck_assert_int_eq(status, 0);
        munmap(o->ix, o->ix->size);
        kvd_decoder_free(o->decoder);
        for (uint32_t i = 0; i < ARRAY_SIZE(o->fds); i++)
                closep(&o->fds[i]);
}

void owner_sketch(struct owner *o, uint32_t rows, uint32_t columns) {
        uint32_t floats = o->layout.layers * o->g.kv_heads * o->g.head_dim;
        uint64_t bytes = kvd_sketch_bytes(rows, columns, floats);

        closep(&o->fds[5]);
        o->sketch = make_memory(&o->fds[5], bytes);
        *o->sketch = (struct kvd_sketch_header){.rows = rows,
                                                .columns = columns,
                                                .salt = 99,
                                                .cell_floats = floats};
        ck_assert_uint_eq(owner_ask(o,
                                    (struct kvd_msg){.number = KVD_MSG_work_sketch,
                                                     .work_sketch = {5, 1, bytes}},
                                    &o->fds[5], 1),
                          0);
}

uint32_t owner_ask(struct owner *o, struct kvd_msg msg, const int *fds, uint32_t n_fds) {
        struct pollfd readable = {o->socket, POLLIN, 0};
        struct kvd_fds set = {.n = n_fds};
        struct kvd_msg reply;
        ssize_t n;

        msg.serial = ++o->serial;
        if (n_fds)
                memcpy(set.fd, fds, n_fds * sizeof *fds);
        n = kvd_msg_encode(&msg, o->frame, sizeof o->frame);
        ck_assert_int_gt(n, 0);
        ck_assert_int_eq(kvd_frame_send(o->socket, o->frame, (size_t)n, &set, 0), 0);
        ck_assert_msg(poll(&readable, 1, PATIENCE_MS) == 1, "the worker does not answer");
        n = kvd_frame_receive(o->socket, o->frame, NULL, 0);
        ck_assert_msg(n > 0, "the worker is gone");
        ck_assert_int_eq(kvd_msg_decode(o->decoder, o->frame, (size_t)n, &reply), 0);
        ck_assert_uint_eq(reply.serial, msg.serial);
        if (reply.number == KVD_MSG_error)
                return reply.error.code;
        ck_assert_uint_eq(reply.number, msg.number + KVD_REPLY);
        if (msg.number != KVD_MSG_work)
                return 0;
        ck_assert_uint_eq(reply.work_reply.id, msg.work.id);
        o->more = reply.work_reply.more;
        o->busy_us = reply.work_reply.busy_us;
        o->result_size = reply.work_reply.result.size;
        if (o->result_size)
                memcpy(o->result, reply.work_reply.result.data, o->result_size);
        return reply.work_reply.error;
}

static uint32_t ask_for(struct owner *o, uint64_t bytes) {
        return owner_ask(o, (struct kvd_msg){.number = KVD_MSG_work, .work = {o->jobs, bytes}},
                         NULL, 0);
}

uint32_t owner_begin(struct owner *o, const struct owner_job *job) {
        struct kvd_job *to = o->arguments;
        uint8_t *at = (uint8_t *)(to + 1);

        *to = (struct kvd_job){.kind = job->kind,
                               .space = 5,
                               .id = ++o->jobs,
                               .n_items = job->n_items,
                               .n_steps = job->n_steps,
                               .n_tokens = job->n_tokens,
                               .sketch = job->sketch,
                               .piece = o->piece};
        memcpy(to->param, job->param, sizeof to->param);
        at = mempcpy(at, job->items, job->n_items * sizeof job->items[0]);
        at = mempcpy(at, job->steps, job->n_steps * sizeof job->steps[0]);
        at = mempcpy(at, job->tokens, job->n_tokens * sizeof job->tokens[0]);
        return ask_for(o, (uint64_t)(at - (uint8_t *)to));
}

uint32_t owner_turn(struct owner *o, uint64_t id, uint32_t turn) {
        *(struct kvd_job *)o->arguments =
                (struct kvd_job){.space = 5, .id = id, .turn = turn, .piece = o->piece};
        o->jobs = id;
        return ask_for(o, sizeof(struct kvd_job));
}

uint32_t owner_do(struct owner *o, const struct owner_job *job) {
        uint32_t error = owner_begin(o, job);

        for (o->rests = 0; o->more; o->rests++)
                error = owner_turn(o, o->jobs, KVD_JOB_GO_ON);
        return error;
}

kvd_ref owner_ref(uint32_t block) {
        return kvd_ref_make(block, GENERATION);
}

struct kvd_job_item owner_item(const struct owner *o, uint32_t block) {
        return (struct kvd_job_item){.ref = owner_ref(block),
                                     .row = block,
                                     .to_row = UINT32_MAX,
                                     .place = KVD_NOWHERE,
                                     .ordinal = KVD_NO_ORDINAL,
                                     .n_tokens = o->g.block_tokens};
}

/* ---- the driver's log ------------------------------------------------------------------------ */

/*
 * Each test makes a new file: a test that was killed leaves its file behind, to which processes
 * with the same ids may have written.
 */
static char log_path[] = "/tmp/kvd-test-owner-XXXXXX";

void owner_log_begin(void) {
        int fd;

        strcpy(log_path + strlen(log_path) - 6, "XXXXXX");
        fd = mkstemp(log_path);
        ck_assert_int_ge(fd, 0);
        close(fd);
        setenv("FAKECUDA_LOG", log_path, 1);
}

uint32_t owner_calls(const struct owner *o, const char *function) {
        char call[64];
        uint32_t n = 0;
        int pid;
        FILE *log = fopen(log_path, "r");

        ck_assert_ptr_nonnull(log);
        while (fscanf(log, "%d %63s%*[^\n]", &pid, call) == 2)
                n += pid == o->pid && strncmp(call, function, strlen(function)) == 0;
        fclose(log);
        return n;
}

void owner_log_end(void) {
        unlink(log_path);
        unsetenv("FAKECUDA_LOG");
}

/* ---- numbers --------------------------------------------------------------------------------- */

uint8_t *owner_block(const struct owner *o, uint32_t block) {
        return o->pool + block * o->ix->block_bytes;
}

static uint8_t *row_of(const struct owner *o, const uint8_t *block, uint32_t layer, int plane,
                       uint32_t head, uint32_t token) {
        const struct kvd_shape *g = &o->g;
        size_t in_plane = g->order == KVD_HND ? (size_t)head * g->block_tokens + token :
                                                (size_t)token * g->kv_heads + head;

        return (uint8_t *)block +
               ((2 * layer + plane) * (size_t)g->kv_heads * g->block_tokens + in_plane) *
                       kvd_format_row(g->dtype, g->head_dim);
}

/* Of a quantised row, all numbers are stored anew. */
void owner_put(const struct owner *o, uint8_t *block, uint32_t layer, int plane, uint32_t head,
               uint32_t token, uint32_t d, double x) {
        uint8_t *row = row_of(o, block, layer, plane, head, token);
        const struct kvd_ops *ops = kvd_ops_pick("scalar");
        float numbers[OWNER_DIM];

        (plane ? ops->read_row : ops->read_key)(numbers, row, o->g.head_dim,
                                                (enum kvd_number)o->g.dtype);
        numbers[d] = (float)x;
        (plane ? ops->write_row : ops->write_key)(row, numbers, o->g.head_dim,
                                                  (enum kvd_number)o->g.dtype);
}

double owner_get(const struct owner *o, const uint8_t *block, uint32_t layer, int plane,
                 uint32_t head, uint32_t token, uint32_t d) {
        const struct kvd_ops *ops = kvd_ops_pick("scalar");
        float numbers[OWNER_DIM];

        (plane ? ops->read_row : ops->read_key)(numbers,
                                                row_of(o, block, layer, plane, head, token),
                                                o->g.head_dim, (enum kvd_number)o->g.dtype);
        return numbers[d];
}

double owner_stored(const struct owner *o, const uint8_t *block, uint32_t layer, int plane,
                    uint32_t head, uint32_t token, uint32_t d) {
        float numbers[OWNER_DIM];

        kvd_ops_pick("scalar")->read_row(numbers, row_of(o, block, layer, plane, head, token),
                                         o->g.head_dim, (enum kvd_number)o->g.dtype);
        return numbers[d];
}

double owner_step(const struct owner *o, const uint8_t *block, uint32_t layer, int plane,
                  uint32_t head, uint32_t token) {
        const uint8_t *row = row_of(o, block, layer, plane, head, token);
        uint16_t half;
        float step;

        if (!kvd_is_quantised(o->g.dtype))
                return 0;
        memcpy(&half, row + kvd_code_bytes(o->g.dtype, o->g.head_dim), sizeof half);
        kvd_ops_pick("scalar")->widen(&step, &half, 1, KVD_NUMBER_F16);
        return step;
}

double owner_random(uint64_t *seed) {
        double x = 0;

        for (int i = 0; i < 12; i++) {
                *seed = *seed * 6364136223846793005u + 1442695040888963407u;
                x += (double)(*seed >> 11) / 9007199254740992.0;
        }
        return x - 6;
}

void owner_fill(const struct owner *o, uint32_t block, uint64_t seed) {
        uint8_t *at = owner_block(o, block);

        seed = seed * 2654435761u + 17;
        for (uint32_t l = 0; l < o->layout.layers; l++)
                for (int plane = 0; plane < 2; plane++)
                        for (uint32_t h = 0; h < o->g.kv_heads; h++)
                                for (uint32_t t = 0; t < o->g.block_tokens; t++)
                                        for (uint32_t d = 0; d < o->g.head_dim; d++)
                                                owner_put(o, at, l, plane, h, t, d,
                                                          owner_random(&seed) +
                                                                  (plane == 0) * (d % 5) * 0.5);
}
