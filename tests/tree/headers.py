#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Each installed header compiles alone where it is installed, in C and C++, and C++ links with what it declares.

    headers.py BUILD            one line for each that does not; exit status 1 if there are any

Headers are copied to where `meson install` would put them, so that no folder of the source tree helps. layers.sh checks
that they compile in the source tree. In C++, functions must have C linkage, or no program links. Compilers are $CC and
$CXX (default cc and c++).
"""
from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

STANDARDS = {"c": ("c99", "gnu17"), "c++": ("c++11", "c++17")}
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
FUNCTION = re.compile(r"^(?!static|typedef|#|\s)[\w \*]*?\b(kvd_\w+)\((?=[^;{]*;)", re.M)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)


def install(build: Path, to: Path) -> list[str]:
    """The headers' names in a program's includes: in include, or in include/kvd as in libkvd_kernels.pc."""
    names = []
    for source, installed in json.loads((build / "meson-info/intro-installed.json").read_text()).items():
        if not installed.endswith(".h"):
            continue
        name = installed[installed.index("/include/") + len("/include/"):]
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, to / name)
        names.append(name.removeprefix("kvd/"))
    return sorted(names)


def compile_alone(at: Path, name: str, language: str, standard: str, functions: list[str]) -> str:
    """The error, or an empty string."""
    compiler = shlex.split(os.environ.get(*(("CC", "cc") if language == "c" else ("CXX", "c++"))))
    uses = ", ".join(f"(void (*)(void)){function}" for function in functions) or "0"
    text = f"#include <{name}>\nvoid (*const volatile uses[])(void) = {{{uses}}};\n"
    done = subprocess.run([*compiler, "-x", language, f"-std={standard}", *STRICT, "-I", at, "-I", at / "kvd", "-c", "-o",
                           at / "object", "-"], input=text, text=True, capture_output=True, check=False)
    if done.returncode:
        return done.stderr
    found = subprocess.run(["nm", "-u", at / "object"], text=True, capture_output=True, check=True).stdout.split()
    missing = sorted(set(functions) - set(found))
    return f"not by their names in C: {' '.join(missing)}" if missing else ""


def main() -> int:
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="kvd-headers-") as folder:
        at = Path(folder)
        names = install(Path(sys.argv[1]), at)
        assert len(names) > 10, names
        for name in names:
            path = at / name if (at / name).exists() else at / "kvd" / name
            functions = sorted(set(FUNCTION.findall(COMMENT.sub("", path.read_text()))))
            for language, standards in STANDARDS.items():
                for standard in standards:
                    why = compile_alone(at, name, language, standard, functions)
                    if why:
                        wrong = 1
                        print(f"{name} as {standard}: {why}")
            print(f"{name}: {len(functions)} functions")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
