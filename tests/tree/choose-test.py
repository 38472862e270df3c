#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`tools/test --changed` runs the tests that a changed file can affect, and no others.

    choose-test.py ROOT BUILD
"""
import sys
from pathlib import Path

ROOT, BUILD = Path(sys.argv[1]), Path(sys.argv[2])
sys.dont_write_bytecode = True
sys.path.append(str(ROOT / "tests/lib"))

from choose import Choice   # noqa: E402

# changed file: (tests that it can affect, tests that it cannot affect)
EXPECTED = {
    "store/file/super.c": ({"super", "crash", "kvctl verbs", "layers"}, {"scan", "kernels-variants"}),
    "ipc/scan.h": ({"scan", "replay-scan"}, {"kernels-variants", "volume"}),
    "kernels/sketch.c": ({"kernels-variants"}, {"scan"}),
    "tests/store/fixture.c": ({"store", "eviction"}, {"kvctl verbs", "volume"}),
    "tests/kvctl/lib.sh": ({"kvctl verbs", "kvctl pages"}, {"super", "pasted README.md"}),
    "README.md": ({"pasted README.md", "every setting is read"}, {"super", "kvctl verbs"}),
    "tests/daemon/meson.build": ({"super", "kvctl verbs", "pasted README.md"}, set()),
}

choice, wrong = Choice(BUILD), []
known = {test["name"] for test in choice.tests}
for file, (reached, others) in EXPECTED.items():
    found = {test["name"] for test in choice.reached({file})}
    wrong += [f"{file} does not reach {name}" for name in reached & known - found]
    wrong += [f"{file} reaches {name}" for name in others & found]
    wrong += [f"there is no test {name}" for name in reached - known]
    if not (ROOT / file).exists():
        wrong.append(f"there is no {file}")
print(*wrong, sep="\n")
sys.exit(bool(wrong))
