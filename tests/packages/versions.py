#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every stated version is the project's; CHANGELOG.md has it, with the numbers of formats that two programs share.

    versions.py ROOT BUILD VERSION      VERSION: meson's, of the project
"""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

root, build, version = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
failed = 0


def expect(what: str, found: object, wanted: object) -> None:
    global failed
    if found != wanted:
        failed += 1
        print(f"not ok: {what}: {found!r}, not {wanted!r}")


def output(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout.strip()


def in_file(name: str, pattern: str) -> list[str]:
    return re.findall(pattern, (root / name).read_text(), re.M)


environment = dict(os.environ, PKG_CONFIG_PATH=str(build / "meson-private"), PYTHONPATH=str(root / "client/python"))
expect("kvd --version", output(os.environ["KVD"], "--version"), f"kvd {version}")
expect("kvctl --version", output(os.environ["KVCTL"], "--version"), f"kvctl {version}")
expect("kvlm --version", output(os.environ["KVLM"], "--version"), f"kvlm (kvd) {version}")
for library in ("libkvd", "libkvd_kernels"):
    expect(f"pkg-config {library}", output("pkg-config", "--modversion", library), version)
expect("kvd.h", in_file("client/kvd.h", r'^#define KVD_VERSION "(.*)"'), [version])
expect("Python's package and library", output(sys.executable, "-c", "import kvd; print(kvd.__version__, "
                                                                    "kvd._native.lib.kvd_version().decode())"),
       f"{version} {version}")
sys.path.append(str(root / "client/python"))
import wheel_of_kvd  # noqa: E402

expect("the wheel", wheel_of_kvd._version(), version)
for library in ("client/libkvd.so", "kernels/libkvd_kernels.so"):
    expect(library, (build / f"{library}.0").resolve().name, f"{Path(library).name}.{version}")

expect("CHANGELOG.md's newest version", in_file("CHANGELOG.md", r"^## (\S+) \(\d{4}-\d\d-\d\d\)")[:1], [version])
numbers = [*in_file("ipc/msg.h", r"^#define KVD_PROTOCOL (\d+)u"),
           *in_file("ipc/base/layout.h", r"^#define KVD_LAYOUT_VERSION (\d+)u"),
           *in_file("store/file/record.h", r"^#define FILE_VERSION (\d+)u")]
expect("CHANGELOG.md's table: protocol, layout and file tier of the newest version",
       in_file("CHANGELOG.md", r"^\| (\S+) \| (\d+) \| (\d+) \| (\d+) \|")[:1], [(version, *numbers)])
expect("tools/debian/libkvd0.symbols: what client/libkvd.map exports",
       sorted(in_file("tools/debian/libkvd0.symbols", r"^ (kvd_\w+)@")),
       sorted(in_file("client/libkvd.map", r"^ +(kvd_\w+);")))
sys.exit(1 if failed else 0)
