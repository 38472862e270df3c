# SPDX-License-Identifier: Apache-2.0
"""For test_vllm.py: vLLM in place with methods. KeyDiff and MemShare against transformers in place, which has its own oracle;
KVReviver and HShare against vLLM alone."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.model_executor.layers import rotary_embedding

import kvd
from common import MODEL, ROOT, Instance, daemon, document
from kvd.engines import _reduction
from kvd.engines._transformers_model import geometry_of
from kvd.engines._vllm_methods import Methods
from kvd.engines._vllm_rows import Row, Rows, Told
from kvd.engines._vllm_steps import Steps, _ends_in
from kvd.engines.transformers import KvdCache
from vllm_engine import Engine
from vllm_server import installed

sys.path.insert(0, str(ROOT / "tools/kvlm"))

from language import Writer, recall_case    # noqa: E402  (needs the path above)

_reduction.PATIENCE_S = 600     # the daemon's worker has what others leave of the processor

BLOCK, CHUNK = 32, 128
OPTIONS = {"max_num_batched_tokens": CHUNK, "max_model_len": 2560}


def space_of(it: Instance) -> str:
    (name,) = [it["name"] for it in it.stat("spaces")["spaces"] if it["name"].startswith("vllm-model")]
    return name


def switch(it: Instance, space: str | None = None, **settings: str | int) -> None:
    """Set settings of a space, and leave all methods off that are not named; _ stands for a dot."""
    all_of_them = dict.fromkeys(("keydiff", "kvreviver", "hshare", "memshare"), "off") | settings
    words = [f"{name.replace('_', '.', 1)}={value}" for name, value in all_of_them.items()]
    it.kvctl("space", "set", space or space_of(it), *words)


def close(got: list[dict], expected: list[dict], tolerance: float = 2e-5) -> None:
    for mine, his in zip(got, expected, strict=True):
        assert mine["tokens"] == his["tokens"], (mine, his)
        assert all(abs(a - b) < tolerance for a, b in zip(mine["logprobs"], his["logprobs"])), (mine, his)


def engine(it: Instance, **options) -> Engine:
    return Engine("in place", extra={"socket": it.socket, "methods": True}, **OPTIONS | options)


def wait_for_tables(it: Instance, n: int) -> None:
    """Wait until the daemon has tables of requests that run."""
    while not any(each["sequences"] >= n for each in it.stat("spaces")["spaces"]):
        time.sleep(0.01)


def nothing_is_held(it: Instance, space: str | None = None) -> None:
    """No more than the unused blocks that each vLLM keeps, and libkvd, a 64th of the pool. The daemon counts pins in rounds,
    and notices a death a little later."""
    (size,) = [each["block_bytes"] for each in it.stat("spaces")["spaces"] if each["name"] == (space or space_of(it))]
    for _ in range(30000):
        if all(each["pinned_blocks"] == 0 and each["held_bytes"] == each["filling_blocks"] * size <= (33 + 32) * size
               for each in it.stat("clients")["clients"]):
            return
        time.sleep(0.02)
    raise AssertionError(it.stat("clients"))


# ---- the same numbers ------------------------------------------------------------------------------------------------


@cache
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="kvd").eval()


def by_transformers(space: kvd.Space, ids: list[int], n: int, say: tuple[int, ...] = (), first: int = 4) -> dict:
    """What transformers answers in place, from a prompt in pieces as vLLM's steps have them. say: what the answer begins with.
    first: the number of logprobs."""
    tokens, logprobs, at = [], [], 0
    with torch.inference_mode(), KvdCache(model(), space, ids, step_ends=[END] if say else ()) as cache:
        at = cache.found
        while len(tokens) < n:
            piece = ids[at:at + CHUNK] if at < len(ids) else tokens[-1:]
            logits = model()(torch.tensor([piece]), past_key_values=cache).logits[0, -1]
            at += len(piece)
            if at >= len(ids):
                tokens.append(say[len(tokens)] if len(tokens) < len(say) else int(logits.argmax()))
                logprobs.append(float(logits.log_softmax(0)[tokens[-1]]))
        (row,) = cache._sequences
        assert not space.setting("keydiff") or row.used < at, row.used
        stats = row.kept.stats() if space.setting("memshare") else None
    return {"tokens": tokens, "logprobs": logprobs[:first]} | ({"shared": stats.shared} if stats else {})


def test_without_a_method_nothing_changes(it: Instance, alone: Engine, one: Engine) -> None:
    """Also with another process, of two threads."""
    prompts = [document(77, 500), document(78, 300), document(77, 400) + [401]]
    expected = alone.ask(prompts, max_tokens=20)
    with engine(it, environment={"OMP_NUM_THREADS": "2"}) as two:
        cold, warm, other = (which.ask(those, max_tokens=20)
                             for which, those in ((one, prompts[:2]), (one, prompts), (two, prompts)))
        close(cold, expected[:2])
        close(warm, expected)
        close(other, expected)
        assert [each["cached"] for each in cold + warm + other] == [0, 0] + 2 * [480, 288, 384]
    it.check()


def test_a_budget_is_that_of_transformers(it: Instance, alone: Engine, one: Engine) -> None:
    """Both keep the same tokens, in prompts and in answers."""
    prompts = [document(80, 640), document(81, 1024), document(82, 384)]
    switch(it, keydiff="on", keydiff_budget=256, keydiff_slack=20)
    with kvd.connect(it.socket).space("oracle", geometry_of(model(), BLOCK)) as oracle:
        oracle.set("keydiff", 1)
        oracle.set("keydiff.budget", 256)
        oracle.set("keydiff.slack", 20)
        expected = [by_transformers(oracle, ids, 100) for ids in prompts]
    got = [one.ask([ids], max_tokens=100)[0] for ids in prompts]       # together, a step would have parts of several prompts
    close(got, expected, 1e-3)
    exact = alone.ask(prompts, max_tokens=100)
    assert any(mine["tokens"] != his["tokens"] for mine, his in zip(got, exact))
    assert [each["cached"] for each in one.ask(prompts, max_tokens=100)] == [0, 0, 0]     # what is reduced is not shared
    close(one.ask([document(83, 200)], max_tokens=8), alone.ask([document(83, 200)]))
    assert one.ask([document(83, 200)])[0]["cached"] == 192                    # what cannot exceed the budget is
    numbers = one.do(op="numbers")
    assert (numbers["used"], numbers["ours"], numbers["chains"], numbers["refused"]) == (0, 0, 0, 0), numbers
    nothing_is_held(it)
    it.check()


# ---- the model's own task --------------------------------------------------------------------------------------------


@cache
def questions(n: int = 10) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of 2,000 tokens that ask for a fact, and answers."""
    writer = Writer("vllm-methods", held_out=True)
    cases = [recall_case(writer, 2000, terse=False) for _ in range(n)]
    return [[1, *each.prompt] for each in cases], [list(each.answer) for each in cases]


