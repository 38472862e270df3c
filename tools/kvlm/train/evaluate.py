"""Measures recall on held-out documents: `python evaluate.py --model ../model --json ../model/eval.json`.

Every document is drawn from another seed than training, and its facts are pairings of name and
value that training never showed. One question follows each document, as in use. An answer counts
only if all its tokens are right under greedy decoding. Here that is checked in one pass over the
document with the expected answer appended: each token must be the most likely one after the right
ones before it, which is the same as generating it.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from cases import Case, chain_case, paired_case, recall_case
from corpus import Writer, enc
from model import Llama

LENGTHS = (64, 128, 256, 512, 1024, 2048)
DEPTHS = 10


def right(model: Llama, case: Case) -> bool:
    """Whether greedy decoding gives exactly the answer and then the newline."""
    expected = case.answer + list(enc("\n"))
    with torch.inference_mode():
        hidden = model.hidden(torch.tensor([case.prompt + expected[:-1]]))[0, -len(expected):]
        best: Tensor = (hidden @ model.embed_tokens.weight.T).argmax(-1)
    return best.tolist() == expected


def measure(model: Llama, seed: str, per_length: int) -> dict:
    """Accuracies by length, by kind, and by depth at the greatest length."""
    by_length: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    by_depth: dict[int, list[bool]] = defaultdict(list)
    for length in LENGTHS:
        writer = Writer(f"{seed}/{length}", held_out=True)
        for i in range(per_length):
            makers = (lambda: recall_case(writer, length, False), lambda: recall_case(writer, length, True),
                      lambda: paired_case(writer, length), lambda: chain_case(writer, length))
            case = makers[(0, 0, 0, 1, 2, 3)[i % 6]]()
            ok = right(model, case)
            by_length[case.kind][str(length)].append(ok)
            if case.kind in ("natural", "terse") and length == LENGTHS[-1]:
                by_depth[int(case.depth * DEPTHS)].append(ok)
    share = lambda oks: {"right": sum(oks), "asked": len(oks), "accuracy": round(sum(oks) / len(oks), 4)}
    recall = {str(n): share(by_length["natural"][str(n)] + by_length["terse"][str(n)]) for n in LENGTHS}
    return {
        "what": "exact greedy answers to questions about held-out documents, full cache, float32",
        "seed": seed,
        "recall_by_length": recall,
        "natural_by_length": {n: share(oks) for n, oks in by_length["natural"].items()},
        "terse_by_length": {n: share(oks) for n, oks in by_length["terse"].items()},
        "paired_by_length": {n: share(oks) for n, oks in by_length["paired"].items()},
        "chain_by_length": {n: share(oks) for n, oks in by_length["chain"].items()},
        f"recall_by_depth_at_{LENGTHS[-1]}": {f"{d / DEPTHS:.1f}-{(d + 1) / DEPTHS:.1f}": share(by_depth[d])
                                              for d in sorted(by_depth)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(__file__).parent.parent / "model")
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--seed", default="held-out")
    parser.add_argument("--per-length", type=int, default=600)
    options = parser.parse_args()
    text = json.dumps(measure(Llama.load(options.model), options.seed, options.per_length), indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
