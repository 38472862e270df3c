/* SPDX-License-Identifier: Apache-2.0 */

/* The parts of MemShare that work on integers and angles; the same for every instruction set. */

#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/memshare.h"

static void sift(uint32_t *heap, uint32_t at, uint32_t n) {
        uint32_t value = heap[at];

        for (uint32_t child; (child = 2 * at + 1) < n; at = child) {
                child += child + 1 < n && heap[child] < heap[child + 1];
                if (heap[child] <= value)
                        break;
                heap[at] = heap[child];
        }
        heap[at] = value;
}

static void sort(uint32_t *ids, uint32_t n) {
        for (uint32_t i = n / 2; i-- > 0;)
                sift(ids, i, n);
        while (n > 1) {
                uint32_t largest = ids[0];

                ids[0] = ids[--n];
                ids[n] = largest;
                sift(ids, 0, n);
        }
}

void kvd_bag_make(struct kvd_bag *bag, const uint32_t *tokens, uint32_t n_tokens, uint32_t *ids,
                  uint16_t *counts) {
        uint32_t n = 0;

        *bag = (struct kvd_bag){.ids = ids, .counts = counts};
        if (n_tokens > 0)
                memcpy(ids, tokens, n_tokens * sizeof *ids);
        sort(ids, n_tokens);
        for (uint32_t i = 0, end; i < n_tokens; i = end, n++) {
                for (end = i + 1; end < n_tokens && ids[end] == ids[i];)
                        end++;
                ids[n] = ids[i];
                counts[n] = (uint16_t)MIN(end - i, UINT16_MAX);
                bag->squares += (double)counts[n] * counts[n];
        }
        bag->n = n;
}

/*
 * The square root of the product of squares, not the product of two roots, so that equal bags give
 * exactly 1.
 */
double kvd_bag_cosine(const struct kvd_bag *a, const struct kvd_bag *b) {
        uint64_t product = 0;

        if (a->n == 0 || b->n == 0)
                return 0.0;
        for (uint32_t i = 0, j = 0; i < a->n && j < b->n;) {
                uint32_t x = a->ids[i], y = b->ids[j];

                product += x == y ? (uint64_t)a->counts[i] * b->counts[j] : 0;
                i += x <= y;
                j += y <= x;
        }
        return (double)product / sqrt(a->squares * b->squares);
}

void kvd_memshare_angles(const double *frequencies, uint32_t half, int64_t delta, float *cosine,
                         float *sine) {
        for (uint32_t i = 0; i < half; i++) {
                cosine[i] = (float)cos(frequencies[i] * (double)delta);
                sine[i] = (float)sin(frequencies[i] * (double)delta);
        }
}

void kvd_memshare_frequencies(double *frequencies, uint32_t half, double base) {
        for (uint32_t i = 0; i < half; i++)
                frequencies[i] = pow(base, -(double)i / half);
}
