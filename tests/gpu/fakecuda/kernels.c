/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/fakecuda/kernels.h"

#include <string.h>

#define GPU_IMAGE(image)
#define GPU_KERNEL(image, name) extern const struct fake_kernel fake_kernel_##name;
#include "kernels/cuda/kernels.def"
#undef GPU_KERNEL
/* tests/gpu/checks.cu */
extern const struct fake_kernel fake_kernel_check_fill, fake_kernel_check_beat,
        fake_kernel_check_read;

#define GPU_KERNEL(image, name) &fake_kernel_##name,
static const struct fake_kernel *const kernels[] = {
#include "kernels/cuda/kernels.def"
        &fake_kernel_check_fill,
        &fake_kernel_check_beat,
        &fake_kernel_check_read,
        NULL,
};

const struct fake_kernel *fake_kernel_find(const char *name) {
        const struct fake_kernel *const *k = kernels;

        while (*k && strcmp((*k)->name, name) != 0)
                k++;
        return *k;
}

size_t fake_kernel_own_shared(const char *name) {
        const struct fake_own *own = fake_own;

        while (own->name && strcmp(own->name, name) != 0)
                own++;
        return own->bytes;
}
