# SPDX-License-Identifier: Apache-2.0
"""Converts `vocab.txt` to the files that Hugging Face's libraries read: `python hf_tokenizer.py ../model`.

Writes tokenizer.json, tokenizer_config.json, special_tokens_map.json and generation_config.json next to it. Needs
only the standard library.

Tokenization is expressed in terms that every engine supports: a pattern of all pieces splits the text where the
greedy match would. Each part is one entry of the vocabulary, or else a single character, which is split into
its bytes. No text matches a control token (`split_special_tokens`), and <bos> begins every prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vocabulary import BOS, CONTROL, EOS, FIRST_BYTE, FIRST_PIECE, PAD, Tokenizer

NAMES = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}


def names_of(vocabulary: Tokenizer) -> list[str]:
    """A name for each id, as in `vocab.txt`, but pieces as the text they stand for."""
    pieces = [piece.decode() for piece in vocabulary.bytes_of[FIRST_PIECE:]]
    names = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    if len(set(names)) != len(names):
        raise ValueError("two tokens have the same name")
    return names


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


def tokenizer_json(vocabulary: Tokenizer) -> dict:
    """In the format of the library `tokenizers`."""
    names = names_of(vocabulary)
    special = [{"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                "special": True} for i, name in enumerate(CONTROL)]
    bos = {"SpecialToken": {"id": CONTROL[BOS], "type_id": 0}}

    def text(which: str, number: int) -> dict:
        return {"Sequence": {"id": which, "type_id": number}}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern_of(tree_of(names[FIRST_PIECE:])) + r"|[\s\S]"},
                          "behavior": "Isolated", "invert": False},
        "post_processor": {
            "type": "TemplateProcessing", "single": [bos, text("A", 0)], "pair": [bos, text("A", 0), text("B", 1)],
            "special_tokens": {CONTROL[BOS]: {"id": CONTROL[BOS], "ids": [BOS], "tokens": [CONTROL[BOS]]}}},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": True, "ignore_merges": True,
                  "vocab": {name: i for i, name in enumerate(names)}, "merges": []},
    }


def files_of(vocabulary: Tokenizer, positions: int) -> dict[str, dict]:
    """The files to write next to `vocab.txt`, by name."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES, "model_max_length": positions,
              "split_special_tokens": True, "clean_up_tokenization_spaces": False, "add_prefix_space": False}
    return {"tokenizer.json": tokenizer_json(vocabulary), "tokenizer_config.json": config,
            "special_tokens_map.json": NAMES,
            "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}}


def texts_of(folder: Path) -> dict[str, str]:
    """The files' contents for the model in a folder."""
    positions = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    made = files_of(Tokenizer.load(folder / "vocab.txt"), positions)
    return {name: json.dumps(content, indent=1, ensure_ascii=True) + "\n" for name, content in made.items()}


def export(folder: Path) -> None:
    """Writes them next to `vocab.txt` and config.json."""
    for name, text in texts_of(folder).items():
        (folder / name).write_text(text, encoding="ascii")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    export(Path(sys.argv[1]))
