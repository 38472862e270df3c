/* SPDX-License-Identifier: Apache-2.0 */

/* AVX-512 (F, BW, VL, DQ): a panel or a lane group is one register, and masks do the remainders. */

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

enum { TILE_ROWS = 4, TILE_PANELS = 4, MAX_PANELS = 8 };

/* The first n of 16 lanes; all of them if there are more. */
KERNEL __mmask16 first_lanes(size_t n) {
        return n >= KVD_PANEL ? 0xffff : (__mmask16)((1u << n) - 1);
}

KERNEL float add_lanes(__m512 v) {
        __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
        __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));

        b = _mm_add_ps(b, _mm_movehl_ps(b, b));
        return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

KERNEL __m512 exp_lanes(__m512 x) {
        __m512 clamped = _mm512_min_ps(_mm512_set1_ps(EXP_HIGH), x);
        __m512 shifted = _mm512_fmadd_ps(clamped, _mm512_set1_ps(EXP_LOG2E), _mm512_set1_ps(EXP_SHIFT));
        __m512 n = _mm512_sub_ps(shifted, _mm512_set1_ps(EXP_SHIFT));
        __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-EXP_LN2_HIGH), clamped);
        __m512 p = _mm512_set1_ps(EXP_C5);
        __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);

        r = _mm512_fmadd_ps(n, _mm512_set1_ps(-EXP_LN2_LOW), r);
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP_C4));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP_C3));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP_C2));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP_C1));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP_C0));
        p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
        power = _mm512_add_epi32(power, _mm512_set1_epi32(EXP_ONE));
        return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(clamped, _mm512_set1_ps(EXP_LOW), _CMP_NLT_UQ), p,
                                   _mm512_castsi512_ps(power));
}

/* ---- matrices ---- */

KERNEL void matmul_tile(float *y, size_t ldy, const float *x, size_t ldx, const float *w, uint32_t n_in,
                        __mmask16 last, int rows, int panels) {
        __m512 acc[TILE_ROWS][MAX_PANELS];

        for (int r = 0; r < rows; r++)
                for (int p = 0; p < panels; p++)
                        acc[r][p] = _mm512_setzero_ps();
        for (uint32_t i = 0; i < n_in; i++) {
                __m512 wi[MAX_PANELS];

                for (int p = 0; p < panels; p++)
                        wi[p] = _mm512_loadu_ps(w + ((size_t)p * n_in + i) * KVD_PANEL);
                for (int r = 0; r < rows; r++) {
                        __m512 xi = _mm512_set1_ps(x[r * ldx + i]);

                        for (int p = 0; p < panels; p++)
                                acc[r][p] = _mm512_fmadd_ps(xi, wi[p], acc[r][p]);
                }
        }
        for (int r = 0; r < rows; r++)
                for (int p = 0; p < panels; p++)
                        _mm512_mask_storeu_ps(y + r * ldy + p * KVD_PANEL, p + 1 < panels ? 0xffff : last, acc[r][p]);
}

/* All rows times a few panels, which stay in the first-level cache meanwhile. */
KERNEL void matmul_panels(float *y, size_t ldy, const float *x, size_t ldx, uint32_t rows, const float *w,
                          uint32_t n_in, __mmask16 last, int panels) {
        uint32_t r = 0;

        for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
                matmul_tile(y + r * ldy, ldy, x + r * ldx, ldx, w, n_in, last, TILE_ROWS, panels);
        for (; r < rows; r++)
                matmul_tile(y + r * ldy, ldy, x + r * ldx, ldx, w, n_in, last, 1, panels);
}

