# SPDX-License-Identifier: Apache-2.0
"""transformers on the pool (kvd.engines.transformers): in place and by copy, against transformers alone.

Logits reach about 15. Sums in another order differ by about 1e-6 there, and by up to 1e-4 where attention is sharp.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
import transformers
from transformers import (AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, DynamicCache, GenerationConfig,
                          StoppingCriteria)

import kvd
from common import MODEL, ROOT, daemon, document, run
from kvd.engines import _reduction, _transformers_model
from kvd.engines._transformers_sequence import Followed
from kvd.engines.transformers import KvdCache, load_prefix, open_space, store, use_pool

TOLERANCE = 1e-3
NEW = 20
EXAMPLES = ROOT / "client/python/examples"

torch.set_num_threads(1)
_reduction.PATIENCE_S = 600     # the worker has what others leave of the processor
warnings.filterwarnings("ignore")
logging.getLogger("kvd").setLevel(logging.WARNING)


def load(implementation: str = "kvd", **options):
    return AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation=implementation, **options).eval()


alone, ours = load("sdpa"), load("kvd")


def generate(model, ids: list[int], cache=None, n: int = NEW, **options) -> list[int]:
    """Greedy: exactly n tokens."""
    out = model.generate(torch.tensor([ids]), past_key_values=cache, max_new_tokens=n, min_new_tokens=n,
                         do_sample=False, **options)
    return out[0, len(ids):].tolist()


def in_place(space, ids: list[int], **options) -> tuple[list[int], int]:
    with KvdCache(ours, space, ids) as cache:
        return generate(ours, ids, cache, **options), cache.found


def expect(error: type[Exception], words: str, function, *arguments, **options) -> None:
    try:
        function(*arguments, **options)
    except error as it:
        assert words in str(it), f"{it!r} does not say {words!r}"
        return
    raise AssertionError(f"no {error.__name__}: {words}")


def held(server) -> int:
    return sum(it["pinned_blocks"] for it in server.stat("clients")["clients"])


def soon(is_so) -> bool:
    """The daemon counts pins in rounds, so a change shows a little later."""
    for _ in range(30000):
        if is_so():
            return True
        time.sleep(0.02)
    return False


def nothing_is_held(server) -> None:
    assert soon(lambda: held(server) == 0), [it for it in server.stat("clients")["clients"] if it["pinned_blocks"]]


# ---- the same numbers ------------------------------------------------------------------------------------------------


def test_in_place_gives_the_same_logits(server, space):
    with torch.inference_mode():
        for n in (2, 15, 16, 17, 33, 500):
            ids = document(1000 + n, n)
            expected = alone(torch.tensor([ids])).logits[0]
            for found in (0, (n - 1) // 16 * 16):       # cold, then warm
                with KvdCache(ours, space, ids) as cache:
                    assert cache.found == found, (n, cache.found)
                    got = ours(torch.tensor([ids[found:]]), past_key_values=cache).logits[0]
                    assert cache.get_seq_length() == n
                error = (got - expected[found:]).abs().max().item()
                assert error < TOLERANCE, (n, found, error)


def test_in_place_generates_the_same_tokens(server, space):
    for n in (5, 64, 333, 1200):
        ids = document(2000 + n, n)
        expected = generate(alone, ids)
        for _ in range(2):
            got, _ = in_place(space, ids)
            assert got == expected, n
        longer = ids + expected         # a conversation continues: the generated tokens were stored, too
        got, found = in_place(space, longer)
        assert got == generate(alone, longer) and found == (n + NEW - 1) // 16 * 16, (n, found)
    nothing_is_held(server)


def test_a_cache_goes_on_from_call_to_call(server, space):
    ids = document(3000, 100)
    expected, other = DynamicCache(config=alone.config), torch.tensor([ids])
    with KvdCache(ours, space, ids) as cache, torch.inference_mode():
        for part in (slice(0, 10), slice(10, 11), slice(11, 80), slice(80, 100)):
            a = alone(other[:, part], past_key_values=expected).logits
            b = ours(other[:, part], past_key_values=cache).logits
            assert (a - b).abs().max() < TOLERANCE
    assert space.match(ids) == 96


def test_by_copy(server, space):
    for n in (6, 50, 400):
        ids = document(4000 + n, n)
        expected = generate(alone, ids)
        for turn in range(2):
            cache, found = load_prefix(space, alone, torch.tensor([ids]))
            assert found == turn * ((n - 1) // 16 * 16)
            assert generate(alone, ids, cache) == expected
            stored = store(space, cache, ids + expected)
            assert stored == ((n + NEW - 1) // 16 if turn == 0 else 0)
        assert in_place(space, ids) == (expected, (n - 1) // 16 * 16)      # one space serves both ways
    nothing_is_held(server)


def test_half_precision(server, space):
    for dtype in (torch.bfloat16, torch.float16):
        a, b = load("sdpa", dtype=dtype), load("kvd", dtype=dtype)
        ids = document(5000, 200)
        with open_space(space.daemon, b) as own, torch.inference_mode():
            expected = a(torch.tensor([ids])).logits
            for found in (0, 192):
                with KvdCache(b, own, ids) as cache:
                    assert cache.found == found
                    got = b(torch.tensor([ids[found:]]), past_key_values=cache).logits
                assert (got - expected[:, found:]).abs().max() < 0.5 and got.dtype == dtype


def test_other_caches_of_the_same_model(server, space):
    ids = document(6000, 40)
    assert generate(ours, ids) == generate(alone, ids)
    both = torch.tensor([ids, [0] * 10 + ids[:30]])
    mask = (both != 0).long()
    got, expected = (model.generate(both, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
                     for model in (ours, alone))
    assert torch.equal(got, expected)
    cache = DynamicCache(config=ours.config)
    with torch.inference_mode():
        ours(torch.tensor([ids[:20]]), past_key_values=cache)
        got = ours(torch.tensor([ids[20:]]), past_key_values=cache).logits
        assert (got - alone(torch.tensor([ids])).logits[:, 20:]).abs().max() < TOLERANCE


def test_text_in_text_out(server, space):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = (ROOT / "tools/kvlm/demo/document-1.txt").read_text()
    asked = [json.loads(line) for line in (ROOT / "tools/kvlm/demo/questions-1.jsonl").read_text().splitlines()[:4]]
    for i, it in enumerate(asked):
        ids = tokenizer(text + it.get("question", it.get("prompt"))).input_ids
        got, found = in_place(space, ids, n=8)
        assert tokenizer.decode(got).split("\n")[0] == it["answer"], tokenizer.decode(got)
        assert (found > 1900) == (i > 0), found


# ---- several processes -----------------------------------------------------------------------------------------------


def child(server, *words) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, __file__, server.socket, *map(str, words)], stdout=subprocess.PIPE,
                            text=True)


def serve(socket: str, *seeds: str) -> None:
    """The child process: answers about documents, one line each."""
    with kvd.connect(socket) as connection, open_space(connection, ours) as space:
        for seed in seeds:
            tokens, found = in_place(space, document(int(seed), 300) + [400])
            print(json.dumps({"seed": int(seed), "tokens": tokens, "found": found}), flush=True)


def answers(process: subprocess.Popen) -> list[dict]:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return [json.loads(line) for line in out.splitlines()]


def test_the_second_process_finds_the_first_ones(server, space):
    expected = generate(alone, document(7000, 300) + [400])
    for found in (0, 288):
        (answer,) = answers(child(server, 7000))
        assert answer == {"seed": 7000, "tokens": expected, "found": found}


def test_four_processes_one_killed(server, space):
    seeds = [7100 + i % 5 for i in range(15)]
    expected = {seed: generate(alone, document(seed, 300) + [400]) for seed in set(seeds)}
    processes = [child(server, *seeds[i:], *seeds[:i]) for i in range(4)]
    victim = processes.pop()
    victim.stdout.readline()                    # it is now working on its second answer
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    for process in processes:
        for answer in answers(process):
            assert answer["tokens"] == expected[answer["seed"]], answer
    for seed, tokens in expected.items():
        assert in_place(space, document(seed, 300) + [400]) == (tokens, 288)
    server.check()


class At(StoppingCriteria):
    """Calls a function once there are n tokens."""

    def __init__(self, n: int, what):
        self.n, self.what = n, what

    def __call__(self, ids, scores, **_):
        if ids.shape[1] == self.n:
            self.what()
        return torch.zeros(ids.shape[0], dtype=torch.bool)


def test_the_daemon_is_killed_in_the_middle(server, space):
    def restart():
        server.kill()
        server.start()

    for i, what in enumerate((server.kill, restart)):
        ids = document(7200 + i, 90)
        in_place(space, ids)
        expected = generate(alone, ids, n=700)
        with KvdCache(ours, space, ids) as cache:
            assert cache.found == 80
            assert generate(ours, ids, cache, n=700, stopping_criteria=[At(120, what)]) == expected
            assert cache.private                # it needed more blocks than libkvd had in stock
        if what == server.kill:
            server.start()
        for _ in range(2):      # the first may find the dead daemon's blocks, which stay mapped while used
            assert in_place(space, ids)[0] == expected[:NEW]
        with KvdCache(ours, space, ids) as cache:
            assert generate(ours, ids, cache) == expected[:NEW] and cache.found == 80 and not cache.private
        assert server.stat("spaces")["spaces"][0]["blocks"]["sealed"] > 0
        server.check()


def test_a_daemon_that_does_not_answer_ends_a_request(server, space):
    """What was sent to it may be published, and evicted since: it cannot be read any more."""
    ids = document(7250, 90)
    with KvdCache(ours, space, ids) as cache:
        expect(kvd.TimedOut, "", generate, ours, ids, cache, n=40,
               stopping_criteria=[At(95, lambda: server.process.send_signal(signal.SIGSTOP))])
        server.process.send_signal(signal.SIGCONT)
    assert soon(space.catch_up)
    assert in_place(space, ids)[0] == generate(alone, ids)
    server.check()


def test_a_full_pool_is_no_failure(server, space):
    with daemon("--pool", "8M") as small, kvd.connect(small.socket) as connection:
        with open_space(connection, ours) as own:
            ids = document(7300, 1500)
            expected = generate(alone, ids)
            held_by_others = []
            with KvdCache(ours, own, document(7301, 600)) as other:
                generate(ours, document(7301, 600), other)
                while True:
                    try:
                        held_by_others += own.alloc(1)
                    except (kvd.PoolFull, kvd.QuotaExceeded):
                        break
                own.free([held_by_others.pop()])
                with KvdCache(ours, own, ids) as cache:
                    assert generate(ours, ids, cache) == expected and cache.private
                assert generate(ours, document(7301, 600), KvdCache(ours, own, document(7301, 600))) == generate(
                    alone, document(7301, 600))
            own.free(held_by_others)
            assert in_place(own, ids)[0] == expected
        small.check()


# ---- batches, padding, windows -----------------------------------------------------------------------------------------


def padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and attention_mask of a batch, with padding on the left."""
    n = max(map(len, prompts))
    return (torch.tensor([[0] * (n - len(it)) + it for it in prompts]),
            torch.tensor([[0] * (n - len(it)) + [1] * len(it) for it in prompts]))


