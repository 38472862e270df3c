/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A chunk of a causal sequence on the CPU: one pass (pass.h) over all layers, from embeddings to
 * logits.
 */

#include "tools/kvlm/forward.h"

int forward_step(struct pass *p, uint32_t layers, const struct step *step) {
        uint32_t end = step->first + step->n;
        int r = pass_rows(p, step->first, step->n);

        if (r < 0)
                return r;
        pass_embed(p, step->tokens, step->first, end);
        r = pass_run(p, &step->view, 0, layers, step->first, end);
        if (r == 0 && step->logits)
                pass_logits(p, step->all_logits ? step->first : end - 1, end, step->logits);
        return r;
}
