# SPDX-License-Identifier: Apache-2.0
"""The package has all its types (py.typed), and type checkers use them in programs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from common import PACKAGE, SKIPPED, child

PROGRAM = """
import kvd
with kvd.connect("a") as daemon:
    space = daemon.space("b", kvd.Geometry(layers=1, kv_heads=1, head_dim=1, vocab=1), fixed=True)
    with space.lookup([1, 2, 3]) as pin:
        found: list[int] = pin.blocks
        wrong: str = pin.tokens
        pin.seal(space.alloc(1), range(16), keep="yes")
"""


def main() -> int:
    if child("import mypy").returncode:
        print("skipped: mypy is not installed")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", folder,
                "--exclude", "/engines/"]       # they import engines, which are installed elsewhere
        subprocess.run([*mypy, str(PACKAGE / "kvd"), str(PACKAGE / "wheel_of_kvd.py")], check=True)
        done = child("import sys; from mypy.main import main; main(args=sys.argv[1:])", *mypy[3:], str(program),
                     MYPYPATH=str(PACKAGE))
        lines = [line.split(":")[1] for line in done.stdout.splitlines() if " error: " in line]
        assert lines == ["7", "8"], done
    return 0


if __name__ == "__main__":
    sys.exit(main())