def right(got: list[dict], answers: list[list[int]]) -> int:
    return sum(each["tokens"][:len(answer)] == answer for each, answer in zip(got, answers))


def test_more_requests_at_once(it: Instance, alone: Engine, one: Engine) -> None:
    """In a pool that holds four such requests and no more."""
    prompts, answers = questions()
    ways = {"all tokens": {}, "half of them": {"keydiff": "on", "keydiff_budget": 1000, "keydiff_slack": BLOCK},
            "a tenth, the others elsewhere": {"kvreviver": "on", "kvreviver_budget": 0.1}}
    seen = {}
    with daemon("--pool", "39M", "--set", "daemon.segment=1M") as small, engine(small, max_num_batched_tokens=256) as two:
        for way, settings in ways.items():
            two.do(op="watch")
            switch(small, **settings)
            start = time.monotonic()
            got = two.ask(prompts, max_tokens=100)
            seconds = time.monotonic() - start
            seen[way] = two.do(op="seen") | {"right": right(got, answers)}
            print(f"     {way}: {seen[way]['most']} requests at once, {seen[way]['right']} of {len(prompts)} answers,"
                  f" {(sum(map(len, prompts)) + 100 * len(prompts)) / seconds:.0f} tokens/s", flush=True)
        nothing_is_held(small)
        small.check()
    full, *others = seen.values()
    fit = full["most"] - (full["preemptions"] > 0)      # one more had begun, and was preempted
    assert all(each["most"] >= 1.5 * fit and not each["preemptions"] for each in others), seen
    assert full["right"] >= 9 and all(each["right"] >= full["right"] - 1 for each in others), seen


