/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks and layers as tensors for other libraries. A tensor is a struct of ours that holds its
 * memory by a pin, or by a reference to the mapping. Any thread of any library may delete it, at
 * any time. If kvd_space_close was called meanwhile, the last tensor closes the space.
 */

#include <dlfcn.h>
#include <errno.h>

#include "client/gpu/dlpack.h"
#include "client/gpu/gpu_view.h"
#include "ipc/base/format.h"
#include "ipc/base/sys.h"

#define DIMENSIONS 5

struct owner {
        struct DLManagedTensor managed;
        struct DLManagedTensorVersioned versioned; /* the same, for kvd_dlpack_versioned */
        int64_t shape[DIMENSIONS], strides[DIMENSIONS];
        struct kvd_space *space;
        struct view *view; /* with a reference, unless lasts */
        bool lasts;        /* a layer or the whole memory of a space at fixed addresses */
        kvd_ref pinned;    /* block with a pin; KVD_ROOT if none */
        void *stream;      /* releases the pin behind it; NULL: the legacy default stream */
};

/* ---- letting go ------------------------------------------------------------------------------ */

/* On a GPU, kernels that read the block may still be running. */
static void let_go(struct owner *o) {
        struct view *view = o->view;

        if (o->pinned == KVD_ROOT)
                return;
        if (!view->device) {
                unpin_moved(view, kvd_ref_id(o->pinned));
                return;
        }
        deferred_settle(view);
        deferred_unpin(view, o->pinned, o->stream);
}

static void end(struct owner *o) {
        if (!forked(o->space->handle)) {
                let_go(o);
                if (!o->lasts)
                        view_put(o->view);
        }
        space_put(o->space);
        free(o);
}

static void delete (struct DLManagedTensor *managed) {
        end(managed->owner);
}

static void delete_versioned(struct DLManagedTensorVersioned *versioned) {
        end(versioned->owner);
}

uint32_t kvd_dlpack_live(struct kvd_space *space) {
        return atomic_load(&space->users) - 1;
}

void kvd_dlpack_release_on(struct DLManagedTensor *managed, void *stream) {
        struct owner *o = managed->owner;

        o->stream = stream;
}

/* Sealed blocks are mapped read-only (on a GPU they are not, but the consumer should know). */
int kvd_dlpack_versioned(struct DLManagedTensor *managed, struct DLManagedTensorVersioned **ret) {
        struct owner *o = managed->owner;

        o->versioned = (struct DLManagedTensorVersioned){
                .version = {1, 1},
                .owner = o,
                .deleter = delete_versioned,
                .flags = o->pinned == KVD_ROOT ? 0 : DLPACK_READ_ONLY,
                .tensor = managed->tensor,
        };
        *ret = &o->versioned;
        return 0;
}

/*
 * Only Python calls this, so its functions are found in this process. A consumer that takes the
 * tensor renames the capsule.
 */
void kvd_dlpack_capsule_free(void *capsule) {
        int (*is_valid)(void *capsule, const char *name);
        void *(*get_pointer)(void *capsule, const char *name);

        *(void **)&is_valid = dlsym(RTLD_DEFAULT, "PyCapsule_IsValid");
        *(void **)&get_pointer = dlsym(RTLD_DEFAULT, "PyCapsule_GetPointer");
        if (!is_valid || !get_pointer)
                return;
        if (is_valid(capsule, "dltensor"))
                delete (get_pointer(capsule, "dltensor"));
        else if (is_valid(capsule, "dltensor_versioned"))
                delete_versioned(get_pointer(capsule, "dltensor_versioned"));
}

/* ---- shapes ---------------------------------------------------------------------------------- */

/* Rows of quantised numbers, with their scales, are bytes. */
static uint32_t element_of(const struct kvd_shape *g) {
        return kvd_is_quantised(g->dtype) ? 1 : kvd_dtype_bytes(g->dtype);
}

