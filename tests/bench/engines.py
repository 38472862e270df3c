# SPDX-License-Identifier: Apache-2.0
"""Times to the first token with vLLM and transformers: computed, from the engine's own cache, and by kvd from another
process's cache, in place and by copy. Called by tests/bench/run --engines. Every round measures everything once, with a
new document. Prints a table of medians on standard error, and one line of JSON on standard output.

    python3 engines.py BUILD VENVS [ROUNDS]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/engines"))

from common import Instance, daemon, document  # noqa: E402
from vllm_engine import Engine  # noqa: E402

LENGTH, PROCESSES, DECODED, CROWD = 2000, 4, 192, 8
SHORT = 31              # tokens, less than a block

TRANSFORMERS = '''
import json, sys, time
import torch, kvd
from transformers import AutoModelForCausalLM
from kvd.engines.transformers import KvdCache, load_prefix, open_space, store
torch.set_num_threads(1)
path, socket = sys.argv[1:]
models = {how: AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention).eval()
          for how, attention in (("alone", "sdpa"), ("in place", "kvd"), ("copy", "sdpa"))}
space = open_space(kvd.connect(socket), models["in place"])
print("ready", flush=True)
for line in sys.stdin:
    how, ids, n = json.loads(line)
    model, ids = models[how], torch.tensor([ids])
    start = time.perf_counter()
    options = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False}
    if how == "in place":
        with KvdCache(model, space, ids) as cache:
            model.generate(ids, past_key_values=cache, **options)
            seconds = time.perf_counter() - start
    elif how == "copy":
        cache, _ = load_prefix(space, model, ids)
        out = model.generate(ids, past_key_values=cache, **options)
        seconds = time.perf_counter() - start
        store(space, cache, out)
    else:
        model.generate(ids, **options)
        seconds = time.perf_counter() - start
    print(json.dumps(seconds), flush=True)
'''


class Transformers:
    def __init__(self, python: Path, socket: str):
        self.process = subprocess.Popen([python, "-c", TRANSFORMERS, os.environ["KVD_MODEL"], socket], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def ask(self, how: str, ids: list[int], n: int = 1) -> float:
        self.process.stdin.write(json.dumps([how, ids, n]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def __enter__(self) -> Transformers:
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()


class Figures(dict):
    """Milliseconds by name, one per round."""

    def add(self, name: str, seconds: float) -> None:
        self.setdefault(name, []).append(seconds * 1e3)

    def median(self, name: str) -> float:
        return statistics.median(self[name])

    def ratio(self, one: str, other: str) -> float:
        """The median of the rounds' ratios, so that a slow round does not count."""
        return statistics.median(a / b for a, b in zip(self[one], self[other]))


class Bench:
    def __init__(self, socket: str, venvs: Path):
        python, extra = venvs / "vllm/bin/python", {"socket": socket}
        self.figures = Figures()
        self.alone = Engine(timeout=1500, python=python)
        self.place = [Engine("in place", extra=extra, timeout=1500, python=python) for _ in range(PROCESSES)]
        self.copy = [Engine("copy", extra=extra, timeout=1500, python=python) for _ in range(2)]
        self.hf = [Transformers(venvs / "hf/bin/python", socket) for _ in range(2)]
        for it in self.hf:
            assert it.process.stdout.readline() == "ready\n", "transformers does not start"

    def close(self) -> None:
        for it in (self.alone, *self.place, *self.copy, *self.hf):
            it.__exit__()

    def first(self, name: str, engine: Engine, prompt: list[int]) -> None:
        """Time to the first token in an engine that has just served another request."""
        engine.ask([prompt[::-1][:SHORT]], max_tokens=1)
        self.figures.add(name, engine.ask([prompt], max_tokens=1)[0]["seconds"])

    def round(self, number: int) -> None:
        """Prefixes come after all cold prompts, so that each engine that finds one has idled while others computed: the
        processor's caches are as cold for an engine's own prefix as for another one's."""
        one, two = (document(1000 + number, LENGTH) + [500 + i] for i in range(2))
        self.first("vLLM alone, cold", self.alone, one)
        self.first("vLLM in place, cold", self.place[0], one)
        self.first("vLLM by copy, cold", self.copy[0], one)
        for how in ("alone", "in place"):
            self.figures.add(f"transformers {how}, cold", self.hf[0].ask(how, one))
        self.first("vLLM alone, own prefix", self.alone, two)
        self.first("vLLM in place, own prefix", self.place[0], two)
        self.first("vLLM in place, other's prefix", self.place[1 + number % (PROCESSES - 1)], two)
        self.first("vLLM by copy, other's prefix", self.copy[1], two)
        for how in ("in place", "copy"):
            self.figures.add(f"transformers {how}, other's prefix", self.hf[1].ask(how, two))

    def crowd(self, number: int) -> None:
        """vllm#58240: engines get the same prompts, each with an end of its own. With private caches each computes all of
        them, as the engine alone does, whose cache is emptied between two engines."""
        prompts = [document(30000 + 3 * number + i, LENGTH) for i in range(3)]
        for i in range(CROWD):
            assert self.alone.do(op="reset")
            for prompt in (it + [500 + i] for it in prompts):
                self.first(f"{CROWD} engines, private caches", self.alone, prompt)
                self.first(f"{CROWD} engines, in place", self.place[i % PROCESSES], prompt)

    def decode(self, number: int) -> None:
        prompts = [document(5000 + 4 * number + i, 64) for i in range(4)]
        for name, engine in (("alone", self.alone), ("in place", self.place[0])):
            self.figures.add(f"decode {name}", engine.ask(prompts, max_tokens=DECODED)[0]["seconds"])
        for how in ("alone", "in place"):
            self.figures.add(f"transformers decode {how}", self.hf[0].ask(how, prompts[0], DECODED))

    def scheduler(self, rounds: int) -> dict:
        """Medians of the scheduler's own time per step, in microseconds, alone and in place, for the same work."""
        engines, spent = {"alone": self.alone, "in place": self.place[0]}, {"alone": [], "in place": []}
        for engine in engines.values():
            engine.do(op="watch")
        for number in range(rounds):
            for name, engine in engines.items():
                before = engine.do(op="seen")
                engine.ask([document(9000 + 8 * number + i, 200) for i in range(8)], max_tokens=128)
                seen = engine.do(op="seen")
                spent[name].append((seen["seconds"] - before["seconds"]) / (seen["steps"] - before["steps"]) * 1e6)
        return {name: statistics.median(it) for name, it in spent.items()}