def test_what_has_left_comes_back(it: Instance, alone: Engine, one: Engine) -> None:
    """KVReviver: if all blocks may come back, answers are exact; if none does, they are not."""
    prompts = [document(84, 640), document(85, 300)]
    expected = alone.ask(prompts, max_tokens=60)
    switch(it, kvreviver="on", kvreviver_budget=1)
    close(one.ask(prompts, max_tokens=60), expected, 1e-3)
    switch(it, kvreviver="on", kvreviver_budget=0.1, kvreviver_wanted=1)
    got = one.ask(prompts, max_tokens=60)
    assert all(mine["tokens"] != his["tokens"] and mine["cached"] == 0 for mine, his in zip(got, expected)), got
    switch(it, kvreviver_budget=0.25, kvreviver_wanted=0.1)
    nothing_is_held(it)
    it.check()


def test_tokens_are_selected_and_prefixes_shared(it: Instance, alone: Engine, one: Engine) -> None:
    """HShare: a selection of all is exact, one of a few is not, and one of a tenth answers. Prefixes are found as ever."""
    prompts, answers = [document(86, 640), document(87, 300)], questions(4)[1]
    expected = alone.ask(prompts, max_tokens=60)
    switch(it, hshare="on", hshare_top=65536)
    for cached in ([0, 0], [608, 288]):
        got = one.ask(prompts, max_tokens=60)
        close(got, expected, 1e-3)
        assert [each["cached"] for each in got] == cached
    switch(it, hshare="on", hshare_top=0, hshare_sinks=0, hshare_recent=1, hshare_dense_layers=0)
    patience = time.monotonic() + 600               # labels are made by and by
    while one.ask(prompts, max_tokens=60) == expected:
        assert time.monotonic() < patience
    switch(it, hshare="on", hshare_top=200, hshare_sinks=16, hshare_recent=64, hshare_dense_layers=2)
    one.ask(questions(4)[0])
    assert right(one.ask(questions(4)[0], max_tokens=100), answers) >= 3
    with engine(it) as two:
        assert [each["cached"] for each in two.ask(prompts)] == [608, 288]
    switch(it)
    nothing_is_held(it)
    it.check()


def test_a_worker_in_another_process(it: Instance, alone: Engine, one: Engine) -> None:
    """As under vllm serve: each of the two processes is a client of the daemon. A request that has ended is not held when the
    next one runs."""
    prompts = [document(88, 640), document(89, 300)]
    expected = alone.ask(prompts, max_tokens=60)
    with tempfile.TemporaryDirectory() as folder, engine(it, environment=installed(folder),
                                                         distributed_executor_backend="mp") as far:
        far.do(op="block")
        for settings in ({"kvreviver": "on", "kvreviver_budget": 1}, {"hshare": "on", "hshare_top": 65536}):
            switch(it, **settings)
            close(far.ask(prompts, max_tokens=60), expected, 1e-3)
        switch(it, keydiff="on", keydiff_budget=256)
        (got,) = far.ask(prompts[:1], max_tokens=60)
        assert got["tokens"] != expected[0]["tokens"]
        switch(it, kvreviver_budget=0.25)
        far.ask([document(200, 100)])
        nothing_is_held(it)
        switch(it, kvreviver="on")
        far.tell(op="generate", prompts=prompts, max_tokens=1000)
        wait_for_tables(it, 2)  # the anchor is one
        far.kill()              # its worker ends with it
        nothing_is_held(it)
        switch(it)
        it.check()


