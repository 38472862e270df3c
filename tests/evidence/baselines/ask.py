# SPDX-License-Identifier: Apache-2.0
"""Runs the baselines in several processes, which call the functions below. Results are the answers' tokens."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")     # one per process; must be set before numpy is imported

import numpy as np  # noqa: E402

from . import eviction, sharing, sketch, sparse  # noqa: E402
from .llama import Llama, Policy  # noqa: E402

ANSWER = 4          # tokens: two for a value, then the end of the sentence
EVICTION = {"recent window": eviction.Window, "random": eviction.Random, "StreamingLLM": eviction.StreamingLLM,
            "H2O, as published": eviction.H2O, "TOVA": eviction.TOVA, "SnapKV, per chunk": eviction.SnapKV,
            "SnapKV, knowing the question": eviction.SnapKVWhole, "KeyDiff, as published": eviction.KeyDiff,
            "KeyDiff, serve form": eviction.KeyDiffServe, "int4": eviction.Int4,
            "KVReviver, as published": sketch.Reviver}

model: Llama        # of this process


def load(folder: Path) -> None:
    global model
    model = Llama(folder)


def evicted(ids: list[int], policy: str, share: float) -> list[int]:
    """The answer with a budget that is a share of the prompt's tokens."""
    return model.answer(ids, ANSWER, EVICTION[policy](int(share * len(ids))))


def large_sketch(ids: list[int], share: float, vague: float) -> list[int]:
    """KVReviver as published with another share for the sketch."""
    return model.answer(ids, ANSWER, sketch.Reviver(int(share * len(ids)), vague))


def full(ids: list[int]) -> list[int]:
    return model.answer(ids, ANSWER, Policy())


def calibrated(documents: list[list[int]]) -> list[np.ndarray]:
    return sparse.calibrate(model, documents)


def attended(ids: list[int], share: float, tail: int, channels: list[np.ndarray],
             hshare: dict[str, tuple[float, float, float]]) -> dict[str, list[int]]:
    """All sparse baselines after one prefill; `tail` tokens of the prompt are decoded."""
    body, tokens = len(ids) - tail, int(share * len(ids))
    cache, recorder = sparse.prefill(model, ids[:body])
    policies = {"dense": Policy(), "recent window": sparse.Newest(model, tokens), "Quest": sparse.Quest(model, tokens),
                "DoubleSparse": sparse.DoubleSparse(model, tokens, channels)}
    for name, ratios in hshare.items():
        policies[name] = sparse.HShare(model, tokens, channels, recorder.queries, cache, ratios)
    return {name: model.go_on(ids[body:], body, sparse.copies(cache), policy, None, ANSWER)
            for name, policy in policies.items()}


def told(ids: list[int], blank: int, rule: str, value: float = 0) -> tuple[list[int], int, np.ndarray]:
    """The answer with shared blocks, the number of these, and the last token's logits."""
    rules = {"unshared": lambda: None, "at random": lambda: sharing.AtRandom(int(value), len(ids), len(ids)),
             "MemShare, as published": lambda: sharing.Similar(tau_block=value),
             "MemShare, serve form": lambda: sharing.Similar(tau_block=value, metric=sharing.relative, align=True)}
    shown, logits = sharing.tell(model, ids, blank, rules[rule]())
    return model.go_on([], len(ids), shown.cache, Policy(), logits, ANSWER), len(shown.shared), logits


def pairs_apart(ids: list[int], count: int) -> list[float]:
    """The paper's distance of random pairs of blocks."""
    return sharing.random_pairs(model, ids, count, sharing.mean_difference)


class Baselines:
    """Processes with the model, for as long as a `with` lasts."""

    def __init__(self, folder: Path, processes: int | None = None) -> None:
        self.folder, self.processes = folder, processes or min(os.cpu_count() or 1, 8)

    def __enter__(self) -> "Baselines":
        self.executor = ProcessPoolExecutor(self.processes, get_context("spawn"), load, (self.folder,))
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.shutdown(cancel_futures=True)

    def each(self, function, items: list, *arguments, **named) -> list:
        """function(item, ...) for every item."""
        return list(self.executor.map(partial(first_of, function, arguments, named), items))

    def pairs(self, function, items: list, values: list, *arguments) -> list:
        """function(item, *arguments, value) for each item and its value."""
        return list(self.executor.map(partial(last_of, function, arguments), items, values))


def first_of(function, arguments: tuple, named: dict, item: object) -> object:
    return function(item, *arguments, **named)


def last_of(function, arguments: tuple, item: object, value: object) -> object:
    return function(item, *arguments, value)
