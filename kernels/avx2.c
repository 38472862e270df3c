/* SPDX-License-Identifier: Apache-2.0 */

/* AVX2 with FMA and F16C: a panel or a lane group is two registers, the lower and the upper eight lanes. */

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/attend_rows.h"
#include "kernels/bicache.h"
#include "kernels/block.h"
#include "kernels/hshare.h"
#include "kernels/keydiff.h"
#include "kernels/memshare.h"
#include "kernels/sketch.h"
#include "kernels/variants.h"

enum { LANES = 8, TILE_ROWS = 4, MAX_VECTORS = 8 };

/* The first n of 8 lanes, n in 1 to 8. */
KERNEL __m256i first_lanes(size_t n) {
        static const int32_t window[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1};

        return _mm256_loadu_si256((const __m256i *)(window + LANES - n));
}

/* Loads and stores the first n lanes; n may be less than 1 (nothing, zeros) or more than 8 (all). */
KERNEL __m256 load_first(const float *from, ptrdiff_t n) {
        if (n >= LANES)
                return _mm256_loadu_ps(from);
        return n <= 0 ? _mm256_setzero_ps() : _mm256_maskload_ps(from, first_lanes((size_t)n));
}

KERNEL void store_first(float *to, __m256 v, ptrdiff_t n) {
        if (n >= LANES)
                _mm256_storeu_ps(to, v);
        else if (n > 0)
                _mm256_maskstore_ps(to, first_lanes((size_t)n), v);
}

KERNEL float add_lanes(__m256 low, __m256 high) {
        __m256 a = _mm256_add_ps(low, high);
        __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));

        b = _mm_add_ps(b, _mm_movehl_ps(b, b));
        return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

