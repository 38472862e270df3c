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
        """The value itself; what the model writes behind it does not count."""
        return text.split("\n")[0].split(".")[0] == self.answer


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


# ---- reasoning that repeats itself -----------------------------------------------------------------------------------

STEP_TOKENS = 60
CHANGED = 0.15      # share of a repeated step's fillers that are other sentences than before


def step(writer: Writer, facts: list, length: int) -> list[tuple[int, ...]]:
    """Sentences of one step, of about `length` tokens."""
    return writer.body(facts, length, repeats=0.0)


def filler_like(writer: Writer, sentence: tuple[int, ...]) -> tuple[int, ...]:
    """Another sentence of the same number of tokens, so that what follows lies as before."""
    while True:
        other = writer.filler()
        if len(other) == len(sentence):
            return other


def again(writer: Writer, sentences: list[tuple[int, ...]], facts: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The step once more: facts stay, a few of the other sentences are replaced."""
    return [s if s in facts or writer.rng.random() >= CHANGED else filler_like(writer, s) for s in sentences]


def reasoning(count: int, steps: int, repeats: int, seed: str = "evidence-steps") -> list[Question]:
    """`steps` different steps, each told `repeats` times in rounds, and a question about a fact of one of them."""
    questions = []
    writer = Writer(seed, held_out=True)
    for _ in range(count):
        facts = writer.facts(2 * steps, 0.0)
        told = [step(writer, facts[2 * i:2 * i + 2], STEP_TOKENS) for i in range(steps)]
        keep = {f.sentence() for f in facts}
        paragraphs = list(told)
        for _ in range(repeats - 1):
            paragraphs += [again(writer, s, keep) for s in told]
        ids = [1]
        for sentences in paragraphs:
            ids += [token for s in sentences for token in s] + list(TOKENS.encode("\n\n"))
        asked = writer.rng.choice(facts)
        questions.append(Question(TOKENS.decode(ids + list(asked.question())), TOKENS.decode(asked.answer()), 0.5))
    return questions


def exact_step(writer: Writer, facts: list, tokens: int) -> list[tuple[int, ...]]:
    """As `step`, of exactly so many tokens with the empty line behind it: repeated, it lies alike in its blocks."""
    while True:
        sentences = step(writer, facts, tokens)
        missing = tokens - 1 - sum(map(len, sentences))
        for _ in range(50):
            filler = writer.filler()
            if len(filler) == missing:
                return [*sentences, filler]
            if missing == 0:
                return sentences


def long_reasoning(count: int, steps: int, repeats: int, tokens: int, seed: str = "evidence-long") -> list[Question]:
    """As `reasoning`, with steps of a multiple of the block's tokens."""
    questions = []
    writer = Writer(seed, held_out=True)
    for _ in range(count):
        facts = writer.facts(2 * steps, 0.0)
        told = [exact_step(writer, facts[2 * i:2 * i + 2], tokens) for i in range(steps)]
        keep = {f.sentence() for f in facts}
        paragraphs = told + [again(writer, s, keep) for _ in range(repeats - 1) for s in told]
        ids = [1]
        for sentences in paragraphs:
            ids += [token for s in sentences for token in s] + list(TOKENS.encode("\n\n"))
        asked = writer.rng.choice(facts)
        questions.append(Question(TOKENS.decode(ids + list(asked.question())), TOKENS.decode(asked.answer()), 0.5))
    return questions
