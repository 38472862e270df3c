"""Compares kvlm's denoising with torch's: the same weights must give the same logits in each step, and the same tokens.

    KVLM=build/tools/kvlm/kvlm python tests/python/test_diffusion.py [--model DIR]

A step fixes the most likely tokens, as tools/kvlm/diffuse_pick.h defines. `Reference` adds what BiCache's official code
does with the prefix's keys and values (the paper's `naive` reuse, and restarting deep layers from the state after layer
b), written after its control flow and independent of kvlm's structure. The prompts are those of demo/diffusion.jsonl.
Exit status 77 means skipped: no KVLM, or no torch here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/kvlm"))

SKIPPED = 77
GREATEST = 1e-3         # difference of a logit; logits reach about 20


def skip(why: str) -> None:
    print(f"skipped: {why}")
    sys.exit(SKIPPED)


try:
    import numpy as np
    import torch
    import torch.nn.functional as F
    from safetensors.torch import load_file
except ImportError as missing:
    skip(f"{missing.name} is not installed")

from torch import Tensor                            # noqa: E402

from train import KINDS, Layer, Llama, rotate       # noqa: E402  (needs the path above)


@dataclass(frozen=True)
class Way:
    """Use of the prefix's keys and values: b layers as stored, the rest recomputed every delta steps."""

    mode: str
    b: int = 0
    delta: int = 16


def best(logits: Tensor, mask: int) -> tuple[Tensor, Tensor]:
    """Per row the best id other than the mask, the lowest among equals, and its log odds in double precision."""
    logits = logits.double().clone()
    logits[:, mask] = -torch.inf
    # Not argmax, which does not define the order of equals.
    tokens = torch.tensor([int((row == row.max()).nonzero()[0]) for row in logits])
    top = logits.gather(1, tokens[:, None])[:, 0]
    return tokens, top - logits.scatter(1, tokens[:, None], -torch.inf).logsumexp(1)