def test_a_worker_does_not_meet_the_next_daemon_first(it: Instance, alone: Engine, one: Engine) -> None:
    """The pool that its scheduler uses would be mapped away under running requests."""
    geometry = kvd.Geometry(2, 2, 32, 768, block_tokens=16)
    with daemon("--pool", "64M", "--set", "daemon.segment=4M") as small:
        scheduler, worker = (kvd.connect(small.socket).space("s", geometry, fixed=True) for _ in range(2))
        rows = Rows(worker)
        rows.hold()
        (block,) = scheduler.alloc(1)
        block.memoryview()[:4] = b"kept"
        at = worker.memory().base + block.id * worker.block_bytes
        small.kill()
        small.start()
        for _ in range(3):
            with suppress(kvd.Error):
                worker.sequence(8)
            try:
                worker.alloc(1)
                raise AssertionError("the next daemon's pool is mapped")
            except kvd.Error:
                assert ctypes.string_at(at, 4) == b"kept"
        rows.let_go()
        assert worker.catch_up() and worker.alloc(1)


def test_an_fp8_cache(it: Instance, alone: Engine, one: Engine) -> None:
    """As transformers in place computes it, which has a reference of its own: with scales, and with KeyDiff. Scales that are
    powers of two change no digit of e5m2."""
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        print("skip an fp8 cache: vLLM needs AVX-512 for it")
        return
    prompts = [document(77, 640), document(78, 384)]
    reduced = {"keydiff": "on", "keydiff.budget": 256, "keydiff.slack": 20}
    for dtype, scales, settings in (("fp8_e5m2", (0.5, 4), {"keydiff": "off"}), ("fp8", (1, 1), reduced)):
        own, stored = f"own-{dtype}", kvd.Geometry(1, 1, 2, 2, dtype).dtype
        with (kvd.connect(it.socket).space(f"oracle-{dtype}", geometry_of(model(), BLOCK, dtype=stored)) as oracle,
              Engine("in place", extra={"socket": it.socket, "methods": True, "space": own}, **OPTIONS, kv_cache_dtype=dtype) as two):
            two.do(op="scale", key=scales[0], value=scales[1])
            for name in oracle.name, own:
                it.kvctl("space", "set", name, *(f"{key}={value}" for key, value in settings.items()))
            expected = [by_transformers(oracle, ids, 60) for ids in prompts]
            for _ in range(2):
                got = [two.ask([ids], max_tokens=60)[0] for ids in prompts]
                close(got, expected, 1e-2)      # sums that differ by their last bit may be rounded to neighbouring numbers
            assert [each["cached"] for each in got] == ([0, 0] if dtype == "fp8" else [640 - BLOCK, 384 - BLOCK]), got
    it.check()


def test_what_is_not_shared_borrows_nothing(it: Instance, alone: Engine, one: Engine) -> None:
    """HShare would look its words up, which are another request's: those of prompt embeddings are zeros."""
    with kvd.connect(it.socket).space("unshared", geometry_of(model(), BLOCK)) as space:
        methods = Methods(SimpleNamespace(space=space, size=BLOCK), None, 100, 100)
        request = SimpleNamespace(num_prompt_tokens=50, max_tokens=50, num_tokens=50)
        assert methods.follow(request, 0) is None
        space.set("hshare", 1)
        assert methods.follow(request, 0) is not None and methods.follow(request, None) is None
        space.set("kvreviver", 1)
        assert methods.follow(request, None).own


