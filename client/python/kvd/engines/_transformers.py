# SPDX-License-Identifier: Apache-2.0
"""KvdCache of kvd.engines.transformers, whose documentation is there.

A batch is padded on the left. Its rows are sequences of their own: position p of a row is column p + pad of the batch. A
row may have more keys than the batch has columns, because the batch begins where the row with the shortest prefix ends.
"""

from __future__ import annotations

import errno
import inspect
import logging
import weakref
from typing import Any, Iterable

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvd

from .._handle import when_forgotten
from ._reduction import METHODS, NOTED, STEPS, compares_steps, methods_of
from ._transformers_model import DTYPES, check_space, form_of, frequencies_of, refuse, refuse_windows, theta_of, thread
from ._transformers_sequence import Followed, Keeping, Rows, Scorer, Sequence

log = logging.getLogger("kvd.engines.transformers")

_ASSISTED = "assisted decoding (assistant_model, prompt_lookup_num_tokens), which removes tokens"
_NO_IDS = "input embeddings (inputs_embeds): it must know the token ids"
_INPUTS = ("input_ids", "attention_mask", "position_ids", "cache_position", "labels", "logits_to_keep")
_OF_THE_MODEL = {"softcap": "soft caps", "s_aux": "attention sinks", "sliding_window": "sliding windows"}
_HARMLESS = ("position_embeddings", "cache_position")       # tensors that models pass to every attention function
_NOT_DONE = {"position_bias": "position biases", "cu_seq_lens_q": "packed sequences", "output_attentions": "weights as output"}

# ---- rows of a batch -------------------------------------------------------------------------------------------------


def _lists(rows: Any) -> list[list[int]]:
    """Return a list of rows, given those or one row, as a tensor or a list."""
    rows = rows.tolist() if hasattr(rows, "tolist") else list(rows)
    return rows if rows and isinstance(rows[0], list) else [rows]


def _rows_of(input_ids: Any, attention_mask: Any) -> list[tuple[list[int], int]]:
    """Return the tokens of each row of a batch, and the number of columns of padding before them."""
    rows = _lists(input_ids)
    if len({len(row) for row in rows}) != 1 or not rows[0]:
        raise ValueError("rows of different lengths, without padding" if rows[0] else "there are no tokens")
    if attention_mask is None:
        return [(row, 0) for row in rows]
    masks = _lists(attention_mask)
    pads = [row.count(0) for row in masks]
    for pad, row in zip(pads, masks):
        if [bool(it) for it in row] != [False] * pad + [True] * (len(row) - pad):
            refuse("padding that is not on the left (padding_side)")
    if [len(row) for row in masks] != [len(row) for row in rows] or any(pad == len(rows[0]) for pad in pads):
        raise ValueError("attention_mask does not have the shape of input_ids, or a row has no tokens")
    return [(row[pad:], pad) for row, pad in zip(rows, pads)]


def _several(n: int, rows: int) -> str:
    return (f"{n} sequences in a cache of {rows} (a batch, num_beams or num_return_sequences): make the cache with"
            " input_ids that have a row for each; it does not support beams")


# ---- the cache -------------------------------------------------------------------------------------------------------


def _followed(model: PreTrainedModel, space: kvd.Space, rows: list[tuple[list[int], int]], salt: int,
              keeping: Keeping) -> list[Sequence]:
    """Return rows that follow the space's methods, or keep what they are asked to; none, if there is nothing to follow, or no
    daemon. A batch finds nothing, because its rows begin together."""
    made: list[Sequence] = []
    methods = methods_of(space) - (STEPS if keeping.frequencies is None else set())
    if keeping.scorer and not keeping.budget and "keydiff" not in methods:
        raise ValueError("a scorer without a budget, which may be the cache's or the space's (keydiff=on, keydiff.budget)")
    if not methods and not keeping.budget:
        return made
    if keeping.scorer and "kvreviver" in methods:
        refuse("a scorer in a space with kvreviver=on, where blocks that it must see have left")
    refuse_windows(model)
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 15
    try:
        for row in rows:
            made.append(Followed(space, *row, salt, most, finds=len(rows) == 1 and not row[1], keeping=keeping))
    except kvd.Error as error:
        log.warning("kvd: this request follows no method: %s", error)
        for it in made:
            it.close()
        made.clear()
    return made


