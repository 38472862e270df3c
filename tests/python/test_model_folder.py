# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of tools/kvlm/model and its files for Hugging Face's libraries are those that language.py makes.

Needs only the standard library. test_hf_equality.py checks with transformers that they are equivalent to vocab.txt.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tools/kvlm/model"
sys.path.insert(0, str(ROOT / "tools/kvlm"))

from language import hugging_face_files, pattern_of, tree_of, vocab_txt      # noqa: E402  (needs the path above)


def stale(folder: Path) -> list[str]:
    made = {"vocab.txt": vocab_txt(), **hugging_face_files()}
    return [name for name, text in made.items() if (folder / name).read_text() != text]


def first_match(pieces: list[str], text: str) -> str:
    pattern = re.sub(r"\\x\{([0-9A-F]+)\}", lambda hexadecimal: re.escape(chr(int(hexadecimal[1], 16))),
                     pattern_of(tree_of(pieces)))
    found = re.match(pattern, text)
    return found[0] if found else ""


def main() -> int:
    wrong = [f"{MODEL / name} differs from the output of tools/kvlm/language.py" for name in stale(MODEL)]
    pieces = ["a", "abc", "abcde", "?", "?\nA", " ", "\\", "xyz"]
    for text, longest in {"abcdX": "abc", "abcde": "abcde", "abX": "a", "?\nB": "?", "?\nA": "?\nA", "xy": "",
                          "\\x": "\\", "  ": " ", "b": ""}.items():
        if first_match(pieces, text) != longest:
            wrong.append(f"in {text!r} the pattern matches {first_match(pieces, text)!r}, not {longest!r}")
    print("\n".join(wrong) or "ok")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
