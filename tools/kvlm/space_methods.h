/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_SPACE_METHODS_H
#define KVLM_SPACE_METHODS_H

/* What "kvctl space set" switched on for a space, as this engine's methods. */

#include "client/kvd_methods.h"
#include "tools/kvlm/methods.h"

/*
 * given: the command line's values, as for methods_read; they come before the space's. space may be NULL. A method of
 * the space is left out where the command line chose another one for the same purpose.
 */
int space_methods(kvd_space *space, const char *const given[METHOD_NAMES], struct methods *ret);

#endif
