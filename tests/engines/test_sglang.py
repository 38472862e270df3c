# SPDX-License-Identifier: Apache-2.0
"""SGLang on kvd: real engines with the repository's model, on the CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import common

HERE = Path(__file__).resolve()
EXAMPLE = common.ROOT / "client/python/examples/sglang_shared.py"
N, NEW, PAGE = 900, 8, 16
WHOLE = N // PAGE * PAGE


# ---- the other process -----------------------------------------------------------------------------------------------


def serve(socket: str) -> None:
    """Answers lines of JSON: {"tokens"} gets {"cached", "made", "logprobs"}, {"flush"} empties SGLang's own cache."""
    import sglang
    linker = {"linker": "Linker", "linker_module_path": "kvd.engines.sglang", "linker_extra_config": {"socket": socket}}
    shared = {"enable_unified_cache_external_linker": True, "unified_cache_external_linker_backend": "dynamic",
              "unified_cache_external_linker_config": linker}
    engine = sglang.Engine(
        model_path=common.MODEL, page_size=PAGE, max_total_tokens=4096, context_length=2048, log_level="warning",
        skip_tokenizer_init=True, device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
        dtype="float32", disable_cuda_graph=True, disable_overlap_schedule=True, grammar_backend="none",
        **(shared if socket else {}))
    print("{}", flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if "flush" in ask:
            print(json.dumps({"flushed": engine.flush_cache().success}), flush=True)
            continue
        out = engine.generate(input_ids=ask["tokens"], sampling_params={"temperature": 0, "max_new_tokens": NEW},
                              return_logprob=True)
        about = out["meta_info"]
        print(json.dumps({"cached": about["cached_tokens"], "made": out["output_ids"],
                          "logprobs": [it[0] for it in about["output_token_logprobs"]]}), flush=True)
    engine.shutdown()


class Server:
    """An engine and its processes, in their own session, so that all of them can be killed."""

    def __init__(self, socket: str):
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([sys.executable, HERE, "serve", socket], text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.log, start_new_session=True)

    def line(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self.log.seek(0)
        raise AssertionError(f"the engine is gone: {self.log.read()[-3000:]}")

    def send(self, **ask) -> None:
        print(json.dumps(ask), file=self.process.stdin, flush=True)

    def ask(self, tokens: list[int]) -> dict:
        self.send(tokens=tokens)
        return self.line()

    def flush(self) -> None:
        self.send(flush=True)
        assert self.line()["flushed"]

    def kill(self) -> None:
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()


def prompt(document: int, question: int) -> list[int]:
    return common.document(document, N) + [500 + question, 501 + question]


def same(a: dict, b: dict) -> bool:
    return a["made"] == b["made"] and all(abs(x - y) < 1e-4 for x, y in zip(a["logprobs"], b["logprobs"]))


# ---- tests -----------------------------------------------------------------------------------------------------------


def test_second_process_finds_the_prefix_and_answers_alike(d, alone, a, b) -> None:
    first, second = a.ask(prompt(0, 0)), b.ask(prompt(0, 1))
    assert first["cached"] == 0 and second["cached"] == WHOLE, (first, second)
    assert same(first, alone.ask(prompt(0, 0))) and same(second, alone.ask(prompt(0, 1)))
    alone.flush()
    assert same(second, alone.ask(prompt(0, 1)))


def test_prefixes_missing_in_its_own_cache_are_found(d, alone, a, b) -> None:
    a.flush()
    again = a.ask(prompt(0, 2))
    assert again["cached"] == WHOLE and same(again, alone.ask(prompt(0, 2)))
    d.check()


def test_another_model_is_refused(d, alone, a, b) -> None:
    import torch
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.server_args import ServerArgs

    import kvd
    from kvd.engines.sglang import Linker

    def link(space: str | None, components=frozenset({ComponentType.FULL}), **arguments) -> Linker:
        planes = [torch.zeros(64, 2, 32) for _ in range(8)]
        cache = SimpleNamespace(k_buffer=planes, v_buffer=planes)
        params = SimpleNamespace(page_size=PAGE, is_eagle=False, token_to_kv_pool_allocator=SimpleNamespace(
            get_kvcache=lambda: cache))
        return Linker(ServerArgs(model_path=common.MODEL, device="cpu", dtype="float32", **arguments), params,
                      components=components, extra_config={"socket": d.socket, "space": space})

    (name,) = {it["name"] for it in d.stat("spaces")["spaces"]}
    same_model = link(None)
    assert same_model.space.name == name
    same_model.close()
    other = link(None, json_model_override_args='{"rope_theta": 250000.0}')
    assert other.space.name != name
    other.close()
    for arguments, words in (({"json_model_override_args": '{"rope_theta": 250000.0}'}, "fingerprint"),
                             ({"tp_size": 2}, "parallelism"), ({"components": {ComponentType.SWA}}, "SWA")):
        try:
            link(name, **arguments)
            raise AssertionError(f"{arguments} was accepted")
        except (kvd.Mismatch, ValueError) as e:
            assert words in str(e), e


def test_killed_engines_and_daemons_cost_no_answer(d, alone, a, b) -> None:
    a.send(tokens=prompt(1, 0))
    a.kill()
    for document in (1, 2):
        assert same(b.ask(prompt(document, 1)), alone.ask(prompt(document, 1)))
    d.check()
    d.kill()
    for question in (2, 3):
        b.flush()
        assert same(b.ask(prompt(1, question)), alone.ask(prompt(1, question)))
    d.start()
    for question in (4, 5, 6, 7):
        b.flush()
        last = b.ask(prompt(3, question))
        assert same(last, alone.ask(prompt(3, question)))
    assert last["cached"] == WHOLE, "the new daemon is not used"
    d.check()


def test_the_example_finds_what_servers_computed(d, alone, a, b) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 30
    done = subprocess.run([sys.executable, EXAMPLE, common.MODEL], env=os.environ | {"KVD_SOCKET": d.socket}, text=True,
                          capture_output=True, timeout=600)
    lines = re.findall(r"^(\d+) of (\d+) tokens were there", done.stdout, re.M)
    assert len(lines) == 2 and int(lines[0][0]) == 0 and int(lines[1][0]) > 0, done.stdout + done.stderr[-3000:]
    d.check()


def main() -> int:
    tests = [it for name, it in globals().items() if name.startswith("test_")]
    with common.daemon() as d:
        servers = [Server(socket) for socket in ("", d.socket, d.socket)]
        try:
            for it in servers:
                it.line()
            return common.run(tests, d, *servers)
        finally:
            for it in servers:
                it.kill()


if __name__ == "__main__":
    sys.exit(serve(sys.argv[2]) if sys.argv[1:2] == ["serve"] else main())
