/* SPDX-License-Identifier: Apache-2.0 */

/* Images and kernels are loaded at first use, and errors name their cause. */

#include <errno.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/cuda/images.h"
#include "kernels/cuda/block.h"
#include "tests/gpu/fakecuda/kernels.h"
#include "tests/kernels/cuda/fixture.h"
#include "tests/lib/suite.h"

GPU_USES(block);

#define IMAGES_BUILT (memcmp(gpu_image_block, GPU_NOT_BUILT, sizeof GPU_NOT_BUILT - 1) != 0)

static struct kvd_cuda cuda;
static struct gpu gpu;
static struct {
        unsigned loads, lookups, raises, launches;
        cu_result error; /* error of the next calls; launch: error of launches */
        int shared;
} driver;

static cu_result load(cu_library *ret, const void *image, void *jit, void **jit_values,
                      unsigned n_jit, void *options, void **values, unsigned n) {
        driver.loads++;
        *ret = &driver;
        return driver.error;
}

static cu_result get_kernel(cu_kernel *ret, cu_library library, const char *name) {
        ck_assert_ptr_eq(library, &driver);
        driver.lookups++;
        *ret = (void *)fake_kernel_find(name);
        return *ret ? driver.error : CU_NOT_FOUND;
}

static cu_result set_attribute(cu_function function, int attribute, int value) {
        ck_assert_int_eq(attribute, CU_FUNC_DYNAMIC_SHARED_BYTES);
        driver.raises++;
        driver.shared = value;
        return driver.error;
}

static cu_result launch(cu_function function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, cu_stream stream,
                        void **parameters, void **extra) {
        ck_assert_int_le((int)shared, driver.shared);
        driver.launches++;
        return driver.error;
}

static void setup(void) {
        gpu = *fixture_gpu();
        cuda = *gpu.cuda;
        cuda.cuLibraryLoadData = load;
        cuda.cuLibraryGetKernel = get_kernel;
        cuda.cuFuncSetAttribute = set_attribute;
        cuda.cuLaunchKernel = launch;
        gpu.cuda = &cuda;
}

static int launch_blocks(size_t shared) {
        struct gpu_compact a = {.n = 1};

        return gpu_launch(&gpu, GPU_KERNEL_compact, (struct gpu_grid){1, 1, 1, 256, shared}, NULL,
                          &a);
}

START_TEST(a_kernel_is_looked_up_once) {
        ck_assert_int_eq(launch_blocks(0), 0);
        ck_assert_int_eq(launch_blocks(0), 0);
        ck_assert(driver.loads == 1 && driver.lookups == 1 && driver.launches == 2 &&
                  driver.raises == 0);
        ck_assert_int_eq(gpu_has_kernels(&gpu), 0);
        ck_assert_uint_eq(driver.loads, 1); /* the only one that this program has */
}
END_TEST

START_TEST(shared_memory_is_raised_on_demand) {
        ck_assert_int_eq(launch_blocks(1000), 0);
        ck_assert_int_eq(launch_blocks(500), 0);
        ck_assert_int_eq(launch_blocks(100000), 0);
        ck_assert(driver.raises == 2 && driver.shared == 100000);
        ck_assert_int_eq(launch_blocks(gpu.shared_bytes + 1), -EINVAL);
        ck_assert(strstr(gpu.why, "kvd_compact") && strstr(gpu.why, "shared memory"));
        driver.error = CU_INVALID_VALUE; /* a kernel's static shared memory counts, too */
        ck_assert_int_eq(launch_blocks(gpu.shared_bytes), -EINVAL);
        ck_assert(strstr(gpu.why, "kvd_compact") &&
                  strstr(gpu.why, "in addition to its static memory"));
        driver.error = CU_OK;
}
END_TEST

/* A GPU's driver rejects the text that a build without nvcc has instead of images. */
START_TEST(an_image_that_the_driver_refuses) {
        driver.error = CU_INVALID_IMAGE;
        ck_assert_int_eq(gpu_has_kernels(&gpu), IMAGES_BUILT ? -ENOEXEC : -ENOSYS);
        ck_assert(strstr(gpu.why, IMAGES_BUILT ? "block" : "nvcc was not found"));
        ck_assert_int_eq(launch_blocks(0), IMAGES_BUILT ? -ENOEXEC : -ENOSYS);
        ck_assert(driver.launches == 0 &&
                  gpu_resident_blocks(&gpu, GPU_KERNEL_compact, 256, 0) == 0);
        driver.error = CU_OK; /* the error is not remembered */
        ck_assert_int_eq(launch_blocks(0), 0);
}
END_TEST

START_TEST(a_launch_that_fails_says_which) {
        ck_assert_int_eq(launch_blocks(0), 0);
        driver.error = CU_ILLEGAL_ADDRESS;
        ck_assert_int_eq(launch_blocks(0), -EIO);
        ck_assert_ptr_eq(strstr(gpu.why, "kvd_compact: "), gpu.why);
        ck_assert_int_eq(launch_blocks(1000), -EIO); /* the limit was not raised */
        driver.error = CU_OK;
        ck_assert_int_eq(launch_blocks(1000), 0);
        ck_assert_int_eq(driver.shared, 1000);
}
END_TEST

START_TEST(an_image_that_is_not_linked_is_said_to_be_missing) {
        ck_assert_int_eq(gpu_launch(&gpu, GPU_KERNEL_summarise, (struct gpu_grid){1, 1, 1, 32, 0},
                                    NULL, &gpu),
                         -ENOSYS);
        ck_assert_str_eq(gpu.why, "this program has no kernels of summarise");
}
END_TEST

START_TEST(every_kernel_of_the_list_is_there) {
#define GPU_IMAGE(image)
#define GPU_KERNEL(image, name) ck_assert_ptr_nonnull(fake_kernel_find("kvd_" #name));
#include "kernels/cuda/kernels.def"
#undef GPU_IMAGE
#undef GPU_KERNEL
        ck_assert_ptr_null(fake_kernel_find("kvd_compac"));
}
END_TEST

SUITE("cuda: launches", FIXTURE(setup, NULL),
      TESTS(a_kernel_is_looked_up_once, shared_memory_is_raised_on_demand,
            an_image_that_the_driver_refuses, a_launch_that_fails_says_which,
            an_image_that_is_not_linked_is_said_to_be_missing, every_kernel_of_the_list_is_there))
