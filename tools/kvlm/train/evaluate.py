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
from typing import Callable

import torch
from torch import Tensor

from cases import Case, chain_case, paired_case, recall_case, sum_case, work_case
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


MAKERS: dict[str, Callable[[Writer, int], Case]] = {
    "natural": lambda writer, length: recall_case(writer, length, terse=False),
    "terse": lambda writer, length: recall_case(writer, length, terse=True),
    "paired": paired_case,
    "chain": chain_case,
    "work": work_case,
    "sum": sum_case,
}


def share(oks: list[bool]) -> dict[str, float]:
    return {"right": sum(oks), "asked": len(oks), "accuracy": round(sum(oks) / len(oks), 4)}


def by_depth(answered: list[tuple[Case, bool]]) -> dict[str, dict[str, float]]:
    """Shares per tenth of the document."""
    tenths: dict[int, list[bool]] = defaultdict(list)
    for case, ok in answered:
        tenths[int(case.depth * DEPTHS)].append(ok)
    return {f"{d / DEPTHS:.1f}-{(d + 1) / DEPTHS:.1f}": share(tenths[d]) for d in sorted(tenths)}


def measure(model: Llama, seed: str, each: int) -> dict:
    """Shares of right answers by kind and length; `each` questions per kind and length, thrice for natural ones."""
    shares: dict[str, dict[str, dict[str, float]]] = {"recall": {}}
    deepest: list[tuple[Case, bool]] = []
    for length in LENGTHS:
        recalled: list[tuple[Case, bool]] = []
        for kind, make in MAKERS.items():
            writer = Writer(f"{seed}/{length}/{kind}", held_out=True)
            cases = [make(writer, length) for _ in range(each * (3 if kind == "natural" else 1))]
            answered = [(case, right(model, case)) for case in cases]
            shares.setdefault(kind, {})[str(length)] = share([ok for _, ok in answered])
            if kind in ("natural", "terse"):
                recalled += answered
        shares["recall"][str(length)] = share([ok for _, ok in recalled])
        deepest = recalled
    return {"what": "exact greedy answers to questions about held-out documents, full cache, float32",
            "seed": seed, "by_length": shares, f"recall_by_depth_at_{LENGTHS[-1]}": by_depth(deepest)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(__file__).parent.parent / "model")
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--seed", default="held-out")
    parser.add_argument("--each", type=int, default=100, help="questions per kind and length")
    options = parser.parse_args()
    text = json.dumps(measure(Llama.load(options.model), options.seed, options.each), indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
