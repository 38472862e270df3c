/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KVLM_GPU_H
#define KVD_TESTS_KVLM_GPU_H

/*
 * kvlm on a GPU, with a daemon whose pool is on that GPU. Each test has a folder (folder.h) with
 * "model", small and random, and "ids", a prompt of SCENE_TOKENS token ids. The programs that use
 * this take two arguments, kvlm and kvctl, and start the daemon $KVD. In the everyday suite the GPU
 * is the stand-in driver (tests/gpu/fakecuda), found by LD_LIBRARY_PATH. To run them on a real GPU:
 *
 *      KVD=BUILD/daemon/kvd test-kvlm-gpu-logits BUILD/tools/kvlm/kvlm BUILD/tools/kvctl/kvctl
 *
 * Exit status 77: there is no GPU, no kernels, or no cuBLAS.
 */

#include <sys/types.h>

#include "tests/kvlm/folder.h"
#include "tests/lib/instance.h"
#include "tests/lib/mark.h"

enum { SCENE_TOKENS = 70 };

void scene_begin(int argc, char **argv); /* before the first test */
void scene_set_up(void);
void scene_tear_down(void);
bool scene_stand_in(void);

/* ---- processes ---- */

void scene_daemon(void);                                     /* ends with the test */
void scene_daemon_of(const char *pool, const char *segment); /* settings */
const char *scene_socket(void);
void scene_end_daemon(int signal);
pid_t scene_spawn(const char *const *argv, const char *out);
void scene_assert_clean(void); /* runs kvctl check */

/* ---- kvlm's output ---- */

/* contents of the --logits file; fails if kvlm failed */
const float *scene_logits(struct output o, const char *name, size_t *n);
uint64_t scene_sum(const char *lines, const char *member);
const char *scene_texts(struct output o);
/* fails unless kvlm exited with a single line that contains this */
void scene_assert_refused(struct output o, const char *line);

/* ---- questions about a text of some 100 tokens ---- */

void scene_prompts(void);
/* first, second: options; with the daemon, without --device */
struct output scene_ask(const char *first, const char *second);
void scene_assert_answers(struct output o, const char *expected);
pid_t scene_ask_in_background(const char *name); /* writes kvlm's output to the file name */

#endif
