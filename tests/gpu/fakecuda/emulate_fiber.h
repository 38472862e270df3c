/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_FAKECUDA_EMULATE_FIBER_H
#define KVD_TESTS_FAKECUDA_EMULATE_FIBER_H

/* Code with a stack of its own. Control switches between the fiber and the code that resumes it. */

#include <stddef.h>

struct fiber;

/*
 * A fiber that runs work(data), and again at the next resume after work has returned. It is never
 * freed. Ends the process if there is no memory.
 */
struct fiber *fiber_new(void (*work)(void *data), void *data);

void fiber_resume(struct fiber *fiber); /* returns when it yields or work returns */
void fiber_yield(struct fiber *fiber);  /* in the fiber: returns to fiber_resume */

#endif
