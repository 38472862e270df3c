#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every function that a header of the product declares is used in the product, not only in tests.

    callers.py ROOT         one line for each unused function; exit status 1 if there are any
    callers.py --self-test  tests that it finds one

By names, not by linking: a use is the name, as a word, in a source or in a Python module of the product, outside
comments, its declaration and its definition. Exports of libkvd are used by applications. Members of the kernels'
tables (kernels/*.h) count as functions. An operation of a GPU (kernels/cuda/*.h) must be used by the worker, a tool or
kvd.ops, and not only by another operation.
"""
import collections
import pathlib
import re
import sys
import tempfile

PRODUCT = ("client", "daemon", "ipc", "kernels", "store", "tools")
SOURCES = {".c", ".h", ".cu", ".cuh", ".def", ".py", ".S"}
EXPORTS = "client/libkvd.map"
TESTS = {"daemon_stop"}     # ends a daemon that runs in a thread of a test; others end by a signal

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*|^#\s*define\s+\w+_H$", re.S | re.M)
WORD = re.compile(r"\b[A-Za-z_]\w*\b")
# A type and a name with parameters at the beginning of a line: a declaration or a definition.
FUNCTION = re.compile(r"^(?!\s|#|typedef\b|_?[Ss]tatic_assert\b)[\w\s\*\(\),]*?\b([a-z_]\w*)\((?=[^;{]*(?:;|\{))", re.M)
VARIANT = re.compile(r"_(scalar|avx2|avx512|neon)$")
MEMBER = re.compile(r"^\s+[\w\s\*]*?\(\*(\w+)\)\(", re.M)


OPERATION = re.compile(r"^int (gpu_\w+)\(struct gpu \*gpu, cu_stream", re.M)
OPS = "kernels/cuda/kvd_kernels_cuda.c"


def texts(root):
    for folder in PRODUCT:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SOURCES and "__pycache__" not in path.parts:
                text = path.read_text(errors="replace")
                yield path.relative_to(root).as_posix(), text if path.suffix == ".py" else COMMENT.sub(" ", text)


def unused(root):
    declared, uses = {}, collections.Counter()
    for path, text in texts(root):
        uses.update(WORD.findall(text))
        own = collections.Counter() if path.endswith(".py") else collections.Counter(FUNCTION.findall(text))
        if re.fullmatch(r"kernels/\w+\.h", path):
            own.update(MEMBER.findall(text))
        uses.subtract(own)
        if path.endswith((".h", ".cuh")):
            declared |= {name: path for name in own}
        elif re.fullmatch(r"kernels/\w+\.c", path):    # a table's row .run = run is not a use
            uses.subtract(re.findall(r"^\s+\.(\w+) = ", text, re.M))
            uses.subtract(re.findall(r"^\s+\.(\w+) = \1,$", text, re.M))
    exported = set(WORD.findall((root / EXPORTS).read_text())) if (root / EXPORTS).exists() else set()
    for name in declared:       # KVD_VARIANT(name) is one of them
        uses[name] += uses[VARIANT.sub("", name)] if VARIANT.search(name) else 0
    nobody = {name for name in declared if uses[name] <= 0} - exported - TESTS
    return sorted(f"{declared[name]}: {name}" for name in nobody)


def not_launched(root):
    operations, callers = {}, ""
    for path, text in texts(root):
        if re.fullmatch(r"kernels/cuda/\w+\.h", path):
            operations |= {name: path for name in OPERATION.findall(text)}
        elif path.startswith(("daemon/process/worker/", "tools/")) or path == OPS:
            callers += text
    return sorted(f"{path}: {name}" for name, path in operations.items()
                  if not re.search(rf"(?<!struct )\b{name}\b", callers))


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for path, text in {
            "store/a.h": "int used(void);\n/* dead() */\nint dead(int a,\n  int b);\n"
                         "static inline int idle(void) {\n}\n",
            "store/a.c": "int used(void) {\n  return 1;\n}\n\nint dead(int a,\n  int b) {\n  return used();\n}\n",
            "kernels/k.h": "struct ops {\n  void (*run)(int a);\n  void (*rest)(int a);\n};\n",
            "kernels/k.c": "struct ops t = {\n  .run = run,\n  .rest = rest,\n};\n\nvoid f(void) {\n  o->run(1);\n}\n",
            "kernels/cuda/g.h": "struct gpu_add {\n};\nint gpu_add(struct gpu *gpu, cu_stream stream, int a);\n"
                                "int gpu_sum(struct gpu *gpu, cu_stream stream, int a);\n",
            "kernels/cuda/g.c": "int gpu_sum(struct gpu *gpu, cu_stream stream, int a) {\n  return gpu_add(0, 0, 1);\n}\n",
            "daemon/process/worker/w.c": "int used(void) {\n  struct gpu_add a;\n  return gpu_sum(0, 0, a);\n}\n",
            "tests/t.c": "int main(void) {\n  return dead(1, 2);\n}\n",
        }.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        found = unused(root)
        assert not_launched(root) == ["kernels/cuda/g.h: gpu_add"]
        assert found == ["kernels/k.h: rest", "store/a.h: dead", "store/a.h: idle"], found


if __name__ == "__main__":
    if sys.argv[1:] == ["--self-test"]:
        self_test()
    else:
        root = pathlib.Path(sys.argv[1])
        nobody = sorted({*unused(root), *not_launched(root)})
        sys.exit("\n".join(nobody) or None)
