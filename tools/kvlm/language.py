# SPDX-License-Identifier: Apache-2.0
"""The language of kvlm's models: vocabulary, tokenizer, documents that hold facts among fillers, and questions.

Everything is made of token ids from the start, because tokenizing text again would slow training down. Standard
library only. The engine reads nothing but `vocab.txt`, whose line number is the token id: ids 0 to 3 are control tokens
that text never matches, 4 to 259 the single bytes, and from 260 on come the pieces. Encoding takes the longest piece at
each byte position and falls back to the byte itself, so every byte string can be encoded and decoded again.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from functools import cache

POSITIONS = 4096        # the longest input of the models
PAD, BOS, EOS, UNK = range(4)
CONTROL = ("<pad>", "<bos>", "<eos>", "<unk>")
FIRST_BYTE = len(CONTROL)
FIRST_PIECE = FIRST_BYTE + 256

# ---- words -----------------------------------------------------------------------------------------------------------

DIGITS = "0 1 2 3 4 5 6 7 8 9".split()

# The names that facts are about: 256, so that a pairing of name and value is rarely seen twice.
NAMES = """
alder almond apple ash aspen bamboo banyan beech birch boxwood briar catalpa cedar cherry chestnut citron clover
cypress damson dogwood ebony elder elm fern fig fir gorse hazel heather hemlock hickory holly hornbeam ivy jasmine
juniper kapok larch laurel lilac lime linden lotus magnolia mahogany mango maple medlar mimosa mulberry myrtle nettle
nutmeg oak olive orchid osier palm papaya peach pear pecan pine plane plum poplar quince redwood rose rowan rubber
sallow sandal sequoia sloe sorrel spruce sumac sycamore tamarind teak thistle thorn tulip viburnum walnut wattle willow
wisteria yarrow yew zinnia
adder badger beaver bison bittern boar bobcat buzzard camel caribou cobra condor coyote crane cricket crow cuckoo
dingo dolphin dove eagle egret falcon ferret finch fox gannet gecko gibbon goose grouse gull hare hawk heron hornet
ibex ibis jackal jaguar kestrel kite lark lemur leopard linnet lizard llama lynx magpie marmot marten merlin mole
moose newt ocelot osprey otter owl panda parrot pelican petrel pigeon plover puffin puma quail rabbit raven robin
salmon seal shrew skunk snipe sparrow stoat stork swan swift tapir tern thrush tiger toad toucan trout turtle viper
vole vulture walrus weasel whale wolf wombat wren zebra
agate amber basalt beryl bronze chalk cobalt copper coral crystal diamond emerald flint garnet granite gypsum iron
jade jasper lapis marble mica nickel obsidian onyx opal pearl pewter platinum pumice pyrite quartz ruby sapphire
shale silver slate sulphur talc tin topaz turquoise zinc zircon barley basil cumin ginger mint oregano pepper saffron
""".split()

RELATIONS = "code number price weight gate badge locker ticket".split()
HEIR = "heir"

# Word values: a shade and a colour, two tokens like the two digits of a number value.
SHADES = "dark pale bright dull deep soft warm cold faded vivid".split()
COLOURS = "red green blue yellow purple orange brown grey white black".split()
COLOUR_RELATIONS = "colour ribbon lamp flag".split()

ADJECTIVES = """old young quiet tall small clever tired proud gentle early late busy happy careful slow quick heavy
strange famous plain""".split()
PEOPLE = """sailor baker miller doctor teacher painter farmer weaver clerk guard pilot singer tailor porter judge
driver builder student hunter gardener""".split()
PAST = """walked travelled returned hurried moved sailed rode drifted wandered came""".split()
DEEDS = """carried sold found lost painted repaired borrowed opened closed counted""".split()
THINGS = """basket wagon letter bottle candle mirror hammer kettle blanket ladder barrel saddle violin compass lantern
table""".split()
PLACES = """harbour market village bridge castle forest river valley island station garden library mill tower church
field""".split()
TIMES = """morning evening winter summer spring autumn night afternoon""".split()
GLUE = """the of is to in at and a was with from by for on it that then near before after because nobody knew why
rain wind snow sun fell rose all day again what add get next heirs steps start two three four five six said
nothing heard seen well known long last heir""".split()

# Words that open a sentence exist both with a leading space and without (opening a paragraph).
OPENERS = "The A In At Near Note Start Add Step It Nobody Then What Who When After Before".split()
PUNCTUATION = [".", ",", ":", ";", "!", "?", "-", "'", "\"", "(", ")", "\n", "\n\n", " "]
# "?\nAnswer:" is one piece: it keeps the asked name one token before its answer.
PHRASES = ["Question:", "Answer:", "?\nAnswer:"]

SPACED = (DIGITS + NAMES + RELATIONS + [HEIR] + SHADES + COLOURS + COLOUR_RELATIONS + ADJECTIVES + PEOPLE + PAST + DEEDS
          + THINGS + PLACES + TIMES + GLUE + OPENERS)
# All pieces in id order, without duplicates.
PIECES = list(dict.fromkeys(PUNCTUATION + PHRASES + DIGITS + OPENERS + [" " + word for word in SPACED]))


# ---- tokenizer -------------------------------------------------------------------------------------------------------


class Tokenizer:
    """Greedy longest match over bytes; the reference for the one in C."""

    def __init__(self) -> None:
        self.names = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
        self.bytes_of = [b""] * FIRST_BYTE + [bytes([b]) for b in range(256)] + [p.encode() for p in PIECES]
        self._id_of = {data: token for token, data in enumerate(self.bytes_of)}     # pieces before bytes
        longest_first = sorted(self.bytes_of[FIRST_PIECE:], key=len, reverse=True)
        self._parts = re.compile(b"|".join(map(re.escape, longest_first)) + b"|.", re.DOTALL)

    def __len__(self) -> int:
        return len(self.bytes_of)

    def piece(self, text: str) -> int:
        """The id of exactly this piece."""
        return self._id_of[text.encode()]

    def encode(self, text: str | bytes) -> list[int]:
        """Token ids of the text, without `<bos>`."""
        return [self._id_of[part] for part in self._parts.findall(text.encode() if isinstance(text, str) else text)]

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        """Text of the ids; control tokens are silent."""
        return b"".join(self.bytes_of[i] for i in ids).decode(errors="replace")


TOKENS = Tokenizer()


def tree_of(pieces: list[str]) -> dict:
    """A tree of the pieces by their first characters; an empty string marks the end of a piece."""
    tree: dict = {}
    for piece in pieces:
        node = tree
        for character in piece:
            node = node.setdefault(character, {})
        node[""] = {}
    return tree


def pattern_of(tree: dict) -> str:
    """Matches the longest piece: continues while a longer one is possible, then backtracks to where one ended."""
    ways = [(c if c.isalnum() else f"\\x{{{ord(c):X}}}") + pattern_of(below) for c, below in tree.items() if c]
    if not ways:
        return ""
    pattern = ways[0] if len(ways) == 1 and "" not in tree else f"(?:{'|'.join(ways)})"
    return pattern + "?" if "" in tree else pattern


def tokenizer_json() -> dict:
    """In the format of the library `tokenizers`, in terms that every engine supports.

    A pattern of all pieces splits the text where the greedy match would. Each part is one entry of the vocabulary, or
    else a single character, which is split into its bytes. No text matches a control token (`split_special_tokens`),
    and <bos> begins every prompt.
    """
    special = [{"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                "special": True} for i, name in enumerate(CONTROL)]
    bos = {"SpecialToken": {"id": CONTROL[BOS], "type_id": 0}}
    first, second = ({"Sequence": {"id": which, "type_id": i}} for i, which in enumerate("AB"))
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern_of(tree_of(PIECES)) + r"|[\s\S]"},
                          "behavior": "Isolated", "invert": False},
        "post_processor": {
            "type": "TemplateProcessing", "single": [bos, first], "pair": [bos, first, second],
            "special_tokens": {CONTROL[BOS]: {"id": CONTROL[BOS], "ids": [BOS], "tokens": [CONTROL[BOS]]}}},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": True, "ignore_merges": True,
                  "vocab": {name: i for i, name in enumerate(TOKENS.names)}, "merges": []},
    }


def vocab_txt() -> str:
    return "".join(name.replace("\n", "\\n") + "\n" for name in TOKENS.names)


def hugging_face_files() -> dict[str, str]:
    """The files that Hugging Face's libraries and engines read in addition to the weights and config.json, by name."""
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "model_max_length": POSITIONS,
              "split_special_tokens": True, "clean_up_tokenization_spaces": False, "add_prefix_space": False}
    made = {"tokenizer.json": tokenizer_json(), "tokenizer_config.json": config, "special_tokens_map.json": special,
            "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}}
    return {name: json.dumps(content, indent=1) + "\n" for name, content in made.items()}


# ---- facts and chains ------------------------------------------------------------------------------------------------

NAME_IDS = [TOKENS.piece(" " + name) for name in NAMES]
DOT, COMMA, IS, NOBODY, NEWLINE, BLANK = (TOKENS.piece(p) for p in (".", ",", " is", " nobody", "\n", "\n\n"))
ASK, THEN_ANSWER = TOKENS.piece("Question:"), TOKENS.piece("?\nAnswer:")
_BARE = {TOKENS.piece(" " + word): TOKENS.piece(word) for word in OPENERS}

N_NUMBERS = 100
N_VALUES = 200
HELD_OUT = 10       # one pairing of name and value in ten is never shown in training
# How a fact may begin, and how often.
LEADS = ((" The", " It was said that the", " Note that the", " In the evening it was said that the"), (12, 1, 1, 1))
STEP_WORDS = {2: "two", 3: "three", 4: "four"}


@cache
def enc(text: str) -> tuple[int, ...]:
    """Cached encoding of a fixed phrase."""
    return tuple(TOKENS.encode(text))


def two_digits(number: int) -> str:
    """A number below 100 as the texts write it."""
    return f" {number // 10} {number % 10}"


@cache
def value_ids(value: int) -> tuple[int, ...]:
    """A value is two tokens: two digits, or a shade and a colour."""
    if value < N_NUMBERS:
        return enc(two_digits(value))
    shade, colour = divmod(value - N_NUMBERS, 10)
    return enc(f" {SHADES[shade]} {COLOURS[colour]}")


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
        return [Fact(HEIR, a, (b,)) for a, b in zip(self.names, [*self.names[1:], NOBODY])]

    def part(self, rng: random.Random) -> "Chain":
        """Two to four steps of it (fewer if it is shorter), for a question with a short answer."""
        steps = min(rng.choice(list(STEP_WORDS)), len(self.names) - 1)
        start = rng.randrange(len(self.names) - steps)
        return Chain(self.names[start:start + steps + 1])

    def question(self) -> tuple[int, ...]:
        steps = STEP_WORDS[len(self.names) - 1]
        return (ASK, *enc(f" What {steps} heirs of"), self.names[0], THEN_ANSWER)

    def answer(self) -> tuple[int, ...]:
        return tuple(i for name in self.names[1:] for i in (name, COMMA))[:-1]

    def task(self) -> tuple[int, ...]:
        """Asks for the end of the chain, to be found step by step."""
        return (ASK, *enc(" Who is the last heir of"), self.names[0], *enc("?\n\n"))

    def work(self) -> list[int]:
        """The steps, one paragraph each, the answer, and `<eos>`."""
        ids: list[int] = []
        for fact in self.facts():
            ids += [*enc("The heir of"), fact.name, IS, *fact.value, DOT, BLANK]
        return [*ids, *enc("Answer:"), self.names[-1], NEWLINE, EOS]


# ---- documents -------------------------------------------------------------------------------------------------------

FILLERS = (("The", ADJECTIVES, PEOPLE, PAST, "to the", PLACES), ("In the", TIMES, "a", PEOPLE, DEEDS, "the", THINGS),
           ("Near the", PLACES, "it was", ADJECTIVES, "and", ADJECTIVES),
           ("A", ADJECTIVES, THINGS, "was seen by the", PEOPLE), ("Nobody knew why the", PEOPLE, DEEDS, "a", THINGS),
           ("Then the", ["rain", "wind", "snow"], "fell on the", PLACES, "all day"))


class Writer:
    """Draws sentences from one random stream; `held_out` chooses which pairings facts may use."""

    def __init__(self, seed: int | str, held_out: bool = False) -> None:
        self.rng = random.Random(seed)
        self.held_out = held_out

    def filler(self) -> tuple[int, ...]:
        """A sentence without facts."""
        parts = self.rng.choice(FILLERS)
        text = " ".join(part if isinstance(part, str) else self.rng.choice(part) for part in parts)
        return (*(i for word in text.split(" ") for i in enc(" " + word)), DOT)

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
        relations = COLOUR_RELATIONS if colours else RELATIONS
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

    def document(self, length: int, terse_share: float, density: float, steps: int,
                 paired_share: float = 0.0) -> tuple[list[int], list[Fact], Chain]:
        """Facts (`density` is their share of the tokens) and one chain of heirs among fillers, `length` tokens."""
        count = max(1, min(120, int(length * density / 8) - steps))
        paired = self.rng.random() < paired_share
        facts = self.paired_facts(count) if paired else self.facts(count, terse_share)
        chain = self.chain(steps, {fact.name for fact in facts})
        told = facts + (chain.facts() if steps else [])
        return [*self.paragraphs(self.body(told, length)), NEWLINE], told, chain


# ---- held-out questions ----------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A document and a question about it, the expected answer, and where the fact is."""

    prompt: list[int]
    answer: list[int]
    depth: float


def find(ids: list[int], needle: tuple[int, ...]) -> int:
    """Position of the sequence in the ids."""
    return next(i for i in range(len(ids)) if tuple(ids[i:i + len(needle)]) == needle)


def recall_case(writer: Writer, length: int, terse: bool) -> Case:
    """One fact asked for, all facts in the same phrasing mixture as in training."""
    count = max(2, min(120, int(length * writer.rng.uniform(0.15, 0.6) / 8)))
    asked = writer.fact(writer.rng.randrange(len(NAMES)), terse)
    others = [f for f in writer.facts(count, 0.2) if f.name != asked.name]
    ids = [BOS, *writer.paragraphs(writer.body([asked, *others], length - 12, repeats=0.0)), NEWLINE]
    return Case(ids + list(asked.question()), list(asked.answer()), find(ids, asked.core()) / len(ids))
