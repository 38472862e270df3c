/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The operations of ops.h that belong to no method, and the table of one instruction set. The
 * accumulators of a tile are its rows by its panels: as many as fit into the registers together
 * with their factors.
 */

#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/attend_rows.h"
#include "kernels/bicache.h"
#include "kernels/block.h"
#include "kernels/hshare.h"
#include "kernels/interleave.h"
#include "kernels/keydiff.h"
#include "kernels/lanes.h"
#include "kernels/memshare.h"
#include "kernels/rows.h"
#include "kernels/sketch.h"

#if defined(KVD_ISA_AVX512)
enum { TILE_ROWS = 4, TILE_PANELS = 4, ROW_PANELS = 8 };
#elif !defined(KVD_ISA_SCALAR)
enum { TILE_ROWS = 4, TILE_PANELS = 1, ROW_PANELS = 4 };
#else
enum { TILE_ROWS = 1, TILE_PANELS = 1, ROW_PANELS = 1 };
#endif

/* ---- matrices ---- */

static void pack_row(float *panels, uint32_t row, const float *from, uint32_t first, uint32_t dim) {
        float *lane = panels + (size_t)(row / KVD_PANEL) * KVD_PANEL * dim + row % KVD_PANEL;

        for (uint32_t d = first; d < dim; d++)
                lane[(size_t)d * KVD_PANEL] = from[d];
}

/* Packs a whole panel, up to the last whole line of its rows. */
static uint32_t pack_panel(float *panel, const float *rows, size_t stride, uint32_t dim) {
        const uint8_t *at[KVD_PANEL];
        uint32_t d = 0;

        for (uint32_t i = 0; i < KVD_PANEL; i++)
                at[i] = (const uint8_t *)(rows + i * stride);
        for (; d + KVD_PANEL <= dim; d += KVD_PANEL)
                lanes_interleave((uint8_t *)(panel + (size_t)d * KVD_PANEL), at, d * sizeof(float),
                                 KVD_LINE, KVD_NUMBER_F32);
        return d;
}

static void pack(float *panels, uint32_t first, const float *rows, size_t stride, uint32_t n,
                 uint32_t dim) {
        for (uint32_t step; n > 0; first += step, rows += step * stride, n -= step) {
                bool whole = first % KVD_PANEL == 0 && n >= KVD_PANEL;
                uint32_t d = whole ? pack_panel(panels + (size_t)first * dim, rows, stride, dim) :
                                     0;

                step = whole ? KVD_PANEL : 1;
                for (uint32_t i = 0; i < step && d < dim; i++)
                        pack_row(panels, first + i, rows + i * stride, d, dim);
        }
}

/* last: number of outputs of the last panel. */
KERNEL void matmul_tile(float *y, size_t ldy, const float *x, size_t ldx, const float *w,
                        uint32_t n_in, uint32_t last, int rows, int panels) {
        lanes acc[TILE_ROWS][ROW_PANELS];

        for (int r = 0; r < rows; r++)
                for (int p = 0; p < panels; p++)
                        acc[r][p] = lanes_zero();
        for (uint32_t i = 0; i < n_in; i++) {
                lanes wi[ROW_PANELS];

                for (int p = 0; p < panels; p++)
                        wi[p] = lanes_load(w + ((size_t)p * n_in + i) * KVD_PANEL);
                for (int r = 0; r < rows; r++) {
                        lanes xi = lanes_set(x[r * ldx + i]);

                        for (int p = 0; p < panels; p++)
                                acc[r][p] = lanes_fma(xi, wi[p], acc[r][p]);
                }
        }
        for (int r = 0; r < rows; r++)
                for (int p = 0; p < panels; p++)
                        lanes_store_to(y + r * ldy + p * KVD_PANEL, acc[r][p],
                                       p + 1 < panels ? KVD_PANEL : last);
}

/* Multiplies all rows with a few panels, which stay in the first-level cache. */
KERNEL void matmul_panels(float *y, size_t ldy, const float *x, size_t ldx, uint32_t rows,
                          const float *w, uint32_t n_in, uint32_t last, int panels) {
        uint32_t r = 0;

        for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
                matmul_tile(y + r * ldy, ldy, x + r * ldx, ldx, w, n_in, last, TILE_ROWS, panels);
        for (; r < rows; r++)
                matmul_tile(y + r * ldy, ldy, x + r * ldx, ldx, w, n_in, last, 1, panels);
}

