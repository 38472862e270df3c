/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_ATTEND_WARP_CUH
#define KVD_KERNELS_CUDA_ATTEND_WARP_CUH

/*
 * A warp with up to 16 rows of queries and tiles of 16 columns in shared memory: scores, running
 * softmax, and the weighted sum of values, on the matrix units. With g = lane / 4 and t = lane % 4,
 * a lane holds rows g and (not NARROW) g + 8.
 *
 * The order of elements within a product can be chosen freely. It is chosen so that every load from
 * shared memory is 16 bytes: in a step of 32 dimensions, lane t takes the eight from 8 t on; of 64
 * dimensions of a value, column g of eight products is the eight from 8 g on. Addresses within rows
 * of keys and values are XORed with the row number to avoid bank conflicts.
 */

#include "kernels/cuda/attend_rows.cuh"

/* A stage of a warp in shared memory. */
template <int DIM> struct stage {
        static const int ROW = DIM * 2, PLANE = GPU_ATTEND_TILE * ROW,
                         BYTES = GPU_ATTEND_STAGE_BYTES(DIM);
        uint8_t *at;

        __device__ __forceinline__ uint8_t *key(uint32_t row, uint32_t chunk) const {
                return at + row * ROW + ((chunk ^ (row & 1) << 2) << 4);
        }
        __device__ __forceinline__ uint8_t *value(uint32_t row, uint32_t chunk) const {
                return at + PLANE + row * ROW + ((chunk ^ (row >> 1 & 3) << 1) << 4);
        }
        __device__ __forceinline__ uint32_t *positions() const {
                return reinterpret_cast<uint32_t *>(at + 2 * PLANE);
        }
        __device__ __forceinline__ uint32_t *rotations() const {
                return positions() + GPU_ATTEND_TILE;
        }
};

/*
 * Copies rows at any addresses. Masked rows and dimensions beyond dim become 0, so that they are
 * not NaN.
 */
template <int DIM>
ATTEND void copy_rows(const struct gpu_attend_launch &r, const struct stage<DIM> &to,
                      uint64_t mine) {
        const uint32_t chunks = DIM / 8, lane = lane_id();

#pragma unroll 1
        for (uint32_t i = 0; i < GPU_ATTEND_TILE * chunks / 32; i++) {
                uint32_t row = (i * 32 + lane) / chunks, chunk = (i * 32 + lane) % chunks;
                uint64_t from = warp_from(mine, (int)row);
                bool there = from && chunk * 8 < r.a.dim;
                const uint8_t *at = reinterpret_cast<const uint8_t *>(there ? from + chunk * 16 :
                                                                              r.a.blocks.base);

                copy_16_or_zeros(to.key(row, chunk), at + (there ? r.a.k_offset : 0), there);
                copy_16_or_zeros(to.value(row, chunk), at + (there ? r.a.v_offset : 0), there);
        }
}

/* Copies equidistant rows: the slots of one block. */
template <int DIM>
ATTEND void copy_run(const struct gpu_attend_launch &r, const struct stage<DIM> &to,
                     uint64_t first) {
        const uint32_t chunks = DIM / 8, rows = 32 / chunks;
        uint32_t row = lane_id() / chunks, chunk = lane_id() % chunks;
        bool there = chunk * 8 < r.a.dim;
        const uint8_t *key = reinterpret_cast<const uint8_t *>(
                first + row * r.a.token_stride + (there ? chunk * 16 : 0) + r.a.k_offset);
        const uint8_t *value = key + (r.a.v_offset - r.a.k_offset);

#pragma unroll
        for (uint32_t i = 0; i < GPU_ATTEND_TILE / rows; i++) {
                copy_16_or_zeros(to.key(i * rows + row, chunk), key, there);
                copy_16_or_zeros(to.value(i * rows + row, chunk), value, there);
                key += rows * r.a.token_stride;
                value += rows * r.a.token_stride;
        }
}

/* Starts to copy a tile; lanes r and r + 16 have the address of row r. */
template <int DIM>
ATTEND void copy_tile(const struct gpu_attend_launch &r, const struct stage<DIM> &to,
                      struct place p) {
        uint64_t mine = reinterpret_cast<uint64_t>(p.at), first = warp_from(mine, 0);
        uint32_t row = lane_id() % GPU_ATTEND_TILE;

        if (lane_id() < GPU_ATTEND_TILE) {
                to.positions()[row] = p.position;
                to.rotations()[row] = p.rotation;
        }
        __syncwarp();
        if (warp_ballot(!mine || mine != first + row * r.a.token_stride))
                copy_rows(r, to, mine);
        else
                copy_run(r, to, first);
}