def generate_batch(model, ids, mask, cache=None, n: int = NEW, **options) -> list[list[int]]:
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=n, min_new_tokens=n,
                         do_sample=False, **options)
    return out[:, ids.shape[1]:].tolist()


def batch_in_place(model, space, ids, mask, **options) -> tuple[list[list[int]], int]:
    with KvdCache(model, space, ids, attention_mask=mask) as cache:
        return generate_batch(model, ids, mask, cache, **options), cache.found


def test_rows_with_padding(server, space):
    """Rows of a batch are found by others and by requests alone. The batch begins where the least is found."""
    prompts = [document(9500 + n, n) for n in (200, 90, 33, 7, 200)]
    prompts[4] = prompts[0][:100] + prompts[4][:100]    # it begins like another row
    ids, mask = padded(prompts)
    expected = generate_batch(alone, ids, mask)
    in_place(space, prompts[1])
    for found in (0, 190):      # the padding of the prompt of 90 tokens, and five of its blocks
        assert batch_in_place(ours, space, ids, mask) == (expected, found)
    for prompt, tokens in zip(prompts, expected):
        assert in_place(space, prompt) == (tokens, (len(prompt) - 1) // 16 * 16)
    longer, more = padded([prompt + tokens for prompt, tokens in zip(prompts, expected)])
    assert batch_in_place(ours, space, longer, more) == (generate_batch(alone, longer, more), 206)
    pair = torch.tensor([prompts[0], prompts[4]])
    expected = generate_batch(alone, pair, None)
    assert batch_in_place(ours, space, pair, None) == (expected, 192)
    nothing_is_held(server)


def test_a_row_for_each_answer(server, space):
    ids = torch.tensor([document(9510, 70)])
    rows = ids.repeat_interleave(3, 0)
    with KvdCache(ours, space, rows) as cache:
        got = ours.generate(ids, past_key_values=cache, num_return_sequences=3, do_sample=True, top_k=1, max_new_tokens=8)
    assert got[:, 70:].tolist() == [generate(alone, ids[0].tolist(), n=8)] * 3
    assert space.match(ids[0].tolist()) == 64


WINDOWS = {"Mistral": {"sliding_window": 40},
           "Gemma2": {"sliding_window": 24, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8, "head_dim": 16},
           "Gemma3Text": {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16},
           "GptOss": {"sliding_window": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16},
           "Olmo3": {"sliding_window": 33}, "Cohere2": {"sliding_window": 20}}


def windowed(kind: str, implementation: str = "kvd"):
    model = small(kind, implementation, num_key_value_heads=2, intermediate_size=64, **WINDOWS[kind])
    for name, it in model.named_parameters():
        if any(word in name for word in ("sinks", "embed", "lm_head", "q_proj", "k_proj", "v_proj")):
            torch.nn.init.normal_(it, std=0.5)      # so that attention decides the next token
    return model


def logits(model, ids, mask, cache=None) -> torch.Tensor:
    first = cache.found if cache else 0
    positions = (mask.cumsum(1) - 1).clamp(0)[:, first:]
    with torch.no_grad():
        return model(ids[:, first:], attention_mask=mask, position_ids=positions, past_key_values=cache).logits


def test_windows_soft_caps_and_sinks(server, space):
    """Against transformers' own eager attention, over several windows; rows with padding, too."""
    ids, mask = padded([document(9520, 130), document(9521, 61), document(9522, 15)])
    for kind in WINDOWS:
        torch.manual_seed(2)
        plain = windowed(kind, "eager")
        model = windowed(kind)
        model.load_state_dict(plain.state_dict())
        expected, tokens = logits(plain, ids, mask), generate_batch(plain, ids, mask)
        long = document(9520, 130)
        with open_space(space.daemon, model) as own:
            expect(ValueError, "sliding", load_prefix, own, model, long)
            for found in (0, 128):      # the window of a row's last tokens begins behind its found prefix, or in it
                with KvdCache(model, own, ids, attention_mask=mask) as cache:
                    assert cache.found == (115 if found else 0), kind
                    error = (logits(model, ids, mask, cache) - expected[:, cache.found:])[mask[:, cache.found:] > 0]
                assert error.abs().max() < TOLERANCE, (kind, found, error.abs().max())
                assert batch_in_place(model, own, ids, mask) == (tokens, 115), kind
                with KvdCache(model, own, long) as cache:
                    assert cache.found == 128 and generate(model, long, cache) == tokens[0], kind
        assert logits(model, ids, mask).sub(expected)[mask > 0].abs().max() < TOLERANCE     # without a cache of ours
        assert len({tuple(it) for it in tokens}) == 3


def test_positions_are_checked_whatever_a_model_does_with_them(server, space):
    """Without position_ids, some models count the padding, and do not show their attention function the positions; and
    there is a model inside of the model. Their keys would be published as those of other positions."""
    prompt = document(9525, 53)
    ids, mask = padded([document(9526, 60), prompt])
    for kind in ("GPTBigCode", "Persimmon", "GPT2"):
        model, plain = (small(kind, it, **TAKEN.get(kind, {"intermediate_size": 64})) for it in ("kvd", "eager"))
        with open_space(space.daemon, model) as own, torch.no_grad():
            with KvdCache(model, own, ids, attention_mask=mask) as cache:
                expect(ValueError, "position_ids", model, ids, attention_mask=mask, past_key_values=cache)
            with KvdCache(model, own, prompt) as cache:
                expect(ValueError, "position_ids", model.base_model, torch.tensor([prompt]), past_key_values=cache,
                       position_ids=torch.arange(53)[None] + 5)
            tokens = generate_batch(plain, ids, mask)
            assert batch_in_place(model, own, ids, mask) == (tokens, 0), kind
            with KvdCache(model, own, prompt) as cache:
                assert cache.found == 48, kind
                got = model(torch.tensor([prompt[48:]]), past_key_values=cache).logits
            assert (got - plain(torch.tensor([prompt])).logits[:, 48:]).abs().max() < TOLERANCE, kind


def test_a_batch_goes_on_in_private_memory(server, space):
    """A full pool, and a daemon that is killed in the middle: with padding, prefixes of different lengths, windows."""
    for kind in ("GptOss", "Gemma2"):
        model, plain = windowed(kind), windowed(kind, "eager")
        plain.load_state_dict(model.state_dict())
        ids, mask = padded([document(9530, 130), document(9531, 61), document(9532, 30)])
        expected = generate_batch(plain, ids, mask, n=200)
        with daemon("--pool", "64M") as own, kvd.connect(own.socket) as connection:
            with open_space(connection, model, max_blocks=60) as room:
                held_by_others = room.alloc(20)
                batch_in_place(model, room, ids[1:2, 69:], None, n=1)
                for _ in range(2):
                    with KvdCache(model, room, ids, attention_mask=mask) as cache:
                        assert generate_batch(model, ids, mask, cache, n=200) == expected and cache.private
                room.free(held_by_others)
            with open_space(connection, model) as room:
                with KvdCache(model, room, ids, attention_mask=mask) as cache:
                    stop = At(150, own.kill)
                    assert generate_batch(model, ids, mask, cache, n=200, stopping_criteria=[stop]) == expected
            own.start()
            own.check()


ROWS = (300, 200, 45)


def rows_in_child(socket: str) -> None:
    """Computes a batch, and says when it has begun to answer."""
    with kvd.connect(socket) as connection, open_space(connection, ours) as space:
        ids, mask = padded([document(9550 + n, n) for n in ROWS])
        said = At(ids.shape[1] + 40, lambda: print("answering", flush=True))
        batch_in_place(ours, space, ids, mask, n=2000, stopping_criteria=[said])


def test_a_process_with_a_batch_is_killed(server, space):
    """What its rows have published is found, and nothing of it is held."""
    ids, mask = padded([document(9550 + n, n) for n in ROWS])
    other = child(server, "--rows")
    assert other.stdout.readline() == "answering\n"
    other.kill()
    other.communicate()
    nothing_is_held(server)
    assert batch_in_place(ours, space, ids, mask) == (generate_batch(alone, ids, mask), 287)
    server.check()


def test_what_a_batch_does_not_support(server, space):
    ids, mask = padded([document(9540, 40), document(9541, 30)])
    expect(ValueError, "on the left", KvdCache, ours, space, ids.flip(1), attention_mask=mask.flip(1))
    expect(ValueError, "no tokens", KvdCache, ours, space, ids, attention_mask=mask * 0)
    expect(ValueError, "shape of input_ids", KvdCache, ours, space, ids, attention_mask=mask[:1])
    expect(ValueError, "different lengths", KvdCache, ours, space, [[1, 2], [3]])
    with KvdCache(ours, space, ids, attention_mask=mask) as cache, torch.inference_mode():
        for words, given in (("padding", mask * 0 + 1), ("without attention_mask", None), ("padding", mask.flip(0))):
            expect(ValueError, words, ours, ids, attention_mask=given, past_key_values=cache)
        wrong = torch.arange(40).expand(2, 40)
        expect(ValueError, "position_ids", ours, ids, attention_mask=mask, position_ids=wrong, past_key_values=cache)
        expect(ValueError, "not the tokens", ours, ids + mask, attention_mask=mask, past_key_values=cache,
               position_ids=(mask.cumsum(1) - 1).clamp(0))
        expect(ValueError, "position_ids", ours, ids, attention_mask=mask, past_key_values=cache)
        expect(ValueError, "1 sequences in a cache of 2", ours, ids[:1], past_key_values=cache)
        expect(ValueError, "4 sequences in a cache of 2", ours.generate, ids, attention_mask=mask, num_beams=2,
               past_key_values=cache, max_new_tokens=4)
        assert generate_batch(ours, ids, mask, cache) == generate_batch(alone, ids, mask)
    nothing_is_held(server)


# ---- KeyDiff ---------------------------------------------------------------------------------------------------------


@contextmanager
def reduced(server, budget: int, **settings):
    """A space under KeyDiff's budget, in tokens per layer and head."""
    with kvd.connect(server.socket) as connection, open_space(connection, ours, f"reduced-{budget}") as space:
        for name, value in {"keydiff": 1, "keydiff.budget": budget, **settings}.items():
            space.set(name, value)
        yield space


def step(model, token: int, at: int, cache) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[token]]), past_key_values=cache, position_ids=torch.tensor([[at]])).logits[0, -1]