KERNEL __m256 exp_lanes(__m256 x) {
        __m256 clamped = _mm256_min_ps(_mm256_set1_ps(EXP_HIGH), x);
        __m256 shifted = _mm256_fmadd_ps(clamped, _mm256_set1_ps(EXP_LOG2E), _mm256_set1_ps(EXP_SHIFT));
        __m256 n = _mm256_sub_ps(shifted, _mm256_set1_ps(EXP_SHIFT));
        __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-EXP_LN2_HIGH), clamped);
        __m256 p = _mm256_set1_ps(EXP_C5);
        __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
        __m256 keep = _mm256_cmp_ps(clamped, _mm256_set1_ps(EXP_LOW), _CMP_NLT_UQ);

        r = _mm256_fmadd_ps(n, _mm256_set1_ps(-EXP_LN2_LOW), r);
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C4));
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C3));
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C2));
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C1));
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C0));
        p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
        power = _mm256_add_epi32(power, _mm256_set1_epi32(EXP_ONE));
        return _mm256_and_ps(keep, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

/* ---- matrices ---- */

KERNEL void transpose_8x8(float *to, const float *rows, size_t stride) {
        __m256 a[8], b[8];

        for (int i = 0; i < 8; i++)
                a[i] = _mm256_loadu_ps(rows + i * stride);
        for (int i = 0; i < 4; i++) {
                b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
                b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
        }
        for (int i = 0; i < 8; i += 4)
                for (int j = 0; j < 2; j++) {
                        a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], _MM_SHUFFLE(1, 0, 1, 0));
                        a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], _MM_SHUFFLE(3, 2, 3, 2));
                }
        for (int i = 0; i < 4; i++) {
                _mm256_storeu_ps(to + i * KVD_PANEL, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
                _mm256_storeu_ps(to + (i + 4) * KVD_PANEL, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
        }
}

KERNEL void pack_8(float *lane, const float *rows, size_t stride, uint32_t dim) {
        uint32_t d = 0;

        for (; d + 8 <= dim; d += 8)
                transpose_8x8(lane + (size_t)d * KVD_PANEL, rows + d, stride);
        for (; d < dim; d++)
                for (int i = 0; i < 8; i++)
                        lane[(size_t)d * KVD_PANEL + i] = rows[i * stride + d];
}

void kvd_pack_avx2(float *panels, uint32_t first, const float *rows, size_t stride, uint32_t n, uint32_t dim) {
        for (uint32_t step; n > 0; first += step, rows += step * stride, n -= step) {
                if (first % 8 == 0 && n >= 8) {
                        step = 8;
                        pack_8(panels + (size_t)(first / KVD_PANEL) * KVD_PANEL * dim + first % KVD_PANEL, rows,
                               stride, dim);
                } else {
                        step = 1;
                        kvd_pack_scalar(panels, first, rows, stride, 1, dim);
                }
        }
}

/* A vector is half a panel: vector v of a tile is half v % 2 of panel v / 2. left: outputs from y on. */
KERNEL void matmul_tile(float *y, size_t ldy, const float *x, size_t ldx, const float *w, uint32_t n_in,
                        ptrdiff_t left, int rows, int vectors) {
        __m256 acc[TILE_ROWS][MAX_VECTORS];

        for (int r = 0; r < rows; r++)
                for (int v = 0; v < vectors; v++)
                        acc[r][v] = _mm256_setzero_ps();
        for (uint32_t i = 0; i < n_in; i++) {
                __m256 wi[MAX_VECTORS];

                for (int v = 0; v < vectors; v++)
                        wi[v] = _mm256_loadu_ps(w + ((size_t)(v / 2) * n_in + i) * KVD_PANEL + v % 2 * LANES);
                for (int r = 0; r < rows; r++) {
                        __m256 xi = _mm256_broadcast_ss(x + r * ldx + i);

                        for (int v = 0; v < vectors; v++)
                                acc[r][v] = _mm256_fmadd_ps(xi, wi[v], acc[r][v]);
                }
        }
        for (int r = 0; r < rows; r++)
                for (int v = 0; v < vectors; v++)
                        store_first(y + r * ldy + v * LANES, acc[r][v], left - v * LANES);
}

static void matmul_panel(float *y, size_t ldy, const float *x, size_t ldx, uint32_t rows, const float *w,
                         uint32_t n_in, ptrdiff_t left) {
        uint32_t r = 0;

        for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
                matmul_tile(y + r * ldy, ldy, x + r * ldx, ldx, w, n_in, left, TILE_ROWS, 2);
        for (; r < rows; r++)
                matmul_tile(y + r * ldy, ldy, x + r * ldx, ldx, w, n_in, left, 1, 2);
}

static void matmul(float *y, size_t ldy, const float *x, size_t ldx, uint32_t rows, const float *w, uint32_t n_in,
                   uint32_t n_out) {
        uint32_t o = 0;

        for (; rows == 1 && o + MAX_VECTORS * LANES <= n_out; o += MAX_VECTORS * LANES)
                matmul_tile(y + o, ldy, x, ldx, w + (size_t)o * n_in, n_in, MAX_VECTORS * LANES, 1, MAX_VECTORS);
        for (; o < n_out; o += KVD_PANEL)
                matmul_panel(y + o, ldy, x, ldx, rows, w + (size_t)o * n_in, n_in, (ptrdiff_t)n_out - o);
}

/* left: dimensions from dim on; a constant for full tiles, so that their loads and stores need no masks. */
KERNEL void mix_tile(float *y, size_t ldy, const float *p, size_t ldp, const struct kvd_rows *v, uint32_t from,
                     uint32_t to, uint32_t dim, ptrdiff_t left, int rows) {
        __m256 acc[TILE_ROWS][2];

        for (int r = 0; r < rows; r++)
                for (int q = 0; q < 2; q++)
                        acc[r][q] = load_first(y + r * ldy + dim + q * LANES, left - q * LANES);
        for (uint32_t t = from; t < to;) {
                const float *row = kvd_rows_at(v, t) + dim;
                uint32_t end = MIN(to, t - t % v->per_block + v->per_block);

                for (; t < end; t++, row += v->stride) {
                        __m256 low = load_first(row, left), high = load_first(row + LANES, left - LANES);

                        for (int r = 0; r < rows; r++) {
                                __m256 weight = _mm256_broadcast_ss(p + r * ldp + t);

                                acc[r][0] = _mm256_fmadd_ps(weight, low, acc[r][0]);
                                acc[r][1] = _mm256_fmadd_ps(weight, high, acc[r][1]);
                        }
                }
        }
        for (int r = 0; r < rows; r++)
                for (int q = 0; q < 2; q++)
                        store_first(y + r * ldy + dim + q * LANES, acc[r][q], left - q * LANES);
}

KERNEL void mix_rows(float *y, size_t ldy, const float *p, size_t ldp, const struct kvd_rows *v, uint32_t from,
                     uint32_t to, int rows) {
        uint32_t d = 0;

        for (; d + KVD_PANEL <= v->dim; d += KVD_PANEL)
                mix_tile(y, ldy, p, ldp, v, from, to, d, KVD_PANEL, rows);
        if (d < v->dim)
                mix_tile(y, ldy, p, ldp, v, from, to, d, (ptrdiff_t)(v->dim - d), rows);
}

static void mix(float *y, size_t ldy, const float *p, size_t ldp, uint32_t rows, const struct kvd_rows *v,
                uint32_t from, uint32_t to) {
        uint32_t r = 0;

        for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
                mix_rows(y + r * ldy, ldy, p + r * ldp, ldp, v, from, to, TILE_ROWS);
        for (; r < rows; r++)
                mix_rows(y + r * ldy, ldy, p + r * ldp, ldp, v, from, to, 1);
}

/* ---- vectors ---- */

static void rmsnorm(float *y, const float *x, const float *w, uint32_t n, float eps) {
        __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()}, scale;

        for (ptrdiff_t i = 0, left = n; left > 0; i += KVD_PANEL, left -= KVD_PANEL)
                for (int q = 0; q < 2; q++) {
                        __m256 xi = load_first(x + i + q * LANES, left - q * LANES);

                        sum[q] = _mm256_fmadd_ps(xi, xi, sum[q]);
                }
        scale = _mm256_set1_ps(1.0f / sqrtf(add_lanes(sum[0], sum[1]) / (float)n + eps));
        for (ptrdiff_t i = 0, left = n; left > 0; i += LANES, left -= LANES) {
                __m256 scaled = _mm256_mul_ps(load_first(x + i, left), scale);

                store_first(y + i, _mm256_mul_ps(scaled, load_first(w + i, left)), left);
        }
}

