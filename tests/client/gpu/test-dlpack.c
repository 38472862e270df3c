/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tensors of blocks and layers: they point to the blocks' memory, have the geometry's shape, and
 * keep their contents until their deleter is called, by any thread. KVD_TEST_BACKEND is the
 * daemon's backend: host or cuda.
 */

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "client/gpu/dlpack.h"
#include "client/kvd.h"
#include "client/kvd_cuda.h"
#include "ipc/base/cuda.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/lib/emulated.h"
#include "tests/lib/instance.h"
#include "tests/lib/suite.h"

enum { LAYERS = 4, GROUPS = 2, HEADS = 3, DIM = 8, TOKENS = 16, VOCAB = 1000 };

static struct instance server;
static kvd *handle;
static kvd_space *space;
static struct kvd_place place;

static void open_space(uint32_t dtype, uint32_t order) {
        const struct kvd_geometry geometry = {.layers = LAYERS,
                                              .kv_heads = HEADS,
                                              .head_dim = DIM,
                                              .block_tokens = TOKENS,
                                              .layer_groups = GROUPS,
                                              .dtype = dtype,
                                              .order = order,
                                              .vocab = VOCAB};

        ck_assert_int_eq(kvd_open(server.socket, &handle), 0);
        ck_assert_msg(kvd_space_open(handle, "tensors", &geometry, NULL, &space) == 0, "%s",
                      kvd_error());
        ck_assert_int_eq(kvd_space_place(space, &place), 0);
}

static void close_space(void) {
        ck_assert_uint_eq(kvd_dlpack_live(space), 0);
        space = kvd_space_close(space);
        handle = kvd_close(handle);
}

static void set_up(void) {
        instance_start(&server, SETTINGS("daemon.pool=8M", "daemon.segment=2M"));
}

static void tear_down(void) {
        instance_end_clean(&server); /* no pin is left */
}

/* Tokens of chain `number`. No two chains have a block in common. */
static void number_tokens(uint32_t number, uint32_t n, uint32_t *tokens) {
        for (uint32_t i = 0; i < n * TOKENS; i++)
                tokens[i] = (i == 0 ? number : i == 1 ? number / VOCAB : i) % VOCAB;
}

static void seal_chain(uint32_t n, uint32_t number, struct kvd_pin *pin, struct kvd_block *blocks) {
        uint32_t tokens[TOKENS * 8];

        number_tokens(number, n, tokens);
        for (uint32_t got = 0; got < n;) {
                int r = kvd_alloc(space, n - got, blocks + got);

                ck_assert_msg(r > 0, "%s", kvd_error());
                got += (uint32_t)r;
        }
        ck_assert_msg(kvd_seal(space, pin, n, blocks, tokens, n * TOKENS) == (int)n, "%s",
                      kvd_error());
}

static void expect_shape(const struct DLManagedTensor *it, int n, const int64_t *shape,
                         const int64_t *strides) {
        ck_assert_int_eq(it->tensor.ndim, n);
        for (int i = 0; i < n; i++) {
                ck_assert_int_eq(it->tensor.shape[i], shape[i]);
                ck_assert_int_eq(it->tensor.strides[i], strides[i]);
        }
        ck_assert_uint_eq(it->tensor.byte_offset, 0);
        ck_assert_int_eq(it->tensor.device.type,
                         place.memory == KVD_MEMORY_CUDA ? DLPACK_CUDA : DLPACK_CPU);
        ck_assert_int_eq(it->tensor.device.id, place.memory == KVD_MEMORY_CUDA ? place.device : 0);
}

/* ---- shapes ---------------------------------------------------------------------------------- */

