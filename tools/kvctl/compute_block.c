/* SPDX-License-Identifier: Apache-2.0 */
/* compute: what all methods do with blocks */
#include "tools/kvctl/compute.h"

#include <string.h>

#include "kernels/block.h"

static int run_topk(struct compute *c) {
        uint64_t rows = compute_size(c, "rows"), n = compute_size(c, "n"), k = compute_size(c, "k");
        const float *scores = c->in[0].data;
        uint32_t *scratch = compute_scratch(c, n * sizeof *scratch);
        uint64_t shape[2] = {rows, k < n ? k : n};

        if (!scratch || n > UINT32_MAX || compute_make(c, 0, 2, shape) < 0)
                return compute_fail(c, "out of memory");
        for (uint64_t i = 0; i < rows; i++)
                c->ops->block->topk((uint32_t *)c->out[0].data + i * shape[1], scores + i * n, (uint32_t)n,
                                    (uint32_t)shape[1], compute_choice(c, "tie") == 1, scratch);
        return 0;
}

/* Pointers into a pool for the second input, a table of its blocks; -1 is none. */
static uint8_t **block_table(struct compute *c, void *pool, size_t block_bytes) {
        const int32_t *index = c->in[1].data;
        uint8_t **blocks = compute_scratch(c, c->in[1].count * sizeof *blocks);

        for (uint64_t i = 0; blocks && i < c->in[1].count; i++) {
                if (index[i] < -1 || (index[i] >= 0 && (uint64_t)index[i] >= compute_size(c, "pool"))) {
                        compute_fail(c, "entry %d of the table is not in the pool", index[i]);
                        return NULL;
                }
                blocks[i] = index[i] < 0 ? NULL : (uint8_t *)pool + (size_t)index[i] * block_bytes;
        }
        return blocks;
}

static int run_gather(struct compute *c) {
        size_t bytes = compute_size(c, "width") * npy_type_size(c->in[0].type);
        uint8_t **blocks = block_table(c, c->in[0].data, bytes);

        if (!blocks)
                return -1;
        c->ops->block->gather(c->out[0].data, (const uint8_t *const *)blocks, (uint32_t)compute_size(c, "n"), 0, bytes);
        return 0;
}

static int run_scatter(struct compute *c) {
        size_t bytes = compute_size(c, "width") * npy_type_size(c->in[0].type);
        uint8_t **blocks = block_table(c, c->out[0].data, bytes);

        if (!blocks)
                return -1;
        if (c->in[2].type != c->in[0].type)
                return compute_fail(c, "rows is not of the type of pool");
        memcpy(c->out[0].data, c->in[0].data, npy_bytes(&c->in[0]));
        c->ops->block->scatter(blocks, c->in[2].data, (uint32_t)compute_size(c, "n"), 0, bytes);
        return 0;
}

/* Every head has its own list; in the pool of blocks a head is a plane. */
static int run_compact(struct compute *c) {
        size_t size = npy_type_size(c->in[0].type), row = compute_size(c, "dim") * size;
        uint32_t heads = (uint32_t)compute_size(c, "heads"), tokens = (uint32_t)compute_size(c, "tokens");
        uint32_t blocks_n = (uint32_t)compute_size(c, "n"), kept = (uint32_t)compute_size(c, "kept");
        size_t plane = tokens * row;
        uint8_t **blocks = block_table(c, c->in[0].data, heads * plane);
        const uint32_t *index = c->in[2].data;

        for (uint32_t i = 0; blocks && i < blocks_n; i++)
                if (!blocks[i])
                        return compute_fail(c, "the table has a hole");
        for (uint32_t h = 0; blocks && h < heads; h++) {
                uint8_t *dense = (uint8_t *)c->out[0].data + (size_t)h * kept * row;
                struct kvd_slots from = {blocks, h * plane, row, tokens, (uint32_t)row};
                struct kvd_slots to = {&dense, 0, row, kept ? kept : 1, (uint32_t)row};

                for (uint32_t j = 0; j < kept; j++)
                        if (index[h * kept + j] >= (uint64_t)blocks_n * tokens)
                                return compute_fail(c, "token %u is not there", index[h * kept + j]);
                c->ops->block->compact(&to, &from, index + (size_t)h * kept, kept);
        }
        return blocks ? 0 : -1;
}

/* ---- four bits ---- */

static int check_group(struct compute *c, uint64_t dim) {
        uint64_t group = compute_whole(c, "group");

        if (dim == 0 || dim > UINT32_MAX)
                return compute_fail(c, "dim is at least 1");
        if (group % 2 && group < dim)
                return compute_fail(c, "group is an even number, or 0 for the whole row");
        return 0;
}

