/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_GPU_ACT_POOL_H
#define KVD_TESTS_GPU_ACT_POOL_H

#include "tests/gpu/actor.h"

/*
 * Actions as clients of kvd: JOIN to DROP. A negative errno of libkvd is returned as the result
 * POOL_ERRNO - errno.
 */
extern action_function *const actions_of_pool[N_ACTIONS];

#define POOL_ERRNO 100000
#define POOL_BLOCK_TOKENS 16u
#define POOL_MOST_BLOCKS 256u

int ask_join(struct actor *a, const char *socket);

#endif
