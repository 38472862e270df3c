# SPDX-License-Identifier: Apache-2.0
"""Trains the models of kvlm; README.md next to it describes them.

    python3 -m venv venv && venv/bin/pip install torch==2.13.0 safetensors numpy
    OMP_WAIT_POLICY=PASSIVE venv/bin/python train.py causal model --minutes 50
    OMP_WAIT_POLICY=PASSIVE venv/bin/python train.py diffusion diffusion --minutes 65

With `--updates 20` it only shows that everything works. The length of the samples grows by stages: a stage is left when
answers of its length are right often enough. Earlier lengths stay in the mixture, because a reader of long documents
forgets short ones. The learning rate follows the clock, not the update count, since the training time is fixed, so a
second run with the same seed gives a similar model, but not the same bits.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from language import BOS, EOS, PAD, POSITIONS, TOKENS, hugging_face_files, vocab_txt
from samples import MASK, CausalMixture, CausalWriter, DiffusionMixture, DiffusionWriter

# ---- model -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The sizes in `config.json`."""

    vocab: int = len(TOKENS)
    hidden: int = 128
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 352
    theta: float = 500000.0     # most dimensions hardly turn within 2,000 tokens, which matching by content needs
    positions: int = POSITIONS
    epsilon: float = 1e-5
    mask: int | None = None     # the token that means an unknown one; None: causal

    def config(self) -> dict[str, object]:
        """The Hugging Face configuration of this shape."""
        kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} if self.mask is None else {
            "architectures": ["KvlmDiffusion"], "model_type": "kvlm_diffusion", "attention": "bidirectional",
            "mask_token_id": self.mask}
        return {
            **kind, "torch_dtype": "float32",
            "vocab_size": self.vocab, "hidden_size": self.hidden, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "intermediate_size": self.ffn, "hidden_act": "silu", "rms_norm_eps": self.epsilon,
            "rope_theta": self.theta, "max_position_embeddings": self.positions, "tie_word_embeddings": True,
            "attention_bias": False, "mlp_bias": False, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS,
        }


def linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, halves convention: dimension i turns with i + head_dim / 2."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = linear(shape.hidden, shape.heads * shape.head_dim)
        self.k_proj = linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.v_proj = linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.o_proj = linear(shape.heads * shape.head_dim, shape.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, value = (proj(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
                       for proj in (self.q_proj, self.k_proj, self.v_proj))
        group = self.shape.heads // self.shape.kv_heads
        k = rotate(k, cos, sin).repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), k, value.repeat_interleave(group, 1),
                                               is_causal=self.shape.mask is None)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden, shape.ffn)
        self.up_proj = linear(shape.hidden, shape.ffn)
        self.down_proj = linear(shape.ffn, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.epsilon)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Attribute names make the state dict equal Hugging Face's, less the prefix `model.`.

    With `Shape.mask` attention sees both directions, and the logits at a position are about the token at that position
    instead of the one after it.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.epsilon)
        # Written as in transformers: at far positions the last bit of a frequency shows in the logits.
        inverse = 1.0 / (shape.theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim))
        angle = torch.outer(torch.arange(shape.positions).float(), inverse)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def initialise(self) -> None:
        """Small normal weights; those that write to the residual stream start even smaller."""
        for name, weight in self.named_parameters():
            if "embed" in name:
                nn.init.normal_(weight, std=0.1)
            elif weight.dim() == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=(0.3 if writes else 0.7) * weight.shape[1] ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return F.linear(self.norm(x), self.embed_tokens.weight)


# ---- initialisation --------------------------------------------------------------------------------------------------
#
# From random weights the model sits for millions of tokens on the plateau where it guesses among the values it has
# seen: no gradient asks for a head that looks one token back before another head uses it, and the other way round. So
# the two halves of an induction circuit are planted roughly in layers 0 and 2, and training is left to sharpen, extend
# or abandon them. Answers were then 97 % right after 0.4 million tokens; without it, 82 % after 2 million.

SHARPNESS = 7.0         # of looking back; gives the right neighbour most of the attention
FAST = 6                # rotary frequencies used for looking back
SLOW_FROM = 5           # rotary frequencies used for matching: they hardly turn over a document
GAIN_STORE, GAIN_MATCH = 0.3, 1.5
NO_MASKS = 6.0          # squared over the root of head_dim: how much less a mask is attended to
CONSTANT, LATER = 7.5, 4.3      # size of the embeddings' constant dimension 0 after the norms of layers 0 and 2