static int run_pack_4(struct compute *c) {
        uint64_t rows = compute_size(c, "rows"), dim = compute_size(c, "dim"), shape[2] = {rows, 0};
        uint32_t group = (uint32_t)compute_whole(c, "group");

        if (check_group(c, dim) < 0)
                return -1;
        shape[1] = kvd_packed_4_bytes((uint32_t)dim, group);
        if (compute_make(c, 0, 2, shape) < 0)
                return -1;
        c->ops->block->pack_4(c->out[0].data, c->in[0].data, dim, (uint32_t)rows, (uint32_t)dim, group, c->type);
        return 0;
}

static int run_unpack_4(struct compute *c) {
        uint64_t rows = compute_size(c, "rows"), dim = compute_size(c, "dim");
        uint32_t group = (uint32_t)compute_whole(c, "group");

        if (check_group(c, dim) < 0)
                return -1;
        if (compute_size(c, "bytes") != kvd_packed_4_bytes((uint32_t)dim, group))
                return compute_fail(c, "a row of %llu numbers is %zu bytes, not %llu", (unsigned long long)dim,
                                    kvd_packed_4_bytes((uint32_t)dim, group),
                                    (unsigned long long)compute_size(c, "bytes"));
        c->ops->block->unpack_4(c->out[0].data, dim, c->in[0].data, (uint32_t)rows, (uint32_t)dim, group,
                                KVD_NUMBER_F32);
        return 0;
}

#define GROUP {"group", "whole", "32", "numbers that share a range; an even number, or 0: the whole row"}

const struct compute_row compute_block[] = {
        {
                .name = "block.compact",
                .text = "the kept tokens of each KV head, packed",
                .in = {{"pool", "pool,heads,tokens,dim", COMPUTE_ANY, "blocks of keys or of values"},
                       {"table", "n", COMPUTE_IS(NPY_I32), "the blocks of the sequence, in order"},
                       {"kept", "heads,kept", COMPUTE_IS(NPY_U32), "token positions in the sequence, for each head"}},
                .out = {{"dense", "heads,kept,dim", COMPUTE_LIKE_FIRST, "token kept[h][j] at [h][j]"}},
                .run = run_compact,
        },
        {
                .name = "block.gather",
                .text = "brings scattered blocks together",
                .in = {{"pool", "pool,width", COMPUTE_ANY, "blocks, whatever is in them"},
                       {"table", "n", COMPUTE_IS(NPY_I32), "which blocks, in order; -1: none, zeros in its place"}},
                .out = {{"rows", "n,width", COMPUTE_LIKE_FIRST, "the blocks of the table"}},
                .run = run_gather,
        },
        {
                .name = "block.pack_4",
                .text = "rows in four bits a number, by groups with a least number and a step",
                .in = {{"rows", "rows,dim", COMPUTE_NUMBER, "keys or values"}},
                .param = {GROUP},
                .out = {{"packed", "rows,bytes", NPY_U8, "codes (the first of two in the low half of a byte), then "
                         "for each group its least number and its step, in fp16"}},
                .run = run_pack_4,
        },
        {
                .name = "block.scatter",
                .text = "writes rows back to scattered blocks",
                .in = {{"pool", "pool,width", COMPUTE_ANY, "blocks, whatever is in them"},
                       {"table", "n", COMPUTE_IS(NPY_I32), "which block each row goes to; -1: none"},
                       {"rows", "n,width", COMPUTE_ANY, "of the type of pool"}},
                .out = {{"pool", "pool,width", COMPUTE_LIKE_FIRST, "the pool afterwards"}},
                .run = run_scatter,
        },
        {
                .name = "block.topk",
                .text = "indices of the k largest scores of each row, ascending",
                .in = {{"scores", "rows,n", COMPUTE_IS(NPY_F32), "a NaN is less than every number"}},
                .param = {{"k", "whole", NULL, "how many; all, if a row has fewer"},
                          {"tie", "lower|larger", "lower", "which index is taken of equal scores at the cut"}},
                .out = {{"indices", "rows,min(k;n)", NPY_U32, "positions in the row"}},
                .run = run_topk,
        },
        {
                .name = "block.unpack_4",
                .text = "numbers from four bits: least + code * step",
                .in = {{"packed", "rows,bytes", COMPUTE_IS(NPY_U8), "of block.pack_4"}},
                .param = {{"dim", "whole", NULL, "numbers of a row"}, GROUP},
                .out = {{"rows", "rows,dim", NPY_F32, "each within half a step of what it was"}},
                .run = run_unpack_4,
        },
        {.name = NULL},
};
