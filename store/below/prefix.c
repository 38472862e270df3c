/* SPDX-License-Identifier: Apache-2.0 */

/* Collects the tokens of a long bidirectional prefix: see prefix.h. */

#include "store/below/prefix.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "store/account.h"

struct prefix {
        uint32_t n;
        uint32_t tokens[KVD_WHOLE_TOKENS]; /* takes memory only as far as it is written */
};

uint64_t prefix_bytes(const struct attachment *a) {
        return a->prefix ? sizeof *a->prefix : 0;
}

void prefix_free(struct attachment *a) {
        account_discharge(a->space, KVD_COST_overhead, prefix_bytes(a));
        free(STEAL(a->prefix));
}

static int make(struct attachment *a) {
        int r = account_charge(a->space, KVD_COST_overhead, sizeof *a->prefix);

        if (r < 0)
                return r;
        a->prefix = sys->calloc(1, sizeof *a->prefix);
        if (a->prefix)
                return 0;
        account_discharge(a->space, KVD_COST_overhead, sizeof *a->prefix);
        return store_refuse(space_store(a->space), -ENOMEM, "out of memory for a prefix's tokens");
}

static int check(const struct attachment *a, const struct fetch_request *q) {
        struct store *store = space_store(a->space);

        if (!space_finds_whole(a->space))
                return store_refuse(store, -EINVAL,
                                    "tokens of a causal chain are fetched behind a block");
        if (q->before != (a->prefix ? a->prefix->n : 0))
                return store_refuse(store, -ESTALE, "the first tokens of the prefix are missing");
        if ((uint64_t)q->before + q->n_tokens > KVD_WHOLE_TOKENS)
                return store_refuse(store, -EINVAL, "a prefix of more than %u tokens",
                                    KVD_WHOLE_TOKENS);
        return 0;
}

int prefix_append(struct attachment *a, struct fetch_request *q) {
        int r;

        if (!q->before)
                prefix_free(a);
        r = check(a, q);
        if (r == 0 && !a->prefix)
                r = make(a);
        if (r < 0)
                return r;
        memcpy(a->prefix->tokens + a->prefix->n, q->tokens, q->n_tokens * sizeof *q->tokens);
        a->prefix->n += q->n_tokens;
        q->tokens = a->prefix->tokens;
        q->n_tokens = a->prefix->n;
        return 0;
}
