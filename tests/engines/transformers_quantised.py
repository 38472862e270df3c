# SPDX-License-Identifier: Apache-2.0
"""A KvdCache whose blocks are quantised, against transformers with a cache that rounds as they do.

The reference is transformers with an attention whose keys and values go through the quantiser in numpy that the kernels'
tests use. With int4, a token sees those of its own span of 128 as they are.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from functools import partial

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvd
from common import MODEL, ROOT, daemon, document
from kvd.engines._transformers_model import geometry_of
from kvd.engines.transformers import KvdCache, load_prefix, open_space, store

sys.path.append(str(ROOT / "tests/kernels/methods"))

from quantiser import expanded, expanded_keys      # noqa: E402 (needs the path above)


def in_double(model):
    """Make a model's sums the same, whatever the number of rows that are computed together: a processor's fastest way to add
    depends on it, and a code that is rounded the other way, because a number differs by its last bit, changes the logits."""
    def forward(it, x):
        return torch.nn.functional.linear(x.double(), it.weight.double()).to(x.dtype)
    for it in model.modules():
        if isinstance(it, torch.nn.Linear):
            it.forward = partial(forward, it)
    return model


ours = in_double(AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="kvd").eval())
alone = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="sdpa").eval()
DTYPES = {"int8": "q8", "int4": "q4", "fp8": "e4m3", "fp8_e5m2": "e5m2"}
SPANS = {"q8": 0, "q4": 128, "e4m3": 0, "e5m2": 0}
TOLERANCE = 1e-3


def rounding(module, query, key, value, mask, scaling=None, **_):
    """Attention to keys and values as blocks of rounding.dtype have them."""
    group, n, end, span = query.shape[1] // key.shape[1], query.shape[2], key.shape[2], SPANS[rounding.dtype]
    q, k = torch.arange(end - n, end)[:, None], torch.arange(end)
    exact = k >= q // span * span if span else torch.zeros(n, end, dtype=torch.bool)
    kept, values = ([it.repeat_interleave(group, 1) for it in (of, rounded(of, rounding.dtype, how))]
                    for of, how in ((key, expanded_keys), (value, expanded)))
    scores = torch.where(exact, query @ kept[0].transpose(2, 3), query @ kept[1].transpose(2, 3)) * scaling
    weights = scores.masked_fill(k > q, -torch.inf).softmax(3)
    return ((weights * exact) @ values[0] + (weights * ~exact) @ values[1]).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("rounding", rounding)
ALL_MASK_ATTENTION_FUNCTIONS.register("rounding", lambda *_, **__: None)
rounds = in_double(AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="rounding").eval())


class Heard:
    """Notes keys and values as the model computes them for a cache, layer by layer. [layers] of [passes]."""

    def __init__(self, cache: KvdCache):
        self.states = [[] for _ in cache.layers]
        for of, layer in zip(self.states, cache.layers):
            layer.update = self._noting(layer.update, of)

    @staticmethod
    def _noting(update, of):
        def noted(keys, values, *arguments, **options):
            of.append((keys.clone(), values.clone()))
            return update(keys, values, *arguments, **options)
        return noted

    def states_of(self, layer: int, passes: int | None = None) -> list[torch.Tensor]:
        """Keys and values [1, heads, tokens, dim] of the first passes."""
        return [torch.cat(of, 2) for of in zip(*self.states[layer][:passes])]

    def rounded(self, layer: int, dtype: str) -> list[torch.Tensor]:
        """The same, as blocks of that dtype have them."""
        return [rounded(it, dtype, how) for it, how in zip(self.states_of(layer), (expanded_keys, expanded))]


def rounded(states: torch.Tensor, dtype: str, how) -> torch.Tensor:
    rows = states.to(torch.float32).reshape(-1, states.shape[-1])
    return torch.from_numpy(how(rows.numpy(), dtype)).view(states.shape).to(states.dtype)


class Replayed(DynamicCache):
    """Returns what another cache heard instead of what it is given: the references' own numbers differ by their last bits,
    and a code that is rounded the other way would change everything behind it."""

    def __init__(self, heard: Heard):
        super().__init__(config=rounds.config)
        self.heard, self.passes = heard, 0

    def update(self, keys, values, layer, *arguments, **options):
        super().update(keys, values, layer, *arguments, **options)
        self.passes += layer == 0
        return self.heard.states_of(layer, self.passes)


@contextmanager
def opened(server, dtype: str, **options):
    with kvd.connect(server.socket) as connection, open_space(connection, ours, dtype=dtype, **options) as space:
        yield space


def logits_of(model, ids: list[int], cache) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), past_key_values=cache).logits[0]


def generate(model, ids: list[int], cache, n: int = 20) -> list[int]:
    out = model.generate(torch.tensor([ids]), past_key_values=cache, max_new_tokens=n, min_new_tokens=n, do_sample=False)
    return out[0, len(ids):].tolist()


def near(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a - b).abs().max() < TOLERANCE, (a - b).abs().max()


def test_quantised_blocks_are_computed_as_a_rounded_cache(server, space):
    ids = document(41, 203)
    for dtype, stored in DTYPES.items():
        with opened(server, dtype) as own, KvdCache(ours, own, ids) as cache:
            assert own.geometry.dtype == stored
            heard, replayed = Heard(cache), None
            rounding.dtype = stored
            for some in (ids[:150], ids[150:200], *([it] for it in ids[200:])):
                mine = logits_of(ours, some, cache)
                replayed = replayed or Replayed(heard)
                near(mine, logits_of(rounds, some, replayed))
                last = mine
        with opened(server, dtype) as own, KvdCache(ours, own, ids) as cache:
            found = 128 if SPANS[stored] else 192       # whole spans, or full blocks, of the first one
            assert cache.found == found, cache.found
            near(logits_of(ours, ids[found:], cache)[-1:], last)


def test_an_answer_does_not_depend_on_what_was_found(server, space):
    """Nor on the passes in which it was computed: a token could see others before they are rounded, or rounded ones where
    another process has them as they were."""
    ids = document(46, 290)
    for dtype, found in (("int8", 288), ("int4", 256)):
        with opened(server, dtype) as own:
            with KvdCache(ours, own, ids) as cache:
                cold = logits_of(ours, ids, cache)
            with KvdCache(ours, own, ids) as cache:
                assert cache.found == found
                near(logits_of(ours, ids[found:], cache), cold[found:])
            with KvdCache(ours, own, ids, salt=1) as cache:
                ends = [0, 1, 100, 128, 129, 255, 257, 258, 290]
                near(torch.cat([logits_of(ours, ids[a:b], cache) for a, b in zip(ends, ends[1:])]), cold)


def test_rows_of_a_batch_are_computed_as_if_alone(server, space):
    prompts = [document(49, 150), document(50, 131), document(50, 140)]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(it)) + it for it in prompts])
    mask = torch.tensor([[0] * (width - len(it)) + [1] * len(it) for it in prompts])
    with opened(server, "int4") as own:
        with KvdCache(ours, own, prompts[1]) as cache:      # found by one row of the batch
            logits_of(ours, prompts[1], cache)
        with KvdCache(ours, own, ids, attention_mask=mask) as cache, torch.no_grad():
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            batch = ours(ids[:, cache.found:], attention_mask=mask, position_ids=positions[:, cache.found:], past_key_values=cache)
        for salt, (prompt, logits) in enumerate(zip(prompts, batch.logits), 1):
            with KvdCache(ours, own, prompt, salt=salt) as cache:
                near(logits[-1], logits_of(ours, prompt, cache)[-1])


def test_a_pass_that_failed_is_done_again(server, space):
    """Layers that had ended their attention had dropped the tokens before the pass."""
    ids = document(46, 290)
    with opened(server, "int4") as own:
        with KvdCache(ours, own, ids, salt=5) as cache:
            whole = logits_of(ours, ids, cache)
        with KvdCache(ours, own, ids, salt=6) as cache:
            logits_of(ours, ids[:100], cache)
            last = cache._own[-1]
            last.attend = None
            try:
                logits_of(ours, ids[100:200], cache)
            except TypeError:
                del last.attend
            near(torch.cat([logits_of(ours, ids[a:b], cache) for a, b in ((100, 200), (200, 201), (201, 290))]), whole[100:])


def test_tokens_behind_an_answer_see_their_own_span(server, space):
    """With kvreviver=on, a pass is computed in pieces, each of which took the last tokens of the pass for its own."""
    ids, more = document(46, 290), document(51, 40)
    with opened(server, "int4", name="spans") as own:
        own.set("kvreviver", 1)
        own.set("kvreviver.budget", 1)
        logits = []
        for cuts in ([40], [16, 16, 8]):
            with KvdCache(ours, own, ids) as cache:
                logits_of(ours, ids, cache)
                parts = [logits_of(ours, more[sum(cuts[:i]):][:n], cache) for i, n in enumerate(cuts)]
                logits.append(torch.cat(parts))
        near(*logits)


def test_what_torch_makes_by_default_does_not_matter(server, space):
    ids = document(46, 290)
    with opened(server, "int4") as own:
        with KvdCache(ours, own, ids, salt=8) as cache:
            whole = logits_of(ours, ids, cache)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.inference_mode():
                cache = KvdCache(ours, own, ids, salt=9)
        finally:
            torch.set_default_dtype(torch.float32)
        with cache:
            near(torch.cat([logits_of(ours, ids[:200], cache), logits_of(ours, ids[200:], cache)]), whole)


def test_other_dtypes_share_nothing(server, space):
    ids = document(42, 100)
    for dtype in DTYPES:
        with opened(server, dtype) as own, KvdCache(ours, own, ids) as cache:
            assert cache.found == 0
            logits_of(ours, ids, cache)
    with KvdCache(ours, space, ids) as cache:
        assert cache.found == 0
    with opened(server, "int8") as own:
        for dtype in (None, "int4", "fp8"):
            try:
                with opened(server, dtype, name=own.name):
                    raise AssertionError("a space of another dtype was opened")
            except kvd.Mismatch as error:
                assert "dtype" in str(error), error


def test_more_tokens_fit_in_a_pool(server, space):
    plain = space.geometry.block_bytes
    row = {"int8": 32 + 4, "int4": 16 + 4, "fp8": 32}      # of head_dim 32; plain numbers are f32 here
    for dtype, of in row.items():
        with opened(server, dtype) as own:
            assert own.geometry.block_bytes * 128 == plain * of, (own.geometry.block_bytes, plain)


def test_a_copy_is_what_the_blocks_stand_for(server, space):
    ids = document(43, 97)
    for dtype, stored in ("int4", "q4"), ("fp8", "e4m3"):
        with opened(server, dtype) as own:
            with KvdCache(ours, own, ids) as cache:
                heard = Heard(cache)
                logits_of(ours, ids, cache)
            copy, n = load_prefix(own, alone, ids)
            assert n == 96
            for layer, it in enumerate(copy.layers):
                for mine, its in zip((it.keys, it.values), heard.rounded(layer, stored)):
                    assert mine.dtype == alone.dtype and torch.equal(mine, its[:, :, :96])
            try:
                store(own, copy, ids)
            except (NotImplementedError, ValueError) as error:
                assert stored in str(error), error
            else:
                raise AssertionError("smaller blocks were stored by copy")


def test_a_full_pool_goes_on_with_what_was_rounded(server, space):
    """Behind the pool, keys and values are as the model computes them."""
    ids = document(44, 400)
    with daemon("--pool", "4M") as small, opened(small, "int8") as own:
        held = []
        with suppress(kvd.Error):
            while True:
                held += own.alloc(16)
        own.free(held[:8])
        with KvdCache(ours, own, ids) as cache:
            heard = Heard(cache)
            logits_of(ours, ids[:80], cache)
            assert not cache.private
            kept = DynamicCache(config=alone.config)
            for layer in range(len(cache.layers)):
                kept.update(*heard.rounded(layer, "q8"), layer)
            near(logits_of(ours, ids[80:], cache), logits_of(alone, ids[80:], kept))
            assert cache.private
        own.free(held[8:])
        small.check()


def test_methods_read_quantised_blocks(server, space):
    """KeyDiff keeps its budget in blocks of int8 or fp8, and what it keeps is chosen among the rounded keys."""
    ids = document(45, 300)
    for dtype in "int8", "fp8":
        with opened(server, dtype, name=f"reduced-{dtype}") as own:
            own.set("keydiff", 1)
            own.set("keydiff.budget", 128)
            with KvdCache(ours, own, ids) as cache:
                answer = generate(ours, ids, cache, 8)
                assert len(answer) == 8 and not cache.private
                assert len(cache.blocks) * own.geometry.block_tokens < 300, cache.blocks


def small(**shape):
    torch.manual_seed(1)
    plain = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 100}
    return LlamaForCausalLM(LlamaConfig(**(plain | shape), attn_implementation="kvd")).eval()


def test_a_scorer_sees_numbers_of_the_model(server, space):
    """Keys of quantised blocks were float32 beside queries of bfloat16."""
    model, ids, seen = small().to(torch.bfloat16), document(47, 100, 360), set()
    ids = [it % 100 for it in ids]

    def scorer(layer, queries, keys, values, scale):
        seen.update((queries.dtype, keys.dtype, values.dtype))
        return keys.float().norm(dim=-1)

    with kvd.connect(server.socket) as connection, open_space(connection, model, dtype="int4") as own:
        with KvdCache(model, own, ids, scorer=scorer, budget=64) as cache:
            for some in (ids[:50], ids[50:90], ids[90:]):
                logits_of(model, some, cache)
    assert seen == {torch.bfloat16}


def test_blocks_may_end_with_padding(server, space):
    """Rows of scales make blocks that are no multiple of 64 bytes."""
    ids = [it % 100 for it in document(48, 40, 360)]
    for shape, tokens in (({"num_key_value_heads": 1}, 1), ({"num_key_value_heads": 1, "num_hidden_layers": 1, "head_dim": 66}, 16)):
        model = small(**shape)
        for dtype in ("f32", "q8", "q4", "e4m3"):
            with (kvd.connect(server.socket) as connection,
                  connection.space(f"padded-{tokens}-{dtype}", geometry_of(model, tokens, dtype=dtype)) as own):
                with KvdCache(model, own, ids) as cache:
                    heard = Heard(cache)
                    logits_of(model, ids, cache)
                copy, n = load_prefix(own, model, ids)
                assert n == 39 // tokens * tokens
                wanted = heard.states_of(0) if dtype == "f32" else heard.rounded(0, dtype)
                for mine, its in zip((copy.layers[0].keys, copy.layers[0].values), wanted):
                    assert torch.equal(mine, its[:, :, :n]), (shape, dtype)


def test_names_of_dtypes(server, space):
    with kvd.connect(server.socket) as connection:
        for dtype in ("i8", "fp4", "int2"):
            try:
                open_space(connection, ours, dtype=dtype)
            except ValueError as error:
                assert "int8, int4, fp8" in str(error), error
            else:
                raise AssertionError(dtype)