def test_a_borrow_that_fails_begins_anew(it: Instance, alone: Engine, one: Engine) -> None:
    """Long prompts are borrowed in pieces, and the first ones may be in the table when another one is refused."""
    words, borrow = document(170, 2 * BLOCK), kvd.Sequence.borrow

    def refused(*given) -> None:
        borrow(*given)
        raise kvd.QuotaExceeded(errno.EDQUOT, "refused")

    with kvd.connect(it.socket).space("begins-anew", geometry_of(model(), BLOCK)) as space:
        space.set("hshare", 1)
        with kvd.Pin(space) as pin:
            pin.seal(space.alloc(2), words)
        row, told = Row(space, space.memory(), Told(1, "it", 0, 0, [], [], 4, 0)), Told(1, "it", 0, 64, [7, 8], words, 4, 0)
        kvd.Sequence.borrow = refused
        try:
            row.begin(told, 9, 0.0)
            assert row.sequence is None and row.first == 0
        finally:
            kvd.Sequence.borrow = borrow
        row.begin(replace(told, tokens=64 + BLOCK, ids=[], words=[]), 9, 0.0)
        assert row.first == sum(entry.tokens for entry in row.sequence.entries()) == 2 * BLOCK
        row.close()


# ---- steps of reasoning ----------------------------------------------------------------------------------------------

END = 272           # the token whose text is an empty line


def reasoning(seed: int, n: int) -> tuple[int, ...]:
    """A step of reasoning, whose length is no multiple of a block's."""
    return (*(it for it in document(seed, n)[1:] if it != END), END)


def thoughts(seed: int, times: int) -> tuple[int, ...]:
    """An answer that says a step again and again, and another one twice."""
    said, other = reasoning(seed, 130), reasoning(seed + 1, 61)
    return said * 3 + other + said * (times - 3) + other


@contextmanager
def thinking(it: Instance, **options) -> Iterator[Engine]:
    """A vLLM that says what it is told to. Without a tokenizer, it is told what ends a step."""
    ends = {"step_ends": [END]} if options.get("skip_tokenizer_init", True) else {}
    with Engine("in place", extra={"socket": it.socket, "methods": True, "space": "vllm-steps", **ends},
                logits_processors=["vllm_saying:Saying"], **OPTIONS | options) as two:
        two.do(op="block")
        yield two


def counter(it: Instance, name: str) -> int:
    """A counter of the daemon: "shared" blocks it has taken back for similar ones."""
    return sum(each["value"] for each in it.stat("stat", "vllm-steps")["counters"] if each["name"] == name)


def test_steps_said_again_are_shared(it: Instance, alone: Engine, one: Engine) -> None:
    """Their blocks are those of the first time, at another place, as transformers in place has them; also beside the other
    methods."""
    prompt, say = document(110, 200), thoughts(111, 7)
    n = len(say) + 20
    others: list[dict] = [{}, {"hshare": "on", "hshare_top": 65536}, {"kvreviver": "on", "kvreviver_budget": 1},
                          {"keydiff": "on", "keydiff_budget": 700, "keydiff_slack": 20}]
    with thinking(it) as two, kvd.connect(it.socket).space("oracle-steps", geometry_of(model(), BLOCK)) as oracle:
        def ask() -> dict:
            return two.ask([prompt], max_tokens=n, say=list(say), first=n)[0]

        expected = by_transformers(oracle, prompt, n, say, n)
        close([ask()], [expected], 1e-3)
        assert counter(it, "appended") == counter(it, "steps") == 0        # no method is on
        for settings in others:
            for name in "vllm-steps", oracle.name:
                switch(it, name, memshare="on", **settings)
            before, its = counter(it, "shared"), by_transformers(oracle, prompt, n, say, n)
            two.do(op="count_blocks")
            close([ask()], [its], 1e-3)
            now, counts = counter(it, "shared") - before, two.do(op="counted")
            assert now == its["shared"] >= (3 if "keydiff" in settings else 10), (settings, now, its["shared"])
            assert any(abs(x - y) > 1e-3 for x, y in zip(its["logprobs"], expected["logprobs"])), settings
            first = 0 if {"keydiff", "kvreviver"} & {*settings} else len(prompt) // BLOCK         # blocks of the prompt
            assert counts["over"] == 0 and counts["moved"] >= (len(prompt) + n) // BLOCK - 1, counts
            assert counts["held"] <= counts["moved"] - first - 9, (settings, counts)    # some are partial
        switch(it, "vllm-steps", kvreviver_budget=0.25)
        close([ask()], [expected], 1e-3)
        nothing_is_held(it, "vllm-steps")
    it.check()


