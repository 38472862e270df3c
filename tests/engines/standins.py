# SPDX-License-Identifier: Apache-2.0
"""Modules that SGLang imports and, on a processor, does not use: triton and torchvision, 500 MB together. Any name
that is asked of them is there and does nothing. One kernel of triton has a stand-in that works, so that a model with
states runs; and attention with windows reads what it wrote. Not for anything else: installed into the virtual environment
of SGLang's test.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

NAMES = ("triton", "torchvision")
CONVOLUTION = "sglang.kernels.ops.mamba.causal_conv1d_triton"
ATTENTION = "sglang.srt.layers.attention.torch_native_backend"


class Kind(type):
    """Of classes: any name is an attribute, as of enumerations."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class Nothing(types.ModuleType):
    """A module, a class, a decorator, whatever somebody makes of it when a file is read."""

    __path__ = []
    __version__ = "3.5.0"

    def __getattr__(self, name):
        if name.startswith("__") or name == "active":   # triton.runtime.driver.active: which GPU
            raise AttributeError(name)
        it = (Kind(name, (), {"__init__": lambda self, *_, **__: None}) if name[0].isupper()
              else Nothing(f"{self.__name__}.{name}"))
        setattr(self, name, it)
        return it

    def __call__(self, *arguments, **_):
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    def __mro_entries__(self, _bases):
        return ()

    def __or__(self, _other):
        return self

    def __ror__(self, _other):
        return self

    def __hash__(self):
        return hash(self.__name__)

    def __eq__(self, other):
        return self is other

    def __getitem__(self, _):
        return self

    def __iter__(self):
        return iter(())


# ---- the short convolutions of models with states --------------------------------------------------------------------


def convolve(x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, **_):
    """x [channels, tokens] of several requests, each convolved after what its state has; the state goes on."""
    import torch
    out, width = torch.empty_like(x), weight.shape[1]
    for i, slot in enumerate(cache_indices.tolist()):
        begin, end = query_start_loc[i:i + 2].tolist()
        before = conv_states[slot] if has_initial_state[i] else torch.zeros_like(conv_states[slot])
        row = torch.cat([before, x[:, begin:end]], 1)
        out[:, begin:end] = torch.nn.functional.conv1d(row[None], weight[:, None], bias, groups=len(weight))[0]
        conv_states[slot] = row[:, 1 - width:]
    return out


def convolve_next(x, conv_state, weight, bias=None, conv_state_indices=None, **_):
    """x [requests, channels]: the next token of each."""
    import torch
    row = torch.cat([conv_state[conv_state_indices], x[:, :, None]], 2)
    conv_state[conv_state_indices] = row[:, :, 1:].to(conv_state.dtype)
    return (row * weight).sum(2) + (0 if bias is None else bias)


def replace_convolution(module):
    module.causal_conv1d_fn, module.causal_conv1d_update = convolve, convolve_next


# ---- windows ---------------------------------------------------------------------------------------------------------


def replace_attention(module):
    """SGLang 0.5.23's attention for processors writes the keys of layers with windows to their own slots, and reads them
    at those of the other layers."""
    def reading(run):
        def read(self, query, output, keys, values, slots, *rest, sliding_window_size=None, **options):
            if self.use_sliding_window_kv_pool and sliding_window_size is not None:
                slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
            return run(self, query, output, keys, values, slots, *rest, sliding_window_size=sliding_window_size, **options)
        return read
    kind = module.TorchNativeAttnBackend
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(kind, name, reading(getattr(kind, name)))


# ---- what finds them -------------------------------------------------------------------------------------------------

REPLACED = {CONVOLUTION: replace_convolution, ATTENTION: replace_attention}


class Replacing(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        REPLACED[module.__name__](module)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name in REPLACED:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            spec.loader = Replacing(spec.loader.name, spec.loader.path)
            return spec
        if name.split(".")[0] in NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Nothing(spec.name)

    def exec_module(self, module):
        if module.__name__ == "triton":
            module.cdiv = lambda a, b: -(-a // b)
            module.next_power_of_2 = lambda n: 1 << max(0, n - 1).bit_length()


sys.meta_path.insert(0, Finder())     # before the one that finds the kernel in its file
