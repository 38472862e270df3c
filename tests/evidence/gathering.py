# SPDX-License-Identifier: Apache-2.0
"""A handmade bidirectional model, whose answers are right only if the prefix has attended to the text after it.

A prefix lists names. A request continues with other names, one of which is the twin of a name in the prefix; the answer
is that name. In one layer, each name of the prefix looks for its twin and is marked if it finds it. In later layers, the
answer's position reads the marked name. A prefix computed alone has no mark. Before that, all tokens learn whether
anything follows, so that keys and values differ from the second layer on, as they do in trained models.

`early` leaves that out: then the marking layer is the last one whose keys and values are the same, which is where
BiCache begins to recompute, from that layer's output for the prefix alone.

Norms and rotations are as in any Llama: compared values are in dimensions of a head that hardly rotate.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np

from engine import DIFFUSION
import tasks  # noqa: F401  (finds language.py)

from language import BOS, NAME_IDS, TOKENS, UNK

NAMES, LISTED = 24, 10              # names and as many twins; how many a text lists
HIDDEN, HEADS, WIDTH, READERS, FFN, THETA = 128, 2, 64, 3, 64, 1e12
CODE, TWIN, ONE, FIRST, EMPTY, MARK, FOLLOWED = 0, NAMES, 48, 49, 50, 51, 52       # dimensions of the residual stream
STILL = [*range(10, WIDTH // 2), *range(10 + WIDTH // 2, WIDTH)]       # dimensions of a head that hardly rotate
IN_ONE, IN_MARK, IN_FOLLOWED = STILL[NAMES:NAMES + 3]


def embedding() -> np.ndarray:
    table = np.zeros((len(TOKENS), HIDDEN), np.float32)
    table[:, ONE] = 1
    for i in range(NAMES):
        table[NAME_IDS[i], CODE + i] = 1
        table[NAME_IDS[NAMES + i], TWIN + i] = 1
    table[BOS, FIRST], table[UNK, EMPTY] = 1, 1
    return table


def zeros() -> dict[str, np.ndarray]:
    """A layer that does nothing; only the first head is ever used."""
    shapes = {"self_attn.q_proj": (HEADS * WIDTH, HIDDEN), "self_attn.k_proj": (HEADS * WIDTH, HIDDEN),
              "self_attn.v_proj": (HEADS * WIDTH, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * WIDTH),
              "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN)}
    layer = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    norms = {f"{place}_layernorm": np.ones(HIDDEN, np.float32) for place in ("input", "post_attention")}
    return {**layer, **norms}


def following() -> dict[str, np.ndarray]:
    """Every token attends to twins, or to the first token if there are none. A twin means that something follows."""
    layer = zeros()
    layer["self_attn.q_proj"][IN_ONE, ONE] = 1.6
    layer["self_attn.k_proj"][IN_ONE, TWIN:TWIN + NAMES], layer["self_attn.k_proj"][IN_ONE, FIRST] = 1.6, 0.8
    layer["self_attn.v_proj"][IN_MARK, TWIN:TWIN + NAMES] = 1
    layer["self_attn.o_proj"][FOLLOWED, IN_MARK] = 1 / 8
    return layer


def marking() -> dict[str, np.ndarray]:
    """A name attends to its twin, or to the first token if it has none. The twin marks it."""
    layer = zeros()
    q, k = layer["self_attn.q_proj"], layer["self_attn.k_proj"]
    for i in range(NAMES):
        q[STILL[i], CODE + i] = k[STILL[i], TWIN + i] = 1.6
    q[IN_ONE, ONE], k[IN_ONE, FIRST], k[IN_FOLLOWED, FOLLOWED] = 1, 1.25, 3.2
    layer["self_attn.v_proj"][IN_MARK, TWIN:TWIN + NAMES] = 1
    layer["self_attn.o_proj"][MARK, IN_MARK] = 1 / 8
    return layer


def reading() -> dict[str, np.ndarray]:
    """The answer's position attends to the marked name, and takes it."""
    layer = zeros()
    layer["self_attn.q_proj"][IN_MARK, EMPTY] = 1
    layer["self_attn.k_proj"][IN_MARK, MARK], layer["self_attn.k_proj"][IN_ONE, ONE] = 3.2, 0.2
    layer["self_attn.k_proj"][IN_FOLLOWED, FOLLOWED] = 3.2
    for i in range(NAMES):
        layer["self_attn.v_proj"][STILL[i], CODE + i] = 1
        layer["self_attn.o_proj"][CODE + i, STILL[i]] = 0.6
    layer["self_attn.v_proj"][IN_MARK, MARK] = 3
    return layer


def write(folder: Path, early: bool) -> Path:
    """Writes the model's files."""
    layers = [*([] if early else [following()]), marking(), *(reading() for _ in range(READERS))]
    tensors = {"model.embed_tokens.weight": embedding(), "model.norm.weight": np.ones(HIDDEN, np.float32)}
    for i, layer in enumerate(layers):
        for name, value in layer.items():
            tensors[f"model.layers.{i}.{name}.weight"] = value
    header, at = {}, 0
    for name, value in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in tensors.values():
            file.write(value.tobytes())
    config = json.loads((DIFFUSION / "config.json").read_text())
    config.update(hidden_size=HIDDEN, num_hidden_layers=len(layers), num_attention_heads=HEADS,
                  num_key_value_heads=HEADS, head_dim=WIDTH, intermediate_size=FFN, rope_theta=THETA)
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(DIFFUSION / "vocab.txt", folder)
    return folder


def requests(count: int, seed: str) -> list[dict]:
    """Five requests per prefix."""
    rng, made = random.Random(seed), []
    for i in range(count):
        if i % 5 == 0:
            listed = rng.sample(range(NAMES), LISTED)
        asked = rng.choice(listed)
        others = rng.sample([n for n in range(NAMES) if n not in listed], LISTED - 1)
        said = [asked, *others]
        rng.shuffle(said)
        prefix, prompt = [NAME_IDS[n] for n in listed], [NAME_IDS[NAMES + n] for n in said]
        made.append({"document": TOKENS.decode(prefix), "prompt": TOKENS.decode(prompt),
                     "answer": TOKENS.decode([NAME_IDS[asked]]), "gen_length": 1, "steps": 1})
    return made