def directions(count: int, size: int, left_out: int = 1) -> Tensor:
    """Orthonormal rows that leave out the first dimensions: 0 is the constant one."""
    rows = torch.linalg.qr(torch.randn(size - left_out, count)).Q.T
    return torch.cat((torch.zeros(count, left_out), rows), 1)


def head(projection: nn.Linear, number: int, width: int) -> Tensor:
    """The rows of one head."""
    return projection.weight[number * width:(number + 1) * width]


def head_out(attention: Attention, number: int, width: int) -> Tensor:
    """The columns of the output projection that one head feeds."""
    return attention.o_proj.weight[:, number * width:(number + 1) * width]


def plant_look_back(model: Llama, distances: tuple[int, ...], kv_heads: int, content: Tensor, stored: Tensor) -> None:
    """In layer 0, a head per distance stores what it sees that many tokens before in a direction of its own."""
    width, half = model.shape.head_dim, model.shape.head_dim // 2
    frequency = model.shape.theta ** (-torch.arange(half).float() / half)
    first = model.layers[0].self_attn
    for kv in range(kv_heads):
        key = head(first.k_proj, kv, width)
        key.zero_()
        key[:FAST, 0] = SHARPNESS / CONSTANT
        head(first.v_proj, kv, width).copy_(content)
    for number, distance in enumerate(distances):
        query, angle = head(first.q_proj, number, width), -distance * frequency[:FAST]
        query.zero_()
        query[:FAST, 0] = SHARPNESS / CONSTANT * angle.cos()
        query[half:half + FAST, 0] = SHARPNESS / CONSTANT * angle.sin()
        head_out(first, number, width).copy_(GAIN_STORE * stored[number].T)


