# SPDX-License-Identifier: Apache-2.0
"""Questions with known answers, drawn as in the models' evaluation: held-out pairs, fixed seeds."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from engine import ROOT

sys.path.insert(0, str(ROOT / "tools/kvlm"))

from language import BLANK, TOKENS, Fact, Writer, find, recall_case      # noqa: E402  (needs the path above)


@dataclass
class Question:
    """A prompt, and its right answer."""

    prompt: str
    answer: str
    depth: float    # position of the fact in the prompt, 0 to 1

    def right(self, text: str) -> bool:
        """Checks the value only; text after it does not count."""
        return text.split("\n")[0].split(".")[0] == self.answer


def recall(count: int, length: int, seed: str = "evidence") -> list[Question]:
    """Questions about one fact each, after a document of `length` tokens."""
    writer = Writer(f"{seed}-{length}", held_out=True)
    questions = []
    for i in range(count):
        case = recall_case(writer, length, terse=i % 4 == 3)
        questions.append(Question(TOKENS.decode(case.prompt), TOKENS.decode(case.answer), case.depth))
    return questions


def prompts(questions: list[Question]) -> list[dict]:
    return [{"prompt": q.prompt} for q in questions]


# ---- reasoning that repeats itself -----------------------------------------------------------------------------------

CHANGED = 0.15      # share of a repeated step's fillers that are replaced by other sentences


def step(writer: Writer, told: list[Fact], length: int) -> list[tuple[int, ...]]:
    """Facts at random places among fillers, of exactly `length` tokens including the empty line at the end."""
    while True:
        sentences = writer.body(told, length, repeats=0.0)
        missing = length - 1 - sum(map(len, sentences))
        for _ in range(50):
            filler = writer.filler()
            if len(filler) == missing:
                return [*sentences, filler]
            if missing == 0:
                return sentences


def filler_like(writer: Writer, sentence: tuple[int, ...]) -> tuple[int, ...]:
    """Another sentence of the same number of tokens, so that later ones keep their positions."""
    while True:
        other = writer.filler()
        if len(other) == len(sentence):
            return other


def again(writer: Writer, sentences: list[tuple[int, ...]], facts: dict[tuple[int, ...], tuple[int, ...]],
          shifted: bool) -> list[tuple[int, ...]]:
    """The step again, with other facts, and with a few of its other sentences replaced."""
    told = []
    for sentence in sentences:
        if sentence in facts:
            told.append(facts[sentence])
        elif writer.rng.random() >= CHANGED:
            told.append(sentence)
        else:
            told.append(writer.filler() if shifted else filler_like(writer, sentence))
    return told


def plain_facts(writer: Writer, count: int) -> list[Fact]:
    """Facts of equally many tokens, about distinct names."""
    return [replace(fact, lead=" The") for fact in writer.facts(count, 0.0)]


LENGTHS = ("of whole blocks", "of any length", "of changing length")


def reasoning(count: int, steps: int, repeats: int, tokens: int = 128, facts: int = 2, lengths: str = LENGTHS[0],
              seed: str = "evidence-steps") -> list[Question]:
    """`steps` different steps, each told `repeats` times in rounds, every time with other facts.

    Every fact is told once, at the position where the other tellings of its step have theirs. If its block is replaced
    by another telling's, the model reads a fact about something else. Steps have `tokens` tokens, or a number near
    that, or a number that also changes with each replaced sentence.
    """
    questions = []
    writer = Writer(f"{seed}-{steps}-{repeats}-{tokens}-{lengths}", held_out=True)
    for _ in range(count):
        pool = plain_facts(writer, steps * repeats * facts)
        rounds = [[pool[(r * steps + i) * facts:][:facts] for i in range(steps)] for r in range(repeats)]
        sizes = [tokens if lengths == LENGTHS[0] else tokens + writer.rng.randrange(-24, 25) for _ in range(steps)]
        first = [step(writer, told, size) for told, size in zip(rounds[0], sizes)]
        ids = [1]
        for told in rounds:
            for i, sentences in enumerate(first):
                renewed = {old.sentence(): new.sentence() for old, new in zip(rounds[0][i], told[i])}
                if told is not rounds[0]:
                    sentences = again(writer, sentences, renewed, lengths == LENGTHS[2])
                ids += [token for s in sentences for token in s] + [BLANK]
        asked = writer.rng.choice(pool)
        depth = find(ids, asked.core()) / len(ids)
        questions.append(Question(TOKENS.decode(ids + list(asked.question())), TOKENS.decode(asked.answer()), depth))
    return questions