static void matmul(float *y, size_t ldy, const float *x, size_t ldx, uint32_t rows, const float *w,
                   uint32_t n_in, uint32_t n_out) {
        uint32_t o = 0;

        for (; rows == 1 && o + ROW_PANELS * KVD_PANEL <= n_out; o += ROW_PANELS * KVD_PANEL)
                matmul_tile(y + o, ldy, x, ldx, w + (size_t)o * n_in, n_in, KVD_PANEL, 1,
                            ROW_PANELS);
        for (; o + TILE_PANELS * KVD_PANEL <= n_out; o += TILE_PANELS * KVD_PANEL)
                matmul_panels(y + o, ldy, x, ldx, rows, w + (size_t)o * n_in, n_in, KVD_PANEL,
                              TILE_PANELS);
        for (; TILE_PANELS > 2 && o + 2 * KVD_PANEL <= n_out; o += 2 * KVD_PANEL)
                matmul_panels(y + o, ldy, x, ldx, rows, w + (size_t)o * n_in, n_in, KVD_PANEL,
                              MIN(TILE_PANELS, 2));
        for (; o < n_out; o += KVD_PANEL)
                matmul_panels(y + o, ldy, x, ldx, rows, w + (size_t)o * n_in, n_in,
                              MIN(n_out - o, KVD_PANEL), 1);
}

/* ---- vectors ---- */

/* Runs the body for every 16 of n; n_here of them exist. */
#define EACH_16(i, n_here, n) \
        for (size_t i = 0, left_ = (n), n_here = MIN(left_, (size_t)KVD_LANES); left_ > 0; \
             i += KVD_LANES, left_ -= n_here, n_here = MIN(left_, (size_t)KVD_LANES))

static void rmsnorm(float *y, const float *x, const float *w, uint32_t n, float eps) {
        lanes sum = lanes_zero(), scale;

        EACH_16(i, here, n) {
                lanes xi = lanes_load_to(x + i, (uint32_t)here);

                sum = lanes_fma(xi, xi, sum);
        }
        scale = lanes_set(1.0f / sqrtf(lanes_sum(sum) / (float)n + eps));
        EACH_16(i, here, n) {
                lanes scaled = lanes_mul(lanes_load_to(x + i, (uint32_t)here), scale);

                lanes_store_to(y + i, lanes_mul(scaled, lanes_load_to(w + i, (uint32_t)here)),
                               (uint32_t)here);
        }
}

static void rope(float *x, const float *cosine, const float *sine, uint32_t half) {
        EACH_16(i, here, half) {
                lanes low = lanes_load_to(x + i, (uint32_t)here),
                      high = lanes_load_to(x + half + i, (uint32_t)here);
                lanes c = lanes_load_to(cosine + i, (uint32_t)here),
                      s = lanes_load_to(sine + i, (uint32_t)here);

                lanes_store_to(x + i,
                               lanes_fma(lanes_mul(lanes_set(-1.0f), high), s, lanes_mul(low, c)),
                               (uint32_t)here);
                lanes_store_to(x + half + i, lanes_fma(low, s, lanes_mul(high, c)), (uint32_t)here);
        }
}

static void swiglu(float *y, const float *gate, const float *up, size_t n) {
        EACH_16(i, here, n) {
                lanes g = lanes_load_to(gate + i, (uint32_t)here);
                lanes e = lanes_exp(lanes_mul(lanes_set(-1.0f), g));
                lanes silu = lanes_div(g, lanes_add(lanes_set(1.0f), e));

                lanes_store_to(y + i, lanes_mul(silu, lanes_load_to(up + i, (uint32_t)here)),
                               (uint32_t)here);
        }
}

static void add(float *y, const float *x, size_t n) {
        EACH_16(i, here, n)
        lanes_store_to(y + i,
                       lanes_add(lanes_load_to(y + i, (uint32_t)here),
                                 lanes_load_to(x + i, (uint32_t)here)),
                       (uint32_t)here);
}

/* tanh x = 1 - 2 / (e^2x + 1) */
static void cap(float *x, uint32_t n, float scale, float most) {
        lanes one = lanes_set(1.0f), factor = lanes_set(2.0f * scale / most);

        EACH_16(i, here, n) {
                lanes e = lanes_exp(lanes_mul(lanes_load_to(x + i, (uint32_t)here), factor));
                lanes part = lanes_div(lanes_set(2.0f * most), lanes_add(e, one));

                lanes_store_to(x + i, lanes_fma(lanes_set(-1.0f), part, lanes_set(most)),
                               (uint32_t)here);
        }
}