static struct DLDataType type_of(const struct kvd_shape *g) {
        static const uint8_t codes[] =
                {[KVD_F32] = DLPACK_FLOAT, [KVD_F16] = DLPACK_FLOAT, [KVD_BF16] = DLPACK_BFLOAT,
                 [KVD_I8] = DLPACK_INT,    [KVD_Q8] = DLPACK_UINT,   [KVD_Q4] = DLPACK_UINT,
                 [KVD_E4M3] = DLPACK_E4M3, [KVD_E5M2] = DLPACK_E5M2};

        return (struct DLDataType){codes[g->dtype], (uint8_t)(element_of(g) * 8), 1};
}

/* The last three dimensions: one plane. */
static void shape_plane(const struct kvd_shape *g, int64_t *shape, int64_t *strides) {
        bool hnd = g->order == KVD_HND;

        shape[0] = hnd ? g->kv_heads : g->block_tokens;
        shape[1] = hnd ? g->block_tokens : g->kv_heads;
        shape[2] = (int64_t)(kvd_format_row(g->dtype, g->head_dim) / element_of(g));
        strides[0] = shape[1] * shape[2];
        strides[1] = shape[2];
        strides[2] = 1;
}

/* Opaque blocks are bytes. */
static void shape_opaque(struct owner *o) {
        o->managed.tensor.dtype = (struct DLDataType){DLPACK_UINT, 8, 1};
        o->shape[0] = (int64_t)o->view->ix->shard_bytes;
        o->strides[0] = 1;
        o->managed.tensor.ndim = 1;
}

static void shape_memory(struct owner *o, const struct kvd_space_memory *memory) {
        o->managed.tensor.dtype = (struct DLDataType){DLPACK_INT, 8, 1};
        o->shape[0] = memory->blocks;
        o->shape[1] = o->strides[0] = (int64_t)memory->block_bytes;
        o->strides[1] = 1;
        o->managed.tensor.ndim = 2;
}

static void shape_planes(struct owner *o) {
        const struct kvd_shape *g = &o->view->ix->geometry;

        o->shape[0] = g->layers / g->layer_groups;
        o->shape[1] = 2;
        shape_plane(g, o->shape + 2, o->strides + 2);
        o->strides[1] = o->shape[2] * o->strides[2];
        o->strides[0] = 2 * o->strides[1];
        o->managed.tensor.ndim = 5;
}

static void shape_layer(struct owner *o, const struct kvd_layer_view *layer) {
        o->shape[0] = is_fixed(o->space) ? o->space->fixed.blocks : o->view->ix->capacity;
        o->strides[0] = (int64_t)(layer->block_stride / element_of(&o->view->ix->geometry));
        shape_plane(&o->view->ix->geometry, o->shape + 1, o->strides + 1);
        o->managed.tensor.ndim = 4;
}

static void shape_block(struct owner *o) {
        if (kvd_shape_is_opaque(&o->view->ix->geometry))
                shape_opaque(o);
        else
                shape_planes(o);
}

static int make(struct kvd_space *space, struct view *view, void *data, bool lasts,
                struct owner **ret) {
        int r = index_only_refuses(space);
        struct owner *o = r < 0 ? NULL : sys->calloc(1, sizeof *o);

        if (!o)
                return r < 0 ? r : client_fail(-ENOMEM, "out of memory");
        o->space = space;
        o->view = view;
        o->lasts = lasts;
        o->pinned = KVD_ROOT;
        o->managed.tensor = (struct DLTensor){
                .data = data,
                .device = view->device ? (struct DLDevice){DLPACK_CUDA, view->device->gpu.ordinal} :
                                         (struct DLDevice){DLPACK_CPU, 0},
                .dtype = type_of(&view->ix->geometry),
                .shape = o->shape,
                .strides = o->strides,
        };
        o->managed.owner = o;
        o->managed.deleter = delete;
        atomic_fetch_add(&view->refs, !lasts);
        atomic_fetch_add(&space->users, 1);
        *ret = o;
        return 0;
}

