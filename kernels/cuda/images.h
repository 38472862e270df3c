/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_IMAGES_H
#define KVD_KERNELS_CUDA_IMAGES_H

/*
 * The output of nvcc for kernels/cuda/ *.cu, each in its own object (embed.sh). A program contains
 * an image if one of its files says GPU_USES(image): the files that launch its kernels do. In a
 * build without nvcc, each image is replaced by a text, which the driver of a GPU rejects.
 */

#include <stdint.h>

#define GPU_NOT_BUILT "kvd: no image of " /* the beginning of that text */

#define GPU_USES(image) \
        extern const uint8_t gpu_image_##image[]; \
        __attribute__((used)) static const uint8_t *const gpu_uses_##image = gpu_image_##image

#endif
