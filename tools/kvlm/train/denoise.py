"""The reference denoiser, which the engine in C must reproduce: `python denoise.py "text" --gen-length 8 --steps 4`.

Input: the prompt's g0 ids (`<bos>`, prefix, question), a region of g masks after it, s steps, 1 <= s <= g. The block
is the whole region: no part of it must be finished before another. This is the low-confidence remasking of LLaDA (Nie
et al., arXiv 2502.09992) with one block. Step t = 1..s:

1. One forward pass over all g0 + g tokens, attention in both directions, positions 0..g0+g-1.
2. At each position of the region that is still a mask: the logit of `mask_token_id` is left out; `token` is the id of
   the largest logit, the lowest id among equals; its confidence is its softmax probability. It is compared as the
   log odds  logit[token] - log(sum over every other id of exp(logit))  in double precision: the same order, and no
   rounding to 1 makes ties of what is nearly certain.
3. The n(t) positions of highest confidence get their tokens, the lower position first among equals;
   n(t) = g // s + (1 if t <= g % s else 0). They never change again.

After s steps no mask is left, since the n(t) sum to g. The answer is the text before the first `<eos>`. Nothing is
random. A step's positions are all chosen from one pass: they do not see each other's tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import vocabulary as v
from corpus import TOKENS
from model import Llama


@dataclass(frozen=True)
class Fixed:
    """A token of the region that step `step` (from 1) set at `position` (from 0, in the region)."""

    step: int
    position: int
    token: int
    log_odds: float


def tokens_of_step(length: int, steps: int, step: int) -> int:
    """How many tokens step `step` (from 1) fixes."""
    return length // steps + (1 if step <= length % steps else 0)


def best(logits: Tensor, mask: int) -> tuple[Tensor, Tensor]:
    """Per row the best id other than the mask, and its log odds."""
    logits = logits.double().clone()
    logits[:, mask] = -torch.inf
    # Not argmax, which does not define the order of equals.
    tokens = torch.tensor([int((row == row.max()).nonzero()[0]) for row in logits])
    top = logits.gather(1, tokens[:, None])[:, 0]
    others = logits.scatter(1, tokens[:, None], -torch.inf)
    return tokens, top - others.logsumexp(1)


def denoise(model: Llama, prompt: list[int], length: int, steps: int) -> tuple[list[int], list[Fixed]]:
    """The region's tokens, and in which order they were fixed."""
    if not 1 <= steps <= length:
        raise ValueError(f"steps must be in 1..{length}")
    region = [model.shape.mask] * length
    order: list[Fixed] = []
    for step in range(1, steps + 1):
        open_positions = [i for i, token in enumerate(region) if token == model.shape.mask]
        with torch.inference_mode():
            hidden = model.hidden(torch.tensor([prompt + region]))[0, len(prompt):][open_positions]
            tokens, odds = best(hidden @ model.embed_tokens.weight.T, model.shape.mask)
        ranked = sorted(range(len(open_positions)), key=lambda i: (-odds[i].item(), open_positions[i]))
        for i in ranked[:tokens_of_step(length, steps, step)]:
            region[open_positions[i]] = int(tokens[i])
            order.append(Fixed(step, open_positions[i], int(tokens[i]), odds[i].item()))
    return region, order


def answer_of(region: list[int]) -> list[int]:
    """The tokens before the first `<eos>`."""
    return region[:region.index(v.EOS)] if v.EOS in region else region


def show(order: list[Fixed]) -> None:
    """Prints a line for each token, in the order in which they were fixed."""
    for fixed in order:
        print(f"step {fixed.step:3}  position {fixed.position:3}  token {fixed.token:3}  "
              f"log odds {fixed.log_odds:7.3f}  {TOKENS.decode([fixed.token])!r}")


def answer_lines(model: Llama, prompts: list[dict]) -> Iterator[dict]:
    """The regions of the lines that `make_diffusion_demo.py` writes."""
    for number, one in enumerate(prompts):
        region, order = denoise(model, one["prefix_ids"] + one["prompt_ids"], one["gen_length"], one["steps"])
        yield {"line": number, "right": region == one["answer_ids"], "ids": region,
               "order": [fixed.position for fixed in order]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("text", nargs="?")
    given.add_argument("--prompts", type=Path, help="the lines of this file; prints their regions as JSON lines")
    parser.add_argument("--model", type=Path, default=Path(__file__).parent.parent / "diffusion")
    parser.add_argument("--gen-length", type=int, default=32, help="of the text")
    parser.add_argument("--steps", type=int, default=32, help="of the text")
    options = parser.parse_args()
    model = Llama.load(options.model)
    if options.prompts:
        for found in answer_lines(model, [json.loads(one) for one in options.prompts.read_text().splitlines()]):
            print(json.dumps(found), flush=True)
        return
    region, order = denoise(model, [v.BOS, *TOKENS.encode(options.text)], options.gen_length, options.steps)
    show(order)
    print(TOKENS.decode(answer_of(region)))


if __name__ == "__main__":
    main()
