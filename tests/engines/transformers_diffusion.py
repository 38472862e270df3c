# SPDX-License-Identifier: Apache-2.0
"""Diffusion models on the pool (kvd.engines.diffusion): against kvlm, against transformers alone, and between processes.

The trained model is kvlm's, of 12 layers. On its own requests all modes answer alike, because the prefix alone says all; on
noise they do not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

import kvd
from common import MODEL, ROOT, daemon, document

BUILD = Path(os.environ["KVCTL"]).parents[2]
KVLM = os.environ.get("KVLM", BUILD / "tools/kvlm/kvlm")
os.environ.setdefault("KVD_KERNELS_LIBRARY", str(BUILD / "kernels/libkvd_kernels.so.0"))

from kvd import ops     # noqa: E402 (needs the variable above)
from kvd.engines import _diffusion, _diffusion_entry, _diffusion_model      # noqa: E402
from kvd.engines import transformers as causal      # noqa: E402
from kvd.engines.diffusion import Answer, generate, open_space, profile     # noqa: E402

TRAINED = ROOT / "tools/kvlm/diffusion"
DEMO = [json.loads(line) for line in (ROOT / "tools/kvlm/demo/diffusion.jsonl").read_text().splitlines()]
LAYERS, MASK = 12, 3
TOLERANCE = 1e-3        # of logits, which reach about 20

_diffusion_entry.LEASE_S = 600.0        # a busy machine


def load(implementation: str = "kvd_bidirectional", dtype=torch.float32):
    """kvlm's model is a Llama, but for the name of its kind."""
    words = json.loads((TRAINED / "config.json").read_text())
    config = LlamaConfig(**{key: it for key, it in words.items() if key not in ("architectures", "model_type", "attention")})
    return AutoModelForCausalLM.from_pretrained(TRAINED, config=config, attn_implementation=implementation, dtype=dtype).eval()


model = load()


def noise(seed: int, prefix: int, prompt: int, length: int) -> dict:
    ids = document(seed, prefix + prompt)
    return {"prefix_ids": ids[:prefix], "prompt_ids": ids[prefix:], "gen_length": length}


def ask(space, it: dict, of=None, **options) -> Answer:
    return generate(of or model, space, it["prefix_ids"], it["prompt_ids"], gen_length=it["gen_length"],
                    **{"mask_token_id": MASK, **options})


def expect(error: type[Exception], words: str, function, *arguments, **options) -> None:
    try:
        function(*arguments, **options)
    except error as it:
        assert words in str(it) and "\n" not in str(it), it
        return
    raise AssertionError(f"no {error.__name__}: {words}")


@contextmanager
def shared(server, name: str, of=None, **settings):
    """A space of a test's own, which is checked afterwards."""
    with kvd.connect(server.socket) as connection, open_space(connection, of or model, f"diffusion-{name}") as space:
        for key, value in {"bicache": 1, **settings}.items():
            space.set(key.replace("_", ".", 1), value)
        yield space
    server.check()


@contextmanager
def patched(owner, name: str, make):
    """Replace owner.name by make(owner.name)."""
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


# ---- the same numbers ------------------------------------------------------------------------------------------------

WAYS = [("off", 0, 1), ("naive", 0, 1), ("on", 3, 4), ("on", LAYERS - 1, 3), ("on", 1, 16)]


def kvlms(it: dict, steps: int, mode: str, depth: int, refresh: int) -> tuple[dict, torch.Tensor]:
    """kvlm's answer, and logits [steps, gen_length, vocab]."""
    with tempfile.TemporaryDirectory() as folder:
        tokens, logits = Path(folder, "tokens"), Path(folder, "logits")
        tokens.write_text(" ".join(map(str, it["prefix_ids"] + it["prompt_ids"])) + "\n")
        done = subprocess.run([KVLM, "--model", TRAINED, "--no-share", "--json", "--tokens", tokens, "--logits", logits,
                               "--prefix-tokens", str(len(it["prefix_ids"])), "--gen-length", str(it["gen_length"]), "--steps",
                               str(steps), "--bicache", mode, "--bicache-depth", str(max(depth, 1)), "--refresh", str(refresh)],
                              stdout=subprocess.PIPE, check=True)
        values = torch.frombuffer(bytearray(logits.read_bytes()), dtype=torch.float32)
        return json.loads(done.stdout), values.view(steps, it["gen_length"], -1)