START_TEST(shapes_are_the_geometry) {
        static const struct {
                uint32_t dtype, order, code, bits;
        } rows[] = {
                {KVD_F32, KVD_HND, DLPACK_FLOAT, 32},
                {KVD_F16, KVD_NHD, DLPACK_FLOAT, 16},
                {KVD_BF16, KVD_HND, DLPACK_BFLOAT, 16},
                {KVD_I8, KVD_NHD, DLPACK_INT, 8},
        };
        const int64_t a = rows[_i].order == KVD_HND ? HEADS : TOKENS,
                      b = rows[_i].order == KVD_HND ? TOKENS : HEADS;
        const int64_t plane = HEADS * TOKENS * DIM, block = plane * 2 * LAYERS / GROUPS;
        struct DLManagedTensor *tensor;
        struct kvd_space_memory memory;
        struct kvd_layer_view layer;
        struct kvd_pin pin = {0};
        struct kvd_block one;

        open_space(rows[_i].dtype, rows[_i].order);
        ck_assert_int_eq(kvd_alloc(space, 1, &one), 1);
        ck_assert_int_eq(kvd_dlpack_filling(space, &one, &tensor), 0);
        ck_assert_ptr_eq(tensor->tensor.data, one.data);
        ck_assert_uint_eq(tensor->tensor.dtype.code, rows[_i].code);
        ck_assert_uint_eq(tensor->tensor.dtype.bits, rows[_i].bits);
        ck_assert_uint_eq(tensor->tensor.dtype.lanes, 1);
        expect_shape(tensor, 5, (int64_t[]){LAYERS / GROUPS, 2, a, b, DIM},
                     (int64_t[]){2 * plane, plane, b * DIM, DIM, 1});
        tensor->deleter(tensor);
        ck_assert_int_eq(kvd_dlpack_layer(space, 3, 1, &tensor), 0);
        ck_assert_int_eq(kvd_layer_view(space, 3, &layer), 0);
        ck_assert_ptr_eq(tensor->tensor.data, layer.values);
        ck_assert_uint_eq(layer.blocks * (uint64_t)block * rows[_i].bits / 8,
                          layer.blocks * layer.block_stride);
        ck_assert_int_eq(kvd_space_memory(space, &memory), 0);
        expect_shape(tensor, 4, (int64_t[]){memory.blocks, a, b, DIM},
                     (int64_t[]){block, b * DIM, DIM, 1});
        ck_assert_uint_gt(layer.blocks, one.id);
        tensor->deleter(tensor);
        ck_assert_int_eq(kvd_dlpack_memory(space, &tensor), 0);
        ck_assert_ptr_eq(tensor->tensor.data, memory.base);
        expect_shape(tensor, 2, (int64_t[]){memory.blocks, block * rows[_i].bits / 8},
                     (int64_t[]){block * rows[_i].bits / 8, 1});
        tensor->deleter(tensor);
        kvd_free(space, 1, &one);
        kvd_unpin(space, &pin);
        close_space();
}
END_TEST

START_TEST(invalid_calls_are_refused) {
        struct DLManagedTensor *tensor;
        struct kvd_block blocks[2], nothing = {0};
        struct kvd_pin pin = {0}, empty = {0};

        open_space(KVD_F32, KVD_HND);
        seal_chain(2, 0, &pin, blocks);
        ck_assert_int_eq(kvd_dlpack_block(space, &empty, blocks[0].id, &tensor), -EINVAL);
        ck_assert_int_eq(kvd_dlpack_block(space, &pin, blocks[1].id + 1 + blocks[0].id, &tensor),
                         -EINVAL);
        ck_assert_int_eq(kvd_dlpack_block(space, &pin, UINT32_MAX, &tensor), -EINVAL);
        ck_assert_int_eq(kvd_dlpack_filling(space, &nothing, &tensor), -EINVAL);
        ck_assert_int_eq(kvd_dlpack_layer(space, LAYERS, 0, &tensor), -EINVAL);
        kvd_unpin(space, &pin);
        close_space();
}
END_TEST

static struct kvd_sys poor;

static void *no_memory(size_t n, size_t size) {
        return NULL;
}

