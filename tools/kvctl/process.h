/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_PROCESS_H
#define KVCTL_PROCESS_H

#include <stdbool.h>
#include <stdint.h>

/*
 * Stopped by a signal (Ctrl-Z, SIGSTOP) or a debugger. Also false if the process is not visible:
 * in another PID namespace its number means another process, or none of that user.
 */
bool process_is_stopped(uint32_t pid, uint32_t uid);

#endif
