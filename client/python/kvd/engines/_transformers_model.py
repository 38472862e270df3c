# SPDX-License-Identifier: Apache-2.0
"""Which models of transformers can share keys and values, and their spaces; see kvd.engines.transformers."""

from __future__ import annotations

import json
import logging
import threading
import weakref
from typing import Any, NamedTuple, NoReturn

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

import kvd

from . import _rotation
from ._reduction import METHODS
from ._rotation import rope_of

log = logging.getLogger("kvd.engines.transformers")
thread = threading.local()      # .ids: token ids embedded last in this thread; .attended: calls of attention

# ---- identity of the model ------------------------------------------------------------------------------------------

_fingerprints: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, tuple[int, int]]] = weakref.WeakKeyDictionary()
_forms: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, _Form]] = weakref.WeakKeyDictionary()

BIDIRECTIONAL = "kvd_bidirectional"     # the attn_implementation of kvd.engines.diffusion
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
BYTES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# names of smaller blocks than the model's, and the dtypes of their spaces
SMALLER = {"int8": "q8", "int4": "q4", "fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
_NO_NUMBERS = {"_name_or_path", "transformers_version", "use_cache", "return_dict", "output_hidden_states", "id2label",
               "label2id", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "architectures",
               "problem_type", "output_attentions", "chunk_size_feed_forward"}


def _weights(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def state_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """Return a value that changes when a weight is changed. Weights made in inference_mode do not show changes."""
    weights = _weights(model)
    if any(tensor.is_inference() for _, tensor in weights):
        refuse("weights made in torch.inference_mode(), whose changes cannot be seen: load the model outside it")
    return tuple((tensor.data_ptr(), tensor._version) for _, tensor in weights)


def fingerprint(model: PreTrainedModel) -> tuple[int, int]:
    """Return a fingerprint of the weights in memory and of everything else that affects keys and values. Recomputed if
    a weight was changed."""
    weights, state = _weights(model), state_of(model)
    known = _fingerprints.get(model)
    if known and known[0] == state:
        return known[1]
    config = model.config.get_text_config()
    made = kvd.fingerprint("transformers 1", type(model).__name__, _settings(config),
                           [[name, tensor.detach().contiguous()] for name, tensor in weights])
    _fingerprints[model] = (state, made)
    return made


def _settings(config: Any) -> str:
    """Return all settings that may affect numbers: the configuration without names, versions and generation options."""
    kept = {key: value for key, value in config.to_dict().items() if key not in _NO_NUMBERS}
    return json.dumps(kept, sort_keys=True, default=str)


def refuse(what: str) -> NoReturn:
    raise ValueError(f"kvd's cache for transformers does not support {what}")


def check_model(model: PreTrainedModel, bidirectional: bool = False) -> Any:
    """Return the model's text configuration, if its keys and values can be shared. bidirectional: as kvd.engines.diffusion
    runs it."""
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        refuse("encoder-decoder models")
    kinds = {*(getattr(config, "layer_types", None) or ())}
    if not kinds <= {"full_attention", "sliding_attention"}:
        refuse(f"layers of the kinds {sorted(kinds)}, but only full_attention and sliding_attention")
    if not bidirectional and (not getattr(config, "is_causal", True) or config._attn_implementation == BIDIRECTIONAL):
        refuse("attention that is not causal")
    if rope_of(config).get("rope_type", "default") in ("dynamic", "longrope"):
        refuse(f"{rope_of(config)['rope_type']} RoPE, whose rotation of keys depends on the sequence's length")
    if model.device.type != "cpu":
        refuse(f"models on {model.device.type}")
    return config


def refuse_windows(model: PreTrainedModel, otherwise: str = ", except in a KvdCache without methods") -> None:
    config = model.config.get_text_config()
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        refuse(f"layers of the kind sliding_attention{otherwise}")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        refuse(f"sliding windows{otherwise}")


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
    thread.attended = 0
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=Cache(layers=list(seen)),
                  use_cache=True)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"kvd's cache for transformers does not support {name}: {error}") from error
    if any(len(it.states) != 2 for it in seen):
        refuse(f"{name}: not every layer has keys and values of its own")
    keys, *others = [state for it in seen for state in it.states]
    for it in others:
        if (it.shape, it.dtype, it.device) != (keys.shape, keys.dtype, keys.device):
            refuse(f"{name}: keys and values of different shapes, {list(keys.shape)} of {keys.dtype} and"
                    f" {list(it.shape)} of {it.dtype} for one token")
    if keys.dim() != 4 or keys.shape[0] != 1 or keys.shape[2] != 1 or keys.dtype not in DTYPES.values():
        refuse(f"{name}: keys of shape {list(keys.shape)} and {keys.dtype} for one token")
    return _Form(layers, keys.shape[1], keys.shape[3], keys.dtype, thread.attended == layers)


def form_of(model: PreTrainedModel, bidirectional: bool = False) -> _Form:
    config = check_model(model, bidirectional)
    state = state_of(model), config._attn_implementation
    known = _forms.get(model)
    if known is None or known[0] != state:
        _forms[model] = known = state, _look(model, config.num_hidden_layers)
    return known[1]


