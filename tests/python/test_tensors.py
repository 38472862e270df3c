# SPDX-License-Identifier: Apache-2.0
"""Blocks are tensors of torch and numpy in place, with the geometry's shape."""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
import threading

from common import (DIM, HEADS, LAYERS, SKIPPED, TOKENS, VOCAB, chain, child, fill_pool, geometry, gone, kvd, main, np,
                    raises, seal, torch)


def libraries():
    """Per library: from_dlpack, and functions for a tensor's address and shape."""
    if torch:
        yield torch.from_dlpack, lambda t: t.data_ptr(), lambda t: tuple(t.shape)
    if np:
        yield np.from_dlpack, lambda t: t.__array_interface__["data"][0], lambda t: t.shape


def writers():
    """The libraries whose tensors are writable. numpy's are from 2.1 on, which requests DLPack 1.0."""
    old = np and tuple(map(int, np.__version__.split(".")[:2])) < (2, 1)
    return (it for it in libraries() if not (old and it[0] is np.from_dlpack))


def live(space: kvd.Space) -> int:
    """Number of tensors that are not deleted yet."""
    return kvd._native.lib.kvd_dlpack_live(space._open())


def test_a_tensor_is_the_block(space):
    ids = seal(space, 1, 2, 5)
    for take, address, shape in libraries():
        with space.lookup(chain(1, 2)) as pin:
            assert pin.tokens == 2 * TOKENS and pin.blocks == ids
            tensor = take(pin.view(ids[1]))
            assert address(tensor) == pin.address(ids[1])
            assert shape(tensor) == (LAYERS, 2, HEADS, TOKENS, DIM)
            assert float(tensor.min()) == float(tensor.max()) == 6


