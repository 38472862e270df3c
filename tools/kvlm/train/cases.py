"""Held-out questions, as the evaluation and the tests ask them. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

import vocabulary as v
from corpus import Fact, Writer, enc

DENSITIES = (0.15, 0.6)         # share of fact tokens in a document, as in training


@dataclass
class Case:
    """A document, a question about it, the expected answer, and where the fact stands."""

    prompt: list[int]
    answer: list[int]
    kind: str
    depth: float


def document(writer: Writer, facts: list[Fact], length: int) -> list[int]:
    """`<bos>`, the document of about `length` tokens, and the newline before the question."""
    body = writer.paragraphs(writer.body(facts, length - 12, repeats=0.0))
    return [v.BOS, *body, *enc("\n")]


def find(ids: list[int], needle: tuple[int, ...]) -> int:
    """Position of the sequence in the ids."""
    return next(i for i in range(len(ids)) if tuple(ids[i:i + len(needle)]) == needle)


def recall_case(writer: Writer, length: int, terse: bool) -> Case:
    """One fact asked for, all facts in the same phrasing mixture as in training."""
    count = max(2, min(120, int(length * writer.rng.uniform(*DENSITIES) / 8)))
    asked = writer.fact(writer.rng.randrange(len(v.NAMES)), terse)
    others = [f for f in writer.facts(count, 0.2) if f.name != asked.name]
    ids = document(writer, [asked, *others], length)
    depth = find(ids, asked.core()) / len(ids)
    return Case(ids + list(asked.question()), list(asked.answer()), "terse" if terse else "natural", depth)


def paired_case(writer: Writer, length: int) -> Case:
    """Every name has two facts; the relation tells which is asked for."""
    facts = writer.paired_facts(max(2, int(length * writer.rng.uniform(*DENSITIES) / 8)))
    asked = facts[0]
    ids = document(writer, facts, length)
    return Case(ids + list(asked.question()), list(asked.answer()), "paired", find(ids, asked.core()) / len(ids))


def chain_case(writer: Writer, length: int) -> Case:
    """Several heirs in a row: each answer token is the next question."""
    count = max(2, int(length * 0.3 / 8))
    others = writer.facts(count, 0.2)
    chain = writer.chain(2 if length < 128 else writer.rng.choice([2, 3, 4]), {f.name for f in others})
    ids = document(writer, chain.facts() + others, length)
    return Case(ids + list(chain.question()), list(chain.answer()), "chain", 0.5)


def work_case(writer: Writer, length: int) -> Case:
    """The whole chain of heirs, a step per paragraph: right only if every step is."""
    steps = max(1, min(12, length // 48))
    ids, _, chain = writer.document(length - 12, 0.2, writer.rng.uniform(*DENSITIES), steps)
    return Case([v.BOS, *ids, *chain.task()], chain.work()[:-2], "work", 0.5)


def sum_case(writer: Writer, length: int) -> Case:
    """A document, and then a sum that has nothing to do with it."""
    ids, _, _ = writer.document(length - 24, 0.2, writer.rng.uniform(*DENSITIES), 0)
    asked = writer.sum()
    return Case([v.BOS, *ids, *asked.task()], asked.work()[:-2], "sum", 0.5)
