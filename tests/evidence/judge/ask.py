# SPDX-License-Identifier: Apache-2.0
"""Prompts for the model, its greedy answers, and its loss on text behind a context."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from .ruler import Question

CHAT, PLAIN = "chat template", "completion"
ONE, NEW = 12, 32       # tokens of an answer, at most: if one thing is asked for, or several
MARK = "kvd-context"


class Continued(Protocol):
    """A context that was kept in some way."""

    def more(self, ids: list[int]) -> torch.Tensor: ...


class Prompts:
    """Questions as token ids: those of the context, and those behind it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.forms = [CHAT, PLAIN] if tokenizer.chat_template else [PLAIN]
        stop = tokenizer.eos_token_id
        self.stop = set(stop if isinstance(stop, list) else [stop])

    def ids(self, text: str, first: bool = False) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=first).input_ids)

    def count(self, text: str) -> int:
        return len(self.ids(text))

    def parts(self, question: Question, form: str) -> tuple[list[int], list[int]]:
        if form == PLAIN:
            return (self.ids(question.context, True),
                    self.ids(f"\n\nQuestion: {question.question}\nAnswer: {question.begin}"))
        chat = self.tokenizer.apply_chat_template([{"role": "user", "content": MARK}], add_generation_prompt=True,
                                                  tokenize=False)
        before, after = chat.split(MARK)
        return (self.ids(before + question.context), self.ids(f"\n\n{question.question}{after}{question.begin}"))

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def answer(kept: Continued, prompts: Prompts, question: list[int], one: bool) -> str:
    """The greedy answer, up to the end of its line if `one` thing is asked for."""
    ids = [int(kept.more(question)[-1].argmax())]
    while len(ids) < (ONE if one else NEW) and ids[-1] not in prompts.stop and not (one and "\n" in prompts.text(ids)):
        ids.append(int(kept.more(ids[-1:])[-1].argmax()))
    return prompts.text(ids)


def loss(kept: Continued, text: list[int]) -> float:
    """The mean negative log likelihood of a text's tokens but the first, in nats."""
    logits = kept.more(text)[:-1]
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:])))