static float largest(const float *x, uint32_t n) {
        lanes max = lanes_set(x[0]), other = max;
        uint32_t i = 0;
        float most;

        for (; i + 2 * KVD_LANES <= n; i += 2 * KVD_LANES) {
                max = lanes_max(lanes_load(x + i), max);
                other = lanes_max(lanes_load(x + i + KVD_LANES), other);
        }
        most = lanes_largest(lanes_max(max, other));
        for (; i < n; i++)
                most = x[i] > most ? x[i] : most;
        return most;
}

static float softmax(float *x, uint32_t n, float scale) {
        lanes max = lanes_set(-(largest(x, n) * scale)), sum = lanes_zero();
        uint32_t i = 0;

        for (; i + 2 * KVD_LANES <= n; i += 2 * KVD_LANES) {
                lanes e[2] = {lanes_fma(lanes_load(x + i), lanes_set(scale), max),
                              lanes_fma(lanes_load(x + i + KVD_LANES), lanes_set(scale), max)};

                lanes_exps(e, 2);
                lanes_store(x + i, e[0]);
                lanes_store(x + i + KVD_LANES, e[1]);
                sum = lanes_add(lanes_add(sum, e[0]), e[1]);
        }
        EACH_16(at, here, n - i) {
                float *last = x + i + at;
                lanes e = lanes_exp(
                        lanes_fma(lanes_load_to(last, (uint32_t)here), lanes_set(scale), max));

                lanes_store_to(last, e, (uint32_t)here);
                sum = lanes_add(sum, lanes_load_to(last, (uint32_t)here));
        }
        return lanes_sum(sum);
}

/* ---- memory ---- */

KERNEL void widen_type(float *to, const uint16_t *from, size_t n, enum kvd_number type) {
        EACH_16(i, here, n)
        lanes_store_to(to + i, lanes_widen_to(from + i, (uint32_t)here, type), (uint32_t)here);
}

static void widen(float *to, const uint16_t *from, size_t n, enum kvd_number type) {
        if (type == KVD_NUMBER_F16)
                widen_type(to, from, n, KVD_NUMBER_F16);
        else
                widen_type(to, from, n, KVD_NUMBER_BF16);
}

KERNEL void narrow_type(uint16_t *to, const float *from, size_t n, enum kvd_number type) {
        size_t i = 0;

        for (; i + KVD_LANES <= n; i += KVD_LANES)
                lanes_narrow(to + i, lanes_load(from + i), type);
        if (i < n)
                lanes_narrow_n(to + i, lanes_load_n(from + i, (uint32_t)(n - i)), (uint32_t)(n - i),
                               type);
}

static void narrow(uint16_t *to, const float *from, size_t n, enum kvd_number type) {
        if (type == KVD_NUMBER_F16)
                narrow_type(to, from, n, KVD_NUMBER_F16);
        else
                narrow_type(to, from, n, KVD_NUMBER_BF16);
}

static void copy_nt(void *to, const void *from, size_t bytes) {
        size_t head = MIN(bytes, -(uintptr_t)to & 63), left = bytes - head;
        const char *source = (const char *)from + head;
        char *target = (char *)to + head;

        memcpy(to, from, head);
        for (; left >= 64; left -= 64, source += 64, target += 64)
                lanes_stream((float *)target, lanes_load((const float *)source));
        memcpy(target, source, left);
        lanes_fence();
}

const struct kvd_ops KVD_VARIANT(kvd_ops) = {
        .name = KVD_ISA_NAME,
        .works = KVD_VARIANT(kvd_works),
        .attend = &KVD_VARIANT(kvd_attend),
        .block = &KVD_VARIANT(kvd_block),
        .keydiff = &KVD_VARIANT(kvd_keydiff),
        .memshare = &KVD_VARIANT(kvd_memshare),
        .sketch = &KVD_VARIANT(kvd_sketch),
        .hshare = &KVD_VARIANT(kvd_hshare),
        .bicache = &KVD_VARIANT(kvd_bicache),
        .pack = pack,
        .matmul = matmul,
        .rmsnorm = rmsnorm,
        .rope = rope,
        .swiglu = swiglu,
        .add = add,
        .cap = cap,
        .largest = largest,
        .softmax = softmax,
        .widen = widen,
        .narrow = narrow,
        .write_row = KVD_VARIANT(kvd_write_row),
        .read_row = KVD_VARIANT(kvd_read_row),
        .write_key = KVD_VARIANT(kvd_write_key),
        .read_key = KVD_VARIANT(kvd_read_key),
        .copy_nt = copy_nt,
};