def test_the_prompt_of_steps_is_published(it: Instance, alone: Engine, one: Engine) -> None:
    """And the answer is not, which is approximate. Without a tokenizer, and if nobody says what ends a step, MemShare has no
    effect, which the log says once."""
    prompt, say = document(115, 200), thoughts(116, 4)
    with thinking(it) as two:
        switch(it, "vllm-steps", memshare="on")
        before, found = counter(it, "shared"), len(prompt) // BLOCK * BLOCK
        for cached in 0, found:
            assert two.ask([prompt], max_tokens=len(say), say=list(say))[0]["cached"] == cached
        assert counter(it, "shared") > before
        assert two.ask([prompt + list(say[:300])])[0]["cached"] == found
        short = document(117, 20)           # less than a block
        assert len(two.ask([short], max_tokens=len(say) + 2, say=list(say))[0]["tokens"]) == len(say) + 2
        nothing_is_held(it, "vllm-steps")
    switch(it, memshare="on")
    for _ in range(2):
        close(one.ask([prompt], max_tokens=60), alone.ask([prompt], max_tokens=60))
    assert one.tail(1 << 20).count("memshare is on") == one.tail(1 << 20).count("which tokens end a step") == 1
    switch(it)
    it.check()


def test_what_is_recomputed_shares_its_prompt(it: Instance, alone: Engine, one: Engine) -> None:
    """One of two requests whose prompts begin alike, and which goes on by blocks of its own, cannot be attended to. The other
    one, of which nothing is missing, goes on."""
    begins = document(160, 640)
    prompts = [begins, begins[:320] + document(161, 330)]
    expected = alone.ask(prompts, max_tokens=80)
    with thinking(it) as two:
        switch(it, "vllm-steps", memshare="on", hshare="on", hshare_top=65536)
        close(two.ask(prompts, max_tokens=80), expected, 1e-3)
        for calls in 400, 401, 900, 901:
            before = two.tail(1 << 20).count("is recomputed")
            two.do(op="fail", calls=calls, gone=True)
            close(two.ask(prompts, max_tokens=80), expected, 1e-3)
            assert two.tail(1 << 20).count("is recomputed") == before + 1
        nothing_is_held(it, "vllm-steps")
    it.check()


def test_steps_said_again_make_room(it: Instance, alone: Engine, one: Engine) -> None:
    """Blocks that are shared are other requests': in a pool too small for answers that repeat nothing, fewer are preempted."""
    prompts, say, seen = [document(120 + i, 100) for i in range(10)], list(thoughts(130, 8)), {}
    with daemon("--pool", "39M", "--set", "daemon.segment=1M") as small, thinking(small) as two:
        for memshare in "off", "on":
            switch(small, "vllm-steps", memshare=memshare)
            two.do(op="watch")
            got = two.ask(prompts, max_tokens=len(say), say=say)
            assert all(each["tokens"] == say for each in got)
            seen[memshare] = two.do(op="seen")["preemptions"]
            print(f"     memshare {memshare}: {seen[memshare]} preemptions", flush=True)
        nothing_is_held(small, "vllm-steps")
        small.check()
    assert seen["off"] > 0 == seen["on"], seen


def test_steps_in_an_fp8_cache(it: Instance, alone: Engine, one: Engine) -> None:
    """As many blocks are shared as in transformers, and answers are the same, but for numbers that are rounded to neighbours."""
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        print("skip an fp8 cache: vLLM needs AVX-512 for it")
        return
    prompt, say = document(110, 200), thoughts(111, 7)
    with (daemon("--pool", "64M") as small, thinking(small, kv_cache_dtype="fp8") as two,
          kvd.connect(small.socket).space("oracle-fp8", geometry_of(model(), BLOCK, dtype="e4m3")) as oracle):
        for name in "vllm-steps", oracle.name:
            switch(small, name, memshare="on")
        its = by_transformers(oracle, prompt, len(say), say, len(say))
        close(two.ask([prompt], max_tokens=len(say), say=list(say), first=len(say)), [its], 0.2)
        assert counter(small, "shared") == its["shared"] >= 10, its["shared"]
        nothing_is_held(small, "vllm-steps")
        small.check()


