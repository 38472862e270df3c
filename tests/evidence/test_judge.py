# SPDX-License-Identifier: Apache-2.0
"""The judge of tools/evidence --model without a model: its texts and tasks, its store after a cut, what it asks for,
and its verdicts and page from a made-up result."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import numpy    # noqa: F401 (certainty needs it)
except ImportError:
    print("skipped: no numpy")
    sys.exit(77)

from certainty import Recall
from findings import FAILS, HOLDS, NOT_SHOWN, NOT_TRIED
from judge import again, plan, results, rows, ruler, texts
from judge.rows import FULL, FULL_POOL, KVD, Row, name
from judge.store import Store
from page import page

ROOT = Path(__file__).resolve().parents[2]
PROSE = texts.sentences(texts.read(texts.standard(ROOT)))


def words(text: str) -> int:
    return len(text.split())


def test_prose_is_prose() -> None:
    manual = ('.\\" no\n.Sh NAME\n.Nm kvd\n.Nd a daemon\n.Pp\n.Nm\n\\fIowns\\fP memory of\n.Ql 4\\-bit\nnumbers\n'
              '.Pq see Xr kvd 8 .\n')
    assert texts.plain(manual) == "kvd a daemon\n\nkvd owns memory of 4-bit numbers see kvd 8."
    assert len(PROSE) > 300 and not [it for it in PROSE if "\\f" in it or it.startswith(".")]


def test_windows_take_turns_and_do_not_overlap() -> None:
    found = texts.windows({"long": list(range(100)), "short": list(range(25)), "none": []}, 20, 5)
    assert [it for it, _ in found] == ["long 0", "short 0", "long 1", "long 2", "long 3"]
    assert found[2][1] == list(range(20, 40)) and all(len(ids) == 20 for _, ids in found)


def test_an_answer_is_hidden_once() -> None:
    for task in ruler.TASKS:
        for number in range(5):
            it = ruler.question(task, PROSE, 700, words, number)
            assert it == ruler.question(task, PROSE, 700, words, number), f"{task} is not the same again"
            assert it != ruler.question(task, PROSE, 700, words, number + 1)
            assert 0.85 * 700 < words(it.context) <= 700, f"{task} has {words(it.context)} words"
            assert it.right(f": {', '.join(it.answers)}.")
            assert not it.right("none") and not it.right(it.answers[0] + "0")
            tracked = {"common words": ruler.REPEATS}
            for i, answer in enumerate(it.answers):
                expected = tracked.get(task, 2 if task == "variable tracking" and i < len(it.answers) - 1 else 1)
                there = re.findall(r"\w+", it.context).count(answer)
                assert there == expected, f"{answer} is {there} times in {task}"


def test_several_answers_are_all_wanted() -> None:
    it = ruler.question("several values", PROSE, 300, words, 0)
    assert len(it.answers) == 2 and not it.right(it.answers[0]) and it.right(" ".join(reversed(it.answers)))


def test_bytes_are_counted() -> None:
    """Scales and least numbers of 16 bits: 4 bytes for the 64 numbers of a head's key."""
    sizes = {it.dtype: it.bytes(64) for it in rows.ROWS if it.dtype}
    assert sizes == {"int8": (64 + 4) / 128, "int4": (32 + 4) / 128, "fp8": 64 / 128}
    assert Row("", rows.POOL, 0.25).bytes(64) == 0.25


def test_rows_have_names_of_their_own() -> None:
    assert len({it.name for it in rows.ROWS}) == len(rows.ROWS)
    short, long = ({it.name for it in rows.chosen(False, n, rows.PRESSES)} for n in (1024, 7800))
    assert {it.name for it in rows.ROWS} == long > short
    assert not any("kvpress" in it.name for it in rows.chosen(True, 1024, []))


def test_only_some_rows_are_measured_beside_the_full_cache() -> None:
    some = {it.name for it in rows.chosen(True, 1024, rows.PRESSES, ["int4", "SnapKV (kvpress), 50%"])}
    assert some == {rows.FULL, rows.SMALLER.format("int4"), rows.name("SnapKV (kvpress)", 0.5)}
    assert not rows.is_wanted(rows.SHARED, ["int4"]) and rows.is_wanted(rows.SHARED, [])


SMALL = plan.Plan((1024, 7800), 8, 4, 64, False)
TEXTS = ["a 0", "a 1", "b 0", "b 1"]


def asked(store: Store, right: Callable[[Row, str, int], bool], most: int = 1 << 30) -> int:
    """Runs the plan with made-up answers, until so many were given. Returns their number."""
    count = 0

    def ask(chosen: list[Row], task: str, length: int, question: str) -> None:
        nonlocal count
        for row in chosen:
            if count == most:
                raise KeyboardInterrupt
            count += 1
            lost = (1 - row.share) / 5 + (0.01 if row.dtype == "int4" else 0) + len(question) / 100 + int(question[-1]) / 10
            made: dict[str, Any] = {"loss": 3 + lost}
            if task == plan.SAID:
                made |= {"plain": 3, "shared": {again.NEW: [0, 20], again.AGAIN: [18, 20], again.OTHER: [2, 20]}}
            elif task != plan.LOSS:
                made = {"right": right(row, task, int(question)), "said": ""}
            store.add(row.name, task, length, question, made)

    try:
        plan.go(store, SMALL, lambda length: rows.chosen(False, length, rows.PRESSES), [rows.SHARED], TEXTS, ask,
                lambda _: None)
    except KeyboardInterrupt:
        pass
    return count


def by_share(row: Row, task: str, number: int) -> bool:
    """Common words cannot be done; a row with half of the tokens, or a tenth of the blocks, answers nothing, but
    StreamingLLM's all."""
    return task != "common words" and (row.share > 0.6 and row.stays > 0.1 or "StreamingLLM" in row.name)


