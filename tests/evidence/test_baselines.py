# SPDX-License-Identifier: Apache-2.0
"""The baselines' engine computes the same as kvlm, and each policy stays within its budget.

    python3 test_baselines.py BUILD
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import numpy as np
except ImportError:
    print("skipped: no numpy")
    sys.exit(77)

import tasks
from baselines import ask, eviction, sharing, sketch, sparse
from baselines.llama import Llama, Policy
from engine import MODEL, Programs

PROGRAMS = Programs(Path(sys.argv[1]))
LLAMA = Llama(MODEL)
[QUESTION] = tasks.recall(1, 300)
IDS = tasks.ids_of(QUESTION)


def logits(chunk: int) -> np.ndarray:
    cache = LLAMA.empty()
    return np.concatenate([LLAMA.forward(IDS[i:i + chunk], i, cache, Policy()) for i in range(0, len(IDS), chunk)])


def test_logits_are_kvlms() -> None:
    theirs = np.array(PROGRAMS.logits(QUESTION.prompt)[0]).reshape(-1, LLAMA.output.shape[1])
    assert len(theirs) == len(IDS)
    assert np.abs(logits(128) - theirs).max() < 2e-4 and np.abs(logits(1) - theirs).max() < 2e-4


def test_the_answer_is_right_without_a_budget() -> None:
    kinds = (eviction.KeyDiff, eviction.H2O, eviction.StreamingLLM)
    for policy in (Policy(), *(kind(len(IDS) + 64) for kind in kinds)):
        assert QUESTION.right(tasks.TOKENS.decode(LLAMA.answer(IDS, ask.ANSWER, policy)))


def test_policies_keep_to_their_budget() -> None:
    for name, kind in ask.EVICTION.items():
        policy, cache = kind(64), LLAMA.empty()
        policy.begin(LLAMA, len(IDS))
        LLAMA.fill(IDS, cache, policy)
        most = policy.budget if name == "int4" else 64
        assert all(len(layer) <= most for layer in cache), name
        assert all((np.diff(layer.positions) > 0).all() for layer in cache if name != "KVReviver, as published"), name


def test_keydiff_is_its_definition() -> None:
    keys = np.random.default_rng(1).normal(size=(2, 50, 8)).astype(np.float32)
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    pairwise = -np.einsum("hid,hjd->hi", unit, unit)
    assert (np.argsort(eviction.distinctive(keys), -1) == np.argsort(pairwise, -1)).all()


def test_sparse_attention_to_everything_is_dense() -> None:
    cache, _ = sparse.prefill(LLAMA, IDS[:-8])
    channels = sparse.calibrate(LLAMA, [IDS])
    dense = LLAMA.go_on(IDS[-8:], len(IDS) - 8, sparse.copies(cache), Policy(), None, ask.ANSWER)
    for policy in (sparse.Quest(LLAMA, len(IDS) - 16), sparse.DoubleSparse(LLAMA, len(IDS) - 16, channels)):
        assert LLAMA.go_on(IDS[-8:], len(IDS) - 8, sparse.copies(cache), policy, None, ask.ANSWER) == dense


def test_greedy_root_has_no_chains() -> None:
    similarity = np.array([[0, 0, 0], [0.8, 0, 0], [0.3, 0.9, 0]])
    assert sparse.greedy_root(similarity, 2) == [0, 0, 0]


def test_a_sketch_without_collisions_is_exact() -> None:
    rows = sketch.Sketch(1, 64, 4, 8, np.random.default_rng(1))
    rows.columns = np.tile(np.arange(8), (3, 1))
    vectors = np.random.default_rng(2).normal(size=(8, 4)).astype(np.float32)
    for i, vector in enumerate(vectors):
        rows.add(0, i, vector)
    assert (rows.query(np.arange(8)[None]) == vectors).all()


def test_sharing_a_block_with_itself_changes_nothing() -> None:
    told, _ = sharing.tell(LLAMA, IDS, tasks.BLANK, None)
    before = told.block(3)
    told.share(3, 3, align=True)
    assert np.abs(told.block(3) - before).max() < 1e-5


def main() -> int:
    tests = [value for name, value in globals().items() if name.startswith("test_")]
    for test in tests:
        test()
        print(f"ok {test.__name__}")
    return 0 if tests else 1


if __name__ == "__main__":
    sys.exit(main())