def seen(cache) -> DynamicCache:
    """What a cache sees of its tokens, for transformers' own attention."""
    it = DynamicCache(config=alone.config)
    for i, (keys, values) in enumerate(cache._seen()):
        it.update(keys, values, i)
    return it


def test_a_budget_keeps_some_tokens_of_each_head(server, space):
    with reduced(server, 200) as own:
        ids = document(9000, 600)
        for _ in range(2):          # nothing of the first is found by the second, since it is approximate
            with KvdCache(ours, own, ids) as cache:
                assert cache.found == 0
                generate(ours, ids, cache, n=1)
                (row,) = cache._sequences
                assert row.used == 200 and len(cache.blocks) <= 200 // 16 + 2, (row.used, len(cache.blocks))
                flags = [it.flags for it in row.kept.entries()]
                assert any(it & kvd.EntryFlags.COMPACT for it in flags) and not flags[0] & kvd.EntryFlags.COMPACT
                for i, token in enumerate(document(9001, 40)):
                    before = seen(cache)
                    assert before.get_seq_length() == row.used <= 216
                    assert torch.allclose(step(ours, token, 600 + i, cache), step(alone, token, 600 + i, before),
                                          atol=TOLERANCE), i
        assert own.match(ids) == 0
    nothing_is_held(server)
    server.check()


def test_a_budget_for_all_changes_nothing(server, space):
    with reduced(server, 5000) as own:
        ids = document(9010, 500)
        assert in_place(own, ids)[0] == generate(alone, ids)


