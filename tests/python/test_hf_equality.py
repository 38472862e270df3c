"""Compares kvlm with transformers: the same weights must give the same logits, the same text the same ids.

    KVLM=build/tools/kvlm/kvlm python tests/python/test_hf_equality.py [--model DIR]

Exit status 77 means skipped: no KVLM, or no torch or transformers here.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/kvlm"))

SKIPPED = 77
# Logits reach about 15. Float32 sums in another order differ by about 1e-4 there, because sharp
# attention amplifies the rotation's rounding errors at far positions.
ABSOLUTE, RELATIVE = 2e-3, 2e-4


def skip(why: str) -> None:
    print(f"skipped: {why}")
    sys.exit(SKIPPED)


try:
    import numpy as np
    import torch
    import transformers
except ImportError as missing:
    skip(f"{missing.name} is not installed")

from language import BOS, EOS, PIECES, TOKENS, Writer, enc      # noqa: E402  (needs the path above)

TEXTS = [
    "",
    "The code of alder is 4 7.",
    " The code of alder is 4 7.\n\nNote birch 0 9.\nQuestion: What is the code of alder?\nAnswer:",
    "alder alderwood unalder ALDER  alder   \t\tthe\r\n",
    "\n\n\n\n \n \n\n?\nAnswer:?\nAnswe",
    "Grüße aus Köln, 日本語, 🦉 and e\u0301.",
    "<bos><eos><0x41><pad>",
    "back\\slash \\n \\x41 \"quoted\" 'single'",
]
ODD_BYTES = [bytes(range(256)), bytes(range(255, -1, -1)), b"\xff\xfe the \x80\x00 code\x00\xc3", b"\x00", b"\xe6\x97"]


class Kvlm:
    """The program under test."""

    def __init__(self, program: str, model: Path) -> None:
        self.command = [program, "--model", str(model)]

    def tokenize(self, data: bytes) -> list[int]:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            done = subprocess.run([*self.command, "--tokenize", file.name], stdout=subprocess.PIPE, check=True)
        return [int(word) for word in done.stdout.split()]

    def logits(self, ids: list[int], vocab: int) -> np.ndarray:
        with tempfile.TemporaryDirectory() as folder:
            tokens, out = Path(folder, "tokens"), Path(folder, "logits")
            tokens.write_text(" ".join(map(str, ids)) + "\n")
            subprocess.run([*self.command, "--tokens", str(tokens), "--logits", str(out), "--no-share"],
                           stdout=subprocess.DEVNULL, check=True)
            return np.fromfile(out, dtype="<f4").reshape(len(ids), vocab)


def prompts(vocab: int) -> dict[str, list[int]]:
    """Prompts of 1 to 2,000 tokens, of the training language and of noise."""
    writer = Writer("equality", held_out=True)
    document, told, chain = writer.document(1950, 0.2, 0.4, 6)
    question = told[0].question() + told[0].answer() + enc("\n") + chain.task()
    noise = random.Random(7)
    return {
        "bos alone": [BOS],
        "a fact and its question": [BOS, *told[1].sentence(), *enc("\n"), *told[1].question()],
        "a chain of heirs in steps": [BOS, *document[:200], *enc("\n"), *chain.task(), *chain.work()],
        "300 random ids": [noise.randrange(vocab) for _ in range(300)],
        "2,000 tokens": [BOS, *document, *question, *chain.work(), EOS][:2000],
    }


def check_logits(kvlm: Kvlm, folder: Path) -> list[str]:
    """Returns the errors in logits, and prints a line of figures per prompt."""
    reference = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    vocab, wrong = reference.config.vocab_size, []
    for name, ids in prompts(vocab).items():
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0].numpy()
        got = kvlm.logits(ids, vocab)
        error = np.abs(got - expected)
        flipped = int((got.argmax(-1) != expected.argmax(-1)).sum())
        print(f"logits: {name}: {len(ids)} tokens, greatest difference {error.max():.2e}, {flipped} other choices")
        if not (error <= ABSOLUTE + RELATIVE * np.abs(expected)).all() or error.max() > ABSOLUTE or flipped:
            wrong.append(f"logits of '{name}' differ")
    return wrong


def check_tokenizer(kvlm: Kvlm) -> list[str]:
    """Returns the errors in token ids."""
    wrong = []
    samples = [text.encode() for text in TEXTS] + ODD_BYTES
    samples += [path.read_bytes() for path in sorted((ROOT / "tools/kvlm/demo").glob("document-*.txt"))]
    for data in samples:
        expected = TOKENS.encode(data)
        assert b"".join(TOKENS.bytes_of[i] for i in expected) == data
        if kvlm.tokenize(data) != expected:
            wrong.append(f"token ids of {data[:60]!r} differ")
    print(f"tokenizer: {len(samples)} texts compared")
    return wrong


def check_auto_tokenizer(folder: Path) -> list[str]:
    """Returns the errors in the folder's tokenizer.json, as engines load it."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    every = ["".join(map(chr, range(start, start + 0x100))) for start in (*range(0, 0x900, 0x100), 0x2000, 0x1F600)]
    noise = random.Random(11)
    mixed = ["".join(noise.choice(PIECES)[noise.randrange(2):] for _ in range(200)) for _ in range(50)]
    documents = [path.read_text() for path in sorted((ROOT / "tools/kvlm/demo").glob("document-*.txt"))]
    wrong, texts = [], TEXTS + every + mixed + documents
    for text in texts:
        ids = theirs(text).input_ids
        if ids != [BOS, *TOKENS.encode(text)]:
            wrong.append(f"AutoTokenizer's ids of {text[:60]!r} differ")
        if theirs.decode(ids, skip_special_tokens=True) != text:
            wrong.append(f"AutoTokenizer does not restore {text[:60]!r}")
    for token, data in enumerate(TOKENS.bytes_of):
        if theirs.decode([token], skip_special_tokens=True) != data.decode(errors="replace"):
            wrong.append(f"AutoTokenizer decodes token {token} differently")
    print(f"tokenizer.json: {len(texts)} texts and {len(TOKENS)} tokens compared")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "tools/kvlm/model")
    options = parser.parse_args()
    if "KVLM" not in os.environ:
        skip("KVLM does not name the program")
    kvlm = Kvlm(os.environ["KVLM"], options.model)
    wrong = check_tokenizer(kvlm) + check_auto_tokenizer(options.model) + check_logits(kvlm, options.model)
    print("\n".join(wrong) or "ok")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
