/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/quant.h"

#include <math.h>
#include <string.h>

#include "ipc/base/util.h"

static void pack_group(const struct kvd_ops *ops, uint8_t *to, const float *from, uint32_t n) {
        float edge[2] = {from[0], from[0]}, rounded[2];
        uint32_t half = (n + 1) / 2;
        uint8_t *codes = to + 4;

        for (uint32_t i = 1; i < n; i++) {
                edge[0] = fminf(edge[0], from[i]);
                edge[1] = fmaxf(edge[1], from[i]);
        }
        edge[1] = edge[1] > edge[0] ? (edge[1] - edge[0]) / 15.0f : 1.0f;
        ops->narrow((uint16_t *)to, edge, 2, KVD_NUMBER_F16);
        ops->widen(rounded, (const uint16_t *)to, 2, KVD_NUMBER_F16);
        memset(codes, 0, half);
        for (uint32_t i = 0; i < n && rounded[1] > 0.0f; i++) { /* a step that f16 cannot tell from 0 has one code */
                float code = rintf((from[i] - rounded[0]) / rounded[1]);

                codes[i % half] |= (uint8_t)((uint32_t)fmaxf(0.0f, fminf(code, 15.0f)) << (i / half * 4));
        }
}

void quant_pack(const struct kvd_ops *ops, uint8_t *to, const float *from, uint32_t n) {
        for (uint32_t i = 0; i < n; i += QUANT_GROUP, to += QUANT_GROUP_BYTES)
                pack_group(ops, to, from + i, MIN(n - i, QUANT_GROUP));
}

/* f16 to float, of finite numbers: the same bits further left mean the value times 2^-112. */
static float widen(const uint8_t *from) {
        uint16_t half;
        uint32_t bits;
        float value;

        memcpy(&half, from, sizeof half);
        bits = (uint32_t)(half & 0x8000) << 16 | (uint32_t)(half & 0x7fff) << 13;
        memcpy(&value, &bits, sizeof value);
        return value * 0x1p112f;
}

static inline __attribute__((always_inline)) void unpack_group(float *restrict to, const uint8_t *restrict from,
                                                               uint32_t n) {
        float least = widen(from), step = widen(from + 2);
        uint32_t half = (n + 1) / 2;

        for (uint32_t i = 0; i < half; i++)
                to[i] = least + (float)(from[4 + i] & 15) * step;
        for (uint32_t i = half; i < n; i++)
                to[i] = least + (float)(from[4 + i - half] >> 4) * step;
}

void quant_unpack(float *to, const uint8_t *from, uint32_t n) {
        for (; n >= QUANT_GROUP; n -= QUANT_GROUP, to += QUANT_GROUP, from += QUANT_GROUP_BYTES)
                unpack_group(to, from, QUANT_GROUP); /* constant: two loops of a vector each */
        if (n > 0)
                unpack_group(to, from, n);
}