/* Each call says so. The next one works. */
START_TEST(a_tensor_without_memory_is_an_error) {
        struct DLManagedTensor *tensor;
        struct kvd_block blocks[2];
        struct kvd_pin pin = {0};

        open_space(KVD_F32, KVD_HND);
        seal_chain(1, 0, &pin, blocks);
        ck_assert_int_eq(kvd_alloc(space, 1, blocks + 1), 1);
        poor = kvd_sys_real;
        poor.calloc = no_memory;
        sys = &poor;
        ck_assert_int_eq(kvd_dlpack_block(space, &pin, blocks[0].id, &tensor), -ENOMEM);
        ck_assert_int_eq(kvd_dlpack_filling(space, blocks + 1, &tensor), -ENOMEM);
        ck_assert_int_eq(kvd_dlpack_layer(space, 0, 0, &tensor), -ENOMEM);
        ck_assert_int_eq(kvd_dlpack_memory(space, &tensor), -ENOMEM);
        sys = &kvd_sys_real;
        ck_assert_int_eq(kvd_dlpack_filling(space, blocks + 1, &tensor), 0);
        tensor->deleter(tensor);
        kvd_free(space, 1, blocks + 1);
        kvd_unpin(space, &pin);
        close_space();
}
END_TEST

/* ---- what tensors hold ----------------------------------------------------------------------- */

/* Publishes more blocks than the pool has, so that everything that is not held is evicted. */
static void fill_pool(uint32_t number) {
        for (uint32_t n = 0; n < 500; n++) {
                struct kvd_block blocks[4];
                struct kvd_pin pin = {0};

                seal_chain(4, number * 500 + n, &pin, blocks);
                kvd_unpin(space, &pin);
        }
}

static bool is_found(uint32_t number, uint32_t n, uint32_t *ids) {
        uint32_t tokens[TOKENS * 8];
        struct kvd_pin pin = {0};
        int64_t found;

        number_tokens(number, n, tokens);
        found = kvd_lookup(space, 0, tokens, n * TOKENS, ids, 8, &pin);
        kvd_unpin(space, &pin);
        return found == (int64_t)n * TOKENS;
}

static void *delete_it(void *tensor) {
        ((struct DLManagedTensor *)tensor)->deleter(tensor);
        return NULL;
}

/*
 * A tensor of the second of three blocks keeps that block and its parent after the caller has
 * unpinned them, whatever else is published. The third is evicted. Once another thread has deleted
 * the tensor, they may be evicted, too.
 */
START_TEST(a_tensor_holds_its_block) {
        struct DLManagedTensor *tensor;
        struct kvd_block blocks[3];
        struct kvd_pin pin = {0};
        uint32_t ids[8], id;
        pthread_t thread;

        open_space(KVD_F32, KVD_HND);
        seal_chain(3, 7, &pin, blocks);
        id = blocks[1].id;
        ck_assert_int_eq(kvd_dlpack_block(space, &pin, id, &tensor), 0);
        ck_assert_ptr_eq(tensor->tensor.data, kvd_pin_block(&pin, id));
        ck_assert_uint_eq(kvd_dlpack_live(space), 1);
        kvd_unpin(space, &pin);
        fill_pool(1);
        ck_assert(!is_found(7, 3, ids));
        ck_assert(is_found(7, 2, ids));
        ck_assert_uint_eq(ids[1], id);
        pthread_create(&thread, NULL, delete_it, tensor);
        pthread_join(thread, NULL);
        ck_assert_uint_eq(kvd_dlpack_live(space), 0);
        while (kvd_settle(space) > 0) /* on a GPU the tensor's pin ends after a stream's work */
                usleep(1000);
        fill_pool(2);
        ck_assert(!is_found(7, 2, ids));
        close_space();
}
END_TEST

static uint64_t flags_of(struct DLManagedTensor *tensor) {
        struct DLManagedTensorVersioned *versioned;
        uint64_t flags;

        ck_assert_int_eq(kvd_dlpack_versioned(tensor, &versioned), 0);
        ck_assert(versioned->version.major == 1 && versioned->version.minor == 1);
        ck_assert_mem_eq(&versioned->tensor, &tensor->tensor, sizeof tensor->tensor);
        flags = versioned->flags;
        versioned->deleter(versioned);
        return flags;
}

