/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_IMAGES_H
#define KVD_KERNELS_CUDA_IMAGES_H

/*
 * What nvcc made of kernels/cuda/ *.cu, inside this program (embed.sh). A build without nvcc has a word in each one's
 * place, which no driver of a GPU takes.
 */

#include <stdint.h>

#define GPU_IMAGE(image) extern const uint8_t gpu_image_##image[];
#define GPU_KERNEL(image, name)
#include "kernels/cuda/kernels.def"
#undef GPU_IMAGE
#undef GPU_KERNEL

extern const uint32_t gpu_images_built; /* 0: by a build without nvcc */

#endif