/* ---- 16-bit numbers in pairs ---- */

template <int NUMBER> ATTEND void multiply(float d[4], const uint32_t a[4], const uint32_t b[2]) {
        if (NUMBER == NUMBER_F16)
                mma_f16(d, a, b);
        else
                mma_bf16(d, a, b);
}

/* high: x and y, rounded; low: their rounding errors. */
template <int NUMBER> ATTEND void split_pair(float x, float y, uint32_t *high, uint32_t *low) {
        typedef element<NUMBER> number;
        uint16_t hx = number::narrow(x), hy = number::narrow(y);

        *high = hx | (uint32_t)hy << 16;
        *low = number::narrow(x - number::wide(hx)) | (uint32_t)number::narrow(y - number::wide(hy)) << 16;
}

ATTEND uint32_t low_halves(uint32_t x, uint32_t y) {
        return __byte_perm(x, y, 0x5410);
}

ATTEND uint32_t high_halves(uint32_t x, uint32_t y) {
        return __byte_perm(x, y, 0x7632);
}

/* A lane's rows. */
struct lane_row {
        uint64_t at;    /* index of its query, in elements */
        uint32_t limit; /* the row sees the positions below */
        bool there;
};

/* ---- the warp ---- */

template <int NUMBER, int DIM, int FORM> struct warp_state {
        static const int ROWS = FORM == GPU_ATTEND_NARROW ? 1 : 2,
                         PARTS = FORM == GPU_ATTEND_WIDE ? 2 : 1;

        struct lane_row rows[ROWS];
        /* [PARTS][DIM / 16][32], in shared memory: each lane's factors */
        uint4 *q;
        uint32_t rotation; /* rotation of q; if rotations are used, q is the warp's own */
        /* weighted sums of values; [8 j + i]: product i of dimensions from 64 j on */
        float sums[DIM / 8][4];
        float largest[ROWS];         /* largest score so far */
        float weights[ROWS];         /* sum of weights of this lane's columns */
};

template <int NUMBER, int DIM, int FORM>
ATTEND void clear_state(struct warp_state<NUMBER, DIM, FORM> &w) {
        w.rotation = NOWHERE;
#pragma unroll
        for (int i = 0; i < DIM / 8; i++)
                for (int j = 0; j < 4; j++)
                        w.sums[i][j] = 0.0f;
        for (int i = 0; i < w.ROWS; i++) {
                w.largest[i] = -INFINITY;
                w.weights[i] = 0.0f;
        }
}

/*
 * Stores two numbers of a row at a time to the word of this lane where a product expects them: word
 * 2 p + row of a step's 16 bytes has pair p of the row. The first part has the rounded numbers, the
 * second their rounding errors. Handles every parts-th pair from part on: warps that share queries
 * share the work.
 */
template <int NUMBER, int DIM, int FORM>
ATTEND void load_queries(const struct gpu_attend_launch &r, struct warp_state<NUMBER, DIM, FORM> &w,
                         uint32_t rotation, uint32_t part, uint32_t parts) {
        uint32_t t = lane_id() % 4, high, low;

        __syncwarp();
#pragma unroll 1
        for (uint32_t i = part; i < DIM / 8 * w.ROWS; i += parts) {
                uint32_t step = i / (2 * w.ROWS), pair = i / w.ROWS % 2;
                uint32_t *to = reinterpret_cast<uint32_t *>(w.q) + step * 128 + lane_id() * 4;
                uint32_t d = step / 2 * 32 + t * 8 + step % 2 * 4 + 2 * pair;
                struct lane_row row = i % w.ROWS ? w.rows[w.ROWS - 1] : w.rows[0];
                float x = row.there ? load_query(r, row.at, d, rotation) : 0.0f;
                float y = row.there ? load_query(r, row.at, d + 1, rotation) : 0.0f;

                split_pair<NUMBER>(x, y, &high, &low);
                to[2 * pair + i % w.ROWS] = high;
                if (FORM == GPU_ATTEND_NARROW)
                        to[2 * pair + 1] = low;
                if (FORM == GPU_ATTEND_WIDE)
                        to[DIM / 16 * 128 + 2 * pair + i % w.ROWS] = low;
        }
        __syncwarp();
        w.rotation = rotation;
}