class Reference:
    """Denoising with stored keys and values of a prefix."""

    def __init__(self, model: Llama, prompt: list[int], prefix: int, way: Way) -> None:
        self.model, self.prompt, self.prefix, self.way = model, prompt, prefix, way
        self.stored: list[tuple[Tensor, Tensor, Tensor]] = []       # per layer: keys, values, rows after it
        self.used: list[tuple[Tensor, Tensor] | None] = []          # per layer: prefix's keys and values for other rows
        if way.mode != "off":
            self.store()

    def rows(self, ids: list[int]) -> Tensor:
        return self.model.embed_tokens(torch.tensor(ids))

    def layer(self, layer: Layer, x: Tensor, first: int, before: tuple[Tensor, Tensor] | None
              ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes rows from position `first` on, attending to earlier rows and each other; also their keys and values."""
        attention, shape = layer.self_attn, self.model.shape
        place = slice(first, first + len(x))
        y = layer.input_layernorm(x)
        q, k, v = (proj(y).view(len(x), -1, shape.head_dim).transpose(0, 1)
                   for proj in (attention.q_proj, attention.k_proj, attention.v_proj))
        q, k = (rotate(part, self.model.cos[place], self.model.sin[place]) for part in (q, k))
        keys, values = (k, v) if before is None else (torch.cat((old, new), 1) for old, new in zip(before, (k, v)))
        group = shape.heads // shape.kv_heads
        mixed = F.scaled_dot_product_attention(q, keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0))
        x = x + attention.o_proj(mixed.transpose(0, 1).reshape(len(x), -1))
        return x + layer.mlp(layer.post_attention_layernorm(x)), k, v

    def store(self) -> None:
        x = self.rows(self.prompt[:self.prefix])
        for layer in self.model.layers:
            x, k, v = self.layer(layer, x, 0, None)
            self.stored.append((k, v, x))
        self.used = [(k, v) for k, v, _ in self.stored]

    def step(self, ids: list[int], i: int) -> Tensor:
        """Rows after the last layer in step i (from 0)."""
        layers, m, b = self.model.layers, self.prefix, self.way.b
        if self.way.mode == "off":
            x = self.rows(ids)
            for layer in layers:
                x, _, _ = self.layer(layer, x, 0, None)
            return x[len(self.prompt):]
        x = self.rows(ids[m:])
        if self.way.mode == "naive" or i % self.way.delta != 0:
            for layer, used in zip(layers, self.used):
                x, _, _ = self.layer(layer, x, m, used)
            return x[len(self.prompt) - m:]
        for layer, (k, v, _) in zip(layers[:b], self.stored):
            x, _, _ = self.layer(layer, x, m, (k, v))
        x = torch.cat((self.stored[b - 1][2], x))
        for n, layer in enumerate(layers[b:], b):
            x, k, v = self.layer(layer, x, 0, None)
            self.used[n] = (k[:, :m], v[:, :m])
        return x[len(self.prompt):]

    def run(self, length: int, steps: int) -> tuple[np.ndarray, list[int]]:
        """Logits of the region before each step fixes its tokens, and the final region."""
        mask = self.model.shape.mask
        region, logits = [mask] * length, []
        for i in range(steps):
            with torch.inference_mode():
                rows = self.model.norm(self.step(self.prompt + region, i)) @ self.model.embed_tokens.weight.T
            logits.append(rows.numpy())
            masked = [p for p, token in enumerate(region) if token == mask]
            tokens, odds = best(rows[masked], mask)
            ranked = sorted(range(len(masked)), key=lambda j: (-odds[j].item(), masked[j]))
            for j in ranked[:length // steps + (i < length % steps)]:
                region[masked[j]] = int(tokens[j])
        return np.stack(logits), region


def kvlm(program: str, folder: Path, prompt: list[int], prefix: int, length: int, steps: int, way: Way
         ) -> tuple[np.ndarray, list[int]]:
    """The same, from the program under test."""
    with tempfile.TemporaryDirectory() as place:
        tokens, out = Path(place, "tokens"), Path(place, "logits")
        tokens.write_text(" ".join(map(str, prompt)) + "\n")
        done = subprocess.run(
            [program, "--model", str(folder), "--no-share", "--json", "--tokens", str(tokens), "--logits", str(out),
             "--prefix-tokens", str(prefix), "--gen-length", str(length), "--steps", str(steps), "--bicache", way.mode,
             "--bicache-depth", str(max(1, way.b)), "--refresh", str(way.delta)],
            stdout=subprocess.PIPE, check=True)
        return np.fromfile(out, dtype="<f4").reshape(steps, length, -1), json.loads(done.stdout)["tokens"]


def load(folder: Path) -> Llama:
    model = Llama(KINDS["diffusion"].shape)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): weight for name, weight in weights.items()})
    return model.eval()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "tools/kvlm/diffusion")
    options = parser.parse_args()
    if "KVLM" not in os.environ:
        skip("KVLM does not name the program")
    torch.set_num_threads(1)
    model, wrong = load(options.model), []
    layers = model.shape.layers
    ways = [Way("off"), Way("naive", layers), Way("on", 1, 1), Way("on", 3, 4), Way("on", layers // 2),
            Way("on", layers - 1, 3)]
    asked = [json.loads(one) for one in (ROOT / "tools/kvlm/demo/diffusion.jsonl").read_text().splitlines()]
    for n, case in enumerate(asked[::11]):      # one after each prefix
        way, kind, prefix = ways[n % len(ways)], f"{case['set']}, {case['kind']}", len(case["prefix_ids"])
        prompt, length = case["prefix_ids"] + case["prompt_ids"], case["gen_length"]
        steps = max(1, length // (1 + n % 2))
        expected, region = Reference(model, prompt, prefix, way).run(length, steps)
        got, tokens = kvlm(os.environ["KVLM"], options.model, prompt, prefix, length, steps, way)
        error = np.abs(got - expected).max()
        print(f"{kind}: prefix {prefix} of {len(prompt)} + {length} tokens, {steps} steps, {way}: greatest "
              f"difference {error:.2e}, {sum(a != b for a, b in zip(tokens, region))} other tokens, "
              f"{'right' if region == case['answer_ids'] else 'wrong'}")
        if not error < GREATEST or tokens != region:
            wrong.append(f"{kind}: kvlm's logits or tokens differ from torch's")
    print("\n".join(wrong) or "ok")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
