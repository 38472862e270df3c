# SPDX-License-Identifier: Apache-2.0
"""kvd.ops uses tensors of any library in place: numpy's, PyTorch's, blocks of a pool, and keys in a GPU's memory.

tests/kernels/methods checks what the operations compute.
"""

from __future__ import annotations

import ctypes
import sys
import types

from common import kvd, main, np, raises, torch

if not np:
    print("skipped: numpy is not installed")
    sys.exit(77)

from kvd import _kernels, ops      # noqa: E402  (needs numpy)


def some_keys(*shape: int):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def test_strides_are_read_in_place(space):
    keys = some_keys(40, 3, 2, 64)
    want = ops.keydiff_anchor(keys[::2, 1].transpose(1, 0, 2).copy())[0]
    assert np.array_equal(ops.keydiff_anchor(keys[::2, 1].transpose(1, 0, 2))[0], want)
    taken = _kernels.take("keys", keys[::2, 1].transpose(1, 0, 2), "heads tokens dim", ["float32"], strided=True)
    assert taken.pointer == keys[0, 1].ctypes.data and taken.strides == (64, 2 * 3 * 2 * 64, 1)
    assert np.array_equal(ops.keydiff_anchor(keys[:, 0, :, ::-1].transpose(1, 0, 2))[0],
                          ops.keydiff_anchor(keys[:, 0, :, ::-1].transpose(1, 0, 2).copy())[0])   # these are copied


def test_strides_between_elements_are_copied(space):
    """Fields of records, and numbers at odd addresses, are not at multiples of their size."""
    scores = np.arange(12, dtype=np.float32).reshape(1, 12)
    records = np.zeros((1, 12), [("score", "<f4"), ("other", "<i2")])
    records["score"] = scores
    odd = np.frombuffer(b"x" + scores.tobytes(), np.uint8)[1:].view(np.float32).reshape(1, 12)
    for given in (records["score"], odd):
        assert ops.topk(given, 2).tolist() == [[10, 11]]
        assert ops.keydiff_blocks(given, 4)[1].tolist() == [[3, 7, 11]]


def test_numbers_are_not_cut_off(space):
    scores = np.arange(8, dtype=np.float32).reshape(1, 8)
    assert ops.topk(scores, 2**32 + 2).tolist() == ops.topk(scores, 2**32).tolist() == [list(range(8))]
    with raises(ValueError, "now must be below 2^31"):
        ops.hshare_select(scores[0], now=10**11)


def test_blocks_of_a_pool_are_read_in_place(space):
    (block,) = space.alloc(1)
    there = np.frombuffer(block.memoryview(), np.float32)
    there[:] = some_keys(there.size)
    shape = _kernels.Tensor("block", block).shape
    assert np.array_equal(ops.memshare_norms(block), ops.memshare_norms(there.reshape(shape).copy()))
    assert _kernels.Tensor("block", block).pointer == there.ctypes.data
    space.free([block])


def test_bfloat16_of_any_library(space):
    keys = some_keys(2, 20, 32)
    bits = (keys.view(np.uint32) >> 16).astype(np.uint16)
    want = ops.keydiff_anchor((bits.astype(np.uint32) << 16).view(np.float32))
    assert np.array_equal(ops.keydiff_anchor(bits.view("V2"))[1], want[1])
    assert np.allclose(ops.keydiff_anchor(bits.view("V2"))[0], want[0], atol=1e-5)
    if torch:
        sums, counts = ops.keydiff_anchor(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))
        assert isinstance(sums, torch.Tensor) and counts.dtype == torch.int64
        assert np.array_equal(sums.numpy(), ops.keydiff_anchor(bits.view("V2"))[0])


def test_mistakes_say_what_is_wrong(space):
    with raises(TypeError, "keys must be of float32, float16, bfloat16, q8, q4, e4m3, e5m2, not int64"):
        ops.keydiff_anchor(np.zeros((1, 2, 3), int))
    with raises(ValueError, "does not run"):
        ops.use("mmx")


# ---- a GPU -----------------------------------------------------------------------------------------------------------


class Driver:
    """The driver calls that PyTorch would make."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        for call in (lambda: self.cuda.cuInit(0), lambda: self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
                     lambda: self.cuda.cuCtxPushCurrent_v2(context)):
            assert call() == 0

    def copied(self, array):
        at = ctypes.c_uint64()
        assert self.cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(max(array.nbytes, 1))) == 0
        self.cuda.cuMemcpyHtoDAsync_v2(at, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), None)
        assert self.cuda.cuStreamSynchronize(None) == 0
        return at.value

    def read(self, address, array):
        self.cuda.cuMemcpyDtoHAsync_v2(ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(address),
                                       ctypes.c_size_t(array.nbytes), None)
        assert self.cuda.cuStreamSynchronize(None) == 0
        return array


def pretended_torch(driver: Driver) -> types.ModuleType:
    """The part of PyTorch with a GPU that kvd.ops uses, over the installed driver."""
    module = types.ModuleType("torch")

    class Tensor:
        is_cuda = True

        def __init__(self, array):
            self.shape, self.dtype, self.at = array.shape, array.dtype, driver.copied(array)

        def data_ptr(self):
            return self.at

        def numpy(self):
            return driver.read(self.at, np.empty(self.shape, self.dtype))

        def long(self):
            return Tensor(self.numpy().astype(np.int64))

        def __dlpack__(self, stream):
            assert stream == -1
            n = len(self.shape)
            self.numbers = (ctypes.c_int64 * n)(*self.shape)
            self.struct = _kernels._DLTensor(self.at, 2, 0, n, 2, 32, 1, self.numbers)
            new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
            return new(("PyCapsule_New", ctypes.pythonapi))(ctypes.addressof(self.struct), b"dltensor", None)

    Tensor.__module__ = "torch"
    module.Tensor, module.device = Tensor, lambda *device: device
    module.float32, module.int32, module.uint8 = np.float32, np.int32, np.uint8
    module.zeros = lambda shape, dtype, device: Tensor(np.zeros(shape, dtype))
    module.cuda = types.SimpleNamespace(current_stream=lambda device: types.SimpleNamespace(cuda_stream=None))
    return module


def test_keys_in_a_gpus_memory(space):
    sys.modules["torch"] = pretended = pretended_torch(Driver())
    keys = some_keys(3, 100, 64)
    on_gpu = pretended.Tensor(keys)
    sums, counts = ops.keydiff_anchor(on_gpu)
    want = ops.keydiff_anchor(keys)
    assert np.allclose(sums.numpy(), want[0], atol=1e-4) and np.array_equal(counts.numpy(), want[1])
    scores = ops.keydiff_scores(on_gpu, sums).numpy()
    assert np.abs(scores - ops.keydiff_scores(keys, want[0])).max() < 2e-6
    with raises(ValueError, "one device"):
        ops.keydiff_scores(on_gpu, want[0])
    with raises(TypeError, "copy it to host memory"):
        ops.hshare_labels(pretended.Tensor(keys[0]), [1])
    with raises(ValueError, "up to 256 dimensions"):
        ops.keydiff_anchor(pretended.Tensor(some_keys(1, 1, 300)))


if __name__ == "__main__":
    if "cuda" not in sys.argv:
        del test_keys_in_a_gpus_memory
    sys.exit(main(globals(), on_a_gpu={globals().get("test_keys_in_a_gpus_memory")}))
