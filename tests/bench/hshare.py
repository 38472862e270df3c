#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of attention and selection for each decoded token, dense and with HShare, against the prompt's length.

    tests/bench/hshare.py BUILD [--shape large|smollm2] [--type bf16|f32] [--lengths 4000,8000,16000] [--rounds 7]

kvlm with a random model of a large model's heads (4 layers, 4 KV heads of 128 dimensions with 4 query heads each) or of
SmolLM2-135M's (30 layers, 3 of 64 with 3 each), a daemon that has the prompt, and rounds in which the settings take
turns. The prompt is computed once a length.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from array import array
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tools/kvlm/model"
sys.path.insert(0, str(ROOT / "tools/kvlm"))

from language import TOKENS, Writer, recall_case      # noqa: E402  (needs the path above)

HIDDEN = 256
SETTINGS = {"dense": None, "1/4": (4, 1), "1/4, shared": (4, 0.75), "1/8": (8, 1), "1/8, shared": (8, 0.75)}


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    kv_heads: int
    dim: int

    def weights(self, vocabulary: int) -> dict[str, tuple[int, ...]]:
        all_ = {"model.embed_tokens.weight": (vocabulary, HIDDEN), "model.norm.weight": (HIDDEN,)}
        rows = {"self_attn.q_proj": self.heads * self.dim, "self_attn.k_proj": self.kv_heads * self.dim,
                "self_attn.v_proj": self.kv_heads * self.dim, "mlp.gate_proj": HIDDEN, "mlp.up_proj": HIDDEN,
                "mlp.down_proj": HIDDEN}
        for i in range(self.layers):
            all_ |= {f"model.layers.{i}.{name}.weight": (n, HIDDEN) for name, n in rows.items()}
            all_[f"model.layers.{i}.self_attn.o_proj.weight"] = (HIDDEN, self.heads * self.dim)
            all_ |= {f"model.layers.{i}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        return all_


SHAPES = {"large": Shape(4, 16, 4, 128), "smollm2": Shape(30, 9, 3, 64)}


def make_model(folder: Path, it: Shape) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"hidden_size": HIDDEN, "num_hidden_layers": it.layers, "num_attention_heads": it.heads,
               "head_dim": it.dim, "num_key_value_heads": it.kv_heads, "intermediate_size": HIDDEN, "max_position_embeddings": 40000}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(MODEL / "vocab.txt", folder)
    header, data, rng = {}, bytearray(), random.Random(1)
    for name, shape in it.weights(config["vocab_size"]).items():
        scale = 2.5 / shape[-1] ** 0.5
        n = shape[0] * shape[-1]
        values = [1.0] * shape[0] if len(shape) == 1 else [rng.uniform(-scale, scale) for _ in range(n)]
        raw = array("f", values).tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


class Bench:
    def __init__(self, build: Path, folder: Path, kv_type: str) -> None:
        self.kv_type = kv_type
        self.kvctl, self.kvlm, self.folder = build / "tools/kvctl/kvctl", build / "tools/kvlm/kvlm", folder
        self.socket = folder / "daemon/kvd.sock"
        self.daemon = subprocess.Popen([build / "daemon/kvd", "--private", self.socket.parent, "--backend", "host",
                                        "--pool", "2G"], stderr=subprocess.DEVNULL)

    def ask(self, prompt: str, tokens: int, *options: str) -> dict:
        (self.folder / "prompt").write_text(prompt)
        done = subprocess.run([self.kvlm, "--model", self.folder / "model", "--text", self.folder / "prompt",
                               "--socket", self.socket, "--space", "model", "--json", "--kv-type", self.kv_type,
                               "--stop", "", "--max-tokens", str(tokens), *options], check=True, stdout=subprocess.PIPE)
        return json.loads(done.stdout)

    def measure(self, prompt: str, n_tokens: int, setting: tuple[int, float] | None) -> tuple[float, float]:
        """Milliseconds per token, and those of them in selection."""
        if setting:
            part, ratio = setting
            values = {"hshare": "on", "dense_layers": 0, "sinks": 16, "recent": 64,
                      "top": max(n_tokens // part - 80, 1), "layer_ratio": ratio, "head_ratio": ratio}
            words = [f"hshare.{k}={v}" if k != "hshare" else f"hshare={v}" for k, v in values.items()]
            subprocess.run([self.kvctl, "--socket", self.socket, "space", "set", "model", *words], check=True,
                           stdout=subprocess.DEVNULL)
        report = self.ask(prompt, 48, "--sequence", "auto" if setting else "off")
        n = report["decoded_tokens"]
        return (report["attention_ms"] + report["selection_ms"]) / n, report["selection_ms"] / n


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def run(bench: Bench, length: int, rounds: int) -> None:
    prompt = TOKENS.decode(recall_case(Writer(f"bench-{length}", held_out=True), length, terse=False).prompt)
    n_tokens = bench.ask(prompt, 1, "--sequence", "off", "--threads", "2")["prompt_tokens"]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in SETTINGS}
    for _ in range(rounds):
        for name, setting in SETTINGS.items():
            times[name].append(bench.measure(prompt, n_tokens, setting))
    dense = median([t for t, _ in times["dense"]])
    for name, found in times.items():
        all_ = [t for t, _ in found]
        print(f"{n_tokens:6} tokens, {name:12} {median(all_):8.3f} ms ({min(all_):.3f} to {max(all_):.3f}), selection "
              f"{median([s for _, s in found]):.3f}, {dense / median(all_):.2f} x dense", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="large")
    parser.add_argument("--type", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--lengths", default="4000,8000,16000")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvd-hshare-") as folder:
        make_model(Path(folder, "model"), SHAPES[options.shape])
        bench = Bench(options.build.resolve(), Path(folder), options.type)
        try:
            for length in map(int, options.lengths.split(",")):
                run(bench, length, options.rounds)
        finally:
            bench.daemon.terminate()
            bench.daemon.wait()


if __name__ == "__main__":
    main()
