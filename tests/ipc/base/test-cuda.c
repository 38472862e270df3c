/* SPDX-License-Identifier: Apache-2.0 */

/* Without a driver there is no device, and a reason. Skipped on a system with a driver. */

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/device.h"
#include "ipc/base/util.h"
#include "tests/lib/suite.h"

START_TEST(a_reason_for_no_driver) {
        const char *why = NULL, *again = NULL;

        ck_assert_ptr_null(kvd_cuda_load(&why));
        ck_assert_ptr_nonnull(strstr(why, "libcuda.so.1"));
        ck_assert_ptr_null(kvd_cuda_load(&again));
        ck_assert_str_eq(why, again);
        ck_assert_ptr_null(kvd_cuda_load(NULL));
}
END_TEST

static void *load(void *ret) {
        kvd_cuda_load(ret);
        return NULL;
}

START_TEST(any_thread_may_be_first) {
        const char *why[8] = {0};
        pthread_t threads[8];

        for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
                ck_assert_int_eq(pthread_create(&threads[i], NULL, load, &why[i]), 0);
        for (size_t i = 0; i < ARRAY_SIZE(threads); i++) {
                pthread_join(threads[i], NULL);
                ck_assert_ptr_nonnull(why[i]);
                ck_assert_ptr_eq(why[i], why[0]);
        }
}
END_TEST

START_TEST(no_device_says_why) {
        struct kvd_device d;

        ck_assert_int_eq(kvd_device_open(&d, &(struct cu_uuid){0}), -ENODEV);
        ck_assert_ptr_nonnull(strstr(d.why, "libcuda.so.1"));
        ck_assert_ptr_null(d.context);
        kvd_device_close(&d);
}
END_TEST

START_TEST(errors_in_words_and_numbers) {
        char text[64], small[8];

        ck_assert_str_eq(kvd_cuda_why(NULL, CU_OUT_OF_MEMORY, text, sizeof text), "CUDA error 2");
        ck_assert_str_eq(kvd_cuda_why(NULL, CU_OUT_OF_MEMORY, small, sizeof small), "CUDA er");
        ck_assert_int_eq(kvd_cuda_errno(CU_OK), 0);
        ck_assert_int_eq(kvd_cuda_errno(CU_OUT_OF_MEMORY), -ENOMEM);
        ck_assert_int_eq(kvd_cuda_errno(CU_NO_DEVICE), -ENODEV);
        ck_assert_int_eq(kvd_cuda_errno(CU_UNSUPPORTED_PTX), -ENOEXEC);
        ck_assert_int_eq(kvd_cuda_errno(CU_NOT_READY), -EAGAIN);
        ck_assert_int_eq(kvd_cuda_errno(CU_NOT_SUPPORTED), -EOPNOTSUPP);
        ck_assert_int_eq(kvd_cuda_errno(CU_ILLEGAL_ADDRESS), -EIO);
        ck_assert_int_eq(kvd_cuda_errno(12345), -EIO);
}
END_TEST

#define SKIPPED 77

SUITE("cuda", SKIP_IF(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL)),
      TESTS(a_reason_for_no_driver, any_thread_may_be_first, no_device_says_why,
            errors_in_words_and_numbers))