/* ---- scores ---- */

/* Multiplies both halves of a tile: columns 0 to 7 with b, 8 to 15 with c. */
template <int NUMBER>
ATTEND void multiply_step(float d[2][4], uint4 q, uint32_t b0, uint32_t b1, uint32_t c0,
                          uint32_t c1) {
        const uint32_t a[4] = {q.x, q.y, q.z, q.w}, b[2] = {b0, b1}, c[2] = {c0, c1};

        multiply<NUMBER>(d[0], a, b);
        multiply<NUMBER>(d[1], a, c);
}

/* to[row][2 * half + i] = the score of column 8 * half + 2 t + i. */
template <int NUMBER, int DIM, int FORM>
ATTEND void multiply_keys(const struct warp_state<NUMBER, DIM, FORM> &w,
                          const struct stage<DIM> &from, float to[2][4]) {
        uint32_t lane = lane_id(), g = lane / 4, t = lane % 4;
        float d[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};

#pragma unroll
        for (int step = 0; step < DIM / 16; step += 2) {
                uint4 k[2];

                for (int half = 0; half < 2; half++)
                        k[half] = *reinterpret_cast<const uint4 *>(
                                from.key(8 * half + g, 2 * step + t));
#pragma unroll
                for (int part = 0; part < w.PARTS; part++) {
                        const uint4 *q = w.q + (part * DIM / 16 + step) * 32 + lane;

                        multiply_step<NUMBER>(d, q[0], k[0].x, k[0].y, k[1].x, k[1].y);
                        multiply_step<NUMBER>(d, q[32], k[0].z, k[0].w, k[1].z, k[1].w);
                }
        }
        for (int half = 0; half < 2; half++)
                for (int i = 0; i < 2; i++)
                        if (FORM == GPU_ATTEND_NARROW) {
                                to[0][2 * half + i] = d[half][i] + d[half][i + 2];
                        } else {
                                to[0][2 * half + i] = d[half][i];
                                to[1][2 * half + i] = d[half][i + 2];
                        }
}

/*
 * Scores as exponents of two; -inf for columns that the row does not see. A tile is processed once
 * for each rotation that it contains.
 */
template <int NUMBER, int DIM, int FORM>
ATTEND void score_tile(const struct gpu_attend_launch &r, struct warp_state<NUMBER, DIM, FORM> &w,
                       const struct stage<DIM> &from, float to[2][4]) {
        uint32_t lane = lane_id(), t = lane % 4, mine = 0, todo = 1, rotation = w.rotation;
        float part[2][4];

        if (r.a.rotation) {
                mine = from.rotations()[lane % GPU_ATTEND_TILE];
                todo = warp_ballot(lane < GPU_ATTEND_TILE &&
                                   from.positions()[lane % GPU_ATTEND_TILE] != NOWHERE);
        }
        for (int i = 0; i < 4; i++)
                to[0][i] = to[1][i] = -INFINITY;
#pragma unroll 1
        while (todo) {
                if (r.a.rotation)
                        rotation = warp_from(mine, __ffs((int)todo) - 1);
                if (rotation != w.rotation)
                        load_queries(r, w, rotation, 0, 1);
                multiply_keys(w, from, part);
                for (int i = 0; i < 4; i++) {
                        uint32_t column = i / 2 * 8 + 2 * t + i % 2,
                                 position = from.positions()[column];
                        bool same = !r.a.rotation || from.rotations()[column] == rotation;

                        for (int row = 0; row < w.ROWS; row++)
                                if (same && position < w.rows[row].limit)
                                        to[row][i] = part[row][i] * r.exponent;
                }
                todo = r.a.rotation ? todo & ~warp_ballot(mine == rotation) : 0;
        }
}

/* ---- softmax ---- */

template <int NUMBER, int DIM, int FORM>
ATTEND void shrink_sums(struct warp_state<NUMBER, DIM, FORM> &w, const float by[2]) {
#pragma unroll
        for (int i = 0; i < DIM / 8; i++)
                for (int j = 0; j < 4; j++)
                        w.sums[i][j] *= by[j / 2 % w.ROWS];
}

