"""The training samples of the diffusion model: a document, questions about it, and partly masked answers.

The same facts, fillers and chains as in `corpus.py`; what differs is the form of a sample. Attention sees both
directions, so a sample has no padding that would betray where an answer ends: the document is made to fill what
the questions leave, its first sentence beginning in the middle if need be.

A block is a question and a region, which is all that may be masked. Of a region's n tokens k are masked, k uniform
in 1..n, and each weighs n / k: the bound LLaDA trains on (Nie et al., arXiv 2502.09992) with the number of masks
instead of their rate drawn. A value stands two and three tokens after its name, in the fact and in every answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import vocabulary as v
from corpus import ANSWER, BLANK, COMMA, COPY, DOT, IS, NEWLINE, THEN_ANSWER, UNFINISHED, ASK
from corpus import Chain, Fact, Writer, enc

MASK = v.UNK            # an id that no text has
PLAIN = 0.1             # weight of masks anywhere, most of which cannot be predicted
HEAVIEST = 8.0          # bound on n / k
MOST_NAMES = 12         # of one question: 62 tokens
MOST_LINKS = 7          # of one reasoning: 63 tokens


@dataclass
class Block:
    """A question, its answer up to the newline, and whether it counts for recall."""

    question: tuple[int, ...]
    answer: tuple[int, ...]
    weight: float
    asked: bool = False

    def __len__(self) -> int:
        return len(self.question) + len(self.answer)


@dataclass
class Masked:
    """Input ids, the ids wanted, the loss weight of each position, and which positions measure recall."""

    inputs: list[int] = field(default_factory=lambda: [v.BOS])
    targets: list[int] = field(default_factory=lambda: [v.BOS])
    weights: list[float] = field(default_factory=lambda: [0.0])
    asked: list[bool] = field(default_factory=lambda: [False])

    def given(self, ids: tuple[int, ...] | list[int]) -> None:
        """Tokens that stay visible."""
        self.inputs += ids
        self.targets += ids
        self.weights += [0.0] * len(ids)
        self.asked += [False] * len(ids)

    def hide(self, rng: random.Random, ids: tuple[int, ...] | list[int], weight: float, asked: bool) -> None:
        """A region of which a random part is masked."""
        start, n = len(self.inputs), len(ids)
        self.given(ids)
        k = rng.randint(1, n)
        for i in rng.sample(range(n), k):
            self.inputs[start + i] = MASK
            self.weights[start + i] = weight * min(HEAVIEST, n / k)
            self.asked[start + i] = asked and i < 2


def known_question(names: list[int]) -> tuple[int, ...]:
    """Asks for the known facts about several names."""
    listed: list[int] = []
    for name in names:
        listed += [name, COMMA]
    return (ASK, *enc(" What is known of"), *listed[:-1], THEN_ANSWER)


def known_answer(facts: list[Fact]) -> tuple[int, ...]:
    """Five tokens for each name, and the newline."""
    ids: list[int] = []
    for fact in facts:
        ids += [fact.name, IS, *fact.value, DOT]
    return (*ids, NEWLINE)


@dataclass(frozen=True)
class Mixture:
    """How samples of a stage are made: shares of kinds, share of fact tokens in documents."""

    repeat: float
    anywhere: float
    alone: float                        # one block after the document instead of as many as fit
    single: float                       # of the blocks
    chains: float                       # of the documents; the same share of their longer blocks asks for them
    density: tuple[float, float]


class Infiller(Writer):
    """Draws masked samples."""

    def single(self, fact: Fact) -> Block:
        """One fact, asked for by a question or by being left unfinished."""
        unfinished = self.rng.random() < UNFINISHED
        return Block(fact.beginning() if unfinished else fact.question(), (*fact.value, NEWLINE), ANSWER, True)

    def known(self, facts: list[Fact]) -> Block:
        return Block(known_question([f.name for f in facts]), known_answer(facts), ANSWER)

    def heirs(self, chain: Chain) -> Block:
        part = chain.part(self.rng)
        return Block(part.question(), (*part.answer(), NEWLINE), ANSWER)

    def work(self, chain: Chain) -> Block:
        """The end of a chain, found step by step."""
        links = self.rng.randint(1, min(MOST_LINKS, len(chain.names)))
        tail = Chain(chain.names[-links:])
        return Block(tail.task(), tuple(tail.work()[:-1]), ANSWER)

    def fill(self, told: list[Fact], length: int) -> list[int]:
        """Exactly `length` tokens: the facts among fillers; the newline at its end."""
        while True:
            ids = self.paragraphs(self.body(told, length - 16, repeats=0.05))
            missing = length - 1 - len(ids)
            if missing >= 0:
                break
        opening: list[int] = [BLANK]
        while len(opening) < missing:
            opening = [*self.filler(), *opening]
        return [*opening[len(opening) - missing:], *ids, NEWLINE]

    def blocks(self, facts: list[Fact], chain: Chain | None, room: int, mixture: Mixture) -> list[Block]:
        """As many questions as fit, every fact asked at most once; one only if it is to stand alone."""
        pool, made, alone = list(facts), [], self.rng.random() < mixture.alone
        self.rng.shuffle(pool)
        while pool:
            draw = self.rng.random()
            if draw < mixture.single:
                block = self.single(pool.pop())
            elif chain and draw > 1 - (1 - mixture.single) * mixture.chains:
                block = self.heirs(chain) if self.rng.random() < 0.4 else self.work(chain)
            else:
                most = min(len(pool), MOST_NAMES, max(2, (room - 6) // 7))
                count = self.rng.randint(min(2, most), most)
                block = self.known([pool.pop() for _ in range(count)])
            if len(block) > room:
                break
            made.append(block)
            room -= len(block)
            if alone:
                break
        return made

    def recall(self, length: int, mixture: Mixture) -> Masked:
        """A document and questions."""
        while True:
            body = int(length * self.rng.uniform(0.35, 0.75))
            count = max(2, min(100, int(body * self.rng.uniform(*mixture.density) / 8)))
            facts = self.facts(count, 0.0)
            steps = self.rng.randint(2, 8) if length >= 128 and self.rng.random() < mixture.chains else 0
            chain = self.chain(steps, {f.name for f in facts}) if steps else None
            told = facts + (chain.facts() if chain else [])
            blocks = self.blocks(facts, chain, length - 1 - body, mixture)
            ends = self.rng.choice((1, 1, 2, 3, 5, 9))
            left = length - 1 - sum(map(len, blocks)) - ends
            if blocks and sum(len(f.sentence()) for f in told) + 24 + len(told) // 4 <= left:
                break
        sample = Masked()
        sample.given(self.fill(told, left))
        for block in blocks[:-1]:
            sample.given(block.question)
            sample.hide(self.rng, block.answer, block.weight, block.asked)
        last = blocks[-1]
        sample.given(last.question)
        sample.hide(self.rng, [*last.answer, *[v.EOS] * ends], last.weight, last.asked)
        return sample

    def repeat(self, length: int) -> Masked:
        """Repeated tokens or sentences, masked anywhere: a token hidden in one copy is visible in another."""
        period = self.rng.randint(8, max(9, length // 2))
        if self.rng.random() < 0.6:
            once = [self.rng.randrange(v.FIRST_PIECE, v.FIRST_PIECE + 500) for _ in range(period)]
        else:
            once = self.paragraphs(self.body(self.facts(2, 0.0), period))
        ids = once * (length // len(once) + 1)
        sample = Masked()
        sample.hide(self.rng, ids[:length - 1], COPY, False)
        return sample

    def anywhere(self, length: int) -> Masked:
        """A document with masks anywhere."""
        sample = Masked()
        sample.hide(self.rng, self.fill(self.facts(max(1, length // 32), 0.0), length - 1), PLAIN, False)
        return sample

    def masked(self, length: int, mixture: Mixture) -> Masked:
        """One training sample of exactly `length` tokens."""
        draw = self.rng.random()
        if draw < mixture.repeat:
            return self.repeat(length)
        if draw < mixture.repeat + mixture.anywhere:
            return self.anywhere(length)
        return self.recall(length, mixture)