def test_answers_under_half_of_the_budget(server, space):
    """The model's own task: a fact of a document. Half of the tokens suffice for all of them."""
    demo = ROOT / "tools/kvlm/demo"
    text, tokenizer = (demo / "document-1.txt").read_text(), AutoTokenizer.from_pretrained(MODEL)
    with reduced(server, 1) as own:
        for line in (demo / "questions-1.jsonl").read_text().splitlines()[:8]:
            it = json.loads(line)
            ids = tokenizer(text + it["prompt"]).input_ids
            own.set("keydiff.budget", len(ids) // 2)
            with KvdCache(ours, own, ids) as cache:
                assert tokenizer.decode(generate(ours, ids, cache, n=6)).startswith(it["answer"]), it


def test_rows_under_a_budget(server, space):
    prompts = [document(9020, 300), document(9021, 120)]
    ids, mask = padded(prompts)
    with reduced(server, 150) as own:
        expected = [in_place(own, it)[0] for it in prompts]
        assert batch_in_place(ours, own, ids, mask)[0] == expected


def test_the_budget_follows_the_switches(server, space):
    with reduced(server, 100, **{"keydiff.slack": 0}) as own:
        ids = document(9030, 300)
        with KvdCache(ours, own, ids) as cache:
            generate(ours, ids, cache, n=1)
            (row,) = cache._sequences
            assert row.used == 100
            for i, (budget, used) in enumerate(((0, 150), (80, 80), (1000, 130))):
                own.set("keydiff.budget", budget)
                for j, token in enumerate(document(9031 + i, 50)):
                    step(ours, token, 300 + 50 * i + j, cache)
                assert row.used == used, (row.used, budget)


def test_a_budget_outlives_its_daemon(server, space):
    """The rest of the request goes on in private memory, and sees what the pool had."""
    with reduced(server, 200, **{"keydiff.slack": 10000}) as own:
        ids = document(9040, 400)
        with KvdCache(ours, own, ids) as cache:
            expected = generate(ours, ids, cache, n=700)
        with KvdCache(ours, own, ids) as cache:
            assert generate(ours, ids, cache, n=700, stopping_criteria=[At(450, server.kill)]) == expected
            assert cache.private
        assert in_place(own, ids)[0] == generate(alone, ids)        # a new request without a daemon is exact
        server.start()
    with reduced(server, 200, **{"keydiff.slack": 10000}) as own:       # the next daemon's space, with its own switches
        assert in_place(own, ids)[0] == expected[:NEW]
    server.check()
    assert soon(space.catch_up)         # the tests' own connection, for those that follow


def test_a_budget_without_a_daemon_keeps_what_there_is(server, space):
    """The daemon ends when a compaction is due, in the middle of a block."""
    with reduced(server, 100, **{"keydiff.slack": 0}) as own:
        ids = document(9080, 200)
        with KvdCache(ours, own, ids) as cache:
            generate(ours, ids, cache, n=1)
            (row,) = cache._sequences
            for i, token in enumerate(document(9081, 70)):
                if i == 19:
                    server.kill()
                before = seen(cache) if not cache.private else None
                got = step(ours, token, 200 + i, cache)
                assert before is None or torch.allclose(got, step(alone, token, 200 + i, before), atol=TOLERANCE), i
            assert row.used > 140
        server.start()
    server.check()
    assert soon(space.catch_up)         # the tests' own connection, for those that follow


def test_a_daemon_that_is_replaced_under_a_budget(server, space):
    """At the end of a block, when the row has no block to fill, and before its first step: it goes on with what it has."""
    def restart():
        server.kill()
        server.start()

    with reduced(server, 200, **{"keydiff.slack": 10000}) as own:
        ids = document(9060, 400)
        with KvdCache(ours, own, ids) as cache:
            expected = generate(ours, ids, cache, n=700)
        for at in (416, 425):
            for name, value in {"keydiff": 1, "keydiff.budget": 200, "keydiff.slack": 10000}.items():
                own.set(name, value)
            with KvdCache(ours, own, ids) as cache:
                assert generate(ours, ids, cache, n=700, stopping_criteria=[At(at, restart)]) == expected, at
                assert cache.private and cache.blocks == [], cache.blocks
            own.catch_up()
        own.set("keydiff", 1)
        own.set("keydiff.budget", 200)
        with KvdCache(ours, own, ids) as cache:
            restart()
            assert generate(ours, ids, cache) == generate(alone, ids)
    server.check()
    assert soon(space.catch_up)         # the tests' own connection, for those that follow


def test_blocks_that_leave_unasked_come_back(server, space):
    """KVReviver, switched on meanwhile, takes blocks under pressure; or they are gone for good, and the request ends."""
    with reduced(server, 200, **{"keydiff.slack": 0}) as own:
        ids, tokens = document(9090, 300), document(9091, 40)
        for i in range(2):
            with KvdCache(ours, own, ids) as cache:
                generate(ours, ids, cache, n=1)
                (row,) = cache._sequences
                own.set("kvreviver", 1)
                row.kept.cool([2], "spill")
                assert row.kept.wait(600) and not row.kept.entries()[2].data
                if i == 1:
                    row.kept.revive = lambda slots: None
                    expect(RuntimeError, "did not come back", step, ours, tokens[0], 300, cache)
                else:
                    step(ours, tokens[0], 300, cache)
                    assert all(it.data or it.flags & kvd.EntryFlags.DROPPED for it in row.kept.entries())
                    before = seen(cache)
                    assert torch.allclose(step(ours, tokens[1], 301, cache), step(alone, tokens[1], 301, before), atol=TOLERANCE)
                own.set("kvreviver", 0)
    server.check()


def test_a_compaction_that_fails_is_tried_again(server, space):
    """Packed blocks need room beside the old ones, which a full pool does not have. The row is then what it was."""
    with reduced(server, 100, **{"keydiff.slack": 0}) as own:
        ids, asked = document(9070, 200), []
        with KvdCache(ours, own, ids) as cache:
            (row,) = cache._sequences
            compact = row.kept.compact

            def sometimes(*arguments):
                asked.append(row.length)
                if len(asked) < 3:
                    raise kvd.PoolFull(errno.ENOBUFS, "there is no room")
                return compact(*arguments)

            row.kept.compact = sometimes
            generate(ours, ids, cache, n=1)
            assert row.used == 200 and asked == [200]
            for i, token in enumerate(document(9071, 40)):
                step(ours, token, 200 + i, cache)
                assert row.used == (201 + i if i < 31 else 100), (i, row.used)
            assert asked[:3] == [200, 216, 232] and not cache.private


def reduced_in_child(socket: str) -> None:
    with kvd.connect(socket) as connection, open_space(connection, ours, "reduced-200") as own:
        ids = document(9050, 400)
        with KvdCache(ours, own, ids) as cache:
            generate(ours, ids, cache, n=1)
            print(len(cache.blocks), flush=True)
            signal.pause()


def test_a_process_under_a_budget_is_killed(server, space):
    with daemon("--pool", "64M") as small, reduced(small, 200) as own:
        process = subprocess.Popen([sys.executable, __file__, small.socket, "--reduced"], stdout=subprocess.PIPE, text=True)
        assert 0 < int(process.stdout.readline()) <= 14
        process.kill()
        process.wait()

        def left() -> tuple[int, int]:
            return held(small), sum(it["sequences"] for it in small.stat("spaces")["spaces"])

        assert soon(lambda: left() == (0, 0)), (left(), small.stat("spaces"), small.stat("clients"))
        assert in_place(own, document(9051, 400))[0]
        small.check()


def test_what_a_budget_does_not_support(server, space):
    model = windowed("Mistral")
    with kvd.connect(server.socket) as connection, open_space(connection, model) as own:
        own.set("keydiff", 1)
        own.set("keydiff.budget", 100)
        expect(ValueError, "sliding windows", KvdCache, model, own, [1, 2, 3])


# ---- KVReviver and HShare --------------------------------------------------------------------------------------------


@contextmanager
def following(server, name: str, **settings):
    """A space whose methods are set."""
    with kvd.connect(server.socket) as connection, open_space(connection, ours, name) as space:
        for it, value in settings.items():
            space.set(it, value)
        yield space


def asked(n: int = 8) -> list[tuple[list[int], str]]:
    """Questions about a fact of a document of 2,000 tokens, and their answers."""
    demo, tokenizer = ROOT / "tools/kvlm/demo", AutoTokenizer.from_pretrained(MODEL)
    text, lines = (demo / "document-1.txt").read_text(), (demo / "questions-1.jsonl").read_text().splitlines()
    return [(tokenizer(text + it["prompt"]).input_ids, it["answer"]) for it in map(json.loads, lines[:n])]


def answers_all(space, questions: list[tuple[list[int], str]], look) -> None:
    """Answers them, and lets look() check each row before it closes."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for ids, answer in questions:
        with KvdCache(ours, space, ids) as cache:
            assert tokenizer.decode(generate(ours, ids, cache, n=6)).startswith(answer), answer
            (row,) = cache._sequences
            look(cache, row)


def test_answers_from_a_tenth_of_the_blocks(server, space):
    """KVReviver: the block with the fact comes back when the question is asked."""
    def look(cache, row):
        table, reader = row.kept.stats(), row.reader.stats()
        assert table.resident <= 13 < 100 < table.spilled + table.resident and reader.most_resident <= 13, table
        assert reader.misses and table.revived_exact and cache.found == 0, reader

    with following(server, "revived", kvreviver=1, **{"kvreviver.budget": 0.1}) as own:
        answers_all(own, asked(), look)
        assert own.match(asked(1)[0][0]) == 0
    nothing_is_held(server)
    server.check()


def test_answers_from_selected_tokens(server, space):
    """HShare: a decoded token sees a tenth. The prompt is published and found, the answer is not published."""
    def look(cache, row):
        assert row.reader.stats().selections and (cache.found == 0 if cache is first[0] else cache.found > 1900)
        assert row.kept.stats().borrowed == len(row.prompt) // 16

    first = []
    with following(server, "selected", hshare=1, **{"hshare.top": 120}) as own:
        questions = asked()
        with KvdCache(ours, own, questions[0][0]) as cache:
            first.append(cache)
            generate(ours, questions[0][0], cache, n=60)
            look(cache, cache._sequences[0])
            assert own.match(questions[0][0] + generate(ours, questions[0][0], n=60)) == 2000
        answers_all(own, questions, look)
        own.set("hshare", 0)
        ids = questions[0][0]
        assert in_place(own, ids) == (generate(alone, ids), 2000)
    nothing_is_held(server)
    server.check()


def test_a_selection_of_all_changes_nothing(server, space):
    """Whatever is read; with rows, and a conversation that goes on after an answer."""
    ids, mask = padded([document(9100, 300), document(9101, 120)])
    expected = generate_batch(alone, ids, mask, n=40)
    for name, settings in {"hshare": {"hshare.top": 10000}, "kvreviver": {"kvreviver.budget": 1},
                           "both": {"hshare": 1, "kvreviver": 1, "hshare.top": 1000, "kvreviver.budget": 1}}.items():
        with following(server, f"all-{name}", **{name: 1} if name != "both" else {}, **settings) as own:
            for _ in range(2):
                assert batch_in_place(ours, own, ids, mask, n=40) == (expected, 0), name
            prompt = document(9102, 200)
            with KvdCache(ours, own, prompt) as cache:
                said = prompt + generate(ours, prompt, cache, n=30)
                more = said + document(9103, 50)
                assert generate(ours, more, cache, n=30) == generate(alone, more, n=30), name
    server.check()


def test_methods_together(server, space):
    """Half of the tokens (KeyDiff), of which a quarter stays (KVReviver), of which a tenth is read (HShare)."""
    def look(cache, row):
        table = row.kept.stats()
        assert table.compacted and table.spilled and row.reader.stats().selections, table
        assert row.used <= 1000 + 16 + 6 and table.resident <= 32, (row.used, table)

    settings = {"keydiff.budget": 1000, "hshare.top": 120}
    with following(server, "together", keydiff=1, kvreviver=1, hshare=1, **settings) as own:
        answers_all(own, asked(), look)
    nothing_is_held(server)
    server.check()


def test_a_conversation_goes_on_without_most_blocks(server, space):
    """A second question in the same cache: its tokens, too, bring back what they need."""
    tokenizer, (ids, answer), (other, second) = AutoTokenizer.from_pretrained(MODEL), *asked(2)
    same = next(i for i, (a, b) in enumerate(zip(ids, other)) if a != b)
    with following(server, "second", kvreviver=1, **{"kvreviver.budget": 0.1}) as own:
        with KvdCache(ours, own, ids) as cache:
            said = ids + generate(ours, ids, cache, n=6)
            assert tokenizer.decode(said[len(ids):]).startswith(answer)
            more = said + tokenizer("\n").input_ids + other[same - 20:]
            assert tokenizer.decode(generate(ours, more, cache, n=6)).startswith(second)


def test_a_question_in_the_middle_of_a_call(server, space):
    """Its answer is right although 60 other tokens follow in the same call, whose queries need other blocks."""
    tokenizer, (ids, _), (other, _) = AutoTokenizer.from_pretrained(MODEL), *asked(2)
    same = next(i for i, (a, b) in enumerate(zip(ids, other)) if a != b)
    question = tokenizer("\n").input_ids + other[same - 20:]
    with following(server, "middle", kvreviver=1, **{"kvreviver.budget": 0.1}) as own, torch.no_grad():
        with KvdCache(ours, own, ids) as cache:
            generate(ours, ids, cache, n=1)
            got = ours(torch.tensor([question + document(9104, 60)]), past_key_values=cache).logits[0, len(question) - 1]
        right = alone(torch.tensor([ids + question])).logits[0, -1]
    assert got.argmax() == right.argmax()


def test_a_prompt_in_pieces_under_pressure_is_whole(server, space):
    """The daemon takes blocks of a row that KeyDiff and KVReviver reduce before its prompt is complete. They come back, or
    the request ends; no piece is computed without them."""
    settings = {"keydiff.budget": 640, "kvreviver.budget": 0.2, "pressure.low": 0, "pressure.high": 0.001}
    with daemon("--pool", "64M") as small, following(small, "pieces", keydiff=1, kvreviver=1, **settings) as own:
        ids = document(9105, 1024)
        with KvdCache(ours, own, ids) as cache, suppress(RuntimeError), torch.no_grad():
            (row,), attend = cache._sequences, Followed.attend

            def watched(self, layer, *given, **form):
                assert self.decodes or not _reduction.missing(self.kept), self.length
                return attend(self, layer, *given, **form)

            row.attend = watched.__get__(row)
            for at in range(0, 1024, 128):
                ours(torch.tensor([ids[at:at + 128]]), past_key_values=cache)
                time.sleep(0.3)         # the daemon relieves the pool
        small.check()


def test_missing_blocks_without_a_daemon_end_the_request(server, space):
    """Whether a query needs them, or only its next block has no room: it must not go on without them, and unnoticed."""
    with daemon("--pool", "64M") as small, following(small, "lost", kvreviver=1, **{"kvreviver.budget": 0.1}) as own:
        (ids, _), = asked(1)
        with KvdCache(ours, own, ids) as cache:
            expect(kvd.Error, "", generate, ours, ids, cache, n=60, stopping_criteria=[At(len(ids) + 1, small.kill)])
        small.start()
        small.check()


def test_a_full_pool_swaps_blocks(server, space):
    """What leaves makes room for what comes back, and for the answer."""
    with daemon("--pool", "64M") as small, following(small, "full", kvreviver=1, **{"kvreviver.budget": 0.1}) as own:
        (ids, _), = asked(1)
        with KvdCache(ours, own, ids) as cache, ExitStack() as others:
            generate(ours, ids, cache, n=1)
            for _ in range(3):      # a client may fill half of the pool
                room = others.enter_context(open_space(others.enter_context(kvd.connect(small.socket)), ours, "full"))
                with suppress(kvd.PoolFull, kvd.QuotaExceeded):
                    while True:
                        others.callback(room.free, room.alloc(1))
            for i in range(40):
                step(ours, 5, len(ids) + i, cache)
            assert not cache.private and cache._sequences[0].kept.stats().revived_exact
        small.check()


def followed_in_child(socket: str) -> None:
    with following(type("", (), {"socket": socket}), "killed", kvreviver=1, hshare=1) as own:
        ids = document(9110, 800)
        with KvdCache(ours, own, ids) as cache:
            generate(ours, ids, cache, n=20)
            print(cache._sequences[0].kept.stats().spilled, flush=True)
            signal.pause()


def test_a_process_whose_blocks_have_left_is_killed(server, space):
    with daemon("--pool", "64M") as small:
        process = subprocess.Popen([sys.executable, __file__, small.socket, "--followed"], stdout=subprocess.PIPE, text=True)
        assert int(process.stdout.readline()) > 20
        process.kill()
        process.wait()

        def left() -> tuple[int, int]:
            return held(small), sum(it["sequences"] for it in small.stat("spaces")["spaces"])

        assert soon(lambda: left() == (0, 0)), (left(), small.stat("spaces"), small.stat("clients"))
        small.check()


# ---- MemShare --------------------------------------------------------------------------------------------------------

END = 272           # the token whose text is an empty line


def reasoning(ids: list[int], n: int = 130) -> list[int]:
    """A step of reasoning."""
    return [it for it in ids[:n] if it != END] + [END]


def test_steps_that_repeat_share_blocks(server, space):
    """A step that is said again uses the blocks of the first time, at another position. Each step is transformers' own
    attention over the turned keys; also in private memory, and with the other methods."""
    assert AutoTokenizer.from_pretrained(MODEL).decode([END]) == "\n\n"
    (ids, _), = asked(1)
    prompt, said = ids[:100], reasoning(ids[100:])
    others = {"alone": {}, "selected": {"hshare": 1, "hshare.top": 10000, "kvreviver": 1, "kvreviver.budget": 1}}
    for name, more in others.items():
        with daemon("--pool", "64M") as small, following(small, f"said-{name}", memshare=1, **more) as own, torch.no_grad():
            with KvdCache(ours, own, prompt, step_ends=[END]) as cache:
                ours(torch.tensor([prompt]), past_key_values=cache)
                for _ in range(4):
                    ours(torch.tensor([said]), past_key_values=cache)
                (row,) = cache._sequences
                table = row.kept.stats()
                assert table.shared >= 10 and table.bytes_saved >= 10 * own.block_bytes, table
                deltas = [it.delta for it in row.kept.entries() if it.flags & kvd.EntryFlags.SHARED]
                assert deltas and all(it and it % len(said) == 0 for it in deltas), deltas
                for i, token in enumerate(document(9300, 300 if name == "alone" else 40)):
                    if i == 20 and name == "alone":
                        small.kill()
                    if not cache.private:
                        before = seen(cache)
                    at = cache.get_seq_length()
                    got, right = step(ours, token, at, cache), step(alone, token, at, before)
                    assert torch.allclose(got, right, atol=TOLERANCE), (name, i)
                assert cache.private == (name == "alone")
            if name != "alone":
                small.check()


def test_steps_that_repeat_keep_a_budget(server, space):
    """Shared blocks cannot be compacted: the others make up for them, by KeyDiff or by a scorer, and not with every token."""
    def scorer(layer, queries, keys, values, scale):
        return keys.norm(dim=2)

    (ids, _), = asked(1)
    prompt, said = ids[:100], reasoning(ids[100:])
    for name, more in {"keydiff": {"keydiff": 1, "keydiff.budget": 350}, "scorer": {}}.items():
        given = {} if more else {"scorer": scorer, "budget": 350}
        with daemon("--pool", "64M") as small, following(small, f"kept-{name}", memshare=1, **more) as own, torch.no_grad():
            with KvdCache(ours, own, prompt, step_ends=[END], **given) as cache:
                (row,), asked_for = cache._sequences, []
                compact = row.kept.compact
                row.kept.compact = lambda *arguments: asked_for.append(row.length) or compact(*arguments)
                for it in (prompt, said, said, said):
                    ours(torch.tensor([it]), past_key_values=cache)
                assert row.kept.stats().shared and row.used <= 350 + 16, (name, row.used, row.kept.stats())
                asked_for.clear()
                for i, token in enumerate(document(9310, 100)):
                    before, at = seen(cache), cache.get_seq_length()
                    got, right = step(ours, token, at, cache), step(alone, token, at, before)
                    assert torch.allclose(got, right, atol=TOLERANCE), (name, i)
                assert row.used <= 350 + 32 and len({*asked_for}) < 20, (name, row.used, asked_for)
            small.check()


def test_rows_of_steps(server, space):
    """A batch whose first call has only padding in one row."""
    (ids, _), = asked(1)
    rows, mask = padded([reasoning(ids, 130) + reasoning(ids, 60), reasoning(ids[200:], 40)])
    with following(server, "step-rows", memshare=1) as own, torch.no_grad():
        with KvdCache(ours, own, rows, attention_mask=mask, step_ends=[END]) as cache:
            positions, got = (mask.cumsum(1) - 1).clamp(0), []
            for at in range(0, rows.shape[1], 64):
                end = min(at + 64, rows.shape[1])
                got.append(ours(rows[:, at:end], attention_mask=mask[:, :end], position_ids=positions[:, at:end],
                                past_key_values=cache).logits)
        right = alone(rows, attention_mask=mask, position_ids=positions).logits
        assert (torch.cat(got, 1) - right)[mask.bool()].abs().max() < TOLERANCE


def test_a_budget_of_blocks_that_have_left(server, space):
    """KeyDiff and KVReviver: they come back to be compacted."""
    settings = {"keydiff.budget": 400, "kvreviver.budget": 0.25}
    with following(server, "left", keydiff=1, kvreviver=1, **settings) as own:
        ids = document(9311, 300)
        with KvdCache(ours, own, ids) as cache:
            generate(ours, ids, cache, n=300)
            (row,) = cache._sequences
            assert row.used <= 400 + 50 + 16 and row.kept.stats().compacted, (row.used, row.kept.stats())


def test_models_that_rotate_otherwise(server, space):
    """Their keys cannot be turned: scaled, slow pairs only, in some layers only, half of a head."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "rope_theta": 500000.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500000.0}
    others = [small("Llama", rope_parameters=llama3), small("Llama", rope_parameters=yarn), small("GPTNeoX", intermediate_size=64),
              small("SmolLM3", num_key_value_heads=2, intermediate_size=64, no_rope_layers=[1, 0])]
    for model in others:
        assert _transformers_model.frequencies_of(model) is None, model.config
    for model in (ours, small("Llama"), small("Qwen3", num_key_value_heads=2, intermediate_size=64, head_dim=16)):
        assert _transformers_model.frequencies_of(model) is not None, model.config


def test_what_is_not_compared(server, space):
    """A model that rotates its keys by other angles; without step_ends, no step is known."""
    heard, logger = Heard(), logging.getLogger("kvd.engines.transformers")
    logger.addHandler(heard)
    logger.setLevel(logging.WARNING)
    try:
        for kind, more in (("ours", {}), ("scaled", {"step_ends": [END]})):
            model = ours if kind == "ours" else small("Llama", rope_parameters={
                "rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0})
            with kvd.connect(server.socket) as connection, open_space(connection, model, f"steps-{kind}") as own:
                own.set("memshare", 1)
                with KvdCache(model, own, document(9301, 40), **more) as cache:
                    generate(model, document(9301, 40), cache)
    finally:
        logger.removeHandler(heard)
        logger.setLevel(logging.NOTSET)
    assert len(heard.lines) == 2 and all("memshare is on" in it for it in heard.lines), heard.lines


# ---- continuous batching ---------------------------------------------------------------------------------------------


class Batches:
    """A manager of continuous batching; with a socket, in the pool."""

    def __init__(self, socket: str | None = None, *, sequences: int = 1, model=None, max_blocks: int = 0, **config):
        config = {"page_size": 16, "num_blocks": 400, "max_batch_tokens": 128} | config
        generation = GenerationConfig(max_new_tokens=NEW, do_sample=True, top_k=1, eos_token_id=-1, pad_token_id=0,
                                      num_return_sequences=sequences)       # top_k=1: greedy, but may return several
        self.manager = (model or alone).init_continuous_batching(
            generation_config=generation, continuous_batching_config=ContinuousBatchingConfig(**config))
        self.space = use_pool(self.manager, kvd.connect(socket), max_blocks=max_blocks) if socket else None

    def __enter__(self) -> Batches:
        self.manager.start()
        return self

    def __exit__(self, *_) -> None:
        self.manager.stop(block=True)

    @classmethod
    def alone(cls, prompt: list[int]) -> list[int]:
        with cls() as plain:
            return plain.tokens([prompt])[0]

    def ask(self, prompts: list[list[int]], results: int | None = None, new: int = NEW) -> dict[str, list[int] | str]:
        """Answers, or errors, by the names of requests."""
        for it in prompts:
            self.manager.add_request(it, max_new_tokens=new)
        return self.hear(results or len(prompts))

    def hear(self, results: int) -> dict[str, list[int] | str]:
        out: dict = {}
        while len(out) < results:
            it = self.manager.get_result(timeout=1)
            if it is not None and it.is_finished():
                out[it.request_id] = it.error or it.generated_tokens
        return out

    def tokens(self, prompts: list[list[int]]) -> list[list[int] | str]:
        return self.in_order(self.ask(prompts))

    @staticmethod
    def in_order(answers: dict) -> list:
        return [answers[name] for name in sorted(answers, key=lambda it: int(it.rsplit("_", 1)[1]))]

    def found(self) -> int:
        return self.space.counters().tokens_found


def batch_in_child(socket: str, *seeds: str) -> None:
    """Serves batches until it is killed."""
    with Batches(socket) as batches:
        while True:
            print(json.dumps(batches.tokens([document(int(it), 300) for it in seeds])), flush=True)


def test_batches_in_the_pool(server, space):
    """What one manager has computed, another one finds: tokens are those of transformers alone."""
    prompts = [document(9000 + i, 90 + 70 * i) for i in range(5)]
    with Batches() as plain:
        expected = plain.tokens(prompts)
    with Batches(server.socket) as one, Batches(server.socket, max_batch_tokens=64) as two:
        assert one.tokens(prompts) == expected and one.found() == 0
        assert two.tokens(prompts) == expected and two.found() == sum((len(it) - 1) // 16 * 16 for it in prompts)
        longer = [asked + it for asked, it in zip(prompts, expected)]
        with Batches() as plain:
            expected = plain.tokens(longer)
        before = one.found()
        assert one.tokens(longer) == expected
        assert one.found() - before == sum((len(it) - 1) // 16 * 16 for it in longer)   # blocks of answers, too
    del one, two
    gc.collect()
    nothing_is_held(server)


def test_forks_share_blocks(server, space):
    """Several answers to one prompt; then another manager goes on behind them."""
    prompts = [document(9100 + i, 150) for i in range(2)]
    with Batches(sequences=3) as plain, Batches(server.socket, sequences=3) as one:
        expected, got = plain.ask(prompts, 6), one.ask(prompts, 6)
        assert sorted(got.values()) == sorted(expected.values()) and len(got) == 6
    with Batches(server.socket) as two:
        two.ask([prompts[0] + next(it for name, it in got.items())])
        assert two.found() >= 144
    del one, two
    gc.collect()
    nothing_is_held(server)


def test_a_block_is_there_while_any_request_uses_it(server, space):
    """A request finds blocks that another one of the same manager has filled, and ends first: they remain the other's."""
    long = document(9150, 100)
    with Batches() as plain:
        (first,) = plain.ask([long], new=300).values()
    with Batches(server.socket, page_size=24) as one:
        name = one.manager.add_request(long, max_new_tokens=300)
        one.ask([document(9160, 100)], new=1)
        assert one.ask([long], new=2) and one.found() == 96
        (allocator,) = one.manager.batch_processor.cache.cache_allocators.values()
        assert {*allocator.block_table[name]} <= {*allocator.pool.ours}
        assert one.ask([document(9161, 100)], results=2)[name] == first


def test_batches_wait_for_pinned_blocks(server, space):
    with Batches(server.socket, max_blocks=64, page_size=32) as one:
        one.tokens([document(9170, 40)])
        pins = []
        with suppress(kvd.PoolFull):
            for i in range(100):
                blocks = one.space.alloc(1)
                pins.append(kvd.Pin(one.space))
                pins[-1].seal(blocks, [i] * 32)
        assert soon(lambda: one.space.available() < 10)
        timer = threading.Timer(1, lambda: [it.release() for it in pins])
        timer.start()
        assert one.tokens([document(9171, 300)])[0] == Batches.alone(document(9171, 300))
        timer.join()


def test_batches_in_a_small_pool(server, space):
    """Requests that do not fit wait, or are computed again."""
    prompts = [document(9200 + i, 200) for i in range(8)]
    with Batches() as plain:
        expected = plain.tokens(prompts)
    few = Batches(server.socket, max_blocks=80, page_size=8, safety_margin=0)   # else it may stop before the pool is full
    for it in prompts:
        few.manager.add_request(it, max_new_tokens=NEW)     # all are there when it starts
    with few:
        assert few.in_order(few.hear(8)) == expected
        assert few.space.counters().refused > 0
        assert few.tokens(prompts) == expected


def test_a_process_with_batches_is_killed(server, space):
    prompts = [document(9300 + i, 300) for i in range(4)]
    with Batches() as plain:
        expected = plain.tokens(prompts)
    other = subprocess.Popen([sys.executable, __file__, "--batches", server.socket, *map(str, range(9300, 9304))],
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with Batches(server.socket) as mine:
        assert json.loads(other.stdout.readline()) == expected
        assert mine.tokens(prompts) == expected and mine.found() == 4 * 288
        other.kill()
        other.wait()
        assert mine.tokens([it[:200] + it[:50] for it in prompts]) and mine.tokens(prompts) == expected
    server.check()


def test_batches_without_a_daemon_fail_by_name(server, space):
    with daemon("--pool", "64M") as own:
        with Batches(own.socket) as batches:
            batches.tokens([document(9400, 100)])
            own.kill()
            (error,) = batches.ask([document(9401, 2000)]).values()
            assert "kvd" in error, error
            own.start()


def test_what_batching_does_not_support(server, space):
    expect(ValueError, "cpu_offload_space", Batches, server.socket, cpu_offload_space=1.0)
    expect(ValueError, "allow_block_sharing", Batches, server.socket, allow_block_sharing=False)
    expect(ValueError, "sliding windows", Batches, server.socket, model=small("Mistral", "sdpa", sliding_window=32))
    with Batches(page_size=32) as started:
        expect(ValueError, "has been started", use_pool, started.manager, kvd.connect(server.socket))


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_wrong_model(server, space):
    other = load("kvd")
    with torch.no_grad():
        other.model.layers[3].self_attn.k_proj.weight[5, 5] += 1e-3
    expect(ValueError, "other weights", KvdCache, other, space, [1, 2])
    expect(ValueError, "other weights", load_prefix, space, other, [1, 2])
    with open_space(space.daemon, other) as own:
        assert own.name != space.name
        with torch.no_grad():
            other.model.norm.weight.mul_(1.5)
        expect(ValueError, "other weights", KvdCache, other, own, [1, 2])      # changed since the space was opened
    with open_space(space.daemon, ours, "named"):
        expect(kvd.Mismatch, "fingerprint", open_space, space.daemon, other, "named")
    turned = load("kvd")
    turned.config.rope_parameters = {**turned.config.rope_parameters, "rope_theta": 10000.0}
    expect(ValueError, "other weights", KvdCache, turned, space, [1, 2])
    expect(ValueError, "attn_implementation", KvdCache, alone, space, [1, 2])


def test_unsupported_attention(server, space):
    ids = document(8000, 40)
    for name, value, words in (("sliding_window", 128, "sliding windows"), ("layer_types", ["sliding_attention"] * 8,
                               "sliding_attention"), ("layer_types", ["chunked_attention"] * 8, "chunked_attention"),
                               ("is_causal", False, "not causal"),
                               ("rope_parameters", {"rope_type": "dynamic"}, "dynamic RoPE")):
        odd = load("kvd")
        setattr(odd.config, name, value)
        expect(ValueError, words, load_prefix, space, odd, ids)
        expect(ValueError, "other weights" if "sliding" in words else words, KvdCache, odd, space, ids)

    def forward(words, tokens=ids, **options):
        with KvdCache(ours, space, ids) as cache, torch.inference_mode():
            options = {"attention_mask": None, "past_key_values": cache, **options}
            expect(ValueError, words, ours, torch.tensor([tokens[cache.found:]]) if tokens else None, **options)

    forward("padding", attention_mask=torch.tensor([[0] * 3 + [1] * 37]))
    forward("masks other than", attention_mask=torch.zeros(1, 1, 40, 40))
    forward("position_ids", position_ids=torch.arange(40)[None] + 1)
    forward("position_ids", position_ids=torch.zeros(1, 40, dtype=torch.long))
    forward("not the tokens", tokens=document(8001, 40))
    forward("soft caps", softcap=30.0)
    forward("sinks", s_aux=torch.zeros(4))
    forward("token ids", tokens=None, inputs_embeds=torch.zeros(1, 40, 128))
    with KvdCache(ours, space, ids) as cache:
        expect(ValueError, "training", ours, torch.tensor([ids]), past_key_values=cache)
    with KvdCache(ours, space, ids) as cache:
        expect(ValueError, "beam", cache.reorder_cache, torch.tensor([0]))
        expect(ValueError, "2 sequences", load_prefix, space, ours, torch.tensor([ids, ids]))
        assert generate(ours, ids, cache) == generate(alone, ids)
    expect(ValueError, "closed", generate, ours, ids, cache)
    expect(ValueError, "load_prefix", store, space, DynamicCache(config=alone.config), ids)
    assert space.match(ids) == 32
    nothing_is_held(server)


def test_a_refusal_names_the_feature(server, space):
    ids = document(8300, 40)
    padded = torch.tensor([[0] * 8 + ids])

    def generate_refused(words, given=None, model=ours, **options):
        for _ in range(2):      # with an empty and a filled cache
            with KvdCache(model, space, ids) as cache:
                expect(ValueError, words, model.generate, torch.tensor([ids]) if given is None else given,
                       past_key_values=cache, max_new_tokens=4, **options)
            in_place(space, ids)

    generate_refused("4 sequences in a cache of 1 (a batch, num_beams or", num_beams=4)
    generate_refused("num_return_sequences", num_return_sequences=2, do_sample=True)
    generate_refused("2 sequences in a cache of 1 (a batch", torch.tensor([ids, ids]))
    generate_refused("padding (zeros in attention_mask)", padded, attention_mask=(padded != 0).long())
    generate_refused("padding", padded)
    generate_refused("assisted decoding (assistant_model", assistant_model=alone)
    generate_refused("prompt_lookup_num_tokens", prompt_lookup_num_tokens=3)
    embedded = ours.get_input_embeddings()(torch.tensor([ids])).detach()
    for salt in (1, 1):         # the embedding layer was called before, with token ids that are not this call's
        with KvdCache(ours, space, ids, salt=salt) as cache, torch.no_grad():
            assert cache.found == 0
            expect(ValueError, "inputs_embeds", ours, inputs_embeds=embedded * 2, past_key_values=cache)
    with torch.inference_mode():
        other = load("kvd")
    expect(ValueError, "inference_mode", open_space, space.daemon, other)
    nothing_is_held(server)


# ---- other models ----------------------------------------------------------------------------------------------------

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 800}
MLA = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
       "first_k_dense_replace": 2, "moe_intermediate_size": 16, "n_routed_experts": 2, "num_experts_per_tok": 1,
       "n_group": 1, "topk_group": 1}


def small(kind: str, implementation: str = "kvd", **more):
    """A model with a few random weights."""
    torch.manual_seed(1)
    config = getattr(transformers, kind + "Config")(**SMALL, **more, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


TAKEN = {"GPT2": {}, "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32}, "GPTNeoX": {"intermediate_size": 64},
         "GPTBigCode": {}, "Phi": {"intermediate_size": 64},
         "Qwen3": {"num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 16}}


def test_models_with_other_names_for_their_numbers(server, space):
    """Shapes come from the model's use of its cache, because not all configurations have num_key_value_heads."""
    ids = document(9000, 70)
    for kind, more in TAKEN.items():
        plain, model = small(kind, "sdpa", **more), small(kind, **more)
        expected = generate(plain, ids)
        with open_space(space.daemon, model) as own:
            for found in (0, 64):
                with KvdCache(model, own, ids) as cache:
                    assert cache.found == found, kind
                    assert generate(model, ids, cache) == expected, kind
            cache, found = load_prefix(own, plain, ids)
            assert found == 64 and generate(plain, ids, cache) == expected, kind
    other = torch.tensor([ids])
    for name in ("token_type_ids", "pixel_values"):     # GPT-2 embeds the former as if they were token ids
        for model in (small("Phi", intermediate_size=64), small("GPT2")):
            with KvdCache(model, open_space(space.daemon, model), ids, salt=2) as cache, torch.no_grad():
                expect(ValueError, name, model, other, past_key_values=cache, **{name: other})
    with KvdCache(model, open_space(space.daemon, model), ids, salt=1) as cache, torch.no_grad():
        expect(ValueError, "position_ids", model, torch.tensor([ids]), past_key_values=cache,
               position_ids=torch.arange(70)[None] + 1)


def test_attention_that_is_the_models_own(server, space):
    """BLOOM adds biases to scores in its own attention, so in place is refused. Copies work."""
    ids, model, plain = document(9001, 70), small("Bloom"), small("Bloom", "eager")
    with open_space(space.daemon, plain) as own:
        expect(ValueError, "BloomForCausalLM in place", KvdCache, model, own, ids)
        expected = generate(plain, ids)
        for found in (0, 64):
            cache, n = load_prefix(own, plain, ids)
            assert n == found and generate(plain, ids, cache) == expected
            store(own, cache, ids + expected)


def test_keys_and_values_of_different_shapes(server, space):
    """DeepSeek-V2: keys and values are compared with a block's shape before their addresses are used."""
    more = {"num_key_value_heads": 4, "intermediate_size": 64, **MLA}
    for implementation in ("kvd", "sdpa"):
        model = small("DeepseekV2", implementation, **more)
        expect(ValueError, "DeepseekV2ForCausalLM: keys and values of different shapes", open_space, space.daemon,
               model)
    expect(ValueError, "Gemma2ForCausalLM: ", open_space, space.daemon,
           small("Gemma2", num_key_value_heads=2, intermediate_size=64, head_dim=8, layer_types=["full_attention"] * 2,
                 sliding_window=None))


def test_tensors_that_are_not_of_the_space(server, space):
    ids = document(9002, 16)
    good = torch.zeros(1, 2, 16, 32)
    with KvdCache(ours, space, ids, salt=5) as cache, torch.inference_mode():
        for k, v in ((good, good[..., :16]), (good[..., :16], good), (good[:, :1], good), (good[:, :, :8], good),
                     (good, good.half()), (good.double(), good), (good.to("meta"), good),
                     (good.repeat(2, 1, 1, 1), good)):
            ours.get_input_embeddings()(torch.tensor([ids]))
            expect(ValueError, "kvd's cache for transformers does not support keys", cache.update, k, v, 0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expect(ValueError, "autocast", ours, torch.tensor([ids]), past_key_values=cache)
    cache, _ = load_prefix(space, alone, ids, salt=5)
    for keys, values in ((good[:, :1], good), (good, good[..., :1]), (good.half(), good), (good[:, :, :15], good),
                         (good.repeat(2, 1, 1, 1), good)):
        for layer in cache.layers:
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        cache.layers[0].keys = good
        expect(ValueError, "kvd's cache", store, space, cache, ids)
    assert space.match(ids, salt=5) == 0


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def test_a_method_that_is_switched_on_is_not_followed(server, space):
    """The log reports it once."""
    heard, logger = Heard(), logging.getLogger("kvd.engines.transformers")
    logger.addHandler(heard)
    logger.setLevel(logging.WARNING)
    try:
        assert "vLLM on CPUs if" in server.kvctl("space", "set", space.name, "memshare=on", "keydiff=on")
        for _ in range(2):
            in_place(space, document(8400, 20))         # it follows KeyDiff, which has no budget
        assert len(heard.lines) == 1 and "memshare is on" in heard.lines[0], heard.lines
        for _ in range(2):
            load_prefix(space, alone, document(8400, 20))
    finally:
        server.kvctl("space", "set", space.name, "memshare=off", "keydiff=off")
        logger.removeHandler(heard)
        logger.setLevel(logging.NOTSET)
    assert len(heard.lines) == 2 and "keydiff is on" in heard.lines[1], heard.lines


def test_salts_keep_apart(server, space):
    ids = document(8100, 64)
    in_place(space, ids)
    with KvdCache(ours, space, ids, salt=7) as cache:
        assert cache.found == 0 and generate(ours, ids, cache) == generate(alone, ids)
    with KvdCache(ours, space, ids, salt=7) as cache:
        assert cache.found == 48
    cache, found = load_prefix(space, alone, ids, salt=8)
    assert found == 0


def test_forgotten_objects_are_released(server, space):
    ids = document(8200, 64)
    cache = KvdCache(ours, space, ids)
    generate(ours, ids, cache)
    assert soon(lambda: held(server) > 0)
    del cache
    nothing_is_held(server)
    assert not ours.get_input_embeddings()._forward_pre_hooks


def test_the_examples(server, space):
    text, question = ROOT / "tools/kvlm/demo/document-2.txt", "What is the code of alder?"
    for name in ("transformers_in_place.py", "transformers_copy.py"):
        lines = (EXAMPLES / name).read_text().splitlines()
        assert len(lines) <= 30, f"{name} has {len(lines)} lines"
        done = subprocess.run([sys.executable, EXAMPLES / name, MODEL, text, question, question], capture_output=True,
                              text=True, timeout=600, env={**os.environ, "KVD_SOCKET": server.socket})
        assert done.returncode == 0, done.stderr
        first, second = done.stdout.splitlines()
        assert first.split("   (")[0] == second.split("   (")[0] and "(2" in second or "(1" in second, done.stdout


def test_the_example_follows_kvctl(server, space):
    demo = ROOT / "tools/kvlm/demo"
    assert len((EXAMPLES / "methods_transformers.py").read_text().splitlines()) <= 30
    it = json.loads((demo / "questions-1.jsonl").read_text().splitlines()[0])
    question = it["prompt"].removeprefix("Question: ").removesuffix("\nAnswer:")
    with daemon("--pool", "64M") as own:
        process = subprocess.Popen([sys.executable, EXAMPLES / "methods_transformers.py", MODEL, demo / "document-1.txt"],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                   env={**os.environ, "KVD_SOCKET": own.socket})

        def ask() -> tuple[int, str]:
            print(question, file=process.stdin, flush=True)
            blocks, answer = process.stdout.readline().strip().split(":")
            return int(blocks.split()[0]), answer

        command = process.stdout.readline().split()
        whole, answer = ask()
        own.kvctl(*command[1:])
        for _ in range(50):         # a busy worker may be too late for a request
            fewer, again = ask()
            assert answer == again == it["answer"], (answer, again)
            if fewer < 0.6 * whole:
                break
        process.communicate()
        assert fewer < 0.6 * whole, (whole, fewer)
        own.check()


def main() -> int:
    import transformers_diffusion
    import transformers_quantised
    import transformers_scorers
    tests = [it for names in (globals(), vars(transformers_scorers), vars(transformers_diffusion), vars(transformers_quantised))
             for name, it in names.items() if name.startswith("test_")]
    with daemon("--pool", "64M") as server, kvd.connect(server.socket) as connection:
        with open_space(connection, ours) as space:
            failed = run(tests, server, space)
        server.check()
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--batches"]:
        batch_in_child(*sys.argv[2:])
    if sys.argv[2:] == ["--reduced"]:
        sys.exit(reduced_in_child(sys.argv[1]))
    if sys.argv[2:] == ["--followed"]:
        sys.exit(followed_in_child(sys.argv[1]))
    if sys.argv[2:] == ["--rows"]:
        sys.exit(rows_in_child(sys.argv[1]))
    if len(sys.argv) > 1:
        sys.exit(serve(*sys.argv[1:]))
    sys.exit(main())
