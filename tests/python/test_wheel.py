# SPDX-License-Identifier: Apache-2.0
"""pip makes a wheel, which is installed in an empty environment and used: it contains its libraries.

    KVD=... KVD_LIBRARY=... KVD_KERNELS_LIBRARY=... python tests/python/test_wheel.py [--build]

Without --build, which takes minutes, the wheel is made from these libraries.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from common import PACKAGE, SKIPPED, daemon

USE = """
import sys, kvd
tokens = list(range(32))
with kvd.connect(sys.argv[1]) as daemon, daemon.space("wheel", kvd.Geometry.opaque(4096, "wheel")) as space:
    with space.lookup(tokens) as pin:
        blocks = space.alloc(2 - len(pin))
        space.write(blocks, bytes(4096 * len(blocks)))
        pin.seal(blocks, tokens[pin.tokens:])
    print(space.match(tokens), kvd.__file__, kvd._native.path)
assert not {"numpy", "torch"} & set(sys.modules)
"""


def tree() -> dict[str, float]:
    return {str(it): it.stat().st_mtime for it in PACKAGE.rglob("*") if "__pycache__" not in it.parts}


def main() -> int:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if subprocess.run([*pip, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        print("skipped: this Python has no pip")
        return SKIPPED
    built = "--build" in sys.argv
    settings = [] if built else ["--config-settings", f"library={os.environ['KVD_LIBRARY']}",
                                 "--config-settings", f"kernels={os.environ['KVD_KERNELS_LIBRARY']}"]
    before = tree()
    with tempfile.TemporaryDirectory(prefix="kvd-wheel-test-") as folder, daemon() as socket:
        subprocess.run([*pip, "-q", "wheel", "--no-deps", *settings, "-w", folder, str(PACKAGE)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        assert ("manylinux_2_" in wheel.name) == built, wheel.name
        assert tree() == before, "building left files in the source folder"
        empty = Path(folder, "venv")
        venv.create(empty)
        subprocess.run([*pip, "-q", "--python", str(empty / "bin/python"), "install", "--no-index", str(wheel)],
                       check=True)
        clean = {key: value for key, value in os.environ.items()
                 if not key.startswith("KVD") and key not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
        if not built:
            clean["LD_LIBRARY_PATH"] = os.environ.get("LD_LIBRARY_PATH", "")
        for _ in range(2):
            done = subprocess.run([empty / "bin/python", "-c", USE, socket], env=clean, cwd=folder, check=True,
                                  stdout=subprocess.PIPE, text=True)
            found, package, library = done.stdout.split()
            assert Path(package).with_name("libkvd_kernels.so.0").exists()
            assert found == "32" and package.startswith(str(empty)) and library.startswith(str(Path(package).parent))
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
