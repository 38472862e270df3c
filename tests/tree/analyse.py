#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Does clang's static analyzer find anything?

    tests/tree/analyse.py BUILD [PATTERN]     analyses BUILD's sources, or those whose path contains PATTERN
    tests/tree/analyse.py --self-test

Each of their C files is analysed once, with the options of its first entry in BUILD/compile_commands.json. A file whose
preprocessed text was clean before is not analysed again: ~/.cache/kvd/analysed has an empty file for each such text.
The exit status is 77 if clang is not installed.
"""
from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvd/analysed"
ANALYSER = ["--analyze", "-Xclang", "-analyzer-output=text", "-Xclang", "-analyzer-werror", "-Qunused-arguments",
            # Its reports ask for memcpy_s(), which glibc does not have.
            "-Xclang", "-analyzer-disable-checker=security.insecureAPI.DeprecatedOrUnsafeBufferHandling",
            # These do not know __attribute__((cleanup)).
            "-Xclang", "-analyzer-disable-checker=unix.Malloc,deadcode.DeadStores"]
ROOMS = ("/client/", "/daemon/", "/ipc/", "/kernels/", "/store/", "/tools/")
KEPT = re.compile(r"-[DIU].*|-std=.*|-pthread|-m.*|-isystem.*")


def entries(build: Path, pattern: str) -> dict[str, tuple[Path, list[str]]]:
    """{file: (folder to run in, options of the preprocessor)}"""
    found: dict[str, tuple[Path, list[str]]] = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = os.path.normpath(os.path.join(entry["directory"], entry["file"]))
        if file.endswith(".c") and any(room in file for room in ROOMS) and "/tests/" not in file and pattern in file:
            options = [word for word in shlex.split(entry["command"]) if KEPT.fullmatch(word)]
            found.setdefault(file, (Path(entry["directory"]), options))
    return found


def analyse(clang: str, file: str, folder: Path, options: list[str]) -> str:
    """What the analyzer says of the file; empty if it is clean."""
    text = subprocess.run([clang, "-E", *options, file], cwd=folder, stdout=subprocess.PIPE, check=True).stdout
    version = os.path.realpath(clang) + str(os.stat(clang).st_mtime_ns)
    clean = CACHE / hashlib.sha256(" ".join([version, *ANALYSER]).encode() + text).hexdigest()
    if clean.exists():
        return ""
    done = subprocess.run([clang, *ANALYSER, *options, file], cwd=folder, stderr=subprocess.PIPE, text=True, check=False)
    # Headers of other projects are not judged.
    if done.returncode == 0 or set(re.findall(r"^(.*?):\d+:\d+: error:", done.stderr, re.M)) == {"/usr/include/xxhash.h"}:
        clean.touch()
        return ""
    return done.stderr or f"{file}: clang ended with status {done.returncode}\n"


def analyse_all(build: Path, pattern: str) -> list[str]:
    clang = shutil.which("clang") or ""
    CACHE.mkdir(parents=True, exist_ok=True)
    files = entries(build, pattern)
    if not files:
        return [f"no file to analyse in {build}/compile_commands.json\n"]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(analyse, clang, file, *how) for file, how in files.items()]
        return [said for said in (job.result() for job in jobs) if said]


def self_test() -> int:
    """A dereference of NULL must be found, in a file that is analysed with the options of its entry."""
    with tempfile.TemporaryDirectory() as name:
        build, store = Path(name) / "build", Path(name) / "store"
        build.mkdir()
        store.mkdir()
        (store / "planted.c").write_text("int f(int *p) {\n#ifdef PLANTED\n\tif (!p)\n\t\treturn *p;\n#endif\n\treturn 0;\n}\n")
        for option in ("-DPLANTED", "-DOTHER"):
            entry = {"directory": str(build), "command": f"cc {option} -c ../store/planted.c", "file": "../store/planted.c"}
            (build / "compile_commands.json").write_text(json.dumps([entry]))
            said = analyse_all(build, "")
            if bool(said) != (option == "-DPLANTED"):
                print(f"with {option}: {said or 'nothing was found'}")
                return 1
    return 0


def main() -> int:
    if not shutil.which("clang"):
        return 77
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    said = analyse_all(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
    sys.stdout.writelines(said)
    return bool(said)


if __name__ == "__main__":
    sys.exit(main())