@torch.no_grad()
def plant_causal(model: Llama) -> None:
    """Layer 2: one head looks for tokens that follow the present token.

    Another one looks for tokens two after the previous one, which is where the answer is in "alder" "is" "4".
    """
    shape, width = model.shape, model.shape.head_dim
    model.embed_tokens.weight[:, 0] = 1.0       # for heads that attend by position alone
    content = directions(width, shape.hidden)
    stored = directions(2 * width, shape.hidden).view(2, width, shape.hidden)
    plant_look_back(model, (1, 2), 1, content, stored)
    slow = (torch.arange(width // 2) >= SLOW_FROM).float().repeat(2).unsqueeze(1) * GAIN_MATCH
    match = model.layers[2].self_attn
    for kv, (asked, found) in enumerate(((content, stored[0]), (stored[0], stored[1]))):
        copied = directions(width, shape.hidden)
        number = kv * (shape.heads // shape.kv_heads)
        head(match.q_proj, number, width).copy_(slow * asked)
        head(match.k_proj, kv, width).copy_(slow * found)
        head(match.v_proj, kv, width).copy_(copied)
        head_out(match, number, width).copy_(copied.T)


@torch.no_grad()
def plant_diffusion(model: Llama) -> None:
    """The same for a model that predicts the token at a mask.

    A mask does not know its own content, only the tokens before it, so both sides of the match are what layer 0 stored.
    The token two positions before the mask (for the first token of a value), or three (for the second), is matched with
    the token two or three positions before every other token. In the same way, the token five before the mask is
    matched with the one two before every other token, which leads from a name in an answer to the next name in the
    question. Dimension 1 of the embeddings marks masks.
    """
    shape, width = model.shape, model.shape.head_dim
    group, still = shape.heads // shape.kv_heads, width // 2 - 1
    model.embed_tokens.weight[:, 0] = 1.0
    model.embed_tokens.weight[:, 1] = 0.0
    model.embed_tokens.weight[shape.mask, 1] = 1.0
    content = directions(width, shape.hidden, 2)
    slow = (torch.arange(width // 2) >= SLOW_FROM).repeat(2)
    stored = torch.zeros(3, width, shape.hidden)
    kept = int(slow.sum())
    stored[:, slow] = directions(3 * kept, shape.hidden, 2).view(3, kept, shape.hidden)
    plant_look_back(model, (2, 3, 5), 2, content, stored)
    match = model.layers[2].self_attn
    two, three, five = GAIN_MATCH * stored
    for number, asked in ((0, two), (1, five), (group, three)):
        query = head(match.q_proj, number, width)
        query.copy_(asked)
        query[still] = 0
        query[still, 0] = NO_MASKS / LATER
    for kv, (found, numbers) in enumerate(((two, range(group)), (three, (group,)))):
        copied = directions(width, shape.hidden, 2)
        key = head(match.k_proj, kv, width)
        key.copy_(found)
        key[still] = 0
        key[still, 1] = -NO_MASKS / LATER
        head(match.v_proj, kv, width).copy_(copied)
        for number in numbers:
            head_out(match, number, width).copy_(copied.T)


# ---- optimiser -------------------------------------------------------------------------------------------------------

MOMENTUM = 0.95
DECAY = 0.02
# Coefficients of the quintic Newton-Schulz iteration, chosen by Keller Jordan for speed over exactness.
A, B, C = 3.4445, -4.7750, 2.0315


def orthogonalised(stack: Tensor, steps: int = 5) -> Tensor:
    """Each matrix of the stack with its singular values pushed to about 1."""
    x = stack / (stack.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.mT if tall else x


class Optimiser:
    """Muon for the matrices, AdamW for the rest; the rate applies to both alike.

    Muon replaces a matrix's momentum by the nearest orthogonal matrix, so rare associations move as fast as frequent
    ones. Matrices of one shape are orthogonalised as one batch: on two cores the call overhead would otherwise cost
    more than the arithmetic.
    """

    def __init__(self, model: nn.Module) -> None:
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        others = []
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                self.groups[tuple(parameter.shape)].append(parameter)
            else:
                others.append(parameter)
        self.momenta = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=True)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for shape, group in self.groups.items():
            gradient = torch.stack([p.grad for p in group])
            momentum = self.momenta[shape].lerp_(gradient, 1 - MOMENTUM)
            update = orthogonalised(gradient.lerp(momentum, MOMENTUM)) * (0.2 * max(shape) ** 0.5)
            for parameter, change in zip(group, update):
                parameter.mul_(1 - rate * DECAY).sub_(change, alpha=rate)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()


# ---- training --------------------------------------------------------------------------------------------------------

ADVANCE = 0.97          # answer-token accuracy at which the next length begins
PEAK_RATE = 3e-3
WARM_UP = 50
CLIP = 1.0
AVERAGE = 0.995         # of the weights, per update
TOKENS_PER_UPDATE = 4224
LOG_EVERY = 50


@dataclass(frozen=True)
class Kind:
    """What differs between the two models."""

    shape: Shape
    plant: Callable[[Llama], None]
    writer: type[CausalWriter] | type[DiffusionWriter]
    lengths: tuple[int, ...]
    current: float      # share of updates with samples of the stage's own length
    mixtures: tuple     # of the first stage, of those between, of the last one


# Until recall is learned the signal is kept dense; then prose and reasoning are added. Names with two facts are added
# only once all lengths are reached, because they are learned slowly and would delay the lengths.
CAUSAL = (CausalMixture(repeat=0.4, steps=0.0, terse=0.5, density=(0.5, 0.9)),
          CausalMixture(repeat=0.1, steps=0.15, terse=0.2, density=(0.1, 0.7)),
          CausalMixture(repeat=0.1, steps=0.15, terse=0.2, density=(0.1, 0.7), paired=0.25))
DIFFUSION = (DiffusionMixture(repeat=0.2, anywhere=0.0, alone=0.0, single=0.7, chains=0.5, density=(0.5, 0.9)),
             DiffusionMixture(repeat=0.1, anywhere=0.03, alone=0.15, single=0.45, chains=0.6, density=(0.3, 0.8)),
             DiffusionMixture(repeat=0.05, anywhere=0.03, alone=0.3, single=0.1, chains=0.8, density=(0.15, 0.7)))
KINDS = {
    "causal": Kind(Shape(), plant_causal, CausalWriter, (64, 128, 256, 512, 1024, 2112), 0.6, CAUSAL),
    # Fewer long samples: bidirectional attention over them takes most of the time.
    "diffusion": Kind(Shape(layers=12, ffn=256, mask=MASK), plant_diffusion, DiffusionWriter, (64, 128, 256, 608), 0.4,
                      DIFFUSION),
}


def loss_of(model: Llama, inputs: Tensor, targets: Tensor, weights: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy, and the share of asked tokens that are right: nan if nothing was asked."""
    logits = model(inputs).float()
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    right = (logits.argmax(-1) == targets) & asked
    return (each * weights.flatten()).sum() / weights.sum(), right.sum() / asked.sum()


def batch(writer: CausalWriter | DiffusionWriter, length: int, count: int, mixture: NamedTuple) -> list[Tensor]:
    """The arguments of `loss_of` after the model."""
    return [torch.tensor(column) for column in zip(*(writer.row(length, mixture) for _ in range(count)))]


def rate_at(update: int, share: float) -> float:
    """Warm-up by updates, then constant, then linear decay over the last third of the time."""
    return PEAK_RATE * min(1.0, (update + 1) / WARM_UP) * min(1.0, max(0.02, (1 - share) / 0.35))


class Trainer:
    def __init__(self, kind: Kind, seed: int) -> None:
        torch.manual_seed(seed)
        self.kind = kind
        self.model = Llama(kind.shape)
        self.model.initialise()
        kind.plant(self.model)
        self.optimiser = Optimiser(self.model)
        # The running average of the weights is exported, as if the rate had already decayed.
        self.average = [p.detach().clone() for p in self.model.parameters()]
        self.random, self.writer = random.Random(f"{seed}/0"), kind.writer(f"{seed}/corpus/0")
        self.loss = torch.compile(loss_of, dynamic=True)
        self.updates = self.tokens = self.stage = 0
        self.accuracy = [0.0] * len(kind.lengths)       # of answer tokens, per length

    def pick_length(self) -> int:
        """Mostly the current stage, sometimes an earlier one."""
        own = self.stage == 0 or self.random.random() < self.kind.current
        return self.stage if own else self.random.randrange(self.stage)

    def note(self, which: int, accuracy: float) -> None:
        """Folds one batch's accuracy into the running one, and advances the stage."""
        if math.isnan(accuracy):
            return
        self.accuracy[which] += 0.05 * (accuracy - self.accuracy[which])
        if which == self.stage and self.accuracy[which] >= ADVANCE and self.stage + 1 < len(self.accuracy):
            self.stage += 1

    def update(self, share: float) -> float:
        """One optimiser step after this share of the time; returns its loss."""
        which = self.pick_length()
        length = self.kind.lengths[which]
        mixture = self.kind.mixtures[0 if self.stage == 0 else 1 if self.stage + 1 < len(self.kind.lengths) else 2]
        data = batch(self.writer, length, TOKENS_PER_UPDATE // length, mixture)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, accuracy = self.loss(self.model, *data)
        self.model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimiser.step(rate_at(self.updates, share))
        keep = min(AVERAGE, (self.updates + 1) / (self.updates + 10))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.model.parameters()], 1 - keep)
        self.updates += 1
        self.tokens += data[0].numel()
        self.note(which, accuracy.item())
        return loss.item()

    def run(self, seconds: float, updates: int) -> None:
        began = time.monotonic()
        passed = 0.0
        while passed < seconds and self.updates < updates:
            loss = self.update(passed / seconds)
            passed = time.monotonic() - began
            if self.updates % LOG_EVERY == 0 or self.updates == updates:
                right = " ".join(f"{n}:{a:.3f}" for n, a in zip(self.kind.lengths, self.accuracy[:self.stage + 1]))
                print(f"{passed / 60:6.1f} min  update {self.updates}  tokens {self.tokens / 1e6:.2f}M  "
                      f"loss {loss:.3f}  answers {right}", flush=True)

    def export(self, folder: Path) -> None:
        """Writes the averaged weights and the vocabulary, and for a causal model the files that engines read."""
        folder.mkdir(parents=True, exist_ok=True)
        names = [name for name, _ in self.model.named_parameters()]
        tensors = {f"model.{name}": t.contiguous() for name, t in zip(names, self.average)}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        files = {"config.json": json.dumps(self.kind.shape.config(), indent=2) + "\n", "vocab.txt": vocab_txt()}
        if self.kind.shape.mask is None:
            files |= hugging_face_files()
        for name, text in files.items():
            (folder / name).write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path, help="where to write the model")
    parser.add_argument("--minutes", type=float, default=60, help="training time")
    parser.add_argument("--updates", type=int, default=10 ** 9, help="at most so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    trainer = Trainer(KINDS[options.kind], options.seed)
    trainer.run(60 * options.minutes, options.updates)
    trainer.export(options.folder)


if __name__ == "__main__":
    main()
