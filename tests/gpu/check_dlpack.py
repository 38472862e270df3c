#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""
T9: does PyTorch accept device memory in a DLPack capsule made with ctypes, use it in place, and call the deleter when
the last tensor dies? Prints one line of JSON, as gpu-checks does.

    check_dlpack.py [DRIVER]        DRIVER: the driver to name in the line
"""
import ctypes as c
import gc
import json
import sys

QUESTION = 'memory of the driver as a DLPack capsule made by ctypes: does torch use it in place, and call its deleter?'
BYTES = 1 << 20


class Device(c.Structure):
    _fields_ = [('type', c.c_int32), ('id', c.c_int32)]


class Tensor(c.Structure):
    _fields_ = [('data', c.c_void_p), ('device', Device), ('ndim', c.c_int32), ('code', c.c_uint8), ('bits', c.c_uint8),
                ('lanes', c.c_uint16), ('shape', c.POINTER(c.c_int64)), ('strides', c.POINTER(c.c_int64)),
                ('byte_offset', c.c_uint64)]


class Managed(c.Structure):
    pass


DELETER = c.CFUNCTYPE(None, c.POINTER(Managed))
Managed._fields_ = [('tensor', Tensor), ('context', c.c_void_p), ('deleter', DELETER)]


def say(answer, ok=None, **numbers):
    print(json.dumps({'check': 'T9', 'question': QUESTION, 'answer': answer, 'ok': ok, 'numbers': numbers,
                      'driver': sys.argv[1] if len(sys.argv) > 1 else 'none'}))
    sys.exit(0)


def capsule_of(at, deleted):
    shape = (c.c_int64 * 1)(BYTES)
    managed = Managed()
    managed.tensor = Tensor(at, Device(2, 0), 1, 1, 8, 1, shape, None, 0)  # kDLCUDA; uint8
    managed.deleter = DELETER(lambda it: deleted.append(it.contents.tensor.data))
    new = c.pythonapi.PyCapsule_New
    new.restype, new.argtypes = c.py_object, [c.c_void_p, c.c_char_p, c.c_void_p]
    return managed, shape, new(c.addressof(managed), b'dltensor', None)


def main():
    try:
        import torch
    except ImportError:
        say('not asked: no torch here')
    if not torch.cuda.is_available():
        say(f'not asked: torch {torch.__version__} sees no device')
    torch.cuda.init()
    torch.empty(1, device='cuda')
    cuda, at, deleted = c.CDLL('libcuda.so.1'), c.c_uint64(), []
    if cuda.cuMemAlloc_v2(c.byref(at), c.c_size_t(BYTES)) != 0:
        say('not asked: cuMemAlloc fails')
    keep = capsule_of(at.value, deleted)
    tensor = torch.utils.dlpack.from_dlpack(keep[2])
    same = tensor.data_ptr() == at.value
    tensor.fill_(7)
    view = tensor.view(torch.bfloat16)
    torch.cuda.synchronize()
    word = (c.c_uint8 * 4)()
    cuda.cuMemcpyDtoH_v2(word, at, c.c_size_t(4))
    seen = list(word) == [7] * 4
    before = len(deleted)
    del tensor
    gc.collect()
    held = len(deleted) == before  # the view keeps the memory
    del view
    gc.collect()
    after = len(deleted)
    ok = same and seen and before == 0 and held and after == 1
    say(f'torch {torch.__version__}: address {"the same" if same else "another"}, its store {"seen" if seen else "not seen"} '
        f'by the driver, deleter called {before} times while in use, {"not " if held else ""}called while a view lived, '
        f'{after} times in the end', ok, deleter_calls=after)


main()