static void matmul(float *y, size_t ldy, const float *x, size_t ldx, uint32_t rows, const float *w, uint32_t n_in,
                   uint32_t n_out) {
        uint32_t o = 0;

        for (; rows == 1 && o + MAX_PANELS * KVD_PANEL <= n_out; o += MAX_PANELS * KVD_PANEL)
                matmul_tile(y + o, ldy, x, ldx, w + (size_t)o * n_in, n_in, 0xffff, 1, MAX_PANELS);
        for (; o + TILE_PANELS * KVD_PANEL <= n_out; o += TILE_PANELS * KVD_PANEL)
                matmul_panels(y + o, ldy, x, ldx, rows, w + (size_t)o * n_in, n_in, 0xffff, TILE_PANELS);
        for (; o + 2 * KVD_PANEL <= n_out; o += 2 * KVD_PANEL)
                matmul_panels(y + o, ldy, x, ldx, rows, w + (size_t)o * n_in, n_in, 0xffff, 2);
        for (; o < n_out; o += KVD_PANEL)
                matmul_panels(y + o, ldy, x, ldx, rows, w + (size_t)o * n_in, n_in, first_lanes(n_out - o), 1);
}

KERNEL void mix_tile(float *y, size_t ldy, const float *p, size_t ldp, const struct kvd_rows *v, uint32_t from,
                     uint32_t to, uint32_t dim, __mmask16 last, int rows, int panels) {
        __m512 acc[8][2];

        for (int r = 0; r < rows; r++)
                for (int q = 0; q < panels; q++)
                        acc[r][q] = _mm512_maskz_loadu_ps(q + 1 < panels ? 0xffff : last,
                                                          y + r * ldy + dim + q * KVD_PANEL);
        for (uint32_t t = from; t < to;) {
                const float *row = kvd_rows_at(v, t) + dim;
                uint32_t end = MIN(to, t - t % v->per_block + v->per_block);

                for (; t < end; t++, row += v->stride) {
                        __m512 vt[2];

                        for (int q = 0; q < panels; q++)
                                vt[q] = _mm512_maskz_loadu_ps(q + 1 < panels ? 0xffff : last, row + q * KVD_PANEL);
                        for (int r = 0; r < rows; r++)
                                for (int q = 0; q < panels; q++)
                                        acc[r][q] = _mm512_fmadd_ps(_mm512_set1_ps(p[r * ldp + t]), vt[q], acc[r][q]);
                }
        }
        for (int r = 0; r < rows; r++)
                for (int q = 0; q < panels; q++)
                        _mm512_mask_storeu_ps(y + r * ldy + dim + q * KVD_PANEL, q + 1 < panels ? 0xffff : last,
                                              acc[r][q]);
}

KERNEL void mix_rows(float *y, size_t ldy, const float *p, size_t ldp, const struct kvd_rows *v, uint32_t from,
                     uint32_t to, int rows) {
        uint32_t d = 0;

        for (; d + 2 * KVD_PANEL <= v->dim; d += 2 * KVD_PANEL)
                mix_tile(y, ldy, p, ldp, v, from, to, d, 0xffff, rows, 2);
        for (; d < v->dim; d += KVD_PANEL)
                mix_tile(y, ldy, p, ldp, v, from, to, d, first_lanes(v->dim - d), rows, 1);
}

static void mix(float *y, size_t ldy, const float *p, size_t ldp, uint32_t rows, const struct kvd_rows *v,
                uint32_t from, uint32_t to) {
        uint32_t r = 0;

        for (; r + 8 <= rows; r += 8)
                mix_rows(y + r * ldy, ldy, p + r * ldp, ldp, v, from, to, 8);
        for (; r + 2 <= rows; r += 2)
                mix_rows(y + r * ldy, ldy, p + r * ldp, ldp, v, from, to, 2);
        for (; r < rows; r++)
                mix_rows(y + r * ldy, ldy, p + r * ldp, ldp, v, from, to, 1);
}

/* ---- vectors ---- */

static void rmsnorm(float *y, const float *x, const float *w, uint32_t n, float eps) {
        __m512 sum = _mm512_setzero_ps(), scale;

        for (uint32_t i = 0; i < n; i += KVD_PANEL) {
                __m512 xi = _mm512_maskz_loadu_ps(first_lanes(n - i), x + i);

                sum = _mm512_fmadd_ps(xi, xi, sum);
        }
        scale = _mm512_set1_ps(1.0f / sqrtf(add_lanes(sum) / (float)n + eps));
        for (uint32_t i = 0; i < n; i += KVD_PANEL) {
                __mmask16 lanes = first_lanes(n - i);
                __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, x + i), scale);

                _mm512_mask_storeu_ps(y + i, lanes, _mm512_mul_ps(scaled, _mm512_maskz_loadu_ps(lanes, w + i)));
        }
}