def test_models_whose_steps_are_not_compared(it: Instance, alone: Engine, one: Engine) -> None:
    """Their keys cannot be turned, as the configuration says, or the code in the process that has the model."""
    def steps(loaded: bool, ends: list[int] = [END], **rope) -> Steps:
        text = SimpleNamespace(rope_parameters={"rope_type": "default", "rope_theta": 500000.0} | rope)
        transfer = SimpleNamespace(get_from_extra_config=lambda name, otherwise: ends)
        return Steps(SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text), kv_transfer_config=transfer), 32, loaded)

    assert not rotary_embedding._ROPE_DICT and steps(False).missing() == "" and steps(False).ends == {END}
    assert "which tokens end a step" in steps(False, []).missing()
    for it in (steps(False, rope_type="linear", factor=4.0), steps(False, rope_theta=None), steps(False, rope_type="llama3"),
               steps(True)):
        assert "rotate" in it.missing()
    rotary_embedding._ROPE_DICT["another"] = SimpleNamespace()
    assert "rotate" in steps(False).missing()
    rotary_embedding._ROPE_DICT.clear()
    for wrong in ("\n\n", ["\n\n"], [True]):
        with suppress(ValueError):
            raise AssertionError(steps(False, wrong))


def test_an_engine_that_shares_steps_is_killed(it: Instance, alone: Engine, one: Engine) -> None:
    """In the middle of an answer: a worker in another process, with a tokenizer, which knows what ends a step. And a daemon, in
    the middle of another."""
    prompts, say = [document(140 + i, 200) for i in range(2)], list(thoughts(141, 8))
    assert END in _ends_in(AutoTokenizer.from_pretrained(MODEL))
    with daemon("--pool", "64M") as small, thinking(small) as two, tempfile.TemporaryDirectory() as folder:
        def begin(which: Engine, n: int) -> None:
            """Have it answer, and wait until it has shared blocks."""
            before, patience = counter(small, "shared"), time.monotonic() + 600
            which.tell(op="generate", prompts=prompts, max_tokens=n, say=say)
            while counter(small, "shared") < before + 4:
                assert time.monotonic() < patience

        expected = two.ask(prompts, max_tokens=len(say) + 20, say=say)
        with thinking(small, environment=installed(folder), distributed_executor_backend="mp", skip_tokenizer_init=False) as far:
            switch(small, "vllm-steps", memshare="on")
            approximate = two.ask(prompts, max_tokens=len(say) + 20, say=say)
            close(far.ask(prompts, max_tokens=len(say) + 20, say=say), approximate, 1e-3)
            begin(far, 2000)
            far.kill()
        nothing_is_held(small, "vllm-steps")
        small.check()
        for _ in range(20):         # a fast engine may have answered before the daemon is killed
            before = two.do(op="numbers")["restarts"]
            begin(two, len(say) + 20)
            small.kill()
            small.start()
            got = two.hear()
            if two.do(op="numbers")["restarts"] > before:
                break
            two.ask([document(142, 20)])        # meets the next daemon
            switch(small, "vllm-steps", memshare="on")
        close(got, expected, 1e-3)              # computed again in the new pool, where no method is on
        nothing_is_held(small, "vllm-steps")
        small.check()


# ---- deaths ----------------------------------------------------------------------------------------------------------


