#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the functions test_* of the given files in order; prints one line each, and the reason if one fails.

        run.py FILE... [--only PART]

Exit status: 0 all passed; 1 some failed; 77 numpy is missing, so nothing was run.
"""
import importlib.util
import pathlib
import sys
import time
import traceback

try:
    import numpy
except ImportError:
    print("skipped: numpy is missing (python3-numpy)")
    sys.exit(77)

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "client/python")]


def load(path):
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tests_of(module, only):
    for name, member in vars(module).items():
        if name.startswith("test_") and callable(member) and only in name:
            yield name, member


def run_one(name, test):
    numpy.random.seed(1)  # for tests without their own generator
    before = time.monotonic()
    try:
        text = test()
    except Exception:
        print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
        return False
    print(f"ok     {name}  {time.monotonic() - before:.2f} s{'  ' + text if text else ''}", flush=True)
    return True


def main(arguments):
    only = ""
    if "--only" in arguments:
        at = arguments.index("--only")
        only = arguments[at + 1]
        del arguments[at : at + 2]
    results = [run_one(*test) for path in arguments for test in tests_of(load(path), only)]
    print(f"{sum(results)} of {len(results)} passed")
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
