# SPDX-License-Identifier: Apache-2.0
"""R-KV (Cai et al. 2025, arXiv:2505.24133): keep what is attended to and not said twice.

    KvdCache(model, space, input_ids, scorer=rkv, budget=1024)
"""

import torch
from torch.nn.functional import max_pool1d, normalize, pad

WINDOW, POOL, IMPORTANCE, ALIKE = 8, 7, 0.1, 0.5


def rkv(layer, queries, keys, values, scale):
    """Scores [kv_heads, tokens]: the window's attention, less how much a key is like the others; the window stays."""
    kv_heads, m, dim = keys.shape
    n = min(WINDOW, queries.shape[1], m - 1)
    logits = queries[:, -n:].reshape(kv_heads, -1, n, dim) @ keys[:, None, :m - n].transpose(2, 3) * scale
    important = max_pool1d(logits.softmax(-1).amax(1).mean(1), POOL, 1, POOL // 2)
    unit = normalize(keys[:, :m - n].float(), dim=2)
    alike = unit @ unit.transpose(1, 2) - torch.eye(m - n)
    newest = torch.where(alike > ALIKE, torch.arange(m - n), -1).amax(2, keepdim=True)
    alike[newest == torch.arange(m - n)] = 0        # the newest of those that are like a key does not count as repeated
    scores = IMPORTANCE * important - (1 - IMPORTANCE) * alike.mean(1).softmax(-1)
    return pad(scores, (0, n), value=float(scores.max()) + 1)
