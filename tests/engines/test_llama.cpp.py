# SPDX-License-Identifier: Apache-2.0
"""llama.cpp on kvd: real contexts in several processes, the repository's model as GGUF."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import common

HERE = Path(__file__).resolve()
EXAMPLE = common.ROOT / "client/python/examples/llama_cpp_shared.py"
N, NEW = 900, 12
DOCUMENTS = [common.document(seed, N) for seed in range(4)]


# ---- the other process -----------------------------------------------------------------------------------------------


def serve(gguf: str, socket: str, options: str) -> None:
    """Answers lines of JSON: {"tokens", "store"} gets {"had", "made", "stored"}. raw: without a Llama object."""
    import numpy
    from llama_cpp import Llama, llama_cpp

    import kvd
    from kvd.engines.llama_cpp import Sequence, Share

    llama, sharing, raw = (json.loads(options).get(it, {}) for it in ("llama", "share", "raw"))
    llm = Llama(gguf, n_ctx=2048, n_threads=1, verbose=False, **({"flash_attn": True} | llama))
    try:
        engine = Sequence(llama_cpp._lib, llm.ctx) if raw else llm
        share = Share(engine, kvd.connect(socket), model=gguf, **sharing) if socket else None
    except kvd.Error as e:
        print(json.dumps({"refused": type(e).__name__, "words": str(e)}), flush=True)
        return
    print(json.dumps({"space": share.space.name, "whole": share.whole} if share else {}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        had = share.restore(ask["tokens"]) if share else 0
        if raw:
            llm.input_ids[:had], llm.n_tokens, llm._requires_eval = ask["tokens"][:had], had, True
        made = list(itertools.islice(llm.generate(ask["tokens"], temp=0), NEW))
        logits = numpy.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), (llm.n_vocab(),)).tolist()
        held = llm.input_ids[:llm.n_tokens] if raw else None
        stored = share.store(held) if share and ask.get("store", True) else 0
        print(json.dumps({"had": had, "made": made, "stored": stored, "logits": logits}), flush=True)
        if ask.get("reset", True):
            llm.reset()


class Process:
    def __init__(self, gguf: str, socket: str, **options):
        self.process = subprocess.Popen([sys.executable, HERE, "serve", gguf, socket, json.dumps(options)], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.about = self._line()

    def _line(self) -> dict:
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def ask(self, tokens: list[int], **more) -> dict:
        print(json.dumps({"tokens": tokens, **more}), file=self.process.stdin, flush=True)
        return self._line()

    def end(self) -> str:
        """Returns its warnings."""
        return self.process.communicate(timeout=600)[1]


@contextmanager
def process(gguf: str, socket: str, **options):
    it = Process(gguf, socket, **options)
    try:
        yield it
    finally:
        it.process.kill()
        it.process.communicate()


def prompt(document: int, question: int) -> list[int]:
    return DOCUMENTS[document] + [500 + question, 501 + question]


def alone(gguf: str, prompts: list[list[int]], **options) -> list[list[int]]:
    with process(gguf, "", **options) as it:
        return [it.ask(tokens)["made"] for tokens in prompts]


# ---- tests -----------------------------------------------------------------------------------------------------------


def test_second_process_finds_the_prefix_and_answers_alike(gguf: str) -> None:
    expected = alone(gguf, [prompt(0, 0), prompt(0, 1)])
    with common.daemon() as d, process(gguf, d.socket) as a, process(gguf, d.socket) as b:
        first = a.ask(prompt(0, 0))
        assert not a.about["whole"] and first["had"] == 0 and first["stored"] == (N + NEW) // 16 * 16, first
        second = b.ask(prompt(0, 1))
        assert second["had"] == N // 16 * 16, second["had"]
        assert [first["made"], second["made"]] == expected
        assert 0 < second["stored"] <= 32, "blocks in the pool are not copied again"
        assert b.ask(prompt(0, 1))["had"] == (N + 1) // 16 * 16
        d.check()


def test_restored_is_computed_bit_for_bit(gguf: str) -> None:
    """Both decode the rest in a separate batch: only the prefix's origin differs."""
    with common.daemon() as d, process(gguf, d.socket) as a, process(gguf, d.socket) as b:
        a.ask(DOCUMENTS[1][:896] + [7], reset=False)
        own = a.ask(prompt(1, 2), store=False)
        taken = b.ask(prompt(1, 2))
        assert taken["had"] == 896, taken["had"]
        assert own["made"] == taken["made"] and own["logits"] == taken["logits"]


def test_cells_out_of_order_are_stored_in_order(gguf: str) -> None:
    """A context that dropped a tail and continued, with 8-bit keys: neither types nor the cells' positions matter."""
    options = {"llama": {"type_k": 8, "type_v": 8}}
    expected = alone(gguf, [prompt(2, 3)], **options)
    with common.daemon() as d, process(gguf, d.socket, **options) as a, process(gguf, d.socket, **options) as b:
        a.ask(DOCUMENTS[2][:500] + DOCUMENTS[3], reset=False)
        a.ask(prompt(2, 3), reset=False)
        taken = b.ask(prompt(2, 3))
        assert taken["had"] == N // 16 * 16 and taken["made"] == expected[0]


