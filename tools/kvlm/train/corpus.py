"""Generates the training language: facts among fillers, and questions about them.

Everything is made of token ids from the start, because text would have to be tokenized again at
ten thousand tokens a second during training. Each token carries a loss weight: answers count
fully, tokens that cannot be predicted count little. Only recall carries the weight ANSWER, so that the
share of right answers means recall alone.

Two rules make recall learnable in an hour of CPU time. The asked name stands one token before the
answer, in the fact (" alder" " is" " 4") and in the question (" alder" "?\\nAnswer:" " 4"). And
many questions follow one short document, mixed with passages that repeat word by word: copying is
what attention must learn, and it learns from dense signal.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from functools import lru_cache

import vocabulary as v

ANSWER, REASON, COPY, PLAIN = 1.0, 0.6, 0.5, 0.08

TOKENS = v.Tokenizer.built_in()
NAME_IDS = [TOKENS.piece(" " + name) for name in v.NAMES]
DOT, COMMA, IS, NOBODY, NEWLINE, BLANK = (TOKENS.piece(p) for p in (".", ",", " is", " nobody", "\n", "\n\n"))
ASK, THEN_ANSWER = TOKENS.piece("Question:"), TOKENS.piece("?\nAnswer:")
_BARE = {TOKENS.piece(" " + word): TOKENS.piece(word) for word in v.OPENERS}

N_NUMBERS = 100
N_VALUES = 200
HELD_OUT = 10       # one pairing of name and value in ten is never shown in training
UNFINISHED = 0.25   # share of facts asked for by their own beginning instead of a question
# How a fact may begin, and how often.
LEADS = ((" The", " It was said that the", " Note that the", " In the evening it was said that the"), (12, 1, 1, 1))
STEP_WORDS = {2: "two", 3: "three", 4: "four"}


@lru_cache(maxsize=100_000)
def enc(text: str) -> tuple[int, ...]:
    """Cached encoding of a fixed phrase."""
    return tuple(TOKENS.encode(text))


def two_digits(number: int) -> str:
    """A number below 100 as the texts write it."""
    return f" {number // 10} {number % 10}"


@lru_cache(maxsize=None)
def value_ids(value: int) -> tuple[int, ...]:
    """A value is two tokens: two digits, or a shade and a colour."""
    if value < N_NUMBERS:
        return enc(two_digits(value))
    shade, colour = divmod(value - N_NUMBERS, 10)
    return enc(f" {v.SHADES[shade]} {v.COLOURS[colour]}")


def is_held_out(name: int, value: int) -> bool:
    """Whether the pairing is reserved for evaluation."""
    return (name * 7 + value * 13) % HELD_OUT == 0


@dataclass
class Fact:
    """"The RELATION of NAME is VALUE.", also after a lead, or, in the terse form, "Note NAME VALUE."."""

    relation: str
    name: int
    value: tuple[int, ...]
    terse: bool = False
    lead: str = " The"

    def sentence(self) -> tuple[int, ...]:
        start = " Note" if self.terse else f"{self.lead} {self.relation} of"
        return (*enc(start), *self.core(), DOT)

    def core(self) -> tuple[int, ...]:
        """Name and value as they stand in the document, which tells this fact from every other."""
        return (self.name, *self.value) if self.terse else (self.name, IS, *self.value)

    def question(self) -> tuple[int, ...]:
        """The line, up to the answer, that asks for the value."""
        if self.terse:
            return (*enc("Note"), self.name)
        return (ASK, *enc(f" What is the {self.relation} of"), self.name, THEN_ANSWER)

    def beginning(self) -> tuple[int, ...]:
        """The fact up to its value: asks for it by being left unfinished."""
        return self.question() if self.terse else (*enc(f"The {self.relation} of"), self.name, IS)

    def answer(self) -> tuple[int, ...]:
        return self.value


@dataclass
class Chain:
    """Heirs: each name leads to the next one, told in separate facts; the last one has no heir."""

    names: list[int]

    def facts(self) -> list[Fact]:
        """One fact per link."""
        return [Fact(v.HEIR, a, (b,)) for a, b in zip(self.names, [*self.names[1:], NOBODY])]

    def part(self, rng: random.Random) -> "Chain":
        """Two to four steps of it (fewer if it is shorter), for a question with a short answer."""
        steps = min(rng.choice(list(STEP_WORDS)), len(self.names) - 1)
        start = rng.randrange(len(self.names) - steps)
        return Chain(self.names[start:start + steps + 1])

    def question(self) -> tuple[int, ...]:
        steps = STEP_WORDS[len(self.names) - 1]
        return (ASK, *enc(f" What {steps} heirs of"), self.names[0], THEN_ANSWER)

    def answer(self) -> tuple[int, ...]:
        out: list[int] = []
        for name in self.names[1:]:
            out += [name, COMMA]
        return tuple(out[:-1])

    def task(self) -> tuple[int, ...]:
        """Asks for the end of the chain, to be found step by step."""
        return (ASK, *enc(" Who is the last heir of"), self.names[0], *enc("?\n\n"))

    def work(self) -> list[int]:
        """The steps, one paragraph each, the answer, and `<eos>`."""
        ids: list[int] = []
        for fact in self.facts():
            ids += [*enc("The heir of"), fact.name, IS, *fact.value, DOT, BLANK]
        return [*ids, *enc("Answer:"), self.names[-1], NEWLINE, v.EOS]


@dataclass
class Sum:
    """Small numbers added one after the other."""

    start: int
    digits: list[int]

    def task(self) -> tuple[int, ...]:
        terms = ",".join(f" {digit}" for digit in self.digits)
        return enc(f"Question: What is{two_digits(self.start)} and then{terms}?\n\n")

    def work(self) -> list[int]:
        """The running totals, one paragraph each, the answer, and `<eos>`."""
        total, steps = self.start, [f"Start with{two_digits(self.start)}."]
        for digit in self.digits:
            total += digit
            steps.append(f"Add {digit} to get{two_digits(total)}.")
        return [*enc("\n\n".join([*steps, f"Answer:{two_digits(total)}\n"])), v.EOS]


@dataclass
class Sample:
    """Token ids with the loss weight of predicting each of them."""

    ids: list[int] = field(default_factory=lambda: [v.BOS])
    weights: list[float] = field(default_factory=lambda: [0.0])

    def add(self, ids: tuple[int, ...] | list[int], weight: float) -> None:
        self.ids.extend(ids)
        self.weights.extend([weight] * len(ids))

    def fitted(self, length: int) -> "Sample":
        """Exactly `length` tokens: cut, or padded with weight 0."""
        missing = max(0, length - len(self.ids))
        return Sample(self.ids[:length] + [v.PAD] * missing, self.weights[:length] + [0.0] * missing)


class Writer:
    """Draws samples from one random stream; `held_out` chooses which pairings facts may use."""

    def __init__(self, seed: int | str, held_out: bool = False) -> None:
        self.rng = random.Random(seed)
        self.held_out = held_out

    def filler(self) -> tuple[int, ...]:
        """A sentence without facts."""
        pick, kind = self.rng.choice, self.rng.randrange(6)
        if kind == 0:
            text = f" The {pick(v.ADJECTIVES)} {pick(v.PEOPLE)} {pick(v.PAST)} to the {pick(v.PLACES)}"
        elif kind == 1:
            text = f" In the {pick(v.TIMES)} a {pick(v.PEOPLE)} {pick(v.DEEDS)} the {pick(v.THINGS)}"
        elif kind == 2:
            text = f" Near the {pick(v.PLACES)} it was {pick(v.ADJECTIVES)} and {pick(v.ADJECTIVES)}"
        elif kind == 3:
            text = f" A {pick(v.ADJECTIVES)} {pick(v.THINGS)} was seen by the {pick(v.PEOPLE)}"
        elif kind == 4:
            text = f" Nobody knew why the {pick(v.PEOPLE)} {pick(v.DEEDS)} a {pick(v.THINGS)}"
        else:
            text = f" Then the {pick(['rain', 'wind', 'snow'])} fell on the {pick(v.PLACES)} all day"
        ids: list[int] = []
        for word in text.split(" ")[1:]:
            ids.extend(enc(" " + word))
        return (*ids, DOT)

    def value_for(self, name: int, colours: bool) -> int:
        """A value whose pairing with the name belongs to this writer's side of the split."""
        low, high = (N_NUMBERS, N_VALUES) if colours else (0, N_NUMBERS)
        while True:
            value = self.rng.randrange(low, high)
            if is_held_out(name, value) == self.held_out:
                return value

    def fact(self, name: int, terse: bool, apart_from: str = "") -> Fact:
        """A fact about the name with this index, by another relation than the given one."""
        colours = self.rng.random() < 0.25
        relations = v.COLOUR_RELATIONS if colours else v.RELATIONS
        relation = self.rng.choice([r for r in relations if r != apart_from])
        value = value_ids(self.value_for(name, colours))
        return Fact(relation, NAME_IDS[name], value, terse, self.rng.choices(*LEADS)[0])

    def facts(self, count: int, terse_share: float) -> list[Fact]:
        """Facts about distinct names."""
        names = self.rng.sample(range(len(NAME_IDS)), count)
        return [self.fact(name, self.rng.random() < terse_share) for name in names]

    def paired_facts(self, count: int) -> list[Fact]:
        """Two facts about each name: the name alone does not tell which value is asked for."""
        facts = []
        for name in self.rng.sample(range(len(NAME_IDS)), (count + 1) // 2):
            one = self.fact(name, False)
            facts += [one, self.fact(name, False, apart_from=one.relation)]
        return facts

    def chain(self, steps: int, taken: set[int]) -> Chain:
        """A chain over names that no fact of the document uses."""
        free = [name for name in NAME_IDS if name not in taken]
        return Chain(self.rng.sample(free, steps + 1))

    def body(self, facts: list[Fact], length: int, repeats: float = 0.1) -> list[tuple[int, ...]]:
        """Fact sentences at random places among fillers, `length` tokens or a little less in all."""
        sentences = [fact.sentence() for fact in facts]
        sentences += [s for s in sentences if self.rng.random() < repeats]
        total = sum(map(len, sentences))
        while True:
            filler = self.filler()
            if total + len(filler) + len(sentences) // 8 > length:
                break
            sentences.append(filler)
            total += len(filler)
        self.rng.shuffle(sentences)
        return sentences

    def paragraphs(self, sentences: list[tuple[int, ...]]) -> list[int]:
        """Joins sentences; a blank line now and then, after which no space leads."""
        ids: list[int] = []
        opening = True
        for sentence in sentences:
            if opening:
                sentence = (_BARE.get(sentence[0], sentence[0]), *sentence[1:])
            ids.extend(sentence)
            opening = self.rng.random() < 0.12
            if opening:
                ids.append(BLANK)
        return ids[:-1] if opening else ids

    # One method per kind of training sample.

    def document(self, length: int, terse_share: float, density: float, steps: int,
                 paired_share: float = 0.0) -> tuple[list[int], list[Fact], Chain]:
        """Facts (`density` is their share of the tokens) and one chain of heirs among fillers, `length` tokens."""
        count = max(1, min(120, int(length * density / 8) - steps))
        paired = self.rng.random() < paired_share
        facts = self.paired_facts(count) if paired else self.facts(count, terse_share)
        chain = self.chain(steps, {fact.name for fact in facts})
        told = facts + (chain.facts() if steps else [])
        return [*self.paragraphs(self.body(told, length)), NEWLINE], told, chain

    def recall(self, length: int, terse_share: float, density: float, paired_share: float = 0.0) -> Sample:
        """A document and then questions up to the end."""
        body_length = int(length * self.rng.uniform(0.35, 0.85))
        longest = min(8, length // 64)
        steps = self.rng.randint(2, longest) if longest >= 2 and self.rng.random() < 0.5 else 0
        ids, told, chain = self.document(body_length, terse_share, density, steps, paired_share)
        pool: list[Fact | Chain] = list(told)
        if steps:
            pool += [chain.part(self.rng) for _ in range(1 + len(told) // 8)]
        sample = Sample()
        sample.add(ids, PLAIN)
        self.rng.shuffle(pool)
        for asked in itertools.cycle(pool):     # in turn, since a question that is asked again answers itself
            if len(sample.ids) >= length:
                return sample
            if isinstance(asked, Fact) and self.rng.random() < UNFINISHED:
                sample.add(asked.beginning(), PLAIN)
            else:
                sample.add(asked.question(), PLAIN)
            sample.add(asked.answer(), ANSWER)
            sample.add((NEWLINE,), COPY)
        raise AssertionError("the pool is never empty")

    def repeat(self, length: int) -> Sample:
        """Random tokens or sentences, repeated word by word until the sample is full."""
        period = self.rng.randint(8, max(9, length // 2))
        if self.rng.random() < 0.6:
            low = v.FIRST_BYTE if self.rng.random() < 0.2 else v.FIRST_PIECE
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
            added = self.sum()
            sample.add(added.task(), PLAIN)
            sample.add(added.work(), REASON)
        return sample

    def sum(self) -> Sum:
        """A sum below 100 whose digits differ, so that each one determines the next."""
        return Sum(self.rng.randrange(50), self.rng.sample(range(10), self.rng.randint(2, 5)))

    def sample(self, length: int, stage: "Mixture") -> Sample:
        """One training sample of exactly `length` tokens."""
        draw = self.rng.random()
        if draw < stage.repeat:
            made = self.repeat(length)
        elif draw < stage.repeat + stage.steps:
            made = self.steps(length)
        else:
            made = self.recall(length, stage.terse, self.rng.uniform(*stage.density), stage.paired)
        return made.fitted(length)


@dataclass(frozen=True)
class Mixture:
    """Shares of the kinds of samples (what is left is recall) and how recall documents are made."""

    repeat: float
    steps: float
    terse: float
    density: tuple[float, float]
    paired: float = 0.0