static void rope(float *x, const float *cosine, const float *sine, uint32_t half) {
        for (ptrdiff_t i = 0, left = half; left > 0; i += LANES, left -= LANES) {
                __m256 low = load_first(x + i, left), high = load_first(x + half + i, left);
                __m256 c = load_first(cosine + i, left), s = load_first(sine + i, left);

                store_first(x + i, _mm256_fnmadd_ps(high, s, _mm256_mul_ps(low, c)), left);
                store_first(x + half + i, _mm256_fmadd_ps(low, s, _mm256_mul_ps(high, c)), left);
        }
}

static void swiglu(float *y, const float *gate, const float *up, size_t n) {
        const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);

        for (ptrdiff_t i = 0, left = (ptrdiff_t)n; left > 0; i += LANES, left -= LANES) {
                __m256 g = load_first(gate + i, left);
                __m256 silu = _mm256_div_ps(g, _mm256_add_ps(one, exp_lanes(_mm256_xor_ps(g, sign))));

                store_first(y + i, _mm256_mul_ps(silu, load_first(up + i, left)), left);
        }
}

static void add(float *y, const float *x, size_t n) {
        for (ptrdiff_t i = 0, left = (ptrdiff_t)n; left > 0; i += LANES, left -= LANES)
                store_first(y + i, _mm256_add_ps(load_first(y + i, left), load_first(x + i, left)), left);
}

KERNEL float largest(const float *x, uint32_t n) {
        __m256 max = _mm256_set1_ps(x[0]);
        float lanes[LANES], most;
        uint32_t i = 0;

        for (; i + LANES <= n; i += LANES)
                max = _mm256_max_ps(_mm256_loadu_ps(x + i), max);
        _mm256_storeu_ps(lanes, max);
        most = lanes[0];
        for (int j = 1; j < LANES; j++)
                most = lanes[j] > most ? lanes[j] : most;
        for (; i < n; i++)
                most = x[i] > most ? x[i] : most;
        return most;
}

