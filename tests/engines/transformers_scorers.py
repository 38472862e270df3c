# SPDX-License-Identifier: Apache-2.0
"""Scorers of a KvdCache: those of the examples against kvpress, and what stays in the pool by their scores.

kvpress (NVIDIA, 0.5.5) asks for other versions of what it does not need here; its presses are imported without it.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvd
from common import MODEL, ROOT, document
from kvd.engines.transformers import KvdCache, open_space

sys.path.append(str(ROOT / "client/python/examples"))

from scorer_h2o import h2o          # noqa: E402 (needs the path above)
from scorer_kvzip import compress, kvzip        # noqa: E402
from scorer_rkv import rkv          # noqa: E402
from scorer_snapkv import snapkv    # noqa: E402

ours = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="kvd")
eager = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="eager")
KV_HEADS, LAYERS = eager.config.num_key_value_heads, eager.config.num_hidden_layers


def press(name: str):
    """A class of kvpress, without importing the package itself; None if it is not installed."""
    if "kvpress" not in sys.modules:
        found = importlib.util.find_spec("kvpress")
        if found is None:
            print(f"skipped: {name}, because kvpress is not installed", flush=True)
            return None
        package = ModuleType("kvpress")
        package.__path__ = [str(Path(found.origin).parent)]
        sys.modules["kvpress"] = package
    module, kind = name.split(".")
    return getattr(importlib.import_module(f"kvpress.presses.{module}"), kind)


class Heard:
    """A scorer that notes what it was given and what it returned, layer by layer."""

    def __init__(self, scorer):
        self.scorer, self.calls = scorer, []

    def __call__(self, layer, *given):
        self.calls.append((layer, *given, self.scorer(layer, *given)))
        return self.calls[-1][-1]

    def scores(self) -> torch.Tensor:
        return torch.stack([call[-1] for call in self.calls])


@contextmanager
def cache_of(server, name: str, ids: list[int], **options):
    with kvd.connect(server.socket) as connection, open_space(connection, ours, f"scored-{name}") as space:
        with KvdCache(ours, space, ids, **options) as cache:
            yield cache
    server.check()


def run(cache, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return ours(torch.tensor([ids]), past_key_values=cache).logits[0]


def pressed(kind, ids: list[int], **options) -> torch.Tensor:
    """A press's scores of a prompt, [layers, kv_heads, tokens]."""
    it, scores, cache = kind(**options), [], DynamicCache(config=eager.config)

    def hook(module, _given, named, out):
        layer = cache.layers[module.layer_idx]
        scores.append(it.score(module, named["hidden_states"], layer.keys, layer.values, out[1], named)[0])

    hooks = [layer.self_attn.register_forward_hook(hook, with_kwargs=True) for layer in eager.model.layers]
    with torch.no_grad():
        eager(torch.tensor([ids]), past_key_values=cache)
    for one in hooks:
        one.remove()
    return torch.stack(scores)