def test_a_cut_run_goes_on(folder: Path) -> None:
    path = folder / "judge.jsonl"
    assert asked(Store(path, "c", "m", "t"), by_share, 100) == 100
    with path.open("ab") as file:
        file.write(b'{"commit": "c", "mod')       # the cut came while a line was written
    rest = asked(Store(path, "c", "m", "t"), by_share)
    whole = asked(Store(folder / "whole.jsonl", "c", "m", "t"), by_share)
    assert 100 + rest == whole
    assert asked(Store(path, "c", "m", "t"), by_share) == 0, "what is there was measured again"
    assert Store(path, "c", "m", "t").found == Store(folder / "whole.jsonl", "c", "m", "t").found
    assert Store(path, "d", "m", "t").found == Store(path, "c", "n", "t").found == {}, "another commit's or model's"
    assert Store(path, "c", "m", "u").found == {}, "other texts'"
    assert len({texts.fingerprint(it) for it in ({"a": "b"}, {"a": "c"}, {"b": "b"})}) == 3


def test_tasks_that_the_full_cache_cannot_do_claim_nothing(folder: Path) -> None:
    store = Store(folder / "able.jsonl", "c", "m", "t")
    asked(store, by_share)
    assert plan.able(store, SMALL, 1024) == [it for it in ruler.TASKS if it != "common words"]
    assert {row for row, task, *_ in store.found if task == "common words"} == {FULL}
    it = results.Results(store, SMALL)
    assert it.all(FULL, 1024).n == 8 * 4 and it.all(name(KVD, 0.5), 1024).value == 0


def test_the_form_that_is_answered_best_is_taken(folder: Path) -> None:
    store = Store(folder / "form.jsonl", "c", "m", "t")
    for task in ruler.TASKS:
        for form in ("a", "b"):
            for number in plan.numbers(plan.TRIALS):
                right = form == "b" and task == "several keys"
                store.add(FULL, f"{plan.TRIAL}{task}, {form}", plan.TRIED, number, {"right": right})
    assert plan.form(store, ["a", "b"]) == "b" and plan.form(store, ["a"]) == "a"


def test_better_means_than_the_best_of_the_others() -> None:
    def compare(ours: int, best: int) -> str:
        recalls = {name: Recall(tuple(i < right for i in range(40)))
                   for name, right in (*((it, 0) for it in results.RIVALS), (results.RIVALS[1], best), ("ours", ours))}
        return results.against("ours", recalls.pop("ours"), recalls).verdict

    assert compare(36, 20) == HOLDS and compare(20, 36) == FAILS and compare(36, 35) == NOT_SHOWN


def test_verdicts_and_page(folder: Path) -> None:
    store = Store(folder / "page.jsonl", "c", "m", "t")
    asked(store, by_share)
    found = results.findings(store, SMALL, 64, "made-up", "completion")
    regime, *against = found.claims
    assert regime.verdict == NOT_SHOWN and "77% of 7800" in regime.measured and "n = 32)" in regime.measured
    assert {it.verdict for it in against} == {FAILS} and all("StreamingLLM" in it.measured for it in against)
    assert all("n = 32)" in it.measured for it in against), "a question counts once"
    same, *others, repeated, strange = found.aims
    assert same.verdict == "reached" and len(others) == 4 + len(results.RECALLS)
    assert (repeated.measured, repeated.verdict) == ("72 of 80", "reached")
    assert (strange.measured, strange.verdict) == ("0 of 80", "reached")
    by_recall = {it.text.partition(":")[0]: it.verdict for it in others if "recall" in it.text}
    assert by_recall == {row: "missed" if row == name(rows.REVIVED, 0.1) else "reached" for row, _ in results.RECALLS}
    assert {it.verdict for it in others if "int" in it.text} == {"missed"}
    assert {it.verdict for it in others if "kvpress" in it.text} == {"reached, within chance"}
    losses = {row[0]: row for row in found.tables[0].rows}
    assert losses[FULL_POOL][4].startswith("+0.0000") and losses[name(KVD, 0.5)][4].startswith("+0.1000")
    html = page([found], {"commit": "c", "model": "made-up"})
    assert "made-up" in html and html.count("<tr>") > 60 and HOLDS not in {it.verdict for it in found.claims}
    short = results.findings(store, plan.Plan((1024,), 8, 4, 64, True), 64, "made-up", "completion")
    assert short.claims[0].verdict == NOT_TRIED


def test_what_is_said_again_is_counted_by_kind() -> None:
    before, told, behind = again.steps([*range(100, 900), 7] * 2, 7, 16, "x")
    assert len(before) == 32 and len(behind) == again.BEHIND and not set(before) & set(behind)
    assert [len(ids) for _, ids in told] == 3 * again.STEPS * [80] and all(ids[-1] == 7 for _, ids in told)
    new, repeated, other = ([ids for kind, ids in told if kind == it] for it in (again.NEW, again.AGAIN, again.OTHER))
    assert new == repeated and all(0 < sum(a != b for a, b in zip(x, y)) < 30 for x, y in zip(new, other))
    at = 32 + 80 * again.STEPS
    assert again.counted([at, at + 64, at + 80 * again.STEPS], told, 32, 16) == {
        again.NEW: [0, 20], again.AGAIN: [2, 20], again.OTHER: [1, 20]}


def main() -> int:
    tests = [value for name, value in globals().items() if name.startswith("test_")]
    for test in tests:
        with tempfile.TemporaryDirectory(prefix="kvd-judge-") as folder:
            test(*[Path(folder)][:test.__code__.co_argcount])
        print(f"ok {test.__name__}")
    return 0 if tests else 1


if __name__ == "__main__":
    sys.exit(main())
