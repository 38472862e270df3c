# SPDX-License-Identifier: Apache-2.0
"""A plugin of vLLM for tests: its CPU backend with a pool on the stand-in driver, and kvd's attention for GPUs. torch for
processors takes the stand-in's device memory for host memory, which it is. Kernels of libkvd run in the emulation; torch's own
wait for them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import kvd
from kvd import _tensor

DEVICE = {b"dltensor": 8, b"dltensor_versioned": 32 + 8}      # bytes before the device's kind


def _of_host(capsule):
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    kind = name(capsule)
    ctypes.c_int32.from_address(pointer(capsule, kind) + DEVICE[kind]).value = 1
    ctypes.c_int32.from_address(pointer(capsule, kind) + DEVICE[kind] + 4).value = 0
    return capsule


class Device:
    """Memory of the stand-in's device, in its primary context."""

    def __init__(self):
        self.driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        self.do("cuInit", 0)
        self.do("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.context = context

    def do(self, name: str, *given) -> None:
        error = getattr(self.driver, name)(*given)
        assert not error, (name, error)

    def __enter__(self) -> Device:
        self.do("cuCtxPushCurrent_v2", self.context)
        return self

    def __exit__(self, *_) -> None:
        self.do("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def take(self, n: int, host: int = 0) -> ctypes.c_uint64:
        at = ctypes.c_uint64()
        self.do("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(n))
        if host:
            self.do("cuMemcpyHtoDAsync_v2", at, ctypes.c_void_p(host), ctypes.c_size_t(n), None)
        return at

    def give(self, at: ctypes.c_uint64, n: int, host: int = 0) -> None:
        if host:
            self.do("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host), at, ctypes.c_size_t(n), None)
        self.do("cuCtxSynchronize")
        self.do("cuMemFree_v2", at)


def plugged(folder: str) -> None:
    """Make this a plugin of the Pythons that have the folder in their path."""
    info = Path(folder) / "standin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: standin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nstandin = vllm_standin:install\n")


def _use_attention_for_gpus() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from kvd.engines import _vllm_layout
    from kvd.engines._vllm_attention_gpu import Backend
    _vllm_layout.register()
    CPUAttentionBackend.get_impl_cls, CPUAttentionBackend.get_builder_cls = Backend.get_impl_cls, Backend.get_builder_cls


def install() -> None:
    if _tensor.View.__dlpack_device__.__name__ != "__dlpack_device__":
        return
    made, begin, attend = _tensor.View.__dlpack__, kvd.Batch.begin, kvd.Batch.attend
    tokens, devices = 0, []

    def counting(batch: kvd.Batch, requests, *given) -> None:
        nonlocal tokens
        tokens = sum(it.n for it in requests)
        begin(batch, requests, *given)

    def elsewhere(batch: kvd.Batch, layer: int, q: int, ldq: int, out: int, ldo: int, *given) -> None:
        """With queries and results of floats in memory of the device, as on a GPU."""
        devices[:] = devices or [Device()]          # in the process that uses it, and not before a fork
        with devices[0] as device:
            there, back = device.take(4 * tokens * ldq, q), device.take(4 * tokens * ldo)
            try:
                attend(batch, layer, there.value, ldq, back.value, ldo, *given)
            finally:
                device.give(there, 4 * tokens * ldq)
                device.give(back, 4 * tokens * ldo, out)

    def of_host(view: _tensor.View, **given):
        given.pop("dl_device", None)
        return _of_host(made(view, **given | {"stream": None}))

    kvd.Batch.begin, kvd.Batch.attend, _tensor.View.__dlpack__ = counting, elsewhere, of_host
    _tensor.View.__dlpack_device__ = lambda view: (1, 0)
    _use_attention_for_gpus()
