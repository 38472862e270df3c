"""Held-out questions for the diffusion model, as its evaluation and the demo ask them. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import vocabulary as v
from corpus import NEWLINE, Chain, Fact
from infill import Infiller, known_answer, known_question

FACT_SHARE = (0.25, 0.6)        # of a document's tokens


@dataclass
class Page:
    """A document that many questions share, and what it tells."""

    ids: list[int]              # with <bos> and the newline at its end
    facts: list[Fact]
    chain: Chain


@dataclass
class Case:
    """A question about a page: the text after the page, the answer, and the length of its region."""

    kind: str
    prompt: list[int]
    answer: list[int]           # with the newline; <eos> fills the rest of the region
    gen_length: int

    def region(self) -> list[int]:
        """The expected region."""
        return self.answer + [v.EOS] * (self.gen_length - len(self.answer))


def page(writer: Infiller, length: int, links: int) -> Page:
    """A document of exactly `length` tokens with one chain of heirs."""
    count = max(2, int(length * writer.rng.uniform(*FACT_SHARE) / 8) - links)
    facts = writer.facts(count, 0.0)
    chain = writer.chain(links, {f.name for f in facts})
    return Page([v.BOS, *writer.fill(facts + chain.facts(), length - 1)], facts, chain)


def single(writer: Infiller, shown: Page) -> Case:
    """One value: two tokens."""
    fact = writer.rng.choice(shown.facts)
    return Case("single", list(fact.question()), [*fact.value, NEWLINE], 4)


def known(names: int) -> Callable[[Infiller, Page], Case]:
    """Values of several names, as many as the page has at most."""
    def make(writer: Infiller, shown: Page) -> Case:
        facts = writer.rng.sample(shown.facts, min(names, len(shown.facts)))
        answer = list(known_answer(facts))
        return Case(f"known-{names}", list(known_question([f.name for f in facts])), answer, 5 * len(facts) + 2)
    return make


def heirs(writer: Infiller, shown: Page) -> Case:
    """Two to four heirs in a row."""
    part = shown.chain.part(writer.rng)
    return Case("heirs", list(part.question()), [*part.answer(), NEWLINE], 8)


def work(links: int) -> Callable[[Infiller, Page], Case]:
    """The end of a chain, in steps."""
    def make(writer: Infiller, shown: Page) -> Case:
        tail = Chain(shown.chain.names[-min(links, len(shown.chain.names)):])
        answer = tail.work()[:-1]
        return Case(f"work-{links}", list(tail.task()), answer, len(answer) + 1)
    return make


MAKERS: dict[str, Callable[[Infiller, Page], Case]] = {
    "single": single, "known-3": known(3), "known-6": known(6), "known-8": known(8), "known-12": known(12),
    "heirs": heirs, "work-4": work(4), "work-7": work(7),
}