def close(ours_: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours_.shape == theirs.shape and torch.allclose(ours_, theirs, atol=1e-5), (ours_ - theirs).abs().max()


def test_a_method_is_few_lines(server, space):
    """Of the examples, whose scores the tests below compare."""
    for name in ("snapkv", "h2o", "rkv", "kvzip"):
        lines = (ROOT / f"client/python/examples/scorer_{name}.py").read_text().splitlines()
        assert len(lines) <= 30, f"{name} has {len(lines)} lines"


# ---- against kvpress -------------------------------------------------------------------------------------------------


def test_snapkv_equals_kvpress(server, space):
    kind, ids, heard = press("snapkv_press.SnapKVPress"), document(9200, 300), Heard(snapkv)
    with cache_of(server, "snapkv", ids, scorer=heard, budget=150) as cache:
        run(cache, ids)
    if kind:
        theirs = pressed(kind, ids)
        theirs[..., -64:] = heard.scores()[..., -64:]       # both keep the window, with any score above all others
        close(heard.scores(), theirs)


def test_h2o_equals_kvpress(server, space):
    """kvpress calls it observed attention."""
    kind, ids, heard = press("observed_attention_press.ObservedAttentionPress"), document(9201, 600), Heard(h2o)
    with cache_of(server, "h2o", ids, scorer=heard, budget=150) as cache:
        run(cache, ids)
    if kind:
        close(heard.scores(), pressed(kind, ids))


def test_kvzip_equals_kvpress(server, space):
    kind, ids, heard = press("kvzip_press.KVzipPress"), document(9202, 200), Heard(kvzip)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    asked = tokenizer("\n\nRepeat the previous context exactly.\n", add_special_tokens=False).input_ids
    with cache_of(server, "kvzip", ids, budget=1000) as cache:
        run(cache, ids)
        cache.reduce(asked + ids, heard, 100)
        assert cache._sequences[0].used == 100
    if kind:
        it = kind(compression_ratio=0.5)
        with it(eager), torch.no_grad():
            it.compress_post = lambda model: setattr(it, "kept", it.score_val)
            eager(torch.tensor([ids]), past_key_values=DynamicCache(config=eager.config))
        theirs = it.kept[:, 0]
        theirs[..., :4] = float("inf")
        got = heard.scores()[..., :len(ids)]
        assert torch.allclose(got, theirs, atol=1e-5), (got - theirs).abs().max()


def test_rkv_keeps_one_of_those_that_are_alike(server, space):
    """R-KV is not among kvpress's. Of three equal keys the newest has the highest score; the window is kept; attention decides
    otherwise."""
    torch.manual_seed(5)
    keys = torch.eye(64)[:40].repeat(KV_HEADS, 1, 1)
    keys[:, 20] = keys[:, 3] = keys[:, 11]
    queries = torch.zeros(2 * KV_HEADS, 40, 64)
    scores = rkv(0, queries, keys, keys, 0.1)
    assert scores.shape == (KV_HEADS, 40) and (scores[:, -8:] > scores[:, :-8].amax()).all()
    assert (scores[:, 20] > scores[:, 11]).all() and (scores[:, 11] > scores[:, 3]).all()
    others = [i for i in range(32) if i not in (3, 11)]
    assert (scores[:, others] > scores[:, 11:12]).all()
    queries[:, -1, 7] = 100.0
    assert (rkv(0, queries, keys, keys, 0.1)[:, :32].argmax(1) - 7).abs().amax() <= 3      # pooled over its neighbours


# ---- what stays ------------------------------------------------------------------------------------------------------


def kept(keys: torch.Tensor, scores: torch.Tensor, first: int, end: int, n: int) -> torch.Tensor:
    """The keys that stay, in order: before first and from end on all, between them the n of highest score of each head."""
    best = scores[..., first:end].topk(n).indices.sort(-1).values + first
    middle = keys.gather(2, best[..., None].expand(-1, -1, -1, keys.shape[-1]))
    return torch.cat([keys[:, :, :first], middle, keys[:, :, end:]], 2)


def test_scores_decide_what_stays(server, space):
    """In the prompt's pass, and again and again while it decodes. The keys and values that are seen are those of highest
    score, in each layer and head; and each step is transformers' own over them."""
    generator = torch.Generator().manual_seed(6)

    def scorer(layer, queries, keys, values, scale):
        return torch.rand(keys.shape[:2], generator=generator)

    ids, heard = document(9203, 300), Heard(scorer)
    with cache_of(server, "random", ids, scorer=heard, budget=150) as cache:
        run(cache, ids)
        (row,) = cache._sequences
        for number in range(3):
            layers = heard.calls[-LAYERS:]
            assert len(heard.calls) == LAYERS * (number + 1) and [call[0] for call in layers] == [*range(LAYERS)]
            keys, values = (torch.stack([call[i] for call in layers]) for i in (2, 3))
            scores, whole = torch.stack([call[-1] for call in layers]), layers[0][2].shape[1] // 16 * 16
            assert row.used == 150
            newest = row.length - row.first
            last = 16 * max(-(-(15 - newest) // 16), 0)         # of the entries: a tenth of the budget stays, in whole blocks
            end, seen = keys.shape[2] - newest - last, row.copy(row.length)[:, :, 0]
            n = 150 - 16 - newest - last
            assert torch.equal(seen[:, 0], kept(keys, scores, 16, end, n)), number
            assert torch.equal(seen[:, 1], kept(values, scores, 16, end, n)), (number, whole)
            for i, token in enumerate(document(9204 + number, 17)):
                before = DynamicCache(config=eager.config)
                for layer, (k, v) in enumerate(row.copy(row.length)):
                    before.update(k, v, layer)
                at = torch.tensor([[row.length]])
                with torch.no_grad():
                    right = eager(torch.tensor([[token]]), past_key_values=before, position_ids=at).logits[0]
                    got = ours(torch.tensor([[token]]), past_key_values=cache, position_ids=at).logits[0]
                assert torch.allclose(got, right, atol=1e-3), (number, i)


def test_a_pass_whose_tokens_do_not_stay(server, space):
    """reduce() with scores that keep all changes nothing, and holds nothing more."""
    ids = document(9205, 300)
    with cache_of(server, "probe", ids, budget=1000) as cache:
        with torch.no_grad():
            exact = eager(torch.tensor([ids + ids[:50]])).logits[0]
        run(cache, ids)
        before = len(cache.blocks)
        cache.reduce(ids, kvzip, 1000)
        assert len(cache.blocks) == before and cache.get_seq_length() == 300
        assert torch.allclose(run(cache, ids[:50]), exact[300:], atol=1e-3)


def test_a_pass_that_fails_leaves_the_cache_as_it_was(server, space):
    """The scorer raises, or there is no room for the packed blocks: an error, no block more, and the same answers."""
    ids = document(9207, 300)

    def broken(*_):
        raise OSError("the scorer's own")

    with cache_of(server, "broken", ids, budget=1000) as cache:
        with torch.no_grad():
            exact = eager(torch.tensor([ids + ids[:20]])).logits[0]
        run(cache, ids)
        (row,), before = cache._sequences, len(cache.blocks)
        compact = row.kept.compact

        def full(*_):
            raise kvd.PoolFull(errno.ENOBUFS, "there is no room")

        for scorer, packs, error in ((broken, compact, OSError), (kvzip, full, RuntimeError)):
            row.kept.compact = packs
            try:
                cache.reduce(ids, scorer, 100)
            except error:
                assert len(cache.blocks) == before and row.used == 300
            else:
                raise AssertionError(error)
        row.kept.compact = compact
        assert torch.allclose(run(cache, ids[:20]), exact[300:], atol=1e-3)


def test_scores_of_what_was_there_before_are_not_used(server, space):
    """A compaction that was late arrives between the scores and the next one."""
    ids, heard = document(9208, 300), Heard(lambda layer, q, keys, v, s: torch.arange(keys.shape[1]).expand(keys.shape[:2]) * 1.0)
    with cache_of(server, "late", ids, scorer=heard, budget=150) as cache:
        (row,) = cache._sequences
        wait, compact, packed = row.kept.wait, row.kept.compact, []

        def late(_):
            raise kvd.TimedOut(errno.ETIMEDOUT, "late")

        def noted(first, n, keep, scores):
            tokens = sum(it.tokens for it in row.kept.entries()[first:first + n] if it.data)
            assert scores.shape[2] == tokens, (scores.shape, tokens)
            packed.append(row.length)
            return compact(first, n, keep, scores)

        row.kept.wait, row.kept.compact = late, noted
        run(cache, ids)
        assert row.used == 300
        row.kept.wait = wait
        for i, token in enumerate(document(9209, 60)):
            run(cache, [token])
        assert row.used <= 150 + 32 and len(packed) >= 2, (row.used, packed)


def test_kvzip_answers_questions_that_it_does_not_know(server, space):
    """A document of 2,000 tokens is kept by a quarter, before any question is known. Each question has a copy of it."""
    import json
    demo, tokenizer = ROOT / "tools/kvlm/demo", AutoTokenizer.from_pretrained(MODEL)
    text = tokenizer((demo / "document-1.txt").read_text()).input_ids
    right = 0
    for line in (demo / "questions-1.jsonl").read_text().splitlines()[:6]:
        it = json.loads(line)
        with cache_of(server, "document", text, budget=10000) as cache:
            run(cache, text)
            compress(cache, tokenizer, torch.tensor([text]), 500)
            ids, said = tokenizer(it["prompt"], add_special_tokens=False).input_ids, []
            for _ in range(6):
                ids = [int(run(cache, ids)[-1].argmax())]
                said += ids
            right += tokenizer.decode(said).startswith(it["answer"])
            assert len(cache.blocks) < 40
    assert right >= 5, right


def test_what_a_scorer_does_not_fit(server, space):
    ids = document(9206, 300)

    def expect(error: type[Exception], words: str, function, *arguments, **options) -> None:
        try:
            function(*arguments, **options)
        except error as it:
            assert words in str(it), it
            return
        raise AssertionError(words)

    with kvd.connect(server.socket) as connection, open_space(connection, ours, "scored-misfits") as own:
        expect(ValueError, "without a budget", KvdCache, ours, own, ids, scorer=snapkv)
        with KvdCache(ours, own, ids, scorer=lambda *_: torch.zeros(KV_HEADS, 10), budget=100) as cache:
            expect(ValueError, "scores of shape", run, cache, ids)
        with KvdCache(ours, own, ids) as cache:
            expect(ValueError, "made with a budget", cache.reduce, ids, kvzip, 100)
        own.set("kvreviver", 1)
        expect(ValueError, "kvreviver", KvdCache, ours, own, ids, scorer=snapkv, budget=100)
