/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_STORE_SIXTH_SIXTH_H
#define KVD_TESTS_STORE_SIXTH_SIXTH_H

#include <stdbool.h>
#include <stdint.h>

extern uint32_t sixth_seen;         /* blocks that workers have looked at */
bool sixth_is_known(uint32_t kind); /* does a worker know that kind of job? */

#endif
