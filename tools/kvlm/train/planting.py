"""A start from which copying is found at once.

From random weights the model sits for millions of tokens on the plateau where it guesses among the
values it has seen: no gradient asks for a head that looks one token back before another head uses
it, and the other way round. So the two halves of an induction circuit are planted roughly, and
training is left to sharpen, extend or abandon them:

- layer 0: two heads look one and two tokens back and store what they saw in directions of their own;
- layer 2: one head looks for tokens that follow the present token, one for tokens that stand two
  after the previous one, which is where the answer is in "alder" "is" "4".
"""

from __future__ import annotations

import torch
from torch import Tensor

from model import Llama

SHARPNESS = 7.0         # of looking back; gives the right neighbour most of the attention
FAST = 6                # rotary frequencies used for looking back
SLOW_FROM = 5           # rotary frequencies used for matching: they hardly turn over a document
GAIN_STORE, GAIN_MATCH = 0.3, 1.5


def directions(count: int, size: int) -> Tensor:
    """Orthonormal rows that leave out dimension 0, the constant one."""
    rows = torch.linalg.qr(torch.randn(size - 1, count)).Q.T
    return torch.cat((torch.zeros(count, 1), rows), 1)


@torch.no_grad()
def plant(model: Llama) -> None:
    """Overwrites parts of the layers 0 and 2 and dimension 0 of the embeddings."""
    shape = model.shape
    width, half = shape.head_dim, shape.head_dim // 2
    group = shape.heads // shape.kv_heads
    frequency = shape.theta ** (-torch.arange(half).float() / half)
    model.embed_tokens.weight[:, 0] = 1.0       # what a head needs that attends by position alone
    constant = 7.5                              # its size after the first norm

    content = directions(width, shape.hidden)
    stored = directions(2 * width, shape.hidden).view(2, width, shape.hidden)
    first = model.layers[0].self_attn
    first.k_proj.weight[:width] = 0
    first.k_proj.weight[:FAST, 0] = SHARPNESS / constant
    first.v_proj.weight[:width] = content
    for head, distance in enumerate((1, 2)):
        query = first.q_proj.weight[head * width:(head + 1) * width]
        query.zero_()
        angle = -distance * frequency[:FAST]
        query[:FAST, 0] = SHARPNESS / constant * angle.cos()
        query[half:half + FAST, 0] = SHARPNESS / constant * angle.sin()
        first.o_proj.weight[:, head * width:(head + 1) * width] = GAIN_STORE * stored[head].T

    slow = (torch.arange(half) >= SLOW_FROM).float().repeat(2).unsqueeze(1) * GAIN_MATCH
    match = model.layers[2].self_attn
    for kv, (asked, found) in enumerate(((content, stored[0]), (stored[0], stored[1]))):
        copied = directions(width, shape.hidden)
        head = kv * group
        match.q_proj.weight[head * width:(head + 1) * width] = slow * asked
        match.k_proj.weight[kv * width:(kv + 1) * width] = slow * found
        match.v_proj.weight[kv * width:(kv + 1) * width] = copied
        match.o_proj.weight[:, head * width:(head + 1) * width] = copied.T
