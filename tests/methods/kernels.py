# SPDX-License-Identifier: Apache-2.0
"""The kernels, as functions on numpy arrays: each call runs "kvctl compute" of the build on files.

        scores = compute("keydiff.score", keys, eps=1e-8)
        kept, codes = compute("x.y", a, None, b, outputs=2, variant="avx2")     # None: an optional array, left out

bf16 numbers are uint16 here: bf16(x) makes them, wide(x) reads them, and bf16=True says that there are some.
A test that returns a text has it printed.
"""
import functools
import os
import subprocess
import tempfile

import numpy as np


class Refused(Exception):
    """What kvctl said, in one line."""


def run(arguments):
    return subprocess.run([os.environ["KVCTL"], *arguments], capture_output=True, text=True, timeout=60)


def compute(operation, *arrays, outputs=1, variant=None, bf16=False, **params):
    """The outputs of an operation; a tuple if outputs is not 1."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["compute", operation]
        for i, array in enumerate(arrays):
            arguments.append("-" if array is None else f"{folder}/in{i}.npy")
            if array is not None:
                np.save(f"{folder}/in{i}.npy", np.ascontiguousarray(array))
        files = [f"{folder}/out{i}.npy" for i in range(outputs)]
        arguments += ["-o", ",".join(files)]
        arguments += ["--variant", variant] if variant else []
        arguments += ["--type", "bf16"] if bf16 else []
        arguments += ["--param", ",".join(f"{k}={v}" for k, v in params.items())] if params else []
        done = run(arguments)
        if done.returncode != 0:
            raise Refused(done.stderr.strip())
        results = tuple(np.load(file) for file in files)
    return results[0] if outputs == 1 else results


@functools.cache
def variants():
    """Those that this processor runs."""
    scores = np.zeros((1, 1), np.float32)
    found = []
    for name in "scalar", "avx2", "avx512":
        try:
            compute("block.topk", scores, k=1, variant=name)
            found.append(name)
        except Refused:
            pass
    return found


def refused(operation, *arrays, **rest):
    """Why an operation does not take these arrays."""
    try:
        compute(operation, *arrays, **rest)
    except Refused as refusal:
        return str(refusal)
    raise AssertionError(f"{operation} takes what it should refuse")


def bf16(x):
    """To nearest, ties to even, as uint16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def wide(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def same(a, b):
    """Equal bytes, where any NaN equals any other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind == "f":
        signs = np.array_equal(np.signbit(a)[a == 0], np.signbit(b)[b == 0])
        return bool(np.array_equal(a, b, equal_nan=True) and signs)
    return bool(np.array_equal(a, b))
