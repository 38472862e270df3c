/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_YARD_H
#define KVD_TESTS_LIB_YARD_H

/*
 * How many times as slow as a fast machine this one is, at least 1. Tests that bound processor time
 * multiply their bounds by it. Each call measures again, in some milliseconds of this thread's own
 * processor time, and returns the least result so far, so that a busy machine does not seem slow.
 * Always 1 with sanitizers: tests have separate bounds for them.
 */
double slowness(void);

#endif
