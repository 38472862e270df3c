# SPDX-License-Identifier: Apache-2.0
"""SnapKV (Li et al. 2024, arXiv:2404.14469): keep what the newest tokens attend to.

    KvdCache(model, space, input_ids, scorer=snapkv, budget=1024)
"""

import torch
from torch.nn.functional import avg_pool1d, pad

WINDOW, POOL = 64, 5


def snapkv(layer, queries, keys, values, scale):
    """Scores [kv_heads, tokens]: the window's average attention, pooled over neighbours; the window itself stays."""
    kv_heads, m, dim = keys.shape
    n = min(WINDOW, queries.shape[1], m - 1)
    grouped = queries[:, -n:].reshape(kv_heads, -1, n, dim)
    logits = grouped @ keys[:, None].transpose(2, 3) * scale
    later = torch.ones(n, m, dtype=torch.bool).triu(m - n + 1)
    weights = logits.masked_fill(later, float("-inf")).softmax(-1)[..., :m - n]
    scores = avg_pool1d(weights.mean(2), POOL, 1, POOL // 2).mean(1)
    return pad(scores, (0, n), value=float(scores.max()) + 1)
