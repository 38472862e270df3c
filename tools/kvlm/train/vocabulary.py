"""The word lists of the training language and the tokenizer built from them.

The vocabulary is the model's contract with the C engine, which reads `vocab.txt` and nothing else.
Line number = token id. Ids 0..3 are control tokens that text never matches, 4..259 the single
bytes, and from 260 on come the pieces. Encoding takes the longest piece at each byte position and
falls back to the byte itself, so every byte string can be encoded and decoded again.
"""

from __future__ import annotations

from pathlib import Path

PAD, BOS, EOS, UNK = range(4)
CONTROL = ("<pad>", "<bos>", "<eos>", "<unk>")
FIRST_BYTE = len(CONTROL)
FIRST_PIECE = FIRST_BYTE + 256

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


def _pieces() -> list[str]:
    """All pieces in id order, without duplicates."""
    spaced = (DIGITS + NAMES + RELATIONS + [HEIR] + SHADES + COLOURS + COLOUR_RELATIONS + ADJECTIVES + PEOPLE
              + PAST + DEEDS + THINGS + PLACES + TIMES + GLUE + OPENERS)
    ordered = PUNCTUATION + PHRASES + DIGITS + OPENERS + [" " + word for word in spaced]
    return list(dict.fromkeys(ordered))


def _escape(raw: bytes) -> str:
    """Writes a piece on one line: printable ASCII as is, the rest escaped."""
    named = {0x0A: "\\n", 0x09: "\\t", 0x5C: "\\\\"}
    return "".join(named.get(b) or (chr(b) if 0x20 <= b < 0x7F else f"\\x{b:02X}") for b in raw)


def _unescape(line: str) -> bytes:
    """Inverse of `_escape`."""
    out, i = bytearray(), 0
    while i < len(line):
        if line[i] != "\\":
            out += line[i].encode()
            i += 1
        elif line[i + 1] == "x":
            out.append(int(line[i + 2:i + 4], 16))
            i += 4
        else:
            out += {"n": b"\n", "t": b"\t", "\\": b"\\"}[line[i + 1]]
            i += 2
    return bytes(out)


class Tokenizer:
    """Greedy longest match over bytes; the reference for the one in C."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.bytes_of: list[bytes] = [b""] * FIRST_BYTE + [bytes([b]) for b in range(256)] + pieces
        self._id_of = {piece: FIRST_PIECE + i for i, piece in enumerate(pieces)}
        self._longest = max(map(len, pieces))

    def __len__(self) -> int:
        return len(self.bytes_of)

    @classmethod
    def built_in(cls) -> "Tokenizer":
        """The tokenizer of the word lists above."""
        return cls([piece.encode() for piece in _pieces()])

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Reads `vocab.txt`."""
        lines = path.read_text(encoding="ascii").split("\n")[:-1]
        return cls([_unescape(line) for line in lines[FIRST_PIECE:]])

    def save(self, path: Path) -> None:
        """Writes `vocab.txt`."""
        lines = list(CONTROL) + [f"<0x{b:02X}>" for b in range(256)]
        lines += [_escape(piece) for piece in self.bytes_of[FIRST_PIECE:]]
        path.write_text("\n".join(lines) + "\n", encoding="ascii")

    def piece(self, text: str) -> int:
        """The id of exactly this piece."""
        return self._id_of[text.encode()]

    def encode(self, text: str | bytes) -> list[int]:
        """Token ids of the text, without `<bos>`."""
        data = text.encode() if isinstance(text, str) else text
        ids, at = [], 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                token = self._id_of.get(data[at:at + length])
                if token is not None:
                    break
            else:
                token, length = FIRST_BYTE + data[at], 1
            ids.append(token)
            at += length
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of the ids; control tokens are silent."""
        return b"".join(self.bytes_of[i] for i in ids).decode(errors="replace")
