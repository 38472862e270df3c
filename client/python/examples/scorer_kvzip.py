# SPDX-License-Identifier: Apache-2.0
"""KVzip (Kim et al. 2025, arXiv:2505.23416): keep what the model needs to say the context again, whatever is asked later.

    with KvdCache(model, space, context_ids, budget=2048) as cache:
        model(context_ids, past_key_values=cache)
        compress(cache, tokenizer, context_ids, 1024)
"""

import torch

SINKS = 4


def kvzip(layer, queries, keys, values, scale):
    """Scores [kv_heads, tokens]: the largest attention that any query of the repetition gives."""
    kv_heads, m, dim = keys.shape
    n = queries.shape[1]
    logits = queries.reshape(kv_heads, -1, n, dim) @ keys[:, None].transpose(2, 3) * scale
    later = torch.ones(n, m, dtype=torch.bool).triu(m - n + 1)
    scores = logits.masked_fill(later, float("-inf")).softmax(-1).amax((1, 2))
    scores[:, :SINKS] = float("inf")
    return scores


def compress(cache, tokenizer, context_ids, budget):
    ask = tokenizer("\n\nRepeat the previous context exactly.\n", add_special_tokens=False, return_tensors="pt").input_ids
    cache.reduce(torch.cat([ask, context_ids], 1), kvzip, budget)
