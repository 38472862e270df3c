/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_IMAGES_H
#define KVD_KERNELS_CUDA_IMAGES_H

/*
 * What nvcc made of kernels/cuda/ *.cu, each in an object of its own (embed.sh). A program has an
 * image if it has a file that says GPU_USES(image): those that launch its kernels. A build without
 * nvcc has a word in each one's place, which no driver of a GPU takes.
 */

#include <stdint.h>

#define GPU_NOT_BUILT "kvd: no image of " /* what begins that word */

#define GPU_USES(image) \
        extern const uint8_t gpu_image_##image[]; \
        __attribute__((used)) static const uint8_t *const gpu_uses_##image = gpu_image_##image

#endif
