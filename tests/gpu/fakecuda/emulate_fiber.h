/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_FAKECUDA_EMULATE_FIBER_H
#define KVD_TESTS_FAKECUDA_EMULATE_FIBER_H

/*
 * A stack of its own and a place in it: control goes to and fro between the one who resumes and the
 * fiber.
 */

#include <stddef.h>

struct fiber;

/*
 * Runs work(data) at each resume after the one at which it returned. Never freed. Ends the process
 * without memory.
 */
struct fiber *fiber_new(void (*work)(void *data), void *data);

void fiber_resume(struct fiber *fiber);  /* until it yields or work returns */
void fiber_yield(struct fiber *fiber);   /* back to the one who resumed; called in the fiber */

#endif