static float softmax(float *x, uint32_t n, float scale) {
        __m256 max = _mm256_set1_ps(largest(x, n) * scale), factor = _mm256_set1_ps(scale);
        __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};

        for (ptrdiff_t i = 0, left = n; left > 0; i += KVD_PANEL, left -= KVD_PANEL)
                for (int q = 0; q < 2 && left > q * LANES; q++) {
                        float *part = x + i + q * LANES;
                        __m256 e = exp_lanes(_mm256_fmsub_ps(load_first(part, left - q * LANES), factor, max));

                        store_first(part, e, left - q * LANES);
                        sum[q] = _mm256_add_ps(sum[q], load_first(part, left - q * LANES));
                }
        return add_lanes(sum[0], sum[1]);
}

/* ---- memory ---- */

void kvd_widen_avx2(float *to, const uint16_t *from, size_t n, enum kvd_number type) {
        size_t i = 0;

        for (; i + LANES <= n; i += LANES) {
                __m128i h = _mm_loadu_si128((const __m128i *)(from + i));
                __m256i shifted = _mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16);

                _mm256_storeu_ps(to + i, type == KVD_NUMBER_F16 ? _mm256_cvtph_ps(h) : _mm256_castsi256_ps(shifted));
        }
        kvd_widen_scalar(to + i, from + i, n - i, type);
}

KERNEL __m128i narrow_bf16(__m256 f) {
        __m256i bits = _mm256_castps_si256(f), upper = _mm256_srli_epi32(bits, 16);
        __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
        __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        __m256 quiet = _mm256_castsi256_ps(_mm256_or_si256(upper, _mm256_set1_epi32(0x40)));
        __m256 number = _mm256_castsi256_ps(_mm256_srli_epi32(rounded, 16));
        __m256i chosen = _mm256_castps_si256(_mm256_blendv_ps(number, quiet, _mm256_cmp_ps(f, f, _CMP_UNORD_Q)));

        return _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
}

void kvd_narrow_avx2(uint16_t *to, const float *from, size_t n, enum kvd_number type) {
        size_t i = 0;

        for (; i + LANES <= n; i += LANES) {
                __m256 f = _mm256_loadu_ps(from + i);
                __m128i h = type == KVD_NUMBER_F16 ? _mm256_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT) : narrow_bf16(f);

                _mm_storeu_si128((__m128i *)(to + i), h);
        }
        kvd_narrow_scalar(to + i, from + i, n - i, type);
}

static void copy_nt(void *to, const void *from, size_t bytes) {
        size_t head = MIN(bytes, -(uintptr_t)to & 31);
        const char *source = (const char *)from + head;
        char *target = (char *)to + head;
        size_t left = bytes - head;

        memcpy(to, from, head);
        for (; left >= 128; left -= 128, source += 128, target += 128)
                for (int i = 0; i < 128; i += 32)
                        _mm256_stream_si256((__m256i *)(target + i), _mm256_loadu_si256((const __m256i *)(source + i)));
        memcpy(target, source, left);
        _mm_sfence();
}

const struct kvd_ops kvd_ops_avx2 = {
        .name = "avx2",
        .works = kvd_has_avx2,
        .pack = kvd_pack_avx2,
        .matmul = matmul,
        .mix = mix,
        .rmsnorm = rmsnorm,
        .rope = rope,
        .swiglu = swiglu,
        .add = add,
        .softmax = softmax,
        .widen = kvd_widen_avx2,
        .narrow = kvd_narrow_avx2,
        .copy_nt = copy_nt,
        .attend = &kvd_attend_avx2,
        .block = &kvd_block_avx2,
        .keydiff = &kvd_keydiff_avx2,
        .memshare = &kvd_memshare_avx2,
        .sketch = &kvd_sketch_avx2,
        .hshare = &kvd_hshare_avx2,
        .bicache = &kvd_bicache_avx2,
};