def test_an_engine_or_the_daemon_is_killed(it: Instance, alone: Engine, one: Engine) -> None:
    prompts, short = [document(90 + i, 700) for i in range(4)], [document(99, 100)]
    switch(it, keydiff="on", keydiff_budget=256, keydiff_slack=20)
    expected = one.ask(prompts, max_tokens=100)
    with engine(it) as two:
        two.ask(prompts[:1])
        two.tell(op="generate", prompts=prompts, max_tokens=1000)
        wait_for_tables(it, 1)
        two.kill()
    nothing_is_held(it)
    it.check()
    with engine(it) as two:     # the daemon is replaced while both have nothing to do, and one meets the next first
        two.ask(prompts[:1])
        it.kill()
        it.start()
        two.ask([document(95 + i, 700) for i in range(4)])
        close(one.ask(short), alone.ask(short))     # looks up, and so meets the next daemon, with blocks of the last one
        switch(it, keydiff="on", keydiff_budget=256, keydiff_slack=20)
        close(one.ask(prompts, max_tokens=100), expected)
    one.tell(op="generate", prompts=prompts, max_tokens=400)
    wait_for_tables(it, 1)
    it.kill()
    it.start()
    assert all(len(each["tokens"]) == 400 for each in one.hear())       # from the new pool, where no method is on
    close(one.ask(short), alone.ask(short))     # which it has met by now, even if all was computed before
    switch(it, keydiff="on", keydiff_budget=256, keydiff_slack=20)
    close(one.ask(prompts, max_tokens=100), expected)
    assert one.do(op="numbers")["state"] == "serving"
    nothing_is_held(it)
    it.check()


def test_what_cannot_be_attended_to_is_computed_again(it: Instance, alone: Engine, one: Engine) -> None:
    """In the middle of a step, of which no token is used; beside requests that go on. If nothing is missing, it goes on, too,
    and reads all its tokens, as does one of several that share their first blocks."""
    prompts = [document(103, 700), document(104, 640)]
    expected = alone.ask(prompts, max_tokens=60)
    for settings in ({"kvreviver": "on", "kvreviver_budget": 1}, {"hshare": "on", "hshare_top": 65536}):
        switch(it, **settings)
        for calls, gone in ((1, False), (30, False), (400, False), (400, True)):
            before = [one.tail(1 << 20).count(it) for it in ("is recomputed", "reads all its tokens")]
            recomputed = gone and "kvreviver" in settings
            one.do(op="fail", calls=calls, gone=recomputed)
            close(one.ask(prompts + prompts[:1], max_tokens=60), expected + expected[:1], 1e-3)
            after = [one.tail(1 << 20).count(it) for it in ("is recomputed", "reads all its tokens")]
            assert after == [before[0] + recomputed, before[1] + (not recomputed)], (settings, calls, gone)
    switch(it, kvreviver_budget=0.25)
    nothing_is_held(it)
    it.check()


def test_the_daemon_is_killed_and_most_blocks_have_left(it: Instance, alone: Engine, one: Engine) -> None:
    """KVReviver: nobody has them any more. The requests are computed once more when the next daemon is there."""
    prompts = [document(100 + i, 700) for i in range(3)]
    expected = alone.ask(prompts, max_tokens=400)
    switch(it, kvreviver="on", kvreviver_budget=0.1, kvreviver_wanted=0.001)
    before = one.tail(1 << 20).count("is recomputed")
    one.do(op="kill_when_gone", pid=it.process.pid)
    one.tell(op="generate", prompts=prompts, max_tokens=400)
    it.process.wait(600)
    it.kill()
    it.start()
    assert all(len(each["tokens"]) == 400 for each in one.hear())
    assert one.tail(1 << 20).count("is recomputed") > before
    close(one.ask(prompts, max_tokens=400), expected, 1e-3)     # no method is on in the new pool
    nothing_is_held(it)
    it.check()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    only = sys.argv[1:]
    with daemon("--pool", "256M", "--set", "daemon.segment=4M") as it, Engine(**OPTIONS) as alone, engine(it) as one:
        one.do(op="block")          # it has started
        for name, test in list(globals().items()):
            if name.startswith("test_") and (not only or name in only):
                try:
                    test(it, alone, one)
                except BaseException:
                    print(one.tail(6000))
                    raise
                print(f"ok   {name.removeprefix('test_').replace('_', ' ')}", flush=True)
