"""Asks kvlm held-out questions and reports how many it answers exactly.

    KVLM=build/tools/kvlm/kvlm python tests/python/recall.py [--questions N] [--length TOKENS] [--at-least SHARE]

Needs no torch, daemon or method: it measures the model alone. `sh tools/evidence` measures it with methods.
Exit status 77 means skipped: no KVLM.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/kvlm"))

from language import TOKENS, Case, Writer, recall_case      # noqa: E402  (needs the path above)

SKIPPED = 77


def ask(program: str, model: Path, cases: list[Case]) -> list[str]:
    """The text generated after each prompt."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for case in cases:
            file.write(json.dumps({"prompt": TOKENS.decode(case.prompt)}) + "\n")
        file.flush()
        done = subprocess.run([program, "--model", str(model), "--no-share", "--prompts", file.name,
                               "--max-tokens", "8", "--json"], stdout=subprocess.PIPE, check=True)
    texts = [json.loads(line)["text"] for line in done.stdout.splitlines() if line.startswith(b"{")]
    if len(texts) != len(cases):
        raise RuntimeError(f"{len(cases)} prompts gave {len(texts)} answers")
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "tools/kvlm/model")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--seed", default="recall")
    parser.add_argument("--at-least", type=float, default=0.95)
    options = parser.parse_args()
    if "KVLM" not in os.environ:
        print("skipped: KVLM does not name the program")
        return SKIPPED
    writer = Writer(options.seed, held_out=True)
    cases = [recall_case(writer, options.length, terse=i % 4 == 3) for i in range(options.questions)]
    texts = ask(os.environ["KVLM"], options.model, cases)
    right = [text.split("\n")[0] == TOKENS.decode(case.answer) for text, case in zip(texts, cases)]
    for half in ("first", "second"):
        part = [ok for ok, case in zip(right, cases) if (case.depth < 0.5) == (half == "first")]
        print(f"facts in the {half} half: {sum(part)} of {len(part)}")
    share = sum(right) / len(right)
    print(f"recall at {options.length} tokens: {sum(right)} of {len(right)} exact ({share:.1%})")
    return 0 if share >= options.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
