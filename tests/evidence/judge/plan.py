# SPDX-License-Identifier: Apache-2.0
"""What a run measures, in order, and what of it is there already. It knows nothing of models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from certainty import Recall

from .rows import FULL, Row
from .ruler import TASKS
from .store import Store

LOSS, SAID, TRIAL = "perplexity", "said again", "trial of "       # tasks' names in the store, besides those of TASKS
TRIALS, TRIED = 2, 1024     # questions of each task for the choice of a form, and their tokens, the same in all runs
ABLE = 0.5              # a task claims something if the full cache answers at least this share of it


@dataclass(frozen=True)
class Plan:
    """How much is asked. A text of perplexity has half of its tokens as context, and the others are scored."""

    lengths: tuple[int, ...]
    questions: int
    texts: int
    window: int         # tokens of a text
    quick: bool

    @staticmethod
    def of(quick: bool, lengths: tuple[int, ...] = ()) -> Plan:
        return (Plan(lengths or (1024,), 5, 6, 1024, True) if quick
                else Plan(lengths or (1024, 2048, 4096, 7800), 20, 16, 2048, False))


def numbers(n: int) -> list[str]:
    return [str(i) for i in range(n)]


def recall(store: Store, row: str, task: str, length: int, n: int) -> Recall | None:
    """A row's answers to the first n questions; None before all are there."""
    keys = [(row, task, length, question) for question in numbers(n)]
    if not n or not all(store.has(*key) for key in keys):
        return None
    return Recall(tuple(bool(store.get(*key)["right"]) for key in keys))


def able(store: Store, plan: Plan, length: int) -> list[str]:
    """The tasks that the full cache answers at this length, as far as it was asked."""
    full = {task: recall(store, FULL, task, length, plan.questions) for task in TASKS}
    return [task for task, it in full.items() if it and it.value >= ABLE]


def missing(store: Store, rows: list[Row], task: str, length: int, question: str) -> list[Row]:
    return [row for row in rows if not store.has(row.name, task, length, question)]


def form(store: Store, forms: list[str]) -> str:
    """The form of prompts in which the full cache answers most of the trials."""
    def answered(form: str) -> float:
        each = [recall(store, FULL, f"{TRIAL}{task}, {form}", TRIED, TRIALS) for task in TASKS]
        return sum(it.value for it in each if it)
    return max(forms, key=answered)


Ask = Callable[[list[Row], str, int, str], None]        # rows, task, length, question: asks and stores


def go(store: Store, plan: Plan, rows: Callable[[int], list[Row]], shared: list[Row], texts: list[str], ask: Ask,
       log: Callable[[str], None]) -> None:
    """Ask what is missing: texts of perplexity, and (of the rows in shared) text that is said again, then at each length all
    tasks of the full cache, and what it can answer of all rows."""
    def part(chosen: list[Row], task: str, length: int, questions: list[str]) -> None:
        for question in questions:
            left = missing(store, chosen, task, length, question)
            if left:
                log(f"{task}, {length} tokens, {question}: {len(left)} of {len(chosen)} rows")
                ask(left, task, length, question)

    part(rows(plan.window // 2), LOSS, plan.window // 2, texts)
    part(shared, SAID, plan.window // 2, texts)
    for length in plan.lengths:
        for task in TASKS:
            part([row for row in rows(length) if row.name == FULL], task, length, numbers(plan.questions))
        for task in able(store, plan, length):
            part(rows(length), task, length, numbers(plan.questions))