def _note_ids(_module: Any, arguments: tuple[Any, ...]) -> None:
    thread.ids = arguments[0]


def _before_calls(cache: weakref.ref[KvdCache]) -> Any:
    """Return a hook of the model for _check_call()."""
    def check(module: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        names = inspect.signature(module.forward).parameters if arguments else ()
        asked, mine = {**dict(zip(names, arguments)), **options}, cache()
        if mine is not None and asked.get("past_key_values") is mine:
            mine._check_call(asked)
    return check


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer of a KvdCache, which is also passed to the attention function in place of the keys."""

    is_sliding = False

    def __init__(self, cache: KvdCache, index: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache, self.index = weakref.proxy(cache), index
        self.is_initialized = True
        self.is_last = index == cache._geometry.layers - 1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        if self.index == 0:
            self.cache._begin(key_states.shape[2])
        if self.cache.private:
            return self.append(key_states, value_states)
        for it in (key_states, value_states):
            self.cache._check_states(it, self.cache._geometry.kv_heads)
        k, v = Rows(key_states), Rows(value_states)
        for row, sequence in enumerate(self.cache._sequences):
            sequence.write(self.index, k, v, row)
        return self, (key_states, value_states)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values in private memory."""
        assert self.keys is not None and self.values is not None    # see KvdCache._leave
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        if self.is_last:
            self.cache._end()
        return self.keys, self.values

    def attend(self, module: torch.nn.Module, query: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor],
               mask: torch.Tensor | None, scale: float, window: int, cap: float,
               sinks: torch.Tensor | None) -> torch.Tensor:
        self.cache._check_states(query, query.shape[1])
        if self.cache._is_cold() and not cap and sinks is None:     # there are only the new tokens
            out, _ = sdpa_attention_forward(module, query, *new, mask, scaling=scale)
            self.cache._note(self.index, query, scale)
            self.cache._score(self.index, query, new, scale)
        else:
            self.cache._score(self.index, query, new, scale)
            q, (rows, heads, n, dim) = Rows(query), query.shape
            out = (torch.zeros if self.cache._padded else torch.empty)(rows, n, heads, dim, dtype=torch.float32)
            sink = None if sinks is None else sinks.detach().to(torch.float32).contiguous()
            form = {"window": window, "cap": cap, "sinks": 0 if sink is None else sink.data_ptr()}
            for row, sequence in enumerate(self.cache._sequences):
                sequence.attend(self.index, q, out.data_ptr(), row, heads, scale, **form)
            out = out if out.dtype == query.dtype else out.to(query.dtype)
        if self.is_last:
            self.cache._end()
        return out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache._length + query_length, 0

    def get_seq_length(self) -> int:
        return int(self.cache._length)

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        refuse("reset: make another cache")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        refuse("beam search (num_beams)")

    def crop(self, tokens_to_remove: int) -> None:
        refuse(_ASSISTED)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


