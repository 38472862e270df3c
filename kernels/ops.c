/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The tables of operations, and the choice among them. A table is offered only if the processor
 * supports all of its instructions.
 */

#include "kernels/ops.h"

#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels/variants.h"

/*
 * These checks are not in the variants' files, where the compiler may use the very instructions
 * that they check for.
 */
bool kvd_works_scalar(void) {
        return true;
}

#if defined(__x86_64__)
bool kvd_works_avx2(void) {
        unsigned int eax, ebx, ecx, edx;

        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

bool kvd_works_avx512(void) {
        return kvd_works_avx2() && __builtin_cpu_supports("avx512f") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
#elif defined(__aarch64__)
bool kvd_works_neon(void) { /* part of the architecture */
        return true;
}
#endif

static const struct kvd_ops *const variants[] = {
#if defined(__x86_64__)
        &kvd_ops_avx512,
        &kvd_ops_avx2,
#elif defined(__aarch64__)
        &kvd_ops_neon,
#endif
        &kvd_ops_scalar,
        NULL,
};

const struct kvd_ops *const *kvd_ops_list(void) {
        return variants;
}

const struct kvd_ops *kvd_ops_pick(const char *name) {
        for (const struct kvd_ops *const *v = variants; *v; v++)
                if ((!name || strcmp(name, (*v)->name) == 0) && (*v)->works())
                        return *v;
        return NULL;
}
