# SPDX-License-Identifier: Apache-2.0
"""Modules that SGLang imports and, on a processor, does not use: triton and torchvision, 500 MB together. Any name
that is asked of them is there and does nothing. Not for anything else: installed into the virtual environment of
SGLang's test.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

NAMES = ("triton", "torchvision")


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


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Nothing(spec.name)

    def exec_module(self, module):
        if module.__name__ == "triton":
            module.cdiv = lambda a, b: -(-a // b)
            module.next_power_of_2 = lambda n: 1 << max(0, n - 1).bit_length()


sys.meta_path.append(Finder())