class KvdCache(Cache):
    """Keys and values of a batch in blocks of the pool, for models with attn_implementation="kvd".

    input_ids is the prompt: [n], or [rows, n] with padding on the left, as attention_mask [rows, n] says (None: no
    padding). Each row begins with the longest stored prefix of all but its last token. generate() and plain calls of the
    model continue behind `found` columns. Caches with different salts share no blocks. With blocks of int4, logits of columns
    that a row of a batch has found, and that are computed again for another row, are approximate. close(), the end of a with block,
    or the garbage collector releases all blocks.

    With a budget, each layer and KV head of a row keeps so many tokens, those to which scorer gives the highest scores beside
    the first and the newest ones, as under keydiff.budget. scorer(layer, queries, keys, values, scale) is called before the
    attention of a pass that makes a row exceed the budget. queries are [heads, new tokens, head_dim], keys and values [kv_heads,
    tokens, head_dim]: what each head kept before, and then the new ones. It returns scores [kv_heads, tokens]. None: KeyDiff's,
    in a space with keydiff=on.

    step_ends: ids of the tokens that end a step of reasoning, such as those whose text ends with an empty line. They are for
    a space that compares each step of the answer with earlier ones.
    """

    def __init__(self, model: PreTrainedModel, space: kvd.Space, input_ids: Any, *, attention_mask: Any = None,
                 salt: int = 0, scorer: Scorer | None = None, budget: int = 0, step_ends: Iterable[int] = ()):
        if model.config.get_text_config()._attn_implementation != "kvd":
            raise ValueError('the model must be loaded with attn_implementation="kvd"')
        ends = frozenset(step_ends)
        frequencies = frequencies_of(model) if ends and compares_steps(space) else None
        check_space(space, model, follows=METHODS if frequencies is not None else METHODS[:-1])
        if not form_of(model).attends:
            refuse(f"{type(model).__name__} in place: its attention does not go through attn_implementation; use"
                    " load_prefix() and store()")
        self._geometry, self._dtype = space.geometry, form_of(model).dtype     # of keys and values, before they are stored
        rows = _rows_of(input_ids, attention_mask)
        if frequencies is not None and space.setting("model.rope_theta") != theta_of(model):
            space.set("model.rope_theta", theta_of(model))      # the daemon compares keys across positions
        keeping = Keeping(scorer, budget, ends, frequencies)
        self._sequences = _followed(model, space, rows, salt, keeping) or [Sequence(space, *row, salt) for row in rows]
        self._follows = isinstance(self._sequences[0], Followed)
        self._padded = any(it.pad for it in self._sequences)
        self.found = min(it.pad + it.found for it in self._sequences)
        """Number of columns of the prompt that need no computing: in all rows, they are padding, or found in the pool."""
        self._length, self._n = self.found, 0   # columns of finished forward passes, and of the one in progress
        self._masks: list[tuple[torch.Tensor | None, int]] = []     # checked in this one, with windows
        self._placed = False                    # whether positions were checked in this one
        self._positions: torch.Tensor | None = None     # those that were
        self._model = weakref.ref(model)
        check = _before_calls(weakref.ref(self))
        hooks = [it.register_forward_pre_hook(check, with_kwargs=True) for it in {model, model.base_model}]
        hooks.append(model.get_input_embeddings().register_forward_pre_hook(_note_ids))
        self._forget = when_forgotten(self, _remove, hooks)
        self.private = False
        """Whether keys and values are in private memory, because the pool has no room."""
        self._own = [_Layer(self, i) for i in range(space.geometry.layers)]
        super().__init__(layers=list(self._own))

    def activate_past_recording(self) -> None:
        refuse(_ASSISTED)

    def batch_repeat_interleave(self, repeats: int) -> None:
        refuse(_several(repeats * len(self._sequences), len(self._sequences)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        refuse(_several(len(indices), len(self._sequences)))

    @property
    def blocks(self) -> list[int]:
        """Ids of the pool's blocks that the cache uses, row by row."""
        return [block for it in self._sequences for block in it.blocks]

    def _begin(self, n: int) -> None:
        """Begin a forward pass of n columns."""
        ids, rows = getattr(thread, "ids", None), len(self._sequences)
        if any(it.closed for it in self._sequences):
            raise ValueError("this cache is closed")
        if ids is None:
            refuse(_NO_IDS)
        if len(ids) != rows:
            refuse(_several(len(ids), rows))
        if ids.shape != (rows, n):
            refuse(f"keys of {n} tokens where {list(ids.shape)} token ids were embedded")
        thread.ids, self._n = None, n
        self._masks.clear()
        for sequence, new in zip(self._sequences, ids.tolist()):
            sequence.begin(new, self._length - sequence.pad)
        try:
            for sequence in self._sequences if not self.private else ():
                sequence.make_room()
        except kvd.Error as error:
            row = self._sequences[0]
            if isinstance(row, Followed) and (rows > 1 or self._padded or row.probing):     # rows of different lengths
                raise
            log.warning("kvd: this request continues in private memory: %s", error)
            self._leave()

    def _end(self) -> None:
        """End a forward pass, after all layers."""
        self._placed, self._positions = False, None
        for it in self._sequences:
            if isinstance(it, Followed) and it.probing:
                it.end_probe()
                return
            it.end()
        self._length += self._n

    def _leave(self) -> None:
        """Leave the pool: copy everything to private memory, and release the blocks."""
        stored = self._seen() if self._follows else self._stored()
        for it in self._sequences:
            it.leave()
        for layer, (keys, values) in zip(self._own, stored):
            layer.keys, layer.values = keys, values
        self.private = True

    def _stored(self) -> torch.Tensor:
        """[layers, 2 (K, V), rows, heads, columns, dim], with zeros for padding."""
        g, rows = self._geometry, len(self._sequences)
        stored = torch.zeros(g.layers, 2, rows, g.kv_heads, self._length, g.head_dim, dtype=self._dtype)
        for row, it in enumerate(self._sequences):
            if self._length > it.pad:
                stored[:, :, row:row + 1, :, it.pad:] = it.copy(self._length - it.pad)
            if self._length > it.pad and it.exact:
                it.exact.put(stored[:, :, row, :, it.pad:])
        return stored

    def _seen(self) -> torch.Tensor:
        """What the only row sees of its tokens."""
        g, (row,) = self._geometry, self._sequences
        empty = torch.zeros(g.layers, 2, 1, g.kv_heads, 0, g.head_dim, dtype=self._dtype)
        return row.copy(self._length).to(self._dtype) if self._length else empty

    def _is_cold(self) -> bool:
        """Whether the pass in progress is the first one, nothing was found, and keys and values are stored as they are: else
        an answer would depend on what others have computed."""
        return self._length == 0 and self._geometry.dtype in DTYPES and not any(it.found for it in self._sequences)

    def _note(self, layer: int, query: torch.Tensor, scale: float) -> None:
        """Let rows that follow methods note the last queries of a pass."""
        rows = [(row, it) for row, it in enumerate(self._sequences) if isinstance(it, Followed) and it.looks]
        q = Rows(query[:, :, -NOTED:]) if rows else None
        for row, it in rows:
            assert q is not None
            it.note(layer, q, row, query.shape[1], scale)

    def _score(self, layer: int, query: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor], scale: float) -> None:
        """Let rows that will exceed their budget score what they see."""
        for row, it in enumerate(self._sequences):
            n = len(it.new)
            if isinstance(it, Followed) and n and it.wants_scores():
                it.score(layer, query[row, :, -n:], (new[0][row, :, -n:], new[1][row, :, -n:]), scale)

    def reduce(self, input_ids: Any, scorer: Scorer, budget: int) -> None:
        """Keep so many tokens of each layer and KV head, those to which scorer gives the highest scores in a pass of other
        tokens: input_ids, a row, which the model computes behind those of the cache, and which do not stay (KVzip: the
        context again). The cache must have been made with a budget, which this replaces, and have one row. Scores of the
        tokens that do not stay may be left out."""
        row, model = self._sequences[0], self._model()
        if not isinstance(row, Followed) or not row.own or len(self._sequences) > 1 or row.moves:
            raise ValueError("only a cache of one row that was made with a budget can be reduced")
        if self.private or not row.publishing or model is None:
            raise RuntimeError("a cache that has left the pool cannot be reduced")
        before, row.keeping, row.probing = row.used, row.keeping._replace(scorer=scorer, budget=budget), True
        try:
            with torch.no_grad():
                model(torch.tensor(_lists(input_ids)), past_key_values=self, logits_to_keep=1)
        finally:
            row.keeping, row.probing = row.keeping._replace(scorer=None), False
            row.cut()
        if row.used == before > budget:
            raise RuntimeError("the cache was not reduced: the pool is full, or the daemon busy or gone")

    def _check_states(self, states: torch.Tensor, heads: int) -> None:
        """Refuse tensors that do not match the geometry, because libkvd gets only their addresses."""
        g = self._geometry
        expected = (len(self._sequences), heads, self._n, g.head_dim)
        if states.shape != expected:
            refuse(f"keys, values or queries of shape {list(states.shape)} where the space has {list(expected)}")
        if states.dtype != self._dtype or not states.is_cpu:
            refuse(f"keys, values or queries of {states.dtype} on {states.device} (autocast?), where the model has"
                    f" {self._dtype} in host memory")

    def _check_call(self, asked: dict[str, Any]) -> None:
        """Refuse arguments of the model, or of the model inside, by name."""
        self._placed, self._positions = False, None
        if asked.get("inputs_embeds") is not None:
            refuse(_NO_IDS)
        for name, value in asked.items():
            if name in _OF_THE_MODEL and value is not None:
                refuse(f"{_OF_THE_MODEL[name]} that are not the model's own")
            if isinstance(value, torch.Tensor) and name not in _INPUTS:
                refuse(f"{_NOT_DONE.get(name, name)}: a block's key has token ids only")
        ids, mask = asked.get("input_ids"), asked.get("attention_mask")
        if ids is None:
            return
        if len(ids) != len(self._sequences):
            refuse(_several(len(ids), len(self._sequences)))
        if mask is None or mask.dim() == 2:
            self._check_padding(mask, ids.shape[1])
        if asked.get("position_ids") is not None:
            self._check_positions(asked["position_ids"], ids.shape[1])

    def _shown(self, n: int) -> torch.Tensor:
        """Return which columns are not padding, up to n: [rows, n]."""
        return torch.arange(n) >= torch.tensor([[it.pad] for it in self._sequences])

    def _check_padding(self, mask: torch.Tensor | None, n: int) -> None:
        """Check a mask [rows, columns so far and n more]."""
        if mask is None and self._padded:
            refuse("a call without attention_mask, with padding in the cache")
        if mask is not None and not torch.equal(mask != 0, self._shown(self._length + n)):
            refuse("padding (zeros in attention_mask) that this cache was not made with: it needs the same attention_mask")

    def _check_mask(self, mask: torch.Tensor | None, window: int) -> None:
        """Check that a layer's mask shows the positions in its window up to a query's own, and not the padding."""
        if any(it is mask and of == window for it, of in self._masks):
            return
        end = self._length + self._n
        if mask is None:
            if self._padded or 0 < window < end:
                refuse("padding or a sliding window without a mask")
        else:
            shown, k = self._shown(end), torch.arange(end)
            q = k[self._length:, None]
            seen = (k <= q) & (k > q - (window or end)) & shown[:, None, None]
            if mask.dtype != torch.bool or mask.shape[2:] != seen.shape[2:] or not bool(
                    ((mask == seen) | ~shown[:, None, self._length:, None]).all()):
                refuse("padding that this cache was not made with, or masks other than the causal one")
        self._masks.append((mask, window))

    def _check_positions(self, positions: torch.Tensor, n: int) -> None:
        """Check that positions are those of the tokens' places in the chain, because keys are rotated by position."""
        if positions is self._positions:    # the model passes on what it was called with
            self._placed = True
            return
        if positions.dim() != 2 or len(positions) not in (1, len(self._sequences)) or positions.shape[1] != n:
            refuse(f"position_ids of shape {list(positions.shape)} (several sequences, or M-RoPE)")
        for it, row in zip(self._sequences, positions.expand(len(self._sequences), n).tolist()):
            first = self._length - it.pad
            if row[max(-first, 0):] != list(range(max(first, 0), first + n)):
                refuse("position_ids that are not those of the tokens' places")
        self._positions, self._placed = positions, True

    def _check_placed(self) -> None:
        """The positions that a model makes by itself count the padding."""
        if not self._placed and self._padded:
            refuse("a call without position_ids, with padding in the cache")

    def close(self) -> None:
        self._forget()
        for it in self._sequences:
            it.close()

    def __enter__(self) -> KvdCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- functions that transformers calls ------------------------------------------------------------------------------


def _attention(module: torch.nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: Any,
               dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
               position_ids: torch.Tensor | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
               **options: Any) -> tuple[torch.Tensor, None]:
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if type(key) is not _Layer:
        thread.attended = getattr(thread, "attended", 0) + 1
        mask = _causal(module, query, key, attention_mask, is_causal, bool(softcap) or s_aux is not None)
        if softcap or s_aux is not None:
            return _capped(query, key, value, mask, scale, softcap, s_aux), None
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling,
                                      is_causal=is_causal, **options)
    for name, it in options.items():
        if it is not None and it is not False and (name in _NOT_DONE or isinstance(it, torch.Tensor) and name not in _HARMLESS):
            refuse(_NOT_DONE.get(name, f"attention with {name}"))
    if dropout or query.requires_grad:
        refuse("training")
    if is_causal is False or not getattr(module, "is_causal", True):
        refuse("attention that is not causal")
    window = options.get("sliding_window") or 0
    key.cache._check_mask(attention_mask, window)
    if key.index == 0 and position_ids is not None:
        key.cache._check_positions(position_ids, query.shape[2])
    key.cache._check_placed()
    if s_aux is not None and s_aux.numel() != query.shape[1]:
        refuse(f"{s_aux.numel()} attention sinks for {query.shape[1]} heads")
    return key.attend(module, query, value, attention_mask, scale, window, softcap or 0.0, s_aux), None


