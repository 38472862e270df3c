# SPDX-License-Identifier: Apache-2.0
"""Four kvlm processes answer questions about two documents from one cache, and the daemon is killed in the middle. Then
everything stops, a new daemon starts with the file of the previous one, and the first answer comes from that file.
Called by tools/demo.

Everything printed is measured in this run: the answers are compared with the documents, the bytes used in place with
the bytes that a process computes alone, and the memory is what the daemon reports.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "model"
PROCESSES = 4
BLOCK_TOKENS = 16
DOCUMENT_TOKENS = 1990  # of the shorter one, rounded down: the prefix that all questions about a document share
PATIENCE = 60           # seconds, even on a busy machine


@dataclass
class Question:
    document: int
    text: str
    answer: str


@dataclass
class Engine:
    """One kvlm process: its questions and its results."""

    number: int
    questions: list[Question]
    results: list[dict] = field(default_factory=list)
    process: subprocess.Popen | None = None


class Stop(Exception):
    """Something failed; the message says what."""


def load_document(number: int) -> str:
    return (HERE / f"document-{number}.txt").read_text()


def load_questions(number: int) -> list[Question]:
    lines = (HERE / f"questions-{number}.jsonl").read_text().splitlines()
    return [Question(number, q["prompt"], q["answer"]) for q in map(json.loads, lines)]


def share_out() -> list[Engine]:
    """Three processes begin with the first document, one with the second; in the end each has asked about both."""
    first, second = load_questions(1), load_questions(2)
    engines = []
    for i in range(PROCESSES):
        own = first[i::PROCESSES][:4] + second[i::PROCESSES][:2]
        engines.append(Engine(i + 1, own if i != 1 else own[::-1]))
    return engines


class Demo:
    def __init__(self, build: Path) -> None:
        self.bin = {"kvd": build / "daemon/kvd", "kvctl": build / "tools/kvctl/kvctl",
                    "kvlm": build / "tools/kvlm/kvlm"}
        self.dir = Path(tempfile.mkdtemp(prefix="kvd-demo-"))
        self.env = dict(os.environ, KVD_SOCKET=str(self.dir / "kvd.sock"))
        self.daemon: subprocess.Popen | None = None
        self.documents = {number: load_document(number) for number in (1, 2)}
        self.engines = share_out()
        self.killed_after = 0           # number of answers before the kill; 0: not killed yet
        self.before: list[int] = []     # answers of each process before the kill
        self.turn = threading.Lock()    # held by a thread that asks a question or kills the daemon

    # ---- processes ---------------------------------------------------------------------------------------------

    def start_daemon(self) -> None:
        ready, wake = os.pipe()
        log = open(self.dir / "kvd.log", "a")
        self.daemon = subprocess.Popen(
            [self.bin["kvd"], "--keep", "--private", self.dir, "--backend", "host", "--pool", "256M", "--set",
             f"daemon.file={self.dir / 'cache'}", "--set", "daemon.file_size=64M", "--ready-fd", str(wake)], stdout=log, stderr=log, pass_fds=[wake])
        os.close(wake)
        if not os.read(ready, 1):
            raise Stop("kvd did not start: " + (self.dir / "kvd.log").read_text().strip())
        os.close(ready)

    def kept(self) -> str:
        """The pid of the daemon that the keeper (kvd --keep) has started."""
        keeper = self.daemon.pid
        return Path(f"/proc/{keeper}/task/{keeper}/children").read_text().strip()

    def kill_daemon(self) -> None:
        """Kills the daemon. The keeper starts the next one with the same memory. Returns when that one answers."""
        killed, until = self.kept(), time.monotonic() + PATIENCE
        os.kill(int(killed), signal.SIGKILL)
        self.before = [len(e.results) for e in self.engines]
        self.killed_after = sum(self.before)
        while (self.kept() in ("", killed) or not self.is_served()) and time.monotonic() < until:
            time.sleep(0.01)

    def is_served(self) -> bool:
        return subprocess.run([self.bin["kvctl"], "ping"], env=self.env, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL).returncode == 0

    def from_file(self) -> dict:
        """Retries begin_anew for a minute: on a busy machine, kvlm may not wait long enough (one second) for the file."""
        until = time.monotonic() + PATIENCE
        while True:
            first = self.begin_anew()
            if not first["right"] or came_from_file(first) or time.monotonic() > until:
                return first

    def begin_anew(self) -> dict:
        """Restarts the daemon with nothing but its file. Returns the first answer and where its tokens came from."""
        question = self.engines[0].questions[0]
        self.kvctl("evict", "--all", "--to", "file")
        self.daemon.terminate()
        self.daemon.wait()
        self.start_daemon()
        while self.tier()["state"] in ("opening", "scanning"):
            time.sleep(0.01)
        prompts = self.prompts_file("first.jsonl", [question])
        first = json.loads(subprocess.run(self.kvlm("--prompts", prompts), env=self.env, check=True, text=True,
                                          stdout=subprocess.PIPE).stdout)
        return {"right": first["text"] == self.engines[0].results[0]["text"], "tokens": first["prompt_tokens"],
                "reused": first["reused_tokens"], "ttft_ms": first["ttft_ms"], "fetched": self.tier()["hits"]}

    def tier(self) -> dict:
        return json.loads(self.kvctl("tiers", "--json"))["tiers"][0]

    def close(self) -> None:
        for process in [e.process for e in self.engines] + [self.daemon]:
            if process and process.poll() is None:
                process.terminate()
                process.wait()
        shutil.rmtree(self.dir, ignore_errors=True)

    def kvctl(self, *arguments: str) -> str:
        return subprocess.run([self.bin["kvctl"], *arguments], env=self.env, check=True, text=True,
                              stdout=subprocess.PIPE).stdout

    def space(self) -> dict:
        """The space, once no block is reserved for clients of the previous daemon any more."""
        until = time.monotonic() + PATIENCE
        while True:
            space = json.loads(self.kvctl("spaces", "--json"))["spaces"][0]
            if not space["blocks"]["limbo"] or time.monotonic() > until:
                return space
            time.sleep(0.01)

    def prompts_file(self, name: str, questions: list[Question]) -> Path:
        path = self.dir / name
        path.write_text("".join(map(self.prompt, questions)))
        return path

    def prompt(self, question: Question) -> str:
        return json.dumps({"prompt": self.documents[question.document] + question.text}) + "\n"

    def kvlm(self, *arguments: object) -> list[str]:
        return [str(a) for a in (self.bin["kvlm"], "--model", MODEL, "--json", "--max-tokens", 8, *arguments)]

    # ---- the four processes ------------------------------------------------------------------------------------

    def run_engine(self, engine: Engine) -> None:
        engine.process = subprocess.Popen(self.kvlm("--prompts", "-"), env=self.env, text=True,
                                          stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for question in engine.questions:
            if not self.ask(engine, question):
                break
        engine.process.communicate()

    def ask(self, engine: Engine, question: Question) -> bool:
        """One question at a time: the daemon is killed between two answers, however fast they come."""
        try:
            with self.turn:
                engine.process.stdin.write(self.prompt(question))
                engine.process.stdin.flush()
        except BrokenPipeError:
            return False
        answer = engine.process.stdout.readline()
        if not answer:
            return False
        with self.turn:
            engine.results.append(json.loads(answer))
            if not self.killed_after and self.answers() > self.questions() // 2:
                self.kill_daemon()
        return True

    def questions(self) -> int:
        return sum(len(e.questions) for e in self.engines)

    def answers(self) -> int:
        return sum(len(e.results) for e in self.engines)

    def run_all(self) -> None:
        """The first two processes start with an empty cache, one per document; the others join while they work."""
        threads = [threading.Thread(target=self.run_engine, args=(e,)) for e in self.engines]
        for i, thread in enumerate(threads):
            thread.start()
            while i == 1 and not all(e.results for e in self.engines[:2]) and threads[0].is_alive():
                self.progress()
        while any(t.is_alive() for t in threads):
            self.progress()
        self.progress(end="\n")
        if any(e.process.returncode for e in self.engines):
            raise Stop("a kvlm process failed")

    def progress(self, end: str = "") -> None:
        done, total = self.answers(), self.questions()
        if sys.stderr.isatty() or end:
            bar = "#" * (done * 40 // total)
            print(f"\r   [{bar:40}] {done}/{total} questions", end=end, file=sys.stderr, flush=True)
        time.sleep(0.02)

    # ---- checking ----------------------------------------------------------------------------------------------

    def verify(self) -> tuple[int, int, int]:
        """Asks everything again: compares bytes used in place with bytes computed alone, and the answers of all runs."""
        questions = [q for e in self.engines for q in e.questions]
        said = [r["text"] for e in self.engines for r in e.results]
        prompts = self.prompts_file("verify.jsonl", questions)
        again = [json.loads(line) for line in
                 subprocess.run(self.kvlm("--prompts", prompts, "--verify"), env=self.env, check=True, text=True,
                                stdout=subprocess.PIPE).stdout.splitlines()]
        alone = [json.loads(line) for line in
                 subprocess.run(self.kvlm("--prompts", prompts, "--no-share"), env=self.env, check=True, text=True,
                                stdout=subprocess.PIPE).stdout.splitlines()]
        different = sum(a["text"] != s for a, s in zip(alone, said, strict=True))
        return sum(r["verified_bytes"] for r in again), sum(r["wrong_bytes"] for r in again), different


# ---- figures -----------------------------------------------------------------------------------------------------


def private_blocks(engine: Engine) -> int:
    """Blocks that a private cache of the process would hold: each document once, and the rest of each prompt."""
    document: dict[int, int] = {}
    blocks = 0
    for q, r in zip(engine.questions, engine.results, strict=True):
        prompt = (r["prompt_tokens"] + r["generated_tokens"]) // BLOCK_TOKENS
        blocks += prompt - document.get(q.document, 0)
        document[q.document] = min(prompt, DOCUMENT_TOKENS // BLOCK_TOKENS)
    return blocks


def copied_bytes(engine: Engine, block_bytes: int) -> int:
    """Bytes of reused tokens that are not in pool blocks of the process's table, so must have been copied."""
    return sum(max(0, r["reused_tokens"] // BLOCK_TOKENS - r["shared_blocks"]) * block_bytes for r in engine.results)


def milliseconds(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ms" if values else "-"


def mebibytes(n: int) -> str:
    return f"{n / 2**20:.1f} MiB"


def print_answers(engines: list[Engine]) -> int:
    correct = 0
    print("\nAnswers\n")
    for e in engines:
        for q, r in zip(e.questions, e.results, strict=True):
            right = r["text"] == q.answer
            correct += right
            question = q.text.replace("\n", " ").removesuffix("Answer:").removeprefix("Question:").strip()
            print(f"  process {e.number}, document {q.document}: {question:45} {r['text'].strip():14}"
                  f"{'right' if right else 'WRONG, it is' + q.answer}")
    return correct


def print_table(engines: list[Engine]) -> None:
    print("\nTokens and time to first token\n")
    print("  PROCESS  PROMPTS  TOKENS  COMPUTED  REUSED  REUSED %  FIRST TOKEN COLD  FIRST TOKEN WARM")
    for e in engines:
        tokens = sum(r["prompt_tokens"] for r in e.results)
        reused = sum(r["reused_tokens"] for r in e.results)
        cold, warm = ttft(e.results)
        print(f"  {e.number:7}  {len(e.results):7}  {tokens:6}  {tokens - reused:8}  {reused:6}  "
              f"{100 * reused / tokens:7.1f}%  {milliseconds(cold):>16}  {milliseconds(warm):>16}")


def ttft(results: list[dict]) -> tuple[list[float], list[float]]:
    """Cold: most of the prompt had to be computed; warm: most of it was found."""
    cold = [r["ttft_ms"] for r in results if 2 * r["reused_tokens"] < r["prompt_tokens"]]
    warm = [r["ttft_ms"] for r in results if 2 * r["reused_tokens"] >= r["prompt_tokens"]]
    return cold, warm


def reused_after_kill(demo: Demo) -> float:
    """The share of tokens that was found, over the questions begun after the daemon was killed."""
    results = [r for e, n in zip(demo.engines, demo.before, strict=True) for r in e.results[n + 1:]]
    tokens = sum(r["prompt_tokens"] for r in results)
    return sum(r["reused_tokens"] for r in results) / tokens if tokens else 0.0


def came_from_file(first: dict) -> bool:
    """Whether most of the prompt came from the file. (The new daemon had no other blocks.)"""
    return first["fetched"] > 0 and 2 * first["reused"] > first["tokens"]


def summary(demo: Demo, space: dict, correct: int, verified: tuple[int, int, int], first: dict) -> dict:
    results = [r for e in demo.engines for r in e.results]
    cold, warm = ttft(results)
    block_bytes = space["block_bytes"]
    return {
        "processes": len(demo.engines),
        "prompts": len(results),
        "correct": correct,
        "prefix_tokens_total": sum(r["prompt_tokens"] for r in results),
        "prefix_tokens_reused": sum(r["reused_tokens"] for r in results),
        "bytes_copied_for_sharing": sum(copied_bytes(e, block_bytes) for e in demo.engines),
        "ttft_ms_cold": round(statistics.median(cold), 3) if cold else None,
        "ttft_ms_warm": round(statistics.median(warm), 3) if warm else None,
        "pool_bytes_used": (space["blocks"]["total"] - space["blocks"]["free"]) * block_bytes,
        "private_bytes_equivalent": sum(private_blocks(e) for e in demo.engines) * block_bytes,
        "verified_bytes": verified[0],
        "wrong_bytes": verified[1],
        "answers_that_differ_without_sharing": verified[2],
        "daemon_killed_after_prompts": demo.killed_after,
        "reused_share_after_kill": round(reused_after_kill(demo), 4),
        "first_answer_from_file": first,
    }


def say(text: str) -> None:
    print(f"== {text}", file=sys.stderr, flush=True)


def run(build: Path) -> int:
    demo = Demo(build)
    try:
        say("Starting a private kvd")
        demo.start_daemon()
        say(f"{PROCESSES} kvlm processes answer questions about two documents of about 2,000 tokens")
        demo.run_all()
        space = demo.space()
        say("Checking: every byte used in place against one computed alone, every answer against one without sharing")
        verified = demo.verify()
        correct = print_answers(demo.engines)
        print_table(demo.engines)
        pool = demo.kvctl("blocks", "--rows", "8")
        first = demo.from_file()
        figures = summary(demo, space, correct, verified, first)
        print(f"\nMemory: {mebibytes(figures['pool_bytes_used'])} of cache serve all {PROCESSES}; "
              f"private caches would need {mebibytes(figures['private_bytes_equivalent'])}.")
        print(f"Checked: {mebibytes(verified[0])} used in place, {verified[1]} wrong bytes; "
              f"{verified[2]} answers differ without sharing.\n")
        print(f"Restart: kvd was killed (kill -9) after {demo.killed_after} answers; the next one took its memory over, and "
              f"{100 * figures['reused_share_after_kill']:.1f} % of the tokens asked from then on were found.\n")
        print(f"File: everything was stopped, and kvd started with its file alone; the first answer {'is' if first['right'] else 'is NOT'} "
              f"the same as before, {first['reused']} of its {first['tokens']} tokens came from the file "
              f"({first['fetched']} blocks), and its first token took {first['ttft_ms']:.1f} ms.\n")
        print("The pool\n")
        print(pool)
        print(json.dumps(figures))
        warm = figures["reused_share_after_kill"] > 0.5
        from_file = first["right"] and came_from_file(first)
        return 0 if verified[1] == 0 and verified[2] == 0 and warm and from_file else 1
    except (Stop, subprocess.CalledProcessError) as e:
        print(f"tools/demo: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ntools/demo: interrupted; all its processes were stopped", file=sys.stderr)
        return 130
    finally:
        demo.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(run(Path(sys.argv[1]).resolve()))
