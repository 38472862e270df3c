/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_EXPANDED_CUH
#define KVD_KERNELS_CUDA_EXPANDED_CUH

/*
 * Sums of squares as in squares.cuh, of planes of numbers of less than 16 bits. A warp expands a chunk
 * of each block to floats in its own shared memory, and sums it up there. Quantised planes have
 * chunks of whole rows. The transform of their keys is undone only before a rotation, since it
 * keeps squares.
 */

#include "kernels/cuda/narrow.cuh"
#include "kernels/cuda/squares.cuh"

/* Floats that a warp needs for a chunk of each of two blocks. */
static __device__ __forceinline__ uint32_t expanded_floats(uint32_t dim) {
        return 2 * (dim > CHUNK ? dim : CHUNK);
}

static __device__ __forceinline__ int form_of(const struct squares_of &q, uint32_t number) {
        if (q.half > 0 || (is_quantised(number) && !q.norms))
                return TURNED;
        return q.norms ? ROWS : FLAT;
}

static __device__ __forceinline__ uint32_t expanded_chunks(const struct squares_of &q,
                                                           uint32_t number) {
        int form = form_of(q, number);

        return form == TURNED ? chunks_of<TURNED>(q) :
               form == ROWS   ? chunks_of<ROWS>(q) :
                                chunks_of<FLAT>(q);
}

/* Expands n numbers of a plane, from number first on; zeros if there is no plane. */
static __device__ __forceinline__ void expand(float *to, const uint8_t *plane, uint64_t first,
                                              uint32_t n, uint32_t dim, uint32_t number) {
        for (uint32_t i = lane_id(); i < n; i += 32) {
                uint64_t row = (first + i) / dim;
                uint32_t d = (uint32_t)(first + i - row * dim);

                to[i] = plane ? narrow_number(plane + row * narrow_bytes(dim, number), d, dim,
                                              number) :
                                0.0f;
        }
        __syncwarp();
}

static __device__ __forceinline__ void turn_all(float *rows, uint32_t n, uint32_t dim) {
        for (uint32_t i = 0; i < n; i++)
                turn_row(rows + i * dim, dim);
}

/* The sum of a chunk of two planes; of x alone if y is nullptr. In lane 0. */
template <int FORM>
static __device__ __forceinline__ float chunk_in(const struct squares_of &q, const uint8_t *x,
                                                 const uint8_t *y, uint32_t number, uint32_t chunk,
                                                 float *room) {
        uint32_t most = FORM == FLAT ? CHUNK : FORM == ROWS ? q.dim : q.together * q.dim;
        uint64_t first = (uint64_t)chunk * most, left = q.elements - first;
        uint32_t n = left < most ? (uint32_t)left : most, group = group_lanes<FORM>(NUMBER_F32);
        float *other = room + expanded_floats(q.dim) / 2;
        struct squares_of one = q;

        one.x = reinterpret_cast<const uint8_t *>(room);
        one.y = reinterpret_cast<const uint8_t *>(other);
        one.elements = n;
        one.rows = n / q.dim;
        __syncwarp();
        expand(room, x, first, n, q.dim, number);
        expand(other, y, first, n, q.dim, number);
        if (q.half > 0 && is_quantised(number)) {
                turn_all(room, one.rows, q.dim);
                turn_all(other, one.rows, q.dim);
        }
        return sum_chunk<NUMBER_F32, false, FORM, true>(one, 0, lane_id() < group ? 0 : 1,
                                                        lane_id() % group);
}

static __device__ __forceinline__ float expanded_chunk(const struct squares_of &q, const uint8_t *x,
                                                       const uint8_t *y, uint32_t number,
                                                       uint32_t chunk, float *room) {
        int form = form_of(q, number);

        return form == TURNED ? chunk_in<TURNED>(q, x, y, number, chunk, room) :
               form == ROWS   ? chunk_in<ROWS>(q, x, y, number, chunk, room) :
                                chunk_in<FLAT>(q, x, y, number, chunk, room);
}

#endif
