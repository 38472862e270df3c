# SPDX-License-Identifier: Apache-2.0
"""The kernels of case_kernels_rows.c in numpy: the same numbers of the same type, one thread.

Commands on standard input: "?name" asks whether it knows a kernel, "name" runs it.
"""
import os
import sys

for name in "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS":
    os.environ[name] = "1"

import numpy as np  # noqa: E402: after the number of threads

HEADS, DIM, BLOCK = 8, 128, 16
rng = np.random.default_rng(1)
all_blocks, windows = int(sys.argv[1]) // (HEADS * BLOCK * DIM * 2), int(sys.argv[2])
blocks = all_blocks // windows
everything = rng.integers(0, 1 << 16, (all_blocks, HEADS, BLOCK, DIM), np.uint16) & 0x807F | 0x3F80
order = rng.permutation(all_blocks)
anchors = rng.standard_normal((HEADS, DIM)).astype(np.float32)
scores = rng.standard_normal((HEADS, blocks * BLOCK)).astype(np.float32)
half = np.arange(blocks * BLOCK // 2) * 2
window = 0
PIECE = 64  # blocks widened at a time: 4 MiB of floats


def wide(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def narrow(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def next_window():
    """As in kernels.h: another part of the pool for each call."""
    global window, pool, shuffled
    window = (window + 1) % windows
    pool = everything[window * blocks : (window + 1) * blocks]
    shuffled = order[window * blocks : (window + 1) * blocks]


def pieces(table=None):
    for i in range(0, blocks, PIECE):
        yield wide(pool[i : i + PIECE] if table is None else everything[table[i : i + PIECE]])


def keydiff_anchor():
    total = np.zeros((HEADS, DIM), np.float32)
    for k in pieces():
        total += (k / np.sqrt(np.einsum("bhtd,bhtd->bht", k, k))[..., None]).sum((0, 2))
    return total


def score(table):
    length = np.sqrt((anchors * anchors).sum(1))
    for k in pieces(table):
        norms = np.sqrt(np.einsum("bhtd,bhtd->bht", k, k))
        yield -np.matmul(k, anchors[None, :, :, None])[..., 0] / np.maximum(norms * length[None, :, None], 1e-8)


def keydiff_score():
    return list(score(None))


def keydiff_shuffled():
    return list(score(shuffled))


def topk():
    return [np.sort(np.argpartition(-row, row.size // 16)[: row.size // 16]) for row in scores]


def compact():
    return pool.transpose(1, 0, 2, 3).reshape(HEADS, -1, DIM)[:, half]


def memshare_norms():
    return [np.sqrt(np.einsum("bhtd,bhtd->b", k, k)) for k in pieces()]


def memshare_distance():
    out = []
    for i in range(0, blocks, 32):  # 512 KiB blocks, each with its neighbour
        difference = wide(pool[i : i + 16]) - wide(pool[i + 16 : i + 32])
        out.append(np.sqrt(np.einsum("bhtd,bhtd->b", difference, difference)).sum())
    return out


def hshare_label():
    out = []
    for k in pieces():
        channels = k[..., ::4]
        low, high = channels.min(-1, keepdims=True), channels.max(-1, keepdims=True)
        codes = np.rint((channels - low) * (15 / (high - low))).astype(np.uint8)
        out.append((codes[..., ::2] | codes[..., 1::2] << 4, low, high))
    return out


def attention(table):
    """Blocks of four heads of keys and four of values; four query heads each."""
    q = anchors[:4] * np.float32(DIM**-0.5)
    logits = [np.matmul(wide(part[:, :4]), q.T) for part in table]
    top = max(x.max() for x in logits)
    weights = [np.exp(x - top) for x in logits]
    total = sum(w.sum((0, 2)) for w in weights)
    out = sum(np.einsum("bhtg,bhtd->hgd", w, wide(part[:, 4:]), optimize=True) for w, part in zip(weights, table))
    return out / total[..., None]


def attend_dense():
    return attention([pool[i : i + PIECE] for i in range(0, blocks, PIECE)])


def main():
    print("ready", flush=True)
    for line in sys.stdin:
        name = line.strip().replace("-", "_")
        if name.startswith("?"):
            print("yes" if name[1:] in globals() else "no", flush=True)
        else:
            next_window()
            globals()[name]()
            print("done", flush=True)


main()
