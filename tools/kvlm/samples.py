# SPDX-License-Identifier: Apache-2.0
"""The training samples of kvlm's models. Needs only the standard library."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import NamedTuple

from language import ASK, BLANK, BOS, COMMA, DOT, EOS, FIRST_BYTE, FIRST_PIECE, IS, NEWLINE, PAD, THEN_ANSWER, TOKENS
from language import UNK, Chain, Fact, Writer, enc, two_digits

MASK = UNK              # an id that no text has
UNFINISHED = 0.25       # share of facts asked for by their own beginning instead of a question

# ---- samples of the causal model -------------------------------------------------------------------------------------

# Loss weights: answers count fully, tokens that cannot be predicted count little.
ANSWER, REASON, COPY, PLAIN = 1.0, 0.6, 0.5, 0.08


@dataclass
class Sample:
    """Token ids, the loss weight of predicting each of them, and which of them measure recall."""

    ids: list[int] = field(default_factory=lambda: [BOS])
    weights: list[float] = field(default_factory=lambda: [0.0])
    asked: list[bool] = field(default_factory=lambda: [False])

    def add(self, ids: tuple[int, ...] | list[int], weight: float, asked: bool = False) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)
        self.asked += [asked] * len(ids)


Row = tuple[list[int], list[int], list[float], list[bool]]       # of a batch: inputs, targets, weights, asked


class CausalMixture(NamedTuple):
    """Shares of the kinds of samples (what is left is recall) and how recall documents are made."""

    repeat: float
    steps: float
    terse: float
    density: tuple[float, float]
    paired: float = 0.0


def sum_in_steps(rng: random.Random) -> tuple[tuple[int, ...], list[int]]:
    """The task and its work up to `<eos>`: a sum below 100 of different digits, so that each determines the next."""
    total = rng.randrange(50)
    digits = rng.sample(range(10), rng.randint(2, 5))
    task = f"Question: What is{two_digits(total)} and then{','.join(f' {digit}' for digit in digits)}?\n\n"
    steps = [f"Start with{two_digits(total)}."]
    for digit in digits:
        total += digit
        steps.append(f"Add {digit} to get{two_digits(total)}.")
    return enc(task), [*enc("\n\n".join([*steps, f"Answer:{two_digits(total)}\n"])), EOS]


class CausalWriter(Writer):
    """Two rules make recall learnable in an hour of CPU time.

    The asked name is one token before the answer, in the fact (" alder" " is" " 4") and in the question (" alder"
    "?\\nAnswer:" " 4"). And many questions follow one short document, mixed with passages that repeat word by word:
    copying is what attention must learn, and it learns from dense signal.
    """

    def recall(self, length: int, mixture: CausalMixture) -> Sample:
        """A document and then questions up to the end."""
        density = self.rng.uniform(*mixture.density)
        body_length = int(length * self.rng.uniform(0.35, 0.85))
        longest = min(8, length // 64)
        steps = self.rng.randint(2, longest) if longest >= 2 and self.rng.random() < 0.5 else 0
        ids, told, chain = self.document(body_length, mixture.terse, density, steps, mixture.paired)
        pool: list[Fact | Chain] = list(told)
        if steps:
            pool += [chain.part(self.rng) for _ in range(1 + len(told) // 8)]
        sample = Sample()
        sample.add(ids, PLAIN)
        self.rng.shuffle(pool)
        for asked in itertools.cycle(pool):     # in turn, since a question that is asked again answers itself
            if len(sample.ids) >= length:
                break
            unfinished = isinstance(asked, Fact) and self.rng.random() < UNFINISHED
            sample.add(asked.beginning() if unfinished else asked.question(), PLAIN)
            sample.add(asked.answer(), ANSWER, asked=True)
            sample.add((NEWLINE,), COPY)
        return sample

    def repeat(self, length: int) -> Sample:
        """Random tokens or sentences, repeated word by word until the sample is full."""
        period = self.rng.randint(8, max(9, length // 2))
        if self.rng.random() < 0.6:
            low = FIRST_BYTE if self.rng.random() < 0.2 else FIRST_PIECE
            once = [self.rng.randrange(low, len(TOKENS)) for _ in range(period)]
        else:
            once = self.paragraphs(self.body(self.facts(2, 0.5), period))
        sample = Sample()
        sample.add(once, PLAIN / 2)
        while len(sample.ids) < length:
            sample.add(once, COPY)
        return sample

    def steps(self, length: int) -> Sample:
        """Reasoning written in steps with blank lines between: a chain of heirs, then running sums."""
        sample = Sample()
        if self.rng.random() < 0.7:
            body_length = int(length * self.rng.uniform(0.3, 0.6))
            steps = min(30, max(1, int((length - body_length - 22) / 9 * self.rng.uniform(0.3, 1.0))))
            ids, _, chain = self.document(body_length, 0.2, self.rng.uniform(0.3, 0.9), steps)
            sample.add(ids, PLAIN)
            sample.add(chain.task(), PLAIN)
            sample.add(chain.work(), REASON)
        while len(sample.ids) < length:
            task, work = sum_in_steps(self.rng)
            sample.add(task, PLAIN)
            sample.add(work, REASON)
        return sample

    def row(self, length: int, mixture: CausalMixture) -> Row:
        """A training sample, cut or padded; each input's target is the next token."""
        draw = self.rng.random()
        if draw < mixture.repeat:
            sample = self.repeat(length + 1)
        elif draw < mixture.repeat + mixture.steps:
            sample = self.steps(length + 1)
        else:
            sample = self.recall(length + 1, mixture)
        sample.add([PAD] * (length + 1 - len(sample.ids)), 0.0)
        end = length + 1
        return sample.ids[:length], sample.ids[1:end], sample.weights[1:end], sample.asked[1:end]


