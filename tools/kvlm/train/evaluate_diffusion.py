"""Measures the diffusion model: `python evaluate_diffusion.py --model ../diffusion --json ../diffusion/eval.json`.

One question follows each held-out document; the region is denoised by `denoise.py`. `exact`: every token of the
answer and the first `<eos>` are right. `tokens`: share of the answer's tokens that are right, whatever else is wrong.
By length of the document with two tokens a step, and by number of steps at one length.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import torch

from denoise import denoise
from infill import Infiller
from infill_cases import MAKERS, Case, page
from model import Llama

LENGTHS = (64, 128, 256, 400, 500)
STEPS_AT = 400
DIVISORS = (64, 32, 16, 8, 4, 2, 1)     # steps are the region's length by one of these
TOKENS_A_STEP = 2                       # in the runs that vary the length
LINKS = 7


def score(model: Llama, prompt: list[int], case: Case, steps: int) -> tuple[bool, int]:
    """Whether all is right, and how many of the answer's tokens are."""
    region, _ = denoise(model, prompt, case.gen_length, steps)
    right = [a == b for a, b in zip(region, case.region())]
    return all(right[:len(case.answer) + 1]), sum(right[:len(case.answer)])


def measure(model: Llama, cases: list[tuple[list[int], Case]], divisor: int) -> dict[str, float]:
    """Shares over the cases, whose regions are denoised in length / divisor steps, at least one."""
    scores = [score(model, prompt, case, max(1, case.gen_length // divisor)) for prompt, case in cases]
    tokens = sum(len(case.answer) for _, case in cases)
    return {"asked": len(cases), "exact": round(sum(ok for ok, _ in scores) / len(cases), 4),
            "tokens": round(sum(n for _, n in scores) / tokens, 4)}


def draw(seed: str, kind: str, length: int, count: int) -> Iterable[tuple[list[int], Case]]:
    """Prompts and cases, each about another document; short documents cannot hold the longer kinds."""
    writer = Infiller(f"{seed}/{length}/{kind}", held_out=True)
    for _ in range(count):
        shown = page(writer, length, min(LINKS, length // 24))
        case = MAKERS[kind](writer, shown)
        yield shown.ids + case.prompt, case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(__file__).parent.parent / "diffusion")
    parser.add_argument("--json", type=Path, help="also write the result here; other kinds that are there stay")
    parser.add_argument("--seed", default="held-out")
    parser.add_argument("--each", type=int, default=40, help="questions per kind and length or number of steps")
    parser.add_argument("--kinds", nargs="+", choices=MAKERS, default=list(MAKERS))
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS)
    parser.add_argument("--divisors", nargs="*", type=int, default=DIVISORS)
    parser.add_argument("--threads", type=int, default=1, help="on busy cores one is faster than two")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = Llama.load(options.model)
    result: dict = {"what": "held-out documents, reference denoiser, float32", "seed": options.seed,
                    "by_length": {}, f"by_steps_at_{STEPS_AT}": {}}
    if options.json and options.json.exists():
        result.update(json.loads(options.json.read_text()))
    for kind in options.kinds:
        for length in options.lengths:
            shares = measure(model, list(draw(options.seed, kind, length, options.each)), TOKENS_A_STEP)
            result["by_length"].setdefault(kind, {})[str(length)] = shares
            print(f"{kind:9} length {length:4}  {shares}", flush=True)
        cases = list(draw(options.seed, kind, STEPS_AT, options.each))
        for divisor in options.divisors:
            if divisor < cases[0][1].gen_length * 2:
                shares = measure(model, cases, divisor)
                result[f"by_steps_at_{STEPS_AT}"].setdefault(kind, {})[f"length / {divisor}"] = shares
                print(f"{kind:9} steps length / {divisor}  {shares}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