def heard(it: dict, **options) -> tuple[Answer, list[tuple[list[int], torch.Tensor]]]:
    """An answer, and each step's masks, as positions in the region, and their logits [masks, vocab]."""
    steps: list[tuple[list[int], torch.Tensor]] = []
    _diffusion_model.Decoder(model)         # examined before

    def stepping(before):
        def call(self, t, n):
            region = self.tokens[len(self.request.tokens):]
            steps.append(([i for i, token in enumerate(region) if token == MASK], torch.empty(0)))
            before(self, t, n)
        return call

    def noting(before):
        def call(self, rows):
            steps[-1] = steps[-1][0], torch.cat([steps[-1][1], before(self, rows)])
            return before(self, rows)
        return call

    with patched(_diffusion.Denoiser, "step", stepping), patched(_diffusion_model.Decoder, "logits", noting):
        answer = ask(None, it, **options)
    return answer, steps


def test_bidirectional_answers_equal_kvlms(server, space):
    """Requests of the demo, with a prefix of each length, and noise, whose answers depend on the mode."""
    asked = [*DEMO[::11], noise(2, 37, 70, 17), noise(3, 150, 20, 16)]
    for i, it in enumerate(asked):
        known, last = "answer_ids" in it, []
        for mode, depth, refresh in WAYS[i % 2::2] if known else WAYS:
            n = max(1, it["gen_length"] // (1 + i % 2))
            theirs, expected = kvlms(it, n, mode, depth, refresh)
            ours, steps = heard(it, mode=mode, depth=depth, refresh=refresh, steps=n)
            assert ours.tokens == theirs["tokens"] and (not known or ours.tokens == it["answer_ids"]), (i, mode, depth)
            assert (ours.refreshes, ours.ratio, ours.made, ours.mode) == (
                theirs["refreshes"], theirs["r"], theirs["made_layers"], theirs["bicache"]), (ours, theirs)
            assert len(steps) == n
            for (masks, logits), all_of_them in zip(steps, expected):
                assert (logits - all_of_them[masks]).abs().max() < TOLERANCE, (i, mode, depth)
            last.append((ours.tokens, steps[n // 2][1]))
        if not known:       # what is compared differs
            assert len({tuple(tokens) for tokens, _ in last}) > 1
            assert all(a.shape != b.shape or (a - b).abs().max() > 10 * TOLERANCE for (_, a), (_, b) in zip(last, last[1:]))


def test_bidirectional_off_is_transformers_alone(server, space):
    """In the steps of a space where BiCache is off, and whatever the space says without a prefix."""
    with shared(server, "off", bicache=0) as own:
        for seed, prefix, prompt in ((3, 50, 31), (4, 0, 20), (5, 16, 0)):
            it = noise(seed, prefix, prompt, 6)
            tokens = it["prefix_ids"] + it["prompt_ids"] + [MASK] * 6
            expected = []
            for _ in range(6):
                with torch.no_grad():
                    logits = model(torch.tensor([tokens])).logits[0]
                logits[:, MASK] = -torch.inf
                best = max((p for p in range(len(tokens)) if tokens[p] == MASK and p >= prefix + prompt),
                           key=lambda p: logits[p].log_softmax(0).max())
                tokens[best] = int(logits[best].argmax())
                expected.append(best)
            answer = ask(own, it)
            assert answer.tokens == tokens[prefix + prompt:] and answer.mode == "off"
            assert answer.computed == answer.whole == LAYERS * len(tokens) * 6
        assert own.counters().blocks_allocated == 0
    ids = torch.tensor([document(9, 20) + [0] * 5])
    with torch.no_grad():       # without kvd: padding is not seen
        padded, bare = model(ids, attention_mask=(ids != 0).long()).logits[0, :20], model(ids[:, :20]).logits[0]
        assert (padded - bare).abs().max() < TOLERANCE < (model(ids).logits[0, :20] - bare).abs().max()


def test_bidirectional_numbers_do_not_depend_on_where_they_are(server, space):
    """Bit for bit: in private memory, made in the pool, found there, found in part, and in two lengths of a last block."""
    for prefix in (64, 75):
        it = noise(6 + prefix, prefix, 30, 8)
        expected, alone = heard(it, mode="on", depth=4, refresh=3)
        with shared(server, f"bits-{prefix}", bicache_delta=3) as own:
            for found, made in ((0, 4), (4, 0)):
                with patched(_diffusion, "Entry", lambda before: lambda decoder, _, tokens: before(decoder, own, tokens)):
                    got, steps = heard(it, mode="on", depth=4, refresh=3)
                assert (got.found, got.made) == (found, made) and got.tokens == expected.tokens, got
                assert all(torch.equal(a, b) for (_, a), (_, b) in zip(alone, steps))
                assert got.shared_bytes == 4 * -(-prefix // 16) * own.geometry.block_bytes
            request = _diffusion.Request(it["prefix_ids"] + it["prompt_ids"], prefix, 8, MASK)
            reads = _diffusion.Denoiser(_diffusion_model.Decoder(model), own, request, _diffusion._Choice("on", 4, 4), 0, 0)
            pool = own.memory()
            for layer in range(4):      # in place
                assert all(0 <= at - pool.sealed < pool.mapped * pool.block_bytes for at in reads.place.layers[layer][0][0].at)
            reads.close()
            deeper = ask(own, it, depth=6)
            assert (deeper.found, deeper.made) == (4, 2)
            assert deeper.tokens == heard(it, mode="on", depth=6, refresh=3)[0].tokens


def test_bidirectional_heads_attend_in_threads(server, space):
    """Bit for bit as in one thread. The rest of the model, which torch computes, has one thread."""
    from kvd.engines import _diffusion_blocks as blocks
    it, used = noise(8, 200, 30, 4), []
    expected, alone = heard(it, mode="on", depth=4)
    noting = lambda before: lambda self: used.append(1) or before(self)     # noqa: E731
    with patched(torch, "get_num_threads", lambda before: lambda: 2), patched(blocks, "_ALONE", lambda before: 0), \
            patched(blocks.Place, "_threads", noting):
        got, steps = heard(it, mode="on", depth=4)
    assert used and got == expected and all(torch.equal(a, b) for (_, a), (_, b) in zip(alone, steps))


def random(kind: str, dtype=torch.float32, **more):
    """A model with a few random weights."""
    torch.manual_seed(2)
    words = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 800,
             "intermediate_size": 64, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(transformers, kind + "Config")(**words | more)
    return AutoModelForCausalLM.from_config(config, attn_implementation="kvd_bidirectional", dtype=dtype).eval()


def plain(of, it: dict, shift: int) -> list[int]:
    """One token a step, by transformers alone; shift as in Dream's generation."""
    tokens = it["prefix_ids"] + it["prompt_ids"] + [MASK] * it["gen_length"]
    for _ in range(it["gen_length"]):
        with torch.no_grad():
            logits = of(torch.tensor([tokens])).logits[0].double()
        if shift:
            logits = torch.cat([logits[:1], logits[:-1]])
        logits[:, MASK] = -torch.inf
        at = max((p for p in range(len(tokens)) if tokens[p] == MASK), key=lambda p: logits[p].log_softmax(0).max())
        tokens[at] = int(logits[at].argmax())
    return tokens[-it["gen_length"]:]


def test_bidirectional_models_of_the_family(server, space):
    """Qwen 2, as Dream is, with biases, and rows shifted; Qwen 3 with norms of queries and keys; 16 bits; one KV head."""
    for kind, dtype, more in (("Qwen2", torch.float32, {}), ("Qwen3", torch.float32, {"head_dim": 16}),
                              ("Llama", torch.bfloat16, {}), ("Mistral", torch.float32, {"sliding_window": None}),
                              ("Gemma", torch.float32, {"head_dim": 8}), ("Llama", torch.float16, {"num_key_value_heads": 1})):
        it, of = noise(20, 40, 20, 6), random(kind, dtype, **more)
        with shared(server, f"{kind}-{str(dtype)[6:]}", of) as own:
            for shift in (0, 1):
                got = ask(own, it, of, mode="off", shift=bool(shift))
                assert dtype != torch.float32 or got.tokens == plain(of, it, shift), (kind, shift)
                answers = [ask(own, it, of, depth=2, shift=bool(shift)) for _ in range(2)]
                assert answers[0].tokens == answers[1].tokens and answers[1].found == 2, answers
                # refreshed in each step with one layer, which no attention precedes, nothing is approximate
                exact = ask(own, it, of, depth=1, refresh=1, shift=bool(shift))
                assert exact.depth == 1 and exact.refreshes == 6


# ---- between processes -----------------------------------------------------------------------------------------------


def child(server, name: str, seed: int, *what: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, __file__, server.socket, name, str(seed), *what], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True)


def told(process: subprocess.Popen, words: str) -> None:
    line = process.stdout.readline()
    assert line == words + "\n", line


def answer_of(process: subprocess.Popen) -> Answer:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    return Answer(*json.loads(out.splitlines()[-1]))


def serve(socket: str, name: str, seed: int, stalls: bool) -> int:
    """A child: says when it asks for the right to compute, and waits for a line in layer 5 of the prefix, if it is to."""
    def asking(before):
        def call(*arguments):
            print("asking", flush=True)
            return before(*arguments)
        return call

    def stalling(before):
        def call(self, *arguments):
            if len(self.layers) == 5:
                print("computing", flush=True)
                sys.stdin.readline()
            return before(self, *arguments)
        return call

    with kvd.connect(socket) as connection, open_space(connection, model, name) as own:
        with patched(kvd.Space, "lease", asking), \
                patched(_diffusion_entry.Entry, "_compute", stalling if stalls else lambda before: before):
            print(json.dumps(ask(own, noise(seed, 200, 30, 8))), flush=True)
    return 0


def work(it: dict, answer: Answer) -> int:
    """Tokens times layers: the entry's, those behind the prefix in each step, and the prefix's deep layers at refreshes."""
    n = len(it["prefix_ids"])
    rest = len(it["prompt_ids"]) + it["gen_length"]
    return answer.made * n + rest * LAYERS * it["gen_length"] + answer.refreshes * (LAYERS - answer.depth) * n


def test_bidirectional_second_process_finds_the_first_ones(server, space):
    it = noise(30, 200, 30, 8)
    with shared(server, "second") as own:
        expected = ask(None, it, mode="on")
        for found, made in ((0, LAYERS), (1, 0)):
            answer = answer_of(child(server, own.name, 30))
            assert (answer.found, answer.made, answer.tokens) == (found, made, expected.tokens), answer
            assert not answer.refused and answer.computed == work(it, answer) < answer.whole == LAYERS * 238 * 8
        whole = ask(own, it, mode="naive")
        assert (whole.found, whole.made) == (LAYERS, 0)         # the first one made all, since there is no table


def test_bidirectional_one_computes_and_others_wait(server, space):
    with shared(server, "flight") as own:
        expected = ask(None, noise(31, 200, 30, 8), mode="on").tokens
        first = child(server, own.name, 31, "stall")
        told(first, "asking")
        told(first, "computing")
        others = [child(server, own.name, 31) for _ in range(2)]
        for it in others:
            told(it, "asking")
        print(file=first.stdin, flush=True)
        answers = [answer_of(it) for it in (first, *others)]
        assert [it.made for it in answers] == [LAYERS, 0, 0] and [it.found for it in answers] == [0, 1, 1], answers
        assert all(it.tokens == expected and not it.refused for it in answers)


def test_bidirectional_process_that_computes_is_killed(server, space):
    """It had sealed four layers. Another one, which waits for it, computes the prefix."""
    with shared(server, "killed") as own:
        expected = ask(None, noise(32, 200, 30, 8), mode="on").tokens
        first = child(server, own.name, 32, "stall")
        told(first, "asking")
        told(first, "computing")
        second = child(server, own.name, 32)
        told(second, "asking")
        first.send_signal(signal.SIGKILL)
        first.communicate()
        answer = answer_of(second)
        assert (answer.made, answer.found, answer.refused, answer.tokens) == (LAYERS, 0, False, expected), answer
        assert ask(own, noise(32, 200, 30, 8), mode="naive").found == LAYERS


def at_layer(n: int, what):
    """Call a function once, before layer n of a prefix is computed."""
    done = []

    def make(before):
        def call(self, at, rows):
            if at == n and not done:
                done.append(what())
            return before(self, at, rows)
        return call
    return make


def at_step(n: int, what):
    def make(before):
        def call(self, t, count):
            if t == n:
                what()
            return before(self, t, count)
        return call
    return make


def test_bidirectional_daemon_is_replaced_in_the_middle(server, space):
    """While a prefix is computed, and while the request reads it."""
    with daemon("--pool", "64M") as own:
        def replace():
            own.kill()
            own.start()

        for seed, (owner, name, make) in enumerate(((_diffusion.Denoiser, "step", at_step), (_diffusion_entry.Entry, "_compute",
                                                                                             at_layer)), 40):
            for what in (own.kill, replace):
                it = noise(seed, 100, 20, 8)
                expected = ask(None, it, mode="on", depth=6, refresh=2).tokens
                with shared(own, f"replaced-{seed}-{what.__name__}") as kept:
                    with patched(owner, name, make(5, what)):
                        answer = ask(kept, it, depth=6, refresh=2, mode="on")
                    assert answer.tokens == expected and answer.made in (6, 7), answer      # a lost layer again
                    if what == own.kill:
                        assert answer.refused == (name == "_compute")
                        own.start()
                    kept.catch_up()
                    again = [ask(kept, it, depth=6, refresh=2, mode="on") for _ in range(2)]
                    assert all(it.tokens == expected for it in again)
                    assert again[1].found == 6 and again[1].made == 0 and not again[1].refused, again


def test_bidirectional_pool_is_full(server, space):
    """There is room for one layer at a time; then there is room for all."""
    it = noise(50, 400, 20, 4)
    expected = ask(None, it, mode="on", depth=8)
    with daemon("--pool", "4M") as own, shared(own, "full") as small:
        held = []
        try:
            while True:
                held += small.alloc(1)
        except (kvd.PoolFull, kvd.QuotaExceeded):
            small.free(held[:30])
        for found, made in ((0, 8), (1, 7)):
            answer = ask(small, it, depth=8, mode="on")
            assert answer.refused and (answer.found, answer.made, answer.tokens) == (found, made, expected.tokens), answer
            assert 25 * small.geometry.block_bytes <= answer.shared_bytes < 8 * 25 * small.geometry.block_bytes
        small.free(held)
        answer = ask(small, it, depth=2, mode="on")
        assert not answer.refused and answer.shared_bytes == 2 * 25 * small.geometry.block_bytes, answer


def test_bidirectional_prefix_comes_back_from_the_file(server, space):
    """After an eviction of all, without a file and with one."""
    it = noise(51, 100, 20, 4)
    expected = ask(None, it, mode="on", depth=3).tokens
    patient = lambda before: lambda self, tokens, group: before(self, tokens, group, wait=600)      # noqa: E731
    with tempfile.TemporaryDirectory(prefix="kvd-test-", dir="/var/tmp") as folder, patched(kvd.Space, "find", patient):
        file = ["--set", f"daemon.file={folder}/file", "--set", "daemon.file_size=16M", "--set", "daemon.file_depth=0"]
        for options, found in (([], 0), (file, 3)):
            with daemon("--pool", "16M", *options) as own, shared(own, "file") as kept:
                while options and own.stat("tiers")["tiers"][0]["state"] != "on":
                    time.sleep(0.02)
                assert ask(kept, it, depth=3).made == 3
                while options and own.stat("tiers")["tiers"][0]["written_bytes"] < 3 * 7 * kept.geometry.block_bytes:
                    time.sleep(0.02)
                own.kvctl("evict", kept.name, "--all")
                answer = ask(kept, it, depth=3)
                assert (answer.found, answer.made, answer.tokens) == (found, 3 - found, expected), answer


# ---- the table -------------------------------------------------------------------------------------------------------


def kvlms_profile(it: dict) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        tokens, samples = Path(folder, "tokens"), Path(folder, "samples")
        tokens.write_text(" ".join(map(str, it["prefix_ids"] + it["prompt_ids"])) + "\n")
        subprocess.run([KVLM, "--model", TRAINED, "--no-share", "--tokens", tokens, "--gen-length", str(it["gen_length"]),
                        "--prefix-tokens", str(len(it["prefix_ids"])), "--profile-out", samples], check=True)
        return json.loads(samples.read_text())


def test_bidirectional_samples_make_a_table(server, space):
    """Similarities are those that kvlm measures, the table is that of them, and requests follow it."""
    asked = DEMO[::11]
    with shared(server, "table") as own:
        assert sum(profile(model, own, it["prefix_ids"], it["prompt_ids"], gen_length=it["gen_length"], mask_token_id=MASK)
                   for it in asked) == len(asked)
        assert ask(own, asked[2]).depth == 1        # not built yet
        rows = {row["ratio_percent"]: row for row in server.stat("profile", "build", own.name)["profile"]}
        theirs = [kvlms_profile(it) for it in asked]
        table = ops.bicache_table([it["r"] for it in theirs], torch.tensor([it["sim"] for it in theirs], dtype=torch.float32))
        for it, sample in zip(asked, theirs):
            depth = ops.bicache_layers(table, sample["r"])
            assert rows[sample["r"]]["depth"] == depth and rows[sample["r"]]["samples"] == 1, (rows[sample["r"]], sample)
        answer = ask(own, asked[4])
        deepest = max(depth for _, depth in table)
        assert answer.depth == ops.bicache_layers(table, answer.ratio) > 1 and answer.made == deepest, (answer, table)
        assert answer.tokens == asked[4]["answer_ids"]
        of = {"gen_length": 32, "mask_token_id": MASK, "step": 20}
        assert profile(model, own, asked[0]["prefix_ids"], asked[0]["prompt_ids"], **of) == 4       # the fifth has masks
        shares = {it.ratio: f"{it.computed / it.whole:.2f}" for it in (ask(own, it) for it in asked)}
        print(f"     layers reused by prefix ratio: {table} of {LAYERS}; share of tokens x layers computed: {shares}")


def test_bidirectional_requests_follow_the_switches(server, space):
    it = noise(60, 90, 30, 12)
    with shared(server, "switches", bicache=0) as own:
        assert ask(own, it).mode == "off"
        server.kvctl("space", "set", own.name, "bicache=on", "bicache.delta=5")
        assert (ask(own, it).mode, ask(own, it).refreshes) == ("on", 3)
        assert ask(own, it, refresh=2).refreshes == 6 and ask(own, it, mode="off").refreshes == 0
        ratios = [ask(own, it).ratio]
        own.set("bicache.r_def", 1)
        assert [*ratios, ask(own, it).ratio] == [68, 75]


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_bidirectional_what_is_refused(server, space):
    it = noise(70, 40, 20, 6)
    with shared(server, "refused") as own:
        for words, options in (("7 steps for 6 tokens", {"steps": 7}), ("0 steps", {"steps": 0}),
                               ("mode must be", {"mode": "paper"}), ("depth and refresh", {"depth": -1}),
                               ("depth and refresh", {"refresh": -1}),
                               ("not name a mask token", {"mask_token_id": None, "of": random("Llama")}),
                               ("mask_token_id has 760", {"mask_token_id": 760})):
            expect(ValueError, words, ask, own if "of" not in options else None, it, **options)
        for words, changes in (("no tokens", {"prefix_ids": [], "prompt_ids": []}), ("gen_length must be", {"gen_length": 0}),
                               ("takes only 4096", {"gen_length": 4096}), ("prefix_ids has 760", {"prefix_ids": [1, 760]}),
                               ("prompt_ids has -1", {"prompt_ids": [-1]}), ("prompt_ids has 1.5", {"prompt_ids": [1.5]}),
                               ("2 rows", {"prefix_ids": torch.tensor([[1, 2], [3, 4]])})):
            expect(ValueError, words, ask, own, it | changes)
        expect(ValueError, "shift needs a token", ask, own, it | {"prompt_ids": []}, shift=True)
        expect(ValueError, "other weights", ask, space, it)                 # a causal space
        expect(ValueError, "other weights", ask, own, it, of=random("Llama"))
        expect(kvd.Mismatch, "kind", own.daemon.space, own.name, own.geometry)
        expect(ValueError, "no prefix to profile", profile, model, own, [], [1, 2], gen_length=4)
        expect(ValueError, "step must be", profile, model, own, [1], [1, 2], gen_length=4, step=101)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expect(ValueError, "autocast", ask, own, it)
        assert ask(own, it | {"prefix_ids": torch.tensor([it["prefix_ids"]])}).tokens == ask(own, it).tokens
    expect(kvd.Closed, "closed", ask, own, it)


def test_bidirectional_models_that_are_refused(server, space):
    with kvd.connect(server.socket) as connection:
        def refused(words: str, of) -> None:
            expect(ValueError, words, open_space, connection, of)

        refused("attn_implementation='kvd'", load("kvd"))
        refused("attn_implementation='sdpa'", load("sdpa"))
        refused("does more than", random("Granite", logits_scaling=2.0))
        refused("sliding windows", random("Mistral", sliding_window=64))
        refused("no output embeddings, or no model.", random("GPT2"))
        refused("dynamic RoPE", random("Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}))
        with torch.device("meta"):
            words = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "num_experts": 2, "top_k_experts": 1,
                     "moe_intermediate_size": 16}
            refused("encoded causally", transformers.DiffusionGemmaForBlockDiffusion(
                transformers.DiffusionGemmaConfig(text_config=words)))
        expect(ValueError, "not causal", causal.open_space, connection, model)
        with open_space(connection, model, "diffusion-changed") as own:
            other = load()
            with torch.no_grad():
                other.model.layers[3].mlp.up_proj.weight[5, 5] += 1e-3
            expect(ValueError, "other weights", ask, own, noise(71, 20, 20, 2), of=other)
            expect(kvd.Mismatch, "fingerprint", open_space, connection, other, "diffusion-changed")
        expect(kvd.Mismatch, "", open_space, connection, model, space.name)
    server.check()


def test_bidirectional_nothing_is_held_afterwards(server, space):
    with shared(server, "held") as own:
        ask(own, noise(80, 100, 20, 4))
        for _ in range(30000):       # the daemon counts pins in rounds
            clients = server.stat("clients")["clients"]
            if sum(it["pinned_blocks"] for it in clients) == 0:
                return
            time.sleep(0.02)
        raise AssertionError(clients)


def test_bidirectional_example(server, space):
    path, it = ROOT / "client/python/examples/diffusion_bicache.py", DEMO[35]
    assert len(path.read_text().splitlines()) <= 30
    with tempfile.TemporaryDirectory() as folder, daemon("--pool", "64M") as own:
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
        text, question = Path(folder, "text"), it["prompt"].split("Question: ")[-1].removesuffix("\nAnswer:")
        text.write_text(it["document"])

        def run(n: int) -> list[list[str]]:
            done = subprocess.run([sys.executable, path, folder, text], input=f"{question}\n" * n, capture_output=True,
                                  text=True, timeout=600, env={**os.environ, "KVD_SOCKET": own.socket})
            assert done.returncode == 0, done.stderr
            return [line.split() for line in done.stdout.splitlines()]

        first, second = run(2)
        assert (first[1], first[4], second[4]) == ("1", "0", "1") and first[8:] == second[8:], (first, second)
        own.stat("profile", "build", first[0][:-1])
        (third,) = run(1)
        assert int(third[1]) > 1 and third[4] == third[1] and float(third[6]) < float(second[6]), (second, third)
        own.check()


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:] == ["stall"]))
