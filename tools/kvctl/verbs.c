/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The table of verbs, made of verbs.def. Each row names the function that answers it.
 */

#include "tools/kvctl/verbs.h"

#include "ipc/base/enums.h"
#include "ipc/base/util.h"

#define F(id) FLAG_BIT(FLAG_##id)

const struct verb verbs[] = {
#define VERB(name, run, operands, least, most, required, optional, text, more, example) \
        {name, run, operands, least, most, required, optional, text, more, example},
#include "tools/kvctl/verbs.def"
#undef VERB
};

const unsigned n_verbs = ARRAY_SIZE(verbs);
