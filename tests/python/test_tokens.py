# SPDX-License-Identifier: Apache-2.0
"""Token ids may come from anything that holds integers, and from nothing else."""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections import deque

from common import chain, child, kvd, main, np, raises, seal, torch


def test_every_kind_of_integers_is_a_row(space):
    tokens = chain(70, 2)
    seal(space, 70, 2)
    kinds = [tokens, tuple(tokens), deque(tokens), iter(tokens), (ctypes.c_uint32 * len(tokens))(*tokens),
             (ctypes.c_int64 * len(tokens))(*tokens), memoryview(array("I", tokens))]
    kinds += [array(kind, tokens) for kind in "hHiIlLqQ"]
    if np:
        kinds += [np.array(tokens, dtype=kind) for kind in ("int16", "uint16", "uint32", "int32", "int64", "uint64")]
        kinds += [np.array([tokens, tokens])[1],
                  np.repeat(np.array(tokens), 2)[::2], list(np.array(tokens))]
    if torch:
        kinds += [torch.tensor(tokens, dtype=kind) for kind in (torch.int64, torch.int32, torch.int16)]
        kinds += [torch.tensor(tokens * 2)[:len(tokens)], torch.tensor(tokens).repeat_interleave(2)[::2]]
    for kind in kinds:
        n = len(kind) if hasattr(kind, "__len__") else len(tokens)
        assert space.match(kind) == n, (type(kind), kind)


def test_empty_lookups_find_nothing(space):
    for empty in ([], (), array("I"), array("q")):
        with space.lookup(empty) as pin:
            assert not pin


def test_small_and_large_ids(space):
    for values in ([0, 2 ** 32 - 1, 2 ** 31], [2 ** 31 - 1]):
        kinds = [values, array("q", values), array("Q", values), array("I", values)]
        kinds += [np.array(values), np.array(values, dtype="uint32")] if np else []
        kinds += [torch.tensor(values)] if torch else []
        for kind in kinds:
            assert kvd._tokens.words(kind).tolist() == values, kind


def test_non_tokens_are_refused(space):
    for wrong in (-1, 2 ** 32, 2 ** 63 - 1, -2 ** 62):
        kinds = [[5, wrong], array("q", [5, wrong])]
        kinds += [np.array([5, wrong])] if np else []
        kinds += [torch.tensor([5, wrong])] if torch else []
        for kind in kinds:
            with raises(ValueError, f"which {wrong} is not"):
                space.lookup(kind)
    for kind in "bhilq":
        with raises(ValueError, "which -3 is not"):
            space.match(array(kind, [5, -3]))
    for kind in ([1.5], array("d", [1]), "12", b"12", bytearray(b"1"), [None], [[1, 2], [3, 4]], 7, None):
        with raises(TypeError, "token ids are"):
            space.match(kind)


def test_one_row_of_tokens(space):
    kinds = [np.zeros((1, 4), dtype=kind) for kind in ("int64", "int32")] + [np.array(3)] if np else []
    kinds += [torch.zeros((1, 4), dtype=torch.int64), torch.tensor(3)] if torch else []
    kinds += [memoryview(bytes(64)).cast("I", (4, 4))]
    for kind in kinds:
        with raises(ValueError, "token ids are one row, not an array of"):
            space.lookup(kind)
    for kind in [np.zeros(4), np.zeros(4, dtype=bool)] if np else []:
        with raises(TypeError, "token ids are integers"):
            space.lookup(kind)
    if torch:
        with raises(TypeError, "token ids are integers"):
            space.lookup(torch.zeros(4))


NO_LOOP = """
import sys, array, kvd
calls = 0
def count(frame, event, argument):
    global calls
    calls += 1
    return count
for kind in (list, lambda it: array.array("q", it), lambda it: array.array("i", it)):
    counts = []
    for n in (32, 2048):
        tokens, calls = kind(range(n)), 0
        sys.settrace(count)
        assert len(kvd._tokens.words(tokens)) == n
        sys.settrace(None)
        counts.append(calls)
    assert counts[0] == counts[1], counts
assert "numpy" not in sys.modules
print("ok")
"""


def test_python_runs_as_many_lines_for_few_tokens_as_for_many(space):
    done = child(NO_LOOP)
    assert done.stdout == "ok\n", done


if __name__ == "__main__":
    sys.exit(main(globals()))
