# SPDX-License-Identifier: Apache-2.0
"""What the pool costs transformers, and what it saves: kvd.engines.transformers beside transformers alone.

    KVD=build/daemon/kvd KVD_LIBRARY=build/client/libkvd.so.0 PYTHONPATH=client/python \\
            python tests/bench/engine_transformers.py [--tokens N] [--rounds N] [--cpu]

Medians of interleaved rounds, on one thread, of: the first token of a prompt when nothing is cached, with a cache of
transformers' own that has all of it but two tokens, with another request's blocks in place, and by copy; and a token
afterwards. --cpu counts processor time, for busy machines. The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))

import kvd                                                                  # noqa: E402  (needs the path above)
from common import MODEL, daemon, document                                  # noqa: E402
from kvd.engines.transformers import KvdCache, load_prefix, open_space      # noqa: E402

STEPS = 64


class Watch:
    """Times by name, in milliseconds."""

    def __init__(self, clock):
        self.clock, self.times = clock, {}

    def __call__(self, name: str, function):
        start = self.clock()
        result = function()
        self.times.setdefault(name, []).append((self.clock() - start) * 1e3)
        return result


def step(model, cache, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1:].argmax(-1)


def in_place(model, space, ids: torch.Tensor) -> tuple[KvdCache, torch.Tensor]:
    cache = KvdCache(model, space, ids)
    return cache, step(model, cache, ids[:, cache.found:])


def by_copy(model, space, ids: torch.Tensor) -> torch.Tensor:
    cache, n = load_prefix(space, model, ids)
    return step(model, cache, ids[:, n:])


def play(watch: Watch, alone, ours, space, ids: torch.Tensor) -> None:
    own = DynamicCache(config=alone.config)
    expected = watch("first token, nothing cached", lambda: step(alone, own, ids))
    warm = copy.deepcopy(own)
    warm.crop(-2)
    tokens = [watch("first token, own cache", lambda: step(alone, warm, ids[:, -2:]))]
    cache, token = watch("first token, in place", lambda: in_place(ours, space, ids))
    tokens += [token, watch("first token, by copy", lambda: by_copy(alone, space, ids))]
    assert all(it == expected for it in tokens), "other tokens"
    with cache:
        for i in range(STEPS):
            ways = [("a token, alone", alone, own), ("a token, in place", ours, cache)]
            made = [watch(name, lambda: step(model, kept, token)) for name, model, kept in ways[::1 - 2 * (i % 2)]]
            assert made[0] == made[1], "other tokens"
            token = made[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2002)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    alone, ours = (AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation=it).eval() for it in ("sdpa", "kvd"))
    watch = Watch(time.thread_time if options.cpu else time.perf_counter)
    ids = torch.tensor([document(7, options.tokens)])
    with daemon() as server, kvd.connect(server.socket) as connection, open_space(connection, ours) as space:
        in_place(ours, space, ids)[0].close()
        for _ in range(options.rounds):
            play(watch, alone, ours, space, ids)
    times = {name: round(median(it), 3) for name, it in watch.times.items()}
    for name, it in times.items():
        print(f"{name:28} {it:9.3f} ms")
    cold, own, place = (times[f"first token, {how}"] for how in ("nothing cached", "own cache", "in place"))
    print(json.dumps({"tokens": options.tokens, **times, "cold / in place": round(cold / place, 1),
                      "in place / own cache": round(place / own, 2),
                      "decode speed": round(times["a token, alone"] / times["a token, in place"], 3)}))


if __name__ == "__main__":
    main()