def geometry_of(model: PreTrainedModel, block_tokens: int = 16, bidirectional: bool = False,
                dtype: str | None = None) -> kvd.Geometry:
    """Return the geometry of the model's space. dtype: that of blocks, if it is not the model's."""
    form, config = form_of(model, bidirectional), model.config.get_text_config()
    return kvd.Geometry(layers=form.layers, kv_heads=form.heads, head_dim=form.dim, vocab=config.vocab_size,
                        dtype=dtype or form.dtype, block_tokens=block_tokens, fingerprint=fingerprint(model),
                        rope="post" if rope_of(config) or getattr(config, "rotary_dim", None) else "none")


def theta_of(model: PreTrainedModel) -> float:
    """Return the base of the rotary angles; 0: the model's configuration has none."""
    return _rotation.theta_of(model.config.get_text_config())


_turns: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, torch.Tensor | None]] = weakref.WeakKeyDictionary()


def frequencies_of(model: PreTrainedModel) -> torch.Tensor | None:
    """Return the radians per position [head_dim / 2] by which the model rotates elements i and i + head_dim / 2 of a key; None
    if it does anything else, in any layer or pair."""
    state = state_of(model)
    known = _turns.get(model)
    if known is None or known[0] != state:
        _turns[model] = known = state, _turn(model)
    return known[1]


def _turn(model: PreTrainedModel) -> torch.Tensor | None:
    form = form_of(model)
    frequencies = _rotation.frequencies_of(model.config.get_text_config(), form.dim)
    if frequencies is None:
        return None
    a, b = _keys_at(model, form.layers, 0).chunk(2, -1)
    norm = (a * a + b * b).sqrt()
    said = [it for it in (getattr(module, "inv_freq", None) for module in model.modules()) if isinstance(it, torch.Tensor)]
    if any(it.shape != frequencies.shape or not torch.allclose(it.cpu(), frequencies, atol=0, rtol=1e-4) for it in said):
        return None
    if not said and not bool((norm.amax(0) > 0).all()):        # a pair that is 0 in the first layer does not show how it turns
        return None
    for position in (7, 4099):          # slow pairs turn visibly only by a far position
        cos, sin = (position * frequencies).cos(), (position * frequencies).sin()
        x, y = _keys_at(model, form.layers, position).chunk(2, -1)
        off = ((a * cos - b * sin - x) ** 2 + (b * cos + a * sin - y) ** 2).sqrt()
        if not bool((off <= 0.02 * norm).all()):
            return None
    return frequencies


def _keys_at(model: PreTrainedModel, layers: int, position: int) -> torch.Tensor:
    """The first layer's keys of some tokens, which depend on them and their position only: [tokens, heads, dim]."""
    seen, n = [_Seen() for _ in range(layers)], model.config.get_text_config().vocab_size
    tokens = torch.tensor([[i * (n - 1) // 8] for i in range(1, 9)])
    with torch.no_grad():
        model(input_ids=tokens, position_ids=torch.full((8, 1), position), past_key_values=Cache(layers=list(seen)),
              use_cache=True)
    return seen[0].states[0][:, :, 0].to(torch.float32)


def open_space(daemon: kvd.Daemon, model: PreTrainedModel, name: str | None = None, *, dtype: str | None = None,
               **options: Any) -> kvd.Space:
    """Open the space of this model. By default it is named after the model's weights and dtype, so that other weights have
    another space.

    dtype: "int8" or "int4" for blocks of quantised keys and values; "fp8" (or "fp8_e4m3") and "fp8_e5m2" for numbers of 8
    bits, limited to 448 and 57344; None: as the model computes them. With a name, raises kvd.Mismatch if the space has
    other weights, or another dtype. options are those of Daemon.space(). Runs the model on one token, and reads all
    weights once, at some GB/s.
    """
    if dtype is not None and dtype not in SMALLER and dtype not in SMALLER.values():
        raise ValueError(f"dtype must be one of {', '.join(SMALLER)}, or None for the model's own, not {dtype!r}")
    stored = SMALLER.get(dtype, dtype) if dtype else None
    geometry = geometry_of(model, dtype=stored)
    own = f"transformers-{geometry.fingerprint[0]:016x}" + (f"-{stored}" if stored else "")
    return daemon.space(name or own, geometry, **options)


_told: set[tuple[str, str]] = set()     # space and method of warnings already given


def check_space(space: kvd.Space, model: PreTrainedModel, follows: tuple[str, ...] = (),
                geometry: kvd.Geometry | None = None) -> None:
    """Refuse a space of another model. Warns of methods that are on, and that the caller does not follow. geometry: the
    model's, if it is not geometry_of()."""
    stored = space.geometry.dtype if space.geometry.dtype in SMALLER.values() else None
    if space.geometry != (geometry or geometry_of(model, space.geometry.block_tokens, dtype=stored)):
        raise ValueError(f"space {space.name!r} is of another model, or of other weights of this one")
    if space.device != (1, 0):
        refuse("spaces on a GPU")
    for method in ("bicache", *METHODS):
        if method not in follows and space.setting(method) and (space.name, method) not in _told:
            _told.add((space.name, method))
            log.warning("kvd: %s is on in space %s, and has no effect: this use of transformers does not follow it", method, space.name)