/* The tensor of a pinned block is read-only; the tensor of a block being filled is writable. */
START_TEST(versioned_tensors_have_flags) {
        struct DLManagedTensor *tensor;
        struct kvd_block blocks[2];
        struct kvd_pin pin = {0};

        open_space(KVD_F32, KVD_HND);
        seal_chain(1, 3, &pin, blocks);
        ck_assert_int_eq(kvd_alloc(space, 1, blocks + 1), 1);
        ck_assert_int_eq(kvd_dlpack_block(space, &pin, blocks[0].id, &tensor), 0);
        ck_assert_uint_eq(flags_of(tensor), DLPACK_READ_ONLY);
        ck_assert_int_eq(kvd_dlpack_filling(space, blocks + 1, &tensor), 0);
        ck_assert_uint_eq(flags_of(tensor), 0);
        ck_assert_int_eq(kvd_dlpack_layer(space, 0, 0, &tensor), 0);
        ck_assert_uint_eq(flags_of(tensor), 0);
        ck_assert_int_eq(kvd_dlpack_memory(space, &tensor), 0);
        ck_assert_uint_eq(flags_of(tensor), 0);
        ck_assert_uint_eq(kvd_dlpack_live(space), 0);
        kvd_free(space, 1, blocks + 1);
        kvd_unpin(space, &pin);
        close_space();
}
END_TEST

START_TEST(opaque_blocks_are_bytes) {
        struct kvd_geometry geometry = {.block_tokens = TOKENS,
                                        .vocab = VOCAB,
                                        .block_bytes = 4096,
                                        .layout = "rows"};
        struct DLManagedTensor *tensor;
        struct kvd_block block;

        ck_assert_int_eq(kvd_open(server.socket, &handle), 0);
        ck_assert_msg(kvd_space_open(handle, "opaque", &geometry, NULL, &space) == 0, "%s",
                      kvd_error());
        ck_assert_int_eq(kvd_space_place(space, &place), 0);
        ck_assert_int_eq(kvd_alloc(space, 1, &block), 1);
        ck_assert_int_eq(kvd_dlpack_filling(space, &block, &tensor), 0);
        expect_shape(tensor, 1, (int64_t[]){4096}, (int64_t[]){1});
        ck_assert_uint_eq(tensor->tensor.dtype.code, DLPACK_UINT);
        ck_assert_uint_eq(tensor->tensor.dtype.bits, 8);
        tensor->deleter(tensor);
        ck_assert_int_eq(kvd_dlpack_layer(space, 0, 0, &tensor), -EINVAL);
        kvd_free(space, 1, &block);
        close_space();
}
END_TEST

/*
 * Space and connection are closed while tensors exist. They end with the last tensor, which then
 * releases its block.
 */
START_TEST(a_tensor_outlives_its_space) {
        struct DLManagedTensor *tensor, *layer;
        struct kvd_pin pin = {0};
        struct kvd_block block;
        uint32_t ids[8];

        open_space(KVD_F32, KVD_HND);
        seal_chain(1, 7, &pin, &block);
        ck_assert_int_eq(kvd_dlpack_block(space, &pin, block.id, &tensor), 0);
        ck_assert_int_eq(kvd_dlpack_layer(space, 0, 0, &layer), 0);
        kvd_unpin(space, &pin);
        ck_assert_ptr_null(kvd_space_close(space));
        ck_assert_ptr_null(kvd_close(handle));

        open_space(KVD_F32, KVD_HND);
        fill_pool(1);
        ck_assert(is_found(7, 1, ids));
        tensor->deleter(tensor);
        layer->deleter(layer);
        for (uint32_t i = 2; i < 5 && is_found(7, 1, ids); i++)
                fill_pool(i); /* its lookups count as use */
        ck_assert(!is_found(7, 1, ids));
        close_space();
}
END_TEST

/*
 * The daemon is replaced, and the space attaches again. Tensors of the old memory keep their
 * contents until they are deleted.
 */