def _causal(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None,
            is_causal: bool | None, always: bool) -> torch.Tensor | None:
    """Return the mask for other caches, and for private memory. sdpa's own causal mask assumes queries from position 0."""
    n, length = query.shape[2], key.shape[2]
    causal = is_causal is not False and getattr(module, "is_causal", True)
    if mask is None and causal and 1 < n and (always or n < length):
        return torch.ones(n, length, dtype=torch.bool, device=query.device).tril(length - n)[None, None]
    return mask


def _capped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float,
            cap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """Attention with soft caps and sinks, which sdpa does not have."""
    group = query.shape[1] // key.shape[1]
    scores = query @ repeat_kv(key, group).transpose(2, 3) * scale
    if cap:
        scores = torch.tanh(scores / cap) * cap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], 3)
    weights = torch.softmax(scores, 3, torch.float32).to(query.dtype)[..., :key.shape[2]]
    return (weights @ repeat_kv(value, group)).transpose(1, 2).contiguous()


def _mask(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
          mask_function: Any = causal_mask_function, attention_mask: torch.Tensor | None = None,
          allow_is_causal_skip: bool = True, **options: Any) -> torch.Tensor | None:
    """Return None for plain causal attention, otherwise sdpa's mask."""
    causal = mask_function is causal_mask_function and kv_offset == 0 and kv_length == q_offset + q_length
    if causal and allow_is_causal_skip and (attention_mask is None or bool(attention_mask.all())):
        return None
    return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                     kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
                     allow_is_causal_skip=allow_is_causal_skip, **options)


ALL_ATTENTION_FUNCTIONS.register("kvd", _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register("kvd", _mask)
