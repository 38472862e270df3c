# SPDX-License-Identifier: Apache-2.0
"""The implementation of kvd.engines.transformers; its documentation is there."""

from __future__ import annotations

import ctypes
import errno
import inspect
import json
import logging
import threading
import weakref
from typing import Any, Iterator, NamedTuple, NoReturn

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvd

from .._handle import when_forgotten

log = logging.getLogger("kvd.engines.transformers")

# ---- identity of the model ------------------------------------------------------------------------------------------

_fingerprints: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, tuple[int, int]]] = weakref.WeakKeyDictionary()
_forms: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, _Form]] = weakref.WeakKeyDictionary()

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_NO_NUMBERS = {"_name_or_path", "transformers_version", "use_cache", "return_dict", "output_hidden_states", "id2label",
               "label2id", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "architectures",
               "problem_type", "output_attentions", "chunk_size_feed_forward"}


def _weights(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _state(model: PreTrainedModel) -> tuple[Any, ...]:
    """Return a value that changes when a weight is changed. Weights made in inference_mode do not show changes."""
    weights = _weights(model)
    if any(tensor.is_inference() for _, tensor in weights):
        _refuse("weights made in torch.inference_mode(), whose changes cannot be seen: load the model outside it")
    return tuple((tensor.data_ptr(), tensor._version) for _, tensor in weights)


def fingerprint(model: PreTrainedModel) -> tuple[int, int]:
    """Return a fingerprint of the weights in memory and of everything else that affects keys and values. Recomputed if
    a weight was changed."""
    weights, state = _weights(model), _state(model)
    known = _fingerprints.get(model)
    if known and known[0] == state:
        return known[1]
    config = model.config.get_text_config()
    made = kvd.fingerprint("transformers 1", type(model).__name__, _settings(config),
                           [[name, tensor.detach().contiguous()] for name, tensor in weights])
    _fingerprints[model] = (state, made)
    return made


def _rope(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})


def _settings(config: Any) -> str:
    """Return all settings that may affect numbers: the configuration without names, versions and generation options."""
    kept = {key: value for key, value in config.to_dict().items() if key not in _NO_NUMBERS}
    return json.dumps(kept, sort_keys=True, default=str)


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"kvd's cache for transformers does not support {what}")


def _check_model(model: PreTrainedModel) -> Any:
    """Return the model's text configuration, if its keys and values can be shared."""
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        _refuse("encoder-decoder models")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        _refuse(f"layers of the kinds {sorted(set(config.layer_types))}, but only full_attention")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        _refuse("sliding windows")
    if not getattr(config, "is_causal", True):
        _refuse("attention that is not causal")
    if _rope(config).get("rope_type", "default") in ("dynamic", "longrope"):
        _refuse(f"{_rope(config)['rope_type']} RoPE, whose rotation of keys depends on the sequence's length")
    if model.device.type != "cpu":
        _refuse(f"models on {model.device.type}")
    return config


