# SPDX-License-Identifier: Apache-2.0
"""H2O (Zhang et al. 2023, arXiv:2306.14048): keep the tokens that got most of the attention of all others.

    KvdCache(model, space, input_ids, scorer=h2o, budget=1024)
"""

import torch


def h2o(layer, queries, keys, values, scale):
    """Scores [kv_heads, tokens]: the attention that a token got, per query of this pass that could see it."""
    kv_heads, m, dim = keys.shape
    n = queries.shape[1]
    sums, pieces = torch.zeros(kv_heads, m), range(0, n, 256)       # a piece at a time, because all weights take much memory
    for first, q in zip(pieces, queries.split(256, 1)):
        grouped = q.reshape(kv_heads, -1, q.shape[1], dim)
        later = torch.ones(q.shape[1], m, dtype=torch.bool).triu(m - n + first + 1)
        logits = (grouped @ keys[:, None].transpose(2, 3) * scale).masked_fill(later, float("-inf"))
        sums += logits.softmax(-1).mean(1).sum(1)
    return sums / torch.arange(m, 0, -1).clamp(max=n)
