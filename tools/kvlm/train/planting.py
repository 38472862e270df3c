"""An initialisation from which the model learns to copy at once.

From random weights the model sits for millions of tokens on the plateau where it guesses among the
values it has seen: no gradient asks for a head that looks one token back before another head uses
it, and the other way round. So the two halves of an induction circuit are planted roughly, and
training is left to sharpen, extend or abandon them:

- layer 0: two heads look one and two tokens back and store what they saw in directions of their own;
- layer 2: one head looks for tokens that follow the present token, one for tokens that stand two
  after the previous one, which is where the answer is in "alder" "is" "4".

`plant_infill` does the same for the diffusion model, which predicts the token at a mask instead of the next one.
A mask does not know its own content, only the tokens before it, so both sides of the match are what layer 0 stored.
The token two positions before the mask (for the first token of a value), or three (for the second), is matched with
the token two or three positions before every other token. In the same way, the token five before the mask is matched
with the one two before every other token, which leads from a name in an answer to the next name in the question.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model import Llama

SHARPNESS = 7.0         # of looking back; gives the right neighbour most of the attention
FAST = 6                # rotary frequencies used for looking back
SLOW_FROM = 5           # rotary frequencies used for matching: they hardly turn over a document
GAIN_STORE, GAIN_MATCH = 0.3, 1.5
NO_MASKS = 6.0          # squared over the root of head_dim: how much less a mask is attended to


def directions(count: int, size: int, left_out: int = 1) -> Tensor:
    """Orthonormal rows that leave out the first dimensions: 0 is the constant one."""
    rows = torch.linalg.qr(torch.randn(size - left_out, count)).Q.T
    return torch.cat((torch.zeros(count, left_out), rows), 1)


def look_back(query: Tensor, distance: int, frequency: Tensor, constant: float) -> None:
    """Makes the head with these query rows attend to the token `distance` before; its keys are constant."""
    half = len(query) // 2
    query.zero_()
    angle = -distance * frequency[:FAST]
    query[:FAST, 0] = SHARPNESS / constant * angle.cos()
    query[half:half + FAST, 0] = SHARPNESS / constant * angle.sin()


@torch.no_grad()
def plant(model: Llama) -> None:
    """Overwrites parts of the layers 0 and 2 and dimension 0 of the embeddings."""
    shape = model.shape
    width, half = shape.head_dim, shape.head_dim // 2
    group = shape.heads // shape.kv_heads
    frequency = shape.theta ** (-torch.arange(half).float() / half)
    model.embed_tokens.weight[:, 0] = 1.0       # for heads that attend by position alone
    constant = 7.5                              # its size after the first norm

    content = directions(width, shape.hidden)
    stored = directions(2 * width, shape.hidden).view(2, width, shape.hidden)
    first = model.layers[0].self_attn
    first.k_proj.weight[:width] = 0
    first.k_proj.weight[:FAST, 0] = SHARPNESS / constant
    first.v_proj.weight[:width] = content
    for head, distance in enumerate((1, 2)):
        look_back(first.q_proj.weight[head * width:(head + 1) * width], distance, frequency, constant)
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


@torch.no_grad()
def plant_infill(model: Llama) -> None:
    """Overwrites parts of the layers 0 and 2 and the dimensions 0 (constant) and 1 (mask) of the embeddings."""
    shape = model.shape
    width, half = shape.head_dim, shape.head_dim // 2
    group = shape.heads // shape.kv_heads
    frequency = shape.theta ** (-torch.arange(half).float() / half)
    model.embed_tokens.weight[:, 0] = 1.0
    model.embed_tokens.weight[:, 1] = 0.0
    model.embed_tokens.weight[shape.mask, 1] = 1.0
    constant, later = 7.5, 4.3                  # its size after the norms of layers 0 and 2

    content = directions(width, shape.hidden, 2)
    slow = (torch.arange(half) >= SLOW_FROM).repeat(2)
    kept = int(slow.sum())
    rows = directions(3 * kept, shape.hidden, 2).view(3, kept, shape.hidden)
    stored = torch.zeros(3, width, shape.hidden)
    stored[:, slow] = rows
    first = model.layers[0].self_attn
    for kv in (0, 1):
        first.k_proj.weight[kv * width:(kv + 1) * width] = 0
        first.k_proj.weight[kv * width:kv * width + FAST, 0] = SHARPNESS / constant
        first.v_proj.weight[kv * width:(kv + 1) * width] = content
    for head, distance in enumerate((2, 3, 5)):
        look_back(first.q_proj.weight[head * width:(head + 1) * width], distance, frequency, constant)
        first.o_proj.weight[:, head * width:(head + 1) * width] = GAIN_STORE * stored[head].T

    match = model.layers[2].self_attn
    two, three, five = GAIN_MATCH * stored
    for head, asked in ((0, two), (1, five), (group, three)):
        query = match.q_proj.weight[head * width:(head + 1) * width]
        query.copy_(asked)
        query[half - 1] = 0
        query[half - 1, 0] = NO_MASKS / later
    for kv, found in enumerate((two, three)):
        copied = directions(width, shape.hidden, 2)
        key = match.k_proj.weight[kv * width:(kv + 1) * width]
        key.copy_(found)
        key[half - 1] = 0
        key[half - 1, 1] = -NO_MASKS / later
        match.v_proj.weight[kv * width:(kv + 1) * width] = copied
        for head in range(kv * group, kv * group + (group if kv == 0 else 1)):
            match.o_proj.weight[:, head * width:(head + 1) * width] = copied.T