/* ---- the calls ------------------------------------------------------------------------------- */

/* The block's reference; KVD_ROOT if it is not in the chain, which cannot change while pinned. */
static kvd_ref find_in_chain(const struct kvd_pin *pin, uint32_t block) {
        const struct view *view = pin->view;
        kvd_ref at = kvd_ref_make(pin->leaf, pin->generation);

        for (uint32_t i = 0;
             i < pin->n_blocks && at != KVD_ROOT && kvd_ref_id(at) < view->ix->capacity; i++) {
                if (kvd_ref_id(at) == block)
                        return at;
                at = shm_get64(&kvd_index_desc(view->ix, kvd_ref_id(at))->parent);
        }
        return KVD_ROOT;
}

/*
 * The new pin needs no second look at the slot word (C5): the caller's pin holds the chain, and a
 * scan that sees the caller's pin released also sees the new one.
 */
int kvd_dlpack_block(struct kvd_space *space, const struct kvd_pin *pin, uint32_t block,
                     struct DLManagedTensor **ret) {
        struct view *view = pin->view;
        struct owner *o;
        kvd_ref ref;
        int r = space_check(space);

        if (r < 0)
                return r;
        ref = view ? find_in_chain(pin, block) : KVD_ROOT;
        if (ref == KVD_ROOT)
                return client_fail(-EINVAL, "block %u is not in the chain that the pin holds",
                                   block);
        r = make(space, view, kvd_pin_block(pin, block), false, &o);
        if (r < 0)
                return r;
        shape_block(o);
        count_pin(view, block);
        pins_moved(view);
        o->pinned = ref;
        *ret = &o->managed;
        return 0;
}

int kvd_dlpack_filling(struct kvd_space *space, const struct kvd_block *block,
                       struct DLManagedTensor **ret) {
        struct owner *o;
        int r = space_check(space);

        if (r < 0)
                return r;
        if (!block->view || !block->data || is_posted(block))
                return client_fail(-EINVAL, "no block that is being filled");
        r = make(space, block->view, block->data, false, &o);
        if (r < 0)
                return r;
        shape_block(o);
        *ret = &o->managed;
        return 0;
}

/*
 * If the daemon was replaced meanwhile, the layer may belong to another view than the one returned:
 * then this repeats both.
 */
static int view_of_layer(struct kvd_space *space, uint32_t layer, struct kvd_layer_view *at,
                         struct view **ret) {
        for (;;) {
                struct view *view = view_get(space);
                int r = kvd_layer_view(space, layer, at);

                if (r == 0 && view_is_current(view)) {
                        *ret = view;
                        return 0;
                }
                view_put(view);
                if (r < 0)
                        return r;
        }
}

int kvd_dlpack_layer(struct kvd_space *space, uint32_t layer, uint32_t values,
                     struct DLManagedTensor **ret) {
        struct kvd_layer_view at;
        struct view *view = NULL;
        struct owner *o;
        int r = space_check(space);

        if (r == 0)
                r = view_of_layer(space, layer, &at, &view);
        if (r < 0)
                return r;
        r = make(space, view, values ? at.values : at.keys, is_fixed(space), &o);
        view_put(view);
        if (r < 0)
                return r;
        shape_layer(o, &at);
        *ret = &o->managed;
        return 0;
}

int kvd_dlpack_memory(struct kvd_space *space, struct DLManagedTensor **ret) {
        struct kvd_space_memory memory;
        struct view *view;
        struct owner *o;
        int r = space_check(space);

        if (r < 0)
                return r;
        view = view_get(space);
        view_memory(view, &memory);
        r = make(space, view, memory.base, is_fixed(space), &o);
        view_put(view);
        if (r < 0)
                return r;
        shape_memory(o, &memory);
        *ret = &o->managed;
        return 0;
}