static void rope(float *x, const float *cosine, const float *sine, uint32_t half) {
        for (uint32_t i = 0; i < half; i += KVD_PANEL) {
                __mmask16 lanes = first_lanes(half - i);
                __m512 low = _mm512_maskz_loadu_ps(lanes, x + i), high = _mm512_maskz_loadu_ps(lanes, x + half + i);
                __m512 c = _mm512_maskz_loadu_ps(lanes, cosine + i), s = _mm512_maskz_loadu_ps(lanes, sine + i);

                _mm512_mask_storeu_ps(x + i, lanes, _mm512_fnmadd_ps(high, s, _mm512_mul_ps(low, c)));
                _mm512_mask_storeu_ps(x + half + i, lanes, _mm512_fmadd_ps(low, s, _mm512_mul_ps(high, c)));
        }
}

static void swiglu(float *y, const float *gate, const float *up, size_t n) {
        const __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f);

        for (size_t i = 0; i < n; i += KVD_PANEL) {
                __mmask16 lanes = first_lanes(n - i);
                __m512 g = _mm512_maskz_loadu_ps(lanes, gate + i);
                __m512 silu = _mm512_div_ps(g, _mm512_add_ps(one, exp_lanes(_mm512_xor_ps(g, sign))));

                _mm512_mask_storeu_ps(y + i, lanes, _mm512_mul_ps(silu, _mm512_maskz_loadu_ps(lanes, up + i)));
        }
}

static void add(float *y, const float *x, size_t n) {
        for (size_t i = 0; i < n; i += KVD_PANEL) {
                __mmask16 lanes = first_lanes(n - i);
                __m512 sum = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, y + i), _mm512_maskz_loadu_ps(lanes, x + i));

                _mm512_mask_storeu_ps(y + i, lanes, sum);
        }
}

static float softmax(float *x, uint32_t n, float scale) {
        __m512 max = _mm512_set1_ps(x[0]), sum = _mm512_setzero_ps();

        for (uint32_t i = 0; i < n; i += KVD_PANEL)
                max = _mm512_max_ps(_mm512_mask_loadu_ps(max, first_lanes(n - i), x + i), max);
        max = _mm512_set1_ps(_mm512_reduce_max_ps(max) * scale);
        for (uint32_t i = 0; i < n; i += KVD_PANEL) {
                __mmask16 lanes = first_lanes(n - i);
                __m512 e = exp_lanes(_mm512_fmsub_ps(_mm512_maskz_loadu_ps(lanes, x + i), _mm512_set1_ps(scale), max));

                sum = _mm512_mask_add_ps(sum, lanes, sum, e);
                _mm512_mask_storeu_ps(x + i, lanes, e);
        }
        return add_lanes(sum);
}

/* ---- memory ---- */

static void copy_nt(void *to, const void *from, size_t bytes) {
        size_t head = MIN(bytes, -(uintptr_t)to & 63);
        const char *source = (const char *)from + head;
        char *target = (char *)to + head;
        size_t left = bytes - head;

        memcpy(to, from, head);
        for (; left >= 256; left -= 256, source += 256, target += 256)
                for (int i = 0; i < 256; i += 64)
                        _mm512_stream_si512((void *)(target + i), _mm512_loadu_si512(source + i));
        for (; left >= 64; left -= 64, source += 64, target += 64)
                _mm512_stream_si512((void *)target, _mm512_loadu_si512(source));
        memcpy(target, source, left);
        _mm_sfence();
}

const struct kvd_ops kvd_ops_avx512 = {
        .name = "avx512",
        .works = kvd_has_avx512,
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
        .attend = &kvd_attend_avx512,
        .block = &kvd_block_avx512,
        .keydiff = &kvd_keydiff_avx512,
        .memshare = &kvd_memshare_avx512,
        .sketch = &kvd_sketch_avx512,
        .hshare = &kvd_hshare_avx512,
        .bicache = &kvd_bicache_avx512,
};
