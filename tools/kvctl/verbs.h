/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_VERBS_H
#define KVCTL_VERBS_H

/* The functions behind the verbs, one file per group. */

#include "tools/kvctl/args.h"

#define VERB(name, run, operands, least, most, required, optional, text, more, example) verb_fn run;
#include "tools/kvctl/verbs.def"
#undef VERB

#endif