def rows(figures: Figures) -> str:
    return "\n".join(f"{name:38}{figures.median(name):9.1f}   {min(it):8.1f} - {max(it):.1f}"
                     for name, it in figures.items())


def goals(figures: Figures, spent: dict, memory: float) -> list[tuple[str, float, str, float]]:
    other = "vLLM in place, other's prefix"
    private, shared = (statistics.mean(figures[f"{CROWD} engines, {it}"]) for it in ("private caches", "in place"))
    return [(f"means of {CROWD} engines, private / in place", private / shared, ">=", 2.76),    # of the issue
            ("in place / own prefix", figures.ratio(other, "vLLM alone, own prefix"), "<=", 1.15),
            ("cold / in place", figures.ratio("vLLM alone, cold", other), ">=", 15),
            ("decode alone / in place", figures.ratio("decode alone", "decode in place"), ">=", 0.97),
            ("transformers decode alone / in place",
             figures.ratio("transformers decode alone", "transformers decode in place"), ">=", 0.97),
            ("scheduler us a step, added", spent["in place"] - spent["alone"], "<=", 100),
            (f"memory of {PROCESSES} processes / of one", memory, "<=", 1.1)]


def used_blocks(it: Instance) -> int:
    """Blocks of the space in which vLLM works in place."""
    return sum(space["blocks"]["sealed"] for space in it.stat("spaces")["spaces"] if "blhnc" in space["shape"])


def measure(venvs: Path, rounds: int) -> dict:
    with daemon("--pool", "1G", "--set", "daemon.pages=auto") as it:
        bench = Bench(it.socket, venvs)
        try:
            for i in range(PROCESSES - 1):
                bench.round(-1 - i)                         # warms every process up
            bench.figures.clear()
            for i in range(rounds):
                bench.round(i)
                bench.decode(i)
            bench.crowd(0)
            memory = shared_memory(it, bench)
            spent = bench.scheduler(rounds)
            it.check()
        finally:
            bench.close()
    figures = bench.figures
    print(f"{'first token, ms':38}{'median':>9}   {'min - max':>8}\n{rows(figures)}\n", file=sys.stderr)
    verdicts = goals(figures, spent, memory)
    for name, value, sign, goal in verdicts:
        met = value <= goal if sign == "<=" else value >= goal
        print(f"{name:38}{value:9.2f}   {sign} {goal:g}: {'met' if met else 'not met'}", file=sys.stderr)
    return {"rounds": rounds, "medians_ms": {name: round(figures.median(name), 2) for name in figures},
            "scheduler_us": {name: round(value, 1) for name, value in spent.items()},
            "goals": {name: round(value, 3) for name, value, *_ in verdicts}}


def shared_memory(it: Instance, bench: Bench) -> float:
    """Ratio of the pool's blocks after all processes have asked about some documents, to those after one has."""
    prompts = [document(20000 + i, LENGTH) for i in range(4)]
    before = used_blocks(it)
    bench.place[0].ask(prompts, max_tokens=1)
    one = used_blocks(it) - before
    for engine in bench.place[1:]:
        engine.ask(prompts, max_tokens=1)
    return (used_blocks(it) - before) / one


def main() -> None:
    build, venvs = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    os.environ |= {"KVD": str(build / "daemon/kvd"), "KVCTL": str(build / "tools/kvctl/kvctl"), "OMP_NUM_THREADS": "1",
                   "KVD_LIBRARY": str(build / "client/libkvd.so.0"), "KVD_MODEL": str(ROOT / "tools/kvlm/model"),
                   "PYTHONPATH": str(ROOT / "client/python"), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    print(json.dumps(measure(venvs, int(sys.argv[3]) if len(sys.argv) > 3 else 7)))


if __name__ == "__main__":
    main()
