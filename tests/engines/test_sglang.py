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
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import common

HERE = Path(__file__).resolve()
EXAMPLE = common.ROOT / "client/python/examples/sglang_shared.py"
N, NEW, PAGE = 900, 8, 16
WHOLE = N // PAGE * PAGE


# ---- the other process -----------------------------------------------------------------------------------------------

# On processors, SGLang keeps states with pages of one token only.
WINDOWS = {"page_size": PAGE, "chunked_prefill_size": 128}
STATES = {"page_size": 1, "chunked_prefill_size": 128, "mamba_radix_cache_strategy": "no_buffer",
          "max_mamba_cache_size": 64}


def serve(socket: str, options: dict) -> None:
    """Answers lines of JSON: {"tokens"} gets {"cached", "made", "logprobs"}, {"flush"} empties SGLang's own cache,
    {"weights"} loads others."""
    import sglang
    linker = {"linker": "Linker", "linker_module_path": "kvd.engines.sglang", "linker_extra_config": {"socket": socket}}
    shared = {"enable_unified_cache_external_linker": True, "unified_cache_external_linker_backend": "dynamic",
              "unified_cache_external_linker_config": linker}
    engine = sglang.Engine(
        max_total_tokens=4096, context_length=2048, log_level="warning",
        skip_tokenizer_init=True, device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
        dtype="float32", disable_cuda_graph=True, disable_overlap_schedule=True, grammar_backend="none",
        sleep_on_idle=True, **options, **(shared if socket else {}))
    print("{}", flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if "flush" in ask:
            print(json.dumps({"flushed": engine.flush_cache().success}), flush=True)
            continue
        if "weights" in ask:
            print(json.dumps({"updated": engine.update_weights_from_disk(ask["weights"])[0]}), flush=True)
            continue
        out = engine.generate(input_ids=ask["tokens"], sampling_params={"temperature": 0, "max_new_tokens": NEW},
                              return_logprob=True)
        about = out["meta_info"]
        print(json.dumps({"cached": about["cached_tokens"], "made": out["output_ids"],
                          "logprobs": [it[0] for it in about["output_token_logprobs"]]}), flush=True)
    engine.shutdown()


class Server:
    """An engine and its processes, in their own session, so that all of them can be killed."""

    def __init__(self, socket: str, options: dict):
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, HERE, "serve", socket, json.dumps(options)], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.log, start_new_session=True,
            env=os.environ | {"SGLANG_MAMBA_CONV_DTYPE": "float32"})

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


@contextmanager
def family(d, name: str, options: dict):
    """An engine without kvd, and two with it, of a family or of the repository's model."""
    with tempfile.TemporaryDirectory() as folder:
        if name:
            subprocess.run([sys.executable, HERE.with_name("models.py"), folder, name], check=True, capture_output=True)
        model = f"{folder}/{name}" if name else common.MODEL
        three = [Server(socket, options | {"model_path": model}) for socket in ("", d.socket, d.socket)]
        try:
            for it in three:
                it.line()
            yield three
        finally:
            for it in three:
                it.kill()


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
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    import kvd
    from kvd.engines.sglang import Linker

    def link(space: str | None, components=frozenset({ComponentType.FULL}), cache=None, **arguments) -> Linker:
        cache = cache or MHATokenToKVPool(64, PAGE, torch.float32, 2, 32, 8, "cpu", False)
        params = SimpleNamespace(page_size=PAGE, is_eagle=False, token_to_kv_pool_allocator=SimpleNamespace(
            get_kvcache=lambda: cache))
        return Linker(ServerArgs(model_path=common.MODEL, device="cpu", dtype="float32", attention_backend="torch_native",
                                 **arguments), params,
                      components=components, extra_config={"socket": d.socket, "space": space})

    get_context().set_server_args(ServerArgs(model_path=common.MODEL, device="cpu"))
    (name,) = {it["name"] for it in d.stat("spaces")["spaces"]}
    same_model = link(None)
    (part,) = same_model.pools.values()
    assert part.space.name == name
    same_model.close()
    other = link(None, json_model_override_args='{"rope_theta": 250000.0}')
    assert [it.space.name for it in other.pools.values()] != [name]
    other.close()
    for arguments, words in (({"json_model_override_args": '{"rope_theta": 250000.0}'}, "fingerprint"),
                             ({"tp_size": 2}, "parallelism"), ({"cache": SimpleNamespace()}, "SimpleNamespace"),
                             ({"components": {ComponentType.FULL, ComponentType.SWA}}, "MHATokenToKVPool"),
                             ({"components": {ComponentType.FULL, ComponentType.C128}}, "C128")):
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


# ---- families --------------------------------------------------------------------------------------------------------


def test_windows_are_in_a_space_of_their_own(d, alone, a, b) -> None:
    """Laguna, two of whose four layers have windows."""
    keys, swa = sorted(d.stat("spaces")["spaces"], key=lambda it: len(it["name"]))
    assert swa["name"] == f"{keys['name']}-swa" and swa["block_bytes"] == keys["block_bytes"]
    assert keys["blocks"]["sealed"] >= swa["blocks"]["sealed"] >= WHOLE // PAGE / 2, d.stat("spaces")


def test_states_at_the_ends_of_answers(d, alone, a, b) -> None:
    """LFM2: a prefix needs the state at its end, which is kept at the end of each chunk of a prompt and of an answer."""
    turn = prompt(5, 0) + a.ask(prompt(5, 0))["made"][:-1]
    after = turn + prompt(6, 0)[:60]
    second = b.ask(after)
    assert second["cached"] == len(turn), second
    alone.flush()
    assert same(second, alone.ask(after))


def test_caches_of_models_that_need_a_gpu(d, *_) -> None:
    done = subprocess.run([sys.executable, HERE.with_name("sglang_pools.py"), d.socket], text=True, capture_output=True,
                          timeout=600)
    print(done.stdout, end="")
    assert done.returncode == 0, done.stderr[-3000:]
    d.check()


def test_new_weights_share_nothing_with_old_ones(d, alone, a, b) -> None:
    """The files of the model that a server got later, with the same bytes here, may be other ones."""
    a.ask(prompt(7, 0))
    a.send(weights=common.MODEL)
    assert a.line()["updated"]
    assert a.ask(prompt(7, 0))["cached"] == 0
    a.flush()
    assert a.ask(prompt(7, 0))["cached"] == WHOLE       # of its own, since the update
    assert b.ask(prompt(7, 1))["cached"] == WHOLE       # what it computed before
    a.ask(prompt(8, 0))
    assert b.ask(prompt(8, 0))["cached"] == 0
    d.check()


EVERYWHERE = [test_second_process_finds_the_prefix_and_answers_alike, test_prefixes_missing_in_its_own_cache_are_found]
PLAIN = [test_another_model_is_refused, test_caches_of_models_that_need_a_gpu,
         test_the_example_finds_what_servers_computed, test_new_weights_share_nothing_with_old_ones]


def main() -> int:
    failed = 0
    for model, options, own in (("", {"page_size": PAGE}, PLAIN), ("laguna", WINDOWS, [
            test_windows_are_in_a_space_of_their_own]), ("lfm2", STATES, [test_states_at_the_ends_of_answers])):
        print(f"-- {model or 'llama'}")
        with common.daemon() as d, family(d, model, options) as three:
            failed |= common.run([*EVERYWHERE, *own, test_killed_engines_and_daemons_cost_no_answer], d, *three)
    return failed


if __name__ == "__main__":
    sys.exit(serve(sys.argv[2], json.loads(sys.argv[3])) if sys.argv[1:2] == ["serve"] else main())