def test_tensor_writes_reach_the_block(space):
    (block,) = space.alloc(1)
    values = (ctypes.c_float * (space.block_bytes // 4)).from_address(block.data)
    if torch:
        tensor = torch.from_dlpack(block)
        tensor[1, 0, 2, 3, 4] = 42
        at = ((1 * 2 + 0) * HEADS + 2) * TOKENS * DIM + 3 * DIM + 4
        assert values[at] == 42
        tensor[:] = 7
        del tensor
        assert set(values) == {7.0}
    for take, *_ in writers():
        array = take(block)
        values[5] = 8
        assert array.reshape(-1)[5] == 8
        array[:] = 9
        del array
        assert set(values) == {9.0}
    space.free([block])


def test_every_dtype_and_order(space):
    for dtype in ("f32", "f16", "bf16", "i8"):
        for order in ("hnd", "nhd"):
            with space.daemon.space(f"{dtype}-{order}", geometry(dtype, order)) as other:
                (block,) = other.alloc(1)
                planes = (HEADS, TOKENS) if order == "hnd" else (TOKENS, HEADS)
                for take, address, shape in libraries():
                    if np and take is np.from_dlpack and dtype == "bf16":
                        continue    # numpy has no bf16
                    tensor = take(block)
                    assert shape(tensor) == (LAYERS, 2, *planes, DIM)
                    assert dtype.replace("f", "float").replace("i8", "int8") in str(tensor.dtype), tensor.dtype
                    assert address(tensor) == block.data
                    del tensor


def test_a_layer_is_indexed_by_blocks(space):
    ids = seal(space, 3, 3, 20)
    for take, _, shape in libraries():
        with space.lookup(chain(3, 3)) as pin:
            layer = take(space.layer(1, values=True))
            assert shape(layer)[1:] == (HEADS, TOKENS, DIM) and shape(layer)[0] > max(ids)
            assert [float(layer[i].min()) for i in pin.blocks] == [20, 21, 22]
            assert [float(layer[i].max()) for i in pin.blocks] == [20, 21, 22]
        del layer


def test_all_memory_is_one_tensor(space):
    (block,) = space.alloc(1)
    for take, address, shape in writers():
        memory = space.memory()
        tensor = take(memory)
        assert shape(tensor) == (memory.blocks, memory.block_bytes) and address(tensor) == memory.base
        tensor[block.id] = 3
        assert set(bytes(block.memoryview())) == {3}
        del tensor


def test_opaque_blocks_are_bytes(space):
    with space.daemon.space("bytes", kvd.Geometry.opaque(4096, "any")) as other:
        (block,) = other.alloc(1)
        for take, address, shape in writers():
            tensor = take(block)
            assert shape(tensor) == (4096,) and "uint8" in str(tensor.dtype) and address(tensor) == block.data
            tensor[:] = 200
        block.memoryview()[:] = bytes([200]) * 4096
        with kvd.Pin(other) as pin:
            pin.seal([block], chain(4, 1))
            assert set(bytes(pin.memoryview(block.id))) == {200}


WRITE = f"""
import sys, kvd
space = kvd.connect(sys.argv[1]).space("tensors", kvd.Geometry(layers={LAYERS}, kv_heads={HEADS}, head_dim={DIM},
                                                              vocab={VOCAB}, dtype="f32"))
pin = space.lookup(list(map(int, sys.argv[3].split(","))))
print(pin.tokens, flush=True)
tensor = __import__(sys.argv[2]).from_dlpack(pin.view(pin.blocks[0]))
if sys.argv[2] == "torch":
    tensor.mul_(-5)
elif sys.argv[2] == "numpy":
    assert not tensor.flags.writeable
    tensor *= -5
print("written")
"""


def test_asarray_is_an_array_of_numbers(space):
    """Without an array interface, numpy.asarray() returned an array of one object, with shape ()."""
    if not np:
        return
    (id_,) = seal(space, 7, 1, 3)
    with space.lookup(chain(7, 1)) as pin:
        array = np.asarray(pin.view(id_))
        assert array.shape == (LAYERS, 2, HEADS, TOKENS, DIM) and array.dtype == np.float32 and not array.flags.writeable
        assert array.__array_interface__["data"][0] == pin.address(id_) and set(array.reshape(-1).tolist()) == {3.0}
        assert np.asarray(pin.view(id_), dtype="f8").sum() == 3 * array.size
        assert np.array(pin.view(id_), copy=True).flags.writeable
    (block,) = space.alloc(1)
    bytes_ = np.asarray(block)
    assert bytes_.shape == (space.block_bytes,) and bytes_.dtype == np.uint8
    bytes_[:] = 5
    assert set(block.memoryview()) == {5}
    assert np.asarray(space.layer(0)).ndim == 4 and np.asarray(space.memory()).ndim == 2
    with space.daemon.space("bf16", geometry("bf16")) as other, kvd.Pin(other) as pin:
        (id_,) = pin.seal(other.alloc(1), chain(7, 1))
        with raises(BufferError):
            np.asarray(pin.view(id_))


def test_a_sealed_block_is_read_only(space):
    """A write fails before anything has changed for others."""
    (id_,) = seal(space, 5, 1, 3)
    for library in ("torch", "numpy"):
        if sys.modules.get(library):
            done = child(WRITE, space.daemon.path, library, ",".join(map(str, chain(5, 1))))
            assert done.stdout == f"{TOKENS}\n", done
            stopped = done.returncode == -signal.SIGSEGV if library == "torch" else "read-only" in done.stderr
            assert stopped, done
    with space.lookup(chain(5, 1)) as pin:
        assert pin.blocks == [id_]
        assert set(memoryview(bytes(pin.memoryview(id_))).cast("f")) == {3.0}


def test_dlpack_versions(space):
    """Consumers that request DLPack 1.0 get its capsules."""
    seal(space, 6, 1)
    (block,) = space.alloc(1)
    with space.lookup(chain(6, 1)) as pin:
        stored = pin.view(pin.blocks[0])
        for view in (block, stored, space.layer(0), space.memory()):
            capsule = view.__dlpack__(max_version=(1, 0))
            assert '"dltensor_versioned"' in repr(capsule)
            if view is stored and space.device[0] != 1:
                with raises(BufferError, "read-only"):
                    view.__dlpack__()
            else:
                for capsule in (view.__dlpack__(), view.__dlpack__(max_version=(0, 8))):
                    assert '"dltensor"' in repr(capsule)
    del capsule
    assert live(space) == 0


def test_a_tensor_outlives_its_pin(space):
    for number, (take, _, _) in enumerate(libraries(), 30):
        ids = seal(space, number, 3, 1)
        pin = space.lookup(chain(number, 3))
        tensor = take(pin.view(ids[1]))
        pin.release()
        fill_pool(space)
        assert space.match(chain(number, 3)) == 2 * TOKENS      # the third block was evicted
        assert float(tensor.min()) == float(tensor.max()) == 2
        del tensor
        gc.collect()
        assert gone(space, chain(number, 3))


def test_tensors_die_in_any_thread(space):
    seal(space, 40, 1)
    take, _, _ = next(libraries())
    with space.lookup(chain(40, 1)) as pin:
        tensors = [take(pin.view(pin.blocks[0])) for _ in range(64)]

    def drop():
        while True:
            try:
                tensors.pop()
            except IndexError:
                return

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert live(space) == 0


def test_an_unused_capsule(space):
    seal(space, 41, 1)
    with space.lookup(chain(41, 1)) as pin:
        for version in ((1, 0), None) if space.device[0] == 1 else ((1, 0),):
            capsule = pin.view(pin.blocks[0]).__dlpack__(max_version=version)
            assert live(space) == 1
            del capsule
            assert live(space) == 0


def test_unsupported_dlpack_requests(space):
    seal(space, 42, 1)
    with space.lookup(chain(42, 1)) as pin:
        view = pin.view(pin.blocks[0])
        for arguments in ({"copy": True}, {"dl_device": (2, 5)}):
            with raises(BufferError):
                view.__dlpack__(**arguments)
        with raises(kvd.Invalid, "not in the chain"):
            pin.view(pin.blocks[0] + 1).__dlpack__(max_version=(1, 0))
    with raises(kvd.Closed):
        view.__dlpack__(max_version=(1, 0))


def test_on_a_gpu(space):
    """Device memory is not read here. The test checks that tensors name their device, and hold and release blocks."""
    if space.device[0] != 2:
        return
    seal(space, 90, 2)
    with space.lookup(chain(90, 2)) as pin:
        assert pin.view(pin.blocks[0]).__dlpack_device__() == (2, 0)
        capsule = pin.view(pin.blocks[0]).__dlpack__(stream=1, max_version=(1, 0))
        pin.wait()
        pin.check()
    assert not gone(space, chain(90, 2)) and space.match(chain(90, 2)) == TOKENS
    del capsule
    assert gone(space, chain(90, 2))


if __name__ == "__main__":
    if not (np or torch):
        print("skipped: neither numpy nor torch is installed")
        sys.exit(SKIPPED)
    sys.exit(main(globals(), {test_on_a_gpu, test_an_unused_capsule, test_unsupported_dlpack_requests,
                              test_dlpack_versions}))
