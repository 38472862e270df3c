# SPDX-License-Identifier: Apache-2.0
"""Measures with a pretrained model, in transformers and a pool, what ways to keep a context lose."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2] / "client/python")]

import torch    # noqa: E402  (these need the paths above)
from transformers.utils.logging import disable_progress_bar     # noqa: E402

from engine import ROOT, Failed, commit, processor     # noqa: E402
from page import page       # noqa: E402

from judge import ask, plan, results, rows, ruler, texts     # noqa: E402
from judge.caches import ATTENTION, Context, prepare, runs_itself, working     # noqa: E402
from judge.store import Store       # noqa: E402


class Judge:
    """The model, twice: for plain caches, and for those in the pool. Weights that lie in a file are in memory once."""

    def __init__(self, folder: Path, build: Path, longest: int, converted: bool) -> None:
        from transformers import AutoTokenizer

        from judge import model         # after kvpress, which patches what it finds
        from judge.pooled import Pool
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.alone, self.prompts = model.load(folder, ATTENTION), ask.Prompts(tokenizer)
        if converted:
            model.check(self.alone, tokenizer)
        ours = model.load(folder, "kvd")
        self.pool = Pool(ours, tokenizer, str(build / "daemon/kvd"), str(build / "tools/kvctl/kvctl"), longest)
        shape = self.alone.config.get_text_config()
        self.width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads

    def each(self, chosen: list[rows.Row], context: list[int], more: int):  # type: ignore[no-untyped-def]
        """For each row, the row and the context as it keeps it."""
        computed = None
        for row in chosen:
            if row.how == rows.POOL:
                with self.pool.kept(row, context, more) as kept:
                    yield row, kept
                continue
            computed = computed or Context(self.alone, context, [
                it for it in chosen if it.how == rows.PRESS and not runs_itself(it)])
            with computed.kept(row) as kept:
                yield row, kept


class Asker:
    """Asks the judge what a plan says, and stores each result."""

    def __init__(self, judge: Judge, store: Store, prose: list[str], pieces: dict[str, list[int]]) -> None:
        self.judge, self.store, self.prose, self.pieces = judge, store, prose, pieces
        self.form = ask.PLAIN

    def __call__(self, chosen: list[rows.Row], task: str, length: int, number: str) -> None:
        if task == plan.LOSS:
            self.read(chosen, length, number)
        elif task == plan.SAID:
            for row in chosen:
                self.store.add(row.name, task, length, number, self.judge.pool.said_again(self.pieces[number], number))
        else:
            self.question(chosen, task, task, length, number, self.form, "judge")

    def read(self, chosen: list[rows.Row], length: int, name: str) -> None:
        ids = self.pieces[name]
        for row, kept in self.judge.each(chosen, ids[:length], len(ids) - length):
            self.store.add(row.name, plan.LOSS, length, name, {"loss": ask.loss(kept, ids[length:])})

    def question(self, chosen: list[rows.Row], task: str, key: str, length: int, number: str, form: str,
                 seed: str) -> None:
        prompts = self.judge.prompts
        it = ruler.question(task, self.prose, length, prompts.count, int(number), seed)
        context, asked = prompts.parts(it, form)
        for row, kept in self.judge.each(chosen, context, len(asked) + ask.NEW):
            said = ask.answer(kept, prompts, asked, len(it.answers) == 1)
            self.store.add(row.name, key, length, number, {"right": it.right(said), "said": said})

    def choose_form(self) -> None:
        """The form of prompts that the full cache answers best, on questions that are not asked again."""
        forms = self.judge.prompts.forms
        full = [it for it in rows.ROWS if it.name == rows.FULL]
        for task in ruler.TASKS if len(forms) > 1 else ():
            for form in forms:
                key = f"{plan.TRIAL}{task}, {form}"
                for number in plan.numbers(plan.TRIALS):
                    if plan.missing(self.store, full, key, plan.TRIED, number):
                        self.question(full, task, key, plan.TRIED, number, form, "trial")
        self.form = plan.form(self.store, forms)


def log(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--model", required=True, help="smollm2, or a folder of transformers")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--lengths", default="", help="tokens of contexts, as in 1024,4096")
    parser.add_argument("--only", default="", help="parts of rows' names, as in int8,int4")
    parser.add_argument("--text", type=Path, action="append", default=[], help="a text instead of the repository's")
    return parser.parse_args()


def measure(given: argparse.Namespace, measured: plan.Plan, store: Store, found: dict[str, str], kvpress: bool
            ) -> tuple[Judge, str]:
    from judge import model
    only = [it for it in given.only.split(",") if it]
    converted = given.model == "smollm2"
    folder = model.smollm2() if converted else Path(given.model)
    judge = Judge(folder, given.build.resolve(), max(*measured.lengths, measured.window) + 512, converted)
    try:
        pieces = dict(texts.windows({n: judge.prompts.ids(it) for n, it in found.items()}, measured.window,
                                    measured.texts))
        asker = Asker(judge, store, texts.sentences(found), pieces)
        asker.choose_form()
        presses = working(judge.alone, rows.ROWS) if kvpress else set()
        shared = [rows.SHARED] if rows.is_wanted(rows.SHARED, only) else []
        plan.go(store, measured, lambda length: rows.chosen(measured.quick, length, presses, only), shared, list(pieces), asker,
                log)
    finally:
        judge.pool.close()
    return judge, asker.form


def main() -> int:
    given, began = options(), time.time()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    warnings.filterwarnings("ignore")
    disable_progress_bar()
    measured = plan.Plan.of(given.quick, tuple(int(it) for it in given.lengths.split(",") if it))
    given.out.mkdir(parents=True, exist_ok=True)
    prose = texts.read(given.text or texts.standard(ROOT))
    store = Store(given.out / "judge.jsonl", commit(), given.model, texts.fingerprint(prose))
    log(f"{store.before} results of {store.of['commit']} are in {store.path} and are not measured again")
    if store.of["commit"].endswith("-dirty"):
        log("there are changes that are not committed: results of other changes to the same commit count as these")
    kvpress = prepare()
    judge, form = measure(given, measured, store, prose, kvpress)
    about = {"commit": store.of["commit"], "model": given.model, "prompts": form,
             "kvpress": version("kvpress") if kvpress else "none", "transformers": version("transformers"),
             "processor": processor(), "threads": torch.get_num_threads(),
             "date": time.strftime("%Y-%m-%d", time.gmtime(began)), "minutes": round((time.time() - began) / 60, 1),
             "results that were there": store.before, "quick": given.quick}
    found = results.findings(store, measured, judge.width, given.model, form)
    (given.out / "evidence.json").write_text(
        json.dumps({"about": about, "methods": {found.method: found.as_json()}}, indent=1) + "\n")
    (given.out / "evidence.html").write_text(page([found], about))
    print(results.summary(found))
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    try:
        sys.exit(main())
    except Failed as failure:
        sys.exit(f"evidence: {failure}")
    except KeyboardInterrupt:
        sys.exit(130)