class _Form(NamedTuple):
    """Shape of a model's keys and values, and whether its attention goes through attn_implementation."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype
    attends: bool


class _Seen(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A cache layer that records keys and values, to examine a model."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized, self.states = True, []

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        self.states += [key_states, value_states]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def _look(model: PreTrainedModel, layers: int) -> _Form:
    """Run the model on one token, and take the shapes from its calls of the cache; configurations name them
    differently."""
    seen, name = [_Seen() for _ in range(layers)], type(model).__name__
    _thread.attended = 0
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=Cache(layers=list(seen)),
                  use_cache=True)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"kvd's cache for transformers does not support {name}: {error}") from error
    if any(len(it.states) != 2 for it in seen):
        _refuse(f"{name}: not every layer has keys and values of its own")
    keys, *others = [state for it in seen for state in it.states]
    for it in others:
        if (it.shape, it.dtype, it.device) != (keys.shape, keys.dtype, keys.device):
            _refuse(f"{name}: keys and values of different shapes, {list(keys.shape)} of {keys.dtype} and"
                    f" {list(it.shape)} of {it.dtype} for one token")
    if keys.dim() != 4 or keys.shape[0] != 1 or keys.shape[2] != 1 or keys.dtype not in _DTYPES.values():
        _refuse(f"{name}: keys of shape {list(keys.shape)} and {keys.dtype} for one token")
    return _Form(layers, keys.shape[1], keys.shape[3], keys.dtype, _thread.attended == layers)


def _form(model: PreTrainedModel) -> _Form:
    config = _check_model(model)
    state = _state(model), config._attn_implementation
    known = _forms.get(model)
    if known is None or known[0] != state:
        _forms[model] = known = state, _look(model, config.num_hidden_layers)
    return known[1]


def _geometry(model: PreTrainedModel, block_tokens: int = 16) -> kvd.Geometry:
    form, config = _form(model), model.config.get_text_config()
    return kvd.Geometry(layers=form.layers, kv_heads=form.heads, head_dim=form.dim, vocab=config.vocab_size,
                        dtype=form.dtype, block_tokens=block_tokens, fingerprint=fingerprint(model),
                        rope="post" if _rope(config) or getattr(config, "rotary_dim", None) else "none")


def open_space(daemon: kvd.Daemon, model: PreTrainedModel, name: str | None = None, **options: Any) -> kvd.Space:
    """Open the space of this model. By default it is named after the model's weights, so that other weights have
    another space.

    With a name, raises kvd.Mismatch if the space has other weights. options are those of Daemon.space(). Runs the model
    on one token, and reads all weights once, at some GB/s.
    """
    geometry = _geometry(model)
    return daemon.space(name or f"transformers-{geometry.fingerprint[0]:016x}", geometry, **options)


_METHODS = ("bicache", "memshare", "keydiff", "kvreviver", "hshare")
_told: set[tuple[str, str]] = set()     # space and method of warnings already given


def _check_space(space: kvd.Space, model: PreTrainedModel) -> None:
    if space.geometry != _geometry(model, space.geometry.block_tokens):
        raise ValueError(f"space {space.name!r} is of another model, or of other weights of this one")
    if space.device != (1, 0):
        _refuse("spaces on a GPU")
    for method in _METHODS:
        if space.setting(method) and (space.name, method) not in _told:
            _told.add((space.name, method))
            log.warning("kvd: %s is on in space %s, and has no effect: transformers does not follow kvd's methods", method,
                        space.name)


_ASSISTED = "assisted decoding (assistant_model, prompt_lookup_num_tokens), which removes tokens"


def _several(n: int) -> str:
    return f"{n} sequences in one cache (a batch, num_beams or num_return_sequences): make a cache for each"


def _tokens_of(input_ids: Any) -> list[int]:
    """Return the token ids of one sequence."""
    tokens = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
    if tokens and isinstance(tokens[0], list):
        if len(tokens) != 1:
            _refuse(_several(len(tokens)))
        tokens = tokens[0]
    if not tokens:
        raise ValueError("there are no tokens")
    return tokens


# ---- in place -------------------------------------------------------------------------------------------------------

_thread = threading.local()     # .ids: token ids embedded last in this thread; .attended: calls of _attention


def _note_ids(_module: Any, arguments: tuple[Any, ...]) -> None:
    _thread.ids = arguments[0]


_INPUTS = ("input_ids", "attention_mask", "position_ids", "cache_position", "labels", "logits_to_keep")


def _check_call(cache: weakref.ref[KvdCache]) -> Any:
    """Return a hook of the model that refuses unsupported arguments by name."""
    def check(module: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        names = inspect.signature(module.forward).parameters if arguments else ()
        asked = {**dict(zip(names, arguments)), **options}
        mine, ids, mask = cache(), asked.get("input_ids"), asked.get("attention_mask")
        if mine is None or asked.get("past_key_values") is not mine:
            return
        if asked.get("inputs_embeds") is not None:
            _refuse("input embeddings (inputs_embeds): it must know the token ids")
        if ids is not None and len(ids) != 1:
            _refuse(_several(len(ids)))
        for name, value in asked.items():
            if isinstance(value, torch.Tensor) and name not in _INPUTS:
                _refuse(f"{_NOT_DONE.get(name, name)}: a block's key has token ids only")
        if mask is not None and mask.dim() == 2 and not bool(mask.all()):
            _refuse("padding (zeros in attention_mask)")
        if ids is not None and asked.get("position_ids") is not None:
            _check_positions(asked["position_ids"], mine._sequence.length, ids.shape[1])
    return check


class _Sequence:
    """A request's blocks: found ones, which are pinned, then its own, which are sealed when they are full."""

    def __init__(self, space: kvd.Space, tokens: list[int], salt: int):
        self.space, self.size = space, space.geometry.block_tokens
        self.prompt = tokens
        self.pin = space.find(tokens[:-1], salt=salt)
        self.filling: list[kvd.Block] = []      # blocks behind the pinned ones
        self.found = self.pin.tokens // self.size * self.size   # a partial last block cannot be continued
        self.length = self.found                # number of positions written in all layers
        self.tokens = tokens[:self.found]
        self.new: list[int] = []                # tokens of the forward pass in progress
        self.publishing, self.closed = True, False
        self.table = kvd.Table(space)
        if self.found:
            self.table.extend(self.pin, self.pin.blocks[:self.found // self.size])

    def begin(self, n: int) -> None:
        """Begin a forward pass of n tokens."""
        ids = getattr(_thread, "ids", None)
        if self.closed:
            raise ValueError("this cache is closed")
        if ids is None:
            _refuse("input embeddings (inputs_embeds): it must know the token ids")
        if len(ids) != 1:
            _refuse(_several(len(ids)))
        if ids.shape != (1, n):
            _refuse(f"keys of {n} tokens where {list(ids.shape)} token ids were embedded")
        self.new, _thread.ids = ids[0].tolist(), None
        expected = self.prompt[self.length:self.length + n]
        if self.new[:len(expected)] != expected:
            raise ValueError(f"from position {self.length} on, these are not the tokens that this cache was made for:"
                             " the model must get the same input_ids, without padding")

    def check(self, states: torch.Tensor, heads: int | None = None) -> None:
        """Refuse tensors that do not match the geometry, because libkvd gets only their addresses."""
        g, n = self.space.geometry, len(self.new)
        expected = (1, g.kv_heads if heads is None else heads, n, g.head_dim)
        if tuple(states.shape) != expected:
            _refuse(f"keys, values or queries of shape {list(states.shape)} where the space has {list(expected)}")
        if states.dtype != _DTYPES[g.dtype] or states.device.type != "cpu":
            _refuse(f"keys, values or queries of {states.dtype} on {states.device} (autocast?), where the space has"
                    f" {_DTYPES[g.dtype]} in host memory")

    def make_room(self, n: int) -> None:
        """Allocate blocks for n more tokens. Raises kvd.Error if that fails."""
        need = -(-(self.length + n) // self.size) - len(self.table)
        if need <= 0:
            return
        blocks = self.space.alloc(need)
        if not self.table.extend(blocks[0], [block.id for block in blocks]):
            self.space.free(blocks)
            raise kvd.Error(errno.ESTALE, "the daemon was replaced during this sequence")
        self.filling += blocks

    def end(self) -> None:
        """End a forward pass, after all layers."""
        self.tokens += self.new
        self.length += len(self.new)
        self.publish()

    def publish(self) -> None:
        """Seal full blocks."""
        first = len(self.table) - len(self.filling)
        n = self.length // self.size - first
        if n <= 0 or not self.publishing:
            return
        try:
            ids = self.pin.seal(self.filling[:n], self.tokens[first * self.size:(first + n) * self.size])
        except kvd.Error as error:      # the blocks remain in use here, but unpublished
            self.publishing = False
            log.warning("kvd: the results of this request are not shared: %s", error)
            return
        self.table.replace(first, ids)
        del self.filling[:len(ids)]

    def leave(self) -> None:
        self.publishing = False
        self.space.free(self.filling)
        self.filling = []
        self.pin.release()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.leave()


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer of a KvdCache, which is also passed to the attention function in place of the keys."""

    is_sliding = False

    def __init__(self, cache: KvdCache, index: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache, self.sequence, self.index = weakref.proxy(cache), cache._sequence, index
        self.is_initialized = True
        self.is_last = index == cache._sequence.space.geometry.layers - 1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        n = key_states.shape[2]
        if self.index == 0:
            self.cache._begin(n)
        if self.cache.private:
            return self.append(key_states, value_states)
        sequence = self.sequence
        sequence.check(key_states)
        sequence.check(value_states)
        k, v = _rows(key_states), _rows(value_states)
        sequence.table.write(self.index, sequence.length, n, k.data_ptr(), v.data_ptr(), k.shape[2] * k.shape[3])
        return self, (key_states, value_states)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values in private memory."""
        assert self.keys is not None and self.values is not None    # see KvdCache._leave
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        if self.is_last:
            self.sequence.end()
        return self.keys, self.values

    def attend(self, module: torch.nn.Module, query: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor],
               scale: float) -> torch.Tensor:
        sequence, (_, heads, n, dim) = self.sequence, query.shape
        sequence.check(query, heads)
        if sequence.length == 0:        # only the new tokens
            out, _ = sdpa_attention_forward(module, query, *new, None, scaling=scale)
        else:
            q, out = _rows(query), torch.empty(1, n, heads, dim)
            sequence.table.attend(self.index, sequence.length, n, heads, scale, q.data_ptr(), heads * dim,
                                  out.data_ptr(), heads * dim)
            out = out.to(query.dtype)
        if self.is_last:
            sequence.end()
        return out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.sequence.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.sequence.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        _refuse("reset: make another cache")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        _refuse("beam search (num_beams)")

    def crop(self, tokens_to_remove: int) -> None:
        _refuse(_ASSISTED)


def _rows(states: torch.Tensor) -> torch.Tensor:
    """Convert [1, heads, n, dim] to float rows of tokens, [1, n, heads, dim]; copies only if necessary."""
    return states.transpose(1, 2).to(torch.float32).contiguous()


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


class KvdCache(Cache):
    """Keys and values of one sequence in blocks of the pool, for models with attn_implementation="kvd".

    input_ids is the prompt, [1, n] or n token ids. The cache begins with the longest stored prefix of all but the last
    of them (`found` tokens). generate() and plain calls of the model continue behind it. Caches with different salts
    share no blocks. close(), the end of a with block, or the garbage collector releases all blocks.
    """

    def __init__(self, model: PreTrainedModel, space: kvd.Space, input_ids: Any, *, salt: int = 0):
        if model.config.get_text_config()._attn_implementation != "kvd":
            raise ValueError('the model must be loaded with attn_implementation="kvd"')
        _check_space(space, model)
        if not _form(model).attends:
            _refuse(f"{type(model).__name__} in place: its attention does not go through attn_implementation; use"
                    " load_prefix() and store()")
        self._sequence = _Sequence(space, _tokens_of(input_ids), salt)
        hooks = [model.get_input_embeddings().register_forward_pre_hook(_note_ids),
                 model.register_forward_pre_hook(_check_call(weakref.ref(self)), with_kwargs=True)]
        self._forget = when_forgotten(self, _remove, hooks)
        self.private = False
        """Whether keys and values are in private memory, because the pool has no room."""
        self._own = [_Layer(self, i) for i in range(space.geometry.layers)]
        super().__init__(layers=list(self._own))

    def activate_past_recording(self) -> None:
        _refuse(_ASSISTED)

    def batch_repeat_interleave(self, repeats: int) -> None:
        _refuse(_several(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        _refuse(_several(len(indices)))

    @property
    def found(self) -> int:
        """Number of tokens of the prompt that were found in the pool, and are used in place."""
        return self._sequence.found

    @property
    def blocks(self) -> list[int]:
        """Ids of the pool's blocks that the cache uses."""
        return self._sequence.table.blocks

    def _begin(self, n: int) -> None:
        self._sequence.begin(n)
        try:
            if not self.private:
                self._sequence.make_room(n)
        except kvd.Error as error:
            log.warning("kvd: this request continues in private memory: %s", error)
            self._leave()

    def _leave(self) -> None:
        """Leave the pool: copy everything to private memory, and release the blocks."""
        sequence = self._sequence
        stored = _gather(sequence.space.geometry, sequence.table.base, sequence.table.blocks, sequence.length)
        for layer, (keys, values) in zip(self._own, stored):
            layer.keys, layer.values = keys, values
        self.private = True
        sequence.leave()

    def close(self) -> None:
        self._forget()
        self._sequence.close()

    def __enter__(self) -> KvdCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- functions that transformers calls ------------------------------------------------------------------------------

_NOT_DONE = {"softcap": "soft caps", "s_aux": "attention sinks", "sliding_window": "sliding windows",
             "position_bias": "position biases", "cu_seq_lens_q": "packed sequences",
             "output_attentions": "weights as output"}


def _attention(module: torch.nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: Any,
               dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
               position_ids: torch.Tensor | None = None, **options: Any) -> tuple[torch.Tensor, None]:
    if type(key) is not _Layer:
        _thread.attended = getattr(_thread, "attended", 0) + 1
        return _plain(module, query, key, value, attention_mask, dropout, scaling, is_causal, options)
    for name, what in _NOT_DONE.items():
        if options.get(name, False) is not False and options[name] is not None:
            _refuse(what)
    if attention_mask is not None:
        _refuse("padding, or masks other than the causal one")
    if dropout or query.requires_grad:
        _refuse("training")
    if is_causal is False or not getattr(module, "is_causal", True):
        _refuse("attention that is not causal")
    if key.index == 0 and position_ids is not None:
        _check_positions(position_ids, key.sequence.length, query.shape[2])
    return key.attend(module, query, value, query.shape[3] ** -0.5 if scaling is None else scaling), None


def _check_positions(positions: torch.Tensor, first: int, n: int) -> None:
    """Check that positions are those of the tokens' places in the chain, because keys are rotated by position."""
    if positions.dim() != 2 or len(positions) != 1:
        _refuse(f"position_ids of shape {list(positions.shape)} (several sequences, or M-RoPE)")
    if int(positions[0, -1]) != first + n - 1 or n > 1 and positions[0].tolist() != list(range(first, first + n)):
        _refuse("position_ids that are not those of the tokens' places")


def _plain(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
           dropout: float, scaling: float | None, is_causal: bool | None, options: dict[str, Any]
           ) -> tuple[torch.Tensor, None]:
    """Attention for other caches, and for private memory: sdpa, whose own causal mask assumes queries from position 0
    on."""
    n, length = query.shape[2], key.shape[2]
    if mask is None and 1 < n < length:
        mask = torch.ones(n, length, dtype=torch.bool, device=query.device).tril(length - n)[None, None]
    return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling,
                                  is_causal=is_causal, **options)


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

# ---- by copy --------------------------------------------------------------------------------------------------------


def _gather(geometry: kvd.Geometry, base: int, ids: list[int], length: int) -> torch.Tensor:
    """Copy blocks to a tensor [layers, 2 (K, V), 1, heads, length, dim]."""
    g, size = geometry, geometry.block_bytes
    out = torch.empty(g.layers, 2, 1, g.kv_heads, len(ids), g.block_tokens, g.head_dim, dtype=_DTYPES[g.dtype])
    for first, block, n in _runs(ids):
        run = torch.frombuffer((ctypes.c_uint8 * (n * size)).from_address(base + block * size), dtype=out.dtype)
        run = run.view(n, g.layers, 2, 1, g.kv_heads, g.block_tokens, g.head_dim)
        out[..., first:first + n, :, :] = run.permute(1, 2, 3, 4, 0, 5, 6)
    return out.flatten(4, 5)[..., :length, :]


def _runs(ids: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of consecutive ids as (index of the first, first id, number of ids)."""
    first = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            yield first, ids[first], i - first
            first = i


def load_prefix(space: kvd.Space, model: PreTrainedModel, input_ids: Any, *, salt: int = 0) -> tuple[DynamicCache, int]:
    """Return a DynamicCache with a copy of the longest stored prefix of all but the prompt's last token, and the number
    of tokens in it."""
    _check_space(space, model)
    cache: Any = DynamicCache(config=model.config)
    cache.kvd_space, cache.kvd_salt = space.name, salt
    if len(cache.layers) != space.geometry.layers:
        _refuse(f"a DynamicCache of {len(cache.layers)} layers for a model of {space.geometry.layers}")
    with space.find(_tokens_of(input_ids)[:-1], salt=salt) as pin:
        if not pin:
            return cache, 0
        stored = _gather(space.geometry, pin.address(0), pin.blocks, pin.tokens)
        for layer, (keys, values) in zip(cache.layers, stored):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return cache, pin.tokens


def store(space: kvd.Space, cache: Any, input_ids: Any) -> int:
    """Publish keys and values of these tokens, the prompt's and the generated ones, from a cache of load_prefix(). Full
    blocks that are not in the pool yet are copied. Returns the number of blocks copied."""
    if getattr(cache, "kvd_space", None) != space.name:
        raise ValueError(f"the cache was not made by load_prefix() for space {space.name!r}")
    tokens, size = _tokens_of(input_ids), space.geometry.block_tokens
    full = min(len(tokens), cache.get_seq_length()) // size
    _check_copied(space.geometry, cache, full * size)
    with space.lookup(tokens[:full * size], salt=cache.kvd_salt) as pin:
        if not pin:
            pin = kvd.Pin(space, salt=cache.kvd_salt)
        return _store_blocks(space, cache, tokens, pin, len(pin.blocks), full)


def _check_copied(g: kvd.Geometry, cache: Any, tokens: int) -> None:
    """Refuse tensors that do not match the geometry, because an assignment would broadcast or convert them."""
    for layer in cache.layers if tokens else ():
        for it in (layer.keys, layer.values):
            if (it.shape[:2], it.shape[3:], it.dtype) != ((1, g.kv_heads), (g.head_dim,), _DTYPES[g.dtype]):
                _refuse(f"keys or values of shape {list(it.shape)} and {it.dtype} in a space of {g}")
            if it.shape[2] < tokens:
                _refuse(f"a cache that has {it.shape[2]} of {tokens} tokens")


def _store_blocks(space: kvd.Space, cache: Any, tokens: list[int], pin: kvd.Pin, first: int, end: int) -> int:
    size = space.geometry.block_tokens
    blocks = space.alloc(end - first)
    for i, block in enumerate(blocks, first):
        to = torch.utils.dlpack.from_dlpack(block)
        for layer, (keys, values) in enumerate((it.keys, it.values) for it in cache.layers):
            to[layer, 0] = keys[0, :, i * size:(i + 1) * size]
            to[layer, 1] = values[0, :, i * size:(i + 1) * size]
        del to
    try:
        if blocks:
            pin.seal(blocks, tokens[first * size:end * size])
    finally:
        space.free(blocks)
        pin.release()
    return len(blocks)
