# SPDX-License-Identifier: Apache-2.0
"""Questions with known answers, drawn as the models' evaluation draws them: held-out pairs, fixed seeds."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from engine import ROOT

sys.path.insert(0, str(ROOT / "tools/kvlm/train"))

from cases import recall_case           # noqa: E402  (needs the path above)
from corpus import TOKENS, Writer       # noqa: E402


@dataclass
class Question:
    """A prompt, and the text that must come."""

    prompt: str
    answer: str
    depth: float    # where in the prompt the fact stands, 0 to 1

    def right(self, text: str) -> bool:
        return text.split("\n")[0] == self.answer


def recall(count: int, length: int, seed: str = "evidence") -> list[Question]:
    """One fact asked for behind a document of `length` tokens."""
    writer = Writer(f"{seed}-{length}", held_out=True)
    questions = []
    for i in range(count):
        case = recall_case(writer, length, terse=i % 4 == 3)
        questions.append(Question(TOKENS.decode(case.prompt), TOKENS.decode(case.answer), case.depth))
    return questions


def prompts(questions: list[Question]) -> list[dict]:
    return [{"prompt": q.prompt} for q in questions]


def accuracy(questions: list[Question], reports: list[dict]) -> float:
    return sum(q.right(r["text"]) for q, r in zip(questions, reports)) / len(questions)