def test_a_program_without_a_llama_object(gguf: str) -> None:
    expected = alone(gguf, [prompt(1, 4)])[0]
    with common.daemon() as d, process(gguf, d.socket, raw=True) as a, process(gguf, d.socket) as b:
        assert a.about["space"] == b.about["space"]
        assert a.ask(prompt(1, 3))["had"] == 0
        assert a.ask(prompt(1, 4))["made"] == expected
        taken = b.ask(prompt(1, 4))
        assert taken["had"] == (N + 1) // 16 * 16 and taken["made"] == expected


def test_other_arithmetic_is_another_space(gguf: str) -> None:
    with common.daemon() as d, process(gguf, d.socket) as a:
        a.ask(prompt(0, 0))
        with process(gguf, d.socket, llama={"rope_freq_base": 250000.0}) as b:
            assert b.about["space"] != a.about["space"] and b.ask(prompt(0, 0))["had"] == 0
        with process(gguf, d.socket, llama={"rope_freq_base": 250000.0}, share={"space": a.about["space"]}) as b:
            assert b.about["refused"] == "Mismatch" and "fingerprint" in b.about["words"], b.about
        with process(gguf, d.socket, share={"salt": 5}) as b:
            assert b.about["space"] == a.about["space"] and b.ask(prompt(0, 0))["had"] == 0


def test_unknown_form_is_shared_as_a_whole(gguf: str) -> None:
    """Without flash attention, values are stored transposed."""
    options = {"llama": {"flash_attn": False}}
    turn = prompt(3, 0)
    expected = alone(gguf, [turn], **options)[0]
    with common.daemon() as d, process(gguf, d.socket, **options) as a, process(gguf, d.socket, **options) as b:
        assert a.about["whole"]
        assert a.ask(turn)["made"] == expected
        after = turn + expected[:-1] + [303, 304, 305]
        taken = b.ask(after)
        assert taken["had"] == len(turn) + NEW - 1, taken["had"]
        assert taken["made"] == a.ask(after, store=False)["made"]
        assert "flash attention" in b.end()
        d.check()


def test_killed_clients_and_daemons_cost_no_answer(gguf: str) -> None:
    prompts = [prompt(i % 4, i) for i in range(8)]
    expected = alone(gguf, prompts)
    with common.daemon("--pool", "64M") as d, process(gguf, d.socket) as a:
        with process(gguf, d.socket) as b:
            b.ask(prompts[0])
            print(json.dumps({"tokens": prompts[1]}), file=b.process.stdin, flush=True)
            b.process.kill()
        for i in (0, 1, 2):
            assert a.ask(prompts[i])["made"] == expected[i]
        d.check()
        d.kill()
        for i in (3, 4):
            assert a.ask(prompts[i])["made"] == expected[i]
        d.start()
        for i in (5, 6, 7):
            assert a.ask(prompts[i])["made"] == expected[i]
        with process(gguf, d.socket) as b:
            assert b.ask(prompts[7])["had"] >= N // 16 * 16
        d.check()


def test_a_full_pool_is_a_warning(gguf: str) -> None:
    options = {"llama": {"type_k": 0, "type_v": 0}}     # f32: 4 KiB a token
    expected = alone(gguf, [prompt(0, 0)], **options)[0]
    with common.daemon("--pool", "4M") as d, process(gguf, d.socket, **options) as a:
        it = a.ask(DOCUMENTS[0] + DOCUMENTS[1])
        assert it["stored"] == 0
        assert a.ask(prompt(0, 0))["made"] == expected
        assert "not shared" in a.end()
        d.check()


def test_example_finds_its_document_the_second_time(gguf: str) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 30
    with common.daemon() as d:
        runs = [subprocess.run([sys.executable, EXAMPLE, gguf], env=os.environ | {"KVD_SOCKET": d.socket}, text=True,
                               capture_output=True, timeout=600) for _ in range(2)]
        cold, warm = (it.stdout.splitlines() for it in runs)
        assert len(warm) == 2, runs[1].stderr
        assert cold[0].startswith("0 of ") and not warm[0].startswith("0 of "), (cold, warm)
        assert [it.split("ms:")[1] for it in cold] == [it.split("ms:")[1] for it in warm]


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="kvd-gguf-") as folder:
        gguf = f"{folder}/model.gguf"
        subprocess.run([sys.executable, HERE.parent / "to_gguf.py", common.MODEL, gguf], check=True, timeout=600)
        return common.run([it for name, it in globals().items() if name.startswith("test_")], gguf)


if __name__ == "__main__":
    sys.exit(serve(*sys.argv[2:]) if sys.argv[1:2] == ["serve"] else main())
