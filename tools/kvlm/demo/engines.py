# SPDX-License-Identifier: Apache-2.0
"""Two vLLM servers and a transformers process share one pool. Called by tools/demo --engine vllm.

Everything printed is measured in this run. The servers are vLLM's own, on loopback. Their answers are compared with
the documents and with each other.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests/engines"))

from demo import Demo, Stop, load_document, load_questions, say  # noqa: E402

MODEL = str(ROOT / "tools/kvlm/model")
ROUNDS = 4

TRANSFORMERS = '''
import json, sys, time
import torch, kvd
from transformers import AutoModelForCausalLM, AutoTokenizer
from kvd.engines.transformers import KvdCache, open_space
torch.set_num_threads(1)
path, socket = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="kvd").eval()
tokenizer = AutoTokenizer.from_pretrained(path)
space = open_space(kvd.connect(socket), model)
print("ready", flush=True)
for line in sys.stdin:
    ids = tokenizer(json.loads(line), return_tensors="pt").input_ids
    start = time.perf_counter()
    with KvdCache(model, space, ids) as cache:
        out = model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)
        print(json.dumps({"seconds": time.perf_counter() - start, "text": tokenizer.decode(out[0, -1:])}), flush=True)
'''


class Transformers:
    """One process of Hugging Face's transformers, which takes requests as lines of JSON."""

    def __init__(self, python: Path, socket: str, environment: dict):
        self.process = subprocess.Popen([python, "-c", TRANSFORMERS, MODEL, socket], stdin=subprocess.PIPE, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)

    def ready(self) -> Transformers:
        if self.process.stdout.readline() != "ready\n":
            raise Stop("transformers does not start")
        return self

    def first_token(self, prompt: str) -> float:
        self.process.stdin.write(json.dumps(prompt) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise Stop("transformers died")
        return json.loads(line)["seconds"] * 1e3

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def milliseconds(values: list[float]) -> str:
    return f"{sorted(values)[len(values) // 2]:8.1f}" if values else "       -"


class Show:
    """Uses Demo's pool. times[engine][how]: milliseconds to the first token, over HTTP for the servers."""

    def __init__(self, demo: Demo, venvs: Path):
        from vllm_server import Server, installed
        self.demo, self.socket = demo, str(demo.dir / "kvd.sock")
        self.times: dict[str, dict[str, list[float]]] = {
            "vLLM in place": {"cold": [], "own": [], "other": []}, "transformers in place": {"cold": [], "own": []}}
        self.correct = self.asked = self.different = 0
        environment = installed(str(demo.dir))
        self.servers = [Server("in place", python=venvs / "vllm/bin/python", environment=environment,
                               socket=self.socket) for _ in range(2)]
        self.transformers = Transformers(venvs / "hf/bin/python", self.socket, os.environ | environment)

    def close(self) -> None:
        for it in self.servers:
            it.kill()
        self.transformers.close()

    def wait(self) -> None:
        for it in self.servers:
            it.ready()
        self.transformers.ready()
        for it in self.servers:                                 # the one-time work of a process's first request
            it.complete("Question: ", max_tokens=1)
        self.transformers.first_token("Question: ")

    def prompt(self, document: int, seed: int) -> str:
        """A different document for every round, of the same length, that no process has seen yet."""
        return f"Round {seed}. " + load_document(document)

    def measure(self) -> None:
        vllm, hf = self.times["vLLM in place"], self.times["transformers in place"]
        for i in range(ROUNDS):
            prompt = self.prompt(1 + i % 2, i)
            for how, server in (("cold", self.servers[0]), ("own", self.servers[0]), ("other", self.servers[1])):
                vllm[how].append(server.complete(prompt, max_tokens=1)["seconds"] * 1e3)
            for how in ("cold", "own"):
                hf[how].append(self.transformers.first_token(prompt))

    def question(self) -> None:
        """Both servers answer about both documents."""
        for number in (1, 2):
            document = load_document(number)
            for it in load_questions(number)[:6]:
                said = [server.complete(document + it.text, max_tokens=8)["text"] for server in self.servers]
                self.correct += sum(text.startswith(it.answer) for text in said)
                self.different += said[0] != said[1]
                self.asked += 2

    def kill_one(self) -> dict:
        """Kills (-9) a server while it works; the other one continues from the same pool."""
        def work() -> None:
            try:
                self.servers[0].complete(self.prompt(1, 99), max_tokens=512)
            except OSError:
                pass                                            # this is what its users see
        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.3)
        self.servers[0].kill()
        thread.join()
        return self.servers[1].complete(self.prompt(2, 1), max_tokens=8)


def table(times: dict[str, dict[str, list[float]]]) -> str:
    rows = [f"{'first token, ms (median)':26}{'cold':>8}  {'own cache':>9}  {'another process':>15}"]
    for name, row in times.items():
        rows.append(f"{name:26}{milliseconds(row['cold'])}  {milliseconds(row['own']):>9}"
                    f"  {milliseconds(row.get('other', [])):>15}")
    return "\n".join(rows)


def figures(show: Show, survivor: dict) -> dict:
    def median(values: list[float]) -> float:
        return round(sorted(values)[len(values) // 2], 2)
    return {"engine": "vllm", "correct": show.correct, "asked": show.asked, "different": show.different,
            "cached_after_kill": survivor["cached"],
            "first_token_ms": {name: {how: median(values) for how, values in row.items()}
                               for name, row in show.times.items()}}


def run(build: Path, venvs: Path) -> int:
    demo, show = Demo(build), None
    os.environ |= {"KVD_MODEL": MODEL, "KVD_LIBRARY": str(build / "client/libkvd.so.0"), "OMP_NUM_THREADS": "1",
                   "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "client/python"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        say("Starting a private kvd, two vLLM servers (OpenAI API) and a transformers process: half a minute")
        demo.start_daemon()
        show = Show(demo, venvs)
        show.wait()
        say(f"First tokens of {ROUNDS} documents of 2,000 tokens: computed, found by the same process, by another one")
        show.measure()
        say("The servers answer questions about two documents")
        show.question()
        print(table(show.times))
        print(f"\n{show.correct} of {show.asked} answers agree with the documents; {show.different} of"
              f" {show.asked // 2} differ between the servers\n")
        print(demo.kvctl("top", "--batch", "--count", "1"))
        say("kill -9 of one server in the middle of an answer")
        survivor = show.kill_one()
        print(f"the other one continues: {survivor['cached']} of {survivor['prompt_tokens']} tokens were in the pool\n")
        print(demo.kvctl("clients"))
        print(demo.kvctl("check"))
        print(json.dumps(figures(show, survivor)))
        return 0 if not show.different else 1
    except (Stop, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"tools/demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ntools/demo: interrupted; all its processes were stopped", file=sys.stderr)
        return 130
    finally:
        if show:
            show.close()
        demo.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(run(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()))
