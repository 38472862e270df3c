# SPDX-License-Identifier: Apache-2.0
"""For test_vllm.py: vLLM in place with methods. KeyDiff, against transformers in place, which has its own oracle."""

from __future__ import annotations

import os
import sys
import time
from functools import cache

import torch
from transformers import AutoModelForCausalLM

import kvd
from common import MODEL, ROOT, Instance, daemon, document
from kvd.engines import _transformers_sequence
from kvd.engines._transformers_model import geometry_of
from kvd.engines.transformers import KvdCache
from vllm_engine import Engine

sys.path.insert(0, str(ROOT / "tools/kvlm"))

from language import Writer, recall_case    # noqa: E402  (needs the path above)

_transformers_sequence.PATIENCE_S = 600     # the daemon's worker has what others leave of the processor

BLOCK, CHUNK = 32, 128
OPTIONS = {"max_num_batched_tokens": CHUNK, "max_model_len": 2560}


def space_of(it: Instance) -> str:
    (name,) = [it["name"] for it in it.stat("spaces")["spaces"] if it["name"].startswith("vllm-")]
    return name


def switch(it: Instance, **settings: str | int) -> None:
    it.kvctl("space", "set", space_of(it), *(f"keydiff{'.' * bool(name)}{name}={value}" for name, value in settings.items()))


def close(got: list[dict], expected: list[dict], tolerance: float = 2e-5) -> None:
    for mine, his in zip(got, expected, strict=True):
        assert mine["tokens"] == his["tokens"], (mine, his)
        assert all(abs(a - b) < tolerance for a, b in zip(mine["logprobs"], his["logprobs"])), (mine, his)


def engine(it: Instance, **options) -> Engine:
    return Engine("in place", extra={"socket": it.socket, "methods": True}, **OPTIONS | options)


def nothing_is_held(it: Instance) -> None:
    """No more than the unused blocks that each vLLM keeps. The daemon counts pins in rounds, and notices a death a little
    later."""
    (size,) = [each["block_bytes"] for each in it.stat("spaces")["spaces"] if each["name"] == space_of(it)]
    for _ in range(3000):
        if all(each["pinned_blocks"] == 0 and each["held_bytes"] == each["filling_blocks"] * size <= 33 * size
               for each in it.stat("clients")["clients"]):
            return
        time.sleep(0.02)
    raise AssertionError(it.stat("clients"))


# ---- the same numbers ------------------------------------------------------------------------------------------------


@cache
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="kvd").eval()


def by_transformers(space: kvd.Space, ids: list[int], n: int) -> dict:
    """What transformers answers in place, from a prompt in pieces as vLLM's steps have them."""
    tokens, logprobs, at = [], [], 0
    with torch.inference_mode(), KvdCache(model(), space, ids) as cache:
        while len(tokens) < n:
            piece = ids[at:at + CHUNK] if at < len(ids) else tokens[-1:]
            logits = model()(torch.tensor([piece]), past_key_values=cache).logits[0, -1]
            at += len(piece)
            if at >= len(ids):
                tokens.append(int(logits.argmax()))
                logprobs.append(float(logits.log_softmax(0)[tokens[-1]]))
        (row,) = cache._sequences
        assert row.used < at, row.used
    return {"tokens": tokens, "logprobs": logprobs[:4]}


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
    """Both keep the same tokens where whole blocks are kept, in prompts and in answers."""
    prompts = [document(80, 640), document(81, 1024), document(82, 384)]
    switch(it, **{"": "on", "budget": 256, "slack": 2 * BLOCK - 1})
    with kvd.connect(it.socket).space("oracle", geometry_of(model(), BLOCK)) as oracle:
        oracle.set("keydiff", 1)
        oracle.set("keydiff.budget", 256)
        oracle.set("keydiff.slack", 2 * BLOCK - 1)
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


# ---- more requests from the same pool --------------------------------------------------------------------------------


def test_more_requests_at_once(it: Instance, alone: Engine, one: Engine) -> None:
    """The model's own task, in a pool that holds four such requests and no more."""
    writer = Writer("vllm-methods", held_out=True)
    cases = [recall_case(writer, 2000, terse=False) for _ in range(10)]
    prompts, answers = [[1, *each.prompt] for each in cases], [list(each.answer) for each in cases]
    seen = {}
    with daemon("--pool", "39M", "--set", "daemon.segment=1M") as small, engine(small, max_num_batched_tokens=256) as two:
        for way, budget in (("all tokens", 0), ("half of them", 1000)):
            two.do(op="watch")
            switch(small, **{"": "on", "budget": budget, "slack": BLOCK})
            start = time.monotonic()
            got = two.ask(prompts, max_tokens=100)
            seconds = time.monotonic() - start
            right = sum(each["tokens"][:len(answer)] == answer for each, answer in zip(got, answers))
            seen[way] = two.do(op="seen") | {"right": right}
            print(f"     {way}: {seen[way]['most']} requests at once, {right} of {len(cases)} answers,"
                  f" {(sum(map(len, prompts)) + 100 * len(prompts)) / seconds:.0f} tokens/s", flush=True)
        nothing_is_held(small)
        small.check()
    full, half = seen["all tokens"], seen["half of them"]
    assert half["most"] >= 1.5 * full["most"] and not half["preemptions"], seen
    assert full["right"] >= 9 and half["right"] >= full["right"] - 1, seen


# ---- deaths ----------------------------------------------------------------------------------------------------------


def test_an_engine_or_the_daemon_is_killed(it: Instance, alone: Engine, one: Engine) -> None:
    prompts, short = [document(90 + i, 700) for i in range(4)], [document(99, 100)]
    switch(it, **{"": "on", "budget": 256, "slack": 2 * BLOCK - 1})
    expected = one.ask(prompts, max_tokens=100)
    with engine(it) as two:
        two.ask(prompts[:1])
        two.tell(op="generate", prompts=prompts, max_tokens=1000)
        time.sleep(1)
        two.kill()
    nothing_is_held(it)
    it.check()
    with engine(it) as two:     # the daemon is replaced while both have nothing to do, and one meets the next first
        two.ask(prompts[:1])
        it.kill()
        it.start()
        two.ask([document(95 + i, 700) for i in range(4)])
        close(one.ask(short), alone.ask(short))     # looks up, and so meets the next daemon, with blocks of the last one
        switch(it, **{"": "on", "budget": 256, "slack": 2 * BLOCK - 1})
        close(one.ask(prompts, max_tokens=100), expected)
    one.tell(op="generate", prompts=prompts, max_tokens=400)
    time.sleep(1)
    it.kill()
    it.start()
    assert all(len(each["tokens"]) == 400 for each in one.hear())       # from the new pool, where no method is on
    switch(it, **{"": "on", "budget": 256, "slack": 2 * BLOCK - 1})
    close(one.ask(prompts, max_tokens=100), expected)
    assert one.do(op="numbers")["state"] == "serving"
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