START_TEST(a_tensor_outlives_the_daemon) {
        struct DLManagedTensor *block, *layer;
        struct kvd_block blocks[2], again;
        volatile uint32_t *in_layer;
        struct kvd_pin pin = {0};

        open_space(KVD_F32, KVD_HND);
        seal_chain(2, 0, &pin, blocks);
        ck_assert_int_eq(kvd_dlpack_block(space, &pin, blocks[0].id, &block), 0);
        ck_assert_int_eq(kvd_dlpack_layer(space, 0, 0, &layer), 0);
        kvd_unpin(space, &pin);
        in_layer = (uint32_t *)layer->tensor.data + blocks[0].id * (size_t)layer->tensor.strides[0];
        *in_layer = 4711; /* on the stand-in, device addresses are valid in this process */
        instance_kill(&server);
        instance_again(&server, SETTINGS("daemon.pool=8M", "daemon.segment=2M"));
        for (int i = 0; kvd_alloc(space, 1, &again) != 1; i++)
                ck_assert_int_lt(i, 10);
        kvd_free(space, 1, &again);
        ck_assert_uint_eq(*(volatile uint32_t *)block->tensor.data, 4711);
        ck_assert_uint_eq(*in_layer, 4711);
        ck_assert_uint_eq(kvd_dlpack_live(space), 2);
        block->deleter(block);
        layer->deleter(layer);
        close_space();
}
END_TEST

/* In a child the space cannot be used, and deleting an inherited tensor touches nothing. */
START_TEST(a_forked_child_may_delete) {
        struct DLManagedTensor *tensor, *none;
        struct kvd_block one;
        struct kvd_pin pin = {0};
        pid_t pid;
        int status;

        open_space(KVD_F32, KVD_HND);
        seal_chain(1, 0, &pin, &one);
        ck_assert_int_eq(kvd_dlpack_block(space, &pin, one.id, &tensor), 0);
        pid = fork();
        if (pid == 0) {
                tensor->deleter(tensor);
                _exit(kvd_dlpack_block(space, &pin, one.id, &none) == -ECHILD ? 0 : 1);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
        tensor->deleter(tensor);
        kvd_unpin(space, &pin);
        close_space();
}
END_TEST

/* ---- on a GPU: a stream still reads when the tensor is deleted ------------------------------- */

struct gate {
        _Atomic int open;
};

static void pass_gate(void *data) {
        while (!((struct gate *)data)->open)
                usleep(1000);
}

START_TEST(a_deleted_tensor_waits_for_its_stream) {
        const struct kvd_cuda *cuda = kvd_cuda_load(NULL);
        struct DLManagedTensor *tensor;
        struct gate gate = {0};
        struct kvd_block one;
        struct kvd_pin pin = {0};
        cu_context context;
        cu_stream stream = NULL;

        open_space(KVD_F32, KVD_HND);
        if (place.memory != KVD_MEMORY_CUDA) {
                close_space();
                return;
        }
        ck_assert_int_eq(cuda->cuDevicePrimaryCtxRetain(&context, place.device), CU_OK);
        ck_assert_int_eq(cuda->cuCtxPushCurrent(context), CU_OK);
        if (_i)
                ck_assert_int_eq(cuda->cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING,
                                                                  0),
                                 CU_OK);
        seal_chain(1, 0, &pin, &one);
        ck_assert_int_eq(kvd_dlpack_block(space, &pin, one.id, &tensor), 0);
        if (_i)
                kvd_dlpack_release_on(tensor, stream);
        kvd_unpin(space, &pin);
        ck_assert_int_eq(cuda->cuLaunchHostFunc(stream, pass_gate, &gate), CU_OK);
        tensor->deleter(tensor);
        ck_assert_uint_eq(kvd_dlpack_live(space), 0);
        ck_assert_int_eq(kvd_settle(space), 1); /* still pinned */
        gate.open = 1;
        ck_assert_int_eq(cuda->cuCtxSynchronize(), CU_OK);
        ck_assert_int_eq(kvd_settle(space), 0);
        close_space();
        ck_assert_int_eq(cuda->cuDevicePrimaryCtxRelease(place.device), CU_OK);
}
END_TEST

SUITE("dlpack", FIXTURE(set_up, tear_down), LOOPS(4, shapes_are_the_geometry),
      TESTS(invalid_calls_are_refused, a_tensor_without_memory_is_an_error,
            a_tensor_holds_its_block, versioned_tensors_have_flags, opaque_blocks_are_bytes,
            a_tensor_outlives_its_space, a_tensor_outlives_the_daemon),
      WHEN(!emulated("MADV_WIPEONFORK has no effect"), TESTS(a_forked_child_may_delete)),
      LOOPS(2, a_deleted_tensor_waits_for_its_stream))