/* Turns scores into weights. */
template <int NUMBER, int DIM, int FORM>
ATTEND void weigh_tile(struct warp_state<NUMBER, DIM, FORM> &w, float x[2][4]) {
        float by[2] = {1.0f, 1.0f};
        bool more = false;

#pragma unroll
        for (int row = 0; row < w.ROWS; row++) {
                float most = fmaxf(fmaxf(x[row][0], x[row][1]), fmaxf(x[row][2], x[row][3]));

                most = fmaxf(most, warp_xor(most, 1));
                most = fmaxf(most, warp_xor(most, 2));
                most = fmaxf(most, w.largest[row]);
                by[row] = shrink(w.largest[row], most);
                more = more || most > w.largest[row];
                w.largest[row] = most;
                w.weights[row] *= by[row];
                for (int i = 0; i < 4; i++) {
                        x[row][i] = x[row][i] == -INFINITY ? 0.0f : exp2f(x[row][i] - most);
                        w.weights[row] += x[row][i];
                }
        }
        if (warp_ballot(more))
                shrink_sums(w, by);
}

/* ---- values ---- */

/* Takes rows 2 t and 2 t + 1, 2 t + 8 and 2 t + 9 of 64 dimensions of a part: eight products. */
template <int NUMBER, int DIM, int PARTS>
ATTEND void multiply_values(float sums[8][4], const struct stage<DIM> &from, uint32_t part,
                            const uint32_t a[PARTS][4]) {
        uint32_t g = lane_id() / 4, t = lane_id() % 4, b[2], word[4][4];

#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
                uint4 v = *reinterpret_cast<const uint4 *>(
                        from.value(i / 2 * 8 + 2 * t + i % 2, 8 * part + g));

                word[i][0] = v.x;
                word[i][1] = v.y;
                word[i][2] = v.z;
                word[i][3] = v.w;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
                for (int j = 0; j < 2; j++)
                        b[j] = i % 2 ? high_halves(word[2 * j][i / 2], word[2 * j + 1][i / 2]) :
                                       low_halves(word[2 * j][i / 2], word[2 * j + 1][i / 2]);
                for (int p = 0; p < PARTS; p++)
                        multiply<NUMBER>(sums[i], a[p], b);
        }
}

/*
 * The weights of a tile are already in the registers where the next product expects its first
 * factor.
 */
template <int NUMBER, int DIM, int FORM>
ATTEND void mix_tile(struct warp_state<NUMBER, DIM, FORM> &w, const struct stage<DIM> &from,
                     const float x[2][4]) {
        uint32_t a[2][4], low[4];

#pragma unroll
        for (int row = 0; row < w.ROWS; row++) {
                split_pair<NUMBER>(x[row][0], x[row][1], &a[0][row], &low[row]);
                split_pair<NUMBER>(x[row][2], x[row][3], &a[0][row + 2], &low[row + 2]);
        }
        if (FORM == GPU_ATTEND_NARROW) {
                a[0][1] = low[0];
                a[0][3] = low[2];
        }
        for (int i = 0; i < 4 && FORM == GPU_ATTEND_WIDE; i++)
                a[1][i] = low[i];
#pragma unroll
        for (int part = 0; part < DIM / 64; part++)
                multiply_values<NUMBER, DIM, FORM == GPU_ATTEND_WIDE ? 2 : 1>(w.sums + 8 * part,
                                                                              from, part, a);
}

/* ---- results ---- */

/* Adds up the lanes' shares of a sum over columns. */
ATTEND float sum_quad(float x) {
        x += warp_xor(x, 1);
        return x + warp_xor(x, 2);
}

/* Stores the sums of row (0: g, 1: g + 8), multiplied by by, to a row of shared memory. */
template <int NUMBER, int DIM, int FORM>
ATTEND void put_sums(const struct warp_state<NUMBER, DIM, FORM> &w, int row, float by, float *to) {
        to += lane_id() % 4 * 16;
#pragma unroll
        for (int part = 0; part < DIM / 64; part++)
#pragma unroll
                for (int i = 0; i < 16; i += 4) {
                        float x[4];

                        for (int j = 0; j < 4; j++) {
                                const float *d = w.sums[8 * part + (i + j) % 8];

                                x[j] = FORM == GPU_ATTEND_NARROW ? d[i / 8] + d[i / 8 + 2] :
                                                                   d[2 * row + i / 8];
                        }
                        *reinterpret_cast<float4 *>(to + 64 * part + i) = make_float4(x[0] * by, x[1] * by, x[2] * by,
                                                                                      x[3] * by);
                }
}

#endif