# ---- samples of the diffusion model ----------------------------------------------------------------------------------

ANYWHERE = 0.1          # loss weight of masks anywhere, most of which cannot be predicted
HEAVIEST = 8.0          # bound on n / k
MOST_NAMES = 12         # of one question: 62 tokens
MOST_LINKS = 7          # of one reasoning: 63 tokens


class Block(NamedTuple):
    """A question, its answer up to the newline, and whether it counts for recall."""

    question: tuple[int, ...]
    answer: tuple[int, ...]
    asked: bool = False

    def size(self) -> int:
        return len(self.question) + len(self.answer)


class DiffusionMixture(NamedTuple):
    """How samples of a stage are made: shares of kinds, share of fact tokens in documents."""

    repeat: float
    anywhere: float
    alone: float                        # one block after the document instead of as many as fit
    single: float                       # of the blocks
    chains: float                       # of the documents; the same share of their longer blocks asks for them
    density: tuple[float, float]


class DiffusionWriter(Writer):
    """A sample is a document, questions about it, and partly masked answers.

    Attention sees both directions, so a sample has no padding that would betray where an answer ends: the document is
    made to fill what the questions leave, its first sentence beginning in the middle if need be.

    A block is a question and a region, which is all that may be masked. Of a region's n tokens k are masked, k uniform
    in 1..n, and each weighs n / k: the bound LLaDA trains on (Nie et al., arXiv 2502.09992) with the number of masks
    instead of their rate drawn. A value is two and three tokens after its name, in the fact and in every answer.
    """

    def hide(self, sample: Sample, ids: tuple[int, ...] | list[int], weight: float, asked: bool = False) -> None:
        """Adds a region of which a random part is masked: the tokens that have a weight."""
        start, n = len(sample.ids), len(ids)
        sample.add(ids, 0.0)
        k = self.rng.randint(1, n)
        for i in self.rng.sample(range(n), k):
            sample.weights[start + i] = weight * min(HEAVIEST, n / k)
            sample.asked[start + i] = asked and i < 2

    def single(self, fact: Fact) -> Block:
        """One fact, asked for by a question or by being left unfinished."""
        unfinished = self.rng.random() < UNFINISHED
        return Block(fact.beginning() if unfinished else fact.question(), (*fact.value, NEWLINE), asked=True)

    def known(self, facts: list[Fact]) -> Block:
        """The known facts about several names, five tokens for each."""
        names = [i for fact in facts for i in (fact.name, COMMA)][:-1]
        answer = [i for fact in facts for i in (fact.name, IS, *fact.value, DOT)]
        return Block((ASK, *enc(" What is known of"), *names, THEN_ANSWER), (*answer, NEWLINE))

    def heirs(self, chain: Chain) -> Block:
        """Some heirs in a row, or the end of a chain, found step by step."""
        if self.rng.random() < 0.4:
            part = chain.part(self.rng)
            return Block(part.question(), (*part.answer(), NEWLINE))
        links = self.rng.randint(1, min(MOST_LINKS, len(chain.names)))
        tail = Chain(chain.names[-links:])
        return Block(tail.task(), tuple(tail.work()[:-1]))

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

    def blocks(self, facts: list[Fact], chain: Chain | None, room: int, mixture: DiffusionMixture) -> list[Block]:
        """As many questions as fit, every fact asked at most once; one only if it is to be alone."""
        pool, made, alone = list(facts), [], self.rng.random() < mixture.alone
        self.rng.shuffle(pool)
        while pool:
            draw = self.rng.random()
            if draw < mixture.single:
                block = self.single(pool.pop())
            elif chain and draw > 1 - (1 - mixture.single) * mixture.chains:
                block = self.heirs(chain)
            else:
                most = min(len(pool), MOST_NAMES, max(2, (room - 6) // 7))
                count = self.rng.randint(min(2, most), most)
                block = self.known([pool.pop() for _ in range(count)])
            if block.size() > room:
                break
            made.append(block)
            room -= block.size()
            if alone:
                break
        return made

    def plan(self, length: int, mixture: DiffusionMixture) -> tuple[list[Fact], list[Block], int, int]:
        """Facts, blocks, how many `<eos>` follow them, and what is left for the document."""
        while True:
            body = int(length * self.rng.uniform(0.35, 0.75))
            count = max(2, min(100, int(body * self.rng.uniform(*mixture.density) / 8)))
            facts = self.facts(count, 0.0)
            steps = self.rng.randint(2, 8) if length >= 128 and self.rng.random() < mixture.chains else 0
            chain = self.chain(steps, {f.name for f in facts}) if steps else None
            told = facts + (chain.facts() if chain else [])
            blocks = self.blocks(facts, chain, length - 1 - body, mixture)
            ends = self.rng.choice((1, 1, 2, 3, 5, 9))
            left = length - 1 - sum(block.size() for block in blocks) - ends
            if blocks and sum(len(f.sentence()) for f in told) + 24 + len(told) // 4 <= left:
                return told, blocks, ends, left

    def recall(self, length: int, mixture: DiffusionMixture) -> Sample:
        """A document and questions."""
        told, blocks, ends, left = self.plan(length, mixture)
        sample = Sample()
        sample.add(self.fill(told, left), 0.0)
        for block in blocks:
            sample.add(block.question, 0.0)
            end = [EOS] * ends if block is blocks[-1] else []
            self.hide(sample, [*block.answer, *end], ANSWER, block.asked)
        return sample

    def repeat(self, length: int) -> Sample:
        """Repeated tokens or sentences, masked anywhere: a token hidden in one copy is visible in another."""
        period = self.rng.randint(8, max(9, length // 2))
        if self.rng.random() < 0.6:
            once = [self.rng.randrange(FIRST_PIECE, FIRST_PIECE + 500) for _ in range(period)]
        else:
            once = self.paragraphs(self.body(self.facts(2, 0.0), period))
        sample = Sample()
        self.hide(sample, (once * (length // len(once) + 1))[:length - 1], COPY)
        return sample

    def anywhere(self, length: int) -> Sample:
        """A document with masks anywhere."""
        sample = Sample()
        self.hide(sample, self.fill(self.facts(max(1, length // 32), 0.0), length - 1), ANYWHERE)
        return sample

    def row(self, length: int, mixture: DiffusionMixture) -> Row:
        """A training sample of exactly `length` tokens; each mask's target is the token under it."""
        draw = self.rng.random()
        if draw < mixture.repeat:
            sample = self.repeat(length)
        elif draw < mixture.repeat + mixture.anywhere:
            sample = self.anywhere(length)
        else:
            sample = self.recall(length, mixture)
        inputs = [MASK if weight else token for token, weight in zip(sample.ids, sample.weights)]
        return inputs, sample.ids, sample.weights, sample.asked
